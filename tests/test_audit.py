"""Audits, splits and rechecks on the fake landscape: a row that loses is found, a cell that lies is split."""

import json
import threading
from dataclasses import replace

import pytest
from databases import add_ok
from fake_landscape import BEST, DEFAULT, FakeFarm, Silent, make_tools, time_of
from test_coordinator import EFFORT, MEASURE, FakePool

from zyfa.config import AttentionConfig, cell_of, octave_of
from zyfa.device import device_of_sku
from zyfa.tuner.audit import (
    AHEAD,
    COLUMNS,
    Audit,
    Finding,
    Plan,
    broken_cells,
    describe,
    irregular,
    rivals,
    summary,
    to_json,
    workload_line,
)
from zyfa.tuner.coordinator import Coordinator
from zyfa.tuner.plan import from_workload, grid
from zyfa.tuner.report import moved, row_of
from zyfa.tuner.split import half_of, probes, promise_broken
from zyfa.tuner.worker import Result
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

CELLS = grid([512, 1024, 2048], ("bf16",), (128,), ((32, 8),), (1,), (True, False))
NEAR = AttentionConfig(128, 32, 8, 2)  # 10 % slower than BEST
TWINS = (NEAR, replace(NEAR, num_stages=4))  # equally fast


class Lengths(FakePool):
    """At lengths below 3/4 of an octave NEAR is the faster one, by a fifth."""

    def _measured(self, job, config):
        result = super()._measured(job, config)
        half = cell_of(job.key) != octave_of(cell_of(job.key))
        ms = result.ms * (0.8 if half and config == NEAR else 1.0)
        return result._replace(ms=ms, ms_lo=ms, ms_hi=ms, samples=(ms,) * 7)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "db.sqlite", device_of_sku("h200")) as store:
        yield store


def tune(store, cells=CELLS, setup=MEASURE, pool=None, seeds=(DEFAULT, BEST, NEAR), hints=None):
    display = Silent()
    tools = make_tools(FakeFarm(), seeds=seeds)
    return Coordinator(cells, setup, tools, store, display, pool=pool or FakePool(), hints=hints).run(), display


def audited(store, keys, config, match="cell", pool=None, stopped=lambda: False):
    said = []
    audit = Audit(store.trials(), MEASURE, make_tools(FakeFarm()), pool or FakePool())
    return audit.run([Plan(key, config, match) for key in keys], stopped, said.append), said


def test_irregular_shapes_lie_in_every_class_and_beside_the_cells():
    keys = irregular(CELLS, 200, 0)
    assert len(keys) == 200 and keys == irregular(CELLS, 200, 0) != irregular(CELLS, 200, 1)
    assert {k.causal for k in keys} == {True, False} and {k.batch for k in keys} == {1, 2, 3, 4}
    assert all(256 < k.seqlen_q <= 2048 and k.seqlen_k >= k.seqlen_q for k in keys)
    inside = [k for k in keys if octave_of(cell_of(k)) in {cell.cell for cell in CELLS}]
    assert 140 <= len(inside) <= 170 and {k.nheads for k in inside} == {32, 24}
    assert 10 < sum(k.seqlen_k > k.seqlen_q for k in keys) < 40
    assert sum(k.seqlen_q & (k.seqlen_q - 1) != 0 for k in keys) > 180


def test_regret_is_what_a_better_known_config_gains(store):
    tune(store)
    keys = irregular(CELLS, 6, 0)
    assert BEST in rivals(keys[0], store.trials())
    found, said = audited(store, keys, DEFAULT, "nearest measured")
    loss = 100 * (time_of(keys[0], DEFAULT) / time_of(keys[0], BEST) - 1)
    assert all(each.best == BEST and each.regret == pytest.approx(loss) for each in found)
    assert len(said) == 6 and f"regret {loss:.2f} %" in said[0]
    figures = summary(found)
    assert figures["worst"] == figures["median"] == pytest.approx(loss) and figures["failed"] == 0
    assert figures["by_match"]["nearest measured"]["shapes"] == 6
    found, _ = audited(store, keys, BEST, "exact measured")
    assert summary(found)["worst"] == 0 and "best" not in describe(found[0])


