"""One run of zyfa-tune from options to exit code: which GPU, which tools, signals, and what is said at the end."""

import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from zyfa.device import Device, current_device, device_of_sku
from zyfa.errors import ZyfaError
from zyfa.lookup import user_db_path
from zyfa.toolchain import running
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

from . import model, space
from .axis import RecipeAxis, recipe_axis
from .cells import CellRun, Setup, Tools
from .certificate import Open, build_ahead
from .claims import claim_of
from .cli import Options
from .compile import CompileFarm
from .coordinator import Coordinator
from .effort import EFFORTS
from .gate import gate
from .modes import Run, audit, record, settle_cells, split_cells
from .progress import LiveProgress, PlainProgress, cell_name, duration
from .report import moved, print_table, row_of, to_json, why_none, write_html
from .stop import Stop
from .study import Space
from .warm import lent_rows
from .worker import WorkerError, WorkerPool

NO_GPU_TARGET = "mi355x"
FRONT_TILES = 3  # tiles that every recipe of a front is tried with, for TPE follows the fast recipes only
FINAL_S = 1.0  # of a cell's comparison at the end of a budget
SPLIT_SHARE = 0.15  # of a budget: for probing the cells' lower halves and tuning those that lose too much there
DONE, FAILED, HOLES = 0, 1, 3


def run(options: Options) -> int:
    """Tunes what the options ask for; returns the exit code. Usage errors raise click's own."""
    console = Console(stderr=options.json)
    with Stop() as stop:
        try:
            device, method, gpus = resolve(options)
            if method != "measure" and (needs := needs_gpu(options)):
                raise click.UsageError(f"{needs} measures, and needs a GPU that torch can use")
            if options.first_hour:
                if not gpus:
                    raise click.UsageError("--first-hour needs a GPU that torch can use")
                from .first_hour_run import run as first_hour

                return first_hour(options, device, gpus, console, stop)
            _say(console, _intro(options, device, method, gpus))
            if method == "predict":
                _say(console, f"zyfa-tune: {claim_of(device.arch)}")
            return _tune(options, device, method, gpus, console, stop)
        except (ZyfaError, WorkerError, OSError) as error:
            click.echo(f"zyfa-tune: {error}", err=True)
            return FAILED


