"""The static gate: one kind of reason at a time."""

import dataclasses

import pytest

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuner.facts import Facts, Loop
from zyfa.tuner.gate import gate


def key(dtype="bf16", head_dim=128):
    return AttentionKey(dtype, head_dim, head_dim, 32, 8, 1, 4096, 4096, True)


def facts(arch, *matrix, **changes):
    loops = tuple(Loop({op: 8, "valu": 100}, 0, 0) for op in matrix)
    base = Facts(arch, 128, 0, 0, 0, 32768, 2, 2.0, 5000, "hash", loops)
    return dataclasses.replace(base, **changes)


BF16, FP8 = AttentionConfig(128, 64, 4, 2), AttentionConfig(128, 64, 4, 2, recipe="block")
FULL = {
    "gfx950": "v_mfma_f32_32x32x64_f8f6f4",
    "gfx942": "v_mfma_f32_32x32x16_fp8_fp8",
    "sm90": "QGMMA.64x64x32.F32.E4M3.E4M3",
}


@pytest.mark.parametrize("arch", FULL)
def test_clean_code_passes(arch):
    assert gate(facts(arch, FULL[arch]), key("fp8"), FP8, arch) is None
    assert gate(facts(arch, "v_mfma_f32_32x32x16_bf16"), key(), BF16, arch) is None


@pytest.mark.parametrize(
    "arch, changes, reason",
    [
        ("gfx950", {"scratch_bytes": 4}, "spills: 0 registers, 4 B of scratch"),
        ("gfx950", {"spills": 2}, "spills: 2 registers, 0 B of scratch"),
        ("sm90", {"scratch_bytes": 257, "spills": 60}, "spills: 60 registers, 257 B of scratch"),
        ("sm90", {"scratch_bytes": 208, "spills": 53}, None),  # the best measured BF16 tile of one H200 has this
        ("sm90", {"loops": (Loop({"scratch": 65}, 0, 0),)}, "spills in the loop: 65 accesses a trip"),
        ("sm90", {"loops": (Loop({"scratch": 64}, 0, 0),)}, None),
        ("gfx950", {"loops": (Loop({"scratch": 1}, 0, 0),)}, "spills in the loop: 1 accesses a trip"),
        ("gfx950", {"lds_bytes": 163841}, "lds: 163841 B of 163840 B"),
        ("gfx942", {"lds_bytes": 65537}, "lds: 65537 B of 65536 B"),
        ("sm90", {"lds_bytes": 232448}, None),
        ("gfx950", {"workgroups_per_unit": 0}, "occupancy: no workgroup of 4 waves with 128 registers fits"),
    ],
)
def test_each_kind_of_reason(arch, changes, reason):
    assert gate(facts(arch, FULL[arch], **changes), key(), BF16, arch) == reason


@pytest.mark.parametrize(
    "arch, slow",
    [
        ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8"),
        ("gfx950", "v_mfma_f32_32x32x16_bf16"),
        ("gfx942", "v_mfma_f32_32x32x8_f16"),
        ("sm90", "HGMMA.64x64x16.F32"),
    ],
)
def test_fp8_loops_must_run_at_the_fp8_rate(arch, slow):
    mixed = facts(arch, FULL[arch], slow)
    assert gate(mixed, key("fp8"), FP8, arch) == f"half-rate matrix: {slow}"
    assert gate(mixed, key("bf16"), BF16, arch) is None


@pytest.mark.parametrize(
    "arch, recipe, other, reason",
    [
        ("gfx950", "int8-kmean", "v_mfma_i32_32x32x32_i8", None),
        ("gfx950", "int8-kmean", "v_mfma_i32_32x32x16_i8", "half-rate matrix: v_mfma_i32_32x32x16_i8"),
        ("gfx942", "int8-kmean", "v_mfma_i32_32x32x16_i8", None),
        ("sm90", "int8-kmean", "IGMMA.64x128x32.S8.S8", None),
        ("gfx950", "bf16qk", "v_mfma_f32_32x32x16_bf16", None),
        ("gfx950", "bf16qk", "v_mfma_f32_32x32x8_bf16", "half-rate matrix: v_mfma_f32_32x32x8_bf16"),
        ("sm90", "bf16qk", "HGMMA.64x128x16.F32.BF16", None),
    ],
)
def test_mixed_recipes_are_held_to_the_rate_of_each_operand_type(arch, recipe, other, reason):
    config = dataclasses.replace(FP8, recipe=recipe)
    assert gate(facts(arch, FULL[arch], other), key("fp8"), config, arch) == reason


def test_narrow_heads_cannot_reach_the_double_rate_and_are_kept():
    slow = facts("gfx950", "v_mfma_f32_32x32x16_fp8_fp8")
    assert gate(slow, key("fp8", 32), FP8, "gfx950") is None
    assert gate(slow, key("fp8", 64), FP8, "gfx950") is not None
