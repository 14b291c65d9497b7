"""Several databases of one SKU as one, and what distinguishes two of them for whoever calls attention.

Trials are a multiset, and the union keeps each as often as the file that has it most often. A seat that two files fill
differently goes to the winner with the better evidence by a total order. Both, and so the merge, give the same result
in any order, any grouping and any repetition.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zyfa.config import Cell
from zyfa.errors import DatabaseError

from .certificates import Licence, Stored
from .content import Content, Crown, Record, Seat
from .reader import Row

ONE_OF_A_KIND = ("sku", "vendor", "arch", "units")  # of meta; what else differs, the larger value wins


class Conflict(NamedTuple):
    """Two files have different winners for one seat."""

    seat: Seat
    kept: Crown
    dropped: Crown


def merged(contents: Sequence[Content]) -> tuple[Content, list[Conflict]]:
    """The union and what was decided. Raises DatabaseError unless all are of one SKU, ValueError for none at all."""
    if not contents:
        raise ValueError("contents is empty; at least one is needed")
    trials: Counter[Record] = Counter()
    winners: dict[Seat, Crown] = {}
    fronts: dict[tuple[Seat, str], Crown] = {}
    certificates: dict[Licence, Stored] = {}
    conflicts: list[Conflict] = []
    for content in contents:
        trials |= content.trials
        conflicts += _join(winners, content.winners)
        conflicts += _join(fronts, content.fronts)
        for licence, stored in content.certificates.items():  # the newest, as when it is earned again
            certificates[licence] = max(certificates.get(licence, stored), stored, key=lambda s: (s.created_at, s))
    return Content(_meta([content.meta for content in contents]), trials, winners, fronts, certificates), conflicts


def _join(seats: dict, more: dict) -> list[Conflict]:
    """Adds the crowns of another file, the better evidence where both have one; returns what was in conflict."""
    conflicts = []
    for seat, crown in more.items():
        kept = seats.setdefault(seat, crown)
        if kept != crown:
            better, worse = (kept, crown) if evidence(kept) > evidence(crown) else (crown, kept)
            seats[seat] = better
            conflicts.append(Conflict(crown.seat, better, worse))
    return conflicts


def evidence(crown: Crown) -> tuple:
    """What makes a winner more credible than another of its seat, most important first; equal only for equal winners.

    Confidence (A compared side by side), how many it was chosen from, how recent, how fast; then an arbitrary order.
    """
    rank = -ord(crown.confidence[:1] or "~")
    return rank, crown.trials, crown.tuned_at, -(crown.record.ms or 0.0), crown.record.order, crown.default_ms or 0.0


def _meta(metas: Sequence[dict[str, str]]) -> dict[str, str]:
    values: dict[str, set[str]] = {}
    for meta in metas:
        for name, value in meta.items():
            values.setdefault(name, set()).add(value)
    for name in ONE_OF_A_KIND:
        if len(found := values.get(name, set())) > 1:
            raise DatabaseError(f"{name} differs: {', '.join(sorted(found))}; one file holds one SKU")
    return {name: max(found) for name, found in sorted(values.items())}


class Change(NamedTuple):
    """What a caller gets for a cell from each of two files; None where a file has no row."""

    cell: Cell
    old: Row | None
    new: Row | None

    @property
    def kind(self) -> str:
        if self.old is None or self.new is None:
            return "added" if self.old is None else "removed"
        if self.old.config != self.new.config:
            return "config"
        return "trust" if self.old.trust != self.new.trust else "time"


def changes(old: Iterable[Row], new: Iterable[Row]) -> list[Change]:
    """The cells whose best row differs in config, trust or time, by cell."""
    before, after = served(old), served(new)
    pairs = [Change(cell, before.get(cell), after.get(cell)) for cell in sorted(before.keys() | after.keys())]
    return [c for c in pairs if _told(c.old) != _told(c.new)]


def served(rows: Iterable[Row]) -> dict[Cell, Row]:
    """The row that each cell is served from: a measured one before a predicted one, then the newest."""
    best: dict[Cell, Row] = {}
    for row in sorted(rows, key=lambda row: (row.trust == "measured", row.tuned_at, row.toolchain)):
        best[row.cell] = row
    return best


def _told(row: Row | None) -> tuple | None:
    return None if row is None else (row.config, row.trust, row.ms)


def pruned(content: Content, keep: int, newest_kernel: bool = False) -> Content:
    """Without most of the trials that decide nothing.

    Of each seat the `keep` fastest stay, the winner, every trial of the default config and one failure of each reason.
    With newest_kernel only the rows of the kernel that was tuned last.
    """
    crowned = {crown.record for crown in (*content.winners.values(), *content.fronts.values())}
    hashes = {r.toolchain.kernel_hash for r in content.trials} if not newest_kernel else {_newest_kernel(content)}
    kept: Counter[Record] = Counter()
    seen: Counter[tuple] = Counter()
    for record in sorted(content.trials, key=lambda r: (r.ms is None, r.ms or 0.0, r.order)):
        seat = (record.key, record.toolchain, record.trust)
        seen[group := (*seat, record.outcome, record.reason)] += 1
        limit = keep if record.outcome == "ok" else 1
        if record.toolchain.kernel_hash in hashes and (
            record in crowned or record.is_default or seen[group] <= limit
        ):  # fmt: skip
            kept[record] = content.trials[record]
    winners = {seat: crown for seat, crown in content.winners.items() if crown.record in kept}
    fronts = {seat: crown for seat, crown in content.fronts.items() if crown.record in kept}
    certificates = {c: stored for c, stored in content.certificates.items() if c.toolchain.kernel_hash in hashes}
    return Content(content.meta, kept, winners, fronts, certificates)


def _newest_kernel(content: Content) -> str:
    newest = max(content.trials, key=lambda r: (r.created_at, r.toolchain), default=None)
    return newest.toolchain.kernel_hash if newest else ""
