"""Certificates of recipes and the fronts of cells: what an FP8 row needs beside its time to be shown to readers.

A certificate belongs to a toolchain: another compiler or kernel has to earn its own. A measured row needs one that the
kernel earned on the GPU, a predicted row one of the recipe's emulation.
"""

import json
import math
import operator
import os
import sqlite3
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .reader import opened
from .schema import Toolchain

if TYPE_CHECKING:
    from .store import Store


class Certificate(NamedTuple):
    """The relative errors of a recipe against float64, {input: (error of each seed, ...)}."""

    recipe: str
    head_dim: int
    head_dim_v: int
    causal: bool
    errors: dict[str, tuple[float, ...]]

    @property
    def worst(self) -> float:
        """The largest error of all; NaN if any is."""
        values = [error for errors in self.errors.values() for error in errors]
        return math.nan if any(map(math.isnan, values)) else max(values)


def add_certificate(store: "Store", toolchain: Toolchain, trust: str, certificate: Certificate) -> None:
    """Stores a certificate in place of an earlier one; raises ValueError when an error is no finite number."""
    if not math.isfinite(certificate.worst):
        raise ValueError(f"recipe {certificate.recipe} has an error that is not finite: {certificate.errors}")
    errors = {name: [float(f"{error:.3g}") for error in values] for name, values in certificate.errors.items()}
    with store._writing():
        row = {
            **certificate._asdict(), "toolchain": store._id("toolchains", toolchain._asdict()), "trust": trust,
            "causal": int(certificate.causal), "worst": certificate.worst, "created_at": int(time.time()),
            "errors": json.dumps(errors, separators=(",", ":"), allow_nan=False),
        }  # fmt: skip
        columns = ", ".join(row), ", ".join(f":{name}" for name in row)
        store._db.execute("INSERT OR REPLACE INTO certificates ({}) VALUES ({})".format(*columns), row)


def certificates(store: "Store", toolchain: Toolchain, trust: str) -> list[Certificate]:
    """The certificates that a toolchain has earned with a trust."""
    rows = store._db.execute(
        """SELECT k.recipe, k.head_dim, k.head_dim_v, k.causal, k.errors
        FROM certificates k JOIN toolchains h ON h.id = k.toolchain
        WHERE (h.kernel_hash, h.triton_version, h.torch_version, h.driver_version, k.trust) = (?, ?, ?, ?, ?)""",
        (*toolchain, trust),
    )
    return [
        Certificate(recipe, d, d_v, bool(causal), {name: tuple(x) for name, x in json.loads(errors).items()})
        for recipe, d, d_v, causal, errors in rows
    ]


def worst_errors(path: str | os.PathLike) -> dict[tuple, float]:
    """The worst error of each certificate of a file: (recipe, toolchain, trust, head_dim, head_dim_v, causal) -> error.

    Raises DatabaseError when the file cannot be used.
    """
    with opened(path) as conn:
        rows = conn.execute(
            """SELECT k.recipe, h.kernel_hash, h.triton_version, h.torch_version, h.driver_version, k.trust, k.head_dim,
                k.head_dim_v, k.causal, k.worst
            FROM certificates k JOIN toolchains h ON h.id = k.toolchain LIMIT 10000"""
        ).fetchall()
    return {(row[0], Toolchain(*row[1:5]), *row[5:8], bool(row[8])): row[9] for row in rows}


def set_front(store: "Store", trial: int, *, confidence: str, trials: int) -> None:
    """Makes an ok trial the best of its recipe in its cell, for its toolchain and trust, in place of an earlier one.

    Raises ValueError when it is none.
    """
    row = {"trial": trial, "confidence": confidence, "trials": operator.index(trials)}
    try:
        with store._writing():
            written = store._db.execute(
                """INSERT OR REPLACE INTO fronts (cell, toolchain, trust, recipe, trial, confidence, trials, tuned_at)
                SELECT s.cell, t.toolchain, t.trust, f.recipe, t.id, :confidence, :trials,
                    strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
                FROM trials t JOIN shapes s ON s.id = t.shape JOIN configs f ON f.id = t.config
                WHERE t.id = :trial AND t.outcome = 'ok' AND (t.trust = 'predicted' OR t.rel_err IS NOT NULL)""",
                row,
            ).rowcount
    except sqlite3.IntegrityError as error:
        raise ValueError(f"front breaks the schema: {error}; got {row}") from error
    if written != 1:
        raise ValueError(f"trial {trial} belongs to no front: it is absent, not ok, or measured without rel_err")


def uncertified(conn: sqlite3.Connection) -> Iterator[str]:
    """One line for each FP8 winner or member of a front that its view hides, for want of a certificate."""
    for table, view in (("winners", "best"), ("fronts", "front")):
        stored, shown = (conn.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in (table, view))
        if stored != shown:
            yield f"{table}: {stored - shown} of {stored} are not in the view {view}: no certificate of their recipe"
