"""The public failure cases of offsets beyond 31 bits.

The interpreter computes offsets in the kernel's own integer types, so that a product that wraps reads elsewhere. Memory
that nobody touches costs nothing: the buffers here are gigabytes of address space with a few pages behind them.
"""

import re

import pytest
import torch
from helpers import assert_correct, make_qkv

import zyfa
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels.launch import attention_forward, compile_for
from zyfa.tuner.compile import _target

case = pytest.mark.case
GIB = 2**30


def attend_in_place(places, tensors, recipe, same):
    """attention_forward on views into huge buffers: runs where the kernels are interpreted. `places`: (sizes, strides,
    offset) of q, k and v in elements; `tensors`: what is put there, at the end of the rows."""
    views = []
    for (sizes, strides, offset), x in zip(places, tensors, strict=True):
        end = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1
        view = torch.empty(end, dtype=x.dtype).as_strided(sizes, strides, offset)
        view[tuple(slice(n - m, n) for n, m in zip(sizes, x.shape, strict=True))] = x
        views.append(view)
    config = AttentionConfig(32, 32, 4, 1, recipe=recipe)
    return attention_forward(*views, config=config, arch="gfx950", return_lse=True, **same)


@case("O-OVF-01")
@pytest.mark.parametrize("seqlen", [98304, 99866, 120000])
def test_rows_of_a_fused_buffer(interpret, seqlen):
    """56 heads of 128 in a fused QKV row of 21504 elements: row 99865 starts behind 2**31."""
    q, k, v = make_qkv(1, 20, 70, 1, 1, 128)
    row = 21504
    places = [
        ((1, 20, 1, 128), (row * 20, row, 128, 1), 0),
        ((1, seqlen, 1, 128), (seqlen * row, row, 128, 1), 55 * 128),
        ((1, seqlen, 1, 128), (seqlen * row, row, 128, 1), 111 * 128),
    ]
    same = {"causal": True, "window_size": (45, 0)}
    out, _ = interpret(attend_in_place, places, (q, k, v), "none", same)
    assert_correct(out, q, k, v, **same)


@case("O-OVF-01")
@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [98304, 99866])
@pytest.mark.parametrize("precision", ["bf16", "fp8:per_tensor"])
def test_rows_of_a_fused_buffer_on_a_gpu(seqlen, precision):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, seqlen, 3, 56, 128, device="cuda", dtype=torch.bfloat16).unbind(2)
    q = q[:, -300:]
    same = {"causal": True, "window_size": (4000, 0)}
    got = zyfa.attention(q, k, v, precision=precision, **same)
    assert torch.equal(got, zyfa.attention(*(x.contiguous() for x in (q, k, v)), precision=precision, **same))


@case("O-OVF-02")
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_batch_and_head_offsets(interpret, axis):
    """(3, 64, 87382, 128): the last batch entry or head starts behind 2**31 elements."""
    q, k, v = make_qkv(3, 20, 40, 1, 1, 16) if axis == "batch" else make_qkv(1, 20, 40, 3, 3, 16)
    strides = (GIB, 16, 16, 1) if axis == "batch" else (4 * GIB, 16, GIB, 1)
    places = [(tuple(x.shape), strides, 0) for x in (q, k, v)]
    out, _ = interpret(attend_in_place, places, (q, k, v), "none", {"causal": True})
    assert_correct(out, q, k, v, causal=True)
    out, _ = interpret(attend_in_place, places, (q, k, v), "block", {"causal": True})
    assert_correct(out, q, k, v, "block", causal=True)


@case("O-OVF-02")
@pytest.mark.gpu
def test_more_than_2_31_elements_on_a_gpu():
    k, v = (torch.randn(3, 64, 87382, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    q = torch.randn(3, 64, 64, 128, device="cuda", dtype=torch.bfloat16)
    same = {"causal": True, "window_size": (1000, 0)}
    out = zyfa.attention(q, k, v, **same)
    last = [x[2:, -1200:, 63:] for x in (q, k, v)]
    assert_correct(out[2:, :, 63:], *last, **same)


@case("O-OVF-03")
def test_varlen_starts_are_widened_before_they_are_multiplied(interpret):
    """128 heads of 128: the second of two sequences starts at token 131080, element 2**31 + 131072."""
    q, k, v = make_qkv(1, 40, 40, 1, 1, 128)
    total, first, row = 131120, 131080, 16384
    offsets = torch.tensor([0, first, total], dtype=torch.int32)
    queries = torch.tensor([0, 0, 40], dtype=torch.int32)
    places = [
        ((40, 1, 128), (row, 128, 1), 0),
        ((total, 1, 128), (row, 128, 1), 0),
        ((total, 1, 128), (row, 128, 1), 0),
    ]
    same = {"cu_seqlens_q": queries, "cu_seqlens_k": offsets, "max_seqlen_q": 40, "max_seqlen_k": first, "causal": True}
    out, _ = interpret(attend_in_place, places, tuple(x[0] for x in (q, k, v)), "none", same)
    assert_correct(out[None], q, k, v, causal=True)


@case("O-OVF-03")
@pytest.mark.gpu
@pytest.mark.parametrize("total", [131072, 131200])
def test_varlen_starts_on_a_gpu(total):
    k, v = (torch.randn(total, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(80, 128, 128, device="cuda", dtype=torch.bfloat16)
    bounds = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 0, 80], [0, total - 100, total])]
    out = zyfa.attention(q, k, v, causal=True, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])
    assert_correct(out[None], q[None], k[None, -100:], v[None, -100:], causal=True)


