"""Which rows and keys a program of attn_fwd and of the quantisers works on, where they lie, and their scales."""

import triton
import triton.language as tl

# Callers' descales may be 0; a logit scale of 0 would turn the -inf of a mask into NaN.
MIN_LOGIT_SCALE: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def take_over(OVERLAP: tl.constexpr):
    """First of all in a kernel: wait until the launch before is done, then let the next one start.

    In that order, so that whatever a kernel writes and reads is that of launches in turn: the next one waits here for
    the end of this one. What overlaps is the start of programs only.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def sequence(b, cu_seqlens, seqlen, VARLEN: tl.constexpr, QUANTISED: tl.constexpr, QUANT_ROWS: tl.constexpr):
    """(first row in the tensor, first row in the LSE, length) of a sequence.

    Quantised varlen buffers start every sequence on a multiple of QUANT_ROWS rows: ceil(start / QUANT_ROWS) + b
    blocks in, which leaves room for every earlier sequence without a prefix sum.
    """
    if VARLEN:
        first = tl.load(cu_seqlens + b)
        seqlen = tl.load(cu_seqlens + b + 1) - first
        row = first
        if QUANTISED:
            row = ((first + QUANT_ROWS - 1) // QUANT_ROWS + b) * QUANT_ROWS
        return row, first, seqlen
    return seqlen * 0, seqlen * 0, seqlen


@triton.jit
def row_at(X, b, h, row, stride_b, stride_n, stride_h):
    """Where a row of a head starts; with varlen `row` counts from the first sequence's and stride_b is 0."""
    base = X + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    return base + tl.cast(row, tl.int64) * stride_n


