"""The Gluon kernel on a Hopper GPU against float64: tails, ratios of heads, masks, LSE, poisoned outputs, fallbacks."""

import pytest
import torch
from helpers import assert_correct, make_qkv

import zyfa
from zyfa.config import AttentionConfig
from zyfa.limits import _gluon_scales
from zyfa.recipes import RECIPES
from zyfa.reference import attention_ref, emulate, relative_error

pytestmark = pytest.mark.gpu
FP8 = [recipe.name for recipe in RECIPES.values() if _gluon_scales(recipe)]


@pytest.fixture(autouse=True)
def hopper():
    from zyfa.device import current_device

    if current_device(0).arch != "sm90":
        pytest.skip("attn_gluon is Hopper's")


def gluon(recipe="none", warps=8, BLOCK_N=128, **change):
    return AttentionConfig(16 * warps, BLOCK_N, warps, 2, recipe=recipe, variant="gluon", **change)


def checked(q, k, v, config, **same):
    """lse of a call into an output full of NaN, whose result is right."""
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
    precision = "bf16" if config.recipe == "none" else "fp8"
    _, lse = zyfa.attention(q, k, v, precision=precision, config=config, out=out, return_lse=True, **same)
    assert_correct(out, q, k, v, config.recipe, "sm90", **same)
    want = attention_ref(q, k, v, return_lse=True, **same)[1]
    assert torch.equal(torch.isinf(lse), torch.isinf(want))
    if config.recipe == "none":
        torch.testing.assert_close(lse.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(512, 512), (113, 203), (700, 129), (1, 217), (300, 1000)])
@pytest.mark.parametrize("recipe", ["none", "block", "int8-kmean-equalise-hadamard"])
def test_tails_and_bottom_right_masks(recipe, seqlen_q, seqlen_k, head_dim, causal):
    checked(*make_qkv(3, seqlen_q, seqlen_k, 8, 2, head_dim, device="cuda"), gluon(recipe), causal=causal)


@pytest.mark.parametrize("recipe", FP8)
def test_recipes(recipe):
    checked(*make_qkv(2, 700, 700, 8, 2, 128, device="cuda"), gluon(recipe), causal=True)


@pytest.mark.parametrize("step", [0.5, 7.0, 9.0, 40.0], ids="by {}".format)
@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize("rising", [True, False], ids=["rising", "falling"])
def test_maxima_that_creep_and_jump(rising, recipe, step):
    """In 16 bits a maximum may stay behind by 8 in base 2: steps below that, above it, and sums of small ones."""
    q, k, v = make_qkv(1, 256, 2048, 4, 2, 128, device="cuda")
    direction = torch.ones(128, device="cuda") / 128**0.5
    tile = torch.arange(2048, device="cuda") // 128
    stair = step * 0.6931 * (tile if not rising else 15 - tile)  # keys are walked from the last to the first
    q = (q.float() * 0.1 + direction * 16).bfloat16()
    k = (k.float() * 0.1 + stair[None, :, None, None] * direction * (128**0.5 / 16)).bfloat16()
    checked(q, k, v, gluon(recipe))


@pytest.mark.parametrize("nheads, nheads_k", [(4, 4), (12, 4), (32, 8), (7, 1)])
@pytest.mark.parametrize("recipe", ["none", "head"])
def test_ratios_of_heads(recipe, nheads, nheads_k):
    config = gluon(recipe, head_group=4)
    checked(*make_qkv(1, 1100, 1100, nheads, nheads_k, 128, device="cuda"), config, causal=True)


@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize(
    "change",
    [
        {"warps": 4}, {"warps": 4, "BLOCK_N": 64}, {"BLOCK_N": 64}, {"ping_pong": True}, {"head_group": 3},
        {"longest_first": False},
    ],
    ids=str,
)  # fmt: skip
def test_every_schedule_computes_the_same(change, recipe):
    """More tiles than programs: each takes several, so that rings and phases go round."""
    checked(*make_qkv(5, 900, 900, 16, 4, 128, device="cuda"), gluon(recipe, **change), causal=True)


@pytest.mark.parametrize(
    "dims, change",
    [
        ((64, 64), {"ping_pong": True}), ((256, 256), {"BLOCK_N": 64}), ((192, 128), {"BLOCK_N": 64}), ((72, 72), {}),
        ((128, 64), {}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims(dims, change, causal):
    q, k, v = make_qkv(2, 500, 500, 8, 2, *dims, device="cuda")
    checked(q, k, v, gluon(**change), causal=causal)


@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize("window_size", [(100, -1), (200, 50), (0, 0), (-1, 300)])
def test_windows(window_size, recipe):
    checked(*make_qkv(2, 600, 650, 8, 2, 128, device="cuda"), gluon(recipe), window_size=window_size)


@pytest.mark.parametrize("recipe", ["none", "bf16qk"])
def test_views_and_stale_memory(recipe):
    q, k, v = (x.unflatten(-1, (4, 64)) for x in torch.randn(2, 200, 768, device="cuda").bfloat16().chunk(3, -1))
    checked(q, k, v, gluon(recipe), causal=True)
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    checked(q, k, v, gluon(recipe), causal=True)
    k[:, 100:], v[:, 100:] = float("nan"), float("inf")
    checked(q, k[:, :100], v[:, :100], gluon(recipe))


def test_fp16():
    checked(*make_qkv(2, 300, 300, 8, 2, 128, dtype=torch.float16, device="cuda"), gluon(), causal=True)


def test_what_it_lacks_runs_on_the_plain_kernel():
    q, k, v = make_qkv(2, 300, 300, 8, 2, 128, device="cuda")
    checked(q, k, v, gluon(), softcap=20.0)
    checked(q, k, v, gluon(), sink=torch.linspace(-1, 1, 8, device="cuda"))
    odd = torch.empty(2, 300, 8 * 128 + 1, device="cuda", dtype=torch.bfloat16)[..., 1:].unflatten(-1, (8, 128))
    checked(odd.copy_(q), k, v, gluon())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(512, 512), (113, 203), (300, 1000)])
def test_fp8_inputs(seqlen_q, seqlen_k, head_dim, causal):
    """Q and K are read where they lie unless they are 72 wide; rows behind the ends, NaN here, must not be read."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv(2, seqlen_q, seqlen_k + 50, 8, 2, head_dim, device="cuda"))
    for x in (k, v):
        x.view(torch.uint8)[:, seqlen_k:] = 0x7F
    k, v = k[:, :seqlen_k], v[:, :seqlen_k]
    scales = [torch.rand(2, n, device="cuda") + 0.5 for n in (8, 2, 2)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = zyfa.attention(q, k, v, causal=causal, config=gluon("head"), **named)
    exact = [x.double() * s[:, None, :, None].double() for x, s in zip((q, k, v), scales, strict=True)]
    base = emulate(q, k, v, "head", arch="sm90", descales=scales, causal=causal)
    ref = attention_ref(*exact, causal=causal)
    assert relative_error(out, ref) <= 1.5 * relative_error(base, ref)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_does_not_grow_with_length_in_fp8(head_dim, warps):
    """V with mean 1 so that sums do not cancel: sums that stayed in the FP8 matrix unit would lose bits."""
    errors = []
    for seqlen_k in (4096, 131072):
        q, k, v = make_qkv(1, 128, seqlen_k, 4, 4, head_dim, device="cuda")
        v = v + 1.0
        out = zyfa.attention(q, k, v, precision="fp8", config=gluon("block", warps=warps))
        errors.append(relative_error(out, attention_ref(q, k, v)))
    assert errors[1] <= 2 * errors[0], errors
    assert errors[0] <= 0.02, errors
