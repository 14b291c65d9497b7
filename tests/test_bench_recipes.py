"""zyfa-bench accuracy over recipes: names, head dims, medians, JSON form, plot."""

import json
import statistics

import pytest
from click.testing import CliRunner

from zyfa.recipes import RECIPES
from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuner import bench_cli, bench_plot
from zyfa.tuner.bench_accuracy import measure, medians, samples_of
from zyfa.tuner.inputs import Shape

SHAPE = Shape(1, 96, 4, 2, 32)


def accuracy(monkeypatch, *args):
    monkeypatch.setattr(bench_cli, "samples_in", lambda folder: [])
    short = ("--device", "cpu", "--seqlen", "96", "--families", "normal,sink")
    return CliRunner().invoke(bench_cli.cli, ["accuracy", *short, *args])


@pytest.fixture(scope="module")
def rows():
    samples = samples_of(["normal", "sink"], [(32, 32), (48, 32)], SHAPE, 0)
    return [row for sample in samples for row in measure(sample, ["tensor", "bf16qk", "fp8:balanced"], True, "cpu")]


def test_a_recipe_without_a_preset_is_run_by_its_name(rows):
    assert [row.recipe for row in rows[:3]] == ["tensor", "bf16qk", "int8-kmean-equalise-hadamard"]
    (sample,) = samples_of(["sink"], [(48, 32)], SHAPE, 0)
    row = rows[-2]
    assert (row.family, row.head_dim, row.head_dim_v, row.recipe) == ("sink", 48, 32, "bf16qk")
    ref = attention_ref(*sample[1:], causal=True)
    assert row.error == pytest.approx(relative_error(emulate(*sample[1:], "bf16qk", causal=True), ref))
    assert row.cut == pytest.approx(1 - row.error / rows[-3].error) and row.cut > 0.5


def test_medians_are_over_head_dims(rows):
    found = {(recipe, family): (n, error, cut) for recipe, family, n, error, cut in medians(rows)}
    assert len(found) == 6
    mine = [row for row in rows if (row.recipe, row.family) == ("bf16qk", "sink")]
    assert found["bf16qk", "sink"] == (
        2,
        statistics.median(r.error for r in mine),
        statistics.median(r.cut for r in mine),
    )


def test_all_recipes_and_head_dims_are_written(monkeypatch, tmp_path):
    path = tmp_path / "accuracy.json"
    result = accuracy(monkeypatch, "--recipes", "all", "--head-dims", "16,48/32", "--json", str(path))
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert {"gpu", "torch", "triton", "date", "method"} < set(written)
    assert {row["recipe"] for row in written["rows"]} == {"none", *RECIPES}
    assert {(row["head_dim"], row["head_dim_v"]) for row in written["rows"]} == {(16, 16), (48, 32)}
    assert {"name", "family", "error", "cosine", "max_error", "cut"} < set(written["rows"][0])
    assert "48/32" in result.output and "Medians" in result.output


def test_the_plot_has_a_line_for_each_recipe_and_a_panel_for_each_family(rows):
    pytest.importorskip("matplotlib")
    axes = [axis for axis in bench_plot.accuracy_figure(rows).axes if axis.lines]
    assert [axis.get_title() for axis in axes] == ["normal", "sink"]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes[1].lines}
    assert lines["tensor"] == [row.error for row in rows if (row.recipe, row.family) == ("tensor", "sink")]
    assert set(lines) == {"tensor", "bf16qk", "int8-kmean-equalise-hadamard"}


def test_the_plot_is_a_file(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "errors.png"
    assert accuracy(monkeypatch, "--head-dims", "16", "--plot", str(path)).exit_code == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bench_cli.importlib.util, "find_spec", lambda name: None)
    result = accuracy(monkeypatch, "--plot", "x.png")
    assert result.exit_code == 2 and "pip install zyfa[report]" in result.stderr
