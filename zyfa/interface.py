"""The public call: check, key, choose, launch. It never tunes, never writes, never fails because of a database."""

import dataclasses
from functools import partial
from itertools import pairwise

import torch

from . import reference
from .archs import ARCHS, default_config
from .checks import FP8, Call, check_call, expand_descale
from .config import AttentionConfig
from .device import Device, current_device
from .kernels.launch import attention_forward
from .limits import broken_limit
from .lookup import Choice, choose, describe, withdraw
from .op import through_operator
from .recipes import PRESETS, RECIPES

CPU_ARCH = "gfx950"  # the CPU path emulates the OCP FP8 format, which gfx950 and sm90 share


def attention(
    q, k, v, *, causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0, sink=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    q_descale=None, k_descale=None, v_descale=None, precision="auto", config=None, out=None, return_lse=False,
):  # fmt: skip
    """Prefill attention of q over k and v: out (batch, seqlen_q, nheads, head_dim_v), or (out, lse) with return_lse.

    q (batch, seqlen_q, nheads, head_dim), k (batch, seqlen_k, nheads_k, head_dim), v (batch, seqlen_k, nheads_k,
    head_dim_v) in bfloat16, float16 or float8_e4m3fn, any strides with a contiguous last dimension (heads first:
    pass x.transpose(1, 2)); nheads is a multiple of nheads_k, and query head h reads KV head h // (nheads // nheads_k).
    Inputs are never written to.

    With cu_seqlens_q and cu_seqlens_k (int32, batch + 1) the tensors are (total, nheads, head_dim). max_seqlen_* are
    read from the offsets when absent, which waits for the GPU (but not in a graph capture, which takes the total).
    Given, they are trusted: larger is slower, and where smaller than the longest sequence the rows behind (in FP8, the
    whole sequence) come out as NaN; offsets on the CPU are checked. Rows of no sequence are left as they are.

    causal and window_size (left, right; inclusive, -1 unlimited) are aligned to the bottom right: left=127 is what
    models call a window of 128. softmax_scale is 1 / sqrt(head_dim) unless given; softcap > 0 bounds the logits by
    softcap * tanh(s / softcap); sink (nheads, floating point) is a logit per head without a key. A row that sees no key
    gives 0 and lse -inf, or the sink.

    precision: "auto" keeps the dtype of the inputs, "fp8" quantises them with the recipe of the tuned config,
    "fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate" with that preset, "bf16" never quantises. FP8 inputs
    take q_descale (batch, nheads), k_descale, v_descale (batch, nheads_k), one element, or numbers; 1.0 where absent.
    config: an AttentionConfig to use instead of the tuned one. The output has the dtype of the inputs (bfloat16 for
    FP8).

    lse: fp32, natural log, (batch, nheads, seqlen_q) or (nheads, total_q): the log of what the output was divided by,
    so a sink is part of it. Parts over disjoint keys merge with weights exp(lse) if the sink went to one of them only.

    Raises ValueError, TypeError or, where gradients are asked for, NotImplementedError before any launch, naming the
    argument. CPU tensors run through zyfa.reference. Capturing a graph needs one earlier call with the same arguments:
    a first launch compiles and loads code, which a capture forbids.
    """
    if torch.compiler.is_compiling():
        return through_operator(
            q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, sink=sink,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            descales=(q_descale, k_descale, v_descale), precision=precision, config=config, out=out,
            return_lse=return_lse,
        )  # fmt: skip
    call = check_call(
        q, k, v, causal=causal, window_size=window_size, softcap=softcap, sink=sink, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        descales=(q_descale, k_descale, v_descale), precision=precision, out=out, softmax_scale=softmax_scale,
    )  # fmt: skip
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError("attention is forward only: call it under torch.no_grad() or detach q, k and v")
    descales = _descales(q, call, q_descale, k_descale, v_descale) if q.dtype in FP8 else None
    if q.numel() == 0 or k.shape[-3] == 0:
        return _without_keys(q, v, call, sink, out, return_lse, varlen=cu_seqlens_q is not None)
    same = {"causal": call.key.causal, "softmax_scale": softmax_scale, "window_size": call.window_size}
    same |= {"softcap": softcap, "sink": sink}
    if not q.is_cuda:
        return _on_cpu(q, k, v, call, config, descales, cu_seqlens_q, cu_seqlens_k, out, return_lse, same)
    with torch.cuda.device(q.device):
        device = current_device(q.device.index)
        _check_fp8(q, device)
        launch = partial(
            attention_forward, q, k, v, arch=device.arch, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k, descales=descales, out=out,
            return_lse=return_lse, **same,
        )  # fmt: skip
        out, lse = _launched(launch, call, config, device)
    return (out, lse) if return_lse else out


def _descales(q, call: Call, q_descale, k_descale, v_descale) -> tuple[torch.Tensor, ...]:
    """The three scales of FP8 inputs as fp32 (batch, nheads) and (batch, nheads_k)."""
    batch, nheads, nheads_k = call.key.batch, call.key.nheads, call.key.nheads_k
    return (
        expand_descale("q_descale", q_descale, batch, nheads, q.device),
        expand_descale("k_descale", k_descale, batch, nheads_k, q.device),
        expand_descale("v_descale", v_descale, batch, nheads_k, q.device),
    )


