"""Properties of zyfa.attention on random calls: the tolerance rule, and what must not change a result."""

import torch
from helpers import assert_correct
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import zyfa
from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref, relative_error

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.load_profile("repeatable")

LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 150]))
HEADS = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 2)])  # (nheads, nheads_k)
HEAD_DIMS = st.sampled_from([16, 24, 64, 72])
MASKS = st.sampled_from([
    {}, {"causal": True}, {"window_size": (7, 3)}, {"causal": True, "window_size": (40, -1)}, {"window_size": (-1, 5)},
])  # fmt: skip
SEEDS = st.integers(0, 1000)


def view(x, layout: str):
    """The same values in another memory layout."""
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "wide rows":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x


@st.composite
def calls(draw, dtypes=(torch.bfloat16, torch.float16)):
    """(q, k, v) of random sizes, layouts and dtype."""
    seqlen_q, seqlen_k, (nheads, nheads_k) = draw(LENGTHS), draw(LENGTHS), draw(HEADS)
    head_dim, head_dim_v, batch = draw(HEAD_DIMS), draw(HEAD_DIMS), draw(st.integers(1, 2))
    dtype, g = draw(st.sampled_from(dtypes)), torch.Generator().manual_seed(draw(SEEDS))
    sizes = (seqlen_q, nheads, head_dim), (seqlen_k, nheads_k, head_dim), (seqlen_k, nheads_k, head_dim_v)
    layouts = st.sampled_from(["as is", "heads first", "wide rows"])
    return tuple(view(torch.randn(batch, *s, generator=g).to(dtype), draw(layouts)) for s in sizes)


@settings(max_examples=100)
@given(calls(), MASKS, st.sampled_from([0.0, 5.0]), st.booleans(), st.sampled_from(["bf16", *PRESETS]))
def test_random_calls_obey_the_tolerance_rule(qkv, mask, softcap, with_sink, preset):
    q = qkv[0]
    sink = torch.linspace(-1, 1, q.shape[2]) if with_sink else None
    same = mask | {"softcap": softcap, "sink": sink}
    precision = "bf16" if preset == "bf16" else f"fp8:{preset}"
    out, lse = zyfa.attention(*qkv, precision=precision, return_lse=True, **same)
    assert_correct(out, *qkv, "none" if preset == "bf16" else PRESETS[preset], **same)
    want = attention_ref(*qkv, return_lse=True, **same)[1]
    assert torch.equal(torch.isinf(lse), torch.isinf(want)) and not torch.isnan(lse).any()
    assert out.dtype == q.dtype and out.shape == (*q.shape[:-1], qkv[2].shape[-1])


@settings(max_examples=30)
@given(calls(), MASKS, st.sampled_from(["bf16", "fp8:balanced"]))
def test_memory_layout_does_not_matter(qkv, mask, precision):
    copies = [x.contiguous() for x in qkv]
    assert torch.equal(
        zyfa.attention(*qkv, precision=precision, **mask), zyfa.attention(*copies, precision=precision, **mask)
    )


@settings(max_examples=30)
@given(calls(dtypes=(torch.float16,)), MASKS, st.integers(-8, 8))
def test_a_shift_of_all_logits_of_a_row_moves_only_the_lse(qkv, mask, shift):
    """One more channel, 1 in q and `shift` in all keys, adds a constant to every logit of a row."""
    q, k, v = (x.contiguous() for x in qkv)
    pad = [torch.nn.functional.pad(x, (0, 8)) for x in (q, k)]
    shifted = [x.clone() for x in pad]
    shifted[0][..., -1], shifted[1][..., -1] = 1, shift
    lse = zyfa.attention(*pad, v, softmax_scale=1.0, return_lse=True, **mask)[1]
    moved, moved_lse = zyfa.attention(*shifted, v, softmax_scale=1.0, return_lse=True, **mask)
    seen = torch.isfinite(lse)
    torch.testing.assert_close(moved_lse[seen], lse[seen] + shift, rtol=1e-5, atol=1e-4)
    ref = attention_ref(*pad, v, softmax_scale=1.0, **mask)
    assert relative_error(moved, ref) <= 2 * relative_error(
        attention_ref(*pad, v, softmax_scale=1.0, dtype=torch.float32, p_dtype=q.dtype, **mask), ref
    )


@settings(max_examples=30)
@given(calls(), SEEDS, st.sampled_from(["bf16", "fp8:per_tensor"]))
def test_keys_may_come_in_any_order(qkv, seed, precision):
    q, k, v = qkv
    order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(seed))
    out = zyfa.attention(q, k[:, order], v[:, order], precision=precision)
    assert_correct(out, q, k, v, "none" if precision == "bf16" else "tensor")


@settings(max_examples=30)
@given(calls(dtypes=(torch.bfloat16,)), st.integers(1, 149))
def test_parts_over_the_keys_merge_by_their_lse(qkv, split):
    q, k, v = qkv
    assume(split < k.shape[1])
    v = v.clamp(-1, 1) / 8  # the bound is absolute: bf16 rounds outputs below 1/8 to 2**-12
    whole, whole_lse = zyfa.attention(q, k, v, return_lse=True)
    parts = [zyfa.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(split), slice(split, None))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o.float() * (x - lse).exp().transpose(1, 2)[..., None] for o, x in parts)
    assert (merged - whole.float()).abs().max() < 1e-3
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(calls(), MASKS, st.sampled_from(["bf16", "fp8:fast"]))
def test_a_batch_is_a_packed_batch_of_equal_lengths(qkv, mask, precision):
    q, k, v = qkv
    offsets = [torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    same = mask | {"precision": precision, "return_lse": True}
    out, lse = zyfa.attention(q, k, v, **same)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed, packed_lse = zyfa.attention(*flat, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **same)
    torch.testing.assert_close(packed.view_as(out), out, rtol=2**-7, atol=2**-10)  # one step of bf16
    torch.testing.assert_close(packed_lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1), lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(calls(), MASKS, SEEDS, st.sampled_from(["bf16", "fp8:balanced"]))
def test_heads_do_not_know_each_other(qkv, mask, seed, precision):
    """Permuting the KV heads, and with them the groups of query heads, permutes the output."""
    q, k, v = qkv
    heads_k = k.shape[2]
    group = q.shape[2] // heads_k
    order = torch.randperm(heads_k, generator=torch.Generator().manual_seed(seed))
    order_q = (order[:, None] * group + torch.arange(group)).flatten()
    out = zyfa.attention(q, k, v, precision=precision, **mask)
    permuted = zyfa.attention(q[:, :, order_q], k[:, :, order], v[:, :, order], precision=precision, **mask)
    torch.testing.assert_close(permuted, out[:, :, order_q], rtol=2**-7, atol=2**-10)
