"""The public failure cases of masks: which keys a query sees, and what comes of a row that sees none."""

import math

import pytest
import torch
from helpers import assert_correct, interpreted, make_qkv, varlen
from torch.nn.functional import scaled_dot_product_attention

import zyfa
from zyfa.reference import attention_ref

case = pytest.mark.case
INF = float("inf")


@case("O-MSK-01")
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(2048, 1024), (1025, 1024), (129, 1)])
def test_more_queries_than_keys(seqlen_q, seqlen_k):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 2, 1, 64)
    out, lse = zyfa.attention(q, k, v, causal=True, return_lse=True)
    blind = seqlen_q - seqlen_k
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -INF).all()
    assert torch.isfinite(lse[:, :, blind:]).all()
    assert_correct(out, q, k, v, causal=True)


@case("O-MSK-01")
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(129, 1), (130, 66)])
def test_more_queries_than_keys_in_the_kernel(interpret, seqlen_q, seqlen_k):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 1, 1, 16)
    out, lse = interpreted(interpret, q, k, v, causal=True)
    blind = seqlen_q - seqlen_k
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -INF).all()
    assert torch.isfinite(lse[:, :, blind:]).all()
    assert_correct(out, q, k, v, causal=True)


@case("O-MSK-02")
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(16, 64), (1, 257)])
def test_the_mask_is_anchored_bottom_right(interpret, seqlen_q, seqlen_k):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 1, 1, 16)
    lower_right = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    want = scaled_dot_product_attention(*heads_first, attn_mask=lower_right).transpose(1, 2)
    torch.testing.assert_close(attention_ref(q, k, v, causal=True), want, rtol=1e-12, atol=1e-12)
    for out in (zyfa.attention(q, k, v, causal=True), interpreted(interpret, q, k, v, causal=True)[0]):
        assert_correct(out, q, k, v, causal=True)


@case("O-MSK-03")
@pytest.mark.parametrize("recipe", ["none", "tensor", "int8-kmean-equalise-hadamard"])
def test_a_row_without_keys_has_lse_minus_infinity(interpret, recipe):
    q, k, v = make_qkv(1, 5, 2, 2, 1, 16)
    precision = {"none": "bf16", "tensor": "fp8:per_tensor"}.get(recipe, "fp8:balanced")
    on_cpu = zyfa.attention(q, k, v, causal=True, return_lse=True, precision=precision)
    for out, lse in (on_cpu, interpreted(interpret, q, k, v, recipe, causal=True)):
        assert (out[:, :3] == 0).all() and (lse[:, :, :3] == -INF).all()
        assert torch.isfinite(lse[:, :, 3:]).all()
        assert_correct(out, q, k, v, recipe, causal=True)


@case("O-MSK-04")
@pytest.mark.parametrize("BLOCK_M, BLOCK_N", [(128, 64), (64, 128), (16, 16)])
@pytest.mark.parametrize("left", [1, 64])
def test_first_tile_that_some_rows_do_not_see(interpret, left, BLOCK_M, BLOCK_N):
    q, k, v = make_qkv(1, 256, 256, 1, 1, 16)
    same = {"causal": True, "window_size": (left, 0)}
    out, lse = interpreted(interpret, q, k, v, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, **same)
    assert torch.isfinite(lse).all()
    assert_correct(out, q, k, v, **same)


@case("O-MSK-04")
@pytest.mark.gpu
@pytest.mark.parametrize("BLOCK_M, BLOCK_N", [(m, n) for m in (64, 128, 256) for n in (32, 64, 128)])
@pytest.mark.parametrize("left", [1, 128])
def test_windows_at_every_tile_on_a_gpu(left, BLOCK_M, BLOCK_N):
    q, k, v = make_qkv(1, 1024, 1024, 4, 1, 64, device="cuda")
    same = {"causal": True, "window_size": (left, 0)}
    out = zyfa.attention(q, k, v, config=zyfa.AttentionConfig(BLOCK_M, BLOCK_N, 4, 1), **same)
    assert_correct(out, q, k, v, **same)


@case("O-MSK-05")
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(64, 1024), (1, 513), (700, 700)])
def test_a_window_of_128_to_the_left_is_129_keys(seqlen_q, seqlen_k):
    """With q = 0 every visible key weighs the same, so that exp(lse) counts them."""
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 8, 1, 64)
    lse = zyfa.attention(q * 0, k, v, causal=True, window_size=(128, 0), return_lse=True)[1]
    seen = torch.clamp(torch.arange(seqlen_q) + seqlen_k - seqlen_q + 1, max=129).log()
    torch.testing.assert_close(lse, seen.expand_as(lse), rtol=1e-6, atol=1e-6)


