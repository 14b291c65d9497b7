"""Of configs that tie at the end of a cell, the one that serves the cell's other lengths best.

A row is tuned at the upper end of its lengths. Tiles that differ by less than their noise there may differ by 8 % just
above a multiple of their rows or keys, where the last block is nearly empty (an H200, BF16, 289 to 446 tokens).
"""

import itertools
import random
import statistics
from collections.abc import Callable, Collection, Sequence

from zyfa.config import AttentionConfig, AttentionKey, Cell, octave_of

from .audit import Audit, Finding, Plan, tile_of
from .cells import CellRun
from .split import PROBES, half_of

NEAR = 0.03  # of the winner's time at the end of the cell: within it, the other lengths decide
CANDIDATES = 3  # beside the winner
GAIN = 0.01  # mean over the lengths that a candidate must be better by


def candidates(run: CellRun) -> list[AttentionConfig]:
    """The fastest configs of other tiles than the winner's that are NEAR it, fastest first."""
    assert run.winner is not None
    winner, result = run.winner
    near = sorted((found.ms, i) for i, (_, found) in enumerate(run.results.values()) if _near(found.ms, result.ms))
    configs, of_tiles = list(run.results), {tile_of(winner): winner}
    for _, i in near:
        of_tiles.setdefault(tile_of(configs[i]), configs[i])
    return [config for config in of_tiles.values() if config != winner][:CANDIDATES]


def _near(ms: float | None, best_ms: float | None) -> bool:
    return ms is not None and best_ms is not None and ms <= (1 + NEAR) * best_ms


def lengths(run: CellRun, halves: Collection[Cell], seed: int) -> list[AttentionKey]:
    """Odd lengths spread over those that the cell's row serves: half an octave where the other half has its own row."""
    key, cell = run.key, run.planned.cell
    octave = octave_of(cell).seqlen_q
    low = octave // 2 if cell != octave_of(cell) or half_of(run.planned).cell not in halves else 3 * octave // 4
    draw, step = random.Random(seed), (key.seqlen_q - low) / PROBES
    if step < 2:
        return []
    found = []
    for i in range(PROBES):
        seqlen = draw.randint(round(low + i * step) + 1, round(low + (i + 1) * step)) - 1 | 1
        found.append(key._replace(seqlen_q=seqlen, seqlen_k=max(seqlen, seqlen + key.seqlen_k - key.seqlen_q)))
    return found


def best_overall(run: CellRun, found: Sequence[Finding]) -> AttentionConfig | None:
    """The candidate whose times over the best, in the mean over the cell's end and other lengths, beat the winner's."""
    assert run.winner is not None
    winner = run.winner[0]
    shapes = [each.times for each in found if winner in each.times]
    known = [config for config in candidates(run) if all(config in times for times in shapes)]
    if not shapes or not known:
        return None
    shapes.append({config: ms for config in (winner, *known) if (ms := run.results[config][1].ms) is not None})
    losses = {
        config: statistics.fmean(times[config] / min(times[c] for c in (winner, *known)) for times in shapes)
        for config in (winner, *known)
    }
    best = min(losses, key=losses.__getitem__)
    return best if losses[best] < (1 - GAIN) * losses[winner] else None


def settle(
    runs: Sequence[CellRun], audit: Audit, seed: int, stopped: Callable[[], bool]
) -> list[tuple[CellRun, AttentionConfig]]:
    """The cells whose winner should be another config, and that; all their lengths are timed as one audit."""
    halves = {run.planned.cell for run in runs}
    planned = [
        (run, [Plan(key, run.winner[0], "cell", tuple(rivals)) for key in lengths(run, halves, seed)])
        for run in runs
        if run.winner and not run.known and (rivals := candidates(run))
    ]
    found = iter(audit.run([plan for _, plans in planned for plan in plans], stopped))
    better = []
    for run, plans in planned:
        own = list(itertools.islice(found, len(plans)))
        if plans and len(own) == len(plans) and (config := best_overall(run, own)):
            better.append((run, config))
    return better
