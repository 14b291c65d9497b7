"""Vector arithmetic of the listing's interpreter: roundings against exact arithmetic and torch, integers, modifiers."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from listing_machine import LANE, execute

from zyfa.tuner.listing import ListingError, UnknownInstruction
from zyfa.tuner.listing.floats import fma, to_e4m3
from zyfa.tuner.listing.state import POISON, bits_of

RNG = np.random.default_rng(0)
NAN, INF = float("nan"), float("inf")


def f32(text, *values, **more):
    """The first lane of v9 as fp32."""
    return execute(text, v=dict(enumerate(values)), **more).f[9, 0]


def u32(text, *values, **more):
    return int(execute(text, v=dict(enumerate(values)), **more).u[9, 0])


# --- fp32 ------------------------------------------------------------------------------------------------------------


def nearest_even(x: Fraction) -> np.float32:
    """A rational number as fp32, by definition: the closest, or of two that are as close the even one."""
    guess = np.float32(float(x))
    around = [np.nextafter(guess, np.float32(-INF)), guess, np.nextafter(guess, np.float32(INF))]
    finite = [c for c in around if np.isfinite(c)]
    return min(finite, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1))


def test_fma_rounds_once():
    """c lies half a step below a tie, by less than fp64 can tell: rounding twice goes the wrong way."""
    a, b, c = np.float32(2**-12 * (1 + 2**-23)), np.float32(2**-12 * (1 - 2**-23)), np.float32(1 + 2**-23)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == 1 + 2**-22
    assert fma(a, b, c) == c


@pytest.mark.parametrize("exponent", [0, -100, -120])  # the last two leave a denormal sum
def test_fma_is_exact_arithmetic_rounded(exponent):
    a, b = (RNG.normal(size=64).astype(np.float32) for _ in range(2))
    b *= np.float32(2.0**exponent) * np.float32(2.0**-26 if exponent else 1)
    c = (-a * b * (1 + RNG.normal(size=64) * 1e-4)).astype(np.float32)  # cancellation shows the error of the product
    exact = [[Fraction(float(x)) for x in values] for values in (a, b, c)]
    want = [nearest_even(x * y + z) for x, y, z in zip(*exact, strict=True)]
    got = execute("v_fma_f32 v9, v0, v1, v2", v={0: a, 1: b, 2: c}).f[9]
    assert np.array_equal(got, np.array(want))


@pytest.mark.parametrize("a, b, c", [(INF, 1, -INF), (INF, 0, 1), (NAN, 1, 1), (3e38, 10, -INF), (1, 2, INF)])
def test_fma_of_infinities(a, b, c):
    with np.errstate(all="ignore"):
        got, want = fma(*(np.float32(x) for x in (a, b, c))), np.float64(a) * b + c
    assert np.array_equal(got, np.float32(want), equal_nan=True)


@pytest.mark.parametrize(
    "text, values, want",
    [
        ("v_sub_f32_e32 v9, v0, v1", (1.5, 4.0), -2.5),
        ("v_mul_f32_e64 v9, |v0|, -v1", (-2.0, 4.0), -8.0),
        ("v_add_f32_e64 v9, -|v0|, 0.5", (-2.0,), -1.5),
        ("v_mul_f32_e32 v9, 0x4f7ffffe, v0", (1.0,), 4294966784.0),  # a literal is the bits of the number
        ("v_fmac_f32_e32 v9, v0, v1", (2.0, 3.0, 0, 0, 0, 0, 0, 0, 0, 10.0), 16.0),
        ("v_max_f32_e32 v9, v0, v1", (NAN, 4.0), 4.0),  # IEEE 754-2008 maxNum
        ("v_min_f32_e32 v9, v0, v1", (NAN, 4.0), 4.0),
        ("v_maximum3_f32 v9, v0, v1, v2", (-1.0, 5.0, 2.0), 5.0),
        ("v_minimum3_f32 v9, v0, v1, v2", (-1.0, 5.0, 2.0), -1.0),
        ("v_rcp_iflag_f32_e32 v9, v0", (3.0,), 1 / 3),
        ("v_max3_f32 v9, v0, |v1|, v2", (1.0, -7.0, 3.0), 7.0),
        ("v_med3_f32 v9, v0, v1, v2", (9.0, -1.0, 3.0), 3.0),
        ("v_med3_f32 v9, v0, v1, v2", (NAN, 448.0, -448.0), -448.0),  # as v_min3
        ("v_exp_f32_e32 v9, v0", (-3.0,), 0.125),
        ("v_exp_f32_e32 v9, v0", (-127.0,), 0.0),  # the result would be denormal
        ("v_exp_f32_e32 v9, v0", (-INF,), 0.0),
        ("v_log_f32_e32 v9, v0", (8.0,), 3.0),
        ("v_log_f32_e32 v9, v0", (1e-40,), -INF),
        ("v_rcp_f32_e32 v9, v0", (-4.0,), -0.25),
        ("v_sqrt_f32_e32 v9, v0", (9.0,), 3.0),
        ("v_ldexp_f32 v9, v0, v1", (3.0, 4), 48.0),
        ("v_div_fixup_f32 v9, v0, v1, v2", (-1.5, 2.0, -3.0), -1.5),
        ("v_div_fixup_f32 v9, v0, v1, v2", (1.5, 0.0, -3.0), -INF),
        ("v_div_fixup_f32 v9, v0, v1, v2", (1.5, INF, 3.0), 0.0),
        ("v_cvt_f32_i32_e32 v9, v0", (-16777219,), -16777220.0),  # to nearest even
        ("v_cvt_f32_u32_e32 v9, v0", (-1,), 4294967296.0),
    ],
)
def test_fp32(text, values, want):
    assert f32(text, *values) == np.float32(want)


@pytest.mark.parametrize("op", ["v_maximum3_f32", "v_minimum3_f32"])
def test_ieee_2019_extrema_hand_nan_on(op):
    assert np.isnan(f32(f"{op} v9, v0, v1, v2", 1.0, NAN, 2.0))


def test_nan_comes_out_of_a_division_of_zeros():
    assert np.isnan(f32("v_div_fixup_f32 v9, v0, v1, v2", 1.0, 0.0, 0.0))


def test_the_division_sequence_rounds_correctly():
    """As LLVM expands a division: two scaled operands, Newton's method, fix-up."""
    n, d = (RNG.normal(size=64).astype(np.float32) for _ in range(2))
    got = execute(
        "v_div_scale_f32 v2, s[0:1], v1, v1, v0", "v_rcp_f32_e32 v3, v2", "v_fma_f32 v4, -v2, v3, 1.0",
        "v_fmac_f32_e32 v3, v4, v3", "v_div_scale_f32 v4, vcc, v0, v1, v0", "v_mul_f32_e32 v5, v4, v3",
        "v_fma_f32 v6, -v2, v5, v4", "v_fmac_f32_e32 v5, v6, v3", "v_fma_f32 v2, -v2, v5, v4",
        "v_div_fmas_f32 v2, v2, v3, v5", "v_div_fixup_f32 v9, v2, v1, v0", v={0: n, 1: d},
    ).f[9]  # fmt: skip
    assert np.array_equal(got, n / d)


