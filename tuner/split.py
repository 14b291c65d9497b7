"""Cells that promise too much: a winner is tuned at the upper end of an octave, and may lose at its lower half."""

import random
import statistics
from collections.abc import Sequence

from zyfa.config import AttentionKey, octave_of

from .audit import MAX_REGRET, Finding, fewer_heads
from .plan import PlannedCell, key_of

PROBES = 3  # lengths of the lower half


def odd_lengths(low: int, high: int, seed: int) -> list[int]:
    """PROBES odd lengths, drawn from as many equal parts of those above low up to high; none of fewer than PROBES."""
    draw, step = random.Random(seed), (high - low) / PROBES
    if step < 1:
        return []
    return [draw.randint(round(low + i * step) + 1, round(low + (i + 1) * step)) - 1 | 1 for i in range(PROBES)]


def probes(planned: PlannedCell, seed: int) -> list[AttentionKey]:
    """Odd lengths of the lower half of a cell (a half has none), the last with fewer heads where it has many."""
    key = planned.key
    low, high = key.seqlen_q // 2, 3 * key.seqlen_q // 4
    seqlens = odd_lengths(low, high, seed) if planned.cell == octave_of(planned.cell) else []
    keys = [key._replace(seqlen_q=n, seqlen_k=n + key.seqlen_k * 3 // 4 - high) for n in seqlens]
    return [*keys[:-1], *map(fewer_heads, keys[-1:])]


def promise_broken(found: Sequence[Finding]) -> bool:
    """Whether a cell's winner loses more than MAX_REGRET in the median over its probes, or fails on one."""
    failed = any(each.outcome != "ok" for each in found)
    return failed or (bool(found) and statistics.median(each.regret for each in found) > MAX_REGRET)


def half_of(planned: PlannedCell) -> PlannedCell:
    """The lower half of a cell, as a cell of half the weight."""
    cell = planned.cell
    cell = cell._replace(seqlen_q=3 * cell.seqlen_q // 4, seqlen_k=3 * cell.seqlen_k // 4)
    return PlannedCell(cell, key_of(cell), planned.weight / 2)
