"""Scalar instructions: integer arithmetic with SCC, compares, branches, kernel arguments, the MODE register.

After the SOP1, SOP2, SOPC, SOPK, SOPP and SMEM chapters of AMD's "CDNA3 Instruction Set Architecture" (2024).
"""

import operator
import re
from collections.abc import Callable

from .operands import Step, constant, flag, register, scalar, scalar_target, unknown
from .parse import Instruction
from .state import EXEC, VCC, Wave

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
BARRIER, END = -1, -2  # what a step returns besides the index of the next instruction


def signed(x: int) -> int:
    return x - ((x & 0x80000000) << 1)


# --- arithmetic: name -> (bits of destination, bits of the sources, function, how SCC is set) -------------------------
# "" leaves SCC alone, "nonzero" is result != 0; functions that set SCC themselves return (result, scc).


def _add_i32(a: int, b: int) -> tuple[int, int]:
    total = signed(a) + signed(b)
    return total & MASK32, int(not -(2**31) <= total < 2**31)


def _sub_i32(a: int, b: int) -> tuple[int, int]:
    total = signed(a) - signed(b)
    return total & MASK32, int(not -(2**31) <= total < 2**31)


def _carry(total: int) -> tuple[int, int]:
    return total & MASK32, int(total > MASK32)


def _select(a: int, b: int, better: Callable[[int, int], bool]) -> tuple[int, int]:
    return (a, 1) if better(a, b) else (b, 0)


def _bfe(a: int, b: int) -> int:
    return a >> (b & 31) & ((1 << (b >> 16 & 0x7F)) - 1)


def _bfe_i32(a: int, b: int) -> int:
    width = b >> 16 & 0x7F
    sign = 1 << width - 1 if width else 0
    return (_bfe(a, b) ^ sign) - sign & MASK32


