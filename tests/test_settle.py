"""Winners that tie at a cell's end are settled at its other lengths, on the fake landscape."""

from dataclasses import replace

import pytest
from fake_landscape import BEST, FakeFarm, make_tools, time_of
from test_audit import tune
from test_coordinator import MEASURE, FakePool

from zyfa.config import octave
from zyfa.device import device_of_sku
from zyfa.tuner.audit import Audit
from zyfa.tuner.settle import candidates, lengths, settle
from zyfa.tuner.split import PROBES, half_of
from zyfa.tuner.worker import Result
from zyfa.tuning_db.store import Store

OTHER = replace(BEST, BLOCK_N=64)  # another tile
SAME = replace(BEST, head_group=4)


class Tied(FakePool):
    """OTHER takes `at_end` times as long as BEST at the ends of cells, `before` times at other lengths."""

    at_end, before = 1.01, 0.95

    def _measured(self, job, config):
        ms = time_of(job.key, BEST if config == OTHER else config)
        if config == OTHER:
            ms *= self.at_end if octave(job.key.seqlen_q) == job.key.seqlen_q else self.before
        return Result("ok", ms, ms, ms, (ms,) * 7, 0.002)


class Level(Tied):
    before = 0.995


class Apart(Tied):
    at_end = 1.05


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "db.sqlite", device_of_sku("h200")) as store:
        yield store


def settled(store, pool, stopped=lambda: False):
    runs, _ = tune(store, pool=pool, seeds=(BEST, OTHER, SAME))
    assert all(run.winner[0] == BEST for run in runs)
    return runs, settle(runs, Audit(store.trials(), MEASURE, make_tools(FakeFarm()), pool), 0, stopped)


def test_what_is_better_at_the_other_lengths_wins(store):
    runs, better = settled(store, Tied())
    assert [(run.planned.cell, config) for run, config in better] == [(run.planned.cell, OTHER) for run in runs]
    assert all(OTHER in candidates(run) and SAME not in candidates(run) for run in runs), (
        "another tile, not another order"
    )


def test_less_than_a_percent_settles_nothing(store):
    assert settled(store, Level())[1] == []


def test_what_loses_at_the_end_is_no_candidate(store):
    pool = Apart()
    runs, better = settled(store, pool)
    assert better == [] and not any(OTHER in candidates(run) for run in runs)


def test_a_run_out_of_time_settles_nothing(store):
    assert settled(store, Tied(), stopped=lambda: True)[1] == []


def test_the_lengths_are_those_that_the_row_serves(store):
    runs, _ = tune(store, pool=Tied(), seeds=(BEST, OTHER))
    whole = runs[0]
    end = whole.key.seqlen_q
    half = replace(whole, planned=half_of(whole.planned))
    for run, halves, low, high in (
        (whole, (), end // 2, end),
        (whole, (half.planned.cell,), 3 * end // 4, end),
        (half, (half.planned.cell,), end // 2, 3 * end // 4),
    ):
        for seed in range(200):  # at the upper end, too, which is even
            found = [key.seqlen_q for key in lengths(run, halves, seed)]
            assert len(found) == PROBES and found == sorted(set(found))
            assert all(low < n <= high and n % 2 for n in found)
    tiny = replace(whole, planned=whole.planned._replace(key=whole.key._replace(seqlen_q=2, seqlen_k=2)))
    assert lengths(tiny, (), 0) == []
