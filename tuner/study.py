"""The search of one cell: an Optuna study in memory that is asked and told, and never asks for the same config twice.

Seeds first, through enqueue_trial, then what the sampler draws (samplers.py). An illegal point is told as a violated
constraint, for TPE learns nothing from a failed trial: told that way, 93 % of 2,000 asks were illegal on a public
landscape. Repeats (20 to 50 % of TPE's asks) cost nothing: they are answered from what is known, and when they pile up
the nearest untried config is taken instead.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import optuna

from zyfa.config import AttentionConfig, AttentionKey

from . import samplers
from .space import FP8_RECIPES, broken_rule, candidates, suggest
from .surrogate import Observation, Surrogate

MAX_ASKS = 16  # of TPE for one new config, before a neighbour of the last one is taken
MIN_GAIN = 0.005  # a smaller gain is noise and does not prolong the search
FIRST_GAIN = 0.25  # what the first trials of a cell are held to promise, before there is a model to ask
CALM_AFTER, CALM = 24, 10  # configs told, and of them without a gain, before the model may end a search
VALID = "valid"  # the one constraint; Optuna's Gaussian process wants the same of every trial
NO_TIME = 1e9  # the value of an infeasible trial; TPE ranks those by their constraint alone

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Space:
    """What may be searched for one key: `suggest` draws a config, `broken_rule` names what forbids it, or None."""

    key: AttentionKey
    suggest: Callable[[optuna.Trial], AttentionConfig]
    broken_rule: Callable[[AttentionConfig], str | None]
    candidates: Callable[[], Sequence[AttentionConfig]]  # every legal config

    @classmethod
    def of(cls, key: AttentionKey, arch: str, recipes: tuple[str, ...] = FP8_RECIPES) -> "Space":
        """What space.py lets a key choose from on an architecture; recipes: of FP8."""
        return cls(
            key,
            lambda trial: suggest(trial, key, arch, recipes),
            lambda config: broken_rule(config, key, arch),
            lambda: candidates(key, arch, recipes),
        )


class CellStudy:
    """Asks for configs that were not tried yet, starting with the seeds, and learns from what it is told.

    sampler: a name in samplers.SAMPLERS. evidence: gives what is known of other keys, which the default sampler uses.
    times: ms of each config told, None where it has no valid time, in the order of telling.
    """

    def __init__(
        self, space: Space, seeds: Iterable[AttentionConfig], seed: int, sampler: str = samplers.DEFAULT,
        evidence: Callable[[], Iterable[Observation]] = tuple,
    ):  # fmt: skip
        self._space = space
        self._seeds = list(seeds)
        self._random = random.Random(seed)
        self._running: dict[AttentionConfig, optuna.Trial | None] = {}
        self.times: dict[AttentionConfig, float | None] = {}
        self._promised = -1, 0.0  # at how many configs told, and how much
        self.illegal_asks = 0  # what the sampler drew in vain
        self._distributions = _distributions(space)
        kinds = self._distributions.items()
        self._choices = {n: d.choices for n, d in kinds if isinstance(d, optuna.distributions.CategoricalDistribution)}
        made = samplers.make(sampler, space, self._distributions, seed, evidence, self.times, self._running)
        self._study = optuna.create_study(direction="minimize", sampler=made)

    @property
    def pending(self) -> int:
        """Configs that were asked for and not told yet."""
        return len(self._running)

    @property
    def seeds_left(self) -> list[AttentionConfig]:
        """Seeds that were not asked for yet; one may have become illegal since, as what failed in another cell."""
        known = {*self.times, *self._running}
        return [config for config in self._seeds if config not in known and self._space.broken_rule(config) is None]

    def ask(self) -> AttentionConfig | None:
        """A legal config that was never asked for; None when there is none left."""
        if seeds := self.seeds_left:
            self._running[seeds[0]] = self._enqueued(seeds[0]) if self._in_space(seeds[0]) else None
            return seeds[0]
        for _ in range(MAX_ASKS):
            trial = self._study.ask()
            config = self._space.suggest(trial)
            if self._space.broken_rule(config) is not None:
                self.illegal_asks += 1
                self._infeasible(trial)
            elif config in self.times:
                self._answer(trial, self.times[config])
            elif config in self._running:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self._running[config] = trial
                return config
        return self._nearest_untried(config)

    def recipes(self) -> set[str]:
        """Of all configs that were asked for."""
        return {config.recipe for config in (*self.times, *self._running)}

    def _enqueued(self, config: AttentionConfig) -> optuna.Trial:
        """A trial of this config, which the sampler did not choose."""
        self._study.enqueue_trial({name: getattr(config, name) for name in self._distributions})
        trial = self._study.ask()
        self._space.suggest(trial)
        return trial

    def claim(self, config: AttentionConfig) -> bool:
        """Marks a config as being evaluated; False if it is or was already."""
        if config in self._running or config in self.times:
            return False
        self._running[config] = None
        return True

    def _untried(self) -> list[AttentionConfig]:
        return [c for c in self._space.candidates() if c not in self.times and c not in self._running]

    def exhausted(self) -> bool:
        """Whether every legal config was asked for. Slow: goes through all of them."""
        return not self._untried()

    def _nearest_untried(self, wanted: AttentionConfig) -> AttentionConfig | None:
        untried = self._untried()
        if not untried:
            return None
        names = list(self._distributions)
        distance = {c: sum(getattr(c, n) != getattr(wanted, n) for n in names) for c in untried}
        least = min(distance.values())
        config = self._random.choice([c for c in untried if distance[c] == least])
        self._running[config] = None
        return config

    def tell(self, config: AttentionConfig, ms: float | None) -> None:
        """The outcome of a config: its time, or None if it has none because it failed in whatever way."""
        trial = self._running.pop(config, None)
        self.times.setdefault(config, ms)
        if trial is not None:
            self._answer(trial, ms)
        elif self._in_space(config):
            self._study.add_trial(self._frozen(config, ms))

    def forget(self, config: AttentionConfig) -> None:
        """The evaluation of a config was given up; it counts as never asked for."""
        trial = self._running.pop(config, None)
        if trial is not None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def _in_space(self, config: AttentionConfig) -> bool:
        """A seed may hold values that TPE cannot draw; it is evaluated, but the model cannot hold it."""
        return all(getattr(config, name) in choices for name, choices in self._choices.items())

    def _answer(self, trial: optuna.Trial, ms: float | None) -> None:
        if ms is None:
            self._infeasible(trial)
        else:
            trial.set_constraint(VALID, 0.0)
            self._study.tell(trial, ms)

    def _infeasible(self, trial: optuna.Trial) -> None:
        trial.set_constraint(VALID, 1.0)
        self._study.tell(trial, NO_TIME)

    def _frozen(self, config: AttentionConfig, ms: float | None) -> optuna.trial.FrozenTrial:
        return optuna.trial.create_trial(
            value=NO_TIME if ms is None else ms,
            params={name: getattr(config, name) for name in self._distributions},
            distributions=self._distributions,
            constraints={VALID: 1.0 if ms is None else 0.0},
        )

    @property
    def best(self) -> AttentionConfig | None:
        """The config with the least time, of equal ones (within 0.1 %) the first told; None without a valid one."""
        valid = {config: ms for config, ms in self.times.items() if ms is not None}
        least = min(valid.values(), default=0.0)
        return next((config for config, ms in valid.items() if ms <= least * 1.001), None)

    @property
    def since_gain(self) -> int:
        """Configs told since the best time last fell by MIN_GAIN; all of them while there is no valid one."""
        best, since = float("inf"), 0
        for ms in self.times.values():
            since += 1
            if ms is not None and ms < best * (1 - MIN_GAIN):
                best, since = ms, 0
        return since

    def finished(self, trials: int, patience: int, min_gain: float = 0.0) -> bool:
        """Whether enough was told: `trials` configs, `patience` in a row without a gain, or so many that the next one
        is expected to gain less than min_gain.

        A function of what was told alone, so that a resumed run agrees with the one that was stopped.
        """
        told, calm = len(self.times), self.since_gain
        if told >= trials or self.best is None:
            return told >= trials
        return (told > patience <= calm) or (told >= CALM_AFTER and calm >= CALM and self._promise() < min_gain)

    def _promise(self) -> float:
        """Expected gain of the most promising config, as a share of the time, by what was told of this key alone."""
        if self._promised[0] != len(self.times):
            judge = Surrogate(self._space.key, self._choices, 0)
            judge.propose(self._space.candidates(), self.times, ())
            self._promised = len(self.times), judge.gain or 0.0
        return self._promised[1]

    def expected_gain(self) -> float:
        """How promising another trial is, as a share of the time; what is in flight counts against it."""
        surrogate = self._surrogate()
        gain = surrogate.gain if surrogate else None
        return (FIRST_GAIN / (1 + self.since_gain) if gain is None else gain) / (1 + self.pending)

    def expected_regret(self) -> float | None:
        """Share of the time by which the best so far is expected to miss the best of all configs; None if unknown."""
        surrogate = self._surrogate()
        return surrogate.regret if surrogate else None

    def _surrogate(self) -> Surrogate | None:
        sampler = self._study.sampler
        return sampler.surrogate if isinstance(sampler, samplers.CandidateSampler) else None


def _distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """What `suggest` draws from, read off one trial of a study that is thrown away."""
    probe = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    space.suggest(probe)
    return probe.distributions
