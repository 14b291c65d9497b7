"""zyfa-db export, import: our text, and the files of other tuners."""

import json
import os
import sys

import click

from zyfa.errors import DatabaseError

from . import foreign, text
from .cli_tools import or_exit, plain, written
from .content import Content, read_content, write_content
from .merge import served
from .reader import MAX_BYTES, read


@click.command()
@click.argument("file", type=click.Path())
@click.option("--to", "form", default="text", show_default=True, type=click.Choice(["text", "aiter", "t4"]))
@click.option("-o", "--output", default="-", show_default=True, help="A file; - is standard output.")
def export(file: str, form: str, output: str) -> None:
    """Print a database as text that a pull request can show, or as another tuner's file.

    text: sorted lines of JSON with everything that FILE holds; `zyfa-db import` makes the same database of it.
    t4: Kernel Tuner's result file, also with everything. aiter: AITER's Triton JSON, the best configs only.

    \b
        zyfa-db export h200.sqlite | grep '"winner"'
        zyfa-db export --to t4 h200.sqlite -o h200.t4.json
    """
    if form == "aiter":
        lines = [json.dumps(foreign.aiter_of(served(or_exit(read, file)).values()), indent=2)]
    else:
        content = or_exit(read_content, file)
        lines = list(text.dump(content)) if form == "text" else [json.dumps(foreign.t4_of(content), indent=1)]
    or_exit(_write, output, lines)


def _write(output: str, lines: list[str]) -> None:
    with written(output) as file:
        file.writelines(f"{line}\n" for line in lines)


@click.command("import")
@click.argument("source")
@click.option(
    "--from", "form", default="text", show_default=True, type=click.Choice(["text", "t4", "aiter", "aotriton"])
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The database to write; for text and t4.")
def import_(source: str, form: str, output: str | None) -> None:
    """Make a database of a text; or print the configs that another tuner chose, as seeds.

    SOURCE is a file, or - for text on standard input. text and t4 become the database that they came from. The files of
    AITER and AOTriton hold configs of other kernels and no times: they are printed as lines of JSON, worth measuring.

    \b
        zyfa-db export a.sqlite | zyfa-db import - -o b.sqlite
        zyfa-db import --from aiter gfx950-MHA-DEFAULT.json | jq .config
        zyfa-db import --from aotriton tuning_database.sqlite3 | jq 'select(.seqlen_q == 8192)'
    """
    if form in ("aiter", "aotriton"):
        if output:
            raise click.UsageError(
                f"--from {form} gives seeds, which are printed: there is no database to write with -o"
            )
        seeds = or_exit(foreign.seeds_of_aiter if form == "aiter" else foreign.seeds_of_aotriton, source)
        for line in foreign.seed_lines(seeds):
            click.echo(json.dumps(line))
        return
    if not output:
        raise click.UsageError("-o is missing: where the database goes")
    content = or_exit(_load, source) if form == "text" else or_exit(foreign.content_of_t4, source)
    or_exit(write_content, content, output)
    click.echo(plain(f"{output}: {content.trials.total()} trials, {len(content.winners)} winners"))


def _load(source: str) -> Content:
    if source == "-":
        return text.load(sys.stdin)
    if os.path.getsize(source) > MAX_BYTES:
        raise DatabaseError(f"{source}: more than {MAX_BYTES} bytes")
    with open(source, encoding="utf-8") as lines:
        return text.load(lines)
