"""The public call: check, key, choose, launch. It never tunes, never writes, never fails because of a database."""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import lookup, reference
from .archs import ARCHS
from .checks import FP8, Call, check_call, expand_descale
from .config import AttentionConfig
from .device import Device, current_device
from .kernels.launch import attention_forward
from .kernels.replay import Plan
from .limits import broken_limit
from .lookup import Choice, choose, describe, faster_plain, withdraw
from .op import through_operator
from .ready import Ready, Scales, argument, find, is_plain, remember, settled
from .recipes import PRESETS

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

    precision: "auto" keeps the dtype of the inputs, "fp8" quantises them with the recipe of the tuned config (or runs
    in 16 bits where that was timed to be as fast),
    "fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate" with that preset in its own best config (or in the
    tuned tile where none is stored), "bf16" never quantises. FP8 inputs take q_descale (batch, nheads), k_descale,
    v_descale (batch, nheads_k), one element, or numbers; 1.0 where absent.
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
    ready, signature = None, None
    extras = (sink, cu_seqlens_q, cu_seqlens_k, q_descale, k_descale, v_descale)
    bare = sink is cu_seqlens_q is cu_seqlens_k is q_descale is k_descale is v_descale is None
    if q.__class__ is Tensor and k.__class__ is Tensor and v.__class__ is Tensor and not needs_grad(q, k, v):
        try:
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
            signature = (
                lookup.generation, q.shape, q.stride(), q.dtype, q.device, addresses[0] & 15,
                k.shape, k.stride(), k.dtype, k.device, addresses[1] & 15,
                v.shape, v.stride(), v.dtype, v.device, addresses[2] & 15,
                causal, softmax_scale, tuple(window_size), softcap, max_seqlen_q, max_seqlen_k, precision, id(config),
                return_lse, None if out is None else argument(out),
                None if bare else tuple(map(argument, extras)),
            )  # fmt: skip
            ready = find(signature)
        except (TypeError, RuntimeError):  # the checks say what is wrong
            signature = None
    if ready is not None:
        return ready.run(q, addresses, out, extras)
    done = checked_call(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, sink=sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        descales=extras[3:], precision=precision, config=config, out=out, return_lse=return_lse,
    )  # fmt: skip
    if signature is not None and _decides_all(signature, extras, max_seqlen_q, max_seqlen_k, done):
        remember(signature, Ready(done.plan, q, done.out, done.lse, _scales(extras[3:], done.descales), config))
    return (done.out, done.lse) if return_lse else done.out


class Done(NamedTuple):
    """A call that ran: its results and, where it was launched on a GPU, what repeats it."""

    out: Tensor
    lse: Tensor | None
    plan: Plan | None = None
    descales: tuple[Tensor, ...] | None = None  # as the kernels took them


def needs_grad(q, k, v) -> bool:
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


def _decides_all(signature: tuple, extras: tuple, max_seqlen_q, max_seqlen_k, done: Done) -> bool:
    """Whether every call of this signature does what this one did, so that nothing needs to be checked or read."""
    read = extras[1] is not None and (max_seqlen_q is None or max_seqlen_k is None)  # lengths, from the offsets
    plain = is_plain(*signature[16:18], *signature[18], *signature[19:23])
    if done.plan is None or signature[0] != lookup.generation or read or not plain:
        return False
    filled = done.descales is not None and not all(isinstance(d, Tensor) for d in extras[3:])
    return not filled or settled(done.out.device)


def _scales(given: tuple, used: tuple[Tensor, ...] | None) -> Scales:
    """How the descales of a later call become what the kernels take: held, converted, or (None) as they are."""

    def way(name: str, d, kernels: Tensor) -> Callable[[Any], Tensor] | None:
        (batch, heads), device = kernels.shape, kernels.device

        def convert(d) -> Tensor:
            return expand_descale(f"{name}_descale", d, batch, heads, device)

        if isinstance(d, Tensor):
            return None if d.data_ptr() == kernels.data_ptr() else convert
        # A graph fills in its own, as it may live longer than what is held here.
        return lambda d: convert(d) if torch.cuda.is_current_stream_capturing() else kernels

    return () if used is None else tuple(map(way, "qkv", given, used))


