"""Time of a config from its machine code alone: pipe bounds, occupancy, grid fill. First version, for ranking.

Everything is counted per SIMD in slots: 4 clocks on gfx (one issue of a 64-wide wave), 1 clock of a quarter SM on sm90.
One trip of a wave costs between `perfect` (matrix and vector work overlap) and `none` (they alternate); `overlap` says
where in between, by the number of waves that share a SIMD. Only OVERLAP, OVERHEAD and clock_fraction are fitted or
guessed; all other numbers are documented rates. Not modelled: dependency stalls, clocks under load, instruction cache.

What was checked: on an 8k sweep of a similar kernel on one H200 (182 timed tiles, eight groups of dtype, head_dim
and causal) the five tiles ranked first hold the fastest of each group; Kendall's tau is .15 to .54. The sm90 form and
constants were chosen looking at that sweep, so this shows fit, not foresight. No gfx part has been timed.
"""

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zyfa.config import AttentionConfig, AttentionKey, octave
from zyfa.limits import operand_bytes
from zyfa.recipes import RECIPES

from .facts import Facts, Loop
from .gate import half_rate, is_matrix

MODEL_VERSION = "v1"


class Device(NamedTuple):
    """One SKU. clock_fraction: part of the peak clock that dense attention sustains, scheduling losses included."""

    sku: str
    arch: str
    units: int  # CUs or SMs
    clock_ghz: float
    clock_fraction: float
    hbm_tb_s: float
    l2_mb: float  # of one L2; there are l2_count, programs are dealt to them in turn
    l2_count: int
    l2_bytes_per_clk: float  # per unit, hit
    far_bytes_per_clk: float  # per unit, miss in L2: MALL on AMD, HBM on NVIDIA


# AMD: data sheets; L2 and MALL rates are CDNA3's. clock_fraction: with it the model gives hand-written BF16 attention
# (perfect overlap 272, none 416 slots a trip, two waves a SIMD) the published 1438 TFLOPS on MI355X, an upper end for
# compiled code. NVIDIA: fitted to the best 8k tiles of a plain Triton kernel on one H200 (554 BF16, 849 FP8 TFLOPS).
DEVICES = {
    device.sku: device
    for device in (
        Device("mi355x", "gfx950", 256, 2.4, 0.77, 8.0, 4, 8, 64, 28),
        Device("mi350x", "gfx950", 256, 2.2, 0.77, 8.0, 4, 8, 64, 28),
        Device("mi325x", "gfx942", 304, 2.1, 0.77, 6.0, 4, 8, 64, 28),
        Device("mi300x", "gfx942", 304, 2.1, 0.77, 5.3, 4, 8, 64, 28),
        Device("h200", "sm90", 132, 1.83, 0.85, 4.8, 50, 1, 64, 19),
        Device("h100", "sm90", 132, 1.83, 0.85, 3.35, 50, 1, 64, 13),
    )
}


@dataclass(frozen=True)
class _Rates:
    """Slots and bytes of one architecture."""

    clocks: int  # of one slot
    exp: tuple[float, float]  # slots of one exp, likely and pessimistic
    lds_read: int  # bytes a clock and unit
    lds_write: int
    barrier: float
    scratch: float
    latency: float  # of a load from L2 or beyond
    overhead: float  # slots that 128 rows on a unit cost outside the loop: Q in, O out, ramp


# exp on gfx950: secondary sources say half rate (2 slots), LLVM prices quarter rate (4): both are carried.
# overhead: 8 tiles of 64 keys in BF16 (fit to 94 published MI355X shapes); 2 tiles of 128 on Hopper.
RATES = {
    "gfx950": _Rates(4, (2, 4), 256, 128, 6, 16, 790 / 4, 3470),
    "gfx942": _Rates(4, (4, 4), 128, 128, 6, 16, 790 / 4, 3470),
    "sm90": _Rates(1, (8, 8), 128, 128, 24, 4, 600, 5900),
}
# Overlap of matrix and vector work with 1, 2, >= 3 waves on a SIMD: placeholders until a GPU of the kind is timed.
OVERLAP = (0.25, 0.5, 0.6)
OVERLAP_SPREAD = 0.2
LAUNCH_MS = 0.002  # a kernel after another on one stream
QUANTISER_FRACTION = 0.6  # of peak HBM bandwidth that a one-pass conversion reaches
GREEDY_PROGRAMS = 8192  # up to here the grid is list-scheduled program by program


