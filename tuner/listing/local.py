"""LDS instructions: reads and writes of all widths, transposed reads, and the two that only move lanes (ds_bpermute,
ds_swizzle).

After the LDS chapters of AMD's "CDNA3 Instruction Set Architecture" (2024) and, for ds_read_b64_tr, of "CDNA4
Instruction Set Architecture" (2025).
"""

import re
from collections.abc import Callable

import numpy as np

from .operands import Step, modifier_int, source, unknown, vector
from .parse import Instruction
from .state import LANES, Wave

U = np.uint32
_LANE = np.arange(LANES)


def _active(w: Wave) -> slice | np.ndarray:
    """Index of the active lanes; a slice copies less."""
    return slice(None) if w.full else w.mask


def _read(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    words = int(ins.op.removeprefix("ds_read_b")) // 32
    rows, address = vector(ins, ins.operands[0], words), source(ins, ins.operands[1], "u")
    offset = U(modifier_int(modifiers, "offset"))

    def step(w: Wave) -> None:
        lanes = _active(w)
        at = address(w)[lanes] + offset

        def finish() -> None:
            w.u[rows, lanes] = w.lds.read(at, words)

        w.finish("lgkmcnt", finish)

    return step


def _write(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    words = int(ins.op.removeprefix("ds_write_b")) // 32
    address, rows = source(ins, ins.operands[0], "u"), vector(ins, ins.operands[1], words)
    offset = U(modifier_int(modifiers, "offset"))

    def step(w: Wave) -> None:
        lanes = _active(w)
        at, data = address(w)[lanes] + offset, w.u[rows, lanes].copy()
        w.finish("lgkmcnt", lambda: w.lds.write(at, data))

    return step


def _two(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """ds_read2, ds_write2 and their st64 forms: two places, offsets in elements or in 64 elements."""
    match = re.fullmatch(r"ds_(read|write)2(st64)?_b(32|64)", ins.op)
    assert match is not None
    words = int(match[3]) // 32
    unit = 4 * words * (64 if match[2] else 1)
    offsets = [U(modifier_int(modifiers, name) * unit) for name in ("offset0", "offset1")]
    if match[1] == "read":
        both, address = vector(ins, ins.operands[0], 2 * words), source(ins, ins.operands[1], "u")
        parts = [slice(both.start + n * words, both.start + (n + 1) * words) for n in (0, 1)]
    else:
        address = source(ins, ins.operands[0], "u")
        parts = [vector(ins, text, words) for text in ins.operands[1:]]

    def read(w: Wave) -> None:
        lanes = _active(w)
        base = address(w)[lanes].copy()  # the destination may hold the address

        def finish() -> None:
            for rows, offset in zip(parts, offsets, strict=True):
                w.u[rows, lanes] = w.lds.read(base + offset, words)

        w.finish("lgkmcnt", finish)

    def write(w: Wave) -> None:
        lanes = _active(w)
        base, data = address(w)[lanes].copy(), [w.u[rows, lanes].copy() for rows in parts]

        def finish() -> None:
            for words, offset in zip(data, offsets, strict=True):
                w.lds.write(base + offset, words)

        w.finish("lgkmcnt", finish)

    return read if match[1] == "read" else write


def _write_small(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """ds_write_b8, ds_write_b16, and with _d16_hi the same of the upper half."""
    count = int(ins.op.removeprefix("ds_write_b").split("_")[0]) // 8
    shift = U(16 if ins.op.endswith("_d16_hi") else 0)
    address, data = source(ins, ins.operands[0], "u"), source(ins, ins.operands[1], "u")
    offset = U(modifier_int(modifiers, "offset"))

    def step(w: Wave) -> None:
        lanes = _active(w)
        at, value = address(w)[lanes] + offset, data(w)[lanes] >> shift
        w.finish("lgkmcnt", lambda: w.lds.write_small(at, value, count))

    return step


def _read_small(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """ds_read_u8, u16 (zero-extended), and with _d16 or _d16_hi into one half of the register."""
    match = re.fullmatch(r"ds_read_u(8|16)(_d16|_d16_hi)?", ins.op)
    assert match is not None
    count, half = int(match[1]) // 8, match[2]
    row, address = vector(ins, ins.operands[0], 1).start, source(ins, ins.operands[1], "u")
    offset = U(modifier_int(modifiers, "offset"))

    def step(w: Wave) -> None:
        lanes = _active(w)
        at = address(w)[lanes] + offset

        def finish() -> None:
            value, old = w.lds.read_small(at, count), w.u[row, lanes]
            if half == "_d16":
                value = value | old & U(0xFFFF0000)
            elif half:
                value = value << U(16) | old & U(0xFFFF)
            w.u[row, lanes] = value

        w.finish("lgkmcnt", finish)

    return step


def _read_transposed(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """ds_read_b64_tr_b16 and _b8: every 16 lanes read a matrix of 16 columns by rows and get it by columns.

    The lanes' 64-bit pieces, one after another, are the rows of that matrix: 4 rows of 16 half words, or 8 rows of 16
    bytes. Lane n gets column n.
    """
    dtype, rows_read = (np.uint16, 4) if ins.op.endswith("b16") else (np.uint8, 8)
    rows, address = vector(ins, ins.operands[0], 2), source(ins, ins.operands[1], "u")
    offset = U(modifier_int(modifiers, "offset"))

    def step(w: Wave) -> None:
        if not w.full:
            raise unknown(ins, "a transposed read with inactive lanes")
        at = address(w) + offset

        def finish() -> None:
            words = w.lds.read(at, 2)
            matrix = np.ascontiguousarray(words.T).view(dtype).reshape(4, rows_read, 16)
            columns = np.ascontiguousarray(matrix.transpose(0, 2, 1)).reshape(LANES, rows_read)
            w.u[rows] = columns.view(U).T

        w.finish("lgkmcnt", finish)

    return step


def _bpermute(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Each lane fetches the register of the lane at address / 4; 0 where that one is inactive."""
    to, address, data = ins.operands
    row, read_address, read = vector(ins, to, 1).start, source(ins, address, "u"), source(ins, data, "u")
    offset = U(modifier_int(modifiers, "offset"))

    def step(w: Wave) -> None:
        lanes = ((read_address(w) + offset) >> U(2)) % LANES
        value, mask = np.where(w.mask[lanes], read(w)[lanes], U(0)), w.mask
        w.finish("lgkmcnt", lambda: np.copyto(w.u[row], value, where=mask))

    return step


def _swizzle(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """ds_swizzle_b32 with swizzle(SWAP,n): neighbouring groups of n lanes change places."""
    match = re.fullmatch(r"swizzle\(SWAP,(\d+)\)", str(modifiers.pop("offset", "")))
    if not match:
        raise unknown(ins, "this pattern")
    row, read = vector(ins, ins.operands[0], 1).start, source(ins, ins.operands[1], "u")
    lanes = _LANE ^ int(match[1])

    def step(w: Wave) -> None:
        value, mask = np.where(w.mask[lanes], read(w)[lanes], U(0)), w.mask
        w.finish("lgkmcnt", lambda: np.copyto(w.u[row], value, where=mask))

    return step


BUILDERS: dict[str, Callable] = {
    name: builder
    for names, builder in (
        ([f"ds_read_b{n}" for n in (32, 64, 96, 128)], _read),
        ([f"ds_write_b{n}" for n in (32, 64, 96, 128)], _write),
        ([f"ds_{op}2{st}_b{n}" for op in ("read", "write") for st in ("", "st64") for n in (32, 64)], _two),
        ([f"ds_write_b{n}{hi}" for n in (8, 16) for hi in ("", "_d16_hi")], _write_small),
        ([f"ds_read_u{n}{half}" for n in (8, 16) for half in ("", "_d16", "_d16_hi")], _read_small),
        (["ds_read_b64_tr_b16", "ds_read_b64_tr_b8"], _read_transposed),
        (["ds_bpermute_b32"], _bpermute),
        (["ds_swizzle_b32"], _swizzle),
    )
    for name in names
}
