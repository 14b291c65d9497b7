"""From databases to one choice: exact measured row, nearest measured row, predicted row, default config.

Databases are asked in the order of ZYFA_TUNING_DB, the user's own, the shipped one. Evidence comes before order: a
measured row of a later database beats a predicted one of an earlier, and one of this toolchain a stale one. Where this
GPU has no row, one of another GPU of the same architecture is borrowed, those with as many units first. Whatever is
wrong with a database costs one warning and the next step is taken; choosing never raises.
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

from .archs import ARCHS, plain_config
from .config import AttentionConfig, AttentionKey, Cell, cell_of, octave_of
from .device import Device
from .errors import DatabaseError
from .grid_fill import default_for
from .limits import broken_limit
from .recipes import RECIPES
from .toolchain import POLICIES, Running, grade, policy, rank, running

# How far a row is borrowed, in octaves summed over seqlen_q, seqlen_k, batch_heads and nheads_ratio. In published
# attention tables doubling both lengths keeps the winner for 41 % of the keys, so three such doublings (six octaves)
# keep it for 7 %: from there on a borrowed row has no better claim than the default.
NEAREST_OCTAVES = 6.0
WHOLE = 1e-6

STEPS = (("exact", "measured"), ("nearest", "measured"), ("exact", "predicted"), ("nearest", "predicted"))


class Choice(NamedTuple):
    """The config of a call and where it is from; row and database are None for a default."""

    config: AttentionConfig
    match: str  # "exact", "nearest", "borrowed" (of another GPU) or "default"
    trust: str  # "measured", "predicted" or "none"
    row: reader.Row | None
    database: str | None
    misses: tuple[str, ...]  # why each earlier step found nothing
    grade: str = ""  # of the row's toolchain: "exact", "compatible", "stale" or "unknown"


class _Candidate(NamedTuple):
    distance: float
    database: str
    row: reader.Row
    grade: str
    rank: int


class _Table(NamedTuple):
    """Rows of every database, best database first, newest row first; and why files were left out.

    The rows of this SKU, of others with its architecture and units, of others with its architecture.
    """

    own: tuple[tuple[str, reader.Row], ...]
    alike: tuple[tuple[str, reader.Row], ...]
    related: tuple[tuple[str, reader.Row], ...]
    misses: tuple[str, ...]


_chosen: dict[tuple[str, Cell, str], Choice] = {}
generation = 0  # of the choices: counts up when some are taken back, so that nobody goes on with them
_warned: dict[str, object] = {}


def choose(key: AttentionKey, device: Device, recipe: str = "") -> Choice:
    """The Choice for a call on a device. Decided once per SKU, cell and recipe, then one dict lookup (0.9 us).

    recipe: what the call names; "" leaves it to the tuned row, whose recipe is within the tuner's error bound.
    """
    at = device.sku_key, cell_of(key), recipe
    choice = _chosen.get(at)
    if choice is None:
        choice = _chosen[at] = _of_recipe(key, at[1], device, recipe) if recipe else _decide(key, at[1], device)
        if "config" in os.environ.get("ZYFA_LOG", "").split(","):
            print(f"zyfa: {describe(choice, key, device)}".replace("\n", "\n      "), file=sys.stderr)
    return choice


def _of_recipe(key: AttentionKey, cell: Cell, device: Device, recipe: str) -> Choice:
    """The best row of that recipe, of a front or a winner, else the tuned tile with it.

    Rows beyond the tuner's error bound count too: the caller has named the recipe.
    """
    choice, tuned = _decide(key, cell, device, recipe), choose(key, device)
    if choice.row is not None and (choice.trust, tuned.trust) != ("predicted", "measured"):
        return choice
    misses = (f"recipe {recipe}: no row of its own is better evidence; the tuned tile runs it", *tuned.misses)
    return tuned._replace(config=_with_recipe(tuned.config, key, device, recipe), misses=misses)


def _with_recipe(config: AttentionConfig, key: AttentionKey, device: Device, recipe: str) -> AttentionConfig:
    """A tuned tile with another recipe than it was tuned with; where that does not fit, the default tile.

    K tiles of 16 bits take one stage fewer than those of 8: 991 against 1351 us at 8k, causal, on an H200. The gluon
    variant needs its two.
    """
    wider = config.variant == "triton" and RECIPES[recipe].qk == "bf16" and RECIPES[config.recipe].qk != "bf16"
    wanted = dataclasses.replace(config, recipe=recipe, num_stages=max(config.num_stages - wider, 1))
    if device.arch in ARCHS and broken_limit(wanted, key, device.arch):
        wanted = default_for(key, device.arch, device.units, recipe)
    return wanted


def faster_plain(fp8: Choice, key: AttentionKey, device: Device) -> Choice:
    """The bf16 choice where both were timed in this very cell and FP8, quantisation included, was no faster.

    Or both in another cell of the same lengths, where only batch and heads differ: on an H200 rows of 32/8 heads told
    right in five of eight shapes with 64/8 heads or 16 x 1k tokens, and cost 0.5 to 2 % in the others
    (benchmarks/h200/speed.json).
    Also on Hopper where nothing says how FP8 does: untuned it took 1.1 to 2 times the time of BF16 on an H200, at 1k to
    16k and head dim 64 (benchmarks/h200/speed.json).
    """
    plain = choose(key._replace(dtype="bf16"), device)
    if fp8.match == "default" and device.arch == "sm90" and plain.config.variant == "gluon":
        told = "fp8: not tuned for this call, and untuned FP8 is slower than bf16 on Hopper"
        return plain._replace(misses=(told, *plain.misses))
    if fp8.row is None or plain.row is None or (fp8.trust, plain.trust) != ("measured", "measured"):
        return fp8
    exact = fp8.match == plain.match == "exact"
    if not (exact or _alike(fp8.row.cell, plain.row.cell, cell_of(key))) or fp8.row.ms < plain.row.ms:
        return fp8
    told = f"fp8: {fp8.row.ms * 1e3:.4g} us with recipe {fp8.config.recipe}, no faster than bf16"
    return plain._replace(misses=(told, *plain.misses))


def _alike(fp8: Cell, plain: Cell, here: Cell) -> bool:
    """Whether two rows are of one cell but for the dtype, and of the lengths of a third, or of its octave's."""
    lengths = [(cell.seqlen_q, cell.seqlen_k) for cell in (fp8, here, octave_of(here))]
    return fp8._replace(dtype=plain.dtype) == plain and lengths[0] in lengths[1:]


