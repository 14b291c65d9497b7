"""The GPU-less check of the shipped databases: every row is valid, legal, compiles again, and is what it says.

python -m zyfa.tuner.check_databases [FILE...]      exit 1 and one line per finding if something is wrong
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from zyfa.config import AttentionKey
from zyfa.kernels import kernel_hash
from zyfa.tuning_db.reader import DATA, Row, read
from zyfa.tuning_db.verify import findings

from .compile import CompileFarm
from .gate import gate
from .plan import key_of
from .space import broken_rule

MEASURABLE = {"sm90"}  # what has been timed by this project; a measured row of another arch must be refused
PROCESSES = 2


def check(path: Path) -> Iterator[str]:
    """Findings of one file, each naming what is wrong."""
    yield from findings(path)
    rows = read(path)
    if not rows:
        yield f"{path.name}: holds no rows"
        return
    if path.stem != rows[0].sku.replace("/", "-"):
        yield f"{path.name}: holds rows of {rows[0].sku}"
    for row in rows:
        if row.trust == "measured" and row.arch not in MEASURABLE:
            yield f"{_name(path, row)}: marked measured, but nobody has timed a {row.arch}"
        if reason := broken_rule(row.config, key_of(row.cell), row.arch):
            yield f"{_name(path, row)}: {reason}"
    with CompileFarm(rows[0].arch, PROCESSES) as farm:
        jobs = [(row, key, farm.submit(key, row.config)) for row in rows for key in [key_of(row.cell)]]
        for row, key, future in jobs:
            yield from (f"{_name(path, row)}: {fault}" for fault in _rebuilt(row, key, future.result()))


def _rebuilt(row: Row, key: AttentionKey, build) -> Iterator[str]:
    """What a fresh compilation says against the row."""
    if build.facts is None:
        yield f"does not compile: {build.failure}"
    elif reason := gate(build.facts, key, row.config, row.arch):
        yield f"would be gated: {reason}"
    if row.kernel_hash != kernel_hash():
        yield f"tuned for kernel {row.kernel_hash}, this is {kernel_hash()}: tune again"


def _name(path: Path, row: Row) -> str:
    cell = row.cell
    mask = "causal" if cell.causal else "full"
    return f"{path.name}: {cell.dtype} d{cell.head_dim} {mask} {cell.seqlen_q}x{cell.seqlen_k}"


def main(argv: list[str]) -> int:
    """Check the named files, or all shipped ones; prints findings and a closing line."""
    paths = [Path(a) for a in argv] or sorted(DATA.glob("*.sqlite"))
    if not paths:
        print(f"no databases in {DATA}")
        return 1
    start, faults = time.monotonic(), 0
    for path in paths:
        for fault in check(path):
            faults += 1
            print(fault)
    print(f"{len(paths)} databases checked in {time.monotonic() - start:.0f} s, {faults} findings")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
