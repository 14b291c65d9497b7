"""zyfa-bench front: points, what dominates what, and the command."""

import dataclasses
import json

import pytest
from click.testing import CliRunner
from databases import CONFIG, H200, TOOLS, a_certificate, a_key, add_ok, make_db

from zyfa.tuner import bench_cli
from zyfa.tuner.bench_front import front_points
from zyfa.tuner.bench_plot import front_figure
from zyfa.tuning_db.certificates import add_certificate
from zyfa.tuning_db.store import Store

KEY = a_key(4096, dtype="fp8")
RECIPES = {"bf16qk": (2.0, 0.03), "tensor": (1.0, 0.6), "block": (1.5, 0.7)}  # ms, worst error


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "db.sqlite"
    with Store(path, H200) as store:
        add_ok(store, a_key(4096), ms=3.0)
        for recipe, (ms, worst) in RECIPES.items():
            trial = add_ok(store, KEY, dataclasses.replace(CONFIG, recipe=recipe), ms=ms, win=recipe == "bf16qk")
            store.set_front(trial, confidence="A", trials=1)
            add_certificate(store, TOOLS, "measured", a_certificate(recipe, KEY, {"x": (worst,)}))
    return path


def test_points_have_time_error_and_speedup(path):
    found = {p.recipe: (p.us, p.error, p.speedup, p.dominated) for p in front_points(path)}
    assert found == {
        "tensor": (1000.0, 0.6, 3.0, False),
        "block": (1500.0, 0.7, 2.0, True),  # slower and worse than tensor
        "bf16qk": (2000.0, 0.03, 1.5, False),
        "none": (3000.0, 0.002, 1.0, False),
    }


def test_the_command_prints_and_writes(path, tmp_path):
    out = tmp_path / "front.json"
    result = CliRunner().invoke(bench_cli.cli, ["front", str(path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line[0] for line in lines] == ["*", " ", "*", "*"] and "1.50x of bf16" in lines[2]
    rows = json.loads(out.read_text())["rows"]
    assert (rows[0]["recipe"], rows[0]["us"], rows[0]["cell"]["seqlen_q"]) == ("tensor", 1000.0, 4096)


def test_the_plot_joins_the_front(path):
    pytest.importorskip("matplotlib")
    (axis,) = front_figure(front_points(path)).axes
    line, dots = axis.lines
    assert list(line.get_xdata()) == [1000.0, 2000.0, 3000.0] and len(dots.get_xdata()) == 4


def test_a_database_without_fronts_is_named(tmp_path):
    path = make_db(tmp_path / "db.sqlite", (a_key(), {}))
    result = CliRunner().invoke(bench_cli.cli, ["front", str(path)])
    assert result.exit_code == 2 and "zyfa-tune --pareto" in result.stderr
    (tmp_path / "x.sqlite").write_text("x")
    result = CliRunner().invoke(bench_cli.cli, ["front", str(tmp_path / "x.sqlite")])
    assert result.exit_code == 2 and "not a SQLite database" in result.stderr