def resolve(options: Options) -> tuple[Device, str, tuple[int, ...]]:
    """(device, method, GPUs to measure on) of the options on this machine; raises click.UsageError where they clash."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.target != "auto":
        device = device_of_sku(options.target)
        if options.method == "measure" and (not count or current_device(0).sku_key != device.sku_key):
            raise click.UsageError(f"--method measure needs a {options.target} in this machine; use --method predict")
        method = "predict" if options.method == "auto" else options.method
    elif count:
        device, method = current_device(options.gpus[0] if options.gpus else 0), options.method
        method = "measure" if method == "auto" else method
    elif options.method == "measure":
        raise click.UsageError("--method measure needs a GPU that torch can use, and there is none")
    else:
        device, method = device_of_sku(NO_GPU_TARGET), "predict" if options.method == "auto" else options.method
    if method == "predict" and device.sku not in model.DEVICES:
        raise click.UsageError(f"--method predict knows {', '.join(model.DEVICES)}, not {device.sku}")
    return device, method, _gpus(options, device, count) if method == "measure" else ()


def needs_gpu(options: Options) -> str | None:
    """The option that asks for measurements, if one does."""
    asked = {"--exhaustive": options.exhaustive is not None, "--audit": options.audit is not None}
    return next((name for name, given in (asked | {"--recheck": options.recheck}).items() if given), None)


def _gpus(options: Options, device: Device, count: int) -> tuple[int, ...]:
    """The GPUs to measure on; all of one kind, for their trials go into one file."""
    wanted = options.gpus or tuple(range(count))
    if beyond := [gpu for gpu in wanted if gpu >= count]:
        raise click.UsageError(f"--gpus {beyond[0]}: this machine has {count} (0 to {count - 1})")
    if others := [gpu for gpu in wanted if current_device(gpu).sku_key != device.sku_key]:
        other = current_device(others[0]).sku_key
        raise click.UsageError(f"GPU {others[0]} is {other}, not {device.sku_key}; name GPUs of one kind with --gpus")
    return wanted


def _intro(options: Options, device: Device, method: str, gpus: tuple[int, ...]) -> str:
    why = " (no GPU in this machine)" if options.target == "auto" and method != "measure" and not gpus else ""
    on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
    cells = f"{len(options.cells)} cells, up to {EFFORTS[options.effort].trials} configs each"
    return f"zyfa-tune: {device.sku_key}{why}, method {method}{on}, {cells}"


def _tune(options: Options, device: Device, method: str, gpus, console: Console, stop: Stop) -> int:
    begun = time.monotonic()
    path = options.db or user_db_path(device)
    store, outdated = _open(path, device, method)
    pool = WorkerPool(gpus, device.arch) if gpus else None
    farm = LazyFarm(device.arch, method)
    stop.at_once = lambda: [part.close() for part in (pool, farm) if part]
    try:
        axis = _axis(options, device, store, method, pool, farm, console)
        setup = _setup(options, method, axis, 2 * farm.processes, outdated, begun)
        run = Run(options, device, setup, _tools(device, method, farm, axis), store, path, pool, console, stop, begun)
        if options.exhaustive is not None:
            return record(run)
        if options.audit is not None:
            return audit(run)
        return _search(run)
    finally:
        for part in (pool, farm, store):
            if part is not None:
                part.close()


def _setup(options: Options, method: str, axis: RecipeAxis, lookahead: int, outdated: bool, begun: float) -> Setup:
    reserve = FINAL_S * len(options.cells) if method == "measure" else 0.0
    deadline = begun + max(options.budget_s - reserve, options.budget_s / 2) if options.budget_s else math.inf
    return Setup(
        method, _toolchain(method), EFFORTS[options.effort], lookahead, options.max_error.ratio, options.seed,
        sampler=options.sampler, fresh=not options.resume or outdated, recheck=options.recheck, deadline=deadline,
        admits=axis.admits, fronted=axis.fronted,
    )  # fmt: skip


def _search(run: Run) -> int:
    """Tunes the cells, then the halves of those that do not keep their promise."""
    setup = run.setup
    if not (run.options.split and setup.method == "measure") or setup.recheck:
        return _finish(run, _searched(run, run.options.cells))
    share = SPLIT_SHARE * (setup.deadline - run.begun) if setup.deadline < math.inf else 0.0
    cells = _searched(replace(run, setup=replace(setup, deadline=setup.deadline - share)), run.options.cells)
    halves, better = split_cells(run, cells)
    for cell in _searched(run, halves, better) if halves and not run.stop.requested() else []:
        if cell.winner is None and not cell.outcomes:
            _say(run.console, f"zyfa-tune: {cell_name(cell.key)}: no time was left; the whole cell's winner serves it")
        else:
            cells.append(cell)
    settle_cells(run, cells)
    return _finish(run, cells)


def _searched(run: Run, cells, hints=None) -> list[CellRun]:
    progress_type = LiveProgress if run.console.is_terminal else PlainProgress
    progress = progress_type(run.console, lambda: coordinator.runs, run.setup.effort.trials, run.setup.patience)
    coordinator = Coordinator(cells, run.setup, run.tools, run.store, progress, run.stop.requested, run.pool, hints)
    with progress:
        found = coordinator.run()
    _say(run.console, progress.summary())
    return found


def _open(path: Path, device: Device, method: str) -> tuple[Store | None, bool]:
    """The store, and whether its predictions are those of another model."""
    if method == "compile":
        return None, False
    store = Store(path, device)
    before = store.meta.get("model_version")
    if method == "measure" or before == model.MODEL_VERSION:
        return store, False
    store.close()
    return Store(path, device, model.MODEL_VERSION), before is not None


class LazyFarm:
    """A compile farm that starts with its first job: a run that finds everything done starts no process."""

    def __init__(self, arch: str, method: str):
        self._share = method != "measure"  # a launch finds in Triton's cache what was compiled by itself only
        self.processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._arch = arch
        self._farm: CompileFarm | None = None

    def submit(self, key, config):
        if self._farm is None:
            self._farm = CompileFarm(self._arch, self.processes, share_head_groups=self._share)
        return self._farm.submit(key, config)

    def close(self) -> None:
        if self._farm is not None:
            self._farm.close()


def _axis(
    options: Options, device: Device, store: Store | None, method: str, pool: WorkerPool | None, farm: LazyFarm,
    console: Console,
) -> RecipeAxis:  # fmt: skip
    """The run's recipes; a usage error where none may win."""
    trust = "measured" if method == "measure" else "predicted"
    say = lambda line: _say(console, f"zyfa-tune: {line}")  # noqa: E731

    def ahead(new: Open) -> None:
        """On an H200 with 16 cores the first trial of a cold run began after 37 s, most of them for this."""
        if pool is not None:
            pool.start()
        build_ahead(farm.submit, device.arch, new)

    gpus = pool.gpus if pool else ()
    axis = recipe_axis(options, device, store, _toolchain(method), trust, gpus, say, ahead)
    if why := axis.without_any([cell.key for cell in options.cells]):
        raise click.UsageError(f"--max-error: {why}")
    return axis