@pytest.mark.parametrize(
    "x, denominator, numerator, value, scaled",
    [
        (1.0, 1.0, 3.0, 1.0, False),
        (1e-40, 1e-40, 1.0, np.float32(1e-40) * np.float32(2.0**64), True),  # the quotient would overflow
        (2.0, 2.0, 2.0**-110, 2.0**65, False),  # a tiny numerator: both are scaled up
    ],
)
def test_div_scale_by_cases(x, denominator, numerator, value, scaled):
    w = execute("v_div_scale_f32 v9, vcc, v0, v1, v2", v={0: x, 1: denominator, 2: numerator})
    assert w.f[9, 0] == np.float32(value) and bool(w.s[106] & 1) == scaled


def test_packed_pairs_choose_halves_and_signs():
    v = {0: 1.0, 1: 2.0, 2: 10.0, 3: 20.0}
    w = execute("v_pk_add_f32 v[8:9], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1]", v=v)
    assert (w.f[8, 0], w.f[9, 0]) == (2.0 - 10.0, 1.0 + 20.0)
    w = execute("v_pk_fma_f32 v[8:9], v[0:1], v[2:3], 1.0 op_sel_hi:[1,1,0]", v=v)
    assert (w.f[8, 0], w.f[9, 0]) == (11.0, 41.0)
    w = execute("v_pk_mul_f32 v[0:1], v[0:1], s[4:5] op_sel_hi:[1,0]", v=v, s={4: 0x40400000, 5: 0})
    assert (w.f[0, 0], w.f[1, 0]) == (3.0, 6.0)


