"""Runs the search of all cells at once: owns their studies, keeps compilers and GPUs busy, writes the trial log.

A trial is stored by the thread of its GPU before that takes the next job and before the study hears of it, so a run
that is killed loses what is in flight and nothing else; the next one rebuilds the studies from the log.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from zyfa.config import AttentionConfig, Cell
from zyfa.tuning_db.store import Store, Trial

from .cells import CellRun, Display, Setup, Tools, failed_build, result_of
from .compile import Build
from .facts import Facts
from .plan import PlannedCell
from .study import CellStudy
from .timing import MIN_GAIN, STORED_GAIN, decide
from .warm import ENOUGH, WarmStart, model_top
from .worker import Job, Result, WorkerPool, then

TICK_S = 0.2  # how long a signal or the display waits at most
TRIAL_LIMIT_S = 60.0  # covers a compile that the disk cache missed
FINAL_LIMIT_S = 300.0
MEASURED_AT_ONCE = 8  # cells: enough to have builds ready for every GPU, few enough to learn from finished ones
CELL_IN_FLIGHT = 8  # trials of one cell: a search learns from results, and builds must be ready
LOST = ("timed_out", "crashed")  # of a process, with every config that it was given
TIE = "ties with the winner"  # the reason of a final trial that is as good
PAIRED, UNPAIRED = "A", "B"  # confidence of a measured winner: decided side by side, or by separate timings


class Coordinator:
    """One tuning run; stopped() is asked between events and ends it early with results kept.

    hints: configs of a cell that are tried right after its default.
    """

    def __init__(
        self, cells: Iterable[PlannedCell], setup: Setup, tools: Tools, store: Store | None, display: Display,
        stopped: Callable[[], bool] = lambda: False, pool: WorkerPool | None = None,
        hints: Mapping[Cell, Sequence[AttentionConfig]] | None = None,
    ):  # fmt: skip
        self.runs = [CellRun(planned, tools.seeds(planned.key)[0]) for planned in cells]
        self._setup, self._tools, self._store, self._pool = setup, tools, store, pool
        self._display, self._stopped, self._hints = display, stopped, hints or {}
        self._handlers: dict[Future, list[Callable[[Future], None]]] = {}
        self._facts: dict[tuple, Facts] = {}  # of what passed its gates, by family and config
        past = store.trials(trust=setup.trust) if store is not None and not setup.fresh else []
        self._warm = WarmStart(past, setup.toolchain, tools.lent() if setup.method == "measure" else ())

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
            full = self._expired() or len(self._handlers) >= self._setup.lookahead
            run = None if full else self._next_run()
            if run is not None:
                self._ask(run)
                if any(future.done() for future in self._handlers):
                    return  # the next config is thought of with what is known by then
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
        if self._setup.recheck:
            return bool(run.study.seeds_left)
        return not run.exhausted and (not enough or self._lacks_recipes(run))

    def _lacks_recipes(self, run: CellRun) -> bool:
        """Whether a front still waits for a recipe; its seeds come first, whatever the effort."""
        return not run.recipes <= run.study.recipes()

    def _finished(self, run: CellRun) -> bool:
        return run.study.finished(self._setup.effort.trials, self._setup.patience, self._setup.min_gain)

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
        stored = self._store.winner(run.planned.cell) if self._store is not None and not self._setup.fresh else None
        run.incumbent = stored.trial.config if stored else None
        evidence = functools.partial(self._warm.evidence, run, self.runs)
        seeds = self._seeds(run, len(evidence()))
        space = self._warm.without_offenders(self._tools.space(run.key))
        run.study = CellStudy(space, seeds, self._setup.seed, self._setup.sampler, evidence)
        run.recipes = frozenset(config.recipe for config in seeds if self._setup.fronted(run.key, config))
        run.state, run.begun = "searching", time.monotonic()
        if self._store is not None and not self._setup.fresh:
            self._restore(run)
        if self._pool is not None:
            left = [(other.gpu, other.work_left(self._setup.effort)) for other in self.runs]
            run.gpu = min(self._pool.gpus, key=lambda gpu: sum(work for at, work in left if at == gpu))
        self._display.state(run)

    def _seeds(self, run: CellRun, evidence: int) -> list[AttentionConfig]:
        """Where a search starts; the architecture's own seeds are left out where near cells tell more, except those
        that a front needs.
        """
        known, own = self._warm.seeds(run, self.runs), self._tools.seeds(run.key)
        known[1:1] = self._hints.get(run.planned.cell, ())
        if self._setup.recheck:
            return list(dict.fromkeys([*known[:1], *filter(None, [run.incumbent]), *self._warm.own_best(run.key)]))
        if evidence >= ENOUGH:
            return [*known, *(config for config in own if self._setup.fronted(run.key, config))]
        predict = self._tools.predict if self._setup.method == "measure" else None
        return [*known, *model_top(run, self._facts, predict), *own]

    def _restore(self, run: CellRun) -> None:
        """Rebuilds the study from the log; the cell is done if its search had ended and its winner was decided."""
        assert self._store is not None
        at = (run.planned.cell, self._setup.toolchain, self._setup.trust)
        for trial in self._store.trials(*at):
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
        if self._setup.recheck:
            return not run.study.seeds_left
        return (self._finished(run) and not self._lacks_recipes(run)) or run.study.exhausted()

    def _replay(self, run: CellRun, trial: Trial) -> None:
        if trial.config not in run.study.times:  # the finalists are in the log twice
            run.count(trial.outcome, trial.reason)
            run.study.claim(trial.config)
            run.study.tell(trial.config, trial.ms)
        run.results.pop(trial.config, None)  # the last word on a config is the last trial
        if trial.outcome == "ok":
            run.results[trial.config] = trial.id, result_of(trial)

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
        job = Job(run.key, (config,), self._setup.effort.repeats, self._setup.max_error, run.best_ms)
        timed = self._submit(run, job, TRIAL_LIMIT_S)
        stored = then(timed, lambda results: self._stored(run, config, results[0], facts.to_dict()))
        self._on(stored, lambda done: self._learn(run, config, *done.result()))

    def _submit(self, run: CellRun, job: Job, limit_s: float) -> "Future[list[Result]]":
        assert self._pool is not None
        return self._pool.submit(run.gpu, job, limit_s)

    def _record(self, run: CellRun, config: AttentionConfig, result: Result, facts: dict) -> None:
        self._learn(run, config, *self._stored(run, config, result, facts))

    def _learn(self, run: CellRun, config: AttentionConfig, number: int, result: Result) -> None:
        """Tells the study and the display of a trial that is stored."""
        self._note(run, config, number, result)
        run.study.tell(config, result.ms)
        run.count(result.outcome, result.reason)
        self._display.trial(run, config, result)

    def _stored(self, run: CellRun, config: AttentionConfig, result: Result, facts: dict) -> tuple[int, Result]:
        """Writes the log and returns the trial's number in it. Changes nothing else: threads of GPUs call it too."""
        if self._store is None:
            return 0, result
        number = self._store.add_trial(
            run.key, self._setup.toolchain, config, trust=self._setup.trust, is_default=config == run.default,
            facts=facts, **result.stored(),
        )  # fmt: skip
        return number, result

    def _note(self, run: CellRun, config: AttentionConfig, number: int, result: Result) -> None:
        """The last word on a config is its last trial."""
        run.results.pop(config, None)
        if result.outcome == "ok":
            run.results[config] = number, result
        self._warm.note(run.key, config, result.outcome)

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
        self._set_state(run, "comparing")
        fastest = self._ranked(run)[: self._setup.effort.finalists]
        always = [c for c in (run.default, run.incumbent) if c in run.results]
        configs = tuple(dict.fromkeys([*always, *fastest, *self._front(run)]))
        job = Job(run.key, configs, self._setup.effort.final, self._setup.max_error)
        self._on(self._submit(run, job, FINAL_LIMIT_S), lambda done: self._compared(run, configs, done.result()))

    def _compared(self, run: CellRun, configs: Sequence[AttentionConfig], results: Sequence[Result]) -> None:
        if len(configs) > 1 and all(result.outcome in LOST for result in results):
            return self._single_out(run, list(configs), [])
        valid = [
            i for i, result in enumerate(results) if result.outcome == "ok" and self._setup.admits(run.key, configs[i])
        ]
        incumbent = next((n for n, i in enumerate(valid) if configs[i] == run.incumbent), None)
        gain = MIN_GAIN if incumbent is None else STORED_GAIN
        verdict = decide([results[i].timing() for i in valid], incumbent or 0, gain) if valid else None
        ties = {valid[n] for n in verdict.ties} if verdict else set()
        for i, (config, result) in enumerate(zip(configs, results, strict=True)):
            told = result._replace(reason=TIE) if i in ties else result
            self._note(run, config, *self._stored(run, config, told, self._final_facts(run, config, result)))
        if verdict:
            run.ties = len(ties)
            run.gain = (verdict.gain, verdict.gain_lo, verdict.gain_hi) if incumbent is not None else None
            self._crown(run, configs[valid[verdict.winner]], PAIRED)
            return self._set_state(run, "done")
        return self._compare(run) if self._ranked(run) else self._set_state(run, "failed")

    def _final_facts(self, run: CellRun, config: AttentionConfig, result: Result) -> dict:
        """Of the code, where this run compiled it, and of the GPU while it was timed."""
        facts = self._facts.get((run.family, config))
        return (facts.to_dict() if facts else {}) | ({"sensors": result.sensors} if result.sensors else {})

    def _single_out(self, run: CellRun, left: list[AttentionConfig], found: list[tuple]) -> None:
        """One finalist took the others with it: each is timed alone, so that only the offender is recorded as one."""
        if left:
            job = Job(run.key, (left[0],), self._setup.effort.repeats, self._setup.max_error)
            timed = self._submit(run, job, TRIAL_LIMIT_S)
            return self._on(timed, lambda done: self._single_out(run, left[1:], [*found, (left[0], done.result()[0])]))
        offenders = [(config, result) for config, result in found if result.outcome != "ok"]
        for config, result in offenders:
            self._note(run, config, *self._stored(run, config, result, {}))
        if not self._ranked(run):
            return self._set_state(run, "failed")
        if offenders:
            return self._compare(run)
        self._crown(run, self._ranked(run)[0], UNPAIRED)  # together they fail, alone none does: decided by single times
        return self._set_state(run, "done")

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
