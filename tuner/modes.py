"""What zyfa-tune does beside searching: record landscapes, audit what lookup gives, find cells to split."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from zyfa.config import AttentionConfig, AttentionKey, Cell
from zyfa.device import Device
from zyfa.tuning_db.cli_tools import plain
from zyfa.tuning_db.store import Store

from .audit import Audit, Plan, broken_cells, irregular, lookup_plans, summary, to_json, workload_line
from .cells import CellRun, Setup, Tools
from .cli import Options
from .exhaustive import Recording
from .plan import PlannedCell
from .progress import cell_name
from .settle import settle
from .split import half_of, probes, promise_broken
from .stop import Stop
from .worker import WorkerPool

EVERY_S = 10.0  # between two lines of a recording


@dataclass
class Run:
    """A run of zyfa-tune, set up."""

    options: Options
    device: Device
    setup: Setup
    tools: Tools
    store: Store | None
    path: Path
    pool: WorkerPool | None
    console: Console
    stop: Stop
    begun: float

    def say(self, line: str) -> None:
        self.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)

    def over(self) -> bool:
        """Whether the run is to end: somebody says so, or its budget is spent."""
        return self.stop.requested() or time.monotonic() >= self.setup.deadline

    def exit_code(self) -> int:
        return 128 + self.stop.signum if self.stop.signum else 0


def record(run: Run) -> int:
    """Records landscapes; returns the exit code."""
    assert run.pool is not None and run.options.exhaustive is not None
    folder = run.options.out or Path("benchmarks") / run.device.sku / "landscapes"
    gpu = run.device.names.get("name") or run.device.sku_key
    recording = Recording(run.options.cells, run.options.exhaustive, folder, gpu, run.setup, run.tools, run.pool)
    last = [time.monotonic()]

    def tick() -> None:
        if time.monotonic() - last[0] >= EVERY_S:
            last[0] = time.monotonic()
            run.say(f"{recording.done} of {recording.total} configs, {last[0] - run.begun:.0f} s")

    paths = recording.run(run.stop.requested, tick)
    run.say(f"zyfa-tune: {recording.done} of {recording.total} configs of {len(paths)} cells are recorded in {folder}")
    return run.exit_code()


def audit(run: Run) -> int:
    """Audits irregular shapes; returns the exit code. With --out, the cells that lose are left there as workloads."""
    assert run.options.audit is not None
    keys = irregular(run.options.cells, run.options.audit, run.options.seed)
    found = _audit(run).run(lookup_plans(keys, run.path, run.device), run.over, run.say)
    if run.options.json:
        seconds = round(time.monotonic() - run.begun, 1)
        head = {"sku": run.device.sku_key, **run.setup.toolchain._asdict(), "seconds": seconds}
        print(to_json(head, found))
    figures, broken = summary(found), broken_cells(found)
    if "worst" in figures:
        text = (
            f"regret worst {figures['worst']:.2f} %, median {figures['median']:.2f} % over {figures['shapes']} shapes"
        )
        run.say(f"zyfa-tune: {text}; {figures['failed']} failed, {len(broken)} cells to tune")
    if run.options.out:
        _write_workloads(run.options.out, list(broken))
    return run.exit_code()


def _write_workloads(folder: Path, keys: Sequence[AttentionKey]) -> None:
    """audit-<dtype>.jsonl of each dtype among the keys, for --workload."""
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in dict.fromkeys(key.dtype for key in keys):
        lines = [workload_line(key) for key in keys if key.dtype == dtype]
        (folder / f"audit-{dtype}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _audit(run: Run) -> Audit:
    assert run.pool is not None and run.store is not None
    trials = run.store.trials(trust="measured")  # of any toolchain: what was good once is a rival, and measured again
    return Audit(trials, run.setup, run.tools, run.pool)


def split_cells(run: Run, cells: Sequence[CellRun]) -> tuple[list[PlannedCell], dict[Cell, list[AttentionConfig]]]:
    """The lower halves of the cells whose winners lose too much there, still to be tuned, and what was better there.

    The probes of all cells are one audit, so that no GPU waits for the compilers of the next cell.
    """
    probed = [(cell, probes(cell.planned, run.options.seed)) for cell in cells if cell.winner and not cell.known]
    plans = [Plan(key, cell.winner[0], "cell") for cell, keys in probed for key in keys if cell.winner]
    left = iter(_audit(run).run(plans, run.stop.requested) if plans else ())
    halves, better = [], {}
    for cell, keys in probed:
        found = list(itertools.islice(left, len(keys)))
        if len(found) == len(keys) and promise_broken(found):
            half = half_of(cell.planned)
            halves.append(half)
            better[half.cell] = list(dict.fromkeys(each.best for each in found))
            worst = max(each.regret for each in found)
            run.say(f"zyfa-tune: {cell_name(cell.key)}: {worst:.1f} % lost in the lower half, which is tuned alone now")
    return halves, better


def settle_cells(run: Run, cells: Sequence[CellRun]) -> None:
    """Crowns what serves all lengths of a cell better than a winner that it ties with at the end."""
    assert run.pool is not None and run.store is not None
    audit = Audit((), run.setup, run.tools, run.pool)  # of rivals that the cells name
    for cell, config in settle(cells, audit, run.options.seed, run.over):
        number, result = cell.results[config]
        cell.winner = config, result
        run.store.set_winner(
            number, confidence=cell.confidence, trials=len(cell.study.times), default_ms=cell.default_ms
        )
        run.say(f"zyfa-tune: {cell_name(cell.key)}: {config} serves its other lengths better")
