"""Writes tuning databases: every trial as it ends, and the winner of each cell.

One short transaction per trial, begun IMMEDIATE: a transaction that upgrades from reading to writing fails at once
under contention, whatever the busy timeout. The journal is SQLite's default (DELETE), not WAL: the database is one
file at every moment, it can be copied, mounted read-only or kept on a network file system, and a trial takes far
longer than its two syncs.
"""

import contextlib
import json
import operator
import os
import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from sqlite_utils import Database

from zyfa.config import AttentionConfig, AttentionKey, Cell, cell_of
from zyfa.device import Device
from zyfa.errors import ConfigError, DatabaseError

from .certificates import put
from .codec import finite, pack_facts, pack_samples, unpack_facts, unpack_samples, utc
from .content import Content, Crown, Record
from .mounts import network_type
from .reader import Row, granularity_of, seal_of
from .schema import Toolchain, check_objects, migrate

Fields = TypeVar("Fields", Cell, AttentionKey)

# SQLite's wait for a lock is no queue, and it sleeps longer the longer it has waited: of eight writers without a pause
# one starved for 5 s on a slow disk. So writers ask again after short random pauses, whoever came first.
BUSY_S = 120.0
PAUSE_S = 0.02
EXPORT_PAGE_BYTES = 2048  # most tables fill one page


class Trial(NamedTuple):
    """One stored trial. ms, ms_lo and ms_hi are None unless outcome is "ok"; samples are ms; created_at is UTC."""

    id: int
    key: AttentionKey  # the shape that was really timed
    toolchain: Toolchain
    config: AttentionConfig
    outcome: str
    trust: str
    is_default: bool
    ms: float | None
    ms_lo: float | None
    ms_hi: float | None
    samples: tuple[float, ...]
    rel_err: float | None
    reason: str
    facts: dict
    created_at: str


class Winner(NamedTuple):
    """The trial that a cell uses, and how it was chosen. default_ms is None where the default config has no time."""

    trial: Trial
    confidence: str
    trials: int
    default_ms: float | None
    tuned_at: str


