"""zyfa-db merge, diff, prune, portfolio."""

import json
import sys

import click

from .cli_tools import AS_JSON, FILES, OUTPUT, or_exit, plain, print_json, print_table
from .content import read_content, write_content
from .merge import Change, Conflict, changes, merged, pruned
from .portfolio import portfolio as cover
from .reader import Row, read


@click.command()
@FILES
@OUTPUT
@AS_JSON
def merge(files: tuple[str, ...], output: str, as_json: bool) -> None:
    """Make one database of several of the same GPU.

    Every trial of every FILE is kept. Where two files have a winner for the same cell, toolchain and trust, the better
    evidence wins: confidence, how many it was chosen from, how recent, how fast. The order of the FILEs does not
    matter, and merging again changes nothing. The result replaces OUTPUT in one step, which may be one of the FILEs.

    \b
        zyfa-db merge node1.sqlite node2.sqlite -o both.sqlite
        zyfa-db merge --json *.sqlite -o all.sqlite | jq '.conflicts | length'
    """
    content, conflicts = or_exit(merged, [or_exit(read_content, path) for path in files])
    or_exit(write_content, content, output)
    if as_json:
        found = [_conflict(c) for c in conflicts]
        return print_json({"trials": content.trials.total(), "winners": len(content.winners), "conflicts": found})
    click.echo(f"{output}: {content.trials.total()} trials, {len(content.winners)} winners")
    for told in map(_conflict, conflicts):
        click.echo(plain(f"conflict: {told['seat']}: kept {told['kept']}, dropped {told['dropped']}"))
    return None


def _conflict(conflict: Conflict) -> dict:
    def told(crown) -> str:
        return f"{crown.record.ms} ms {crown.confidence} of {crown.trials} ({crown.tuned_at}) {crown.record.config}"

    seat = conflict.seat
    where = " ".join(map(str, (*seat.cell, seat.trust, *filter(None, seat.toolchain))))
    return {"seat": where, "kept": told(conflict.kept), "dropped": told(conflict.dropped)}


@click.command()
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@click.option("--exit-code", is_flag=True, help="Exit 1 if there is a difference.")
@AS_JSON
def diff(old: str, new: str, exit_code: bool, as_json: bool) -> None:
    """Print what changes for callers from OLD to NEW: configs, times and trust of each cell.

    \b
        zyfa-db diff shipped.sqlite tuned.sqlite
        zyfa-db diff --json old.sqlite new.sqlite | jq '.[] | select(.kind == "config")'
    """
    found = or_exit(lambda: changes(read(old), read(new)))
    if as_json:
        print_json([_change(c) for c in found])
    else:
        heads = ("cell", "what", "old us", "new us", "new/old", "old config", "new config")
        print_table([heads, *map(_line, found)])
    sys.exit(1 if exit_code and found else 0)


def _line(c: Change) -> tuple[str, ...]:
    def us(row: Row | None) -> str:
        return "-" if row is None else f"{row.ms * 1e3:.4g} {row.trust}"

    ratio = f"{c.new.ms / c.old.ms:.3f}" if c.old and c.new else "-"
    same = c.old and c.new and c.old.config == c.new.config
    old = str(c.old.config) if c.old else "-"
    new = "same" if same else str(c.new.config) if c.new else "-"
    return " ".join(map(str, c.cell)), c.kind, us(c.old), us(c.new), ratio, old, new


def _change(c: Change) -> dict:
    def told(row: Row | None) -> dict | None:
        return row and {"ms": row.ms, "trust": row.trust, "config": row.config.to_dict(), "tuned_at": row.tuned_at}

    return {"cell": c.cell._asdict(), "kind": c.kind, "old": told(c.old), "new": told(c.new)}


@click.command()
@click.argument("file", type=click.Path())
@OUTPUT
@click.option(
    "--keep", default=8, show_default=True, type=click.IntRange(1), help="Fastest trials to keep of each cell."
)
@click.option("--newest-kernel", is_flag=True, help="Drop what was tuned for another kernel than the newest trial.")
def prune(file: str, output: str, keep: int, newest_kernel: bool) -> None:
    """Drop trials that decide nothing.

    Kept are all winners, the trials of the default config, the fastest of each cell and one failure of each reason.
    OUTPUT may be FILE.

    \b
        zyfa-db prune tuned.sqlite -o small.sqlite
        zyfa-db prune --newest-kernel --keep 3 tuned.sqlite -o tuned.sqlite
    """
    before = or_exit(read_content, file)
    after = pruned(before, keep, newest_kernel)
    or_exit(write_content, after, output)
    click.echo(
        f"{output}: {after.trials.total()} of {before.trials.total()} trials, "
        f"{len(after.winners)} of {len(before.winners)} winners"
    )


@click.command()
@click.argument("file", type=click.Path())
@click.option("--within", default=5.0, show_default=True, type=click.FloatRange(0), help="Percent of the best time.")
@click.option("--max", "most", default=20, show_default=True, type=click.IntRange(1), help="Configs at most.")
@AS_JSON
def portfolio(file: str, within: float, most: int, as_json: bool) -> None:
    """Print the few configs that serve all cells almost as well as each cell's own.

    \b
        zyfa-db portfolio --within 5 --max 8 h200.sqlite
        zyfa-db portfolio --json h200.sqlite | jq '.uncovered'
    """
    found = cover(or_exit(read_content, file), within / 100, most)
    if as_json:
        picks = [
            {"config": json.loads(p.config), "cells": [c._asdict() for c in p.cells], "worst": p.worst}
            for p in found.picks
        ]
        return print_json({"picks": picks, "uncovered": [c._asdict() for c in found.uncovered]})
    print_table([("cells", "worst", "config"), *((str(len(p.cells)), f"{p.worst:.3f}", p.config) for p in found.picks)])
    for cell in found.uncovered:
        click.echo(f"not covered: {plain(' '.join(map(str, cell)))}")
    return None