def withdraw(key: AttentionKey, device: Device, error: Exception, recipe: str = "") -> bool:
    """Replaces the config that a call was given, and that failed to launch, by the plain one; False if it was that.

    Not by the default: it may be the one that failed, or fail for the same reason. For this process, the cell and the
    named recipe only; one warning. A compiler other than the row's may refuse what that one compiled.
    """
    global generation
    at = device.sku_key, cell_of(key), recipe
    failed = _chosen.get(at)
    default = plain_config(device.arch, key, recipe)
    if failed is None or failed.config == default:
        return False
    reason = f"{type(error).__name__}: {str(error).strip()[:200]}"
    source = str(failed.database or "default_config()")
    told = f"{failed.match} {failed.trust}: {source}: {failed.config.to_json()} failed to launch: {reason}"
    _chosen[at] = Choice(default, "default", "none", None, None, (*failed.misses, told))
    generation += 1
    _warn(source, f"a config failed to launch and the plain default runs instead: {reason}")
    return True


def reset() -> None:
    """Forgets choices, tables and given warnings: files and environment are read again."""
    global generation
    _chosen.clear()
    _warned.clear()
    _table.cache_clear()
    running.cache_clear()
    generation += 1


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
            *([("", f"of {row.sku}, another GPU: tune to know")] if row.sku != device.sku_key else []),
            ("", f"{row.ms * 1e3:.4g} us ({row.ms_lo * 1e3:.4g} to {row.ms_hi * 1e3:.4g}), {row.tflops:.4g} TFLOPS"),
            ("", f"confidence {row.confidence}, best of {row.trials} trials"),
            ("", f"{row.tuned_at}, Triton {row.triton_version}, torch {row.torch_version or '-'}"),
            ("grade", ": ".join(filter(None, grade(Running(*row.toolchain), running())))),
        ]
    lines += [("config", str(choice.config)), *(("missed", miss) for miss in choice.misses)]
    return "\n".join(f"{label:<9}{text}" for label, text in lines)


def _spelled(cell: Cell) -> str:
    return " ".join(f"{name}={value}" for name, value in cell._asdict().items())


def _decide(key: AttentionKey, cell: Cell, device: Device, recipe: str = "") -> Choice:
    own, alike, related, files = _table(device, "front" if recipe else "best")
    misses = list(files)
    tiers = (("", own), ("borrowed", alike), ("borrowed", related)) if device.arch in ARCHS else ()
    for label, rows in tiers:
        if recipe:
            rows = tuple((path, row) for path, row in rows if row.config.recipe == recipe)
        scored = _scored(cell, rows, misses)
        for match, trust in STEPS if rows or not label else ():
            of_trust = [c for c in scored if c.row.trust == trust]
            step = f"{label} {match} {trust}".lstrip()
            if found := _fitting(_ranked(of_trust, match), step, key, device, misses):
                return Choice(
                    found.row.config, label or match, trust, found.row, found.database, tuple(misses), found.grade
                )
            misses.append(f"{step}: {_nothing(of_trust, match)}")
    return Choice(default_for(key, device.arch, device.units), "default", "none", None, None, tuple(misses))


def _scored(cell: Cell, rows: tuple[tuple[str, reader.Row], ...], misses: list[str]) -> list[_Candidate]:
    """The rows of the cell's class that the policy admits."""
    scored, refused = [], 0
    for path, row in rows:
        if (distance := _distance(cell, row.cell)) is None:
            continue
        graded, _ = grade(Running(*row.toolchain), running())
        place = rank(graded, _policy())
        refused += place is None
        if place is not None:
            scored.append(_Candidate(distance, path, row, graded, place))
    if refused:
        misses.append(f"ZYFA_TRUST={_policy()} refuses {refused} rows of other toolchains")
    return scored