class Store:
    """A tuning database opened for writing; created or migrated as needed.

    Raises DatabaseError for a file that is no tuning database, cannot be written, or (with `device`) belongs to
    another SKU; SchemaTooNew for one that a newer ZYFA wrote. `device` and `model_version` go into table meta.
    Threads may share one: they take turns.
    """

    def __init__(self, path: str | os.PathLike, device: Device | None = None, model_version: str = ""):
        self.path = Path(path)
        if kind := network_type(self.path):
            warnings.warn(
                f"{path}: lies on {kind}, where SQLite's locks may not hold: tune into a local file and copy it there",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            conn = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(f"{path}: cannot be opened for writing: {error}") from error
        self._db, self._turn = Database(conn), threading.RLock()
        try:
            self._prepare(device, model_version)
        except sqlite3.Error as error:
            self.close()
            raise DatabaseError(f"{path}: cannot be used for writing: {error}") from error
        except BaseException:
            self.close()
            raise

    def _prepare(self, device: Device | None, model_version: str) -> None:
        self._db.execute("PRAGMA trusted_schema = OFF")
        self._db.execute("PRAGMA foreign_keys = ON")
        migrate(self._db.conn, self.path)
        check_objects(self._db.conn, self.path)
        if self._db.journal_mode != "delete":  # set by another tool; while that has the file open, WAL has to do
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = DELETE")
        if device is not None:
            self._set_meta(device, model_version)

    def _set_meta(self, device: Device, model_version: str) -> None:
        with self._writing():
            stored = self.meta.get("sku", device.sku_key)
            if stored != device.sku_key:
                raise DatabaseError(
                    f"{self.path}: belongs to {stored}, not to {device.sku_key}; one file holds one SKU"
                )
            values = {
                "sku": device.sku_key, "vendor": device.vendor, "arch": device.arch, "units": str(device.units),
                "names": json.dumps(dict(device.names), sort_keys=True),
            }  # fmt: skip
            if model_version:
                values["model_version"] = model_version
            self._db.conn.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        with self._turn:
            self._db.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._turn:
            try:
                self._begin()
                yield
                self._db.commit()
            except BaseException as error:
                self._db.rollback()
                if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.IntegrityError):
                    # locked, full, read-only
                    raise DatabaseError(f"{self.path}: cannot be written: {error}") from error
                raise

    def _begin(self) -> None:
        until, pauses = time.monotonic() + BUSY_S, random.SystemRandom()
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            while True:
                try:
                    self._db.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                        raise
                time.sleep(pauses.uniform(0.0, PAUSE_S))
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(1e3 * BUSY_S)}")

    @property
    def meta(self) -> dict[str, str]:
        """Whose database it is: sku (the key), vendor, arch, units, names, model_version."""
        return dict(self._read("SELECT key, value FROM meta"))

    def _read(self, sql: str, values: Sequence | dict = ()) -> list[tuple]:
        with self._turn:
            return self._db.execute(sql, values).fetchall()

    def add_trial(
        self, key: AttentionKey, toolchain: Toolchain, config: AttentionConfig, *, outcome: str, trust: str,
        ms: float | None = None, ms_lo: float | None = None, ms_hi: float | None = None, samples: Sequence[float] = (),
        rel_err: float | None = None, is_default: bool = False, reason: str = "", facts: dict | None = None,
    ) -> int:  # fmt: skip
        """Appends one trial and returns its id; it is on disk when this returns.

        An "ok" trial has ms, and ms_lo and ms_hi (ms where absent); a measured one also its samples, in ms. Raises
        ValueError for NaN, infinity and whatever else the schema forbids.
        """
        if key.window_class != "none":
            raise ValueError(
                "a trial with a window has no place in this schema: its work depends on the window's width"
            )
        packed_facts = pack_facts(facts or {})
        record = {
            "outcome": outcome, "trust": trust, "is_default": int(is_default), "reason": reason,
            "ms": finite("ms", ms), "ms_lo": finite("ms_lo", ms if ms_lo is None else ms_lo),
            "ms_hi": finite("ms_hi", ms if ms_hi is None else ms_hi), "rel_err": finite("rel_err", rel_err),
            "samples": pack_samples([1e3 * (finite("samples", x) or 0.0) for x in samples]),
            "created_at": int(time.time()),
        }  # fmt: skip
        try:
            with self._writing():
                return self._append(key, toolchain, config.to_json(), granularity_of(config), packed_facts, record)
        except sqlite3.IntegrityError as error:
            raise ValueError(f"trial breaks the schema: {error}; got {record}") from error

    def _append(self, key, toolchain: Toolchain, config: str, granularity: str, facts: bytes, record: dict) -> int:
        return self._insert("trials", record | {
            "shape": self._shape_id(key), "toolchain": self._id("toolchains", toolchain._asdict()),
            "config": self._id("configs", {"config": config, "granularity": granularity}),
            "facts": self._id("facts", {"facts": facts}),
        })  # fmt: skip

    def fill(self, content: Content) -> None:
        """Adds what another database says, all or nothing; raises ValueError for what the schema forbids.

        Meant for an empty database: the trials that it has already are added again.
        """
        try:
            with self._writing():
                self._db.conn.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", sorted(content.meta.items()))
                oldest_first = sorted(content.trials.elements(), key=lambda r: (r.created_at, r.order))
                ids = {record: self._append_record(record) for record in oldest_first}
                for licence in sorted(content.certificates, key=lambda licence: licence.order):
                    put(self, licence, content.certificates[licence])
                for crown in sorted(content.winners.values(), key=lambda crown: crown.seat.order):
                    self._append_crown("winners", {}, crown, ids[crown.record])
                for (_, recipe), crown in sorted(content.fronts.items(), key=lambda x: (x[0][0].order, x[0][1])):
                    self._append_crown("fronts", {"recipe": recipe}, crown, ids[crown.record])
        except sqlite3.Error as error:
            raise ValueError(f"{self.path}: content breaks the schema: {error}") from error

    def _append_record(self, r: Record) -> int:
        plain = {
            "outcome": r.outcome, "trust": r.trust, "is_default": r.is_default, "ms": r.ms, "ms_lo": r.ms_lo,
            "ms_hi": r.ms_hi, "samples": pack_samples(r.samples_us), "rel_err": r.rel_err, "reason": r.reason,
            "created_at": r.created_at,
        }  # fmt: skip
        return self._append(r.key, r.toolchain, r.config, r.granularity, pack_facts(json.loads(r.facts)), plain)

    def _append_crown(self, table: str, more: dict, crown: Crown, trial: int) -> None:
        at = more | {
            "cell": self._id("cells", crown.seat.cell._asdict()), "trust": crown.seat.trust, "trial": trial,
            "toolchain": self._id("toolchains", crown.seat.toolchain._asdict()), "confidence": crown.confidence,
            "trials": crown.trials, "default_ms": crown.default_ms, "tuned_at": crown.tuned_at, "seal": "",
        }  # fmt: skip
        self._insert(table, at)
        self._seal(table, trial)

    def _id(self, table: str, row: dict) -> int:
        """The id of the row with these values, inserted unless it is there."""
        found = self._read(f"SELECT id FROM {table} WHERE {' AND '.join(f'{name} = :{name}' for name in row)}", row)
        return found[0][0] if found else self._insert(table, row)

    def _shape_id(self, key: AttentionKey) -> int:
        key = _plain(key)
        cell = self._id("cells", cell_of(key)._asdict())
        return self._id("shapes", {"cell": cell} | {name: getattr(key, name) for name in _SHAPE})

    def _insert(self, table: str, row: dict) -> int:
        sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"
        return self._db.execute(sql, row).lastrowid or 0

    def set_winner(self, trial: int, *, confidence: str, trials: int, default_ms: float | None = None) -> None:
        """Makes a trial the winner of its cell for its toolchain and trust, in place of an earlier one.

        trials: how many it was chosen from. Raises ValueError unless the trial exists and is "ok", for a measured one
        without rel_err, and for FP8 without a certificate of its recipe: a time without its error is no evidence.
        """
        self._crown("winners", {}, trial, confidence, trials, default_ms)

    def set_front(self, trial: int, *, confidence: str, trials: int, default_ms: float | None = None) -> None:
        """Makes a trial the best of its recipe in its cell; trials: how many of the recipe. Raises as set_winner."""
        found = self._read("SELECT f.config FROM trials t JOIN configs f ON f.id = t.config WHERE t.id = ?", [trial])
        recipe = AttentionConfig.from_json(found[0][0]).recipe if found else ""
        self._crown("fronts", {"recipe": recipe}, trial, confidence, trials, default_ms)

    def _crown(self, table: str, more: dict, trial: int, confidence: str, trials: int, default_ms) -> None:
        row = more | {
            "trial": trial, "confidence": confidence, "trials": operator.index(trials),
            "default_ms": finite("default_ms", default_ms), "tuned_at": utc(time.time()), "seal": "",
        }  # fmt: skip
        seat = {"cell": "s.cell", "toolchain": "t.toolchain", "trust": "t.trust"} | {name: f":{name}" for name in row}
        try:
            with self._writing():
                self._db.execute(
                    f"""INSERT OR REPLACE INTO {table} ({", ".join(seat)}) SELECT {", ".join(seat.values())}
                    FROM trials t JOIN shapes s ON s.id = t.shape
                    WHERE t.id = :trial AND outcome = 'ok' AND (t.trust = 'predicted' OR rel_err IS NOT NULL)""",
                    row,
                )
                if not self._seal(table, trial):
                    raise ValueError(
                        f"trial {trial} belongs not in {table}: it is absent, not ok, measured without rel_err, or its "
                        "recipe has no certificate"
                    )
        except sqlite3.IntegrityError as error:
            raise ValueError(f"row of {table} breaks the schema: {error}; got {row}") from error

    def _seal(self, table: str, trial: int) -> bool:
        """Gives the row of this trial the seal of what its view shows; False if that is nothing."""
        rows = self._db.execute(
            f"""SELECT {", ".join(Row._fields)} FROM {_VIEWS[table]}
            WHERE ({", ".join(Cell._fields)}, {", ".join(Toolchain._fields)}, trust, config) = (
                SELECT {", ".join(f"c.{name}" for name in Cell._fields)}, {", ".join(Toolchain._fields)}, w.trust,
                    f.config
                FROM {table} w JOIN cells c ON c.id = w.cell JOIN toolchains h ON h.id = w.toolchain
                JOIN trials t ON t.id = w.trial JOIN configs f ON f.id = t.config WHERE w.trial = ?)""",
            [trial],
        ).fetchall()
        for values in rows:
            self._db.execute(f"UPDATE {table} SET seal = ? WHERE trial = ?", [seal_of(values), trial])
        return bool(rows)

    def trials(
        self, cell: Cell | None = None, toolchain: Toolchain | None = None, trust: str | None = None
    ) -> list[Trial]:
        """The stored trials, oldest first, of one cell, toolchain and trust where given."""
        return [trial for trial, _ in self._select("", cell, toolchain, trust)]

    def winner(self, cell: Cell, toolchain: Toolchain | None = None, trust: str | None = None) -> Winner | None:
        """The newest winner of a cell, of one toolchain and trust where given; without trust a measured one first."""
        found = self._select("JOIN winners w ON w.trial = t.id", cell, toolchain, trust)
        winners = [Winner(trial, *rest) for trial, rest in found]
        return max(winners, key=lambda w: (w.trial.trust == "measured", w.tuned_at), default=None)

    def _select(self, join: str, cell, toolchain, trust) -> list[tuple[Trial, tuple]]:
        wanted = {f"c.{name}": value for name, value in (_plain(cell)._asdict() if cell else {}).items()}
        wanted |= {f"h.{name}": value for name, value in (toolchain._asdict() if toolchain else {}).items()}
        wanted |= {"t.trust": trust} if trust else {}
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        tail = "w.confidence, w.trials, w.default_ms, w.tuned_at" if join else "1"
        rows = self._read(
            f"""SELECT t.id, c.dtype, c.head_dim, c.head_dim_v, s.nheads, s.nheads_k, s.batch, s.seqlen_q, s.seqlen_k,
                c.causal, c.window_class, h.kernel_hash, h.triton_version, h.torch_version, h.driver_version, f.config,
                t.outcome, t.trust, t.is_default, t.ms, t.ms_lo, t.ms_hi, t.samples, t.rel_err, t.reason, x.facts,
                t.created_at, {tail}
            FROM trials t JOIN shapes s ON s.id = t.shape JOIN cells c ON c.id = s.cell
            JOIN toolchains h ON h.id = t.toolchain JOIN configs f ON f.id = t.config
            JOIN facts x ON x.id = t.facts {join}
            WHERE {where} ORDER BY t.id""",
            list(wanted.values()),
        )
        return list(self._parsed(rows))

    def _parsed(self, rows) -> Iterator[tuple[Trial, tuple]]:
        """(trial, what follows it) of each row whose config this version knows; one warning for the others."""
        unknown: list[str] = []
        for number, *row in rows:
            key = AttentionKey._make([*row[:8], bool(row[8]), row[9]])
            try:
                config = AttentionConfig.from_json(row[14])
            except ConfigError as error:
                unknown.append(f"trial {number}: {error}")
                continue
            outcome, trust, default, ms, lo, hi, samples, rel_err, reason, facts, created = row[15:26]
            yield Trial(
                number, key, Toolchain(*row[10:14]), config, outcome, trust, bool(default), ms, lo, hi,
                tuple(us / 1e3 for us in unpack_samples(samples)), rel_err, reason, unpack_facts(facts), utc(created),
            ), tuple(row[26:])  # fmt: skip
        if unknown:
            warnings.warn(
                f"{self.path}: {len(unknown)} trials left out, first {unknown[0]}", RuntimeWarning, stacklevel=4
            )

    def export(self, path: str | os.PathLike) -> None:
        """Writes a compact copy for shipping: one file, journal mode DELETE, analysed; replaces `path` in one step."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.unlink(missing_ok=True)
        try:
            with self._turn:
                self._db.execute(f"PRAGMA page_size = {EXPORT_PAGE_BYTES}")  # of the copy; a file in use keeps its own
                self._db.execute("VACUUM INTO ?", (str(part),))
            with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy:
                copy.execute("PRAGMA journal_mode = DELETE")
                copy.execute("ANALYZE")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


_VIEWS = {"winners": "best", "fronts": "front"}
_SHAPE = ("batch", "nheads", "nheads_k", "seqlen_q", "seqlen_k")


def _plain(fields: Fields) -> Fields:
    """The same tuple in Python's own types: sqlite3 binds a NumPy integer as a BLOB."""
    return type(fields)._make(value.item() if hasattr(value, "item") else value for value in fields)
