"""Time of a config from its machine code alone: pipe bounds, occupancy, grid fill. For ranking first, times second.

One trip of a wave costs between `perfect` (matrix and vector work overlap) and `none` (they alternate); `overlap` says
where in between, by the number of waves that share a SIMD. Waves share the pipes and fill each other's waits; LDS, L2
and the latency of loads bound a trip from below; a grid is list-scheduled over the units. The numbers, documented and
fitted, are in rates.py; what is claimed of the result, and the measurements behind that, in claims.py. Not modelled:
clocks under load, instruction cache.
"""

import math
from typing import NamedTuple

from zyfa.config import AttentionConfig, AttentionKey, octave
from zyfa.grid_fill import grid_heads, programs, query_blocks
from zyfa.limits import operand_bytes
from zyfa.recipes import RECIPES, Recipe

from .facts import Facts, Loop
from .gate import half_rate, is_matrix
from .grid import all_trips, grid_time
from .rates import DEVICES, FITS, RATES, Device, Fit, Rates, hold_slots, matrix_slots

__all__ = ["DEVICES", "MODEL_VERSION", "Device", "Prediction", "predict"]

MODEL_VERSION = "v2"


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


# --- one trip of one wave ------------------------------------------------------------------------------------------


def _trip(loop: Loop, arch: str, exp_slots: float, fit: Fit) -> _Trip:
    count = loop.mix.get
    matrix = {op: n for op, n in loop.mix.items() if is_matrix(op)}
    busy = sum(n * matrix_slots(op, arch) for op, n in matrix.items())
    extra = fit.barrier * count("barrier", 0) + fit.scratch * count("scratch", 0) + count("nop", 0)
    if arch == "sm90":
        issue = sum(n for kind, n in loop.mix.items() if not is_matrix(kind))
        half = 2 * (count("valu_half", 0) + count("cvt", 0))
        vector = max(exp_slots * count("trans", 0), half, 4 * count("xlane", 0), issue)
        return _Trip(max(busy, vector), busy + vector, extra, busy, vector)
    plain = 2 * count("xlane", 0) + exp_slots * count("trans", 0)
    plain += sum(count(kind, 0) for kind in ("valu", "cvt", "agpr"))
    packed = count("pk", 0)  # packed FP32 never issues beside an MFMA
    hold = sum(n * hold_slots(op) for op, n in matrix.items())
    perfect = max(busy + packed, plain + packed + hold)
    return _Trip(perfect, busy + plain + packed, extra, busy, plain + packed)


# --- one trip of all that runs on a unit -------------------------------------------------------------------------


class _Run(NamedTuple):
    """One call on one device; workgroups: how many share a CU or SM."""

    facts: Facts
    key: AttentionKey
    config: AttentionConfig
    device: Device
    fit: Fit
    workgroups: int

    @property
    def batch_heads(self) -> int:
        return grid_heads(self.key, self.config)

    @property
    def num_m_blocks(self) -> int:
        """Programs of a head: its query blocks, times the splits."""
        return query_blocks(self.key, self.config) * self.config.splits

    @property
    def slots(self) -> int:
        """Programs that run at a time."""
        return self.device.units * self.workgroups

    @property
    def waves_per_simd(self) -> float:
        return self.workgroups * self.config.num_warps / 4

    @property
    def rates(self) -> Rates:
        return RATES[self.device.arch]

    @property
    def ms_per_slot(self) -> float:
        return self.rates.clocks / (self.device.clock_ghz * self.fit.clock_fraction * 1e6)

    @property
    def tile_bytes(self) -> int:
        """Of K and V for one trip."""
        qk_size, v_size = operand_bytes(self.config)
        return self.config.BLOCK_N * (octave(self.key.head_dim) * qk_size + octave(self.key.head_dim_v) * v_size)


def _run(facts: Facts, key: AttentionKey, config: AttentionConfig, device: Device, fit: Fit | None = None) -> _Run:
    fit = fit or FITS[device.arch]
    if device.arch == "sm90" and config.variant == "gluon":
        fit = _specialised(fit)
    alone = _Run(facts, key, config, device, fit, 1)
    share = math.ceil(programs(key, config) / device.units)
    return alone._replace(workgroups=max(1, min(facts.workgroups_per_unit, share)))


def _specialised(fit: Fit) -> Fit:
    """Numbers of Hopper's warp-specialised kernel: a warp of its own loads, so that nothing drains, and while one warp
    group waits for its products another one computes: it overlaps as if as many programs as pay shared the unit.

    On eight recorded cells of an H200 (benchmarks/h200/model-gluon.json) this orders its configs among the plain ones;
    priced as a plain program it came out a third too slow.
    """
    return fit._replace(overlap=(fit.overlap[2],) * 3, stall=0.0, drain=0.0)


