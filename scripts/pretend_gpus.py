"""How well one coordinator feeds several GPUs: sixteen cells are tuned on pretended ones, in real time.

    .venv/bin/python scripts/pretend_gpus.py                         1, 2, 4 and 8 GPUs, trials of 30 ms
    .venv/bin/python scripts/pretend_gpus.py --gpus 1,2 --trial-ms 130

A GPU is a worker process that sleeps for the length of a trial, twice as long for a finalist. Search spaces, proposals
and commits are those of `zyfa-tune --effort quick --no-split` for BF16 on an H200; compilers take no time.
Prints a JSON line for each number of GPUs.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import device_of_sku
from zyfa.tuner import space
from zyfa.tuner.cells import Setup
from zyfa.tuner.coordinator import Coordinator
from zyfa.tuner.effort import EFFORTS
from zyfa.tuner.lengths import parse_numbers
from zyfa.tuner.plan import grid
from zyfa.tuner.study import Space
from zyfa.tuner.worker import Result, WorkerPool
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from fake_landscape import FakeBuild, FakeFacts, FakeFarm, Silent, make_tools

DEVICE = device_of_sku("h200")
CELLS = grid([1024, 2048, 4096, 8192], ("bf16",), (128,), ((32, 8), (16, 16)), (1,), (True, False))
SETUP = Setup("measure", Toolchain("pretended", "3.6.0", "2.11.0", "580"), EFFORTS["quick"], lookahead=64)
TRIAL_MS = "ZYFA_PRETENDED_TRIAL_MS"  # for the workers


def _share(*of) -> float:
    """A fixed number from 0 to 1 for anything."""
    return int(hashlib.sha256(repr(of).encode()).hexdigest()[:8], 16) / 2**32


def pretended_ms(key: AttentionKey, config: AttentionConfig) -> float:
    """Each field has a factor, nearly the same at every length."""
    fields = config.to_dict().items()
    effects = (0.25 * _share(field, key.causal) + 0.03 * _share(field, key) for field in fields)
    return math.exp(sum(effects)) * key.seqlen_k / 1024


class Sleeper:
    """What a worker runs."""

    def __init__(self, gpu: int, arch: str):
        self._trial_s = 1e-3 * float(os.environ[TRIAL_MS])

    def __call__(self, job) -> list[Result]:
        time.sleep(self._trial_s * (1 if len(job.configs) == 1 else 2 * len(job.configs)))
        times = [pretended_ms(job.key, config) for config in job.configs]
        return [Result("ok", ms, ms, ms, (ms,) * 7, 0.002) for ms in times]


def _built(key: AttentionKey, config: AttentionConfig) -> Future:
    build: Future = Future()
    build.set_result(FakeBuild(FakeFacts("fine")))
    return build


def tune(gpus: int) -> dict:
    """Trials, seconds from the first job on, and the share of them that each GPU worked."""
    tools = make_tools(FakeFarm())._replace(
        space=lambda key: Space.of(key, DEVICE.arch, ()), seeds=lambda key: space.seeds(key, DEVICE.arch, ()),
        compile=_built, gate=lambda *build: None, predict=None,
    )  # fmt: skip
    pool = WorkerPool(range(gpus), DEVICE.arch, Sleeper)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "x.sqlite", DEVICE) as store:
        runs = Coordinator(CELLS, SETUP, tools, store, Silent(), pool=pool).run()
        ended, usage = time.monotonic(), pool.usage().values()
        pool.close()
    seconds = ended - min(used.first for used in usage)
    return {
        "gpus": gpus, "trials": sum(sum(run.outcomes.values()) for run in runs), "seconds": round(seconds, 2),
        "busy": [round(used.busy_s / seconds, 2) for used in usage],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2,4,8")
    parser.add_argument("--trial-ms", default="30")
    given = parser.parse_args()
    os.environ[TRIAL_MS] = given.trial_ms
    for gpus in parse_numbers(given.gpus, "GPUs", 1, 64):
        print(json.dumps(tune(gpus)), flush=True)


if __name__ == "__main__":
    main()
