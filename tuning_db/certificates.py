"""Certificates of recipes and the fronts of cells: what an FP8 row needs beside its time to be shown to readers.

A certificate belongs to a toolchain: another compiler or kernel has to earn its own. A measured row needs one that the
kernel earned on the GPU, a predicted row one of the recipe's emulation.
"""

import hashlib
import json
import math
import os
import sqlite3
import time
from typing import TYPE_CHECKING, NamedTuple

from zyfa.errors import DatabaseError

from .reader import opened
from .schema import Toolchain, version_of

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


class Licence(NamedTuple):
    """What a certificate allows: rows of this toolchain and trust to use the recipe, in one class of calls."""

    toolchain: Toolchain
    trust: str
    recipe: str
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def order(self) -> str:
        return json.dumps(self)


class Stored(NamedTuple):
    """What a certificate says, as its row does: its errors as JSON, and when it was earned, in Unix seconds."""

    errors: str
    created_at: int

    @property
    def worst(self) -> float:
        """The largest error; raises ValueError unless the text is {input: [finite error, ...]}."""
        values = [error for errors in json.loads(self.errors).values() for error in errors]
        if not values or not all(isinstance(x, float | int) and math.isfinite(x) and x >= 0 for x in values):
            raise ValueError(f"errors are {self.errors!r:.80}")
        return float(max(values))

    def seal(self, licence: Licence) -> str:
        """16 hex digits over all that the row says."""
        return hashlib.sha256(f"{licence.order} {self.created_at} {self.errors}".encode()).hexdigest()[:16]


def add_certificate(store: "Store", toolchain: Toolchain, trust: str, certificate: Certificate) -> None:
    """Stores a certificate in place of an earlier one; raises ValueError when an error is no finite number."""
    if not math.isfinite(certificate.worst):
        raise ValueError(f"recipe {certificate.recipe} has an error that is not finite: {certificate.errors}")
    errors = {name: [float(f"{error:.3g}") for error in values] for name, values in certificate.errors.items()}
    text = json.dumps(errors, sort_keys=True, separators=(",", ":"), allow_nan=False)
    with store._writing():
        put(store, Licence(toolchain, trust, *certificate[:4]), Stored(text, int(time.time())))


def put(store: "Store", licence: Licence, stored: Stored) -> None:
    """Writes one row within the store's transaction."""
    row = licence._asdict() | stored._asdict() | {
        "toolchain": store._id("toolchains", licence.toolchain._asdict()), "causal": int(licence.causal),
        "worst": stored.worst, "seal": stored.seal(licence),
    }  # fmt: skip
    columns = ", ".join(row), ", ".join(f":{name}" for name in row)
    store._db.execute("INSERT OR REPLACE INTO certificates ({}) VALUES ({})".format(*columns), row)


def stored_in(conn: sqlite3.Connection) -> dict[Licence, Stored]:
    """Every certificate of an open database. Raises DatabaseError for one that does not match its seal."""
    if version_of(conn, "") < 2:
        return {}
    rows = conn.execute(
        """SELECT h.kernel_hash, h.triton_version, h.torch_version, h.driver_version, k.trust, k.recipe, k.head_dim,
            k.head_dim_v, k.causal, k.errors, k.created_at, k.worst, k.seal
        FROM certificates k JOIN toolchains h ON h.id = k.toolchain LIMIT 100000"""
    )
    found = {}
    for row in rows:
        licence = Licence._make([Toolchain(*row[:4]), *row[4:8], bool(row[8])])
        stored = Stored._make(row[9:11])
        if row[12] != stored.seal(licence) or row[11] != stored.worst:
            raise DatabaseError(f"the certificate of recipe {licence.recipe!r:.40} does not match its seal: damaged")
        found[licence] = stored
    return found


def certificates(store: "Store", toolchain: Toolchain, trust: str) -> list[Certificate]:
    """The certificates that a toolchain has earned with a trust."""
    with store._turn:
        found = stored_in(store._db.conn)
    return [
        Certificate(*licence[2:], {name: tuple(x) for name, x in json.loads(stored.errors).items()})
        for licence, stored in found.items()
        if licence[:2] == (toolchain, trust)
    ]


def worst_errors(path: str | os.PathLike) -> dict[Licence, float]:
    """The worst certified error of each recipe of a database; raises DatabaseError."""
    with opened(path) as conn:
        return {licence: stored.worst for licence, stored in stored_in(conn).items()}