@case("O-MSK-05")
def test_window_in_dense_and_varlen_kernels(interpret):
    q, k, v = make_qkv(1, 40, 300, 8, 1, 16)
    same = {"causal": True, "window_size": (128, 0)}
    dense, _ = interpreted(interpret, q, k, v, **same)
    assert_correct(dense, q, k, v, **same)
    packed, _ = interpreted(interpret, q[0], k[0], v[0], **varlen([15, 25], [200, 100]), **same)
    for rows, keys in ((slice(0, 15), slice(0, 200)), (slice(15, 40), slice(200, 300))):
        assert_correct(packed[None, rows], q[:, rows], k[:, keys], v[:, keys], **same)


@case("O-MSK-06")
@pytest.mark.parametrize("recipe", ["none", "tensor", "block-kmean-qmean"])
@pytest.mark.parametrize("junk", [float("nan"), INF], ids=["nan", "inf"])
@pytest.mark.parametrize("BLOCK_N", [64, 128])
def test_stale_memory_behind_the_keys(interpret, BLOCK_N, junk, recipe):
    q, k, v = make_qkv(1, 33, 128, 1, 1, 16)
    results = []
    for filler in (junk, 0.0):
        k[:, 100:], v[:, 100:] = filler, filler
        results.append(interpreted(interpret, q, k[:, :100], v[:, :100], recipe, BLOCK_N=BLOCK_N))
    for stale, clean in zip(*results, strict=True):
        assert torch.equal(stale, clean)
    assert_correct(results[0][0], q, k[:, :100], v[:, :100], recipe)


@case("O-MSK-06")
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_nan_rows_between_packed_sequences(interpret, recipe):
    """A sequence of NaN keys that no query belongs to lies between two others."""
    q, k, v = make_qkv(1, 20, 100, 1, 1, 16)
    k[:, 40:60], v[:, 40:60] = float("nan"), float("nan")
    out, _ = interpreted(interpret, q[0], k[0], v[0], recipe, **varlen([12, 0, 8], [40, 20, 40]))
    for rows, keys in ((slice(0, 12), slice(0, 40)), (slice(12, 20), slice(60, 100))):
        assert_correct(out[None, rows], q[:, rows], k[:, keys], v[:, keys], recipe)


@case("O-MSK-06")
def test_fp8_nan_bytes_behind_the_keys(interpret):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv(1, 16, 128, 1, 1, 32))
    scales = tuple(torch.ones(1, 1) for _ in range(3))
    results = []
    for byte in (0x7F, 0x00):
        k.view(torch.uint8)[:, 100:], v.view(torch.uint8)[:, 100:] = byte, byte
        run = interpreted(interpret, q, k[:, :100], v[:, :100], "head", descales=scales)
        results.append(run[0])
    assert torch.isfinite(results[0]).all() and torch.equal(*results)


@case("O-MSK-07")
def test_empty_sequences_in_a_batch(interpret):
    q, k, v = (x[0] for x in make_qkv(1, 8, 8, 9, 3, 64))
    same = varlen([0, 1, 0, 1], [0, 3, 0, 5]) | {"causal": True}
    on_cpu = zyfa.attention(q[:2], k, v, return_lse=True, **same)
    for out, lse in (on_cpu, interpreted(interpret, q[:2], k, v, **same)):
        assert out.shape == (2, 9, 64) and lse.shape == (9, 2)
        assert_correct(out[None, :1], q[None, :1], k[None, :3], v[None, :3], causal=True)
        assert_correct(out[None, 1:], q[None, 1:2], k[None, 3:], v[None, 3:], causal=True)


@case("O-MSK-07")
def test_queries_without_keys_and_all_empty(interpret):
    q, k, v = (x[0] for x in make_qkv(1, 3, 4, 9, 3, 64))
    same = varlen([3, 0], [0, 4])
    for out, lse in (zyfa.attention(q, k, v, return_lse=True, **same), interpreted(interpret, q, k, v, **same)):
        assert (out == 0).all() and (lse == -INF).all() and out.shape == (3, 9, 64)
    empty = zyfa.attention(q[:0], k[:0], v[:0], **varlen([0, 0], [0, 0]))
    assert empty.shape == (0, 9, 64) and empty.dtype == q.dtype


@case("O-MSK-08")
def test_max_seqlen_is_derived_and_one_offset_tensor_is_not_enough():
    q, k, v = (x[0] for x in make_qkv(1, 30, 30, 2, 1, 16))
    offsets = torch.tensor([0, 10, 30], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    out = zyfa.attention(q, k, v, **packed)
    assert_correct(out[None, 10:], q[None, 10:], k[None, 10:], v[None, 10:])  # and no key of the first sequence
    assert torch.equal(out, zyfa.attention(q, k, v, max_seqlen_q=1000, max_seqlen_k=1000, **packed))
    for name in packed:
        with pytest.raises(ValueError, match="go together"):
            zyfa.attention(q, k, v, **{name: offsets})
    with pytest.raises(ValueError, match="max_seqlen_k must be at least the longest sequence, 20, got 19"):
        zyfa.attention(q, k, v, max_seqlen_k=19, **packed)


@case("O-MSK-08")
@pytest.mark.parametrize("bad", [[1, 10, 30], [0, 20, 10], [0, 10, 31]], ids=str)
def test_offsets_that_are_no_offsets(bad):
    q, k, v = (x[0] for x in make_qkv(1, 30, 30, 2, 1, 16))
    good, bad = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 30], bad))
    with pytest.raises(ValueError, match="cu_seqlens_k must ascend from 0 to at most 30, got"):
        zyfa.attention(q, k, v, cu_seqlens_q=good, cu_seqlens_k=bad)


