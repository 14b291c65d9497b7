"""zyfa-bench: the evidence, as tables on a terminal and as JSON whose numbers can be recomputed."""

import datetime
import functools
import importlib.util
import json
import math
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from zyfa.recipes import RECIPES

from .bench_accuracy import BASELINE, PRECISIONS, Accuracy, fault, measure, medians, samples_in, samples_of
from .bench_front import front
from .bench_plan import plan
from .bench_plot import HINT, save_accuracy
from .bench_report import write_report
from .inputs import CHECKOUT_ACTIVATIONS, FAMILIES, Shape
from .lengths import parse_heads, parse_numbers, parse_seq_lens

MASKS = {"both": (True, False), "causal": (True,), "full": (False,)}
SEED = 0
ACCURACY_METHOD = (
    "relative Frobenius error of zyfa.attention against float64; emulation_error is that of the same arithmetic on the "
    f"CPU, ratio = error / emulation_error; cut = 1 - error / error of recipe {BASELINE}; max_error is relative to the "
    "largest |output|"
)


def _parsed(parse: Callable[[str], object]) -> Callable:
    """A click callback; bad text exits with 2 and the accepted forms."""

    def callback(ctx, param, text: str):
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _one_of(accepted: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A list of these words, or `all` or `none` of them."""
    words = tuple(accepted)

    def parse(text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return words if text == "all" else ()
        chosen = tuple(word.strip() for word in text.split(","))
        if unknown := [word for word in chosen if word not in words]:
            raise ValueError(f"{unknown[0]!r} is unknown. Accepted: all, none, or a list of {', '.join(words)}")
        return chosen

    return parse


def _head_dims(text: str) -> tuple[int, ...]:
    return parse_numbers(text, "head dim", 16, 256, 8)


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    """(head_dim, head_dim_v) of each part like 128 or 192/128."""
    parts = [[*_head_dims(dims.replace("/", ","))] for dims in text.split(",")]
    if bad := [part for part in parts if len(part) > 2]:
        raise ValueError(f"{bad[0]} has more than the head dims of Q, K and of V. Accepted: like 64,128,192/128")
    return tuple((part[0], part[-1]) for part in parts)


def _recipes(text: str) -> tuple[str, ...]:
    """Names that bench_accuracy.measure takes; presets and all come with bf16, the floor."""
    groups = {"presets": PRECISIONS, "all": ("bf16", *RECIPES)}
    if text in groups:
        return groups[text]
    try:
        return _one_of((*PRECISIONS, "fp8", *RECIPES))(text)
    except ValueError as error:
        raise ValueError(str(error).replace("Accepted: all, none,", "Accepted: presets, all,")) from None


def _option(name: str, default: str, parse: Callable[[str], object], help: str) -> Callable:
    return click.option(name, default=default, show_default=True, callback=_parsed(parse), help=help)


json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Also write the rows to this file."
)
mask_option = click.option("--causal", type=click.Choice(list(MASKS)), default="both", show_default=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="zyfa")
def cli() -> None:
    """How exact and how fast zyfa.attention is on this machine."""


cli.add_command(plan)
cli.add_command(front)


@cli.command()
@click.option(
    "--activations", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of activation samples (*.npz). Default: tests/data/activations of the checkout that this is run from; "
    "an installed wheel has none, and needs the option.",
)  # fmt: skip
@_option("--families", "all", _one_of(FAMILIES), "Synthetic inputs: all, none, or a list.")
@_option("--head-dims", "128", _pairs, "Of the synthetic inputs, like 64,128,192/128 (Q and K / V).")
@_option(
    "--recipes",
    "presets",
    _recipes,
    "presets (with bf16), all, or a list of recipe names, bf16, fp8 (as tuned), "
    "fp8:balanced ... A cut needs recipe tensor among them.",
)
@click.option("--seqlen", type=click.IntRange(1, 1 << 15), default=512, help="Of the synthetic inputs.")
@click.option("--causal/--full", default=True, help="The mask.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where zyfa.attention runs.")
@json_option
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the errors, like errors.png.")
def accuracy(activations, families, head_dims, recipes, seqlen, causal, device, json_path, plot) -> None:
    """Error of zyfa.attention against float64 and against the CPU emulation of its recipe.

    Exits with 1 when an error is more than 1.5x the emulation's, or in bf16 more than 2x that of plain bf16.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device == "cuda":
        _need_gpu()
    if plot and not importlib.util.find_spec("matplotlib"):
        raise click.UsageError(HINT)
    samples = [
        *samples_in(_activations(activations)),
        *samples_of(families, head_dims, Shape(1, seqlen, 4, 2, 128), SEED),
    ]
    rows = [row for sample in samples for row in measure(sample, recipes, causal, device)]
    _print(_accuracy_table(rows, device))
    _print(_median_table(rows))
    if absent := [name for name in recipes if name in RECIPES and name not in {row.recipe for row in rows}]:
        click.echo(f"left out, this GPU cannot run them: {', '.join(absent)}")
    if plot:
        save_accuracy(rows, plot)
    _write(json_path, ACCURACY_METHOD, [row._asdict() for row in rows], device)
    _exit_with([reason for row in rows if (reason := fault(row))])


def _activations(folder: Path | None) -> Path:
    if folder is None and not CHECKOUT_ACTIVATIONS.is_dir():
        raise click.UsageError(
            "--activations DIR is needed: the samples are in the repository, not in the installed package"
        )
    return folder or CHECKOUT_ACTIVATIONS


def _accuracy_table(rows: Sequence[Accuracy], device: str) -> Table:
    table = _table(
        f"Error against float64, on {device}",
        ("input", "precision", "recipe"),
        ("D", "error", "emulation", "ratio", "cosine", "max", "cut"),
    )
    for row in rows:
        table.add_row(
            row.name, row.precision, row.recipe, _dims(row.head_dim, row.head_dim_v), f"{row.error:.3%}",
            f"{row.emulation_error:.3%}",
            f"{row.ratio:.2f}", f"{row.cosine:.5f}", f"{row.max_error:.2%}",
            "" if row.cut is None else f"{row.cut:.0%}",
        )  # fmt: skip
    return table


def _dims(head_dim: int, head_dim_v: int) -> str:
    return str(head_dim) if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"


def _median_table(rows: Sequence[Accuracy]) -> Table:
    table = _table("Medians over samples and head dims", ("recipe", "family"), ("n", "error", "cut"))
    for recipe, family, count, error, cut in medians(rows):
        table.add_row(recipe, family, str(count), f"{error:.2%}", "" if cut is None else f"{cut:.0%}")
    return table


@cli.command()
@_option("--seq-lens", "512..32k", parse_seq_lens, "Like 512..32k or 512,1000,4k.")
@_option("--dtypes", "bf16,fp8", _one_of(("bf16", "fp8")), "What zyfa runs in.")
@_option("--head-dims", "128", _head_dims, "Head dims.")
@_option("--heads", "32:8", parse_heads, "Query heads:KV heads.")
@_option("--batch", "1", lambda text: parse_numbers(text, "batch size", 1, 1 << 16), "Batch sizes.")
@mask_option
@click.option("--quick", is_flag=True, help="Fewer rounds: wider intervals.")
@json_option
def speed(seq_lens, dtypes, head_dims, heads, batch, causal, quick, json_path) -> None:
    """Device time of zyfa.attention (tuned and default config) and of every installed peer, interleaved in one run.

    FP8 is timed end to end, quantisation included, on inputs that are FP8 already, and its attention kernel alone.
    Exits with 1 when zyfa itself could not be timed; a peer that is missing or fails is named.
    """
    from .bench_speed import DEFAULT, METHOD, QUICK, input_sets, measure_shape

    _need_gpu()
    rows: list[dict] = []
    skipped: dict[str, str] = {}
    shapes = [Shape(b, n, h, hk, d) for d in head_dims for h, hk in heads for b in batch for n in seq_lens]
    for shape in shapes:
        sets = input_sets(shape, "cuda")
        for mask in MASKS[causal]:
            result = measure_shape(shape, mask, dtypes, sets, QUICK if quick else DEFAULT)
            _print(_speed_table(shape, mask, result))
            rows += result.rows
            skipped |= result.skipped
            _write(json_path, METHOD, rows, "cuda")  # a run that is cut short keeps what it has
        del sets
        torch.cuda.empty_cache()
    missing = "".join(f" Skipped: {name} ({reason})." for name, reason in skipped.items())
    _write(json_path, METHOD + missing, rows, "cuda")
    _exit_with([f"{name}: {reason}" for name, reason in skipped.items() if name.startswith("zyfa")])


def _speed_table(shape: Shape, causal: bool, result) -> Table:
    batch, seqlen, nheads, nheads_k, head_dim = shape
    table = _table(
        f"seqlen {seqlen}, {'causal' if causal else 'full'}, batch {batch}, heads {nheads}:{nheads_k}, D{head_dim}",
        ("name", "dtype"),
        ("us", "lo .. hi", "TFLOPS", "of peak", "best peer / this", "spread", "best peer"),
    )
    for row, spread in sorted(zip(result.rows, result.spreads, strict=True), key=lambda pair: pair[0]["us"]):
        table.add_row(
            row["name"], row["dtype"], f"{row['us']:.1f}", f"{row['us_lo']:.1f} .. {row['us_hi']:.1f}",
            f"{row['tflops']:.0f}", f"{row['roofline']:.0%}" if row["roofline"] else "",
            f"{row['ratio']:.2f}" if row["ratio"] else "",
            f"{spread[0]:.2f} .. {spread[1]:.2f}" if spread else "", row["best_peer"] or "",
        )  # fmt: skip
    table.caption = _skipped(result.skipped)
    return table


@cli.command()
@_option("--seq-lens", "8k,16k,32k", parse_seq_lens, "Like 512..32k or 512,1000,4k.")
@_option("--head-dims", "128", _head_dims, "Head dims.")
@_option("--heads", "32:8", parse_heads, "Query heads:KV heads.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, help="Of each shape.")
@json_option
def quantise(seq_lens, head_dims, heads, rounds, json_path) -> None:
    """Device time and bandwidth of the quantisers of each preset, beside a device copy of as many bytes."""
    from zyfa.device import current_device

    from .bench_alone import QUANTISE_METHOD, measure_quantisers
    from .bench_speed import input_sets

    _need_gpu()
    arch = current_device(0).arch
    rows: list[dict] = []
    for shape in [Shape(1, n, h, hk, d) for d in head_dims for h, hk in heads for n in seq_lens]:
        rows += measure_quantisers(shape, input_sets(shape, "cuda"), arch, rounds)
        torch.cuda.empty_cache()
    table = _table(
        "Quantisers", ("preset", "recipe"), ("seqlen", "MB", "us", "lo .. hi", "GB/s", "copy GB/s", "of copy")
    )
    for row in rows:
        table.add_row(
            row["name"], row["recipe"], str(row["seqlen"]), f"{row['mb']:.0f}", f"{row['us']:.1f}",
            f"{row['us_lo']:.1f} .. {row['us_hi']:.1f}", f"{row['gb_s']:.0f}", f"{row['copy_gb_s']:.0f}",
            f"{row['ratio']:.0%}",
        )  # fmt: skip
    _print(table)
    _write(json_path, QUANTISE_METHOD, rows, "cuda")


@cli.command()
@click.option(
    "--seqlen", type=click.IntRange(1, 4096), default=128, help="Short, so that the device waits for the host."
)
@click.option(
    "--number", type=click.IntRange(1, 200), default=100, help="Calls of one burst; a full queue would block it."
)
@click.option("--loops", type=click.IntRange(3, 1000), default=15, help="Bursts of each call.")
@json_option
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Also write a web page with a plot.")
def overhead(seqlen, number, loops, json_path, report) -> None:
    """Host us of one call: zyfa.attention, prepared and not, torch SDPA, FlashAttention-3, a bare Triton launch.

    And of the parts of a call. The host never waits for the device.
    """
    from .bench_overhead import METHOD, measure_overhead, parts, peer_calls, public_calls
    from .bench_speed import input_sets

    _need_gpu()
    (qkv, *_) = input_sets(Shape(1, seqlen, 8, 2, 128), "cuda")
    peers, skipped = peer_calls(qkv)
    timings = measure_overhead(public_calls(qkv) | peers | parts(qkv), number, loops)
    title = f"Host time of a call, seqlen {seqlen}, heads 8:2, D128, causal"
    table = _table(title, ("call",), ("us", "lo", "hi", "SDPA / this"))
    for timing in timings:
        ratio = "" if timing.ratio is None else f"{timing.ratio:.2f}"
        table.add_row(timing.name, *(f"{us:.1f}" for us in timing[1:4]), ratio)
    table.caption = _skipped(skipped)
    _print(table)
    method = METHOD.format(number=number, loops=loops)
    rows = [timing._asdict() for timing in timings]
    _write(json_path, method, rows, "cuda")
    if report:
        write_report(report, title, environment("cuda") | {"method": method} | skipped, rows, "us")


def _skipped(reasons: dict[str, str]) -> str | None:
    return "; ".join(f"{name} skipped: {reason}" for name, reason in reasons.items()) or None


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise click.UsageError("this needs a GPU that torch can use, and there is none")


def _table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    """As wide as the table is where output is no terminal: a log must not lose columns."""
    console = Console()
    console.print(table) if console.is_terminal else Console(width=200).print(table)


def _exit_with(faults: Sequence[str]) -> None:
    for reason in faults:
        click.echo(reason, err=True)
    if faults:
        raise SystemExit(1)


def _write(path: Path | None, method: str, rows: Sequence[dict], device: str) -> None:
    if path is not None:
        head = json.dumps({**environment(device), "method": method}, indent=1)
        lines = ",\n  ".join(json.dumps(row) for row in _finite(rows))  # a line a row: diffs can be read
        path.write_text(f'{head.removesuffix("}").rstrip()},\n "rows": [\n  {lines}\n ]\n}}\n')


def _finite(rows: Sequence[dict]) -> list[dict]:
    """NaN and infinity are no JSON: null."""
    return [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()} for row in rows
    ]


def environment(device: str) -> dict[str, str]:
    """What produced the numbers; gpu is "cpu" and driver "" where no GPU took part."""
    import triton

    on_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": _driver() if on_gpu else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


@functools.cache
def _driver() -> str:
    if torch.version.hip:
        return f"hip {torch.version.hip}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def main() -> None:
    """The console script."""
    cli(prog_name="zyfa-bench")


if __name__ == "__main__":
    main()
