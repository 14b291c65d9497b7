"""Matrix instructions D = A B + C of one wave, and the conversions that feed them FP8.

Register layout, after the chapter on matrix instructions of AMD's "CDNA3 Instruction Set Architecture" (2024), that of
"CDNA4 Instruction Set Architecture" (2025) and AMD's matrix instruction calculator: with M rows (32 or 16),
    A  lane l holds row l % M and M K / 64 values of k, the (l // M)-th such part; B the same of its column.
       f8f6f4: 16 values of the lower half of k and 16 of the upper one, each the (l // M)-th such part of its half
    D  lane l holds column l % M; its register r holds row 8 (r // 4) + 4 (l // 32) + r % 4 if M is 32,
       row 4 (l // 16) + r if M is 16
How k is spread over the lanes of a row matters to scales only, since A and B share it. Products and their sum are taken
in fp64 and rounded to fp32 once, after C is added: hardware rounds more often, in an order that AMD does not state.
"""

import re
from collections.abc import Callable

import numpy as np

from .floats import E4M3, E5M2, from_bf16, to_e4m3
from .operands import Reader, Step, constant, modifier_int, modifier_list, register, source, unknown, vector
from .parse import Instruction
from .state import FP16_OVFL, LANES, Wave

# Element type by the end of the opcode: (bytes, decoder of an array of unsigned elements to fp64).
_DECODERS: dict[str, tuple[int, Callable]] = {
    "bf16": (2, lambda x: from_bf16(x).astype(np.float64)),
    "f16": (2, lambda x: x.view(np.float16).astype(np.float64)),
    "fp8": (1, E4M3.__getitem__),
    "bf8": (1, E5M2.__getitem__),
    "i8": (1, lambda x: x.view(np.int8).astype(np.float64)),
}
# "cbsz" and "blgp" of the f8f6f4 instructions: the formats of A and B.
_F8F6F4 = {0: "fp8", 1: "bf8"}
_NAME = re.compile(r"v_mfma_(?:scale_)?(f32|i32)_(32x32|16x16)x(\d+)_(bf16|f16|i8|fp8_fp8|f8f6f4)$")


def _formats(ins: Instruction, modifiers: dict, kind: str) -> tuple[str, str]:
    if kind == "f8f6f4":
        codes = modifier_int(modifiers, "cbsz"), modifier_int(modifiers, "blgp")
        if not set(codes) <= set(_F8F6F4):
            raise unknown(ins, f"formats cbsz:{codes[0]} blgp:{codes[1]}")
        return _F8F6F4[codes[0]], _F8F6F4[codes[1]]
    kind = kind.removesuffix("_fp8")
    return kind, kind