def _lower(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda a, b: function(a, b) & MASK32


_BINARY: dict[str, tuple[int, tuple[int, int], Callable, str]] = {
    "s_add_i32": (32, (32, 32), _add_i32, "own"),
    "s_sub_i32": (32, (32, 32), _sub_i32, "own"),
    "s_add_u32": (32, (32, 32), lambda a, b: _carry(a + b), "own"),
    "s_sub_u32": (32, (32, 32), lambda a, b: ((a - b) & MASK32, int(b > a)), "own"),
    "s_mul_i32": (32, (32, 32), lambda a, b: a * b & MASK32, ""),
    "s_mul_hi_u32": (32, (32, 32), lambda a, b: a * b >> 32, ""),
    "s_mul_hi_i32": (32, (32, 32), lambda a, b: signed(a) * signed(b) >> 32 & MASK32, ""),
    "s_max_i32": (32, (32, 32), lambda a, b: _select(a, b, lambda x, y: signed(x) >= signed(y)), "own"),
    "s_min_i32": (32, (32, 32), lambda a, b: _select(a, b, lambda x, y: signed(x) < signed(y)), "own"),
    "s_max_u32": (32, (32, 32), lambda a, b: _select(a, b, lambda x, y: x >= y), "own"),
    "s_min_u32": (32, (32, 32), lambda a, b: _select(a, b, lambda x, y: x < y), "own"),
    "s_lshl_b32": (32, (32, 32), lambda a, b: a << (b & 31) & MASK32, "nonzero"),
    "s_lshr_b32": (32, (32, 32), lambda a, b: a >> (b & 31), "nonzero"),
    "s_ashr_i32": (32, (32, 32), lambda a, b: signed(a) >> (b & 31) & MASK32, "nonzero"),
    "s_lshl_b64": (64, (64, 32), lambda a, b: a << (b & 63) & MASK64, "nonzero"),
    "s_lshr_b64": (64, (64, 32), lambda a, b: a >> (b & 63), "nonzero"),
    "s_bfe_u32": (32, (32, 32), _bfe, "nonzero"),
    "s_bfe_i32": (32, (32, 32), _bfe_i32, "nonzero"),
    "s_lshl1_add_u32": (32, (32, 32), lambda a, b: _carry((a << 1) + b), "own"),
    "s_lshl2_add_u32": (32, (32, 32), lambda a, b: _carry((a << 2) + b), "own"),
    "s_lshl3_add_u32": (32, (32, 32), lambda a, b: _carry((a << 3) + b), "own"),
    "s_lshl4_add_u32": (32, (32, 32), lambda a, b: _carry((a << 4) + b), "own"),
}
_BITWISE: dict[str, Callable[[int, int], int]] = {  # of 64 bits; the lower half is what 32-bit forms give
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b & MASK64,
}
_BINARY |= {f"s_{name}_b64": (64, (64, 64), function, "nonzero") for name, function in _BITWISE.items()}
_BINARY |= {f"s_{name}_b32": (32, (32, 32), _lower(function), "nonzero") for name, function in _BITWISE.items()}

_UNARY: dict[str, tuple[int, Callable, str]] = {
    "s_mov_b32": (32, lambda a: a, ""),
    "s_mov_b64": (64, lambda a: a, ""),
    "s_not_b32": (32, lambda a: ~a & MASK32, "nonzero"),
    "s_abs_i32": (32, lambda a: abs(signed(a)) & MASK32, "nonzero"),
}

_COMPARE = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _put(w: Wave, target: int, bits: int, value, scc: str) -> None:
    if scc == "own":
        value, w.scc = value
    elif scc:
        w.scc = int(value != 0)
    if bits == 64:
        w.set_scalar64(target, value)
    else:
        w.set_scalar(target, value)


def _binary(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    bits, sources, function, scc = _BINARY[ins.op]
    to, a, b = ins.operands
    target = scalar_target(ins, to, bits // 32)
    read_a, read_b = (scalar(ins, text, n // 32) for text, n in zip((a, b), sources, strict=True))
    return lambda w: _put(w, target, bits, function(read_a(w), read_b(w)), scc)


def _unary(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    bits, function, scc = _UNARY[ins.op]
    to, a = ins.operands
    target = scalar_target(ins, to, bits // 32)
    read = scalar(ins, a, bits // 32)
    return lambda w: _put(w, target, bits, function(read(w)), scc)


def _addc(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_addc_u32 and s_subb_u32: carry in and out are SCC."""
    to, a, b = ins.operands
    target, read_a, read_b = scalar_target(ins, to), scalar(ins, a), scalar(ins, b)
    sign = 1 if ins.op == "s_addc_u32" else -1

    def step(w: Wave) -> None:
        total = read_a(w) + sign * (read_b(w) + w.scc)
        w.scc = int(not 0 <= total <= MASK32)
        w.set_scalar(target, total & MASK32)

    return step


def _k16(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_movk_i32, s_addk_i32, s_mulk_i32: a sign-extended 16-bit immediate."""
    target = scalar_target(ins, ins.operands[0])
    value = int(ins.operands[1], 0) & 0xFFFF
    value = (value ^ 0x8000) - 0x8000 & MASK32
    if ins.op == "s_movk_i32":
        return lambda w: w.set_scalar(target, value)
    if ins.op == "s_mulk_i32":
        return lambda w: w.set_scalar(target, w.s[target] * value & MASK32)
    return lambda w: _put(w, target, 32, _add_i32(w.s[target], value), "own")


def _cselect(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    bits = 64 if ins.op.endswith("64") else 32
    to, a, b = ins.operands
    target = scalar_target(ins, to, bits // 32)
    read_a, read_b = scalar(ins, a, bits // 32), scalar(ins, b, bits // 32)
    return lambda w: _put(w, target, bits, read_a(w) if w.scc else read_b(w), "")


def _compare(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    _, _, relation, type_ = ins.op.split("_")
    count = 2 if type_ == "u64" else 1
    read_a, read_b = scalar(ins, ins.operands[0], count), scalar(ins, ins.operands[1], count)
    test = _COMPARE[relation]
    number = signed if type_ == "i32" else int  # int(None) raises: a register that was never written

    def step(w: Wave) -> None:
        w.scc = int(test(number(read_a(w)), number(read_b(w))))

    return step


def _compare_k(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    _, _, relation, type_ = ins.op.split("_")
    read, value = scalar(ins, ins.operands[0]), int(ins.operands[1], 0) & 0xFFFF
    test = _COMPARE[relation.removesuffix("k")]
    number = signed if type_ == "i32" else int
    value = (value ^ 0x8000) - 0x8000 if type_ == "i32" else value

    def step(w: Wave) -> None:
        w.scc = int(test(number(read(w)), value))

    return step


def _bitcmp(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    wanted = int(ins.op[len("s_bitcmp")])
    read_a, read_b = scalar(ins, ins.operands[0]), scalar(ins, ins.operands[1])

    def step(w: Wave) -> None:
        w.scc = int(read_a(w) >> (read_b(w) & 31) & 1 == wanted)

    return step


def _bitset(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_bitset0_b32, s_bitset1_b32: one bit of the destination."""
    target, read = scalar_target(ins, ins.operands[0]), scalar(ins, ins.operands[1])
    if ins.op == "s_bitset1_b32":
        return lambda w: w.set_scalar(target, w.s[target] | 1 << (read(w) & 31))
    return lambda w: w.set_scalar(target, w.s[target] & ~(1 << (read(w) & 31)))


def _saveexec(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_and_saveexec_b64, s_or_saveexec_b64: the old EXEC to the destination, source and (or) EXEC to EXEC."""
    combine = operator.and_ if "_and_" in ins.op else operator.or_
    target, read = scalar_target(ins, ins.operands[0], 2), scalar(ins, ins.operands[1], 2)

    def step(w: Wave) -> None:
        before, value = w.scalar64(EXEC), read(w)
        w.set_scalar64(target, before)
        w.set_exec(combine(value, before))
        w.scc = int(w.scalar64(EXEC) != 0)

    return step


# --- control ---------------------------------------------------------------------------------------------------------

_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: bool(w.scc),
    "s_cbranch_vccz": lambda w: w.scalar64(VCC) == 0,
    "s_cbranch_vccnz": lambda w: w.scalar64(VCC) != 0,
    "s_cbranch_execz": lambda w: w.scalar64(EXEC) == 0,
    "s_cbranch_execnz": lambda w: w.scalar64(EXEC) != 0,
}


def _branch(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    (label,) = ins.operands
    if label not in labels:
        raise unknown(ins, f"label {label}")
    target, taken = labels[label], _CONDITIONS[ins.op]
    return lambda w: target if taken(w) else None


def _nothing(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Wait states and priorities: an arithmetic instruction is finished when the next one starts."""
    return lambda w: None


def _waitcnt(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_waitcnt vmcnt(n) lgkmcnt(m); reads and writes share vmcnt on this architecture."""
    words = [*ins.operands, *modifiers]
    modifiers.clear()
    limits = {}
    for word in words:
        match = re.fullmatch(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", word)
        if not match:
            raise unknown(ins, word)
        limits[match[1]] = int(match[2])
    limits.pop("expcnt", None)  # exports: there are none

    def step(w: Wave) -> None:
        for counter, left in limits.items():
            w.wait(counter, left)

    return step


def _end(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    def step(w: Wave) -> int:
        w.wait("vmcnt")
        w.wait("lgkmcnt")
        return END

    return step


def _setreg(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_setreg_imm32_b32 hwreg(HW_REG_MODE, offset, size), value."""
    match = re.fullmatch(r"hwreg\(HW_REG_MODE,\s*(\d+),\s*(\d+)\)", ins.operands[0])
    if not match or (int(match[1]), int(match[2])) != (23, 1):
        raise unknown(ins, f"a write to {ins.operands[0]}: only MODE.FP16_OVFL")
    value = (constant(ins, ins.operands[1]) & 1) << 23

    def step(w: Wave) -> None:
        w.mode = w.mode & ~(1 << 23) | value

    return step


def _load(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """s_load_dword*: offsets are constants or a scalar register."""
    flag(modifiers, "glc")
    count = int(ins.op.partition("dwordx")[2] or 1)
    to, base, offset = ins.operands
    target, read_base, read_offset = scalar_target(ins, to, count), scalar(ins, base, 2), scalar(ins, offset)
    immediate = register(offset) is None

    def step(w: Wave) -> None:
        at = signed(read_offset(w)) if immediate else read_offset(w)
        address = read_base(w) + at

        def finish() -> None:
            for n, word in enumerate(w.memory.read_scalar(address, count)):
                w.set_scalar(target + n, word)

        w.finish("lgkmcnt", finish)

    return step


BUILDERS: dict[str, Callable] = (
    dict.fromkeys(_BINARY, _binary)
    | dict.fromkeys(_UNARY, _unary)
    | dict.fromkeys(("s_addc_u32", "s_subb_u32"), _addc)
    | dict.fromkeys(("s_movk_i32", "s_addk_i32", "s_mulk_i32"), _k16)
    | dict.fromkeys(("s_cselect_b32", "s_cselect_b64"), _cselect)
    | {f"s_cmp_{relation}_{t}": _compare for relation in _COMPARE for t in ("i32", "u32")}
    | dict.fromkeys(("s_cmp_eq_u64", "s_cmp_lg_u64"), _compare)
    | {f"s_cmpk_{relation}_{t}": _compare_k for relation in _COMPARE for t in ("i32", "u32")}
    | dict.fromkeys(("s_bitcmp0_b32", "s_bitcmp1_b32"), _bitcmp)
    | dict.fromkeys(("s_bitset0_b32", "s_bitset1_b32"), _bitset)
    | dict.fromkeys(("s_and_saveexec_b64", "s_or_saveexec_b64"), _saveexec)
    | dict.fromkeys(_CONDITIONS, _branch)
    | dict.fromkeys(("s_nop", "s_setprio"), _nothing)
    | {"s_setreg_imm32_b32": _setreg, "s_waitcnt": _waitcnt}
    | dict.fromkeys(("s_load_dword", *(f"s_load_dwordx{n}" for n in (2, 4, 8, 16))), _load)
    | {"s_barrier": lambda *_: lambda w: BARRIER, "s_endpgm": _end}
)
