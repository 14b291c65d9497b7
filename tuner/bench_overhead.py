"""Host time of a call: zyfa.attention, prepared and not, beside torch SDPA, FlashAttention-3 and a Triton launch."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from .inputs import QKV
from .peers import PEERS, first_line
from .timing import paired

SDPA = "torch SDPA bf16"
METHOD = (
    "host time of a call in bursts of {number} that never wait for the device, whose queue is empty before each; all "
    "calls interleaved in one run in rotating order; us is the median over {loops} bursts, us_lo and us_hi its 95 % "
    "interval; ratio = us of torch SDPA in the same run / us. Rows `part: ...` are parts of a call of zyfa bf16, timed "
    "alone: check and choose run on the first call of a signature, output and launch on every call."
)
Call = Callable[[], object]


class Overhead(NamedTuple):
    """Host us of one call, its 95 % interval, and how many times SDPA takes as long (None for parts of a call)."""

    name: str
    us: float
    us_lo: float
    us_hi: float
    ratio: float | None


@triton.jit
def _nothing(q, k, v, out, n):
    pass


def public_calls(qkv: QKV) -> dict[str, Call]:
    """The causal calls that users make; torch SDPA chooses its backend itself, as it does for them."""
    from zyfa.interface import attention
    from zyfa.prepared import prepare

    q, k, v = (x.transpose(1, 2) for x in qkv)
    out = torch.empty_like(qkv[0])
    bf16, fp8 = prepare(*qkv, causal=True), prepare(*qkv, causal=True, precision="fp8")
    return {
        "zyfa bf16": partial(attention, *qkv, causal=True),
        "zyfa fp8": partial(attention, *qkv, causal=True, precision="fp8"),
        "zyfa prepared bf16": partial(bf16, *qkv),
        "zyfa prepared bf16, out given": partial(bf16, *qkv, out=out),
        "zyfa prepared fp8": partial(fp8, *qkv),
        "zyfa prepared fp8, out given": partial(fp8, *qkv, out=out),
        SDPA: partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True),
    }


def peer_calls(qkv: QKV) -> tuple[dict[str, Call], dict[str, str]]:
    """A bare launch of a Triton kernel, FlashAttention-3 in BF16 where it is installed, and why it is not."""
    tensors = (*qkv, torch.empty_like(qkv[0]))
    calls: dict[str, Call] = {"triton kernel of 5 arguments": lambda: _nothing[(1,)](*tensors, 5)}
    peer = next(peer for peer in PEERS if peer.name == "fa3")
    try:
        calls["fa3 bf16"] = peer.make("fa3", [qkv], True).launches[0]
    except Exception as error:  # other people's code: whatever it raises is the reason, and is printed
        return calls, {"fa3 bf16": first_line(error)}
    return calls, {}


def parts(qkv: QKV) -> dict[str, Call]:
    """What a call of zyfa bf16 is made of; the launch is that of a replay, addresses known."""
    from zyfa.checks import check_call
    from zyfa.device import current_device
    from zyfa.lookup import choose
    from zyfa.prepared import prepare

    q, k, v = qkv
    given = dict.fromkeys(("sink", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "out"))
    check = partial(
        check_call, q, k, v, causal=True, window_size=(-1, -1), softcap=0.0, descales=(None,) * 3, precision="auto",
        **given,
    )  # fmt: skip
    key, device = check().key, current_device(q.device.index)
    out, ready = torch.empty_like(q), prepare(q, k, v, causal=True).ready
    assert ready is not None, "parts are timed on a GPU"
    addresses = [x.data_ptr() for x in (q, k, v, out)]
    return {
        "part: check": check,
        "part: choose": partial(choose, key, device),
        "part: output": partial(torch.empty_like, q),
        "part: launch": partial(ready.plan.run, addresses, 0),
    }


def measure_overhead(
    calls: dict[str, Call],
    number: int = 100,
    loops: int = 15,
    wait: Callable[[], object] = torch.cuda.synchronize,
) -> list[Overhead]:
    """Host time of each call in bursts of `number` without waiting for the device, which must be faster than the host.

    Bursts of different calls alternate; `wait` empties the device's queue before each.
    """

    def burst(call: Call) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number * 1e3

    for call in calls.values():
        burst(call)
    timings = dict(zip(calls, paired([partial(burst, call) for call in calls.values()], loops), strict=True))
    sdpa = timings[SDPA].ms if SDPA in timings else None
    return [
        Overhead(
            name, timing.ms * 1e3, timing.ms_lo * 1e3, timing.ms_hi * 1e3,
            sdpa / timing.ms if sdpa and not name.startswith("part") else None,
        )
        for name, timing in timings.items()
    ]  # fmt: skip
