"""How the programs of one call meet the units of a GPU: trips of each query block, launch order, makespan."""

import functools
import heapq
import math
from collections.abc import Sequence

from zyfa.config import AttentionConfig, AttentionKey

# Up to here, in programs for each slot, the grid is list-scheduled program by program; longer grids are even enough for
# a closed form, which tests hold to 5 % of list scheduling.
GREEDY_ROUNDS = 12


def trips(m: int, key: AttentionKey, config: AttentionConfig) -> tuple[int, int]:
    """(unmasked, masked) loop trips of query block m, as the kernel walks them; a local window is taken as open."""
    hi = full_hi = key.seqlen_k
    if key.causal:
        shift = key.seqlen_k - key.seqlen_q
        hi = min(key.seqlen_k, max(0, min((m + 1) * config.BLOCK_M, key.seqlen_q) + shift))
        full_hi = min(key.seqlen_k, max(0, m * config.BLOCK_M + shift + 1))
    full = full_hi // config.BLOCK_N
    return full, max(0, -(-(hi - full * config.BLOCK_N) // config.BLOCK_N))


@functools.lru_cache(maxsize=1024)
def all_trips(key: AttentionKey, block_m: int, block_n: int) -> tuple[tuple[int, int], ...]:
    """trips() of every query block; kept, because many configs of a call share their tile."""
    config = AttentionConfig(block_m, block_n, 4, 1)
    return tuple(trips(m, key, config) for m in range(-(-key.seqlen_q // block_m)))


def programs_in_order(per_m: Sequence[float], batch_heads: int, config: AttentionConfig) -> list[float]:
    """Costs of all programs in launch order, from the cost of each query block."""
    order = list(reversed(per_m)) if config.longest_first else list(per_m)
    width = config.head_group or batch_heads
    widths = [min(width, batch_heads - first) for first in range(0, batch_heads, width)]
    return [cost for heads in widths for cost in order for _ in range(heads)]


def makespan(costs: Sequence[float], slots: int) -> float:
    """Time until all are done when each starts, in order, on the slot that is free first."""
    busy = list(costs[:slots])
    heapq.heapify(busy)
    for cost in costs[slots:]:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy, default=0.0)


def grid_time(per_m: Sequence[float], batch_heads: int, slots: int, config: AttentionConfig) -> float:
    """makespan of the whole grid; of grids beyond GREEDY_ROUNDS the mean load plus half of the last program."""
    programs = len(per_m) * batch_heads
    longest = max(per_m)
    if longest == min(per_m):
        return math.ceil(programs / slots) * longest
    if programs <= GREEDY_ROUNDS * slots:
        return makespan(programs_in_order(per_m, batch_heads, config), slots)
    last = per_m[0] if config.longest_first else per_m[-1]
    return max(longest, sum(per_m) * batch_heads / slots + last / 2)
