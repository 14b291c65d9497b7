"""Asks whether stored rows keep their promise: irregular shapes, timed with what lookup gives and what else is known.

The regret of a shape is how much slower its config is than the best of those compared side by side: the default and
the best known configs of the nearest cells. It is 0 unless one of them is faster with 95 % confidence.
"""

import json
import os
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from zyfa import lookup
from zyfa.config import AttentionConfig, AttentionKey, cell_of, octave_of
from zyfa.device import Device
from zyfa.tuning_db.store import Trial

from .cells import Setup, Tools, family_of
from .landscape import name_of
from .plan import PlannedCell, key_of
from .progress import cell_name
from .timing import Repeats, decide
from .warm import octaves
from .worker import Job, Result, WorkerPool

RIVAL_CELLS, RIVALS, TILES = 2, 2, 3  # nearest cells; the configs, and the tiles, of each that a shape is compared with
MAX_REGRET = 3.0  # percent beyond which a cell does not keep its promise
BESIDE = 0.25  # share of the shapes that lie beside the cells
MAX_TOKENS = 1 << 17  # of a batch: inputs stay within a GPU's memory
AUDIT_LIMIT_S = 300.0
REPEATS = Repeats(0.0, 9, 15, 30.0)  # paired rounds see half a percent, and 200 shapes are to take two minutes
AHEAD = 4  # shapes that are handed to a GPU: one runs while the results of others are read


class Finding(NamedTuple):
    """One audited shape: the config it gets and how lookup came to it, the best one, regret in percent."""

    key: AttentionKey
    config: AttentionConfig
    match: str
    best: AttentionConfig
    ms: float | None
    regret: float
    regret_lo: float
    outcome: str = "ok"
    times: Mapping[AttentionConfig, float] = {}  # ms of all that were valid


class Plan(NamedTuple):
    """A shape to audit, the config that it gets, how that was found, and its rivals if they are not the known ones."""

    key: AttentionKey
    config: AttentionConfig
    match: str
    rivals: tuple[AttentionConfig, ...] = ()


def irregular(cells: Sequence[PlannedCell], number: int, seed: int) -> list[AttentionKey]:
    """Shapes of the cells: any length, some with fewer heads. A quarter lies beside them: other batches, more keys."""
    draw = random.Random(seed)
    families: dict[tuple, list[AttentionKey]] = {}
    for cell in cells:
        families.setdefault(family_of(cell.key), []).append(cell.key)
    keys = []
    for i in range(number):
        family = list(families.values())[i % len(families)]
        keys.append(_shape(draw.choice(family), draw))
    return keys