@case("O-MSK-08")
def test_rows_behind_a_too_small_max_seqlen_are_nan(interpret):
    """Offsets on a GPU cannot be looked at without waiting for it, so that the kernel marks what it was not told of."""
    q, k, v = (x[0] for x in make_qkv(1, 110, 60, 2, 1, 16))
    lengths = varlen([90, 20], [30, 30])
    want, want_lse = interpreted(interpret, q, k, v, **lengths)
    same = lengths | {"max_seqlen_q": 40, "out": torch.zeros_like(q)}
    out, lse = interpreted(interpret, q, k, v, BLOCK_M=32, **same)
    told = torch.cat([torch.arange(90) < 40, torch.ones(20, dtype=torch.bool)])
    torch.testing.assert_close(out[told], want[told], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse[:, told], want_lse[:, told], rtol=1e-5, atol=1e-5)
    assert torch.isnan(out[~told]).all() and torch.isnan(lse[:, ~told]).all()


@case("O-MSK-08")
def test_quantised_keys_behind_a_too_small_max_seqlen_give_nan(interpret):
    q, k, v = (x[0] for x in make_qkv(1, 20, 180, 1, 1, 16))
    same = varlen([10, 10], [150, 30]) | {"max_seqlen_k": 100}
    out, lse = interpreted(interpret, q, k, v, "block", **same)
    assert torch.isnan(out[:10]).all() and torch.isnan(lse[:, :10]).all()
    assert_correct(out[None, 10:], q[None, 10:], k[None, 150:], v[None, 150:], "block")


@case("O-MSK-08")
def test_tokens_behind_the_last_sequence_are_left_alone(interpret):
    """A padded batch: the lse of every head still starts at its own row."""
    q, k, v = (x[0] for x in make_qkv(1, 30, 30, 2, 1, 16))
    same = varlen([10, 12], [10, 12])
    short, short_lse = zyfa.attention(q[:22], k[:22], v[:22], return_lse=True, **same)
    out, lse = zyfa.attention(q, k, v, return_lse=True, out=torch.full_like(q, 7.0), **same)
    assert torch.equal(out[:22], short) and (out[22:] == 7).all() and torch.equal(lse[:, :22], short_lse)
    out, lse = interpreted(interpret, q, k, v, out=torch.full_like(q, 7.0), **same)
    torch.testing.assert_close(lse[:, :22], short_lse, rtol=1e-5, atol=1e-5)
    assert (out[22:] == 7).all()


def test_windows_of_any_size_are_limits_or_none():
    q, k, v = make_qkv(1, 20, 30, 1, 1, 16)
    for huge in (2**31 - 1, 2**62):
        assert torch.equal(zyfa.attention(q, k, v, window_size=(huge, huge)), zyfa.attention(q, k, v))


def test_a_huge_window_does_not_wrap_in_the_kernel(interpret):
    from zyfa.checks import UNLIMITED

    q, k, v = make_qkv(1, 20, 30, 1, 1, 16)
    out, lse = interpreted(interpret, q, k, v, window_size=(UNLIMITED, UNLIMITED))
    assert_correct(out, q, k, v)
    assert lse[0, 0, 0].item() == pytest.approx(attention_ref(q, k, v, return_lse=True)[1][0, 0, 0].item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sink_is_part_of_the_lse_also_where_no_key_is_seen(interpret, dtype):
    q, k, v = make_qkv(1, 5, 2, 2, 1, 16)
    sink = torch.tensor([0.4, -1.7]).to(dtype)
    on_cpu = zyfa.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    empty = zyfa.attention(q, k[:, :0], v[:, :0], sink=sink, return_lse=True)
    for out, lse in (on_cpu, interpreted(interpret, q, k, v, causal=True, sink=sink), empty):
        assert (out[:, :3] == 0).all()
        torch.testing.assert_close(lse[0, :, :3], sink.float()[:, None].expand(2, 3), rtol=1e-6, atol=1e-6)
    s = (q[0, 4].float() @ k[0, 0, 0].float() / 4, q[0, 4].float() @ k[0, 1, 0].float() / 4)
    want = torch.stack([*s, sink.float()]).logsumexp(0)
    torch.testing.assert_close(on_cpu[1][0, :, 4], want, rtol=1e-5, atol=1e-5)
    assert math.isfinite(want.sum())