@triton.jit
def block_rows(
    X, b, h, first, seqlen, start, offs_n, stride_b, stride_n, stride_h, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows start + offs_n of one head of a sequence that begins at row `first`, BLOCK_D wide, zero outside."""
    offs_d = tl.arange(0, BLOCK_D)
    base = row_at(X, b, h, first + start, stride_b, stride_n, stride_h)
    inside = (start + offs_n < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(base + offs_n[:, None] * stride_n + offs_d[None, :], inside, other=0.0)


@triton.jit
def tile_on_die(pid, programs, DIES: tl.constexpr):
    """The tile of a program where program ids go to DIES dies in turn: each die walks neighbouring tiles.

    A bijection for any number of programs: the first programs % DIES dies take one more.
    """
    die = pid % DIES
    return die * (programs // DIES) + min(die, programs % DIES) + pid // DIES


@triton.jit
def share(split, lo, full_lo, full_hi, hi, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """What one of SPLITS programs takes of the ranges of _visible: as many tiles as the others, give or take one.

    All but the last bound are whole tiles for the compiler, too: else 8-bit V is not copied asynchronously on sm_90.
    """
    tiles = tl.cdiv(max(hi - lo, 0), BLOCK_N)
    start = lo + tiles * split // SPLITS * BLOCK_N
    end = lo + tiles * (split + 1) // SPLITS * BLOCK_N
    return start, min(max(full_lo, start), end), min(max(full_hi, start), end), min(hi, end)


@triton.jit
def rows_of(m, h, group, BLOCK_M: tl.constexpr, PACK_GQA: tl.constexpr):
    """(queries, query head or heads) of the rows of a block; packed, h is a KV head: its group's heads side by side."""
    queries = m * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = h
    if PACK_GQA:
        heads = h * group + queries % group
        queries = queries // group
    return queries, heads


@triton.jit
def row_ptrs(
    X, b, h, first, m, group, stride_b, stride_m, stride_h, BLOCK_M: tl.constexpr, PACK_GQA: tl.constexpr
):  # fmt: skip
    """(BLOCK_M, 1) pointers to where the rows of a block start; with varlen `first` is the sequence's row."""
    if PACK_GQA:
        queries, heads = rows_of(m, h, group, BLOCK_M, PACK_GQA)
        offsets = tl.cast(first + queries, tl.int64) * stride_m + tl.cast(heads, tl.int64) * stride_h
        ptrs = (X + tl.cast(b, tl.int64) * stride_b + offsets)[:, None]
    else:
        base = row_at(X, b, h, first + m * BLOCK_M, stride_b, stride_m, stride_h)
        ptrs = base + tl.arange(0, BLOCK_M)[:, None] * stride_m
    return ptrs


@triton.jit
def store(
    O, acc, b, h, first, m, in_rows, group, stride_ob, stride_om, stride_oh,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, PACK_GQA: tl.constexpr,
):  # fmt: skip
    """The output block; with varlen `first` is the sequence's row and stride_ob is 0."""
    offs_dv = tl.arange(0, BLOCK_DV)
    ptrs = row_ptrs(O, b, h, first, m, group, stride_ob, stride_om, stride_oh, BLOCK_M, PACK_GQA) + offs_dv[None, :]
    tl.store(ptrs, acc.to(O.dtype.element_ty), in_rows[:, None] & (offs_dv < HEAD_DIM_V)[None, :])


@triton.jit
def poison(
    O, LSE, h, first, num_m_blocks, seqlen_q, group, stride_om, stride_oh, stride_lse,
    HAS_LSE: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    PACK_GQA: tl.constexpr,
):  # fmt: skip
    """NaN in the rows behind the last query block: a max_seqlen_q that is too small leaves them to no program."""
    nan = tl.full([BLOCK_M, BLOCK_DV], float("nan"), tl.float32)
    for m in range(num_m_blocks, tl.cdiv(seqlen_q * group if PACK_GQA else seqlen_q, BLOCK_M)):
        queries, heads = rows_of(m, h, group, BLOCK_M, PACK_GQA)
        in_rows = queries < seqlen_q
        store(O, nan, 0, h, first, m, in_rows, group, 0, stride_om, stride_oh, HEAD_DIM_V, BLOCK_M, BLOCK_DV, PACK_GQA)
        if HAS_LSE:
            nans = tl.full([BLOCK_M], float("nan"), tl.float32)
            tl.store(LSE + tl.cast(heads, tl.int64) * stride_lse + first + queries, nans, in_rows)


@triton.jit
def key_scales(
    k_descale, kv_head, k_first, stride_k_descale, QK_SCALES: tl.constexpr, QUANT_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Where the scales of a sequence's keys begin: of blocks, rows or MX groups."""
    k_descale += tl.cast(kv_head, tl.int64) * stride_k_descale
    if QK_SCALES == "block":
        k_descale += k_first // QUANT_ROWS
    elif QK_SCALES == "row":
        k_descale += k_first
    else:
        k_descale += tl.cast(k_first, tl.int64) * (BLOCK_D // 32)
    return k_descale


@triton.jit
def row_scales(
    q_descale, k_descale, qk_scale, head, kv_head_scale, q_first, offs_m, in_rows, stride_q_descale, stride_k_descale,
    QK_SCALES: tl.constexpr, QUANT_ROWS: tl.constexpr, PACK_GQA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(scale of each row's logits, MX scales of Q; read with "mx" only)."""
    scale = tl.zeros([BLOCK_M], tl.float32) + qk_scale
    q_mx = 0
    if QK_SCALES == "head":
        scale *= tl.load(q_descale + head * stride_q_descale)
        scale *= tl.load(k_descale + kv_head_scale * stride_k_descale)
        scale = tl.maximum(scale, MIN_LOGIT_SCALE)
    elif QK_SCALES != "none":
        q_descale += tl.cast(head, tl.int64) * stride_q_descale
        if QK_SCALES == "block":
            scale *= tl.load(q_descale + (q_first + offs_m) // QUANT_ROWS, in_rows, other=1.0)
        elif QK_SCALES == "row":
            scale *= tl.load(q_descale + q_first + offs_m, in_rows, other=1.0)
        else:
            q_descale += tl.cast(q_first, tl.int64) * (BLOCK_D // 32)
            groups = offs_m[:, None] * (BLOCK_D // 32) + tl.arange(0, BLOCK_D // 32)[None, :]
            q_scales = q_descale[:, None] if PACK_GQA else q_descale
            q_mx = tl.load(q_scales + groups, in_rows[:, None], other=127)  # 2^0
    return scale, q_mx
