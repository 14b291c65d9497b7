"""Exact attention and the CPU emulation of every recipe: the measure for tests, the tuner's gate and benchmarks.

Everything here is plain PyTorch on any device. `attention_ref` in float64 is the truth; `attention_ref` with
`p_dtype` is the same maths in a working precision; `emulate` follows a recipe step by step.
"""

import torch

from .archs import ARCHS
from .recipes import FP8_MAX, INT8_MAX, MX_GROUP, QUANT_ROWS, RECIPES, Recipe, p_offset

TILE = 128  # keys of one step of the online softmax; P is cast against the running maximum of the steps so far
ROWS = 1024  # query rows at a time: bounds the memory of long sequences
MIN_SCALE, MIN_V_SCALE = 1e-12, 2.0**-30  # as in kernels/scales.py


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; 0.0 when both are zero, NaN if either holds one."""
    out, ref = out.double(), ref.double().to(out.device)
    size = ref.norm()
    return float((out - ref).norm() / size) if size > 0 else float(out.norm())


def visible(
    rows: torch.Tensor, cols: torch.Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window_size
) -> torch.Tensor:
    """(rows, cols) boolean: may query row i see key j? Bottom-right aligned, window inclusive, -1 unlimited."""
    left, right = window_size[0], 0 if causal else window_size[1]
    distance = cols[None, :] - (rows[:, None] + seqlen_k - seqlen_q)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        keep &= distance <= right
    if left >= 0:
        keep &= distance >= -left
    return keep


def _cast_fp8(x: torch.Tensor, fp8_format: str) -> torch.Tensor:
    """Rounded to FP8 and back, saturating; NaN stays NaN."""
    dtype = torch.float8_e4m3fn if fp8_format == "e4m3fn" else torch.float8_e4m3fnuz
    top = FP8_MAX[fp8_format]
    return x.float().clamp(-top, top).to(dtype).to(x.dtype)


def _amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """The largest magnitude of what shares a scale, for every element of x (batch, heads, rows, width)."""
    size, (b, h, n, width) = x.abs(), x.shape
    if granularity == "tensor":
        return size.amax().expand_as(x)
    if granularity == "mx":
        padded = torch.nn.functional.pad(size, (0, -width % MX_GROUP)).unflatten(3, (-1, MX_GROUP)).amax(4)
        return padded.repeat_interleave(MX_GROUP, 3)[..., :width]
    if granularity == "block":
        padded = torch.nn.functional.pad(size.amax(3), (0, -n % QUANT_ROWS)).view(b, h, -1, QUANT_ROWS).amax(3)
        return padded.repeat_interleave(QUANT_ROWS, 2)[:, :, :n, None].expand_as(x)
    axes = {"head": (2, 3), "row": (3,), "channel": (2,)}[granularity]
    return size.amax(axes, keepdim=True).expand_as(x)


def _scales(x: torch.Tensor, granularity: str, top: float, is_v: bool) -> torch.Tensor:
    """The scale of every element of x (batch, heads, rows, width)."""
    scale = (_amax(x, granularity).float() / top).clamp_min(MIN_SCALE)
    if is_v or granularity == "mx":  # a power of two, rounded up
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return (scale.clamp_min(MIN_V_SCALE) if is_v else scale).to(x.dtype)


def fake_quantise(x, recipe: Recipe, fp8_format: str = "e4m3fn", is_v: bool = False) -> torch.Tensor:
    """x (batch, heads, rows, width) rounded as the recipe's quantiser rounds it, in the dtype of x."""
    if x.numel() == 0 or (recipe.qk == "bf16" and not is_v):
        return x
    if recipe.qk == "int8" and not is_v:
        scale = _scales(x, recipe.granularity, INT8_MAX, is_v)
        return torch.round((x / scale).clamp(-INT8_MAX, INT8_MAX)) * scale
    scale = _scales(x, recipe.v_scaled_by if is_v else recipe.granularity, FP8_MAX[fp8_format], is_v)
    return _cast_fp8(x / scale, fp8_format) * scale


