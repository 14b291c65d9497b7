"""The host side of attn_gluon: which tensors TMA reaches, their descriptors, the arguments of a launch."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..archs import ARCHS
from ..config import AttentionConfig
from ..limits import stages_output
from ..recipes import QUANT_ROWS
from .attn_gluon import attn_gluon
from .gluon_ring import Options
from .operands import Operands, Shape, ahead, strides_of
from .replay import Compiler, Recorder

ROWS = 64  # of one consumer, which has four warps
WARPS = 4
# Registers of a thread when the kernel starts, 64k over all threads, and what a consumer then takes of the producer's.
ENTRY_REGISTERS = {1: 128, 2: 168}
REGISTERS = {1: 232, 2: 240}
UNITS_OF_NO_DEVICE = 132  # streaming multiprocessors that a compilation without a GPU assumes; it changes no code
ELEMENTS = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8,
}  # fmt: skip


def reaches(x: torch.Tensor) -> bool:
    """Whether TMA can read x: a base and strides of 16 bytes, none of them 0."""
    steps = (stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def _descriptor(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor of (batch, heads, rows, width); the stride of an axis of length 1 means nothing and may be odd."""
    strides = [s if n > 1 else 16 for n, s in zip(shape, strides[:3], strict=False)] + [1]
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, *block], ELEMENTS[x.dtype])
    return TensorDescriptor(x, shape, strides, [1, 1, *block], layout)


def _rows_of(x: torch.Tensor, strides: tuple[int, int, int], buffered: bool, block: list[int]) -> TensorDescriptor:
    """The descriptor of an input (batch, rows, heads, width), or of an eight-bit buffer (batch, heads, rows, width)."""
    b, row, head = strides
    shape = list(x.shape) if buffered else [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
    return _descriptor(x, shape, [b, head, row, 1], block)


def _descriptors(ops: Operands, config: AttentionConfig, shape: Shape) -> tuple[TensorDescriptor, ...]:
    buffered = ops.qk_quantised and not ops.in_place
    q = _rows_of(ops.q, ops.strides_q, buffered, [ROWS, shape.block_d])
    k = _rows_of(ops.k, ops.strides_k, buffered, [config.BLOCK_N, shape.block_d])
    block_v = [shape.block_dv, config.BLOCK_N] if ops.v_quantised else [config.BLOCK_N, shape.block_dv]
    return q, k, _rows_of(ops.v, ops.strides_v, ops.v_quantised, block_v)


def start(
    launcher: Compiler | Recorder, ops: Operands, shape: Shape, config: AttentionConfig, out, lse, scale: float, window
):
    """Start the kernel; returns what the launcher made of it. window: (left, right), -1 unlimited."""
    left, right = window
    consumers = config.num_warps // WARPS
    num_m_blocks = -(-shape.seqlen_q // config.BLOCK_M)
    pointers = (*ops.descales, ops.row_shift)
    args = (
        *_descriptors(ops, config, shape), out, lse if lse is not None else out,
        *(out if x is None else x for x in pointers), scale, *strides_of(out), *ops.descale_strides,
        shape.rows8_q, shape.total_q, shape.batch * shape.nheads, shape.nheads, shape.nheads // shape.nheads_k,
        shape.seqlen_q, shape.seqlen_k, num_m_blocks, left, right,
    )  # fmt: skip
    overlap = ahead(ARCHS["sm90"], shape, ops.v_quantised)  # quantisers run before
    options = Options(
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_LSE=lse is not None, QK_QUANTISED=ops.qk_quantised,
        V_QUANTISED=ops.v_quantised, QK_BLOCKS=ops.qk_scales == "block", V_BLOCKS=ops.v_scales == "block",
        FP16=out.dtype == torch.float16, QUANT_ROWS=QUANT_ROWS,
        ROW_SHIFT=ops.row_shift is not None, P_OFFSET=ops.p_offset, HEAD_DIM_V=shape.head_dim_v,
        STAGED=stages_output(config.num_warps, shape.block_dv),
        BLOCK_DV=shape.block_dv, BLOCK_N=config.BLOCK_N, CONSUMERS=consumers, STAGES=config.num_stages,
        PING_PONG=config.ping_pong, LONGEST_FIRST=config.longest_first and right >= 0, HEAD_GROUP=config.head_group,
        REGISTERS=REGISTERS[consumers], OVERLAP=overlap.pop("OVERLAP"),
        Q_IN_REGISTERS=shape.block_d <= 64 or (ops.qk_quantised and consumers == 1),
    )  # fmt: skip
    programs = min(num_m_blocks * shape.batch * shape.nheads, _resident(out.device, consumers))
    constants = {"c": options, "num_warps": WARPS, "maxnreg": ENTRY_REGISTERS[consumers]} | overlap
    return launcher.start(attn_gluon, (programs,), args, constants)


def _resident(device: torch.device, consumers: int) -> int:
    """Programs that the GPU holds at a time: two a multiprocessor with one consumer, else one."""
    units = UNITS_OF_NO_DEVICE
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    return units * (2 if consumers == 1 else 1)
