"""The error of zyfa.attention against float64, beside the error that the recipe's emulation makes on the CPU.

Their ratio separates two questions: how good the recipe is, and whether the kernel computes the recipe.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zyfa.archs import default_config
from zyfa.limits import broken_limit
from zyfa.recipes import PRESETS, RECIPES
from zyfa.reference import attention_ref, emulate, relative_error

from .inputs import FAMILIES, Shape, load_activations

PRECISIONS = ("bf16", *(f"fp8:{name}" for name in PRESETS))
BASELINE = PRESETS["per_tensor"]  # a recipe
FP8_RATIO = 1.5  # how much worse than the emulation of its recipe the kernel may be
BF16_RATIO = 2.0  # how much worse than the same maths in bf16 the kernel may be


class Sample(NamedTuple):
    """Inputs with a name: q (batch, seqlen, nheads, head_dim), k, v (batch, seqlen, nheads_k, head_dim), on the CPU."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Accuracy(NamedTuple):
    """Errors of one call. All are relative: error to ||ref||, max_error to the largest |ref|.

    name: of the sample; family: "activations" for those of real models, else the name.
    """

    name: str
    family: str
    batch: int
    nheads: int
    nheads_k: int
    head_dim: int
    head_dim_v: int
    seqlen: int
    causal: bool
    precision: str
    recipe: str
    error: float
    emulation_error: float
    ratio: float  # error / emulation_error
    cosine: float
    max_error: float
    cut: float | None  # share of the error of per-tensor FP8 that this recipe removes; None if that was not run


def samples_in(folder: Path) -> Iterator[Sample]:
    """Every activation sample of a folder, by name; raises ValueError when there is none."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise ValueError(f"{folder} holds no activation samples (*.npz)")
    for path in paths:
        yield Sample(path.stem, *load_activations(path))


def samples_of(
    families: Iterable[str], head_dims: Iterable[tuple[int, int]], shape: Shape, seed: int
) -> Iterator[Sample]:
    """The synthetic families at every (head_dim, head_dim_v)."""
    for head_dim, head_dim_v in head_dims:
        for family in families:
            q, k, v = FAMILIES[family](shape._replace(head_dim=max(head_dim, head_dim_v)), seed)
            yield Sample(family, q[..., :head_dim], k[..., :head_dim], v[..., :head_dim_v])


def measure(sample: Sample, names: Sequence[str], causal: bool, device: str) -> list[Accuracy]:
    """One Accuracy for each name, a precision or a recipe, that `device` can run; `zyfa.attention` runs there."""
    ref = attention_ref(*sample[1:], causal=causal)
    every = (_measure_one(sample, name, causal, device, ref) for name in names)
    rows = [row for row in every if row is not None]
    base = next((row.error for row in rows if row.recipe == BASELINE), None)
    return [row._replace(cut=_cut(row, base)) for row in rows]


def _measure_one(sample: Sample, name: str, causal: bool, device: str, ref: torch.Tensor) -> Accuracy | None:
    from zyfa.interface import attention  # the call that users make; late, so that --help needs no kernels

    on_device = [x.to(device) for x in sample[1:]]
    how, arch, reason = _how(on_device, name, causal)
    if reason:
        return None
    out = attention(*on_device, causal=causal, **how).cpu()
    recipe = how["config"].recipe if how["precision"] != "bf16" else "none"
    error, emulated = relative_error(out, ref), relative_error(_emulated(sample, recipe, arch, causal), ref)
    batch, seqlen, nheads, head_dim = sample.q.shape
    return Accuracy(
        sample.name, sample.name if sample.name in FAMILIES else "activations", batch, nheads, sample.k.shape[2],
        head_dim, sample.v.shape[3], seqlen, causal, how["precision"], recipe, error, emulated,
        error / emulated if emulated else math.inf, _cosine(out.double(), ref),
        float((out - ref).abs().max() / ref.abs().max()), None,
    )  # fmt: skip


def _how(qkv: Sequence[torch.Tensor], name: str, causal: bool) -> tuple[dict, str, str | None]:
    """({precision, config} of the call, architecture, why it cannot run it); the CPU path is gfx950's format."""
    from zyfa.interface import CPU_ARCH, explain

    precision = "fp8" if name in RECIPES else name
    why = explain(*qkv, causal=causal, precision=precision)
    arch = why.device.arch if why.device else CPU_ARCH
    config = why.config or default_config(arch, why.call.key)
    recipe = name if name in RECIPES else why.call.preset or config.recipe
    config = dataclasses.replace(config, recipe=recipe)
    precision = "bf16" if recipe == "none" else precision  # where FP8 was timed to be no faster
    reason = broken_limit(config, why.call.key, arch) if why.device else None
    return {"precision": precision, "config": config}, arch, reason


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
    """Why a row is not acceptable, None if it is. A NaN error is never.

    A smaller error is no fault: attn_gluon walks the keys backwards, and what a late maximum makes underflow in the
    emulation it has summed before (per-tensor FP8 on `underflow`: 41 % instead of 100 %).
    """
    high = BF16_RATIO if row.recipe == "none" else FP8_RATIO
    if row.ratio <= high:
        return None
    return (
        f"{row.name} D{row.head_dim} {row.precision} {row.recipe}: error {row.error:.3e} is {row.ratio:.3g} times "
        f"the emulation's {row.emulation_error:.3e}; accepted are {high:g}"
    )


def medians(rows: Sequence[Accuracy]) -> list[tuple[str, str, int, float, float | None]]:
    """(recipe, family, samples, median error, median cut) over head dims and samples, in the order of the rows."""
    groups: dict[tuple[str, str], list[Accuracy]] = {}
    for row in rows:
        groups.setdefault((row.recipe, row.family), []).append(row)
    return [
        (recipe, family, len(group), statistics.median(row.error for row in group),
         None if any(row.cut is None for row in group) else statistics.median(row.cut or 0.0 for row in group))
        for (recipe, family), group in groups.items()
    ]  # fmt: skip
