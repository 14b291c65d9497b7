"""The schema of a tuning database: tables, view, migrations, and the check that a file is one. Standard library only.

A file holds one SKU. Everything that repeats is stored once (configs, cells, toolchains, facts of compiled code), and
samples and facts are packed (codec.py), so that 28 cells of 48 trials stay below 300 KB. The writer's transactions keep
configs and facts unique: an index would repeat their text. No key column is NULL: SQLite holds every NULL to be
distinct, so UNIQUE would not bind. CHECK calls no function: SQLite 3.40 takes json_valid() for unsafe under
trusted_schema=OFF.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from zyfa.errors import DatabaseError, SchemaTooNew

APPLICATION_ID = 0x5A594641  # "ZYFA"

OUTCOMES = ("ok", "illegal", "compile_failed", "gated", "wrong", "timed_out", "crashed")
TRUSTS = ("measured", "predicted")
CONFIDENCES = ("A", "B", "C")


class Toolchain(NamedTuple):
    """What compiled and ran a trial; "" where a part took no part (a prediction has no driver)."""

    kernel_hash: str
    triton_version: str
    torch_version: str
    driver_version: str


# The contract with readers. Under the causal mask query i sees the keys j <= i + seqlen_k - seqlen_q: with
# m = min(seqlen_q, seqlen_k) that is m (2 seqlen_k - m + 1) / 2 pairs, of 2 (head_dim + head_dim_v) FLOPs each.
_VIEW = """CREATE VIEW {name} AS
SELECT (SELECT value FROM meta WHERE key = 'sku') AS sku, (SELECT value FROM meta WHERE key = 'arch') AS arch,
    c.dtype, c.head_dim, c.head_dim_v, c.nheads_ratio, c.causal, c.window_class, c.batch_heads, c.seqlen_q, c.seqlen_k,
    f.config, f.granularity, t.ms, t.ms_lo, t.ms_hi,
    2.0 * (c.head_dim + c.head_dim_v) * s.batch * s.nheads / (t.ms * 1e9) * CASE c.causal
        WHEN 0 THEN s.seqlen_q * s.seqlen_k
        ELSE min(s.seqlen_q, s.seqlen_k) * (2 * s.seqlen_k - min(s.seqlen_q, s.seqlen_k) + 1) / 2
    END AS tflops,
    t.rel_err, w.trust, w.confidence, w.trials,
    h.kernel_hash, h.triton_version, h.torch_version, h.driver_version, w.tuned_at
