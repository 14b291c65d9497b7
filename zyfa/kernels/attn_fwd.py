"""The prefill forward kernel: one family, every feature a constexpr switch. Knows no database and no tuner.

Online softmax in base 2 after FlashAttention-2 (arXiv 2307.08691). Masks are bottom-right aligned: query row i sits at
key position i + seqlen_k - seqlen_q. Tiles that need no mask run in a loop without one, tiles that no row sees are
never visited.
"""

import triton
import triton.language as tl

from .rows import key_scales, poison, row_at, row_ptrs, row_scales, rows_of, sequence, share, store, take_over, tile_on_die  # isort: skip # fmt: skip # noqa: E501

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# No V scale ratio between neighbouring blocks may blow the accumulator up to inf: |acc| <= 2**34 at 128k keys.
MAX_RATIO: tl.constexpr = tl.constexpr(2.0**90)
E4M3: tl.constexpr = tl.constexpr("e4m3")
# Sizes that no instruction depends on: one build serves every length, also 1 and multiples of 16.
UNSPECIALISED = (
    "stride_q_descale", "stride_k_descale", "stride_v_descale", "stride_row_shift", "stride_col_bias", "stride_lse",
    "batch_heads", "nheads", "group", "seqlen_q", "seqlen_k", "num_m_blocks", "window_left", "window_right",
)  # fmt: skip


