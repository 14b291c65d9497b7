"""scripts/gpu_matrix.py: its cells on the CPU path, and that a wrong cell fails the run."""

import runpy
from pathlib import Path

import pytest
import torch

import zyfa

matrix = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "gpu_matrix.py"))


def test_every_cell_passes_on_the_cpu(capsys):
    assert matrix["main"](["--device", "cpu", "--head-dims", "72", "--shrink", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = len(matrix["FEATURES"]) * len(matrix["PRECISIONS"])
    assert lines[-1] == f"{cells} of {cells} cells pass on cpu"
    assert sum(line.endswith("pass") for line in lines) == cells


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda out, lse: (out * 1.02, lse), "FAIL"),
        (lambda out, lse: (out, lse + 0.1), "FAIL lse: 0.1 off"),
        (lambda out, lse: (out, lse.clamp_min(-1e4)), "FAIL lse: not finite"),
        (lambda out, lse: (torch.full_like(out, float("nan")), lse), "FAIL"),
    ],
    ids=["output", "lse", "sentinel", "unwritten"],
)
def test_a_wrong_cell_fails_the_run(monkeypatch, capsys, spoil, reason):
    right = zyfa.attention
    monkeypatch.setattr(zyfa, "attention", lambda *args, **same: spoil(*right(*args, **same)))
    arguments = ["--device", "cpu", "--head-dims", "16", "--precisions", "bf16", "--shrink", "8"]
    assert matrix["main"](arguments) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("more queries than keys"))
    assert reason in line


def test_bad_words_name_what_is_accepted(capsys):
    with pytest.raises(SystemExit, match="2"):
        matrix["main"](["--device", "cpu", "--precisions", "fp4"])
    assert "['fp4'] unknown; accepted are bf16, fp16" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", matrix["HEAD_DIMS"])
def test_every_cell_passes_on_a_gpu(head_dim, capsys):
    assert matrix["main"](["--head-dims", str(head_dim)]) == 0, capsys.readouterr().out
