"""A launcher that compiles kernels for gfx950 and executes their listings instead of launching them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .run import run_kernel


def host_bytes(x: torch.Tensor) -> np.ndarray:
    """The bytes of a CPU tensor from its first to its last element, sharing its memory, whatever its strides."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    first = x.storage_offset() * x.element_size()
    return storage.numpy()[first : first + (last + 1) * x.element_size()]


class Executor:
    """Stands for zyfa.kernels.replay's Compiler and Recorder where Triton's active driver compiles for gfx950.

    patch(kernel name, listing) returns the listing that runs instead. late, backwards: see run_kernel. listings: kernel
    name and text of every start.
    """

    def __init__(self, patch: Callable[[str, str], str] | None = None, late: bool = False, backwards: bool = False):
        self._patch = patch or (lambda name, text: text)
        self._order = {"late": late, "backwards": backwards}
        self.listings: list[tuple[str, str]] = []

    def start(self, kernel, grid: tuple[int, ...], args: tuple, constants: dict) -> Any:
        """Runs the kernel on CPU tensors, which it changes in place; returns Triton's CompiledKernel."""
        compiled = kernel.warmup(*args, grid=grid, **constants)
        name = kernel.fn.__name__
        text = self._patch(name, compiled.asm["amdgcn"])
        self.listings.append((name, text))
        kinds = compiled.src.signature.values()  # types in the order of the arguments; "constexpr" for what is built in
        values = [
            host_bytes(value) if isinstance(value, torch.Tensor) else float(value) if kind == "fp32" else value
            for kind, value in zip(kinds, args, strict=False)
            if kind != "constexpr"
        ]
        meta = compiled.metadata
        run_kernel(text, values, grid, num_warps=meta.num_warps, lds_bytes=meta.shared, **self._order)
        return compiled
