"""Compiled code that is not worth timing or predicting: one reason per kind, read from its facts."""

import re

from zyfa.archs import ARCHS
from zyfa.config import AttentionConfig, AttentionKey, octave
from zyfa.recipes import RECIPES

from .facts import Facts

# Bytes of scratch that a lane may use. AMD: none; of 81 swept gfx950 builds 46 do without. NVIDIA: one H200's best BF16
# tile for full attention at 8k, 128x64 with four warps, has 168 to 208 bytes on the stack, hence the tolerance.
SCRATCH_BYTES = {"amd": 0, "nvidia": 256}
# Accesses to it in one trip of a loop. Of 1,066 timed H200 configs 18 have more than 64, and none of them is among the
# five fastest of its cell; a gate that allows none would throw 20 of 140 of those away (benchmarks/h200/model.json).
SCRATCH_ACCESSES = {"amd": 0, "nvidia": 64}
# Matrix instructions at the full 8-bit rate, and those that recipes with 16-bit Q and K may hold beside them.
FULL_RATE = {
    "gfx950": (re.compile("f8f6f4|32x32x32_i8|16x16x64_i8"), re.compile("32x32x16_b?f16|16x16x32_b?f16")),
    "gfx942": (re.compile("fp8|bf8|_i8"), re.compile("32x32x8_b?f16|16x16x16_b?f16")),
    "sm90": (re.compile("[QI]GMMA"), re.compile("HGMMA")),
}


def gate(facts: Facts, key: AttentionKey, config: AttentionConfig, arch: str) -> str | None:
    """Why this build is discarded, or None.

    One of "spills", "spills in the loop", "lds", "occupancy" or "half-rate matrix", with the numbers.
    """
    limits = ARCHS[arch]
    if facts.scratch_bytes > SCRATCH_BYTES[limits.vendor] or (limits.vendor == "amd" and facts.spills):
        return f"spills: {facts.spills} registers, {facts.scratch_bytes} B of scratch"
    if facts.scratch_in_loops > SCRATCH_ACCESSES[limits.vendor]:
        return f"spills in the loop: {facts.scratch_in_loops} accesses a trip"
    if facts.lds_bytes > limits.lds_bytes:
        return f"lds: {facts.lds_bytes} B of {limits.lds_bytes} B"
    if facts.workgroups_per_unit == 0:
        return f"occupancy: no workgroup of {config.num_warps} waves with {facts.registers} registers fits"
    if slow := half_rate(facts, key, config):
        return f"half-rate matrix: {slow}"
    return None


def half_rate(facts: Facts, key: AttentionKey, config: AttentionConfig) -> str | None:
    """The first matrix instruction of a quantised loop below the rate of its operands, or None.

    Heads under 64 wide cannot reach that rate on gfx950.
    """
    if config.recipe == "none" or (facts.arch == "gfx950" and octave(key.head_dim) < 64):
        return None
    bits8, bits16 = FULL_RATE[facts.arch]
    accepted = (bits8, bits16) if RECIPES[config.recipe].qk == "bf16" else (bits8,)
    matrix = (op for loop in facts.loops for op in loop.mix if is_matrix(op))
    return next((op for op in matrix if not any(pattern.search(op) for pattern in accepted)), None)


def is_matrix(kind: str) -> bool:
    """Whether a class of Loop.mix is a matrix instruction."""
    return kind.startswith("v_mfma") or "MMA" in kind
