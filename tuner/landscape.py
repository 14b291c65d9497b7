"""A landscape: what each config of one cell took, recorded once, so that a search can be replayed without a GPU.

A gzip file of JSON lines: a header, then one line per config. It is written line by line, each a gzip member of its
own, so that a recording that is killed keeps what it has; readers of gzip join members by themselves.
"""

import gzip
import hashlib
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuning_db.schema import OUTCOMES

from .study import Space

SUFFIX = ".jsonl.gz"


class Entry(NamedTuple):
    """One config: its outcome, ms of each repeat, relative error, facts of the compiled code.

    "ok" has repeats. "gated" may: the gate refused the code and it was timed all the same, to know what the gate costs.
    """

    config: AttentionConfig
    outcome: str
    samples_ms: tuple[float, ...] = ()
    rel_err: float | None = None
    facts: dict = {}  # noqa: RUF012  # never changed

    @property
    def ms(self) -> float | None:
        """Median of the repeats; None unless the outcome is "ok"."""
        return statistics.median(self.samples_ms) if self.outcome == "ok" else None

    def to_dict(self) -> dict:
        return self._asdict() | {"config": self.config.to_dict(), "samples_ms": list(self.samples_ms)}

    @classmethod
    def from_dict(cls, values: dict) -> "Entry":
        """Raises ValueError for an unknown outcome, or an "ok" one without a time."""
        entry = cls(**values | {"config": AttentionConfig.from_dict(values["config"])})
        fits = bool(entry.samples_ms) in {"ok": (True,), "gated": (True, False)}.get(entry.outcome, (False,))
        if entry.outcome not in OUTCOMES or not fits:
            raise ValueError(f"outcome {entry.outcome!r} with {len(entry.samples_ms)} samples")
        return entry._replace(samples_ms=tuple(entry.samples_ms))


class Landscape(NamedTuple):
    """head: gpu, driver, torch, triton, date, method, kernel_hash, key. entries: by config, in order of recording."""

    name: str
    head: dict
    key: AttentionKey
    entries: dict[AttentionConfig, Entry]

    @property
    def best_ms(self) -> float:
        """Least median of all configs; raises ValueError where none is ok."""
        return min(entry.ms for entry in self.entries.values() if entry.ms is not None)

    def space(self) -> Space:
        """What was recorded, as a space to search: the recorded configs are the legal ones.

        The values of each field are those that occur; a field with one value is no choice.
        """
        found = {name: dict.fromkeys(getattr(c, name) for c in self.entries) for name in vars(next(iter(self.entries)))}
        values = {name: tuple(sorted(each)) for name, each in found.items() if len(each) > 1}
        fixed = {name: next(iter(each)) for name, each in found.items() if len(each) == 1}

        def suggest(trial) -> AttentionConfig:
            drawn = {name: trial.suggest_categorical(name, each) for name, each in values.items()}
            return AttentionConfig(**fixed, **drawn)

        legal = tuple(self.entries)
        return Space(
            self.key, suggest, lambda config: None if config in self.entries else "not recorded", lambda: legal
        )


class Recorder:
    """Writes a landscape file; configs that an earlier, interrupted recording of the same header holds are kept."""

    def __init__(self, path: Path, head: dict):
        self._path = path
        self.done: set[AttentionConfig] = set()
        if path.exists():
            before = read(path)
            if {**before.head, "date": ""} != {**head, "date": ""}:
                raise ValueError(f"{path}: holds a recording of another GPU, toolchain, kernel or cell; move it away")
            self.done = set(before.entries)
            _rewrite(path, _lines(path))  # what was cut off at the end would hide what follows
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(head)

    def add(self, entry: Entry) -> None:
        self._append(entry.to_dict())
        self.done.add(entry.config)

    def _append(self, values: dict) -> None:
        with self._path.open("ab") as file:
            file.write(gzip.compress(json.dumps(values, separators=(",", ":")).encode() + b"\n", mtime=0))


def compact(path: Path) -> None:
    """Rewrites a finished recording as one gzip member: a tenth of the bytes, and equal content is equal bytes."""
    _rewrite(path, _lines(path))


def _rewrite(path: Path, lines: Iterable[dict]) -> None:
    part = path.with_name(f".{path.name}.part")
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    part.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    part.replace(path)


def read(path: Path) -> Landscape:
    """The landscape of a file; a line that was cut off at the end is left out. Raises ValueError for anything else."""
    try:
        head, *rest = _lines(path)
        entries = [Entry.from_dict(values) for values in rest]
        key = AttentionKey(**head["key"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no landscape: {error}") from error
    return Landscape(path.name.removesuffix(SUFFIX), head, key, {entry.config: entry for entry in entries})


def read_all(folder: Path) -> list[Landscape]:
    """Every landscape of a folder, by name."""
    return [read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def _lines(path: Path) -> Iterator[dict]:
    with gzip.open(path) as file:
        try:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)
        except EOFError:  # killed within the last member
            return


def name_of(key: AttentionKey) -> str:
    """File name of a cell's landscape, like bf16-causal-d128-h32x8-s8192."""
    dim = f"d{key.head_dim}" + (f"x{key.head_dim_v}" if key.head_dim_v != key.head_dim else "")
    length = f"s{key.seqlen_q}" + (f"x{key.seqlen_k}" if key.seqlen_k != key.seqlen_q else "")
    batch = f"b{key.batch}-" if key.batch > 1 else ""
    return f"{key.dtype}-{'causal' if key.causal else 'full'}-{dim}-h{key.nheads}x{key.nheads_k}-{batch}{length}"


def sample(configs: Sequence[AttentionConfig], number: int, first: Iterable[AttentionConfig] = ()) -> list:
    """`number` of the configs, or all if there are fewer: `first`, then one of each stratum (_stratum) in turn.

    A function of the configs alone, so that cells of one family record the same ones and share their builds. Within a
    stratum the order is that of a hash, which favours no value.
    """
    strata: dict[tuple, list[AttentionConfig]] = defaultdict(list)
    for config in sorted(configs, key=lambda config: hashlib.sha256(config.to_json().encode()).hexdigest()):
        strata[_stratum(config)].append(config)
    turns = itertools.zip_longest(*strata.values())
    legal = set(configs)
    chosen = dict.fromkeys(c for c in itertools.chain(first, *turns) if c in legal)
    return list(chosen)[:number]


def _stratum(config: AttentionConfig) -> tuple:
    """What decides most of the time: kernel, tile and what is multiplied."""
    return config.BLOCK_M, config.BLOCK_N, config.num_warps, config.recipe, getattr(config, "variant", "")
