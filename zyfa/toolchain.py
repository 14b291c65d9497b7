"""What compiles and runs kernels in this process, and what a row that another toolchain produced is worth here.

All-or-nothing checks throw good rows away at every patch release; no check at all replays configs that have become slow
or no longer compile. So a row has a grade, and a policy says what the grade does.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

GRADES = ("exact", "compatible", "stale", "unknown")

# ZYFA_TRUST: how a grade decides. Stale rows stay below fresh ones of the same step by default: a config that was fast
# is a better guess than the default, but a worse one than what was timed with this compiler.
POLICIES = ("prefer", "exact", "compatible", "any")

# Environment variables that change the machine code and are in no version string (Triton 3.6 to 3.9, knobs.py).
CODEGEN_ENV = (
    "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE", "AMDGCN_SCALARIZE_PACKED_FOPS", "AMDGCN_USE_BUFFER_ATOMICS",
    "AMDGCN_USE_BUFFER_OPS", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "TRITON_DEFAULT_FP_FUSION",
    "TRITON_HIP_USE_ASYNC_COPY", "TRITON_HIP_USE_BLOCK_PINGPONG", "TRITON_HIP_USE_IN_THREAD_TRANSPOSE",
    "TRITON_INTERPRET",
)  # fmt: skip


class Running(NamedTuple):
    """The toolchain of this process, spelled as in a row of a database."""

    kernel_hash: str
    triton_version: str
    torch_version: str
    driver_version: str


@cache
def running() -> Running:
    """This process's toolchain, read once."""
    import torch

    from .kernels import kernel_hash

    return Running(kernel_hash(), triton_version(), torch.__version__, driver_version())


def triton_version() -> str:
    """Like "3.7.1", followed by the codegen variables that are set: "3.7.1 DISABLE_LLVM_OPT=1"."""
    import triton

    knobs = [f"{name}={os.environ[name]}" for name in CODEGEN_ENV if os.environ.get(name)]
    return " ".join([triton.__version__, *knobs])


def driver_version() -> str:
    """The kernel driver's version as Linux tells it; "" where it does not."""
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists() and (found := re.search(r"\d+\.\d+(\.\d+)?", path.read_text())):
            return found[0]
    return ""


def grade(row: Running, here: Running) -> tuple[str, str]:
    """(one of GRADES, why it is not exact) of a row's toolchain where `here` runs.

    exact: all parts are equal, or took no part ("": torch and driver in a prediction). compatible: kernel, Triton
    release (major.minor) and codegen variables are equal. stale: one of those differs. unknown: the row does not say.
    """
    if not row.kernel_hash or not row.triton_version:
        return "unknown", "the row names no kernel or no Triton"
    differ = [
        f"{name.removesuffix('_version')} {theirs}, here {ours or 'unknown'}"
        for name, theirs, ours in zip(Running._fields, row, here, strict=True)
        if theirs and theirs != ours
    ]
    if not differ:
        return "exact", ""
    same_code = row.kernel_hash == here.kernel_hash and _release(row.triton_version) == _release(here.triton_version)
    return ("compatible" if same_code else "stale"), "; ".join(differ)


def _release(version: str) -> tuple:
    """Major, minor and the codegen variables."""
    number, *knobs = version.split()
    return (*number.split(".")[:2], *knobs)


def policy() -> str:
    """ZYFA_TRUST, "prefer" where it is not set; raises ValueError naming the accepted ones."""
    chosen = os.environ.get("ZYFA_TRUST") or POLICIES[0]
    if chosen not in POLICIES:
        raise ValueError(f"ZYFA_TRUST is {chosen!r:.80}; accepted are {', '.join(POLICIES)}")
    return chosen


def rank(grade: str, policy: str) -> int | None:
    """How a policy orders a grade, lower first; None if such rows are not used."""
    if policy in ("exact", "compatible") and GRADES.index(grade) > GRADES.index(policy):
        return None
    return 0 if policy == "any" else GRADES.index(grade)
