"""Hard limits: the LDS estimate against compiled kernels, and each limit with a config that breaks exactly it."""

import dataclasses

import pytest

from zyfa.archs import ARCHS, default_config, plain_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.limits import LIMITS, broken_limit, knows_gluon, lds_bytes
from zyfa.recipes import PRESETS


def key(dtype="bf16", head_dim=128, causal=True):
    return AttentionKey(dtype, head_dim, head_dim, 32, 8, 1, 4096, 4096, causal)


# metadata.shared of kernels that Triton 3.7.1 compiled: arch, dtype, head_dim, BLOCK_M, BLOCK_N, warps, stages, bytes.
COMPILED = [
    ("gfx950", "bf16", 128, 128, 64, 4, 2, {}, 32768),
    ("gfx950", "bf16", 64, 64, 64, 4, 2, {}, 24576),
    ("gfx950", "bf16", 256, 128, 128, 4, 1, {}, 65536),
    ("gfx950", "bf16", 256, 256, 128, 2, 3, {}, 262144),
    ("gfx950", "bf16", 256, 64, 32, 2, 4, {}, 32768),
    ("gfx950", "bf16", 64, 128, 128, 4, 2, {"async_copy": 1}, 68016),
    ("gfx950", "bf16", 64, 256, 128, 8, 3, {"async_copy": 1}, 102064),
    ("gfx950", "bf16", 64, 128, 32, 2, 4, {"async_copy": 1}, 16832),
    ("gfx950", "bf16", 128, 128, 128, 8, 4, {"async_copy": 1}, 168880),
    ("gfx950", "fp8", 64, 64, 64, 2, 4, {}, 24576),
    ("gfx950", "fp8", 128, 64, 64, 4, 3, {"async_copy": 1}, 53248),
    ("gfx950", "fp8", 256, 128, 128, 8, 2, {"async_copy": 1}, 147456),
    ("gfx942", "bf16", 64, 128, 64, 4, 3, {}, 32768),
    ("gfx942", "bf16", 64, 128, 128, 8, 4, {}, 65536),
    ("gfx942", "fp8", 128, 64, 32, 4, 3, {}, 18432),
    ("gfx942", "fp8", 64, 256, 128, 4, 4, {}, 17408),
    ("sm90", "bf16", 128, 128, 128, 8, 3, {}, 229376),
    ("sm90", "bf16", 64, 128, 128, 4, 4, {}, 147456),
    ("sm90", "bf16", 256, 128, 128, 8, 1, {}, 131072),
    ("sm90", "bf16", 256, 64, 32, 4, 4, {"tensor_descriptors": True}, 164864),
    ("sm90", "fp8", 128, 128, 128, 8, 2, {}, 82944),
    ("sm90", "fp8", 128, 256, 128, 8, 4, {"tensor_descriptors": True}, 165888),
    ("sm90", "bf16", 128, 128, 128, 8, 2, {"variant": "gluon"}, 196704),
    ("sm90", "bf16", 256, 128, 64, 8, 2, {"variant": "gluon"}, 196960),
    ("sm90", "fp8", 128, 128, 128, 8, 2, {"variant": "gluon"}, 180320),
    ("sm90", "fp8", 128, 64, 128, 4, 2, {"variant": "gluon"}, 106812),
]


@pytest.mark.parametrize("arch, dtype, head_dim, m, n, warps, stages, knobs, compiled", COMPILED)
def test_lds_bytes_is_a_close_lower_bound(arch, dtype, head_dim, m, n, warps, stages, knobs, compiled):
    config = AttentionConfig(m, n, warps, stages, recipe="block" if dtype == "fp8" else "none", **knobs)
    estimate = lds_bytes(config, key(dtype, head_dim), arch)
    assert 0.94 * compiled <= estimate <= compiled


def test_head_dims_count_as_the_next_power_of_two():
    config = AttentionConfig(128, 64, 4, 2)
    assert lds_bytes(config, key(head_dim=96), "gfx950") == lds_bytes(config, key(head_dim=128), "gfx950")
    narrow_v = key(head_dim=192)._replace(head_dim_v=128)
    assert lds_bytes(config, narrow_v, "sm90") == 128 * 256 * 2 + 2 * 64 * (256 + 128) * 2  # Q, then two stages of K, V


def test_operands_count_in_their_own_bytes():
    int8, bf16qk = (AttentionConfig(64, 128, 4, 2, recipe=recipe) for recipe in ("int8-kmean", "bf16qk"))
    assert lds_bytes(int8, key("fp8"), "sm90") == 64 * 128 + 2 * 128 * (128 + 128)
    assert lds_bytes(bf16qk, key("fp8"), "sm90") == 2 * 64 * 128 + 2 * 128 * (2 * 128 + 128)  # compiled: 114688


