"""The softmax of attn_gluon: what a consumer makes of the scores of its 64 rows, and what new maxima do to its sums.

A WGMMA leaves each row of 8 columns in four lanes. Maxima and sums of a row are kept by lanes, (ROWS, 4): the maxima
are the same in all four, the sums are those of a lane's columns and meet at the end.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_ring import ROWS

MAX_RATIO = gl.constexpr(2.0**90)  # as in attn_fwd
NO_KEY = gl.constexpr(-1e30)  # a row maximum before any key: finite, so that no difference of maxima is NaN
BIAS = gl.constexpr(12582912.0)  # 1.5 * 2**23: the last mantissa bits of BIAS + n are the integer n
BIAS_BITS = gl.constexpr(0x4B400000)
# By how much, in base 2, a row's scores may pass its maximum before the maximum moves and the output is rescaled. BF16
# and FP16 have the bits of a weight of 256; E4M3 has not (its weights reach 2**8 of 448), and with 0.8 moves stay so
# frequent that asking costs more than multiplying (H200, head dim 128, 8k: 0.93 to 0.98 of the time's inverse).
SLACK = 8.0
_SLACK_BITS = "0f" + struct.pack(">f", SLACK).hex()
_SHUFFLES = (
    " shfl.sync.bfly.b32 c, a, 1, 31, -1; shfl.sync.bfly.b32 d, b, 1, 31, -1; max.f32 a, a, c; max.f32 b, b, d;"
    " shfl.sync.bfly.b32 c, a, 2, 31, -1; shfl.sync.bfly.b32 d, b, 2, 31, -1; max.f32 a, a, c; max.f32 b, b, d;"
)
# Both of a lane's rows: the lanes exchange their maxima only where one of the warp's passes its limit.
_LAZY_MAXIMA = gl.constexpr(
    "{ .reg .pred p, q; .reg .f32 a, b, c, d; sub.f32 c, $2, $4; sub.f32 d, $3, $5;"
    f" setp.gt.f32 p, c, {_SLACK_BITS}; setp.gt.or.f32 q, d, {_SLACK_BITS}, p; vote.sync.any.pred p, q, -1;"
    f" mov.f32 $0, $4; mov.f32 $1, $5; @!p bra.uni DONE; mov.f32 a, $2; mov.f32 b, $3;{_SHUFFLES}"
    f" sub.f32 c, a, $4; sub.f32 d, b, $5; setp.gt.f32 p, c, {_SLACK_BITS}; selp.f32 $0, a, $4, p;"
    f" setp.gt.f32 p, d, {_SLACK_BITS}; selp.f32 $1, b, $5, p; DONE: }}"
)
_MAXIMA = gl.constexpr(
    f"{{ .reg .f32 a, b, c, d; mov.f32 a, $2; mov.f32 b, $3;{_SHUFFLES} max.f32 $0, a, $4; max.f32 $1, b, $5; }}"
)


@gluon.constexpr_function
def _lazy_product(n):
    """PTX for n values of a lane, in two rows, times the factors of their rows; a warp of ones multiplies nothing."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 q, ${2 * n + 2}, 0f3F800000, p;"
        f" vote.sync.any.pred p, q, -1; @!p bra.uni DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _in_place(n):
    """Constraints of n results in the registers of the first n of 2 n operands."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _by_lanes(x):
    """A consumer's sums as (rows, groups of 8 columns, lanes of a row, columns of a lane)."""
    return gl.reshape(x, [ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def _along(x, like):
    """One value a row and lane, for all that this lane holds of the row in a tensor by lanes."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout)))
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon.jit
def _tops(s, INT8: gl.constexpr):
    """The largest score of each row and lane."""
    s = _by_lanes(s)
    if INT8:  # biased scores are positive, whose order is that of their bits: Hopper has a maximum of three integers
        tops = gl.max(gl.max(s.to(gl.int32, bitcast=True), 3), 1).to(gl.float32, bitcast=True) - BIAS
    else:
        tops = gl.max(gl.max(s, 3), 1)
    return tops


@gluon.jit
def _maxima(tops, m, c: gl.constexpr):
    """The maxima m of the rows after a tile with these tops (times the scale of logits)."""
    return gl.inline_asm_elementwise(
        _MAXIMA if c.V_QUANTISED else _LAZY_MAXIMA, "=f,=f,f,f,f,f", [tops, m], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def _weights(s, m, scale, INT8: gl.constexpr, c: gl.constexpr):
    """(exponentials of the scores of a tile, their sums by lanes)."""
    shift = m - c.P_OFFSET
    if INT8:
        shift += BIAS * scale
    s = _by_lanes(s)
    BLOCK_N: gl.constexpr = c.BLOCK_N
    e = gl.exp2(s * scale - _along(shift, s))
    return gl.reshape(e, [ROWS, BLOCK_N]), gl.sum(gl.sum(e, 3), 1)


@gluon.jit
def _rescaled(x, alpha):
    """The rows of an output, each times its alpha."""
    parts = _by_lanes(x)
    return gl.convert_layout(gl.reshape(parts * _along(alpha, parts), x.shape), x.type.layout)


@gluon.jit
def _rescaled_lazily(x, alpha, c: gl.constexpr):
    """As _rescaled, without a multiplication where alpha is 1 for all rows of a warp.

    The branch does more: ptxas cannot wait for the output above it, where the softmax would wait, too.
    """
    N: gl.constexpr = c.BLOCK_DV // 2
    parts = _by_lanes(x)
    scaled = gl.inline_asm_elementwise(
        _lazy_product(N), _in_place(N), [parts, _along(alpha, parts)], dtype=gl.float32, is_pure=True, pack=N
    )
    return gl.convert_layout(gl.reshape(scaled, x.shape), x.type.layout)


@gluon.jit
def _pack(p, operand: gl.constexpr, c: gl.constexpr):
    """P rounded, 32 bits in each int32. A loop that carries single values pays 64 byte permutes a tile (8 bits: 140).

    In 8 bits a lane holds the columns 2t, 2t + 1, 2t + 8, 2t + 9 of each 16 of P, and an operand wants four neighbours:
    the quantiser has stored V's keys in that order (scales.write), so no data crosses lanes.
    """
    BLOCK_N: gl.constexpr = c.BLOCK_N
    if c.V_QUANTISED:
        p = gl.permute(gl.reshape(p, [ROWS, BLOCK_N // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
        p = gl.convert_layout(gl.reshape(p, [ROWS, BLOCK_N]), operand)
        even, odd = gl.split(gl.reshape(p, [ROWS, BLOCK_N // 4, 2, 2]))
        p0, p2 = gl.split(even)
        p1, p3 = gl.split(odd)
        packed = gl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f", [p0, p1, p2, p3], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = gl.split(gl.reshape(p, [ROWS, BLOCK_N // 2, 2]))
        cvt: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if c.FP16 else "cvt.rn.bf16x2.f32 $0, $2, $1;"
        packed = gl.inline_asm_elementwise(cvt, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return packed


@gluon.jit
def _unpack(packed, operand: gl.constexpr, c: gl.constexpr):
    """P as the register operand of the next product; names registers, moves nothing."""
    BLOCK_N: gl.constexpr = c.BLOCK_N
    if c.V_QUANTISED:
        packed = gl.join(packed, packed)
        p = gl.convert_layout(gl.reshape(gl.join(packed, packed), [ROWS, BLOCK_N]), operand)
        p = gl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; mov.b32 $0, {lo, hi}; }",
            "=r,r,r,r,r",
            [p],
            dtype=gl.float8e4nv,
            is_pure=True,
            pack=4,
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        p = gl.reshape(gl.join(even, odd), [ROWS, BLOCK_N])
        p = gl.convert_layout(p.to(gl.float16 if c.FP16 else gl.bfloat16, bitcast=True), operand)
    return p
