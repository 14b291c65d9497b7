"""What a tuning database says, apart from how its file says it: no row numbers, no order, everything comparable.

Two files with equal contents are the same database. Merging, comparing, pruning and the text dump work on this form.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zyfa.config import AttentionConfig, AttentionKey, Cell, cell_of
from zyfa.errors import DatabaseError

from .certificates import Licence, Stored, stored_in
from .codec import unpack_facts, unpack_samples
from .reader import UNCERTIFIED, opened, read
from .schema import Toolchain, version_of

MAX_TRIALS = 500_000  # the longest tuning logs have some ten thousand


class Record(NamedTuple):
    """One trial. Times in ms, samples in us, facts as canonical JSON, created_at in Unix seconds."""

    key: AttentionKey
    toolchain: Toolchain
    config: str  # canonical JSON; may be one that only a newer ZYFA knows
    granularity: str
    outcome: str
    trust: str
    is_default: int
    ms: float | None
    ms_lo: float | None
    ms_hi: float | None
    samples_us: tuple[float, ...]
    rel_err: float | None
    reason: str
    facts: str
    created_at: int

    @property
    def order(self) -> str:
        """Sorts trials by cell, toolchain, trust, then time: a cell that is tuned again adds lines in one place."""
        return json.dumps([_padded(cell_of(self.key)), self.toolchain, self.trust, self.created_at, self])


class Seat(NamedTuple):
    """What a winner is the winner of."""

    cell: Cell
    toolchain: Toolchain
    trust: str

    @property
    def order(self) -> str:
        return json.dumps([_padded(self.cell), self.toolchain, self.trust])


class Crown(NamedTuple):
    """A winner: its trial and how it was chosen."""

    record: Record
    confidence: str
    trials: int
    default_ms: float | None
    tuned_at: str

    @property
    def seat(self) -> Seat:
        return Seat(cell_of(self.record.key), self.record.toolchain, self.record.trust)


class Content(NamedTuple):
    """meta; how often each trial was recorded; the winner of each seat, and of each recipe there; certificates."""

    meta: dict[str, str]
    trials: Counter[Record]
    winners: dict[Seat, Crown]
    fronts: dict[tuple[Seat, str], Crown]
    certificates: dict[Licence, Stored]


def _padded(cell: Cell) -> list[str]:
    return [f"{value:09d}" if isinstance(value, int) else value for value in cell]


_SQL = """SELECT t.id, c.dtype, c.head_dim, c.head_dim_v, s.nheads, s.nheads_k, s.batch, s.seqlen_q, s.seqlen_k,
    c.causal, c.window_class, h.kernel_hash, h.triton_version, h.torch_version, h.driver_version, f.config,
    f.granularity, t.outcome, t.trust, t.is_default, t.ms, t.ms_lo, t.ms_hi, t.samples, t.rel_err, t.reason, x.facts,
    t.created_at
FROM trials t JOIN shapes s ON s.id = t.shape JOIN cells c ON c.id = s.cell
JOIN toolchains h ON h.id = t.toolchain JOIN configs f ON f.id = t.config JOIN facts x ON x.id = t.facts"""

_FRONTS = "SELECT recipe, trial, confidence, trials, default_ms, tuned_at FROM fronts"


def read_content(path: str | os.PathLike) -> Content:
    """Everything that a database holds.

    Raises DatabaseError, also for a trial that lacks a part or a winner that does not read: writing it again would give
    it a valid seal. FP8 winners without a certificate are left out, their trials are not.
    """
    skipped: list[str] = []
    for view in ("best", "front"):
        read(path, skipped, view)
    if faults := [fault for fault in skipped if not fault.endswith(UNCERTIFIED)]:
        raise DatabaseError(f"{path}: {faults[0]}; see zyfa-db verify")
    with opened(path) as conn:
        meta = dict(conn.execute("SELECT key, value FROM meta ORDER BY key LIMIT 100"))
        (stored,) = conn.execute("SELECT count(*) FROM trials").fetchone()
        if stored > MAX_TRIALS:
            raise DatabaseError(f"{path}: {stored} trials, more than {MAX_TRIALS}")
        by_id = {row[0]: _record(row) for row in conn.execute(_SQL)}
        winners = conn.execute("SELECT '', trial, confidence, trials, default_ms, tuned_at FROM winners").fetchall()
        fronts = conn.execute(_FRONTS).fetchall() if version_of(conn, path) >= 2 else []
        certificates = stored_in(conn)
    if len(by_id) != stored or any(trial not in by_id for _, trial, *_ in winners + fronts):
        raise DatabaseError(f"{path}: some trials or winners lack a part; see zyfa-db verify")
    crowns = [(recipe, Crown(by_id[trial], *rest)) for recipe, trial, *rest in winners + fronts]
    crowns = [(recipe, crown) for recipe, crown in crowns if _is_shown(crown, certificates)]
    return Content(
        meta,
        Counter(by_id.values()),
        {crown.seat: crown for recipe, crown in crowns if not recipe},
        {(crown.seat, recipe): crown for recipe, crown in crowns if recipe},
        certificates,
    )


def _is_shown(crown: Crown, certificates: dict[Licence, Stored]) -> bool:
    """Whether the views show it: FP8 needs the certificate of its recipe."""
    key = crown.record.key
    if key.dtype != "fp8":
        return True
    recipe = AttentionConfig.from_json(crown.record.config).recipe
    at = crown.record.toolchain, crown.record.trust, recipe, key.head_dim, key.head_dim_v, key.causal
    return Licence(*at) in certificates


def _record(row: tuple) -> Record:
    key = AttentionKey._make([*row[1:9], bool(row[9]), row[10]])
    facts = json.dumps(unpack_facts(row[26]), sort_keys=True, separators=(",", ":"))
    parts = [key, Toolchain(*row[11:15]), *row[15:23], unpack_samples(row[23]), row[24], row[25], facts, row[27]]
    return Record._make(parts)


def write_content(content: Content, path: str | os.PathLike) -> None:
    """Writes a database that holds just this, compact, in one step; equal contents give equal rows in equal order.

    Raises DatabaseError or ValueError, and then leaves `path` as it was.
    """
    from .store import Store

    path = Path(path)
    with _part_of(path) as part, Store(part) as store:
        store.fill(content)
        store.export(path)


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[Path]:
    """A private name beside the file; what is left there is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        for rest in (part, Path(f"{part}-journal")):
            rest.unlink(missing_ok=True)
