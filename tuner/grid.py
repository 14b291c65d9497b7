"""How the programs of one call meet the units of a GPU: trips of each query block, launch order, makespan."""

import functools
import heapq
import itertools
import math
from collections.abc import Sequence

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.grid_fill import query_blocks

# Up to here, in programs for each slot, the grid is list-scheduled program by program; longer grids are even enough for
# a closed form, which tests hold to 5 % of list scheduling.
GREEDY_ROUNDS = 12


def trips(m: int, key: AttentionKey, config: AttentionConfig) -> tuple[int, int]:
    """(unmasked, masked) loop trips of query block m, as the kernel walks them; a local window is taken as open."""
    hi = full_hi = key.seqlen_k
    if key.causal:
        shift = key.seqlen_k - key.seqlen_q
        group = key.nheads // key.nheads_k if config.pack_gqa else 1  # rows of one query
        hi = min(key.seqlen_k, max(0, min(-(-(m + 1) * config.BLOCK_M // group), key.seqlen_q) + shift))
        full_hi = min(key.seqlen_k, max(0, m * config.BLOCK_M // group + shift + 1))
    full = full_hi // config.BLOCK_N
    return full, max(0, -(-(hi - full * config.BLOCK_N) // config.BLOCK_N))


def shares(full: int, masked: int, splits: int) -> list[tuple[int, int]]:
    """What each of the programs that share these trips takes of them: the masked ones come last."""
    ends = [(full + masked) * i // splits for i in range(splits + 1)]
    return [(min(hi, full) - min(lo, full), max(hi, full) - max(lo, full)) for lo, hi in itertools.pairwise(ends)]


@functools.lru_cache(maxsize=1024)
def all_trips(
    key: AttentionKey, block_m: int, block_n: int, splits: int = 1, pack_gqa: bool = False
) -> tuple[tuple[int, int], ...]:
    """shares() of every query block; kept, because many configs of a call share their tile."""
    config = AttentionConfig(block_m, block_n, 4, 1, pack_gqa=pack_gqa)
    blocks = range(query_blocks(key, config))
    return tuple(part for m in blocks for part in shares(*trips(m, key, config), splits))


def programs_in_order(per_m: Sequence[float], batch_heads: int, config: AttentionConfig) -> list[float]:
    """Costs of all programs in launch order, from the cost of each query block."""
    order = list(reversed(per_m)) if config.longest_first else list(per_m)
    width = config.head_group or batch_heads
    widths = [min(width, batch_heads - first) for first in range(0, batch_heads, width)]
    tiles = [cost for heads in widths for cost in order for _ in range(heads)]
    if not config.xcds:
        return tiles
    each, more = divmod(len(tiles), config.xcds)  # each die starts its own part of the tiles: kernels/rows.py
    starts = [die * each + min(die, more) for die in range(config.xcds)]
    return [tiles[starts[i % config.xcds] + i // config.xcds] for i in range(len(tiles))]


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
