"""zyfa.prepare: one signature of the public call, bound for hot loops and graph captures."""

import inspect

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import interface
from .ready import Ready, layout, quick_test, settled


def prepare(q, k, v, **same) -> "Prepared":
    """A callable f(q, k, v, out=None) for tensors like these: attention(q, k, v, **same), checked and planned once.

    same: the arguments of zyfa.attention but out. Choice, checks and compilation happen here, and the call runs once;
    f only compares layouts, and returns what attention returns: a new out, or (out, lse), or the out that it is given.

    f accepts tensors with the shapes, strides, dtype, device and alignment of q, k and v; out must be what f would
    allocate: contiguous, of the output's shape and dtype. Anything else raises ValueError. sink, cu_seqlens_* and
    descales that are full fp32 tensors are bound, not copied: their values may change in place; max_seqlen_*, where not
    given, and other descales are read now. The config stays, whatever a database says later.

    f holds the temporaries of FP8, one workspace for each stream that it is called on, so calls on several streams do
    not meet. A captured graph uses the workspace of its stream: keep f as long as the graph, and do not replay graphs
    of one f side by side. CPU tensors run through zyfa.reference on every call. Raises what zyfa.attention raises.
    """
    bound = inspect.signature(interface.attention).bind(q, k, v, **same)
    if "out" in bound.arguments:
        raise TypeError("prepare takes no out: give it to the prepared callable")
    bound.apply_defaults()
    return Prepared(q, k, v, {name: x for name, x in bound.arguments.items() if name not in ("q", "k", "v", "out")})


class Prepared:
    """What zyfa.prepare returns."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, same: dict):
        self._same = dict(same)
        same = dict(same)
        given = tuple(same.pop(f"{name}_descale") for name in "qkv")
        done = interface.checked_call(q, k, v, descales=given, out=None, **same)
        self._layouts = {"q": layout(q), "k": layout(k), "v": layout(v), "out": layout(done.out)}
        self._aligned = not any(x.data_ptr() & 15 for x in (q, k, v))
        self._tests(q, k, v, done.out)
        descales = done.descales or (None, None, None)
        self._extras = (same["sink"], same["cu_seqlens_q"], same["cu_seqlens_k"], *descales)
        self.ready = None if done.plan is None else Ready(done.plan, q, done.out, done.lse)
        self._workspaces: dict[int, Tensor] = {}
        if done.descales:
            settled(q.device)  # f may run on a stream that did not fill them

    def _tests(self, *tensors: Tensor) -> None:
        """Tests in the mode of now: without a given out, and with one, which costs one test less than two."""
        self._alike, self._alike_with_out = quick_test(*tensors[:3]), quick_test(*tensors)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None):
        """attention(q, k, v, out=out) with the prepared arguments; ValueError where a layout is another."""
        if is_compiling():
            return interface.attention(q, k, v, out=out, **self._same)
        if not (self._alike(q, k, v) if out is None else self._alike_with_out(q, k, v, out)):
            self._require(q=q, k=k, v=v)
            if interface.needs_grad(q, k, v):
                return interface.attention(q, k, v, out=out, **self._same)
            if out is not None:
                self._require(out=out)
                self._tests(q, k, v, out)
            else:
                self._alike = quick_test(q, k, v)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not self._aligned or (addresses[0] | addresses[1] | addresses[2]) & 15:
            self._require(q=q, k=k, v=v)
        if out is not None and out.data_ptr() & 15:
            self._require(out=out)
        ready = self.ready
        if ready is None:
            return interface.attention(q, k, v, out=out, **self._same)
        base = self._workspace(ready.plan) if ready.plan.base_bytes else 0
        return ready.run(q, addresses, out, self._extras, base)

    def _workspace(self, plan) -> int:
        stream = plan.stream()
        held = self._workspaces.get(stream)
        if held is None:  # of two threads that come here, both use the one that is kept
            held = self._workspaces.setdefault(stream, plan.workspace())
        return held.data_ptr()

    def _require(self, **tensors) -> None:
        """ValueError for the first tensor that is not like the prepared one."""
        for name, x in tensors.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if type(x) not in (Tensor, Parameter) or layout(x) != self._layouts[name]:
                raise ValueError(
                    f"{name} was prepared as {_spelled(*self._layouts[name])}, got {_spelled(*layout(x))} "
                    f"({type(x).__name__}): prepare another callable, or call zyfa.attention"
                )


def _spelled(shape, stride, dtype, device, misaligned: int) -> str:
    start = f", {misaligned} bytes behind a multiple of 16" if misaligned else ""
    return f"{tuple(shape)} with strides {stride} of {dtype} on {device}{start}"
