"""The prefill forward kernel for gfx950 in Gluon: K and V copied to LDS asynchronously, P never leaving its registers.

A wave owns 32 query rows. Both products are 32x32 MFMAs whose result is transposed, so a row lies in two lanes and the
registers that hold P are the operand of P V (gluon_lds says how V's rows meet them). K and V pass through rings in LDS,
filled STAGES - 1 tiles ahead. Scores, row sums and the output are handled in pairs where that saves vector
instructions, which bound FP8 on MI355X. Masks and tile order are those of attn_fwd; keys are walked from the last to
the first, so the masked tiles come first.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from .attn_fwd import _tile_of
from .attn_gluon import LN2, MIN_LOGIT_SCALE, UNSPECIALISED
from .gluon_lds import _allocate, _by_key, _copy, _o_layout, _offsets, _s_layout
from .gluon_ring import ROWS, _key_tiles
from .gluon_softmax import BIAS, BIAS_BITS, NO_KEY

ONE_BITS = gl.constexpr(0x3F800000)
LEAST_RATIO = gl.constexpr(-126 << 23)  # of V scales, as the difference of their bits
MOST_RATIO = gl.constexpr(90 << 23)  # attn_fwd.MAX_RATIO


@gluon.jit
def _rescaled(acc, alpha):
    """The rows of an output, each times its alpha."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _scores(q, k_smem, stage, k_tile: gl.constexpr, c: gl.constexpr):
    """Q times K transposed for the tile in a stage, fp32.

    Sums of int8 products start at BIAS_BITS, as in attn_gluon: read as fp32 they are BIAS plus the sum.
    """
    layout: gl.constexpr = _s_layout(c)
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = c.BLOCK_N
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 16 if c.QK_QUANTISED else 8)
    tile = _by_key(k_smem, stage, k_tile).permute([1, 0])
    k = cdna4.async_copy.load_shared_relaxed(tile, operand)
    if c.QK == "int8":
        s = cdna4.mfma(q, k, gl.full([BLOCK_M, BLOCK_N], BIAS_BITS, gl.int32, layout)).to(gl.float32, bitcast=True)
    elif c.QK == "e4m3":
        s = cdna4.mfma_scaled(q, None, "e4m3", k, None, "e4m3", gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout))
    else:
        s = cdna4.mfma(q, k, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout))
    return s


