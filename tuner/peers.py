"""What zyfa.attention is measured against: every attention of the field that is installed, as launches over inputs.

A peer says what its timed call starts from ("bf16" or "fp8" inputs) and what it multiplies. Whatever its users do once
or have anyway (layout views, heads that it cannot share, FP8 inputs where it takes them) is prepared outside the call.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from zyfa.recipes import FP8_MAX

from .inputs import QKV

FP8 = torch.float8_e4m3fn
Launch = Callable[[], torch.Tensor]


class Contender(NamedTuple):
    """One way to compute a shape, ready to be timed.

    launches: a function for each input set that starts one call on the current stream and returns
    out (batch, seqlen, nheads, head_dim). starts_from: the dtype of what the call is given. path: what runs inside.
    """

    name: str
    dtype: str
    starts_from: str
    recipe: str
    path: str
    launches: Sequence[Launch]


class PeerSkipped(Exception):
    """A peer that is not installed or does not take this shape; says why."""


def first_line(error: BaseException | str) -> str:
    """What went wrong, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sdpa(name: str, backend: SDPBackend, sets: Sequence[QKV], causal: bool) -> Contender:
    """A backend of torch SDPA. It aligns a causal mask to the top left: the same where seqlen_q = seqlen_k."""

    def launch(qkv: QKV, enable_gqa: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=enable_gqa)
        return out.transpose(1, 2)

    heads_first: list[QKV] = [(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) for q, k, v in sets]
    group = sets[0][0].shape[2] // sets[0][1].shape[2]
    shares_heads = group > 1 and not _refusal(partial(launch, heads_first[0], True))
    path = f"torch {torch.__version__} {backend.name}"
    if group > 1 and not shares_heads:
        path += ", K and V expanded to all heads outside the timing"
        heads_first = [(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for q, k, v in heads_first]
    if reason := _refusal(partial(launch, heads_first[0], shares_heads)):
        raise PeerSkipped(reason)
    return Contender(name, "bf16", "bf16", "none", path, [partial(launch, qkv, shares_heads) for qkv in heads_first])


def _refusal(launch: Launch) -> str | None:
    """Why torch has no kernel of the chosen backend for a call (it explains that in warnings), None if it has one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            launch()
        except RuntimeError as error:
            return "; ".join([first_line(error), *(first_line(w.message) for w in caught[-1:])])
    return None


def _fa3():
    """The FlashAttention-3 module; its own build and the prebuilt forward-only wheel differ in name."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # it is there, but something that it needs is not
                raise
    raise PeerSkipped("neither flash_attn_interface nor fa3_fwd_interface is installed")


def _output(result) -> torch.Tensor:
    """Versions of FlashAttention-3 differ in whether they return the LSE beside the output."""
    return result[0] if isinstance(result, tuple) else result


def fa3(name: str, sets: Sequence[QKV], causal: bool) -> Contender:
    """FlashAttention-3 in BF16."""
    module = _fa3()
    launches = [lambda qkv=qkv: _output(module.flash_attn_func(*qkv, causal=causal)) for qkv in sets]
    return Contender(name, "bf16", "bf16", "none", module.__name__, launches)


def quantise_per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in e4m3, fp32 descale of shape ()) with one scale for the tensor: eager torch, as users of FP8 peers do it."""
    scale = x.abs().amax().float() / FP8_MAX["e4m3fn"]
    return (x / scale).to(FP8), scale


def _fa3_fp8(module, quantised: Sequence[tuple[torch.Tensor, torch.Tensor]], causal: bool) -> torch.Tensor:
    (q, *_), (k, *_) = quantised[:2]
    size = q.shape[0], k.shape[2]
    descales = {f"{name}_descale": scale.expand(size) for name, (_, scale) in zip("qkv", quantised, strict=True)}
    return _output(module.flash_attn_func(*(x for x, _ in quantised), causal=causal, **descales))


def fa3_fp8_inputs(name: str, sets: Sequence[QKV], causal: bool) -> Contender:
    """FlashAttention-3 on inputs that are FP8 already: its kernel alone."""
    module = _fa3()
    quantised = [[quantise_per_tensor(x) for x in qkv] for qkv in sets]
    launches = [lambda x8=x8: _fa3_fp8(module, x8, causal) for x8 in quantised]
    return Contender(name, "fp8", "fp8", "tensor", f"{module.__name__}, quantised outside the timing", launches)


def fa3_fp8(name: str, sets: Sequence[QKV], causal: bool) -> Contender:
    """FlashAttention-3 in FP8 from BF16 inputs, with eager per-tensor quantisation in front."""
    module = _fa3()
    launches = [lambda qkv=qkv: _fa3_fp8(module, [quantise_per_tensor(x) for x in qkv], causal) for qkv in sets]
    return Contender(name, "fp8", "bf16", "tensor", f"{module.__name__}, eager quantisation timed", launches)


class Peer(NamedTuple):
    """make(name, input sets, causal) -> Contender; raises PeerSkipped, or whatever its library raises."""

    name: str
    dtype: str
    make: Callable[[str, Sequence[QKV], bool], Contender]


def _sdpa_peer(name: str, backend: SDPBackend) -> Peer:
    return Peer(name, "bf16", lambda name, sets, causal: sdpa(name, backend, sets, causal))


PEERS: tuple[Peer, ...] = (
    _sdpa_peer("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
    _sdpa_peer("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    _sdpa_peer("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    Peer("fa3", "bf16", fa3),
    Peer("fa3-fp8", "fp8", fa3_fp8),
    Peer("fa3-fp8-inputs", "fp8", fa3_fp8_inputs),
)
