"""Vector arithmetic: one table of opcodes, their sources and what they compute on all lanes at once.

After the VOP1, VOP2, VOP3, VOP3P and VOPC chapters of AMD's "CDNA3 Instruction Set Architecture" (2024) and, for what
gfx950 adds (v_bitop3, v_cvt_scalef32, v_cvt_pk_bf16_f32), of "CDNA4 Instruction Set Architecture" (2025).
Transcendental functions are computed in fp64 and rounded once, where hardware promises one unit in the last place; they
read and write denormals as zeros.
"""

import operator
from collections.abc import Callable

import numpy as np

from .crosslane import dpp_step, sdwa_result, sdwa_source
from .division import div_fixup
from .floats import flush, fma, to_bf16
from .operands import Reader, Step, modifier_int, modifier_list, packed, source, target, unknown
from .parse import Instruction
from .state import LANES, POISON, Wave

U, I, F, D = np.uint32, np.int32, np.float32, np.float64


def _shift(b):
    return b & U(31)


def _poison_high(x):
    """A 16-bit result; what becomes of the other half is not relied upon here, so it is made to show."""
    return x & U(0xFFFF) | U(POISON & 0xFFFF0000)


def _med3(a, b, c):
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(middle), np.fmin(np.fmin(a, b), c), middle)


def _transcendental(function):
    return lambda a: flush(function(flush(a).astype(D)).astype(F))


def _to_uint(a):
    """Truncated and saturated; NaN gives 0."""
    x = np.clip(np.nan_to_num(np.asarray(a, D), nan=0.0, posinf=2.0**33, neginf=-(2.0**33)), 0, 2**32 - 1)
    return x.astype(U)


def _to_f16(a):
    return np.asarray(a).astype(np.float16).view(np.uint16).astype(U)


def _high_product(a, b):
    return (np.asarray(a, np.uint64) * np.asarray(b, np.uint64) >> np.uint64(32)).astype(U)


def _signed24(a):
    return (a << I(8)) >> I(8)


def _bfe_u32(a, b, c):
    width = c & U(31)
    return (a >> _shift(b)) & ((U(1) << width) - U(1))


def _bfe_i32(a, b, c):
    width, offset = np.asarray(c & U(31), np.int64), np.asarray(b & U(31), np.int64)
    field = np.asarray(a, np.int64) >> offset & (1 << width) - 1
    sign = np.where(width > 0, 1 << np.maximum(width - 1, 0), 0)
    return ((field ^ sign) - sign).astype(I)


def _reverse(a):
    octets = np.asarray(a, U).reshape(-1, 1).view(np.uint8)
    flipped = np.packbits(np.unpackbits(octets, axis=1, bitorder="little"), axis=1, bitorder="big")
    return flipped[:, ::-1].copy().view(U)[:, 0]


def _perm(a, b, selectors):
    """Each byte of the selector picks one of the eight bytes of {a, b} (4-7, 0-3), 12 gives 0x00, 13 and up 0xFF."""
    a, b, selectors = np.broadcast_arrays(a, b, selectors)
    octets = np.concatenate([np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (b, a)], axis=1)
    octets = np.concatenate([octets, np.zeros((len(octets), 5), np.uint8), np.full((len(octets), 1), 255, np.uint8)], 1)
    select = np.minimum(np.ascontiguousarray(selectors).reshape(-1, 1).view(np.uint8), 13)
    if ((select > 7) & (select < 12)).any():
        raise ValueError("v_perm_b32 with a sign selector is not modelled")
    return np.take_along_axis(octets, select.astype(np.int64), 1).copy().view(U)[:, 0]