def _shape(key: AttentionKey, draw: random.Random) -> AttentionKey:
    """A shape in the octave of a key; beside it, with up to twice the keys or three more in the batch."""
    seqlen = draw.randint(max(key.seqlen_q // 2 + 1, 16), key.seqlen_q)
    inside = key._replace(seqlen_q=seqlen, seqlen_k=seqlen)
    if draw.random() >= BESIDE:
        return fewer_heads(inside) if draw.random() < 0.25 else inside
    more = [batch for batch in (2, 3, 4) if batch * key.batch * seqlen <= MAX_TOKENS]
    if more and draw.random() < 0.5:
        return inside._replace(batch=draw.choice(more) * key.batch)
    return inside._replace(seqlen_k=draw.randint(seqlen, 2 * seqlen))


def fewer_heads(key: AttentionKey) -> AttentionKey:
    """The key with three quarters of its heads, which share its cell, where those divide."""
    ratio, fewer = key.nheads // key.nheads_k, 3 * key.nheads_k // 4
    return key._replace(nheads=fewer * ratio, nheads_k=fewer) if key.nheads_k % 4 == 0 else key


def rivals(key: AttentionKey, trials: Iterable[Trial]) -> list[AttentionConfig]:
    """The best known configs of the cells nearest to a key, of its family, and those of their best tiles.

    Of tiles, too: configs that differ in less lose at the same lengths, where the last block is nearly empty.
    """
    by_key: dict[AttentionKey, dict[AttentionConfig, float]] = {}
    for trial in trials:
        if family_of(trial.key) == family_of(key) and trial.ms is not None:
            by_key.setdefault(trial.key, {})[trial.config] = trial.ms
    near = sorted(by_key, key=lambda other: octaves(other, key))[:RIVAL_CELLS]
    return list(dict.fromkeys(config for n in near for config in _best(by_key[n])))


def _best(ms: Mapping[AttentionConfig, float]) -> list[AttentionConfig]:
    """The RIVALS fastest configs, and the fastest of each of the TILES fastest tiles."""
    fastest = sorted(ms, key=ms.__getitem__)
    return [*fastest[:RIVALS], *one_of_each_tile(fastest)[:TILES]]


def one_of_each_tile(configs: Iterable[AttentionConfig]) -> list[AttentionConfig]:
    """The first config of each tile and recipe, which decide how a time grows with the length: by how full the last
    blocks are, and what quantising costs.
    """
    first: dict[tuple, AttentionConfig] = {}
    for c in configs:
        first.setdefault((c.variant, c.BLOCK_M, c.BLOCK_N, c.num_warps, c.splits, c.recipe), c)
    return list(first.values())


class Audit:
    """Times shapes. trials: what is known, of which the best configs of near cells are the rivals."""

    def __init__(self, trials: Sequence[Trial], setup: Setup, tools: Tools, pool: WorkerPool):
        self._trials, self._setup, self._tools, self._pool = trials, setup, tools, pool

    def run(
        self, plans: Sequence[Plan], stopped: Callable[[], bool], say: Callable[[str], None] = lambda line: None
    ) -> list[Finding]:  # fmt: skip
        """A Finding for each plan, in order; fewer where stopped() ends the run. say: is told each as a line.

        Everything is handed to the compilers at once. The GPUs take shapes in turn.
        """
        compared = [self._compared(plan) for plan in plans]
        builds = [
            [self._tools.compile(plan.key, c) for c in configs] for plan, configs in zip(plans, compared, strict=True)
        ]
        gpus, found = self._pool.gpus, []
        running: deque[tuple[Plan, list[AttentionConfig], Future]] = deque()

        def take() -> None:
            plan, configs, done = running.popleft()
            found.append(_finding(plan, configs, done.result()))
            say(describe(found[-1]))

        for number, (plan, configs, built) in enumerate(zip(plans, compared, builds, strict=True)):
            if stopped():
                break
            good = [c for c, build in zip(configs, built, strict=True) if build.result().facts is not None]
            configs = [plan.config, *(c for c in good if c != plan.config)]
            if len(running) >= AHEAD * len(gpus):
                take()
            job = Job(plan.key, tuple(configs), REPEATS, self._setup.max_error)
            running.append((plan, configs, self._pool.submit(gpus[number % len(gpus)], job, AUDIT_LIMIT_S)))
        while running:
            take()
        return found

    def _compared(self, plan: Plan) -> list[AttentionConfig]:
        legal = self._tools.space(plan.key).broken_rule
        others = plan.rivals or (self._tools.seeds(plan.key)[0], *rivals(plan.key, self._trials))
        return list(dict.fromkeys([plan.config, *(config for config in others if legal(config) is None)]))


def _finding(plan: Plan, configs: Sequence[AttentionConfig], results: Sequence[Result]) -> Finding:
    """Of the results of configs[0], which is the plan's, and of its rivals."""
    key, chosen, match, _ = plan
    if results[0].outcome != "ok":
        return Finding(key, chosen, match, chosen, None, 0.0, 0.0, results[0].outcome)
    valid = [i for i, result in enumerate(results) if result.outcome == "ok"]
    verdict = decide([results[i].timing() for i in valid], min_gain=0.0)
    best = configs[valid[verdict.winner]]
    times = {configs[i]: ms for i in valid if (ms := results[i].ms) is not None}
    return Finding(key, chosen, match, best, results[0].ms, verdict.gain, verdict.gain_lo, times=times)


def describe(found: Finding) -> str:
    """One line."""
    how = found.outcome if found.outcome != "ok" else f"regret {found.regret:.2f} %"
    return f"{cell_name(found.key)}: {found.match}, {how}" + (f", best {found.best}" if found.regret else "")


def summary(found: Sequence[Finding]) -> dict:
    """Worst and median regret in percent, over all shapes and by how lookup found the config; shapes that failed."""
    timed = [each for each in found if each.outcome == "ok"]

    def figures(some: Sequence[Finding]) -> dict:
        regrets = [each.regret for each in some]
        return {"shapes": len(some), "median": statistics.median(regrets), "worst": max(regrets)} if some else {}

    matches = sorted({each.match for each in timed})
    return {
        **figures(timed), "failed": len(found) - len(timed),
        "by_match": {match: figures([each for each in timed if each.match == match]) for match in matches},
    }  # fmt: skip


OWN_ROW = "exact measured"  # how lookup says that a row of the shape's own cell was found


def broken_cells(found: Sequence[Finding]) -> dict[AttentionKey, float]:
    """The worst regret in percent, by largest key, of each cell in which a shape loses more than MAX_REGRET.

    Where the cell has a row of its own, which is tuned already, it is the lower half that the shape lies in.
    """
    worst: dict[AttentionKey, float] = {}
    for each in found:
        if each.regret > MAX_REGRET:
            cell = cell_of(each.key)
            at = key_of(cell if each.match == OWN_ROW else octave_of(cell))
            worst[at] = max(each.regret, worst.get(at, 0.0))
    return worst


COLUMNS = ("shape", "match", "outcome", "ms", "regret_pct", "regret_lo_pct", "config", "best")


def to_json(head: dict, found: Sequence[Finding]) -> str:
    """A report of one line for each shape: COLUMNS, of which the last two are places in "configs"."""
    configs = list(dict.fromkeys(config for each in found for config in (each.config, each.best)))
    place = {config: n for n, config in enumerate(configs)}
    rows = [
        [name_of(f.key), f.match, f.outcome, f.ms and float(f"{f.ms:.4g}"), round(f.regret, 2), round(f.regret_lo, 2),
         place[f.config], place[f.best]]
        for f in found
    ]  # fmt: skip
    cells = {name_of(key): round(regret, 2) for key, regret in broken_cells(found).items()}
    head = head | summary(found) | {"cells_to_tune": cells, "columns": COLUMNS}
    lists = _lines("configs", [config.to_dict() for config in configs]) + ",\n" + _lines("rows", rows)
    return json.dumps(head, indent=1).removesuffix("\n}") + ",\n" + lists + "\n}"


def _lines(name: str, values: Sequence) -> str:
    return f'"{name}": [\n' + ",\n".join(json.dumps(value, separators=(",", ":")) for value in values) + "\n]"


def workload_line(key: AttentionKey) -> str:
    """A call for zyfa-tune --workload, whose dtype is an option there."""
    fields = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "head_dim", "head_dim_v", "causal")
    half = cell_of(key) != octave_of(cell_of(key))
    return json.dumps({name: getattr(key, name) for name in fields} | ({"half": True} if half else {}))


def lookup_plans(keys: Sequence[AttentionKey], database: Path, device: Device) -> list[Plan]:
    """What zyfa.attention would run for each key when `database` is the first that it reads."""
    os.environ["ZYFA_TUNING_DB"] = str(database)
    lookup.reset()
    choices = ((key, lookup.choose(key, device)) for key in keys)
    return [Plan(key, choice.config, f"{choice.match} {choice.trust}") for key, choice in choices]