FROM {table} w
JOIN trials t ON t.id = w.trial AND t.toolchain = w.toolchain AND t.trust = w.trust
JOIN shapes s ON s.id = t.shape AND s.cell = w.cell
JOIN cells c ON c.id = w.cell
JOIN configs f ON f.id = t.config
JOIN toolchains h ON h.id = w.toolchain
WHERE t.outcome = 'ok'{certified}"""

# Configs are in canonical spelling, so that the text finds the recipe.
_CERTIFIED = """ AND (c.dtype <> 'fp8' OR EXISTS (
    SELECT 1 FROM certificates k
    WHERE k.toolchain = w.toolchain AND k.trust = w.trust AND k.head_dim = c.head_dim AND k.head_dim_v = c.head_dim_v
        AND k.causal = c.causal AND instr(f.config, '"recipe":"' || k.recipe || '"') > 0))"""

_INITIAL = (
    """CREATE TABLE meta (
    key   TEXT NOT NULL PRIMARY KEY,  -- sku (the whole key), vendor, arch, units, names (JSON), model_version
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID""",
    """CREATE TABLE configs (
    id          INTEGER PRIMARY KEY,
    config      TEXT NOT NULL,  -- AttentionConfig.to_json()
    granularity TEXT NOT NULL   -- of the config's recipe; 'none' without one
) STRICT""",
    """CREATE TABLE cells (  -- zyfa.config.Cell; lengths and batch_heads are upper ends of octaves
    id           INTEGER PRIMARY KEY,
    dtype        TEXT    NOT NULL,
    head_dim     INTEGER NOT NULL CHECK (head_dim > 0),
    head_dim_v   INTEGER NOT NULL CHECK (head_dim_v > 0),
    nheads_ratio INTEGER NOT NULL CHECK (nheads_ratio > 0),
    causal       INTEGER NOT NULL CHECK (causal IN (0, 1)),
    window_class TEXT    NOT NULL,
    batch_heads  INTEGER NOT NULL CHECK (batch_heads > 0),
    seqlen_q     INTEGER NOT NULL CHECK (seqlen_q > 0),
    seqlen_k     INTEGER NOT NULL CHECK (seqlen_k > 0),
    UNIQUE (dtype, head_dim, head_dim_v, nheads_ratio, causal, window_class, batch_heads, seqlen_q, seqlen_k)
) STRICT""",
    """CREATE TABLE shapes (  -- what was really timed, and the cell that it falls in
    id       INTEGER PRIMARY KEY,
    cell     INTEGER NOT NULL REFERENCES cells(id),
    batch    INTEGER NOT NULL CHECK (batch > 0),
    nheads   INTEGER NOT NULL CHECK (nheads > 0),
    nheads_k INTEGER NOT NULL CHECK (nheads_k > 0),
    seqlen_q INTEGER NOT NULL CHECK (seqlen_q > 0),
    seqlen_k INTEGER NOT NULL CHECK (seqlen_k > 0),
    UNIQUE (cell, batch, nheads, nheads_k, seqlen_q, seqlen_k)
) STRICT""",
    """CREATE TABLE toolchains (
    id             INTEGER PRIMARY KEY,
    kernel_hash    TEXT NOT NULL,
    triton_version TEXT NOT NULL,
    torch_version  TEXT NOT NULL,
    driver_version TEXT NOT NULL,
    UNIQUE (kernel_hash, triton_version, torch_version, driver_version)
) STRICT""",
    """CREATE TABLE facts (  -- of compiled code: registers, spills, LDS ...; shared by all lengths of a class
    id    INTEGER PRIMARY KEY,
    facts BLOB NOT NULL  -- codec.pack_facts
) STRICT""",
    f"""CREATE TABLE trials (
    id         INTEGER PRIMARY KEY,
    shape      INTEGER NOT NULL REFERENCES shapes(id),
    toolchain  INTEGER NOT NULL REFERENCES toolchains(id),
    config     INTEGER NOT NULL REFERENCES configs(id),
    facts      INTEGER NOT NULL REFERENCES facts(id),
    outcome    TEXT    NOT NULL CHECK (outcome IN {OUTCOMES}),
    trust      TEXT    NOT NULL CHECK (trust IN {TRUSTS}),
    is_default INTEGER NOT NULL CHECK (is_default IN (0, 1)),  -- the config that runs when nothing is tuned
    ms         REAL CHECK (ms > 0 AND ms < 1e9),               -- median, or the model's
    ms_lo      REAL CHECK (ms_lo > 0 AND ms_lo <= ms),
    ms_hi      REAL CHECK (ms_hi < 1e9 AND ms_hi >= ms),
    samples    BLOB    NOT NULL,                               -- codec.pack_samples; empty where nothing was timed
    rel_err    REAL CHECK (rel_err >= 0 AND rel_err < 1e9),
    reason     TEXT    NOT NULL,                               -- why it is not ok
    created_at INTEGER NOT NULL CHECK (created_at > 0),        -- Unix seconds: a fifth of the text's bytes
    CHECK ((outcome = 'ok') = (ms IS NOT NULL AND ms_lo IS NOT NULL AND ms_hi IS NOT NULL)),
    CHECK (outcome = 'ok' OR (ms IS NULL AND ms_lo IS NULL AND ms_hi IS NULL)),
    CHECK ((samples <> x'') = (trust = 'measured' AND outcome = 'ok'))
) STRICT""",
    f"""CREATE TABLE winners (
    cell       INTEGER NOT NULL REFERENCES cells(id),
    toolchain  INTEGER NOT NULL REFERENCES toolchains(id),
    trust      TEXT    NOT NULL CHECK (trust IN {TRUSTS}),
    trial      INTEGER NOT NULL REFERENCES trials(id),
    confidence TEXT    NOT NULL CHECK (confidence IN {CONFIDENCES}),
    trials     INTEGER NOT NULL CHECK (trials > 0),                 -- how many it was chosen from
    default_ms REAL CHECK (default_ms > 0 AND default_ms < 1e9),    -- NULL where the default config has no time
    tuned_at   TEXT    NOT NULL,                                    -- UTC
    seal       TEXT    NOT NULL,                                    -- reader.seal_of its row of best
    PRIMARY KEY (cell, toolchain, trust)
) STRICT, WITHOUT ROWID""",
    _VIEW.format(name="best", table="winners", certified=""),
)

_CERTIFICATES = (
    f"""CREATE TABLE certificates (  -- how far off an FP8 recipe was on inputs that are hard for it
    toolchain  INTEGER NOT NULL REFERENCES toolchains(id),
    trust      TEXT    NOT NULL CHECK (trust IN {TRUSTS}),  -- measured: the kernel on this GPU; predicted: emulation
    recipe     TEXT    NOT NULL,
    head_dim   INTEGER NOT NULL CHECK (head_dim > 0),
    head_dim_v INTEGER NOT NULL CHECK (head_dim_v > 0),
    causal     INTEGER NOT NULL CHECK (causal IN (0, 1)),
    worst      REAL    NOT NULL CHECK (worst >= 0 AND worst < 1e9),  -- the largest of errors
    errors     TEXT    NOT NULL,                                     -- JSON, input: [relative error of each seed]
    created_at INTEGER NOT NULL CHECK (created_at > 0),              -- Unix seconds
    seal       TEXT    NOT NULL,                                     -- certificates.Stored.seal
    PRIMARY KEY (toolchain, trust, recipe, head_dim, head_dim_v, causal)
) STRICT, WITHOUT ROWID""",
    f"""CREATE TABLE fronts (  -- the best config of each recipe in a cell: time against error
    cell       INTEGER NOT NULL REFERENCES cells(id),
    toolchain  INTEGER NOT NULL REFERENCES toolchains(id),
    trust      TEXT    NOT NULL CHECK (trust IN {TRUSTS}),
    recipe     TEXT    NOT NULL,
    trial      INTEGER NOT NULL REFERENCES trials(id),
    confidence TEXT    NOT NULL CHECK (confidence IN {CONFIDENCES}),
    trials     INTEGER NOT NULL CHECK (trials > 0),               -- how many of this recipe it was chosen from
    default_ms REAL CHECK (default_ms > 0 AND default_ms < 1e9),
    tuned_at   TEXT    NOT NULL,                                  -- UTC
    seal       TEXT    NOT NULL,                                  -- reader.seal_of its row of front
    PRIMARY KEY (cell, toolchain, trust, recipe)
) STRICT, WITHOUT ROWID""",
    "DROP VIEW best",
    _VIEW.format(name="best", table="winners", certified=_CERTIFIED),
    _VIEW.format(name="front", table="fronts", certified=_CERTIFIED),
)

# forward only: a released step is never edited
MIGRATIONS: tuple[tuple[str, ...], ...] = (_INITIAL, _CERTIFICATES)


def version_of(conn: sqlite3.Connection, path) -> int:
    """The schema version of an open database; 0 for an empty one. Raises DatabaseError or SchemaTooNew."""
    with _snapshot(conn):
        (objects,) = conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        (app,) = conn.execute("PRAGMA application_id").fetchone()
        (version,) = conn.execute("PRAGMA user_version").fetchone()
    if (app, version, objects) == (0, 0, 0):
        return 0
    if app != APPLICATION_ID:
        raise DatabaseError(f"{path}: not a ZYFA tuning database (application_id is {app:#x}, not {APPLICATION_ID:#x})")
    if version > len(MIGRATIONS):
        raise SchemaTooNew(
            f"{path}: written by a newer ZYFA (schema {version}, this one knows {len(MIGRATIONS)}); upgrade zyfa"
        )
    if version < 1:
        raise DatabaseError(f"{path}: schema {version} never existed")
    return version


@contextlib.contextmanager
def _snapshot(conn: sqlite3.Connection) -> Iterator[None]:
    """All reads see one state: another process may be creating the file between two of them."""
    if conn.in_transaction:
        yield
        return
    conn.execute("BEGIN")
    try:
        yield
    finally:
        if conn.in_transaction:
            conn.execute("ROLLBACK")


def check_objects(conn: sqlite3.Connection, path) -> None:
    """Raises DatabaseError unless tables and view are, to the letter, those of the file's version, and nothing more.

    A view or trigger is code: one that a stranger put in place of a table would run in our process.
    """
    version = version_of(conn, path)
    if version == 0:
        raise DatabaseError(f"{path}: the database is empty")
    found, wanted = _objects(conn), _expected(version)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            problem = "is missing" if name not in found else "differs" if name in wanted else "does not belong there"
            raise DatabaseError(f"{path}: not schema {version} of ZYFA: {name} {problem}")


def _objects(conn: sqlite3.Connection) -> dict[str, tuple[str, str]]:
    """(type, sql) of every object by name, SQLite's own (sqlite_stat1, unique indexes) left out."""
    rows = conn.execute(
        "SELECT name, type, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\' LIMIT 100"
    )
    return {str(name): (kind, sql) for name, kind, sql in rows}


@cache
def _expected(version: int) -> dict[str, tuple[str, str]]:
    conn = sqlite3.connect(":memory:")
    for step in MIGRATIONS[:version]:
        for statement in step:
            conn.execute(statement)
    objects = _objects(conn)
    conn.close()
    return objects


def migrate(conn: sqlite3.Connection, path) -> None:
    """Brings an open, writable database to the newest schema, in one transaction; processes may race to create it."""
    if version_of(conn, path) == len(MIGRATIONS):
        return
    conn.execute("BEGIN IMMEDIATE")
    try:
        for number in range(
            version_of(conn, path), len(MIGRATIONS)
        ):  # asked again: another process may have been first
            for statement in MIGRATIONS[number]:
                conn.execute(statement)
            conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            conn.execute(f"PRAGMA user_version = {number + 1}")
    except BaseException:
        conn.execute("ROLLBACK")
        raise
    conn.execute("COMMIT")
