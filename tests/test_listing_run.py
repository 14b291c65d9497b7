"""The listing's interpreter as a whole, on small kernels: parsing, arguments, memory, waves, barriers and waits."""

import numpy as np
import pytest
from listing_machine import LANE, execute, kernel_text

from zyfa.tuner.listing import ListingError, UnknownInstruction, run_kernel
from zyfa.tuner.listing.memory import Memory
from zyfa.tuner.listing.parse import Argument, parse, parse_instruction

LOAD_POINTERS = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dword s8, s[0:1], 0x10
    s_waitcnt lgkmcnt(0)
"""
# out[i] = in[i] + k for the first 100 words, one workgroup of 64 work items a program
ADD = (
    LOAD_POINTERS
    + """
    s_lshl_b32 s9, s2, 6
    v_add_u32_e32 v1, s9, v0
    v_cmp_gt_u32_e32 vcc, 0x64, v1
    s_and_saveexec_b64 s[10:11], vcc
    s_cbranch_execz .LBB0_1
    v_lshlrev_b32_e32 v1, 2, v1
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    v_add_u32_e32 v2, s8, v2
    global_store_dword v1, v2, s[6:7]
    .LBB0_1:
    s_endpgm
"""
)
# Two waves exchange their work item numbers through LDS.
EXCHANGE = (
    LOAD_POINTERS
    + """
    v_lshlrev_b32_e32 v1, 2, v0
    v_xor_b32_e32 v2, 0x100, v1
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[6:7]
    s_endpgm