@triton.jit
def _tile_of(pid, num_m_blocks, batch_heads, HEAD_GROUP: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """(query block, batch * head) of a program: heads of one group side by side, longest query blocks first."""
    if HEAD_GROUP == 0:
        m = pid // batch_heads
        bh = pid % batch_heads
    else:
        group = pid // (HEAD_GROUP * num_m_blocks)
        rest = pid % (HEAD_GROUP * num_m_blocks)
        width = min(HEAD_GROUP, batch_heads - group * HEAD_GROUP)
        m = rest // width
        bh = group * HEAD_GROUP + rest % width
    if LONGEST_FIRST:
        m = num_m_blocks - 1 - m
    return m, bh


@triton.jit
def _visible(
    m, seqlen_q, seqlen_k, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key ranges of a query block: [lo, full_lo) masked, [full_lo, full_hi) seen by all rows, up to hi masked."""
    first = m * BLOCK_M + seqlen_k - seqlen_q
    last = min((m + 1) * BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
    return _ranges(first, last, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N)


@triton.jit
def _ranges(
    first, last, seqlen_k, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """_visible of the rows whose key positions are first to last."""
    lo = 0
    full_lo = 0
    if HAS_LEFT:
        lo = max(first - window_left, 0) // BLOCK_N * BLOCK_N
        full_lo = (max(last - window_left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    hi = seqlen_k
    full_hi = seqlen_k // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        hi = min(seqlen_k, max(last + window_right + 1, 0))
        full_hi = min(seqlen_k, max(first + window_right + 1, 0)) // BLOCK_N * BLOCK_N
    return lo, full_lo, full_hi, hi


@triton.jit
def _head_tiles(
    X, b, h, first, stride_b, stride_n, stride_h, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Where one head's rows start: (pointer or descriptor, row, column); row and column matter to descriptors only."""
    row, col = 0, 0
    tiles = X
    if DESCRIPTOR:
        row = b * stride_b
        if TRANSPOSED:
            col = first
        else:
            row += first
        if DESCRIPTOR == 1:
            col += h * stride_h
        else:
            row += h * stride_h
    else:
        tiles = row_at(X, b, h, first, stride_b, 1 if TRANSPOSED else stride_n, stride_h)
    return tiles, row, col


@triton.jit
def _load_k(
    K, k_row, k_col, stride_kn, n, seqlen_k, DESCRIPTOR: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The (BLOCK_D, BLOCK_N) tile of K transposed, zero outside the sequence."""
    if DESCRIPTOR:
        k = tl.trans(K.load([k_row + n, k_col]))
    else:
        offs_d = tl.arange(0, BLOCK_D)
        offs_n = tl.arange(0, BLOCK_N)
        ptrs = K + tl.cast(n, tl.int64) * stride_kn + offs_n[None, :] * stride_kn + offs_d[:, None]
        if MASKED:
            k = tl.load(ptrs, (n + offs_n < seqlen_k)[None, :] & (offs_d < HEAD_DIM)[:, None], other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(ptrs, (offs_d < HEAD_DIM)[:, None], other=0.0)
        else:
            k = tl.load(ptrs)
    return k


@triton.jit
def _load_v(
    V, v_row, v_col, stride_vn, n, seqlen_k,
    DESCRIPTOR: tl.constexpr, MASKED: tl.constexpr, V_TRANSPOSED: tl.constexpr, QUANTISED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The (BLOCK_N, BLOCK_D) tile of V, zero outside the sequence: 0 * NaN of stale memory would poison valid rows."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    if DESCRIPTOR:
        v = tl.trans(V.load([v_row, v_col + n])) if V_TRANSPOSED else V.load([v_row + n, v_col])
        if MASKED and not QUANTISED:  # rows of the next sequence, or whatever lies behind the tensor's view
            v = tl.where((n + offs_n < seqlen_k)[:, None], v, 0.0)
    elif V_TRANSPOSED:  # only quantised buffers: padded with zeros in both directions
        v = tl.trans(tl.load(V + n + offs_d[:, None] * stride_vn + offs_n[None, :]))
    else:
        ptrs = V + tl.cast(n, tl.int64) * stride_vn + offs_n[:, None] * stride_vn + offs_d[None, :]
        if MASKED:
            v = tl.load(ptrs, (n + offs_n < seqlen_k)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        elif BLOCK_D != HEAD_DIM:
            v = tl.load(ptrs, (offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(ptrs)
    return v


@triton.jit
def _logits(
    q, q_mx, k, k_descale, scale, row_shift, col_bias, n, softcap,
    SOFTCAP: tl.constexpr, ROW_SHIFT: tl.constexpr, COL_BIAS: tl.constexpr, SCALES: tl.constexpr,
    QUANT_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Q times K transposed in fp32, and the scale a row that is still to be applied to it.

    The scale stays out where nothing is added to the logits: the maximum and exp2's argument take it for free.
    """
    offs_n = n + tl.arange(0, BLOCK_N)
    if SCALES == "mx":
        groups = tl.arange(0, BLOCK_D // 32)
        k_mx = tl.load(k_descale + offs_n[:, None] * (BLOCK_D // 32) + groups[None, :])
        s = tl.dot_scaled(q, q_mx, E4M3, k, k_mx, E4M3)
    else:
        s = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32) if q.dtype == tl.int8 else tl.dot(q, k)
    if SCALES == "block":
        scale = scale * tl.load(k_descale + n // QUANT_ROWS)
    elif SCALES == "row":
        s = s * tl.load(k_descale + offs_n)[None, :]
    if COL_BIAS or SOFTCAP:
        s = s * scale[:, None]
        scale = scale * 0.0 + 1.0
    if COL_BIAS:  # what Q's mean took from the logits of these keys
        s += tl.load(col_bias + offs_n)[None, :]
    if SOFTCAP:  # bounds the true logits; tanh(x) = 1 - 2 / (e^2x + 1) is finite at both ends
        if ROW_SHIFT:
            s += row_shift[:, None]
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    return s, scale


@triton.jit
def _walk(
    acc, l_i, m_i, v_scale,  # running output, row sum, row max (base 2) and the scale that acc is in
    q, q_mx, K, k_row, k_col, stride_kn, V, v_row, v_col, stride_vn,
    k_descale, v_descale, qk_scale, row_shift, col_bias, softcap,  # qk_scale: one value a row
    n_lo, n_hi, rows, seqlen_k, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    K_DESCRIPTOR: tl.constexpr, V_DESCRIPTOR: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    QK_SCALES: tl.constexpr, V_SCALES: tl.constexpr, ROW_SHIFT: tl.constexpr, COL_BIAS: tl.constexpr,
    QUANT_ROWS: tl.constexpr, P_OFFSET: tl.constexpr, SHORT_SUM: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to the keys [n_lo, n_hi), a tile at a time. `rows` are key positions of the query rows."""
    for n in range(n_lo, n_hi, BLOCK_N):
        k = _load_k(K, k_row, k_col, stride_kn, n, seqlen_k, K_DESCRIPTOR, MASKED, HEAD_DIM, BLOCK_D, BLOCK_N)
        s, scale = _logits(q, q_mx, k, k_descale, qk_scale, row_shift, col_bias, n, softcap,
                           SOFTCAP, ROW_SHIFT, COL_BIAS, QK_SCALES, QUANT_ROWS, BLOCK_D, BLOCK_N)  # fmt: skip
        if MASKED:
            cols = n + tl.arange(0, BLOCK_N)[None, :]
            keep = cols < seqlen_k
            if HAS_RIGHT:
                keep = keep & (cols <= rows[:, None] + window_right)
            if HAS_LEFT:
                keep = keep & (cols >= rows[:, None] - window_left)
            s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        shift = m_new
        if MASKED:  # a row that has seen no key keeps m = -inf; shifting by 0 gives exp2(-inf) = 0, not NaN
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale[:, None] - (shift - P_OFFSET)[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        if V_SCALES == "block":  # acc is kept in units of this tile's V scale; the scales are powers of two: exact
            next_scale = tl.load(v_descale + n // QUANT_ROWS)
            alpha = alpha * min(v_scale / next_scale, MAX_RATIO)
            v_scale = next_scale
        v = _load_v(
            V, v_row, v_col, stride_vn, n, seqlen_k,
            V_DESCRIPTOR, MASKED, V_TRANSPOSED, V_SCALES != "none", HEAD_DIM_V, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
        acc = acc * alpha[:, None]
        if SHORT_SUM:  # summed in fp32 outside the matrix unit, which rounds long FP8 sums
            acc += tl.dot(p.to(v.dtype), v)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    return acc, l_i, m_i, v_scale


@triton.jit(do_not_specialize=UNSPECIALISED)
def attn_fwd(
    Q, K, V, O, LSE,  # K, V: pointers, or tensor descriptors: 1 heads are columns, 2 heads are rows
    q_descale, k_descale, v_descale,  # as QK_SCALES and V_SCALES say: a head's, a block's, a row's, a channel's
    row_shift, col_bias,  # fp32 (batch, nheads, padded rows), base 2: what smoothing took from rows and columns
    sink, cu_seqlens_q, cu_seqlens_k,  # fp32 (nheads); int32 (batch + 1)
    qk_scale, softcap,  # both times log2(e)
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh,  # elements; of K and V as descriptors: rows, or columns from head to head
    stride_q_descale, stride_k_descale, stride_v_descale,  # from one head to the next; 0 when all heads share one
    stride_row_shift, stride_col_bias, stride_lse,
    batch_heads, nheads, group, seqlen_q, seqlen_k, num_m_blocks, window_left, window_right,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    QK_SCALES: tl.constexpr, V_SCALES: tl.constexpr, QUANT_ROWS: tl.constexpr,
    ROW_SHIFT: tl.constexpr, COL_BIAS: tl.constexpr, P_OFFSET: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    K_DESCRIPTOR: tl.constexpr, V_DESCRIPTOR: tl.constexpr, SHORT_SUM: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LONGEST_FIRST: tl.constexpr, HEAD_GROUP: tl.constexpr, ASYNC_COPY: tl.constexpr,
    SPLITS: tl.constexpr, PACK_GQA: tl.constexpr, XCDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK_M query rows of one head. ASYNC_COPY is read by nobody: it keeps two builds apart.

    PACK_GQA: the rows are those of all heads of one KV head, and batch_heads counts KV heads. SPLITS > 1: only a share
    of the keys; O and LSE are those of merge_splits, with one more axis in front, and the LSE is in base 2.
    """
    take_over(OVERLAP)
    pid = tl.program_id(0)
    if XCDS:
        pid = tile_on_die(pid, tl.num_programs(0), XCDS)
    split = 0
    if SPLITS > 1:
        split = pid % SPLITS
        pid = pid // SPLITS
        parts = tl.cast(split, tl.int64) * (nheads if VARLEN else batch_heads * group if PACK_GQA else batch_heads)
        O += parts * stride_oh
        LSE += parts * stride_lse
    m, bh = _tile_of(pid, num_m_blocks, batch_heads, HEAD_GROUP, LONGEST_FIRST)
    heads = nheads // group if PACK_GQA else nheads
    b = bh // heads
    first_h = bh % heads
    hk = first_h if PACK_GQA else first_h // group
    max_q, max_k = seqlen_q, seqlen_k
    QK_QUANTISED: tl.constexpr = QK_SCALES != "none"
    V_QUANTISED: tl.constexpr = V_SCALES != "none"
    q_first, lse_first, seqlen_q = sequence(b, cu_seqlens_q, seqlen_q, VARLEN, QK_QUANTISED, QUANT_ROWS)
    k_first, _, _ = sequence(b, cu_seqlens_k, seqlen_k, VARLEN, QK_QUANTISED, QUANT_ROWS)
    v_first, _, seqlen_k = sequence(b, cu_seqlens_k, seqlen_k, VARLEN, V_QUANTISED, QUANT_ROWS)
    if m * BLOCK_M >= (seqlen_q * group if PACK_GQA else seqlen_q):
        return
    if VARLEN and m == num_m_blocks - 1:
        poison(O, LSE, first_h, lse_first, num_m_blocks, seqlen_q, group, stride_om, stride_oh, stride_lse,
               HAS_LSE, HEAD_DIM_V, BLOCK_M, BLOCK_DV, PACK_GQA)  # fmt: skip
    offs_m, h = rows_of(m, first_h, group, BLOCK_M, PACK_GQA)
    if PACK_GQA:
        bh = b * nheads + h
    in_rows = offs_m < seqlen_q
    offs_d = tl.arange(0, BLOCK_D)

    q_ptrs = row_ptrs(Q, b, first_h, q_first, m, group, stride_qb, stride_qm, stride_qh, BLOCK_M, PACK_GQA)
    q_ptrs += offs_d[None, :]
    q = tl.load(q_ptrs, in_rows[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    k_tiles, k_row, k_col = _head_tiles(K, b, hk, k_first, stride_kb, stride_kn, stride_kh, K_DESCRIPTOR, False)
    v_tiles, v_row, v_col = _head_tiles(V, b, hk, v_first, stride_vb, stride_vn, stride_vh, V_DESCRIPTOR, V_TRANSPOSED)

    head = h if VARLEN else bh  # in buffers whose batch axis is folded into the rows
    kv_head = hk if VARLEN else b * (nheads // group) + hk
    heads_k = nheads // group
    v_scale = 1.0
    row_scale, q_mx = row_scales(
        q_descale, k_descale, qk_scale, bh if QK_SCALES == "head" else head, b * heads_k + hk, q_first, offs_m, in_rows,
        stride_q_descale, stride_k_descale, QK_SCALES, QUANT_ROWS, PACK_GQA, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    if QK_SCALES != "none" and QK_SCALES != "head":
        k_descale = key_scales(k_descale, kv_head, k_first, stride_k_descale, QK_SCALES, QUANT_ROWS, BLOCK_D)
    if V_SCALES == "block":
        v_descale += tl.cast(kv_head, tl.int64) * stride_v_descale + v_first // QUANT_ROWS
    elif V_SCALES == "head":
        v_scale = tl.load(v_descale + (b * heads_k + hk) * stride_v_descale)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if ROW_SHIFT:
        shift = tl.load(row_shift + tl.cast(head, tl.int64) * stride_row_shift + q_first + offs_m, in_rows, other=0.0)
    if COL_BIAS:
        col_bias += tl.cast(head, tl.int64) * stride_col_bias + k_first

    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINK:  # a logit without a key: it takes part in the sum only
        m_i = tl.load(sink + h).to(tl.float32) * LOG2E - (shift * 0.0 if SOFTCAP else shift)
        l_i += 2.0**P_OFFSET
        if SPLITS > 1:  # in one of the sums
            m_i = tl.where(split == 0, m_i, float("-inf"))
            l_i = tl.where(split == 0, l_i, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    rows = offs_m + seqlen_k - seqlen_q
    if PACK_GQA:
        at = m * BLOCK_M // group + seqlen_k - seqlen_q
        last = min(((m + 1) * BLOCK_M - 1) // group, seqlen_q - 1) + seqlen_k - seqlen_q
        lo, full_lo, full_hi, hi = _ranges(at, last, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    else:
        lo, full_lo, full_hi, hi = _visible(
            m, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
        )
    if SPLITS > 1:
        lo, full_lo, full_hi, hi = share(split, lo, full_lo, full_hi, hi, SPLITS, BLOCK_N)
    for part in tl.static_range(3):  # masked on the left, unmasked, masked on the right
        if part == 0:
            n_lo, n_hi = lo, min(full_lo, hi)
        elif part == 1:
            n_lo, n_hi = full_lo, full_hi
        else:
            n_lo, n_hi = max(full_lo, full_hi), hi
        if part != 0 or HAS_LEFT:
            acc, l_i, m_i, v_scale = _walk(
                acc, l_i, m_i, v_scale, q, q_mx, k_tiles, k_row, k_col, stride_kn, v_tiles, v_row, v_col, stride_vn,
                k_descale, v_descale, row_scale, shift, col_bias, softcap, n_lo, n_hi, rows, seqlen_k,
                window_left, window_right, HAS_LEFT, HAS_RIGHT, SOFTCAP, part != 1, K_DESCRIPTOR, V_DESCRIPTOR,
                V_TRANSPOSED, QK_SCALES, V_SCALES, ROW_SHIFT, COL_BIAS, QUANT_ROWS, P_OFFSET, SHORT_SUM,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N,
            )  # fmt: skip

    if VARLEN:  # a max_seqlen that is too small shows as NaN, not as stale memory
        reached = offs_m < max_q
        if V_QUANTISED:
            reached &= seqlen_k <= max_k
        l_i = tl.where(reached, l_i, float("nan"))
    if HAS_LSE:
        lse = m_i + tl.log2(l_i) - P_OFFSET  # -inf where no key was seen
        if ROW_SHIFT and not SOFTCAP:
            lse += shift
        if SPLITS == 1:
            lse = lse * LN2
        tl.store(LSE + tl.cast(head, tl.int64) * stride_lse + lse_first + offs_m, lse, in_rows)
    acc = acc * (v_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    if V_SCALES == "channel":
        v_scales = v_descale + (b * heads_k + hk) * stride_v_descale + tl.arange(0, BLOCK_DV)
        acc = acc * tl.load(v_scales)[None, :]
    store(O, acc, b, first_h, lse_first, m, in_rows, group, stride_ob, stride_om, stride_oh,
          HEAD_DIM_V, BLOCK_M, BLOCK_DV, PACK_GQA)  # fmt: skip
