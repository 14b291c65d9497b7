"""Facts of machine code: two small stored listings, hand-written control flow, occupancy numbers.

The listings under data/ are one bf16 loop, O += exp2(P) V, with P (64, n) and V (n, 32), compiled by Triton 3.7.1.
"""

import json
from pathlib import Path

import pytest

from zyfa.tuner.facts import Instruction, amdgcn_facts, matrix_loops, sass_facts, workgroups_per_unit

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
    assert (loop.mix["scratch"], loop.mix["vmem_lds"], loop.mix["vmem"]) == (1, 1, 1)
    assert loop.mix["nop"] == 5  # s_nop 4 waits five slots
    assert loop.lds_write_bytes == 3 * 1024 + 1024


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
