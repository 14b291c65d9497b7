"""zyfa.attention against every installed peer: device time of all contenders side by side, and host time per call."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import Device, current_device
from zyfa.recipes import PRESETS
from zyfa.reference import relative_error

from .evaluate import LAST_CACHE_BYTES, MAX_CALLS, ROUND_FLOPS
from .inputs import QKV, Shape, outlier_channels
from .peers import PEERS, Contender, Peer, first_line, quantise_per_tensor
from .plan import flops
from .rates import DEVICES, peak_tflops
from .timing import GraphSampler, MakeSampler, Sampler, Timing, interval, paired, rested

OURS = "zyfa"
CHECKED_ROWS = 128  # at either end of the queries: a causal mask shows in the first, the length of the keys in the last
MAX_DIFFERENCE = 0.5  # relative; per-tensor FP8 is 10 to 20 % away on these inputs, a wrong mask or layout 100 %
METHOD = (
    "CUDA graph replays; a replay holds one call for each of several input sets that together exceed the last-level "
    "cache; all contenders of a shape interleaved in one run in rotating order, before each sample an idle gap as long "
    "as its replay (5 to 50 ms) and one untimed replay; us is the median, us_lo and us_hi its 95 % interval. best_peer "
    "is the fastest peer that starts from inputs of the same dtype and multiplies no fewer bits; ratio = best_peer_us "
    "/ us."
)


class Effort(NamedTuple):
    """Rounds of each shape: at most max_rounds, fewer (but three) if they take longer than budget_s."""

    max_rounds: int
    budget_s: float


QUICK, DEFAULT = Effort(5, 1.5), Effort(15, 5.0)


class ShapeResult(NamedTuple):
    """What one shape and mask gave."""

    rows: list[dict]  # in the form of benchmarks/<sku>/<name>.json
    spreads: list[tuple[float, float] | None]  # 95 % interval of the ratio of paired rounds, for each row
    skipped: dict[str, str]  # contender -> reason


def key_of(shape: Shape, dtype: str, causal: bool) -> AttentionKey:
    batch, seqlen, nheads, nheads_k, head_dim = shape
    return AttentionKey(dtype, head_dim, head_dim, nheads, nheads_k, batch, seqlen, seqlen, causal)


def input_sets(shape: Shape, device: str) -> list[QKV]:
    """As many different inputs as the last-level cache cannot hold, at least one and at most MAX_CALLS."""
    first = outlier_channels(shape, 0, device)
    cache = 0
    if first[0].is_cuda:
        cache = LAST_CACHE_BYTES if torch.version.hip else torch.cuda.get_device_properties(device).L2_cache_size
    copies = min(MAX_CALLS, 1 + cache // sum(x.nbytes for x in first))
    return [first, *(outlier_channels(shape, seed, device) for seed in range(1, copies))]


def _chosen(
    qkv: Sequence[torch.Tensor], causal: bool, precision: str = "auto"
) -> tuple[str, AttentionConfig, AttentionConfig]:
    """(path, config, default config) of a call: what zyfa.attention runs on GPU tensors and where it has that from."""
    from zyfa.interface import explain

    why = explain(*qkv, causal=causal, precision=precision)
    assert why.device and why.choice and why.config, "speed is measured on a GPU"
    default = default_config(why.device.arch, why.call.key)
    return f"{why.choice.match} {why.choice.trust}: {why.config}", why.config, default


def ours(sets: Sequence[QKV], causal: bool, dtype: str) -> Iterator[Contender]:
    """zyfa.attention with the tuned config and, where that is another one, with default_config()."""
    from zyfa.interface import attention

    def contender(name: str, recipe: str, path: str, config: AttentionConfig | None) -> Contender:
        def launch(qkv: QKV) -> torch.Tensor:
            return attention(*qkv, causal=causal, precision=dtype, config=config)

        return Contender(name, dtype, "bf16", recipe, path, [partial(launch, qkv) for qkv in sets])

    path, config, default = _chosen(sets[0], causal, dtype)
    yield contender(OURS, config.recipe, path, None)
    if config != default:
        yield contender(f"{OURS}-default", default.recipe, f"default_config(): {default}", default)


def ours_fp8_inputs(sets: Sequence[QKV], causal: bool) -> Contender:
    """zyfa.attention on FP8 inputs with one scale per tensor; moving them to the kernel's layout is timed."""
    from zyfa.interface import attention

    def prepare(qkv: QKV) -> partial:
        quantised = [quantise_per_tensor(x) for x in qkv]
        descales = {
            f"{name}_descale": scale.expand(x.shape[0], x.shape[2]).contiguous()
            for name, (x, scale) in zip("qkv", quantised, strict=True)
        }
        return partial(attention, *(x for x, _ in quantised), causal=causal, **descales)

    launches = [prepare(qkv) for qkv in sets]
    path, _, _ = _chosen(launches[0].args, causal)
    return Contender(f"{OURS}-fp8-inputs", "fp8", "fp8", "tensor", f"quantised outside the timing, {path}", launches)


def ours_fp8_kernel(sets: Sequence[QKV], causal: bool) -> Iterator[Contender]:
    """The attention kernel of precision="fp8" by itself: with one scale a tensor, as FA3's has, and as balanced."""
    from .bench_alone import kernel_alone

    arch = _device_of(sets).arch
    for name, preset in (("kernel", "per_tensor"), ("kernel-balanced", "balanced")):
        _, config, _ = _chosen(sets[0], causal, "fp8")
        if config.recipe == "none":  # BF16 was faster end to end
            _, config, _ = _chosen(sets[0], causal, f"fp8:{preset}")
        config = dataclasses.replace(config, recipe=PRESETS[preset])
        path = f"kernel alone, quantised outside the timing: {config}"
        launches = [kernel_alone(qkv, config, arch, causal) for qkv in sets]
        yield Contender(f"{OURS}-fp8-{name}", "fp8", "fp8", config.recipe, path, launches)


