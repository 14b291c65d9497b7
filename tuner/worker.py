"""One process per GPU that may hang or die: a trial that takes too long or kills it is an outcome, not the end.

The coordinator sees futures. A thread per GPU sends jobs through a pipe, kills the process when a job outlasts its
limit, and starts the next one when it is needed. A process whose GPU raised an error is replaced, for a fault poisons
everything that the same process runs later.
"""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

from zyfa.config import AttentionConfig, AttentionKey

from .timing import Repeats, Timing

START_LIMIT_S = 180.0  # importing torch and creating a context on a loaded machine
MAX_BAD_STARTS = 2
MAX_KILLS = 3


class Job(NamedTuple):
    """One config to check and time, or several to compare; best_ms is the time to beat."""

    key: AttentionKey
    configs: tuple[AttentionConfig, ...]
    repeats: Repeats
    max_error: float
    best_ms: float | None = None


class Result(NamedTuple):
    """The outcome of a trial; times in ms, None unless outcome is "ok". sensors: clocks, power and temperature."""

    outcome: str
    ms: float | None = None
    ms_lo: float | None = None
    ms_hi: float | None = None
    samples: tuple[float, ...] = ()
    rel_err: float | None = None
    reason: str = ""
    sensors: dict[str, float] = {}  # noqa: RUF012  # never changed

    def timing(self) -> Timing:
        """The times of an ok result."""
        assert self.ms is not None and self.ms_lo is not None and self.ms_hi is not None
        return Timing(self.ms, self.ms_lo, self.ms_hi, self.samples)

    def stored(self) -> dict:
        """The columns of a trial."""
        columns = self._asdict()
        del columns["sensors"]
        return columns


class Usage(NamedTuple):
    """What a GPU was used for: jobs, time.monotonic() when the first began, seconds in jobs, starts not counted."""

    jobs: int = 0
    first: float = 0.0
    busy_s: float = 0.0


Evaluate = Callable[[Job], list[Result]]


class WorkerError(RuntimeError):
    """A worker process that cannot start, or a mistake of ours in it; the message holds its traceback."""


class _Died(Exception):
    """The process ended or broke during a job; says how."""


def gpu_evaluator(gpu: int, arch: str) -> Evaluate:
    """What a worker process runs; imports torch there and not in the coordinator."""
    from .compile import pin_environment
    from .evaluate import Evaluator

    pin_environment()  # so that launches find what the farm compiled
    return Evaluator.on_gpu(gpu, arch)


def _serve(conn, make: Callable[..., Evaluate], args: tuple) -> None:
    """Runs in the worker: answers each job with ("done", results), ("died", why) or ("bug", traceback)."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and `timeout` reach the whole process group; the
        signal.signal(signum, signal.SIG_IGN)  # coordinator decides, and a trial is not to be taken for a crash
    try:
        evaluate = make(*args)
        conn.send(("ready", None))
        while (job := conn.recv()) is not None:
            conn.send(_answer(evaluate, job))
    except (EOFError, ConnectionError):  # the coordinator is gone, while this waited or had an answer
        return
    except Exception:
        conn.send(("bug", traceback.format_exc()))


def _answer(evaluate: Evaluate, job: Job) -> tuple[str, object]:
    """GPU errors are RuntimeErrors (torch's and Triton's alike); other exceptions are mistakes and escape."""
    try:
        return "done", evaluate(job)
    except (RuntimeError, MemoryError) as error:
        return "died", f"{type(error).__name__}: {error}".splitlines()[0]


def then(done: Future, step: Callable) -> Future:
    """A future of step(result), which the thread that finishes `done` takes; a GPU's thread before its next job."""
    after: Future = Future()

    def take(done: Future) -> None:
        try:
            after.set_result(step(done.result()))
        except Exception as error:  # cancelled, a broken worker or what the step raises: for whoever waits
            after.set_exception(error)

    done.add_done_callback(take)
    return after


