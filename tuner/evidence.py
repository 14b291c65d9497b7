"""Timed landscapes, what predictions are judged by: every trial of a database, or recorded files."""

import gzip
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from zyfa.archs import ARCHS
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import identify
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.reader import read

from .facts import Facts
from .timing import summarise

LEAST_NOISE = 0.005  # of a time: what a short interval of one run does not show


class Timed(NamedTuple):
    """One config that was timed: ms is the median, noise the half width of its interval relative to it."""

    config: AttentionConfig
    facts: Facts
    ms: float
    noise: float


class Landscape(NamedTuple):
    """The timed configs of one call on one GPU; untimed: how many others there are, by outcome."""

    sku: str
    key: AttentionKey
    timed: tuple[Timed, ...]
    untimed: dict[str, int]


def load(paths: Iterable[Path]) -> list[Landscape]:
    """The landscapes of databases (*.sqlite), recorded files (*.jsonl.gz) and folders of those, by key.

    Raises ValueError naming a file that is neither, or a line that is no record.
    """
    found: list[Landscape] = []
    for path in paths:
        if path.is_dir():
            found += load(sorted(path.rglob("*.jsonl.gz")))
        elif path.suffix == ".sqlite":
            found += from_database(path)
        elif path.name.endswith(".jsonl.gz"):
            found.append(from_file(path))
        else:
            raise ValueError(f"{path}: neither a database (.sqlite) nor a landscape (.jsonl.gz)")
    return sorted(found, key=lambda landscape: landscape.key)


def from_database(path: Path) -> list[Landscape]:
    """One landscape of each call of which two or more configs were timed; several timings of a config are averaged."""
    times: dict[AttentionKey, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[tuple[AttentionKey, str], Facts] = {}
    untimed: dict[AttentionKey, Counter[str]] = defaultdict(Counter)
    for record in read_content(path).trials:
        if record.trust != "measured" or record.ms is None:
            untimed[record.key][record.outcome] += 1
            continue
        assert record.ms_lo is not None and record.ms_hi is not None
        times[record.key][record.config].append((record.ms, (record.ms_hi - record.ms_lo) / 2))
        if record.facts != "{}":
            facts[record.key, record.config] = Facts.from_dict(json.loads(record.facts))
    sku = next((row.sku for row in read(path)), "///").split("/")[2]
    return [
        Landscape(sku, key, tuple(timed), dict(untimed[key]))
        for key, configs in times.items()
        if len(timed := list(_timed(key, configs, facts))) > 1
    ]


def _timed(key: AttentionKey, configs: dict, facts: dict) -> Iterator[Timed]:
    for text, runs in sorted(configs.items()):
        if (key, text) in facts:
            ms = statistics.mean(ms for ms, _ in runs)
            noise = max(LEAST_NOISE, statistics.mean(half for _, half in runs) / ms)
            yield Timed(AttentionConfig.from_json(text), facts[key, text], ms, noise)


def from_file(path: Path) -> Landscape:
    """A recorded landscape: a header with "gpu" and "key", then a line with config, outcome, samples_ms and facts each.

    A config that has samples counts as timed whatever its outcome: a gated one shows what the gate costs.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    timed: list[Timed] = []
    untimed: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if number == 1:
                head, key = record, AttentionKey(**record["key"])
            elif record.get("samples_ms") and record.get("facts"):
                timed.append(_from_record(record))
            else:
                untimed[record["outcome"]] += 1
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from error
    if not timed:
        raise ValueError(f"{path}: holds no timed config")
    arch = timed[0].facts.arch
    return Landscape(identify(ARCHS[arch].vendor, arch, 0, head["gpu"], None).sku, key, tuple(timed), dict(untimed))


def _from_record(record: dict) -> Timed:
    timing = summarise(record["samples_ms"])
    noise = max(LEAST_NOISE, (timing.ms_hi - timing.ms_lo) / 2 / timing.ms)
    return Timed(AttentionConfig.from_dict(record["config"]), Facts.from_dict(record["facts"]), timing.ms, noise)
