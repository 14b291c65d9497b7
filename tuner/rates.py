"""The numbers behind the performance model: data sheets, documented rates, and the few that were fitted, with sources.

Everything is counted per SIMD in slots: 4 clocks on gfx (one issue of a 64-wide wave), 1 clock of a quarter SM on sm90.
"""

import re
from typing import NamedTuple


class Device(NamedTuple):
    """One SKU, by its data sheet."""

    sku: str
    arch: str
    units: int  # CUs or SMs
    clock_ghz: float
    hbm_tb_s: float
    l2_mb: float  # of one L2; there are l2_count, programs are dealt to them in turn
    l2_count: int
    l2_bytes_per_clk: float  # per unit, hit
    far_bytes_per_clk: float  # per unit, miss in L2: MALL on AMD, HBM on NVIDIA


# AMD: data sheets; L2 and MALL rates are CDNA3's.
DEVICES = {
    device.sku: device
    for device in (
        Device("mi355x", "gfx950", 256, 2.4, 8.0, 4, 8, 64, 28),
        Device("mi350x", "gfx950", 256, 2.2, 8.0, 4, 8, 64, 28),
        Device("mi325x", "gfx942", 304, 2.1, 6.0, 4, 8, 64, 28),
        Device("mi300x", "gfx942", 304, 2.1, 5.3, 4, 8, 64, 28),
        Device("h200", "sm90", 132, 1.83, 4.8, 50, 1, 64, 19),
        Device("h100", "sm90", 132, 1.83, 3.35, 50, 1, 64, 13),
    )
}


PEAK_FLOP = {"gfx950": 4096, "gfx942": 2048, "sm90": 4096}  # 16-bit dense, a clock and unit; 8 bits: twice as many


def peak_tflops(device: Device, dtype: str) -> float:
    """What its data sheet promises for dense products: H200 989 in BF16, 1979 in FP8; MI355X 2516 and 5033."""
    per_clock = PEAK_FLOP[device.arch] * (2 if dtype == "fp8" else 1)
    return device.units * device.clock_ghz * per_clock / 1e3


class Rates(NamedTuple):
    """Documented slots and bytes of one architecture."""

    clocks: int  # of one slot
    lds_read: int  # bytes a clock and unit
    lds_write: int
    latency: float  # slots of a load from L2 or beyond


# Latency of a global load: 790 clocks, measured by others on gfx950 at 2.2 GHz; 600 on Hopper.
RATES = {
    "gfx950": Rates(4, 256, 128, 790 / 4),
    "gfx942": Rates(4, 128, 128, 790 / 4),
    "sm90": Rates(1, 128, 128, 600),
}


class Fit(NamedTuple):
    """What no document states, of one architecture.

    overlap: of matrix and vector work with 1, 2, >= 3 waves (Hopper: programs) on a SIMD; below 0 they take longer than
    one after the other. spread: how far overlap may be off. stall: slots of a trip in which a wave waits for its own
    results, which other waves can fill. drain: slots that a trip with two stages or fewer takes more. barrier, scratch:
    slots of one. overhead: slots that 128 rows on a unit cost outside the loop: Q in, O out, ramp. clock_fraction: part
    of the peak clock that dense attention sustains. launch_ms: of each kernel of a call. quantiser_fraction: of peak
    HBM bandwidth that the quantisers reach. error: of the whole, by which the interval is widened.
    exp: slots of one exp, likely and pessimistic.
    """

    overlap: tuple[float, float, float]
    spread: float
    stall: float
    drain: float
    barrier: float
    scratch: float
    overhead: float
    clock_fraction: float
    launch_ms: float
    quantiser_fraction: float
    error: float
    exp: tuple[float, float]


# sm90: scripts/validate_model.py --fit on the 28 cells of the shipped H200 database (1,066 timed configs, 2026-11-30);
# with error 9 of 10 held-out times lie in their interval.
# gfx: nothing is timed. overlap and spread are guesses that stay between none and perfect; stall is two dependent reads
# of a 16-pass MFMA (20 slots each, LLVM) and one LDS latency (69 clocks); barrier and scratch are guesses; overhead is
# 8 tiles of 64 keys in BF16, fitted to 94 published MI355X shapes; with clock_fraction the model gives hand-written
# BF16 attention (perfect overlap 272, none 416 slots a trip, two waves a SIMD) its published 1438 TFLOPS on MI355X, an
# upper end for compiled code. launch_ms, quantiser_fraction and error are the H200's.
# exp on gfx950: secondary sources say half rate (2 slots), LLVM prices quarter rate (4): both are carried.
_GFX = Fit((0.25, 0.5, 0.6), 0.2, 57, 0, 6, 16, 3470, 0.77, 0.0034, 0.25, 0.12, (2, 4))
_SM90 = Fit((-0.15, 0.25, 0.55), 0.2, 450, 110, 16, 2, 5900, 0.85, 0.0034, 0.25, 0.12, (8, 8))
FITS = {"gfx950": _GFX, "gfx942": _GFX._replace(exp=(4, 4)), "sm90": _SM90}


def matrix_slots(op: str, arch: str) -> float:
    """Slots that one matrix instruction keeps its pipe busy: FLOP over the rate of its kind."""
    if arch == "sm90":
        shape = re.search(r"GMMA\.64x(\d+)x", op)
        return int(shape[1]) / 2 if shape else 8  # 64 x N x 32 bytes at 4096 (8192) FLOP a clock; mma.sync: half rate
    m, n, k, size = _mfma_shape(op)
    # The longer forms of a type, with more bytes of A, are the faster ones; 8192 FLOP a slot is what the array can do.
    return 2 * m * n * k / min(8192, (4 if size == 2 else 8) * m * k * size)


def _mfma_shape(op: str) -> tuple[int, int, int, int]:
    """(M, N, K, bytes of one operand element) of an MFMA."""
    m, n, k = map(int, re.findall(r"_(\d+)x(\d+)x(\d+)", op)[0])
    return m, n, k, 2 if op.endswith("f16") else 1


def hold_slots(op: str) -> float:
    """Slots at the start of an MFMA in which no vector instruction issues: one, and the bytes of A a lane over 16."""
    m, _, k, size = _mfma_shape(op)
    return 1 + m * k * size / 64 / 16
