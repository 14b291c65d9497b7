"""What accuracy and speed are measured on: samples of real models and synthetic families, each with one difficulty.

A family is a function of (shape, seed) that returns q, k, v in bfloat16. N(0, 1) alone hides every difference between
recipes, so each other family isolates one thing that real activations do to low precision.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

# Only a checkout has the samples, a wheel does not.
CHECKOUT_ACTIVATIONS = Path(__file__).resolve().parent.parent / "tests" / "data" / "activations"
TILE = 128  # keys; no kernel of ours takes more in one step of its softmax
QUERY = 8.0  # length of a query along a direction of interest: logits along it then vary by 1/8 where they vary

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Shape(NamedTuple):
    """Sizes of one self-attention call."""

    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    head_dim: int


def load_activations(path: str | Path) -> QKV:
    """q (1, seqlen, nheads, head_dim), k, v (1, seqlen, nheads_k, head_dim) of a sample, bfloat16.

    Raises ValueError when the file is no sample (see tests/data/activations/README.md).
    """
    import numpy as np  # part of zyfa[tune] only

    with np.load(path) as sample:
        if missing := {"q", "k", "v"} - set(sample.files):
            raise ValueError(f"{path}: lacks {sorted(missing)}; a sample holds q, k and v")
        arrays = [sample[name] for name in "qkv"]
    for name, x in zip("qkv", arrays, strict=True):
        if x.dtype != np.int16 or x.ndim != 3:
            raise ValueError(f"{path}: {name} is {x.dtype} {x.shape}, not int16 (heads, seqlen, head_dim)")
    q, k, v = (torch.from_numpy(x).view(torch.bfloat16).transpose(0, 1)[None].contiguous() for x in arrays)
    return q, k, v


class _Draft:
    """N(0, 1) in fp32 and what families do to it: q, k, v, and a random unit vector `along` for each KV head."""

    def __init__(self, shape: Shape, seed: int, device: str):
        self.shape = shape
        self._generator = torch.Generator(device).manual_seed(seed)
        batch, seqlen, nheads, nheads_k, head_dim = shape
        self.q = self.randn(batch, seqlen, nheads, head_dim)
        self.k = self.randn(batch, seqlen, nheads_k, head_dim)
        self.v = self.randn(batch, seqlen, nheads_k, head_dim)
        self.along = torch.nn.functional.normalize(self.randn(nheads_k, head_dim), dim=-1)

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._generator, device=self._generator.device)

    def set_logits(self, token: int | slice, logits: float | torch.Tensor) -> None:
        """Keys at `token` get the given logits for every query, apart from their random part."""
        k = self.k[:, token]
        size = logits * math.sqrt(self.shape.head_dim) / QUERY
        size = size[:, None, None] if isinstance(size, torch.Tensor) else size
        self.k[:, token] = k - (k * self.along).sum(-1, keepdim=True) * self.along + size * self.along

    def point_queries(self) -> None:
        """Every query gets the same length QUERY along its KV head's direction, so that set_logits is exact."""
        along = self.along.repeat_interleave(self.shape.nheads // self.shape.nheads_k, 0)
        self.q += (QUERY - (self.q * along).sum(-1, keepdim=True)) * along

    def done(self) -> QKV:
        return self.q.bfloat16(), self.k.bfloat16(), self.v.bfloat16()


def normal(shape: Shape, seed: int, device: str = "cpu") -> QKV:
    """N(0, 1): what most benchmarks use. Attention over it is nearly flat and every recipe looks good."""
    return _Draft(shape, seed, device).done()


def outlier_channels(shape: Shape, seed: int, device: str = "cpu") -> QKV:
    """Four channels of K around +-16, and one channel of Q, another, around 16 and four times as wide as the rest.

    Biases of the projections make such channels. The K means add one number to all logits of a query and so cancel in
    the softmax, but not in a rounded K.
    """
    x = _Draft(shape, seed, device)
    signs = torch.where(x.randn(shape.nheads_k, 4) < 0, -16.0, 16.0)
    x.k[..., 1 :: shape.head_dim // 4] += signs
    x.q[..., 0] = 4.0 * x.q[..., 0] + 16.0
    return x.done()


def _with_sink(shape: Shape, seed: int, device: str, token: int) -> QKV:
    x = _Draft(shape, seed, device)
    x.point_queries()
    x.set_logits(slice(None), 0.0)
    x.set_logits(token, math.log(shape.seqlen) + 3.0)  # about 20 times the mass of all others at their mean logit
    x.v[:, token] *= 0.01
    return x.done()


def sink(shape: Shape, seed: int, device: str = "cpu") -> QKV:
    """Token 0 takes most of the mass and has a V near zero, as in most layers of most LLMs.

    The output is then made of small probabilities, which an unscaled 8-bit P rounds to zero.
    """
    return _with_sink(shape, seed, device, 0)


def late_sink(shape: Shape, seed: int, device: str = "cpu") -> QKV:
    """The same sink at three quarters of the keys: the running maximum jumps when most of the sum is already made."""
    return _with_sink(shape, seed, device, shape.seqlen * 3 // 4)


def underflow(shape: Shape, seed: int, device: str = "cpu") -> QKV:
    """One key with V = 0 is 8 nats above a flat tail: each of the others has about 3.4e-4 of the maximum.

    That is below half of e4m3's least number, 2**-10, and V has mean 1, so that losing the tail loses the output.
    """
    x = _Draft(shape, seed, device)
    x.k *= 0.05
    x.point_queries()
    x.set_logits(slice(None), 0.0)
    x.set_logits(0, 8.0)
    x.v += 1.0
    x.v[:, 0] = 0.0
    return x.done()


def staircase(shape: Shape, seed: int, device: str = "cpu") -> QKV:
    """Logits rise by one nat with every TILE keys (by 32 nats in all at most): each tile brings a new maximum."""
    x = _Draft(shape, seed, device)
    x.point_queries()
    tile = torch.arange(shape.seqlen, device=x.k.device) // TILE
    x.set_logits(slice(None), tile * min(1.0, 32.0 / max(int(tile[-1]), 1)))
    return x.done()


FAMILIES: dict[str, Callable[..., QKV]] = {
    family.__name__: family for family in (normal, outlier_channels, sink, late_sink, underflow, staircase)
}
