"""The kernels on a GPU: every feature, precision and head dim against float64, poisoned outputs, odd shapes."""

import pytest
import torch
from helpers import assert_correct, make_qkv

import zyfa
from zyfa.archs import plain_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.grid_fill import default_for
from zyfa.kernels.launch import attention_forward
from zyfa.recipes import RECIPES
from zyfa.reference import attention_ref, emulate, relative_error

pytestmark = pytest.mark.gpu
MX = [name for name, recipe in RECIPES.items() if recipe.granularity == "mx"]
PRECISIONS = ["none", *(name for name in RECIPES if name not in MX)]


def arch():
    from zyfa.device import current_device

    return current_device(0).arch


def config_for(recipe, head_dim, **change):
    key = AttentionKey("bf16" if recipe == "none" else "fp8", head_dim, head_dim, 8, 2, 1, 1024, 1024, True)
    return AttentionConfig.from_dict(plain_config(arch(), key, recipe).to_dict() | change)


def run(q, k, v, recipe, config, **same):
    """zyfa.attention into an output full of NaN."""
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
    precision = "bf16" if recipe == "none" else "fp8"
    return zyfa.attention(q, k, v, precision=precision, config=config, out=out, return_lse=True, **same)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("recipe", PRECISIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(512, 512), (113, 203), (300, 129), (1, 217)])
def test_matches_reference(seqlen_q, seqlen_k, head_dim, recipe, causal):
    q, k, v = make_qkv(2, seqlen_q, seqlen_k, 8, 2, head_dim, device="cuda")
    out, lse = run(q, k, v, recipe, config_for(recipe, head_dim), causal=causal)
    assert_correct(out, q, k, v, recipe, arch(), causal=causal)
    want = attention_ref(q, k, v, causal=causal, return_lse=True)[1]
    assert torch.equal(torch.isinf(lse), torch.isinf(want))
    if recipe == "none":
        torch.testing.assert_close(lse.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [{"head_group": 1}, {"head_group": 3}, {"longest_first": False}, {"tensor_descriptors": True}],
    ids=str,
)
@pytest.mark.parametrize("recipe", PRECISIONS)
def test_every_order_and_load_path_computes_the_same(change, recipe):
    if "tensor_descriptors" in change and arch().startswith("gfx"):
        pytest.skip("tensor descriptors are NVIDIA's")
    q, k, v = make_qkv(2, 700, 700, 8, 2, 128, device="cuda")
    out, _ = run(q, k, v, recipe, config_for(recipe, 128, **change), causal=True)
    assert_correct(out, q, k, v, recipe, arch(), causal=True)


