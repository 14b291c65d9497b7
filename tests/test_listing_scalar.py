"""Scalar instructions of the listing's interpreter, and the exchange of lanes, with known values."""

import numpy as np
import pytest
from listing_machine import LANE, execute

from zyfa.tuner.listing import ListingError, UnknownInstruction
from zyfa.tuner.listing.parse import parse_instruction
from zyfa.tuner.listing.run import decode

MIN, MAX, ONES = -(2**31), 2**31 - 1, 2**32 - 1
F, T = 0, 1


@pytest.mark.parametrize(
    "text, a, b, result, scc",
    [
        ("s_add_i32 s0, s1, s2", 3, -5, -2, F),
        ("s_add_i32 s0, s1, s2", MAX, 1, MIN, T),  # SCC is signed overflow
        ("s_add_u32 s0, s1, s2", ONES, 2, 1, T),  # SCC is the carry
        ("s_sub_i32 s0, s1, s2", MIN, 1, MAX, T),
        ("s_sub_u32 s0, s1, s2", 1, 2, -1, T),
        ("s_mul_i32 s0, s1, s2", 0x10001, 0x10003, 0x40003, None),
        ("s_mul_hi_u32 s0, s1, s2", ONES, ONES, ONES - 1, None),
        ("s_mul_hi_i32 s0, s1, s2", -3, 1 << 30, -1, None),  # -3 * 2**30 is -1 * 2**32 + 2**30
        ("s_mul_hi_i32 s0, s1, s2", MIN, MIN, 1 << 30, None),
        ("s_max_i32 s0, s1, s2", -1, 5, 5, F),
        ("s_min_i32 s0, s1, s2", -1, 5, -1, T),
        ("s_lshl_b32 s0, s1, s2", 3, 33, 6, T),  # five bits of the shift count
        ("s_lshr_b32 s0, s1, s2", -8, 29, 7, T),
        ("s_ashr_i32 s0, s1, s2", -8, 1, -4, T),
        ("s_lshl2_add_u32 s0, s1, s2", 0x40000001, 2, 6, T),
        ("s_lshl1_add_u32 s0, s1, s2", 3, 4, 10, F),
        ("s_addk_i32 s0, 0xffff", 0, 0, 2, F),
        ("s_mulk_i32 s0, 0x7", 0, 0, 21, None),
        ("s_bfe_u32 s0, s1, s2", 0xABCD, 0x80004, 0xBC, T),
        ("s_bfe_i32 s0, s1, s2", 0xABCD, 0x80004, 0xBC - 0x100, T),
        ("s_and_b32 s0, s1, s2", 12, 10, 8, T),
        ("s_andn2_b32 s0, s1, s2", 12, 12, 0, F),
        ("s_xor_b32 s0, s1, -1", 12, 0, ~12, T),
        ("s_or_b32 s0, s1, 0x80", 1, 0, 0x81, T),
        ("s_not_b32 s0, s1", 0, 0, -1, T),
        ("s_abs_i32 s0, s1", -7, 0, 7, T),
        ("s_movk_i32 s0, 0xff80", 0, 0, -128, None),
        ("s_bitset1_b32 s0, 4", 0, 0, 19, None),
    ],
)
def test_arithmetic(text, a, b, result, scc):
    w = execute(text, s={0: 3, 1: a, 2: b})
    assert w.s[0] == result & ONES
    assert scc is None or w.scc == scc


