"""Kills tuning runs, and their workers, with SIGKILL at random moments, and counts what that costs.

    .venv/bin/python scripts/torture_tune.py                    200 moments, a quarter of an hour
    .venv/bin/python scripts/torture_tune.py --moments 10

Two cells of recorded timings are searched on two pretended GPUs until every config of them is known. Each run is a
fresh interpreter in a session of its own, with workers as WorkerPool starts them. After each kill of the coordinator
the database must be whole, and at most one finished trial of each GPU may be missing in it. In the end the winners
must be those of a run that nobody disturbed. Resuming is counted from the end of the imports to the first trial that
is given out. Prints one JSON object; exit 1 if anything differs, or if resuming took 2 s.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from zyfa.config import AttentionConfig, cell_of
from zyfa.device import device_of_sku
from zyfa.tuner.cells import Setup
from zyfa.tuner.coordinator import Coordinator
from zyfa.tuner.effort import Effort
from zyfa.tuner.exhaustive import sample
from zyfa.tuner.landscape import Landscape, read
from zyfa.tuner.plan import PlannedCell
from zyfa.tuner.timing import Repeats
from zyfa.tuner.worker import Result, WorkerPool
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store
from zyfa.tuning_db.verify import findings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from fake_landscape import FakeFarm, Silent, make_tools

ROOT = Path(__file__).resolve().parent.parent
DEVICE = device_of_sku("h200")
GPUS = (0, 1)
CONFIGS = 40  # of each cell
TRIAL_S = 0.1  # as on a GPU
END_S = 60.0  # within which a run begins, answers, and workers whose coordinator is gone end
RESUME_S = 2.0
EFFORT = Effort(CONFIGS, CONFIGS, 3, Repeats(), Repeats())


class Thorough(Setup):
    """Tries every config of a cell, so that the winner depends on no order."""

    @property
    def min_gain(self) -> float:
        return 0.0


SETUP = Thorough("measure", Toolchain("torture", "3.7.1", "2.13.0", "570.1"), EFFORT, lookahead=8)


# --- what is killed --------------------------------------------------------------------------------------------------


class Recorded:
    """What a worker runs: answers from the landscapes, and writes down each answer before it gives it."""

    def __init__(self, log: Path, cells: Sequence[Landscape], gpu: int, arch: str):
        self._log, self._cells = log / f"gpu{gpu}", {cell.key: cell for cell in cells}
        self._alive = (log / f"alive{gpu}").open("w")
        fcntl.flock(self._alive, fcntl.LOCK_SH)  # until the process ends, however it does
        (log / f"pid{gpu}-{os.getppid()}").write_text(str(os.getpid()))

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
    """Writes down when the first job is given out."""

    log: Path | None = None

    def submit(self, gpu, job, limit_s):
        if self.log:
            (self.log / "asked").write_text(str(time.monotonic()))
            self.log = None
        return super().submit(gpu, job, limit_s)


def tune(path: Path, log: Path, cells: Sequence[Landscape]) -> None:
    """One run from opening the database to its end, or until someone kills it; writes its winners to log/winners."""
    (log / "imported").write_text(str(time.monotonic()))
    spaces = {cell.key: cell.space() for cell in cells}
    seeds = {key: [space.candidates()[0]] for key, space in spaces.items()}
    tools = make_tools(FakeFarm())._replace(
        space=spaces.__getitem__, seeds=seeds.__getitem__, gate=lambda *build: None, predict=None
    )
    pool = Pool(GPUS, DEVICE.arch, functools.partial(Recorded, log, cells))
    pool.log = log
    plan = [PlannedCell(cell_of(cell.key), cell.key, 1.0) for cell in cells]
    with Store(path, DEVICE) as store:
        runs = Coordinator(plan, SETUP, tools, store, Silent(), pool=pool).run()
        pool.close()
    winners = {run.key.seqlen_k: run.winner[0].to_json() for run in runs if run.winner}
    (log / "winners").write_text(json.dumps(winners))


def cells_of(folder: Path) -> list[Landscape]:
    """Two cells of the recorded landscapes, CONFIGS of each."""
    chosen = []
    for path in sorted(folder.glob("bf16-*"))[:2]:
        cell = read(path)
        configs = sample(list(cell.entries), CONFIGS)
        chosen.append(cell._replace(entries={config: cell.entries[config] for config in configs}))
    return chosen


# --- who kills -------------------------------------------------------------------------------------------------------


class Life:
    """A run on a database, from its start to its end or its kill. Raises RuntimeError where it fails by itself."""

    def __init__(self, path: Path, log: Path, folder: Path):
        self._log = log
        for name in ("imported", "asked"):
            (log / name).unlink(missing_ok=True)
        command = [sys.executable, "-P", __file__, "--folder", str(folder), "--run", str(path), str(log)]
        self._process = subprocess.Popen(command, start_new_session=True)
        self._until(lambda: bool(self._read("imported")))

    @property
    def ended(self) -> bool:
        code = self._process.poll()
        if code:
            raise RuntimeError(f"a run ended with {code}")
        return code == 0

    @property
    def resume_s(self) -> float:
        """From the end of the imports to the first trial; 0 if none was given out."""
        return float(self._read("asked") or 0) - float(self._read("imported")) if self._read("asked") else 0.0

    def wait(self) -> None:
        """Until it ends by itself."""
        self._until(lambda: False)

    def pass_moment(self) -> None:
        """Lets a random time pass: half of the moments lie in the start of a run, half between its answers."""
        if random.random() < 0.5:
            before = self._answers()
            self._until(lambda: self._answers() > before)
        until = time.monotonic() + random.uniform(0.0, 0.5)
        self._until(lambda: time.monotonic() >= until)

    def kill_worker(self) -> bool:
        """Kills a worker, if one has started."""
        pids = [int(text) for file in self._log.glob(f"pid*-{self._process.pid}") if (text := file.read_text())]
        if not pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(pids), signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Kills the coordinator, in half of the cases its workers with it; returns when all of them are gone."""
        kill = os.killpg if random.random() < 0.5 else os.kill
        kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in self._log.glob("alive*"):
            with path.open() as file:
                _wait_for(lambda file=file: _locked(file))

    def _answers(self) -> int:
        return sum(path.stat().st_size for path in self._log.glob("gpu*"))

    def _until(self, true) -> None:
        _wait_for(lambda: self.ended or true())

    def _read(self, name: str) -> str:
        path = self._log / name
        return path.read_text() if path.exists() else ""


