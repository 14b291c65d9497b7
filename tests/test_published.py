"""The tables of others: complete, plausible, and turned into shapes the way the model counts them."""

import json
from pathlib import Path

import pytest
from test_ranking import script

from zyfa.config import AttentionKey
from zyfa.tuner.model import MODEL_VERSION

published = script("validate_published")
ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_are_complete_and_below_the_peak():
    groups = [(group["sku"], group["kernel"], len(points)) for group, points in published.published()]
    assert groups[:4] == [
        ("mi355x", "AITER assembly", 94), ("mi300x", "AITER assembly", 94), ("mi355x", "HipKittens", 40),
        ("mi355x", "AITER, in the run of HipKittens", 40),
    ]  # fmt: skip
    for group, points in published.published():
        peak = {"mi355x": 2516, "mi300x": 1307}[group["sku"]]
        assert group["source"] and all(0 < p.tflops < 0.6 * peak for p in points)
        assert len({p.key for p in points}) == len(points)


def test_shapes_are_work_over_makespan():
    key = AttentionKey("bf16", 128, 128, 32, 8, 1, 1024, 1024, False)
    work = 4 * 32 * 1024 * 1024 * 128
    # Four query blocks of 256 rows a head are 128 programs of 16 trips: one round of 256 units, or four of 32.
    assert published.relative_tflops(key, 256, 0) == work / 16
    assert published.relative_tflops(key, 32, 4) == work / (4 * 20)


def test_a_planted_kernel_is_fitted():
    points = [p._replace(tflops=7 * published.relative_tflops(p.key, 256, 5)) for p in published.published()[0][1][:20]]
    factor, overhead = published.fitted(points, 256)
    assert (factor, overhead) == (pytest.approx(7), 5)
    assert published.judged(points, 256, factor, overhead)["error"] == 0


def test_the_stored_figures_are_of_this_model():
    found = json.loads((ROOT / "benchmarks/mi355x/model.json").read_text())
    assert found["model_version"] == MODEL_VERSION
    assert (
        found["shapes"]["AITER full -> causal"]["error"]
        < 0.05
        < found["shapes"]["AITER full -> causal"]["constant_error"]
    )
