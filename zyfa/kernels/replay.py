"""How kernels are started: compiled only, launched and recorded, or replayed from a record.

Triton's own launch of a kernel with 50 arguments and our preparation cost 119 us a BF16 call and 334 us an FP8 call
on the host of an H200 (torch 2.11, Triton 3.6, 2026-11). So the launches of a call are recorded once for each signature
and replayed with the tensors of the next call in place of the recorded ones. Temporaries become parts of one workspace.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from .driver import Place, packed

_knobs = triton.knobs.runtime
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
    """The launches of one call signature, to be repeated on the tensors of other calls. Any thread may run it."""

    def __init__(self, launches: Sequence[Launch], inputs: Sequence[torch.Tensor | None]):
        """inputs: those that the launches were recorded with, each of them distinct()."""
        device = next(x.device for x in inputs if x is not None)
        self.device_index = -1 if device.index is None else device.index  # as Tensor.get_device() counts
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self.workspace_bytes = 0
        self._parts: dict[int, int] = {}  # address of a recorded temporary's storage -> offset in the workspace
        self._places = {id(x): i for i, x in enumerate(inputs) if x is not None}
        self.inputs = 1 + max(self._places.values(), default=-1)  # how many addresses a run takes
        self._storages = {x.untyped_storage().data_ptr() for x in inputs if x is not None and x.numel()}
        # compiled kernel, grid, arguments, and [(argument, input or None for the workspace, offset, descriptor)]
        self._steps = [self._step(launch) for launch in launches]
        # At most one, which whoever runs takes out: popping and appending need no lock and cost half of one.
        self._packed = [] if (made := packed(launches, self.inputs, self._place)) is None else [made]
        self.base_bytes = self.workspace_bytes if self._packed else 0

    def _step(self, launch: Launch):
        args, moving = list(launch.args), []
        for i, x in enumerate(args):
            if hasattr(x, "block_shape"):  # a tensor descriptor
                moving.append((i, *self._place(x.base), _rebased(x, 0)))
            elif isinstance(x, torch.Tensor):
                moving.append((i, *self._place(x), None))
        for i, *_ in moving:
            args[i] = None
        return launch.compiled, launch.grid, args, moving

    def _place(self, x: torch.Tensor) -> Place:
        """(index among the inputs, 0), or (None, offset in the workspace) for a temporary."""
        if id(x) in self._places:
            return self._places[id(x)], 0
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._parts:
            assert storage.data_ptr() not in self._storages, "a kernel was given a view of an input, not the input"
            self._parts[storage.data_ptr()] = self.workspace_bytes
            self.workspace_bytes += -(-storage.nbytes() // ALIGN) * ALIGN
        return None, self._parts[storage.data_ptr()] + int(x.storage_offset()) * x.element_size()

    def replay(self, inputs: Sequence[torch.Tensor | None]) -> None:
        """Launches on the current stream; inputs in the order and with the layouts of the recorded ones."""
        addresses = [0 if x is None else x.data_ptr() for x in inputs[: self.inputs]]
        workspace = self.workspace()
        self.run(addresses, workspace.data_ptr())

    def workspace(self) -> torch.Tensor:
        """Memory for one run: free again for whatever its stream does afterwards."""
        return self._nothing.new_empty(self.workspace_bytes)

    def stream(self) -> int:
        """The current stream of torch on the plan's device."""
        return triton.runtime.driver.active.get_current_stream(self.device_index)

    def run(self, addresses: Sequence[int], base: int) -> None:
        """Launches on the current stream of the plan's device, which must be the current device.

        addresses: of the first self.inputs inputs, 0 for one that is None; base: where self.base_bytes of a workspace
        start, which no launch of another stream uses.
        """
        enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
        try:
            watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
            packed = None if watched else self._packed.pop()
        except IndexError:  # nothing is packed, or another thread, or what this one interrupted, writes parameters
            packed = None
        if packed is None:
            workspace = self.workspace()  # of its own: the one at base may be in use, too
            self._launch(addresses, workspace.data_ptr(), watched)
            return
        try:
            packed.run(addresses, self.stream(), base)
        finally:
            self._packed.append(packed)

    def _launch(self, addresses: Sequence[int], base: int, watched) -> None:
        """Through Triton: tensors as plain addresses, which spares the driver's look at each pointer.

        watched: by hooks, such as a profiler's, that only compiled[grid] tells of launches.
        """
        stream = self.stream()
        for compiled, grid, template, moving in self._steps:
            args = template.copy()
            for i, source, offset, descriptor in moving:
                address = base + offset if source is None else addresses[source]
                args[i] = address if descriptor is None else _rebased(descriptor, address)
            if watched:
                compiled[grid](*args)
            else:  # what compiled[grid] does but for the hooks
                compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def again(launches: Sequence[Launch]) -> Callable[[], None]:
    """Repeats some launches of a record on the very tensors that they were recorded with, which it keeps."""
    args = [x for launch in launches for x in launch.args]
    tensors = [x.base if hasattr(x, "block_shape") else x for x in args if not isinstance(x, (int, float, bool))]
    kept = list({id(x): x for x in tensors if isinstance(x, torch.Tensor)}.values())
    return partial(Plan(launches, kept).replay, kept)
