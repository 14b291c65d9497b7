"""Facts of machine code: two small stored listings, hand-written control flow, occupancy numbers.

The listings under data/ are one bf16 loop, O += exp2(P) V, with P (64, n) and V (n, 32), compiled by Triton 3.7.1;
those under data/listings are loops of the attention kernel by every supported Triton (its README says how).
"""

import gzip
import json
from pathlib import Path

import pytest

from zyfa.tuner.facts import Facts, amdgcn_facts, sass_facts, workgroups_per_unit
from zyfa.tuner.flow import Instruction, matrix_loops

DATA = Path(__file__).parent / "data"


def gfx950(listing=None, shared=4096, num_warps=2):
    return amdgcn_facts(listing or (DATA / "gfx950_tiny.amdgcn").read_text(), shared, num_warps, "gfx950")


def sm90(listing=None, shared=8192, num_warps=4):
    return sass_facts(listing or (DATA / "sm90_tiny.sass").read_text(), shared, num_warps)


def test_gfx_loop_mix_and_lds_traffic():
    (loop,) = gfx950().loops
    assert loop.mix == {
        "v_mfma_f32_32x32x16_bf16": 2, "trans": 16, "cvt": 8, "valu": 19, "ds_read": 2, "ds_tr": 4, "ds_write": 3,
        "vmem": 3, "barrier": 4, "waitcnt": 9, "nop": 1, "salu": 3,
    }  # fmt: skip
    # P (32 rows x 32 keys a wave) and V (32 x 32) in bf16 are read once; half of P and of V's tile are written by it.
    assert loop.lds_read_bytes == 32 * 32 * 2 + 32 * 32 * 2
    assert loop.lds_write_bytes == 64 * 32 * 2 // 2 + 32 * 32 * 2 // 2


def test_gfx_registers_and_sizes():
    facts = gfx950()
    assert (facts.registers, facts.agprs, facts.spills, facts.scratch_bytes) == (50, 0, 0, 0)
    assert (facts.code_bytes, facts.lds_bytes) == (1172, 4096)
    assert (facts.workgroups_per_unit, facts.waves_per_simd) == (16, 8.0)  # 8 waves a SIMD, two a workgroup


def test_sass_loop_mix_and_shared_memory_traffic():
    facts = sm90()
    (loop,) = facts.loops
    assert loop.mix == {
        "HGMMA.64x32x16.F32.BF16": 2, "trans": 16, "cvt": 8, "valu_half": 31, "ds_read": 2, "ds_write": 3, "vmem": 3,
        "barrier": 4, "waitcnt": 4, "salu": 4,
    }  # fmt: skip
    # A warp reads its 16 rows of P and, through WGMMA, a quarter of V; P comes from registers then.
    assert loop.lds_read_bytes == 16 * 32 * 2 + 32 * 32 * 2 // 4
    assert (facts.registers, facts.spills, facts.scratch_bytes, facts.code_bytes) == (56, 0, 0, 3328)


def test_code_hash_sees_instructions_only():
    listing = (DATA / "gfx950_tiny.amdgcn").read_text()
    same = gfx950(listing.replace("tiny", "other").replace("Inner Loop", "Loop"))
    assert same.code_hash == gfx950().code_hash
    other = gfx950(listing.replace("v_add_u32_e32 v18, 64, v18", "v_add_u32_e32 v18, 32, v18"))
    assert other.code_hash != gfx950().code_hash


def test_facts_survive_json():
    values = json.loads(json.dumps(gfx950().to_dict()))
    assert values["loops"][0]["mix"]["v_mfma_f32_32x32x16_bf16"] == 2
    assert values["registers"] == 50
    assert Facts.from_dict(values) == gfx950()


