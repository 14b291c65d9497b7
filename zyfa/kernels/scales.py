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
def _max_of(amax, n):
    """The maximum of n values."""
    best = tl.zeros([1024], tl.float32)
    for i in range(0, n, 1024):
        offs = i + tl.arange(0, 1024)
        best = tl.maximum(best, tl.load(amax + offs, offs < n, other=0.0))
    return tl.max(best)


@triton.jit
def _amax(
    y, amax, all_heads, b, h, heads,
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
    elif GRANULARITY == "head":
        top = tl.max(tl.load(amax + (b * heads + h) * CHUNKS + tl.arange(0, CHUNKS)))
    else:
        top = _max_of(amax, all_heads * CHUNKS)
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
def _round(y, X8):
    """Values in the element type of X8; they stay as they are where they have it.

    No clamp: their scale came from the largest of them, which ends within rounding of the type's largest value, less
    than half a step above it. NaN stays NaN in FP8.
    """
    if y.dtype == X8.dtype.element_ty:
        return y
    y = y.to(tl.float32)
    if X8.dtype.element_ty == tl.int8:  # the sum's last mantissa bits are the nearest integer
        return (y + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    return y.to(X8.dtype.element_ty)


@triton.jit
def _power_of_two(scale, LEAST: tl.constexpr):
    """The scale, up to a power of two: e4m3 keeps its bits, and changing units is exact."""
    bits = (tl.cast(scale, tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.maximum(bits.to(tl.float32, bitcast=True), LEAST)


@triton.jit
def write(
    y, X8, descale, amax, all_heads, b, h, heads, head, out_block, rows8,
    BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, TOP: tl.constexpr, GRANULARITY: tl.constexpr,
    IS_V: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Scale, round and store one block of one tensor, and its scales.

    head: in X8, whose batch axis is folded with varlen. amax: of "head" and "tensor" (batch, heads, CHUNKS), of
    "channel" with the width behind; all_heads: batch * heads.
    """
    if GRANULARITY != "given":
        y = y.to(tl.float32)
        top = _amax(y, amax, all_heads, b, h, heads, BLOCK_D, QUANT_ROWS, GRANULARITY, CHUNKS)
        scale = tl.maximum(top * (1.0 / TOP), MIN_SCALE)
        if IS_V or GRANULARITY == "mx":
            scale = _power_of_two(scale, MIN_V_SCALE if IS_V else MIN_SCALE)
        y = _scaled(y, scale, BLOCK_D, QUANT_ROWS, GRANULARITY)
        _store_scale(scale, descale, b, h, head, heads, out_block, rows8, BLOCK_D, QUANT_ROWS, GRANULARITY)
    offs_n = out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
    head8 = X8 + tl.cast(head, tl.int64) * BLOCK_D * rows8
    tl.store(head8 + offs_n[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], _round(y, X8))


@triton.jit
def quad_rows(QUANT_ROWS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first row of each four that are neighbours in V stored transposed: r, r + 1, r + 2, r + 3.

    INTERLEAVED: r, r + 1, r + 8, r + 9, so that each 16 are in the order in which lanes of attn_gluon hold columns
    of P: 8i + 2t + j at 4t + 2i + j.
    """
    quad = tl.arange(0, QUANT_ROWS // 4)
    return quad // 4 * 16 + quad % 4 * 2 if INTERLEAVED else quad * 4


@triton.jit
def write_transposed(
    y, X8, descale, amax, all_heads, b, h, heads, head, out_block, rows8,
    BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, TOP: tl.constexpr, GRANULARITY: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """write() of V as (width, rows); y (QUANT_ROWS / 4, BLOCK_D, 2, 2) holds the four rows of each of quad_rows().

    A lane that holds four neighbours of the result moves 32 bits at a time through shared memory, not single bytes.
    """
    y = tl.reshape(y, [QUANT_ROWS // 4, BLOCK_D, 4])
    if GRANULARITY != "given":
        y = y.to(tl.float32)
        top = _amax(y, amax, all_heads, b, h, heads, BLOCK_D, QUANT_ROWS, GRANULARITY, CHUNKS)
        scale = _power_of_two(tl.maximum(top * (1.0 / TOP), MIN_SCALE), MIN_V_SCALE)
        inverse = 1.0 / scale
        y = y * inverse[None, :, None] if GRANULARITY == "channel" else y * inverse
        _store_scale(scale, descale, b, h, head, heads, out_block, rows8, BLOCK_D, QUANT_ROWS, GRANULARITY)
    y = tl.reshape(tl.permute(_round(y, X8), [1, 0, 2]), [BLOCK_D, QUANT_ROWS])
    offs_n = out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
    head8 = X8 + tl.cast(head, tl.int64) * BLOCK_D * rows8
    tl.store(head8 + tl.arange(0, BLOCK_D)[:, None] * rows8 + offs_n[None, :], y)
