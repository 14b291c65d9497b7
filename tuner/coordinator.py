"""Runs the search of all cells at once: owns their studies, keeps compilers and GPUs busy, writes the trial log.

The only writer. A trial is stored before the study hears of it, so a run that is killed loses what is in flight and
nothing else; the next one rebuilds the studies from the log.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from zyfa.config import AttentionConfig
from zyfa.tuning_db.store import Store, Trial

from .cells import CellRun, Display, Setup, Tools, failed_build, result_of, size_of
from .compile import Build
from .facts import Facts
from .plan import PlannedCell
from .study import CellStudy
from .timing import winner_of
from .worker import Job, Result, WorkerPool

TICK_S = 0.2  # how long a signal or the display waits at most
TRIAL_LIMIT_S = 60.0  # covers a compile that the disk cache missed
FINAL_LIMIT_S = 300.0
MEASURED_AT_ONCE = 8  # cells: enough to have builds ready for every GPU, few enough to learn from finished ones
CELL_IN_FLIGHT = 12  # trials of one cell: TPE learns from results, and a quarter of a default search is enough ahead
NEIGHBOURS, MODEL_TOP = 3, 3  # seeds from finished cells, and from the model's ranking of what is compiled already
PAIRED, UNPAIRED = "A", "B"  # confidence of a measured winner: decided side by side, or by separate timings


class Coordinator:
    """One tuning run; stopped() is asked between events and ends it early with results kept."""

    def __init__(
        self, cells: Iterable[PlannedCell], setup: Setup, tools: Tools, store: Store | None, display: Display,
        stopped: Callable[[], bool] = lambda: False, pool: WorkerPool | None = None,
    ):  # fmt: skip
        self.runs = [CellRun(planned, tools.seeds(planned.key)[0]) for planned in cells]
        self._setup, self._tools, self._store, self._pool = setup, tools, store, pool
        self._display, self._stopped = display, stopped
        self._handlers: dict[Future, list[Callable[[Future], None]]] = {}
        self._facts: dict[tuple, Facts] = {}  # of what passed its gates, by family and config

    def run(self) -> list[CellRun]:
        """Searches until every cell is done, the deadline passes or stopped() says so; returns all cells.

        Raises what a worker or the compile farm raises when it is broken itself, and DatabaseError.
        """
        self._fill()
        while self._handlers and not self._stopped():
            done, _ = wait(list(self._handlers), TICK_S, FIRST_COMPLETED)
            for future in done:
                for handle in self._handlers.pop(future):
                    handle(future)
            self._fill()
            self._display.tick()
        for run in self.runs:
            if run.state not in ("done", "failed"):
                self._keep(run)
        return self.runs

    # --- what to do next ---------------------------------------------------------------------------------------

    @property
    def _searching(self) -> list[CellRun]:
        return [run for run in self.runs if run.state == "searching"]

    def _expired(self) -> bool:
        return time.monotonic() >= self._setup.deadline

    def _fill(self) -> None:
        """Starts cells and compiles until the lookahead is reached, and closes cells that need no more."""
        while not self._stopped():
            self._start_cells()
            run = None if self._expired() or len(self._handlers) >= self._setup.lookahead else self._next_run()
            if run is not None:
                self._ask(run)
            elif not any([self._close_if_finished(run) for run in self._searching]):
                return

    def _start_cells(self) -> None:
        # Under a budget every cell gets its share from the start; predictions share builds between lengths.
        unlimited = self._setup.method != "measure" or self._setup.deadline < math.inf
        room = len(self.runs) if unlimited else MEASURED_AT_ONCE * len(self._pool.gpus if self._pool else [0])
        for run in self.runs:
            if run.state == "waiting" and len(self._searching) < room:
                self._start(run)

    def _next_run(self) -> CellRun | None:
        """The cell whose next trial promises most; what is in flight for it counts against it."""
        open_runs = [run for run in self._searching if self._wants_more(run) and run.study.pending < CELL_IN_FLIGHT]
        return max(open_runs, key=lambda run: run.planned.weight * run.study.expected_gain(), default=None)

    def _wants_more(self, run: CellRun) -> bool:
        told = len(run.study.times) + run.study.pending
        enough = told >= self._setup.effort.trials or self._finished(run)
        return not run.exhausted and (not enough or self._lacks_recipes(run))

    def _lacks_recipes(self, run: CellRun) -> bool:
        """Whether a front still waits for a recipe; its seeds come first, whatever the effort."""
        return not run.recipes <= run.study.recipes()

    def _finished(self, run: CellRun) -> bool:
        return run.study.finished(self._setup.effort.trials, self._setup.patience)

    def _close_if_finished(self, run: CellRun) -> bool:
        if run.study.pending or (self._wants_more(run) and not self._expired()):
            return False
        if self._setup.method == "compile":
            self._set_state(run, "done" if run.outcomes["ok"] else "failed")
        elif not self._ranked(run):
            self._set_state(run, "failed")
        elif self._setup.method == "measure":
            self._compare(run)
        else:
            self._crown_predicted(run)
        return True

    # --- one cell ----------------------------------------------------------------------------------------------

    def _start(self, run: CellRun) -> None:
        seeds = [run.default, *self._neighbours(run), *self._model_top(run), *self._tools.seeds(run.key)]
        run.study = CellStudy(self._tools.space(run.key), dict.fromkeys(seeds), self._setup.seed)
        run.recipes = frozenset(config.recipe for config in seeds if self._setup.fronted(run.key, config))
        run.state = "searching"
        if self._store is not None and not self._setup.fresh:
            self._restore(run)
        if self._pool is not None:
            load = Counter(other.gpu for other in self._searching)
            run.gpu = min(self._pool.gpus, key=lambda gpu: load[gpu])
        self._display.state(run)

    def _restore(self, run: CellRun) -> None:
        """Rebuilds the study from the log; the cell is done if its search had ended and its winner was decided."""
        assert self._store is not None
        at = (run.planned.cell, self._setup.toolchain, self._setup.trust)
        trials = self._store.trials(*at)
        for trial in trials:
            self._replay(run, trial)
        run.resumed = len(run.study.times)
        winner = self._store.winner(*at)
        if winner and not self._setup.admits(run.key, winner.trial.config):
            winner = None
        if winner and (self._setup.method, winner.confidence) != ("measure", UNPAIRED) and self._ended(run):
            run.known = True
            run.winner = winner.trial.config, result_of(winner.trial)
            run.confidence, run.default_ms = winner.confidence, winner.default_ms
            run.state = "done"
            self._keep_front(run)

    def _ended(self, run: CellRun) -> bool:
        return (self._finished(run) and not self._lacks_recipes(run)) or run.study.exhausted()

    def _replay(self, run: CellRun, trial: Trial) -> None:
        if trial.config not in run.study.times:  # the finalists are in the log twice
            run.count(trial.outcome, trial.reason)
            run.study.claim(trial.config)
            run.study.tell(trial.config, trial.ms)
        if trial.outcome == "ok":
            run.results[trial.config] = trial.id, result_of(trial)

    def _neighbours(self, run: CellRun) -> list[AttentionConfig]:
        """Winners to start from: the cell's own under another toolchain, then those of the family's nearest lengths."""
        own = self._store.winner(run.planned.cell) if self._store is not None else None
        near = sorted(
            (other for other in self.runs if other.family == run.family and other.winner),
            key=lambda other: abs(math.log2(size_of(other.key) / size_of(run.key))),
        )
        winners = [other.winner[0] for other in near if other.winner]
        return ([own.trial.config] if own else []) + list(dict.fromkeys(winners))[:NEIGHBOURS]

    def _model_top(self, run: CellRun) -> list[AttentionConfig]:
        """What the model holds best for this cell among the builds of its family; they cost no compile."""
        if self._setup.method != "measure" or self._tools.predict is None:
            return []
        predicted = {
            config: self._tools.predict(facts, run.key, config).ms
            for (family, config), facts in self._facts.items()
            if family == run.family
        }
        return sorted(predicted, key=predicted.__getitem__)[:MODEL_TOP]

    def _ask(self, run: CellRun) -> None:
        config = run.study.ask()
        if config is None:
            run.exhausted = True
            return
        runs = [run]
        if self._setup.method != "measure":  # a prediction costs nothing, so one build is used for every length
            runs += [r for r in self._searching if r is not run and self._shares(r, run, config)]
        for each in runs:
            self._compile(each, config)

    def _compile(self, run: CellRun, config: AttentionConfig) -> None:
        future = self._tools.compile(run.key, config)  # one future for all jobs that compile to the same code
        self._on(future, lambda done: self._built(run, config, done.result()))

    def _on(self, future: Future, handle: Callable[[Future], None]) -> None:
        self._handlers.setdefault(future, []).append(handle)

    def _shares(self, other: CellRun, run: CellRun, config: AttentionConfig) -> bool:
        fits = other.family == run.family and self._wants_more(other)
        return fits and self._tools.space(other.key).broken_rule(config) is None and other.study.claim(config)

    def _built(self, run: CellRun, config: AttentionConfig, build: Build) -> None:
        if build.facts is None:
            self._record(run, config, failed_build(build), {})
        elif reason := self._gated(run, config, build.facts):
            self._record(run, config, Result("gated", reason=reason), build.facts.to_dict())
        elif self._setup.method == "measure":
            self._facts[run.family, config] = build.facts
            self._measure(run, config, build.facts)
        else:
            self._judge(run, config, build.facts)

    def _gated(self, run: CellRun, config: AttentionConfig, facts: Facts) -> str | None:
        if self._setup.method == "measure" and config == run.default:
            return None  # what runs when nothing is tuned is timed even if its code is poor: every gain refers to it
        return self._tools.gate(facts, run.key, config)

    def _judge(self, run: CellRun, config: AttentionConfig, facts: Facts) -> None:
        """Predicts; the method "compile" has no time to give and stores nothing of what passes its gates."""
        if self._tools.predict is None:
            run.study.tell(config, 1.0)
            run.count("ok", "")
            self._display.trial(run, config, Result("ok"))
            return
        prediction = self._tools.predict(facts, run.key, config)
        run.confidences[config] = prediction.confidence
        result = Result("ok", prediction.ms, prediction.ms_lo, prediction.ms_hi)
        self._record(run, config, result, facts.to_dict())

    def _measure(self, run: CellRun, config: AttentionConfig, facts: Facts) -> None:
        assert self._pool is not None
        job = Job(run.key, (config,), self._setup.effort.repeats, self._setup.max_error, run.best_ms)
        future = self._pool.submit(run.gpu, job, TRIAL_LIMIT_S)
        self._on(future, lambda done: self._record(run, config, done.result()[0], facts.to_dict()))

    def _record(self, run: CellRun, config: AttentionConfig, result: Result, facts: dict) -> None:
        """Stores a trial, then tells the study and the display."""
        self._log(run, config, result, facts)
        run.study.tell(config, result.ms)
        run.count(result.outcome, result.reason)
        self._display.trial(run, config, result)

    def _log(self, run: CellRun, config: AttentionConfig, result: Result, facts: dict) -> None:
        if self._store is None:
            return
        number = self._store.add_trial(
            run.key, self._setup.toolchain, config, trust=self._setup.trust, is_default=config == run.default,
            facts=facts, **result._asdict(),
        )  # fmt: skip
        if result.outcome == "ok":
            run.results[config] = number, result

    # --- the end of a cell -------------------------------------------------------------------------------------

    def _ranked(self, run: CellRun) -> list[AttentionConfig]:
        """Valid configs that may win, fastest first; of equal times the one that was tried first."""
        admitted = [config for config in run.results if self._setup.admits(run.key, config)]
        return sorted(admitted, key=lambda config: run.results[config][1].ms or math.inf)

    def _front(self, run: CellRun) -> list[AttentionConfig]:
        """The fastest valid config of each recipe that belongs in a front."""
        best: dict[str, AttentionConfig] = {}
        for config, (_, result) in run.results.items():
            if not self._setup.fronted(run.key, config):
                continue
            kept = best.get(config.recipe)
            if kept is None or (result.ms or math.inf) < (run.results[kept][1].ms or math.inf):
                best[config.recipe] = config
        return list(best.values())

    def _keep_front(self, run: CellRun) -> None:
        for config in self._front(run):
            assert self._store is not None
            tried = sum(other.recipe == config.recipe for other in run.study.times)
            self._store.set_front(
                run.results[config][0], confidence=run.confidence, trials=max(tried, 1), default_ms=run.default_ms
            )

    def _compare(self, run: CellRun) -> None:
        """Times the default config and the fastest side by side; the winner is decided there."""
        assert self._pool is not None
        self._set_state(run, "comparing")
        fastest = self._ranked(run)[: self._setup.effort.finalists]
        default = [run.default] if run.default in run.results else []
        configs = tuple(dict.fromkeys([*default, *fastest, *self._front(run)]))
        job = Job(run.key, configs, self._setup.effort.final, self._setup.max_error)
        future = self._pool.submit(run.gpu, job, FINAL_LIMIT_S)
        self._on(future, lambda done: self._compared(run, configs, done.result()))

    def _compared(self, run: CellRun, configs: Sequence[AttentionConfig], results: Sequence[Result]) -> None:
        for config, result in zip(configs, results, strict=True):
            run.results.pop(config, None)  # the last word on a config is the last trial
            self._log(run, config, result, {})
        valid = [c for c in configs if c in run.results and self._setup.admits(run.key, c)]
        if valid:
            timings = [run.results[config][1].timing() for config in valid]
            self._crown(run, valid[winner_of(timings)], PAIRED)
            return self._set_state(run, "done")
        return self._compare(run) if self._ranked(run) else self._set_state(run, "failed")

    def _crown(self, run: CellRun, config: AttentionConfig, confidence: str) -> None:
        """Makes a config the winner of its cell."""
        assert self._store is not None
        number, result = run.results[config]
        default = run.results.get(run.default)
        run.default_ms = default[1].ms if default else None
        run.winner, run.confidence = (config, result), confidence
        self._store.set_winner(number, confidence=confidence, trials=len(run.study.times), default_ms=run.default_ms)
        self._keep_front(run)

    def _crown_predicted(self, run: CellRun) -> None:
        """The least predicted time wins. Of a winner from an earlier run the model's confidence is asked again."""
        config = run.study.best
        if config is None or not self._setup.admits(run.key, config):
            config = self._ranked(run)[0]
        if config in run.confidences:
            self._crown(run, config, run.confidences[config])
            return self._set_state(run, "done")
        run.state = "comparing"
        self._on(self._tools.compile(run.key, config), lambda done: self._confirm(run, config, done.result()))
        return None

    def _confirm(self, run: CellRun, config: AttentionConfig, build: Build) -> None:
        assert self._tools.predict is not None
        if build.facts is not None:
            run.confidences[config] = self._tools.predict(build.facts, run.key, config).confidence
        run.confidences.setdefault(config, "C")
        self._crown_predicted(run)

    def _keep(self, run: CellRun) -> None:
        """The run ends before the cell does: its fastest config so far becomes the winner, unless one is stored."""
        if run.state == "waiting" or not self._ranked(run) or self._setup.method == "compile":
            return self._set_state(run, "stopped")
        assert self._store is not None
        if self._store.winner(run.planned.cell, self._setup.toolchain, self._setup.trust) is None:
            config = self._ranked(run)[0]
            self._crown(run, config, UNPAIRED if self._setup.method == "measure" else run.confidences.get(config, "C"))
        return self._set_state(run, "stopped")

    def _set_state(self, run: CellRun, state: str) -> None:
        run.state = state
        self._display.state(run)
