"""Recorded launches handed to the CUDA driver itself: one call of cuLaunchKernelEx each.

A compiled kernel launched through Triton parses all its arguments, constexprs included, again on every launch, and a
host tensor descriptor is built anew. Here the parameters of each launch lie packed in memory as the kernel reads them;
those that are addresses share one cell for each tensor of the call, so that a replay writes a few words and launches.
Tensor maps stay encoded; cuTensorMapReplaceAddress moves them when their tensor moved.

The parameters are those of Triton's own launchers (3.6 to 3.9): every argument that is no constexpr, a descriptor as
tensor map, sizes and strides, and two scratch pointers at the end. The kernel's PTX has the last word: where its entry
reads other sizes, or a launch asks for what is not packed here, packed() is None and Triton launches.
"""

import ctypes
import functools
import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_SCALARS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
_PARAM = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[ .\w]*? \w+(?:\[(\d+)\])?")
# CUtensorMapDataType of Triton's descriptor element types: as numbered by the device, but for the 16-bit floats.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}
_MAP_BYTES = 128
_L2_PROMOTION = 2  # of 128 bytes, as Triton's launchers ask for
_INVALID_CONTEXT = 201
_STREAM_SERIALISATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NOWHERE = -1

Place = tuple[int | None, int]  # (index of an input, 0), or (None, offset in the workspace)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding, and a union of 64 bytes, of which one int is used here."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class Driver(NamedTuple):
    """The functions of libcuda that replays call; each returns 0 or a CUresult."""

    launch: Callable[..., int]  # cuLaunchKernelEx(config, function, parameters, NULL)
    encode: Callable[..., int]  # cuTensorMapEncodeTiled
    move: Callable[..., int]  # cuTensorMapReplaceAddress(map, address)
    context: Callable[..., int]  # cuCtxGetCurrent(pointer to a context)
    enter: Callable[..., int]  # cuCtxSetCurrent(context)
    name: Callable[..., int]  # cuGetErrorString(CUresult, pointer to a text)


@functools.cache
def driver() -> Driver | None:
    """libcuda's functions; None where there are none (AMD, drivers before CUDA 12)."""
    if torch.version.hip:
        return None
    try:
        lib = ctypes.CDLL("libcuda.so.1")  # releases the GIL: a launch waits where the queue is full
        return Driver(
            lib.cuLaunchKernelEx, lib.cuTensorMapEncodeTiled, lib.cuTensorMapReplaceAddress, lib.cuCtxGetCurrent,
            lib.cuCtxSetCurrent, lib.cuGetErrorString,
        )  # fmt: skip
    except (OSError, AttributeError):
        return None


class _Launch(NamedTuple):
    """One launch, every part of it packed; the last three are held because the others point into them."""

    config_pointer: Any
    function: ctypes.c_void_p
    parameters: Any
    config: _LaunchConfig
    values: list
    compiled: Any


class _Map(NamedTuple):
    """A tensor map in a parameter, and the place of its tensor."""

    pointer: ctypes.c_void_p
    place: Place
    buffer: Any


class _Unpackable(Exception):
    """This launch asks for something that only Triton's launcher does."""


