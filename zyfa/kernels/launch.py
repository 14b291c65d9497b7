"""From checked tensors and a config to launches: options, grids, the arguments of the attention kernel, and replays."""

import contextlib
from collections.abc import Sequence

import torch
import triton

from ..archs import ARCHS, Arch, plain_config
from ..config import AttentionConfig, AttentionKey
from ..recipes import QUANT_ROWS, RECIPES
from .attn_fwd import attn_fwd
from .merge import merge_splits
from .operands import Operands, Shape, ahead, as_descriptors, plain, shape_of, strides_of
from .quantiser import Quantiser
from .replay import Compiler, Plan, Recorder, distinct

LOG2E = 1.4426950408889634
MERGED_VALUES = 2048  # of each part that a program of merge_splits holds: 16 rows of 128
MAX_PLANS = 4096  # recorded call signatures; beyond, as with ever new lengths, all are forgotten
_plans: dict[tuple, Plan] = {}


def _options(config: AttentionConfig, arch: Arch) -> dict:
    """The compiler options of a config."""
    options: dict = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if arch.vendor == "amd":
        options["waves_per_eu"] = config.waves_per_eu
        options["matrix_instr_nonkdim"] = config.matrix_instr_nonkdim
        if config.sched_strategy:
            options["llvm_fn_attrs"] = f"amdgpu-sched-strategy={config.sched_strategy}"
    elif config.maxnreg:
        options["maxnreg"] = config.maxnreg
    return options


@contextlib.contextmanager
def _async_copy(config: AttentionConfig):
    """Async copy is a process-wide knob of Triton, not an option of a kernel."""
    if config.async_copy < 0:
        yield
        return
    with triton.knobs.amd.scope():
        triton.knobs.amd.use_async_copy = bool(config.async_copy)
        yield


def _constants(ops: Operands, shape: Shape, config: AttentionConfig, arch: Arch, window, softcap, sink, lse) -> dict:
    """The constexpr arguments of attn_fwd."""
    left, right = window
    return {
        "VARLEN": shape.varlen, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "SOFTCAP": softcap > 0.0,
        "HAS_SINK": sink is not None, "HAS_LSE": lse is not None,
        "QK_SCALES": ops.qk_scales, "V_SCALES": ops.v_scales,
        "QUANT_ROWS": QUANT_ROWS, "ROW_SHIFT": ops.row_shift is not None, "COL_BIAS": ops.col_bias is not None,
        "P_OFFSET": ops.p_offset, "V_TRANSPOSED": ops.v_transposed,
        "K_DESCRIPTOR": ops.k_descriptor, "V_DESCRIPTOR": ops.v_descriptor,
        "SHORT_SUM": arch.short_fp8_sum and ops.v_quantised,
        "HEAD_DIM": shape.block_d if ops.qk_quantised else shape.head_dim, "HEAD_DIM_V": shape.head_dim_v,
        "BLOCK_D": shape.block_d, "BLOCK_DV": shape.block_dv, "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N,
        "LONGEST_FIRST": config.longest_first and right >= 0, "HEAD_GROUP": config.head_group,
        "ASYNC_COPY": config.async_copy, "SPLITS": config.splits, "PACK_GQA": _packs(config, shape),
        "XCDS": config.xcds,
    } | ahead(arch, shape, ops.v_quantised or config.splits > 1)  # fmt: skip


