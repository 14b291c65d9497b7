"""zyfa-bench front: time against error of every recipe, from the fronts that zyfa-tune --pareto stored."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from zyfa.config import Cell
from zyfa.errors import DatabaseError
from zyfa.tuning_db.certificates import Licence, worst_errors
from zyfa.tuning_db.reader import Row, read


class FrontPoint(NamedTuple):
    """The best config of a recipe in a cell; bf16 is a point too, with the error that was measured beside its time.

    error: the recipe's worst certified error. us: end to end, quantisation included. speedup: of bf16's time, None
    where the cell has no bf16 row. dominated: another recipe of the cell is at least as fast and as exact.
    """

    cell: Cell
    recipe: str
    us: float
    error: float
    speedup: float | None
    dominated: bool
    trust: str


def front_points(path: Path) -> list[FrontPoint]:
    """The points of every FP8 cell of a database, by cell and time; the newest toolchain of a cell counts."""
    plain = {(row.cell[1:], row.trust): row for row in reversed(read(path)) if row.dtype == "bf16"}
    newest = {(row.cell, row.trust, row.config.recipe): row for row in reversed(read(path, view="front"))}
    errors = worst_errors(path)
    cells: dict[tuple[Cell, str], list[FrontPoint]] = {}
    for (cell, trust, recipe), row in newest.items():
        base = plain.get((cell[1:], trust))
        points = cells.setdefault((cell, trust), [_point(cell, "none", base, base, base.rel_err)] if base else [])
        points.append(
            _point(cell, recipe, row, base, errors[Licence(row.toolchain, trust, recipe, *cell[1:3], cell.causal)])
        )
    return [point for _, points in sorted(cells.items()) for point in _marked(points)]


def _point(cell: Cell, recipe: str, row: Row, base: Row | None, error: float | None) -> FrontPoint:
    known = float("nan") if error is None else error  # a predicted bf16 row has none
    return FrontPoint(cell, recipe, row.ms * 1e3, known, base.ms / row.ms if base else None, False, row.trust)


def _marked(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """The points by time; those that another one beats in time or error and in neither is worse are dominated."""

    def beats(a: FrontPoint, b: FrontPoint) -> bool:
        return a.us <= b.us and a.error <= b.error and (a.us, a.error) != (b.us, b.error)

    marked = [p._replace(dominated=any(beats(other, p) for other in points)) for p in points]
    return sorted(marked, key=lambda point: point.us)


def name_of(cell: Cell) -> str:
    """Like D128 4:1 heads causal 8192 x 32."""
    dims = cell.head_dim if cell.head_dim == cell.head_dim_v else f"{cell.head_dim}/{cell.head_dim_v}"
    mask = "causal" if cell.causal else "full"
    return f"D{dims} {mask} {cell.seqlen_q} x {cell.batch_heads} heads {cell.nheads_ratio}:1"


@click.command()
@click.argument("database", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the points to this file.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw them, like front.png.")
def front(database, json_path, plot) -> None:
    """Time and worst certified error of each FP8 recipe in each cell of DATABASE, and BF16 beside them.

    The rows are those that zyfa-tune --pareto stored; times include quantisation. A star marks the front.
    """
    import json

    from .bench_plot import save_front

    try:
        points = front_points(database)
    except DatabaseError as error:
        raise click.UsageError(str(error)) from error
    if not points:
        raise click.UsageError(f"{database} holds no fronts; zyfa-tune --pareto stores them")
    for p in points:
        speedup = "" if p.speedup is None else f"  {p.speedup:.2f}x of bf16"
        mark = " " if p.dominated else "*"
        click.echo(f"{mark} {name_of(p.cell)}  {p.recipe:<36} {p.us:10.1f} us  {p.error:7.2%}  {p.trust}{speedup}")
    if json_path:
        rows = [
            p._asdict() | {"cell": p.cell._asdict(), "error": p.error if p.error == p.error else None} for p in points
        ]
        json_path.write_text(json.dumps({"database": database.name, "rows": rows}, indent=1) + "\n")
    if plot:
        try:
            save_front(points, plot)
        except ModuleNotFoundError as error:
            raise click.UsageError(str(error)) from error
