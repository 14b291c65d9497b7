"""The public call: check, key, choose, launch. It never tunes, never writes, never fails because of a database."""

import dataclasses
from itertools import pairwise

import torch

from . import reference
from .archs import ARCHS
from .checks import FP8, Call, check_call, expand_descale
from .config import AttentionConfig
from .device import Device, current_device
from .kernels.launch import attention_forward
from .limits import broken_limit
from .lookup import Choice, choose, choose_recipe, describe
from .op import through_operator
from .recipes import PRESETS

CPU_ARCH = "gfx950"  # the CPU path emulates the OCP FP8 format, which gfx950 and sm90 share


def attention(
    q, k, v, *, causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0, sink=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    q_descale=None, k_descale=None, v_descale=None, precision="auto", config=None, out=None, return_lse=False,
):  # fmt: skip
    """Prefill attention of q over k and v: out (batch, seqlen_q, nheads, head_dim_v), or (out, lse) with return_lse.

    q (batch, seqlen_q, nheads, head_dim), k (batch, seqlen_k, nheads_k, head_dim), v (batch, seqlen_k, nheads_k,
    head_dim_v) in bfloat16, float16 or float8_e4m3fn, any strides with a contiguous last dimension; nheads is a
    multiple of nheads_k, and query head h reads KV head h // (nheads // nheads_k). With cu_seqlens_q and cu_seqlens_k
    (int32, batch + 1) the tensors are (total, nheads, head_dim); max_seqlen_* are read from the device when absent.

    causal and window_size (left, right; inclusive, -1 unlimited) are aligned to the bottom right. softmax_scale is
    1 / sqrt(head_dim) unless given; softcap > 0 bounds the logits by softcap * tanh(s / softcap); sink (nheads, fp32)
    is a logit per head without a key. A row that sees no key gives 0 and lse -inf.

    precision: "auto" keeps the dtype of the inputs, "fp8" quantises them with the recipe of the tuned config,
    "fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate" with that preset in its own best config (or in the
    tuned tile where none is stored), "bf16" never quantises. FP8 inputs
    take q_descale (batch, nheads), k_descale, v_descale (batch, nheads_k), or numbers; 1.0 where absent.
    config: an AttentionConfig to use instead of the tuned one. The output has the dtype of the inputs (bfloat16 for
    FP8), lse is fp32, natural log, (batch, nheads, seqlen_q) or (nheads, total_q).

    Raises ValueError or TypeError before any launch, naming the argument. CPU tensors run through zyfa.reference.
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
        descales=(q_descale, k_descale, v_descale), precision=precision, out=out,
    )  # fmt: skip
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("attention is forward only: call it under torch.no_grad() or detach q, k and v")
    descales = _descales(q, call, q_descale, k_descale, v_descale) if q.dtype in FP8 else None
    if q.numel() == 0 or k.shape[-3] == 0:
        return _without_keys(q, v, call, out, return_lse, varlen=cu_seqlens_q is not None)
    same = {"causal": call.key.causal, "softmax_scale": softmax_scale, "window_size": call.window_size}
    same |= {"softcap": softcap, "sink": sink}
    if not q.is_cuda:
        return _on_cpu(q, k, v, call, config, descales, cu_seqlens_q, cu_seqlens_k, out, return_lse, same)
    with torch.cuda.device(q.device):
        device = current_device(q.device.index)
        _check_fp8(q, device)
        chosen = _config_for(call, config, device)
        out, lse = attention_forward(
            q, k, v, config=chosen, arch=device.arch, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k, descales=descales, out=out,
            return_lse=return_lse, **same,
        )  # fmt: skip
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
    if config is not None:
        if reason := broken_limit(config, call.key, device.arch):
            raise ValueError(f"config does not fit this call on {device.sku_key}: {reason}")
        return dataclasses.replace(config, recipe=call.preset) if call.preset else config
    return _choice_for(call, device).config


def _choice_for(call: Call, device: Device) -> Choice:
    return choose_recipe(call.key, device, call.preset) if call.preset else choose(call.key, device)


def _without_keys(q, v, call: Call, out, return_lse: bool, varlen: bool):
    """The result when there is no query or no key at all: zeros and -inf."""
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    out.zero_()
    shape = (call.key.nheads, q.shape[0]) if varlen else (q.shape[0], call.key.nheads, q.shape[1])
    return (out, torch.full(shape, float("-inf"), device=q.device)) if return_lse else out


def _on_cpu(q, k, v, call: Call, config, descales, cu_seqlens_q, cu_seqlens_k, out, return_lse, same):
    """The reference with the recipe's arithmetic, one sequence at a time for varlen."""
    recipe = call.preset or (config.recipe if config is not None else PRESETS["balanced"])

    def one(q, k, v, descales):
        if call.key.dtype == "fp8":
            return reference.emulate(q, k, v, recipe, arch=CPU_ARCH, descales=descales, return_lse=True, **same)
        o, lse = reference.attention_ref(q, k, v, dtype=torch.float32, p_dtype=q.dtype, return_lse=True, **same)
        return o.to(q.dtype), lse

    if cu_seqlens_q is None:
        result, lse = one(q, k, v, descales)
    else:
        bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        parts = [
            one(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], descales and tuple(d[i : i + 1] for d in descales))
            for i, ((q0, q1), (k0, k1)) in enumerate(bounds)
        ]
        result, lse = torch.cat([o[0] for o, _ in parts]), torch.cat([x[0] for _, x in parts], 1)
    out = result.contiguous() if out is None else out.copy_(result)
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
    names = ("softcap", "sink", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "out")
    given = {name: same.get(name, 0.0 if name == "softcap" else None) for name in names}
    descales = tuple(same.get(f"{name}_descale") for name in "qkv")
    call = check_call(q, k, v, causal=causal, window_size=window_size, descales=descales, precision=precision, **given)
    if not q.is_cuda:
        return Explanation(call, None, None, None)
    device = current_device(q.device.index)
    return Explanation(call, device, _choice_for(call, device), _config_for(call, same.get("config"), device))
