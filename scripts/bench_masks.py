"""Does time follow the unmasked area? Full, causal and sliding windows at one length, side by side in one run.

    .venv/bin/python scripts/bench_masks.py --seqlen 16384 --windows 1024,4096

For each mask: us, the share of (query, key) pairs that are visible, the share of key tiles that the kernel visits (the
least that any kernel with these tiles must), the time as a share of full attention, and time share / tile share: 1.0
is time that follows the tiles, above it lies what a tile with a mask and the start of a row block cost. Needs a GPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

import zyfa
from zyfa.config import AttentionConfig
from zyfa.tuner.timing import GraphSampler, paired

Window = tuple[int, int]  # left, right; -1 is unlimited
ROUNDS = 15


class Mask(NamedTuple):
    name: str
    window: Window


class Row(NamedTuple):
    """One mask: shares are of full attention, work is time_share / tile_share."""

    name: str
    config: AttentionConfig
    us: float
    pair_share: float
    tile_share: float
    time_share: float

    @property
    def work(self) -> float:
        return self.time_share / self.tile_share


def visible_ranges(m: int, seqlen_q: int, seqlen_k: int, window: Window, BLOCK_M: int, BLOCK_N: int):
    """(lo, full_lo, full_hi, hi) of query block m: attn_fwd._visible in Python."""
    left, right = window
    first = m * BLOCK_M + seqlen_k - seqlen_q
    last = min((m + 1) * BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
    lo = full_lo = 0
    hi, full_hi = seqlen_k, seqlen_k // BLOCK_N * BLOCK_N
    if left >= 0:
        lo = max(first - left, 0) // BLOCK_N * BLOCK_N
        full_lo = -(-max(last - left, 0) // BLOCK_N) * BLOCK_N
    if right >= 0:
        hi = min(seqlen_k, max(last + right + 1, 0))
        full_hi = min(seqlen_k, max(first + right + 1, 0)) // BLOCK_N * BLOCK_N
    return lo, full_lo, full_hi, hi


def tiles(
    m: int, seqlen_q: int, seqlen_k: int, window: Window, BLOCK_M: int, BLOCK_N: int
) -> Iterator[tuple[int, bool]]:
    """(first key, has a mask) of every tile that query block m visits, in the kernel's order."""
    lo, full_lo, full_hi, hi = visible_ranges(m, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N)
    if window[0] >= 0:
        yield from ((n, True) for n in range(lo, min(full_lo, hi), BLOCK_N))
    yield from ((n, False) for n in range(full_lo, full_hi, BLOCK_N))
    yield from ((n, True) for n in range(max(full_lo, full_hi), hi, BLOCK_N))


def tile_count(seqlen_q: int, seqlen_k: int, window: Window, BLOCK_M: int, BLOCK_N: int) -> int:
    """Tiles of one head."""
    blocks = range(-(-seqlen_q // BLOCK_M))
    return sum(1 for m in blocks for _ in tiles(m, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N))


def pair_count(seqlen_q: int, seqlen_k: int, window: Window) -> int:
    """Visible (query, key) pairs of one head."""
    left, right = window
    positions = range(seqlen_k - seqlen_q, seqlen_k)
    first = (max(p - left, 0) if left >= 0 else 0 for p in positions)
    last = (min(p + right, seqlen_k - 1) if right >= 0 else seqlen_k - 1 for p in positions)
    return sum(max(b - a + 1, 0) for a, b in zip(first, last, strict=True))


def masks_of(windows: Sequence[int]) -> list[Mask]:
    """Full, causal, and causal with each window; a window of w keys is left = w - 1."""
    return [Mask("full", (-1, -1)), Mask("causal", (-1, 0)), *(Mask(f"window {w}", (w - 1, 0)) for w in windows)]


def rows_of(masks: Sequence[Mask], config: AttentionConfig, ms: Sequence[float], seqlen: int) -> list[Row]:
    """Shares from times; the first mask is the full one."""
    tiles = [tile_count(seqlen, seqlen, mask.window, config.BLOCK_M, config.BLOCK_N) for mask in masks]
    rows = []
    for mask, count, time in zip(masks, tiles, ms, strict=True):
        pairs = pair_count(seqlen, seqlen, mask.window) / seqlen**2
        rows.append(Row(mask.name, config, time * 1e3, pairs, count / tiles[0], time / ms[0]))
    return rows


def measure(masks: Sequence[Mask], seqlen: int, precision: str, heads: tuple[int, int], head_dim: int) -> list[Row]:
    """Times every mask on one GPU, interleaved, with the config of the causal mask: what differs is the mask alone."""
    q, k, v = (
        torch.randn(1, seqlen, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (heads[0], *heads[1:] * 2)
    )
    config = zyfa.explain(q, k, v, causal=True, precision=precision).config
    assert config is not None, "a call on a GPU has a config"
    precision = "bf16" if config.recipe == "none" else precision  # where FP8 was timed to be no faster
    launches = []
    for mask in masks:
        same = {"causal": mask.window[1] == 0, "window_size": mask.window, "precision": precision, "config": config}
        launches.append(lambda same=same: zyfa.attention(q, k, v, **same))
    for launch in launches:
        launch()  # a capture can neither compile nor load code
    timings = paired([GraphSampler([launch] * 4) for launch in launches], ROUNDS)
    return rows_of(masks, config, [t.ms for t in timings], seqlen)


def print_rows(rows: Sequence[Row], title: str) -> None:
    print(f"{title}\n{'mask':<14}{'us':>9}{'pairs':>8}{'tiles':>8}{'time':>8}{'time/tiles':>12}  config")
    for row in rows:
        shares = f"{row.pair_share:>8.1%}{row.tile_share:>8.1%}{row.time_share:>8.1%}{row.work:>12.2f}"
        print(f"{row.name:<14}{row.us:>9.1f}{shares}  {row.config}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--windows", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 4096])
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["bf16", "fp8"])
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU that torch can use, and there is none")
    for precision in options.precisions:
        rows = measure(masks_of(options.windows), options.seqlen, precision, (32, 8), options.head_dim)
        print_rows(rows, f"{precision}, seqlen {options.seqlen}, heads 32:8, D{options.head_dim}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