BASE = {
    "gfx950": AttentionConfig(128, 64, 4, 2),
    "gfx942": AttentionConfig(128, 64, 4, 1),
    "sm90": AttentionConfig(128, 64, 4, 2),
}
GLUON = "the gluon variant runs this tile, recipe and head dim, and its options are its own"
EIGHT_WARPS = {"variant": "gluon", "num_warps": 8}
BROKEN = [
    ("gfx950", {"BLOCK_M": 96}, "BLOCK_M is a power of two from 16 to 256"),
    ("gfx950", {"BLOCK_M": 512}, "BLOCK_M is a power of two from 16 to 256"),
    ("gfx950", {"BLOCK_N": 256}, "BLOCK_N is a power of two from 16 to 128"),
    ("gfx950", {"num_warps": 16}, "num_warps is 1, 2, 4 or 8"),
    ("gfx950", {"num_stages": 0}, "num_stages is 1 to 5"),
    ("gfx950", {"head_group": -1}, "head_group is not negative"),
    ("gfx950", {"splits": 0}, "splits is 1 to 16"),
    ("sm90", {"splits": 17}, "splits is 1 to 16"),
    ("gfx942", {"xcds": 4}, "xcds is 0 or 8"),
    ("sm90", {"xcds": 8}, "AMD knobs stay at their defaults"),
    ("sm90", {**EIGHT_WARPS, "splits": 2}, "the gluon variant has neither splits nor pack_gqa"),
    ("sm90", {**EIGHT_WARPS, "pack_gqa": True}, "the gluon variant has neither splits nor pack_gqa"),
    ("gfx950", {"recipe": "nonsense"}, "recipe is known"),
    ("gfx950", {"recipe": "block"}, "recipe is none for bf16 and fp16 only"),
    ("sm90", {"waves_per_eu": 2}, "AMD knobs stay at their defaults"),
    ("sm90", {"async_copy": 0}, "AMD knobs stay at their defaults"),
    ("gfx950", {"maxnreg": 128}, "NVIDIA knobs stay at their defaults"),
    ("gfx950", {"tensor_descriptors": True}, "NVIDIA knobs stay at their defaults"),
    ("gfx950", {"waves_per_eu": 9}, "waves_per_eu is 0 to 8"),
    ("gfx950", {"matrix_instr_nonkdim": 4}, "matrix_instr_nonkdim is 0, 16 or 32"),
    ("gfx950", {"async_copy": 2}, "async_copy is -1, 0 or 1"),
    ("gfx950", {"sched_strategy": "fastest"}, "sched_strategy is known"),
    ("sm90", {"maxnreg": 100}, "maxnreg is 0 or a multiple of 8 from 24 to 255"),
    ("sm90", {"BLOCK_N": 128, "BLOCK_M": 256, "num_stages": 3}, "K and V tiles fit in shared memory"),
    ("sm90", {"variant": "cuda"}, "variant is triton or gluon"),
    ("sm90", {"ping_pong": True}, GLUON),
    ("sm90", {"variant": "gluon"}, GLUON),  # four warps are one consumer of 64 rows
    ("sm90", {**EIGHT_WARPS, "BLOCK_N": 32}, GLUON),
    ("sm90", {**EIGHT_WARPS, "maxnreg": 168}, GLUON),
    ("sm90", {**EIGHT_WARPS, "tensor_descriptors": True}, GLUON),
    ("sm90", {**EIGHT_WARPS, "BLOCK_N": 128, "num_stages": 3}, "K and V tiles fit in shared memory"),
]


@pytest.mark.parametrize("arch, change, name", BROKEN)
def test_each_limit_names_itself(arch, change, name):
    assert broken_limit(BASE[arch], key(), arch) is None
    assert broken_limit(dataclasses.replace(BASE[arch], **change), key(), arch) == name


