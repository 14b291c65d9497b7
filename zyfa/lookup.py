"""From databases to one choice: exact measured row, nearest measured row, predicted row, default config.

Databases are asked in the order of ZYFA_TUNING_DB, the user's own, the shipped one. Evidence comes before order: a
measured row of a later database beats a predicted one of an earlier. Whatever is wrong with a database costs one
warning and the next step is taken; choosing never raises.
"""

import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from math import log2
from pathlib import Path
from typing import NamedTuple

from zyfa.tuning_db import reader

from .archs import ARCHS, default_config
from .config import AttentionConfig, AttentionKey, Cell, cell_of
from .device import Device
from .errors import DatabaseError
from .limits import broken_limit

# How far a row is borrowed, in octaves summed over seqlen_q, seqlen_k, batch_heads and nheads_ratio. In published
# attention tables doubling both lengths keeps the winner for 41 % of the keys, so three such doublings (six octaves)
# keep it for 7 %: from there on a borrowed row has no better claim than the default.
NEAREST_OCTAVES = 6.0

STEPS = (("exact", "measured"), ("nearest", "measured"), ("exact", "predicted"), ("nearest", "predicted"))


class Choice(NamedTuple):
    """The config of a call and where it is from; row and database are None for a default."""

    config: AttentionConfig
    match: str  # "exact", "nearest" or "default"
    trust: str  # "measured", "predicted" or "none"
    row: reader.Row | None
    database: str | None
    misses: tuple[str, ...]  # why each earlier step found nothing


class _Candidate(NamedTuple):
    distance: float
    database: str
    row: reader.Row


class _Table(NamedTuple):
    """The rows of every database for one SKU, best database first, newest row first; and why files were left out.

    front: the best rows of each recipe, the winners among them.
    """

    rows: tuple[tuple[str, reader.Row], ...]
    front: tuple[tuple[str, reader.Row], ...]
    misses: tuple[str, ...]


_chosen: dict[tuple, Choice] = {}
_warned: dict[str, object] = {}


def choose(key: AttentionKey, device: Device) -> Choice:
    """The Choice for a call on a device. Decided once per SKU and cell, then one dict lookup (0.9 us)."""
    at = device.sku_key, cell_of(key)
    choice = _chosen.get(at)
    if choice is None:
        choice = _chosen[at] = _decide(key, at[1], device)
        _log(choice, key, device)
    return choice


def choose_recipe(key: AttentionKey, device: Device, recipe: str) -> Choice:
    """The Choice for a call that names its recipe: the best row of that recipe, else choose()'s tile with it.

    The rows are those of fronts and winners, also beyond the tuner's error bound: the caller has named the recipe.
    """
    at = device.sku_key, cell_of(key), recipe
    choice = _chosen.get(at)
    if choice is None:
        choice, tuned = _decide(key, at[1], device, recipe), choose(key, device)
        if choice.row is None or (choice.trust, tuned.trust) == ("predicted", "measured"):
            misses = (f"recipe {recipe}: no row of its own is better evidence; the tuned tile runs it", *tuned.misses)
            choice = tuned._replace(config=_with_recipe(tuned.config, key, device, recipe), misses=misses)
        _chosen[at] = choice
        _log(choice, key, device)
    return choice


def _with_recipe(config: AttentionConfig, key: AttentionKey, device: Device, recipe: str) -> AttentionConfig:
    """The tile with another recipe, whose wider Q and K may not fit where its own did: then the default tile."""
    wanted = dataclasses.replace(config, recipe=recipe)
    if device.arch in ARCHS and broken_limit(wanted, key, device.arch):
        wanted = dataclasses.replace(default_config(device.arch, key), recipe=recipe)
    return wanted


def _log(choice: Choice, key: AttentionKey, device: Device) -> None:
    if "config" in os.environ.get("ZYFA_LOG", "").split(","):
        print(f"zyfa: {describe(choice, key, device)}".replace("\n", "\n      "), file=sys.stderr)


def reset() -> None:
    """Forgets choices, tables and given warnings: files and environment are read again."""
    _chosen.clear()
    _warned.clear()
    _table.cache_clear()


def user_db_path(device: Device) -> Path:
    """Where `zyfa-tune` writes and lookup reads; raises RuntimeError where the user has no home directory."""
    name = f"{device.db_name}.sqlite"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "zyfa" / name
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "zyfa" / name
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share") / "zyfa" / name


def describe(choice: Choice, key: AttentionKey, device: Device) -> str:
    """What was chosen for a call and why, one fact a line."""
    lines = [
        ("device", device.sku_key), ("cell", _spelled(cell_of(key))), ("match", choice.match), ("trust", choice.trust),
    ]  # fmt: skip
    if row := choice.row:
        lines += [
            ("database", str(choice.database)),
            ("row", _spelled(row.cell)),
            ("", f"{row.ms * 1e3:.4g} us ({row.ms_lo * 1e3:.4g} to {row.ms_hi * 1e3:.4g}), {row.tflops:.4g} TFLOPS"),
            ("", f"confidence {row.confidence}, best of {row.trials} trials"),
            ("", f"{row.tuned_at}, Triton {row.triton_version}, torch {row.torch_version}"),
        ]
    lines += [("config", str(choice.config)), *(("missed", miss) for miss in choice.misses)]
    return "\n".join(f"{label:<9}{text}" for label, text in lines)


