"""Global memory: host buffers at made-up addresses, and the instructions that reach them.

Every buffer has 64 GiB of addresses to itself, far more than a 32-bit offset can leave, so an access outside of it hits
nothing and raises. After the MUBUF, FLAT and SMEM chapters of AMD's "CDNA3 Instruction Set Architecture" (2024); loads
of 16 bytes a lane into LDS after "CDNA4 Instruction Set Architecture" (2025).
"""

import re
from collections.abc import Callable

import numpy as np

from .operands import Reader, Step, flag, modifier_int, register, scalar, source, unknown, vector
from .parse import Instruction, ListingError
from .state import LANES, M0, Wave

U = np.uint32
_SHIFT = 36  # log2 of the addresses that one buffer has to itself
# Word 3 of a buffer descriptor as Triton writes it: 32-bit data format, no swizzle. Others are not known.
_WORD3 = 0x27000


class Memory:
    """Host buffers by address. place() returns the address; the kernel then reads and writes the buffer itself."""

    def __init__(self):
        self._buffers: dict[int, tuple[np.ndarray, int]] = {}

    def place(self, buffer: np.ndarray, low_bits: int = 0) -> int:
        """The address of a contiguous uint8 array, equal to low_bits modulo 256."""
        number = len(self._buffers) + 1
        base = (number << _SHIFT) + low_bits % 256
        self._buffers[number] = buffer, base
        return base

    def _find(self, address: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The buffer that all addresses lie in, and int64 byte offsets; raises ListingError outside of it."""
        number = int(address[0]) >> _SHIFT
        if number not in self._buffers:
            raise ListingError(f"no buffer at {int(address[0]):#x}")
        buffer, base = self._buffers[number]
        offset = (address - np.uint64(base)).astype(np.int64)
        low, high = int(offset.min()), int(offset.max()) + count
        if low < 0 or high > buffer.size:
            raise ListingError(f"access to bytes {low}..{high} of buffer {number}, which has {buffer.size}")
        return buffer, offset

    def read(self, address: np.ndarray, count: int) -> np.ndarray:
        """uint8 (lanes, count) from uint64 addresses."""
        if not address.size:
            return np.zeros((0, count), np.uint8)
        buffer, offset = self._find(address, count)
        return buffer[offset[:, None] + np.arange(count)]

    def write(self, address: np.ndarray, value: np.ndarray) -> None:
        """value: uint8 (lanes, count); a later lane wins over an earlier one."""
        if address.size:
            buffer, offset = self._find(address, value.shape[1])
            buffer[offset[:, None] + np.arange(value.shape[1])] = value

    def read_scalar(self, address: int, words: int) -> list[int]:
        return self.read(np.array([address & ~3], np.uint64), 4 * words).view(U)[0].tolist()


# --- widths ----------------------------------------------------------------------------------------------------------

_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}
_OP = re.compile(r"(buffer|global)_(load|store)_(ubyte|sbyte|byte|ushort|sshort|short|dword)(x2|x3|x4)?(_d16)?(_hi)?$")


def _width(ins: Instruction) -> tuple[int, int]:
    """(bytes of a lane, registers)."""
    match = _OP.match(ins.op)
    assert match is not None
    count = _BYTES[match[3]] * int((match[4] or "x1")[1:])
    return count, -(-count // 4)


def _to_words(ins: Instruction, data: np.ndarray, old: np.ndarray) -> np.ndarray:
    """uint32 (registers, lanes) of loaded bytes; d16 loads keep the other half of what was there."""
    if data.shape[1] >= 4:
        return np.ascontiguousarray(data).view(U).T
    if "sbyte" in ins.op or "sshort" in ins.op:
        dtype = np.int8 if data.shape[1] == 1 else np.int16
        value = np.ascontiguousarray(data).view(dtype)[:, 0].astype(np.int32).view(U)
    else:
        value = np.pad(data, ((0, 0), (0, 4 - data.shape[1]))).view(U)[:, 0]
    if ins.op.endswith("d16_hi"):
        return (value << U(16) | old[0] & U(0xFFFF))[None]
    if ins.op.endswith("d16"):
        return (value & U(0xFFFF) | old[0] & U(0xFFFF0000))[None]
    return value[None]


def _to_bytes(ins: Instruction, words: np.ndarray, count: int) -> np.ndarray:
    """uint8 (lanes, count) of the registers that are stored."""
    if ins.op.endswith("d16_hi"):
        words = words >> U(16)
    return np.ascontiguousarray(words.T).view(np.uint8)[:, :count]


# --- buffers ---------------------------------------------------------------------------------------------------------


def _resource(ins: Instruction, text: str) -> Callable[[Wave], tuple[int, int]]:
    """(base address, bytes) of a buffer descriptor; raises on strides, swizzles and other formats."""
    reg = register(text)
    if reg is None or reg.bank != "s" or reg.width != 4:
        raise unknown(ins, f"resource {text}")
    n = reg.first

    def read(w: Wave) -> tuple[int, int]:
        low, high, records, word3 = w.s[n : n + 4]
        if high >> 16 or word3 != _WORD3:
            raise unknown(ins, f"a buffer descriptor of words {high:#x}, {word3:#x}")
        return low | high << 32, records

    return read


def _buffer_address(
    ins: Instruction, modifiers: dict, texts: tuple[str, ...], count: int
) -> Callable[[Wave], tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """(active lanes inside of the range, their uint64 addresses) of vaddr, srsrc, soffset and the modifiers."""
    vaddr, srsrc, soffset = texts
    if (modifiers.pop("offen", False) is True) != (vaddr != "off") or "idxen" in modifiers:
        raise unknown(ins, "this addressing")
    immediate = modifier_int(modifiers, "offset")
    flag(modifiers, "sc0", "sc1", "nt")
    resource, start = _resource(ins, srsrc), scalar(ins, soffset)
    offsets: Reader = (lambda w: np.zeros(LANES, U)) if vaddr == "off" else source(ins, vaddr, "u")

    def place(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        (base, records), first = resource(w), start(w)
        offset = offsets(w).astype(np.int64) + immediate
        lanes = np.flatnonzero(w.mask & _in_range(np.where(w.mask, offset, records), first, records, count))
        return lanes, (offset[lanes] + first + base).astype(np.uint64)

    return place


def _in_range(offset: np.ndarray, soffset: int, records: int, count: int) -> np.ndarray:
    """Lanes whose access lies inside of the descriptor's range; others load 0 and store nothing.

    Hardware decides for each dword; an access that is cut by the end of the range would read one half, and raises.
    """
    inside = offset < records - soffset
    if (inside & (offset + count > records - soffset)).any():
        raise ListingError(f"an access of {count} bytes across the end of a buffer of {records}")
    return inside


def _buffer(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    if modifiers.pop("lds", False):
        return _buffer_to_lds(ins, modifiers)
    count, registers = _width(ins)
    data, *texts = ins.operands
    place, rows = _buffer_address(ins, modifiers, tuple(texts), count), vector(ins, data, registers)

    def load(w: Wave) -> None:
        (lanes, address), mask = place(w), w.mask

        def finish() -> None:
            value = np.zeros((LANES, count), np.uint8)
            value[lanes] = w.memory.read(address, count)
            np.copyto(w.u[rows], _to_words(ins, value, w.u[rows]), where=mask)

        w.finish("vmcnt", finish)

    def store(w: Wave) -> None:
        lanes, address = place(w)
        data = _to_bytes(ins, w.u[rows][:, lanes], count)
        w.finish("vmcnt", lambda: w.memory.write(address, data))

    return load if "_load_" in ins.op else store


def _buffer_to_lds(ins: Instruction, modifiers: dict) -> Step:
    """Lane n's bytes go to LDS at M0 + offset + n times the width; lanes outside of the range write zeros."""
    count = 4 * int(ins.op.removeprefix("buffer_load_dword").lstrip("x") or 1)
    immediate = modifier_int(dict(modifiers), "offset")
    place = _buffer_address(ins, modifiers, ins.operands, count)

    def step(w: Wave) -> None:
        (lanes, address), mask = place(w), w.mask
        to = np.flatnonzero(mask) * count + w.s[M0] + immediate

        def finish() -> None:
            value = np.zeros((LANES, count), np.uint8)
            value[lanes] = w.memory.read(address, count)
            w.lds.write(to.astype(U), value.view(U)[mask].T)

        w.finish("vmcnt", finish)

    return step


# --- global ----------------------------------------------------------------------------------------------------------


def _global_address(ins: Instruction, modifiers: dict, address: str, base: str) -> Callable[[Wave], np.ndarray]:
    """uint64 addresses: 64 bits of a lane, or a 32-bit offset of a lane from a scalar base."""
    immediate = modifier_int(modifiers, "offset")
    flag(modifiers, "sc0", "sc1", "nt")
    if base == "off":
        wide = source(ins, address, "q")
        return lambda w: (wide(w).astype(np.int64) + immediate).astype(np.uint64)
    offset, start = source(ins, address, "u"), scalar(ins, base, 2)
    return lambda w: (np.broadcast_to(offset(w), LANES).astype(np.int64) + start(w) + immediate).astype(np.uint64)


def _global(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    count, registers = _width(ins)
    if "_load_" in ins.op:
        data, address, base = ins.operands
    else:
        address, data, base = ins.operands
    addresses, rows = _global_address(ins, modifiers, address, base), vector(ins, data, registers)

    def load(w: Wave) -> None:
        lanes = np.flatnonzero(w.mask)
        at = addresses(w)[lanes]

        def finish() -> None:
            w.u[rows, lanes] = _to_words(ins, w.memory.read(at, count), w.u[rows][:, lanes])

        w.finish("vmcnt", finish)

    def store(w: Wave) -> None:
        lanes = np.flatnonzero(w.mask)
        at, value = addresses(w)[lanes], _to_bytes(ins, w.u[rows][:, lanes], count)
        w.finish("vmcnt", lambda: w.memory.write(at, value))

    return load if "_load_" in ins.op else store


def _scratch(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Spilled registers: a private word of each lane at a constant offset."""
    words = int(ins.op.partition("dwordx")[2] or 1)
    data, *address = (ins.operands[1], ins.operands[0], ins.operands[2]) if "_store_" in ins.op else ins.operands
    if address != ["off", "off"]:
        raise unknown(ins, f"address {address}")
    rows, first = vector(ins, data, words), modifier_int(modifiers, "offset") // 4
    place = slice(first, first + words)

    def load(w: Wave) -> None:
        mask = w.mask
        w.finish("vmcnt", lambda: np.copyto(w.u[rows], w.scratch[place], where=mask))

    def store(w: Wave) -> None:
        mask, value = w.mask, w.u[rows].copy()
        w.finish("vmcnt", lambda: np.copyto(w.scratch[place], value, where=mask))

    return load if "_load_" in ins.op else store


_LOADS = ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4")
_HALVES = ("ubyte_d16", "ubyte_d16_hi", "short_d16", "short_d16_hi")
_STORES = ("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4", "byte_d16_hi", "short_d16_hi")
BUILDERS: dict[str, Callable] = {
    f"{space}_{way}_{width}": builder
    for space, builder in (("buffer", _buffer), ("global", _global))
    for way, widths in (("load", (*_LOADS, *_HALVES)), ("store", _STORES))
    for width in widths
} | {f"scratch_{way}_dword{n}": _scratch for way in ("load", "store") for n in ("", "x2", "x3", "x4")}
