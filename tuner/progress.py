"""What a run shows while it goes on: a live table on a terminal, one line per cell elsewhere."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuning_db.cli_tools import plain

from .cells import CellRun
from .worker import Result

LINE_EVERY_S = 15.0  # of plain output, at least this often when something ends
SHOWN_ROWS = 16  # cells of the live table: those in work first


def cell_name(key: AttentionKey) -> str:
    """Like `bf16 causal d128 h32:8 s512`; batch and a second length only where they say something."""
    dim = f"d{key.head_dim}" + (f"/{key.head_dim_v}" if key.head_dim_v != key.head_dim else "")
    length = f"s{key.seqlen_q}" + (f"x{key.seqlen_k}" if key.seqlen_k != key.seqlen_q else "")
    batch = f" b{key.batch}" if key.batch > 1 else ""
    return f"{key.dtype} {'causal' if key.causal else 'full'} {dim} h{key.nheads}:{key.nheads_k}{batch} {length}"


def duration(seconds: float) -> str:
    """Like 7s, 3m05s or 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02}m"


def failures(outcomes: Counter[str]) -> str:
    """Like `gated 12, wrong 1`; empty when all went well."""
    return ", ".join(f"{kind.replace('_', ' ')} {n}" for kind, n in outcomes.most_common() if kind != "ok" and n)


class Progress:
    """Common part: counts trials and estimates the time that is left. Used as a context manager."""

    def __init__(self, runs: Callable[[], Sequence[CellRun]], trials_per_cell: int, patience: int):
        self._runs, self._per_cell, self._patience = runs, trials_per_cell, patience
        self._begun = time.monotonic()
        self._trials = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        pass

    def trial(self, run: CellRun, config: AttentionConfig, result: Result) -> None:
        self._trials += 1

    def state(self, run: CellRun) -> None:
        pass

    def tick(self) -> None:
        pass

    def summary(self) -> str:
        """Cells done, trials, failures by kind, time so far and left."""
        runs = self._runs()
        done = sum(run.state in ("done", "failed", "stopped") for run in runs)
        totals = sum((run.outcomes for run in runs), Counter())
        elapsed = time.monotonic() - self._begun
        parts = [f"{done}/{len(runs)} cells", f"{self._trials} trials"]
        if bad := failures(totals):
            parts.append(bad)
        parts.append(f"{duration(elapsed)} so far")
        if self._trials and done < len(runs):
            parts.append(f"at most {duration(self._left() * elapsed / self._trials)} to go")
        return "; ".join(parts)

    def _left(self) -> int:
        """Trials that are left if no cell ends early."""
        told = {id(run): len(run.study.times) if run.state != "waiting" else 0 for run in self._runs()}
        unfinished = (run for run in self._runs() if run.state in ("waiting", "searching"))
        return sum(max(self._per_cell - told[id(run)], 0) for run in unfinished)


class PlainProgress(Progress):
    """A line when a cell ends, and one in between when nothing was said for a while."""

    def __init__(self, console: Console, runs: Callable[[], Sequence[CellRun]], trials_per_cell: int, patience: int):
        super().__init__(runs, trials_per_cell, patience)
        self._console, self._last = console, time.monotonic()

    def state(self, run: CellRun) -> None:
        if run.state in ("done", "failed", "stopped") and not run.known:
            self._say(f"{cell_name(run.key)}: {_outcome(run)}")

    def tick(self) -> None:
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._say(self.summary())
            for run in self._runs():
                if run.state == "searching":
                    self._say(f"  {cell_name(run.key)}: {self._standing(run)}")

    def _standing(self, run: CellRun) -> str:
        """Like `12 trials, best 0.934 ms, regret about 2.1 %, at most 20s`."""
        parts = [f"{len(run.study.times)} trials"]
        if run.best_ms:
            parts.append(f"best {run.best_ms:.4g} ms")
        if regret := _regret(run):
            parts.append(f"regret about {regret}")
        left = run.seconds_left(self._per_cell, self._patience, time.monotonic())
        return ", ".join(parts + ([f"at most {duration(left)}"] if left is not None else []))

    def _say(self, line: str) -> None:
        self._console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
        self._last = time.monotonic()


class LiveProgress(Progress):
    """A table of the cells in work that is redrawn in place."""

    def __init__(self, console: Console, runs: Callable[[], Sequence[CellRun]], trials_per_cell: int, patience: int):
        super().__init__(runs, trials_per_cell, patience)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self):
        self._live.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        self._live.__exit__(*exc)

    def _render(self) -> Table:
        table = Table(
            "cell",
            "state",
            "trials",
            "best ms",
            "vs default",
            "regret",
            "left",
            "failures",
            title=self.summary(),
            title_style="",
        )
        order = {"comparing": 0, "searching": 0, "waiting": 1}
        runs = sorted(self._runs(), key=lambda run: order.get(run.state, 2))
        for run in runs[:SHOWN_ROWS]:
            left = run.seconds_left(self._per_cell, self._patience, time.monotonic())
            table.add_row(*_live_row(run, left))
        if len(runs) > SHOWN_ROWS:
            table.caption = f"and {len(runs) - SHOWN_ROWS} more cells"
        return table


def _regret(run: CellRun) -> str:
    """By how much the best so far is expected to miss the best of all configs; empty where no model says."""
    regret = run.study.expected_regret() if run.state == "searching" else None
    return "" if regret is None else f"{100 * regret:.1f} %"


def _live_row(run: CellRun, left: float | None) -> tuple[Text, ...]:
    best_ms, trials, speedup = run.best_ms, "", ""
    if run.state != "waiting":
        trials = str(len(run.study.times))
        default_ms = run.default_ms or run.study.times.get(run.default)
        speedup = f"{default_ms / best_ms:.2f}x" if default_ms and best_ms else ""
    best = f"{best_ms:.4g}" if best_ms else ""
    until = duration(left) if left is not None else ""
    texts = cell_name(run.key), run.state, trials, best, speedup, _regret(run), until, failures(run.outcomes)
    return tuple(map(Text, texts))


def _outcome(run: CellRun) -> str:
    if not run.winner:
        counts = failures(run.outcomes) or "no trial ended"
        return f"{run.outcomes['ok']} configs compile" if run.state == "done" else f"no valid config ({counts})"
    config, result = run.winner
    speedup = f", {run.default_ms / result.ms:.2f}x the default" if run.default_ms and result.ms else ""
    return f"{result.ms:.4g} ms{speedup}, {len(run.study.times)} trials, {config}"