def _overlap(run: _Run) -> float:
    """Hopper: warps of one program move in step (on one H200, 8k: FP8 128x128, 8 warps lost a third to 64x128, 4 warps,
    two programs an SM), so programs count there and not warps.
    """
    partners = run.workgroups if run.device.arch == "sm90" else round(run.waves_per_simd)
    return run.fit.overlap[min(max(partners, 1), 3) - 1]


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
    head in one of them; with xcds each L2 has heads of its own, and those of one KV head side by side. Programs of one
    head walk its keys together and share what misses.
    """
    key, device = run.key, run.device
    dies = device.l2_count if run.config.xcds else 1
    width = min(run.config.head_group or run.batch_heads, run.batch_heads)
    groups = math.ceil(run.slots / dies / (run.num_m_blocks * width))
    heads = min(math.ceil(run.batch_heads / dies), width * groups)
    per_l2 = heads if run.config.xcds else math.ceil(heads / math.gcd(width, device.l2_count))
    group = 1 if run.config.pack_gqa else key.nheads // key.nheads_k
    kv_heads = min(per_l2, math.ceil(heads / group))
    hot = kv_heads * key.seqlen_k / run.config.BLOCK_N * run.tile_bytes
    sharers = max(1.0, run.slots / device.l2_count / kv_heads)
    miss = max(0.0, 1 - device.l2_mb * 2**20 / hot) / sharers
    return 1 / ((1 - miss) / device.l2_bytes_per_clk + miss / device.far_bytes_per_clk)


def _l2_slots(run: _Run) -> float:
    return run.workgroups * run.tile_bytes / l2_bytes_per_clk(run) / run.rates.clocks


def _unit_slots(loop: Loop, run: _Run, exp_slots: float, overlap: float) -> float:
    """Slots in which every resident workgroup does one trip."""
    slots = _trip(loop, run.device.arch, exp_slots, run.fit).slots(overlap)
    exposed = max(0.0, run.rates.latency - (run.config.num_stages - 1) * slots)  # loads run num_stages - 1 trips ahead
    slots += run.fit.drain if run.config.num_stages <= 2 else 0.0
    alone = slots + max(exposed, run.fit.stall)
    return max(slots * max(run.waves_per_simd, 1), alone, _lds_slots(loop, run), _l2_slots(run))


# --- the prediction ----------------------------------------------------------------------------------------------


def quantiser_work(key: AttentionKey, recipe: Recipe) -> tuple[int, int]:
    """(bytes that the quantisers read and write, launches), without the small sums and scales.

    Scales wider than a block and the statistics of the smoothing steps need a pass over the data before.
    """
    q = key.batch * key.seqlen_q * key.nheads * key.head_dim
    k, v = (key.batch * key.seqlen_k * key.nheads_k * dim for dim in (key.head_dim, key.head_dim_v))
    converted = v if recipe.qk == "bf16" else q + k + v
    scanned = k * (recipe.k_mean or recipe.equalise) + q * (recipe.q_mean or recipe.equalise)
    launches = 2 if scanned else 1
    if recipe.granularity in ("head", "tensor"):
        scanned, launches = converted, 2
    elif recipe.v_scaled_by in ("head", "channel"):
        scanned, launches = scanned + v, launches + 1
    return 3 * converted + 2 * scanned, launches  # 16 bits in and 8 out, and 16 in for statistics


def quantise_ms(key: AttentionKey, config: AttentionConfig, device: Device, fit: Fit) -> float:
    """Time of the quantisers: bytes over bandwidth, and launches."""
    if config.recipe == "none":
        return 0.0
    moved, launches = quantiser_work(key, RECIPES[config.recipe])
    return moved / (device.hbm_tb_s * 1e9 * fit.quantiser_fraction) + launches * fit.launch_ms


def merge_ms(key: AttentionKey, config: AttentionConfig, device: Device, fit: Fit) -> float:
    """Time that split keys cost beside the shorter loops: the parts, in fp32, written and read, and one launch.

    They pass through what lies behind the L2s: each program's part is read by another unit.
    """
    if config.splits == 1:
        return 0.0
    rows = key.batch * key.nheads * key.seqlen_q
    moved = 2 * config.splits * rows * (4 * key.head_dim_v + 4) + 2 * rows * key.head_dim_v
    return moved / (device.far_bytes_per_clk * device.units * device.clock_ghz * 1e6) + fit.launch_ms


def _costs(run: _Run, exp_slots: float, overlap: float) -> list[float]:
    """Slots of a program of each query block and split.

    The loop without masks is the cheapest of the code's loops; those with masks hold more compares and selects.
    """
    each = [_unit_slots(loop, run, exp_slots, overlap) for loop in run.facts.loops]
    overhead = run.fit.overhead * run.config.BLOCK_M * run.workgroups / 128
    return [full * min(each) + masked * max(each) + overhead for full, masked in _counts(run)]


def _counts(run: _Run) -> tuple[tuple[int, int], ...]:
    return all_trips(run.key, run.config.BLOCK_M, run.config.BLOCK_N, run.config.splits, run.config.pack_gqa)


def _bounds(run: _Run) -> dict[str, float]:
    """Slots of the whole grid, perfectly spread, if one resource alone did all trips without masks."""
    loop = min(run.facts.loops, key=lambda loop: _trip(loop, run.device.arch, run.fit.exp[0], run.fit).none)
    trip = _trip(loop, run.device.arch, run.fit.exp[0], run.fit)
    waves = max(run.waves_per_simd, 1)
    each = {
        "matrix": trip.matrix * waves,
        "vector": trip.vector * waves,
        "lds": _lds_slots(loop, run),
        "l2": _l2_slots(run),
    }
    total = sum(map(sum, _counts(run))) * run.batch_heads
    return {name: slots * total / run.slots for name, slots in each.items()}


def _confidence(run: _Run, near_memory: bool) -> str:
    """C: code or shape on which the model was far off or is blind; B: limits that nothing timed came near; A: the rest.

    On one H200 a tenth of the times was more than 14 % off with grade A, and more than 23 % where private memory is
    used or one wave has a SIMD for itself.
    """
    facts = run.facts
    private = facts.scratch_bytes or facts.scratch_in_loops
    if half_rate(facts, run.key, run.config) or private or run.waves_per_simd <= 1 or run.key.window_class != "none":
        return "C"
    empty_units = run.num_m_blocks * run.batch_heads < run.device.units
    return "B" if facts.spills or near_memory or empty_units else "A"


def predict(
    facts: Facts, key: AttentionKey, config: AttentionConfig, device: Device, fit: Fit | None = None
) -> Prediction:
    """Time of one attention call, quantisers included, on an otherwise idle device.

    Raises ValueError when the code has no loop with matrix instructions or was built for another architecture.
    """
    if facts.arch != device.arch or not facts.loops:
        raise ValueError(
            f"facts of {facts.arch} with {len(facts.loops)} matrix loops cannot be priced for {device.sku}"
        )
    run = _run(facts, key, config, device, fit)
    overlap, spread = _overlap(run), run.fit.spread
    costs = _costs(run, run.fit.exp[0], overlap)
    low = _costs(run, run.fit.exp[0], min(1.0, overlap + spread))
    high = _costs(run, run.fit.exp[1], overlap - spread)
    grid_ms = grid_time(costs, run.batch_heads, run.slots, config) * run.ms_per_slot
    fixed_ms = _fixed_ms(key, config, device, run.fit)
    bounds = {name: slots * run.ms_per_slot for name, slots in _bounds(run).items()}
    bounds["spread"] = sum(costs) * run.batch_heads / run.slots * run.ms_per_slot
    bounds["fixed"] = fixed_ms
    return Prediction(
        grid_ms + fixed_ms,
        (grid_ms * sum(low) / sum(costs) + fixed_ms) * (1 - run.fit.error),
        (grid_ms * sum(high) / sum(costs) + fixed_ms) * (1 + run.fit.error),
        _confidence(run, max(bounds["lds"], bounds["l2"]) > 0.85 * bounds["spread"]),
        bounds,
    )


def nominal_ms(facts: Facts, key: AttentionKey, config: AttentionConfig, device: Device, fit: Fit) -> float:
    """predict(...).ms alone, in a third of the time; what fitting.py minimises the error of."""
    run = _run(facts, key, config, device, fit)
    costs = _costs(run, run.fit.exp[0], _overlap(run))
    grid_ms = grid_time(costs, run.batch_heads, run.slots, config) * run.ms_per_slot
    return grid_ms + _fixed_ms(key, config, device, fit)


def _fixed_ms(key: AttentionKey, config: AttentionConfig, device: Device, fit: Fit) -> float:
    """Everything but the grid of the attention kernel."""
    return fit.launch_ms + quantise_ms(key, config, device, fit) + merge_ms(key, config, device, fit)