class Worker:
    """A process with one GPU; not thread-safe, except kill()."""

    def __init__(self, make: Callable[..., Evaluate], args: tuple):
        self._make, self._args = make, args
        self._process: multiprocessing.process.BaseProcess | None = None
        self._closed = False
        self.usage = Usage()

    def run(self, job: Job, limit_s: float) -> list[Result]:
        """The results of a job, each "timed_out" or "crashed" if the process had to be killed or died.

        Who is killed by SIGKILL did not crash: a person or the system wanted memory back. The job is run again, at most
        MAX_KILLS times.
        """
        self.start()
        begun = time.monotonic()
        try:
            return self._run(job, limit_s)
        finally:
            first = self.usage.first or begun
            self.usage = Usage(self.usage.jobs + 1, first, self.usage.busy_s + time.monotonic() - begun)

    def _run(self, job: Job, limit_s: float, killed_before: int = 0) -> list[Result]:
        try:
            self._conn.send(job)
            if not self._conn.poll(limit_s):
                self.kill()
                return self._all(job, "timed_out", f"no answer within {limit_s:g} s")
            return self._received()
        except (_Died, EOFError, OSError) as error:
            told = str(error) if isinstance(error, _Died) else ""
            killed = not told and self._exit_code() == -signal.SIGKILL
            self.kill()
            if killed and killed_before < MAX_KILLS and not self._closed:
                self.start()
                return self._run(job, limit_s, killed_before + 1)
            return self._all(job, "crashed", told or self._epitaph())

    def _exit_code(self) -> int | None:
        """Of a process whose pipe has closed."""
        assert self._process is not None
        self._process.join(5)
        return self._process.exitcode

    def _all(self, job: Job, outcome: str, reason: str) -> list[Result]:
        if self._closed:
            raise CancelledError
        return [Result(outcome, reason=reason)] * len(job.configs)

    def _received(self):
        kind, value = self._conn.recv()
        if kind == "bug":
            raise WorkerError(value)
        if kind == "died":
            raise _Died(value)
        return value

    def start(self) -> None:
        """Starts the process if there is none and waits until it is ready; raises WorkerError where it never is."""
        if self._process is not None and self._process.is_alive():
            return
        for _ in range(MAX_BAD_STARTS):
            if self._closed:
                raise CancelledError
            self._start()
            try:
                if self._conn.poll(START_LIMIT_S):
                    self._received()
                    return
            except (_Died, EOFError, OSError):
                pass
            self.kill()
        raise WorkerError(f"worker {self._args} did not start in {MAX_BAD_STARTS} attempts: {self._epitaph()}")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked CUDA or HIP context is broken
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._make, self._args), daemon=True)
        self._process.start()
        theirs.close()

    def _epitaph(self) -> str:
        code = self._process.exitcode if self._process else None
        return (
            f"the process ended by {signal.Signals(-code).name}"
            if code and code < 0
            else f"the process ended with {code}"
        )

    def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join(5)


class WorkerPool:
    """Workers for several GPUs. submit() queues a job on one of them, because a cell stays on one GPU: the spread
    between GPUs exceeds the margin between candidates.
    """

    def __init__(self, gpus: Sequence[int], arch: str, make: Callable[..., Evaluate] = gpu_evaluator):
        self.gpus = tuple(gpus)
        self._workers = {gpu: Worker(make, (gpu, arch)) for gpu in gpus}
        self._threads = {gpu: ThreadPoolExecutor(1, f"gpu{gpu}") for gpu in gpus}

    def submit(self, gpu: int, job: Job, limit_s: float) -> "Future[list[Result]]":
        """A future of the job's results; it raises WorkerError where the worker itself is broken."""
        return self._threads[gpu].submit(self._workers[gpu].run, job, limit_s)

    def start(self) -> None:
        """Begins to start the processes, which the first jobs would have to wait for; returns at once."""
        for gpu, worker in self._workers.items():
            self._threads[gpu].submit(worker.start)

    def usage(self) -> dict[int, Usage]:
        """What each GPU did so far."""
        return {gpu: worker.usage for gpu, worker in self._workers.items()}

    def close(self) -> None:
        """Kills the processes; jobs that run or wait end as cancelled."""
        for gpu, worker in self._workers.items():
            worker._closed = True
            self._threads[gpu].shutdown(wait=False, cancel_futures=True)
            worker.kill()
