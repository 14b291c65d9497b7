"""The real kernels run by Triton's interpreter on the CPU: numbers for every feature, recipe and layout."""

import helpers
import pytest
import torch
from helpers import assert_correct, assert_lse, make_qkv, run

from zyfa.config import AttentionConfig
from zyfa.kernels.launch import attention_forward
from zyfa.recipes import RECIPES
from zyfa.reference import attention_ref, emulate, relative_error


def config(recipe="none", BLOCK_M=64, BLOCK_N=64, **more):
    return AttentionConfig(BLOCK_M, BLOCK_N, 4, 1, recipe=recipe, **more)


FEATURES = [
    *helpers.FEATURES,
    {"causal": True, "sink": torch.tensor([0.5, -1.0])},
    {"softmax_scale": 0.3},
]


@pytest.mark.parametrize("same", FEATURES, ids=lambda same: "-".join(same) or "full")
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(150, 150), (70, 200), (200, 70)])
def test_bf16_features(interpret, seqlen_q, seqlen_k, same):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 2, 1, 64)
    out, lse = run(interpret, q, k, v, config(), **same)
    assert_correct(out, q, k, v, **same)
    assert_lse(lse, q, k, v, **same)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (256, 256), (72, 40), (192, 128), (16, 16)])
def test_head_dims(interpret, head_dim, head_dim_v, dtype):
    q, k, v = make_qkv(1, 80, 100, 2, 1, head_dim, head_dim_v, dtype=dtype)
    out, _ = run(interpret, q, k, v, config(BLOCK_N=32), causal=True)
    assert_correct(out, q, k, v, causal=True)


@pytest.mark.parametrize("nheads, nheads_k", [(4, 4), (6, 2), (5, 1), (12, 4)])
@pytest.mark.parametrize("head_group", [0, 1, 4])
def test_every_head_reads_its_own_keys(interpret, nheads, nheads_k, head_group):
    q, k, v = make_qkv(2, 70, 70, nheads, nheads_k, 32)
    out, _ = run(interpret, q, k, v, config(head_group=head_group), causal=True)
    assert_correct(out, q, k, v, causal=True)


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm90"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_follow_their_emulation(interpret, recipe, arch):
    if RECIPES[recipe].granularity == "mx" and arch == "gfx942":
        pytest.skip("gfx942 has no scaled matrix instructions, and its FP8 is another")
    q, k, v = make_qkv(2, 150, 300, 4, 2, 64)
    out, lse = run(interpret, q, k, v, config(recipe), arch, causal=True)
    base, base_lse = emulate(q, k, v, recipe, arch=arch, causal=True, return_lse=True)
    assert_correct(out, q, k, v, recipe, arch, causal=True)
    # far closer to the emulation than to the truth: it is the same arithmetic, not merely as exact
    assert relative_error(out, base) < 0.5 * relative_error(base, attention_ref(q, k, v, causal=True))
    exact = attention_ref(q, k, v, causal=True, return_lse=True)[1]
    assert (lse - base_lse).norm() <= max(1e-4 * exact.norm(), 0.5 * (base_lse - exact).norm())


