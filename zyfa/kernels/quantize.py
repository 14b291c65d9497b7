"""The fused quantisers: Q, K and V to FP8 or INT8 with fp32 scales in one launch, no eager arithmetic around it.

Scales of a block, of a row or of 32 neighbours in a row ("mx") need one pass: a program reads QUANT_ROWS rows of one
head, takes the maxima and writes them. "head", "tensor" and "channel" need maxima of more rows before that, and so do
means and the equaliser: the first pass (statistics.py) leaves them in parts, which every program here reduces for its
head. Buffers are padded with zeros to QUANT_ROWS rows and a power-of-two width: the attention kernel needs no masks.
"""

import triton
import triton.language as tl

from .rows import block_rows, sequence, take_over
from .scales import quad_rows, write, write_transposed
from .statistics import UNSPECIALISED, place


@triton.jit
def _chunks(sums, head, WHICH: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(CHUNKS, BLOCK_D): a head's sums of each channel (WHICH 0) or of its squares (WHICH 1), to be added up."""
    ptrs = sums + (tl.cast(head, tl.int64) * 2 + WHICH) * CHUNKS * BLOCK_D
    return tl.load(ptrs + tl.arange(0, CHUNKS)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def _mean(chunks, n):
    """The mean over n rows by channel."""
    return tl.sum(chunks, 0) / tl.maximum(n, 1)


@triton.jit
def _equaliser(
    q_sums, k_sums, kv_head, group, len_q, len_k,
    Q_MEAN: tl.constexpr, CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(s_c = sqrt(rms k_c / rms q_c) of a KV head and its query heads, within [2**-10, 2**10]; K's mean)."""
    k_chunks = _chunks(k_sums, kv_head, 0, CHUNKS_K, BLOCK_D)  # all are asked for before the first barrier
    k_squares = _chunks(k_sums, kv_head, 1, CHUNKS_K, BLOCK_D)
    if Q_MEAN:
        q_square = tl.zeros([BLOCK_D], tl.float32)
        for i in range(0, group):
            mean = _mean(_chunks(q_sums, kv_head * group + i, 0, CHUNKS_Q, BLOCK_D), len_q)
            square = _mean(_chunks(q_sums, kv_head * group + i, 1, CHUNKS_Q, BLOCK_D), len_q)
            q_square += tl.maximum(square - mean * mean, 0.0)
    else:  # the sums are those of the whole group
        q_square = _mean(_chunks(q_sums, kv_head, 1, CHUNKS_Q, BLOCK_D), len_q)
    k_mean = _mean(k_chunks, len_k)
    k_square = tl.maximum(_mean(k_squares, len_k) - k_mean * k_mean, 0.0)
    ratio = k_square / tl.maximum(q_square / group, 1e-20)
    return tl.clamp(tl.sqrt(tl.sqrt(ratio)), 2.0**-10, 2.0**10), k_mean


@triton.jit
def _corrections(
    q_sums, k_sums, of_q, q_head, kv_head, group, len_q, len_k,
    K_MEAN: tl.constexpr, Q_MEAN: tl.constexpr, EQUALISE: tl.constexpr, ROW_SHIFT: tl.constexpr,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(what is taken off every row of this program, K's mean, equaliser) by channel; 0, 0 and 1 where not asked for."""
    k_mean = tl.zeros([BLOCK_D], tl.float32)
    s = tl.full([BLOCK_D], 1.0, tl.float32)
    if EQUALISE:
        s, k_mean = _equaliser(q_sums, k_sums, kv_head, group, len_q, len_k, Q_MEAN, CHUNKS_Q, CHUNKS_K, BLOCK_D)
    elif K_MEAN:  # noqa: SIM102 - a constant decides what is compiled, a number what runs
        if ROW_SHIFT or not of_q:
            k_mean = _mean(_chunks(k_sums, kv_head, 0, CHUNKS_K, BLOCK_D), len_k)
    mean = tl.where(of_q, 0.0, k_mean)
    if Q_MEAN:  # noqa: SIM102
        if of_q:
            mean = _mean(_chunks(q_sums, q_head, 0, CHUNKS_Q, BLOCK_D), len_q)
    return mean, k_mean, s


@triton.jit
def _factors(s, BLOCK_D: tl.constexpr):
    """(t of Q, t of K): channels times t_q are Q times s, times t_k K over s, both over sqrt(BLOCK_D).

    Powers of two, the nearest to s over about sqrt(BLOCK_D), and t_q t_k BLOCK_D = 1: exact in every dtype.
    """
    LOG2: tl.constexpr = tl.constexpr(BLOCK_D.bit_length() - 1)
    bits = (tl.cast(s, tl.int32, bitcast=True) + 0x4AFB0D) & 0x7F800000  # up from sqrt(2) on
    t_q = tl.cast(bits, tl.float32, bitcast=True) * 2.0 ** -(LOG2 // 2)
    return t_q, 1.0 / (BLOCK_D * t_q)


@triton.jit
def _round_block(
    X, X8, descale, amax, row_shift, qk_scale, turn, mean, along, of_q, all_heads, b, h, heads, head, block,
    first, seqlen, out_first, rows8, stride_b, stride_n, stride_h,
    MEAN: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, TOP: tl.constexpr,
    GRANULARITY: tl.constexpr,
):  # fmt: skip
    """A block of one head of Q or K: turned, less its mean, rounded.

    The mean, turned likewise, is taken off behind the product, which so reads the rows as they are in memory.
    ROW_SHIFT: of Q also what K's mean (along) takes from every logit of a row, in base 2.
    """
    offs = tl.arange(0, QUANT_ROWS)
    start = block * QUANT_ROWS
    x = block_rows(X, b, h, first, seqlen, start, offs, stride_b, stride_n, stride_h, HEAD_DIM, BLOCK_D)
    if ROW_SHIFT:
        rows = tl.cast(head, tl.int64) * rows8 + (out_first + block) * QUANT_ROWS + offs
        tl.store(row_shift + rows, tl.sum(x.to(tl.float32) * along[None, :], 1) * qk_scale, of_q)
    if HADAMARD:
        x = tl.dot(x, turn)
    if MEAN:  # the factor keeps rows behind the end 0, for less than a choice costs
        inside = (start + offs < seqlen).to(tl.float32)
        x = x.to(tl.float32) - mean[None, :] * inside[:, None]
    write(x, X8, descale, amax, all_heads, b, h, heads, head, out_first + block, rows8,
          BLOCK_D, QUANT_ROWS, TOP, GRANULARITY, False, CHUNKS)  # fmt: skip


@triton.jit
def _round_blocks(
    X, X8, descale, amax, row_shift, qk_scale, hadamard, t, mean, along, of_q, all_heads, b, h, heads, head,
    begin, end, first, seqlen, out_first, rows8, stride_b, stride_n, stride_h,
    MEAN: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr, STAGES: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr, TOP: tl.constexpr,
    GRANULARITY: tl.constexpr,
):  # fmt: skip
    """Blocks begin to end of one head of Q or K, STAGES of them in hand at a time; at most one if STAGES is 0.

    Turning is one product with diag(t) times the Hadamard matrix, in the dtype of X.
    """
    turn = hadamard
    if HADAMARD:
        dtype: tl.constexpr = X.dtype.element_ty
        turn = hadamard.to(dtype) * t.to(dtype)[:, None]
        if MEAN:
            mean = tl.sum(mean[:, None] * turn.to(tl.float32), 0)
    if STAGES:
        for block in tl.range(begin, end, num_stages=STAGES):
            _round_block(X, X8, descale, amax, row_shift, qk_scale, turn, mean, along, of_q, all_heads, b, h, heads,
                         head, block, first, seqlen, out_first, rows8, stride_b, stride_n, stride_h, MEAN, HADAMARD,
                         ROW_SHIFT, CHUNKS, HEAD_DIM, BLOCK_D, QUANT_ROWS, TOP, GRANULARITY)  # fmt: skip
    elif begin < end:
        _round_block(X, X8, descale, amax, row_shift, qk_scale, turn, mean, along, of_q, all_heads, b, h, heads,
                     head, begin, first, seqlen, out_first, rows8, stride_b, stride_n, stride_h, MEAN, HADAMARD,
                     ROW_SHIFT, CHUNKS, HEAD_DIM, BLOCK_D, QUANT_ROWS, TOP, GRANULARITY)  # fmt: skip


@triton.jit
def _write_col_bias(
    K, k_mean, q_sums, col_bias, qk_scale, b, h, group, first_head, sums_head, begin, end, first, seqlen, len_q,
    out_first, rows8, stride_b, stride_n, stride_h,
    CHUNKS_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """What Q's mean takes from every logit of a key, in base 2, for each query head of a KV head.

    first_head: of the group in col_bias; sums_head: in q_sums, which has every batch entry apart.
    """
    offs = tl.arange(0, QUANT_ROWS)
    for block in range(begin, end):
        start = block * QUANT_ROWS
        x = block_rows(K, b, h, first, seqlen, start, offs, stride_b, stride_n, stride_h, HEAD_DIM, BLOCK_D)
        x = tl.where((start + offs < seqlen)[:, None], x.to(tl.float32) - k_mean[None, :], 0.0)
        for i in range(0, group):
            q_mean = _mean(_chunks(q_sums, sums_head + i, 0, CHUNKS_Q, BLOCK_D), len_q)
            rows = tl.cast(first_head + i, tl.int64) * rows8 + (out_first + block) * QUANT_ROWS + offs
            tl.store(col_bias + rows, tl.sum(x * q_mean[None, :], 1) * qk_scale)


@triton.jit(do_not_specialize=("run", "batch", *UNSPECIALISED))
def quantize(
    Q, K, V, Q8, K8, V8, q_descale, k_descale, v_descale, q_amax, k_amax, v_amax, q_sums, k_sums,
    rotation, row_shift, col_bias, qk_scale,
    cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    n_q, n_k, run, batch, nheads, nheads_k, blocks_q, blocks_k, rows8_q, rows8_k, seqlen_q, seqlen_k,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUANT_ROWS: tl.constexpr, QK: tl.constexpr,
    QK_TOP: tl.constexpr, V_TOP: tl.constexpr, GRANULARITY: tl.constexpr, V_GRANULARITY: tl.constexpr,
    V_TRANSPOSED: tl.constexpr, V_INTERLEAVED: tl.constexpr, K_MEAN: tl.constexpr, Q_MEAN: tl.constexpr,
    EQUALISE: tl.constexpr, HADAMARD: tl.constexpr, ROW_SHIFT: tl.constexpr,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Q, K and V in eight bits: X8 (batch, heads, rows8, width), V8 with the last two swapped if V_TRANSPOSED.

    Programs [0, n_q) write Q, the next n_k K, `run` blocks each, the rest V; without QK only V. X = X8 * descale.
    With VARLEN the batch axis is folded into the rows (see rows.sequence). GRANULARITY "given": the inputs are
    FP8 already and only move to the padded layout.
    """
    take_over(OVERLAP)
    which, b, h, part = place(tl.program_id(0), n_q, n_k, nheads, nheads_k, tl.cdiv(blocks_q, run),
                              tl.cdiv(blocks_k, run), blocks_k)  # fmt: skip
    padded_q, first_q, len_q = sequence(b, cu_seqlens_q, seqlen_q, VARLEN, True, QUANT_ROWS)
    padded_k, first_k, len_k = sequence(b, cu_seqlens_k, seqlen_k, VARLEN, True, QUANT_ROWS)
    out_q, out_k = padded_q // QUANT_ROWS, padded_k // QUANT_ROWS
    offs = tl.arange(0, QUANT_ROWS)
    group = nheads // nheads_k
    folded = 0 if VARLEN else b
    if which == 2:
        start = part * QUANT_ROWS
        out_k += part
        if start < len_k:
            head = folded * nheads_k + h
            if V_TRANSPOSED:
                quads = quad_rows(QUANT_ROWS, V_INTERLEAVED)
                STEP: tl.constexpr = 8 if V_INTERLEAVED else 2
                x0 = block_rows(V, b, h, first_k, len_k, start, quads, stride_vb, stride_vn, stride_vh,
                                HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x1 = block_rows(V, b, h, first_k, len_k, start, quads + 1, stride_vb, stride_vn, stride_vh,
                                HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x2 = block_rows(V, b, h, first_k, len_k, start, quads + STEP, stride_vb, stride_vn, stride_vh,
                                HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x3 = block_rows(V, b, h, first_k, len_k, start, quads + STEP + 1, stride_vb, stride_vn, stride_vh,
                                HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
                write_transposed(x, V8, v_descale, v_amax, batch * nheads_k, b, h, nheads_k, head, out_k, rows8_k,
                                 BLOCK_DV, QUANT_ROWS, V_TOP, V_GRANULARITY, CHUNKS_V)  # fmt: skip
            else:
                x = block_rows(V, b, h, first_k, len_k, start, offs, stride_vb, stride_vn, stride_vh,
                               HEAD_DIM_V, BLOCK_DV)  # fmt: skip
                write(x, V8, v_descale, v_amax, batch * nheads_k, b, h, nheads_k, head, out_k, rows8_k,
                      BLOCK_DV, QUANT_ROWS, V_TOP, V_GRANULARITY, True, CHUNKS_V)  # fmt: skip
    elif QK:  # one path for both: two would keep two sets of buffers in shared memory, and one program a multiprocessor
        of_q = which == 0
        kv_head = b * nheads_k + tl.where(of_q, h // group, h)
        heads = tl.where(of_q, nheads, nheads_k)
        head = folded * heads + h
        hadamard = rotation
        if HADAMARD:  # asked for before what has to be waited for
            i = tl.arange(0, BLOCK_D)
            hadamard = tl.load(rotation + i[:, None] * BLOCK_D + i[None, :])
        mean, k_mean, s = _corrections(
            q_sums, k_sums, of_q, b * nheads + h, kv_head, group, len_q, len_k,
            K_MEAN, Q_MEAN, EQUALISE, ROW_SHIFT, CHUNKS_Q, CHUNKS_K, BLOCK_D,
        )  # fmt: skip
        t_q, t_k = _factors(s, BLOCK_D)
        descale, amax = q_descale, q_amax
        if GRANULARITY != "given":
            descale = tl.where(of_q, q_descale, k_descale)
        if GRANULARITY == "head" or GRANULARITY == "tensor":
            amax = tl.where(of_q, q_amax, k_amax)
        first, seqlen = tl.where(of_q, first_q, first_k), tl.where(of_q, len_q, len_k)
        out_first, rows8 = tl.where(of_q, out_q, out_k), tl.where(of_q, rows8_q, rows8_k)
        begin, end = part * run, tl.minimum(part * run + run, tl.cdiv(seqlen, QUANT_ROWS))
        _round_blocks(
            tl.where(of_q, Q, K), tl.where(of_q, Q8, K8), descale, amax, row_shift, qk_scale, hadamard,
            tl.where(of_q, t_q, t_k), mean, k_mean, of_q, batch * heads, b, h, heads, head,
            begin, end, first, seqlen, out_first, rows8, tl.where(of_q, stride_qb, stride_kb),
            tl.where(of_q, stride_qm, stride_kn), tl.where(of_q, stride_qh, stride_kh), K_MEAN or Q_MEAN, HADAMARD,
            ROW_SHIFT, STAGES, CHUNKS_QK, HEAD_DIM, BLOCK_D, QUANT_ROWS, QK_TOP, GRANULARITY,
        )  # fmt: skip
        if Q_MEAN:  # noqa: SIM102 - as in _corrections
            if not of_q:
                _write_col_bias(K, k_mean, q_sums, col_bias, qk_scale, b, h, group, head * group, kv_head * group,
                                begin, end, first_k, len_k, len_q, out_k, rows8_k, stride_kb, stride_kn, stride_kh,
                                CHUNKS_Q, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