def _spelled(cell: Cell) -> str:
    return " ".join(f"{name}={value}" for name, value in cell._asdict().items())


def _decide(key: AttentionKey, cell: Cell, device: Device, recipe: str = "") -> Choice:
    rows, front, files = _table(device)
    if recipe:
        rows = tuple((path, row) for path, row in front if row.config.recipe == recipe)
    misses = list(files)
    scored = [
        _Candidate(distance, path, row) for path, row in rows if (distance := _distance(cell, row.cell)) is not None
    ]
    for match, trust in STEPS if device.arch in ARCHS else ():
        of_trust = [c for c in scored if c.row.trust == trust]
        for candidate in _ranked(of_trust, match):
            if reason := broken_limit(candidate.row.config, key, device.arch):
                misses.append(
                    f"{match} {trust}: {candidate.database}: row {candidate.row.config.to_json()} breaks: {reason}"
                )
                _warn(candidate.database, f"a row that {device.sku_key} cannot run was left out: {reason}")
                continue
            _, database, row = candidate
            return Choice(row.config, match, trust, row, database, tuple(misses))
        misses.append(f"{match} {trust}: {_nothing(of_trust, match)}")
    return Choice(default_config(device.arch, key), "default", "none", None, None, tuple(misses))


def _distance(cell: Cell, other: Cell) -> float | None:
    """Octaves between two cells; None if they differ in dtype, head dims or mask, across which no row is borrowed."""
    if (cell[:3], cell.causal, cell.window_class) != (other[:3], other.causal, other.window_class):
        return None
    return sum(
        abs(log2(getattr(cell, name) / getattr(other, name)))
        for name in ("nheads_ratio", "batch_heads", "seqlen_q", "seqlen_k")
    )


def _ranked(candidates: list[_Candidate], match: str) -> list[_Candidate]:
    """The candidates of a step, best first; equal ones stay in the order of databases, then newest first."""
    if match == "exact":
        return [c for c in candidates if c.distance == 0]
    return sorted((c for c in candidates if 0 < c.distance <= NEAREST_OCTAVES), key=lambda c: c.distance)


def _nothing(candidates: list[_Candidate], match: str) -> str:
    if match == "exact" or not candidates:
        return "no such row" if match == "exact" else "no row of the same dtype, head dims and mask"
    nearest = min(c.distance for c in candidates)
    return f"no usable row within {NEAREST_OCTAVES:g} octaves (the nearest is {nearest:.3g} away)"


@cache
def _table(device: Device) -> _Table:
    rows: list[tuple[str, reader.Row]] = []
    front: list[tuple[str, reader.Row]] = []
    misses: list[str] = []
    warned = len(_warned)
    for path, required in _search_list(device, misses):
        found, members = _rows_of(path, required, misses)
        mine = [(str(path), row) for row in found if (row.sku, row.arch) == (device.sku_key, device.arch)]
        if found and not mine:
            misses.append(f"{path}: has rows of {', '.join(sorted({row.sku for row in found}))} only")
        rows += mine
        front += [(str(path), row) for row in members if (row.sku, row.arch) == (device.sku_key, device.arch)]
    if not rows and len(_warned) == warned:
        _warn(device.sku_key, f"no tuned config for this GPU ({'; '.join(misses)})")
    return _Table(tuple(rows), tuple(front), tuple(misses))


def _search_list(device: Device, misses: list[str]) -> Iterator[tuple[Path, bool]]:
    """(database, whether its absence is worth a warning)."""
    for path in filter(None, os.environ.get("ZYFA_TUNING_DB", "").split(os.pathsep)):
        yield Path(path), True
    try:
        yield user_db_path(device), False
    except RuntimeError as error:  # no home directory
        misses.append(f"user database: {error}")
    yield reader.DATA / f"{device.db_name}.sqlite", False


def _rows_of(path: Path, required: bool, misses: list[str]) -> tuple[list[reader.Row], list[reader.Row]]:
    """(best rows, members of fronts and best rows) of a file."""
    skipped: list[str] = []
    try:
        rows = reader.read(path, skipped)
        front = reader.read(path, skipped, view="front")
    except DatabaseError as error:
        misses.append(str(error))
        if required or not isinstance(error.__cause__, FileNotFoundError):
            _warn(str(path), str(error).removeprefix(f"{path}: "))
        return [], []
    if skipped:
        misses.append(f"{path}: {len(skipped)} rows left out, first {skipped[0]}")
        _warn(str(path), f"{len(skipped)} rows left out, first {skipped[0]}")
    return rows, [*front, *rows]


def _warn(what: str, reason: str) -> None:
    """One warning per process, subject and cause."""
    message = f"{what}: {reason}. zyfa goes on without it; run zyfa-tune to (re)create tuned configs"
    if _warned.setdefault(message, mine := object()) is mine:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