def operand_matrix(words: np.ndarray, rows: int, kind: str, pieces: int = 1) -> np.ndarray:
    """A (rows, k) or B transposed, fp64, from the (registers, 64) words of an operand; pieces of k in a lane."""
    size, decode = _DECODERS[kind]
    elements = np.ascontiguousarray(words.T).view(np.uint8 if size == 1 else np.uint16)  # (64, elements of a lane)
    values = decode(elements).reshape(LANES // rows, rows, pieces, -1)
    return values.transpose(1, 2, 0, 3).reshape(rows, -1)


def to_registers(d: np.ndarray) -> np.ndarray:
    """(registers, 64) of a (rows, columns) result."""
    if len(d) == 32:
        return d.reshape(4, 2, 4, 32).transpose(0, 2, 1, 3).reshape(16, LANES)
    return d.reshape(4, 4, 16).transpose(1, 0, 2).reshape(4, LANES)


def from_registers(words: np.ndarray) -> np.ndarray:
    """Inverse of to_registers."""
    if len(words) == 16:
        return words.reshape(4, 4, 2, 32).transpose(0, 2, 1, 3).reshape(32, 32)
    return words.reshape(4, 4, 16).transpose(1, 0, 2).reshape(16, 16)


def _addend(ins: Instruction, text: str, count: int, bank: str) -> Reader:
    """C as a matrix, in fp64."""
    if register(text) is None:
        value = np.uint32(constant(ins, text)).view(np.float32 if bank == "f" else np.int32).astype(np.float64)
        return lambda w: value
    rows = vector(ins, text, count)
    return lambda w: from_registers((w.f if bank == "f" else w.i)[rows]).astype(np.float64)


def _scales(ins: Instruction, modifiers: dict, texts: list[str], rows: int) -> list[Reader]:
    """Powers of two for A and B, (rows, k / 32): lane l scales 32 values of row l % M, those from 32 (l // M) on.

    They are a byte of its register, a biased exponent (E8M0, 255 is NaN); op_sel and op_sel_hi are the low and the high
    bit of the byte's number.
    """
    if "op_sel_hi" not in modifiers:
        raise unknown(ins, "a missing op_sel_hi")
    low = modifier_list(ins, modifiers, "op_sel", (0, 0, 0))
    high = modifier_list(ins, modifiers, "op_sel_hi", (0, 0, 0))

    def reader(text: str, byte: int) -> Reader:
        read, shift = source(ins, text, "u"), np.uint32(8 * byte)

        def scales(w: Wave) -> np.ndarray:
            code = np.broadcast_to(read(w), LANES) >> shift & np.uint32(0xFF)
            value = np.where(code == 0xFF, np.nan, np.ldexp(1.0, code.astype(np.int64) - 127))
            return value.reshape(-1, rows).T

        return scales

    return [reader(text, low[n] + 2 * high[n]) for n, text in enumerate(texts)]


def _mfma(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    match = _NAME.match(ins.op)
    assert match is not None
    bank, rows, k, kind = match[1][0], int(match[2][:2]), int(match[3]), match[4]
    formats = _formats(ins, modifiers, kind)
    counts = [rows * k // LANES * _DECODERS[f][0] // 4 for f in formats]
    to, left_text, right_text, c, *scale_texts = ins.operands
    a, b = vector(ins, left_text, counts[0]), vector(ins, right_text, counts[1])
    if len(scale_texts) != (2 if "_scale_" in ins.op else 0):
        raise unknown(ins, f"{len(ins.operands)} operands")
    scales = _scales(ins, modifiers, scale_texts, rows) if scale_texts else []
    pieces, count = 2 if kind == "f8f6f4" else 1, rows * rows // LANES
    put, addend = vector(ins, to, count), _addend(ins, c, count, bank)

    def step(w: Wave) -> None:
        left, right = operand_matrix(w.u[a], rows, formats[0], pieces), operand_matrix(w.u[b], rows, formats[1], pieces)
        if scales:
            left, right = (m * np.repeat(s(w), 32, axis=1) for m, s in zip((left, right), scales, strict=True))
        total = left @ right.T + addend(w)
        if bank == "f":
            w.f[put] = to_registers(np.broadcast_to(total.astype(np.float32), (rows, rows)))
        else:
            w.i[put] = to_registers(total.astype(np.int64).astype(np.int32))

    return step


_OPCODES = [
    f"v_mfma_{bank}_{shape}_{kind}"
    for bank, shape, kinds in (
        ("f32", "32x32x16", ("bf16", "f16", "fp8_fp8")),
        ("f32", "16x16x32", ("bf16", "f16", "fp8_fp8")),
        ("f32", "32x32x8", ("bf16", "f16")),
        ("f32", "16x16x16", ("bf16", "f16")),
        ("f32", "32x32x64", ("f8f6f4",)),
        ("f32", "16x16x128", ("f8f6f4",)),
        ("scale_f32", "32x32x64", ("f8f6f4",)),
        ("scale_f32", "16x16x128", ("f8f6f4",)),
        ("i32", "32x32x32", ("i8",)),
        ("i32", "16x16x64", ("i8",)),
        ("i32", "32x32x16", ("i8",)),
        ("i32", "16x16x32", ("i8",)),
    )
    for kind in kinds
]


# --- conversions to FP8 ----------------------------------------------------------------------------------------------


def _convert_fp8(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Two fp32 to E4M3 in one half of a register, the other half kept: op_sel's last bit chooses the upper one."""
    to, a, b, scale = ins.operands
    if scale != "1.0":
        raise unknown(ins, f"a scale of {scale}")
    select = modifier_list(ins, modifiers, "op_sel", (0,))
    if any(select[:-1]):
        raise unknown(ins, f"op_sel {select}")
    row, upper = vector(ins, to, 1).start, select[-1]
    read_a, read_b = source(ins, a, "f"), source(ins, b, "f")

    def step(w: Wave) -> None:
        saturate = bool(w.mode & FP16_OVFL)
        x, y = (np.where(w.mask, read(w), np.float32(0)) for read in (read_a, read_b))
        pair = to_e4m3(x, saturate) | to_e4m3(y, saturate) << np.uint32(8)
        old = w.u[row]
        new = old & np.uint32(0xFFFF) | pair << np.uint32(16) if upper else old & np.uint32(0xFFFF0000) | pair
        np.copyto(old, new, where=w.mask)

    return step


BUILDERS: dict[str, Callable] = dict.fromkeys(_OPCODES, _mfma) | {"v_cvt_scalef32_pk_fp8_f32": _convert_fp8}
