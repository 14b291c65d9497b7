"""What compiled code says about itself: registers, spills, shared memory, occupancy, and the work of its matrix loops.

Read from Triton's gfx listing (`asm["amdgcn"]`) or from the SASS that Triton's bundled cuobjdump prints of a cubin.
"""

import dataclasses
import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from zyfa.archs import ARCHS

from .flow import Instruction, matrix_loops


@dataclass(frozen=True)
class Loop:
    """One trip of an innermost loop that multiplies matrices, as one wave (warp) executes it.

    mix: instructions by class; matrix instructions appear under their own opcode, "nop" counts wait states.
    lds_read_bytes, lds_write_bytes: traffic of one wave, operands that WGMMA fetches itself included.
    """

    mix: dict[str, int]
    lds_read_bytes: int
    lds_write_bytes: int


@dataclass(frozen=True)
class Facts:
    """Facts of one compiled kernel. registers: 32-bit registers a lane, on AMD with the AGPRs, which agprs counts.

    spills: registers that were saved elsewhere (NVIDIA: spill stores in the code). scratch_bytes: private memory of
    one lane. waves_per_simd and workgroups_per_unit: what fits on one SIMD and on one CU or SM at a time, quantised to
    whole workgroups. code_hash: sha256 over instructions, blind to comments, names and encodings.
    """

    arch: str
    registers: int
    agprs: int
    spills: int
    scratch_bytes: int
    lds_bytes: int
    workgroups_per_unit: int
    waves_per_simd: float
    code_bytes: int
    code_hash: str
    loops: tuple[Loop, ...]

    def to_dict(self) -> dict:
        """Plain values for JSON, zero counts left out."""
        return dataclasses.asdict(self) | {"loops": [dataclasses.asdict(loop) for loop in self.loops]}

    @classmethod
    def from_dict(cls, values: dict) -> "Facts":
        """Inverse of to_dict, also of a trial's facts, where sensors may lie beside them; TypeError, KeyError else."""
        own = {name: value for name, value in values.items() if name != "sensors"}
        return cls(**own | {"loops": tuple(Loop(**loop) for loop in values["loops"])})

    @property
    def scratch_in_loops(self) -> int:
        """Accesses to private memory in one trip of the loop that has most of them."""
        return max((loop.mix.get("scratch", 0) for loop in self.loops), default=0)


def facts_of(kernel, arch: str) -> Facts:
    """Facts of a Triton CompiledKernel for arch; raises RuntimeError when its machine code cannot be read."""
    shared, num_warps = kernel.metadata.shared, kernel.metadata.num_warps
    if ARCHS[arch].vendor == "amd":
        return amdgcn_facts(kernel.asm["amdgcn"], shared, num_warps, arch)
    return sass_facts(sass_listing(kernel.asm["cubin"]), shared, num_warps, arch)


def loops_with(kernel, arch: str, holds: Callable[[str], bool]) -> list[Loop]:
    """The innermost loops of a CompiledKernel that hold an opcode for which holds() is true."""
    if ARCHS[arch].vendor == "amd":
        bodies = matrix_loops(_parse_gfx(kernel.asm["amdgcn"]), holds)
        return [_loop(body, _gfx_class, _gfx_traffic) for body in bodies]
    bodies = matrix_loops(_parse_sass(sass_listing(kernel.asm["cubin"])), holds)
    return [_loop(body, _sass_class, _sass_traffic) for body in bodies]


# --- occupancy ---------------------------------------------------------------------------------------------------