class Prediction(NamedTuple):
    """ms with its interval; confidence "A", "B" or "C"; bounds: what each limit alone would allow, in ms."""

    ms: float
    ms_lo: float
    ms_hi: float
    confidence: str
    bounds: dict[str, float]


class _Trip(NamedTuple):
    """Slots of one loop trip of one wave."""

    perfect: float
    none: float
    extra: float
    matrix: float
    vector: float

    def slots(self, overlap: float) -> float:
        return overlap * self.perfect + (1 - overlap) * self.none + self.extra


# --- one trip of one wave ----------------------------------------------------------------------------------------


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


def _hold_slots(op: str) -> float:
    """Slots at the start of an MFMA in which no vector instruction issues: one, and the bytes of A a lane over 16."""
    m, _, k, size = _mfma_shape(op)
    return 1 + m * k * size / 64 / 16


def _trip(loop: Loop, arch: str, exp_slots: float) -> _Trip:
    count = loop.mix.get
    rates = RATES[arch]
    matrix = {op: n for op, n in loop.mix.items() if is_matrix(op)}
    busy = sum(n * matrix_slots(op, arch) for op, n in matrix.items())
    extra = rates.barrier * count("barrier", 0) + rates.scratch * count("scratch", 0) + count("nop", 0)
    if arch == "sm90":
        issue = sum(n for kind, n in loop.mix.items() if not is_matrix(kind))
        half = 2 * (count("valu_half", 0) + count("cvt", 0))
        vector = max(exp_slots * count("trans", 0), half, 4 * count("xlane", 0), issue)
        return _Trip(max(busy, vector), busy + vector, extra, busy, vector)
    plain = 2 * count("xlane", 0) + exp_slots * count("trans", 0)
    plain += sum(count(kind, 0) for kind in ("valu", "cvt", "agpr"))
    packed = count("pk", 0)  # packed FP32 never issues beside an MFMA
    hold = sum(n * _hold_slots(op) for op, n in matrix.items())
    perfect = max(busy + packed, plain + packed + hold)
    return _Trip(perfect, busy + plain + packed, extra, busy, plain + packed)


# --- one trip of all that runs on a unit -------------------------------------------------------------------------


