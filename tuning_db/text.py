"""A database as text: sorted lines of JSON that a pull request can show, and back again without loss.

The first line names the form. Then `{"meta": ...}`, `{"facts": id, ...}` once for each kind of compiled code,
`{"trial": id, ...}`, and `{"winner": id of its trial, ...}`. An id is a hash of what it names, so a new trial
changes no other line.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator

from zyfa.config import AttentionKey
from zyfa.errors import DatabaseError

from .content import Content, Crown, Record
from .schema import Toolchain

HEAD = "zyfa tuning database, text form 1"
MAX_LINES = 1_000_000


def dump(content: Content) -> Iterator[str]:
    """The lines, without their ends."""
    yield HEAD
    yield _json({"meta": content.meta})
    for facts in sorted({record.facts for record in content.trials}, key=_id):
        yield _json({"facts": _id(facts), "of": json.loads(facts)})
    for record in sorted(content.trials, key=lambda record: record.order):
        count = {"times": n} if (n := content.trials[record]) > 1 else {}
        yield _json({"trial": _id(record.order), **count, **_trial(record)})
    for crown in sorted(content.winners.values(), key=lambda crown: crown.seat.order):
        yield _json({"winner": _id(crown.record.order), **dict(zip(Crown._fields[1:], crown[1:], strict=True))})


def load(lines: Iterable[str]) -> Content:
    """Inverse of dump. Raises DatabaseError naming the line for anything that dump does not write."""
    content = Content({}, Counter(), {})
    facts: dict[str, str] = {}
    trials: dict[str, Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if number == 1:
                _expect(line.rstrip("\r\n") == HEAD, f"the first line is not {HEAD!r}")
            elif line.strip():
                _expect(number <= MAX_LINES, f"more than {MAX_LINES} lines")
                _read(json.loads(line, parse_constant=_no_constant), content, facts, trials)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DatabaseError(f"line {number}: {error}") from error
    if not content.meta:
        raise DatabaseError("no line with meta")
    return content


def _read(values: dict, content: Content, facts: dict[str, str], trials: dict[str, Record]) -> None:
    """Adds one line to the content; facts and trials are known by their ids."""
    _expect(isinstance(values, dict), "not an object")
    if "meta" in values:
        _expect(all(isinstance(v, str) for v in values["meta"].values()), "meta holds more than text")
        content.meta.update(values["meta"])
    elif "of" in values:
        facts[values["facts"]] = _json(values["of"])
    elif "trial" in values:
        record = _record(values, facts)
        trials[values["trial"]] = record
        content.trials[record] += _typed("times", values.get("times", 1), int)
    else:
        crown = Crown(trials[values["winner"]], *(values[name] for name in Crown._fields[1:]))
        _expect(isinstance(crown.confidence, str) and isinstance(crown.tuned_at, str), "a winner of wrong types")
        _expect(crown.seat not in content.winners, "a second winner of the same seat")
        content.winners[crown.seat] = crown


def _trial(record: Record) -> dict:
    return record._asdict() | {
        "facts": _id(record.facts), "key": record.key._asdict(), "toolchain": record.toolchain._asdict(),
        "config": _object(record.config),
    }  # fmt: skip


def _object(config: str):
    """The config as an object where that is the same text; else, as a stranger may have written it, the text."""
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return config
    return value if isinstance(value, dict) and _json(value) == config else config


def _record(values: dict, facts: dict[str, str]) -> Record:
    given = {name: values[name] for name in Record._fields}
    config = given["config"]
    return Record(**given | {
        "key": AttentionKey(**{n: _typed(n, given["key"][n], t) for n, t in AttentionKey.__annotations__.items()}),
        "toolchain": Toolchain(**{n: _typed(n, given["toolchain"][n], str) for n in Toolchain._fields}),
        "config": _json(config) if isinstance(config, dict) else _typed("config", config, str),
        "samples_us": tuple(_typed("samples_us", float(us), float) for us in given["samples_us"]),
        "facts": facts[given["facts"]],
        "created_at": _typed("created_at", given["created_at"], int),
    })  # fmt: skip


def _typed(name: str, value, kind):
    _expect(type(value) is kind, f"{name} is {value!r:.80}, not {kind.__name__}")
    return value


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _no_constant(name: str):
    raise ValueError(f"{name} is no number of ours")


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _json(value) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
