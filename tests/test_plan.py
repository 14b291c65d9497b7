"""Cells and weights of a grid and of a workload."""

import json

import pytest

from zyfa.config import AttentionKey, cell_of
from zyfa.tuner.plan import flops, from_workload, grid, key_of

CALL = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "nheads": 28, "nheads_k": 4, "head_dim": 128, "causal": True}


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_default_grid_has_28_cells():
    lengths = [512 << n for n in range(7)]
    cells = grid(lengths, ("bf16", "fp8"), (128,), ((32, 8),), (1,), (True, False))
    assert len({c.cell for c in cells}) == len(cells) == 28
    assert {c.weight for c in cells} == {1.0}
    assert [c.key.seqlen_q for c in cells[:7]] == lengths
    assert cells[0].key == AttentionKey("bf16", 128, 128, 32, 8, 1, 512, 512, True)


def test_lengths_of_one_octave_share_a_cell():
    cells = grid([1000, 1024, 513], ("bf16",), (64,), ((16, 16),), (1,), (True,))
    assert [c.key.seqlen_k for c in cells] == [1024]


@pytest.mark.parametrize(
    "nheads, nheads_k, batch", [(32, 8, 1), (28, 4, 1), (5, 1, 1), (3, 1, 3), (16, 16, 7), (1, 1, 1)]
)
def test_the_shape_of_a_cell_lies_in_it(nheads, nheads_k, batch):
    cell = cell_of(AttentionKey("fp8", 64, 64, nheads, nheads_k, batch, 777, 1000, False))
    key = key_of(cell)
    assert cell_of(key) == cell
    assert (key.seqlen_q, key.seqlen_k) == (1024, 1024)


def test_flops():
    full = AttentionKey("bf16", 128, 64, 4, 2, 3, 5, 7, False)
    assert flops(full) == 2 * (128 + 64) * 3 * 4 * 35
    assert flops(full._replace(causal=True)) == 2 * (128 + 64) * 3 * 4 * (3 + 4 + 5 + 6 + 7)
    assert flops(full._replace(causal=True, seqlen_k=3)) == 2 * (128 + 64) * 3 * 4 * (1 + 2 + 3)


def test_workload_weights_are_shares_of_the_work(tmp_path):
    long = CALL | {"seqlen_q": 2000, "seqlen_k": 2000}
    path = write(tmp_path / "calls.jsonl", CALL | {"count": 1.5}, "", long, CALL)
    cells = from_workload(path, ("bf16",))
    assert [c.cell.seqlen_q for c in cells] == [2048, 1024]
    work = [flops(AttentionKey("bf16", 128, 128, 28, 4, 2, n, n, True)) for n in (2000, 1000)]
    assert cells[1].weight == pytest.approx(2.5 * work[1] / (work[0] + 2.5 * work[1]))
    assert sum(c.weight for c in cells) == pytest.approx(1)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "2: "), ("[1]", "not an object"), ({"batch": 1}, "lacks"), (CALL | {"nheads": 30}, "no multiple"),
        (CALL | {"seqlen_q": 0}, "seqlen_q=0"), (CALL | {"head_dim": 100}, "head_dim=100"),
        (CALL | {"causal": 1}, "causal=1"), (CALL | {"half": 1}, "half=1"),
        (CALL | {"count": -1}, "count=-1"), (CALL | {"batch": True}, "batch=True"),
        (CALL | {"count": float("nan")}, "count=nan"),
    ],
)  # fmt: skip
def test_bad_workload_names_file_and_line(tmp_path, line, reason):
    path = write(tmp_path / "calls.jsonl", CALL, line)
    with pytest.raises(ValueError, match=r"calls\.jsonl:2: ") as caught:
        from_workload(path, ("bf16",))
    assert reason in str(caught.value)


def test_a_line_may_ask_for_a_half_octave(tmp_path):
    asked = ((700, True), (700, False), (900, True))
    path = write(tmp_path / "c.jsonl", *(CALL | {"seqlen_q": n, "seqlen_k": n, "half": half} for n, half in asked))
    assert {cell.cell.seqlen_q: cell.key.seqlen_q for cell in from_workload(path, ("bf16",))} == {768: 768, 1024: 1024}


def test_empty_workload(tmp_path):
    with pytest.raises(ValueError, match="holds no calls"):
        from_workload(write(tmp_path / "calls.jsonl", ""), ("bf16",))