def test_a_config_that_is_wrong_at_an_irregular_shape_is_a_failure_and_no_regret(store):
    tune(store)
    pool = FakePool(finals={BEST: Result("wrong", reason="error")})
    found, _ = audited(store, irregular(CELLS, 4, 0), BEST, "exact measured", pool)
    assert summary(found)["failed"] == 4 and "wrong" in describe(found[0])


class Together(FakePool):
    """Answers only once both GPUs have a shape."""

    both = threading.Barrier(2)

    def _run(self, job):
        self.both.wait(60)
        return super()._run(job)


def test_shapes_are_timed_on_all_gpus_at_once_and_reported_in_order(store):
    keys = irregular(CELLS, 8, 0)
    found, said = audited(store, keys, BEST, pool=Together())
    assert [each.key for each in found] == keys and len(said) == 8


def test_a_stopped_audit_keeps_what_was_handed_out(store):
    keys, handed = irregular(CELLS, 40, 0), []
    found, _ = audited(store, keys, BEST, stopped=lambda: handed.append(1) or len(handed) > 2 * AHEAD + 3)
    assert [each.key for each in found] == keys[: 2 * AHEAD + 3]


def test_a_report_of_200_shapes_is_short_and_names_the_cells_to_tune(tmp_path):
    keys = irregular(CELLS, 200, 0)
    found = [Finding(key, NEAR, "nearest measured", BEST, 0.123456, 4.0 + n / 100, 3.5) for n, key in enumerate(keys)]
    found[0] = found[0]._replace(regret=0.0, best=NEAR)
    text = to_json({"sku": "x"}, found)
    report = json.loads(text)
    assert len(text) < 30_000 and len(report["rows"]) == 200 and report["configs"] == [NEAR.to_dict(), BEST.to_dict()]
    row = dict(zip(COLUMNS, report["rows"][199], strict=True))
    assert (
        row["ms"] == 0.1235 and row["regret_pct"] == 5.99 == report["worst"] and (row["config"], row["best"]) == (0, 1)
    )
    cells = broken_cells(found)
    assert {octave_of(cell_of(key)) for key in keys[1:]} == set(map(cell_of, cells))
    assert len(cells) == len(report["cells_to_tune"]) and max(cells.values()) == pytest.approx(5.99)
    (tmp_path / "calls.jsonl").write_text("\n".join(map(workload_line, cells)))
    assert {cell.key for cell in from_workload(tmp_path / "calls.jsonl", ("bf16",))} == set(cells)


