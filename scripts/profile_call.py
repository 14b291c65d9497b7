"""The Python part of a call on a machine without a GPU: everything that zyfa.attention does but the driver's launch.

    python scripts/profile_call.py [--profile]

Kernels are compiled for sm90 and never run; tensors lie on the CPU; the driver's functions are replaced by ones that
return at once. Prints us of CPU time per call, best of several loops; --profile adds where they go.
"""

import argparse
import contextlib
import cProfile
import pstats
import time
import timeit
from functools import partial
from unittest import mock

import torch

import zyfa
from zyfa import interface, ready
from zyfa.device import device_of_sku
from zyfa.kernels import driver, replay
from zyfa.tuner.compile import _target

CALLS, LOOPS = 500, 60


def compiled_only(recorder, kernel, grid, args, constants):
    """Recorder.start, but for the launch."""
    compiled = kernel.warmup(*args, grid=grid, **constants)
    compiled.module, compiled.function = object(), 1
    constexprs = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    recorder.launches.append(replay.Launch(compiled, (*grid, 1, 1)[:3], args + constexprs))


@contextlib.contextmanager
def pretended_h200():
    """CPU tensors are planned and replayed as on an H200 whose driver does nothing."""
    nothing = driver.Driver(*[lambda *args: 0] * 6)
    places = (
        (replay.Recorder, "start", compiled_only), (replay.Plan, "stream", lambda plan: 0),
        (driver, "driver", lambda: nothing), (interface, "on_gpu", lambda q: True),
        (interface, "current_device", lambda index: device_of_sku("h200")), (ready, "current_device", lambda: -1),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, value in places:
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(_target("sm90"))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="Also print the functions that take the time.")
    profile = parser.parse_args().profile
    q, k, v = (torch.zeros(1, 512, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
    with pretended_h200():
        for precision in ("bf16", "fp8"):
            prepared, out = zyfa.prepare(q, k, v, causal=True, precision=precision), torch.empty_like(q)
            calls = {
                "attention": partial(zyfa.attention, q, k, v, causal=True, precision=precision),
                "prepared": partial(prepared, q, k, v),
                "prepared, out given": partial(prepared, q, k, v, out=out),
            }
            for name, call in calls.items():
                call()
                us = min(timeit.repeat(call, timer=time.process_time, number=CALLS, repeat=LOOPS)) / CALLS * 1e6
                print(f"{precision:5}{name:22}{us:8.2f} us")
                if profile:
                    with cProfile.Profile() as profiler:
                        for _ in range(CALLS):
                            call()
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
