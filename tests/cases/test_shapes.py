"""The public failure cases of shapes: head dims, head counts, empty and very short inputs."""

import dataclasses
import itertools

import pytest
import torch
from helpers import assert_correct, interpreted, make_qkv, varlen

import zyfa
from zyfa.archs import default_config
from zyfa.config import AttentionKey, cell_of
from zyfa.limits import lds_bytes
from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref
from zyfa.tuner.compile import compile_config

case = pytest.mark.case
HEAD_DIMS = [40, 72, 80, 88, 96, 112, 160, 192]
ALL_HEAD_DIMS = range(16, 257, 8)


@case("O-SHP-01")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_head_dim_72_gives_the_same_bits_whatever_lies_around(interpret, dtype):
    """The same values inside wider rows full of NaN, and inside rows full of zeros."""
    q, k, v = make_qkv(1, 70, 90, 2, 1, 72, dtype=dtype)
    results = []
    for junk in (float("nan"), 0.0):
        wide = [torch.full((*x.shape[:3], 128), junk, dtype=dtype) for x in (q, k, v)]
        for w, x in zip(wide, (q, k, v), strict=True):
            w[..., :72] = x
        results.append(interpreted(interpret, *(w[..., :72] for w in wide)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert_correct(results[0][0], q, k, v)


@case("O-SHP-01")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_head_dim_72_repeats_bit_for_bit_on_a_gpu(dtype):
    q, k, v = make_qkv(1, 512, 512, 16, 16, 72, dtype=dtype, device="cuda")
    outs = []
    for _ in range(4):
        junk = torch.full((64 << 20,), float("nan"), device="cuda")
        del junk  # the allocator hands these bytes out next
        outs.append(zyfa.attention(q, k, v))
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert_correct(outs[0], q, k, v)


@case("O-SHP-02")
@pytest.mark.parametrize("recipe, causal", [("none", False), ("int8-kmean-equalise-hadamard", True)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_padded_head_dims_on_the_cpu(head_dim, recipe, causal):
    q, k, v = make_qkv(1, 1000, 1000, 1, 1, head_dim)
    out = zyfa.attention(q, k, v, causal=causal, precision="bf16" if recipe == "none" else "fp8:balanced")
    assert out.shape == q.shape
    assert_correct(out, q, k, v, recipe, causal=causal)


@case("O-SHP-02")
@pytest.mark.parametrize("recipe", ["none", "tensor"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_padded_head_dims_in_the_kernels(interpret, head_dim, recipe):
    q, k, v = make_qkv(1, 40, 50, 1, 1, head_dim)
    out, _ = interpreted(interpret, q, k, v, recipe, causal=True)
    assert_correct(out, q, k, v, recipe, causal=True)


@case("O-SHP-02")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8:per_tensor"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_padded_head_dims_on_a_gpu(head_dim, precision):
    q, k, v = make_qkv(1, 1000, 1000, 4, 2, head_dim, device="cuda")
    for causal in (False, True):
        out = zyfa.attention(q, k, v, causal=causal, precision=precision)
        assert_correct(out, q, k, v, "none" if precision == "bf16" else "tensor", causal=causal)


@case("O-SHP-02")
@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm90"])
def test_limits_count_the_padded_width(arch):
    def key(head_dim):
        return AttentionKey("bf16", head_dim, head_dim, 8, 8, 1, 1024, 1024, True)

    config = default_config(arch, key(128))
    assert lds_bytes(config, key(72), arch) == lds_bytes(config, key(128), arch)
    assert lds_bytes(config, key(160), arch) == lds_bytes(config, key(256), arch)
    assert lds_bytes(config, key(64), arch) < lds_bytes(config, key(72), arch)


@case("O-SHP-02")
@pytest.mark.parametrize("head_dim", [8, 12, 20, 100, 264])
def test_unsupported_head_dims_raise(head_dim):
    q, k, v = make_qkv(1, 8, 8, 1, 1, head_dim)
    with pytest.raises(ValueError, match=f"head_dim must be a multiple of 8 from 16 to 256, got {head_dim}"):
        zyfa.attention(q, k, v)
    good = make_qkv(1, 8, 8, 1, 1, 16)
    with pytest.raises(ValueError, match=f"head_dim of v must be a multiple of 8 from 16 to 256, got {head_dim}"):
        zyfa.attention(good[0], good[1], v)


@case("O-SHP-03")
@pytest.mark.parametrize("nheads_k", [16, 1])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_value_head_dim_differs(nheads_k, scale):
    q, k, v = make_qkv(1, 300, 300, 16, nheads_k, 192, 128)
    out = zyfa.attention(q, k, v, causal=True, softmax_scale=scale)
    assert out.shape == (1, 300, 16, 128)
    assert_correct(out, q, k, v, causal=True, softmax_scale=192**-0.5 if scale is None else scale)


@case("O-SHP-03")
@pytest.mark.parametrize("recipe", ["none", "tensor"])
def test_value_head_dim_differs_in_the_kernels(interpret, recipe):
    q, k, v = make_qkv(1, 40, 50, 2, 1, 192, 128)
    out, _ = interpreted(interpret, q, k, v, recipe, causal=True)
    assert_correct(out, q, k, v, recipe, causal=True, softmax_scale=192**-0.5)


@case("O-SHP-03")
@pytest.mark.parametrize("arch", ["gfx950", "sm90"])
@pytest.mark.parametrize("preset", ["per_tensor", "balanced", "accurate"])
def test_quantisers_of_two_widths_compile(preset, arch):
    """The interpreter does not mind a name that stands for two shapes; the compiler does."""
    key = AttentionKey("fp8", 64, 32, 8, 2, 1, 1024, 1024, True)
    config = dataclasses.replace(default_config(arch, key), recipe=PRESETS[preset])
    assert compile_config(key, config, arch).failure is None


@case("O-SHP-03")
@pytest.mark.gpu
@pytest.mark.parametrize("nheads_k", [16, 1])
def test_value_head_dim_differs_on_a_gpu(nheads_k):
    q, k, v = make_qkv(1, 4096, 4096, 16, nheads_k, 192, 128, device="cuda")
    assert_correct(zyfa.attention(q, k, v, causal=True), q, k, v, causal=True)


@case("O-SHP-03")
def test_rows_of_the_database_hold_both_head_dims():
    key = AttentionKey("bf16", 192, 128, 16, 16, 1, 4096, 4096, True)
    assert cell_of(key)[:3] == ("bf16", 192, 128) != cell_of(key._replace(head_dim=128))[:3]


@case("O-SHP-04")
@pytest.mark.parametrize("recipe", ["none", "int8-kmean-equalise-hadamard"])
@pytest.mark.parametrize("nheads, nheads_k", [(24, 8), (40, 8), (24, 4), (28, 4), (48, 8), (12, 2)])
def test_any_group_of_heads(nheads, nheads_k, recipe):
    q, k, v = make_qkv(1, 70, 70, nheads, nheads_k, 32)
    out = zyfa.attention(q, k, v, precision="bf16" if recipe == "none" else "fp8:balanced")
    for h in (0, nheads // nheads_k, nheads - 1):
        hk = h // (nheads // nheads_k)
        one = (q[:, :, h : h + 1], k[:, :, hk : hk + 1], v[:, :, hk : hk + 1])
        if recipe == "none":
            assert_correct(out[:, :, h : h + 1], *one)
    assert_correct(out, q, k, v, recipe)


@case("O-SHP-04")
@pytest.mark.parametrize("recipe", ["none", "int8-kmean-equalise-hadamard"])
@pytest.mark.parametrize("nheads, nheads_k", [(6, 2), (5, 1), (12, 2), (14, 2)])
def test_any_group_of_heads_in_the_kernels(interpret, nheads, nheads_k, recipe):
    q, k, v = make_qkv(1, 20, 20, nheads, nheads_k, 16)
    assert_correct(interpreted(interpret, q, k, v, recipe)[0], q, k, v, recipe)


@case("O-SHP-05")
@pytest.mark.parametrize("nheads, nheads_k", [(33, 2), (3, 2), (8, 3), (2, 4), (8, 0)])
def test_heads_that_do_not_divide_raise(nheads, nheads_k):
    q, k, v = (torch.zeros(1, 4, n, 16, dtype=torch.bfloat16) for n in (nheads, nheads_k, nheads_k))
    with pytest.raises(ValueError, match=f"multiple of nheads_k .*, got nheads {nheads} and nheads_k {nheads_k}"):
        zyfa.attention(q, k, v)


EMPTY = {"batch": (0, 4, 6, 2, 1), "queries": (2, 0, 6, 2, 1), "heads": (2, 4, 6, 0, 1)}


@case("O-SHP-06")
@pytest.mark.parametrize("precision", ["auto", "fp8"])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_empty_inputs_give_empty_results(sizes, precision):
    batch, seqlen_q, seqlen_k, nheads, nheads_k = sizes
    q, k, v = make_qkv(batch, seqlen_q, seqlen_k, nheads, nheads_k, 32, 16)
    out, lse = zyfa.attention(q, k, v, causal=True, return_lse=True, precision=precision)
    assert out.shape == (batch, seqlen_q, nheads, 16) and out.dtype == q.dtype
    assert lse.shape == (batch, nheads, seqlen_q) and lse.dtype == torch.float32


@case("O-SHP-06")
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_packed_batches_without_tokens(batch):
    q, k, v = (x[0] for x in make_qkv(1, 0, 0, 2, 1, 32))
    same = varlen([0] * batch, [0] * batch) if batch else dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(1, dtype=torch.int32)
    )  # fmt: skip
    out, lse = zyfa.attention(q, k, v, return_lse=True, **same)
    assert out.shape == (0, 2, 32) and lse.shape == (2, 0)


@case("O-SHP-06")
def test_no_keys_give_zeros():
    q, k, v = make_qkv(2, 4, 0, 2, 1, 32)
    out, lse = zyfa.attention(q, k, v, return_lse=True, out=torch.full_like(q, float("nan")))
    assert (out == 0).all() and (lse == float("-inf")).all()


@case("O-SHP-07")
@pytest.mark.parametrize("recipe", ["none", "block-kmean"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (2, 3), (7, 15), (8, 1), (15, 3)])
def test_very_short_sequences(interpret, seqlen_q, seqlen_k, recipe):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 1, 1, 16)
    assert_correct(interpreted(interpret, q, k, v, recipe)[0], q, k, v, recipe)


@case("O-SHP-07")
@pytest.mark.parametrize("seqlen_q, seqlen_k", list(itertools.product([1, 2, 7, 8, 15], [1, 3, 15])))
def test_very_short_sequences_on_the_cpu(seqlen_q, seqlen_k):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 2, 1, 16)
    assert_correct(zyfa.attention(q, k, v, causal=True), q, k, v, causal=True)


@case("O-SHP-07")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm90"])
def test_the_narrowest_head_compiles_in_fp8(arch, preset):
    """An 8-bit dot of Hopper sums at least 32 products: 16 channels have to be padded."""
    key = AttentionKey("fp8", 16, 16, 8, 2, 1, 1024, 1024, True)
    config = dataclasses.replace(default_config(arch, key), recipe=PRESETS[preset])
    assert compile_config(key, config, arch).failure is None


@case("O-SHP-07")
@pytest.mark.parametrize("recipe", ["tensor", "int8-kmean-equalise-hadamard", "block-kmean-qmean", "bf16qk"])
def test_the_narrowest_head_on_hopper(interpret, recipe):
    q, k, v = make_qkv(1, 40, 50, 2, 1, 16)
    out, lse = interpreted(interpret, q, k, v, recipe, "sm90", causal=True)
    assert_correct(out, q, k, v, recipe, "sm90", causal=True)
    assert torch.isfinite(lse[:, :, 10:]).all()


def perturbed(q, k, v, attend):
    """(did the scores change, which output channels changed) by the last channel of q and k, and then of v."""
    last = slice(q.shape[-1] - 1, None)
    out, lse = attend(q, k, v)
    q2, k2, v2 = q.clone(), k.clone(), v.clone()
    q2[..., last] += 2
    k2[..., last] += torch.linspace(0, 2, k.shape[1])[None, :, None, None].to(k.dtype)
    v2[..., last] += 1
    scores = not torch.equal(attend(q2, k2, v)[1], lse)
    changed = (attend(q, k, v2)[0] != out).flatten(0, 2).any(0)
    return scores, changed.nonzero().flatten().tolist()


@case("O-SHP-08")
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_the_last_channel_takes_part(head_dim):
    q, k, v = make_qkv(1, 8, 12, 1, 1, head_dim)
    assert perturbed(q, k, v, lambda *x: zyfa.attention(*x, return_lse=True)) == (True, [head_dim - 1])


@case("O-SHP-08")
@pytest.mark.parametrize("head_dim", [16, 24, 64, 72, 128, 200, 256])
def test_the_last_channel_takes_part_in_the_kernel(interpret, head_dim):
    q, k, v = make_qkv(1, 8, 12, 1, 1, head_dim)
    attend = lambda *x: interpreted(interpret, *x, BLOCK_M=16, BLOCK_N=16)  # noqa: E731
    assert perturbed(q, k, v, attend) == (True, [head_dim - 1])


def test_the_lse_of_every_head_dim_is_exact(interpret):
    """Padding lanes add nothing: the lse against float64 at a width that fills no power of two."""
    q, k, v = make_qkv(1, 8, 12, 1, 1, 200)
    lse = interpreted(interpret, q, k, v, BLOCK_M=16, BLOCK_N=16)[1]
    torch.testing.assert_close(lse.double(), attention_ref(q, k, v, return_lse=True)[1], rtol=1e-5, atol=1e-5)


def test_inputs_are_never_written_to():
    q, k, v = make_qkv(1, 40, 40, 2, 1, 32)
    sink, kept = torch.zeros(2), [x.clone() for x in (q, k, v)]
    for precision in ("auto", "fp8"):
        zyfa.attention(q, k, v, causal=True, precision=precision, sink=sink)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, sink), (*kept, torch.zeros(2)), strict=True))
