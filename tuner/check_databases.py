"""The GPU-less check of the shipped databases: every row is valid, legal, priced as it says, and compiles to its code.

python -m zyfa.tuner.check_databases [--all] [FILE...]     exit 1 and one line per finding if something is wrong

Every row is checked against its file, the schema, the limits, the gate and the model; a sample of the builds (all of
them with --all) is compiled again. With the row's Triton the code must be equal, hash for hash; with another one it
need only pass the gate, and how many differ is said.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from zyfa.config import AttentionConfig, AttentionKey, cell_of
from zyfa.device import TARGETS
from zyfa.errors import DatabaseError
from zyfa.kernels import kernel_hash
from zyfa.toolchain import triton_version
from zyfa.tuning_db.content import Content, Crown, read_content
from zyfa.tuning_db.reader import DATA
from zyfa.tuning_db.verify import findings

from .compile import Build, CompileFarm, specialisation
from .facts import Facts
from .gate import gate
from .model import DEVICES, MODEL_VERSION, predict
from .rates import FITS
from .space import broken_rule

MEASURABLE = {"sm90"}  # what has been timed by this project; a measured row of another arch must be refused
PROCESSES = 2
SAMPLE = 8  # builds of one file, spread over its rows
SAME = 1e-6  # of a predicted time: the arithmetic is the same everywhere, down to rounding
BOOST = 1.15  # over the clock of the data sheet: no time may be below what the matrix units need at this


class Farm(Protocol):
    """What compiles: a CompileFarm, or a test's."""

    def submit(self, key: AttentionKey, config: AttentionConfig) -> "Future[Build]": ...


class Checked(NamedTuple):
    """A winner with all that is known of it."""

    crown: Crown
    key: AttentionKey
    config: AttentionConfig
    facts: Facts | None
    arch: str
    sku: str


def check(path: Path, farm: Farm | None = None, everything: bool = False) -> Iterator[str]:
    """Findings of one file, each naming what is wrong. farm: what compiles (processes of its own)."""
    if found := findings(path):
        yield from found
        return
    content = read_content(path)
    if not content.winners:
        yield f"{path.name}: holds no rows"
        return
    yield from (f"{path.name}: {fault}" for fault in _identity(path, content))
    rows = list(_rows(content))
    for row in rows:
        yield from (f"{_name(path, row)}: {fault}" for fault in (*_trust(row, content), *_static(row)))
    sample = rows if everything else spread(rows, SAMPLE)
    with _farm(farm, rows[0].arch) as compiler:
        futures = [(row, compiler.submit(row.key, row.config)) for row in sample]
        builds = [(row, future.result()) for row, future in futures]
    yield from (f"{_name(path, row)}: {fault}" for row, build in builds for fault in _rebuilt(row, build))
    _say_differences(path, builds)


def _identity(path: Path, content: Content) -> Iterator[str]:
    """The file's name, its meta and the table of GPUs agree; predictions are today's model's."""
    meta = content.meta
    vendor, arch, sku, units = meta["sku"].split("/")
    if path.stem != meta["sku"].replace("/", "-"):
        yield f"holds rows of {meta['sku']}"
    if sku not in TARGETS or TARGETS[sku][:2] != (vendor, arch) or TARGETS[sku][2] % int(units[2:]):
        yield f"{meta['sku']} is no GPU of the table"
    predicted = any(seat.trust == "predicted" for seat in content.winners)
    if predicted and meta.get("model_version") != MODEL_VERSION:
        yield f"predictions are of model {meta.get('model_version')}, this is {MODEL_VERSION}: predict again"
    if any(seat.toolchain.kernel_hash != kernel_hash() for seat in content.winners):
        hashes = sorted({seat.toolchain.kernel_hash for seat in content.winners} - {kernel_hash()})
        yield f"tuned for kernel {', '.join(hashes)}, this is {kernel_hash()}: tune again"


def _rows(content: Content) -> Iterator[Checked]:
    """The winners; the facts of a finalist may stand with its first trial only."""
    known = {(r.key, r.config, r.toolchain): r.facts for r in content.trials if r.facts != "{}"}
    _, arch, sku, _ = content.meta["sku"].split("/")
    for _, crown in sorted(content.winners.items(), key=lambda item: item[0].order):
        record = crown.record
        text = known.get((record.key, record.config, record.toolchain))
        facts = Facts.from_dict(json.loads(text)) if text else None
        yield Checked(crown, record.key, AttentionConfig.from_json(record.config), facts, arch, sku)


def _trust(row: Checked, content: Content) -> Iterator[str]:
    """A row is what it says: timed on this GPU, or exactly what the model gives for its stored code."""
    record = row.crown.record
    tools = record.toolchain
    if record.trust == "measured":
        if row.arch not in MEASURABLE:
            yield f"marked measured, but nobody has timed a {row.arch}"
        if not (tools.driver_version and tools.torch_version and record.samples_us):
            yield "marked measured, but names no driver, no torch or no timings, like a prediction"
        return
    if tools.driver_version or tools.torch_version or record.samples_us or record.rel_err is not None:
        yield "marked predicted, but carries a driver, a torch, timings or an error, like a measurement"
    if row.facts is None or row.sku not in DEVICES:
        yield "marked predicted, but has no facts to predict from"
    elif content.meta.get("model_version") == MODEL_VERSION and row.facts.loops and row.facts.arch == row.arch:
        yield from _repriced(row)


