"""What a worker does with its GPU: makes inputs, checks a config against the reference, times it."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels.launch import attention_forward
from zyfa.reference import attention_ref, emulate, relative_error

from .plan import flops
from .sensors import Reading, nothing, reader
from .timing import GraphSampler, Repeats, collect, paired, summarise
from .worker import Job, Result

FP8_MAX_ERROR = 1.5  # times the error of the emulation of the same recipe: more is a wrong result
OUTLIER_CHANNELS, Q_SCALE, K_BIAS = 4, 4.0, 16.0  # real Q and K have a few wide channels and K large biases
CHECKED_ROWS = 256  # of each block of query rows that is compared, in CHECKED_HEADS heads
ROW_ALIGN = 128  # blocks start where the rows that share a scale start
RAGGED = 37  # rows and keys that the second check leaves out: no multiple of a tile or of 16
LAST_CACHE_BYTES = 256 << 20  # AMD's Infinity Cache, which torch does not report
ROUND_FLOPS = 2e11  # about 0.4 ms: a round of short calls is long against its two events
MAX_CALLS = 64
MEMORY_SHARE = 0.25  # of the GPU, for inputs that are kept
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Inputs(NamedTuple):
    """q, out (batch, seqlen_q, nheads, head_dim[_v]), k, v (batch, seqlen_k, nheads_k, ...) of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)

    def cut(self, rows: int) -> "Inputs":
        """Views without the last rows of queries and keys."""
        return Inputs(*(x[:, : x.shape[1] - rows] for x in self))


class Expected(NamedTuple):
    """The exact output of some query rows in some heads, and the error that a correct kernel stays below."""

    slices: list[tuple[int, int]]
    heads: list[int]
    exact: torch.Tensor
    max_error: float


