"""The Gluon kernel for gfx950, compiled without a GPU: spills, matrix units, LDS, vector work; and its host side."""

import collections

import numpy as np
import pytest
import torch
import triton
from helpers import lacking, launch_inputs

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels.launch import compile_for, runnable
from zyfa.limits import broken_limit, knows_gluon, lds_bytes
from zyfa.recipes import PRESETS
from zyfa.tuner.compile import _captured_stderr, _target
from zyfa.tuner.facts import Facts, facts_of
from zyfa.tuner.gate import gate, is_matrix

pytestmark = pytest.mark.skipif(not knows_gluon("gfx950"), reason="this Triton has no Gluon for gfx950")

BF16, FP8, INT8 = "v_mfma_f32_32x32x16_bf16", "v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_i32_32x32x32_i8"
# 256 rows and 128 keys: Triton 3.6 spills 6 to 10 registers in FP8 at head dim 128; 3.8 and later give two waves a SIMD
# 128 registers of each kind and spill 28 to 92 there, 1 or 2 at head dim 64, 4 with BF16 Q and K and 64 keys.
WIDE = pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="spills here, and the gate discards it")
# recipe, head_dim, causal, (waves, keys, stages), matrix instructions
BUILDS = [
    ("none", 128, True, (8, 64, 2), {BF16}),
    ("none", 128, False, (4, 64, 3), {BF16}),
    ("none", 128, True, (4, 128, 2), {BF16}),
    pytest.param("none", 64, True, (8, 128, 2), {BF16}, marks=WIDE),
    ("none", 96, True, (4, 64, 2), {BF16}),
    pytest.param("tensor", 128, True, (8, 128, 2), {FP8}, marks=WIDE),
    ("block", 128, False, (4, 64, 2), {FP8}),
    pytest.param("block", 64, True, (8, 128, 2), {FP8}, marks=WIDE),
    pytest.param(PRESETS["balanced"], 128, True, (8, 128, 2), {INT8, FP8}, marks=WIDE),
    pytest.param("bf16qk", 128, True, (8, 64, 2), {BF16, FP8}, marks=WIDE),
    ("bf16qk", 64, False, (4, 128, 2), {BF16, FP8}),
]


def key(recipe, head_dim, causal):
    dtype = "bf16" if recipe == "none" else "fp8"
    return AttentionKey(dtype, head_dim, head_dim, 32, 8, 1, 4096, 4096, causal)


def config(recipe="none", shape=(4, 64, 2), **change):
    waves, keys, stages = shape
    return AttentionConfig(32 * waves, keys, waves, stages, recipe=recipe, variant="gluon", **change)


def compiled(at: AttentionKey, with_config: AttentionConfig) -> Facts:
    with _target("gfx950"), _captured_stderr():
        return facts_of(compile_for(at, with_config, "gfx950"), "gfx950")


def vector_slots(facts: Facts) -> int:
    """Slots of the vector pipe for one trip of the loop without masks; an exponential takes two."""
    kinds = {"valu": 1, "pk": 1, "cvt": 1, "agpr": 1, "trans": 2, "xlane": 2}
    return min(sum(slots * loop.mix.get(kind, 0) for kind, slots in kinds.items()) for loop in facts.loops)


@pytest.mark.parametrize("recipe, head_dim, causal, shape, matrix", BUILDS)
def test_full_rate_products_p_in_registers_nothing_spilled(recipe, head_dim, causal, shape, matrix):
    at, tile = key(recipe, head_dim, causal), config(recipe, shape)
    assert broken_limit(tile, at, "gfx950") is None
    facts = compiled(at, tile)
    assert gate(facts, at, tile, "gfx950") is None
    assert (facts.spills, facts.scratch_bytes, facts.scratch_in_loops) == (0, 0, 0)
    assert lds_bytes(tile, at, "gfx950") == facts.lds_bytes
    for loop in facts.loops:
        mix = collections.Counter(loop.mix)
        assert {op for op in mix if is_matrix(op)} == matrix
        # Only row maxima cross lanes, only the copies write LDS; one barrier, for the tiles of K and V.
        assert (mix["xlane"], mix["ds_write"], mix["barrier"]) == (1, 0, 1)
        assert mix["ds_tr"] and mix["vmem_lds"] and mix["vmem"] <= 2  # scales of blocks


@pytest.mark.parametrize("recipe, head_dim", [("none", 64), ("tensor", 64), ("tensor", 128), (PRESETS["balanced"], 64)])
def test_fewer_vector_slots_than_the_plain_kernel_with_the_same_tile(recipe, head_dim):
    at, tile = key(recipe, head_dim, True), config(recipe, (4, 64, 2))
    plain = default_config("gfx950", at)
    assert (plain.BLOCK_M, plain.BLOCK_N, plain.num_warps) == (tile.BLOCK_M, tile.BLOCK_N, tile.num_warps)
    plain = AttentionConfig(**{**plain.to_dict(), "recipe": recipe})
    assert vector_slots(compiled(at, tile)) < 0.94 * vector_slots(compiled(at, plain))


# --- rows in LDS -----------------------------------------------------------------------------------------------------


