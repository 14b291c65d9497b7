"""The fused quantisers: Q, K and V to FP8 with fp32 scales in one launch, no eager arithmetic around it.

Scales of a block, of a row or of 32 neighbours in a row ("mx") need one pass: a program reads QUANT_ROWS rows of one
head, takes the maxima and writes them. "head", "tensor" and "channel" read the data once more before that, for theirs.
Buffers are padded with zeros to QUANT_ROWS rows and a power-of-two width, so that the attention kernel needs no masks.
"""

import triton
import triton.language as tl

from .scales import extent, write

UNSPECIALISED = ("first", "n_q", "n_k", "nheads", "nheads_k", "blocks_q", "blocks_k", "seqlen_q", "seqlen_k")


@triton.jit
def _rows(
    X, b, h, block, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The (QUANT_ROWS, BLOCK_D) block of one head in fp32, zero outside, and the block's index in the padded buffer."""
    first = 0
    out_block = block
    if VARLEN:
        first = tl.load(cu_seqlens + b)
        seqlen = tl.load(cu_seqlens + b + 1) - first
        out_block = block + (first + QUANT_ROWS - 1) // QUANT_ROWS + b
    offs_n = tl.arange(0, QUANT_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    base = X + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    base += tl.cast(first + block * QUANT_ROWS, tl.int64) * stride_n
    inside = (block * QUANT_ROWS + offs_n < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]
    x = tl.load(base + offs_n[:, None] * stride_n + offs_d[None, :], inside, other=0.0)
    return x.to(tl.float32), out_block, seqlen


@triton.jit
def _place(pid, n_q, n_k, nheads, nheads_k, blocks_q, blocks_k):
    """Which tensor (0 Q, 1 K, 2 V), batch entry, head and row block a program works on, and its index there."""
    which = (pid >= n_q).to(tl.int32) + (pid >= n_q + n_k).to(tl.int32)
    i = pid - tl.where(which == 0, 0, n_q + (which - 1) * n_k)
    heads = tl.where(which == 0, nheads, nheads_k)
    blocks = tl.where(which == 0, blocks_q, blocks_k)
    return which, i // (heads * blocks), i // blocks % heads, i % blocks, i


@triton.jit
def _amax_of(
    X, amax, i, b, h, block, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    x, _, _ = _rows(X, b, h, block, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
                    VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    tl.store(amax + i, tl.max(tl.abs(x)))


@triton.jit(do_not_specialize=UNSPECIALISED)
def block_amax(
    Q, K, V, amax,  # amax: fp32, one value a program: Q's, then K's, then V's
    cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    first, n_q, n_k, nheads, nheads_k, blocks_q, blocks_k, seqlen_q, seqlen_k,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each block of QUANT_ROWS rows of one head, from block number `first` on."""
    pid = first + tl.program_id(0)
    which, b, h, block, _ = _place(pid, n_q, n_k, nheads, nheads_k, blocks_q, blocks_k)
    if which == 0:
        _amax_of(Q, amax, pid, b, h, block, stride_qb, stride_qm, stride_qh, cu_seqlens_q, seqlen_q,
                 VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    elif which == 1:
        _amax_of(K, amax, pid, b, h, block, stride_kb, stride_kn, stride_kh, cu_seqlens_k, seqlen_k,
                 VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    else:
        _amax_of(V, amax, pid, b, h, block, stride_vb, stride_vn, stride_vh, cu_seqlens_k, seqlen_k,
                 VARLEN, HEAD_DIM_V, BLOCK_DV, QUANT_ROWS)  # fmt: skip


@triton.jit(do_not_specialize=("nheads_k", "blocks_k", "seqlen_k"))
def channel_amax(
    V, amax,  # fp32 (batch, nheads_k, CHUNKS, BLOCK_DV)
    cu_seqlens_k, stride_vb, stride_vn, stride_vh, nheads_k, blocks_k, seqlen_k,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each channel of one head of V, over every CHUNKS-th block of rows."""
    bh, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    top = tl.zeros([BLOCK_DV], tl.float32)
    for block in range(chunk, blocks_k, CHUNKS):
        x, _, _ = _rows(V, bh // nheads_k, bh % nheads_k, block, stride_vb, stride_vn, stride_vh, cu_seqlens_k,
                        seqlen_k, VARLEN, HEAD_DIM_V, BLOCK_DV, QUANT_ROWS)  # fmt: skip
        top = tl.maximum(top, tl.max(tl.abs(x), 0))
    tl.store(amax + tl.cast(tl.program_id(0), tl.int64) * BLOCK_DV + tl.arange(0, BLOCK_DV), top)


@triton.jit
def _sums_of(
    X, sums, b, h, chunk, heads, row_blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_D], tl.float32)
    square = tl.zeros([BLOCK_D], tl.float32)
    for block in range(chunk, row_blocks, CHUNKS):
        x, _, _ = _rows(X, b, h, block, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
                        VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
        total += tl.sum(x, 0)
        square += tl.sum(x * x, 0)
    out = sums + (tl.cast(b * heads + h, tl.int64) * CHUNKS + chunk) * 2 * BLOCK_D + tl.arange(0, BLOCK_D)
    tl.store(out, total)
    tl.store(out + BLOCK_D, square)


@triton.jit(do_not_specialize=UNSPECIALISED)
def column_sums(
    Q, K, q_sums, k_sums,  # fp32 (batch, heads, CHUNKS, 2, BLOCK_D): sums and sums of squares over the rows
    cu_seqlens_q, cu_seqlens_k, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    n_q, n_k, nheads, nheads_k, blocks_q, blocks_k, seqlen_q, seqlen_k,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Per-channel statistics of K (programs n_q and up) and, where n_q > 0, of Q; every CHUNKS-th block of rows each.

    Partial sums instead of atomics: the result does not depend on the order in which programs finish.
    """
    pid = tl.program_id(0)
    if pid < n_q:
        bh, chunk = pid // CHUNKS, pid % CHUNKS
        _sums_of(Q, q_sums, bh // nheads, bh % nheads, chunk, nheads, blocks_q, stride_qb, stride_qm, stride_qh,
                 cu_seqlens_q, seqlen_q, CHUNKS, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    else:
        bh, chunk = (pid - n_q) // CHUNKS, (pid - n_q) % CHUNKS
        _sums_of(K, k_sums, bh // nheads_k, bh % nheads_k, chunk, nheads_k, blocks_k, stride_kb, stride_kn, stride_kh,
                 cu_seqlens_k, seqlen_k, CHUNKS, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip


@triton.jit
def _mean(sums, head, channels, seqlen, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean over the rows, and the mean square about it, of some channels of one head."""
    ptrs = sums + tl.cast(head, tl.int64) * CHUNKS * 2 * BLOCK_D
    ptrs = ptrs + tl.arange(0, CHUNKS)[:, None] * 2 * BLOCK_D + channels[None, :]
    n = tl.maximum(seqlen, 1)
    mean = tl.sum(tl.load(ptrs), 0) / n
    return mean, tl.maximum(tl.sum(tl.load(ptrs + BLOCK_D), 0) / n - mean * mean, 0.0)


@triton.jit(do_not_specialize=("nheads_k", "group", "seqlen_q", "seqlen_k"))
def column_statistics(
    q_sums, k_sums, q_means, k_means, equaliser,  # in; out fp32 (batch, heads, BLOCK_D)
    cu_seqlens_q, cu_seqlens_k, nheads_k, group, seqlen_q, seqlen_k,
    VARLEN: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr, HAS_Q: tl.constexpr,
    Q_MEAN: tl.constexpr, EQUALISE: tl.constexpr,
):  # fmt: skip
    """From sums to means: CHANNELS channels of one KV head, and of the query heads that read it, a program.

    equaliser: s_c = sqrt(rms k_c / rms q_c) of a KV head, within [2**-10, 2**10].
    """
    head = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if VARLEN:
        b = head // nheads_k
        seqlen_q = tl.load(cu_seqlens_q + b + 1) - tl.load(cu_seqlens_q + b)
        seqlen_k = tl.load(cu_seqlens_k + b + 1) - tl.load(cu_seqlens_k + b)
    k_mean, k_square = _mean(k_sums, head, channels, seqlen_k, CHUNKS, BLOCK_D)
    tl.store(k_means + head * BLOCK_D + channels, k_mean)
    if HAS_Q:
        q_square = tl.zeros([CHANNELS], tl.float32)
        for i in range(0, group):
            mean, square = _mean(q_sums, head * group + i, channels, seqlen_q, CHUNKS, BLOCK_D)
            if Q_MEAN:
                tl.store(q_means + (head * group + i) * BLOCK_D + channels, mean)
                q_square += square
            else:
                q_square += square + mean * mean
        if EQUALISE:
            ratio = k_square / tl.maximum(q_square / group, 1e-20)
            s = tl.clamp(tl.sqrt(tl.sqrt(ratio)), 2.0**-10, 2.0**10)
            tl.store(equaliser + head * BLOCK_D + channels, s)


@triton.jit
def _rotate(x, BLOCK_D: tl.constexpr):
    """x times the Hadamard matrix of order BLOCK_D over sqrt(BLOCK_D), its entries +-1 by the parity of i & j."""
    i = tl.arange(0, BLOCK_D)
    bits = i[:, None] & i[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    h = (1 - 2 * (bits & 1)).to(tl.float32).to(tl.bfloat16)
    return tl.dot(x.to(tl.bfloat16), h) * (BLOCK_D**-0.5)


@triton.jit
def _smooth_q(
    x, q_means, k_means, equaliser, row_shift, qk_scale, b, h, out_block, nheads, nheads_k, rows8, inside,
    Q_MEAN: tl.constexpr, EQUALISE: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Q as it is rounded; writes what K's mean takes from every logit of a row, in base 2, if ROW_SHIFT."""
    offs_d = tl.arange(0, BLOCK_D)
    kv_head = b * nheads_k + h // (nheads // nheads_k)
    if ROW_SHIFT:
        k_mean = tl.load(k_means + kv_head * BLOCK_D + offs_d)
        head = h if VARLEN else b * nheads + h
        rows = tl.cast(head, tl.int64) * rows8 + out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
        tl.store(row_shift + rows, tl.sum(x * k_mean[None, :], 1) * qk_scale)
    if Q_MEAN:
        mean = tl.load(q_means + (b * nheads + h) * BLOCK_D + offs_d)
        x = tl.where(inside[:, None], x - mean[None, :], 0.0)
    if EQUALISE:
        x *= tl.load(equaliser + kv_head * BLOCK_D + offs_d)[None, :]
    return _rotate(x, BLOCK_D) if HADAMARD else x


@triton.jit
def _smooth_k(
    x, q_means, k_means, equaliser, col_bias, qk_scale, b, h, out_block, nheads, nheads_k, rows8, inside,
    K_MEAN: tl.constexpr, Q_MEAN: tl.constexpr, EQUALISE: tl.constexpr, HADAMARD: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """K as it is rounded; writes what Q's mean takes from every logit of a key, in base 2, for each query head."""
    offs_d = tl.arange(0, BLOCK_D)
    kv_head = b * nheads_k + h
    group = nheads // nheads_k
    if K_MEAN:
        mean = tl.load(k_means + kv_head * BLOCK_D + offs_d)
        x = tl.where(inside[:, None], x - mean[None, :], 0.0)
    if Q_MEAN:
        for i in range(0, group):
            q_head = h * group + i
            q_mean = tl.load(q_means + (b * nheads + q_head) * BLOCK_D + offs_d)
            head = q_head if VARLEN else b * nheads + q_head
            rows = tl.cast(head, tl.int64) * rows8 + out_block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
            tl.store(col_bias + rows, tl.sum(x * q_mean[None, :], 1) * qk_scale)
    if EQUALISE:
        x /= tl.load(equaliser + kv_head * BLOCK_D + offs_d)[None, :]
    return _rotate(x, BLOCK_D) if HADAMARD else x


@triton.jit(do_not_specialize=UNSPECIALISED)
def quantize(
    Q, K, V, Q8, K8, V8, q_descale, k_descale, v_descale, amax, v_amax, q_means, k_means, equaliser,
    row_shift, col_bias, qk_scale,
    cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    n_q, n_k, nheads, nheads_k, blocks_q, blocks_k, rows8_q, rows8_k, seqlen_q, seqlen_k,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUANT_ROWS: tl.constexpr, QK: tl.constexpr,
    QK_TOP: tl.constexpr, V_TOP: tl.constexpr, GRANULARITY: tl.constexpr, V_GRANULARITY: tl.constexpr,
    V_TRANSPOSED: tl.constexpr, V_INTERLEAVED: tl.constexpr, K_MEAN: tl.constexpr, Q_MEAN: tl.constexpr,
    EQUALISE: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Q, K and V in eight bits: X8 (batch, heads, rows8, width), V8 with the last two swapped if V_TRANSPOSED.

    Programs [0, n_q) write Q, the next n_k K, the rest V; without QK only V is there. X = X8 * descale.
    With VARLEN the batch axis is folded into the rows (see attn_fwd._sequence). GRANULARITY "given": the inputs are
    FP8 already and only move to the padded layout.
    """
    which, b, h, block, i = _place(tl.program_id(0), n_q, n_k, nheads, nheads_k, blocks_q, blocks_k)
    if VARLEN:
        len_q = tl.load(cu_seqlens_q + b + 1) - tl.load(cu_seqlens_q + b)
        len_k = tl.load(cu_seqlens_k + b + 1) - tl.load(cu_seqlens_k + b)
    else:
        len_q, len_k = seqlen_q, seqlen_k
    offs = block * QUANT_ROWS + tl.arange(0, QUANT_ROWS)
    if which == 2:
        x, out_block, _ = _rows(V, b, h, block, stride_vb, stride_vn, stride_vh, cu_seqlens_k, seqlen_k,
                                VARLEN, HEAD_DIM_V, BLOCK_DV, QUANT_ROWS)  # fmt: skip
        if block * QUANT_ROWS < len_k:
            first, last = extent(which, i, n_q, n_k, blocks_k, V_GRANULARITY)
            write(x, V8, v_descale, v_amax, first, last, b, h, nheads_k, out_block, rows8_k,
                   VARLEN, BLOCK_DV, QUANT_ROWS, V_TOP, V_GRANULARITY, True, V_TRANSPOSED, V_INTERLEAVED,
                  CHUNKS)  # fmt: skip
    elif QK:
        first, last = extent(which, i, n_q, n_k, tl.where(which == 0, blocks_q, blocks_k), GRANULARITY)
        if which == 0:
            x, out_block, _ = _rows(Q, b, h, block, stride_qb, stride_qm, stride_qh, cu_seqlens_q, seqlen_q,
                                    VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
            if block * QUANT_ROWS < len_q:
                x = _smooth_q(x, q_means, k_means, equaliser, row_shift, qk_scale, b, h, out_block, nheads, nheads_k,
                              rows8_q, offs < len_q, Q_MEAN, EQUALISE, HADAMARD, ROW_SHIFT, VARLEN, BLOCK_D,
                              QUANT_ROWS)  # fmt: skip
                write(x, Q8, q_descale, amax, first, last, b, h, nheads, out_block, rows8_q,
                       VARLEN, BLOCK_D, QUANT_ROWS, QK_TOP, GRANULARITY, False, False, False, CHUNKS)  # fmt: skip
        else:
            x, out_block, _ = _rows(K, b, h, block, stride_kb, stride_kn, stride_kh, cu_seqlens_k, seqlen_k,
                                    VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
            if block * QUANT_ROWS < len_k:
                x = _smooth_k(x, q_means, k_means, equaliser, col_bias, qk_scale, b, h, out_block, nheads, nheads_k,
                              rows8_k, offs < len_k, K_MEAN, Q_MEAN, EQUALISE, HADAMARD, VARLEN, BLOCK_D,
                              QUANT_ROWS)  # fmt: skip
                write(x, K8, k_descale, amax, first, last, b, h, nheads_k, out_block, rows8_k,
                       VARLEN, BLOCK_D, QUANT_ROWS, QK_TOP, GRANULARITY, False, False, False, CHUNKS)  # fmt: skip
