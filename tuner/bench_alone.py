"""Parts of an FP8 call by themselves: the attention kernel, on operands that are quantised already; the quantisers."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zyfa.archs import ARCHS
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels import launch
from zyfa.kernels.replay import Recorder, again
from zyfa.recipes import PRESETS, RECIPES

from .evaluate import MAX_CALLS
from .inputs import QKV, Shape
from .model import quantiser_work
from .timing import GraphSampler, MakeSampler, Timing, interval, paired, rested

ROUND_BYTES = 2e9  # about 0.5 ms
QUANTISE_METHOD = (
    "CUDA graph replays of the launches before the attention kernel, each call on inputs and outputs of its own that "
    "together exceed the last-level cache; presets and a device copy (torch copy_) that moves as many bytes, "
    "interleaved in one run in rotating order with idle gaps; bytes: all that is read, by first passes too, and "
    "written, without the small sums and scales; us is the median, us_lo and us_hi its 95 % interval; ratio = "
    "copy_us / us, of paired rounds from ratio_lo to ratio_hi."
)


def kernel_alone(qkv: QKV, config: AttentionConfig, arch: str, causal: bool) -> Callable[[], torch.Tensor]:
    """Runs a call once; returns what repeats its attention kernel alone, into the same output."""
    recorder, out = Recorder(), torch.empty_like(qkv[0])
    inputs = (*qkv, out, *[None] * 7)
    launch._start(recorder, inputs, config, arch, None, (-1, 0 if causal else -1), 0.0, None, None)
    repeat = again(recorder.launches[-1:])

    def attend() -> torch.Tensor:
        repeat()
        return out

    return attend


def quantise_alone(qkv: QKV, recipe: str, arch: str) -> Callable[[], None]:
    """Runs the quantisers of a recipe once; returns what repeats them, into the same buffers."""
    recorder = Recorder()
    config = AttentionConfig(64, 64, 4, 1, recipe=recipe)
    launch.prepare_operands(*qkv, config=config, arch=ARCHS[arch], qk_scale=1.0, launcher=recorder)
    return again(recorder.launches)


def measure_quantisers(
    shape: Shape,
    sets: Sequence[QKV],
    arch: str,
    rounds: int,
    make_sampler: MakeSampler = GraphSampler,
    alone: Callable[[QKV, str, str], Callable[[], object]] = quantise_alone,
) -> list[dict]:
    """A row for each preset, beside a copy of as many bytes."""
    batch, n, heads, heads_k, head_dim = shape
    key = AttentionKey("fp8", head_dim, head_dim, heads, heads_k, batch, n, n, False)
    moved = {preset: quantiser_work(key, RECIPES[recipe])[0] for preset, recipe in PRESETS.items()}
    calls = max(len(sets), min(MAX_CALLS, int(ROUND_BYTES / max(moved.values()))))
    samplers = []
    for preset, recipe in PRESETS.items():
        quantisers = [alone(qkv, recipe, arch) for qkv in sets]
        copies = [_copy(moved[preset] // 2, sets[0][0].device) for _ in sets]
        for launches in (quantisers, copies):
            launches[0]()
            samplers.append(rested(make_sampler([launches[i % len(sets)] for i in range(calls)]), calls))
    timings = paired(samplers, rounds)
    return [
        _row(shape, preset, moved[preset], ours, copy)
        for preset, ours, copy in zip(PRESETS, timings[::2], timings[1::2], strict=True)
    ]


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return partial(target.copy_, source)


def _row(shape: Shape, preset: str, moved: int, ours: Timing, copy: Timing) -> dict:
    us, copy_us = ours.ms * 1e3, copy.ms * 1e3
    lo, hi = interval([a / b for a, b in zip(copy.samples, ours.samples, strict=True)])
    return {
        "name": preset, "recipe": PRESETS[preset], **shape._asdict(), "mb": moved / 1e6, "us": us,
        "us_lo": ours.ms_lo * 1e3, "us_hi": ours.ms_hi * 1e3, "gb_s": moved / us / 1e3, "copy_us": copy_us,
        "copy_gb_s": moved / copy_us / 1e3, "ratio": copy_us / us, "ratio_lo": lo, "ratio_hi": hi,
    }  # fmt: skip