class Packed:
    """The launches of a plan in the form that the driver takes. Not for two threads at once."""

    def __init__(self, driver: Driver, launches: Sequence, inputs: int, place: Callable[[Any], Place]):
        self._driver, self._place = driver, place
        self._maps: list[_Map] = []
        parts = sorted({p for launch in launches for x in launch.args if (p := _place_of(x, place)) and p[0] is None})
        self._offsets = [(inputs + i, offset) for i, (_, offset) in enumerate(parts)]
        self._index = {p: inputs + i for i, p in enumerate(parts)} | {(i, 0): i for i in range(inputs)}
        self._cells = (ctypes.c_uint64 * max(1, len(self._index)))()
        self._write = struct.Struct(f"{inputs}Q").pack_into
        self._launches = [self._packed(launch, i > 0) for i, launch in enumerate(launches)]
        self._at = [_NOWHERE] * len(self._maps)  # where each tensor map points
        self._addresses: Sequence[int] = ()
        self._base = self._stream = _NOWHERE
        self._context = ctypes.c_void_p()
        self._check(driver.context(ctypes.byref(self._context)))

    def run(self, addresses: Sequence[int], stream: int, base: int) -> None:
        """Launches on a stream (a CUstream) with the addresses of the inputs and of the workspace."""
        if addresses != self._addresses or base != self._base:
            self._addresses, self._base = (), _NOWHERE  # an interrupt may leave them half moved
            self._move(addresses, base)
            self._addresses, self._base = addresses, base
        if stream != self._stream:
            self._stream = _NOWHERE
            for launch in self._launches:
                launch.config.stream = stream
            self._stream = stream
        start = self._driver.launch
        for config, function, parameters, *_ in self._launches:
            if status := start(config, function, parameters, None):
                self._again(status, start, config, function, parameters, None)

    def _move(self, addresses: Sequence[int], base: int) -> None:
        """Writes where the tensors of this run lie, and moves the tensor maps whose tensor moved."""
        self._write(self._cells, 0, *addresses)
        for cell, offset in self._offsets:
            self._cells[cell] = base + offset
        for i, (pointer, (source, offset), _) in enumerate(self._maps):
            address = base + offset if source is None else addresses[source]
            if address != self._at[i]:
                self._at[i] = _NOWHERE
                if status := self._driver.move(pointer, ctypes.c_void_p(address)):
                    self._again(status, self._driver.move, pointer, ctypes.c_void_p(address))
                self._at[i] = address

    def _again(self, status: int, function: Callable[..., int], *args) -> None:
        """A thread that has not used the GPU yet has no context: it enters the one of the recording."""
        if status == _INVALID_CONTEXT:
            self._check(self._driver.enter(self._context))
            status = function(*args)
        self._check(status)

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.name(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {status} in a replayed launch: {(text.value or b'').decode()}")

    def _packed(self, launch, follows: bool) -> _Launch:
        """follows: another launch of the plan, which this one may overlap if its kernel waits (rows.take_over).

        The first one overlaps nothing: what runs before it is not ours.
        """
        compiled, grid, args = launch
        metadata = compiled.metadata
        plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
        if metadata.target.backend != "cuda" or not plain or not math.prod(grid):
            raise _Unpackable
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise _Unpackable
        pointers, sizes, values = self._parameters(compiled, args)
        if sizes != _entry_sizes(compiled.asm["ptx"], metadata.name):
            raise _Unpackable
        num_warps, _, shared = compiled.packed_metadata
        config = _LaunchConfig(*grid, 32 * num_warps, 1, 1, shared)
        if follows and metadata.launch_pdl:
            early = _LaunchAttribute(_STREAM_SERIALISATION, 0, 1)
            config.attributes, config.num_attributes = ctypes.addressof(early), 1
            values.append(early)
        parameters = (ctypes.c_void_p * len(pointers))(*pointers)
        return _Launch(ctypes.byref(config), ctypes.c_void_p(compiled.function), parameters, config, values, compiled)

    def _parameters(self, compiled, args) -> tuple[list[int], list[int], list]:
        """(address, size in bytes) of each parameter, and what keeps their memory alive."""
        pointers, sizes, values = [], [], []
        descriptors = iter(compiled.metadata.tensordesc_meta or ())

        def add(value) -> None:
            pointers.append(ctypes.addressof(value))
            sizes.append(ctypes.sizeof(value))
            values.append(value)

        for kind, x in zip(compiled.src.signature.values(), args, strict=True):
            if kind == "constexpr":
                continue
            if kind[0] == "*":
                pointers.append(ctypes.addressof(self._cells) + 8 * self._index[self._place(x)])
                sizes.append(8)
            elif isinstance(kind, str) and kind.startswith("tensordesc"):
                add(self._map(x, next(descriptors, {})))
                for size in x.shape:
                    add(ctypes.c_int32(size))
                for stride in x.strides:
                    add(ctypes.c_int64(stride))
            elif kind in _SCALARS:
                add(_SCALARS[kind](x))
            else:
                raise _Unpackable
        for _ in range(2):  # scratch memory, which none of these kernels has
            add(ctypes.c_uint64(0))
        return pointers, sizes, values

    def _map(self, descriptor, meta: dict):
        """An encoded tensor map of a descriptor, 128-byte aligned."""
        if not meta or meta["fp4_padded"] or meta.get("is_im2col") or getattr(descriptor, "round_f32_to_tf32", False):
            raise _Unpackable
        memory = (ctypes.c_uint8 * (2 * _MAP_BYTES))()
        aligned = (ctypes.c_uint8 * _MAP_BYTES).from_buffer(memory, -ctypes.addressof(memory) % _MAP_BYTES)
        rank, size = len(descriptor.shape), meta["elem_size"]
        strides = [stride * size for stride in descriptor.strides[-2::-1]]
        self._check(
            self._driver.encode(
                aligned, _HOST_TYPES.get(meta["elem_type"], meta["elem_type"]), rank,
                ctypes.c_void_p(descriptor.base.data_ptr()), _array(ctypes.c_uint64, descriptor.shape[::-1]),
                _array(ctypes.c_uint64, strides), _array(ctypes.c_uint32, meta["block_size"][::-1]),
                _array(ctypes.c_uint32, [1] * rank), 0, meta["swizzle"], _L2_PROMOTION,
                int(descriptor.padding == "nan"),
            )
        )  # fmt: skip
        self._maps.append(_Map(ctypes.c_void_p(ctypes.addressof(aligned)), self._place(descriptor.base), aligned))
        return aligned


def _array(kind, values: Sequence[int]):
    return (kind * len(values))(*values)


def _place_of(x, place: Callable[[Any], Place]) -> Place | None:
    """Where an argument's cell gets its address from; None for numbers, None and descriptors."""
    return place(x) if isinstance(x, torch.Tensor) else None


def _entry_sizes(ptx: str, name: str) -> list[int]:
    """Bytes of each parameter that the kernel reads."""
    start = ptx.index(f".entry {name}(")
    return [int(bits) // 8 * int(n or 1) for bits, n in _PARAM.findall(ptx, start, ptx.index(")", start))]


def packed(launches: Sequence, inputs: int, place: Callable[[Any], Place]) -> Packed | None:
    """The launches (compiled kernel, three-dimensional grid, all arguments) packed; None where Triton must launch.

    inputs: how many addresses a run takes; place says where the address of a tensor argument comes from.
    """
    functions = driver()
    if functions is None:
        return None
    try:
        return Packed(functions, launches, inputs, place)
    except (_Unpackable, AttributeError, KeyError, ValueError, RuntimeError):  # another Triton has other kernels
        return None
