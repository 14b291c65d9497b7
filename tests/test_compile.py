"""Compiling without the GPU: every architecture, failures as results, equal jobs, and workers that die."""

import dataclasses
import os

import pytest

from zyfa.archs import plain_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuner.compile import CompileFarm, compile_config, pin_environment, specialisation
from zyfa.tuner.gate import gate, is_matrix


def key(dtype="bf16", seqlen=4096, causal=True, nheads=32, nheads_k=8, batch=1):
    return AttentionKey(dtype, 128, 128, nheads, nheads_k, batch, seqlen, seqlen, causal)


BF16, FP8 = AttentionConfig(128, 64, 4, 2), AttentionConfig(128, 64, 4, 2, recipe="block")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    """No build from an earlier run; the variables that pin_environment sets are put back."""
    for name in ("TRITON_DEFAULT_FP_FUSION", "TRITON_DISABLE_LINE_INFO"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize(
    "arch, dtype, matrix",
    [
        ("gfx950", "bf16", "v_mfma_f32_32x32x16_bf16"),
        ("gfx950", "fp8", ("v_mfma_f32_32x32x64_f8f6f4", "v_mfma_i32_32x32x32_i8")),
        ("gfx942", "bf16", "v_mfma_f32_32x32x8_bf16"),
        ("gfx942", "fp8", ("v_mfma_f32_32x32x16_fp8_fp8", "v_mfma_i32_32x32x16_i8")),
        ("sm90", "bf16", "HGMMA.64x"),
        ("sm90", "fp8", ("QGMMA.64x", "IGMMA.64x")),
    ],
)
def test_plain_configs_compile_without_spills_or_half_rate(arch, dtype, matrix):
    config = plain_config(arch, key(dtype))
    build = compile_config(key(dtype), config, arch)
    assert build.failure is None
    assert len(build.facts.loops) == 2  # without and with masks
    kinds = {kind for loop in build.facts.loops for kind in loop.mix if is_matrix(kind)}
    assert kinds and all(kind.startswith(matrix) for kind in kinds)
    assert gate(build.facts, key(dtype), config, arch) is None
    assert build.facts.scratch_bytes == 0
    assert build.seconds > 0


def test_a_compiler_error_is_a_result_and_stays_off_the_terminal(capfd):
    build = compile_config(key("fp8"), dataclasses.replace(FP8, num_stages=4, async_copy=1), "gfx950")
    assert build.facts is None
    assert build.failure == "RuntimeError: PassManager::run failed"
    assert capfd.readouterr().err == ""


def test_equal_jobs_have_equal_code_and_other_jobs_do_not():
    same = [key(), key(seqlen=512), key(nheads=8, nheads_k=8, batch=3)]
    assert len({specialisation(k, BF16, "gfx950") for k in same}) == 1
    assert len({compile_config(k, BF16, "gfx950").facts.code_hash for k in same}) == 1
    pipelined = dataclasses.replace(BF16, async_copy=1)
    assert specialisation(key(), pipelined, "gfx950") != specialisation(key(), BF16, "gfx950")
    assert compile_config(key(), pipelined, "gfx950").facts.loops[0].mix["vmem_lds"] > 0


@pytest.mark.parametrize(
    "other_key, other_config, same",
    [
        (key(seqlen=1000), BF16, True),  # the kernel does not specialise on lengths, the strides divide by 16 still
        (key(causal=False), BF16, False),
        (key()._replace(head_dim_v=64), BF16, False),
        (key()._replace(head_dim=72), BF16, False),
        (key(seqlen=65536, batch=8), BF16, False),  # Q passes 2 GiB: other addressing on AMD
        (key()._replace(window_class="local"), BF16, False),
        (key(), dataclasses.replace(BF16, head_group=8), False),
        (key(), dataclasses.replace(BF16, waves_per_eu=2), False),
        (key(), dataclasses.replace(BF16, splits=2), False),
        (key(), dataclasses.replace(BF16, pack_gqa=True), False),
        (key(), dataclasses.replace(BF16, xcds=8), False),
    ],
)
def test_specialisation(other_key, other_config, same):
    assert (specialisation(other_key, other_config, "gfx950") == specialisation(key(), BF16, "gfx950")) is same


def test_specialisation_of_groups_and_recipes():
    def of(**change):
        return specialisation(key("fp8"), dataclasses.replace(FP8, **change), "sm90")

    assert of(splits=2) == of(splits=8)
    assert of(head_group=1) == of(head_group=8) != of()
    assert of(recipe="block-kmean-hadamard") == of()
    assert len({of(recipe=recipe) for recipe in ("block", "head", "tensor", "int8-kmean", "block-kmean-qmean")}) == 5


def test_knobs_outside_tritons_cache_key_choose_the_directory(monkeypatch, tmp_path):
    pin_environment()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    monkeypatch.setenv("AMDGCN_SCALARIZE_PACKED_FOPS", "1")
    pin_environment()
    first = os.environ["TRITON_CACHE_DIR"]
    pin_environment()
    assert os.environ["TRITON_CACHE_DIR"] == first != str(tmp_path / "triton")


def test_farm_shares_equal_jobs_and_survives_a_killed_worker():
    with CompileFarm("gfx950", processes=1) as farm:
        one = farm.submit(key(), BF16)
        assert farm.submit(key(seqlen=512), BF16) is one
        assert one.result().facts.arch == "gfx950"
        lost = farm.submit(key("fp8"), FP8)
        while not lost.running():
            pass
        farm._workers[0].process.kill()
        assert "crashed" in lost.result().failure
        assert farm.submit(key(causal=False), BF16).result().failure is None
        assert len(farm._workers) == 2


def test_farm_ends_a_job_that_takes_too_long():
    with CompileFarm("gfx950", processes=1, timeout_s=0.01) as farm:
        build = farm.submit(key(), BF16).result()
    assert (build.facts, build.failure) == (None, "compiler ran past 0.01 s")


def test_farm_tells_head_groups_apart_when_asked_to():
    grouped = [dataclasses.replace(BF16, head_group=group) for group in (1, 8)]
    farm = CompileFarm("gfx950", processes=1, timeout_s=0.01, share_head_groups=False)
    with farm:
        assert farm.submit(key(), grouped[0]) is not farm.submit(key(), grouped[1])
