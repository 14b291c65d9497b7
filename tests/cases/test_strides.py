"""The public failure cases of strides: views, fused buffers, broadcasts, odd offsets and dimensions of size one."""

import pytest
import torch
from helpers import assert_correct, interpreted, make_qkv

import zyfa
from zyfa.config import cell_of
from zyfa.kernels.operands import plain

case = pytest.mark.case
RECIPES = pytest.mark.parametrize("recipe", ["none", "block-kmean"])


def assert_same_as_contiguous(interpret, q, k, v, recipe="none", **same):
    """On the CPU and in the kernels, to the bit; and the inputs reach the kernel as they are."""
    copies = [x.contiguous() for x in (q, k, v)]
    precision = "bf16" if recipe == "none" else "fp8"
    assert torch.equal(
        zyfa.attention(q, k, v, precision=precision, **same), zyfa.attention(*copies, precision=precision, **same)
    )
    got, want = (interpreted(interpret, *x, recipe, **same)[0] for x in ((q, k, v), copies))
    assert torch.equal(got, want)
    assert_correct(got, *copies, recipe, **same)
    assert plain(q, k, v)[:3] == (q, k, v)


@case("O-STR-01")
@RECIPES
@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_one_tensor_at_a_time_is_a_view(interpret, which, recipe):
    tensors = list(make_qkv(1, 40, 40, 3, 3, 16))
    tensors[which] = tensors[which].transpose(1, 2).contiguous().transpose(1, 2)
    assert not tensors[which].is_contiguous()
    assert_same_as_contiguous(interpret, *tensors, recipe, causal=True)


@case("O-STR-02")
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("view", ["transposed", "stepped"])
def test_a_last_dimension_with_gaps_raises(which, view):
    tensors = dict(zip("qkv", make_qkv(1, 32, 32, 2, 2, 32), strict=True))
    x = tensors[which]
    gaps = x.repeat(1, 1, 1, 2)[..., ::2] if view == "stepped" else x.transpose(1, 3).contiguous().transpose(1, 3)
    tensors[which] = gaps
    message = rf"{which} must be contiguous in its last dimension, got strides \({gaps.stride(0)}, {gaps.stride(1)}"
    with pytest.raises(ValueError, match=message):
        zyfa.attention(**tensors)


def fused(layout: str):
    """q, k, v as views of one buffer."""
    g = torch.Generator().manual_seed(0)
    if layout == "b s 3 h d":
        return torch.randn(2, 40, 3, 2, 16, generator=g).bfloat16().unbind(2)
    if layout == "b 3 h s d":
        return tuple(x.transpose(1, 2) for x in torch.randn(2, 3, 2, 40, 16, generator=g).bfloat16().unbind(1))
    return torch.randn(2, 40, 4 + 2 * 2, 16, generator=g).bfloat16().split([4, 2, 2], 2)


@case("O-STR-03")
@RECIPES
@pytest.mark.parametrize("layout", ["b s 3 h d", "b 3 h s d", "b s (h+2hk) d"])
def test_views_of_one_buffer(interpret, layout, recipe):
    q, k, v = fused(layout)
    assert not q.is_contiguous()
    assert_same_as_contiguous(interpret, q, k, v, recipe, causal=True)


def shifted(x, row: int, offset: int):
    """x with rows `row` elements apart, its first element `offset` elements into the buffer."""
    b, n, h, d = x.shape
    buffer = torch.empty(offset + b * n * h * row, dtype=x.dtype, device=x.device)
    return buffer[offset:].view(b, n, h, row)[..., :d].copy_(x)


@case("O-STR-04")
@pytest.mark.parametrize("row, offset", [(32, 1), (33, 0), (33, 1)])
def test_odd_strides_and_offsets(interpret, row, offset):
    q, k, v = (shifted(x, row, offset) for x in make_qkv(1, 40, 40, 2, 2, 32))
    assert_same_as_contiguous(interpret, q, k, v)
    assert_same_as_contiguous(interpret, q, k, v, "block-kmean")


@case("O-STR-04")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8:per_tensor"])
def test_odd_strides_after_an_aligned_call_on_a_gpu(precision):
    q, k, v = make_qkv(1, 300, 300, 4, 2, 64, device="cuda")
    for row, offset in ((64, 0), (64, 1), (65, 0), (65, 1)):
        out = zyfa.attention(*(shifted(x, row, offset) for x in (q, k, v)), causal=True, precision=precision)
        assert_correct(out, q, k, v, "none" if precision == "bf16" else "tensor", causal=True)


@case("O-STR-04")
@pytest.mark.gpu
def test_fp8_inputs_one_byte_off_on_a_gpu():
    tensors = [x.to(torch.float8_e4m3fn) for x in make_qkv(1, 300, 300, 4, 2, 64, device="cuda")]
    want = zyfa.attention(*tensors, causal=True)
    assert torch.equal(zyfa.attention(*(shifted(x, 65, 1) for x in tensors), causal=True), want)


@case("O-STR-04")
def test_alignment_is_no_part_of_the_key():
    q, k, v = make_qkv(1, 40, 40, 2, 2, 32)
    keys = [zyfa.explain(*x).call.key for x in ((q, k, v), [shifted(x, 33, 1) for x in (q, k, v)])]
    assert keys[0] == keys[1]


@case("O-STR-05")
@RECIPES
def test_broadcast_keys_and_queries(interpret, recipe):
    q, k, v = make_qkv(1, 40, 40, 2, 1, 16)
    q = q.expand(2, -1, -1, -1)
    k, v = (x.expand(2, -1, 2, -1) for x in (k, v))
    assert k.stride(2) == 0 and q.stride(0) == 0
    kept = [x.clone() for x in (q, k, v)]
    assert_same_as_contiguous(interpret, q, k, v, recipe, causal=True)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept, strict=True))


@case("O-STR-06")
def test_the_layout_is_one_and_is_never_guessed():
    """batch, seqlen, nheads, head_dim also where seqlen and nheads are equal; heads first is a transpose away."""
    q, k, v = make_qkv(1, 16, 16, 16, 16, 32)
    out = zyfa.attention(q, k, v)
    assert_correct(out, q, k, v)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    assert not torch.equal(zyfa.attention(*(x.contiguous() for x in heads_first)).transpose(1, 2), out)
    assert torch.equal(zyfa.attention(*(x.contiguous().transpose(1, 2) for x in heads_first)), out)
    with pytest.raises(TypeError, match="layout"):
        zyfa.attention(q, k, v, layout="bhsd")


@case("O-STR-07")
@RECIPES
@pytest.mark.parametrize("stride", [0, 2**40, 7])
@pytest.mark.parametrize("dim", ["batch", "heads", "rows"])
def test_dimensions_of_size_one_may_have_any_stride(interpret, dim, stride, recipe):
    """As BHSD buffers; the key of the call, which the database is asked for, is that of a contiguous call."""
    seqlen, heads = (1, 2) if dim == "rows" else (20, 1)
    q, k, v = make_qkv(1, seqlen, seqlen, heads, heads, 16)
    index = {"batch": 0, "rows": 1, "heads": 2}[dim]
    odd = []
    for x in (q, k, v):
        strides = list(x.stride())
        strides[index] = stride
        odd.append(x.as_strided(x.shape, strides))
    assert cell_of(zyfa.explain(*odd).call.key) == cell_of(zyfa.explain(q, k, v).call.key)
    got, want = (interpreted(interpret, *x, recipe)[0] for x in (odd, (q, k, v)))
    assert torch.equal(got, want) and torch.equal(zyfa.attention(*odd), zyfa.attention(q, k, v))