class _Run(NamedTuple):
    """One call on one device; workgroups: how many share a CU or SM."""

    facts: Facts
    key: AttentionKey
    config: AttentionConfig
    device: Device
    workgroups: int

    @property
    def batch_heads(self) -> int:
        return self.key.batch * self.key.nheads

    @property
    def num_m_blocks(self) -> int:
        return -(-self.key.seqlen_q // self.config.BLOCK_M)

    @property
    def slots(self) -> int:
        """Programs that run at a time."""
        return self.device.units * self.workgroups

    @property
    def waves_per_simd(self) -> float:
        return self.workgroups * self.config.num_warps / 4

    @property
    def rates(self) -> _Rates:
        return RATES[self.device.arch]

    @property
    def tile_bytes(self) -> int:
        """Of K and V for one trip."""
        qk_size, v_size = operand_bytes(self.config)
        return self.config.BLOCK_N * (octave(self.key.head_dim) * qk_size + octave(self.key.head_dim_v) * v_size)


def _run(facts: Facts, key: AttentionKey, config: AttentionConfig, device: Device) -> _Run:
    alone = _Run(facts, key, config, device, 1)
    share = math.ceil(alone.num_m_blocks * alone.batch_heads / device.units)
    return alone._replace(workgroups=max(1, min(facts.workgroups_per_unit, share)))


def _overlap(run: _Run) -> float:
    """Hopper: warps of one program move in step (on one H200, 8k: FP8 128x128, 8 warps lost a third to 64x128, 4 warps,
    two programs an SM), so programs count there and not warps.
    """
    partners = run.workgroups if run.device.arch == "sm90" else round(run.waves_per_simd)
    return OVERLAP[min(max(partners, 1), len(OVERLAP)) - 1]


def _lds_slots(loop: Loop, run: _Run) -> float:
    """Slots of the LDS pipe for one trip of all resident workgroups.

    On Hopper what TMA and cp.async write is left out.
    """
    rates = run.rates
    clocks = run.config.num_warps * (loop.lds_read_bytes / rates.lds_read + loop.lds_write_bytes / rates.lds_write)
    return run.workgroups * clocks / rates.clocks


def l2_bytes_per_clk(run: _Run) -> float:
    """Rate at which a unit gets K and V, by how much of those of all heads that run at once fits in the L2s.

    Neighbouring programs go to different L2s in turn, so a group of heads that the number of L2s divides keeps each
    head in one of them. Programs of one head walk its keys together and share what misses.
    """
    key, device = run.key, run.device
    width = min(run.config.head_group or run.batch_heads, run.batch_heads)
    groups = math.ceil(run.slots / (run.num_m_blocks * width))
    heads = min(run.batch_heads, width * groups)
    per_l2 = math.ceil(heads / math.gcd(width, device.l2_count))
    kv_heads = min(per_l2, math.ceil(heads * key.nheads_k / key.nheads))
    hot = kv_heads * key.seqlen_k / run.config.BLOCK_N * run.tile_bytes
    sharers = max(1.0, run.slots / device.l2_count / kv_heads)
    miss = max(0.0, 1 - device.l2_mb * 2**20 / hot) / sharers
    return 1 / ((1 - miss) / device.l2_bytes_per_clk + miss / device.far_bytes_per_clk)


def _l2_slots(run: _Run) -> float:
    return run.workgroups * run.tile_bytes / l2_bytes_per_clk(run) / run.rates.clocks


def _unit_slots(loop: Loop, run: _Run, exp_slots: float, overlap: float) -> float:
    """Slots in which every resident workgroup does one trip."""
    slots = _trip(loop, run.device.arch, exp_slots).slots(overlap)
    exposed = max(0.0, run.rates.latency - (run.config.num_stages - 1) * slots)  # loads run num_stages - 1 trips ahead
    return max(slots * max(run.waves_per_simd, 1), slots + exposed, _lds_slots(loop, run), _l2_slots(run))


# --- the grid ----------------------------------------------------------------------------------------------------


def trips(m: int, key: AttentionKey, config: AttentionConfig) -> tuple[int, int]:
    """(unmasked, masked) loop trips of query block m, as the kernel walks them; a local window is taken as open."""
    hi = full_hi = key.seqlen_k
    if key.causal:
        shift = key.seqlen_k - key.seqlen_q
        hi = min(key.seqlen_k, max(0, min((m + 1) * config.BLOCK_M, key.seqlen_q) + shift))
        full_hi = min(key.seqlen_k, max(0, m * config.BLOCK_M + shift + 1))
    full = full_hi // config.BLOCK_N
    return full, max(0, -(-(hi - full * config.BLOCK_N) // config.BLOCK_N))


def programs_in_order(per_m: Sequence[float], batch_heads: int, config: AttentionConfig) -> list[float]:
    """Costs of all programs in launch order, from the cost of each query block."""
    order = list(reversed(per_m)) if config.longest_first else list(per_m)
    width = config.head_group or batch_heads
    widths = [min(width, batch_heads - first) for first in range(0, batch_heads, width)]
    return [cost for heads in widths for cost in order for _ in range(heads)]


def makespan(costs: Sequence[float], slots: int) -> float:
    """Time until all are done when each starts, in order, on the slot that is free first."""
    busy = list(costs[:slots])
    heapq.heapify(busy)
    for cost in costs[slots:]:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy, default=0.0)


def grid_time(per_m: Sequence[float], batch_heads: int, slots: int, config: AttentionConfig) -> float:
    """makespan of the whole grid; of grids beyond GREEDY_PROGRAMS the mean load plus half of the last program."""
    programs = len(per_m) * batch_heads
    longest = max(per_m)
    if longest == min(per_m):
        return math.ceil(programs / slots) * longest
    if programs <= GREEDY_PROGRAMS:
        return makespan(programs_in_order(per_m, batch_heads, config), slots)
    last = per_m[0] if config.longest_first else per_m[-1]
    return max(longest, sum(per_m) * batch_heads / slots + last / 2)


# --- the prediction ----------------------------------------------------------------------------------------------


def quantise_ms(key: AttentionKey, config: AttentionConfig, device: Device) -> float:
    """Time of the quantisers: bytes over bandwidth, and launches.

    Scales wider than a block and the statistics of the smoothing steps need a pass over the data before.
    """
    if config.recipe == "none":
        return 0.0
    recipe = RECIPES[config.recipe]
    q = key.batch * key.seqlen_q * key.nheads * key.head_dim
    k, v = (key.batch * key.seqlen_k * key.nheads_k * dim for dim in (key.head_dim, key.head_dim_v))
    converted = v if recipe.qk == "bf16" else q + k + v
    scanned = k * (recipe.k_mean or recipe.equalise) + q * (recipe.q_mean or recipe.equalise)
    if recipe.granularity in ("head", "tensor"):
        scanned = converted
    elif recipe.v_scaled_by in ("head", "channel"):
        scanned += v
    moved = 3 * converted + 2 * scanned  # bytes: 16 bits in and 8 out, and 16 in for statistics
    return moved / (device.hbm_tb_s * 1e9 * QUANTISER_FRACTION) + (2 if scanned else 1) * LAUNCH_MS


def _costs(run: _Run, exp_slots: float, overlap: float) -> list[float]:
    """Slots of a program of each query block.

    The loop without masks is the cheapest of the code's loops; those with masks hold more compares and selects.
    """
    each = [_unit_slots(loop, run, exp_slots, overlap) for loop in run.facts.loops]
    overhead = run.rates.overhead * run.config.BLOCK_M * run.workgroups / 128
    counts = (trips(m, run.key, run.config) for m in range(run.num_m_blocks))
    return [full * min(each) + masked * max(each) + overhead for full, masked in counts]


def _bounds(run: _Run) -> dict[str, float]:
    """Slots of the whole grid, perfectly spread, if one resource alone did all trips without masks."""
    loop = min(run.facts.loops, key=lambda loop: _trip(loop, run.device.arch, run.rates.exp[0]).none)
    trip = _trip(loop, run.device.arch, run.rates.exp[0])
    waves = max(run.waves_per_simd, 1)
    each = {
        "matrix": trip.matrix * waves,
        "vector": trip.vector * waves,
        "lds": _lds_slots(loop, run),
        "l2": _l2_slots(run),
    }
    total = sum(sum(trips(m, run.key, run.config)) for m in range(run.num_m_blocks)) * run.batch_heads
    return {name: slots * total / run.slots for name, slots in each.items()}


def _confidence(run: _Run, near_memory: bool) -> str:
    """A: nothing known against the prediction; B: spills, or memory bounds are near; C: the model's ground is left."""
    facts = run.facts
    kinds = {kind for loop in facts.loops for kind in loop.mix}
    slow = half_rate(facts, run.key, run.config)
    empty_units = run.num_m_blocks * run.batch_heads < run.device.units
    if slow or "scratch" in kinds or facts.waves_per_simd <= 1 or empty_units or run.key.window_class != "none":
        return "C"
    return "B" if facts.spills or near_memory else "A"


def predict(facts: Facts, key: AttentionKey, config: AttentionConfig, device: Device) -> Prediction:
    """Time of one attention call, quantisers included, on an otherwise idle device.

    Raises ValueError when the code has no loop with matrix instructions or was built for another architecture.
    """
    if facts.arch != device.arch or not facts.loops:
        raise ValueError(
            f"facts of {facts.arch} with {len(facts.loops)} matrix loops cannot be priced for {device.sku}"
        )
    run = _run(facts, key, config, device)
    overlap = _overlap(run)
    costs = _costs(run, run.rates.exp[0], overlap)
    low = _costs(run, run.rates.exp[0], min(1.0, overlap + OVERLAP_SPREAD))
    high = _costs(run, run.rates.exp[1], max(0.0, overlap - OVERLAP_SPREAD))
    ms_per_slot = run.rates.clocks / (device.clock_ghz * device.clock_fraction * 1e6)
    grid_ms = grid_time(costs, run.batch_heads, run.slots, config) * ms_per_slot
    fixed_ms = LAUNCH_MS + quantise_ms(key, config, device)
    bounds = {name: slots * ms_per_slot for name, slots in _bounds(run).items()}
    bounds["spread"] = sum(costs) * run.batch_heads / run.slots * ms_per_slot
    bounds["fixed"] = fixed_ms
    return Prediction(
        grid_ms + fixed_ms,
        grid_ms * sum(low) / sum(costs) + fixed_ms,
        grid_ms * sum(high) / sum(costs) + fixed_ms,
        _confidence(run, max(bounds["lds"], bounds["l2"]) > 0.85 * bounds["spread"]),
        bounds,
    )
