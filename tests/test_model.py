"""The performance model against numbers worked out by hand or by brute force, and the orderings that it must keep."""

import dataclasses
import itertools
import random

import pytest

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuner import grid, model
from zyfa.tuner.facts import Facts, Loop
from zyfa.tuner.grid import grid_time, makespan, programs_in_order, trips
from zyfa.tuner.model import predict
from zyfa.tuner.rates import DEVICES, FITS, matrix_slots

MI355X, H200 = DEVICES["mi355x"], DEVICES["h200"]
# One trip of 128x64, D128, four waves, BF16, full and masked, as in the feasibility table for gfx950.
MIX = {"v_mfma_f32_32x32x16_bf16": 32, "valu": 80, "pk": 40, "trans": 33, "cvt": 16, "barrier": 1}
GFX = Facts(
    "gfx950",
    218,
    0,
    0,
    0,
    68016,
    2,
    2.0,
    7260,
    "hash",
    (Loop(MIX, 32768, 8192), Loop(MIX | {"valu": 200}, 32768, 8192)),
)
SM90 = Facts(
    "sm90", 168, 0, 0, 0, 65536, 3, 3.0, 9000, "hash",
    (Loop({"QGMMA.64x128x32.F32.E4M3.E4M3": 8, "trans": 66, "valu": 200, "valu_half": 60, "cvt": 32}, 16384, 0),),
)  # fmt: skip
CONFIG = AttentionConfig(128, 64, 4, 2)


def key(dtype="bf16", seqlen=4096, causal=False, nheads=32, nheads_k=8, batch=1):
    return AttentionKey(dtype, 128, 128, nheads, nheads_k, batch, seqlen, seqlen, causal)


def changed(mix, facts=GFX):
    return dataclasses.replace(
        facts, loops=tuple(dataclasses.replace(loop, mix=loop.mix | mix) for loop in facts.loops)
    )


# Cycles of AMD's matrix-core table, in slots of 4; WGMMA: 64 x N x K at 4096 (FP8 8192) FLOP a clock.
@pytest.mark.parametrize(
    "op, arch, slots",
    [
        ("v_mfma_f32_32x32x16_bf16", "gfx950", 8),
        ("v_mfma_f32_16x16x32_bf16", "gfx950", 4),
        ("v_mfma_f32_32x32x64_f8f6f4", "gfx950", 16),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", "gfx950", 8),
        ("v_mfma_f32_32x32x16_fp8_fp8", "gfx950", 8),
        ("v_mfma_f32_16x16x32_fp8_fp8", "gfx942", 4),
        ("v_mfma_f32_32x32x8_f16", "gfx942", 8),
        ("v_mfma_f32_16x16x16_bf16", "gfx942", 4),
        ("v_mfma_i32_32x32x32_i8", "gfx950", 8),
        ("v_mfma_i32_16x16x64_i8", "gfx950", 4),
        ("v_mfma_i32_32x32x16_i8", "gfx942", 8),
        ("HGMMA.64x64x16.F32.BF16", "sm90", 32),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "sm90", 64),
    ],
)
def test_matrix_slots(op, arch, slots):
    assert matrix_slots(op, arch) == slots


def test_trip_of_the_bf16_loop_by_hand():
    trip = model._trip(GFX.loops[0], "gfx950", 2, FITS["gfx950"])
    assert trip.matrix == 256
    assert trip.none == 256 + (80 + 16 + 2 * 33) + 40
    assert trip.perfect == max(256 + 40, 80 + 16 + 2 * 33 + 40 + 2 * 32)
    assert trip.extra == 6


def test_makespan_equals_brute_force():
    def by_steps(costs, slots):
        free = [0.0] * slots
        for cost in costs:
            at = min(range(slots), key=free.__getitem__)
            free[at] += cost
        return max(free)

    rng = random.Random(1)
    for n, slots in itertools.product((1, 2, 5, 9, 40), (1, 2, 3, 7)):
        costs = [rng.randint(1, 9) for _ in range(n)]
        assert makespan(costs, slots) == by_steps(costs, slots)


def test_makespan_of_known_cases():
    assert makespan([5, 4, 3, 3, 3], 2) == 10  # 5+3+... on one: 5, 8; other 4, 7, 10
    assert makespan([1, 1, 1, 6], 2) == 7  # the long one last
    assert makespan([6, 1, 1, 1], 2) == 6  # and first
    assert makespan([], 4) == 0


