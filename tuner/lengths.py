"""Text of the command line to numbers: `512..32k`, `32:8`, `10m`. Standard library only, ASCII digits only."""

import re

MAX_LENGTH = 1 << 20
SEQ_LENS_FORMS = (
    "512..32k (every power of two in between, ends included), 512,1000,4k (a list) or a mix of both; "
    f"k, K or Ki is 1024; from 1 to {MAX_LENGTH // 1024}k"
)
_NUMBER = re.compile(r"([0-9]{1,7})(k|K|Ki)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_seq_lens(text: str) -> tuple[int, ...]:
    """The lengths that a text means, in its order, each once.

    Blanks around numbers are ignored. Raises ValueError quoting the token that is wrong and naming the accepted forms.
    """
    lengths: dict[int, None] = {}
    for token in text.split(","):
        lengths.update(dict.fromkeys(_lengths_of(token.strip())))
    return tuple(lengths)


def _lengths_of(token: str) -> list[int]:
    first, dots, last = (part.strip() for part in token.partition(".."))
    if not dots:
        return [_length(first, token)]
    low, high = _length(first, token), _length(last, token)
    if low > high:
        raise _bad(token, f"it runs backwards; write {last}..{first}")
    powers = (1 << n for n in range(low.bit_length(), high.bit_length()))
    return list(dict.fromkeys([low, *(n for n in powers if low < n < high), high]))


def _length(text: str, token: str) -> int:
    match = _NUMBER.fullmatch(text)
    if not match:
        raise _bad(token, f"{text!r} is no length")
    length = int(match[1]) * (1024 if match[2] else 1)
    if not 1 <= length <= MAX_LENGTH:
        raise _bad(token, f"{text} is not from 1 to {MAX_LENGTH // 1024}k")
    return length


def _bad(token: str, why: str) -> ValueError:
    return ValueError(f"{token!r}: {why}. Accepted: {SEQ_LENS_FORMS}")


def parse_numbers(text: str, what: str, low: int, high: int, step: int = 1) -> tuple[int, ...]:
    """Whole numbers of a list like `64,128`, each once; raises ValueError outside low..high or off the step."""
    numbers: dict[int, None] = {}
    for token in (part.strip() for part in text.split(",")):
        number = int(token) if re.fullmatch(r"[0-9]{1,7}", token) else -1
        if not low <= number <= high or number % step:
            multiple = f", multiples of {step}" if step > 1 else ""
            raise ValueError(f"{token!r} is no {what}. Accepted: a list of numbers from {low} to {high}{multiple}")
        numbers[number] = None
    return tuple(numbers)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """(nheads, nheads_k) pairs of a list like `32:8,16`; a number alone means as many KV heads."""
    pairs: dict[tuple[int, int], None] = {}
    for token in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", token)
        nheads, nheads_k = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if nheads_k < 1 or nheads < 1 or nheads % nheads_k:
            raise ValueError(
                f"{token!r} is no pair of heads. Accepted: query heads:KV heads like 32:8, the first a multiple of the "
                "second; 32 alone is 32:32"
            )
        pairs[nheads, nheads_k] = None
    return tuple(pairs)


def parse_duration(text: str) -> float:
    """Seconds of a text like 90s, 10m or 1.5h; a bare number is seconds. Raises ValueError for others and for 0."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is no duration. Accepted: 90s, 10m, 1.5h")
    return seconds
