"""Calls whose signature was seen before: everything that the signature decides is decided, what is left is to launch.

A signature holds what checks, choice and launches depend on: of each tensor its layout, and every other argument. A
check that needs values instead (gradients, offsets that have to be read) is made on every call by whoever asks here.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .kernels.replay import Plan

# What torch.compile guards its graphs with: no public API, so everything works without it, too.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
Scales = tuple[Callable[[Any], Tensor] | None, ...]
MAX_READY = 4096  # signatures; beyond, as with ever new lengths, all are forgotten
_ready: dict[tuple, "Ready"] = {}
_generation = -1  # of the choices that they rest on


class Ready:
    """One signature: the plan of its launches and the form of its results."""

    def __init__(self, plan: Plan, q: Tensor, out: Tensor, lse: Tensor | None, scales: Scales = (), held: Any = None):
        """q, out, lse: of a call of this signature; held: what must live as long, as its id is in the signature.

        scales: for each descale what makes the kernel's of the caller's, None where they are the same.
        """
        self.plan, self._scales, self._held = plan, scales, held
        self._out_shape, self._out_dtype = tuple(out.shape), out.dtype
        self._like_q = (q.shape, q.stride(), q.dtype) == (out.shape, out.stride(), out.dtype)
        self._lse_shape = None if lse is None else tuple(lse.shape)
        self._short = plan.inputs == 4  # q, k, v and out, as nearly every call
        self._one_device = torch.cuda.device_count() == 1

    def _new_out(self, q: Tensor) -> Tensor:
        """An output, contiguous; like q where they are alike, which takes two thirds of the time."""
        return torch.empty_like(q) if self._like_q else q.new_empty(self._out_shape, dtype=self._out_dtype)

    def run(self, q: Tensor, addresses: tuple[int, int, int], out: Tensor | None, extras: tuple, base: int = 0):
        """The result of a call. addresses: of q, k and v; extras: sink, the offsets and the descales, None if absent.

        base: where a workspace of the plan starts, 0 for one of this call's own.
        """
        plan = self.plan
        if out is None:
            out = self._new_out(q)
        lse = None if self._lse_shape is None else q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._short:
            inputs: tuple[int, ...] = (*addresses, out.data_ptr())
        else:
            used = self._used(extras)  # alive until everything is launched
            rest = [0 if x is None else x.data_ptr() for x in (out, lse, *used)]
            inputs = (*addresses, *rest)[: plan.inputs]
        if plan.base_bytes and not base:
            workspace = plan.workspace()
            base = workspace.data_ptr()
        if self._one_device or current_device() == plan.device_index:
            plan.run(inputs, base)
        else:
            with torch.cuda.device(plan.device_index):
                plan.run(inputs, base)
        return out if lse is None else (out, lse)

    def _used(self, extras: tuple) -> tuple:
        """The extras as the kernels take them."""
        scales = (x if make is None else make(x) for make, x in zip(self._scales, extras[3:], strict=False))
        return (*extras[:3], *scales) if self._scales else extras


current_device = torch.cuda.current_device


def layout(x: Tensor) -> tuple:
    """What the launches and checks of a call depend on, of one tensor; its address counts modulo 16."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


def quick_test(*tensors: Tensor) -> Callable[..., bool]:
    """f(*others): True only if they are plain tensors laid out like these, alignment aside, and none wants a gradient.

    False may mean anything, such as another mode of torch than now. A third of the time of comparing layout().
    """
    if TensorGuards is None:
        return lambda *others: False
    plain = [x.detach() for x in tensors]
    sizes, strides = [list(x.shape) for x in plain], [list(x.stride()) for x in plain]
    return TensorGuards(*plain, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def argument(x) -> Any:
    """An optional argument as part of a signature: a tensor's layout, anything else itself; TypeError for others."""
    if x is None:
        return None
    if x.__class__ is Tensor or x.__class__ is Parameter:
        return layout(x)
    if isinstance(x, Tensor):
        raise TypeError(f"a {type(x).__name__} may be more than its layout")
    return x


def find(signature: tuple) -> Ready | None:
    """What is ready for a signature; raises TypeError where it cannot be hashed."""
    return _ready.get(signature)


def remember(signature: tuple, ready: Ready) -> None:
    """Keeps what is ready for a signature, whose first item counts the changes of choices: older ones are dropped."""
    global _generation
    if len(_ready) >= MAX_READY or signature[0] != _generation:
        _ready.clear()
        _generation = signature[0]
    _ready[signature] = ready


def settled(device: torch.device) -> bool:
    """Waits until every stream may read what the current one has written; False in a capture, which must not wait."""
    if torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.current_stream(device).synchronize()
    return True


def is_plain(*values) -> bool:
    """Whether the values are numbers, text or None, whose equality says all; a tensor's value can change."""
    return all(value is None or isinstance(value, (Number, str)) for value in values)
