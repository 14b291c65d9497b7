"""How good an order of configs is against their measured times: rank correlation, regret, recall, with intervals."""

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .evidence import Timed

TIE_BREAKS = 32  # random orders of equal scores over which regret and recall are averaged


class Score(NamedTuple):
    """Of one landscape. tau: Kendall's, over pairs that noise does not tie; pairs of equal score count as no agreement.

    top1, top5: best time among the 1 or 5 ranked first over the best of all, minus 1. recall: share of the five fastest
    among the ten ranked first.
    """

    tau: float
    top1: float
    top5: float
    recall: float


def score(timed: Sequence[Timed], scores: Sequence[float]) -> Score:
    """The Score of scores (lower is better) for the timed configs; raises ValueError for fewer than two configs."""
    if len(timed) < 2:
        raise ValueError("an order needs two configs")
    rng = random.Random(0)
    best = min(t.ms for t in timed)
    fastest = set(sorted(range(len(timed)), key=lambda i: timed[i].ms)[:5])
    parts = []
    for _ in range(TIE_BREAKS if len(set(scores)) < len(scores) else 1):
        order = sorted(range(len(timed)), key=lambda i: (scores[i], rng.random()))
        first = [timed[i].ms / best - 1 for i in order[:5]]
        parts.append((first[0], min(first), len(fastest & set(order[:10])) / len(fastest)))
    return Score(kendall(timed, scores), *(statistics.mean(column) for column in zip(*parts, strict=True)))


def kendall(timed: Sequence[Timed], scores: Sequence[float]) -> float:
    """Agreeing minus disagreeing pairs over all pairs whose times differ by more than their noise; 0 if none does."""
    agree = pairs = 0
    for i, a in enumerate(timed):
        for j in range(i):
            b = timed[j]
            gap = math.log(a.ms / b.ms)
            if abs(gap) <= math.hypot(a.noise, b.noise):
                continue
            pairs += 1
            told = (scores[i] - scores[j]) * gap
            agree += (told > 0) - (told < 0)
    return agree / pairs if pairs else 0.0


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, between order statistics."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def summary(scores: Sequence[Score], resamples: int = 2000) -> dict[str, dict[str, float]]:
    """Statistic -> value with its 95 % bootstrap interval over landscapes."""
    statistics_of = {
        "tau_median": lambda s: statistics.median(x.tau for x in s),
        "top1_median": lambda s: statistics.median(x.top1 for x in s),
        "top1_p90": lambda s: quantile([x.top1 for x in s], 0.9),
        "top5_median": lambda s: statistics.median(x.top5 for x in s),
        "top5_p90": lambda s: quantile([x.top5 for x in s], 0.9),
        "recall_mean": lambda s: statistics.mean(x.recall for x in s),
    }
    rng = random.Random(0)
    draws = [[rng.choice(scores) for _ in scores] for _ in range(resamples)]
    result = {}
    for name, of in statistics_of.items():
        values = [of(draw) for draw in draws]
        numbers = {"value": of(scores), "lo": quantile(values, 0.025), "hi": quantile(values, 0.975)}
        result[name] = {which: round(number, 5) for which, number in numbers.items()}
    return result
