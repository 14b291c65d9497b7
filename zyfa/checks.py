"""What a call may look like: each rule raises before any launch, with the argument, what it got, what is accepted."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from .config import AttentionKey
from .recipes import PRESETS, QUANT_ROWS

HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}
PRECISIONS = ("auto", "bf16", "fp8", *(f"fp8:{name}" for name in PRESETS))
MAX_HEAD_DIM = 256
# Bases of tiles are 64-bit sums, offsets inside a tile of up to 256 rows (or channels) are 32-bit products.
MAX_ROW_STRIDE = 2**31 // 256
UNLIMITED = 2**30  # a window of this many keys sees all of them, and positions plus it stay 32-bit numbers


class Call(NamedTuple):
    """A checked call: its key and what was normalised on the way."""

    key: AttentionKey
    window_size: tuple[int, int]
    preset: str | None  # the recipe that `precision` asks for, None for the tuned one
    max_seqlen_q: int
    max_seqlen_k: int
    quantises: bool = False  # 16-bit inputs that may run in FP8 with any recipe


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_tensors(q, k, v, varlen: bool) -> None:
    ndim, layout = (3, "(total, nheads, head_dim)") if varlen else (4, "(batch, seqlen, nheads, head_dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != ndim:
            raise ValueError(f"{name} must be {layout}, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or (x.dtype not in HALF and x.dtype not in FP8):
            accepted = "bfloat16, float16 or float8_e4m3fn"
            raise TypeError(f"q, k and v must share a dtype, {accepted}; {name} is {x.dtype}, q is {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device; {name} is on {x.device}, q on {q.device}")
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")
        if x.stride(-3) > MAX_ROW_STRIDE and x.shape[-3] > 1:
            raise ValueError(f"{name} must have rows at most {MAX_ROW_STRIDE} elements apart, got strides {x.stride()}")


def _check_shapes(q, k, v, varlen: bool) -> None:
    nheads, head_dim = q.shape[-2:]
    nheads_k, head_dim_v = v.shape[-2:]
    _require(
        k.shape[:-1] == v.shape[:-1],
        f"k and v must agree but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}",
    )
    _require(k.shape[-1] == head_dim, f"k must have the head_dim of q, {head_dim}, got {k.shape[-1]}")
    _require(varlen or k.shape[0] == q.shape[0], f"k must have the batch of q, {q.shape[0]}, got {k.shape[0]}")
    _require(
        nheads_k > 0 and nheads % nheads_k == 0,
        f"nheads of q must be a multiple of nheads_k of k and v, got nheads {nheads} and nheads_k {nheads_k}",
    )
    for name, d in (("head_dim", head_dim), ("head_dim of v", head_dim_v)):
        _require(
            16 <= d <= MAX_HEAD_DIM and d % 8 == 0,
            f"{name} must be a multiple of 8 from 16 to {MAX_HEAD_DIM}, got {d}",
        )


def _check_offsets(name: str, cu_seqlens, x) -> None:
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"cu_seqlens_{name} must be a 1-D int32 tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        got = f"{cu_seqlens.ndim}-D {cu_seqlens.dtype}"
        raise TypeError(f"cu_seqlens_{name} must be a 1-D int32 tensor, got {got}")
    _require(cu_seqlens.device == x.device, f"cu_seqlens_{name} must be on {x.device}, got {cu_seqlens.device}")
    enough = cu_seqlens.shape[0] >= (2 if x.shape[0] else 1)
    _require(enough, f"cu_seqlens_{name} must hold batch + 1 offsets, got {cu_seqlens.shape[0]}")


def _max_seqlen(name: str, cu_seqlens, x, given: int | None) -> int:
    """The longest sequence, at least 1: as given, read from the offsets, or (capturing a graph) the safe upper bound.

    Offsets are looked at where that needs no waiting for a GPU, or has to be done anyway.
    """
    _check_offsets(name, cu_seqlens, x)
    total = x.shape[0]
    _require(given is None or given >= 0, f"max_seqlen_{name} must be at least 0, got {given}")
    if cu_seqlens.is_cuda and (given is not None or torch.cuda.is_current_stream_capturing()):
        return max(1, total if given is None else min(int(given), total))
    offsets = cu_seqlens.tolist()
    ascending = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= total
    _require(ascending, f"cu_seqlens_{name} must ascend from 0 to at most {total}, got {_spelled(offsets)}")
    longest = max((b - a for a, b in pairwise(offsets)), default=0)
    enough = given is None or given >= longest
    _require(enough, f"max_seqlen_{name} must be at least the longest sequence, {longest}, got {given}")
    return max(1, longest)


def _spelled(offsets: list[int]) -> str:
    return str(offsets) if len(offsets) <= 8 else f"{str(offsets[:8])[:-1]}, ...]"


def _window(causal: bool, window_size) -> tuple[int, int]:
    try:
        left, right = (int(w) for w in window_size)
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size must be two integers (left, right), -1 for unlimited, got {window_size!r}"
        ) from None
    _require(left >= -1 and right >= -1, f"window_size must be at least -1 on both sides, got {window_size!r}")
    return min(left, UNLIMITED), 0 if causal else min(right, UNLIMITED)


def _check_out(out, shape: tuple[int, ...], dtype: torch.dtype, device) -> None:
    matches = tuple(out.shape) == shape and out.dtype == dtype and out.device == device and out.stride(-1) == 1
    wanted = f"{shape} of {dtype} on {device} with a contiguous last dimension"
    _require(matches, f"out must be {wanted}, got {tuple(out.shape)} of {out.dtype} on {out.device}")


def _check_sink(sink, nheads: int, device) -> None:
    if not sink.is_floating_point():
        raise TypeError(f"sink must hold floating-point logits, got {sink.dtype}")
    got = f"{tuple(sink.shape)} with strides {sink.stride()} on {sink.device}"
    matches = tuple(sink.shape) == (nheads,) and sink.is_contiguous() and sink.device == device
    _require(matches, f"sink must have shape ({nheads},), contiguous, on {device}; got {got}")


def _check_precision(precision: str, q, descales) -> None:
    _require(precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    if q.dtype in FP8:
        _require(precision != "bf16", f"precision 'bf16' needs bfloat16 or float16 inputs, q is {q.dtype}")
    elif any(d is not None for d in descales):
        raise ValueError(f"q_descale, k_descale and v_descale belong to FP8 inputs, q is {q.dtype}")


def _varlen_sizes(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> tuple[int, int, int]:
    """(batch, longest query sequence, longest key sequence)."""
    seqlen_q = _max_seqlen("q", cu_seqlens_q, q, max_seqlen_q)
    seqlen_k = _max_seqlen("k", cu_seqlens_k, k, max_seqlen_k)
    lengths = cu_seqlens_q.shape[0], cu_seqlens_k.shape[0]
    _require(lengths[0] == lengths[1], f"cu_seqlens_q and cu_seqlens_k must have one length, got {lengths}")
    return lengths[0] - 1, seqlen_q, seqlen_k


def check_call(
    q, k, v, *, causal, window_size, softcap, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    descales, precision, out, softmax_scale=None,
) -> Call:  # fmt: skip
    """The checked call, or ValueError/TypeError."""
    varlen = cu_seqlens_q is not None
    _require(varlen == (cu_seqlens_k is not None), "cu_seqlens_q and cu_seqlens_k go together, got only one of them")
    _check_tensors(q, k, v, varlen)
    _check_shapes(q, k, v, varlen)
    _check_precision(precision, q, descales)
    left, right = _window(causal, window_size)
    _require(0.0 <= softcap < math.inf, f"softcap must be at least 0 (0 is off) and finite, got {softcap}")
    positive = softmax_scale is None or 0.0 < softmax_scale < math.inf
    _require(positive, f"softmax_scale must be positive and finite, got {softmax_scale}")
    nheads, head_dim = q.shape[-2:]
    if sink is not None:
        _check_sink(sink, nheads, q.device)
    given_fp8 = q.dtype in FP8
    if out is not None:
        _check_out(out, (*q.shape[:-1], v.shape[-1]), torch.bfloat16 if given_fp8 else q.dtype, q.device)
    if varlen:
        sizes = _varlen_sizes(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    else:
        sizes = q.shape[0], q.shape[1], k.shape[1]
    dtype = "fp8" if given_fp8 or precision.startswith("fp8") else HALF[q.dtype]
    window_class = "local" if left >= 0 or (right >= 0 and not causal) else "none"
    key = AttentionKey(dtype, head_dim, v.shape[-1], nheads, v.shape[-2], *sizes, bool(causal), window_class)
    if dtype == "fp8":  # the rows of one head in the quantised buffers, each sequence rounded up to QUANT_ROWS
        rows = max(q.shape[-3], k.shape[-3]) + sizes[0] * QUANT_ROWS
        _require(rows <= MAX_ROW_STRIDE, f"q and k must have at most {MAX_ROW_STRIDE} rows a head in FP8, got {rows}")
    preset = PRESETS[precision[4:]] if precision.startswith("fp8:") else None
    return Call(key, (left, right), preset, sizes[1], sizes[2], quantises=precision == "fp8" and not given_fp8)


def expand_descale(name: str, descale, batch: int, heads: int, device) -> torch.Tensor:
    """A descale as fp32 (batch, heads) on `device`: from None (1.0), a number, one element, or (batch, heads)."""
    if descale is None:
        descale = 1.0
    if isinstance(descale, (int, float)):
        _require(0.0 < descale < math.inf, f"{name} must be positive and finite, got {descale}")
        return torch.full((batch, heads), float(descale), dtype=torch.float32, device=device)
    if not isinstance(descale, torch.Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {type(descale).__name__}")
    _require(
        descale.device == device,
        f"{name} must be on {device}, got {descale.device}: move it once, outside the hot path",
    )
    _require(
        descale.numel() == 1 or tuple(descale.shape) == (batch, heads),
        f"{name} must be a number, one element, or ({batch}, {heads}); got shape {tuple(descale.shape)}",
    )
    shaped = descale.reshape(1, 1) if descale.numel() == 1 else descale
    return shaped.to(torch.float32).expand(batch, heads).contiguous()