def test_rivals_are_of_several_tiles(store):
    """The two fastest are of one tile: the third and fourth are the best of the next two."""
    key = CELLS[0].key
    others = [replace(BEST, head_group=n) for n in (1, 4, 8)]
    narrow, short = replace(BEST, BLOCK_N=2 * BEST.BLOCK_N), replace(BEST, BLOCK_M=BEST.BLOCK_M // 2)
    for ms, config in enumerate((BEST, *others, narrow, replace(narrow, num_stages=1), short), start=1):
        add_ok(store, key, config, ms=float(ms))
    assert rivals(key._replace(seqlen_q=400, seqlen_k=400), store.trials()) == [BEST, others[0], narrow, short]


def test_probes_lie_in_the_lower_half_of_the_cell():
    for planned in CELLS:
        keys = probes(planned, 0)
        assert len(keys) == 3 and len({k.nheads for k in keys}) == 2
        for key in keys:
            cell = cell_of(key)
            assert cell == half_of(planned).cell and octave_of(cell) == planned.cell
            assert key.seqlen_q % 2 == 1
        assert probes(half_of(planned), 0) == [], "a half is not split again"
    assert probes(CELLS[0]._replace(key=CELLS[0].key._replace(seqlen_q=1, seqlen_k=1)), 0) == []


def test_a_cell_whose_winner_loses_in_its_lower_half_is_split_and_served_from_there(store, tmp_path, monkeypatch):
    from zyfa import lookup

    pool = Lengths()
    thorough = replace(MEASURE, effort=replace(EFFORT, trials=500, patience=500))  # 30 miss it at times
    runs, _ = tune(store, setup=thorough, pool=pool)
    assert all(run.winner[0] == BEST for run in runs)
    halves = []
    for run in runs:
        found, _ = audited(store, probes(run.planned, 0), BEST, pool=pool)
        assert [each.regret for each in found] == pytest.approx([100 * (1.1 * 0.8) ** -1 - 100] * 3, abs=1e-6)
        assert promise_broken(found)
        halves.append(half_of(run.planned))
    runs, _ = tune(store, halves, thorough, pool, hints={half.cell: (NEAR,) for half in halves})  # as the probes say
    assert all(run.winner[0] == NEAR and run.planned.cell == cell_of(run.key) for run in runs)
    monkeypatch.setenv("ZYFA_TUNING_DB", str(tmp_path / "db.sqlite"))
    lookup.reset()
    key = CELLS[1].key
    for length, config in ((1024, BEST), (769, BEST), (768, NEAR), (513, NEAR)):
        choice = lookup.choose(key._replace(seqlen_q=length, seqlen_k=length), device_of_sku("h200"))
        assert (choice.match, choice.config) == ("exact", config)


def test_a_cell_that_keeps_its_promise_stays_whole(store):
    runs, _ = tune(store)
    found, _ = audited(store, probes(runs[0].planned, 0), BEST)
    assert not promise_broken(found) and not promise_broken([])


NEW = replace(MEASURE, toolchain=Toolchain("hash 2", "3.8.0", "2.15", "590"), recheck=True)


class Regressed(FakePool):
    """A toolchain under which BEST takes twice the time."""

    def _measured(self, job, config):
        result = super()._measured(job, config)
        ms = result.ms * (2.0 if config == BEST else 1.0)
        return result._replace(ms=ms, ms_lo=ms, ms_hi=ms, samples=(ms,) * 7)


def test_a_recheck_times_what_is_stored_and_reports_what_moved(store):
    tune(store)
    runs, display = tune(store, setup=NEW, pool=Regressed())
    assert len(display.trials) <= 5 * len(CELLS)  # the default and four of each cell
    for run in runs:
        assert run.incumbent == BEST and run.winner[0] in TWINS
        assert run.gain[0] == pytest.approx(100 * (2 / 1.1 - 1))
        line = moved(row_of(run, "measured"))
        assert "moved, 81.8 % faster" in line and "num_stages=3 -> " in line
        assert store.winner(run.planned.cell, NEW.toolchain, "measured").trial.config == run.winner[0]
    runs, display = tune(store, setup=NEW, pool=Regressed())
    assert not display.trials and all("already" in moved(row_of(run, "measured")) for run in runs)


def test_a_recheck_that_finds_the_same_says_so(store):
    tune(store)
    runs, _ = tune(store, setup=NEW)
    assert all(run.winner[0] == BEST and "the winner stays" in moved(row_of(run, "measured")) for run in runs)


def test_a_stored_winner_is_replaced_for_a_percent_only(store):
    tune(store, CELLS[:1], replace(MEASURE, effort=replace(EFFORT, trials=3)), seeds=(DEFAULT, NEAR))
    slightly = FakePool({BEST: Result("ok", *([1.1 * 0.993 / 2] * 3), (1.1 * 0.993 / 2,) * 5, 0.002)})
    slightly._finals = slightly._special
    setup = replace(MEASURE, effort=replace(EFFORT, trials=6))
    (run,), _ = tune(store, CELLS[:1], setup, slightly, seeds=(DEFAULT, NEAR, BEST))
    assert BEST in run.study.times and run.incumbent == run.winner[0] == NEAR


def test_the_display_tells_regret_and_time_left_of_each_cell(store, monkeypatch):
    from io import StringIO

    from rich.console import Console

    from zyfa.tuner import progress

    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    out = StringIO()
    shown = progress.PlainProgress(Console(file=out), lambda: coordinator.runs, 30, 30)
    coordinator = Coordinator(
        CELLS[:1], MEASURE, make_tools(FakeFarm()), store, shown, pool=FakePool(seconds=0.01)
    )  # fmt: skip
    coordinator.run()
    standing = [line for line in out.getvalue().splitlines() if "regret about" in line]
    assert any(", at most " in line and "trials, best " in line for line in standing)
    regrets = [float(line.split("regret about ")[1].split(" %")[0]) for line in standing]
    assert regrets[-1] < max(regrets) and regrets[-1] < 5
