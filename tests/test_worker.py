"""Worker processes that hang, die, refuse to start or hold a mistake; no GPU needed."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuner.timing import Repeats
from zyfa.tuner.worker import Job, Result, WorkerError, WorkerPool, _serve, then

KEY = AttentionKey("bf16", 128, 128, 32, 8, 1, 1024, 1024, True)
GOOD = AttentionConfig(64, 64, 4, 2)
HANGS, DIES, FAULTS, BUG, KILLED, DOOMED = (AttentionConfig(64, 64, 4, n) for n in (11, 12, 13, 14, 15, 16))


def fake_evaluator(gpu, arch):
    """Answers with its process number as the time."""
    poisoned = False

    def evaluate(job):
        nonlocal poisoned
        config = job.configs[0]
        if config == HANGS:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if config == DIES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if config == DOOMED or (config == KILLED and not os.path.exists(os.environ["KILLED_ONCE"])):
            open(os.environ["KILLED_ONCE"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if config == FAULTS or poisoned:
            poisoned = True
            raise RuntimeError("an illegal memory access was encountered\nmore text")
        if config == BUG:
            raise TypeError("no such argument")
        return [Result("ok", float(os.getpid()), reason=f"{gpu} {arch}")] * len(job.configs)

    return evaluate


def never_starts(gpu, arch):
    raise TypeError("no device")


def job(*configs):
    return Job(KEY, configs, Repeats(), 2.0)


@pytest.fixture
def pool():
    pool = WorkerPool((0, 3), "sm90", fake_evaluator)
    yield pool
    pool.close()


def run(pool, config, limit_s=60.0):
    return pool.submit(0, job(config), limit_s).result(60)[0]


def test_offenders_are_recorded_and_good_configs_measured_around_them(pool):
    first = run(pool, GOOD)
    assert (first.outcome, first.reason) == ("ok", "0 sm90")
    assert run(pool, GOOD).ms == first.ms  # the same process
    died = run(pool, DIES)
    assert (died.outcome, died.reason) == ("crashed", "the process ended by SIGSEGV")
    second = run(pool, GOOD)
    assert second.outcome == "ok" and second.ms != first.ms
    faulted = run(pool, FAULTS)
    assert (faulted.outcome, faulted.reason) == ("crashed", "RuntimeError: an illegal memory access was encountered")
    assert run(pool, GOOD).outcome == "ok"  # in a process that is not poisoned


def test_a_hang_is_killed_even_if_it_ignores_sigterm(pool):
    assert run(pool, GOOD).outcome == "ok"
    hung = run(pool, HANGS, limit_s=0.5)
    assert (hung.outcome, hung.reason) == ("timed_out", "no answer within 0.5 s")
    assert run(pool, GOOD).outcome == "ok"


def test_a_worker_that_someone_else_kills_is_no_crash_of_its_config(monkeypatch, tmp_path):
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "once"))
    pool = WorkerPool((0,), "sm90", fake_evaluator)
    assert run(pool, KILLED).outcome == "ok"
    doomed = run(pool, DOOMED)
    assert (doomed.outcome, doomed.reason) == ("crashed", "the process ended by SIGKILL")
    pool.close()


def test_a_signal_to_the_whole_group_is_no_crash(pool):
    assert run(pool, GOOD).outcome == "ok"
    process = pool._workers[0]._process
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, signum)
    assert run(pool, GOOD).ms == float(process.pid)


def test_every_config_of_a_lost_job_gets_the_outcome(pool):
    results = pool.submit(3, job(DIES, GOOD), 60).result(60)
    assert [r.outcome for r in results] == ["crashed", "crashed"]


def test_a_mistake_is_raised_not_recorded(pool):
    with pytest.raises(WorkerError, match="TypeError: no such argument"):
        run(pool, BUG)


def test_a_worker_that_cannot_start_is_an_error():
    pool = WorkerPool((0,), "sm90", never_starts)
    with pytest.raises(WorkerError, match="no device"):
        run(pool, GOOD)
    pool.close()


def test_close_cancels_what_runs_and_waits(pool):
    assert run(pool, GOOD).outcome == "ok"
    running = pool.submit(0, job(HANGS), 60)
    waiting = pool.submit(0, job(GOOD), 60)
    time.sleep(0.2)
    pool.close()
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(10)


def test_a_gpu_takes_its_next_job_after_the_step_that_follows_the_one_before():
    events, go = [], threading.Event()

    def work(number):
        go.wait(10)
        events.append(f"job {number}")
        return number

    with ThreadPoolExecutor(1) as gpu:
        jobs = [gpu.submit(work, number) for number in range(3)]
        steps = [then(done, lambda number: events.append(f"stored {number}") or 10 * number) for done in jobs]
        go.set()
        assert [step.result(10) for step in steps] == [0, 10, 20]
    assert events == ["job 0", "stored 0", "job 1", "stored 1", "job 2", "stored 2"]


def test_whoever_waits_for_a_step_hears_what_went_wrong():
    broken, cancelled, fine = Future(), Future(), Future()
    steps = [then(future, lambda result: 1 // result) for future in (broken, cancelled, fine)]
    broken.set_exception(WorkerError("no driver"))
    cancelled.cancel()
    fine.set_result(0)
    for step, error in zip(steps, (WorkerError, CancelledError, ZeroDivisionError), strict=True):
        with pytest.raises(error):
            step.result(10)


def slow_evaluator(gpu, arch):
    def evaluate(job):
        time.sleep(0.3)
        return []

    return evaluate


def test_a_worker_whose_coordinator_is_gone_ends_in_peace_with_its_answer():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, slow_evaluator, (0, "sm90")))
    process.start()
    theirs.close()
    assert ours.recv() == ("ready", None)
    ours.send(job(GOOD))
    ours.close()
    process.join(60)
    assert process.exitcode == 0


def test_what_a_gpu_was_used_for_is_counted_from_its_first_job(pool):
    assert pool.usage()[0].jobs == 0
    begun = time.monotonic()
    run(pool, GOOD)
    run(pool, DIES)
    used = pool.usage()
    assert used[0].jobs == 2 and used[3].jobs == 0
    assert used[0].first >= begun and 0 < used[0].busy_s <= time.monotonic() - used[0].first