def test_gfx_scratch_and_async_copies_are_classes_of_their_own():
    listing = (DATA / "gfx950_tiny.amdgcn").read_text()
    listing = listing.replace(
        "buffer_load_dwordx4 v[26:29], v19, s[12:15], 0 offen", "scratch_load_dword v26, off, s33"
    )
    listing = listing.replace(
        "buffer_load_dwordx4 v[30:33], v18, s[12:15], 0 offen", "buffer_load_dwordx4 v18, s[12:15], 0 offen lds"
    )
    listing = listing.replace("s_nop 0", "s_nop 4")
    (loop,) = gfx950(listing).loops
    assert (gfx950().scratch_in_loops, gfx950(listing).scratch_in_loops) == (0, 1)
    assert (loop.mix["scratch"], loop.mix["vmem_lds"], loop.mix["vmem"]) == (1, 1, 1)
    assert loop.mix["nop"] == 5  # s_nop 4 waits five slots
    assert loop.lds_write_bytes == 3 * 1024 + 1024


# --- the attention kernel, 128 rows a workgroup of four waves (Hopper: 64), D 128, causal, by each Triton ---

TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
# As the metadata and the resource usage state them: registers, AGPRs, spills (Hopper: stores within the span), scratch
# bytes, code bytes (of SASS they are the span's); then LDS bytes, and the workgroups a unit that follow.
STATED = {
    ("gfx950-bf16", "3.6.0"): (308, 64, 0, 0, 13104, 32768, 1),
    ("gfx950-bf16", "3.7.1"): (232, 0, 0, 0, 9088, 32768, 2),
    ("gfx950-bf16", "3.8.0"): (213, 0, 0, 0, 9064, 32768, 2),
    ("gfx950-bf16", "3.9.0"): (241, 0, 0, 0, 9068, 32768, 2),
    ("gfx950-fp8", "3.6.0"): (304, 96, 0, 0, 19884, 16384, 1),
    ("gfx950-fp8", "3.7.1"): (225, 0, 0, 0, 12936, 16384, 2),
    ("gfx950-fp8", "3.8.0"): (272, 16, 0, 0, 14628, 33488, 1),
    ("gfx950-fp8", "3.9.0"): (264, 8, 0, 0, 14628, 33488, 1),
    ("gfx942-fp8", "3.6.0"): (268, 80, 0, 0, 16180, 16384, 1),
    ("gfx942-fp8", "3.7.1"): (203, 0, 0, 0, 11812, 16384, 2),
    ("gfx942-fp8", "3.8.0"): (212, 0, 0, 0, 12072, 16384, 2),
    ("gfx942-fp8", "3.9.0"): (203, 0, 0, 0, 11808, 16384, 2),
    ("sm90-fp8", "3.6.0"): (254, 0, 0, 0, None, 74752, 2),
    ("sm90-fp8", "3.7.1"): (254, 0, 0, 0, None, 74752, 2),
    ("sm90-fp8", "3.8.0"): (255, 0, 0, 0, None, 74752, 2),
    ("sm90-fp8", "3.9.0"): (255, 0, 1, 8, None, 74752, 2),
}
# Matrix instructions of one trip: 2 rows x keys x (head_dim + head_dim_v) over what one multiplies. A wave has 32 rows
# and 64 keys; QK of 64 x 128 and PV of 128 keys each take four WGMMA of 64x128x32.
MATRIX = {
    "gfx950-bf16": {"v_mfma_f32_32x32x16_bf16": 32 * 64 * 256 // (32 * 32 * 16)},
    "gfx950-fp8": {"v_mfma_f32_32x32x64_f8f6f4": 32 * 64 * 256 // (32 * 32 * 64)},
    "gfx942-fp8": {"v_mfma_f32_32x32x16_fp8_fp8": 32 * 64 * 256 // (32 * 32 * 16)},
    "sm90-fp8": {"QGMMA.64x128x32.F32.E4M3.E4M3": 64 * 128 * 256 // (64 * 128 * 32)},
}


def stored(name, triton):
    *_, lds_bytes, _ = STATED[name, triton]
    text = gzip.decompress((DATA / "listings" / f"{name}-triton{triton}.txt.gz").read_bytes()).decode()
    arch = name.split("-")[0]
    return sass_facts(text, lds_bytes, 4) if arch == "sm90" else amdgcn_facts(text, lds_bytes, 4, arch)


@pytest.mark.parametrize("name, triton", STATED)
def test_resources_by_every_triton(name, triton):
    facts = stored(name, triton)
    got = (facts.registers, facts.agprs, facts.spills, facts.scratch_bytes, facts.code_bytes, facts.lds_bytes)
    registers, agprs, spills, scratch, code_bytes, lds_bytes, workgroups = STATED[name, triton]
    assert got == (registers, agprs, spills, scratch, code_bytes or got[4], lds_bytes)
    assert (facts.workgroups_per_unit, facts.waves_per_simd) == (workgroups, workgroups)


@pytest.mark.parametrize("name, triton", STATED)
def test_work_of_both_loops_by_every_triton(name, triton):
    """The loop without and the one with masks do the same matrix work, exps and loads; the masks cost VALU work."""
    facts = stored(name, triton)
    assert len(facts.loops) == 2
    full, masked = sorted(facts.loops, key=lambda loop: loop.mix["valu"] + loop.mix.get("valu_half", 0))
    rows, keys, lanes = (64, 128, 128) if name == "sm90-fp8" else (32, 64, 64)
    exps = rows * keys // lanes
    for loop in facts.loops:
        assert {op: n for op, n in loop.mix.items() if "mfma" in op or "MMA" in op} == MATRIX[name]
        assert exps < loop.mix["trans"] <= exps + 3  # one for each row's old maximum, and a conversion of scales
        assert "scratch" not in loop.mix
        assert loop.mix["barrier"] >= 1 and loop.mix["waitcnt"] >= 4
    assert masked.mix["valu"] + masked.mix.get("valu_half", 0) > 1.3 * (full.mix["valu"] + full.mix.get("valu_half", 0))
    assert full.mix["trans"] == masked.mix["trans"]


@pytest.mark.parametrize("triton", TRITONS)
def test_lds_traffic_by_every_triton(triton):
    """Every wave reads all of the K and V tiles, and writes a quarter of them."""
    for loop in stored("gfx950-bf16", triton).loops:
        assert (loop.lds_read_bytes, loop.lds_write_bytes) == (2 * 64 * 128 * 2, 2 * 64 * 128 * 2 // 4)
    for loop in stored("gfx950-fp8", triton).loops:
        assert (loop.lds_read_bytes, loop.lds_write_bytes) == (2 * 64 * 128, 2 * 64 * 128 // 4)


def test_async_copies_are_the_default_of_triton_3_8_and_later():
    kinds = {triton: stored("gfx950-fp8", triton).loops[0].mix for triton in TRITONS}
    assert [triton for triton, mix in kinds.items() if "vmem_lds" in mix] == ["3.8.0", "3.9.0"]
    assert all(mix["vmem_lds"] == 4 for mix in kinds.values() if "vmem_lds" in mix)  # 4 KB each: K and V of 64 x 128


def test_triton_3_6_moves_accumulators_through_agprs():
    assert [stored("gfx950-bf16", triton).loops[0].mix.get("agpr", 0) for triton in TRITONS] == [160, 0, 0, 0]


@pytest.mark.parametrize("read", [lambda: gfx950("nothing\n"), lambda: sm90("nothing\n")])
def test_what_is_no_listing_is_refused(read):
    with pytest.raises(RuntimeError, match="listing"):
        read()


def ops(*items):
    """Code from "op" or ("op", target) or ("op", target, falls)."""
    return [Instruction(i, "") if isinstance(i, str) else Instruction(i[0], "", *i[1:]) for i in items]


def bodies(code):
    return [[i.op for i in body] for body in matrix_loops(code, lambda op: op == "MMA")]


def test_only_innermost_loops_with_matrix_instructions_count():
    code = ops("a", "b", "MMA", ("jump", 2), "x", ("jump", 4), ("jump", 1), "end")
    assert bodies(code) == [["MMA", "jump"]]


def test_a_backward_jump_into_the_middle_is_no_loop():
    # SASS: a barrier's waiting loop (4, 5) lies behind the end of the code and returns by a backward jump.
    code = ops("start", ("wait", 4), "MMA", ("end", None, False), "spin", ("again", 4), ("back", 2, False))
    assert bodies(code) == []


def test_waiting_loops_inside_do_not_hide_the_matrix_loop():
    code = ops("a", "MMA", "poll", ("again", 2), "b", ("jump", 1), "end")
    assert bodies(code) == [["MMA", "poll", "again", "b", "jump"]]


def test_what_spins_beside_the_path_is_no_work_of_a_trip():
    # "wait" finds its barrier open and falls through, or spins behind the end of the code (6, 7) and comes back.
    code = ops(
        "a", ("wait", 6), "MMA", ("jump", 1), "x", ("end", None, False), "poll", ("again", 6), ("back", 2, False)
    )
    assert bodies(code) == [["wait", "MMA", "jump"]]


def test_partitions_that_a_table_of_jumps_enters_have_loops_of_their_own():
    part = ["nop", "MMA", "x"]
    code = ops(
        ("table", None, False), *part, ("jump", 2), ("end", None, False), *part, ("jump", 7), ("end", None, False)
    )
    assert bodies(code) == [["MMA", "x", "jump"]] * 2


def test_the_warp_specialised_kernel_has_two_loops_in_each_of_its_two_copies():
    """Ping-pong of two warp groups of 64 rows: each has a loop without and one with masks, which wait for K and V."""
    text = gzip.decompress((DATA / "listings" / "sm90-gluon-triton3.7.1.txt.gz").read_bytes()).decode()
    facts = sass_facts(text, 131168, 12)
    assert len(facts.loops) == 4 and (facts.registers, facts.workgroups_per_unit) == (168, 1)
    for loop in facts.loops:
        assert {op: n for op, n in loop.mix.items() if "MMA" in op} == {
            "HGMMA.64x64x16.F32.BF16": 128 // 16, "HGMMA.64x128x16.F32.BF16": 64 // 16,
        }  # fmt: skip
        assert 64 * 64 // 128 < loop.mix["trans"] <= 64 * 64 // 128 + 3 and loop.mix["waitcnt"] == 8
    costs = sorted(loop.mix["valu_half"] for loop in facts.loops)
    assert costs[0] == costs[1] and costs[2] == costs[3] > 2 * costs[0]  # masks


def test_two_back_edges_to_one_header_are_one_loop():
    code = ops("a", "MMA", ("jump", 1), "b", ("jump", 1), "end")
    assert bodies(code) == [["MMA", "jump", "b", "jump"]]


# registers, LDS bytes, waves -> workgroups; waves a SIMD by registers: 8 at 64, 7 at 72, 5 at 96, 3 at 168.
OCCUPANCY = [
    ("gfx950", 64, 0, 4, 8),
    ("gfx950", 72, 0, 4, 7),
    ("gfx950", 73, 0, 4, 6),
    ("gfx950", 96, 0, 4, 5),
    ("gfx950", 168, 0, 4, 3),
    ("gfx950", 169, 0, 4, 2),
    ("gfx950", 257, 0, 4, 1),
    ("gfx950", 257, 0, 8, 0),  # one wave a SIMD, eight wanted
    ("gfx950", 168, 0, 8, 1),  # twelve waves by registers hold one workgroup of eight
    ("gfx950", 64, 68016, 4, 2),  # 160 KB / 69120 after rounding up to 1280
    ("gfx950", 64, 81920, 4, 2),
    ("gfx950", 64, 81921, 4, 1),
    ("gfx950", 64, 163841, 4, 0),
    ("gfx942", 64, 32768, 4, 2),
    ("sm90", 168, 0, 4, 3),  # 65536 registers / (168 x 128)
    ("sm90", 255, 0, 8, 1),
    ("sm90", 128, 0, 8, 2),
    ("sm90", 64, 115712, 4, 2),  # two of 113 KB and 1 KB that is reserved for each fill 228 KB
    ("sm90", 64, 115713, 4, 1),
]


@pytest.mark.parametrize("arch, registers, lds, waves, workgroups", OCCUPANCY)
def test_occupancy_is_whole_workgroups(arch, registers, lds, waves, workgroups):
    assert workgroups_per_unit(arch, registers, lds, waves) == workgroups
