"""What tests share: inputs, and the one rule of what counts as correct."""

import pytest
import torch

from zyfa.config import AttentionConfig
from zyfa.kernels.launch import attention_forward
from zyfa.reference import attention_ref, emulate, relative_error


def make_qkv(
    batch,
    seqlen_q,
    seqlen_k,
    nheads,
    nheads_k,
    head_dim,
    head_dim_v=None,
    dtype=torch.bfloat16,
    device="cpu",
    seed=0,
):
    """q, k, v in (batch, seqlen, heads, width): normal, with a channel of K that has a large mean."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, seqlen_q, nheads, head_dim, generator=g)
    k = torch.randn(batch, seqlen_k, nheads_k, head_dim, generator=g)
    v = torch.randn(batch, seqlen_k, nheads_k, head_dim_v or head_dim, generator=g)
    k[..., 1] += 3.0
    return tuple(x.to(dtype).to(device) for x in (q, k, v))


def assert_correct(out, q, k, v, recipe="none", arch="gfx950", **same):
    """At most 2x the error of the same maths in the plain dtype, 1.5x the emulation of the recipe for FP8."""
    ref = attention_ref(q, k, v, **same)
    if recipe == "none":
        base, factor = attention_ref(q, k, v, dtype=torch.float32, p_dtype=q.dtype, **same), 2.0
    else:
        base, factor = emulate(q, k, v, recipe, arch=arch, **same), 1.5
    error, bound = relative_error(out, ref), factor * relative_error(base, ref)
    assert error <= bound, f"error {error:.3e} exceeds {factor} x the plain error: {bound:.3e}"
    return error


def varlen(lengths_q, lengths_k) -> dict:
    """The arguments of a packed batch of these lengths."""
    offsets = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)]
    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    return {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], **longest}


def assert_lse(lse, q, k, v, **same):
    """Minus infinity where it should be, and elsewhere what fp32 gives of the natural logarithm."""
    want = attention_ref(q, k, v, return_lse=True, **same)[1]
    assert torch.equal(torch.isinf(lse), torch.isinf(want))
    finite = torch.isfinite(want)
    torch.testing.assert_close(lse.double()[finite], want[finite], rtol=1e-5, atol=1e-5)


def run(interpret, q, k, v, config, arch="gfx950", out=None, return_lse=True, **same):
    """(out, lse) of the real kernels, into an output full of NaN so that a row nobody writes shows."""
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=dtype) if out is None else out
    return interpret(attention_forward, q, k, v, config=config, arch=arch, out=out, return_lse=return_lse, **same)


def interpreted(interpret, q, k, v, recipe="none", arch="gfx950", BLOCK_M=64, BLOCK_N=32, out=None, **same):
    """run() with a small tile."""
    return run(interpret, q, k, v, AttentionConfig(BLOCK_M, BLOCK_N, 4, 1, recipe=recipe), arch, out, **same)


# Masks and options that every kernel is tried with.
FEATURES = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (30, -1)},
    {"window_size": (30, 20)},
    {"window_size": (1, 0)},
    {"causal": True, "softcap": 5.0},
]


def launch_inputs(q=None, sink=None, cu_seqlens=None):
    """What launch.runnable() is asked about: head dim 64, BF16."""
    x = torch.empty(1, 512, 8, 64, dtype=torch.bfloat16)
    return (x if q is None else q, x, x, x, None, sink, cu_seqlens, cu_seqlens, None, None, None)


def lacking(**more):
    """Parametrises with what no Gluon kernel runs: (inputs of a launch, softcap), and with `more` inputs."""
    odd = torch.empty(1, 512, 8 * 64 + 1, dtype=torch.bfloat16)[..., 1:].unflatten(-1, (8, 64))
    calls = {
        "softcap": (launch_inputs(), 20.0),
        "sink": (launch_inputs(sink=torch.zeros(8)), 0.0),
        "varlen": (launch_inputs(cu_seqlens=torch.tensor([0, 512], dtype=torch.int32)), 0.0),
        "unaligned": (launch_inputs(odd), 0.0),
    } | {name: (launch_inputs(q), 0.0) for name, q in more.items()}
    return pytest.mark.parametrize("lacks, softcap", calls.values(), ids=calls)
