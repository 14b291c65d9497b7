"""How kernels are started: compiled only, launched and recorded, or replayed from a record.

Triton's own launch of a kernel with 50 arguments and our preparation cost 119 us a BF16 call and 334 us an FP8 call
on the host of an H200 (torch 2.11, Triton 3.6, 2026-11); launching a compiled kernel takes about 10 us. So the
launches of a call are recorded once for each signature and replayed with the tensors of the next call in place of the
recorded ones. Temporaries become parts of one workspace; tensors are passed as plain addresses, which also spares the
driver's look at each pointer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

ALIGN = 256  # bytes between the parts of a workspace, as torch's allocator aligns: specialisations still hold


class Compiler:
    """Starts nothing: compiles for the target of Triton's active driver."""

    def start(self, kernel, grid: tuple[int, ...], args: tuple, constants: dict):
        """The compiled kernel."""
        return kernel.warmup(*args, grid=grid, **constants)


class Launch(NamedTuple):
    """One launch: the compiled kernel, its three-dimensional grid, and all arguments, constexprs last."""

    compiled: Any
    grid: tuple[int, int, int]
    args: tuple


class Recorder:
    """Launches kernels and keeps what it launched."""

    def __init__(self):
        self.launches: list[Launch] = []

    def start(self, kernel, grid: tuple[int, ...], args: tuple, constants: dict):
        """Launches on the current stream; returns the compiled kernel, None from Triton's interpreter."""
        compiled = kernel[grid](*args, **constants)
        constexprs = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        x, y, z = (*grid, 1, 1)[:3]
        self.launches.append(Launch(compiled, (x, y, z), args + constexprs))
        return compiled

    @property
    def replayable(self) -> bool:
        return all(launch.compiled is not None for launch in self.launches)


class _Address:
    """The base of a tensor descriptor, as far as a launch asks for it."""

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _rebased(descriptor, address: int):
    """The descriptor at another address; its constructor would check again what the recorded one has passed."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=_Address(address))
    return new


def distinct(inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The inputs, each an object of its own: a record of attention(x, x, x) is replayed with three tensors."""
    unique: list[torch.Tensor | None] = []
    for x in inputs:
        repeated = x is not None and any(x is other for other in unique)
        unique.append(x.detach() if x is not None and repeated else x)
    return tuple(unique)


class Plan:
    """The launches of one call signature; run() repeats them on the tensors of another call."""

    def __init__(self, launches: Sequence[Launch], inputs: Sequence[torch.Tensor | None]):
        """inputs: those that the launches were recorded with, each of them distinct()."""
        self.workspace_bytes = 0
        self._parts: dict[int, int] = {}  # address of a recorded temporary's storage -> offset in the workspace
        self._places = {id(x): i for i, x in enumerate(inputs) if x is not None}
        # compiled kernel, grid, arguments, and [(argument, input or None for the workspace, offset, descriptor)]
        self._steps = [self._step(launch) for launch in launches]

    def _step(self, launch: Launch):
        args, moving = list(launch.args), []
        for i, x in enumerate(args):
            if hasattr(x, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
                moving.append((i, *self._place(x.base), _rebased(x, 0)))
            elif isinstance(x, torch.Tensor):
                moving.append((i, *self._place(x), None))
        for i, *_ in moving:
            args[i] = None
        return launch.compiled, launch.grid, args, moving

    def _place(self, x: torch.Tensor) -> tuple[int | None, int]:
        """(index among the inputs, 0), or (None, offset in the workspace) for a temporary."""
        if id(x) in self._places:
            return self._places[id(x)], 0
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._parts:
            self._parts[storage.data_ptr()] = self.workspace_bytes
            self.workspace_bytes += -(-storage.nbytes() // ALIGN) * ALIGN
        return None, self._parts[storage.data_ptr()] + int(x.storage_offset()) * x.element_size()

    def run(self, inputs: Sequence[torch.Tensor | None], device: torch.device) -> None:
        """Launches on the current stream; inputs in the order and with the layouts of the recorded ones."""
        addresses: list = [None if x is None else x.data_ptr() for x in inputs]
        base = 0
        if self.workspace_bytes:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
            base = workspace.data_ptr()
        for compiled, grid, template, moving in self._steps:
            args = template.copy()
            for i, source, offset, descriptor in moving:
                address = base + offset if source is None else addresses[source]
                args[i] = address if descriptor is None else _rebased(descriptor, address)
            compiled[grid](*args)
