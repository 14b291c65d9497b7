"""Records landscapes on a GPU: all legal configs of a cell, or a stated sample, with repeats and no early stops.

What the gate refuses is timed too, so that its false discards can be counted; it keeps the outcome "gated".
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import UTC, datetime
from pathlib import Path

from zyfa.config import AttentionConfig, AttentionKey

from .cells import Setup, Tools, failed_build, family_of
from .compile import Build
from .facts import Facts
from .landscape import SUFFIX, Entry, Recorder, compact, name_of, sample
from .plan import PlannedCell
from .worker import Job, Result, WorkerPool

RECORD_LIMIT_S = 60.0
TICK_S = 0.2
AHEAD = 256  # builds that are queued: enough for every compiler, few enough to be dropped when the run is stopped

Handler = Callable[[Future], None]


class Recording:
    """Landscapes of several cells, recorded together: a build serves all cells of its family.

    number: configs of each cell, 0 for all. Files that exist are continued.
    """

    def __init__(
        self, cells: Sequence[PlannedCell], number: int, folder: Path, gpu: str, setup: Setup, tools: Tools,
        pool: WorkerPool,
    ):  # fmt: skip
        self._setup, self._tools, self._pool = setup, tools, pool
        self._keys = [cell.key for cell in cells]
        self.paths = {key: folder / f"{name_of(key)}{SUFFIX}" for key in self._keys}
        self._wanted = {key: self._choose(key, number) for key in self._keys}
        self._recorders = {key: Recorder(self.paths[key], self._head(gpu, key, number)) for key in self._keys}
        self._todo = self._order()
        self._pending: dict[Future, list[Handler]] = {}
        self.total = sum(map(len, self._wanted.values()))

    def _choose(self, key: AttentionKey, number: int) -> list[AttentionConfig]:
        legal = self._tools.space(key).candidates()
        return sample(legal, number or len(legal), self._tools.seeds(key))

    def _head(self, gpu: str, key: AttentionKey, number: int) -> dict:
        of, toolchain = len(self._tools.space(key).candidates()), self._setup.toolchain
        chosen = len(self._wanted[key])
        share = "all" if chosen == of else f"{chosen}, stratified by tile, warps and recipe, of"
        repeats = self._setup.effort.repeats
        recipes = sorted({config.recipe for config in self._wanted[key]} - {"none"})
        among = f" (recipes {', '.join(recipes)})" if recipes else ""
        return {
            "gpu": gpu, "driver": toolchain.driver_version, "torch": toolchain.torch_version,
            "triton": toolchain.triton_version, "date": datetime.now(UTC).date().isoformat(),
            "method": f"{share} {of} legal configs{among}; graph replays over rotated inputs, "
            f"{repeats.heat_ms:g} ms heat-up, {repeats.min_rounds} to {repeats.max_rounds} repeats",
            "kernel_hash": toolchain.kernel_hash, "key": key._asdict(),
        }  # fmt: skip

    def _order(self) -> list[tuple[AttentionConfig, list[AttentionKey]]]:
        """Builds with the cells that want them, families in turn so that none is left out by an early end."""
        families: dict[tuple, dict[AttentionConfig, list[AttentionKey]]] = {}
        for key in self._keys:
            for config in self._wanted[key]:
                if config not in self._recorders[key].done:
                    families.setdefault(family_of(key), {}).setdefault(config, []).append(key)
        queues = [list(family.items()) for family in families.values()]
        return [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]

    @property
    def done(self) -> int:
        """Configs recorded so far, those of earlier runs included."""
        return sum(len(recorder.done) for recorder in self._recorders.values())

    def run(self, stopped: Callable[[], bool], tick: Callable[[], None]) -> list[Path]:
        """Records until all is done or stopped() says so; returns the files. Finished files are compacted."""
        todo = iter(self._todo)
        while not stopped():
            while len(self._pending) < AHEAD and (job := next(todo, None)) is not None:
                self._compile(*job)
            if not self._pending:
                break
            for future in wait(list(self._pending), TICK_S, FIRST_COMPLETED)[0]:
                for handle in self._pending.pop(future):
                    handle(future)
            tick()
        for key, path in self.paths.items():
            if len(self._recorders[key].done) == len(self._wanted[key]):
                compact(path)
        return list(self.paths.values())

    def _compile(self, config: AttentionConfig, keys: Sequence[AttentionKey]) -> None:
        waiting: dict[Future[Build], list[AttentionKey]] = {}
        for key in keys:  # long and short cells may address differently and so be builds of their own
            waiting.setdefault(self._tools.compile(key, config), []).append(key)
        for future, sharing in waiting.items():
            self._on(future, functools.partial(self._built, config, sharing))

    def _on(self, future: Future, handle: Handler) -> None:
        self._pending.setdefault(future, []).append(handle)

    def _built(self, config: AttentionConfig, keys: Sequence[AttentionKey], build: Future[Build]) -> None:
        facts = build.result().facts
        for key in keys:
            if facts is None:
                self._add(key, config, failed_build(build.result()), {})
            else:
                job = Job(key, (config,), self._setup.effort.repeats, self._setup.max_error)
                gpu = self._pool.gpus[self._keys.index(key) % len(self._pool.gpus)]  # a cell stays on one
                timed = self._pool.submit(gpu, job, RECORD_LIMIT_S)
                self._on(timed, functools.partial(self._timed, key, config, facts))

    def _timed(self, key: AttentionKey, config: AttentionConfig, facts: Facts, done: Future[list[Result]]) -> None:
        result = done.result()[0]
        if self._tools.gate(facts, key, config):  # one that failed besides has no samples
            result = result._replace(outcome="gated")
        self._add(key, config, result, facts.to_dict())

    def _add(self, key: AttentionKey, config: AttentionConfig, result: Result, facts: dict) -> None:
        self._recorders[key].add(Entry(config, result.outcome, result.samples, result.rel_err, facts))
