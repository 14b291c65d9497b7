"""What the attention kernel reads: the inputs themselves, or eight-bit buffers that the quantisers fill."""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..archs import Arch
from ..config import AttentionConfig, octave
from ..recipes import QUANT_ROWS

SHORT_BLOCKS = 1024  # row blocks of Q, K and V together


class Shape(NamedTuple):
    """Sizes of one call. With cu_seqlens the lengths are maxima over the batch, the totals count all rows."""

    batch: int
    nheads: int
    nheads_k: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    varlen: bool
    total_q: int
    total_k: int
    min_block_d: int = 16  # products that the matrix unit sums at least

    @property
    def block_d(self) -> int:
        """Width of Q and K in the kernel: a power of two, and what the matrix units need at least."""
        return max(self.min_block_d, octave(self.head_dim))

    @property
    def block_dv(self) -> int:
        return max(16, octave(self.head_dim_v))

    @property
    def rows8_q(self) -> int:
        """Rows of one head in a padded buffer; see rows.sequence for varlen."""
        return self._rows8(self.total_q, self.seqlen_q)

    @property
    def rows8_k(self) -> int:
        return self._rows8(self.total_k, self.seqlen_k)

    @property
    def blocks_q(self) -> int:
        """Blocks of QUANT_ROWS rows of one head, of the longest with varlen."""
        return -(-self.seqlen_q // QUANT_ROWS)

    @property
    def blocks_k(self) -> int:
        return -(-self.seqlen_k // QUANT_ROWS)

    def _rows8(self, total: int, seqlen: int) -> int:
        blocks = -(-total // QUANT_ROWS) + self.batch if self.varlen else -(-seqlen // QUANT_ROWS)
        return blocks * QUANT_ROWS


def ahead(arch: Arch, shape: Shape, among_others: bool = True) -> dict:
    """Constants of a launch: may its programs start while the launch before ends (rows.take_over)?

    Programmatic dependent launch, in short calls of several launches: on an H200 calls of 512 to 2048 tokens (32/8
    heads) took 0 to 5 % less time with it (0.6 to 1.7 us), calls of 4096 and 8192 0.2 to 0.6 % more, as programs of the
    next launch wait where those of this one could run.
    """
    blocks = shape.batch * (shape.nheads * shape.blocks_q + 2 * shape.nheads_k * shape.blocks_k)
    overlap = arch.overlaps and among_others and blocks <= SHORT_BLOCKS
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


class Operands(NamedTuple):
    """Tensors with their strides (batch, row, head), scales and corrections."""

    q: torch.Tensor
    k: torch.Tensor | TensorDescriptor
    v: torch.Tensor | TensorDescriptor
    strides_q: tuple[int, int, int]
    strides_k: tuple[int, int, int]
    strides_v: tuple[int, int, int]
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    descale_strides: tuple[int, int, int] = (0, 0, 0)  # of Q, K, V from head to head
    row_shift: torch.Tensor | None = None
    col_bias: torch.Tensor | None = None
    qk_scales: str = "none"  # Recipe.qk_scales
    v_scales: str = "none"  # "none", "head", "block" or "channel"
    p_offset: int = 0
    v_transposed: bool = False
    in_place: bool = False  # Q and K in eight bits lie as the caller gave them, in no buffer of ours
    k_descriptor: int = 0
    v_descriptor: int = 0

    @property
    def qk_quantised(self) -> bool:
        return self.qk_scales != "none"

    @property
    def v_quantised(self) -> bool:
        return self.v_scales != "none"


def shape_of(q, k, v, cu_seqlens_q=None, max_seqlen_q=None, max_seqlen_k=None) -> Shape:
    """Sizes of (batch, seqlen, nheads, head_dim) tensors, or of (total, nheads, head_dim) with cu_seqlens_q."""
    if cu_seqlens_q is None:
        b, sq, h, d = q.shape
        sk, hk, dv = v.shape[1:]
        return Shape(b, h, hk, d, dv, sq, sk, False, sq, sk)
    (tq, h, d), (tk, hk, dv) = q.shape, v.shape
    return Shape(cu_seqlens_q.shape[0] - 1, h, hk, d, dv, max_seqlen_q, max_seqlen_k, True, tq, tk)


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements; varlen tensors have no batch axis."""
    s = x.stride()
    return (0, s[0], s[1]) if x.ndim == 3 else (s[0], s[1], s[2])


def plain(q, k, v) -> Operands:
    """The inputs as they are."""
    return Operands(q, k, v, strides_of(q), strides_of(k), strides_of(v))


def _layout(x: torch.Tensor, strides: tuple[int, int, int], heads: int, width: int) -> int:
    """How one 2-D descriptor can reach every head: 1 heads are columns, 2 heads are rows, 0 not at all."""
    b, row, head = strides
    aligned = all(s * x.element_size() % 16 == 0 for s in strides) and x.data_ptr() % 16 == 0
    if not aligned or row <= 0 or b % row or width & (width - 1) or width < 16:
        return 0
    if (heads - 1) * head + width <= row:
        return 1
    return 2 if head % row == 0 else 0


def _descriptor(x, strides, sizes, width: int, block: list[int]):
    """(descriptor or x, strides in its units, layout); sizes are (batch, rows of a head, heads)."""
    (b, row, head), (batch, rows, heads) = strides, sizes
    layout = _layout(x, strides, heads, width)
    if not layout:
        return x, strides, 0
    in_rows = head // row if layout == 2 else 0
    total = (batch - 1) * (b // row) + (heads - 1) * in_rows + rows
    columns = row if layout == 1 else width
    units = (b // row, row, in_rows if layout == 2 else head)
    return TensorDescriptor(x, [total, columns], [row, 1], block), units, layout


def as_descriptors(ops: Operands, config: AttentionConfig, shape: Shape) -> Operands:
    """The same operands with K and V as tensor descriptors, each where its layout allows it."""
    batch = 1 if shape.varlen else shape.batch
    rows = shape.total_k if shape.varlen else shape.seqlen_k
    sizes = (batch, shape.rows8_k if ops.qk_quantised else rows, shape.nheads_k)
    width = shape.block_d if ops.qk_quantised else shape.head_dim
    k, strides_k, k_layout = _descriptor(ops.k, ops.strides_k, sizes, width, [config.BLOCK_N, shape.block_d])
    if ops.v_transposed:
        sizes, width, block = (batch, shape.block_dv, shape.nheads_k), shape.rows8_k, [shape.block_dv, config.BLOCK_N]
        total = batch * shape.nheads_k * shape.block_dv
        v, strides_v, v_layout = TensorDescriptor(ops.v, [total, width], [width, 1], block), ops.strides_v, 2
        strides_v = (strides_v[0] // width, width, strides_v[2] // width)
    else:
        sizes = (batch, shape.rows8_k if ops.v_quantised else rows, shape.nheads_k)
        width = shape.block_dv if ops.v_quantised else shape.head_dim_v
        v, strides_v, v_layout = _descriptor(ops.v, ops.strides_v, sizes, width, [config.BLOCK_N, shape.block_dv])
    return ops._replace(
        k=k, v=v, strides_k=strides_k, strides_v=strides_v, k_descriptor=k_layout, v_descriptor=v_layout
    )
