"""What is wrong with a tuning database, in full: slower than reading it, for releases and for files of strangers."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator

from zyfa.archs import ARCHS
from zyfa.config import AttentionConfig, AttentionKey, cell_of
from zyfa.errors import ConfigError, DatabaseError
from zyfa.limits import broken_limit

from .certificates import stored_in
from .reader import granularity_of, opened, read


def findings(path: str | os.PathLike) -> list[str]:
    """One line per fault of the database; empty if it may be shipped. Never raises for what the file holds."""
    try:
        with opened(path) as conn:
            stored_in(conn)
            found = [*_integrity(conn), *_meta(conn), *_winners(conn), *_trials(conn)]
        skipped: list[str] = []
        for view in ("best", "front"):
            read(path, skipped, view)
    except DatabaseError as error:
        return [str(error)]
    return [f"{path}: {what}" for what in dict.fromkeys(found + skipped)]


def _integrity(conn: sqlite3.Connection) -> Iterator[str]:
    """Pages, indexes, NOT NULL, CHECK and foreign keys, as SQLite sees them."""
    with contextlib.closing(sqlite3.connect(":memory:")) as copy:  # a read-only connection checks no CHECK
        copy.execute("PRAGMA trusted_schema = OFF")
        copy.execute("PRAGMA page_size = {}".format(*conn.execute("PRAGMA page_size").fetchone()))
        conn.backup(copy)
        for (line,) in copy.execute("PRAGMA integrity_check(20)"):
            if line != "ok":
                yield f"integrity: {line}"
    for table, row, parent, _ in conn.execute("PRAGMA foreign_key_check"):
        yield f"{table} {row} refers to a row that {parent} lacks"


def _meta(conn: sqlite3.Connection) -> Iterator[str]:
    meta = dict(conn.execute("SELECT key, value FROM meta"))
    parts = meta.get("sku", "").split("/")
    if len(parts) != 4:
        yield f"meta: sku is {meta.get('sku')!r}, not vendor/arch/sku/units"
    elif (parts[0], parts[1]) != (meta.get("vendor"), meta.get("arch")) or parts[3][2:] != meta.get("units"):
        yield f"meta: sku {meta['sku']} contradicts vendor, arch or units"


def _winners(conn: sqlite3.Connection) -> Iterator[str]:
    """Every winner is an ok trial of its own cell, toolchain and trust; a measured one knows its error."""
    rows = conn.execute(
        """SELECT w.cell, w.trust, w.trial, t.outcome, t.rel_err,
            s.cell IS w.cell AND t.toolchain IS w.toolchain AND t.trust IS w.trust
        FROM winners w LEFT JOIN trials t ON t.id = w.trial LEFT JOIN shapes s ON s.id = t.shape"""
    )
    for cell, trust, trial, outcome, rel_err, belongs in rows:
        winner = f"{trust} winner of cell {cell}: trial {trial}"
        if outcome is None:
            yield f"{winner} does not exist"
        elif outcome != "ok":
            yield f"{winner} is {outcome}"
        elif not belongs:
            yield f"{winner} has another cell, toolchain or trust"
        elif trust == "measured" and rel_err is None:
            yield f"{winner} has no rel_err"


def _trials(conn: sqlite3.Connection) -> Iterator[str]:
    """Every shape falls in its cell, every config is one; an ok trial keeps the limits of the device."""
    arch = dict(conn.execute("SELECT key, value FROM meta")).get("arch")
    if arch not in ARCHS:
        yield f"meta: arch {arch!r} is none of {', '.join(ARCHS)}"
        return
    rows = conn.execute(
        """SELECT DISTINCT c.dtype, c.head_dim, c.head_dim_v, s.nheads, s.nheads_k, s.batch, s.seqlen_q, s.seqlen_k,
            c.causal, c.window_class, c.nheads_ratio, c.batch_heads, c.seqlen_q, c.seqlen_k,
            f.config, f.granularity, t.outcome = 'ok'
        FROM trials t JOIN shapes s ON s.id = t.shape JOIN cells c ON c.id = s.cell JOIN configs f ON f.id = t.config"""
    )
    for *fields, config, granularity, ok in rows:
        key = AttentionKey(*fields[:10])
        cell = cell_of(key)
        if (cell.nheads_ratio, cell.batch_heads, cell.seqlen_q, cell.seqlen_k) != tuple(fields[10:]):
            yield f"shape {key} lies in another cell than it says"
        if fault := _config_fault(config, granularity, key if ok else None, arch):
            yield f"config {config}: {fault}"


def _config_fault(text: str, granularity: str, key: AttentionKey | None, arch: str) -> str | None:
    try:
        config = AttentionConfig.from_json(text)
        if granularity_of(config) != granularity:
            return f"granularity is {granularity}, that of its recipe {granularity_of(config)}"
    except ConfigError as error:
        return str(error)
    if config.to_json() != text:
        return f"not in its canonical spelling {config.to_json()}"
    return broken_limit(config, key, arch) if key else None