def _ceil_to(n: int, granule: int) -> int:
    return -(-n // granule) * granule


class _Unit(NamedTuple):
    """Resources of a CU (SM), four SIMDs each: LLVM's GCNSubtarget for gfx, the CUDA occupancy tables for sm90."""

    lds_bytes: int
    lds_granule: int
    lds_reserved: int  # what the driver adds to each workgroup
    registers_per_simd: int  # of one lane
    waves_per_simd: int


_UNITS = {
    "gfx950": _Unit(160 * 1024, 1280, 0, 512, 8),
    "gfx942": _Unit(64 * 1024, 512, 0, 512, 8),
    "sm90": _Unit(228 * 1024, 128, 1024, 512, 16),
}


def workgroups_per_unit(arch: str, registers: int, lds_bytes: int, num_warps: int) -> int:
    """Workgroups that one CU or SM holds at a time: limited by registers, by shared memory and by wave slots."""
    unit = _UNITS[arch]
    waves_per_simd = min(unit.waves_per_simd, unit.registers_per_simd // max(_ceil_to(registers, 8), 8))
    by_lds = unit.lds_bytes // max(_ceil_to(lds_bytes + unit.lds_reserved, unit.lds_granule), 1)
    return min(waves_per_simd * 4 // num_warps, by_lds, 32)


def _occupancy(arch: str, registers: int, lds_bytes: int, num_warps: int) -> tuple[int, float]:
    workgroups = workgroups_per_unit(arch, registers, lds_bytes, num_warps)
    return workgroups, workgroups * num_warps / 4


# --- loops ----------------------------------------------------------------------------------------------------------


def _loop(body: list[Instruction], classify: Callable[[str, str], str], traffic: Callable) -> Loop:
    mix: Counter[str] = Counter()
    read = written = 0
    for op, args, *_ in body:
        kind = classify(op, args)
        mix[kind] += int(args or 0) + 1 if kind == "nop" and args.isdigit() else 1
        bytes_read, bytes_written = traffic(kind, op, args)
        read, written = read + bytes_read, written + bytes_written
    return Loop(dict(sorted(mix.items())), read, written)


def _code_hash(code: list[Instruction]) -> str:
    text = "\n".join(f"{i.op} {i.target if i.target is not None else i.args}" for i in code)
    return hashlib.sha256(text.encode()).hexdigest()


# --- gfx ---------------------------------------------------------------------------------------------------------

_GFX_LABEL = re.compile(r"^(\.L\w+):")
_GFX_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\b\s*([^;]*)")
_GFX_FIELDS = {
    "registers": r"^ +\.vgpr_count: +(\d+)",
    "agprs": r"\.agpr_count: +(\d+)",
    "spills": r"^ +\.vgpr_spill_count: +(\d+)",
    "scratch_bytes": r"^ +\.private_segment_fixed_size: +(\d+)",
    "code_bytes": r"^; codeLenInByte = (\d+)",
}
_GFX_CLASSES = (  # the first pattern that fits names the class
    (re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)"), "trans"),
    (re.compile(r"v_accvgpr"), "agpr"),
    (re.compile(r"v_cvt"), "cvt"),
    (re.compile(r"v_pk_"), "pk"),
    (re.compile(r"v_permlane"), "xlane"),
    (re.compile(r"v_"), "valu"),
    (re.compile(r"ds_.*_tr_"), "ds_tr"),
    (re.compile(r"ds_write"), "ds_write"),
    (re.compile(r"ds_"), "ds_read"),
    (re.compile(r"scratch_"), "scratch"),
    (re.compile(r"(buffer|global|flat)_store"), "vmem_store"),
    (re.compile(r"(buffer|global|flat)_"), "vmem"),
    (re.compile(r"s_barrier"), "barrier"),
    (re.compile(r"s_waitcnt"), "waitcnt"),
    (re.compile(r"s_nop"), "nop"),
)


def _parse_gfx(listing: str) -> list[Instruction]:
    """Instructions of the kernel's body."""
    labels: dict[str, int] = {}
    raw: list[tuple[str, str]] = []
    for line in listing.splitlines():
        if label := _GFX_LABEL.match(line):
            if label[1].startswith(".Lfunc_end"):
                break
            labels[label[1]] = len(raw)
        elif found := _GFX_INSTRUCTION.match(line):
            raw.append((found[1], found[2].strip()))
    return [
        Instruction(op, args, labels.get(args) if "branch" in op else None, op not in _GFX_ENDS) for op, args in raw
    ]


_GFX_ENDS = ("s_branch", "s_endpgm", "s_setpc_b64")


def _gfx_class(op: str, args: str) -> str:
    if op.startswith("v_mfma"):
        return op
    kind = next((name for pattern, name in _GFX_CLASSES if pattern.match(op)), "salu")
    return "vmem_lds" if kind == "vmem" and (args.endswith(" lds") or "_lds_" in op) else kind


def _gfx_traffic(kind: str, op: str, args: str) -> tuple[int, int]:
    """(read, written) LDS bytes of one instruction of a wave."""
    if not kind.startswith("ds_") and kind != "vmem_lds":
        return 0, 0
    dwords = {"x4": 4, "x3": 3, "x2": 2}.get(op[-2:], 1)
    bits = re.search(r"_b(\d+)", op)
    per_lane = int(bits[1]) // 8 * (2 if "2" in op.split("_")[1] else 1) if bits else 4 * dwords
    return (0, 64 * per_lane) if kind in ("ds_write", "vmem_lds") else (64 * per_lane, 0)


def amdgcn_facts(listing: str, shared_bytes: int, num_warps: int, arch: str) -> Facts:
    """Facts of one kernel from Triton's gfx listing; shared_bytes is metadata.shared, which the listing lacks.

    Raises RuntimeError when the listing holds no kernel descriptor.
    """
    fields = {name: re.search(pattern, listing, re.M) for name, pattern in _GFX_FIELDS.items()}
    if missing := [name for name, found in fields.items() if not found]:
        raise RuntimeError(f"the {arch} listing lacks {missing}")
    numbers = {name: int(found[1]) for name, found in fields.items() if found}
    code = _parse_gfx(listing)
    workgroups, waves = _occupancy(arch, numbers["registers"], shared_bytes, num_warps)
    loops = matrix_loops(code, lambda op: op.startswith("v_mfma"))
    return Facts(
        arch=arch,
        lds_bytes=shared_bytes,
        workgroups_per_unit=workgroups,
        waves_per_simd=waves,
        code_hash=_code_hash(code),
        loops=tuple(_loop(body, _gfx_class, _gfx_traffic) for body in loops),
        **numbers,
    )


# --- sm90 --------------------------------------------------------------------------------------------------------

_SASS_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
_SASS_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_SASS_CLASSES = (
    (re.compile(r"MUFU"), "trans"),
    (re.compile(r"F2FP|F2F|I2F|F2I|I2FP"), "cvt"),
    (re.compile(r"SHFL|VOTE|MATCH|REDUX"), "xlane"),
    (re.compile(r"FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2"), "valu"),
    (re.compile(r"LDSM|LDS"), "ds_read"),
    (re.compile(r"STS"), "ds_write"),
    (re.compile(r"LDGSTS|UTMALDG|UBLKCP"), "vmem_lds"),
    (re.compile(r"LDG|LD\b"), "vmem"),
    (re.compile(r"STG|ST\b"), "vmem_store"),
    (re.compile(r"LDL|STL"), "scratch"),
    (re.compile(r"BAR"), "barrier"),
    (re.compile(r"WARPGROUP|WARPSYNC|DEPBAR|LDGDEPBAR|SYNCS|FENCE|MEMBAR|CCTL"), "waitcnt"),
    (re.compile(r"NOP"), "nop"),
    (re.compile(r"U[A-Z]|R2UR|S2R|BRA|EXIT|ELECT|CS2R|LDC|BSSY|BSYNC|PLOP3"), "salu"),
)
_MATRIX = re.compile(r"(H|Q|I|B)GMMA|(H|I|Q)MMA")
_GMMA_SHAPE = re.compile(r"([HQI])GMMA\.64x(\d+)x(\d+)")


def sass_listing(cubin: bytes) -> str:
    """Resource usage and disassembly of a cubin, from the cuobjdump that comes with Triton."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed with {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout


def _parse_sass(listing: str) -> list[Instruction]:
    lines = [found for found in map(_SASS_LINE.match, listing.splitlines()) if found]
    index = {int(found[1], 16): n for n, found in enumerate(lines)}
    return [_sass_instruction(found, index) for found in lines]


def _sass_instruction(found: re.Match, index: dict[int, int]) -> Instruction:
    guard, op, args = found[2], found[3], found[4].strip()
    ends = op.startswith(("BRA", "EXIT", "RET", "BRX", "JMP")) and not guard
    address = re.search(r"0x([0-9a-f]+)$", args) if op.startswith("BRA") else None
    return Instruction(op, args, index.get(int(address[1], 16)) if address else None, not ends)


def _sass_class(op: str, args: str) -> str:
    if _MATRIX.match(op):
        return op
    # What is left (compare, select, min/max, integer, move, permute) runs at half the FP32 rate.
    return next((name for pattern, name in _SASS_CLASSES if pattern.match(op)), "valu_half")


def _sass_traffic(kind: str, op: str, args: str) -> tuple[int, int]:
    """(read, written) shared-memory bytes of one warp, a quarter of what the WGMMA of its warp group fetches."""
    if shape := _GMMA_SHAPE.match(op):
        size = 2 if shape[1] == "H" else 1
        a_rows = 64 if args.split(",")[1].strip().startswith("gdesc") else 0
        return (a_rows + int(shape[2])) * int(shape[3]) * size // 4, 0
    if kind not in ("ds_read", "ds_write"):
        return 0, 0
    per_warp = _sass_bytes(op)
    return (per_warp, 0) if kind == "ds_read" else (0, per_warp)


def _sass_bytes(op: str) -> int:
    if matrices := re.match(r"(?:LDSM|STSM)\D*16\.\D*88(?:\.(\d))?", op):
        return 128 * int(matrices[1] or 1)  # an 8x8 matrix of 16-bit values
    width = re.search(r"\.(\d+)$", op)
    return 32 * (int(width[1]) // 8 if width else 4)


def sass_facts(listing: str, shared_bytes: int, num_warps: int, arch: str = "sm90") -> Facts:
    """Facts of one kernel from sass_listing(); shared_bytes is metadata.shared.

    Raises RuntimeError when the listing holds no resource usage.
    """
    usage = _SASS_USAGE.search(listing)
    code = _parse_sass(listing)
    if usage is None or not code:
        raise RuntimeError(f"the {arch} listing holds no kernel")
    registers = int(usage[1])
    workgroups, waves = _occupancy(arch, registers, shared_bytes, num_warps)
    loops = matrix_loops(code, lambda op: _MATRIX.match(op) is not None)
    return Facts(
        arch=arch,
        registers=registers,
        agprs=0,
        spills=sum(i.op.startswith("STL") for i in code),
        scratch_bytes=int(usage[2]),
        lds_bytes=shared_bytes,
        workgroups_per_unit=workgroups,
        waves_per_simd=waves,
        code_bytes=16 * len(code),
        code_hash=_code_hash(code),
        loops=tuple(_loop(body, _sass_class, _sass_traffic) for body in loops),
    )
