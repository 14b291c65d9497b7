"""A database as text: sorted lines of JSON that a pull request can show, and back again without loss.

The first line names the form. Then `{"meta": ...}`, `{"facts": id, ...}` and `{"toolchain": id, ...}` once for each,
`{"trial": id, ...}` without what is empty, `{"winner": id of its trial, ...}`, `{"front": id of its trial, ...}` and
`{"certificate": what it allows, ...}`. An id is a hash of what it names, so
a new trial changes no other line.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zyfa.config import AttentionKey
from zyfa.errors import DatabaseError

from .certificates import Licence, Stored
from .content import Content, Crown, Record
from .schema import Toolchain

HEAD = "zyfa tuning database, text form 2"
OLDER = ("zyfa tuning database, text form 1",)  # without certificates and fronts
MAX_LINES = 1_000_000
_EMPTY = {
    "granularity": "none", "is_default": 0, "ms": None, "ms_lo": None, "ms_hi": None, "samples_us": (), "rel_err": None,
    "reason": "",
}  # fmt: skip


def dump(content: Content) -> Iterator[str]:
    """The lines, without their ends."""
    yield HEAD
    yield _json({"meta": content.meta})
    for facts in sorted({record.facts for record in content.trials}, key=_id):
        yield _json({"facts": _id(facts), "of": json.loads(facts)})
    for toolchain in sorted({record.toolchain for record in content.trials}):
        yield _json({"toolchain": _id(_json(toolchain)), "is": toolchain._asdict()})
    for record in sorted(content.trials, key=lambda record: record.order):
        count = {"times": n} if (n := content.trials[record]) > 1 else {}
        yield _json({"trial": _id(record.order), **count, **_trial(record)})
    for crown in sorted(content.winners.values(), key=lambda crown: crown.seat.order):
        yield _json({"winner": _id(crown.record.order), **_crown(crown)})
    for (_, recipe), crown in sorted(content.fronts.items(), key=lambda item: (item[0][0].order, item[0][1])):
        yield _json({"front": _id(crown.record.order), "recipe": recipe, **_crown(crown)})
    for licence in sorted(content.certificates, key=lambda licence: licence.order):
        named = licence._asdict() | {"toolchain": _id(_json(licence.toolchain))}
        stored = content.certificates[licence]
        yield _json({"certificate": named, "errors": json.loads(stored.errors), "created_at": stored.created_at})


def load(lines: Iterable[str]) -> Content:
    """Inverse of dump. Raises DatabaseError naming the line for anything that dump does not write."""
    content, known = Content({}, Counter(), {}, {}, {}), _Known({}, {}, {})
    for number, line in enumerate(lines, start=1):
        try:
            if number == 1:
                _expect(line.rstrip("\r\n") in (HEAD, *OLDER), f"the first line is not {HEAD!r}")
            elif line.strip():
                _expect(number <= MAX_LINES, f"more than {MAX_LINES} lines")
                _read(json.loads(line, parse_constant=_no_constant), content, known)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DatabaseError(f"line {number}: {error}") from error
    if not content.meta:
        raise DatabaseError("no line with meta")
    return content


class _Known(NamedTuple):
    """What earlier lines named, by their ids."""

    facts: dict[str, str]
    toolchains: dict[str, Toolchain]
    trials: dict[str, Record]


def _read(values: dict, content: Content, known: _Known) -> None:
    """Adds one line to the content."""
    _expect(isinstance(values, dict), "not an object")
    if "meta" in values:
        _expect(all(isinstance(v, str) for v in values["meta"].values()), "meta holds more than text")
        content.meta.update(values["meta"])
    elif "of" in values:
        known.facts[values["facts"]] = _json(values["of"])
    elif "is" in values:
        parts = {name: _typed(name, values["is"][name], str) for name in Toolchain._fields}
        known.toolchains[values["toolchain"]] = Toolchain(**parts)
    elif "trial" in values:
        record = _record(values, known)
        known.trials[values["trial"]] = record
        content.trials[record] += _typed("times", values.get("times", 1), int)
    elif "certificate" in values:
        licence = _licence(values["certificate"], known)
        _expect(licence not in content.certificates, "a second certificate of the same recipe")
        stored = Stored(_json(values["errors"]), _typed("created_at", values["created_at"], int))
        _expect(stored.worst < 1e9, f"errors are {stored.errors:.80}")
        content.certificates[licence] = stored
    else:
        crown = Crown(
            known.trials[values.get("winner") or values["front"]], *(values[name] for name in Crown._fields[1:])
        )
        _expect(isinstance(crown.confidence, str) and isinstance(crown.tuned_at, str), "a winner of wrong types")
        if "winner" in values:
            _expect(crown.seat not in content.winners, "a second winner of the same seat")
            content.winners[crown.seat] = crown
        else:
            seat = crown.seat, _typed("recipe", values["recipe"], str)
            _expect(seat not in content.fronts, "a second front of the same seat and recipe")
            content.fronts[seat] = crown


def _crown(crown: Crown) -> dict:
    return dict(zip(Crown._fields[1:], crown[1:], strict=True))


def _licence(values: dict, known: _Known) -> Licence:
    given = [_typed(name, values[name], kind) for name, kind in list(Licence.__annotations__.items())[1:]]
    return Licence(known.toolchains[values["toolchain"]], *given)


def _trial(record: Record) -> dict:
    told = record._asdict() | {
        "facts": _id(record.facts), "key": list(record.key), "toolchain": _id(_json(record.toolchain)),
        "config": _object(record.config),
    }  # fmt: skip
    return {name: value for name, value in told.items() if name not in _EMPTY or value != _EMPTY[name]}


def _object(config: str):
    """The config as an object where that is the same text; else, as a stranger may have written it, the text."""
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return config
    return value if isinstance(value, dict) and _json(value) == config else config


def _record(values: dict, known: _Known) -> Record:
    given = {name: values[name] if name not in _EMPTY else values.get(name, _EMPTY[name]) for name in Record._fields}
    key = zip(AttentionKey._fields, given["key"], strict=True)
    config = given["config"]
    return Record(**given | {
        "key": AttentionKey(**{n: _typed(n, value, AttentionKey.__annotations__[n]) for n, value in key}),
        "toolchain": known.toolchains[given["toolchain"]],
        "config": _json(config) if isinstance(config, dict) else _typed("config", config, str),
        "samples_us": tuple(_typed("samples_us", float(us), float) for us in given["samples_us"]),
        "facts": known.facts[given["facts"]],
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
