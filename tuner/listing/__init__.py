"""Executes gfx950 machine code, as Triton lists it, on a CPU: correctness of the real code without the GPU.

run_kernel(compiled.asm["amdgcn"], [q, k, v, out, 256], grid=(4,), num_warps=4, lds_bytes=compiled.metadata.shared)
"""

from .parse import ListingError, UnknownInstruction
from .run import run_kernel

__all__ = ["ListingError", "UnknownInstruction", "run_kernel"]