def hadamard(width: int, device=None) -> torch.Tensor:
    """The symmetric orthogonal matrix of order `width`, a power of two: +-1 by the parity of i & j, normalised."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h * width**-0.5


def _equaliser(q, k, group: int) -> torch.Tensor:
    """s (batch, nheads_k, width) = sqrt(rms k / rms q) of each channel, of K about its mean."""
    k_square = (k - k.mean(2, keepdim=True)).pow(2).mean(2)
    q_square = q.pow(2).mean(2).unflatten(1, (-1, group)).mean(2)
    return (k_square / q_square.clamp_min(1e-20)).sqrt().sqrt().clamp(2.0**-10, 2.0**10)


def turned(q, k, s):
    """(Q, K), their channels times s and over it (None: 1), times a Hadamard matrix: Q K^T stays as it is.

    s (batch, nheads_k, width) is rounded to the nearest power of two and about sqrt(width) is a power of two in each:
    exact in every dtype.
    """
    width = 1 << (q.shape[3] - 1).bit_length()
    s = torch.ones_like(k[:, :, 0]) if s is None else s
    t = torch.exp2(s.log2().round() - (width.bit_length() - 1) // 2)[:, :, None]
    q, k = q * t.repeat_interleave(q.shape[1] // k.shape[1], 1), k / (t * width)
    h = hadamard(width, q.device).sign()
    q, k = (torch.nn.functional.pad(x, (0, width - x.shape[3])) @ h for x in (q, k))
    return q, k


def smooth(q, k, recipe: Recipe):
    """(q, k, q_mean, k): Q and K as they are rounded, the mean that Q lost and the centred K that it multiplies.

    q (batch, nheads, rows, width), k (batch, nheads_k, rows, width) in fp32. q k^T + q_mean k_centred^T are the logits
    but for one number a row.
    """
    group = q.shape[1] // k.shape[1]
    if recipe.k_mean:
        k = k - k.mean(2, keepdim=True)
    centred, q_mean = k, None
    if recipe.q_mean:
        q_mean = q.mean(2, keepdim=True)
        q = q - q_mean
    if recipe.hadamard:
        q, k = turned(q, k, _equaliser(q, k, group) if recipe.equalise else None)
    return q, k, q_mean, centred


def _softmax_v(q, k, v, lo, seqlen_q, causal, window_size, softcap, sink, p_cast, p_offset):
    """Output and natural LSE of the query rows q (b, hk, group, rows, d) that start at row `lo`; q holds the scale."""
    rows = torch.arange(lo, lo + q.shape[3], device=q.device)
    seqlen_k = k.shape[2]
    m = q.new_full(q.shape[:4], float("-inf"))
    total = torch.zeros_like(m)
    if sink is not None:
        m = sink.to(q).view(1, k.shape[1], -1, 1).expand_as(m).clone()
        total = torch.ones_like(m)
    out = q.new_zeros((*q.shape[:4], v.shape[3]))
    for n in range(0, seqlen_k, TILE):
        s = q @ k[:, :, None, n : n + TILE].transpose(-1, -2)
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        cols = torch.arange(n, min(n + TILE, seqlen_k), device=q.device)
        s = s.masked_fill(~visible(rows, cols, seqlen_q, seqlen_k, causal, window_size), float("-inf"))
        m_new = torch.maximum(m, s.amax(-1))
        shift = torch.where(m_new == float("-inf"), torch.zeros_like(m_new), m_new)
        p = torch.exp(s - shift[..., None])
        alpha = torch.exp(m - shift)
        total = total * alpha + p.sum(-1)
        if p_cast is not None:
            p = p_cast(p * 2.0**p_offset) * 2.0**-p_offset
        out = out * alpha[..., None] + p @ v[:, :, None, n : n + TILE]
        m = m_new
    lse = m + torch.log(total)
    return out / torch.where(total == 0, torch.ones_like(total), total)[..., None], lse


def _dense(q, k, v, *, causal, softmax_scale, window_size, softcap, sink, p_cast=None, p_offset=0):
    """(out, lse) of (batch, heads, seqlen, head_dim) tensors in one floating dtype, GQA by grouping."""
    b, h, sq, d = q.shape
    group = max(h // max(k.shape[1], 1), 1)
    q = (q * softmax_scale).view(b, k.shape[1], group, sq, d)
    parts = [
        _softmax_v(q[:, :, :, lo : lo + ROWS], k, v, lo, sq, causal, window_size, softcap, sink, p_cast, p_offset)
        for lo in range(0, sq, ROWS)
    ]
    if not parts:
        return q.new_zeros((b, h, 0, v.shape[3])), q.new_zeros((b, h, 0))
    out = torch.cat([o for o, _ in parts], 3).reshape(b, h, sq, v.shape[3])
    return out, torch.cat([lse for _, lse in parts], 3).reshape(b, h, sq)


def attention_ref(
    q, k, v, *, causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0, sink=None,
    dtype=torch.float64, p_dtype=None, return_lse=False,
):  # fmt: skip
    """Attention computed in `dtype`: out (batch, seqlen_q, nheads, head_dim_v) of that dtype.

    q (batch, seqlen_q, nheads, head_dim), k, v (batch, seqlen_k, nheads_k, ...). With p_dtype (bf16, fp16) P and the
    output are rounded to it, which is what a kernel in that dtype does. return_lse: (out, lse), lse (batch, nheads,
    seqlen_q), natural.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    p_cast = None if p_dtype is None else lambda p: p.to(p_dtype).to(dtype)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    out, lse = _dense(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=scale,
        window_size=window_size,
        softcap=softcap,
        sink=sink,
        p_cast=p_cast,
    )
    out = out.transpose(1, 2)
    if p_dtype is not None:
        out = out.to(p_dtype).to(dtype)
    return (out, lse) if return_lse else out


