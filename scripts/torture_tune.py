"""Kills tuning runs, and their workers, with SIGKILL at random moments, and counts what that costs.

    .venv/bin/python scripts/torture_tune.py                    200 moments, some minutes
    .venv/bin/python scripts/torture_tune.py --moments 10

Two cells of recorded timings are searched on two pretended GPUs until every config of them is known. After each kill
of the coordinator the database must be whole, and at most one finished trial of each GPU may be missing in it. In the
end the winners must be those of a run that nobody disturbed. Prints one JSON object; exit 1 if anything differs.
Imports are not counted as resuming: the killed process is forked from one that has them, and so are its workers.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from zyfa.config import AttentionConfig
from zyfa.device import device_of_sku
from zyfa.tuner import worker
from zyfa.tuner.cells import Setup
from zyfa.tuner.coordinator import Coordinator
from zyfa.tuner.effort import Effort
from zyfa.tuner.exhaustive import sample
from zyfa.tuner.landscape import Landscape, read_all
from zyfa.tuner.plan import PlannedCell
from zyfa.tuner.timing import Repeats
from zyfa.tuner.worker import Result, WorkerPool
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store
from zyfa.tuning_db.verify import findings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from fake_landscape import FakeFarm, make_tools

ROOT = Path(__file__).resolve().parent.parent
DEVICE = device_of_sku("h200")
GPUS = (0, 1)
PR_SET_PDEATHSIG = 1
CONFIGS = 40  # of each cell
TRIAL_S = 0.1  # as on a GPU
EFFORT = Effort(CONFIGS, CONFIGS, 3, Repeats(), Repeats())
SETUP = Setup("measure", Toolchain("torture", "3.7.1", "2.13.0", "570.1"), EFFORT, lookahead=8)


class Silent:
    """No display."""

    def trial(self, run, config, result) -> None: ...
    def state(self, run) -> None: ...
    def tick(self) -> None: ...


class Recorded:
    """What a worker runs: answers from the landscapes, and writes down each answer before it gives it."""

    def __init__(self, gpu: int, log: Path, cells: list[Landscape]):
        self._log, self._cells = log / f"gpu{gpu}", {cell.key: cell for cell in cells}
        # Forked workers hold each other's pipes open and would not see the coordinator's end; spawned ones do.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        (log / f"pid{gpu}").write_text(str(os.getpid()))

    def __call__(self, job) -> list[Result]:
        time.sleep(TRIAL_S * len(job.configs))
        results = [self._result(job.key, config) for config in job.configs]
        if len(results) == 1:
            with self._log.open("a") as file:
                file.write(json.dumps([job.key.seqlen_k, job.configs[0].to_json()]) + "\n")
        return results

    def _result(self, key, config: AttentionConfig) -> Result:
        entry = self._cells[key].entries[config]
        if entry.ms is None:
            return Result("wrong", reason="recorded so")
        return Result("ok", entry.ms, entry.ms, entry.ms, (entry.ms,) * 7, 0.002)


class Pool(WorkerPool):
    """Notes when the first job is given out."""

    first = 0.0

    def submit(self, gpu, job, limit_s):
        self.first = self.first or time.monotonic()
        return super().submit(gpu, job, limit_s)


def tune(path: Path, log: Path, cells: list[Landscape]) -> dict:
    """One run from opening the database to its end, or until someone kills it."""
    begun = time.monotonic()
    # A worker that is forked amid threads may inherit a lock that nobody holds any more; it is started anew.
    worker.START_LIMIT_S, worker.MAX_BAD_STARTS = 5.0, 10
    worker.multiprocessing.get_context = lambda method: multiprocessing.context.ForkContext()  # type: ignore[attr-defined]
    spaces = {cell.key: cell.space() for cell in cells}
    seeds = {key: [space.candidates()[0]] for key, space in spaces.items()}
    tools = make_tools(FakeFarm())._replace(
        space=spaces.__getitem__, seeds=seeds.__getitem__, gate=lambda *build: None, predict=None
    )
    pool = Pool(GPUS, DEVICE.arch, lambda gpu, arch: Recorded(gpu, log, cells))
    plan = [PlannedCell(_cell(cell), cell.key, 1.0) for cell in cells]
    with Store(path, DEVICE) as store:
        coordinator = Coordinator(plan, SETUP, tools, store, Silent(), pool=pool)
        (log / "running").touch()
        runs = coordinator.run()
        pool.close()
        if pool.first:
            (log / "resume_s").write_text(str(pool.first - begun))
        return {run.key.seqlen_k: run.winner[0].to_json() for run in runs if run.winner}


def _cell(landscape: Landscape):
    from zyfa.config import cell_of

    return cell_of(landscape.key)


def fork(path: Path, log: Path, cells: list[Landscape]) -> int:
    """Process id of a child that tunes; it writes its winners to log/winners and ends with 0."""
    (log / "running").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        (log / "winners").write_text(json.dumps(tune(path, log, cells)))
        code = 0
    finally:
        os._exit(code)


def lost(path: Path, log: Path) -> int:
    """The most trials of one GPU that were finished and are not stored."""
    with Store(path, DEVICE) as store:
        stored = {(trial.key.seqlen_k, trial.config.to_json()) for trial in store.trials()}
    finished: Counter[str] = Counter()
    for gpu in log.glob("gpu*"):
        lines = (json.loads(line) for line in gpu.read_text().splitlines())
        finished[gpu.name] = len({(length, config) for length, config in lines} - stored)
        gpu.unlink()
    return max(finished.values(), default=0)


def torture(folder: Path, cells: list[Landscape], moments: int) -> dict:
    """Runs, kills and resumes on one database after another until `moments` kills have hit."""
    counts = {"coordinator_kills": 0, "worker_kills": 0, "runs": 0, "most_lost": 0, "faults": 0, "other_winners": 0}
    calm = _fresh(folder / "calm")
    os.waitpid(fork(folder / "calm.sqlite", calm, cells), 0)
    slowest, wanted = 0.0, json.loads((calm / "winners").read_text())
    while counts["coordinator_kills"] + counts["worker_kills"] < moments:
        counts["runs"] += 1
        path, log = folder / f"run{counts['runs']}.sqlite", _fresh(folder / f"run{counts['runs']}")
        child = fork(path, log, cells)
        while not _ended(child, random.uniform(0.02, 0.5)):
            if random.random() < 0.2 and (victim := _worker(log)):
                _kill(victim)
                counts["worker_kills"] += 1
                continue
            os.killpg(child, signal.SIGKILL) if random.random() < 0.5 else os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            counts["coordinator_kills"] += 1
            counts["most_lost"] = max(counts["most_lost"], lost(path, log))
            counts["faults"] += len(findings(path))
            begun = time.monotonic()
            child = fork(path, log, cells)
            while not (log / "running").exists() and time.monotonic() - begun < 60:
                time.sleep(0.01)
            slowest = max(slowest, time.monotonic() - begun)
        counts["faults"] += len(findings(path))
        counts["other_winners"] += json.loads((log / "winners").read_text()) != wanted
    return counts | {"slowest_resume_s": round(slowest, 2), "winners": wanted}


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _worker(log: Path) -> int | None:
    """The process id of a worker, if one has started."""
    pids = [int(text) for file in log.glob("pid*") if (text := file.read_text())]
    return random.choice(pids) if pids else None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ended(child: int, within_s: float) -> bool:
    """Whether a child ends by itself within the time; raises RuntimeError if it fails."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if code := os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"a run ended with {code}")
            return True
        time.sleep(0.005)
    return False


def cells_of(folder: Path) -> list[Landscape]:
    """Two cells of the recorded landscapes, CONFIGS of each."""
    found = [cell for cell in read_all(folder) if cell.key.dtype == "bf16"][:2]
    chosen = []
    for cell in found:
        configs = sample(list(cell.entries), CONFIGS)
        chosen.append(cell._replace(entries={config: cell.entries[config] for config in configs}))
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "h200" / "landscapes")
    given = parser.parse_args()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        result = torture(Path(folder), cells_of(given.folder), given.moments)
    print(json.dumps(result, indent=1))
    return int(result["most_lost"] > 1 or result["faults"] or result["other_winners"] or result["slowest_resume_s"] > 2)


if __name__ == "__main__":
    sys.exit(main())
