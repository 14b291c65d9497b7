"""The prefill forward kernel for Hopper in Gluon: one warp feeds the tensor cores through TMA, the others multiply.

A producer warp fills rings of K and V tiles; each consumer (four warps, 64 query rows) runs WGMMA asynchronously beside
its softmax: in 16 bits in the order of FlashAttention-3 (arXiv 2407.08608), P carried to the next tile; in 8 bits with
the scores of the next tile multiplied ahead. Consumers take the registers that the producer gives up (setmaxnreg).
Programs stay on their SM, so that the next tile's K, V and Q arrive while this one is finished. Masks and tile order
are those of attn_fwd; keys are walked from the last to the first, so the masked tiles come first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .attn_fwd import _tile_of
from .gluon_ring import (
    ROWS,
    _advance,
    _key_tiles,
    _o_layout,
    _part,
    _pass_turn,
    _produce,
    _ring,
    _s_layout,
    _take_turn,
    _tile_at,
    _tiles_of_program,
)
from .gluon_softmax import (
    BIAS_BITS,
    MAX_RATIO,
    NO_KEY,
    _maxima,
    _pack,
    _rescaled,
    _rescaled_lazily,
    _tops,
    _unpack,
    _weights,
)
from .rows import take_over

LN2 = gl.constexpr(0.6931471805599453)
MIN_LOGIT_SCALE = gl.constexpr(1e-30)
FLUSH_KEYS = gl.constexpr(1024)  # whose FP8 products are summed in the matrix unit
PRODUCER_REGISTERS = gl.constexpr(24)
UNSPECIALISED = (
    "stride_q_descale", "stride_k_descale", "stride_v_descale", "stride_row_shift", "stride_lse",
    "batch_heads", "nheads", "group", "seqlen_q", "seqlen_k", "num_m_blocks", "window_left", "window_right",
)  # fmt: skip


@gluon.jit
def _issue_qk(q, k_ring, stage, phase, c: gl.constexpr):
    """Start Q times K transposed for the tile in a slot of the ring.

    Sums of int8 products start at BIAS_BITS: read as fp32 they are BIAS plus the sum, exact below 2**22 (head dim 256),
    and softmax subtracts BIAS where it subtracts anyhow. Converting 64 integers a lane would run at half rate.
    """
    BLOCK_N: gl.constexpr = c.BLOCK_N
    layout: gl.constexpr = _s_layout(c)
    k_smem, k_full, _ = k_ring
    mbarrier.wait(k_full.index(stage), phase)
    k = k_smem.index(stage)
    k = k.reshape([BLOCK_N, k.shape[3]]).permute((1, 0))
    if q.dtype == gl.int8:
        qk = warpgroup_mma(q, k, gl.full([ROWS, BLOCK_N], BIAS_BITS, gl.int32, layout), is_async=True)
    else:
        qk = warpgroup_mma(q, k, gl.zeros([ROWS, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True)
    return qk


@gluon.jit
def _issue_pv(p, v_ring, stage, phase, acc, c: gl.constexpr):
    """Start P times V for the tile in a slot of the ring, added to acc."""
    v_smem, v_full, _ = v_ring
    mbarrier.wait(v_full.index(stage), phase)
    v = v_smem.index(stage)
    v = v.reshape([v.shape[2], v.shape[3]])
    if c.V_QUANTISED:
        v = v.permute((1, 0))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _output(pv, p, v_ring, stage, c: gl.constexpr):
    """The sums of _issue_pv once they are there; V's slot is free again."""
    tile, _ = warpgroup_mma_wait(0, deps=[pv, p])  # P packed: a wait takes no 8-bit values
    _, _, v_empty = v_ring
    mbarrier.arrive(v_empty.index(stage), count=1)
    return tile


@gluon.jit
def _scores(qk, k_ring, stage, OUTSTANDING: gl.constexpr):
    """The products, once only OUTSTANDING newer ones are under way, in fp32; K's slot is free again."""
    s = warpgroup_mma_wait(OUTSTANDING, deps=[qk])
    _, _, k_empty = k_ring
    mbarrier.arrive(k_empty.index(stage), count=1)
    return s.to(gl.float32, bitcast=True) if s.dtype == gl.int32 else s


