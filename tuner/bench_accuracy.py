"""The error of zyfa.attention against float64, beside the error that the recipe's emulation makes on the CPU.

Their ratio separates two questions: how good the recipe is, and whether the kernel computes the recipe.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zyfa.archs import default_config
from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref, emulate, relative_error

from .inputs import FAMILIES, Shape, load_activations

PRECISIONS = ("bf16", *(f"fp8:{name}" for name in PRESETS))
BASELINE = "fp8:per_tensor"
FP8_RATIO = 1.5  # how far kernel and emulation may be apart, either way
BF16_RATIO = 2.0  # how much worse than the same maths in bf16 the kernel may be


class Sample(NamedTuple):
    """Inputs with a name: q (batch, seqlen, nheads, head_dim), k, v (batch, seqlen, nheads_k, head_dim), on the CPU."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Accuracy(NamedTuple):
    """Errors of one call. All are relative: error to ||ref||, max_error to the largest |ref|."""

    input: str
    batch: int
    nheads: int
    nheads_k: int
    head_dim: int
    seqlen: int
    causal: bool
    precision: str
    recipe: str
    error: float
    emulation_error: float
    ratio: float  # error / emulation_error
    cosine: float
    max_error: float
    cut: float | None  # share of the error of fp8:per_tensor that this recipe removes; None if that was not run


def samples_in(folder: Path) -> Iterator[Sample]:
    """Every activation sample of a folder, by name; raises ValueError when there is none."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise ValueError(f"{folder} holds no activation samples (*.npz)")
    for path in paths:
        yield Sample(path.stem, *load_activations(path))


def samples_of(families: Iterable[str], head_dims: Sequence[int], shape: Shape, seed: int) -> Iterator[Sample]:
    """The synthetic families at every head dim."""
    for family in families:
        for head_dim in head_dims:
            yield Sample(family, *FAMILIES[family](shape._replace(head_dim=head_dim), seed))


def measure(sample: Sample, precisions: Sequence[str], causal: bool, device: str) -> list[Accuracy]:
    """One Accuracy for each precision; `zyfa.attention` runs on `device`, reference and emulation on the CPU."""
    qkv = sample[1:]
    ref = attention_ref(*qkv, causal=causal)
    rows = [_measure_one(sample, precision, causal, device, ref) for precision in precisions]
    base = next((row.error for row in rows if row.precision == BASELINE), None)
    return [row._replace(cut=_cut(row, base)) for row in rows]


def _measure_one(sample: Sample, precision: str, causal: bool, device: str, ref: torch.Tensor) -> Accuracy:
    from zyfa.interface import attention  # the call that users make; late, so that --help needs no kernels

    on_device = [x.to(device) for x in sample[1:]]
    out = attention(*on_device, causal=causal, precision=precision).cpu()
    recipe, arch = _recipe_of(on_device, precision, causal)
    error, emulated = relative_error(out, ref), relative_error(_emulated(sample, recipe, arch, causal), ref)
    batch, seqlen, nheads, head_dim = sample.q.shape
    return Accuracy(
        sample.name, batch, nheads, sample.k.shape[2], head_dim, seqlen, causal, precision, recipe,
        error, emulated, error / emulated if emulated else math.inf,
        _cosine(out.double(), ref), float((out - ref).abs().max() / ref.abs().max()), None,
    )  # fmt: skip


def _recipe_of(qkv: Sequence[torch.Tensor], precision: str, causal: bool) -> tuple[str, str]:
    """(recipe, architecture) that attention runs a precision with; the CPU path is gfx950's format."""
    from zyfa.interface import CPU_ARCH, explain

    why = explain(*qkv, causal=causal, precision=precision)
    arch = why.device.arch if why.device else CPU_ARCH
    if why.call.key.dtype != "fp8":
        return "none", arch
    config = why.config or default_config(arch, why.call.key)
    return why.call.preset or config.recipe, arch


def _cosine(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Of all elements as one vector; 0.0 for an output of zeros."""
    return float(torch.nn.functional.cosine_similarity(out.flatten(), ref.flatten(), dim=0))


def _emulated(sample: Sample, recipe: str, arch: str, causal: bool) -> torch.Tensor:
    qkv = sample[1:]
    if recipe == "none":
        return attention_ref(*qkv, causal=causal, dtype=torch.float32, p_dtype=sample.q.dtype)
    return emulate(*qkv, recipe, arch=arch, causal=causal)


def _cut(row: Accuracy, base: float | None) -> float | None:
    return None if base is None or row.recipe == "none" else 1 - row.error / base


def fault(row: Accuracy) -> str | None:
    """Why a row is not acceptable, None if it is. A NaN error is never."""
    low, high = (0.0, BF16_RATIO) if row.recipe == "none" else (1 / FP8_RATIO, FP8_RATIO)
    if low <= row.ratio <= high:
        return None
    return (
        f"{row.input} D{row.head_dim} {row.precision}: error {row.error:.3e} is {row.ratio:.3g} times the emulation's "
        f"{row.emulation_error:.3e}; accepted are {low:.2g} to {high:g}"
    )
