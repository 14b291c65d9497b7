"""zyfa-bench plan: from captured Q, K and V of a model to the precision of each of its layers."""

from pathlib import Path

import click

from zyfa.plan import QKV, PrecisionPlan, layer_errors, plan_precision

from .inputs import load_activations

FORMS = (
    "an .npz file is one layer (q, k, v as int16 bit patterns of bfloat16, (heads, seqlen, head_dim)); a .safetensors "
    "file holds LAYER.q, LAYER.k and LAYER.v, (batch, seqlen, heads, head_dim)"
)


def load_layers(path: Path) -> dict[str, QKV]:
    """{layer: (q, k, v)} of a file; raises ValueError naming it and the accepted forms."""
    if path.suffix == ".npz":
        return {path.stem: load_activations(path)}
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is neither .npz nor .safetensors: {FORMS}")
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs safetensors: pip install safetensors") from error
    tensors = load_file(path)
    names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    if missing := [f"{name}.{x}" for name in names for x in "qkv" if f"{name}.{x}" not in tensors]:
        raise ValueError(f"{path} lacks {missing[0]}: {FORMS}")
    return {name: (tensors[f"{name}.q"], tensors[f"{name}.k"], tensors[f"{name}.v"]) for name in names}


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--budget", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.04, show_default=True,
    help="Largest relative error of any layer's attention output, against float64.",
)  # fmt: skip
@click.option("--causal/--full", default=True, show_default=True, help="The mask.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this JSON file.")
@click.option(
    "--check", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Choose nothing: apply this plan to the FILEs, other captures of its layers, and state their errors.",
)  # fmt: skip
def plan(files, budget, causal, out, check) -> None:
    """Choose bf16 or the cheapest FP8 preset for each captured layer.

    Every fourth query row is held out of the choice. Exits with 1 when a layer's held-out rows, or with --check any
    layer, exceed the budget.
    """
    try:
        layers = {name: qkv for path in files for name, qkv in load_layers(path).items()}
        if check:
            raise SystemExit(_check(PrecisionPlan.load(check), layers))
        made = plan_precision(layers, budget, causal=causal)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for name, layer in made.layers.items():
        others = ", ".join(f"{precision} {error:.2%}" for precision, error in layer.errors.items())
        click.echo(f"{name}: {layer.precision}, error {layer.error:.2%}, held out {layer.held_error:.2%} ({others})")
    click.echo(f"{len(made.layers)} layers within {budget:.2%}; predicted time {made.time:.2f} of bf16")
    if out:
        made.save(out)
    for name, held in made.beyond_budget.items():
        click.echo(f"{name}: held-out rows have {held:.2%}, more than the budget of {budget:.2%}", err=True)
    raise SystemExit(1 if made.beyond_budget else 0)


def _check(made: PrecisionPlan, layers: dict[str, QKV]) -> int:
    errors = layer_errors(made, layers)
    for name, error in errors.items():
        verdict = "ok" if error <= made.budget else f"more than the budget of {made.budget:.2%}"
        click.echo(f"{name}: {made[name]}, error {error:.2%}, {verdict}")
    return int(any(not error <= made.budget for error in errors.values()))