@pytest.mark.parametrize(
    "dtype, head_dim, change, reason",
    [
        ("bf16", 128, {}, None), ("fp16", 64, {"ping_pong": True}, None), ("bf16", 72, {}, None),
        ("bf16", 256, {"BLOCK_N": 64}, None), ("bf16", 256, {}, GLUON), ("bf16", 32, {}, GLUON),
        ("fp8", 128, {"recipe": "int8-kmean"}, None), ("fp8", 64, {"recipe": "bf16qk"}, None),
        ("fp8", 256, {"recipe": "block", "BLOCK_N": 64}, GLUON), ("fp8", 128, {"recipe": "block-kmean-qmean"}, GLUON),
        ("fp8", 128, {"recipe": "row"}, GLUON), ("fp8", 128, {"recipe": f"{PRESETS['balanced']}-vhead"}, None),
        ("fp8", 128, {"recipe": f"{PRESETS['balanced']}-vchannel"}, GLUON),
        ("fp8", 128, {"recipe": "block", "BLOCK_M": 64, "num_warps": 4, "ping_pong": True}, GLUON),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_gluon_variant_runs(dtype, head_dim, change, reason):
    config = dataclasses.replace(AttentionConfig(128, 128, 8, 2, variant="gluon"), **change)
    assert broken_limit(config, key(dtype, head_dim), "sm90") == reason


def test_the_gluon_variant_needs_a_triton_that_has_it(monkeypatch):
    monkeypatch.setattr("zyfa.limits.knows_gluon", lambda arch: False)
    config = AttentionConfig(128, 128, 8, 2, variant="gluon")
    assert broken_limit(config, key(), "sm90") == "this Triton has Gluon"
    assert broken_limit(AttentionConfig(128, 64, 4, 2), key(), "sm90") is None


def test_fp8_needs_32_keys_a_tile_on_nvidia_only():
    config = AttentionConfig(64, 16, 4, 2, recipe="block")
    assert broken_limit(config, key("fp8"), "sm90") == "FP8 needs BLOCK_N >= 32"
    assert broken_limit(config, key("fp8"), "gfx950") is None


@pytest.mark.parametrize("version, reason", [("3.7.1", "sched_strategy needs Triton 3.8"), ("3.10.0", None)])
def test_sched_strategy_follows_the_installed_triton(monkeypatch, version, reason):
    monkeypatch.setattr("triton.__version__", version)
    assert broken_limit(AttentionConfig(128, 64, 4, 2, sched_strategy="max-ilp"), key(), "gfx950") == reason


@pytest.mark.parametrize("recipe, packs", [("block-kmean", True), ("block-kmean-qmean", False), ("bf16qk", True)])
def test_heads_with_biases_of_their_own_are_not_packed(recipe, packs):
    config = AttentionConfig(64, 64, 4, 2, recipe=recipe, pack_gqa=True)
    assert (broken_limit(config, key("fp8"), "sm90") == "pack_gqa needs a recipe without q_mean") is not packs
    assert broken_limit(dataclasses.replace(config, pack_gqa=False, splits=8), key("fp8"), "sm90") is None


def test_mx_scales_run_on_gfx950_only():
    config, reason = AttentionConfig(64, 64, 4, 1, recipe="mx"), "MX scales need gfx950's scaled matrix instructions"
    assert [broken_limit(config, key("fp8"), arch) for arch in ("gfx950", "gfx942", "sm90")] == [None, reason, reason]


def test_every_limit_has_a_case_here():
    tested = {name for _, _, name in BROKEN} | {"FP8 needs BLOCK_N >= 32", "sched_strategy needs Triton 3.8"}
    tested |= {"pack_gqa needs a recipe without q_mean"}
    tested |= {"MX scales need gfx950's scaled matrix instructions", "this Triton has Gluon"}
    assert tested == {limit.name for limit in LIMITS}


GLUON_TILE = AttentionConfig(128, 128, 8, 2, variant="gluon", ping_pong=True)
HALF_TILE = dataclasses.replace(GLUON_TILE, BLOCK_N=64)
BALANCED = PRESETS["balanced"]


@pytest.mark.skipif(not knows_gluon("sm90"), reason="this Triton has no Gluon")
@pytest.mark.parametrize(
    "dtype, dims, recipe, want",
    [
        ("bf16", (128, 128), "", GLUON_TILE), ("fp16", (40, 64), "", GLUON_TILE), ("bf16", (256, 256), "", HALF_TILE),
        ("bf16", (192, 128), "", HALF_TILE), ("bf16", (32, 32), "", AttentionConfig(64, 64, 4, 2)),
        ("fp8", (128, 128), "", dataclasses.replace(GLUON_TILE, ping_pong=False, recipe=BALANCED)),
        ("fp8", (64, 64), "tensor", dataclasses.replace(GLUON_TILE, ping_pong=False, recipe="tensor")),
        ("fp8", (128, 128), "row", AttentionConfig(64, 128, 4, 2, recipe="row")),
        ("fp8", (192, 128), "", AttentionConfig(64, 64, 8, 2, recipe=BALANCED)),
    ],
)  # fmt: skip
def test_hoppers_default_is_the_gluon_tile_where_that_kernel_takes_the_call(dtype, dims, recipe, want, monkeypatch):
    at = AttentionKey(dtype, *dims, 8, 2, 1, 2048, 2048, True)
    assert default_config("sm90", at, recipe) == want
    monkeypatch.setattr("zyfa.limits.knows_gluon", lambda arch: False)
    plain = default_config("sm90", at, recipe)
    assert plain == plain_config("sm90", at, recipe) and (plain.variant, plain.recipe) == ("triton", want.recipe)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_default_configs_break_no_limit(arch, dtype):
    for head_dim in range(16, 257, 8):
        assert broken_limit(default_config(arch, key(dtype, head_dim)), key(dtype, head_dim), arch) is None
