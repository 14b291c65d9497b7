"""CPU tensors as if they were on an H200: calls are checked, planned and replayed, and launches are noted down."""

import contextlib
import ctypes
from typing import NamedTuple

import torch
from helpers import make_qkv

from zyfa import interface, limits, ready
from zyfa.device import device_of_sku
from zyfa.kernels import driver, launch, replay


def qkv(seed=0, seqlen=96, **more):
    return make_qkv(1, seqlen, seqlen, 4, 2, 32, seed=seed, **more)


def addresses(*tensors):
    return tuple(x.data_ptr() for x in tensors)


class Launched(NamedTuple):
    """One launch: of which config (what the call was recorded with), and its arguments, tensors as addresses."""

    kernel: str
    config: object
    args: tuple


class Compiled:
    """Stands for a compiled kernel: notes what it is launched with, at first and again."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, kernel: str, config, log: list):
        self.kernel, self.config, self.log = kernel, config, log

    def note(self, args) -> None:
        addresses = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args)
        self.log.append(Launched(self.kernel, self.config, addresses))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (function, metadata, launch_metadata, enter, leave) == (11, (4, 1, 0), None, None, None)
        self.note(args)


class FakeGpu:
    """`launches`: all so far; `recorded`: how many calls were started anew; `fail`: raised by the next first launch."""

    def __init__(self, monkeypatch, sku: str = "h200"):
        self.launches: list[Launched] = []
        self.recorded = 0
        self.fail: Exception | None = None
        self.stream = 7
        start = launch._start

        def started(launcher, inputs, config, *rest):
            self.recorded += 1
            self._config = config
            if self.fail is not None:
                error, self.fail = self.fail, None
                raise error
            return start(launcher, inputs, config, *rest)

        def start_kernel(recorder, kernel, grid, args, constants):
            compiled = Compiled(kernel.__name__, self._config, self.launches)
            compiled.note(args)
            recorder.launches.append(replay.Launch(compiled, (1, 1, 1), args))

        monkeypatch.setattr(launch, "_start", started)
        monkeypatch.setattr(launch, "_plans", {})
        monkeypatch.setattr(ready, "_ready", {})
        monkeypatch.setattr(replay.Recorder, "start", start_kernel)
        monkeypatch.setattr(replay.Plan, "stream", lambda plan: self.stream)
        monkeypatch.setattr(driver, "driver", lambda: None)
        monkeypatch.setattr(limits, "knows_gluon", lambda arch: False)  # the plain kernel's launches show pointers
        monkeypatch.setattr(interface, "on_gpu", lambda q: True)
        monkeypatch.setattr(interface, "current_device", lambda index: device_of_sku(sku))
        monkeypatch.setattr(ready, "current_device", lambda: -1)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream(device="cpu"))

    def last(self, kernel: str = "attn_fwd") -> Launched:
        """The latest launch of a kernel."""
        return next(x for x in reversed(self.launches) if x.kernel == kernel)


class FakeDriver:
    """Stands for libcuda: reads the parameters of a launch back as the kernel would, and moves tensor maps."""

    def __init__(self):
        self.launches: list[tuple] = []  # (grid, block, shared, stream, function, [bytes of each parameter])
        self.attributes: list[list[tuple[int, int]]] = []  # of each launch: ids of CUlaunchAttribute and their values
        self.sizes: dict[int, list[int]] = {}  # function -> bytes of each parameter
        self.encoded: list[tuple] = []
        self.status: list[int] = []  # to be returned by the next launches and moves of maps
        self.entered: list[int] = []

    def functions(self) -> driver.Driver:
        return driver.Driver(self.launch, self.encode, self.move, self.context, self.enter, self.name)

    def launch(self, config_pointer, function, parameters, extra) -> int:
        assert extra is None
        if self.status and (status := self.status.pop(0)):
            return status
        c, sizes = config_pointer._obj, self.sizes[function.value]
        assert len(parameters) == len(sizes)
        attributes = ctypes.cast(c.attributes, ctypes.POINTER(ctypes.c_uint * 18))  # an id, padding, 64 bytes of value
        self.attributes.append([(attributes[i][0], attributes[i][2]) for i in range(c.num_attributes)])
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(parameters, sizes, strict=True)]
        grid, block = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        self.launches.append((grid, block, c.shared, c.stream, function.value, values))
        return 0

    def encode(
        self, where, kind, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill
    ) -> int:
        ctypes.memmove(where, address.value.to_bytes(8, "little"), 8)  # the map's first word stands for its address
        self.encoded.append((ctypes.addressof(where), kind, rank, [*sizes], [*strides], [*box], [*steps], swizzle))
        return 0

    def move(self, pointer, address) -> int:
        if self.status and (status := self.status.pop(0)):
            return status
        ctypes.memmove(pointer.value, address.value.to_bytes(8, "little"), 8)
        return 0

    def context(self, pointer) -> int:
        pointer._obj.value = 4711
        return 0

    def enter(self, context) -> int:
        self.entered.append(context.value)
        return 0

    def name(self, status, pointer) -> int:
        pointer._obj.value = b"some error"
        return 0
