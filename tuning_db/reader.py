"""Reads the best rows of a tuning database. Standard library only: this is the part that the runtime loads.

Nothing in the file is believed: it may be cut, stale, or a stranger's. Its tables and view must be ours to the letter,
sizes and time are bounded, each row is checked value by value, and against the seal that its writer gave it: a flipped
bit that leaves a legal value behind would go unseen otherwise.
"""

import contextlib
import hashlib
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zyfa.config import DTYPES, WINDOW_CLASSES, AttentionConfig, Cell
from zyfa.errors import ConfigError, DatabaseError
from zyfa.recipes import RECIPES

from .schema import CONFIDENCES, TRUSTS, Toolchain, check_objects, version_of

DATA = Path(__file__).resolve().parent / "data"  # the shipped databases, <Device.db_name>.sqlite

MAX_ROWS = 20_000  # a shipped file has tens
MAX_BYTES = 64 << 20  # a shipped file stays below 300 KB; the longest tuning logs reach some MB
MAX_TEXT_BYTES = 1 << 20  # of one value
MAX_READ_S = 10.0  # a shipped file takes milliseconds; statistics that lie can make the planner choose an endless join
BUSY_S = 5.0  # a commit holds the file for milliseconds; of 49 reads amid three busy writers one waited for 1 s


class Row(NamedTuple):
    """One row of view `best` or `front`, checked. Times in ms, tflops as the view counts; rel_err None if unknown."""

    sku: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    nheads_ratio: int
    causal: bool
    window_class: str
    batch_heads: int
    seqlen_q: int
    seqlen_k: int
    config: AttentionConfig
    granularity: str
    ms: float
    ms_lo: float
    ms_hi: float
    tflops: float
    rel_err: float | None
    trust: str
    confidence: str
    trials: int
    kernel_hash: str
    triton_version: str
    torch_version: str
    driver_version: str
    tuned_at: str

    @property
    def cell(self) -> Cell:
        return Cell(*(getattr(self, name) for name in Cell._fields))

    @property
    def toolchain(self) -> Toolchain:
        return Toolchain(self.kernel_hash, self.triton_version, self.torch_version, self.driver_version)


UNCERTIFIED = "have no certificate of their recipe; zyfa-tune earns it"
_WHOLE = """SELECT count(*) FROM {} w
JOIN trials t ON t.id = w.trial AND t.toolchain = w.toolchain AND t.trust = w.trust
JOIN shapes s ON s.id = t.shape AND s.cell = w.cell
JOIN configs f ON f.id = t.config
WHERE t.outcome = 'ok'"""


def read(path: str | os.PathLike, skipped: list[str] | None = None, view: str = "best") -> list[Row]:
    """The rows of `best`, newest first; a cell tuned with several toolchains has several.

    view "front": instead the best row of each recipe in a cell, also of recipes beyond the tuner's error bound.

    A row that is not valid is left out, and why is appended to `skipped`. Raises DatabaseError naming the file and the
    reason when it cannot be used at all, SchemaTooNew when a newer ZYFA wrote it.
    """
    table = {"best": "winners", "front": "fronts"}[view]
    with opened(path) as conn:
        for (fault,) in conn.execute("PRAGMA quick_check(1)"):
            if fault != "ok":
                raise DatabaseError(f"{path}: damaged: {fault!r:.200}")
        certifies = version_of(conn, path) >= 2  # earlier files have neither certificates nor fronts
        if view == "front" and not certifies:
            return []
        which = "" if certifies else "WHERE dtype <> 'fp8' "
        found = conn.execute(f"SELECT {', '.join(Row._fields)} FROM {view} {which}LIMIT {MAX_ROWS + 1}").fetchall()
        seals = [seal for (seal,) in conn.execute(f"SELECT seal FROM {table} LIMIT {MAX_ROWS + 1}")]
        (whole,) = conn.execute(_WHOLE.format(table)).fetchone()
    if len(found) > MAX_ROWS:
        raise DatabaseError(f"{path}: more than {MAX_ROWS} rows")
    rows, faults = _valid(found, set(seals))
    if broken := len(seals) - whole:
        faults.append(f"{broken} {table} lead to no valid trial")
    if hidden := whole - len(found):
        faults.append(f"{hidden} FP8 {table} {UNCERTIFIED}")
    if skipped is not None:
        skipped += faults
    return sorted(rows, key=lambda row: row.tuned_at, reverse=True)


def _valid(found: list[tuple], seals: set[str]) -> tuple[list["Row"], list[str]]:
    """The rows that hold, and why each other one does not."""
    rows, faults = [], []
    for number, values in enumerate(found, start=1):
        try:
            row = _checked(*values)
            if seal_of(values) not in seals:
                raise ValueError("does not match its seal: damaged, or changed by another program")
            rows.append(row)
        except ValueError as error:
            faults.append(f"row {number}: {error}")
    return rows, faults