def test_packed_moves_take_one_half_of_each_source():
    v = {0: 1.0, 1: 2.0, 2: 10.0, 3: 20.0}
    for select, want in (("op_sel:[1,0]", (2.0, 10.0)), ("op_sel:[0,1]", (1.0, 20.0)), ("op_sel:[0,0]", (1.0, 10.0))):
        w = execute(f"v_pk_mov_b32 v[8:9], v[0:1], v[2:3] {select}", v=v)
        assert (w.f[8, 0], w.f[9, 0]) == want


# --- integers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, values, want",
    [
        ("v_add_u32_e32 v9, -1, v0", (5,), 4),
        ("v_sub_u32_e32 v9, 3, v0", (5,), -2),
        ("v_or_b32_e32 v9, 0x50, v0", (0x0F,), 0x5F),
        ("v_or3_b32 v9, v0, v1, 4", (1, 2), 7),
        ("v_mul_u32_u24_e32 v9, v0, v1", (0x1000003, 5), 15),
        ("v_subrev_u32_e32 v9, v0, v1", (5, 3), -2),
        ("v_mul_lo_u32 v9, v0, v1", (0x10001, 0x10003), 0x40003),
        ("v_mul_hi_u32 v9, v0, v1", (-1, -1), -2),
        ("v_mul_i32_i24_e32 v9, 0xffffffd, v0", (5,), -15),
        ("v_mad_i32_i24 v9, v0, v1, v2", (-3, 5, 100), 85),
        ("v_min3_i32 v9, v0, v1, v2", (5, -7, 3), -7),
        ("v_add3_u32 v9, v0, v1, 7", (-1, 2), 8),
        ("v_lshl_add_u32 v9, v0, 3, v1", (5, 2), 42),
        ("v_add_lshl_u32 v9, v0, v1, 1", (5, 2), 14),
        ("v_lshl_or_b32 v9, v0, 8, v1", (0xAB, 0xCD), 0xABCD),
        ("v_and_or_b32 v9, v0, v1, v2", (0xFF, 0x18, 0x100), 0x118),
        ("v_xad_u32 v9, v0, v1, 1", (6, 3), 6),
        ("v_bfi_b32 v9, v0, v1, v2", (0xF0, 0xAB, 0xCD), 0xAD),
        ("v_bfe_u32 v9, v0, 4, 8", (0xABCD,), 0xBC),
        ("v_bfe_i32 v9, v0, 4, 8", (0xABCD,), 0xBC - 256),
        ("v_bfrev_b32_e32 v9, 1", (), -(2**31)),
        ("v_lshrrev_b32_e32 v9, 4, v0", (-1,), 0x0FFFFFFF),
        ("v_ashrrev_i32_e32 v9, 4, v0", (-256,), -16),
        ("v_max_i32_e32 v9, v0, v1", (-1, 3), 3),
        ("v_max3_i32 v9, v0, v1, 2", (-1, 3), 3),
        ("v_min3_i32 v9, v0, v1, 2", (-1, 3), 2**32 - 1),
        ("v_med3_i32 v9, v0, 7, v1", (-9, -4), 2**32 - 4),
        ("v_cvt_u32_f32_e32 v9, v0", (3.99,), 3),
        ("v_cvt_u32_f32_e32 v9, v0", (-1.0,), 0),
        ("v_lshrrev_b32_sdwa v9, v0, v1 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
         (4, 0xABCD), 0xBC00),
        ("v_lshlrev_b32_sdwa v9, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
         (4, 0x00120034), 0x120),
    ],
)  # fmt: skip
def test_integers(text, values, want):
    assert u32(text, *values) == want & 0xFFFFFFFF


def test_perm_picks_bytes_of_both_sources():
    assert u32("v_perm_b32 v9, v0, v1, s0", 0x44332211, 0x88776655, s={0: 0x040C0307}) == 0x11008844
    assert u32("v_perm_b32 v9, v0, v1, s0", 0x44332211, 0x88776655, s={0: 0x0D000506}) == 0xFF552233