"""
)


def run(body, *args, grid=(1,), num_warps=1, lds_bytes=0, arguments="ppi", **order):
    run_kernel(kernel_text(body, arguments), args, grid, num_warps=num_warps, lds_bytes=lds_bytes, **order)


# --- parsing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, op, operands, modifiers",
    [
        ("\tv_max3_f32 v1, v2, |v3|, -|v4|", "v_max3_f32", ("v1", "v2", "|v3|", "-|v4|"), {}),
        ("\tbuffer_load_dwordx4 v8, s[20:23], 0 offen offset:16 lds ; x", "buffer_load_dwordx4",
         ("v8", "s[20:23]", "0"), {"offen": True, "offset": "16", "lds": True}),
        ("\tv_pk_mul_f32 v[0:1], v[2:3], s[2:3] op_sel_hi:[1,0]", "v_pk_mul_f32",
         ("v[0:1]", "v[2:3]", "s[2:3]"), {"op_sel_hi": "[1,0]"}),
        ("\ts_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", "s_setreg_imm32_b32",
         ("hwreg(HW_REG_MODE,23,1)", "1"), {}),
        ("\ts_waitcnt vmcnt(1) lgkmcnt(0)", "s_waitcnt", ("vmcnt(1)",), {"lgkmcnt(0)": True}),
        ("\ts_endpgm", "s_endpgm", (), {}),
    ],
)  # fmt: skip
def test_lines(line, op, operands, modifiers):
    ins = parse_instruction(line)
    assert (ins.op, ins.operands, ins.modifiers) == (op, operands, modifiers)


def test_a_listing_is_instructions_labels_descriptor_and_arguments():
    listing = parse(kernel_text(ADD, "ppi"))
    assert listing.name == "k" and listing.instructions[0].op == "s_load_dwordx4"
    assert listing.instructions[listing.labels[".LBB0_1"]].op == "s_endpgm"
    assert listing.descriptor["user_sgpr_count"] == 2
    assert listing.arguments == (Argument(0, 8, True), Argument(8, 8, True), Argument(16, 4, False))


def test_text_without_a_kernel_is_refused():
    with pytest.raises(ListingError, match="this one 0"):
        parse("\ts_endpgm\n")


# --- running ---------------------------------------------------------------------------------------------------------


def test_a_grid_of_programs_fills_the_output():
    x, out = np.arange(100, dtype=np.int32), np.zeros(100, np.int32)
    run(ADD, x, out, -7, grid=(2,))
    assert np.array_equal(out, x - 7)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_waves_meet_at_the_barrier(late, backwards):
    out = np.zeros(128, np.int32)
    run(EXCHANGE, None, out, 0, num_warps=2, lds_bytes=512, late=late, backwards=backwards)
    assert np.array_equal(out, (np.arange(128) + 64) % 128)


def test_a_missing_barrier_shows_in_one_order_of_the_waves():
    body = EXCHANGE.replace("s_barrier", "s_nop 0")
    out = np.zeros((2, 128), np.int32)
    for backwards in (0, 1):
        run(body, None, out[backwards], 0, num_warps=2, lds_bytes=512, backwards=bool(backwards))
    assert not np.array_equal(out[0], out[1])


def without_wait(body: str, number: int) -> str:
    parts = body.split("s_waitcnt lgkmcnt(0)")
    return "s_waitcnt lgkmcnt(0)".join(parts[: number + 1]) + "s_waitcnt lgkmcnt(0)".join(parts[number + 1 :])


@pytest.mark.parametrize("number", [1, 2])  # LDS is empty for the other wave; the value that is stored is not there
def test_a_missing_wait_shows_when_memory_is_late(number):
    out, want = np.zeros(128, np.int32), (np.arange(128) + 64) % 128
    for late in (False, True):
        run(without_wait(EXCHANGE, number), None, out, 0, num_warps=2, lds_bytes=512, late=late)
        assert np.array_equal(out, want) != late


def test_an_argument_that_is_not_waited_for_is_unwritten():
    x, out = np.arange(100, dtype=np.int32), np.zeros(100, np.int32)
    run(without_wait(ADD, 0), x, out, 1)
    with pytest.raises(ListingError, match=r"global_load_dword v2, v1, s\[4:5\]`: TypeError"):
        run(without_wait(ADD, 0), x, out, 1, late=True)


@pytest.mark.parametrize("loads, arrived", [(63, False), (64, True)])
def test_a_full_counter_holds_the_next_load_back(loads, arrived):
    memory = Memory()
    base = memory.place(np.full(256, 1, np.uint8))
    lines = [f"global_load_dword v{n + 1}, v0, s[0:1]" for n in range(loads)]
    w = execute(*lines, v={0: 4 * LANE}, s={0: base & 0xFFFFFFFF, 1: base >> 32}, memory=memory, late=True)
    assert (w.u[1, 0] == 0x01010101) == arrived and w.u[2, 0] != 0x01010101


def test_a_loop_counts():
    out = np.zeros(64, np.int32)
    body = (
        LOAD_POINTERS
        + """
        s_mov_b32 s9, 0
        v_mov_b32_e32 v2, 0
        .LBB0_1:
        s_add_i32 s9, s9, 1
        v_add_u32_e32 v2, s9, v2
        s_cmp_lt_i32 s9, s8
        s_cbranch_scc1 .LBB0_1
        v_lshlrev_b32_e32 v1, 2, v0
        global_store_dword v1, v2, s[6:7]
        s_endpgm
    """
    )
    run(body, None, out, 10)
    assert (out == 55).all()


def test_a_loop_without_end_ends(monkeypatch):
    monkeypatch.setattr("zyfa.tuner.listing.run.MAX_STEPS", 1000)
    with pytest.raises(ListingError, match="no end after 1000"):
        run(".LBB0_1:\ns_branch .LBB0_1", None, None, 0)


def test_two_dimensions_of_a_grid():
    out = np.zeros((3, 2), np.int32)
    body = (
        LOAD_POINTERS
        + """
        s_lshl_b32 s9, s3, 1
        s_add_i32 s9, s9, s2
        v_mov_b32_e32 v1, s9
        v_lshlrev_b32_e32 v2, 2, v1
        global_store_dword v2, v1, s[6:7]
        s_endpgm
    """
    )
    run(body, None, out, 0, grid=(2, 3))
    assert np.array_equal(out, np.arange(6).reshape(3, 2))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, named",
    [
        ("v_frobnicate_f32 v0, v1", "opcode v_frobnicate_f32"),
        ("v_add_f32_e64 v0, v1, v2 clamp", "clamp"),
        ("v_add_f32_e64 v0, v1, v2 mul:2", "mul"),
        ("ds_read_b32 v0, v1 gds", "gds"),
        ("buffer_load_dword v0, v1, s[4:7], 0 idxen", "addressing"),
        ("s_cbranch_scc1 .LBB0_9", "LBB0_9"),
        ("v_and_b32_e32 v0, -v1, v2", "sign of -v1"),
        ("v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_0 dst_unused:UNUSED_PRESERVE", "kept in part"),
        ("v_add_f32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", "src0_sel:WORD_1"),
        ("s_waitcnt vscnt(0)", r"vscnt\(0\)"),
    ],
)
def test_what_has_no_model_is_named_before_anything_runs(line, named):
    out = np.zeros(64, np.int32)
    with pytest.raises(UnknownInstruction, match=named):
        run(ADD.replace("s_endpgm", f"s_endpgm\n{line}"), out, out, 0)
    assert not out.any()


@pytest.mark.parametrize("size, fault", [(99, "buffer 2"), (100, None)])
def test_a_store_behind_the_output_raises(size, fault):
    x, out = np.arange(100, dtype=np.int32), np.zeros(size, np.int32)
    if fault is None:
        run(ADD, x, out, 0, grid=(2,))
        return
    with pytest.raises(ListingError, match=r"global_store_dword.*bytes 256\.\.400 of buffer 2, which has 396"):
        run(ADD, x, out, 0, grid=(2,))


def test_a_null_pointer_raises():
    with pytest.raises(ListingError, match=r"global_load_dword.*no buffer at 0x0"):
        run(ADD, None, np.zeros(100, np.int32), 0)


def test_unwritten_registers_poison():
    out = np.zeros(64, np.float32)
    body = (
        LOAD_POINTERS
        + """
        v_lshlrev_b32_e32 v1, 2, v0
        v_add_f32_e32 v3, 1.0, v7
        global_store_dword v1, v3, s[6:7]
        s_endpgm
    """
    )
    run(body, None, out, 0)
    assert np.isnan(out).all()
    with pytest.raises(ListingError, match="s_add_i32 s8, s8, s15"):
        run(LOAD_POINTERS + "s_add_i32 s8, s8, s15\ns_endpgm", None, out, 0)


@pytest.mark.parametrize(
    "args, message",
    [((1, None, 0), "pointer"), ((None, None, np.zeros(1)), "no pointer"), ((None, None, 0, 0), "3 arguments"),
     ((None, None, "x"), "'str'")],
)  # fmt: skip
def test_arguments_that_do_not_fit(args, message):
    with pytest.raises(TypeError, match=message):
        run("s_endpgm", *args)


def test_a_descriptor_of_another_rounding_is_refused():
    text = kernel_text("s_endpgm", "p").replace("float_round_mode_32 0", "float_round_mode_32 3")
    with pytest.raises(UnknownInstruction, match="float_round_mode_32"):
        run_kernel(text, [None], (1,), num_warps=1, lds_bytes=0)


# --- buffers ---------------------------------------------------------------------------------------------------------


def buffer_wave(text, buffer, records=0x7FFFFFFE, word3=0x27000, **more):
    memory = Memory()
    base = memory.place(buffer)
    s = {4: base & 0xFFFFFFFF, 5: base >> 32, 6: records, 7: word3, 124: 0}
    return execute(text, s=s | more.pop("s", {}), memory=memory, **more)


def test_buffer_loads_give_zero_behind_the_range_and_raise_behind_the_buffer():
    data = np.arange(64, dtype=np.uint32).view(np.uint8)
    v = {0: np.where(LANE < 63, 4 * LANE, -(2**31)).astype(np.uint32)}  # Triton's offset of a masked lane
    w = buffer_wave("buffer_load_dword v1, v0, s[4:7], 0 offen", data, v=v)
    assert np.array_equal(w.u[1], np.where(LANE < 63, LANE, 0))
    with pytest.raises(ListingError, match=r"bytes 4\.\.260 of buffer 1, which has 256"):
        buffer_wave("buffer_load_dword v1, v0, s[4:7], 0 offen offset:4", data, v={0: 4 * LANE})


def test_buffer_stores_skip_lanes_behind_the_range():
    data = np.zeros(256, np.uint8)
    buffer_wave("buffer_store_short v1, v0, s[4:7], s8 offen", data, records=72, v={0: 2 * LANE, 1: 7}, s={8: 8})
    assert np.array_equal(data.view(np.uint16), np.where((np.arange(128) >= 4) & (np.arange(128) < 36), 7, 0))


def test_copies_to_lds_follow_m0_and_the_lane():
    data = np.arange(1024, dtype=np.uint32).view(np.uint8)
    v = {0: np.where(LANE == 5, -(2**31), 16 * (63 - LANE)).astype(np.uint32)}
    w = buffer_wave("buffer_load_dwordx4 v0, s[4:7], 0 offen lds", data, v=v, s={124: 512})
    got = w.lds.words[128 : 128 + 256].reshape(64, 4)
    want = 4 * (63 - LANE)[:, None] + np.arange(4)
    assert np.array_equal(got, np.where(LANE[:, None] == 5, 0, want))


@pytest.mark.parametrize("field", [{"word3": 0x20000}, {"s": {5: 0x40000}}])
def test_other_buffer_descriptors_are_refused(field):
    with pytest.raises(UnknownInstruction, match="descriptor"):
        buffer_wave("buffer_load_dword v1, v0, s[4:7], 0 offen", np.zeros(256, np.uint8), v={0: 0}, **field)


@pytest.mark.parametrize(
    "text, want",
    [
        ("global_load_ubyte v1, v0, s[4:5]", 0x80), ("global_load_sbyte v1, v0, s[4:5]", 0xFFFFFF80),
        ("global_load_ushort v1, v0, s[4:5]", 0x9180), ("global_load_short_d16_hi v1, v0, s[4:5]", 0x91800009),
        ("global_load_short_d16 v1, v0, s[4:5] offset:1", 0xA291),
    ],
)  # fmt: skip
def test_narrow_loads(text, want):
    data = np.uint8([0x80, 0x91, 0xA2, 0xB3])
    assert buffer_wave(text, data, v={0: 0, 1: 9}, exec_bits=1).u[1, 0] == want


def test_spills_come_back():
    text = kernel_text(LOAD_POINTERS + """
        v_lshlrev_b32_e32 v1, 2, v0
        scratch_store_dwordx2 off, v[0:1], off offset:8
        v_mov_b32_e32 v0, 0
        s_waitcnt vmcnt(0)
        scratch_load_dword v2, off, off offset:8
        s_waitcnt vmcnt(0)
        global_store_dword v1, v2, s[6:7]
        s_endpgm
    """, "ppi").replace("private_segment_fixed_size 0", "private_segment_fixed_size 16")  # fmt: skip
    out = np.zeros(64, np.int32)
    run_kernel(text, [None, out, 0], (1,), num_warps=1, lds_bytes=0, late=True)
    assert np.array_equal(out, LANE)
