"""What a run knows: its settings, the tools it calls, and the state of each cell."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuning_db.reader import Row
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Trial

from . import samplers
from .compile import Build
from .effort import Effort
from .facts import Facts
from .model import Prediction
from .plan import PlannedCell
from .study import MIN_GAIN, CellStudy, Space
from .worker import Result

FINALIST_TRIALS = 3  # that one finalist takes as long as


class Tools(NamedTuple):
    """Everything the coordinator calls, so that tests can put something else in its place."""

    space: Callable[[AttentionKey], Space]
    seeds: Callable[[AttentionKey], list[AttentionConfig]]  # the default config first
    compile: Callable[[AttentionKey, AttentionConfig], "Future[Build]"]
    gate: Callable[[Facts, AttentionKey, AttentionConfig], str | None]
    predict: Callable[[Facts, AttentionKey, AttentionConfig], Prediction] | None
    lent: Callable[[], Sequence[Row]] = tuple  # winners of shipped databases, to start from


@dataclass(frozen=True)
class Setup:
    """What is the same for every cell of a run. deadline: of time.monotonic(). lookahead: trials in flight.

    max_error: of bf16 and fp16, as a multiple of the plain dtype's. admits: may this config win its cell?
    fronted: does this config count as the best of its recipe, admitted or not? None does unless fronts are wanted.
    """

    method: str  # "measure", "predict" or "compile"
    toolchain: Toolchain
    effort: Effort
    lookahead: int
    max_error: float = 2.0
    seed: int = 0
    sampler: str = samplers.DEFAULT
    fresh: bool = False
    recheck: bool = False  # time what is stored of each cell again, and search no further
    deadline: float = math.inf
    admits: Callable[[AttentionKey, AttentionConfig], bool] = lambda key, config: True
    fronted: Callable[[AttentionKey, AttentionConfig], bool] = lambda key, config: False

    @property
    def patience(self) -> int:
        """Trials without a gain that end a cell. Not of predictions: one build serves all lengths, so none is waste."""
        return self.effort.patience if self.method == "measure" else self.effort.trials

    @property
    def min_gain(self) -> float:
        """Expected gain of a trial below which a cell ends; predictions, again, are searched to their end."""
        return MIN_GAIN if self.method == "measure" else 0.0

    @property
    def trust(self) -> str:
        return "measured" if self.method == "measure" else "predicted"


@dataclass
class CellRun:
    """One cell of the run. results: the valid trials by config, with their number in the log."""

    planned: PlannedCell
    default: AttentionConfig
    state: str = "waiting"  # -> "searching" -> "comparing" -> "done", "failed" or "stopped"
    resumed: int = 0  # trials that were in the log already
    known: bool = False  # nothing was left to do
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    results: dict[AttentionConfig, tuple[int, Result]] = field(default_factory=dict)
    confidences: dict[AttentionConfig, str] = field(default_factory=dict)
    winner: tuple[AttentionConfig, Result] | None = None
    confidence: str = ""
    default_ms: float | None = None
    incumbent: AttentionConfig | None = None  # the winner that was stored before the run, whatever its toolchain
    gain: tuple[float, float, float] | None = None  # of the winner over the incumbent, percent, with its interval
    ties: int = 0  # finalists that cannot be told from the winner
    exhausted: bool = False
    recipes: frozenset[str] = frozenset()  # that a front has to have tried
    study: CellStudy = field(init=False)
    gpu: int = -1
    begun: float = 0.0  # time.monotonic() when its search started

    def count(self, outcome: str, reason: str) -> None:
        """One more trial; reasons are counted up to their first colon, where the numbers begin."""
        self.outcomes[outcome] += 1
        if reason:
            self.reasons[reason.split(":")[0]] += 1

    @property
    def key(self) -> AttentionKey:
        return self.planned.key

    @property
    def family(self) -> tuple:
        return family_of(self.key)

    @property
    def started(self) -> bool:
        """Whether the cell has a study."""
        return self.state != "waiting"

    def seconds_left(self, trials: int, patience: int, now: float) -> float | None:
        """At most so long until the search of the cell ends, at its own pace so far; None where there is none yet."""
        if self.state != "searching" or (told := len(self.study.times)) <= self.resumed:
            return None
        left = trials - told if self.study.best is None else min(trials - told, patience - self.study.since_gain)
        return max(left, 0) * (now - self.begun) / (told - self.resumed)

    def work_left(self, effort: Effort) -> int:
        """At most so many trials of its GPU, with the comparison at the end as some."""
        if self.state not in ("searching", "comparing"):
            return 0
        trials = max(effort.trials - len(self.study.times), 0) if self.state == "searching" else 0
        return trials + FINALIST_TRIALS * (effort.finalists + 1)

    @property
    def best_ms(self) -> float | None:
        best = self.study.best if self.state != "waiting" else None
        return None if best is None else self.study.times[best]


class Display(Protocol):
    """Is told what happens, on the coordinator's thread."""

    def trial(self, run: CellRun, config: AttentionConfig, result: Result) -> None: ...
    def state(self, run: CellRun) -> None: ...
    def tick(self) -> None: ...


def family_of(key: AttentionKey) -> tuple:
    """Cells of one family differ in lengths, batch and heads only, and one build serves them all."""
    return key.dtype, key.head_dim, key.head_dim_v, key.causal, key.window_class


def size_of(key: AttentionKey) -> float:
    return math.sqrt(key.seqlen_q * key.seqlen_k) * key.batch * key.nheads


def failed_build(build: Build) -> Result:
    """The outcome of a build without facts; the farm says in words whether the compiler or its process failed."""
    reason = build.failure or ""
    kinds = {"compiler crashed": "crashed", "compiler ran past": "timed_out"}
    return Result(next((kinds[k] for k in kinds if reason.startswith(k)), "compile_failed"), reason=reason)


def result_of(trial: Trial) -> Result:
    return Result(trial.outcome, trial.ms, trial.ms_lo, trial.ms_hi, trial.samples, trial.rel_err, trial.reason)