@pytest.mark.parametrize("table", [0x00, 0x36, 0x78, 0x96, 0xC8, 0xEC, 0xF6, 0xFE, 0x1B, 0xFF])
def test_bitop3_is_its_truth_table(table):
    a, b, c = (RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
    got = execute(f"v_bitop3_b32 v9, v0, v1, v2 bitop3:{table:#x}", v={0: a, 1: b, 2: c}).u[9]
    for bit in range(32):
        index = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
        assert np.array_equal(got >> bit & 1, table >> index & 1)


def test_16_bit_results_leave_nothing_to_rely_on_above():
    above = POISON & 0xFFFF0000
    assert u32("v_lshlrev_b16_e32 v9, 8, v0", 0x1234) == 0x3400 | above
    assert u32("v_lshrrev_b16_e32 v9, 8, v0", 0xFF1234) == 0x12 | above
    assert u32("v_add_u16_e32 v9, v0, v1", 0xFFFF, 2) == 1 | above
    got = u32("v_bitop3_b16 v9, v0, v1, v2 bitop3:0xec", 0x1234, 0xFF00, 0x00F0)  # b | a & c
    assert got == 0xFF30 | above


def test_carries():
    w = execute("v_add_co_u32_e32 v8, vcc, v0, v1", "v_addc_co_u32_e32 v9, vcc, 0, v2, vcc",
                v={0: np.where(LANE < 32, 2**32 - 1, 5), 1: 1, 2: 7})  # fmt: skip
    assert np.array_equal(w.u[9], np.where(LANE < 32, 8, 7)) and w.s[106] == 0
    w = execute("v_sub_co_u32_e64 v9, s[0:1], v0, 1", v={0: LANE})
    assert (w.u[9, 0], w.u[9, 1], w.s[0]) == (2**32 - 1, 0, 1)
    w = execute("v_subrev_co_u32_e64 v9, s[0:1], 1, v0", v={0: LANE})
    assert (w.u[9, 0], w.s[0], w.s[1]) == (2**32 - 1, 1, 0)


def test_mad_u64():
    w = execute("v_mad_u64_u32 v[8:9], s[2:3], v0, s0, v[2:3]", v={0: -1, 2: 1, 3: 2}, s={0: 0xFFFFFFFF})
    total = (2**32 - 1) ** 2 + (2 << 32) + 1
    assert (w.u[8, 0], w.u[9, 0]) == (total & 0xFFFFFFFF, total >> 32 & 0xFFFFFFFF)
    assert w.s[2] == 0xFFFFFFFF, "the carry out of 64 bits"


@pytest.mark.parametrize(
    "text, want",
    [
        ("v_lshlrev_b64 v[8:9], 36, v[0:1]", (0x123456789ABCDEF0 << 36) % 2**64),
        ("v_lshrrev_b64 v[8:9], 36, v[0:1]", 0x123456789ABCDEF0 >> 36),
        ("v_lshl_add_u64 v[8:9], v[0:1], 2, s[2:3]", (0x123456789ABCDEF0 * 4 + 0x700000005) % 2**64),
        ("v_mov_b64_e32 v[8:9], v[0:1]", 0x123456789ABCDEF0),
        ("v_mov_b64_e32 v[8:9], s[2:3]", 0x700000005),  # the same in all lanes
    ],
)
def test_64_bits(text, want):
    w = execute(text, v={0: 0x9ABCDEF0, 1: 0x12345678}, s={2: 5, 3: 7})
    assert all(int(w.u[8, lane]) | int(w.u[9, lane]) << 32 == want for lane in (0, 63))


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, want",
    [
        ("v_cmp_gt_i32_e64 s[0:1], s8, v0", LANE - 32 < 5),
        ("v_cmp_lt_i32_e64 s[0:1], v0, v1", LANE - 32 < 3),
        ("v_cmp_lt_u32_e64 s[0:1], v0, v1", (LANE >= 32) & (LANE < 35)),
        ("v_cmp_eq_u32_e64 s[0:1], 7, v0", LANE == 39),
        ("v_cmp_le_i32_e64 s[0:1], v0, v1", LANE - 32 <= 3),
        ("v_cmp_gt_u32_e64 s[0:1], 4, v0", (LANE >= 32) & (LANE < 36)),
        ("v_cmp_ne_u32_e64 s[0:1], 0, v0", LANE != 32),
        ("v_cmp_eq_u64_e64 s[0:1], s[10:11], v[0:1]", LANE == 39),
        ("v_cmp_gt_u64_e64 s[0:1], s[10:11], v[0:1]", (LANE >= 32) & (LANE < 39)),
        ("v_cmp_u_f32_e64 s[0:1], v2, v2", LANE == 7),
        ("v_cmp_neq_f32_e64 s[0:1], 1.0, v2", LANE == 7),
        ("v_cmp_gt_f32_e64 s[0:1], 2.0, v2", LANE != 7),
    ],
)
def test_compares_make_masks(text, want):
    v = {0: LANE - 32, 1: 3, 2: np.where(LANE == 7, np.float32(NAN), np.float32(1))}
    w = execute(text, v=v, s={8: 5, 10: 7, 11: 3})
    assert w.s[0] | w.s[1] << 32 == bits_of(want)