def prepare_operands(
    q, k, v, *, config: AttentionConfig, arch: Arch, qk_scale: float, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=None, max_seqlen_k=None, descales=None, row_shift=False, launcher: Compiler | Recorder,
) -> tuple[Operands, Shape]:  # fmt: skip
    """What the attention kernel reads: quantised as the config's recipe says, as descriptors if the config says so."""
    shape = shape_of(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    if config.recipe == "none":
        ops = plain(q, k, v)
    else:
        # FP8 inputs carry no means and no rotation: only the plain recipe describes them
        recipe = RECIPES["head" if descales else config.recipe]
        if recipe.granularity == "mx":
            shape = shape._replace(min_block_d=64)  # the scaled matrix instructions sum 64 products at least
        elif recipe.qk != "bf16" and arch.vendor == "nvidia":
            shape = shape._replace(min_block_d=32)  # an 8-bit dot sums 32 products there
        gluon = config.variant == "gluon" and arch.v_k_major
        in_place = bool(descales) and gluon and _in_place(shape, q, k)
        run = Quantiser(shape, recipe, arch, launcher, cu_seqlens_q, cu_seqlens_k, qk_scale, row_shift, gluon, in_place)
        ops = run.run(q, k, v, descales)
    return (as_descriptors(ops, config, shape) if config.tensor_descriptors else ops), shape


def _in_place(shape: Shape, *x: torch.Tensor) -> bool:
    """Whether TMA reads FP8 Q and K where they lie: their width is the kernel's, and their ends become zeros."""
    from .hopper import reaches

    return shape.head_dim == shape.block_d and all(map(reaches, x))


def _gluon_host(arch: str):
    """The host side of an architecture's Gluon kernel; imported late, as the plain kernel needs no Gluon."""
    if arch == "gfx950":
        from . import cdna4 as host
    else:
        from . import hopper as host  # type: ignore[no-redef]
    return host


def runnable(config: AttentionConfig, arch: str, inputs: Sequence, softcap: float) -> AttentionConfig:
    """The config, or the plain kernel's tile where the Gluon kernel lacks what this call asks for.

    What is no part of a key decides here: softcap, sink, packed sequences (TMA cannot zero the end of each), layouts
    that its copies do not reach. inputs as in _start.
    """
    if config.variant != "gluon":
        return config
    q, k, v, _, _, sink, cu_seqlens_q, *_ = inputs
    if softcap == 0.0 and sink is None and cu_seqlens_q is None:
        # quantised tensors are read from buffers of ours
        read = (q, k, v) if config.recipe == "none" else (q, k) if RECIPES[config.recipe].qk == "bf16" else ()
        if all(_gluon_host(arch).reaches(x) for x in read):
            return config
    dtype = "bf16" if config.recipe == "none" else "fp8"
    key = AttentionKey(dtype, q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2], 1, q.shape[-3], k.shape[-3], False)
    return plain_config(arch, key, config.recipe)


def attention_forward(
    q, k, v, *, config: AttentionConfig, arch: str, causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0,
    sink=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    descales=None, out=None, return_lse=False, compile_only=False, with_plan=False,
):  # fmt: skip
    """Attention of checked inputs with a given config: (out, lse or None), launched on the current stream.

    q (batch, seqlen_q, nheads, head_dim), k, v (batch, seqlen_k, nheads_k, head_dim[_v]) bf16, fp16 or FP8; with
    cu_seqlens (int32, batch + 1): (total, nheads, head_dim). descales: fp32 (batch, nheads), (batch, nheads_k) twice,
    for FP8 inputs. config.recipe says how bf16/fp16 inputs are quantised. lse fp32 (batch, nheads, seqlen_q), natural.
    compile_only: nothing runs; returns the compiled attention kernel of the active driver's target. with_plan: a third
    result, the Plan that repeats the call on tensors of the same layouts (None where kernels were interpreted).
    """
    out, lse = _outputs(q, v, out, return_lse, cu_seqlens_q)
    inputs = (q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k, *(descales or (None, None, None)))
    window = (window_size[0], 0 if causal else window_size[1])
    fixed = (config, arch, softmax_scale, window, softcap, max_seqlen_q, max_seqlen_k)
    if compile_only:
        return _start(Compiler(), inputs, *fixed)
    plan = _replayed(inputs, *fixed)
    return (out, lse, plan) if with_plan else (out, lse)


def _replayed(inputs: Sequence, *fixed) -> Plan | None:
    """Replays the recorded launches of these layouts, or launches and records."""
    signature = (*fixed, inputs[0].device, *(None if x is None else _layout(x) for x in inputs))
    plan = _plans.get(signature)
    if plan is not None:
        plan.replay(inputs)
        return plan
    recorder, inputs = Recorder(), distinct(inputs)
    _start(recorder, inputs, *fixed)
    if not recorder.replayable:
        return None
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    plan = _plans[signature] = Plan(recorder.launches, inputs)
    return plan


