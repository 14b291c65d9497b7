"""Jobs for GPUs, one at a time each: the next begins once what came before is stored."""

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from .worker import Job, WorkerPool

Handler = Callable[[Future], None]


class _Waiting(NamedTuple):
    job: Job
    limit_s: float
    handle: Handler


class GpuQueues:
    """Hands jobs to a pool; a kill at any moment then loses one trial of each GPU at most.

    watch: is told each future and what to do when it is done; the handler of a job stores its result.
    """

    def __init__(self, pool: WorkerPool, watch: Callable[[Future, Handler], None]):
        self._pool, self._watch = pool, watch
        self._queues: dict[int, deque[_Waiting]] = defaultdict(deque)  # the first of each runs

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return sum(max(len(queue) - 1, 0) for queue in self._queues.values())

    def add(self, gpu: int, job: Job, limit_s: float, handle: Handler) -> None:
        self._queues[gpu].append(_Waiting(job, limit_s, handle))
        if len(self._queues[gpu]) == 1:
            self._begin(gpu)

    def _begin(self, gpu: int) -> None:
        first = self._queues[gpu][0]
        self._watch(self._pool.submit(gpu, first.job, first.limit_s), lambda done: self._ended(gpu, first.handle, done))

    def _ended(self, gpu: int, handle: Handler, done: Future) -> None:
        handle(done)
        self._queues[gpu].popleft()
        if self._queues[gpu]:
            self._begin(gpu)
