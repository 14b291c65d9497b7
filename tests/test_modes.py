"""zyfa-tune's other modes from the command line to files and exit codes, on a pretended GPU."""

import json
import time

import pytest
from click.testing import CliRunner
from fake_landscape import BEST, DEFAULT, FakeFarm, make_tools
from test_audit import NEAR, Lengths
from test_coordinator import FakePool
from test_settle import OTHER, Tied

from zyfa.device import device_of_sku
from zyfa.tuner import cli, session
from zyfa.tuner.axis import RecipeAxis
from zyfa.tuner.landscape import read_all
from zyfa.tuning_db.reader import read

GRID = ("--seq-lens", "512..1k", "--dtypes", "bf16", "--causal", "yes")


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Runs zyfa-tune in this process as if there were a GPU; the database is tmp_path/db.sqlite."""

    def call(*args, pool=FakePool, seeds=(DEFAULT, BEST, NEAR)):
        made = pool(gpus=(0,))
        made.close = lambda: None
        monkeypatch.setattr(session, "resolve", lambda options: (device_of_sku("h200"), "measure", (0,)))
        monkeypatch.setattr(session, "WorkerPool", lambda gpus, arch: made)
        monkeypatch.setattr(session, "_axis", lambda *given: RecipeAxis((), {}, 1.0, False))
        monkeypatch.setattr(session, "_tools", lambda *given: make_tools(FakeFarm(), seeds=seeds))
        result = CliRunner().invoke(cli.main, [*GRID, *map(str, args), "--db", str(tmp_path / "db.sqlite")])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def test_exhaustive_writes_landscapes(tune, tmp_path):
    result = tune("--exhaustive", "30", "--out", tmp_path / "land")
    assert result.exit_code == 0 and "60 of 60 configs of 2 cells are recorded" in result.output
    cells = read_all(tmp_path / "land")
    assert [cell.key.seqlen_q for cell in cells] == [1024, 512] and all(len(cell.entries) == 30 for cell in cells)


def test_audit_prints_the_worst_and_the_median(tune, tmp_path):
    assert tune("--effort", "quick", "--no-split", seeds=(DEFAULT,)).exit_code == 0
    result = tune("--audit", "8", "--json", "--out", tmp_path / "out")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and len(report["rows"]) == report["shapes"] == 8
    assert report["worst"] >= report["median"] >= 0 and report["sku"] == "nvidia/sm90/h200/sm132"
    assert f"regret worst {report['worst']:.2f} %, median {report['median']:.2f} % over 8 shapes" in result.stderr
    lossy = len(report["cells_to_tune"])
    assert f"0 failed, {lossy} cells to tune" in result.stderr
    lines = [line for path in (tmp_path / "out").glob("audit-bf16.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == lossy


def test_a_search_splits_the_cells_that_lie(tune, tmp_path):
    result = tune("--effort", "quick", pool=Lengths)
    assert result.exit_code == 0 and result.output.count("lost in the lower half") == 2
    lengths = {row.seqlen_q: row.config for row in read(tmp_path / "db.sqlite")}
    assert lengths == {512: BEST, 384: NEAR, 1024: BEST, 768: NEAR}
    result = tune("--effort", "quick", "--fresh", "--no-split", pool=Lengths)
    assert "lower half" not in result.output


def test_the_halves_have_their_share_of_a_budget(tune, monkeypatch):
    """From 3/20 before the end of 100 s, less two for the last comparisons of two cells."""
    ends, searched, begun = [], session._searched, time.monotonic()

    def noted(run, *rest):
        ends.append(run.setup.deadline - begun)
        return searched(run, *rest)

    monkeypatch.setattr(session, "_searched", noted)
    tune("--effort", "quick", "--budget", "100s", pool=Lengths)
    assert ends == [pytest.approx(0.85 * 98, abs=2), pytest.approx(98, abs=2)]


def test_a_half_without_time_is_no_failure(tune, monkeypatch, tmp_path):
    split = session.split_cells

    def late(run, cells):
        halves = split(run, cells)
        object.__setattr__(run.setup, "deadline", time.monotonic())
        return halves

    monkeypatch.setattr(session, "split_cells", late)
    result = tune("--effort", "quick", pool=Lengths)
    assert result.exit_code == 0 and result.output.count("no time was left; the whole cell's winner serves it") == 2
    assert "2 of 2 cells" in result.output and {row.seqlen_q for row in read(tmp_path / "db.sqlite")} == {512, 1024}


def test_what_an_audit_leaves_is_tuned_as_a_workload(tune, tmp_path):
    """Both cells are tuned already: it is their lower halves that lose, and no search of the whole finds them."""
    tune("--effort", "quick", "--no-split", pool=Lengths)
    tune("--audit", "12", "--out", tmp_path / "out", pool=Lengths)
    result = tune("--effort", "quick", "--no-split", "--workload", tmp_path / "out" / "audit-bf16.jsonl", pool=Lengths)
    lengths = {row.seqlen_q: row.config for row in read(tmp_path / "db.sqlite") if row.seqlen_q == row.seqlen_k}
    assert result.exit_code == 0 and "nothing to do" not in result.output
    assert set(lengths) == {384, 512, 768, 1024} and lengths[512] == lengths[1024] == BEST


def test_a_search_settles_ties_at_the_other_lengths(tune, tmp_path):
    """Until a run without --split is told to keep the winners of the cells' ends."""
    seeds = (BEST, OTHER)
    result = tune("--effort", "quick", "--no-split", pool=Tied, seeds=seeds)
    assert {row.config for row in read(tmp_path / "db.sqlite")} == {BEST} and "serves its" not in result.output
    result = tune("--effort", "quick", "--fresh", pool=Tied, seeds=seeds)
    assert result.output.count("serves its other lengths better") >= 2
    assert {row.config for row in read(tmp_path / "db.sqlite") if row.seqlen_q in (512, 1024)} == {OTHER}


def test_a_recheck_says_what_it_found(tune, monkeypatch):
    tune("--effort", "quick", "--no-split")
    old = session._toolchain
    monkeypatch.setattr(session, "_toolchain", lambda method: old(method)._replace(triton_version="9.9"))
    result = tune("--recheck")
    assert result.exit_code == 0 and result.output.count("the winner stays") == 2


def test_the_json_says_how_busy_each_gpu_was(tune):
    (used,) = json.loads(tune("--effort", "quick", "--no-split", "--json").stdout)["gpus"].values()
    assert used["jobs"] == 3 and used["busy"] == pytest.approx(0.8, abs=0.1)
