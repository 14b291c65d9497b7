"""The prefill forward kernel for Hopper in Gluon: one warp feeds the tensor cores through TMA, the others multiply.

A producer warp fills rings of K and V tiles; each consumer (four warps, 64 query rows) runs WGMMA asynchronously beside
its softmax, in the order of FlashAttention-3 (arXiv 2407.08608). Consumers take the registers that the producer gives
up (setmaxnreg). Programs stay on their SM, so that the next tile's K, V and Q arrive while this one is finished. Masks
and tile order are those of attn_fwd; keys are walked from the last to the first, so the masked tiles come first.
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
from .gluon_ring import ROWS, _advance, _key_tiles, _produce, _ring, _s_layout, _tile_at, _tiles_of_program

LN2 = gl.constexpr(0.6931471805599453)
MAX_RATIO = gl.constexpr(2.0**90)  # as in attn_fwd
MIN_LOGIT_SCALE = gl.constexpr(1e-30)
NO_KEY = gl.constexpr(-1e30)  # a row maximum before any key: finite, so that no difference of maxima is NaN
BIAS = gl.constexpr(12582912.0)  # 1.5 * 2**23: the last mantissa bits of BIAS + n are the integer n
BIAS_BITS = gl.constexpr(0x4B400000)
FLUSH_KEYS = gl.constexpr(1024)  # whose FP8 products are summed in the matrix unit
PRODUCER_REGISTERS = gl.constexpr(24)
UNSPECIALISED = (
    "stride_q_descale", "stride_k_descale", "stride_v_descale", "stride_row_shift", "stride_lse",
    "batch_heads", "nheads", "group", "seqlen_q", "seqlen_k", "num_m_blocks", "window_left", "window_right",
)  # fmt: skip


@gluon.jit
def _named_barrier(op: gl.constexpr, number: gl.constexpr):
    """bar.sync or bar.arrive on a hardware barrier of both consumers; 0 to 7 are the compiler's."""
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar." + op + " " + number + ", 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _take_turn(WG: gl.constexpr, c: gl.constexpr):
    """Wait until the other consumer has issued its products: one multiplies while the other is in its softmax."""
    if c.PING_PONG:
        _named_barrier("sync", "8" if WG == 0 else "9")


@gluon.jit
def _pass_turn(WG: gl.constexpr, c: gl.constexpr):
    if c.PING_PONG:
        _named_barrier("arrive", "9" if WG == 0 else "8")


@gluon.jit
def _issue_qk(q, k_ring, stage, phase, layout: gl.constexpr, c: gl.constexpr):
    """Start Q times K transposed for the tile in a slot of the ring.

    Sums of int8 products start at BIAS_BITS: read as fp32 they are BIAS plus the sum, exact below 2**22 (head dim 256),
    and softmax subtracts BIAS where it subtracts anyhow. Converting 64 integers a lane would run at half rate.
    """
    BLOCK_N: gl.constexpr = c.BLOCK_N
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
def _softmax(s, m, scale, INT8: gl.constexpr, c: gl.constexpr):
    """(exponentials, new row maxima) of a tile's scores."""
    top = gl.max(s, 1)
    if INT8:
        top -= BIAS
    m = gl.maximum(m, top * scale)
    shift = m - c.P_OFFSET
    if INT8:
        shift += BIAS * scale
    return gl.exp2(s * scale - shift[:, None]), m


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
def _rescaled(acc, alpha):
    """The rows of an output, each times its alpha."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _flushed(acc, beta, flushes, sums):
    """acc plus what earlier flushes left in memory, which is still to be multiplied by beta."""
    before = gl.where(flushes > 0, sums.load(acc.type.layout), 0.0)  # no number yet before the first
    return _rescaled(before, beta) + acc


@gluon.jit
def _flush(acc, beta, flushes, sums):
    """Move the output to memory in fp32: the FP8 matrix unit rounds long sums (Arch.short_fp8_sum)."""
    sums.store(_flushed(acc, beta, flushes, sums))
    return gl.zeros_like(acc), gl.full(beta.shape, 1.0, gl.float32, beta.type.layout), flushes + 1


@gluon.jit
def _step(
    p, acc, beta, flushes, m, l, v_scale, slots, q, sums, k_ring, v_ring, n, limits, scales,
    MASKED: gl.constexpr, WG: gl.constexpr, s_layout: gl.constexpr, operand: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Tile n's scores and softmax beside the output of the tile before, whose P is carried."""
    stage, phase, next_stage, next_phase = slots
    scale, next_v = _scales(n, scales, c)
    a = _unpack(p, operand, c)
    _take_turn(WG, c)
    qk = _issue_qk(q, k_ring, next_stage, next_phase, s_layout, c)
    pv = _issue_pv(a, v_ring, stage, phase, acc, c)
    _pass_turn(WG, c)
    s = _scores(qk, k_ring, next_stage, 1)
    if MASKED:
        s = _masked(s, n, limits, c)
    e, m_new = _softmax(s, m, scale, q.dtype == gl.int8, c)
    alpha = gl.exp2(m - m_new)
    l = l * alpha + gl.sum(e, 1)
    p_new = _pack(e, operand, c)
    acc = _output(pv, p, v_ring, stage, c)
    if c.V_BLOCKS:  # acc is kept in units of this tile's V scale; powers of two: exact
        alpha = alpha * gl.minimum(v_scale / next_v, MAX_RATIO)
    acc = _rescaled(acc, alpha)
    if c.V_QUANTISED:
        beta = beta * alpha
        if not MASKED:  # noqa: SIM102 - a constant decides what is compiled, a number what runs
            if n * c.BLOCK_N % FLUSH_KEYS == 0:
                acc, beta, flushes = _flush(acc, beta, flushes, sums)
    after_stage, after_phase = _advance(next_stage, next_phase, c)
    slots = (next_stage, next_phase, after_stage, after_phase)
    return p_new, acc, beta, flushes, m_new, l, next_v, slots