def _layout(x: torch.Tensor) -> tuple:
    """What the kernels are specialised on, and everything that their arguments hold, of one tensor."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0


def _start(
    launcher: Compiler | Recorder, inputs: Sequence, config: AttentionConfig, arch: str,
    softmax_scale, window, softcap, max_seqlen_q, max_seqlen_k,
):  # fmt: skip
    """Start the quantisers and the attention kernel; returns what the launcher made of the latter.

    inputs: q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k and the three descales, None where absent.
    """
    q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k, *descales = inputs
    facts, config = ARCHS[arch], runnable(config, arch, inputs, softcap)
    scale = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) * LOG2E
    ops, shape = prepare_operands(
        q, k, v, config=config, arch=facts, qk_scale=scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, descales=None if descales[0] is None else descales,
        row_shift=lse is not None or softcap > 0.0 or sink is not None, launcher=launcher,
    )  # fmt: skip
    if config.variant == "gluon":
        return _gluon_host(arch).start(launcher, ops, shape, config, out, lse, scale, window)
    heads, rows = shape.nheads, shape.seqlen_q
    if _packs(config, shape):
        heads, rows = shape.nheads_k, rows * (shape.nheads // shape.nheads_k)
    num_m_blocks, batch_heads = -(-rows // config.BLOCK_M), shape.batch * heads
    to, to_lse, strides = _parts(shape, config.splits, out) if config.splits > 1 else (out, lse, strides_of(out))
    args = (
        ops.q, ops.k, ops.v, to, to_lse, *ops.descales, ops.row_shift, ops.col_bias, sink, cu_seqlens_q, cu_seqlens_k,
        scale, softcap * LOG2E, *ops.strides_q, *ops.strides_k, *ops.strides_v, *strides, *ops.descale_strides,
        shape.rows8_q, shape.rows8_k, shape.total_q, batch_heads, shape.nheads, shape.nheads // shape.nheads_k,
        shape.seqlen_q, shape.seqlen_k, num_m_blocks, *window,
    )  # fmt: skip
    constants = _constants(ops, shape, config, facts, window, softcap, sink, to_lse) | _options(config, facts)
    with _async_copy(config):
        started = launcher.start(attn_fwd, (num_m_blocks * batch_heads * config.splits,), args, constants)
    if config.splits > 1:
        _merge(launcher, facts, shape, config.splits, to, to_lse, out, lse, cu_seqlens_q)
    return started


def _packs(config: AttentionConfig, shape: Shape) -> bool:
    return config.pack_gqa and shape.nheads > shape.nheads_k


def _parts(shape: Shape, splits: int, out: torch.Tensor):
    """Room for what each split finds, fp32 (splits, heads, rows, head_dim_v), their sums, and strides of the former."""
    heads = shape.nheads if shape.varlen else shape.batch * shape.nheads
    rows, width = shape.total_q, shape.head_dim_v
    parts = torch.empty((splits, heads, rows, width), dtype=torch.float32, device=out.device)
    sums = torch.empty((splits, heads, rows), dtype=torch.float32, device=out.device)
    return parts, sums, (0 if shape.varlen else shape.nheads * rows * width, width, rows * width)


def _merge(
    launcher: Compiler | Recorder, arch: Arch, shape: Shape, splits: int, parts, sums, out, lse, cu_seqlens_q
) -> None:
    """Start what makes the output of the parts."""
    rows = MERGED_VALUES // shape.block_dv
    programs_of_head = -(-shape.total_q // rows)
    args = (parts, sums, out, lse, cu_seqlens_q, *strides_of(out), programs_of_head, shape.nheads, shape.batch)
    constants = {
        "SPLITS": splits, "VARLEN": shape.varlen, "HAS_LSE": lse is not None,
        "HEAD_DIM_V": shape.head_dim_v, "BLOCK_DV": shape.block_dv, "ROWS": rows, "num_warps": 4,
    } | ahead(arch, shape)  # fmt: skip
    launcher.start(merge_splits, (programs_of_head * parts.shape[1],), (*args, shape.total_q), constants)


def _outputs(q, v, out, return_lse: bool, cu_seqlens_q):
    """The output tensor, bf16 for FP8 inputs, and the lse if asked for."""
    if out is None:
        dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    if not return_lse:
        return out, None
    batch = () if cu_seqlens_q is not None else q.shape[:1]
    return out, torch.empty((*batch, q.shape[-2], q.shape[-3]), dtype=torch.float32, device=q.device)


def compile_for(key: AttentionKey, config: AttentionConfig, arch: str):
    """The attention kernel of a key and config, compiled (with its quantisers) for the active driver's target.

    Runs nothing and allocates nothing: tensors on the meta device stand for the inputs. Returns Triton's
    CompiledKernel.
    """
    dtype = torch.float16 if key.dtype == "fp16" else torch.bfloat16
    q = torch.empty((key.batch, key.seqlen_q, key.nheads, key.head_dim), dtype=dtype, device="meta")
    k = torch.empty((key.batch, key.seqlen_k, key.nheads_k, key.head_dim), dtype=dtype, device="meta")
    v = torch.empty((key.batch, key.seqlen_k, key.nheads_k, key.head_dim_v), dtype=dtype, device="meta")
    window = (key.seqlen_k // 2, -1) if key.window_class == "local" else (-1, -1)
    return attention_forward(
        q, k, v, config=config, arch=arch, causal=key.causal, window_size=window, compile_only=True
    )