@pytest.mark.parametrize(
    "recipe",
    ["tensor", "block-kmean-qmean-equalise-hadamard", "int8-kmean", "bf16qk",
     "row-kmean-qmean-equalise-hadamard", "mx", "int8-kmean-equalise-hadamard-vhead",
     "int8-kmean-equalise-hadamard-vchannel"],
)  # fmt: skip
def test_recipes_with_every_feature_at_once(interpret, recipe):
    q, k, v = make_qkv(1, 200, 230, 2, 1, 72, 40)
    same = {"causal": True, "window_size": (90, -1), "softcap": 5.0, "sink": torch.tensor([0.5, -1.0])}
    out, lse = run(interpret, q, k, v, config(recipe, BLOCK_M=256, BLOCK_N=128), **same)
    assert_correct(out, q, k, v, recipe, **same)
    torch.testing.assert_close(lse, emulate(q, k, v, recipe, return_lse=True, **same)[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipe", ["none", *RECIPES])
def test_varlen_equals_one_call_per_sequence(interpret, recipe):
    if RECIPES.get(recipe) and RECIPES[recipe].granularity == "tensor":
        pytest.skip("one scale for the whole batch is not one scale a call")
    lengths_q, lengths_k = [50, 0, 133, 1], [30, 40, 150, 0]
    bounds_q, bounds_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    q = make_qkv(1, sum(lengths_q), 1, 4, 2, 32)[0][0]
    _, k, v = (x[0] for x in make_qkv(1, 1, sum(lengths_k), 4, 2, 32))
    out, lse = run(
        interpret, q, k, v, config(recipe), causal=True, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k,
        max_seqlen_q=133, max_seqlen_k=150,
    )  # fmt: skip
    assert torch.isfinite(out).all()
    for i, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(bounds_q[i], bounds_q[i + 1]), slice(bounds_k[i], bounds_k[i + 1])
        if n_q and n_k:
            one, one_lse = run(interpret, q[None, rows], k[None, keys], v[None, keys], config(recipe), causal=True)
            torch.testing.assert_close(out[rows], one[0], rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(lse[:, rows], one_lse[0], rtol=1e-4, atol=1e-4)
        elif n_q:
            assert (out[rows] == 0).all() and (lse[:, rows] == float("-inf")).all()


@pytest.mark.parametrize("recipe", ["none", "block", "int8-kmean", "bf16qk"])
def test_memory_behind_the_sequence_is_not_read(interpret, recipe):
    q, k, v = make_qkv(1, 60, 128, 2, 1, 32)
    k[:, 100:], v[:, 100:] = float("nan"), float("inf")
    out, _ = run(interpret, q, k[:, :100], v[:, :100], config(recipe))
    assert_correct(out, q, k[:, :100], v[:, :100], recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("zero", ["q", "k", "v", "head"])
def test_zero_inputs_stay_finite(interpret, recipe, zero):
    """An all-zero block must not give 0 / 0: v = 0 gives exactly 0, k = 0 the mean of v."""
    q, k, v = make_qkv(1, 64, 130, 2, 2, 32)
    {"q": q, "k": k, "v": v, "head": v[:, :, 0]}[zero].zero_()
    out, _ = run(interpret, q, k, v, config(recipe))
    assert torch.isfinite(out).all()
    if zero == "v":
        assert (out == 0).all()
    if zero in ("q", "k"):
        assert relative_error(out, v.double().mean(1, keepdim=True).expand_as(v[:, :64])) < 0.05


def test_casts_saturate_and_keep_nan(interpret):
    """Values at and beyond e4m3's range with a given scale of one: a missing clamp makes NaN of 465 and up."""
    values = torch.tensor([448.0, 449, 464, 465, 480, 1e4, -1e4, float("nan")])
    v = values.view(1, 1, 1, 8).repeat(1, 16, 1, 4).bfloat16()
    q, k = torch.zeros(1, 16, 1, 32).bfloat16(), torch.zeros(1, 16, 1, 32).bfloat16()
    v[..., 8:] = 1.0
    out, _ = run(interpret, q, k, v, config("head"))
    assert torch.isfinite(out[0, 0, 0, :7]).all() and torch.isnan(out[0, 0, 0, 7])
    assert out[0, 0, 0, 5] == -out[0, 0, 0, 6]


@pytest.mark.parametrize("arch", ["gfx950", "sm90"])
def test_fp8_inputs_keep_their_bits_and_their_scales(interpret, arch):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv(2, 100, 140, 4, 2, 32))
    scales = torch.rand(2, 4) + 0.5, torch.rand(2, 2) + 0.5, torch.rand(2, 2) + 0.5
    out, _ = interpret(
        attention_forward, q, k, v, config=config("head"), arch=arch, descales=scales, causal=True, return_lse=True
    )
    exact = [x.double() * s[:, None, :, None].double() for x, s in zip((q, k, v), scales, strict=True)]
    base = emulate(q, k, v, "head", arch=arch, descales=scales, causal=True)
    ref = attention_ref(*exact, causal=True)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, ref) <= 1.5 * relative_error(base, ref)


@pytest.mark.parametrize("seqlen_k", [127, 128, 129, 256, 257])
@pytest.mark.parametrize("BLOCK_N", [32, 128])
def test_no_jump_at_tile_boundaries_in_fp8(interpret, seqlen_k, BLOCK_N):
    q, k, v = make_qkv(1, 16, seqlen_k, 6, 1, 64)
    out, _ = run(interpret, q, k, v, config("block", BLOCK_N=BLOCK_N))
    cosine = torch.nn.functional.cosine_similarity(out.double().flatten(), attention_ref(q, k, v).flatten(), 0)
    assert cosine >= 0.998
