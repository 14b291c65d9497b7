"""Replays recorded landscapes without a GPU: how many timed trials each search needs, and what it misses at a budget.

    .venv/bin/python scripts/replay_search.py                             our search, random, Optuna's samplers
    .venv/bin/python scripts/replay_search.py --kernel-tuner KT/bin/python --smac SMAC/bin/python --optuna OPT/python
    .venv/bin/python scripts/replay_search.py --strategies cold,warm --seeds 5 --no-write
    .venv/bin/python scripts/replay_search.py --folder benchmarks/h200/landscapes-gluon

A trial told to a search is the median of as many of the recorded repeats, drawn with replacement: the noise of the GPU.
What it found is judged by the recorded median. "unseeded": nothing is known. "cold": with the seeds of the
architecture, of which the tiles for sm90 come from sweeps on this kind of GPU. "warm": with the trials of the other
cells of the dtype, at other lengths and masks, which were searched cold. Optuna's samplers get our treatment of repeats
and of illegal points, but no seeds; "gp" needs scipy. Kernel Tuner, SMAC, and Optuna's samplers that know no categories
(CMA-ES, QMC) run in interpreters that have them, over the same legal configs (rivals.py). Writes search.json and
search.md (search-gluon.* for landscapes-gluon) beside the folder; rows there of other strategies are kept.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import optuna

from zyfa.config import AttentionConfig
from zyfa.tuner import space
from zyfa.tuner.landscape import SUFFIX, Entry, Landscape, read_all
from zyfa.tuner.study import CellStudy
from zyfa.tuner.surrogate import Observation

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.95, 0.98, 0.99)  # of the fastest recorded config's speed
BUDGETS = (10, 15, 20, 40)  # trials at which regret is stated
TRIALS = 50  # of every search but those that `FEWER` names
FEWER = {"optuna gp": (40, 5)}  # trials and seeds at most: 0.2 to 1 s an ask
NEIGHBOURS = 4  # cells whose trials a warm start gets
OURS = ("unseeded", "cold", "warm")
OPTUNA = {"random": "random", "optuna tpe": "tpe", "optuna gp": "gp", "optuna nsga2": "nsga2"}

Trace = dict[AttentionConfig, float | None]  # config: ms as the search was told, in order


def told(entry: Entry, draw: random.Random) -> float | None:
    """What timing this config once more would have given."""
    if entry.outcome != "ok":  # a gated config may have been timed, but no search would
        return None
    return statistics.median(draw.choices(entry.samples_ms, k=len(entry.samples_ms)))


def search(landscape: Landscape, study: CellStudy, trials: int, seed: int) -> Trace:
    """Runs a study on a landscape. A config that did not compile or pass the gate is told, but is no timed trial."""
    draw, timed, trace = random.Random(seed), 0, {}
    while timed < trials and (config := study.ask()) is not None:
        entry = landscape.entries[config]
        trace[config] = told(entry, draw)
        study.tell(config, trace[config])
        timed += entry.outcome in ("ok", "wrong", "timed_out", "crashed")
    return trace


class Replay:
    """All landscapes of one GPU, and the traces of the cold searches that warm ones start from."""

    def __init__(self, landscapes: Sequence[Landscape], arch: str, trials: int):
        self.landscapes, self._arch, self._trials = landscapes, arch, trials
        self._cold: dict[tuple[str, int], Trace] = {}

    def trace(self, strategy: str, landscape: Landscape, seed: int) -> Trace:
        """One search of one landscape; cold ones are kept, since warm ones ask for them."""
        if strategy == "cold":
            if (landscape.name, seed) not in self._cold:
                self._cold[landscape.name, seed] = self._ours(landscape, seed, self._seeds(landscape), [])
            return self._cold[landscape.name, seed]
        if strategy == "warm":
            return self._warm(landscape, seed)
        if strategy == "unseeded":
            return self._ours(landscape, seed, [], [])
        study = CellStudy(landscape.space(), (), seed, OPTUNA[strategy])
        return search(landscape, study, FEWER.get(strategy, (self._trials, 0))[0], seed)

    def _seeds(self, landscape: Landscape) -> list[AttentionConfig]:
        return [config for config in space.seeds(landscape.key, self._arch) if config in landscape.entries]

    def _ours(self, landscape: Landscape, seed: int, seeds: Iterable[AttentionConfig], evidence) -> Trace:
        return search(
            landscape, CellStudy(landscape.space(), seeds, seed, evidence=lambda: evidence), self._trials, seed
        )

    def _warm(self, landscape: Landscape, seed: int) -> Trace:
        key = landscape.key
        others = [other for other in self.landscapes if other.key.dtype == key.dtype and other is not landscape]
        others.sort(key=lambda other: (other.key.causal != key.causal, abs(np.log2(other.key.seqlen_k / key.seqlen_k))))
        evidence, winners = [], []
        for other in others[:NEIGHBOURS]:
            trace = dict(list(self.trace("cold", other, seed).items())[:40])
            evidence += [Observation(other.key, config, ms) for config, ms in trace.items()]
            winners.append(min((c for c in trace if trace[c] is not None), key=lambda c: trace[c] or 0.0))
        same = [w for w, other in zip(winners, others, strict=False) if other.key.causal == key.causal]
        seeds = [self._seeds(landscape)[0], *same[:2]]
        return self._ours(landscape, seed, [c for c in seeds if c in landscape.entries], evidence)


def shares(landscape: Landscape, trace: Iterable[AttentionConfig], times: Sequence[float | None]) -> list[float]:
    """After each timed trial: true speed of the config that looked best so far, as a share of the best recorded."""
    found, best, seen = [], 0.0, float("inf")
    for config, ms in zip(trace, times, strict=True):
        entry = landscape.entries[config]
        if ms is not None and ms < seen and entry.ms is not None:
            seen, best = ms, landscape.best_ms / entry.ms
        if entry.outcome in ("ok", "wrong", "timed_out", "crashed"):
            found.append(best)
    return found


def summarise(runs: dict[str, list[list[float]]]) -> dict:
    """Figures of one strategy. runs: the shares of each seed, by cell."""
    every = [run for cell in runs.values() for run in cell]

    def needed(run: Sequence[float], share: float) -> float:
        return next((i for i, value in enumerate(run, 1) if value >= share), np.inf)

    figures: dict = {"runs": len(every), "trials": max(map(len, every))}
    for share in SHARES:
        counts = sorted(needed(run, share) for run in every)
        figures[f"to_{share:.0%}"] = _finite(counts[(len(counts) - 1) // 2])
        figures[f"to_{share:.0%}_p90"] = _finite(counts[int(0.9 * (len(counts) - 1))])
    for budget in (b for b in BUDGETS if b <= figures["trials"]):
        regrets = sorted(_regret(run[:budget]) for run in every)
        for name, at in (("", statistics.median(regrets)), ("_p90", regrets[int(0.9 * (len(regrets) - 1))])):
            figures[f"regret_pct_at_{budget}{name}"] = round(at, 3) if np.isfinite(at) else None
    return figures


def _regret(run: Sequence[float]) -> float:
    """Percent after a run; infinite where it found no legal config that works."""
    return 100 * (1 / run[-1] - 1) if run and run[-1] else np.inf


def _finite(number: float) -> int | None:
    return int(number) if np.isfinite(number) else None


def rivals(python: str, which: str, replay: Replay, seeds: int, trials: int) -> dict[str, dict[str, list[list[float]]]]:
    """Shares by strategy and cell of the tuners that rivals.py runs in another interpreter; {} where it fails."""
    tables = []
    for landscape in replay.landscapes:
        fields = {n: v for n, v in _columns(landscape).items() if len(set(v)) > 1}
        ms = [entry.ms for entry in landscape.entries.values()]
        tables.append({"name": landscape.name, "fields": fields, "ms": ms})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.json"
        path.write_text(json.dumps({"which": which, "tables": tables, "seeds": seeds, "trials": trials}))
        done = subprocess.run([python, str(ROOT / "scripts" / "rivals.py"), str(path)], stdout=subprocess.PIPE)
    if done.returncode:
        print(f"{which}: {python} ended with {done.returncode}; left out", file=sys.stderr)
        return {}
    found: dict[str, dict[str, list[list[float]]]] = {}
    by_name = {landscape.name: landscape for landscape in replay.landscapes}
    for strategy, cell, order in json.loads(done.stdout):
        landscape = by_name[cell]
        configs = list(landscape.entries)
        run = shares(landscape, [configs[i] for i in order], [landscape.entries[configs[i]].ms for i in order])
        found.setdefault(strategy, {}).setdefault(cell, []).append(run)
    return found


def _columns(landscape: Landscape) -> dict[str, list]:
    names = vars(next(iter(landscape.entries)))
    return {name: [getattr(config, name) for config in landscape.entries] for name in names}


def measure(replay: Replay, strategies: Sequence[str], seeds: int, say: Callable[[str], None]) -> dict[str, dict]:
    """Figures of each strategy over all landscapes and seeds, with the seconds that it thought for each trial."""
    rows = {}
    for strategy in strategies:
        number, begun, runs = min(seeds, FEWER.get(strategy, (0, seeds))[1]), time.monotonic(), {}
        for landscape in replay.landscapes:
            traces = [replay.trace(strategy, landscape, seed) for seed in range(number)]
            runs[landscape.name] = [shares(landscape, t, list(t.values())) for t in traces]
        asks = sum(len(run) for cell in runs.values() for run in cell)
        rows[strategy] = summarise(runs) | {
            "seeds": number,
            "ms_per_ask": round(1e3 * (time.monotonic() - begun) / max(asks, 1), 2),
        }
        say(f"{strategy}: {rows[strategy]}")
    return rows


def markdown(head: dict, rows: dict[str, dict]) -> str:
    """The table that the documentation shows."""
    budgets = [b for b in BUDGETS if any(f"regret_pct_at_{b}" in row for row in rows.values())]
    heads = ["search", "seeds", *(f"to {share:.0%}" for share in SHARES), *(f"regret at {b}" for b in budgets)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in rows.items():
        trials = [_pair(row[f"to_{share:.0%}"], row[f"to_{share:.0%}_p90"], row["trials"]) for share in SHARES]
        regrets = [
            f"{row[f'regret_pct_at_{b}']:.1f} %" if row.get(f"regret_pct_at_{b}") is not None else "" for b in budgets
        ]
        lines.append(f"| {name} | {row['runs'] // head['cells']} | {' | '.join(trials + regrets)} |")
    return (
        f"{head['gpu']}, {head['date']}: {head['cells']} cells, {head['configs']} recorded configs. Timed trials until "
        "the best found is that share of the fastest recorded, median (90th percentile) over cells and seeds; median "
        "regret after so many trials.\n\n" + "\n".join(lines) + "\n"
    )


def _pair(median: int | None, p90: int | None, limit: int) -> str:
    return f"{median or f'>{limit}'} ({p90 or f'>{limit}'})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "h200" / "landscapes")
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--strategies", default=",".join((*OURS, *OPTUNA)))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--kernel-tuner", help="an interpreter that has kernel_tuner")
    parser.add_argument("--smac", help="an interpreter that has smac")
    parser.add_argument("--optuna", help="an interpreter that has optuna, scipy and cmaes")
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    landscapes = read_all(given.folder)
    if not landscapes:
        parser.error(f"{given.folder} holds no landscapes")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    replay, text = Replay(landscapes, given.arch, given.trials), ""
    for strategy in filter(None, given.strategies.split(",")):
        text = keep(given.folder, landscapes, measure(replay, [strategy], given.seeds, print), not given.no_write)
    for which, python in (("kernel_tuner", given.kernel_tuner), ("smac", given.smac), ("optuna", given.optuna)):
        if python:
            found = rivals(python, which, replay, given.seeds, given.trials)
            rows = {name: summarise(runs) for name, runs in found.items()}
            text = keep(given.folder, landscapes, rows, not given.no_write)
    print(text)
    return 0


def keep(folder: Path, landscapes: Sequence[Landscape], rows: dict[str, dict], write: bool) -> str:
    """Adds rows to the stored ones, if those are of the same landscapes; returns the table."""
    where, names = table_of(folder), [each.name for each in landscapes]
    sums = sums_of(folder, names)
    if where.exists() and (before := json.loads(where.read_text()))["landscapes"] == sums:
        rows = before["rows"] | rows
    order = (*OURS, *OPTUNA, *rows)
    rows = {name: rows[name] for name in sorted(rows, key=order.index)}
    head = {
        "gpu": landscapes[0].head["gpu"], "date": datetime.now(UTC).date().isoformat(), "cells": len(landscapes),
        "configs": sum(len(each.entries) for each in landscapes), "python": platform.python_version(),
        "optuna": optuna.__version__, "landscapes": sums, "method": __doc__,
    }  # fmt: skip
    text = markdown(head, rows)
    if write:
        where.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
        where.with_suffix(".md").write_text(text)
    return text


def sums_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """What tells whether figures belong to the landscapes of a folder."""
    return {name: hashlib.sha256((folder / f"{name}{SUFFIX}").read_bytes()).hexdigest()[:16] for name in names}


def table_of(folder: Path) -> Path:
    """Where the figures of a folder of landscapes are kept: search.json, or search-gluon.json of landscapes-gluon."""
    return folder.parent / f"search{folder.name.removeprefix('landscapes')}.json"


if __name__ == "__main__":
    sys.exit(main())
