"""The samplers that a search may use, by name; all are Optuna's or speak its interface."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from zyfa.config import AttentionConfig

from .surrogate import Observation, Surrogate

DEFAULT = "surrogate"
SAMPLERS = {
    DEFAULT: "a Gaussian process over every legal config",
    "tpe": "Optuna's tree-structured Parzen estimator",
    "gp": "Optuna's Gaussian process (needs scipy)",
    "nsga2": "Optuna's NSGA-II",
    "random": "no model",
}


class CandidateSampler(optuna.samplers.BaseSampler):
    """Draws all fields at once, as the config that the surrogate proposes among the legal ones.

    known, running: what the study was told and what it waits for; both are read at each ask.
    """

    def __init__(
        self, surrogate: Surrogate, distributions: Mapping[str, BaseDistribution],
        candidates: Callable[[], Sequence[AttentionConfig]], known: Mapping[AttentionConfig, float | None],
        running: Iterable[AttentionConfig],
    ):  # fmt: skip
        self.surrogate, self._distributions, self._candidates = surrogate, dict(distributions), candidates
        self._known, self._running = known, running

    def infer_relative_search_space(self, study, trial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(self, study, trial, search_space) -> dict:
        config = self.surrogate.propose(self._candidates(), self._known, self._running)
        return {} if config is None else {name: getattr(config, name) for name in search_space}

    def sample_independent(self, study, trial, param_name, param_distribution):
        """Of a field that the search space has not: never asked for while a candidate is left."""
        return param_distribution.choices[0]


def make(
    name: str, space, distributions: Mapping[str, BaseDistribution], seed: int,
    evidence: Callable[[], Iterable[Observation]], known: Mapping[AttentionConfig, float | None],
    running: Iterable[AttentionConfig],
) -> optuna.samplers.BaseSampler:  # fmt: skip
    """The sampler of a name in SAMPLERS for a study.Space."""
    with warnings.catch_warnings():  # some of these are marked experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == DEFAULT:
            fields = {n: d.choices for n, d in distributions.items() if isinstance(d, CategoricalDistribution)}
            surrogate = Surrogate(space.key, fields, seed, evidence)
            return CandidateSampler(surrogate, distributions, space.candidates, known, running)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=seed)
        if name == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed)
        if name == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
