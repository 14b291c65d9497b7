"""Which few kernels serve all cells almost as well as every cell's own: for small images and short warm-up."""

from collections import defaultdict
from typing import NamedTuple

from zyfa.config import Cell, cell_of

from .content import Content, Seat


class Pick(NamedTuple):
    """One config of a portfolio, the cells that it was chosen for, and its worst time there against their best."""

    config: str
    cells: tuple[Cell, ...]
    worst: float


class Portfolio(NamedTuple):
    picks: tuple[Pick, ...]
    uncovered: tuple[Cell, ...]


def portfolio(content: Content, within: float, most: int) -> Portfolio:
    """At most `most` configs that run the cells within a fraction `within` of their best time, and what is left over.

    Greedy: the next config is the one that covers most of the cells still open, of equal ones the faster. Only times of
    the winner's own toolchain and trust are compared. Raises ValueError for a negative fraction or no config.
    """
    if within < 0 or most < 1:
        raise ValueError(f"within is {within} and most {most}; accepted are within >= 0 and most >= 1")
    slowdowns = _slowdowns(content)
    covers: dict[str, dict[Cell, float]] = defaultdict(dict)
    for cell, configs in slowdowns.items():
        for config, slowdown in configs.items():
            if slowdown <= 1 + within:
                covers[config][cell] = slowdown
    left, picks = set(slowdowns), list[Pick]()
    while left and len(picks) < most:
        gains = {config: sorted(left & cells.keys()) for config, cells in covers.items()}
        config = min(gains, key=lambda c: (-len(gains[c]), sum(covers[c][cell] for cell in gains[c]), c))
        picks.append(Pick(config, tuple(gains[config]), max(covers[config][cell] for cell in gains[config])))
        left -= set(gains[config])
    return Portfolio(tuple(picks), tuple(sorted(left)))


def _slowdowns(content: Content) -> dict[Cell, dict[str, float]]:
    """Of each cell its configs and their times against the best, within the seat that serves the cell."""
    serving: dict[Cell, Seat] = {}
    for seat, crown in sorted(
        content.winners.items(), key=lambda item: (item[0].trust == "measured", item[1].tuned_at)
    ):
        serving[seat.cell] = crown.seat
    times: dict[Seat, dict[str, float]] = defaultdict(dict)
    for record in content.trials:
        if record.ms is not None:
            seat = Seat(cell_of(record.key), record.toolchain, record.trust)
            times[seat][record.config] = min(record.ms, times[seat].get(record.config, record.ms))
    return {
        cell: {config: ms / min(times[seat].values()) for config, ms in times[seat].items()}
        for cell, seat in serving.items()
    }