@pytest.mark.parametrize(
    "text, scc",
    [
        ("s_cmp_lt_i32 s1, 0", T), ("s_cmp_eq_u32 s1, -1", T), ("s_cmp_ge_i32 s1, s2", F), ("s_cmp_le_i32 s1, s2", T),
        ("s_cmpk_gt_i32 s1, 0xfffe", T), ("s_cmpk_lt_i32 s2, 0x5", F), ("s_cmp_lg_u64 s[2:3], 0", T),
        ("s_cmp_ge_u32 s1, s2", T), ("s_cmp_gt_i32 s1, s2", F), ("s_cmp_lg_u32 s2, 5", F),
        ("s_bitcmp0_b32 s2, 1", T), ("s_bitcmp1_b32 s2, 2", T), ("s_cmp_eq_u64 s[2:3], s[2:3]", T),
    ],
)  # fmt: skip
def test_compares(text, scc):
    w = execute(text, "s_cselect_b32 s0, 7, 8", "s_cselect_b64 s[4:5], -1, 0", s={1: -1, 2: 5, 3: 9})
    assert (w.scc, w.s[0], w.s[5]) == (scc, 7 if scc else 8, ONES if scc else 0)


def test_carries_run_through_scc():
    w = execute("s_add_u32 s0, s2, s4", "s_addc_u32 s1, s3, s5", s={2: ONES, 3: 1, 4: 1, 5: 2})
    assert (w.s[0], w.s[1], w.scc) == (0, 4, 0)


def test_exec_is_saved_and_narrowed():
    w = execute("s_and_saveexec_b64 s[4:5], vcc", s={106: 0b1010, 107: 1}, exec_bits=0b1100)
    assert (w.s[4], w.s[126], w.scc) == (0b1100, 0b1000, 1)
    assert w.mask.tolist() == [n == 3 for n in range(64)]


def test_exec_is_saved_and_widened():
    w = execute("s_or_saveexec_b64 s[4:5], vcc", s={106: 0b1010, 107: 1}, exec_bits=0b1100)
    assert (w.s[4], w.s[126], w.s[127], w.scc) == (0b1100, 0b1110, 1, 1)
    assert w.mask.tolist() == [n in (1, 2, 3, 32) for n in range(64)]


@pytest.mark.parametrize(
    "text, result", [("s_and_b64 s[4:5], s[0:1], vcc", 0x8), ("s_or_b64 s[4:5], s[0:1], vcc", 0x1_0000_000E),
                     ("s_xor_b64 s[4:5], s[0:1], -1", 2**64 - 1 - 0xC), ("s_andn2_b64 s[4:5], s[0:1], vcc", 0x4)],
)  # fmt: skip
def test_masks_of_64_lanes(text, result):
    w = execute(text, s={0: 0xC, 1: 0, 106: 0xA, 107: 1})
    assert w.s[4] | w.s[5] << 32 == result and w.scc == 1


@pytest.mark.parametrize(
    "text, taken",
    [
        ("s_branch .L", T), ("s_cbranch_scc0 .L", F), ("s_cbranch_scc1 .L", T), ("s_cbranch_vccz .L", F),
        ("s_cbranch_vccnz .L", T), ("s_cbranch_execz .L", T), ("s_cbranch_execnz .L", F),
    ],
)  # fmt: skip
def test_branches(text, taken):
    w = execute("s_cmp_eq_u32 s0, 0", s={0: 0, 106: 0, 107: 1}, exec_bits=0)
    assert decode(parse_instruction(text), {".L": 7})(w) == (7 if taken else None)


def test_64_bit_constants():
    w = execute("s_mov_b64 s[0:1], -1", "s_lshl_b64 s[2:3], s[0:1], 60", "s_mov_b64 vcc, 0x7fffffff")
    assert (w.s[0], w.s[1], w.s[3], w.s[106], w.s[107]) == (ONES, ONES, 0xF0000000, 0x7FFFFFFF, 0)


def test_an_unwritten_register_is_no_zero():
    with pytest.raises(TypeError):
        execute("s_add_i32 s0, s1, s2", s={1: 1})


def test_only_the_overflow_bit_of_mode_is_known():
    assert execute("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1").mode == 1 << 23
    with pytest.raises(UnknownInstruction, match="HW_REG_MODE,4,2"):
        execute("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0")


# --- lanes -----------------------------------------------------------------------------------------------------------

ROW = LANE // 16


