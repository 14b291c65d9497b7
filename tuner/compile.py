"""Compile configs for an architecture that this machine may not have, in worker processes that may die."""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zyfa.archs import ARCHS
from zyfa.config import AttentionConfig, AttentionKey, octave
from zyfa.recipes import RECIPES

from .facts import Facts, facts_of

# Line tables only blow listings up; FP fusion loses its default in Triton 3.10. Both are in Triton's cache key, so
# who wants to find these builds in the cache must pin them too.
PINNED = {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_DISABLE_LINE_INFO": "1"}
# These change the code and are in no cache key (3.6 to 3.9: the old binary comes back), so they choose the directory.
UNCACHED = ("AMDGCN_SCALARIZE_PACKED_FOPS", "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE", "TRITON_SWAP_MIR")
POINTER_RANGE = 2**31 - 1  # bytes; Triton addresses larger tensors with 64 bits on AMD


@dataclass(frozen=True)
class Build:
    """What became of one compilation: facts of the code, or why there is none. seconds: time in the compiler."""

    facts: Facts | None
    failure: str | None
    seconds: float


def pin_environment() -> None:
    """Fix what Triton reads from the environment. Call it before Triton compiles anything in this process."""
    os.environ.update(PINNED)
    changed = {name: os.environ[name] for name in UNCACHED if name in os.environ}
    if changed:
        tag = hashlib.sha256(repr(sorted(changed.items())).encode()).hexdigest()[:12]
        base = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        if base.name != f"zyfa-{tag}":
            os.environ["TRITON_CACHE_DIR"] = str(base / f"zyfa-{tag}")


class _NoDevice:
    """Stands for Triton's driver where the target GPU is not there: enough to compile, nothing to launch with."""

    def __init__(self, arch: str):
        from triton.backends.compiler import GPUTarget

        # A kernel object remembers one target for each device number, so every architecture gets its own number.
        self.number = 1000 + list(ARCHS).index(arch)
        warp_size = ARCHS[arch].warp_size
        self.target = GPUTarget("cuda", 90, warp_size) if arch == "sm90" else GPUTarget("hip", arch, warp_size)

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _target(arch: str) -> Iterator[None]:
    """Make arch the active target of Triton in this process; what was active before comes back afterwards."""
    import triton

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDevice(arch))
    try:
        yield
    finally:
        triton.runtime.driver._active = before


@contextlib.contextmanager
def _captured_stderr() -> Iterator[None]:
    """Keep MLIR's diagnostics, hundreds of lines a failure, off the terminal; the C++ side writes to fd 2 itself."""
    with tempfile.TemporaryFile() as sink:
        saved = os.dup(2)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:200]


def compile_config(key: AttentionKey, config: AttentionConfig, arch: str) -> Build:
    """Compile one config for arch in this process, without a GPU; a compiler error becomes the build's failure."""
    from zyfa.kernels.launch import compile_for

    start = time.perf_counter()
    facts = failure = None
    with _target(arch), _captured_stderr():
        try:
            facts = facts_of(compile_for(key, config, arch), arch)
        except Exception as error:  # whatever the compiler throws is a result: the config does not compile
            failure = _reason(error)
    return Build(facts, failure, time.perf_counter() - start)


# --- which jobs are the same -------------------------------------------------------------------------------------


def _stride_class(stride: int) -> tuple[bool, bool, bool]:
    """What Triton specialises an integer argument on: equal to 1, divisible by 16, wider than 32 bits."""
    return stride == 1, stride % 16 == 0, stride >= 2**31


def _loop_of(recipe: str) -> tuple:
    """What of a recipe the attention kernel is compiled for; the rest is the quantisers' business."""
    if recipe == "none":
        return ()
    r = RECIPES[recipe]
    return r.qk, r.qk_scales, {"tensor": "head"}.get(r.v_scaled_by, r.v_scaled_by), r.q_mean, r.p_offset


