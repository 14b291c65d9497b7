"""Outputs over disjoint keys become one: what attn_fwd leaves behind where several programs share a row's keys."""

import triton
import triton.language as tl

from .rows import take_over

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=("programs_of_head", "nheads", "batch", "rows"))
def merge_splits(
    Parts, Sums, O, LSE, cu_seqlens_q,  # Parts, Sums: fp32 (splits, heads, rows, HEAD_DIM_V), (splits, heads, rows)
    stride_ob, stride_om, stride_oh, programs_of_head, nheads, batch, rows,
    SPLITS: tl.constexpr, VARLEN: tl.constexpr, HAS_LSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head: the parts weighted with 2 ** (their base-2 log-sum-exp less the row's largest one).

    A part without keys has weight 0, a row without any gives 0 and -inf, NaN stays NaN. Rows of no sequence stay as
    they are; with VARLEN the batch axis is folded into the rows.
    """
    take_over(OVERLAP)
    pid = tl.program_id(0)
    bh = pid // programs_of_head
    offs_n = pid % programs_of_head * ROWS + tl.arange(0, ROWS)
    offs_dv = tl.arange(0, BLOCK_DV)
    keep = offs_n < rows
    if VARLEN:
        keep = keep & (offs_n >= tl.load(cu_seqlens_q)) & (offs_n < tl.load(cu_seqlens_q + batch))
    heads = nheads if VARLEN else batch * nheads
    inside = keep[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        first = (tl.cast(split * heads, tl.int64) + bh) * rows
        top = tl.maximum(top, tl.load(Sums + first + offs_n, keep, other=0.0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for split in tl.static_range(SPLITS):
        first = (tl.cast(split * heads, tl.int64) + bh) * rows
        weight = tl.exp2(tl.load(Sums + first + offs_n, keep, other=0.0) - shift)
        part = tl.load(Parts + first * HEAD_DIM_V + offs_n[:, None] * HEAD_DIM_V + offs_dv[None, :], inside, other=0.0)
        total += weight
        acc += part * weight[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    o_ptrs = O + tl.cast(bh // nheads, tl.int64) * stride_ob + tl.cast(bh % nheads, tl.int64) * stride_oh
    o_ptrs = o_ptrs + tl.cast(offs_n, tl.int64)[:, None] * stride_om + offs_dv[None, :]
    tl.store(o_ptrs, acc.to(O.dtype.element_ty), inside)
    if HAS_LSE:
        tl.store(LSE + tl.cast(bh, tl.int64) * rows + offs_n, (shift + tl.log2(total)) * LN2, keep)
