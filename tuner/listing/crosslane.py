"""What lets a lane see another one's registers: DPP, swaps of half rows, lane reads; and SDWA, parts of a register.

After the DPP and SDWA sections of AMD's "CDNA3 Instruction Set Architecture" (2024); v_permlane16_swap and
v_permlane32_swap after "CDNA4 Instruction Set Architecture" (2025).
"""

import re
from collections.abc import Callable

import numpy as np

from .operands import Reader, Step, scalar, scalar_target, source, target, unknown, vector
from .parse import Instruction
from .state import LANES, POISON, Wave

_LANE = np.arange(LANES)
_ROW, _COLUMN = _LANE // 16, _LANE % 16


def _dpp_lanes(ins: Instruction, modifiers: dict) -> tuple[np.ndarray, np.ndarray]:
    """(source lane of each lane, does it exist?) of the one DPP control among the modifiers."""
    for size in (16, 8):
        if modifiers.pop("row_mirror" if size == 16 else "row_half_mirror", False):
            return _LANE // size * size + size - 1 - _LANE % size, np.ones(LANES, bool)
    for name in ("quad_perm", "row_shl", "row_shr", "row_ror", "row_bcast", "row_newbcast"):
        if name in modifiers:
            value = str(modifiers.pop(name))
            break
    else:
        raise unknown(ins, "DPP control")
    if name == "quad_perm":
        order = np.array([int(n) for n in re.findall(r"\d+", value)])
        return _LANE // 4 * 4 + order[_LANE % 4], np.ones(LANES, bool)
    n = int(value)
    if name == "row_bcast":  # the last lane of a row, or of the lower half, to all lanes of the next
        if n not in (15, 31):
            raise unknown(ins, f"row_bcast:{n}")
        return np.maximum(_LANE // (n + 1) * (n + 1) - 1, 0), n < _LANE
    if name == "row_newbcast":
        return _ROW * 16 + n, np.ones(LANES, bool)
    if name == "row_ror":
        return _ROW * 16 + (_COLUMN - n) % 16, np.ones(LANES, bool)
    column = _COLUMN + (n if name == "row_shl" else -n)
    return _ROW * 16 + column % 16, (column >= 0) & (column < 16)


def dpp_step(
    ins: Instruction, modifiers: dict, readers: list[Reader], function: Callable, to: str, kind: str
) -> Step:  # fmt: skip
    """An instruction whose first source comes from other lanes.

    A lane whose source does not exist or is inactive gets 0 with bound_ctrl and keeps its destination without.
    """
    lanes, exists = _dpp_lanes(ins, modifiers)
    rows, banks = (int(str(modifiers.pop(name, "0xf")), 0) for name in ("row_mask", "bank_mask"))
    zero = modifiers.pop("bound_ctrl", None) is not None
    chosen = ((rows >> _ROW) & 1 & (banks >> (_COLUMN // 4)) & 1).astype(bool)
    if kind not in "ufi":
        raise unknown(ins, "a DPP destination that is no register")
    row = vector(ins, to, 1).start

    def step(w: Wave) -> None:
        first = np.broadcast_to(readers[0](w), LANES)[lanes]
        valid = exists & w.mask[lanes]
        first = np.where(valid, first, first.dtype.type(0))
        value = function(first, *(read(w) for read in readers[1:]))
        write = w.mask & chosen if zero else w.mask & chosen & valid
        bank = {"u": w.u, "f": w.f, "i": w.i}[kind]
        np.copyto(bank[row], value, where=write)

    return step


def _sdwa_part(ins: Instruction, modifiers: dict, name: str, kind: str) -> tuple[np.uint32, np.uint32] | None:
    """(shift, mask) of a modifier like src0_sel:BYTE_1; None for whole registers."""
    select = str(modifiers.pop(name, "DWORD"))
    if select == "DWORD":
        return None
    if kind != "u" or not (match := re.fullmatch(r"(BYTE|WORD)_([0-3])", select)):
        raise unknown(ins, f"{name}:{select}")
    bits = 8 if match[1] == "BYTE" else 16
    return np.uint32(bits * int(match[2])), np.uint32(2**bits - 1)


def sdwa_source(ins: Instruction, modifiers: dict, n: int, text: str, kind: str) -> Reader:
    """Source n of an SDWA instruction: a byte or half word, zero-extended."""
    read, part = source(ins, text, kind), _sdwa_part(ins, modifiers, f"src{n}_sel", kind)
    if part is None:
        return read
    shift, mask = part
    return lambda w: (read(w) >> shift) & mask


def sdwa_result(ins: Instruction, modifiers: dict, kind: str, function: Callable) -> Callable:
    """The function with its result moved to a byte or half word and zeros around it."""
    if modifiers.pop("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise unknown(ins, "an SDWA destination that is kept in part")
    part = _sdwa_part(ins, modifiers, "dst_sel", kind)
    if part is None:
        return function
    shift, mask = part
    return lambda *sources: (function(*sources) & mask) << shift


def _permlane_swap(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Exchanges the odd rows (of 16 or 32 lanes) of the first register with the even rows of the second."""
    size = int(ins.op.removeprefix("v_permlane")[:2])
    first, second = (vector(ins, text, 1).start for text in ins.operands)
    odd = np.flatnonzero(_LANE // size % 2 == 1)
    even = odd - size

    def step(w: Wave) -> None:
        if not w.full:
            raise unknown(ins, "a swap with inactive lanes")
        w.u[first, odd], w.u[second, even] = w.u[second, even], w.u[first, odd]

    return step


def _read_lane(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_readlane_b32; v_readfirstlane_b32 reads the first active lane, lane 0 if none is."""
    to = scalar_target(ins, ins.operands[0])
    row = vector(ins, ins.operands[1], 1).start
    if ins.op == "v_readfirstlane_b32":
        return lambda w: w.set_scalar(to, int(w.u[row, int(w.mask.argmax())]))
    lane = scalar(ins, ins.operands[2])
    return lambda w: w.set_scalar(to, int(w.u[row, lane(w) % LANES]))


def _write_lane(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_writelane_b32, whatever EXEC is. A scalar that was never written may be saved so, as part of a wider one."""
    row = vector(ins, ins.operands[0], 1).start
    value, lane = scalar(ins, ins.operands[1]), scalar(ins, ins.operands[2])

    def step(w: Wave) -> None:
        x = value(w)
        w.u[row, lane(w) % LANES] = POISON if x is None else x

    return step


def _accumulator(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_accvgpr_read_b32, v_accvgpr_write_b32: moves between the halves of the register file."""
    put, read = target(ins, ins.operands[0], "u"), source(ins, ins.operands[1], "u")
    return lambda w: put(w, read(w))


BUILDERS: dict[str, Callable] = {
    "v_permlane16_swap_b32_e32": _permlane_swap,
    "v_permlane32_swap_b32_e32": _permlane_swap,
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_accvgpr_read_b32": _accumulator,
    "v_accvgpr_write_b32": _accumulator,
    "v_accvgpr_mov_b32": _accumulator,
}
