"""What zyfa-tune does beside searching: record landscapes, audit what lookup gives, find cells to split."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from zyfa.config import AttentionConfig, Cell
from zyfa.device import Device
from zyfa.tuning_db.cli_tools import plain
from zyfa.tuning_db.store import Store

from .audit import Audit, irregular, lookup_choice, summary
from .cells import CellRun, Setup, Tools
from .cli import Options
from .exhaustive import Recording
from .plan import PlannedCell
from .progress import cell_name
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
    """Audits irregular shapes; returns the exit code."""
    assert run.options.audit is not None
    keys = irregular(run.options.cells, run.options.audit, run.options.seed)
    found = _audit(run, lookup_choice(run.path, run.device)).run(keys, run.stop.requested, run.say)
    figures = summary(found)
    if run.options.json:
        head = {"sku": run.device.sku_key, **run.setup.toolchain._asdict()}
        print(json.dumps(head | figures | {"rows": [each.to_dict() for each in found]}, indent=1))
    if "worst" in figures:
        text = (
            f"regret worst {figures['worst']:.2f} %, median {figures['median']:.2f} % over {figures['shapes']} shapes"
        )
        run.say(f"zyfa-tune: {text}; {figures['failed']} failed")
    return run.exit_code()


def _audit(run: Run, choose) -> Audit:
    assert run.pool is not None and run.store is not None
    trials = run.store.trials(trust="measured")  # of any toolchain: what was good once is a rival, and measured again
    return Audit(choose, trials, run.setup, run.tools, run.pool)


def split_cells(run: Run, cells: Sequence[CellRun]) -> tuple[list[PlannedCell], dict[Cell, list[AttentionConfig]]]:
    """The lower halves of the cells whose winners lose too much there, still to be tuned, and what was better there."""
    halves, better = [], {}
    for cell in cells:
        if run.stop.requested() or cell.winner is None or cell.known:
            continue
        shapes, winner = probes(cell.planned, run.options.seed), cell.winner[0]
        audit = _audit(run, lambda key, winner=winner: (winner, "cell"))
        found = audit.run(shapes, run.stop.requested, lambda line: None)
        if promise_broken(found):
            half = half_of(cell.planned)
            halves.append(half)
            better[half.cell] = list(dict.fromkeys(each.best for each in found))
            worst = max(each.regret for each in found)
            run.say(f"zyfa-tune: {cell_name(cell.key)}: {worst:.1f} % lost in the lower half, which is tuned alone now")
    return halves, better