def checked_call(
    q, k, v, *, causal, softmax_scale, window_size, softcap, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, descales, precision, config, out, return_lse,
) -> Done:  # fmt: skip
    """attention() from its checks to its launch."""
    call = check_call(
        q, k, v, causal=causal, window_size=window_size, softcap=softcap, sink=sink, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        descales=descales, precision=precision, out=out, softmax_scale=softmax_scale,
    )  # fmt: skip
    if needs_grad(q, k, v):
        raise NotImplementedError("attention is forward only: call it under torch.no_grad() or detach q, k and v")
    descales = _descales(q, call, *descales) if q.dtype in FP8 else None
    if q.numel() == 0 or k.shape[-3] == 0:
        return _without_keys(q, v, call, sink, out, return_lse, varlen=cu_seqlens_q is not None)
    same = {"causal": call.key.causal, "softmax_scale": softmax_scale, "window_size": call.window_size}
    same |= {"softcap": softcap, "sink": sink}
    if not on_gpu(q):
        return _on_cpu(q, k, v, call, config, descales, cu_seqlens_q, cu_seqlens_k, out, same)
    with torch.cuda.device(q.device):
        device = current_device(q.device.index)
        _check_fp8(q, device)
        launch = partial(
            attention_forward, q, k, v, arch=device.arch, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k, descales=descales, out=out,
            return_lse=return_lse, with_plan=True, **same,
        )  # fmt: skip
        out, lse, plan = _launched(launch, call, config, device)
        return Done(out, lse, plan, descales)


def on_gpu(q: Tensor) -> bool:
    return q.is_cuda


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
        return _choice_for(call, device).config
    config = dataclasses.replace(config, recipe=call.preset) if call.preset else config
    if reason := broken_limit(config, call.key, device.arch):
        raise ValueError(f"config does not fit this call on {device.sku_key}: {reason}")
    return config


def _choice_for(call: Call, device: Device) -> Choice:
    choice = choose(call.key, device, call.preset or "")
    return faster_plain(choice, call.key, device) if call.quantises else choice


def _launched(launch, call: Call, config: AttentionConfig | None, device: Device):
    """Launches; a config that we chose and that does not compile or fit here is withdrawn and the plain one runs."""
    try:
        return launch(config=_config_for(call, config, device))
    except (ValueError, TypeError, torch.OutOfMemoryError):  # the caller's arguments, or memory: no config helps
        raise
    except Exception as error:  # of Triton, ptxas, LLVM or the driver: none has a common base
        if config is not None or not withdraw(call.key, device, error, call.preset or ""):
            raise
    return launch(config=_config_for(call, None, device))


def _without_keys(q, v, call: Call, sink, out, return_lse: bool, varlen: bool) -> Done:
    """The result when there is no query or no key at all: zeros, and the sink or -inf."""
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    out.zero_()
    if not return_lse:
        return Done(out, None)
    nheads = call.key.nheads
    shape = (nheads, q.shape[0]) if varlen else (q.shape[0], nheads, q.shape[1])
    lse = torch.full(shape, float("-inf"), device=q.device)
    return Done(out, lse if sink is None else lse.copy_(sink[:, None]))


def _on_cpu(q, k, v, call: Call, config, descales, cu_seqlens_q, cu_seqlens_k, out, same) -> Done:
    """The reference with the recipe's arithmetic, one sequence at a time for varlen; rows of no sequence stay."""
    recipe = call.preset or (config.recipe if config is not None else PRESETS["balanced"])

    def one(q, k, v, descales):
        if call.key.dtype == "fp8":
            return reference.emulate(q, k, v, recipe, arch=CPU_ARCH, descales=descales, return_lse=True, **same)
        o, lse = reference.attention_ref(q, k, v, dtype=torch.float32, p_dtype=q.dtype, return_lse=True, **same)
        return o.to(q.dtype), lse

    if cu_seqlens_q is None:
        result, lse = one(q, k, v, descales)
        return Done(result.contiguous() if out is None else out.copy_(result), lse)
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = torch.empty(q.shape[1], q.shape[0])
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for i, ((q0, q1), (k0, k1)) in enumerate(bounds):
        part = one(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], descales and tuple(d[i : i + 1] for d in descales))
        out[q0:q1], lse[:, q0:q1] = part[0][0], part[1][0]
    return Done(out, lse)


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
    choice = _choice_for(call, device)
    return Explanation(call, device, choice, _config_for(call, same.get("config"), device))
