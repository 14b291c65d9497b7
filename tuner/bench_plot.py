"""The plots of zyfa-bench; matplotlib is loaded here and nowhere else."""

from collections.abc import Sequence
from pathlib import Path

from .bench_accuracy import Accuracy

HINT = "--plot needs matplotlib: pip install zyfa[report]"


def accuracy_figure(rows: Sequence[Accuracy]):
    """A matplotlib Figure: one panel per family, the error of each recipe over head dims on a logarithmic axis.

    Raises ModuleNotFoundError with a hint where matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(HINT, name=error.name) from error
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
