"""The command zyfa-tune: options to a plan. What runs it is loaded only when there is something to run."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from zyfa.device import TARGETS
from zyfa.recipes import PRESETS, RECIPES

from .effort import EFFORTS
from .lengths import parse_duration, parse_heads, parse_numbers, parse_seq_lens
from .plan import PlannedCell, from_workload, grid
from .space import FP8_RECIPES, MAX_RECIPE_ERROR

SAMPLERS = ("surrogate", "tpe", "gp", "nsga2", "random")  # samplers.SAMPLERS, which loads Optuna
DTYPES = ("bf16", "fp16", "fp8")
CAUSAL = {"both": (True, False), "yes": (True,), "no": (False,)}


class Parsed(click.ParamType):
    """An option whose text goes through a parser that raises ValueError naming the accepted forms."""

    def __init__(self, name: str, parse):
        self.name, self._parse = name, parse

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            return self.fail(str(error), param, ctx)


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Some of DTYPES, each once; raises ValueError naming them."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if bad := [name for name in names if name not in DTYPES]:
        raise ValueError(f"{bad[0]!r} is no dtype. Accepted: a list of {', '.join(DTYPES)}")
    return names


def parse_recipes(text: str) -> tuple[str, ...]:
    """Some of RECIPES, each once; raises ValueError naming them."""
    groups = {"safe": FP8_RECIPES, "presets": tuple(PRESETS.values()), "all": tuple(RECIPES)}
    parts = [groups.get(part.strip(), (part.strip(),)) for part in text.split(",")]
    names = tuple(dict.fromkeys(name for part in parts for name in part))
    if bad := [name for name in names if name not in RECIPES]:
        raise ValueError(f"{bad[0]!r} is no recipe. Accepted: a list of {', '.join((*groups, *RECIPES))}")
    return names


class MaxError(NamedTuple):
    """Error bounds: of every config against its own arithmetic, and of the FP8 recipes that may win a cell."""

    ratio: float = 2.0  # to the plain dtype's error
    recipe: float = MAX_RECIPE_ERROR  # the worst certified relative error


def parse_max_error(text: str) -> MaxError:
    """A ratio of at least 1 (2.0), a bound of FP8 recipes (7% or 0.07), or both; raises ValueError naming the forms."""
    values = {}
    for part in text.split(","):
        try:
            value = float(part.strip().removesuffix("%")) / (100 if part.strip().endswith("%") else 1)
        except ValueError:
            value = math.nan
        name = "recipe" if "%" in part or value < 1 else "ratio"
        if name in values or not (0 < value <= 1 if name == "recipe" else 1 <= value <= 100):
            raise ValueError(
                f"{text!r} is no error bound. Accepted: a ratio from 1 to 100, like 2.0; a share, like 7%; or 2.0,7%"
            )
        values[name] = value
    return MaxError(**values)


def parse_gpus(text: str) -> tuple[int, ...]:
    """GPU numbers; "all" is the empty tuple."""
    return () if text.strip() == "all" else parse_numbers(text, "GPU", 0, 1023)


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked as far as no GPU is needed for it."""

    cells: tuple[PlannedCell, ...]
    target: str
    method: str
    effort: str
    budget_s: float | None
    recipes: tuple[str, ...]
    max_error: MaxError
    pareto: bool
    sampler: str
    exhaustive: int | None  # configs of each cell, 0 for all; None: no recording
    audit: int | None
    recheck: bool
    db: Path | None
    out: Path | None
    split: bool
    gpus: tuple[int, ...]
    resume: bool
    seed: int
    json: bool
    report: Path | None
    first_hour: bool = False


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110})
@click.option(
    "--seq-lens",
    type=Parsed("lengths", parse_seq_lens),
    default="512..32k",
    help="Sequence lengths: 512..32k is every power of two in between, 512,1000,4k is a list; k is 1024.",
)
@click.option(
    "--workload",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines of real calls instead of a grid: batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim, "
    "causal, count; half: their half octave alone.",
)
@click.option("--dtypes", type=Parsed("list", parse_dtypes), default="bf16,fp8", help="Some of bf16, fp16, fp8.")
@click.option(
    "--head-dims",
    type=Parsed("list", lambda text: parse_numbers(text, "head dim", 16, 256, 8)),
    default="128",
    help="Head dims, multiples of 8 from 16 to 256.",
)
@click.option("--heads", type=Parsed("list", parse_heads), default="32:8", help="Query heads:KV heads.")
@click.option(
    "--batch",
    type=Parsed("list", lambda text: parse_numbers(text, "batch size", 1, 65536)),
    default="1",
    help="Batch sizes.",
)
@click.option("--causal", type=click.Choice([*CAUSAL]), default="both", help="With a causal mask, without, or both.")
@click.option(
    "--target",
    type=click.Choice(["auto", *TARGETS], case_sensitive=False),
    default="auto",
    help="The GPU of this machine (mi355x where there is none), or one to compile and predict for.",
)
@click.option(
    "--method",
    type=click.Choice(["auto", "measure", "predict", "compile"]),
    default="auto",
    help="Time on this GPU; predict from machine code; or only compile and reject what spills.",
)
@click.option("--effort", type=click.Choice([*EFFORTS]), default="default", help="Trials and repeats of each cell.")
@click.option(
    "--budget",
    type=Parsed("duration", parse_duration),
    help="Wall time of the whole run, like 10m; spent on the cells that promise most.",
)
@click.option(
    "--recipes",
    type=Parsed("names", parse_recipes),
    default="safe",
    help="FP8 recipes to search: safe (those that keep every sample of real activations), presets, all, or a list of "
    "names; tensor, head and block are plain FP8 with scales of that granularity.",
)
@click.option(
    "--max-error",
    type=Parsed("bounds", parse_max_error),
    default=f"2.0,{MAX_RECIPE_ERROR:.0%}",
    help="2.0: no candidate errs more than this multiple of plain bf16 or fp16 arithmetic (FP8: 1.5 times its recipe "
    "in exact arithmetic). 7%: only recipes whose worst certified error, over input families, seeds and real "
    "activations, is within this win FP8 cells. One of them, or both.",
)
@click.option(
    "--pareto",
    is_flag=True,
    help="Also search recipes beyond --max-error (by default the presets too), and store the best config of each "
    "recipe, which precision='fp8:<preset>' takes.",
)
@click.option(
    "--sampler",
    type=click.Choice([*SAMPLERS]),
    default=SAMPLERS[0],
    help="What proposes configs: a Gaussian process over all legal ones (surrogate), or one of Optuna's.",
)
@click.option(
    "--exhaustive",
    type=click.IntRange(0),
    is_flag=False,
    flag_value=0,
    metavar="[N]",
    help="Instead of searching, record every legal config of each cell, or a stratified sample of N, as landscape "
    "files in --out (benchmarks/<sku>/landscapes).",
)
@click.option(
    "--audit",
    type=click.IntRange(1),
    metavar="N",
    help="Instead of searching, time what lookup gives for N random irregular shapes against the best known configs, "
    "and print the worst and the median regret; --out gets workloads of the cells that lose more than 3 %.",
)
@click.option(
    "--recheck",
    is_flag=True,
    help="Instead of searching, measure each cell's stored best configs again under this toolchain, and print which "
    "winners moved and by how much.",
)
@click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Database that is read and written.  [default: the user's, which zyfa.attention reads]",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also export the GPU's file to this folder."
)
@click.option(
    "--split/--no-split",
    default=True,
    help="After searching, sample the lower half of each measured cell, and tune it on its own where the cell's winner "
    "loses more than 3 % there; and let other lengths decide between configs that tie at a cell's upper end.",
)
@click.option("--gpus", type=Parsed("list", parse_gpus), default="all", help="GPUs to measure on, like 0,1.")
@click.option("--engine", type=click.Choice(["local"]), default="local", help="Where workers run: this machine.")
@click.option("--resume/--fresh", default=True, help="Use the trials that are stored already, or search again.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Of the search.")
@click.option("--dry-run", is_flag=True, help="Print the plan; touch neither GPU nor database.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; everything else goes to stderr.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Also write the final table as a web page.",
)
@click.option(
    "--first-hour",
    is_flag=True,
    help="On a GPU that nobody has timed: test every preset against the reference, time what the model does not know, "
    "judge its predictions on 24 configs in 6 shapes, then tune with the rest of --budget (1h); writes to --out "
    "(first-hour) what to send back.",
)
@click.version_option(package_name="zyfa")
def main(seq_lens, workload, dtypes, head_dims, heads, batch, causal, target, method, effort, budget, recipes,
         max_error, pareto, sampler, exhaustive, audit, recheck, db, out, split, gpus, engine, resume, seed, dry_run,
         as_json, report, first_hour):  # fmt: skip
    """Search the fastest configs of prefill attention and store them where zyfa.attention finds them.

    With a GPU in this machine configs are timed on it; without one they are compiled for a target GPU, and what the
    machine code promises is stored as predicted.

    \b
    Examples:
      zyfa-tune                                      this GPU, or mi355x where there is none
      zyfa-tune --seq-lens 512..32k --effort quick
      zyfa-tune --seq-lens 1000,4k --heads 16:16 --dtypes bf16 --causal yes
      zyfa-tune --target mi300x --out databases/     no GPU needed
      zyfa-tune --workload calls.jsonl --budget 10m
      zyfa-tune --dtypes fp8 --pareto                the best config of each FP8 recipe: time against error
      zyfa-tune --recheck                            which winners moved with the new driver or Triton?
      zyfa-tune --audit 100                          what irregular shapes lose
      zyfa-tune --first-hour                         a GPU that nobody has timed

    \b
    Exit codes: 0 done; 2 wrong usage; 3 done, but some cells have no valid config; 130 and 143 stopped by SIGINT and
    SIGTERM, with what was found kept; 1 anything else.
    """
    try:
        cells = from_workload(workload, dtypes) if workload else grid(
            seq_lens, dtypes, head_dims, heads, batch, CAUSAL[causal]
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--workload") from error
    if sum((exhaustive is not None, audit is not None, recheck)) > 1:
        raise click.UsageError("--exhaustive, --audit and --recheck exclude each other")
    options = Options(
        tuple(cells), target.lower(), method, effort, budget, recipes, max_error, pareto, sampler, exhaustive, audit,
        recheck, db, out, split, gpus, resume, seed, as_json, report, first_hour,
    )  # fmt: skip
    if dry_run:
        return print_plan(options)
    from .session import run  # loads torch, Triton and Optuna

    return sys.exit(run(options))


def print_plan(options: Options) -> None:
    """One line per cell, and what would be done with them; as JSON where that is asked for."""
    from .progress import cell_name

    trials = EFFORTS[options.effort].trials
    if options.json:
        import json

        cells = [{"name": cell_name(c.key), "cell": c.cell._asdict(), "weight": c.weight} for c in options.cells]
        plan = {"target": options.target, "method": options.method, "trials_per_cell": trials, "cells": cells}
        return click.echo(json.dumps(plan, indent=1))
    for cell in options.cells:
        click.echo(f"{cell_name(cell.key)}  weight {cell.weight:.3g}")
    return click.echo(
        f"{len(options.cells)} cells, up to {trials} configs each; target {options.target}, method {options.method}. "
        "Lengths are upper ends of octaves. Dry run: nothing was touched"
    )
