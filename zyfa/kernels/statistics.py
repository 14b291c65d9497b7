"""The quantisers' first pass, where one is needed: sums or largest magnitudes of every CHUNKS-th block of a head.

Each program reduces its blocks once, at the end, to numbers that quantize adds up or takes the maximum of; partial
results instead of atomics, so that nothing depends on the order in which programs finish (docs/kernels.md).
"""

import triton
import triton.language as tl

from .rows import block_rows, sequence, take_over

UNSPECIALISED = ("n_q", "n_k", "nheads", "nheads_k", "blocks_q", "blocks_k", "seqlen_q", "seqlen_k")


@triton.jit
def place(pid, n_q, n_k, nheads, nheads_k, parts_q, parts_k, parts_v):
    """Which tensor (0 Q, 1 K, 2 V), batch entry, head and part of it a program works on."""
    which = (pid >= n_q).to(tl.int32) + (pid >= n_q + n_k).to(tl.int32)
    i = pid - tl.where(which == 0, 0, n_q + (which - 1) * n_k)
    heads = tl.where(which == 0, nheads, nheads_k)
    parts = tl.where(which == 0, parts_q, tl.where(which == 1, parts_k, parts_v))
    return which, i // (heads * parts), i // parts % heads, i % parts


@triton.jit
def _by_lane(x, ROWS: tl.constexpr):
    """A block in fp32 as (parts, ROWS, width): a lane holds its 8 columns of one row in every part."""
    return tl.reshape(x.to(tl.float32), [x.shape[0] // ROWS, ROWS, x.shape[1]])


@triton.jit
def _block_of(
    X, j, end, b, h, blocks, first, seqlen, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Block j of heads h, h + 1, ... that have `blocks` blocks each; zeros from block `end` on."""
    return block_rows(X, b, h + j // blocks, first, tl.where(j < end, seqlen, 0), j % blocks * QUANT_ROWS,
                      tl.arange(0, QUANT_ROWS), stride_b, stride_n, stride_h, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit
def _tops(
    X, b, h, chunk, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of a chunk of a head, (ROWS, BLOCK_D): of the rows that share i % ROWS."""
    ROWS: tl.constexpr = min(QUANT_ROWS, 2048 // BLOCK_D)  # a load: 8 values (16 bytes) of each of 256 lanes
    first, _, seqlen = sequence(b, cu_seqlens, seqlen, VARLEN, False, QUANT_ROWS)
    top = tl.zeros([ROWS, BLOCK_D], tl.float32)
    x = _block_of(X, chunk, blocks, b, h, blocks, first, seqlen, stride_b, stride_n, stride_h,
                  HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    for j in range(chunk, blocks, CHUNKS):  # the next block is on its way while one is reduced
        ahead = _block_of(X, j + CHUNKS, blocks, b, h, blocks, first, seqlen, stride_b, stride_n, stride_h,
                          HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
        top = tl.maximum(top, tl.max(tl.abs(_by_lane(x, ROWS)), 0))
        x = ahead
    return top


@triton.jit
def _amax_of(
    X, amax, i, b, h, chunk, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
):  # fmt: skip
    top = _tops(X, b, h, chunk, blocks, stride_b, stride_n, stride_h, cu_seqlens, seqlen,
                CHUNKS, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    tl.store(amax + i, tl.max(top))


@triton.jit(do_not_specialize=UNSPECIALISED)
def chunk_amax(
    Q, K, V, q_amax, k_amax, v_amax,  # fp32 (batch, heads, CHUNKS)
    cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    n_q, n_k, nheads, nheads_k, blocks_q, blocks_k, seqlen_q, seqlen_k,
    CHUNKS: tl.constexpr, VARLEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each chunk of a head, every CHUNKS-th block of rows; programs of Q, then K, then V."""
    take_over(OVERLAP)
    pid = tl.program_id(0)
    which, b, h, chunk = place(pid, n_q, n_k, nheads, nheads_k, CHUNKS, CHUNKS, CHUNKS)
    if which == 0:
        _amax_of(Q, q_amax, pid, b, h, chunk, blocks_q, stride_qb, stride_qm, stride_qh, cu_seqlens_q, seqlen_q,
                 CHUNKS, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    elif which == 1:
        _amax_of(K, k_amax, pid - n_q, b, h, chunk, blocks_k, stride_kb, stride_kn, stride_kh, cu_seqlens_k, seqlen_k,
                 CHUNKS, VARLEN, HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    else:
        _amax_of(V, v_amax, pid - n_q - n_k, b, h, chunk, blocks_k, stride_vb, stride_vn, stride_vh, cu_seqlens_k,
                 seqlen_k, CHUNKS, VARLEN, HEAD_DIM_V, BLOCK_DV, QUANT_ROWS)  # fmt: skip


@triton.jit(do_not_specialize=("nheads_k", "blocks_k", "seqlen_k"))
def channel_amax(
    V, v_amax,  # fp32 (batch, nheads_k, CHUNKS_V, BLOCK_DV)
    cu_seqlens_k, stride_vb, stride_vn, stride_vh, nheads_k, blocks_k, seqlen_k,
    CHUNKS_V: tl.constexpr, VARLEN: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUANT_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each channel of each chunk of a head of V."""
    take_over(OVERLAP)
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
    b, h, end = i * span // heads, i * span % heads, span * blocks
    first, _, seqlen = sequence(b, cu_seqlens, seqlen, VARLEN, False, QUANT_ROWS)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    square = tl.zeros([ROWS, BLOCK_D], tl.float32)
    x = _block_of(X, chunk, end, b, h, blocks, first, seqlen, stride_b, stride_n, stride_h,
                  HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
    for j in range(chunk, end, CHUNKS):
        ahead = _block_of(X, j + CHUNKS, end, b, h, blocks, first, seqlen, stride_b, stride_n, stride_h,
                          HEAD_DIM, BLOCK_D, QUANT_ROWS)  # fmt: skip
        values = _by_lane(x, ROWS)
        total += tl.sum(values, 0)
        if SQUARES:
            square += tl.sum(values * values, 0)
        x = ahead
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


@triton.jit(do_not_specialize=("span", "n_q", *UNSPECIALISED[2:]))
def column_sums(
    Q, K, q_sums, k_sums,  # fp32 (batch, heads / span, 2, CHUNKS, BLOCK_D): sums and sums of squares over the rows
    rotation,  # bf16 (BLOCK_D, BLOCK_D)
    cu_seqlens_q, cu_seqlens_k, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    n_q, span, nheads, nheads_k, blocks_q, blocks_k, seqlen_q, seqlen_k,
    CHUNKS_Q: tl.constexpr, CHUNKS_K: tl.constexpr, SQUARES: tl.constexpr, HADAMARD: tl.constexpr,
    VARLEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Per-channel statistics of K (programs n_q and up) and, where n_q > 0, of Q, `span` heads of it together.

    Partial sums instead of atomics: the result does not depend on the order in which programs finish. The matrix that
    quantize rotates by is written here, once: made by every program there it would cost as much as all its arithmetic.
    """
    take_over(OVERLAP)
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
