"""zyfa-db: what is in a tuning database, and whether it is sound."""

import csv
import dataclasses
import itertools
import os
import subprocess
import sys

import click

from zyfa.config import DTYPES
from zyfa.device import visible_devices, why

from .cli_exchange import export, import_
from .cli_merge import diff, merge, portfolio, prune
from .cli_tools import AS_JSON, FILES, or_exit, plain, print_json, print_table
from .reader import Row, opened, read
from .schema import TRUSTS, version_of
from .verify import findings

# What `show` prints of a row.
COLUMNS = (
    ("dtype", lambda r: r.dtype),
    ("dim", lambda r: str(r.head_dim) if r.head_dim == r.head_dim_v else f"{r.head_dim}/{r.head_dim_v}"),
    ("mask", lambda r: ("causal" if r.causal else "full") + ("+local" if r.window_class == "local" else "")),
    ("ratio", lambda r: str(r.nheads_ratio)),
    ("heads", lambda r: str(r.batch_heads)),
    ("seqlen", lambda r: str(r.seqlen_q) if r.seqlen_q == r.seqlen_k else f"{r.seqlen_q}/{r.seqlen_k}"),
    ("us", lambda r: f"{r.ms * 1e3:.4g}"),
    ("TFLOPS", lambda r: f"{r.tflops:.4g}"),
    ("error", lambda r: "-" if r.rel_err is None else f"{r.rel_err:.2g}"),
    ("trust", lambda r: f"{r.trust} {r.confidence}"),
    ("trials", lambda r: str(r.trials)),
    ("config", lambda r: plain(r.config)),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look into tuning databases, and work with them.

    \b
        zyfa-db info   h200.sqlite                   whose it is, what it holds
        zyfa-db show   h200.sqlite --json            the best config of each cell
        zyfa-db verify *.sqlite                      exit 1 if anything is wrong
        zyfa-db diff   old.sqlite new.sqlite         what changes for callers
        zyfa-db merge  a.sqlite b.sqlite -o c.sqlite one of several
        zyfa-db export h200.sqlite                   as text; import is the way back

    Exit codes: 0 done, 1 something is wrong with a file, 2 usage.
    """


for command in (merge, diff, export, import_, prune, portfolio):
    cli.add_command(command)


@cli.command()
@click.argument("files", metavar="FILE...", nargs=-1, type=click.Path())
@AS_JSON
@click.option("--here", is_flag=True, help="How the GPUs of this machine were recognised.")
def info(files: tuple[str, ...], as_json: bool, here: bool) -> None:
    """Print the GPU, the toolchains and the counts of each FILE.

    \b
        zyfa-db info nvidia-sm90-h200-sm132.sqlite
        zyfa-db info --here
        zyfa-db info --json *.sqlite | jq '.[].sku'
    """
    if not files and not here:
        raise click.UsageError("FILE... is missing; --here tells of this machine")
    infos = [*(_here() if here else []), *(or_exit(_info, path) for path in files)]
    if as_json:
        print_json(infos)
        return
    for facts in infos:
        for name, value in facts.items():
            click.echo(f"{name:<14}{plain(value)}")


@cli.command()
@FILES
@AS_JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, config as JSON.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Only cells of this dtype.")
@click.option("--trust", type=click.Choice(TRUSTS), help="Only rows of this trust.")
@click.option("--seqlen", type=int, help="Only cells with this upper end of seqlen_q.")
def show(files: tuple[str, ...], as_json: bool, as_csv: bool, dtype, trust, seqlen) -> None:
    """Print the best config of every cell, one row per toolchain and trust.

    \b
        zyfa-db show nvidia-sm90-h200-sm132.sqlite --dtype fp8
        zyfa-db show --json *.sqlite | jq '.[] | select(.tflops > 500)'
    """
    skipped: list[str] = []
    rows = [row for path in files for row in or_exit(read, path, skipped)]
    wanted = {"dtype": dtype, "trust": trust, "seqlen_q": seqlen}
    rows = [row for row in rows if all(want in (None, getattr(row, name)) for name, want in wanted.items())]
    rows.sort(key=lambda row: (row.sku, row.cell, row.trust))
    if as_json:
        print_json([row._asdict() | {"config": dataclasses.asdict(row.config)} for row in rows])
    elif as_csv:
        lines = csv.writer(sys.stdout, lineterminator="\n")
        lines.writerow(Row._fields)
        lines.writerows(row._replace(config=row.config.to_json()) for row in rows)
    else:
        _print_rows(rows)
    for reason in skipped:
        click.echo(f"left out: {plain(reason)}", err=True)


@cli.command()
@FILES
@click.option(
    "--recompile",
    is_flag=True,
    help="Also compile every winner with this Triton, which needs no GPU: it must still compile, spill nothing, and be "
    "tuned for these kernels.",
)
def verify(files: tuple[str, ...], recompile: bool) -> None:
    """Check each FILE and print what is wrong with it; exit 1 if anything is.

    Checked are the file (integrity, application_id, schema), every winner (its trial exists, is ok, has the trust that
    it claims), and every config (it parses and keeps the limits of the GPU).

    \b
        zyfa-db verify *.sqlite
        zyfa-db verify --recompile mine.sqlite
    """
    if recompile:  # the tuner's business, and in a process of its own: this package knows no compiler
        sys.exit(subprocess.run([sys.executable, "-P", "-m", "zyfa.tuner.check_databases", "--all", *files]).returncode)
    bad = 0
    for path in files:
        faults = findings(path)
        bad += bool(faults)
        for fault in faults or [f"{path}: ok"]:
            click.echo(plain(fault))
    sys.exit(1 if bad else 0)


def _here() -> list[dict]:
    """What each GPU of this machine is, and why."""
    found = visible_devices()
    if not found:
        click.echo("zyfa-db: no NVIDIA or AMD GPU that this torch can use", err=True)
    return [{"gpu": index, **dict(why(device))} for index, device in enumerate(found)]


def _info(path: str) -> dict:
    with opened(path) as conn:
        counts = {
            name: conn.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("cells", "configs", "trials")
        }
        return {
            "file": path, "bytes": os.path.getsize(path), "schema": version_of(conn, path),
            **dict(conn.execute("SELECT key, value FROM meta ORDER BY key LIMIT 100")), **counts,
            "outcomes": dict(conn.execute("SELECT outcome, count(*) FROM trials GROUP BY 1")),
            "winners": dict(conn.execute("SELECT trust, count(*) FROM winners GROUP BY 1")),
            "toolchains": [list(row[1:]) for row in conn.execute("SELECT * FROM toolchains LIMIT 100")],
        }  # fmt: skip


def _print_rows(rows: list[Row]) -> None:
    heads = tuple(name for name, _ in COLUMNS)
    for sku, group in itertools.groupby(rows, key=lambda row: row.sku):
        click.echo(f"-- {sku}")
        print_table([heads, *(tuple(text(row) for _, text in COLUMNS) for row in group)])
