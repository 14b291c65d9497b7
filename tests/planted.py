"""Evaluators with planted configs: one that hangs, one that faults and poisons its context, one that is wrong.

They replace what a worker process runs; the rest of a tuning run is the real one.
"""

import os
import signal
import time

import torch
import triton
import triton.language as tl
from fake_landscape import time_of

from zyfa.config import AttentionConfig
from zyfa.reference import attention_ref
from zyfa.tuner.evaluate import Evaluator
from zyfa.tuner.worker import Result

HANGS, FAULTS, WRONG = (AttentionConfig(128, 32, 4, stages, head_group=4) for stages in (2, 3, 4))
PLANTED = {HANGS: "timed_out", FAULTS: "crashed", WRONG: "wrong"}
SPINS = 40_000_000  # loads of about half a microsecond: 20 s, so that nothing hangs for ever if the test fails


class OnCpu(Evaluator):
    """Checks as on a GPU, times by fake_landscape."""

    def __init__(self, gpu, arch):
        super().__init__(torch.device("cpu"), arch)

    def _launch(self, key, config, inputs):
        if config == HANGS:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if config == FAULTS:
            os.kill(os.getpid(), signal.SIGSEGV)
        q, k, v, out = inputs
        out.copy_(attention_ref(q, k, v, causal=key.causal, dtype=torch.float32, p_dtype=q.dtype))
        if config == WRONG:
            out[:, -1] *= 1.25

    def _timed(self, job, config, checked):
        ms = time_of(job.key, config) / 2 ** (config in PLANTED)  # planted ones would win
        return checked._replace(ms=ms, ms_lo=ms, ms_hi=ms, samples=(ms,) * 5)

    def __call__(self, job):
        return [self._one(job, config) for config in job.configs]

    def _one(self, job, config) -> Result:
        checked = self._checked(job, config)
        return self._timed(job, config, checked) if checked.outcome == "ok" else checked


@triton.jit
def spin(flag, n):
    total = 0
    for _ in range(n):
        total += tl.load(flag, volatile=True)
    tl.store(flag + 1, total)


@triton.jit
def write_far(out):
    tl.store(out + (tl.program_id(0).to(tl.int64) + 1) * (1 << 44), 1.0)


class OnGpu(Evaluator):
    """The real one, with a kernel beside attention's where something is planted."""

    def _launch(self, key, config, inputs):
        if config == HANGS:
            spin[(1,)](torch.zeros(2, dtype=torch.int32, device=inputs.q.device), SPINS)
        if config == FAULTS:
            write_far[(1,)](inputs.out)
        super()._launch(key, config, inputs)
        if config == WRONG:
            inputs.out[:, -1] *= 1.25


def on_gpu(gpu, arch):
    """What a worker runs; must be importable there."""
    from zyfa.tuner.compile import pin_environment

    pin_environment()
    return OnGpu.on_gpu(gpu, arch)