def address(layout, row: int, column: int, size: int) -> int:
    """The byte where a layout puts an element."""
    at = 0
    for bit, (key_bit, column_bit) in enumerate(layout.offset_bases):
        at |= bool(row & key_bit or column & column_bit) << bit
    ((interval, padding),) = layout.interval_padding_pairs
    return (at + at // interval * padding) * size


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("size", [1, 2])
def test_no_two_lanes_of_a_read_share_a_bank(rows, width, size):
    from zyfa.kernels.gluon_lds import _smem_layout, tile
    from zyfa.limits import LDS_PAD_K, LDS_PAD_V

    def banks(pad, first, keys, bytes_of_each):
        layout = _smem_layout.fn(tile(rows, width, width, size, pad, 4), True)  # 3.6 would unpack the Tile
        starts = [address(layout, first + n, 0, size) for n in range(keys)]
        return [(start + 4 * word) // 4 % 64 for start in starts for word in range(bytes_of_each // 4)]

    for first in range(0, rows, 16):  # K: 16 bytes of 16 keys
        assert sorted(banks(LDS_PAD_K, first, 16, 16)) == list(range(64))
    keys, taken = (4, 64) if size == 2 else (8, 32)
    for first in range(0, rows, keys):  # V: 64 bytes of 4 keys, or 32 bytes of 8
        assert sorted(banks(LDS_PAD_V[size], first, keys, taken)) == list(range(64))


@pytest.mark.parametrize("width, size", [(64, 1), (128, 2)])
def test_a_tile_lies_in_lds_once(width, size):
    from zyfa.kernels.gluon_lds import _smem_layout, tile

    t = tile(64, width, width, size, 32, 4)
    by_key, in_order = ([address(_smem_layout.fn(t, which), n, 0, size) for n in range(64)] for which in (True, False))
    assert sorted(by_key) == in_order == sorted(in_order) and by_key != in_order
    # What the copies compute: the key of each row in memory.
    n = np.arange(64)
    chunk = n // t.IN_CHUNK
    keys = chunk % t.DEALT + n % t.IN_CHUNK * t.DEALT + chunk // t.DEALT * (t.DEALT * t.IN_CHUNK)
    assert [by_key[k] for k in keys] == in_order


# --- what runs it ----------------------------------------------------------------------------------------------------

EIGHT = {"BLOCK_M": 256, "BLOCK_N": 128, "num_warps": 8}
LIMIT = "the gluon variant runs this tile, recipe and head dim, and its options are its own"


@pytest.mark.parametrize(
    "recipe, head_dim, change, reason",
    [
        ("none", 128, {}, None), ("none", 72, {}, None), ("none", 100, {}, LIMIT), ("none", 32, {}, LIMIT),
        ("none", 256, {}, LIMIT), ("none", 128, {"BLOCK_N": 128}, None), ("none", 128, EIGHT, LIMIT),
        ("none", 64, EIGHT, None),
        ("none", 64, {"BLOCK_N": 32}, LIMIT), ("none", 128, {"num_stages": 1}, LIMIT),
        ("none", 128, {"BLOCK_M": 64}, LIMIT), ("none", 128, {"BLOCK_M": 32, "num_warps": 1}, LIMIT),
        ("none", 128, {"waves_per_eu": 2}, None), ("none", 128, {"async_copy": 1}, LIMIT),
        ("none", 128, {"matrix_instr_nonkdim": 16}, LIMIT), ("none", 128, {"ping_pong": True}, LIMIT),
        ("tensor", 100, {"BLOCK_N": 128}, None), ("bf16qk", 128, EIGHT, LIMIT),
        ("bf16qk", 100, {}, LIMIT), ("int8-kmean", 128, {}, None), ("row", 128, {}, LIMIT), ("mx", 128, {}, LIMIT),
        ("block-kmean-qmean", 128, {}, LIMIT), (f"{PRESETS['balanced']}-vchannel", 128, {}, LIMIT),
        ("none", 128, {"num_stages": 5}, "K and V tiles fit in shared memory"),
    ],
    ids=str,
)  # fmt: skip
def test_limits(recipe, head_dim, change, reason):
    assert (
        broken_limit(AttentionConfig(**{**config(recipe).to_dict(), **change}), key(recipe, head_dim, True), "gfx950")
        == reason
    )


def test_gfx942_has_no_gluon_kernel():
    assert broken_limit(config(), key("none", 128, True), "gfx942") == LIMIT


def test_calls_that_it_covers_keep_its_config():
    packed = torch.empty(512, 3 * 8 * 64, dtype=torch.bfloat16)[None, :, : 8 * 64].unflatten(-1, (8, 64))
    shared = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16).expand(1, 512, 8, 64)
    for x in (None, packed, shared, torch.empty(1, 8, 512, 64, dtype=torch.bfloat16).transpose(1, 2)):
        assert runnable(config(), "gfx950", launch_inputs(x), 0.0) == config()


@lacking(**{"strided rows": torch.empty(1, 512, 64, 8, dtype=torch.bfloat16).transpose(2, 3)})
def test_calls_that_it_lacks_run_the_plain_kernel(lacks, softcap):
    got = runnable(config(), "gfx950", lacks, softcap)
    assert got == default_config("gfx950", key("none", 64, True))