@gluon.jit
def _masked(s, n, limits, c: gl.constexpr):
    """Scores of tile n with -inf outside of limits, the first and last key that a row sees."""
    row_lo, row_hi = limits
    cols = gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
    keep = cols <= (row_hi - n * c.BLOCK_N)[:, None]
    if c.HAS_LEFT:
        keep = keep & (cols >= (row_lo - n * c.BLOCK_N)[:, None])
    return gl.where(keep, s, -float("inf"))


@gluon.jit
def _scales(n, scales, c: gl.constexpr):
    """(logit scale, V scale) of a key tile; scales: of the rows, of V where there is one only, pointers to the rest."""
    scale, v_scale = scales[0], scales[1]
    if c.QK_BLOCKS:
        scale = gl.maximum(scale * gl.load(scales[2] + n * c.BLOCK_N // c.QUANT_ROWS), MIN_LOGIT_SCALE)
    if c.V_BLOCKS:
        v_scale = gl.load(scales[3] + n * c.BLOCK_N // c.QUANT_ROWS)
    return scale, v_scale


@gluon.jit
def _flushed(acc, beta, flushes, sums):
    """acc plus what earlier flushes left in memory, which is still to be multiplied by beta."""
    before = gl.where(flushes > 0, sums.load(acc.type.layout), 0.0)  # no number yet before the first
    return _rescaled(before, beta) + acc


@gluon.jit
def _flush(rows, flushes, sums):
    """Move the output to memory in fp32: the FP8 matrix unit rounds long sums (Arch.short_fp8_sum)."""
    acc, beta, m, l, v_scale = rows
    sums.store(_flushed(acc, beta, flushes, sums))
    return (gl.zeros_like(acc), gl.zeros_like(beta) + 1.0, m, l, v_scale), flushes + 1


@gluon.jit
def _step16(
    p, acc, m, l, slots, q, k_ring, v_ring, n, limits, scale,
    MASKED: gl.constexpr, WG: gl.constexpr, operand: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Tile n's scores and softmax beside the output of the tile before, whose P is carried."""
    stage, phase, next_stage, next_phase = slots
    a = _unpack(p, operand, c)
    _take_turn(WG, c)
    qk = _issue_qk(q, k_ring, next_stage, next_phase, c)
    pv = _issue_pv(a, v_ring, stage, phase, acc, c)
    _pass_turn(WG, c)
    s = _scores(qk, k_ring, next_stage, 1)
    if MASKED:
        s = _masked(s, n, limits, c)
    m_new = _maxima(_tops(s, False) * scale, m, c)
    e, sums = _weights(s, m_new, scale, False, c)
    alpha = gl.exp2(m - m_new)
    p_new = _pack(e, operand, c)
    acc = _rescaled_lazily(_output(pv, p, v_ring, stage, c), alpha, c)
    after_stage, after_phase = _advance(next_stage, next_phase, c)
    return p_new, acc, m_new, l * alpha + sums, (next_stage, next_phase, after_stage, after_phase)


@gluon.jit
def _attend16(q, k_ring, v_ring, slots, tiles, limits, scales, WG: gl.constexpr, c: gl.constexpr):
    """All key tiles of one query block: (output before division by its row sums, its scale, maxima, sums, slots)."""
    BLOCK_DV: gl.constexpr = c.BLOCK_DV
    o_layout: gl.constexpr = _o_layout(c)
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    stage, phase, _, _ = slots
    scale, v_scale = _scales(tiles[3], scales, c)
    s = _masked(_scores(_issue_qk(q, k_ring, stage, phase, c), k_ring, stage, 0), tiles[3], limits, c)
    tops = _tops(s, False)
    m = _maxima(tops * scale, gl.full(tops.shape, NO_KEY, gl.float32, tops.type.layout), c)
    e, l = _weights(s, m, scale, False, c)
    p = _pack(e, operand, c)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
    for part in gl.static_range(3):
        top, count = _part(tiles, part)
        if part != 2 or c.HAS_LEFT:
            for j in range(count):
                p, acc, m, l, slots = _step16(
                    p, acc, m, l, slots, q, k_ring, v_ring, top - j, limits, scale, part != 1, WG, operand, c
                )
    stage, phase, _, _ = slots
    acc = _output(_issue_pv(_unpack(p, operand, c), v_ring, stage, phase, acc, c), p, v_ring, stage, c)
    return acc, v_scale, m, l, slots


@gluon.jit
def _softmax8(tile, rows, INT8: gl.constexpr, operand: gl.constexpr, c: gl.constexpr):
    """(P of a tile, rows but for its product with V). rows: output, its scale since a flush, maxima, sums, V scale."""
    s, tops, scale, next_v = tile
    acc, beta, m, l, v_scale = rows
    m_new = _maxima(tops * scale, m, c)
    e, sums = _weights(s, m_new, scale, INT8, c)
    alpha = gl.exp2(m - m_new)
    l = l * alpha + sums
    p = _pack(e, operand, c)
    if c.V_BLOCKS:  # acc is kept in units of this tile's V scale; powers of two: exact
        alpha = alpha * gl.minimum(v_scale / next_v, MAX_RATIO)
    return p, (_rescaled(acc, alpha), beta * alpha, m_new, l, next_v)


@gluon.jit
def _step8(
    tile, rows, slots, q, k_ring, v_ring, n, limits, scales,
    MASKED: gl.constexpr, WG: gl.constexpr, operand: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Tile n's scores beside the softmax of the tile before, whose scores are carried, then that tile's output."""
    stage, phase, next_stage, next_phase = slots
    _take_turn(WG, c)
    qk = _issue_qk(q, k_ring, next_stage, next_phase, c)
    _pass_turn(WG, c)
    p, rows = _softmax8(tile, rows, q.dtype == gl.int8, operand, c)
    pv = _issue_pv(_unpack(p, operand, c), v_ring, stage, phase, rows[0], c)
    s = _scores(qk, k_ring, next_stage, 1)
    if MASKED:
        s = _masked(s, n, limits, c)
    tops = _tops(s, q.dtype == gl.int8)
    acc = _output(pv, p, v_ring, stage, c)
    scale, next_v = _scales(n, scales, c)
    after_stage, after_phase = _advance(next_stage, next_phase, c)
    rows = (acc, rows[1], rows[2], rows[3], rows[4])
    return (s, tops, scale, next_v), rows, (next_stage, next_phase, after_stage, after_phase)


@gluon.jit
def _attend8(q, sums, k_ring, v_ring, slots, tiles, limits, scales, WG: gl.constexpr, c: gl.constexpr):
    """As _attend16, with products that leave the matrix unit every FLUSH_KEYS keys."""
    BLOCK_DV: gl.constexpr = c.BLOCK_DV
    o_layout: gl.constexpr = _o_layout(c)
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    FLUSH: gl.constexpr = FLUSH_KEYS // c.BLOCK_N
    stage, phase, _, _ = slots
    scale, v_scale = _scales(tiles[3], scales, c)
    s = _masked(_scores(_issue_qk(q, k_ring, stage, phase, c), k_ring, stage, 0), tiles[3], limits, c)
    tops = _tops(s, q.dtype == gl.int8)
    m = gl.full(tops.shape, NO_KEY, gl.float32, tops.type.layout)
    tile = (s, tops, scale, v_scale)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
    rows = (acc, gl.zeros_like(m) + 1.0, m, gl.zeros_like(m), v_scale)
    flushes = 0
    for part in gl.static_range(3):
        top, count = _part(tiles, part)
        if part == 1:
            for f in range(gl.cdiv(count, FLUSH)):
                if f > 0:
                    rows, flushes = _flush(rows, flushes, sums)
                for j in range(f * FLUSH, gl.minimum(count, (f + 1) * FLUSH)):
                    tile, rows, slots = _step8(
                        tile, rows, slots, q, k_ring, v_ring, top - j, limits, scales, False, WG, operand, c
                    )
        elif part == 0 or c.HAS_LEFT:
            for j in range(count):
                tile, rows, slots = _step8(
                    tile, rows, slots, q, k_ring, v_ring, top - j, limits, scales, True, WG, operand, c
                )
    p, rows = _softmax8(tile, rows, q.dtype == gl.int8, operand, c)
    acc, beta, m, l, v_scale = rows
    stage, phase, _, _ = slots
    acc = _output(_issue_pv(_unpack(p, operand, c), v_ring, stage, phase, acc, c), p, v_ring, stage, c)
    if flushes > 0:
        acc = _flushed(acc, beta, flushes, sums)
    return acc, v_scale, m, l, slots


@gluon.jit
def _store(out, acc, m, l, v_scale, b, h, head, first_row, seqlen_q, c: gl.constexpr):
    """Output and LSE of one consumer's rows. The output leaves in 16 bytes a lane where that fits in memory."""
    O, LSE, row_shift, stride_ob, stride_om, stride_oh, stride_row_shift, stride_lse = out
    m = gl.max(m, 1)
    l = gl.sum(l, 1)
    if c.HAS_LSE:
        rows = first_row + gl.arange(0, ROWS, layout=l.type.layout)
        lse = m + gl.log2(l) - c.P_OFFSET  # -inf where no key was seen
        if c.ROW_SHIFT:
            lse += gl.load(row_shift + gl.cast(head, gl.int64) * stride_row_shift + rows)
        gl.store(LSE + gl.cast(head, gl.int64) * stride_lse + rows, lse * LN2, rows < seqlen_q)
    acc = acc * gl.convert_layout(v_scale / gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, acc.type.layout))[:, None]
    LANES: gl.constexpr = min(c.BLOCK_DV // 8, 16)
    whole_rows: gl.constexpr = gl.BlockedLayout([LANES // 2, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    layout: gl.constexpr = whole_rows if c.STAGED else acc.type.layout
    o = gl.convert_layout(acc.to(O.dtype.element_ty), layout)
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, c.BLOCK_DV, layout=gl.SliceLayout(0, layout))
    base = O + gl.cast(b, gl.int64) * stride_ob + gl.cast(h, gl.int64) * stride_oh
    ptrs = base + gl.cast(rows, gl.int64)[:, None] * stride_om + cols[None, :]
    gl.store(ptrs, o, (rows < seqlen_q)[:, None] & (cols < c.HEAD_DIM_V)[None, :])


@gluon.jit
def _consume(WG: gl.constexpr, rings, out, scales, sizes, c: gl.constexpr):
    """One consumer: ROWS query rows of every tile of this program."""
    batch_heads, nheads, group, seqlen_q, seqlen_k, num_m_blocks, window_left, window_right = sizes
    q_ring, k_ring, v_ring, sums = rings
    q_smem, q_full, q_empty = q_ring
    num_tiles = num_m_blocks * batch_heads
    zero = gl.to_tensor(0)
    next_stage, next_phase = _advance(zero, zero, c)
    slots = (zero, zero, next_stage, next_phase)  # of the tile whose V is next, and of the one whose K is
    if WG == 1:  # consumer 0 begins
        _pass_turn(WG, c)
    for i in range(_tiles_of_program(num_tiles)):
        m_block, bh = _tile_of(_tile_at(i), num_m_blocks, batch_heads, c.HEAD_GROUP, c.LONGEST_FIRST)
        b = bh // nheads
        h = bh % nheads
        kv_head = b * (nheads // group) + h // group
        tiles = _key_tiles(m_block, sizes, c)
        first_row = (m_block * c.CONSUMERS + WG) * ROWS
        s_layout: gl.constexpr = _s_layout(c)
        rows = first_row + seqlen_k - seqlen_q + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
        row_hi = gl.zeros_like(rows) + (seqlen_k - 1)
        if c.HAS_RIGHT:
            row_hi = gl.minimum(row_hi, rows + window_right)
        scale = scales[0]
        tile_scales = (gl.maximum(scale, MIN_LOGIT_SCALE), 1.0, 0, 0)
        if c.V_QUANTISED:
            _, q_descale, k_descale, v_descale, stride_q_descale, stride_k_descale, stride_v_descale = scales
            v_scale = 1.0
            if c.QK_BLOCKS:  # a consumer's rows share a scale
                scale *= gl.load(q_descale + bh * stride_q_descale + first_row // c.QUANT_ROWS)
            elif c.QK_QUANTISED:
                scale *= gl.load(q_descale + bh * stride_q_descale) * gl.load(k_descale + kv_head * stride_k_descale)
            if not c.V_BLOCKS:
                v_scale = gl.load(v_descale + kv_head * stride_v_descale)
            tile_scales = (
                gl.maximum(scale, MIN_LOGIT_SCALE), v_scale,
                k_descale + kv_head * stride_k_descale, v_descale + kv_head * stride_v_descale,
            )  # fmt: skip
        mbarrier.wait(q_full, i & 1)
        q = q_smem.index(WG)
        q = q.reshape([ROWS, q.shape[3]])
        limits = (rows - window_left, row_hi)
        if c.Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(0, s_layout, 4 if c.QK_QUANTISED else 2))
        if c.V_QUANTISED:
            acc, v_scale, m, l, slots = _attend8(
                q, sums.index(WG), k_ring, v_ring, slots, tiles, limits, tile_scales, WG, c
            )
        else:
            acc, v_scale, m, l, slots = _attend16(q, k_ring, v_ring, slots, tiles, limits, tile_scales, WG, c)
        next_stage, next_phase = _advance(slots[2], slots[3], c)
        slots = (slots[2], slots[3], next_stage, next_phase)
        mbarrier.arrive(q_empty, count=1)
        _store(out, acc, m, l, v_scale, b, h, bh, first_row, seqlen_q, c)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def attn_gluon(
    Q, K, V,  # descriptors of (batch, heads, rows, width); V in 8 bits (batch, heads, width, rows)
    O, LSE, q_descale, k_descale, v_descale, row_shift, qk_scale,  # as in attn_fwd; absent ones are any pointer
    stride_ob, stride_om, stride_oh, stride_q_descale, stride_k_descale, stride_v_descale, stride_row_shift, stride_lse,
    batch_heads, nheads, group, seqlen_q, seqlen_k, num_m_blocks, window_left, window_right,
    c: gl.constexpr,
):  # fmt: skip
    """Query blocks of CONSUMERS * ROWS rows, as many as the program's turns give it."""
    q_smem = gl.allocate_shared_memory(Q.dtype, [c.CONSUMERS] + Q.block_type.shape, Q.layout)  # noqa: RUF005 - Triton's Python
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=c.CONSUMERS)
    sums = q_smem  # nothing in 16 bits
    if c.V_QUANTISED:
        sums = gl.allocate_shared_memory(
            gl.float32, [c.CONSUMERS, ROWS, c.BLOCK_DV], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        )
    rings = ((q_smem, q_full, q_empty), _ring(K, c.STAGES, c.CONSUMERS), _ring(V, c.STAGES, c.CONSUMERS), sums)
    fence_async_shared()
    take_over(c.OVERLAP)
    sizes = (batch_heads, nheads, group, seqlen_q, seqlen_k, num_m_blocks, window_left, window_right)
    out = (O, LSE, row_shift, stride_ob, stride_om, stride_oh, stride_row_shift, stride_lse)
    scales = (qk_scale,)
    if c.V_QUANTISED:
        strides = (stride_q_descale, stride_k_descale, stride_v_descale)
        scales = scales + (q_descale, k_descale, v_descale) + strides  # type: ignore[assignment]  # noqa: RUF005
    if c.CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, rings, out, scales, sizes, c)), (_produce, (Q, K, V, rings, sizes, c))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, rings, out, scales, sizes, c)), (_consume, (1, rings, out, scales, sizes, c)),
                (_produce, (Q, K, V, rings, sizes, c)),
            ],
            [4, 1], [c.REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