# op: (kind of the destination, kinds of the sources, function)
TABLE: dict[str, tuple[str, str, Callable]] = {
    # fp32
    "v_add_f32": ("f", "ff", np.add),
    "v_sub_f32": ("f", "ff", np.subtract),
    "v_mul_f32": ("f", "ff", np.multiply),
    "v_max_f32": ("f", "ff", np.fmax),
    "v_min_f32": ("f", "ff", np.fmin),
    "v_max3_f32": ("f", "fff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_maximum3_f32": ("f", "fff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_minimum3_f32": ("f", "fff", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_med3_f32": ("f", "fff", _med3),
    "v_div_fixup_f32": ("f", "fff", div_fixup),
    "v_fma_f32": ("f", "fff", fma),
    "v_exp_f32": ("f", "f", _transcendental(np.exp2)),
    "v_log_f32": ("f", "f", _transcendental(np.log2)),
    "v_rcp_f32": ("f", "f", _transcendental(np.reciprocal)),
    "v_rcp_iflag_f32": ("f", "f", _transcendental(np.reciprocal)),
    "v_sqrt_f32": ("f", "f", _transcendental(np.sqrt)),
    "v_ldexp_f32": ("f", "fi", lambda a, b: np.ldexp(np.asarray(a, D), np.clip(b, -400, 400)).astype(F)),
    # conversions
    "v_cvt_f32_i32": ("f", "i", lambda a: a.astype(F)),
    "v_cvt_f32_u32": ("f", "u", lambda a: a.astype(F)),
    "v_cvt_u32_f32": ("u", "f", _to_uint),
    "v_cvt_pk_bf16_f32": ("u", "ff", lambda a, b: to_bf16(a) | to_bf16(b) << U(16)),
    "v_cvt_f32_f16": ("f", "u", lambda a: (np.asarray(a) & U(0xFFFF)).astype(np.uint16).view(np.float16).astype(F)),
    "v_cvt_pk_f16_f32": ("u", "ff", lambda a, b: _to_f16(a) | _to_f16(b) << U(16)),
    # integers
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_bfrev_b32": ("u", "u", _reverse),
    "v_add_u32": ("u", "uu", np.add),
    "v_sub_u32": ("u", "uu", np.subtract),
    "v_subrev_u32": ("u", "uu", lambda a, b: b - a),
    "v_mul_lo_u32": ("u", "uu", np.multiply),
    "v_mul_hi_u32": ("u", "uu", _high_product),
    "v_mul_u32_u24": ("u", "uu", lambda a, b: (a & U(0xFFFFFF)) * (b & U(0xFFFFFF))),
    "v_mul_i32_i24": ("i", "ii", lambda a, b: _signed24(a) * _signed24(b)),
    "v_mad_i32_i24": ("i", "iii", lambda a, b, c: _signed24(a) * _signed24(b) + c),
    "v_add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << _shift(b)) + c),
    "v_add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << _shift(c)),
    "v_lshl_or_b32": ("u", "uuu", lambda a, b, c: a << _shift(b) | c),
    "v_and_or_b32": ("u", "uuu", lambda a, b, c: a & b | c),
    "v_or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_bfi_b32": ("u", "uuu", lambda a, b, c: a & b | ~a & c),
    "v_bfe_u32": ("u", "uuu", _bfe_u32),
    "v_bfe_i32": ("i", "uuu", _bfe_i32),
    "v_perm_b32": ("u", "uuu", _perm),
    "v_and_b32": ("u", "uu", np.bitwise_and),
    "v_or_b32": ("u", "uu", np.bitwise_or),
    "v_xor_b32": ("u", "uu", np.bitwise_xor),
    "v_lshlrev_b32": ("u", "uu", lambda a, b: b << _shift(a)),
    "v_lshrrev_b32": ("u", "uu", lambda a, b: b >> _shift(a)),
    "v_ashrrev_i32": ("i", "ui", lambda a, b: b >> (a & U(31)).astype(I)),
    "v_lshrrev_b16": ("u", "uu", lambda a, b: _poison_high((b & U(0xFFFF)) >> (a & U(15)))),
    "v_add_u16": ("u", "uu", lambda a, b: _poison_high(a + b)),
    "v_lshlrev_b16": ("u", "uu", lambda a, b: _poison_high(b << (a & U(15)))),
    "v_max_i32": ("i", "ii", np.maximum),
    "v_min_i32": ("i", "ii", np.minimum),
    "v_max3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_med3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "v_max_u32": ("u", "uu", np.maximum),
    "v_min_u32": ("u", "uu", np.minimum),
    "v_cndmask_b32": ("u", "bbm", lambda a, b, m: np.where(m, b, a)),
    "v_lshlrev_b64": ("q", "uq", lambda a, b: b << (a & U(63)).astype(np.uint64)),
    "v_lshrrev_b64": ("q", "uq", lambda a, b: b >> (a & U(63)).astype(np.uint64)),
    "v_lshl_add_u64": ("q", "quq", lambda a, b, c: (a << (b & U(7)).astype(np.uint64)) + c),
    "v_mov_b64": ("q", "q", lambda a: a),
}  # fmt: skip

_FLOAT_TESTS: dict[str, Callable] = {
    "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b), "neq": operator.ne, "nlt": lambda a, b: ~(a < b),
}  # fmt: skip
_TESTS = {name: _FLOAT_TESTS[name] for name in ("lt", "eq", "le", "gt", "ge")} | {"ne": operator.ne}
TABLE |= {f"v_cmp_{name}_f32": ("m", "ff", test) for name, test in _FLOAT_TESTS.items()}
TABLE |= {f"v_cmp_{name}_i32": ("m", "ii", test) for name, test in _TESTS.items()}
TABLE |= {f"v_cmp_{name}_u32": ("m", "uu", test) for name, test in _TESTS.items()}
TABLE |= {f"v_cmp_{name}_u64": ("m", "qq", test) for name, test in _TESTS.items()}


def base_name(op: str) -> tuple[str, str]:
    """(opcode, encoding): v_add_f32_e64 is v_add_f32 in encoding e64; "" where the name has none."""
    for encoding in ("e32", "e64", "dpp", "sdwa"):
        if op.endswith(f"_{encoding}"):
            return op.removesuffix(f"_{encoding}"), encoding
    return op, ""


def sources(ins: Instruction, modifiers: dict, texts: tuple[str, ...], kinds: str) -> list[Reader]:
    """Readers of the sources, through DPP or SDWA where the encoding says so."""
    if len(texts) != len(kinds):
        raise unknown(ins, f"{len(texts)} sources")
    encoding = base_name(ins.op)[1]
    if encoding == "sdwa":
        pairs = zip(texts, kinds, strict=True)
        return [sdwa_source(ins, modifiers, n, text, kind) for n, (text, kind) in enumerate(pairs)]
    return [source(ins, text, kind) for text, kind in zip(texts, kinds, strict=True)]


def vector(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Any instruction of TABLE."""
    name, encoding = base_name(ins.op)
    kind, kinds, function = TABLE[name]
    to, *texts = ins.operands
    readers = sources(ins, modifiers, tuple(texts), kinds)
    put = target(ins, to, kind)
    if encoding == "sdwa":
        function = sdwa_result(ins, modifiers, kind, function)
    if encoding == "dpp":
        return dpp_step(ins, modifiers, readers, function, to, kind)
    if len(readers) == 1:
        (a,) = readers
        return lambda w: put(w, function(a(w)))
    if len(readers) == 2:
        a, b = readers
        return lambda w: put(w, function(a(w), b(w)))
    a, b, c = readers
    return lambda w: put(w, function(a(w), b(w), c(w)))


def fmac(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_fmac_f32: the destination is the addend."""
    to, a, b = ins.operands
    put, old = target(ins, to, "f"), source(ins, to, "f")
    read_a, read_b = source(ins, a, "f"), source(ins, b, "f")
    return lambda w: put(w, fma(read_a(w), read_b(w), old(w)))


_PACKED: dict[str, Callable] = {"v_pk_add_f32": np.add, "v_pk_mul_f32": np.multiply, "v_pk_fma_f32": fma}


def packed_step(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Two fp32 operations on register pairs; op_sel and op_sel_hi choose the halves, neg_lo and neg_hi their signs."""
    to, *texts = ins.operands
    n = len(texts)
    zeros, ones = (0,) * n, (1,) * n
    low = modifier_list(ins, modifiers, "op_sel", zeros)
    high = modifier_list(ins, modifiers, "op_sel_hi", ones)
    neg_low = modifier_list(ins, modifiers, "neg_lo", zeros)
    neg_high = modifier_list(ins, modifiers, "neg_hi", zeros)
    readers = [packed(ins, texts[i], (low[i], high[i]), (neg_low[i], neg_high[i])) for i in range(n)]
    put, function = target(ins, to, "F"), _PACKED[ins.op]
    return lambda w: put(w, function(*(read(w) for read in readers)))


def packed_move(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_pk_mov_b32: one half of each source, chosen by op_sel, side by side."""
    to, *texts = ins.operands
    halves = modifier_list(ins, modifiers, "op_sel", (0, 1))
    low, high = (packed(ins, text, (half, half), (0, 0)) for text, half in zip(texts, halves, strict=True))
    put = target(ins, to, "F")
    return lambda w: put(w, np.stack([np.broadcast_to(np.ravel(read(w)[0]), LANES) for read in (low, high)]))


# --- v_bitop3 --------------------------------------------------------------------------------------------------------


def _two_inputs(table: int) -> Callable:
    """The function of (b, c) whose value for b=1,c=1 is bit 3 of the table, for b=1,c=0 bit 2, and so on."""
    return (
        lambda b, c: U(0), lambda b, c: ~(b | c), lambda b, c: ~b & c, lambda b, c: ~b,
        lambda b, c: b & ~c, lambda b, c: ~c, lambda b, c: b ^ c, lambda b, c: ~(b & c),
        lambda b, c: b & c, lambda b, c: ~(b ^ c), lambda b, c: c, lambda b, c: ~b | c,
        lambda b, c: b, lambda b, c: b | ~c, lambda b, c: b | c, lambda b, c: U(0xFFFFFFFF),
    )[table]  # fmt: skip


def bitop3(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """Any bitwise function of three inputs: bit 4 * a + 2 * b + c of the table is its value."""
    table = modifier_int(modifiers, "bitop3")
    if_a, if_not = _two_inputs(table >> 4), _two_inputs(table & 15)
    to, *texts = ins.operands
    a, b, c = (source(ins, text, "u") for text in texts)
    put = target(ins, to, "u")
    narrow = _poison_high if ins.op == "v_bitop3_b16" else lambda x: x

    def step(w: Wave) -> None:
        x, y, z = a(w), b(w), c(w)
        put(w, narrow(x & if_a(y, z) | ~x & if_not(y, z)))

    return step


# --- carries ---------------------------------------------------------------------------------------------------------


def carry(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_add_co_u32 and its kind: destination, carry out, two sources and, with addc and subb, the carry in."""
    name, _ = base_name(ins.op)
    to, out, *texts = ins.operands
    a, b = source(ins, texts[0], "u"), source(ins, texts[1], "u")
    carried = source(ins, texts[2], "m") if len(texts) == 3 else lambda w: np.zeros(LANES, bool)
    put, put_carry = target(ins, to, "u"), target(ins, out, "m")

    def step(w: Wave) -> None:
        x, y = np.asarray(a(w), np.int64), np.asarray(b(w), np.int64)
        if "rev" in name:
            x, y = y, x
        total = x + (y + carried(w)) * (-1 if "sub" in name else 1)
        put(w, (total & 0xFFFFFFFF).astype(U))
        put_carry(w, (total < 0) | (total > 0xFFFFFFFF))

    return step


def mad_u64(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_mad_u64_u32: 32 x 32 + 64 bits, carry out to the scalar pair."""
    to, out, *texts = ins.operands
    a, b, c = source(ins, texts[0], "u"), source(ins, texts[1], "u"), source(ins, texts[2], "q")
    put, put_carry = target(ins, to, "q"), target(ins, out, "m")

    def step(w: Wave) -> None:
        product, addend = np.asarray(a(w), np.uint64) * np.asarray(b(w), np.uint64), c(w)
        total = product + addend
        put(w, total)
        put_carry(w, total < addend)

    return step


_ENCODED = {f"{name}{suffix}": vector for name in TABLE for suffix in ("", "_e32", "_e64", "_dpp", "_sdwa")}
_CARRIES = ("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
BUILDERS: dict[str, Callable] = (
    _ENCODED
    | dict.fromkeys(("v_fmac_f32_e32", "v_fmac_f32_e64"), fmac)
    | dict.fromkeys(_PACKED, packed_step)
    | {"v_pk_mov_b32": packed_move}
    | dict.fromkeys(("v_bitop3_b32", "v_bitop3_b16"), bitop3)
    | {f"{name}_{encoding}": carry for name in _CARRIES for encoding in ("e32", "e64")}
    | {"v_mad_u64_u32": mad_u64}
)
