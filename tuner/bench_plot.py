"""The plots of zyfa-bench; matplotlib is loaded here and nowhere else."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .bench_accuracy import Accuracy

if TYPE_CHECKING:
    from .bench_front import FrontPoint

HINT = "--plot needs matplotlib: pip install zyfa[report]"


def _figure_class():
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(HINT, name=error.name) from error
    return Figure


def accuracy_figure(rows: Sequence[Accuracy]):
    """A matplotlib Figure: one panel per family, the error of each recipe over head dims on a logarithmic axis.

    Raises ModuleNotFoundError with a hint where matplotlib is absent.
    """
    Figure = _figure_class()
    families = list(dict.fromkeys(row.family for row in rows))
    figure = Figure(figsize=(5 * min(len(families), 3) + 3, 4 * -(-len(families) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(families) // 3), min(len(families), 3), squeeze=False, sharey=True).flat
    for axis, family in zip(axes, families, strict=False):
        _panel(axis, family, [row for row in rows if row.family == family])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _panel(axis, family: str, rows: Sequence[Accuracy]) -> None:
    dims = sorted({(row.head_dim, row.head_dim_v) for row in rows})
    for recipe in dict.fromkeys(row.recipe for row in rows):
        points = [(dims.index((r.head_dim, r.head_dim_v)), r.error) for r in rows if r.recipe == recipe]
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1, label=recipe)
    axis.set(title=family, xlabel="head dim", ylabel="relative error", yscale="log")
    axis.set_xticks(range(len(dims)), [str(d) if d == d_v else f"{d}/{d_v}" for d, d_v in dims])


def save_accuracy(rows: Sequence[Accuracy], path: Path) -> None:
    """Writes accuracy_figure to a file; its ending says the format."""
    accuracy_figure(rows).savefig(path, dpi=120)


def front_figure(points: "Sequence[FrontPoint]"):
    """A matplotlib Figure: one panel per cell, error over time, the undominated recipes joined by a line."""
    cells = list(dict.fromkeys(point.cell for point in points))
    width = min(len(cells), 4)
    figure = _figure_class()(figsize=(4.5 * width + 1, 3.5 * -(-len(cells) // width)), layout="constrained")
    axes = list(figure.subplots(-(-len(cells) // width), width, squeeze=False).flat)
    for axis in axes[len(cells) :]:
        axis.set_visible(False)
    for axis, cell in zip(axes, cells, strict=False):
        mine = [point for point in points if point.cell == cell]
        best = [point for point in mine if not point.dominated]
        axis.plot([p.us for p in best], [p.error for p in best], linewidth=1)
        axis.plot([p.us for p in mine], [p.error for p in mine], linestyle="", marker="o", markersize=4)
        for p in mine:
            side = "right" if 2 * p.us > mine[0].us + mine[-1].us else "left"  # names stay inside of the panel
            axis.annotate("bf16" if p.recipe == "none" else p.recipe, (p.us, p.error), fontsize=6, ha=side)
        seqlen, mask = cell.seqlen_q, "causal" if cell.causal else "full"
        axis.set(title=f"{seqlen}, {mask}", xlabel="us", ylabel="worst certified error", yscale="log")
    return figure


def save_front(points: "Sequence[FrontPoint]", path: Path) -> None:
    """Writes front_figure to a file; its ending says the format."""
    front_figure(points).savefig(path, dpi=120)