def _repriced(row: Checked) -> Iterator[str]:
    assert row.facts is not None
    record = row.crown.record
    told = predict(row.facts, row.key, row.config, DEVICES[row.sku])
    stored = (record.ms, record.ms_lo, record.ms_hi)
    if any(abs((a or 0) / b - 1) > SAME for a, b in zip(stored, told[:3], strict=True)):
        yield f"says {record.ms:.6g} ms ({record.ms_lo:.6g} to {record.ms_hi:.6g}), the model {told.ms:.6g} ms"
    if row.crown.confidence != told.confidence:
        yield f"says grade {row.crown.confidence}, the model {told.confidence}"


def _static(row: Checked) -> Iterator[str]:
    """What the stored facts say against the row, without compiling."""
    if reason := broken_rule(row.config, row.key, row.arch):
        yield reason
    if row.facts is None:
        return
    if row.facts.arch != row.arch:
        yield f"facts are of {row.facts.arch}"
    elif reason := gate(row.facts, row.key, row.config, row.arch):
        yield f"would be gated: {reason}"
    elif row.sku in DEVICES and row.facts.loops:
        least = predict(row.facts, row.key, row.config, DEVICES[row.sku]).bounds["matrix"]
        fraction = FITS[row.arch].clock_fraction / BOOST
        if (row.crown.record.ms or 0) < least * fraction:
            yield f"{row.crown.record.ms:.4g} ms is faster than the matrix units are"


def spread(rows: Sequence[Checked], most: int) -> list[Checked]:
    """At most `most` rows of different builds, evenly over the file's order."""
    unique = list({specialisation(row.key, row.config, row.arch): row for row in rows}.values())
    step = max(1.0, len(unique) / most)
    return [unique[int(n * step)] for n in range(min(most, len(unique)))]


def _rebuilt(row: Checked, build: Build) -> Iterator[str]:
    """What a fresh compilation says against the row."""
    if build.facts is None:
        yield f"does not compile: {build.failure}"
    elif reason := gate(build.facts, row.key, row.config, row.arch):
        yield f"would be gated: {reason}"
    elif _same_compiler(row) and row.facts is not None and _code(row, build.facts) != _code(row, row.facts):
        yield f"its code is {row.facts.code_hash[:12]}, this Triton compiles it to {build.facts.code_hash[:12]}"


def _code(row: Checked, facts: Facts) -> object:
    """What must be equal: of grids that share a build, their loops and registers, else every instruction."""
    shared = row.config.head_group or row.config.splits > 1
    return (facts.loops, facts.registers, facts.lds_bytes) if shared else facts.code_hash


def _same_compiler(row: Checked) -> bool:
    tools = row.crown.record.toolchain
    return (tools.kernel_hash, tools.triton_version) == (kernel_hash(), triton_version())


def _say_differences(path: Path, builds: Sequence[tuple[Checked, Build]]) -> None:
    """Which rows could not be held to their hash, and how many differ: expected of another Triton, but said."""
    others = [(row, build) for row, build in builds if not _same_compiler(row) and row.facts and build.facts]
    if others:
        differ = sum(build.facts.code_hash != row.facts.code_hash for row, build in others)  # type: ignore[union-attr]
        versions = sorted({row.crown.record.toolchain.triton_version for row, _ in others})
        print(f"{path.name}: {differ} of {len(others)} builds differ from those of Triton {', '.join(versions)}; "
              f"this is {triton_version()}")  # fmt: skip


class _farm:
    """The given farm, or one that is closed afterwards."""

    def __init__(self, farm: Farm | None, arch: str):
        self._own = None if farm else CompileFarm(arch, PROCESSES)
        self._farm = farm or self._own

    def __enter__(self) -> Farm:
        assert self._farm is not None
        return self._farm

    def __exit__(self, *exception) -> None:
        if self._own:
            self._own.close()


def _name(path: Path, row: Checked) -> str:
    cell = cell_of(row.key)
    mask = "causal" if cell.causal else "full"
    return f"{path.name}: {cell.dtype} d{cell.head_dim} {mask} {cell.seqlen_q}x{cell.seqlen_k}"


def main(argv: list[str]) -> int:
    """Check the named files, or all shipped ones; prints findings and a closing line."""
    parser = argparse.ArgumentParser(prog="check_databases", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="compile every build, not a sample")
    given = parser.parse_args(argv)
    paths = given.files or sorted(DATA.glob("*.sqlite"))
    if not paths:
        print(f"no databases in {DATA}")
        return 1
    start, faults = time.monotonic(), 0
    for path in paths:
        for fault in _findings(path, given.all):
            faults += 1
            print(fault)
    print(f"{len(paths)} databases checked in {time.monotonic() - start:.0f} s, {faults} findings")
    return int(faults > 0)


def _findings(path: Path, everything: bool) -> Iterator[str]:
    try:
        yield from check(path, everything=everything)
    except DatabaseError as error:
        yield str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