def _wait_for(true) -> None:
    until = time.monotonic() + END_S
    while not true():
        if time.monotonic() >= until:
            raise RuntimeError(f"nothing happened within {END_S:g} s")
        time.sleep(0.005)


def _locked(file) -> bool:
    """Whether no worker holds the file any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def torture(work: Path, folder: Path, moments: int) -> dict:
    """Runs, kills and resumes on one database after another until `moments` kills have hit."""
    counts = {"coordinator_kills": 0, "worker_kills": 0, "runs": 0, "most_lost": 0, "faults": 0, "other_winners": 0}
    resumes: list[float] = []
    wanted = _winners(work, "calm", folder)
    while (left := moments - counts["coordinator_kills"] - counts["worker_kills"]) > 0:
        counts["runs"] += 1
        found = _winners(work, f"run{counts['runs']}", folder, left, counts, resumes)
        counts["other_winners"] += found != wanted
    return counts | {"slowest_resume_s": round(max(resumes, default=0.0), 2), "winners": wanted}


def _winners(work: Path, name: str, folder: Path, kills: int = 0, counts=None, resumes=None) -> dict:
    """The winners of one database, whose runs were killed `kills` times unless they ended before."""
    path, log = work / f"{name}.sqlite", work / name
    log.mkdir()
    life = Life(path, log, folder)
    for _ in range(kills):
        life.pass_moment()
        if life.ended:
            break
        if random.random() < 0.2 and life.kill_worker():
            counts["worker_kills"] += 1
            continue
        life.kill()
        counts["coordinator_kills"] += 1
        resumes.append(life.resume_s)
        counts["most_lost"] = max(counts["most_lost"], lost(path, log))
        counts["faults"] += len(findings(path))
        life = Life(path, log, folder)
    life.wait()
    if counts:
        resumes.append(life.resume_s)
        counts["faults"] += len(findings(path))
    return json.loads((log / "winners").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "h200" / "landscapes")
    parser.add_argument("--run", nargs=2, type=Path, metavar=("DATABASE", "LOG"), help="be one of the runs")
    given = parser.parse_args()
    if given.run:
        database, log = given.run
        tune(database, log, cells_of(given.folder))
        return 0
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as work:
        result = torture(Path(work), given.folder, given.moments)
    print(json.dumps(result, indent=1))
    good = result["most_lost"] <= 1 and result["faults"] == result["other_winners"] == 0
    return int(not good or result["slowest_resume_s"] > RESUME_S)


if __name__ == "__main__":
    sys.exit(main())