def accesses(batch: int, heads: int, seqlen: int, head_dim: int = 128) -> dict[str, int]:
    """How often gfx950 code for BHSD views of this size uses buffer (32-bit offsets) and global (64-bit) memory ops."""
    shape = (batch, heads, seqlen, head_dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(3))
    with _target("gfx950"):
        config = AttentionConfig(128, 64, 4, 2)
        compiled = attention_forward(q, k, v, config=config, arch="gfx950", return_lse=False, compile_only=True)
    listing = compiled.asm["amdgcn"]
    return {kind: len(re.findall(rf"\b{kind}_(?:load|store)", listing)) for kind in ("buffer", "global")}


@case("O-OVF-04")
def test_tensors_beyond_2_gib_use_no_buffer_operations():
    """2.5 GiB but less than 2**31 elements: a 32-bit byte offset does not reach its end. Below 2 GiB it may."""
    small, large = accesses(1, 64, 4096), accesses(1, 64, 163840)
    assert large["buffer"] == 0 and large["global"] > 0
    assert small["buffer"] > 0 and small["global"] == 0


@case("O-OVF-04")
def test_the_bound_is_2_gib_of_storage_also_for_a_small_view():
    """What counts is the storage: the view of the last rows of 2.5 GiB is small, its offset is not."""
    buffer = torch.empty(1, 163840, 64, 128, dtype=torch.bfloat16, device="meta")
    q, k, v = (buffer[:, -512:] for _ in range(3))
    with _target("gfx950"):
        compiled = attention_forward(
            q, k, v, config=AttentionConfig(128, 64, 4, 2), arch="gfx950", compile_only=True,
            out=torch.empty_like(buffer)[:, -512:],
        )  # fmt: skip
    assert not re.findall(r"\bbuffer_(?:load|store)", compiled.asm["amdgcn"])


@case("O-OVF-04")
def test_quantised_buffers_beyond_2_gib_too():
    key = AttentionKey("fp8", 128, 128, 64, 64, 1, 163840 * 2, 163840 * 2, True)
    with _target("gfx950"):
        compiled = compile_for(key, AttentionConfig(128, 64, 4, 2, recipe="block"), "gfx950")
    loads = re.findall(r"\b(buffer|global)_load_(?:dwordx?[24]|b128|b64)", compiled.asm["amdgcn"])
    assert loads and set(loads) == {"global"}


def grid_of(batch, seqlen, heads, cu_seqlens=None):
    """The grids that a call launches with."""
    from unittest import mock

    from zyfa.kernels import launch

    q = torch.empty((batch, seqlen, heads, 16) if cu_seqlens is None else (seqlen, heads, 16), dtype=torch.bfloat16)
    same = {} if cu_seqlens is None else {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    same |= {} if cu_seqlens is None else {"max_seqlen_q": 32, "max_seqlen_k": 32}
    config = AttentionConfig(32, 32, 4, 1, recipe="int8-kmean-equalise-hadamard")
    with mock.patch.object(launch, "Compiler") as compiler:
        attention_forward(q, q, q, config=config, arch="sm90", compile_only=True, **same)
    return [call.args[1] for call in compiler.return_value.start.call_args_list]


@case("O-OVF-05")
def test_batch_times_heads_is_on_the_long_axis_of_the_grid(interpret):
    """Only axis 0 may exceed 65535 on CUDA."""
    dense = interpret(grid_of, 10923, 32, 6)
    packed = interpret(grid_of, 2050, 2050 * 32, 32, torch.arange(2051, dtype=torch.int32) * 32)
    assert dense[-1] == (65538,) and packed[-1] == (65600,)
    for grid in (*dense, *packed):
        assert grid[0] < 2**31 and all(n <= 65535 for n in grid[1:])


@case("O-OVF-05")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_more_than_65535_heads_on_a_gpu(precision):
    q, k, v = make_qkv(10923, 32, 32, 6, 6, 16, device="cuda")
    out = zyfa.attention(q, k, v, precision=precision)
    recipe = "none" if precision == "bf16" else zyfa.explain(q, k, v, precision=precision).config.recipe
    assert_correct(out[-2:], q[-2:], k[-2:], v[-2:], recipe)
    offsets = torch.arange(10924, dtype=torch.int32, device="cuda") * 32
    packed = zyfa.attention(
        *(x.flatten(0, 1) for x in (q, k, v)), precision=precision, cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )
    assert_correct(packed.view_as(out)[-2:], q[-2:], k[-2:], v[-2:], recipe)


def test_rows_too_far_apart_and_too_many_rows_raise():
    """Within a tile offsets are 32-bit: what they cannot reach is refused, not wrapped."""
    far = torch.empty(2**23 + 2**20).bfloat16().as_strided((1, 2, 1, 16), (0, 2**23 + 8, 16, 1))
    with pytest.raises(ValueError, match=r"q must have rows at most 8388608 elements apart, got strides"):
        zyfa.attention(far, far, far)
    many = torch.empty(16).bfloat16().expand(1, 2**23 + 1, 1, 16)
    with pytest.raises(ValueError, match="at most 8388608 rows a head in FP8"):
        zyfa.explain(many, many, many, precision="fp8")
