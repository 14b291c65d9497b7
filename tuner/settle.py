"""Of configs that tie at the end of a cell, the one that serves the cell's other lengths best.

A row is tuned at the upper end of its lengths. Tiles that differ by less than their noise there may differ by 8 % just
above a multiple of their rows or keys, where the last block is nearly empty (an H200, BF16, 289 to 446 tokens).
"""

import itertools
import statistics
from collections.abc import Callable, Collection, Sequence

from zyfa.config import AttentionConfig, AttentionKey, Cell, octave_of

from .audit import Audit, Finding, Plan, one_of_each_tile
from .cells import CellRun
from .split import half_of, odd_lengths

NEAR = 0.03  # of the winner's time at the end of the cell: within it, the other lengths decide
CANDIDATES = 3  # beside the winner
GAIN = 0.01  # mean over the lengths that a candidate must be better by


def candidates(run: CellRun) -> list[AttentionConfig]:
    """The fastest configs of other tiles than the winner's that are NEAR it, fastest first."""
    assert run.winner is not None
    winner, result = run.winner
    times = {config: found.ms for config, (_, found) in run.results.items() if found.ms is not None}
    near = sorted((c for c, ms in times.items() if result.ms and ms <= (1 + NEAR) * result.ms), key=times.__getitem__)
    return one_of_each_tile([winner, *near])[1 : 1 + CANDIDATES]


def lengths(run: CellRun, halves: Collection[Cell], seed: int) -> list[AttentionKey]:
    """Odd lengths spread over those that the cell's row serves: half an octave where the other half has its own row."""
    key, cell = run.key, run.planned.cell
    octave = octave_of(cell).seqlen_q
    low = octave // 2 if cell != octave_of(cell) or half_of(run.planned).cell not in halves else 3 * octave // 4
    seqlens = odd_lengths(low, key.seqlen_q, seed)
    return [key._replace(seqlen_q=n, seqlen_k=max(n, n + key.seqlen_k - key.seqlen_q)) for n in seqlens]


def best_overall(run: CellRun, rivals: Sequence[AttentionConfig], found: Sequence[Finding]) -> AttentionConfig | None:
    """The rival whose times over the best, in the mean over the cell's end and other lengths, beat the winner's."""
    assert run.winner is not None
    winner = run.winner[0]
    at_end = {config: ms for config in (winner, *rivals) if (ms := run.results[config][1].ms) is not None}
    shapes = [at_end, *(each.times for each in found)]
    valid = [config for config in (winner, *rivals) if all(config in times for times in shapes)]
    if winner not in valid:
        return None
    losses = {c: statistics.fmean(times[c] / min(times[v] for v in valid) for times in shapes) for c in valid}
    best = min(losses, key=losses.__getitem__)
    return best if losses[best] < (1 - GAIN) * losses[winner] else None


def settle(
    runs: Sequence[CellRun], audit: Audit, seed: int, stopped: Callable[[], bool]
) -> list[tuple[CellRun, AttentionConfig]]:
    """The cells whose winner should be another config, and that; all their lengths are timed as one audit."""
    halves = {run.planned.cell for run in runs}
    planned = [
        (run, rivals, [Plan(key, run.winner[0], "cell", tuple(rivals)) for key in lengths(run, halves, seed)])
        for run in runs
        if run.winner and not run.known and (rivals := candidates(run))
    ]
    found = iter(audit.run([plan for *_, plans in planned for plan in plans], stopped))
    better = []
    for run, rivals, plans in planned:
        own = list(itertools.islice(found, len(plans)))
        if plans and len(own) == len(plans) and (config := best_overall(run, rivals, own)):
            better.append((run, config))
    return better
