"""zyfa-db: what is in a tuning database, and whether it is sound."""

import dataclasses
import json
import os
import sys

import click

from zyfa.errors import DatabaseError

from .reader import Row, opened, read
from .schema import version_of
from .verify import findings

FILES = click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, one array with an object per file or row.")

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
    ("config", lambda r: _plain(r.config)),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look into tuning databases.

    \b
        zyfa-db info   h200.sqlite          whose it is, what it holds
        zyfa-db show   h200.sqlite --json   the best config of each cell
        zyfa-db verify *.sqlite             exit 1 if anything is wrong
    """


@cli.command()
@FILES
@AS_JSON
def info(files: tuple[str, ...], as_json: bool) -> None:
    """Print the GPU, the toolchains and the counts of each FILE.

    \b
        zyfa-db info nvidia-sm90-h200-sm132.sqlite
        zyfa-db info --json *.sqlite | jq '.[].sku'
    """
    infos = [_or_exit(_info, path) for path in files]
    if as_json:
        click.echo(json.dumps(infos, indent=2))
        return
    for facts in infos:
        for name, value in facts.items():
            click.echo(f"{name:<14}{_plain(value)}")


@cli.command()
@FILES
@AS_JSON
def show(files: tuple[str, ...], as_json: bool) -> None:
    """Print the best config of every cell, one row per toolchain and trust.

    \b
        zyfa-db show nvidia-sm90-h200-sm132.sqlite
        zyfa-db show --json *.sqlite | jq '.[] | select(.dtype == "fp8")'
    """
    skipped: list[str] = []
    rows = [row for path in files for row in _or_exit(lambda path: read(path, skipped), path)]
    rows.sort(key=lambda row: (row.sku, row.cell, row.trust))
    if as_json:
        click.echo(json.dumps([row._asdict() | {"config": dataclasses.asdict(row.config)} for row in rows], indent=2))
    else:
        _print_table(rows)
    for reason in skipped:
        click.echo(f"left out: {_plain(reason)}", err=True)


@cli.command()
@FILES
def verify(files: tuple[str, ...]) -> None:
    """Check each FILE and print what is wrong with it; exit 1 if anything is.

    Checked are the file (integrity, application_id, schema), every winner (its trial exists, is ok, has the trust that
    it claims), and every config (it parses and keeps the limits of the GPU).

    \b
        zyfa-db verify *.sqlite
    """
    bad = 0
    for path in files:
        faults = findings(path)
        bad += bool(faults)
        for fault in faults or [f"{path}: ok"]:
            click.echo(_plain(fault))
    sys.exit(1 if bad else 0)


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


def _or_exit(read_file, path: str):
    try:
        return read_file(path)
    except DatabaseError as error:
        click.echo(f"zyfa-db: {_plain(error)}", err=True)
        sys.exit(1)


def _print_table(rows: list[Row]) -> None:
    table = [tuple(name for name, _ in COLUMNS), *(tuple(text(row) for _, text in COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sku = None
    for row, line in zip([None, *rows], table, strict=True):
        if row is not None and row.sku != sku:
            sku = row.sku
            click.echo(f"-- {sku}")
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())


def _plain(value) -> str:
    """The value as text that cannot steer a terminal: files may be a stranger's."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))