def test_program_order_walks_groups_of_heads():
    costs = [1.0, 2.0]  # two query blocks, the second longer
    config = dataclasses.replace(CONFIG, longest_first=True)
    assert programs_in_order(costs, 3, config) == [2, 2, 2, 1, 1, 1]
    assert programs_in_order(costs, 3, dataclasses.replace(config, head_group=2)) == [2, 2, 1, 1, 2, 1]
    assert programs_in_order(costs, 3, dataclasses.replace(config, longest_first=False)) == [1, 1, 1, 2, 2, 2]


def test_long_grids_in_closed_form_are_close_to_list_scheduling(monkeypatch):
    per_m = [float(m + 3) for m in range(128)]
    for longest_first in (True, False):
        config = dataclasses.replace(CONFIG, longest_first=longest_first)
        exact = grid_time(per_m, 32, 512, config)
        monkeypatch.setattr(grid, "GREEDY_ROUNDS", 0)
        closed = grid_time(per_m, 32, 512, config)
        monkeypatch.undo()
        assert closed == pytest.approx(exact, rel=0.05)


def test_trips_match_the_kernels_ranges():
    config = AttentionConfig(128, 64, 4, 2)
    assert trips(0, key(seqlen=512), config) == (8, 0)
    assert trips(0, key(seqlen=500), config) == (7, 1)
    assert [trips(m, key(seqlen=512, causal=True), config) for m in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    # Bottom-right: 128 queries at the end of 512 keys see all before them.
    longer = key(seqlen=512, causal=True)._replace(seqlen_q=128)
    assert trips(0, longer, config) == (6, 2)
    assert trips(0, longer._replace(seqlen_q=1), config) == (8, 0)
    # More queries than keys: the first blocks see nothing.
    assert trips(0, key(seqlen=512, causal=True)._replace(seqlen_k=128), config) == (0, 0)


def test_every_visible_pair_is_in_some_trip():
    at = key(seqlen=1000, causal=True)._replace(seqlen_q=700)
    config = AttentionConfig(64, 32, 4, 2)
    for m in range(11):
        seen = sum(trips(m, at, config)) * 32
        last = min((m + 1) * 64, 700) - 1 + 300
        assert last + 1 <= seen < last + 1 + 32


@pytest.mark.parametrize(
    "worse",
    [
        changed({"v_mfma_f32_32x32x16_bf16": 64}),
        changed({"trans": 330}),
        changed({"scratch": 50}),
        changed({"barrier": 60}),
        dataclasses.replace(GFX, workgroups_per_unit=1, waves_per_simd=1.0),
    ],
)
def test_more_work_or_less_occupancy_takes_longer(worse):
    assert predict(worse, key(), CONFIG, MI355X).ms > predict(GFX, key(), CONFIG, MI355X).ms


def test_bf16_at_8k_lands_between_the_published_kernels_and_half_of_them():
    flop = 4 * 32 * 8192 * 8192 * 128
    tflops = flop / predict(GFX, key(seqlen=8192), CONFIG, MI355X).ms / 1e9
    assert 719 < tflops < 1438  # hand-written assembly: 1438


def test_interval_holds_the_time_and_the_exp_rate_widens_it():
    got = predict(GFX, key(), CONFIG, MI355X)
    assert got.ms_lo < got.ms < got.ms_hi
    slow_exp = predict(changed({"trans": 66}), key(), CONFIG, MI355X)
    assert slow_exp.ms_hi / slow_exp.ms > got.ms_hi / got.ms


def test_time_grows_with_length_and_causal_is_about_half():
    times = [predict(GFX, key(seqlen=2**n), CONFIG, MI355X).ms for n in range(9, 16)]
    assert times == sorted(times)
    assert 3 < times[-1] / times[-2] < 4.2
    causal = predict(changed({}), key(seqlen=32768, causal=True), CONFIG, MI355X).ms
    assert 0.48 < causal / times[-1] < 0.6


def test_longest_first_beats_natural_order_where_the_tail_is_long():
    at = key(seqlen=4096, causal=True)
    natural = dataclasses.replace(CONFIG, longest_first=False)
    assert predict(GFX, at, CONFIG, MI355X).ms < predict(GFX, at, natural, MI355X).ms


def test_a_grid_smaller_than_the_device_gains_from_smaller_tiles():
    at = key(seqlen=512)
    small = AttentionConfig(64, 64, 2, 2)
    assert predict(GFX, at, small, MI355X).ms < predict(GFX, at, AttentionConfig(256, 64, 8, 2), MI355X).ms


def test_granularity_costs_what_its_passes_move():
    at = key("fp8", seqlen=8192)
    fit = FITS["sm90"]._replace(launch_ms=0.002, quantiser_fraction=0.6)

    def quantise_ms(recipe):
        return model.quantise_ms(at, AttentionConfig(64, 128, 4, 2, recipe=recipe), H200, fit)

    bytes_once = 8192 * 128 * (32 + 2 * 8) * 3
    assert quantise_ms("block") == pytest.approx(bytes_once / (4.8e9 * 0.6) + 0.002)
    assert quantise_ms("head") == pytest.approx(bytes_once * 5 / 3 / (4.8e9 * 0.6) + 0.004)
    assert quantise_ms("none") == 0
    assert quantise_ms("bf16qk") == pytest.approx(8192 * 128 * 8 * 3 / (4.8e9 * 0.6) + 0.002)
    smoothed = (bytes_once + 8192 * 128 * 8 * 2) / (4.8e9 * 0.6)
    assert quantise_ms("int8-kmean") == pytest.approx(smoothed + 2 * 0.002)  # one kernel for the statistics


def test_heads_that_overflow_the_l2_slow_it_down():
    run = model._run(GFX, key(seqlen=1024), CONFIG, MI355X)
    assert model.l2_bytes_per_clk(run) == MI355X.l2_bytes_per_clk
    # 64 query heads of their own K and V, 32 MB each, on eight L2s of 4 MB: almost every shared read misses.
    far = model._run(GFX, key(seqlen=65536, nheads=64, nheads_k=64), CONFIG, MI355X)
    assert MI355X.far_bytes_per_clk < model.l2_bytes_per_clk(far) < MI355X.l2_bytes_per_clk
    grouped = far._replace(config=dataclasses.replace(CONFIG, head_group=8))
    assert model.l2_bytes_per_clk(grouped) > model.l2_bytes_per_clk(far)


@pytest.mark.parametrize(
    "facts, at, grade",
    [
        (GFX, key(), "A"),
        (dataclasses.replace(GFX, spills=4), key(), "B"),
        (changed({"scratch": 1}), key(), "C"),
        (dataclasses.replace(GFX, waves_per_simd=1.0, workgroups_per_unit=1), key(), "C"),
        (GFX, key(seqlen=512), "C"),  # 128 programs on 256 CUs
        (GFX, key()._replace(window_class="local"), "C"),
        (dataclasses.replace(GFX, loops=(Loop(MIX, 200000, 0),)), key(), "B"),  # at the LDS bound
    ],
)
def test_confidence(facts, at, grade):
    assert predict(facts, at, CONFIG, MI355X).confidence == grade


def test_half_rate_matrix_work_is_grade_c():
    config = dataclasses.replace(CONFIG, recipe="block")
    assert predict(GFX, key("fp8"), config, MI355X).confidence == "C"


def test_foreign_or_empty_facts_are_refused():
    with pytest.raises(ValueError, match="sm90"):
        predict(SM90, key("fp8"), CONFIG, MI355X)
    with pytest.raises(ValueError, match="0 matrix loops"):
        predict(dataclasses.replace(GFX, loops=()), key(), CONFIG, MI355X)


def test_hopper_programs_overlap_each_other():
    config = AttentionConfig(64, 128, 4, 3, recipe="block")
    alone = dataclasses.replace(SM90, workgroups_per_unit=1, waves_per_simd=1.0)
    at = key("fp8", seqlen=8192)
    ratio = predict(alone, at, config, H200).ms / predict(SM90, at, config, H200).ms
    assert 1.2 < ratio < 2


def test_warp_groups_of_the_specialised_kernel_overlap_and_wait_for_no_load():
    fit, device = FITS["sm90"], DEVICES["h200"]
    lone = dataclasses.replace(SM90, workgroups_per_unit=1, waves_per_simd=1.0)
    plain = AttentionConfig(128, 128, 8, 2)
    gluon = AttentionConfig(128, 128, 8, 2, variant="gluon")
    best = fit._replace(overlap=(fit.overlap[2],) * 3, stall=0.0, drain=0.0)
    ms = [model.nominal_ms(lone, key(), plain, device, fit), model.nominal_ms(lone, key(), gluon, device, fit)]
    assert ms[1] == model.nominal_ms(lone, key(), plain, device, best) < 0.9 * ms[0]


# --- small grids -------------------------------------------------------------------------------------------------


def chunk(seqlen_q=128, seqlen_k=32768, **more):
    return key(causal=True, **more)._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def test_shares_are_even_and_the_masked_trips_come_last():
    assert grid.shares(6, 2, 2) == [(4, 0), (2, 2)]
    assert grid.shares(0, 3, 2) == [(0, 1), (0, 2)]
    assert grid.shares(1, 0, 4) == [(0, 0), (0, 0), (0, 0), (1, 0)]
    for full, masked, splits in itertools.product(range(7), range(4), (1, 2, 3, 8)):
        parts = grid.shares(full, masked, splits)
        assert (sum(f for f, _ in parts), sum(m for _, m in parts)) == (full, masked)
        assert max(map(sum, parts)) - min(map(sum, parts)) <= 1


def test_packed_rows_see_what_their_queries_see():
    """128 rows are 32 queries of four heads."""
    packed = dataclasses.replace(CONFIG, pack_gqa=True)
    at = key(seqlen=512, causal=True)
    for m in range(16):
        assert trips(m, at, packed) == trips(m, at, dataclasses.replace(CONFIG, BLOCK_M=32))


def test_splits_divide_the_time_of_a_grid_that_leaves_units_idle():
    """32 programs of 512 trips on 256 units: eight splits take an eighth, and the merge."""
    times = {n: predict(GFX, chunk(), dataclasses.replace(CONFIG, splits=n), MI355X) for n in (1, 2, 8)}
    assert times[2].bounds["fixed"] > times[1].bounds["fixed"] + FITS["gfx950"].launch_ms
    grid_ms = {n: t.ms - t.bounds["fixed"] for n, t in times.items()}
    assert grid_ms[2] == pytest.approx(grid_ms[1] / 2, rel=0.02)
    overhead = FITS["gfx950"].overhead * 4 / (2.4 * 0.77e6)  # of each program, whatever its keys
    assert grid_ms[8] == pytest.approx((grid_ms[1] - overhead) / 8 + overhead, rel=0.02)
    full = key(causal=True)  # 1024 programs: nothing to fill, more to merge
    assert predict(GFX, full, dataclasses.replace(CONFIG, splits=2), MI355X).ms > predict(GFX, full, CONFIG, MI355X).ms


def test_merge_moves_the_parts_twice():
    moved = 2 * 4 * 32 * 128 * (4 * 128 + 4) + 2 * 32 * 128 * 128
    split = dataclasses.replace(CONFIG, splits=4)
    fit = FITS["sm90"]
    assert model.merge_ms(chunk(), CONFIG, H200, fit) == 0
    assert model.merge_ms(chunk(), split, H200, fit) == pytest.approx(moved / (19 * 132 * 1.83e6) + fit.launch_ms)


def test_packing_divides_the_programs_of_short_queries():
    packed = dataclasses.replace(CONFIG, pack_gqa=True)
    at = chunk(32, 8192, batch=64)  # 2048 programs of 32 rows, or 512 of 128
    apart, together = (predict(GFX, at, c, MI355X) for c in (CONFIG, packed))
    assert together.bounds["matrix"] == pytest.approx(apart.bounds["matrix"] / 4, rel=0.3)
    assert together.ms < 0.4 * apart.ms


def test_dies_start_parts_of_their_own():
    """Tiles 0 to 10 on 8 dies: three of them have two, and every tile starts once."""
    config = dataclasses.replace(CONFIG, longest_first=False)
    tiles = [float(i) for i in range(11)]
    order = programs_in_order(tiles, 1, dataclasses.replace(config, xcds=8))
    assert order == [0, 2, 4, 6, 7, 8, 9, 10, 1, 3, 5]


def test_heads_of_one_die_share_its_l2():
    """32 query heads of 8 KV heads at 32k, BF16: four KV heads of 16 MB an L2 as dealt, one with a die's own heads."""
    plain = model._run(GFX, key(seqlen=32768), CONFIG, MI355X)
    own = plain._replace(config=dataclasses.replace(CONFIG, xcds=8, head_group=4))
    assert model.l2_bytes_per_clk(own) >= model.l2_bytes_per_clk(plain)
    short = plain._replace(key=key(seqlen=8192))
    own = own._replace(key=key(seqlen=8192))
    assert model.l2_bytes_per_clk(own) == 64 > model.l2_bytes_per_clk(short)  # 4 MB are one KV head of 8k keys