@gluon.jit
def _attend(q, sums, k_ring, v_ring, stage, phase, tiles, limits, scales, WG: gl.constexpr, c: gl.constexpr):
    """All key tiles of one query block: (output before division by its row sums, its scale, maxima, sums, slot)."""
    BLOCK_DV: gl.constexpr = c.BLOCK_DV
    V_STEP: gl.constexpr = 32 if c.V_QUANTISED else 16
    s_layout: gl.constexpr = _s_layout(c)
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_DV, V_STEP])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4 if c.V_QUANTISED else 2)
    first, full, masked, last = tiles
    scale, v_scale = _scales(last, scales, c)
    if c.Q_IN_REGISTERS:
        q = q.load(gl.DotOperandLayout(0, s_layout, 4 if c.QK_QUANTISED else 2))
    s = _scores(_issue_qk(q, k_ring, stage, phase, s_layout, c), k_ring, stage, 0)
    s = _masked(s, last, limits, c)
    m = gl.full([ROWS], NO_KEY, gl.float32, gl.SliceLayout(1, s_layout))
    e, m = _softmax(s, m, scale, q.dtype == gl.int8, c)
    l = gl.sum(e, 1)
    p = _pack(e, operand, c)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
    beta = gl.full([ROWS], 1.0, gl.float32, m.type.layout)
    flushes = 0
    next_stage, next_phase = _advance(stage, phase, c)
    slots = (stage, phase, next_stage, next_phase)
    for part in gl.static_range(3):  # masked on the right, unmasked, masked on the left
        if part == 0:
            top, count = last - 1, last - masked
        elif part == 1:
            top, count = masked - 1, masked - full
        else:
            top, count = full - 1, full - first
        if part != 2 or c.HAS_LEFT:
            for j in range(count):
                p, acc, beta, flushes, m, l, v_scale, slots = _step(
                    p, acc, beta, flushes, m, l, v_scale, slots, q, sums, k_ring, v_ring, top - j, limits, scales,
                    part != 1, WG, s_layout, operand, c,
                )  # fmt: skip
    stage, phase, next_stage, next_phase = slots
    a = _unpack(p, operand, c)
    acc = _output(_issue_pv(a, v_ring, stage, phase, acc, c), p, v_ring, stage, c)
    if c.V_QUANTISED:  # noqa: SIM102 - as in _step
        if flushes > 0:
            acc = _flushed(acc, beta, flushes, sums)
    return acc, v_scale, m, l, next_stage, next_phase


@gluon.jit
def _store(out, acc, m, l, v_scale, b, h, head, first_row, seqlen_q, c: gl.constexpr):
    """Output and LSE of one consumer's rows. The output leaves in 16 bytes a lane where that fits in memory."""
    O, LSE, row_shift, stride_ob, stride_om, stride_oh, stride_row_shift, stride_lse = out
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
    stage = 0
    phase = 0
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
        acc, v_scale, m, l, stage, phase = _attend(
            q, sums.index(WG), k_ring, v_ring, stage, phase, tiles, limits, tile_scales, WG, c
        )
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
