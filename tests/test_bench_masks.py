"""The arithmetic of scripts/bench_masks.py: tiles visited are exactly the tiles that hold a visible key."""

import runpy
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from zyfa.config import AttentionConfig
from zyfa.kernels.attn_fwd import _visible
from zyfa.reference import visible

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_masks.py"
bench = runpy.run_path(str(SCRIPT))

LENGTHS = st.integers(1, 200)
WINDOWS = st.tuples(st.integers(-1, 220), st.integers(-1, 220))
BLOCKS = st.tuples(st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))


def keep_of(seqlen_q, seqlen_k, window):
    return visible(torch.arange(seqlen_q), torch.arange(seqlen_k), seqlen_q, seqlen_k, False, window)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(LENGTHS, LENGTHS, WINDOWS, BLOCKS)
def test_tiles_visited_are_the_tiles_with_a_visible_key(seqlen_q, seqlen_k, window, blocks):
    """Rounded to whole tiles that start at multiples of BLOCK_N; one without a mask is seen whole by its rows."""
    BLOCK_M, BLOCK_N = blocks
    keep = keep_of(seqlen_q, seqlen_k, window)
    for m in range(-(-seqlen_q // BLOCK_M)):
        rows = keep[m * BLOCK_M : (m + 1) * BLOCK_M]
        got = list(bench["tiles"](m, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N))
        want = [n for n in range(0, seqlen_k, BLOCK_N) if rows[:, n : n + BLOCK_N].any()]
        assert [n for n, _ in got] == want
        for n, masked in got:
            assert masked or (n + BLOCK_N <= seqlen_k and rows[:, n : n + BLOCK_N].all())
    assert bench["pair_count"](seqlen_q, seqlen_k, window) == int(keep.sum())


@triton.jit
def ranges_kernel(
    out, m, seqlen_q, seqlen_k, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    lo, full_lo, full_hi, hi = _visible(m, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
    tl.store(out, lo)
    tl.store(out + 1, full_lo)
    tl.store(out + 2, full_hi)
    tl.store(out + 3, hi)


def ranges_of_the_kernel(calls):
    out = torch.zeros(len(calls), 4, dtype=torch.int32)
    for row, (m, seqlen_q, seqlen_k, (left, right), BLOCK_M, BLOCK_N) in zip(out, calls, strict=True):
        ranges_kernel[(1,)](row, m, seqlen_q, seqlen_k, left, right, left >= 0, right >= 0, BLOCK_M, BLOCK_N)
    return out.tolist()


def test_the_script_counts_what_the_kernel_visits(interpret):
    calls = [
        (m, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N)
        for seqlen_q, seqlen_k in ((100, 100), (1, 77), (130, 40), (40, 130))
        for window in ((-1, -1), (-1, 0), (0, 0), (30, 0), (5, 40), (200, 200))
        for BLOCK_M, BLOCK_N in ((64, 32), (16, 64))
        for m in range(-(-seqlen_q // BLOCK_M))
    ]
    assert interpret(ranges_of_the_kernel, calls) == [list(bench["visible_ranges"](*call)) for call in calls]


def test_shares_of_the_benchmark():
    """At 16k: causal is half of the pairs, a window of 1k is 6.05 %, and tiles are a little more."""
    masks = bench["masks_of"]([1024])
    rows = bench["rows_of"](masks, AttentionConfig(128, 64, 4, 2), [8.0, 4.4, 0.6], 16384)
    assert [row.name for row in rows] == ["full", "causal", "window 1024"]
    assert rows[1].pair_share == pytest.approx((16384 + 1) / 2 / 16384)
    assert rows[2].pair_share == pytest.approx((1024 * 16384 - 1024 * 1023 / 2) / 16384**2)
    assert rows[0].tile_share == 1.0
    assert rows[1].tile_share == pytest.approx(sum(2 * (m + 1) for m in range(128)) / (128 * 256))
    assert rows[2].time_share == pytest.approx(0.075) and rows[1].us == pytest.approx(4400)
    assert all(row.tile_share >= row.pair_share for row in rows)
    assert rows[1].work == pytest.approx(0.55 / rows[1].tile_share)


def test_without_a_gpu_the_script_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench["main"]([])
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_runs_on_a_gpu(capsys):
    assert bench["main"](["--seqlen", "2048", "--windows", "256"]) == 0
    assert "window 256" in capsys.readouterr().out