def make_inputs(key: AttentionKey, device: torch.device, seed: int) -> Inputs:
    """Normal data with outlier channels; zeros would draw less power, and plain N(0, 1) hides the error of recipes."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = TORCH_DTYPES[key.dtype]

    def normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn((key.batch, seqlen, heads, dim), generator=generator, device=device, dtype=dtype)

    q, k = normal(key.seqlen_q, key.nheads, key.head_dim), normal(key.seqlen_k, key.nheads_k, key.head_dim)
    channels = torch.randperm(key.head_dim, generator=generator, device=device)[:OUTLIER_CHANNELS]
    q[..., channels] *= Q_SCALE
    k[..., channels] += K_BIAS
    v = normal(key.seqlen_k, key.nheads_k, key.head_dim_v)
    return Inputs(q, k, v, torch.empty((*q.shape[:-1], key.head_dim_v), device=device, dtype=dtype))


def row_slices(key: AttentionKey) -> list[tuple[int, int]]:
    """First, middle and last block of the query rows; under a causal mask only those that see a key."""
    n = key.seqlen_q
    starts = {0, n // 2, max(n - CHECKED_ROWS, 0)} if n > 3 * CHECKED_ROWS else {*range(0, n, CHECKED_ROWS)}
    aligned = sorted(lo // ROW_ALIGN * ROW_ALIGN for lo in starts)
    slices = [(lo, n if lo == aligned[-1] else lo + CHECKED_ROWS) for lo in aligned]
    return [(lo, hi) for lo, hi in slices if not key.causal or lo + key.seqlen_k - n >= 0]


def expected(key: AttentionKey, inputs: Inputs, recipe: str, arch: str, max_error: float) -> Expected:
    """The reference of a call, computed where it is checked only.

    The bound is max_error times the error of the same maths in plain bf16 or fp16 or, with a recipe, FP8_MAX_ERROR
    times the error of its emulation.
    """
    slices = row_slices(key)
    heads = sorted({0, key.nheads - 1})
    kv_heads = [h // (key.nheads // key.nheads_k) for h in heads]
    calls = []
    for lo, hi in slices:
        seen = hi + key.seqlen_k - key.seqlen_q if key.causal else key.seqlen_k  # bottom-right aligned
        calls.append((inputs.q[:1, lo:hi, heads], inputs.k[:1, :seen, kv_heads], inputs.v[:1, :seen, kv_heads]))
    exact = torch.cat([attention_ref(*call, causal=key.causal) for call in calls], 1)

    if recipe == "none":
        low = functools.partial(attention_ref, dtype=torch.float32, p_dtype=inputs.q.dtype)
    else:
        low = functools.partial(emulate, recipe=recipe, arch=arch)
    error = relative_error(torch.cat([low(*call, causal=key.causal) for call in calls], 1), exact)
    return Expected(slices, heads, exact, (max_error if recipe == "none" else FP8_MAX_ERROR) * error)


class Evaluator:
    """Runs jobs on one device. Inputs and references are made once per shape and kept.

    cache_bytes: last-level cache, which the copies of a call's inputs must exceed. memory_bytes: for kept inputs.
    sensors: reads clocks, power and temperature, at the end of each timing.
    """

    def __init__(
        self, device: torch.device, arch: str, cache_bytes: int = 0, memory_bytes: float = float("inf"),
        sensors: Callable[[], Reading] = nothing,
    ):  # fmt: skip
        self._device, self._arch, self._sensors = device, arch, sensors
        self._cache_bytes, self._memory_bytes = cache_bytes, memory_bytes
        self._inputs: dict[AttentionKey, list[Inputs]] = {}
        self._expected: dict[tuple, Expected] = {}

    @classmethod
    def on_gpu(cls, gpu: int, arch: str) -> "Evaluator":
        """For a GPU of this process, which becomes the current one."""
        torch.cuda.set_device(gpu)
        props = torch.cuda.get_device_properties(gpu)
        cache_bytes = LAST_CACHE_BYTES if torch.version.hip else props.L2_cache_size
        return cls(torch.device("cuda", gpu), arch, cache_bytes, MEMORY_SHARE * props.total_memory, reader(gpu))

    def __call__(self, job: Job) -> list[Result]:
        """One Result for each config of the job; those that are right are timed side by side if there are several."""
        results = [self._checked(job, config) for config in job.configs]
        valid = [i for i, result in enumerate(results) if result.outcome == "ok"]
        if len(job.configs) == 1:
            return [self._timed(job, job.configs[0], results[0])] if valid else results
        samplers = [self._sampler(job.key, job.configs[i]) for i in valid]
        for i, result in zip(valid, self._paired(samplers, job.repeats), strict=True):
            results[i] = results[i]._replace(**result)
        return results

    def _checked(self, job: Job, config: AttentionConfig) -> Result:
        """An ok Result with its error but without a time, or the reason why the config is none."""
        errors = []
        for rows in (0, RAGGED) if min(job.key.seqlen_q, job.key.seqlen_k) > 4 * RAGGED else (0,):
            try:
                error, bound = self._error(job, config, rows)
            except triton.runtime.errors.OutOfResources as failure:
                return Result("compile_failed", reason=str(failure).splitlines()[0])
            if not error <= bound:
                where = f" without the last {rows} rows" if rows else ""
                return Result("wrong", reason=f"error {error:.3g} exceeds {bound:.3g}{where}")
            errors.append(error)
        return Result("ok", rel_err=max(errors))

    def _error(self, job: Job, config: AttentionConfig, rows: int) -> tuple[float, float]:
        """(relative error, bound) of a call without its last rows; NaN if any output is not finite or not written."""
        whole = self._sets(job.key)[0]
        cut = whole.cut(rows)
        key = job.key._replace(seqlen_q=job.key.seqlen_q - rows, seqlen_k=job.key.seqlen_k - rows)
        name = (key, config.recipe, job.max_error)
        if name not in self._expected:
            self._expected[name] = expected(key, cut, config.recipe, self._arch, job.max_error)
        wanted = self._expected[name]
        whole.out.fill_(float("nan"))
        self._launch(key, config, cut)
        inside = bool(torch.isfinite(cut.out).all())
        outside = bool(torch.isnan(whole.out[:, key.seqlen_q :]).all())
        got = torch.cat([cut.out[:1, lo:hi, wanted.heads] for lo, hi in wanted.slices], 1)
        error = relative_error(got, wanted.exact) if inside and outside else float("nan")
        return error, wanted.max_error

    def _launch(self, key: AttentionKey, config: AttentionConfig, inputs: Inputs) -> None:
        q, k, v, out = inputs
        attention_forward(q, k, v, config=config, arch=self._arch, causal=key.causal, out=out)

    def _timed(self, job: Job, config: AttentionConfig, checked: Result) -> Result:
        sampler = self._sampler(job.key, config)
        try:
            timing = collect(sampler, sampler.calls, job.repeats, job.best_ms)
        except ValueError as error:  # a clock that stands still or runs backwards
            return Result("wrong", rel_err=checked.rel_err, reason=str(error))
        return checked._replace(**timing._asdict(), sensors=self._sensors())

    def _paired(self, samplers: Sequence[GraphSampler], repeats: Repeats) -> list[dict]:
        heated = [summarise([sampler() for _ in range(2)]).ms * sampler.calls for sampler in samplers]
        rounds = int(repeats.budget_ms * len(samplers) / max(sum(heated), 1e-6))
        rounds = max(repeats.min_rounds, min(rounds, repeats.max_rounds))
        timings = paired(samplers, rounds) if samplers else []
        sensors = self._sensors()
        return [timing._asdict() | {"sensors": sensors} for timing in timings]

    def _sampler(self, key: AttentionKey, config: AttentionConfig) -> GraphSampler:
        sets = self._sets(key)
        calls = max(len(sets), min(MAX_CALLS, int(ROUND_FLOPS / flops(key))))
        launches = [functools.partial(self._launch, key, config, sets[i % len(sets)]) for i in range(calls)]
        return GraphSampler(launches)

    def _sets(self, key: AttentionKey) -> list[Inputs]:
        """Copies of a shape's inputs, one more than the last-level cache holds. Mask and dtype share them."""
        shape = key._replace(causal=False, dtype="bf16" if key.dtype == "fp8" else key.dtype)
        if shape not in self._inputs:
            kept = sum(inputs.nbytes for sets in self._inputs.values() for inputs in sets)
            if kept > self._memory_bytes:
                self._inputs.clear()
            first = make_inputs(shape, self._device, seed=0)
            copies = min(MAX_CALLS, 1 + -(-self._cache_bytes // first.nbytes))
            self._inputs[shape] = [first, *(make_inputs(shape, self._device, seed) for seed in range(1, copies))]
        return self._inputs[shape]
