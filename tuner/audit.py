"""Asks whether stored rows keep their promise: irregular shapes, timed with what lookup gives and what else is known.

The regret of a shape is how much slower its config is than the best of those compared side by side: the default and
the best known configs of the nearest cells. It is 0 unless one of them is faster with 95 % confidence.
"""

import os
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from zyfa import lookup
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import Device
from zyfa.tuning_db.store import Trial

from .cells import Setup, Tools, family_of
from .plan import PlannedCell
from .progress import cell_name
from .timing import decide
from .warm import octaves
from .worker import Job, WorkerPool

RIVAL_CELLS, RIVALS = 3, 2  # nearest cells, and the configs of each that a shape is compared with
MAX_TOKENS = 1 << 17  # of a batch: inputs stay within a GPU's memory
AUDIT_LIMIT_S = 300.0


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

    def to_dict(self) -> dict:
        return self._asdict() | {
            "key": self.key._asdict(), "config": self.config.to_dict(), "best": self.best.to_dict(),
        }  # fmt: skip


def irregular(cells: Sequence[PlannedCell], number: int, seed: int) -> list[AttentionKey]:
    """Shapes in the cells and beside them: any length, other batches, a quarter with more keys than queries."""
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
    """A shape in the octave of a key, or one with up to four times its heads in a batch."""
    seqlen = draw.randint(max(key.seqlen_q // 2 + 1, 16), key.seqlen_q)
    longer = draw.randint(seqlen, 2 * seqlen) if draw.random() < 0.25 else seqlen
    batch = draw.choice([b for b in (1, 1, 1, 2, 3, 4) if b == 1 or b * longer <= MAX_TOKENS])
    return key._replace(seqlen_q=seqlen, seqlen_k=longer, batch=batch)


def rivals(key: AttentionKey, trials: Iterable[Trial]) -> list[AttentionConfig]:
    """The best known configs of the cells nearest to a key, of its family."""
    by_key: dict[AttentionKey, dict[AttentionConfig, float]] = {}
    for trial in trials:
        if family_of(trial.key) == family_of(key) and trial.ms is not None:
            by_key.setdefault(trial.key, {})[trial.config] = trial.ms
    near = sorted(by_key, key=lambda other: octaves(other, key))[:RIVAL_CELLS]
    return list(dict.fromkeys(c for n in near for c in sorted(by_key[n], key=by_key[n].__getitem__)[:RIVALS]))


class Audit:
    """Times shapes. choose: (config, how it was found) that a call of a key would get."""

    def __init__(
        self, choose: Callable[[AttentionKey], tuple[AttentionConfig, str]], trials: Sequence[Trial], setup: Setup,
        tools: Tools, pool: WorkerPool,
    ):  # fmt: skip
        self._choose, self._trials = choose, trials
        self._setup, self._tools, self._pool = setup, tools, pool

    def run(
        self, keys: Sequence[AttentionKey], stopped: Callable[[], bool], say: Callable[[str], None]
    ) -> list[Finding]:  # fmt: skip
        """A Finding for each key; fewer where stopped() ends the run. say: is told each as a line."""
        plans = [(key, self._choose(key)) for key in keys]
        jobs = [(key, chosen, match, self._compared(key, chosen)) for key, (chosen, match) in plans]
        builds = [[self._tools.compile(key, c) for c in configs] for key, _, _, configs in jobs]
        found = []
        for (key, chosen, match, configs), built in zip(jobs, builds, strict=True):
            if stopped():
                break
            good = [c for c, build in zip(configs, built, strict=True) if build.result().facts is not None]
            found.append(self._timed(key, chosen, match, [chosen, *(c for c in good if c != chosen)]))
            say(describe(found[-1]))
        return found

    def _compared(self, key: AttentionKey, chosen: AttentionConfig) -> list[AttentionConfig]:
        legal = self._tools.space(key).broken_rule
        others = [self._tools.seeds(key)[0], *rivals(key, self._trials)]
        return list(dict.fromkeys([chosen, *(config for config in others if legal(config) is None)]))

    def _timed(self, key: AttentionKey, chosen: AttentionConfig, match: str, configs: list[AttentionConfig]) -> Finding:
        job = Job(key, tuple(configs), self._setup.effort.final, self._setup.max_error)
        results = self._pool.submit(self._pool.gpus[0], job, AUDIT_LIMIT_S).result()
        if results[0].outcome != "ok":
            return Finding(key, chosen, match, chosen, None, 0.0, 0.0, results[0].outcome)
        valid = [i for i, result in enumerate(results) if result.outcome == "ok"]
        verdict = decide([results[i].timing() for i in valid], min_gain=0.0)
        best = configs[valid[verdict.winner]]
        return Finding(key, chosen, match, best, results[0].ms, verdict.gain, verdict.gain_lo)


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


def lookup_choice(database: Path, device: Device) -> Callable[[AttentionKey], tuple[AttentionConfig, str]]:
    """What zyfa.attention would run for a key when `database` is the first that it reads, and how it was found."""
    os.environ["ZYFA_TUNING_DB"] = str(database)
    lookup.reset()

    def choose(key: AttentionKey) -> tuple[AttentionConfig, str]:
        choice = lookup.choose(key, device)
        return choice.config, f"{choice.match} {choice.trust}"

    return choose