def _policy() -> str:
    try:
        return policy()
    except ValueError as error:
        _warn("ZYFA_TRUST", str(error))
        return POLICIES[0]


def _fitting(candidates, step: str, key: AttentionKey, device: Device, misses: list[str]) -> _Candidate | None:
    """The first that the device can run."""
    for candidate in candidates:
        reason = broken_limit(candidate.row.config, key, device.arch)
        if not reason:
            return candidate
        misses.append(f"{step}: {candidate.database}: row {candidate.row.config.to_json()} breaks: {reason}")
        _warn(candidate.database, f"a row that {device.sku_key} cannot run was left out: {reason}")
    return None


def _distance(cell: Cell, other: Cell) -> float | None:
    """Octaves between two cells; None if they differ in dtype, head dims or mask, across which no row is borrowed.

    WHOLE for the row of an octave to its lower half, which it serves where that has none of its own.
    """
    if cell != other == octave_of(cell):
        return WHOLE
    if (cell[:3], cell.causal, cell.window_class) != (other[:3], other.causal, other.window_class):
        return None
    return sum(
        abs(log2(getattr(cell, name) / getattr(other, name)))
        for name in ("nheads_ratio", "batch_heads", "seqlen_q", "seqlen_k")
    )


def _ranked(candidates: list[_Candidate], match: str) -> list[_Candidate]:
    """The candidates of a step, best first; equal ones stay in the order of databases, then newest first."""
    if match == "exact":
        return sorted((c for c in candidates if c.distance <= WHOLE), key=lambda c: (c.rank, c.distance))
    near = (c for c in candidates if WHOLE < c.distance <= NEAREST_OCTAVES)
    return sorted(near, key=lambda c: (c.rank, c.distance))


def _nothing(candidates: list[_Candidate], match: str) -> str:
    if match == "exact" or not candidates:
        return "no such row" if match == "exact" else "no row of the same dtype, head dims and mask"
    nearest = min(c.distance for c in candidates)
    return f"no usable row within {NEAREST_OCTAVES:g} octaves (the nearest is {nearest:.3g} away)"


@cache
def _table(device: Device, view: str) -> _Table:
    """The rows of view "best"; or of "front", and of "best" too."""
    own: list[tuple[str, reader.Row]] = []
    alike: list[tuple[str, reader.Row]] = []
    related: list[tuple[str, reader.Row]] = []
    misses: list[str] = []
    warned = len(_warned)
    units = device.sku_key.rsplit("/", 1)[1]
    for path, required in _search_list(device, misses):
        found = _rows_of(path, required, misses, view)
        for row in found:
            if row.arch == device.arch:
                tier = own if row.sku == device.sku_key else alike if row.sku.endswith(f"/{units}") else related
                tier.append((str(path), row))
        if found and all(row.sku != device.sku_key for row in found):
            misses.append(f"{path}: has rows of {', '.join(sorted({row.sku for row in found}))} only")
    if not own and len(_warned) == warned:
        lent = "; rows of a related GPU are borrowed" if alike or related else ""
        _warn(device.sku_key, f"no tuned config for this GPU ({'; '.join(misses)}){lent}")
    return _Table(tuple(own), tuple(alike), tuple(related), tuple(misses))


def _search_list(device: Device, misses: list[str]) -> Iterator[tuple[Path, bool]]:
    """(database, whether its absence is worth a warning)."""
    for path in filter(None, os.environ.get("ZYFA_TUNING_DB", "").split(os.pathsep)):
        yield Path(path), True
    try:
        yield user_db_path(device), False
    except RuntimeError as error:  # no home directory
        misses.append(f"user database: {error}")
    own = reader.DATA / f"{device.db_name}.sqlite"
    yield own, False
    for path in sorted(reader.DATA.glob(f"{device.vendor}-{device.arch}-*.sqlite")):
        if path != own:
            yield path, False


def _rows_of(path: Path, required: bool, misses: list[str], view: str) -> list[reader.Row]:
    skipped: list[str] = []
    try:
        rows = reader.read(path, skipped)
        if view != "best":
            rows = [*reader.read(path, skipped, view), *rows]
    except DatabaseError as error:
        misses.append(str(error))
        if required or not isinstance(error.__cause__, FileNotFoundError):
            _warn(str(path), str(error).removeprefix(f"{path}: "))
        return []
    if skipped:
        misses.append(f"{path}: {len(skipped)} rows left out, first {skipped[0]}")
        _warn(str(path), f"{len(skipped)} rows left out, first {skipped[0]}")
    return rows


def _warn(what: str, reason: str) -> None:
    """One warning per process, subject and cause."""
    message = f"{what}: {reason}. zyfa goes on without it; run zyfa-tune to (re)create tuned configs"
    if _warned.setdefault(message, mine := object()) is mine:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