def specialisation(key: AttentionKey, config: AttentionConfig, arch: str) -> tuple:
    """Equal for two jobs exactly if they compile to the same loops.

    Lengths and head counts reach the kernel as plain integers, so they matter only through the strides and through
    the size of the tensors. head_group and how many splits there are are left out: they are constants of the
    program-to-tile arithmetic before the loops.
    """
    rows = (
        (key.seqlen_q, key.nheads * key.head_dim), (key.seqlen_k, key.nheads_k * key.head_dim),
        (key.seqlen_k, key.nheads_k * key.head_dim_v), (key.seqlen_q, key.nheads * key.head_dim_v),
    )  # fmt: skip
    dims = (key.head_dim, key.head_dim, key.head_dim_v, key.head_dim_v)
    strides = tuple(
        _stride_class(stride) for (n, row), dim in zip(rows, dims, strict=True) for stride in (n * row, row, dim)
    )
    wide = tuple(2 * key.batch * octave(n) * row > POINTER_RANGE for n, row in rows)
    fields = config.to_dict() | {"head_group": config.head_group > 0, "splits": config.splits > 1}
    fields["recipe"] = _loop_of(config.recipe)
    shape = (key.dtype, key.head_dim, key.head_dim_v, key.causal, key.window_class)
    return (arch, *shape, strides, wide, tuple(sorted(fields.items())))


# --- the farm ----------------------------------------------------------------------------------------------------


def _serve(connection, arch: str) -> None:
    """A worker's life: take a job, answer with its Build, until the other end closes."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # these reach the whole process group; the coordinator decides
        signal.signal(signum, signal.SIG_IGN)
    pin_environment()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            key, config = connection.recv()
            connection.send(compile_config(key, config, arch))


class _Worker:
    """One worker process; after a crash or a timeout it is dead and must be replaced."""

    def __init__(self, arch: str):
        context = multiprocessing.get_context("spawn")  # fork is unsafe beside the threads of torch and Triton
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, arch), daemon=True)
        self.process.start()
        theirs.close()

    def build(self, key: AttentionKey, config: AttentionConfig, timeout_s: float) -> Build:
        """Run one job; a crash or a timeout ends the process and is the job's failure."""
        start = time.perf_counter()
        try:
            self._connection.send((key, config))
            if self._connection.poll(timeout_s):
                return self._connection.recv()
            failure = f"compiler ran past {timeout_s:g} s"
        except (EOFError, OSError):
            self.process.join(5)
            failure = f"compiler crashed (exit code {self.process.exitcode})"
        self.stop()
        return Build(None, failure, time.perf_counter() - start)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


class CompileFarm:
    """A pool of compiling processes for one architecture; close it, or use it in a `with` block.

    Equal jobs, by specialisation(), compile once and share a future.
    share_head_groups=False compiles each head_group and number of splits by itself, which a later launch then finds in
    Triton's cache.
    """

    def __init__(self, arch: str, processes: int, timeout_s: float = 180.0, share_head_groups: bool = True):
        self.arch = arch
        self.timeout_s = timeout_s
        self.share_head_groups = share_head_groups
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="compile")
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._builds: dict[tuple, Future[Build]] = {}

    def submit(self, key: AttentionKey, config: AttentionConfig) -> "Future[Build]":
        """The future of this job's Build; jobs that compile to the same code share one."""
        grid = None if self.share_head_groups else (config.head_group, config.splits)
        same = (specialisation(key, config, self.arch), grid)
        if same not in self._builds:
            self._builds[same] = self._threads.submit(self._build, key, config)
        return self._builds[same]

    def _build(self, key: AttentionKey, config: AttentionConfig) -> Build:
        worker = getattr(self._local, "worker", None)
        if worker is None or not worker.process.is_alive():
            worker = self._local.worker = _Worker(self.arch)
            self._workers.append(worker)
        return worker.build(key, config, self.timeout_s)

    def close(self) -> None:
        """Drop what has not begun and end all workers, whatever they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.process.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> "CompileFarm":
        return self

    def __exit__(self, *exception) -> None:
        self.close()