def _check_fp8(q, device: Device) -> None:
    if device.arch not in ARCHS:
        raise ValueError(f"q is on {device.sku_key}, which ZYFA has no kernels for; supported are {', '.join(ARCHS)}")
    wanted = ARCHS[device.arch].fp8_format
    if q.dtype in FP8 and FP8[q.dtype] != wanted:
        raise TypeError(
            f"q is {q.dtype}, but FP8 on {device.arch} is float8_{wanted}: the same bits mean other numbers"
        )


def _config_for(call: Call, config: AttentionConfig | None, device: Device) -> AttentionConfig:
    """The caller's config, checked, or the tuned one; with the recipe that `precision` asks for."""
    if config is None:
        config = choose(call.key, device).config
        if call.preset is None:
            return config
        config = _with_recipe(config, call.preset)
        if broken_limit(config, call.key, device.arch) is None:
            return config
        # tuned with another recipe, whose tiles are smaller
        return dataclasses.replace(default_config(device.arch, call.key), recipe=call.preset)
    config = dataclasses.replace(config, recipe=call.preset) if call.preset else config
    if reason := broken_limit(config, call.key, device.arch):
        raise ValueError(f"config does not fit this call on {device.sku_key}: {reason}")
    return config


def _with_recipe(config: AttentionConfig, recipe: str) -> AttentionConfig:
    """A tuned tile with another recipe than it was tuned with.

    K tiles of 16 bits take one stage fewer than those of 8: 991 against 1351 us at 8k, causal, on an H200. The gluon
    variant needs its two.
    """
    wider = config.variant == "triton" and RECIPES[recipe].qk == "bf16" and RECIPES[config.recipe].qk != "bf16"
    return dataclasses.replace(config, recipe=recipe, num_stages=max(config.num_stages - wider, 1))


def _launched(launch, call: Call, config: AttentionConfig | None, device: Device):
    """Launches; a config of a database that does not compile or fit here is withdrawn and the default runs."""
    try:
        return launch(config=_config_for(call, config, device))
    except (ValueError, TypeError, torch.OutOfMemoryError):  # the caller's arguments, or memory: no config helps
        raise
    except Exception as error:  # of Triton, ptxas, LLVM or the driver: none has a common base
        if config is not None or not withdraw(call.key, device, error):
            raise
    return launch(config=_config_for(call, None, device))


def _without_keys(q, v, call: Call, sink, out, return_lse: bool, varlen: bool):
    """The result when there is no query or no key at all: zeros, and the sink or -inf."""
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    out.zero_()
    if not return_lse:
        return out
    nheads = call.key.nheads
    shape = (nheads, q.shape[0]) if varlen else (q.shape[0], nheads, q.shape[1])
    lse = torch.full(shape, float("-inf"), device=q.device)
    return out, lse if sink is None else lse.copy_(sink[:, None])


def _on_cpu(q, k, v, call: Call, config, descales, cu_seqlens_q, cu_seqlens_k, out, return_lse, same):
    """The reference with the recipe's arithmetic, one sequence at a time for varlen; rows of no sequence stay."""
    recipe = call.preset or (config.recipe if config is not None else PRESETS["balanced"])

    def one(q, k, v, descales):
        if call.key.dtype == "fp8":
            return reference.emulate(q, k, v, recipe, arch=CPU_ARCH, descales=descales, return_lse=True, **same)
        o, lse = reference.attention_ref(q, k, v, dtype=torch.float32, p_dtype=q.dtype, return_lse=True, **same)
        return o.to(q.dtype), lse

    if cu_seqlens_q is None:
        result, lse = one(q, k, v, descales)
        out = result.contiguous() if out is None else out.copy_(result)
        return (out, lse) if return_lse else out
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = torch.empty(q.shape[1], q.shape[0])
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for i, ((q0, q1), (k0, k1)) in enumerate(bounds):
        part = one(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], descales and tuple(d[i : i + 1] for d in descales))
        out[q0:q1], lse[:, q0:q1] = part[0][0], part[1][0]
    return (out, lse) if return_lse else out


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a call runs as it does; prints the SKU, the cell, the database and row, the trust, and what missed before."""

    call: Call
    device: Device | None
    choice: Choice | None
    config: AttentionConfig | None

    def __str__(self) -> str:
        if self.choice is None or self.device is None:
            return "CPU tensors: zyfa.reference computes the call with the same arithmetic; no database is asked"
        text = describe(self.choice, self.call.key, self.device)
        return f"{text}\nprecision asks for recipe {self.call.preset}" if self.call.preset else text


def explain(q, k, v, *, precision="auto", causal=False, window_size=(-1, -1), **same) -> Explanation:
    """What attention(q, k, v, ...) with the same arguments would run, and why; launches nothing."""
    names = (
        "softcap", "sink", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "out", "softmax_scale"
    )  # fmt: skip
    given = {name: same.get(name, 0.0 if name == "softcap" else None) for name in names}
    descales = tuple(same.get(f"{name}_descale") for name in "qkv")
    call = check_call(q, k, v, causal=causal, window_size=window_size, descales=descales, precision=precision, **given)
    if not q.is_cuda:
        return Explanation(call, None, None, None)
    device = current_device(q.device.index)
    return Explanation(call, device, choose(call.key, device), _config_for(call, same.get("config"), device))
