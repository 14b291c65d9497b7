"""The fused quantisers: Q, K and V to FP8 with fp32 scales in one launch, no eager arithmetic around it.

Scales of a block, of a row or of 32 neighbours in a row ("mx") need one pass: a program reads QUANT_ROWS rows of one
head, takes the maxima and writes them. "head", "tensor" and "channel" read the data once more before that, for theirs,
and so do means and the equaliser: a first launch leaves maxima or sums of every CHUNKS-th block of a head, the second
reduces those of its head in every program (docs/kernels.md).
Buffers are padded with zeros to QUANT_ROWS rows and a power-of-two width, so that the attention kernel needs no masks.
"""

import triton
import triton.language as tl

from .scales import quad_rows, write, write_transposed

UNSPECIALISED = ("batch", "n_q", "n_k", "nheads", "nheads_k", "blocks_q", "blocks_k", "seqlen_q", "seqlen_k")


@triton.jit
def _bounds(b, cu_seqlens, seqlen, VARLEN: tl.constexpr):
    """First row, and number of rows, of a batch entry."""
    first = 0
    if VARLEN:
        first = tl.load(cu_seqlens + b)
        seqlen = tl.load(cu_seqlens + b + 1) - first
    return first, seqlen


@triton.jit
def _rows(
    X, b, h, first, seqlen, start, offs_n, stride_b, stride_n, stride_h, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows start + offs_n of one head, BLOCK_D wide, zero outside."""
    offs_d = tl.arange(0, BLOCK_D)
    base = X + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    base += tl.cast(first + start, tl.int64) * stride_n
    inside = (start + offs_n < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(base + offs_n[:, None] * stride_n + offs_d[None, :], inside, other=0.0)


@triton.jit
def _place(pid, n_q, n_k, nheads, nheads_k, parts_q, parts_k, parts_v):
    """Which tensor (0 Q, 1 K, 2 V), batch entry, head and part of it a program works on."""
    which = (pid >= n_q).to(tl.int32) + (pid >= n_q + n_k).to(tl.int32)
    i = pid - tl.where(which == 0, 0, n_q + (which - 1) * n_k)
    heads = tl.where(which == 0, nheads, nheads_k)
    parts = tl.where(which == 0, parts_q, tl.where(which == 1, parts_k, parts_v))
    return which, i // (heads * parts), i // parts % heads, i % parts


@triton.jit
def _tops(
    X, b, h, chunk, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of every CHUNKS-th block of a head, (ROWS, BLOCK_D): of the rows that share i % ROWS."""
    ROWS: tl.constexpr = min(QUANT_ROWS, 2048 // BLOCK_D)  # a load: 8 values (16 bytes) of each of 256 lanes
    first, seqlen = _bounds(b, cu_seqlens, seqlen, VARLEN)
    top = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for block in range(chunk, blocks, CHUNKS):
        for part in tl.static_range(QUANT_ROWS // ROWS):
            x = _rows(X, b, h, first, seqlen, block * QUANT_ROWS + part * ROWS, tl.arange(0, ROWS),
                      stride_b, stride_n, stride_h, HEAD_DIM, BLOCK_D)  # fmt: skip
            top = tl.maximum(top, tl.abs(x.to(tl.float32)))
    return top


@triton.jit
def _amax_of(
    X, amax, i, b, h, chunk, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    top = _tops(X, b, h, chunk, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
                CHUNKS, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    tl.store(amax + i, tl.max(top))


@triton.jit(do_not_specialize=UNSPECIALISED[1:])
def chunk_amax(
    Q, K, V, q_amax, k_amax, v_amax,  # fp32 (batch, heads, CHUNKS); K and V have as many
    cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    n_q, n_k, nheads, nheads_k, blocks_q, blocks_k, seqlen_q, seqlen_k,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, VARLEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each chunk of a head, every CHUNKS-th block of rows; programs of Q, then K, then V."""
    pid = tl.program_id(0)
    which, b, h, chunk = _place(pid, n_q, n_k, nheads, nheads_k, CHUNKS_Q, CHUNKS_K, CHUNKS_K)
    if which == 0:
        _amax_of(Q, q_amax, pid, b, h, chunk, blocks_q, stride_qb, stride_qm, stride_qh, cu_seqlens_q, seqlen_q,
                 CHUNKS_Q, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    elif which == 1:
        _amax_of(K, k_amax, pid - n_q, b, h, chunk, blocks_k, stride_kb, stride_kn, stride_kh, cu_seqlens_k, seqlen_k,
                 CHUNKS_K, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    else:
        _amax_of(V, v_amax, pid - n_q - n_k, b, h, chunk, blocks_k, stride_vb, stride_vn, stride_vh, cu_seqlens_k,
                 seqlen_k, CHUNKS_K, VARLEN, HEAD_DIM_V, BLOCK_DV, QUANT_ROWS)  # fmt: skip


@triton.jit(do_not_specialize=("nheads_k", "blocks_k", "seqlen_k"))
def channel_amax(
    V, v_amax,  # fp32 (batch, nheads_k, CHUNKS_V, BLOCK_DV)
    cu_seqlens_k, stride_vb, stride_vn, stride_vh, nheads_k, blocks_k, seqlen_k,
    CHUNKS_V: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each channel of each chunk of a head of V."""
    bh, chunk = tl.program_id(0) // CHUNKS_V, tl.program_id(0) % CHUNKS_V
    top = _tops(V, bh // nheads_k, bh % nheads_k, chunk, blocks_k, stride_vb, stride_vn, stride_vh, cu_seqlens_k,
                seqlen_k, CHUNKS_V, VARLEN, HEAD_DIM_V, BLOCK_DV, QUANT_ROWS)  # fmt: skip
    tl.store(v_amax + tl.cast(tl.program_id(0), tl.int64) * BLOCK_DV + tl.arange(0, BLOCK_DV), tl.max(top, 0))


@triton.jit
def _sums_of(
    X, sums, i, chunk, heads, span, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    CHUNKS: tl.constexpr, SQUARES: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the i-th `span` heads. Reduced over rows once, at the end: a barrier a block would drain the loads."""
    ROWS: tl.constexpr = min(QUANT_ROWS, 2048 // BLOCK_D)  # as in _tops
    b = i * span // heads
    first, seqlen = _bounds(b, cu_seqlens, seqlen, VARLEN)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    square = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for j in range(chunk, span * blocks, CHUNKS):
        h = i * span % heads + j // blocks
        for part in tl.static_range(QUANT_ROWS // ROWS):
            x = _rows(X, b, h, first, seqlen, j % blocks * QUANT_ROWS + part * ROWS, tl.arange(0, ROWS),
                      stride_b, stride_n, stride_h, HEAD_DIM, BLOCK_D).to(tl.float32)  # fmt: skip
            total += x
            square += x * x
    out = sums + (tl.cast(i, tl.int64) * 2 * CHUNKS + chunk) * BLOCK_D + tl.arange(0, BLOCK_D)
    tl.store(out, tl.sum(total, 0))
    if SQUARES:
        tl.store(out + CHUNKS * BLOCK_D, tl.sum(square, 0))


@triton.jit
def _write_rotation(rotation, part, BLOCK_D: tl.constexpr):
    """32 rows of the Hadamard matrix of order BLOCK_D: +-1 in bf16, by the parity of i & j."""
    ROWS: tl.constexpr = min(32, BLOCK_D)
    i = part * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK_D)
    bits = i[:, None] & j[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    tl.store(rotation + i[:, None] * BLOCK_D + j[None, :], (1 - 2 * (bits & 1)).to(tl.float32).to(tl.bfloat16))


@triton.jit(do_not_specialize=("span", "n_q", *UNSPECIALISED[3:]))
def column_sums(
    Q, K, q_sums, k_sums,  # fp32 (batch, heads / span, 2, CHUNKS, BLOCK_D): sums and sums of squares over the rows
    rotation,  # bf16 (BLOCK_D, BLOCK_D)
    cu_seqlens_q, cu_seqlens_k, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    n_q, span, nheads, nheads_k, blocks_q, blocks_k, seqlen_q, seqlen_k,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, SQUARES: tl.constexpr, HADAMARD: tl.constexpr,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Per-channel statistics of K (programs n_q and up) and, where n_q > 0, of Q, `span` heads of it together.

    Partial sums instead of atomics: the result does not depend on the order in which programs finish. The matrix that
    quantize rotates by is written here, once: made by every program there it would cost as much as all its arithmetic.
    """
    pid = tl.program_id(0)
    if HADAMARD:  # noqa: SIM102 - a constant decides what is compiled, a number what runs
        if pid * 32 < BLOCK_D:  # there are at least eight programs
            _write_rotation(rotation, pid, BLOCK_D)
    if pid < n_q:
        _sums_of(Q, q_sums, pid // CHUNKS_Q, pid % CHUNKS_Q, nheads, span, blocks_q, stride_qb, stride_qm, stride_qh,
                 cu_seqlens_q, seqlen_q, CHUNKS_Q, SQUARES, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    else:
        pid -= n_q
        _sums_of(K, k_sums, pid // CHUNKS_K, pid % CHUNKS_K, nheads_k, 1, blocks_k, stride_kb, stride_kn, stride_kh,
                 cu_seqlens_k, seqlen_k, CHUNKS_K, SQUARES, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip


@triton.jit
def _mean(sums, head, n, WHICH: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean over n rows of each channel (WHICH 0) or of its square (WHICH 1), from the sums of all chunks."""
    ptrs = sums + (tl.cast(head, tl.int64) * 2 + WHICH) * CHUNKS * BLOCK_D
    ptrs = ptrs + tl.arange(0, CHUNKS)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    return tl.sum(tl.load(ptrs), 0) / tl.maximum(n, 1)


@triton.jit
def _equaliser(
    q_sums, k_sums, kv_head, group, len_q, len_k, k_mean,
    Q_MEAN: tl.constexpr, CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """s_c = sqrt(rms k_c / rms q_c) of a KV head and the query heads that read it, within [2**-10, 2**10]."""
    k_square = tl.maximum(_mean(k_sums, kv_head, len_k, 1, CHUNKS_K, BLOCK_D) - k_mean * k_mean, 0.0)
    if Q_MEAN:
        q_square = tl.zeros([BLOCK_D], tl.float32)
        for i in range(0, group):
            mean = _mean(q_sums, kv_head * group + i, len_q, 0, CHUNKS_Q, BLOCK_D)
            square = _mean(q_sums, kv_head * group + i, len_q, 1, CHUNKS_Q, BLOCK_D)
            q_square += tl.maximum(square - mean * mean, 0.0)
    else:  # the sums are those of the whole group
        q_square = _mean(q_sums, kv_head, len_q, 1, CHUNKS_Q, BLOCK_D)
    ratio = k_square / tl.maximum(q_square / group, 1e-20)
    return tl.clamp(tl.sqrt(tl.sqrt(ratio)), 2.0**-10, 2.0**10)


@triton.jit
def _rotate(x, rotation, BLOCK_D: tl.constexpr):
    """x times the Hadamard matrix over sqrt(BLOCK_D), which is orthogonal."""
    i = tl.arange(0, BLOCK_D)
    h = tl.load(rotation + i[:, None] * BLOCK_D + i[None, :])
    return tl.dot(x.to(tl.bfloat16), h) * (BLOCK_D**-0.5)


@triton.jit
def _corrections(
    q_sums, k_sums, q_head, kv_head, group, len_q, len_k,
    OF_Q: tl.constexpr, OF_K: tl.constexpr, EQUALISE: tl.constexpr, Q_MEAN: tl.constexpr,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(mean of a head of Q, of K, equaliser) by channel, those that are asked for; the rest 0, 0 and 1."""
    q_mean = tl.zeros([BLOCK_D], tl.float32)
    k_mean = tl.zeros([BLOCK_D], tl.float32)
    s = tl.full([BLOCK_D], 1.0, tl.float32)
    if OF_Q:
        q_mean = _mean(q_sums, q_head, len_q, 0, CHUNKS_Q, BLOCK_D)
    if OF_K or EQUALISE:
        k_mean = _mean(k_sums, kv_head, len_k, 0, CHUNKS_K, BLOCK_D)
    if EQUALISE:
        s = _equaliser(q_sums, k_sums, kv_head, group, len_q, len_k, k_mean, Q_MEAN, CHUNKS_Q, CHUNKS_K, BLOCK_D)
    return q_mean, k_mean, s


@triton.jit
def _smooth_q(
    x, q_mean, k_mean, s, rotation, row_shift, qk_scale, head, out_block, rows8, inside,
    Q_MEAN: tl.constexpr, EQUALISE: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr,
    BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Q as it is rounded; writes what K's mean takes from every logit of a row, in base 2, if ROW_SHIFT."""
    if ROW_SHIFT:
        rows = tl.cast(head, tl.int64) * rows8 + out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
        tl.store(row_shift + rows, tl.sum(x * k_mean[None, :], 1) * qk_scale)
    if Q_MEAN:
        x = tl.where(inside[:, None], x - q_mean[None, :], 0.0)
    if EQUALISE:
        x *= s[None, :]
    return _rotate(x, rotation, BLOCK_D) if HADAMARD else x


@triton.jit
def _smooth_k(
    x, q_sums, k_mean, s, rotation, col_bias, qk_scale, first_head, group, sums_head, len_q, out_block, rows8, inside,
    K_MEAN: tl.constexpr, Q_MEAN: tl.constexpr, EQUALISE: tl.constexpr, HADAMARD: tl.constexpr,
    BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, CHUNKS_Q: tl.constexpr,
):  # fmt: skip
    """K as it is rounded; writes what Q's mean takes from every logit of a key, in base 2, for each query head.

    first_head: of the group in col_bias; sums_head: in q_sums, which has every batch entry apart.
    """
    if K_MEAN:
        x = tl.where(inside[:, None], x - k_mean[None, :], 0.0)
    if Q_MEAN:
        for i in range(0, group):
            q_mean = _mean(q_sums, sums_head + i, len_q, 0, CHUNKS_Q, BLOCK_D)
            rows = tl.cast(first_head + i, tl.int64) * rows8 + out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
            tl.store(col_bias + rows, tl.sum(x * q_mean[None, :], 1) * qk_scale)
    if EQUALISE:
        x *= (1.0 / s)[None, :]
    return _rotate(x, rotation, BLOCK_D) if HADAMARD else x


@triton.jit(do_not_specialize=UNSPECIALISED)
def quantize(
    Q, K, V, Q8, K8, V8, q_descale, k_descale, v_descale, q_amax, k_amax, v_amax, q_sums, k_sums,
    rotation, row_shift, col_bias, qk_scale,
    cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    n_q, n_k, batch, nheads, nheads_k, blocks_q, blocks_k, rows8_q, rows8_k, seqlen_q, seqlen_k,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUANT_ROWS: tl.constexpr, QK: tl.constexpr,
    QK_TOP: tl.constexpr, V_TOP: tl.constexpr, GRANULARITY: tl.constexpr, V_GRANULARITY: tl.constexpr,
    V_TRANSPOSED: tl.constexpr, V_INTERLEAVED: tl.constexpr, K_MEAN: tl.constexpr, Q_MEAN: tl.constexpr,
    EQUALISE: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, CHUNKS_V: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Q, K and V in eight bits: X8 (batch, heads, rows8, width), V8 with the last two swapped if V_TRANSPOSED.

    Programs [0, n_q) write Q, the next n_k K, RUN blocks each, the rest V; without QK only V. X = X8 * descale.
    With VARLEN the batch axis is folded into the rows (see attn_fwd._sequence). GRANULARITY "given": the inputs are
    FP8 already and only move to the padded layout.
    """
    which, b, h, part = _place(tl.program_id(0), n_q, n_k, nheads, nheads_k, tl.cdiv(blocks_q, RUN),
                               tl.cdiv(blocks_k, RUN), blocks_k)  # fmt: skip
    first_q, len_q = _bounds(b, cu_seqlens_q, seqlen_q, VARLEN)
    first_k, len_k = _bounds(b, cu_seqlens_k, seqlen_k, VARLEN)
    offs = tl.arange(0, QUANT_ROWS)
    group = nheads // nheads_k
    out_q, out_k, folded = 0, 0, b  # where the sequence begins, in blocks of the padded buffers
    if VARLEN:
        folded = 0
        out_q += (first_q + QUANT_ROWS - 1) // QUANT_ROWS + b
        out_k += (first_k + QUANT_ROWS - 1) // QUANT_ROWS + b
    if which == 2:
        start = part * QUANT_ROWS
        out_k += part
        if start < len_k:
            head = folded * nheads_k + h
            if V_TRANSPOSED:
                first = quad_rows(QUANT_ROWS, V_INTERLEAVED)
                STEP: tl.constexpr = 8 if V_INTERLEAVED else 2
                x0 = _rows(V, b, h, first_k, len_k, start, first, stride_vb, stride_vn, stride_vh, HEAD_DIM_V, BLOCK_DV)
                x1 = _rows(V, b, h, first_k, len_k, start, first + 1, stride_vb, stride_vn, stride_vh,
                           HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x2 = _rows(V, b, h, first_k, len_k, start, first + STEP, stride_vb, stride_vn, stride_vh,
                           HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x3 = _rows(V, b, h, first_k, len_k, start, first + STEP + 1, stride_vb, stride_vn, stride_vh,
                           HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
                write_transposed(x, V8, v_descale, v_amax, batch * nheads_k, b, h, nheads_k, head, out_k, rows8_k,
                                 BLOCK_DV, QUANT_ROWS, V_TOP, V_GRANULARITY, CHUNKS_V)  # fmt: skip
            else:
                x = _rows(V, b, h, first_k, len_k, start, offs, stride_vb, stride_vn, stride_vh, HEAD_DIM_V, BLOCK_DV)
                write(x, V8, v_descale, v_amax, batch * nheads_k, b, h, nheads_k, head, out_k, rows8_k,
                      BLOCK_DV, QUANT_ROWS, V_TOP, V_GRANULARITY, True, CHUNKS_V)  # fmt: skip
    elif QK:
        head = folded * nheads + h
        if which == 0:
            q_mean, k_mean, s = _corrections(
                q_sums, k_sums, b * nheads + h, b * nheads_k + h // group, group, len_q, len_k,
                Q_MEAN, ROW_SHIFT, EQUALISE, Q_MEAN, CHUNKS_Q, CHUNKS_K, BLOCK_D,
            )  # fmt: skip
            for r in tl.static_range(RUN):
                block = part * RUN + r
                start = block * QUANT_ROWS
                if start < len_q:
                    x = _rows(Q, b, h, first_q, len_q, start, offs, stride_qb, stride_qm, stride_qh, HEAD_DIM, BLOCK_D)
                    if Q_MEAN or EQUALISE or HADAMARD or ROW_SHIFT:
                        x = _smooth_q(x.to(tl.float32), q_mean, k_mean, s, rotation, row_shift, qk_scale, head,
                                      out_q + block, rows8_q, start + offs < len_q, Q_MEAN, EQUALISE, HADAMARD,
                                      ROW_SHIFT, BLOCK_D, QUANT_ROWS)  # fmt: skip
                    write(x, Q8, q_descale, q_amax, batch * nheads, b, h, nheads, head, out_q + block, rows8_q,
                          BLOCK_D, QUANT_ROWS, QK_TOP, GRANULARITY, False, CHUNKS_Q)  # fmt: skip
        else:
            head = folded * nheads_k + h
            q_mean, k_mean, s = _corrections(
                q_sums, k_sums, 0, b * nheads_k + h, group, len_q, len_k,
                False, K_MEAN, EQUALISE, Q_MEAN, CHUNKS_Q, CHUNKS_K, BLOCK_D,
            )  # fmt: skip
            for r in tl.static_range(RUN):
                block = part * RUN + r
                start = block * QUANT_ROWS
                if start < len_k:
                    x = _rows(K, b, h, first_k, len_k, start, offs, stride_kb, stride_kn, stride_kh, HEAD_DIM, BLOCK_D)
                    if K_MEAN or Q_MEAN or EQUALISE or HADAMARD:
                        x = _smooth_k(x.to(tl.float32), q_sums, k_mean, s, rotation, col_bias, qk_scale, head * group,
                                      group, (b * nheads_k + h) * group, len_q, out_k + block, rows8_k,
                                      start + offs < len_k, K_MEAN, Q_MEAN, EQUALISE, HADAMARD, BLOCK_D, QUANT_ROWS,
                                      CHUNKS_Q)  # fmt: skip
                    write(x, K8, k_descale, k_amax, batch * nheads_k, b, h, nheads_k, head, out_k + block, rows8_k,
                          BLOCK_D, QUANT_ROWS, QK_TOP, GRANULARITY, False, CHUNKS_K)  # fmt: skip