def emulate(
    q, k, v, recipe: str, *, arch="gfx950", causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0,
    sink=None, descales=None, return_lse=False,
):  # fmt: skip
    """The arithmetic of a recipe on any device: Q, K, V and P rounded as the kernels round them, sums in fp32.

    Shapes as attention_ref; out in bf16 (fp16 for fp16 inputs). FP8 inputs come with `descales`, fp32 (batch, nheads)
    and (batch, nheads_k) twice, and are used as they are.
    """
    rule, fp8_format = RECIPES[recipe], ARCHS[arch].fp8_format
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out_dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    if descales is not None:
        q, k, v = (x * s[:, :, None, None] for x, s in zip((q, k, v), descales, strict=True))
    elif k.shape[2] and q.shape[2]:
        q, k, v = _fake_quantise_all(q, k, v, rule, fp8_format, keep_mean=return_lse or softcap > 0 or sink is not None)
    out, lse = _dense(
        q, k, v, causal=causal, softmax_scale=scale, window_size=window_size, softcap=softcap, sink=sink,
        p_cast=lambda p: _cast_fp8(p, fp8_format), p_offset=p_offset(rule, fp8_format),
    )  # fmt: skip
    out = out.transpose(1, 2).to(out_dtype)
    return (out, lse) if return_lse else out


def _fake_quantise_all(q, k, v, rule: Recipe, fp8_format: str, keep_mean: bool):
    """Q, K, V as the matrix units see them; exact corrections ride in extra channels of Q and K."""
    k_mean = k.mean(2, keepdim=True)
    q8, k8, q_mean, centred = smooth(q, k, rule)
    q8, k8 = fake_quantise(q8, rule, fp8_format), fake_quantise(k8, rule, fp8_format)
    if q_mean is not None:
        q8, k8 = torch.cat([q8, q_mean.expand_as(q)], 3), torch.cat([k8, centred], 3)
    if rule.k_mean and keep_mean:  # the true logits: what K's mean took from every logit of a row
        group = q.shape[1] // k.shape[1]
        shift = (q * k_mean.repeat_interleave(group, 1)).sum(3, keepdim=True)
        q8, k8 = torch.cat([q8, shift], 3), torch.cat([k8, torch.ones_like(k[..., :1])], 3)
    return q8, k8, fake_quantise(v, rule, fp8_format, is_v=True)
