"""What is tuned: cells and their weights, from the options' grid or from a file of real calls."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from zyfa.config import AttentionKey, Cell, cell_of, octave_of

from .lengths import MAX_LENGTH

_CALL_FIELDS = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "head_dim", "causal")
_LIMITS = {"batch": 1 << 16, "seqlen_q": MAX_LENGTH, "seqlen_k": MAX_LENGTH, "nheads": 1 << 14, "nheads_k": 1 << 14}


class PlannedCell(NamedTuple):
    """A cell, the shape that stands for it, and its share of the work that the plan is for."""

    cell: Cell
    key: AttentionKey
    weight: float


def key_of(cell: Cell) -> AttentionKey:
    """The shape that a cell is tuned at: its upper end, one batch entry with as many heads as the ratio allows.

    A function of the cell alone, so that trials of different runs and plans can be compared and resumed.
    """
    nheads_k = max(cell.batch_heads // cell.nheads_ratio, 1)
    return AttentionKey(
        cell.dtype, cell.head_dim, cell.head_dim_v, nheads_k * cell.nheads_ratio, nheads_k, 1,
        cell.seqlen_q, cell.seqlen_k, cell.causal, cell.window_class,
    )  # fmt: skip


def flops(key: AttentionKey) -> float:
    """Floating-point operations of a call: 2 (head_dim + head_dim_v) for each unmasked (query, key) pair and head."""
    pairs = key.seqlen_q * key.seqlen_k
    if key.causal:  # bottom-right aligned: the last m queries see seqlen_k - m + 1 ... seqlen_k keys
        m = min(key.seqlen_q, key.seqlen_k)
        pairs = m * (2 * key.seqlen_k - m + 1) // 2
    return 2.0 * (key.head_dim + key.head_dim_v) * key.batch * key.nheads * pairs


def grid(
    seq_lens: Sequence[int], dtypes: Sequence[str], head_dims: Sequence[int], heads: Sequence[tuple[int, int]],
    batches: Sequence[int], causal: Sequence[bool],
) -> list[PlannedCell]:  # fmt: skip
    """The cells of every combination, each once and of equal weight; lengths that share an octave share a cell."""
    keys = (
        AttentionKey(dtype, head_dim, head_dim, nheads, nheads_k, batch, seqlen, seqlen, mask)
        for head_dim in head_dims
        for nheads, nheads_k in heads
        for batch in batches
        for dtype in dtypes
        for mask in causal
        for seqlen in seq_lens
    )
    return [PlannedCell(cell, key_of(cell), 1.0) for cell in dict.fromkeys(octave_of(cell_of(key)) for key in keys)]


def from_workload(path: Path, dtypes: Sequence[str]) -> list[PlannedCell]:
    """The cells of the calls in a file of JSON lines, heaviest first; weights are shares of the operations, sum 1.

    "half": true in a line asks for the half octave of its lengths alone, as an audit does.
    Raises ValueError with file and line for a line that is no call, and for a file without any.
    """
    work: dict[Cell, float] = {}
    for key, count, half in _calls(path, path.read_text(encoding="utf-8").splitlines(), dtypes):
        cell = cell_of(key) if half else octave_of(cell_of(key))
        work[cell] = work.get(cell, 0.0) + count * flops(key)
    total = sum(work.values())
    if not total:
        raise ValueError(f"{path}: holds no calls; a line is like {_EXAMPLE}")
    heaviest = sorted(work, key=work.__getitem__, reverse=True)
    return [PlannedCell(cell, key_of(cell), work[cell] / total) for cell in heaviest]


_EXAMPLE = json.dumps(dict(zip(_CALL_FIELDS, (1, 2048, 2048, 32, 8, 128, True), strict=True)) | {"count": 10})


def _calls(path: Path, lines: Iterable[str], dtypes: Sequence[str]):
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            call = json.loads(line)
            count = _checked(call)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}; a line is like {_EXAMPLE}") from error
        for dtype in dtypes:
            dim = call["head_dim"]
            shape = (call["nheads"], call["nheads_k"], call["batch"], call["seqlen_q"], call["seqlen_k"])
            yield (
                AttentionKey(dtype, dim, call.get("head_dim_v", dim), *shape, call["causal"]),
                count,
                call.get("half", False),
            )


def _checked(call: dict) -> float:
    """The count of a call; raises ValueError on a missing field, a wrong type or an impossible size."""
    if not isinstance(call, dict):
        raise ValueError("not an object")
    if missing := [name for name in _CALL_FIELDS if name not in call]:
        raise ValueError(f"lacks {missing}")
    for name, top in _LIMITS.items():
        if type(call[name]) is not int or not 1 <= call[name] <= top:
            raise ValueError(f"{name}={call[name]!r} is not a whole number from 1 to {top}")
    for name in ("head_dim", "head_dim_v"):
        dim = call.get(name, 128)
        if type(dim) is not int or not 16 <= dim <= 256 or dim % 8:
            raise ValueError(f"{name}={dim!r} is not a multiple of 8 from 16 to 256")
    if call["nheads"] % call["nheads_k"]:
        raise ValueError(f"nheads={call['nheads']} is no multiple of nheads_k={call['nheads_k']}")
    for name in ("causal", "half"):
        if type(call.get(name, False)) is not bool:
            raise ValueError(f"{name}={call[name]!r} is not true or false")
    count = call.get("count", 1)
    if type(count) not in (int, float) or not 0 < count < 1e15:
        raise ValueError(f"count={count!r} is not a positive number")
    return float(count)
