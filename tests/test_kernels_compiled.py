"""The machine code of the default configs on every architecture, compiled here without a GPU."""

import dataclasses
import itertools

import pytest

from zyfa.archs import ARCHS, default_config, plain_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.recipes import PRESETS, RECIPES
from zyfa.tuner.compile import CompileFarm, compile_config
from zyfa.tuner.gate import gate, is_matrix

# What each architecture multiplies with: 16-bit QK and PV, 8-bit integer QK, FP8 PV.
UNITS = {
    "gfx950": ("v_mfma_f32_32x32x16_bf16", "v_mfma_i32_32x32x32_i8", "f8f6f4"),
    "gfx942": ("v_mfma_f32_32x32x8_bf16", "v_mfma_i32_32x32x16_i8", "fp8_fp8"),
    "sm90": ("HGMMA", "IGMMA", "QGMMA"),
}
CASES = list(itertools.product(ARCHS, ("bf16", "fp8"), (64, 128, 256), (False, True)))


def key_of(dtype, head_dim, causal):
    return AttentionKey(dtype, head_dim, head_dim, 32, 8, 1, 4096, 4096, causal)


@pytest.fixture(scope="module")
def farms():
    open_farms = {arch: CompileFarm(arch, 1) for arch in ARCHS}
    for arch, *key in CASES:  # all at once: the farms compile side by side while the first test waits
        open_farms[arch].submit(key_of(*key), default_config(arch, key_of(*key)))
    yield open_farms
    for farm in open_farms.values():
        farm.close()


def build(farms, arch, key, config):
    result = farms[arch].submit(key, config).result()
    assert result.failure is None, result.failure
    return result.facts


@pytest.mark.parametrize("arch, dtype, head_dim, causal", CASES)
def test_default_config_is_clean_machine_code(farms, arch, dtype, head_dim, causal):
    key = key_of(dtype, head_dim, causal)
    config = default_config(arch, key)
    facts = build(farms, arch, key, config)
    assert gate(facts, key, config, arch) is None
    assert facts.registers <= ARCHS[arch].max_registers
    assert 0 < facts.lds_bytes <= ARCHS[arch].lds_bytes
    if arch != "sm90":  # ptxas keeps up to 208 bytes of stack in tiles that are the fastest all the same
        assert facts.spills == 0 and facts.scratch_bytes == 0
    used = {op for loop in facts.loops for op in loop.mix}
    half, integer, fp8 = UNITS[arch]
    wanted = {"bf16": {half}, "fp8": {integer, fp8}}[dtype]
    assert all(any(unit in op for op in used) for unit in wanted), used


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_use_the_full_rate(farms, arch, preset):
    key = key_of("fp8", 128, True)
    config = dataclasses.replace(default_config(arch, key), recipe=PRESETS[preset])
    assert gate(build(farms, arch, key, config), key, config, arch) is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_uses_the_full_rate_of_gfx950_without_spills(farms, recipe):
    key = key_of("fp8", 128, True)
    config = dataclasses.replace(default_config("gfx950", key), recipe=recipe)
    facts = build(farms, "gfx950", key, config)
    assert gate(facts, key, config, "gfx950") is None and facts.spills == 0
    scaled = any("v_mfma_scale_f32_32x32x64_f8f6f4" in op for loop in facts.loops for op in loop.mix)
    assert scaled == (RECIPES[recipe].granularity == "mx")


def test_shared_memory_overflow_compiles_but_is_gated(farms):
    """Triton does not mind 204 KB of LDS; we must."""
    key = key_of("bf16", 128, False)
    config = AttentionConfig(128, 128, 4, 3, async_copy=1)
    facts = build(farms, "gfx950", key, config)
    assert facts.lds_bytes > ARCHS["gfx950"].lds_bytes
    assert "lds" in gate(facts, key, config, "gfx950")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("fill", [{"splits": 4}, {"pack_gqa": True}, {"splits": 4, "pack_gqa": True}], ids="-".join)
def test_small_grids_keep_the_loop(farms, arch, dtype, fill):
    """Which keys and rows a program has is decided before the loop: what it multiplies in a trip is the same."""
    key = key_of(dtype, 128, True)
    config = plain_config(arch, key)
    plain, small = (build(farms, arch, key, c) for c in (config, dataclasses.replace(config, **fill)))
    assert gate(small, key, dataclasses.replace(config, **fill), arch) is None
    assert small.code_hash != plain.code_hash
    assert small.registers <= ARCHS[arch].max_registers
    assert small.scratch_bytes <= (16 if arch == "sm90" else 0)  # both in FP8 on Hopper: 16 bytes, outside the loop
    assert small.scratch_in_loops == plain.scratch_in_loops == 0
    products = [sum(n for op, n in loop.mix.items() if is_matrix(op)) for f in (plain, small) for loop in f.loops]
    assert len(set(products)) == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_any_number_of_splits_has_one_loop(arch):
    key = key_of("bf16", 128, True)
    two, eight = (
        compile_config(key, dataclasses.replace(default_config(arch, key), splits=n), arch).facts for n in (2, 8)
    )
    assert (two.loops, two.registers, two.lds_bytes) == (eight.loops, eight.registers, eight.lds_bytes)


def test_dies_change_the_grid_and_not_the_loop(farms):
    key = key_of("bf16", 128, True)
    config = dataclasses.replace(default_config("gfx950", key), head_group=4)
    plain, dies = (build(farms, "gfx950", key, c) for c in (config, dataclasses.replace(config, xcds=8)))
    assert plain.code_hash != dies.code_hash and plain.loops == dies.loops
