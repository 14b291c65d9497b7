"""From operand text to functions that read it from a wave or write it there.

Readers of kind
    "f", "u", "i"  a vector source as fp32, uint32, int32: shape (64,), or a numpy scalar
    "b"            32 bits of a vector source that may carry float signs (-v1, |v1|): uint32
    "F"            a packed pair of fp32 in two registers: (2, 64) or what broadcasts to it
    "q"            a 64-bit integer in two registers: uint64 (64,)
    "m"            a lane mask in a scalar pair: bool (64,)
Writers of kind "f", "u", "i", "F", "q" obey EXEC; "m" clears the bits of inactive lanes, as v_cmp does.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .parse import Instruction, UnknownInstruction
from .state import EXEC, M0, VCC, Wave, bits_of, mask_of

Step = Callable[[Wave], int | None]
Reader = Callable[[Wave], Any]  # an array or a numpy scalar, which mypy keeps apart
_SPECIAL = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0, "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1}
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])$")
_DTYPES = {"u": np.uint32, "b": np.uint32, "i": np.int32, "f": np.float32}


class Register(NamedTuple):
    """bank "v" (AGPRs from 256 on) or "s", first register, how many of them."""

    bank: str
    first: int
    width: int


def unknown(ins: Instruction, what: str) -> UnknownInstruction:
    return UnknownInstruction(f"line {ins.number}: no model of {what} in `{ins.text}`")


def register(text: str) -> Register | None:
    """The register that an operand names, None for a constant."""
    if text in _SPECIAL:
        return Register("s", _SPECIAL[text], 2 if text in ("vcc", "exec") else 1)
    match = _REGISTER.match(text)
    if not match:
        return None
    bank, one, lo, hi = match.groups()
    first = int(one if one is not None else lo)
    count = 1 if one is not None else int(hi) - first + 1
    return Register("s" if bank == "s" else "v", first + 256 * (bank == "a"), count)


def vector(ins: Instruction, text: str, count: int | None = None) -> slice:
    """The rows of a VGPR or AGPR operand; raises UnknownInstruction on anything else."""
    reg = register(text)
    if reg is None or reg.bank != "v" or (count is not None and reg.width != count):
        raise unknown(ins, f"operand {text}")
    return slice(reg.first, reg.first + reg.width)


def constant(ins: Instruction, text: str) -> int:
    """A literal or inline constant as 32 bits: hexadecimal as it stands, integers, floats as fp32."""
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return int(text, 0) & 0xFFFFFFFF
    if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text):
        return int(np.float32(float(text)).view(np.uint32))
    raise unknown(ins, f"operand {text}")


# --- scalar ----------------------------------------------------------------------------------------------------------


def scalar(ins: Instruction, text: str, count: int = 1) -> Callable[[Wave], int]:
    """Reads 32 bits, or 64 (count 2), as an unsigned integer."""
    reg = register(text)
    if reg is None:
        value = constant(ins, text)
        if count == 2 and text.startswith("-"):  # inline integers are sign-extended, literals zero-extended
            value |= 0xFFFFFFFF << 32
        return lambda w: value
    if reg.bank != "s" or reg.width != count:
        raise unknown(ins, f"operand {text}")
    n = reg.first
    return (lambda w: w.s[n]) if count == 1 else (lambda w: w.s[n] | w.s[n + 1] << 32)


def scalar_target(ins: Instruction, text: str, count: int = 1) -> int:
    reg = register(text)
    if reg is None or reg.bank != "s" or reg.width != count:
        raise unknown(ins, f"destination {text}")
    return reg.first


# --- vector sources --------------------------------------------------------------------------------------------------


def _signs(text: str) -> tuple[str, bool, bool]:
    """(operand without signs, absolute, negative)."""
    negative = bool(re.match(r"-[|vsa(]", text))
    text = text[negative:]
    absolute = text.startswith("|")
    return text.strip("|"), absolute, negative


def _plain(ins: Instruction, text: str, kind: str) -> Reader:
    """A 32-bit source without signs."""
    reg = register(text)
    dtype = _DTYPES[kind]
    if reg is None:
        value = np.uint32(constant(ins, text)).view(dtype)
        return lambda w: value
    n = reg.first
    if reg.width != 1:
        raise unknown(ins, f"operand {text}")
    if reg.bank == "s":
        return lambda w: np.uint32(w.s[n]).view(dtype)
    if kind == "f":
        return lambda w: w.f[n]
    return (lambda w: w.i[n]) if kind == "i" else (lambda w: w.u[n])


def source(ins: Instruction, text: str, kind: str) -> Reader:
    """The reader of one vector source, see the kinds above."""
    if kind == "m":
        n = scalar_target(ins, text, 2)
        return lambda w: mask_of(w.s[n] | w.s[n + 1] << 32)
    if kind == "q":
        return _wide(ins, text)
    bare, absolute, negative = _signs(text)
    if not (absolute or negative):
        return _plain(ins, text, kind)
    if kind not in "fb":
        raise unknown(ins, f"the sign of {text}")
    read = _plain(ins, bare, "f")
    if absolute and negative:
        signed = lambda w: -np.abs(read(w))  # noqa: E731
    else:
        sign = np.abs if absolute else np.negative
        signed = lambda w: sign(read(w))  # noqa: E731
    return signed if kind == "f" else lambda w: signed(w).view(np.uint32)


def _wide(ins: Instruction, text: str) -> Reader:
    reg = register(text)
    if reg is None:
        read = scalar(ins, text, 2)
        return lambda w: np.uint64(read(w))
    if reg.width != 2:
        raise unknown(ins, f"operand {text}")
    n = reg.first
    if reg.bank == "s":
        return lambda w: np.uint64(w.s[n] | w.s[n + 1] << 32)
    return lambda w: w.u[n].astype(np.uint64) | w.u[n + 1].astype(np.uint64) << np.uint64(32)


def packed(ins: Instruction, text: str, halves: tuple[int, int], negate: tuple[int, int]) -> Reader:
    """A packed fp32 source: halves says which register of the pair feeds the low and the high result."""
    reg = register(text)
    sign = np.array([[-1.0 if n else 1.0] for n in negate], np.float32)
    if reg is None or reg.width != 2:
        if reg is not None or halves != (0, 0):
            raise unknown(ins, f"operand {text} of halves {halves}")
        value = np.uint32(constant(ins, text)).view(np.float32) * sign
        return lambda w: value
    rows = [reg.first + half for half in halves]
    if reg.bank == "s":
        return lambda w: np.array([[w.s[n]] for n in rows], np.uint32).view(np.float32) * sign
    natural = slice(rows[0], rows[0] + 2) if halves == (0, 1) else rows
    return (lambda w: w.f[natural] * sign) if any(negate) else (lambda w: w.f[natural])


# --- destinations ----------------------------------------------------------------------------------------------------


def target(ins: Instruction, text: str, kind: str) -> Callable[[Wave, np.ndarray], None]:
    """The writer of one destination, see the kinds above."""
    if kind == "m":
        n = scalar_target(ins, text, 2)
        return lambda w, value: w.set_scalar64(n, bits_of(value & w.mask))
    span = vector(ins, text, 2 if kind in "Fq" else 1)
    rows = span if kind in "Fq" else span.start

    def put(w: Wave, value) -> None:
        if kind == "q":
            value = np.broadcast_to(value, 64)  # a scalar pair has one number for all lanes
            value = np.stack([value & np.uint64(0xFFFFFFFF), value >> np.uint64(32)]).astype(np.uint32)
            value = value.reshape(2, -1)  # one column where all lanes get the same
        bank = w.f if kind in "fF" else w.i if kind == "i" else w.u
        if w.full:
            bank[rows] = value
        else:
            np.copyto(bank[rows], value, where=w.mask)

    return put


def modifier_list(ins: Instruction, modifiers: dict, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Takes a modifier like op_sel_hi:[1,0] out of modifiers."""
    value = modifiers.pop(name, None)
    if value is None:
        return default
    if value is True or not re.fullmatch(r"\[[01](,[01])*\]", value):
        raise unknown(ins, f"{name}:{value}")
    return tuple(int(bit) for bit in value.strip("[]").split(","))


def modifier_int(modifiers: dict, name: str, default: int = 0) -> int:
    return int(str(modifiers.pop(name, default)), 0)


def flag(modifiers: dict, *names: str) -> None:
    """Drops modifiers that change no value: cache policies."""
    for name in names:
        modifiers.pop(name, None)