@gluon.jit
def _masked(s, n, limits, c: gl.constexpr):
    """Scores of tile n with -inf outside of limits, the first and last key that a row sees.

    Columns are split into what a register and what a lane decides, so that registers compare with constants.
    """
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = c.BLOCK_N
    row_lo, row_hi = limits
    parts = gl.reshape(s, [BLOCK_M, BLOCK_N // 8, 2, 4])
    layout: gl.constexpr = parts.type.layout
    eights = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    lane = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    ones = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    cols = 8 * eights[None, :][:, :, None][:, :, :, None] + ones[None, :][:, None, :][:, :, None, :]
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    last = gl.convert_layout(row_hi - n * BLOCK_N, rows)[:, None] - 4 * lane[None, :]
    keep = cols <= last[:, None, :][:, :, :, None]
    if c.HAS_LEFT:
        first = gl.convert_layout(row_lo - n * BLOCK_N, rows)[:, None] - 4 * lane[None, :]
        keep = keep & (cols >= first[:, None, :][:, :, :, None])
    parts = gl.where(keep, parts, -float("inf"))
    return gl.convert_layout(gl.reshape(parts, [BLOCK_M, BLOCK_N]), s.type.layout)


@gluon.jit
def _larger(a, b):
    """The maximum; NaN wins, else the compiler quiets what comes from matrix and lane instructions first."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _pair(low, high):
    """Two fp32 as 64 bits: neighbouring registers, which packed instructions take."""
    low = low.to(gl.uint32, bitcast=True).to(gl.uint64)
    return (high.to(gl.uint32, bitcast=True).to(gl.uint64) << 32) | low


@gluon.jit
def _packed_exponents(s, scale, shift, c: gl.constexpr):
    """s * scale - shift, scale and shift of each row, two columns an instruction.

    The compiler packs no multiply-add that exp2 takes. This one may read what an MFMA has just written: the shift comes
    from the row maxima, which have waited for that.
    """
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = c.BLOCK_N
    even, odd = gl.split(gl.reshape(s, [BLOCK_M, BLOCK_N // 2, 2]))
    pairs = _pair(even, odd)
    zeros = gl.zeros_like(pairs)
    rows: gl.constexpr = gl.SliceLayout(1, pairs.type.layout)
    scale = zeros + gl.convert_layout(_pair(scale, scale), rows)[:, None]
    shift = zeros + gl.convert_layout(_pair(shift, shift), rows)[:, None]
    x = gl.inline_asm_elementwise(
        "v_pk_fma_f32 $0, $1, $2, $3 neg_lo:[0,0,1] neg_hi:[0,0,1]", "=v,v,v,v",
        [pairs, scale, shift], dtype=gl.uint64, is_pure=True, pack=1,
    )  # fmt: skip
    low = x.to(gl.uint32).to(gl.float32, bitcast=True)
    high = (x >> 32).to(gl.uint32).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [BLOCK_M, BLOCK_N]), s.type.layout)


@gluon.jit
def _softmax(s, m, scale, c: gl.constexpr):
    """(exponentials, new row maxima) of a tile's scores."""
    top = gl.reduce(s, 1, _larger)
    if c.QK == "int8":
        top -= BIAS
    m = _larger(m, top * scale)
    shift = m - c.P_OFFSET
    if c.QK == "int8":
        shift += BIAS * scale
    x = _packed_exponents(s, scale, shift, c) if c.PACKED else s * scale[:, None] - shift[:, None]
    return gl.exp2(x), m


@gluon.jit
def _row_sums(p, c: gl.constexpr):
    """Sums of each row, four of them: its two lanes', of even and of odd columns. _row_sum adds them up in the end."""
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = c.BLOCK_N
    return gl.sum(gl.sum(gl.reshape(p, [BLOCK_M, BLOCK_N // 8, 2, 2, 2]), 1), 2)


@gluon.jit
def _row_sum(l, layout: gl.constexpr):
    return gl.convert_layout(gl.sum(gl.sum(l, 2), 1), layout)


@gluon.jit
def _weighted(p, v_smem, stage, acc, v_tile: gl.constexpr, c: gl.constexpr):
    """acc plus P times V for the tile in a stage."""
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = c.BLOCK_N
    K_WIDTH: gl.constexpr = 8 if c.V_QUANTISED else 4
    layout: gl.constexpr = acc.type.layout
    v = cdna4.async_copy.load_shared_relaxed(_by_key(v_smem, stage, v_tile), gl.DotOperandLayout(1, layout, K_WIDTH))
    if c.V_QUANTISED:  # names the registers as gluon_lds has ordered V's rows
        p = gl.permute(gl.reshape(p, [BLOCK_M, BLOCK_N // 16, 2, 2, 4]), [0, 1, 3, 2, 4])
        p = gl.convert_layout(gl.reshape(p, [BLOCK_M, BLOCK_N]), gl.DotOperandLayout(0, layout, K_WIDTH))
        acc = cdna4.mfma_scaled(p, None, "e4m3", v, None, "e4m3", acc)
    else:
        acc = cdna4.mfma(gl.convert_layout(p, gl.DotOperandLayout(0, layout, K_WIDTH)), v, acc)
    return acc


@gluon.jit
def _scales(n, scales, c: gl.constexpr):
    """Scales of K and of V of a key tile, one of each a block; 1 and V's only one where there is one a head."""
    k_scale, v_scale = 1.0, scales[0]
    if c.QK_BLOCKS:
        k_scale = gl.load(scales[1] + n * c.BLOCK_N // c.QUANT_ROWS)
    if c.V_BLOCKS:
        v_scale = gl.load(scales[2] + n * c.BLOCK_N // c.QUANT_ROWS)
    return k_scale, v_scale


@gluon.jit
def _ratio(a, b):
    """a / b of two powers of two, limited to 2**-126 and attn_fwd's MAX_RATIO: four instructions instead of eleven."""
    bits = a.to(gl.int32, bitcast=True) - b.to(gl.int32, bitcast=True)
    bits = gl.minimum(gl.maximum(bits, LEAST_RATIO), MOST_RATIO)
    return (bits + ONE_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def _store(out, acc, m, l, v_scale, b, h, bh, first_row, seqlen_q, c: gl.constexpr):
    """Output and LSE of a query block."""
    O, LSE, row_shift, stride_ob, stride_om, stride_oh, stride_row_shift, stride_lse = out
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    if c.HAS_LSE:
        rows = first_row + gl.arange(0, BLOCK_M, layout=l.type.layout)
        lse = m + gl.log2(l) - c.P_OFFSET  # -inf where no key was seen
        if c.ROW_SHIFT:
            lse += gl.load(row_shift + gl.cast(bh, gl.int64) * stride_row_shift + rows, rows < seqlen_q, other=0.0)
        gl.store(LSE + gl.cast(bh, gl.int64) * stride_lse + rows, lse * LN2, rows < seqlen_q)
    layout: gl.constexpr = acc.type.layout
    o = _rescaled(acc, v_scale / gl.where(l == 0.0, 1.0, l)).to(O.dtype.element_ty)
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, c.BLOCK_DV, layout=gl.SliceLayout(0, layout))
    base = O + gl.cast(b, gl.int64) * stride_ob + gl.cast(h, gl.int64) * stride_oh
    base += gl.cast(first_row, gl.int64) * stride_om
    keep = (rows + first_row < seqlen_q)[:, None] & (cols < c.HEAD_DIM_V)[None, :]
    gl.store(base + rows[:, None] * stride_om + cols[None, :], o, keep)


@gluon.jit
def _attend(
    q, K, V, stride_kn, stride_vn, tiles, limits, q_scale, scales, seqlen_k,
    k_tile: gl.constexpr, v_tile: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """All key tiles of one query block: (output before division by its row sums, its scale, maxima, row sums)."""
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = c.BLOCK_N
    BLOCK_DV: gl.constexpr = c.BLOCK_DV
    STAGES: gl.constexpr = c.STAGES
    first, full, masked, last = tiles
    k_smem = _allocate(K.dtype.element_ty, STAGES, k_tile)
    v_smem = _allocate(V.dtype.element_ty, STAGES, v_tile)
    there = seqlen_k - last * BLOCK_N
    _copy(k_smem, 0, K, stride_kn, _offsets(stride_kn, there, k_tile), last, k_tile)
    _copy(v_smem, 0, V, stride_vn, _offsets(stride_vn, there, v_tile), last, v_tile)
    cdna4.async_copy.commit_group()
    # The others are complete. Copies for which no tile is left bring the first one again, which nobody reads.
    there = gl.where(first < last, BLOCK_N, there)
    k_offsets = _offsets(stride_kn, there, k_tile)
    v_offsets = _offsets(stride_vn, there, v_tile)
    for i in gl.static_range(1, STAGES - 1):
        n = gl.maximum(last - i, first)
        _copy(k_smem, i, K, stride_kn, k_offsets, n, k_tile)
        _copy(v_smem, i, V, stride_vn, v_offsets, n, v_tile)
        cdna4.async_copy.commit_group()
    s_layout: gl.constexpr = _s_layout(c)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    m = gl.full([BLOCK_M], NO_KEY, gl.float32, of_rows)
    l = _row_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout), c)
    of_sums: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, l.type.layout))
    acc = gl.zeros([BLOCK_M, BLOCK_DV], gl.float32, _o_layout(c))
    k_scale, v_scale = _scales(last, scales, c)
    unit = v_scale  # that acc is in
    stage = 0
    ahead = STAGES - 1
    for part in gl.static_range(3):  # masked on the right, unmasked, masked on the left
        if part == 0:
            top, count = last, last - masked + 1
        elif part == 1:
            top, count = masked - 1, masked - full
        else:
            top, count = full - 1, full - first
        if part != 2 or c.HAS_LEFT:
            for j in range(count):
                n = top - j
                cdna4.async_copy.wait_group(STAGES - 2)
                next_k, next_v = _scales(gl.maximum(n - 1, first), scales, c)
                coming = gl.maximum(n - (STAGES - 1), first)  # to the slots that all waves had read before the wait
                _copy(k_smem, ahead, K, stride_kn, k_offsets, coming, k_tile)
                _copy(v_smem, ahead, V, stride_vn, v_offsets, coming, v_tile)
                cdna4.async_copy.commit_group()
                s = _scores(q, k_smem, stage, k_tile, c)
                if part != 1:
                    s = _masked(s, n, limits, c)
                scale = gl.maximum(q_scale * k_scale, MIN_LOGIT_SCALE) if c.QK_BLOCKS else q_scale
                p, m_new = _softmax(s, m, scale, c)
                alpha = gl.exp2(m - m_new)
                m = m_new
                l = l * gl.convert_layout(alpha, of_sums)[:, None][:, :, None] + _row_sums(p, c)
                p = p.to(V.dtype.element_ty)
                if c.V_BLOCKS:  # acc is kept in units of this tile's V scale; powers of two: exact
                    alpha = alpha * _ratio(unit, v_scale)
                    unit = v_scale
                acc = _rescaled(acc, alpha)
                acc = _weighted(p, v_smem, stage, acc, v_tile, c)
                k_scale, v_scale = next_k, next_v
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
                ahead = gl.where(ahead == STAGES - 1, 0, ahead + 1)
    cdna4.async_copy.wait_group(0)
    return acc, unit, m, _row_sum(l, of_rows)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def attn_gluon_amd(
    Q, K, V, O, LSE, q_descale, k_descale, v_descale, row_shift, qk_scale,  # as in attn_fwd; absent ones any pointer
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh, stride_q_descale, stride_k_descale, stride_v_descale, stride_row_shift, stride_lse,
    batch_heads, nheads, group, seqlen_q, seqlen_k, num_m_blocks, window_left, window_right,
    k_tile: gl.constexpr, v_tile: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """One block of CONSUMERS * ROWS query rows of one head."""
    BLOCK_M: gl.constexpr = c.CONSUMERS * ROWS
    s_layout: gl.constexpr = _s_layout(c)
    m_block, bh = _tile_of(gl.program_id(0), num_m_blocks, batch_heads, c.HEAD_GROUP, c.LONGEST_FIRST)
    b = bh // nheads
    h = bh % nheads
    hk = h // group
    kv_head = b * (nheads // group) + hk
    first_row = m_block * BLOCK_M
    sizes = (batch_heads, nheads, group, seqlen_q, seqlen_k, num_m_blocks, window_left, window_right)
    tiles = _key_tiles(m_block, sizes, c)
    Q += gl.cast(b, gl.int64) * stride_qb + gl.cast(h, gl.int64) * stride_qh + gl.cast(first_row, gl.int64) * stride_qm
    K += gl.cast(b, gl.int64) * stride_kb + gl.cast(hk, gl.int64) * stride_kh
    V += gl.cast(b, gl.int64) * stride_vb + gl.cast(hk, gl.int64) * stride_vh
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 16 if c.QK_QUANTISED else 8)
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, operand))
    cols = gl.arange(0, c.BLOCK_D, layout=gl.SliceLayout(0, operand))
    keep = (rows + first_row < seqlen_q)[:, None] & (cols < c.HEAD_DIM)[None, :]
    q = gl.load(Q + rows[:, None] * stride_qm + cols[None, :], keep, other=0.0)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = first_row + seqlen_k - seqlen_q + gl.arange(0, BLOCK_M, layout=of_rows)
    row_hi = gl.zeros_like(rows) + (seqlen_k - 1)
    if c.HAS_RIGHT:
        row_hi = gl.minimum(row_hi, rows + window_right)
    q_scale = gl.zeros([BLOCK_M], gl.float32, of_rows) + qk_scale
    v_scale = 1.0
    if c.QK_BLOCKS:
        at = first_row + gl.arange(0, BLOCK_M, layout=of_rows)
        blocks = q_descale + gl.cast(bh, gl.int64) * stride_q_descale + at // c.QUANT_ROWS
        q_scale *= gl.load(blocks, at < seqlen_q, other=1.0)
    elif c.QK_QUANTISED:
        q_scale *= gl.load(q_descale + bh * stride_q_descale) * gl.load(k_descale + kv_head * stride_k_descale)
    if c.V_QUANTISED and not c.V_BLOCKS:
        v_scale = gl.load(v_descale + kv_head * stride_v_descale)
    q_scale = gl.maximum(q_scale, MIN_LOGIT_SCALE)
    k_descale += gl.cast(kv_head, gl.int64) * stride_k_descale
    v_descale += gl.cast(kv_head, gl.int64) * stride_v_descale
    acc, v_scale, m, l = _attend(
        q, K, V, stride_kn, stride_vn, tiles, (rows - window_left, row_hi), q_scale, (v_scale, k_descale, v_descale),
        seqlen_k, k_tile, v_tile, c,
    )  # fmt: skip
    out = (O, LSE, row_shift, stride_ob, stride_om, stride_oh, stride_row_shift, stride_lse)
    _store(out, acc, m, l, v_scale, b, h, bh, first_row, seqlen_q, c)
