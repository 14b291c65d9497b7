"""Whether a second GPU is used: whole runs in simulated time, in which only compilers and GPUs take any."""

import heapq
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from fake_landscape import FakeBuild, FakeFacts, FakeFarm, Silent, make_tools, time_of
from test_coordinator import MEASURE

from zyfa.device import device_of_sku
from zyfa.tuner import coordinator
from zyfa.tuner.audit import REPEATS, Audit, Plan, irregular
from zyfa.tuner.coordinator import Coordinator
from zyfa.tuner.effort import EFFORTS
from zyfa.tuner.plan import grid
from zyfa.tuner.worker import Result
from zyfa.tuning_db.store import Store

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "pretend_gpus.py"
CELLS = grid([512 << n for n in range(7)], ("bf16", "fp16"), (128,), ((32, 8),), (1,), (True, False))
COMPILERS, COMPILE_S = 32, 3.0  # cores and Triton on the host of two H200
TRIAL_S, FINAL_S = 0.13, 0.4  # of one config alone, and of each finalist


class Machine:
    """Futures that are done at a moment of simulated time: the pool, the farm, and concurrent.futures.wait."""

    def __init__(self, gpus: int):
        self.gpus, self.now = tuple(range(gpus)), 0.0
        self._events, self._order = [], itertools.count()
        self._gpu_free, self._compilers, self._builds = defaultdict(float), [0.0] * COMPILERS, {}

    def _at(self, when, value):
        future = Future()
        heapq.heappush(self._events, (when, next(self._order), future, value))
        return future

    def wait(self, futures, timeout=None, return_when=None):
        while not (done := {future for future in futures if future.done()}):
            self.now, _, future, value = heapq.heappop(self._events)
            future.set_result(value)
        return done, set()

    def compile(self, key, config):
        name = key.dtype, key.causal, config
        if name not in self._builds:
            ends = max(self.now, heapq.heappop(self._compilers)) + COMPILE_S
            heapq.heappush(self._compilers, ends)
            self._builds[name] = self._at(ends, FakeBuild(FakeFacts("fine")))
        return self._builds[name]

    def submit(self, gpu, job, limit_s):
        seconds = TRIAL_S if len(job.configs) == 1 else FINAL_S * len(job.configs)
        self._gpu_free[gpu] = max(self.now, self._gpu_free[gpu]) + seconds
        times = [time_of(job.key, config) for config in job.configs]
        return self._at(self._gpu_free[gpu], [Result("ok", ms, ms, ms, (ms,) * 7, 0.002) for ms in times])


def seconds(monkeypatch, path, gpus, setup):
    machine = Machine(gpus)
    monkeypatch.setattr(coordinator, "wait", machine.wait)
    tools = make_tools(FakeFarm())._replace(compile=machine.compile, predict=None)
    with Store(path, device_of_sku("h200")) as store:
        runs = Coordinator(CELLS, setup, tools, store, Silent(), pool=machine).run()
    assert {run.state for run in runs} == {"done"} and {run.gpu for run in runs} == set(machine.gpus)
    return machine.now


def test_two_gpus_tune_twice_the_cells_in_a_minute(monkeypatch, tmp_path):
    setup = replace(MEASURE, effort=EFFORTS["quick"], lookahead=2 * COMPILERS)
    one, two = (seconds(monkeypatch, tmp_path / f"{n}.sqlite", n, setup) for n in (1, 2))
    assert one / two >= 1.9


def test_the_script_that_pretends_gpus_uses_all_of_them():
    command = [sys.executable, "-P", str(SCRIPT), "--gpus", "2", "--trial-ms", "5"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert (found["gpus"], found["trials"]) == (2, 16 * EFFORTS["quick"].trials) and 0 < found["seconds"] < 60
    assert len(found["busy"]) == 2 and all(0.05 < busy <= 1 for busy in found["busy"])


class Queue:
    """GPUs that answer at once; remembers which got what."""

    def __init__(self, gpus):
        self.gpus, self.given = gpus, defaultdict(list)

    def submit(self, gpu, job, limit_s):
        self.given[gpu].append(job)
        future = Future()
        future.set_result([Result("ok", 1.0, 1.0, 1.0, (1.0,) * 9, 0.002) for _ in job.configs])
        return future


@pytest.mark.parametrize("gpus", [(0,), (0, 1), (1, 3, 4)])
def test_an_audit_deals_its_shapes_to_all_gpus(gpus):
    pool, tools = Queue(gpus), make_tools(FakeFarm())
    keys = irregular(CELLS, 24, 0)
    Audit([], MEASURE, tools, pool).run([Plan(key, tools.seeds(key)[0], "cell") for key in keys], lambda: False)
    assert {gpu: len(jobs) for gpu, jobs in pool.given.items()} == {gpu: 24 // len(gpus) for gpu in gpus}
    assert all(job.repeats == REPEATS for jobs in pool.given.values() for job in jobs)
