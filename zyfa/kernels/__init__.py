"""One family of prefill kernels and its quantisers. Knows no database and no tuner."""

import functools
import hashlib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

# What is compiled; the host side does not change a kernel's time. attn_gluon_amd.py and gluon_lds.py belong here once a
# search may choose them: no stored row is theirs, and a new hash makes every shipped row stale.
_SOURCES = (
    "attn_fwd.py", "attn_gluon.py", "gluon_ring.py", "gluon_softmax.py", "merge.py", "quantize.py", "rows.py",
    "scales.py", "statistics.py",
)  # fmt: skip
_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}
_LINE_STARTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """(type, text) of each token; an f-string is one, as it was before Python 3.12 took it apart."""
    begin, end = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    lines, depth, first = text.splitlines(keepends=True), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == begin:
            first = token.start if depth == 0 else first
            depth += 1
        elif token.type == end and depth == 1:
            depth = 0
            (row, column), (last, stop) = first, token.end
            rows = [*lines[row - 1 : last - 1], lines[last - 1][:stop]]
            yield tokenize.STRING, "".join(rows)[column:]
        elif depth == 0:
            yield token.type, token.string
        elif token.type == end:
            depth -= 1


def _code(text: str) -> str:
    """Python source without comments, docstrings and layout, spelled alike by every Python version."""
    kept, before = [], tokenize.NEWLINE
    for kind, spelled in _tokens(text):
        if kind in _IGNORED:
            continue
        if not (kind == tokenize.STRING and before in _LINE_STARTS):
            kept.append(spelled if kind not in _LINE_STARTS else tokenize.tok_name[kind])
        before = kind
    return " ".join(kept)


@functools.cache
def kernel_hash() -> str:
    """16 hex digits that change when, and only when, the code of a kernel changes."""
    folder = Path(__file__).parent
    code = "\n".join(_code((folder / name).read_text(encoding="utf-8")) for name in _SOURCES)
    return hashlib.sha256(code.encode()).hexdigest()[:16]
