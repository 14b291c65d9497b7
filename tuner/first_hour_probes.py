"""Small kernels that time what the model cannot read: the rate of exp, and how far matrix and vector work overlap.

Each is one loop in registers. What a trip holds is read from its machine code, so what the compiler makes of a line
does not matter; the time of a plain fused multiply-add loop is the unit, so the clock need not be known.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from .facts import Loop, loops_with
from .gate import is_matrix
from .rates import RATES, Fit, matrix_slots

TRIPS = 4097  # odd: where LLVM unrolls a loop (Triton 3.8), the rest loop stays, and that is one trip
ROWS, COLS, DEPTH = 128, 64, 64  # of one program of four waves: 32 rows a wave, one 32x32 tile pair on gfx
WAVES = (1, 2, 3)  # on a SIMD


@triton.jit
def probe(
    out, trips,
    MATRIX: tl.constexpr, EXP: tl.constexpr, FMA: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """MATRIX dots, EXP exps and FMA multiply-adds of each element in a trip; writes what keeps them alive."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    x = rows[:, None] * 0.001 + cols[None, :] * 0.003 + tl.program_id(0) * 1e-6
    a = (rows[:, None] * 0.01 - depth[None, :] * 0.02).to(tl.bfloat16)
    b = (depth[:, None] * 0.01 - cols[None, :] * 0.02).to(tl.bfloat16)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for _ in range(trips):
        for _m in tl.static_range(MATRIX):
            acc = tl.dot(a, b, acc)
        for _e in tl.static_range(EXP):
            x = tl.exp2(x)
            x = x - 2.0  # stays within (-2, 0]
        for _f in tl.static_range(FMA):
            x = x * 0.75 + 0.125
    total = tl.sum(x, 1) + tl.sum(acc, 1)
    tl.store(out + tl.program_id(0) * ROWS + rows, total)


# name: (MATRIX, EXP, FMA)
KINDS = {"fma": (0, 0, 8), "exp": (0, 4, 0), "matrix": (4, 0, 0), "both": (4, 4, 0)}


class Probe(NamedTuple):
    """ms of one launch of each kind by waves on a SIMD, and the instructions of one trip of its loop by class."""

    ms: dict[str, dict[int, float]]
    mix: dict[str, dict[str, int]]
    empty_ms: float  # of a launch that does one trip of "fma"


class Found(NamedTuple):
    """What probes say. exp: slots. overlap: at 1, 2 and 3 waves. clock_ghz: while multiplying matrices. launch_ms."""

    exp: float
    overlap: tuple[float, float, float]
    clock_ghz: float
    launch_ms: float

    def applied(self, fit: Fit, clock_ghz: float) -> Fit:
        """The fit with what was found; clock_ghz: of the data sheet."""
        fraction, exp = min(1.0, self.clock_ghz / clock_ghz), (self.exp, self.exp)
        return fit._replace(exp=exp, overlap=self.overlap, clock_fraction=fraction, launch_ms=self.launch_ms)


def found(probe: Probe, arch: str) -> Found:
    """The slots of one exp, the overlap and the clock that explain the times."""
    slot_ms = {waves: ms / TRIPS / (waves * _vector(probe.mix["fma"])) for waves, ms in probe.ms["fma"].items()}
    unit = min(slot_ms.values())  # with enough waves nothing waits
    trans = probe.mix["exp"]["trans"]
    plain = _vector(probe.mix["exp"])
    exp = min(ms / TRIPS / unit / waves for waves, ms in probe.ms["exp"].items()) - (0 if arch == "sm90" else plain)
    busy = sum(n * matrix_slots(op, arch) for op, n in probe.mix["matrix"].items() if is_matrix(op))
    clock = max(waves * busy * TRIPS / ms for waves, ms in probe.ms["matrix"].items()) * RATES[arch].clocks / 1e6
    one, two, three = (_overlap(probe, waves) for waves in WAVES)
    return Found(max(exp / trans, 1.0), (one, two, three), clock, probe.empty_ms)


def _overlap(probe: Probe, waves: int) -> float:
    """Where `both` lies between the sum of its parts (0) and the longer of them (1)."""
    matrix, vector, both = (probe.ms[kind][waves] for kind in ("matrix", "exp", "both"))
    return max(-0.6, min(1.0, (matrix + vector - both) / min(matrix, vector)))


def _vector(mix: dict[str, int]) -> int:
    """Instructions of one slot: on Hopper vector work other than FP32 multiply-adds does not occur in these loops."""
    return sum(mix.get(kind, 0) for kind in ("valu", "valu_half", "pk", "cvt", "agpr"))


def measure(gpu: int, arch: str) -> Probe:
    """Times all probes on a GPU, interleaved; run it in a process of its own."""
    import torch

    from zyfa.kernels.replay import Compiler

    from .timing import GraphSampler, paired

    torch.cuda.set_device(gpu)
    units = torch.cuda.get_device_properties(gpu).multi_processor_count
    out = torch.empty(max(WAVES) * units * ROWS, dtype=torch.float32, device="cuda")
    samplers, mix = {}, {}

    def launch(kind: str, waves: int, trips: int):
        grid = (waves * units,)
        return lambda: probe[grid](out, trips, **constants(kind))

    for kind in KINDS:
        kernel = Compiler().start(probe, (units,), (out, TRIPS), constants(kind))
        mix[kind] = smallest(loops_with(kernel, arch, holds(kind)))
        for waves in WAVES:
            launch(kind, waves, TRIPS)()
            samplers[kind, waves] = GraphSampler([launch(kind, waves, TRIPS)])
    launch("fma", 1, 1)()
    samplers["empty", 1] = GraphSampler([launch("fma", 1, 1)] * 16)
    paired(list(samplers.values()), 3)  # heats up
    ms = {name: timing.ms for name, timing in zip(samplers, paired(list(samplers.values()), 11), strict=True)}
    by_kind = {kind: {waves: ms[kind, waves] for waves in WAVES} for kind in KINDS}
    return Probe(by_kind, mix, ms["empty", 1])


def constants(kind: str) -> dict[str, int]:
    """The constexpr arguments and options of a probe."""
    counts = dict(zip(("MATRIX", "EXP", "FMA"), KINDS[kind], strict=True))
    return counts | {"ROWS": ROWS, "COLS": COLS, "DEPTH": DEPTH, "num_warps": 4}


def holds(kind: str) -> Callable[[str], bool]:
    """Whether an opcode marks the loop of a kind."""
    marks = {
        "fma": ("v_fma", "v_pk_fma", "v_fmac", "v_mul", "v_pk_mul", "FFMA"), "exp": ("v_exp", "MUFU"),
        "matrix": ("v_mfma", "HGMMA", "HMMA"), "both": ("v_mfma", "HGMMA", "HMMA"),
    }  # fmt: skip
    return lambda op: op.startswith(marks[kind])


def smallest(loops: Sequence[Loop]) -> dict[str, int]:
    """The mix of the loop with fewest instructions; raises RuntimeError where the compiler left none."""
    if not loops:
        raise RuntimeError("a probe has lost its loop to the compiler")
    return min((loop.mix for loop in loops), key=lambda mix: sum(mix.values()))
