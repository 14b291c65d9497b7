"""What the commands of zyfa-db share: arguments, errors, and output that cannot steer a terminal."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from zyfa.errors import DatabaseError

FILES = click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
OUTPUT = click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="Where the result goes.")


def or_exit(act: Callable, *args):
    """The result of act(*args); what is wrong with a file is one line on stderr and exit code 1."""
    try:
        return act(*args)
    except BrokenPipeError:  # click ends quietly, exit 1
        raise
    except (DatabaseError, ValueError, OSError) as error:
        click.echo(f"zyfa-db: {plain(error)}", err=True)
        sys.exit(1)


def plain(value) -> str:
    """The value as text that cannot steer a terminal: files may be a stranger's."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Left-aligned columns, the first row is the head."""
    table = [tuple(map(plain, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())


def print_json(value) -> None:
    """ASCII only, so that no text of a file reaches the terminal as it is."""
    click.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def written(path: str) -> Iterator:
    """A text file that appears whole or not at all; "-" is standard output."""
    if path == "-":
        yield sys.stdout
        return
    part = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
