"""From a block of fp32 values to eight bits: the scales of every granularity, rounding, and where both are stored."""

import triton
import triton.language as tl

# V scales are powers of two in [2**-30, 2**90]: attn_fwd changes units between blocks and must not overflow.
MIN_V_SCALE: tl.constexpr = tl.constexpr(2.0**-30)
# The least scale: an all-zero block must give 0, not 0 / 0, and the product of two must stay a normal number, or the
# -inf of a masked logit times 0 gives NaN.
MIN_SCALE: tl.constexpr = tl.constexpr(1e-12)
# Adding it to |x| <= 2**22 leaves x rounded to the nearest integer, ties to even, in the low bits.
ROUND: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
MX_GROUP: tl.constexpr = tl.constexpr(32)  # channels that share a scale in the OCP microscaling formats


@triton.jit
def _max_of(amax, lo, hi):
    """The maximum of amax[lo:hi]."""
    best = tl.zeros([1024], tl.float32)
    for i in range(lo, hi, 1024):
        offs = i + tl.arange(0, 1024)
        best = tl.maximum(best, tl.load(amax + offs, offs < hi, other=0.0))
    return tl.max(best)


@triton.jit
def extent(which, i, n_q, n_k, per_head, GRANULARITY: tl.constexpr):
    """The values of block_amax that the scale of block i of a tensor comes from, [first, last)."""
    first = tl.where(which == 0, 0, n_q + (which - 1) * n_k)
    last = tl.where(which == 0, n_q, n_q + which * n_k)
    if GRANULARITY == "head":
        first += i // per_head * per_head
        last = first + per_head
    return first, last


@triton.jit
def _amax(
    y, amax, amax_lo, amax_hi, b, h, heads,
    BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, GRANULARITY: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The magnitudes that the scales come from: a number, (rows), (rows, groups) or (channels)."""
    if GRANULARITY == "block":
        top = tl.max(tl.abs(y))
    elif GRANULARITY == "row":
        top = tl.max(tl.abs(y), 1)
    elif GRANULARITY == "mx":
        top = tl.max(tl.reshape(tl.abs(y), [QUANT_ROWS, BLOCK_D // MX_GROUP, MX_GROUP]), 2)
    elif GRANULARITY == "channel":
        parts = amax + tl.cast(b * heads + h, tl.int64) * CHUNKS * BLOCK_D
        top = tl.max(tl.load(parts + tl.arange(0, CHUNKS)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]), 0)
    else:
        top = _max_of(amax, amax_lo, amax_hi)
    return top


@triton.jit
def _scaled(y, scale, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, GRANULARITY: tl.constexpr):
    inverse = 1.0 / scale
    if GRANULARITY == "row":
        y = y * inverse[:, None]
    elif GRANULARITY == "mx":
        y = tl.reshape(y, [QUANT_ROWS, BLOCK_D // MX_GROUP, MX_GROUP]) * inverse[:, :, None]
        y = tl.reshape(y, [QUANT_ROWS, BLOCK_D])
    elif GRANULARITY == "channel":
        y = y * inverse[None, :]
    else:
        y = y * inverse
    return y


@triton.jit
def _store_scale(
    scale, descale, b, h, head, heads, out_block, rows8,
    BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, GRANULARITY: tl.constexpr,
):  # fmt: skip
    offs_n = tl.cast(head, tl.int64) * rows8 + out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
    if GRANULARITY == "block":
        tl.store(descale + head * (rows8 // QUANT_ROWS) + out_block, scale)
    elif GRANULARITY == "row":
        tl.store(descale + offs_n, scale)
    elif GRANULARITY == "mx":  # the biased exponent of a power of two is its e8m0
        groups = tl.arange(0, BLOCK_D // MX_GROUP)
        exponent = (tl.cast(scale, tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(descale + offs_n[:, None] * (BLOCK_D // MX_GROUP) + groups[None, :], exponent)
    elif GRANULARITY == "channel":  # every block of the head writes the same
        tl.store(descale + (b * heads + h) * BLOCK_D + tl.arange(0, BLOCK_D), scale)
    elif GRANULARITY == "head":
        tl.store(descale + b * heads + h, scale)
    elif GRANULARITY == "tensor":
        tl.store(descale, scale)


@triton.jit
def write(
    y, X8, descale, amax, amax_lo, amax_hi, b, h, heads, out_block, rows8,
    VARLEN: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, TOP: tl.constexpr,
    GRANULARITY: tl.constexpr, IS_V: tl.constexpr, TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Scale, round, clamp and store one block of one tensor, and its scales.

    INTERLEAVED: each 16 rows in the order in which lanes of attn_gluon hold columns of P: 8i + 2t + j at 4t + 2i + j.
    """
    head = h if VARLEN else b * heads + h
    if GRANULARITY != "given":
        top = _amax(y, amax, amax_lo, amax_hi, b, h, heads, BLOCK_D, QUANT_ROWS, GRANULARITY, CHUNKS)
        scale = tl.maximum(top * (1.0 / TOP), MIN_SCALE)
        if IS_V or GRANULARITY == "mx":  # up to a power of two: e4m3 keeps its bits, changing V's units is exact
            bits = (tl.cast(scale, tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scale = tl.maximum(bits.to(tl.float32, bitcast=True), MIN_V_SCALE if IS_V else MIN_SCALE)
        y = _scaled(y, scale, BLOCK_D, QUANT_ROWS, GRANULARITY)
        _store_scale(scale, descale, b, h, head, heads, out_block, rows8, BLOCK_D, QUANT_ROWS, GRANULARITY)
    # The clamp is explicit: gfx950's cast does not saturate. NaN stays NaN.
    y = tl.clamp(y, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)
    if X8.dtype.element_ty == tl.int8:  # the sum's last mantissa bits are the nearest integer
        y = (y + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        y = y.to(X8.dtype.element_ty)
    offs_n = out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    head8 = X8 + tl.cast(head, tl.int64) * BLOCK_D * rows8
    if TRANSPOSED:
        y = tl.trans(y)
        if INTERLEAVED:
            y = tl.permute(tl.reshape(y, [BLOCK_D, QUANT_ROWS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
            y = tl.reshape(y, [BLOCK_D, QUANT_ROWS])
        tl.store(head8 + offs_d[:, None] * rows8 + offs_n[None, :], y)
    else:
        tl.store(head8 + offs_n[:, None] * BLOCK_D + offs_d[None, :], y)