def test_inactive_lanes_keep_registers_and_compare_as_zero():
    w = execute("v_mov_b32_e32 v0, 5", "v_cmp_eq_u32_e32 vcc, v0, v0", v={0: 1}, exec_bits=0b100)
    assert w.u[0, :4].tolist() == [1, 1, 5, 1] and w.s[106] == 0b100


def test_cndmask_takes_the_second_where_the_mask_is_set():
    w = execute("v_cndmask_b32_e64 v9, v0, -v1, s[0:1]", v={0: 1.0, 1: 2.0}, s={0: 0xF0, 1: 0})
    assert np.array_equal(w.f[9], np.where((LANE >= 4) & (LANE < 8), -2.0, 1.0))


# --- narrow formats --------------------------------------------------------------------------------------------------


def samples() -> np.ndarray:
    """fp32 of all magnitudes, with every tie between neighbours of E4M3 and some of BF16, and the special values."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    ties = (codes[:-1] + codes[1:]) / 2
    near = np.concatenate([np.nextafter(ties, np.float32(s)) for s in (-INF, INF)])
    bits = RNG.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    halves = (RNG.integers(0, 2**16, 500, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    special = np.float32([0, NAN, INF, 448, 464, 465, 1e-9])
    x = np.concatenate([codes, ties, near, bits, halves, special])
    x = np.concatenate([x, -x])
    return np.pad(x, (0, -len(x) % 128)).astype(np.float32)


def test_bf16_rounds_as_torch_does():
    for x, y in samples().reshape(-1, 2, 64):
        packed = execute("v_cvt_pk_bf16_f32 v9, v0, v1", v={0: x, 1: y}).u[9]
        for got, source in ((packed << 16, x), (packed & 0xFFFF0000, y)):
            want = torch.from_numpy(source).bfloat16().float().numpy()
            assert np.array_equal(got.astype(np.uint32).view(np.float32), want, equal_nan=True)


def test_fp16_rounds_as_torch_does():
    for x, y in samples().reshape(-1, 2, 64):
        lines = ("v_cvt_pk_f16_f32 v9, v0, v1", "v_cvt_f32_f16_e32 v2, v9",
                 "v_cvt_f32_f16_sdwa v3, v9 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1")  # fmt: skip
        w = execute(*lines, v={0: x, 1: y})
        for got, source in ((w.f[2], x), (w.f[3], y)):
            assert np.array_equal(got, torch.from_numpy(source).half().float().numpy(), equal_nan=True)


def e4m3(x: np.ndarray, saturate: bool) -> np.ndarray:
    """torch's rounding; beyond 464, the tie between 448 and the next step, the largest value or NaN."""
    rounded = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    return rounded if saturate else np.where(np.abs(x) > 464, np.float32(NAN), rounded)


@pytest.mark.parametrize("saturate", [False, True])
def test_fp8_rounds_as_torch_does(saturate):
    mode = ["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"] if saturate else []
    convert = "v_cvt_scalef32_pk_fp8_f32 v9, v0, v1, 1.0", "v_cvt_scalef32_pk_fp8_f32 v9, v1, v0, 1.0 op_sel:[0,0,0,1]"
    x = samples()
    x[np.isinf(x) & saturate] = 1
    for low, high in x.reshape(-1, 2, 64):
        codes = execute(*mode, *convert, v={0: low, 1: high}).u[9].copy().view(np.uint8)
        got = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy().reshape(64, 4).T
        want = [e4m3(source, saturate) for source in (low, high, high, low)]
        assert np.array_equal(got, want, equal_nan=True)


def test_a_saturated_infinity_is_not_modelled():
    with pytest.raises(ListingError, match="infinity"):
        to_e4m3(np.float32([INF]), saturate=True)


def test_an_fp8_scale_other_than_one_is_not_modelled():
    with pytest.raises(UnknownInstruction, match="scale"):
        execute("v_cvt_scalef32_pk_fp8_f32 v9, v0, v1, 2.0")