@pytest.mark.parametrize(
    "control, lanes, exists",
    [
        ("row_shr:3", LANE - 3, LANE % 16 >= 3),
        ("row_shl:4", LANE + 4, LANE % 16 < 12),
        ("row_ror:5", ROW * 16 + (LANE - 5) % 16, None),
        ("quad_perm:[2,3,0,1]", LANE ^ 2, None),
        ("row_mirror", ROW * 16 + 15 - LANE % 16, None),
        ("row_half_mirror", LANE // 8 * 8 + 7 - LANE % 8, None),
        ("row_bcast:15", ROW * 16 - 1, ROW > 0),
        ("row_bcast:31", 31, LANE >= 32),
        ("row_newbcast:6", ROW * 16 + 6, None),
    ],
)
def test_dpp(control, lanes, exists):
    exists = np.ones(64, bool) if exists is None else exists
    masks = "row_mask:0xf bank_mask:0xf"
    kept = execute(f"v_mov_b32_dpp v1, v0 {control} {masks}", v={0: LANE + 100, 1: LANE}).u[1]
    assert np.array_equal(kept, np.where(exists, lanes + 100, LANE))
    zeroed = execute(f"v_mov_b32_dpp v1, v0 {control} {masks} bound_ctrl:1", v={0: LANE + 100, 1: LANE}).u[1]
    assert np.array_equal(zeroed, np.where(exists, lanes + 100, 0))


def test_dpp_masks_choose_rows_and_banks():
    got = execute("v_mov_b32_dpp v1, v0 quad_perm:[0,1,2,3] row_mask:0xa bank_mask:0x5", v={0: 7, 1: 0}).u[1]
    assert np.array_equal(got == 7, (ROW % 2 == 1) & (LANE // 4 % 2 == 0))


def test_dpp_source_of_an_inactive_lane_does_not_exist():
    got = execute("v_mov_b32_dpp v1, v0 row_shr:1 row_mask:0xf bank_mask:0xf", v={0: 9, 1: 0}, exec_bits=0b110).u[1]
    assert got[:4].tolist() == [0, 0, 9, 0]


@pytest.mark.parametrize("size", [16, 32])
def test_permlane_swaps_odd_rows_with_even_ones(size):
    w = execute(f"v_permlane{size}_swap_b32_e32 v0, v1", v={0: LANE, 1: LANE + 100})
    odd = LANE // size % 2 == 1
    assert np.array_equal(w.u[0], np.where(odd, LANE - size + 100, LANE))
    assert np.array_equal(w.u[1], np.where(odd, LANE + 100, LANE + size))


def test_lanes_to_scalars_and_back():
    w = execute("v_readfirstlane_b32 s0, v0", "v_readlane_b32 s1, v0, 63", "v_writelane_b32 v0, s1, 2",
                v={0: LANE}, exec_bits=0b11000)  # fmt: skip
    assert (w.s[0], w.s[1], w.u[0, 2], w.u[0, 3]) == (3, 63, 63, 3)


def test_accumulator_registers_are_the_upper_half_of_the_file():
    w = execute("v_accvgpr_write_b32 a3, v0", "v_accvgpr_mov_b32 a4, a3", "v_accvgpr_read_b32 v1, a4", v={0: LANE})
    assert np.array_equal(w.u[259], LANE) and np.array_equal(w.u[1], LANE)


def test_bpermute_and_swizzle():
    w = execute("ds_bpermute_b32 v2, v0, v1", "ds_swizzle_b32 v3, v1 offset:swizzle(SWAP,16)",
                v={0: 4 * (63 - LANE), 1: LANE})  # fmt: skip
    assert np.array_equal(w.u[2], 63 - LANE) and np.array_equal(w.u[3], LANE ^ 16)
    with pytest.raises(UnknownInstruction, match="pattern"):
        execute("ds_swizzle_b32 v3, v1 offset:swizzle(REVERSE,16)", v={1: LANE})


def test_swaps_with_inactive_lanes_are_not_modelled():
    with pytest.raises(ListingError, match="inactive"):
        execute("v_permlane32_swap_b32_e32 v0, v1", exec_bits=1)
