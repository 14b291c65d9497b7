"""The timing protocol on fake clocks: what it concludes, not how long anything takes."""

import itertools
import random

import pytest

from zyfa.tuner.timing import STORED_GAIN, Repeats, collect, decide, interval, paired, summarise

LONG = Repeats(heat_ms=0.0, min_rounds=5, max_rounds=40, budget_ms=1e9)


def clock(*values):
    """A sampler that returns the values in turn, for ever."""
    return itertools.cycle(values).__next__


def counted(sample):
    calls = []

    def wrapped():
        calls.append(sample())
        return calls[-1]

    return wrapped, calls


def test_interval_is_the_95_percent_order_statistic():
    assert interval(range(1, 101)) == (41, 60)
    assert interval([3, 1, 2]) == (1, 3)
    assert interval([5]) == (5, 5)


def test_a_steady_candidate_needs_few_rounds():
    sample, calls = counted(clock(2.0))
    assert collect(sample, 4, LONG) == (2.0, 2.0, 2.0, (2.0,) * 5)
    assert len(calls) == 5


def test_a_noisy_candidate_gets_more_rounds_up_to_the_limit():
    sample, calls = counted(clock(1.0, 2.0))
    timing = collect(sample, 1, LONG)
    assert len(calls) == LONG.max_rounds
    assert (timing.ms_lo, timing.ms, timing.ms_hi) == (1.0, 1.5, 2.0)


def test_the_budget_counts_every_call_of_a_round():
    sample, calls = counted(clock(1.0, 1.2))
    collect(sample, 10, Repeats(0.0, 2, 1000, 110.0))
    assert len(calls) == 10


def test_heat_up_rounds_are_no_samples():
    values = [9.0, 9.0, 2.0]
    timing = collect(lambda: values.pop(0) if len(values) > 1 else values[0], 1, Repeats(15.0, 5, 40, 1e9))
    assert timing.samples == (2.0,) * 5


def test_a_slower_candidate_is_given_up_early():
    for ms, rounds in ((1.6, 3), (1.4, 5)):
        sample, calls = counted(clock(ms))
        assert collect(sample, 1, LONG, best_ms=1.0).ms == ms
        assert len(calls) == rounds
    noisy = (1.2, 1.5)  # never known well, and never as fast as the best
    sample, calls = counted(clock(*noisy))
    collect(sample, 1, LONG, best_ms=1.0)
    assert len(calls) == 5
    sample, calls = counted(clock(*noisy))
    collect(sample, 1, LONG, best_ms=1.1)
    assert len(calls) == LONG.max_rounds


def test_one_slow_round_does_not_end_a_candidate():
    values = [2.0, 2.0, 1.0] + [1.0] * 100
    assert collect(lambda: values.pop(0), 1, LONG, best_ms=1.0).ms == 1.0


def test_a_hopeless_candidate_ends_within_the_heat_up():
    sample, calls = counted(clock(50.0))
    assert collect(sample, 2, Repeats(1000.0, 5, 40, 1e9), best_ms=10.0).samples == (50.0,)
    assert len(calls) == 1


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(ms):
    with pytest.raises(ValueError, match="no possible time"):
        collect(clock(ms), 1, LONG)
    with pytest.raises(ValueError, match="no possible time"):
        collect(clock(ms), 1, Repeats(heat_ms=10.0))


def test_pairs_of_one_moment_share_an_index_and_every_order_occurs():
    order = []

    def sampler(name):
        def sample():
            order.append(name)
            return 1.0 + len(order) // 3  # every round is slower than the one before

        return sample

    timings = paired([sampler(n) for n in "abc"], 6)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert {r[0] for r in rounds} == {r[-1] for r in rounds} == {"a", "b", "c"}
    assert all(len(timing.samples) == 6 for timing in timings)


def test_the_winner_is_found_through_drift_outliers_and_noise():
    rng = random.Random(0)
    true = [1.0, 0.97, 1.02, 1.1]
    clock_speed = [1.0] * 10 + [1.3] * 11  # clocks drop by 30 % half-way
    samples = [[t * slow * rng.uniform(0.99, 1.01) for slow in clock_speed] for t in true]
    samples[3][4] *= 0.5  # one lucky outlier
    verdict = decide([summarise(s) for s in samples])
    assert verdict.winner == 1 and verdict.ties == ()
    assert verdict.gain_lo < 100 / 0.97 - 100 < verdict.gain_hi and verdict.gain == pytest.approx(3.1, abs=0.5)


def test_a_tie_keeps_the_incumbent_and_is_told():
    rng = random.Random(1)
    noisy = [summarise([1 + rng.uniform(-0.02, 0.02) for _ in range(21)]) for _ in range(3)]
    assert decide(noisy) == (0, (1, 2), 0.0, 0.0, 0.0)
    faster = summarise([0.9 * ms for ms in noisy[1].samples])
    assert decide([noisy[0], noisy[1], faster])[:2] == (2, ())


def test_a_gain_counts_from_its_least_on():
    timings = [summarise([1.0] * 9), summarise([0.993] * 9), summarise([0.997] * 9)]
    assert decide(timings).winner == 1
    assert decide([timings[0], timings[2]]).winner == 0
    assert decide(timings, min_gain=STORED_GAIN).winner == 0
    assert decide(timings, incumbent=2, min_gain=STORED_GAIN).winner == 2


def test_a_gain_without_confidence_is_none():
    mostly = [0.9] * 6 + [1.2] * 5  # faster in the median of 11 rounds, and not known to be
    assert decide([summarise([1.0] * 11), summarise(mostly)]).winner == 0


@pytest.mark.gpu
def test_graph_sampler_times_the_device():
    import torch

    from zyfa.tuner.timing import GraphSampler

    x = torch.ones(1 << 26, device="cuda")  # 256 MiB: read and written in 0.1 to 1 ms
    launches = [lambda: x.mul_(1.0)] * 3
    launches[0]()
    sampler = GraphSampler(launches)
    assert sampler.calls == 3
    assert 0.01 < collect(sampler, 3, Repeats()).ms < 10
