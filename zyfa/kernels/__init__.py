"""One family of prefill kernels and its quantisers. Knows no database and no tuner."""

import functools
import hashlib
import io
import tokenize
from pathlib import Path

# What is compiled; the host side does not change a kernel's time. attn_gluon_amd.py and gluon_lds.py belong here once a
# search may choose them: no stored row is theirs, and a new hash makes every shipped row stale.
_SOURCES = (
    "attn_fwd.py", "attn_gluon.py", "gluon_ring.py", "gluon_softmax.py", "merge.py", "quantize.py", "rows.py",
    "scales.py",
)  # fmt: skip
_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}
_LINE_STARTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def _code(text: str) -> str:
    """Python source without comments, docstrings and layout, spelled alike by every Python version."""
    kept, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _IGNORED:
            continue
        if not (token.type == tokenize.STRING and before in _LINE_STARTS):
            kept.append(token.string if token.type not in _LINE_STARTS else tokenize.tok_name[token.type])
        before = token.type
    return " ".join(kept)


@functools.cache
def kernel_hash() -> str:
    """16 hex digits that change when, and only when, the code of a kernel changes."""
    folder = Path(__file__).parent
    code = "\n".join(_code((folder / name).read_text(encoding="utf-8")) for name in _SOURCES)
    return hashlib.sha256(code.encode()).hexdigest()[:16]
