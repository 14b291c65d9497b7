"""One protocol for every time that ZYFA stores: device time, cold L2, warm clocks, as many repeats as needed.

A sampler runs the calls of one round and returns the mean ms of a call. The calls of a round walk over copies of the
inputs that together exceed the last-level cache, so each finds its own data evicted; a round is one graph replay
between two events, so that the time of the host (8 to 40 us a launch) stays out of it.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# (rounds, ratio): a candidate whose fastest round is so much slower than the best is given up after so many.
GIVE_UP = ((3, 1.5), (5, 1.15))
HOPELESS_RATIO = 4.0  # no cold clock explains this much: given up within the heat-up
ENOUGH = 0.005  # half width of the interval, relative to the median, at which more rounds tell nothing
MIN_GAIN = 0.005  # a candidate must beat the default config by this much in the paired rounds
STORED_GAIN = 0.01  # and a stored winner by this: a row that changes at every run is no use to anyone
CONFIDENCE_Z = 1.96  # 95 %
MAX_GAP_S = 0.05

Sampler = Callable[[], float]
MakeSampler = Callable[[Sequence[Callable[[], object]]], Sampler]


class Timing(NamedTuple):
    """Median of the samples and its 95 % interval, all ms of one call."""

    ms: float
    ms_lo: float
    ms_hi: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Repeats:
    """How long one candidate is timed: ms of heat-up, rounds, and the ms after which no further round starts."""

    heat_ms: float = 10.0
    min_rounds: int = 5
    max_rounds: int = 40
    budget_ms: float = 60.0


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """The order statistics that enclose the median with 95 % confidence; the extremes of fewer than six samples."""
    ordered, n = sorted(samples), len(samples)
    below = math.floor((n - CONFIDENCE_Z * math.sqrt(n)) / 2)
    return (ordered[below], ordered[n - 1 - below]) if n >= 6 and below >= 0 else (ordered[0], ordered[-1])


def summarise(samples: Sequence[float]) -> Timing:
    """The Timing of samples; raises ValueError when one is no possible time (zero, negative, infinite, NaN)."""
    for ms in samples:
        if not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"{ms} ms is no possible time")
    return Timing(statistics.median(samples), *interval(samples), tuple(samples))


def collect(sample: Callable[[], float], calls: int, repeats: Repeats, best_ms: float | None = None) -> Timing:
    """Times one candidate until its median is known well, the budget is spent, or it is clearly slower than best_ms.

    sample: runs one round of `calls` calls. Rounds that only heat up are not samples, except of a hopeless candidate.
    """
    cold = _heat(sample, calls, repeats.heat_ms, best_ms)
    if cold is not None:
        return summarise([cold])
    samples: list[float] = []
    while True:
        samples.append(sample())
        timing = summarise(samples)
        precise = timing.ms_hi - timing.ms_lo <= 2 * ENOUGH * timing.ms and len(samples) >= repeats.min_rounds
        spent = len(samples) >= repeats.max_rounds or sum(samples) * calls >= repeats.budget_ms
        if precise or spent or _hopeless(samples, best_ms):
            return timing


def _heat(sample: Callable[[], float], calls: int, heat_ms: float, best_ms: float | None) -> float | None:
    """Runs rounds for heat_ms: by time, as clocks settle in milliseconds whatever the size of the call.

    Returns the ms of a round that HOPELESS_RATIO rules out already, else None.
    """
    spent = 0.0
    while spent < heat_ms:
        ms = sample()
        summarise([ms])
        if best_ms is not None and ms > HOPELESS_RATIO * best_ms:
            return ms
        spent += ms * calls
    return None


def _hopeless(samples: Sequence[float], best_ms: float | None) -> bool:
    """Even its fastest round is too slow; one slow round (a clock change, a neighbour) decides nothing."""
    return best_ms is not None and any(n <= len(samples) and min(samples) > r * best_ms for n, r in GIVE_UP)


def rested(sampler: Sampler, calls: int) -> Sampler:
    """The sampler after a pause as long as its replay and one untimed replay.

    A board that runs back to back hits its power limit, and every kernel is then a tenth slower.
    """
    gap_s = min(MAX_GAP_S, max(0.005, sampler() * calls * 1e-3))

    def after_a_gap() -> float:
        time.sleep(gap_s)
        sampler()
        return sampler()

    return after_a_gap


def paired(samplers: Sequence[Callable[[], float]], rounds: int) -> list[Timing]:
    """Timings of several candidates side by side: each round times all of them, in an order that rotates and turns.

    Drift of clocks and temperature then meets every candidate alike, and samples[i] of all belong to one moment.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    for number in range(rounds):
        start = number % len(samplers)
        order = [*range(start, len(samplers)), *range(start)]
        for which in reversed(order) if number % 2 else order:
            samples[which].append(samplers[which]())
    return [summarise(s) for s in samples]


class Verdict(NamedTuple):
    """What a comparison found: index of the winner, of those that cannot be told from it, and its gain in percent
    over the incumbent, with the 95 % interval.
    """

    winner: int
    ties: tuple[int, ...]
    gain: float
    gain_lo: float
    gain_hi: float


def decide(timings: Sequence[Timing], incumbent: int = 0, min_gain: float = MIN_GAIN) -> Verdict:
    """The Verdict on candidates that were timed in pairs.

    The incumbent stays unless a candidate's rounds are faster by min_gain in the median and by anything at all with
    95 % confidence. A tie with the winner: the interval of the ratio of their rounds holds 1.
    """
    ratios = [_ratio(timing, timings[incumbent]) for timing in timings]
    better = [i for i, (mid, _, high) in enumerate(ratios) if mid <= 1 - min_gain and high < 1]
    winner = min(better, key=lambda i: ratios[i][0], default=incumbent)
    against = [_ratio(timing, timings[winner]) for timing in timings]
    ties = tuple(i for i, (_, low, high) in enumerate(against) if i != winner and low <= 1 <= high)
    mid, low, high = ratios[winner]
    return Verdict(winner, ties, 100 * (1 / mid - 1), 100 * (1 / high - 1), 100 * (1 / low - 1))


def _ratio(timing: Timing, base: Timing) -> tuple[float, float, float]:
    """Median of the ratios of rounds that belong together, and its 95 % interval."""
    ratios = [a / b for a, b in zip(timing.samples, base.samples, strict=True)]
    return statistics.median(ratios), *interval(ratios)


class GraphSampler:
    """Times launches on the current GPU: one round is one replay of a graph that holds every launch once.

    launches: functions of no arguments that start one call each on the current stream; each must have run before,
    since a capture can neither compile nor load code.
    """

    def __init__(self, launches: Sequence[Callable[[], object]]):
        import torch

        self.calls = len(launches)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph() would empty the allocator's cache each time
            self._graph.capture_begin()
            try:
                for launch in launches:
                    launch()
            finally:
                self._graph.capture_end()

    def __call__(self) -> float:
        """Mean ms of a call in one round."""
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / self.calls