def seal_of(values: Sequence) -> str:
    """16 hex digits over the values of a row of `best`, as SQLite gives them; whose it is stands in meta, unsealed."""
    row = Row(*values)
    told = row._replace(sku="", arch="", tflops=f"{row.tflops:.6g}")  # type: ignore[arg-type]  # derived: not to an ulp
    return hashlib.sha256(repr(tuple(told)).encode()).hexdigest()[:16]


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a tuning database of a known schema; sqlite3's errors come out as DatabaseError."""
    _check_file(path)
    try:
        with contextlib.closing(sqlite3.connect(_uri(path), uri=True, timeout=BUSY_S)) as conn:
            conn.execute("PRAGMA trusted_schema = OFF")
            conn.execute("PRAGMA cell_size_check = ON")
            conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT_BYTES)
            until = time.monotonic() + MAX_READ_S
            conn.set_progress_handler(lambda: time.monotonic() > until, 1_000_000)
            check_objects(conn, path)
            yield conn
    except (sqlite3.Error, UnicodeDecodeError) as error:  # its message may quote damaged text, which Python decodes
        raise DatabaseError(f"{path}: {error}{_hint(error, path)}") from error


def _hint(error: Exception, path) -> str:
    """What SQLite's text does not say: a journal is rolled back by the next writer, which a reader may not be."""
    in_use = (getattr(error, "sqlite_errorcode", 0) & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return (
        "; an interrupted write waits for the next zyfa-tune"
        if os.path.exists(f"{path}-journal") and not in_use
        else ""
    )


def _check_file(path) -> None:
    """Raises DatabaseError with a reason that helps more than SQLite's own."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DatabaseError(f"{path}: {error.strerror or error}") from error
    if size > MAX_BYTES:
        raise DatabaseError(f"{path}: {size} bytes, more than the {MAX_BYTES} that a tuning database may have")
    if head.startswith(b"version https://"):
        raise DatabaseError(f"{path}: a Git LFS pointer instead of the file; run git lfs pull")
    if head != b"SQLite format 3\0":
        raise DatabaseError(f"{path}: {'the database is empty' if not size else 'not a SQLite database'}")


def _uri(path) -> str:
    """How to open the file: always read-only, and without any lock where nobody can be writing.

    immutable=1 reads past locks and logs, so on a file in use it can return stale or torn data. It is right for the
    shipped files, and needed for a file left in WAL mode with no log beside it: plain mode=ro would create one, and
    fails in a read-only directory.
    """
    path = Path(path).absolute()
    with open(path, "rb") as file:
        wal_mode = file.read(20)[18:] == b"\x02\x02"
    log = Path(f"{path}-wal")
    unused = path.resolve().parent == DATA or (wal_mode and not (log.exists() and log.stat().st_size))
    return f"{path.as_uri()}?mode=ro{'&immutable=1' if unused else ''}"


def _checked(*values) -> Row:
    """The row of raw values; raises ValueError naming the first that is wrong."""
    row = Row(*values)
    for name, want in Row.__annotations__.items():
        if not _CHECKS[want](getattr(row, name)):
            raise ValueError(f"{name} is {getattr(row, name)!r:.80}")
    for name, accepted in _ACCEPTED.items():
        if getattr(row, name) not in accepted:
            raise ValueError(f"{name} is {getattr(row, name)!r:.80}, not one of {accepted}")
    if not row.ms_lo <= row.ms <= row.ms_hi:
        raise ValueError(f"ms {row.ms} is not between {row.ms_lo} and {row.ms_hi}")
    config = AttentionConfig.from_json(row.config)  # type: ignore[arg-type]
    if wide := [value for value in vars(config).values() if isinstance(value, int) and abs(value) >= 1 << 31]:
        raise ValueError(f"config has {wide[0]:.3g}, which no kernel argument holds")
    if row.granularity != granularity_of(config):
        raise ValueError(f"granularity is {row.granularity}, that of recipe {config.recipe} {granularity_of(config)}")
    return row._replace(config=config, causal=bool(row.causal))


def granularity_of(config: AttentionConfig) -> str:
    """The scaling granularity of the config's recipe, "none" without one; ConfigError if the recipe is unknown."""
    if config.recipe == "none":
        return "none"
    if config.recipe not in RECIPES:
        raise ConfigError(f"recipe {config.recipe!r:.80} is unknown; known are {('none', *RECIPES)}")
    return RECIPES[config.recipe].granularity


def _is_text(value) -> bool:
    return isinstance(value, str) and len(value) <= 4096 and value.isprintable()


def _is_positive(value) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


_CHECKS = {
    str: _is_text,
    AttentionConfig: _is_text,
    int: lambda value: isinstance(value, int) and 0 < value < 1 << 31,
    bool: lambda value: value in (0, 1),
    float: _is_positive,
    float | None: lambda value: value is None or value == 0.0 or _is_positive(value),
}
_ACCEPTED = {"dtype": DTYPES, "window_class": WINDOW_CLASSES, "trust": TRUSTS, "confidence": CONFIDENCES}
