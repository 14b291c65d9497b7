"""What a search starts from: the cell's own past, cells near it, the cell of a related GPU; and what it leaves out.

Seeds are measured again and never copied: on public landscapes the best config of another GPU keeps 5 to 99 % of the
optimum, while measuring its 20 best again recovers 88 to 99.7 % of it.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from zyfa.config import AttentionConfig, AttentionKey, Cell
from zyfa.tuning_db.reader import Row
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Trial

from .cells import CellRun, family_of, size_of
from .facts import Facts
from .study import Space
from .surrogate import Observation

OFFENCES = ("wrong", "timed_out", "crashed")
OWN_TOP = 4  # of the same cell under other toolchains
NEIGHBOURS = 2  # cells whose winners are seeds
MODEL_TOP = 3  # of the model's ranking of what is compiled already
LENT = 2  # rows of related GPUs
NEAR_CELLS = 6  # whose trials are evidence
ENOUGH = 24  # trials of near cells with which the architecture's own seeds are not needed


class WarmStart:
    """past: trials of the database that is tuned into. lent: winners of the shipped databases of this architecture."""

    def __init__(self, past: Iterable[Trial], toolchain: Toolchain, lent: Sequence[Row] = ()):
        self._lent = lent
        self._mine: dict[tuple, dict[AttentionKey, list[Trial]]] = defaultdict(lambda: defaultdict(list))
        self._older: dict[AttentionKey, list[Trial]] = defaultdict(list)
        self._offenders: dict[tuple, set[AttentionConfig]] = defaultdict(set)
        for trial in past:
            if trial.toolchain != toolchain:
                self._older[trial.key].append(trial)
            else:
                self._mine[family_of(trial.key)][trial.key].append(trial)
                self.note(trial.key, trial.config, trial.outcome)

    def note(self, key: AttentionKey, config: AttentionConfig, outcome: str) -> None:
        """Remembers a config that was wrong, hung or crashed with this toolchain."""
        if outcome in OFFENCES:
            self._offenders[family_of(key)].add(config)

    def without_offenders(self, space: Space) -> Space:
        """The space without what failed so in any cell of the key's family: what hangs at one length is left alone."""
        banned = self._offenders[family_of(space.key)]
        return dataclasses.replace(
            space,
            broken_rule=lambda c: "failed in another cell" if c in banned else space.broken_rule(c),
            candidates=lambda: [c for c in space.candidates() if c not in banned] if banned else space.candidates(),
        )

    def seeds(self, run: CellRun, runs: Sequence[CellRun]) -> list[AttentionConfig]:
        """The default config, then the best of what is known elsewhere, best claim first."""
        older = sorted((t for t in self._older[run.key] if t.ms is not None), key=lambda t: t.ms or 0.0)
        own = list(dict.fromkeys(trial.config for trial in older))[:OWN_TOP]
        return list(
            dict.fromkeys([run.default, *own, *self._near_winners(run, runs), *self._lent_to(run.planned.cell)])
        )

    def own_best(self, key: AttentionKey) -> list[AttentionConfig]:
        """The fastest of a cell under other toolchains, the finalists by their last time."""
        last = {trial.config: trial.ms for trial in self._older[key]}
        valid = [config for config, ms in last.items() if ms is not None]
        return sorted(valid, key=lambda config: last[config] or 0.0)[:OWN_TOP]

    def _near_winners(self, run: CellRun, runs: Sequence[CellRun]) -> list[AttentionConfig]:
        family = [other for other in runs if other.family == run.family and other is not run and other.started]
        best = {other.key: other.winner[0] if other.winner else other.study.best for other in family}
        won = {key: config for key, config in best.items() if config is not None}
        for key, trials in self._mine[run.family].items():
            valid = [trial for trial in trials if trial.ms is not None]
            if key != run.key and key not in won and valid:
                won[key] = min(valid, key=lambda trial: trial.ms or 0.0).config
        near = sorted(won, key=lambda key: octaves(key, run.key))
        return list(dict.fromkeys(won[key] for key in near))[:NEIGHBOURS]

    def _lent_to(self, cell: Cell) -> list[AttentionConfig]:
        """Configs of the nearest rows of the cell's class."""
        rows = [row for row in self._lent if row.cell[:3] == cell[:3] and row.cell[4:6] == cell[4:6]]

        def far(row: Row) -> float:
            pairs = zip(row.cell[6:], cell[6:], strict=True)
            return sum(abs(math.log2(theirs / ours)) for theirs, ours in pairs)

        return list(dict.fromkeys(row.config for row in sorted(rows, key=far)))[:LENT]

    def evidence(self, run: CellRun, runs: Sequence[CellRun]) -> list[Observation]:
        """What is known of other cells now, those of the nearest sizes last, the cell's own past the very last."""
        told: dict[AttentionKey, dict[AttentionConfig, float | None]] = {
            key: {trial.config: trial.ms for trial in trials} for key, trials in self._mine[run.family].items()
        }
        told |= {other.key: other.study.times for other in runs if other.family == run.family and other.started}
        told.pop(run.key, None)
        near = sorted(told, key=lambda key: octaves(key, run.key))[:NEAR_CELLS]
        found = [Observation(key, config, ms) for key in reversed(near) for config, ms in told[key].items()]
        return found + [Observation(t.key, t.config, t.ms, foreign=True) for t in self._older[run.key]]


def model_top(run: CellRun, facts: Mapping[tuple, Facts], predict: Callable | None) -> list[AttentionConfig]:
    """What the model holds best for a cell among the builds of its family so far; they cost no compile.

    facts: of builds by (family, config). predict: None where there is no model to ask.
    """
    if predict is None:
        return []
    ms = {config: predict(f, run.key, config).ms for (family, config), f in facts.items() if family == run.family}
    return sorted(ms, key=ms.__getitem__)[:MODEL_TOP]


def octaves(key: AttentionKey, other: AttentionKey) -> float:
    """How far two keys of one family are apart in size."""
    return abs(math.log2(size_of(key) / size_of(other)))


def lent_rows(sku_key: str, arch: str, vendor: str) -> list[Row]:
    """Winners of the shipped databases of an architecture: this SKU's own first, then its siblings'. Never raises."""
    from zyfa.errors import DatabaseError
    from zyfa.tuning_db import reader

    rows = []
    for path in sorted(reader.DATA.glob(f"{vendor}-{arch}-*.sqlite")):
        try:
            rows += reader.read(path)
        except DatabaseError:
            continue
    return sorted(rows, key=lambda row: row.sku != sku_key)
