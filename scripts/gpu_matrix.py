"""Feature x precision x head dim against float64: prints one line a cell, exits with 1 if any cell fails.

    .venv/bin/python scripts/gpu_matrix.py                                on the GPU of this machine
    .venv/bin/python scripts/gpu_matrix.py --device cpu --head-dims 64    the CPU emulation, small

A cell shows its error over the error of the plain maths (bf16, fp16; at most 2) or of the recipe's CPU emulation (FP8;
at most 1.5). The log-sum-exp must be right too, and outputs start as NaN, so that unwritten rows fail.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

import zyfa
from zyfa.archs import ARCHS
from zyfa.kernels.quantiser import FP8_DTYPES
from zyfa.recipes import PRESETS, RECIPES
from zyfa.reference import attention_ref, emulate, relative_error

PRECISIONS = ("bf16", "fp16", *(f"fp8:{name}" for name in PRESETS), "fp8-inputs")
HEAD_DIMS = (16, 64, 72, 80, 96, 128, 160, 192, 256)


class Sizes(NamedTuple):
    batch: int = 2
    seqlen_q: int = 512
    seqlen_k: int = 512
    nheads: int = 8
    nheads_k: int = 2


class Feature(NamedTuple):
    """same: arguments of the call, given (nheads, device)."""

    name: str
    sizes: Sizes = Sizes()
    same: Callable[[int, str], dict] = lambda nheads, device: {}
    varlen: tuple[int, ...] = ()
    head_dim_v: int | None = None


def _fixed(**same) -> Callable[[int, str], dict]:
    return lambda nheads, device: same


def _with_sink(nheads: int, device: str) -> dict:
    return {"causal": True, "sink": torch.linspace(-1, 2, nheads, device=device)}


FEATURES = (
    Feature("full"),
    Feature("causal", same=_fixed(causal=True)),
    Feature("odd lengths", Sizes(seqlen_q=333, seqlen_k=477), _fixed(causal=True)),
    Feature("more queries than keys", Sizes(seqlen_q=477, seqlen_k=333), _fixed(causal=True)),
    Feature("one query", Sizes(seqlen_q=1), _fixed(causal=True)),
    Feature("MHA", Sizes(nheads_k=8), _fixed(causal=True)),
    Feature("MQA", Sizes(nheads_k=1), _fixed(causal=True)),
    Feature("GQA 7:1", Sizes(nheads=7, nheads_k=1), _fixed(causal=True)),
    Feature("causal window", same=_fixed(causal=True, window_size=(100, -1))),
    Feature("two-sided window", same=_fixed(window_size=(50, 70))),
    Feature("softcap", same=_fixed(causal=True, softcap=20.0)),
    Feature("sink", same=_with_sink),
    Feature("varlen", Sizes(batch=1), _fixed(causal=True), varlen=(100, 1, 411)),
    Feature("varlen window", Sizes(batch=1), _fixed(causal=True, window_size=(60, -1)), varlen=(100, 1, 411)),
    Feature("value head dim 64", same=_fixed(causal=True), head_dim_v=64),
)


class Cell(NamedTuple):
    feature: str
    precision: str
    head_dim: int
    ratio: float
    bound: float
    fault: str

    @property
    def passed(self) -> bool:
        return self.ratio <= self.bound and not self.fault


def _inputs(feature: Feature, sizes: Sizes, head_dim: int, dtype, device: str):
    """q, k, v on the CPU and on the device: normal, K with one channel around 3."""
    g = torch.Generator().manual_seed(0)
    shapes = [(sizes.seqlen_q, sizes.nheads, head_dim), (sizes.seqlen_k, sizes.nheads_k, head_dim)]
    shapes.append((sizes.seqlen_k, sizes.nheads_k, feature.head_dim_v or head_dim))
    tensors = [torch.randn(sizes.batch, *shape, generator=g) for shape in shapes]
    tensors[1][..., 1] += 3.0
    return [x.to(dtype).to(device) for x in tensors]


def _sequences(feature: Feature, length: int) -> list[slice]:
    if not feature.varlen:
        return [slice(0, length)]
    ends = torch.tensor([0, *feature.varlen]).cumsum(0) * length // sum(feature.varlen)
    return [slice(a, b) for a, b in zip(ends.tolist(), ends[1:].tolist(), strict=False)]


def _recipe(qkv, precision: str) -> str:
    if precision in ("bf16", "fp16"):
        return "none"
    return "head" if precision == "fp8-inputs" else PRESETS[precision[4:]]


def _want(qkv, recipe: str, arch: str, same: dict):
    """(float64 output and lse, output and lse of the plain maths or the emulated recipe) of one sequence."""
    q, k, v = qkv
    ref = attention_ref(q, k, v, return_lse=True, **same)
    if recipe == "none":
        return ref, attention_ref(q, k, v, return_lse=True, dtype=torch.float32, p_dtype=q.dtype, **same)
    descales = None
    if q.element_size() == 1:
        descales = tuple(torch.ones(x.shape[0], x.shape[2], device=x.device) for x in qkv)
    return ref, emulate(q, k, v, recipe, arch=arch, descales=descales, return_lse=True, **same)


def _call(feature: Feature, qkv, precision: str, sequences: list[list[slice]], same: dict):
    """(out, lse) in the layout of a batch, written into NaN."""
    q = qkv[0]
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    out = torch.full((*q.shape[:-1], qkv[2].shape[-1]), float("nan"), dtype=dtype, device=q.device)
    given = precision if precision.startswith("fp8:") else "auto"
    if not feature.varlen:
        return zyfa.attention(*qkv, precision=given, out=out, return_lse=True, **same)
    offsets = [torch.tensor([0, *(s.stop for s in x)], dtype=torch.int32, device=q.device) for x in sequences]
    same = same | {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    _, lse = zyfa.attention(*(x[0] for x in qkv), precision=given, out=out[0], return_lse=True, **same)
    return out, lse[None]


def _lse_slack(qkv, recipe: str, arch: str) -> float:
    """1e-4, and what a matrix unit with short FP8 sums (archs.py) may lose of logits.

    It keeps 13 bits of |q| |k| each time it has summed 32 products (DeepSeek-V3, arXiv 2412.19437, saw about 14).
    """
    q, k, _ = (x.transpose(1, 2).double() for x in qkv)
    if not ARCHS[arch].short_fp8_sum or recipe == "none" or RECIPES[recipe].qk != "e4m3" or q.shape[2] == 0:
        return 1e-4
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    steps = -(-q.shape[-1] // 32)
    return 1e-4 + steps * 2.0**-13 * float((q.abs() @ k.abs().transpose(-1, -2)).amax()) * q.shape[-1] ** -0.5


def _lse_fault(lse, ref, base, slack: float) -> str:
    """Infinite where the truth is, elsewhere as near to it as the plain maths and what the matrix unit drops."""
    if not torch.equal(torch.isinf(lse), torch.isinf(ref)) or torch.isnan(lse).any():
        return "lse: not finite where it should be"
    seen = torch.isfinite(ref)
    error, allowed = ((x.double() - ref)[seen].abs().amax() if seen.any() else torch.zeros(()) for x in (lse, base))
    bound = 2 * float(allowed) + slack
    return "" if error <= bound else f"lse: {error:.2g} off, allowed {bound:.2g}"


def check(feature: Feature, precision: str, head_dim: int, device: str, arch: str, shrink: int = 1) -> Cell:
    """One cell of the matrix. shrink divides the lengths."""
    sizes = feature.sizes
    sizes = sizes._replace(seqlen_q=max(1, sizes.seqlen_q // shrink), seqlen_k=sizes.seqlen_k // shrink)
    dtype = {"fp16": torch.float16, "fp8-inputs": FP8_DTYPES[ARCHS[arch].fp8_format]}.get(precision, torch.bfloat16)
    qkv = _inputs(feature, sizes, head_dim, dtype, device)
    same, recipe = feature.same(sizes.nheads, device), _recipe(qkv, precision)
    sequences = [_sequences(feature, n) for n in (sizes.seqlen_q, sizes.seqlen_k)]
    out, lse = _call(feature, qkv, precision, sequences, same)
    pairs = [
        _want((qkv[0][:, a], qkv[1][:, b], qkv[2][:, b]), recipe, arch, same) for a, b in zip(*sequences, strict=True)
    ]
    ref, base = (torch.cat([pair[i][0] for pair in pairs], 1) for i in (0, 1))
    ref_lse, base_lse = (torch.cat([pair[i][1] for pair in pairs], 2) for i in (0, 1))
    error, plain = relative_error(out, ref), relative_error(base, ref)
    bound = 2.0 if recipe == "none" else 1.5
    return Cell(feature.name, precision, head_dim, error / plain if plain else math.inf, bound,
                _lse_fault(lse, ref_lse, base_lse, _lse_slack(qkv, recipe, arch)))  # fmt: skip


def cells(head_dims: Sequence[int], precisions: Sequence[str], device: str, shrink: int) -> Iterator[Cell]:
    """Every cell; raises what a call raises, since every cell is supported."""
    from zyfa.device import current_device
    from zyfa.interface import CPU_ARCH

    arch = current_device(torch.device(device).index or 0).arch if device != "cpu" else CPU_ARCH
    for head_dim in head_dims:
        for feature in FEATURES:
            for precision in precisions:
                yield check(feature, precision, head_dim, device, arch, shrink)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--head-dims", type=lambda t: [int(n) for n in _words(t)], default=HEAD_DIMS)
    parser.add_argument("--precisions", type=_words, default=PRECISIONS)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    options = parser.parse_args(arguments)
    if unknown := set(options.precisions) - set(PRECISIONS):
        parser.error(f"--precisions: {sorted(unknown)} unknown; accepted are {', '.join(PRECISIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --device cpu checks the emulation")
    failed = total = 0
    print(f"{'feature':<24}{'precision':<16}{'D':>4}  error / allowed")
    for cell in cells(options.head_dims, options.precisions, options.device, options.shrink):
        total, failed = total + 1, failed + (not cell.passed)
        verdict = "pass" if cell.passed else f"FAIL {cell.fault}"
        print(f"{cell.feature:<24}{cell.precision:<16}{cell.head_dim:>4}  {cell.ratio:.2f} / {cell.bound}  {verdict}")
    print(f"{total - failed} of {total} cells pass on {options.device}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
