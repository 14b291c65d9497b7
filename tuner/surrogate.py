"""A Gaussian process over configs that are listed one by one: which of them is worth timing next.

The spaces of one cell hold some hundred legal configs, so the surrogate is asked about each of them and never proposes
an illegal or a known one. Times enter as their logarithm (a ratio is what matters) of ms over operations, which makes
cells of other lengths evidence too: how far they count is one more length scale, fitted with the others.
Method: expected improvement (Jones et al. 1998) under a Matern-5/2 kernel with one scale per field, fitted by the
marginal likelihood with a log-normal prior on the scales. Failures lower the chance of what shares fields with them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from zyfa.config import AttentionConfig, AttentionKey

from .plan import flops

CAP = 1.0  # log(ms) above the best: how much worse a config is than 2.7 times the best says nothing about the best
NOISE = 1e-4  # variance of a standardised time; repeat noise is a few tenths of a percent
PRIOR_MEAN, PRIOR_STD = math.log(0.4), 1.2  # of the logarithm of a squared inverse length
STEPS = (-0.9, 0.9)  # of that logarithm, tried in turn for each field
REFIT = 4  # tells between two fits of the scales
FIRST_SWEEPS = 2  # over all fields, of the first fit
DRAWN, DRAWS = 48, 64  # configs, and joint samples of them, that the regret is estimated from
FIT_ROWS = 96  # times that a fit looks at: 50 inversions of so many rows take 30 ms
HOPELESS = 0.25  # chance of being valid below which a config is left for the end
MAX_EVIDENCE = 240  # times from other cells at most; an inversion of 300 rows takes 4 ms
MAX_POOL = 4000  # configs that are scored in one go: 50 ms


class Observation(NamedTuple):
    """A config that was tried for a key; ms is None where it failed. foreign: under another toolchain."""

    key: AttentionKey
    config: AttentionConfig
    ms: float | None
    foreign: bool = False


Point = tuple[AttentionKey, AttentionConfig] | tuple[AttentionKey, AttentionConfig, bool]


class Surrogate:
    """Proposes configs for one key, from what was told of it and from `evidence` of other cells, asked for each time.

    fields: values by field, as the search space lists them; others are constant. Of the last proposal, as shares of the
    best time so far: gain is its expected improvement, regret that of the best untried config, were it known.
    """

    gain: float | None = None
    regret: float | None = None

    def __init__(
        self, key: AttentionKey, fields: Mapping[str, Sequence], seed: int,
        evidence: Callable[[], Iterable[Observation]] = tuple,
    ):  # fmt: skip
        self._key, self._random = key, np.random.default_rng(seed)
        self._fields = {name: tuple(values) for name, values in fields.items() if len(values) > 1}
        self._evidence = evidence
        self._scales: np.ndarray | None = None
        self._fitted = 0
        self._known_rows: dict[Point, list[float]] = {}

    def propose(
        self,
        pool: Sequence[AttentionConfig],
        times: Mapping[AttentionConfig, float | None],
        running: Iterable[AttentionConfig],
    ) -> AttentionConfig | None:
        """The config of the pool, neither known nor running, that promises most; None if there is none left."""
        busy = {*times, *running}
        untried = [config for config in pool if config not in busy]
        if len(untried) > MAX_POOL:
            untried = [untried[i] for i in self._random.choice(len(untried), MAX_POOL, replace=False)]
        if not untried:
            return None
        known = [Observation(self._key, config, ms) for config, ms in times.items() if ms is not None]
        seen = [each for each in self._evidence() if each.ms is not None][-MAX_EVIDENCE:] + known
        if len(seen) < 2:
            return untried[self._random.integers(len(untried))]
        score = self._expected_improvement(seen, len(known), untried, [*running])
        self.gain = float(score.max())
        score += 1e-9 * self._random.random(len(untried))  # where nothing promises anything
        chance = self._chance(times, untried)
        score *= np.where(chance < HOPELESS, 0.0, chance)
        return untried[int(score.argmax())]

    # --- what the model sees -----------------------------------------------------------------------------------------

    def _rows(self, points: Iterable[Point]) -> np.ndarray:
        """(points, features): sizes as logarithms, everything else as one column per value."""
        known = self._known_rows
        return np.array([known.get(point) or known.setdefault(point, self._row(*point)) for point in points])

    def _row(self, key: AttentionKey, config: AttentionConfig, foreign: bool = False) -> list[float]:
        row: list[float] = []
        for name, values in self._fields.items():
            value = getattr(config, name)
            if _is_size(values):
                row.append(math.log2(value))
            else:
                row += [math.sqrt(0.5) * (value == other) for other in values]
        sizes = key.batch * key.nheads, key.seqlen_q, key.seqlen_k
        return row + [math.log2(size) / 2 for size in sizes] + [float(key.causal), float(foreign)]

    def _columns(self) -> np.ndarray:
        """Which field a feature belongs to: the columns of one field share a scale."""
        widths = [1 if _is_size(values) else len(values) for values in self._fields.values()]
        return np.repeat(np.arange(len(widths) + 5), [*widths, 1, 1, 1, 1, 1])

    # --- the model ---------------------------------------------------------------------------------------------------

    def _expected_improvement(self, seen, known: int, untried, running) -> np.ndarray:
        x = self._rows((each.key, each.config, each.foreign) for each in seen)
        y = np.array([math.log(each.ms / flops(each.key)) for each in seen])
        own = y[len(seen) - known :] if known else y
        y = np.minimum(y, own.min() + CAP)
        mean, std = own.clip(max=own.min() + CAP).mean(), max(y.std(), 1e-3)
        y = (y - mean) / std
        self._fit(x, y)
        new = self._rows((self._key, config) for config in untried)
        best = y[len(seen) - known :].min() if known else y.min()
        if running:  # what is in flight is believed to come out as expected, so that the next one is elsewhere
            z = self._rows((self._key, config) for config in running)
            x, y = np.vstack([x, z]), np.append(y, self._posterior(x, y, z)[0])
        mu, sigma = self._posterior(x, y, new)
        score = _improvement(best - mu, sigma)
        self.regret = std * self._expected_regret(x, y, new[np.argsort(-score)[:DRAWN]], best)
        return std * score

    def _expected_regret(self, x: np.ndarray, y: np.ndarray, new: np.ndarray, best: float) -> float:
        """Mean of what the best of `new` is better than the best known, over joint samples of the posterior."""
        assert self._scales is not None
        cross = self._kernel(new, x, self._scales)
        solved = np.linalg.solve(self._kernel(x, x, self._scales) + NOISE * np.eye(len(x)), cross.T)
        covariance = self._kernel(new, new, self._scales) - cross @ solved + 1e-6 * np.eye(len(new))
        noise = np.random.default_rng(0).standard_normal((len(new), DRAWS))  # its own, so that proposals do not shift
        draws = (y @ solved)[:, None] + np.linalg.cholesky(covariance) @ noise
        return float((best - draws.min(0)).clip(min=0).mean())

    def _kernel(self, a: np.ndarray, b: np.ndarray, scales: np.ndarray) -> np.ndarray:
        weights = np.exp(scales)[self._columns()]
        a, b = a * np.sqrt(weights), b * np.sqrt(weights)
        square = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
        r = np.sqrt(5 * square.clip(min=0))
        return (1 + r + r**2 / 3) * np.exp(-r)

    def _posterior(self, x: np.ndarray, y: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation at `new`."""
        assert self._scales is not None
        k = self._kernel(x, x, self._scales) + NOISE * np.eye(len(x))
        cross = self._kernel(new, x, self._scales)
        solved = np.linalg.solve(k, np.column_stack([y, cross.T]))
        variance = 1 - (cross * solved[:, 1:].T).sum(1)
        return cross @ solved[:, 0], np.sqrt(variance.clip(min=1e-9))

    def _fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Coordinate ascent, one field at a time and from the last fit."""
        if self._scales is not None and len(y) < self._fitted + REFIT:
            return
        self._fitted = len(y)
        if first := self._scales is None:
            self._scales = np.full(self._columns()[-1] + 1, PRIOR_MEAN)
        if len(y) > FIT_ROWS:  # the own times stand last and weigh most
            rows = self._random.choice(len(y), FIT_ROWS, replace=False, p=_rising(len(y)))
            x, y = x[rows], y[rows]
        best = self._likelihood(x, y, self._scales)
        sweeps = FIRST_SWEEPS if first else 1
        varied = {int(c) for c, column in zip(self._columns(), x.T, strict=True) if column.min() < column.max()}
        for field in sorted(varied) * sweeps:
            for step in STEPS:
                trial = self._scales.copy()
                trial[field] += step
                value = self._likelihood(x, y, trial)
                if value > best:
                    best, self._scales = value, trial

    def _likelihood(self, x: np.ndarray, y: np.ndarray, scales: np.ndarray) -> float:
        k = self._kernel(x, x, scales) + NOISE * np.eye(len(x))
        lower = np.linalg.cholesky(k)
        half = np.linalg.solve(lower, y)
        variance = float(half @ half) / len(y)  # of the whole process, at its best value
        fit = -np.log(np.diag(lower)).sum() - len(y) / 2 * math.log(max(1e-12, variance))
        return float(fit - (((scales - PRIOR_MEAN) / PRIOR_STD) ** 2).sum() / 2)

    def _chance(self, times: Mapping[AttentionConfig, float | None], untried) -> np.ndarray:
        """That a config is valid: naive Bayes over its fields, for it is mostly one or two of them that break it."""
        valid = [config for config, ms in times.items() if ms is not None]
        failed = [config for config, ms in times.items() if ms is None]
        if not failed:
            return np.ones(len(untried))
        odds = np.full(len(untried), (len(valid) + 9) / (len(failed) + 1))
        for name, values in self._fields.items():
            good, bad = (Counter(getattr(c, name) for c in configs) for configs in (valid, failed))
            ratio = {v: (good[v] + 1) / (bad[v] + 1) * (len(failed) + len(values)) / (len(valid) + len(values))
                     for v in values}  # fmt: skip
            odds *= [ratio[getattr(config, name)] for config in untried]
        return odds / (1 + odds)


def _rising(n: int) -> np.ndarray:
    """Chances that grow with the position, in sum 1."""
    weights = np.arange(1, n + 1)
    return weights / weights.sum()


def _is_size(values: Sequence) -> bool:
    """Whether a field's values are sizes, whose ratio matters, and no switch or enumeration."""
    return len(values) > 2 and all(type(value) is int and value > 0 for value in values)


def _improvement(gain: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Expected improvement of normal variables with mean gain and deviation sigma."""
    z = gain / sigma
    erf = np.vectorize(math.erf)
    return gain * 0.5 * (1 + erf(z / math.sqrt(2))) + sigma * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