def _tools(device: Device, method: str, farm: LazyFarm, axis: RecipeAxis) -> Tools:
    arch, priced = device.arch, model.DEVICES.get(device.sku)
    return Tools(
        space=lambda key: Space.of(key, arch, axis.searched(key)),
        seeds=lambda key: space.seeds(key, arch, axis.searched(key), tiles=FRONT_TILES if axis.front else 1),
        compile=farm.submit,
        gate=lambda facts, key, config: gate(facts, key, config, arch),
        predict=None if method == "compile" or not priced else lambda f, k, c: model.predict(f, k, c, priced),
        lent=lambda: lent_rows(device.sku_key, arch, device.vendor),
    )


def _toolchain(method: str) -> Toolchain:
    """What compiles and runs the trials; torch and driver take no part in a prediction."""
    here = running()
    return Toolchain(*here) if method == "measure" else Toolchain(here.kernel_hash, here.triton_version, "", "")


def _finish(run: Run, cells: list[CellRun]) -> int:
    """Prints and writes the results; returns the exit code."""
    options, setup, seconds = run.options, run.setup, time.monotonic() - run.begun
    rows = [row_of(cell, setup.trust) for cell in cells]
    head = {
        "sku": run.device.sku_key, "method": setup.method, **setup.toolchain._asdict(), "seconds": round(seconds, 1),
        "database": str(run.path) if run.store else None, "gpus": _usage(run) if run.pool else {},
    }  # fmt: skip
    print_table(run.console, rows)
    if options.json:
        print(to_json(head, rows))
    if options.report:
        write_html(options.report, head, rows)
    if options.out and run.store:
        run.store.export(options.out / f"{run.device.db_name}.sqlite")
    for row in rows if setup.recheck else ():
        _say(run.console, moved(row))
    return _last_words(setup, cells, rows, run.path if run.store else None, run.console, run.stop, seconds)


def _usage(run: Run) -> dict[int, dict]:
    """Of each GPU: jobs, seconds from the start of the run to the first, and from there the share of time in jobs."""
    assert run.pool is not None
    used = {gpu: usage for gpu, usage in run.pool.usage().items() if usage.jobs}
    return {
        gpu: {
            "jobs": usage.jobs, "first_s": round(usage.first - run.begun, 1),
            "busy": round(usage.busy_s / max(time.monotonic() - usage.first, 1e-9), 3),
        }
        for gpu, usage in used.items()
    }  # fmt: skip


def _last_words(setup: Setup, runs, rows, path, console, stop: Stop, seconds: float) -> int:
    kept = f"in {path}" if path else "nowhere: --method compile stores nothing"
    if stop.signum:
        trials = sum(sum(run.outcomes.values()) for run in runs)
        _say(console, f"zyfa-tune: stopped; {trials} trials are kept {kept}; the same command goes on from there")
        return 128 + stop.signum
    holes = [row for row in rows if row["config"] is None and (setup.method != "compile" or row["state"] == "failed")]
    for row in holes:
        click.echo(f"zyfa-tune: {row['name']}: {why_none(row)}", err=True)
    if all(run.known for run in runs):
        _say(console, f"zyfa-tune: nothing to do: all {len(runs)} cells are tuned {kept}; --fresh searches again")
    else:
        fine = len(rows) - len(holes)
        _say(console, f"zyfa-tune: {fine} of {len(rows)} cells in {duration(seconds)}; results are {kept}")
    return HOLES if holes else DONE


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
