"""One wave for tests of single instructions, the text of a kernel around a few of them, and attention from listings."""

import dataclasses

import numpy as np
import torch

from zyfa.archs import default_config
from zyfa.config import AttentionKey
from zyfa.kernels import launch
from zyfa.kernels.operands import shape_of
from zyfa.tuner.compile import _target
from zyfa.tuner.listing.launch import Executor
from zyfa.tuner.listing.memory import Memory
from zyfa.tuner.listing.parse import parse_instruction
from zyfa.tuner.listing.run import decode
from zyfa.tuner.listing.state import Lds, Wave

LANE = np.arange(64)


def words(x) -> np.ndarray:
    """64 lanes of an array or number of any 32-bit type, as uint32."""
    x = np.asarray(x)
    x = x.astype(np.float32) if x.dtype == np.float64 else x.astype(np.int64).astype(np.uint32) if x.dtype == int else x
    return np.broadcast_to(x, 64).copy().view(np.uint32)


def execute(*lines: str, v=None, s=None, exec_bits=None, lds=None, late=False, memory=None) -> Wave:
    """The wave after some instructions; v, s: registers before them, lds: bytes."""
    w = Wave(Lds(8192), memory or Memory(), late)
    for n, value in (v or {}).items():
        w.u[n] = words(value)
    for n, value in (s or {}).items():
        w.s[n] = value & 0xFFFFFFFF
    if lds is not None:
        w.lds.bytes[: len(lds)] = lds
    if exec_bits is not None:
        w.set_exec(exec_bits)
    with np.errstate(all="ignore"):
        for line in lines:
            decode(parse_instruction(line), {})(w)
    return w


def kernel_text(body: str, arguments: str, vgprs: int = 8) -> str:
    """A listing as Triton prints it. arguments: p for a pointer, i for 32 bits, in order."""
    layout, offset = [], 0
    for kind in arguments:
        size = 8 if kind == "p" else 4
        offset = -(-offset // size) * size
        value_kind = "global_buffer" if kind == "p" else "by_value"
        layout.append(f"      - .offset:         {offset}\n        .size:           {size}\n"
                      f"        .value_kind:     {value_kind}")  # fmt: skip
        offset += size
    lines = "\n".join(line if line.endswith(":") else f"\t{line}" for line in map(str.strip, body.strip().splitlines()))
    return f"""\t.text
\t.globl\tk                        ; -- Begin function k
k:                               ; @k
{lines}
\t.section\t.rodata,"a",@progbits
\t.amdhsa_kernel k
\t\t.amdhsa_private_segment_fixed_size 0
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_user_sgpr_kernarg_preload_length 0
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_system_sgpr_workgroup_id_y 1
\t\t.amdhsa_system_sgpr_workgroup_id_z 0
\t\t.amdhsa_next_free_vgpr {vgprs}
\t\t.amdhsa_float_round_mode_32 0
\t\t.amdhsa_float_denorm_mode_32 3
\t.end_amdhsa_kernel
\t.text
.Lfunc_end0:
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
{chr(10).join(layout)}
    .group_segment_fixed_size: 0
    .name:           k
...
\t.end_amdgpu_metadata
"""


def executed(q, k, v, recipe="none", executor=None, changes=None, out=None, **same):
    """(out, lse) of the listings of the quantisers and of attn_fwd for gfx950, into tensors full of NaN.

    changes: fields of the default config that differ; same: what attention_ref takes, or cu_seqlens_* and max_seqlen_*.
    """
    shape = shape_of(q, k, v, *(same.get(name) for name in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")))
    causal, window = same.get("causal", False), same.get("window_size", (-1, -1))
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[q.dtype] if recipe == "none" else "fp8"
    key = AttentionKey(dtype, shape.head_dim, shape.head_dim_v, shape.nheads, shape.nheads_k, shape.batch,
                       shape.seqlen_q, shape.seqlen_k, causal)  # fmt: skip
    config = dataclasses.replace(default_config("gfx950", key), recipe=recipe, **(changes or {}))
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype) if out is None else out
    lse = torch.full((*(() if shape.varlen else q.shape[:1]), q.shape[-2], q.shape[-3]), float("nan"))
    inputs = (q, k, v, out, lse, *(same.get(name) for name in ("sink", "cu_seqlens_q", "cu_seqlens_k")), *[None] * 3)
    with _target("gfx950"):
        launch._start(
            executor or Executor(), inputs, config, "gfx950", same.get("softmax_scale"),
            (window[0], 0 if causal else window[1]), same.get("softcap", 0.0),
            same.get("max_seqlen_q"), same.get("max_seqlen_k"),
        )  # fmt: skip
    return out, lse
