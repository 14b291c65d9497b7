"""The host side of attn_gluon_amd: which tensors its copies reach, the constants and arguments of a launch."""

import torch

from ..config import AttentionConfig
from ..limits import LDS_PAD_K, LDS_PAD_V
from ..recipes import QUANT_ROWS
from .attn_gluon_amd import attn_gluon_amd
from .gluon_lds import Options, tile
from .operands import Operands, Shape, strides_of
from .replay import Compiler, Recorder

ROWS = 64  # gluon_ring's, in whose units the kernel counts query rows


def reaches(x: torch.Tensor) -> bool:
    """Whether 16 bytes of x can be copied at a time, as Triton sees it: strides that 16 divides, an aligned base."""
    steps = (stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(step % 16 == 0 for step in steps)


def packs(recipe_quantised: bool, width: int) -> bool:
    """Whether exponents are computed in pairs, which takes fewer instructions but none of them beside an MFMA.

    Pays where vector instructions bound a trip: not in BF16 from 128 columns on.
    """
    return recipe_quantised or width <= 64


def start(
    launcher: Compiler | Recorder, ops: Operands, shape: Shape, config: AttentionConfig, out, lse, scale: float, window
):
    """Start the kernel; returns what the launcher made of it. window: (left, right), -1 unlimited."""
    left, right = window
    num_m_blocks = -(-shape.seqlen_q // config.BLOCK_M)
    batch_heads = shape.batch * shape.nheads
    pointers = (*ops.descales, ops.row_shift)
    args = (
        ops.q, ops.k, ops.v, out, lse if lse is not None else out, *(out if x is None else x for x in pointers), scale,
        *ops.strides_q, *ops.strides_k, *ops.strides_v, *strides_of(out), *ops.descale_strides,
        shape.rows8_q, shape.total_q, batch_heads, shape.nheads, shape.nheads // shape.nheads_k,
        shape.seqlen_q, shape.seqlen_k, num_m_blocks, left, right,
    )  # fmt: skip
    options = Options(
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_LSE=lse is not None,
        QK="int8" if ops.q.dtype == torch.int8 else "e4m3" if ops.qk_quantised else "16",
        V_QUANTISED=ops.v_quantised, QK_QUANTISED=ops.qk_quantised, QK_BLOCKS=ops.qk_scales == "block",
        V_BLOCKS=ops.v_scales == "block", QUANT_ROWS=QUANT_ROWS, ROW_SHIFT=ops.row_shift is not None,
        P_OFFSET=ops.p_offset, PACKED=packs(ops.v_quantised, shape.block_d),
        HEAD_DIM=shape.head_dim, HEAD_DIM_V=shape.head_dim_v, BLOCK_D=shape.block_d, BLOCK_DV=shape.block_dv,
        BLOCK_N=config.BLOCK_N, CONSUMERS=config.BLOCK_M // ROWS, WARPS=config.num_warps, STAGES=config.num_stages,
        LONGEST_FIRST=config.longest_first and right >= 0, HEAD_GROUP=config.head_group,
    )  # fmt: skip
    n, warps, k_size, v_size = config.BLOCK_N, config.num_warps, ops.k.element_size(), ops.v.element_size()
    tiles = {
        "k_tile": tile(n, shape.block_d, shape.head_dim, k_size, LDS_PAD_K, warps),
        "v_tile": tile(n, shape.block_dv, shape.head_dim_v, v_size, LDS_PAD_V[v_size], warps, swapped=v_size == 1),
    }
    constants = {"c": options, "num_warps": warps, "waves_per_eu": config.waves_per_eu}
    return launcher.start(attn_gluon_amd, (num_m_blocks * batch_heads,), args, tiles | constants)