def _device_of(sets: Sequence[QKV]) -> Device:
    return current_device(sets[0][0].device.index or 0)


def contenders_of(
    sets: Sequence[QKV], causal: bool, dtypes: Iterable[str], peers: Sequence[Peer] = PEERS
) -> tuple[list[Contender], dict[str, str]]:
    """Everything that can be timed on these inputs, and why the others cannot."""
    made: list[Contender] = []
    skipped: dict[str, str] = {}
    for dtype in dtypes:
        made += ours(sets, causal, dtype)
        if dtype == "fp8":
            made += [ours_fp8_inputs(sets, causal), *ours_fp8_kernel(sets, causal)]
    for peer in peers:
        if peer.dtype == "fp8" and "fp8" not in dtypes:
            continue
        try:
            made.append(peer.make(peer.name, sets, causal))
        except Exception as error:  # other people's code: whatever it raises is the reason, and is printed
            skipped[peer.name] = first_line(error)
    return made, skipped


def time_side_by_side(
    contenders: Iterable[Contender], calls: int, effort: Effort, make_sampler: MakeSampler = GraphSampler
) -> tuple[list[tuple[Contender, Timing]], dict[str, str]]:
    """Timings of all contenders in interleaved rounds, and why others fell out: failed, or computed something else.

    Every output is compared with that of the first contender, which must work.
    """
    ready: list[Contender] = []
    samplers: list[Sampler] = []
    skipped: dict[str, str] = {}
    wanted = None
    for contender in contenders:
        try:
            got = _ends(contender.launches[0]())
            wanted = got if wanted is None else wanted
            _check_same(got, wanted)
            launches = [contender.launches[i % len(contender.launches)] for i in range(calls)]
            sampler = rested(make_sampler(launches), calls)
        except Exception as error:  # as above
            if not ready:
                raise
            skipped[f"{contender.name} {contender.dtype}"] = first_line(error)
            continue
        ready.append(contender)
        samplers.append(sampler)
    rounds = max(3, min(effort.max_rounds, int(effort.budget_s / _seconds(samplers))))
    return list(zip(ready, paired(samplers, rounds), strict=True)), skipped


def _ends(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:, :CHECKED_ROWS], out[:, -CHECKED_ROWS:]], 1).float()


def _check_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    difference = relative_error(got, wanted)
    if not difference <= MAX_DIFFERENCE:
        raise ValueError(f"wrong result: {difference:.3g} away from the first contender's")


def _seconds(samplers: Iterable[Sampler]) -> float:
    start = time.perf_counter()
    for sampler in samplers:
        sampler()
    return time.perf_counter() - start


def rows_of(
    shape: Shape,
    causal: bool,
    timed: Sequence[tuple[Contender, Timing]],
    skipped: dict[str, str],
    sku: str | None = None,
) -> ShapeResult:
    """The rows of one shape; peers are compared like everybody else, so the best one has ratio 1.

    sku: of the GPU; roofline is the share of its documented peak at the row's dtype, None where no document is known.
    """
    work = flops(key_of(shape, "bf16", causal))
    rows, spreads = [], []
    for contender, timing in timed:
        rivals = [(c, t) for c, t in timed if not c.name.startswith(OURS) and _is_rival(c, contender)]
        best, best_timing = min(rivals, key=lambda rival: rival[1].ms, default=(None, None))
        us, best_us = timing.ms * 1e3, best_timing.ms * 1e3 if best_timing else None
        rows.append({
            "name": contender.name, "batch": shape.batch, "nheads": shape.nheads, "nheads_k": shape.nheads_k,
            "head_dim": shape.head_dim, "seqlen": shape.seqlen, "causal": causal, "dtype": contender.dtype,
            "recipe": contender.recipe, "us": us, "us_lo": timing.ms_lo * 1e3, "us_hi": timing.ms_hi * 1e3,
            "tflops": work / us / 1e6, "roofline": roofline(work / us / 1e6, sku, contender.dtype),
            "path": contender.path, "best_peer": best.name if best else None,
            "best_peer_us": best_us, "ratio": best_us / us if best_us else None,
        })  # fmt: skip
        spreads.append(_spread(best_timing, timing) if best_timing else None)
    return ShapeResult(rows, spreads, skipped)


def roofline(tflops: float, sku: str | None, dtype: str) -> float | None:
    """tflops over the peak of dense products of a dtype on a SKU; None if that is not known."""
    return tflops / peak_tflops(DEVICES[sku], dtype) if sku in DEVICES else None


def _is_rival(peer: Contender, contender: Contender) -> bool:
    """A BF16 peer also competes with FP8 on BF16 inputs: nobody trades accuracy for a loss. Not the other way round."""
    return peer.starts_from == contender.starts_from and peer.dtype in ("bf16", contender.dtype)


def _spread(best: Timing, timing: Timing) -> tuple[float, float]:
    return interval([a / b for a, b in zip(best.samples, timing.samples, strict=True)])


def measure_shape(
    shape: Shape,
    causal: bool,
    dtypes: Sequence[str],
    sets: Sequence[QKV],
    effort: Effort = DEFAULT,
    make_sampler: MakeSampler = GraphSampler,
) -> ShapeResult:
    """Times everything on one shape and mask."""
    contenders, absent = contenders_of(sets, causal, dtypes)
    calls = max(len(sets), min(MAX_CALLS, int(ROUND_FLOPS / flops(key_of(shape, "bf16", causal)))))
    timed, failed = time_side_by_side(contenders, calls, effort, make_sampler)
    return rows_of(shape, causal, timed, absent | failed, _device_of(sets).sku)