@pytest.mark.parametrize("view", ["fused_qkv", "heads_first"])
@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_strides(view, recipe, descriptors):
    if descriptors and arch().startswith("gfx"):
        pytest.skip("tensor descriptors are NVIDIA's")
    torch.manual_seed(0)
    if view == "fused_qkv":
        q, k, v = (x.unflatten(-1, (4, 64)) for x in torch.randn(2, 200, 768, device="cuda").bfloat16().chunk(3, -1))
    else:
        q, k, v = (torch.randn(2, 4, 200, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    out, _ = run(q, k, v, recipe, config_for(recipe, 64, tensor_descriptors=descriptors), causal=True)
    assert_correct(out, q, k, v, recipe, arch(), causal=True)


@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_stale_memory_behind_the_sequence_does_not_leak(recipe, descriptors):
    if descriptors and arch().startswith("gfx"):
        pytest.skip("tensor descriptors are NVIDIA's")
    q, k, v = make_qkv(1, 100, 128, 4, 2, 64, device="cuda")
    k[:, 100:], v[:, 100:] = float("nan"), float("inf")
    out, _ = run(q, k[:, :100], v[:, :100], recipe, config_for(recipe, 64, tensor_descriptors=descriptors))
    assert_correct(out, q, k[:, :100], v[:, :100], recipe, arch())


@pytest.mark.parametrize("recipe", MX)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_mx_recipes_compute_what_they_state(head_dim, recipe):
    """Where the matrix unit has no scales Triton multiplies in 16 bits: slower, which a limit forbids, and the same."""
    q, k, v = make_qkv(2, 300, 500, 8, 2, head_dim, device="cuda")
    out = torch.full_like(q, float("nan"))
    attention_forward(q, k, v, config=config_for(recipe, head_dim), arch=arch(), causal=True, out=out)
    assert_correct(out, q, k, v, recipe, arch(), causal=True)


@pytest.mark.parametrize("recipe", PRECISIONS[1:])
def test_zero_heads_rows_and_tensors_stay_finite(recipe):
    q, k, v = make_qkv(1, 128, 128, 8, 8, 128, device="cuda")
    k[:, :, 0], q[:, :, 1], v[:, 5] = 0, 0, 0
    out, _ = run(q, k, v, recipe, config_for(recipe, 128))
    assert torch.isfinite(out).all()
    assert (run(q, k, torch.zeros_like(v), recipe, config_for(recipe, 128))[0] == 0).all()


def test_error_does_not_grow_with_length_in_fp8():
    """V with mean 1 so that sums do not cancel: a short accumulator would lose bits from 4k to 128k keys."""
    errors = []
    for seqlen_k in (4096, 131072):
        q, k, v = make_qkv(1, 128, seqlen_k, 4, 4, 128, device="cuda")
        v = v + 1.0
        out, _ = run(q, k, v, "block", config_for("block", 128))
        errors.append(relative_error(out, attention_ref(q, k, v)))
    assert errors[1] <= 2 * errors[0], errors


def test_fp8_inputs_with_descales():
    q, k, v = make_qkv(2, 300, 300, 8, 2, 128, device="cuda")
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    qs = torch.linspace(0.5, 2, 16, device="cuda").view(2, 8)
    ks, vs = (torch.linspace(0.5, 2, 4, device="cuda").view(2, 2) for _ in range(2))
    out = zyfa.attention(q8, k8, v8, causal=True, q_descale=qs, k_descale=ks, v_descale=vs)
    exact = attention_ref(*(x.double() * s[:, None, :, None] for x, s in ((q8, qs), (k8, ks), (v8, vs))), causal=True)
    base = emulate(q8, k8, v8, "block", causal=True, descales=(qs, ks, vs))
    assert relative_error(out, exact) <= 1.5 * relative_error(base, exact)


def test_tuned_and_default_calls_agree_with_the_reference():
    q, k, v = make_qkv(1, 1024, 1024, 32, 8, 128, device="cuda")
    assert_correct(zyfa.attention(q, k, v, causal=True), q, k, v, causal=True)
    text = str(zyfa.explain(q, k, v, causal=True))
    assert "trust" in text and "config" in text


FILLS = [{"splits": 2}, {"splits": 8}, {"pack_gqa": True}, {"splits": 4, "pack_gqa": True}]


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("recipe", PRECISIONS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(64, 2048), (17, 1000), (200, 33)])
def test_split_keys_and_packed_heads(seqlen_q, seqlen_k, recipe, fill):
    if "pack_gqa" in fill and recipe in RECIPES and RECIPES[recipe].q_mean:
        pytest.skip("a limit: heads of one program would differ in what they add to a key")
    q, k, v = make_qkv(2, seqlen_q, seqlen_k, 8, 2, 128, device="cuda")
    out, lse = run(q, k, v, recipe, config_for(recipe, 128, **fill), causal=True)
    assert_correct(out, q, k, v, recipe, arch(), causal=True)
    want = attention_ref(q, k, v, causal=True, return_lse=True)[1]
    assert torch.equal(torch.isinf(lse), torch.isinf(want))
    if recipe == "none":
        seen = torch.isfinite(want)
        torch.testing.assert_close(lse.double()[seen], want[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_split_keys_and_packed_heads_with_every_feature(descriptors, fill):
    if descriptors and arch().startswith("gfx"):
        pytest.skip("tensor descriptors are NVIDIA's")
    config = config_for("none", 128, tensor_descriptors=descriptors, **fill)
    q, k, v = make_qkv(2, 100, 3000, 8, 2, 128, device="cuda")
    sink = torch.linspace(-1, 2, 8, device="cuda")
    same = {"causal": True, "window_size": (1500, -1), "softcap": 20.0, "sink": sink}
    for _ in range(2):  # the second call is a replay
        out, lse = run(q, k, v, "none", config, **same)
        assert_correct(out, q, k, v, **same)
        want = attention_ref(q, k, v, return_lse=True, **same)[1]
        torch.testing.assert_close(lse.double(), want, rtol=1e-4, atol=1e-4)


def test_short_queries_run_split_and_packed_by_default():
    q, k, v = make_qkv(1, 16, 16384, 32, 8, 128, device="cuda")
    config = default_for(AttentionKey("bf16", 128, 128, 32, 8, 1, 16, 16384, True), arch(), 132)
    assert config.splits > 1 and config.pack_gqa
    out, _ = run(q, k, v, "none", config, causal=True)
    assert_correct(out, q, k, v, causal=True)
