"""zyfa-tune as a user meets it: help, bad input, exit codes, signals, output."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_landscape import DEFAULT, FakeFarm, make_tools

from zyfa.config import AttentionConfig
from zyfa.recipes import RECIPES
from zyfa.tuner import cli, session
from zyfa.tuner.cli import parse_max_error, parse_recipes
from zyfa.tuner.space import FP8_RECIPES, MAX_RECIPE_ERROR
from zyfa.tuning_db.store import Store

GRID = ("--target", "mi355x", "--seq-lens", "512..1k", "--dtypes", "bf16", "--effort", "quick")

HELP = """
import sys
from zyfa.tuner.__main__ import main
sys.argv = ["zyfa-tune", "-h"]
try:
    main()
except SystemExit:
    print(sorted({"torch", "triton", "optuna", "sqlite_utils", "rich"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Runs zyfa-tune in this process on the fake landscape; the database is tmp_path/db.sqlite."""

    def call(*args, **tools):
        farm = FakeFarm()
        monkeypatch.setattr(session, "_tools", lambda device, method, lazy, axis: make_tools(farm, **tools))
        result = CliRunner().invoke(cli.main, [*map(str, args), "--db", str(tmp_path / "db.sqlite")])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def test_help_is_complete_and_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for option in cli.main.params:
        assert any(name in done.stdout for name in option.opts)
    assert all(option.help for option in cli.main.params)
    assert "zyfa-tune --seq-lens 512..32k" in done.stdout and "Exit codes" in done.stdout


@pytest.mark.parametrize(
    "args, said",
    [
        (("--seq-lens", "32k..512"), "'32k..512'"),
        (("--seq-lens", "0"), "'0'"),
        (("--seq-lens", "abc"), "'abc'"),
        (("--seq-lens", "-5..3"), "'-5..3'"),
        (("--dtypes", "int4"), "bf16, fp16, fp8"),
        (("--head-dims", "100"), "multiples of 8"),
        (("--heads", "5:3"), "'5:3'"),
        (("--batch", "0"), "batch size"),
        (("--target", "b200"), "mi355x"),
        (("--budget", "soon"), "10m"),
        (("--gpus", "a"), "'a'"),
        (("--engine", "ray"), "local"),
        (("--workload", "absent.jsonl"), "absent.jsonl"),
        (("--target", "mi355x", "--method", "measure"), "--method measure needs"),
    ],
)
def test_wrong_usage_exits_2_and_names_what_is_accepted(tune, args, said):
    result = tune(*args)
    assert result.exit_code == 2
    assert said in result.output
    if args[0] == "--seq-lens":
        assert "512..32k" in result.output and "512,1000,4k" in result.output


def test_bad_workload_exits_2_with_its_line(tune, tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text("{}\n")
    result = tune("--workload", path)
    assert result.exit_code == 2 and "calls.jsonl:1" in result.output


def test_dry_run_prints_the_plan_and_touches_nothing(tune, tmp_path):
    result = tune("--dry-run", "--json")
    assert result.exit_code == 0 and len(json.loads(result.output)["cells"]) == 28
    assert "28 cells" in tune("--dry-run").output
    assert not (tmp_path / "db.sqlite").exists()


def test_a_run_and_a_second_one(tune, tmp_path):
    first = tune(*GRID, "--out", tmp_path / "out")
    assert first.exit_code == 0
    assert "4 of 4 cells" in first.output and str(tmp_path / "db.sqlite") in first.output
    assert first.output.count("predicted B") == 4
    assert "Nothing has been timed on gfx950" in first.output  # what a prediction is worth is said with it
    with sqlite3.connect(tmp_path / "out" / "amd-gfx950-mi355x-cu256.sqlite") as conn:
        assert conn.execute("SELECT count(*) FROM best WHERE trust = 'predicted'").fetchone() == (4,)
    second = tune(*GRID)
    assert second.exit_code == 0 and "nothing to do: all 4 cells are tuned" in second.output
    fresh = tune(*GRID, "--fresh")
    assert "nothing to do" not in fresh.output and "48 trials" in fresh.output


def test_predictions_of_another_model_are_not_reused(tune, monkeypatch):
    tune(*GRID)
    monkeypatch.setattr(session.model, "MODEL_VERSION", "another")
    assert "nothing to do" not in tune(*GRID).output
    assert "nothing to do" in tune(*GRID).output


def test_json_is_all_that_stdout_holds(tune):
    result = tune(*GRID, "--json")
    report = json.loads(result.stdout)
    assert (report["sku"], report["method"]) == ("amd/gfx950/mi355x/cu256", "predict")
    assert len(report["cells"]) == 4
    for cell in report["cells"]:
        assert cell["trust"] == "predicted" and cell["state"] == "done"
        assert cell["speedup"] == pytest.approx(cell["default_ms"] / cell["ms"]) and cell["speedup"] >= 1
        assert AttentionConfig.from_dict(cell["config"])


def test_holes_exit_3_and_are_named_with_reasons(tune):
    gate = lambda facts, key, config: "lds: <too> much" if key.causal else None  # noqa: E731
    result = tune(*GRID, gate=gate)
    assert result.exit_code == 3
    assert re.search(r"zyfa-tune: bf16 causal d128 h32:8 s512: no valid config \(.*gated \d+.*: lds", result.output)
    assert "2 of 4 cells" in result.output


def test_the_page_stands_alone_and_is_escaped(tune, tmp_path):
    def gate(facts, key, config):
        return "<script>: x" if key.causal else None

    tune(*GRID, "--report", tmp_path / "report.html", gate=gate)
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "http" not in page and page.count("<tr>") == 1 + 4


def test_another_gpus_database_is_refused(tune):
    tune(*GRID)
    result = tune("--target", "mi300x", *GRID[2:])
    assert result.exit_code == 1 and "amd/gfx950/mi355x/cu256" in result.output


def test_compile_only_says_that_nothing_is_stored(tune, tmp_path):
    result = tune(*GRID, "--method", "compile", seeds=(DEFAULT,))
    assert result.exit_code == 0 and "stores nothing" in result.output
    assert not (tmp_path / "db.sqlite").exists()


def trials_in(path: Path) -> int:
    if not path.exists():
        return 0
    with sqlite3.connect(path, timeout=5) as conn:
        try:
            return conn.execute("SELECT count(*) FROM trials").fetchone()[0]
        except sqlite3.OperationalError:  # not created yet
            return 0


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_keeps_its_trials_and_goes_on(tune, tmp_path, signum, code):
    path = tmp_path / "db.sqlite"
    args = ["--target", "mi355x", "--seq-lens", "512", "--dtypes", "bf16"]
    script = Path(__file__).with_name("fake_tune.py")
    process = subprocess.Popen(
        [sys.executable, str(script), *args, "--db", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ,
    )  # fmt: skip
    until = time.monotonic() + 120
    while trials_in(path) < 5 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signum)
    time.sleep(0.02)
    process.send_signal(signum)  # as `timeout` does: still one request
    output, _ = process.communicate(timeout=60)
    kept = trials_in(path)
    assert process.returncode == code, output
    assert kept >= 5 and f"{kept} trials are kept in {path}" in output.replace("\n", "")
    assert "Traceback" not in output
    result = tune(*args)
    assert result.exit_code == 0
    assert "nothing to do" in tune(*args).output
    with Store(path) as store:
        trials = store.trials()
    assert len({(trial.key, trial.config) for trial in trials}) == len(trials) > kept


@pytest.mark.parametrize(
    "text, names", [("safe", FP8_RECIPES), ("tensor, head,tensor", ("tensor", "head")), ("all", tuple(RECIPES))]
)
def test_recipes_are_parsed(text, names):
    assert parse_recipes(text) == names


def test_an_unknown_recipe_names_the_accepted_ones():
    with pytest.raises(ValueError, match=r"'fp4' is no recipe.*bf16qk"):
        parse_recipes("fp4")


@pytest.mark.parametrize(
    "text, bounds",
    [("2.0", (2.0, MAX_RECIPE_ERROR)), ("5%", (2.0, 0.05)), ("0.05", (2.0, 0.05)), ("1.5, 10%", (1.5, 0.1))],
)
def test_error_bounds_are_parsed(text, bounds):
    assert parse_max_error(text) == pytest.approx(bounds)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "200", "1,2", "5%,6%", "x", "nan"])
def test_wrong_error_bounds_name_the_accepted_forms(text):
    with pytest.raises(ValueError, match=r"Accepted: a ratio from 1 to 100, like 2\.0"):
        parse_max_error(text)


@pytest.mark.parametrize("args", [("--exhaustive",), ("--exhaustive", "300"), ("--audit", "20"), ("--recheck",)])
def test_what_measures_needs_a_gpu(tune, args):
    result = tune(*GRID, *args)
    assert result.exit_code == 2 and f"{args[0]} measures, and needs a GPU" in result.output


def test_modes_exclude_each_other(tune):
    assert tune("--recheck", "--audit", "3").exit_code == 2


@pytest.mark.parametrize("sampler", [name for name in cli.SAMPLERS if name != "gp"])
def test_every_sampler_tunes(tune, sampler):
    assert "4 of 4 cells" in tune(*GRID, "--sampler", sampler).output


def test_the_samplers_are_those_that_there_are():
    from zyfa.tuner.samplers import DEFAULT as SAMPLER
    from zyfa.tuner.samplers import SAMPLERS

    assert tuple(SAMPLERS) == cli.SAMPLERS and cli.SAMPLERS[0] == SAMPLER
