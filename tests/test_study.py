"""The search of one cell on a synthetic landscape."""

import statistics

import pytest
from fake_landscape import BEST, DEFAULT, KEY, broken_rule, candidates, make_space, time_of

from zyfa.config import AttentionConfig
from zyfa.tuner.study import CellStudy, Space


def search(seed=0, trials=40, seeds=(DEFAULT,), fails=lambda config: False):
    study = CellStudy(make_space(), seeds, seed)
    for _ in range(trials):
        config = study.ask()
        study.tell(config, None if fails(config) else time_of(KEY, config))
    return study


def test_seeds_come_first_and_nothing_is_asked_twice():
    seeds = [DEFAULT, AttentionConfig(256, 16, 4, 1), DEFAULT]
    study = CellStudy(make_space(), seeds, 0)
    asked = [study.ask() for _ in range(60)]
    assert asked[:2] == seeds[:2]
    assert len(set(asked)) == 60 == study.pending
    assert all(broken_rule(config) is None for config in asked)


def test_finds_the_optimum_faster_than_chance():
    # Chance needs half of the 224 candidates in the median.
    needed = []
    for seed in range(5):
        study = search(seed, trials=80)
        within = [i for i, ms in enumerate(study.times.values()) if ms <= 1.05 * time_of(KEY, BEST)]
        needed.append(within[0] if within else 80)
    assert statistics.median(needed) <= 50


def test_failures_are_never_best_and_the_search_leaves_them():
    study = search(trials=60, fails=lambda config: config.num_stages >= 3)
    assert study.best.num_stages == 2
    late = list(study.times)[30:]
    assert sum(config.num_stages >= 3 for config in late) < len(late) / 2


def test_every_candidate_is_asked_when_trials_suffice():
    study = search(trials=len(candidates()))
    assert set(study.times) == set(candidates())
    assert study.exhausted()
    assert study.ask() is None
    assert study.best == BEST


def test_illegal_seeds_are_left_out():
    study = CellStudy(make_space(), [AttentionConfig(16, 16, 8, 1), DEFAULT], 0)
    assert study.ask() == DEFAULT


def test_a_seed_outside_the_space_is_evaluated():
    odd = AttentionConfig(64, 64, 4, 2, maxnreg=99)
    outside = AttentionConfig(64, 48, 4, 2)
    study = search(seeds=(DEFAULT, odd, outside), trials=12)
    assert {odd, outside} <= set(study.times)


def test_of_equal_times_the_first_stays():
    study = CellStudy(make_space(), (), 0)
    first, second, faster = candidates()[:3]
    for config, ms in ((first, 1.0005), (second, 1.0)):
        study.claim(config)
        study.tell(config, ms)
    assert study.best == first
    study.claim(faster)
    study.tell(faster, 0.99)
    assert study.best == faster


def test_finished_by_trials_or_patience_and_after_a_replay():
    study = search(trials=30)
    assert study.finished(30, 1000) and not study.finished(31, 1000)
    patience = study.since_gain
    assert study.finished(1000, patience) and not study.finished(1000, patience + 1)
    again = CellStudy(make_space(), (DEFAULT,), 0)
    for config, ms in study.times.items():
        assert again.claim(config)
        again.tell(config, ms)
    assert (again.best, again.since_gain) == (study.best, study.since_gain)
    assert again.ask() not in study.times


def test_not_finished_without_a_valid_config():
    study = search(trials=30, fails=lambda config: True)
    assert study.best is None
    assert not study.finished(31, 5)


def test_nothing_legal():
    study = CellStudy(Space(KEY, make_space().suggest, lambda config: "never", list), [DEFAULT], 0)
    assert study.ask() is None


@pytest.mark.parametrize("tell_first", [True, False])
def test_claim_is_refused_for_known_configs(tell_first):
    study = CellStudy(make_space(), (), 0)
    assert study.claim(DEFAULT)
    if tell_first:
        study.tell(DEFAULT, 1.0)
    assert not study.claim(DEFAULT)
