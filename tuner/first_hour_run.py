"""zyfa-tune --first-hour: opens what the hour needs, runs it, then tunes with what is left, and writes what to send."""

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
from rich.console import Console

from zyfa.config import cell_of
from zyfa.device import Device
from zyfa.lookup import user_db_path
from zyfa.tuning_db.reader import DATA, Row, read
from zyfa.tuning_db.store import Store

from . import session
from .cli import Options
from .first_hour import Hour, budget_left
from .first_hour_probes import Probe, measure
from .first_hour_report import lines, to_dict
from .model import DEVICES, MODEL_VERSION
from .progress import cell_name
from .worker import WorkerPool

FOLDER = Path("first-hour")
PROBE_LIMIT_S = 300.0


def probe(gpu: int, arch: str) -> Probe:
    """Probes in a process of their own: a hang or a crash there costs the probes and nothing else."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(measure, gpu, arch).result(PROBE_LIMIT_S)
        except TimeoutError as error:
            for worker in (process._processes or {}).values():
                worker.kill()
            raise RuntimeError(f"no answer within {PROBE_LIMIT_S:g} s") from error


def run(options: Options, device: Device, gpus: tuple[int, ...], console: Console, stop) -> int:
    """The hour on the first of the GPUs; returns the exit code."""
    if device.sku not in DEVICES:
        raise click.UsageError(f"--first-hour knows {', '.join(DEVICES)}, not {device.sku}")
    begun, path, folder = time.monotonic(), options.db or user_db_path(device), options.out or FOLDER
    tools = session._toolchain("measure")
    pool, farm = WorkerPool(gpus[:1], device.arch), session.LazyFarm(device.arch, "measure")
    stop.at_once = lambda: [part.close() for part in (pool, farm)]

    def say(line: str) -> None:
        session._say(console, line)

    try:
        with Store(path, device) as store:
            hour = Hour(device.sku, device.arch, farm.submit, pool, lambda: probe(gpus[0], device.arch), store, tools,
                        say, stop.requested, options.seed)  # fmt: skip
            outcome = hour.run()
            store.export(folder / f"{device.db_name}.sqlite")
    finally:
        pool.close()
        farm.close()
    head = {"sku": device.sku_key, "model_version": MODEL_VERSION, **tools._asdict(), "names": dict(device.names)}
    report = folder / f"{device.db_name}.json"
    report.write_text(json.dumps(to_dict(outcome, head), indent=1) + "\n", encoding="utf-8")
    for line in lines(outcome, device.sku_key):
        say(line)
    code = _tuned(options, device, gpus, console, stop, folder, path, begun)
    say(f"zyfa-tune: to send back: {report} and {folder / device.db_name}.sqlite (zyfa-db merge takes the latter)")
    return code or int(any(result.outcome != "ok" for result in outcome.checks.values()))


def _tuned(options: Options, device: Device, gpus, console: Console, stop, folder: Path, path: Path, begun) -> int:
    """The ordinary tune; afterwards every cell that it decided against the row that was shipped for it."""
    if stop.signum:
        return 128 + stop.signum
    left = dataclasses.replace(options, budget_s=budget_left(begun, options.budget_s), db=path, out=folder)
    code = session._tune(left, device, "measure", gpus, console, stop)
    for line in against_shipped(path, DATA / f"{device.db_name}.sqlite", session._toolchain("measure")):
        session._say(console, line)
    return code


def against_shipped(path: Path, shipped: Path, toolchain) -> Iterator[str]:
    """For each cell with a shipped prediction and a measured winner: what the predicted config was worth."""
    rows: dict = {}
    for row in reversed(read(shipped) if shipped.exists() else []):
        if row.trust == "predicted":
            rows[row.cell] = row
    with Store(path) as store:
        for cell, row in sorted(rows.items()):
            if winner := store.winner(cell, toolchain, "measured"):
                trials = store.trials(cell, toolchain, "measured")
                times = [t.ms for t in trials if t.config == row.config and t.ms is not None]
                yield _against(row, winner.trial, min(times, default=None))


def _against(row: Row, best, ms: float | None) -> str:
    name = cell_name(best.key)
    assert cell_of(best.key) == row.cell
    if ms is None:
        return f"{name}: predicted {row.ms:.4g} ms; its config was not timed; measured best {best.ms:.4g} ms"
    inside = "inside" if row.ms_lo <= ms <= row.ms_hi else "outside"
    gap = ms / best.ms - 1
    return f"{name}: predicted {row.ms:.4g} ms, measured {ms:.4g} ms ({inside} the interval), {gap:.1%} above the best"
