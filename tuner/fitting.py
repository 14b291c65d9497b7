"""Fits the model's open numbers to timed configs: a few coordinates, walked one after the other in shrinking steps."""

import math
import statistics
from collections.abc import Sequence

from .evidence import Landscape
from .model import DEVICES, nominal_ms
from .rates import Fit

ROUNDS = 3
NEAR = 0.3  # slowdown over which a config's weight falls by e: the order of the fast ones is what counts
LEVEL_WEIGHT = 0.2  # of an error that all configs of a call share, which no order shows
# First step of each number, and the values that it may take.
STEPS: dict[str, tuple[float, float, float]] = {
    "overlap.0": (0.1, -0.6, 1.0), "overlap.1": (0.1, -0.6, 1.0), "overlap.2": (0.1, -0.6, 1.0),
    "stall": (100, 0, 2000), "drain": (25, 0, 500), "barrier": (8, 0, 100), "scratch": (2, 0, 40),
    "overhead": (1500, 0, 30000), "clock_fraction": (0.05, 0.3, 1.0), "launch_ms": (7e-4, 2e-4, 0.02),
    "quantiser_fraction": (0.1, 0.05, 1.0),
}  # fmt: skip


def fit(landscapes: Sequence[Landscape], start: Fit, names: Sequence[str] = tuple(STEPS), rounds: int = ROUNDS) -> Fit:
    """The Fit near `start` with the least loss(); only the named numbers move."""
    best, least = start, loss(landscapes, start)
    for number in range(rounds):
        for name in names:
            step = STEPS[name][0] / 2**number
            for direction in (step, -step):
                while (moved := _moved(best, name, direction)) and (at := loss(landscapes, moved)) < least - 1e-5:
                    best, least = moved, at
    return best


def loss(landscapes: Sequence[Landscape], fit: Fit) -> float:
    """Mean over calls of the error in log time: the weighted spread around its median, and a part of the median."""
    each = []
    for landscape in landscapes:
        device, key = DEVICES[landscape.sku], landscape.key
        best = min(t.ms for t in landscape.timed)
        errors = [math.log(nominal_ms(t.facts, key, t.config, device, fit) / t.ms) for t in landscape.timed]
        weights = [math.exp(-(t.ms / best - 1) / NEAR) for t in landscape.timed]
        level = statistics.median(errors)
        spread = sum(w * abs(e - level) for w, e in zip(weights, errors, strict=True)) / sum(weights)
        each.append(spread + LEVEL_WEIGHT * abs(level))
    return statistics.mean(each)


def _moved(fit: Fit, name: str, step: float) -> Fit | None:
    """The fit with one number changed, None where that leaves its range."""
    _, low, high = STEPS[name]
    field, _, index = name.partition(".")
    before = getattr(fit, field)
    value = (before[int(index)] if index else before) + step
    if not low <= value <= high:
        return None
    value = round(value, 6)
    whole = (*before[: int(index)], value, *before[int(index) + 1 :]) if index else value
    return Fit(**fit._asdict() | {field: whole})
