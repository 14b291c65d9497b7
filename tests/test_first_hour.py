"""The first hour on a simulated GPU whose numbers are not the model's: it must find them, and say what was wrong."""

import dataclasses
import json
import random
import statistics
from concurrent.futures import Future

import pytest
from click.testing import CliRunner
from rich.console import Console

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import device_of_sku
from zyfa.recipes import PRESETS
from zyfa.tuner import cli, first_hour, first_hour_run, session
from zyfa.tuner import first_hour_probes as probes
from zyfa.tuner.compile import Build
from zyfa.tuner.facts import Facts, Loop, workgroups_per_unit
from zyfa.tuner.first_hour import Candidate, Hour, check_list, choose, kit_keys
from zyfa.tuner.first_hour_report import changes, discarded_fast, lines, to_dict
from zyfa.tuner.model import DEVICES, Prediction, nominal_ms
from zyfa.tuner.plan import PlannedCell
from zyfa.tuner.rates import FITS
from zyfa.tuner.worker import Result
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.merge import merged
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

TOOLS = Toolchain("k1", "3.7.1", "2.13.0", "6.14")
TRUE = FITS["gfx950"]._replace(overlap=(0.05, 0.2, 0.4), clock_fraction=0.62, overhead=6470)
KEYS = [kit_keys()[n] for n in (0, 2, 3)]


def facts_for(key: AttentionKey, config: AttentionConfig) -> Facts:
    """Machine code of about the right size: 32 x BLOCK_N scores a wave, and registers that grow with the tile."""
    scores, products = config.BLOCK_N // 2, config.BLOCK_N * key.head_dim // 256
    matrix = "v_mfma_f32_32x32x64_f8f6f4" if key.dtype == "fp8" else "v_mfma_f32_32x32x16_bf16"
    mix = {matrix: products // (4 if key.dtype == "fp8" else 1), "trans": scores + 1, "valu": 3 * scores, "pk": scores}
    registers = 60 + config.BLOCK_M * (config.BLOCK_N + key.head_dim) // (56 * config.num_warps)
    spills = max(0, registers - 512 // max(config.num_warps // 4, config.waves_per_eu, 1))
    lds = config.num_stages * config.BLOCK_N * key.head_dim * 2
    loops = (Loop(mix, 4 * lds, lds), Loop(mix | {"valu": 6 * scores}, 4 * lds, lds))
    groups = workgroups_per_unit("gfx950", min(registers, 512), lds, config.num_warps)
    return Facts(
        "gfx950", registers, 0, spills, 4 * spills, lds, groups, groups * config.num_warps / 4, 8000, "h", loops
    )


def compiles(key, config):
    future = Future()
    config = dataclasses.replace(config, longest_first=True)
    future.set_result(Build(facts_for(key, config), None, 0.0))
    return future


class SimulatedGpu:
    """A pool whose times are the model's with other numbers, and some noise; `wrong` recipes give wrong results."""

    gpus = (0,)

    def __init__(self, wrong=()):
        self.wrong, self._random, self.jobs = wrong, random.Random(0), 0

    def submit(self, gpu, job, limit_s):
        self.jobs += 1
        (config,) = job.configs
        future = Future()
        if config.recipe in self.wrong:
            future.set_result([Result("wrong", reason="error 0.5 exceeds 0.1")])
            return future
        ms = nominal_ms(facts_for(job.key, config), job.key, config, DEVICES["mi355x"], TRUE)
        ms *= 1 + self._random.uniform(-0.002, 0.002)
        future.set_result([Result("ok", ms, ms * 0.998, ms * 1.002, (ms,) * 9, 0.002)])
        return future


def simulated_probe(exp=4.0, overlap=(0.05, 0.2, 0.4), clock_ghz=1.5) -> probes.Probe:
    """What probes on such a GPU would take: gfx950's real mixes, at the true rates."""
    mix = {
        "fma": {"pk": 128}, "exp": {"trans": 128, "valu": 96, "pk": 16}, "matrix": {"v_mfma_f32_32x32x16_bf16": 32},
        "both": {},
    }  # fmt: skip
    slot_ms = 4 / (clock_ghz * 1e6)
    slots = {"fma": 128, "exp": 128 * exp + 112, "matrix": 256}
    ms = {kind: {w: probes.TRIPS * w * n * slot_ms for w in probes.WAVES} for kind, n in slots.items()}
    both = {
        w: ms["matrix"][w] + ms["exp"][w] - a * min(ms["matrix"][w], ms["exp"][w])
        for w, a in zip(probes.WAVES, overlap, strict=True)
    }
    return probes.Probe(ms | {"both": both}, mix, 0.005)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """One hour on the simulated GPU, with one preset wrong, and the database that it wrote."""
    path = tmp_path_factory.mktemp("hour") / "db.sqlite"
    checks = [check for check in check_list("gfx950") if check.key.causal and check.key.head_dim == 128]
    said: list[str] = []
    with Store(path, device_of_sku("mi355x")) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        gpu = SimulatedGpu(wrong=(PRESETS["per_tensor"],))
        hour = Hour("mi355x", "gfx950", compiles, gpu, simulated_probe, store, TOOLS, said.append)
        return hour.run(checks, KEYS), path, said


def test_the_rates_of_the_gpu_are_found(outcome):
    found = outcome[0].probed
    assert found.exp == pytest.approx(4.0) and found.clock_ghz == pytest.approx(1.5)
    assert found.overlap == pytest.approx((0.05, 0.2, 0.4)) and found.launch_ms == 0.005


@pytest.mark.parametrize("exp", [2.0, 4.0])
def test_both_rates_of_exp_can_be_told_apart(exp):
    assert probes.found(simulated_probe(exp=exp), "gfx950").exp == pytest.approx(exp)


def test_probes_set_the_numbers_that_they_measure():
    fit = probes.found(simulated_probe(), "gfx950").applied(FITS["gfx950"], 2.4)
    assert fit.exp == pytest.approx((4, 4)) and fit.clock_fraction == pytest.approx(1.5 / 2.4)
    assert fit.stall == FITS["gfx950"].stall


def test_fitted_numbers_explain_the_kit_better_than_the_shipped_ones(outcome):
    hour = outcome[0]
    assert len(hour.shapes) == len(KEYS)
    for shape in hour.shapes:
        assert shape.after.tau > 0.85 and shape.after.top5 <= 0.01
    before, after = (statistics.mean(getattr(s, when).tau for s in hour.shapes) for when in ("before", "after"))
    assert after >= before - 0.02, "over the kit: near ties may turn in one shape"
    changed = {name: new for name, _, new in changes(hour.fits["shipped"], hour.fits["fitted"])}
    assert changed["clock_fraction"] == pytest.approx(0.62, abs=0.05)


def test_every_trial_of_the_kit_is_stored_and_can_be_merged(outcome):
    hour, path, _ = outcome
    content = read_content(path)
    assert len(content.trials) == sum(len(shape.tried) for shape in hour.shapes)
    assert all(r.trust == "measured" and r.samples_us and r.facts != "{}" for r in content.trials)
    assert merged([content, content])[0].trials == content.trials


def test_a_wrong_preset_is_named(outcome):
    hour, _, said = outcome
    wrong = [name for name, result in hour.checks.items() if result.outcome == "wrong"]
    assert wrong == ["fp8:per_tensor causal d128 h8:2"]
    text = "\n".join(lines(hour, "amd/gfx950/mi355x/cu256"))
    assert "5 of 6 calls of the self-test are right" in text and "fp8:per_tensor causal d128 h8:2: wrong" in text
    assert any("5 of 6 are right" in line for line in said)


def test_the_report_says_what_changed(outcome):
    text = "\n".join(lines(outcome[0], "amd/gfx950/mi355x/cu256"))
    assert "exp takes 4.00 slots" in text and "clock_fraction: 0.77 -> " in text
    assert text.count("predicted best:") == text.count("order: tau") == len(KEYS)
    assert "model as shipped" in text and "gate: would have discarded" in text
    values = json.loads(json.dumps(to_dict(outcome[0], {"sku": "x"})))
    assert len(values["shapes"]) == len(KEYS) and values["shapes"][0]["tried"][0]["facts"]["loops"]
    assert values["probed"]["exp"] == pytest.approx(4.0) and values["gate"]["fastest"] == 5 * len(KEYS)


def test_the_kit_holds_good_middling_and_poor_configs(outcome):
    for shape in outcome[0].shapes:
        good = sorted((t for t in shape.tried if not t.discarded), key=lambda t: t.predicted.ms)
        assert len({t.config for t in shape.tried}) == len(shape.tried) == 24
        assert len(good) > 8 and good[-1].predicted.ms > 1.2 * good[0].predicted.ms


def candidate(ms, grade="A", discarded=None):
    return Candidate(AttentionConfig(64, 64, 4, 2), None, Prediction(ms, ms, ms, grade, {}), discarded)


def test_what_the_gate_discards_is_timed_too():
    known = [candidate(n) for n in range(1, 30)] + [candidate(50 + n, "C") for n in range(3)]
    known += [candidate(0.5, discarded="spills: 9") for _ in range(9)]
    chosen = choose(known, 8)
    assert [c.predicted.ms for c in chosen[:8]] == list(range(1, 9)) and len(chosen) == 24
    assert sum(c.discarded is not None for c in chosen) >= 5 and sum(c.predicted.confidence == "C" for c in chosen) >= 1
    assert len(choose(known[:10], 8)) == 10  # fewer than 24 there are


def test_discards_among_the_fastest_are_counted(outcome):
    hour = outcome[0]
    assert discarded_fast(hour)[1] == 5 * len(KEYS)
    shape = hour.shapes[0]
    best = min(shape.tried, key=lambda t: t.result.ms)
    marked = tuple(t._replace(discarded="spills" if t is best else None) for t in shape.tried)
    assert discarded_fast(hour._replace(shapes=[shape._replace(tried=marked)])) == (1, 5)


def test_failing_probes_leave_the_rest_of_use():
    def fails():
        raise RuntimeError("no answer within 300 s")

    said = []
    hour = Hour("mi355x", "gfx950", compiles, SimulatedGpu(), fails, None, TOOLS, said.append)
    got = hour.run([], KEYS[:2])
    assert got.probed is None and len(got.shapes) == 2 and any("no answer" in line for line in said)


def test_a_stop_ends_it_between_trials():
    gpu = SimulatedGpu()
    hour = Hour(
        "mi355x", "gfx950", compiles, gpu, simulated_probe, None, TOOLS, lambda line: None, lambda: gpu.jobs >= 3
    )
    got = hour.run(list(check_list("gfx950")), KEYS)
    assert gpu.jobs == 3 and got.shapes == [] and got.probed is None
    assert "nothing can be said" in "\n".join(lines(got, "x"))


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm90"])
def test_the_self_test_covers_every_preset_with_legal_configs(arch):
    checks = list(check_list(arch))
    assert {check.config.recipe for check in checks} == {"none", *PRESETS.values()}
    assert len({check.name for check in checks}) == len(checks) == 6 * 3 * 2
    for check in checks:
        assert first_hour.broken_limit(check.config, check.key, arch) is None


@pytest.mark.parametrize("arch, kinds", [("gfx950", tuple(probes.KINDS)), ("sm90", ("exp", "matrix"))])
def test_the_probes_compile_to_loops_of_what_they_time(arch, kinds, monkeypatch, tmp_path):
    import torch

    from zyfa.kernels.replay import Compiler
    from zyfa.tuner.compile import _target
    from zyfa.tuner.facts import loops_with

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    mixes = {}
    with _target(arch):
        out = torch.empty(1024, dtype=torch.float32, device="meta")
        for kind in kinds:
            kernel = Compiler().start(probes.probe, (8,), (out, probes.TRIPS), probes.constants(kind))
            mixes[kind] = probes.smallest(loops_with(kernel, arch, probes.holds(kind)))
    elements = 32 * probes.COLS // (64 if arch == "gfx950" else 32)  # of a lane
    matrix = "v_mfma_f32_32x32x16_bf16" if arch == "gfx950" else "HGMMA.64x64x16.F32.BF16"
    assert mixes["exp"]["trans"] == 4 * elements
    assert mixes["matrix"][matrix] == 32
    if arch == "gfx950":
        assert (mixes["both"]["trans"], mixes["both"][matrix]) == (4 * elements, 32)
        assert probes._vector(mixes["fma"]) == pytest.approx(8 * elements / 2, abs=2)  # two in one packed instruction


def test_the_command_needs_a_gpu():
    result = CliRunner().invoke(cli.main, ["--first-hour", "--target", "mi355x"])
    assert result.exit_code == 2 and "--first-hour needs a GPU" in result.output


def test_the_command_writes_what_is_sent_back(monkeypatch, tmp_path):
    """Everything but the GPU: pool, farm and probes are simulated, and the tune is noted."""
    tuned = []

    class Farm:
        submit = staticmethod(compiles)

        def close(self):
            pass

    class Pool(SimulatedGpu):
        def __init__(self, gpus, arch):
            super().__init__()

        def close(self):
            pass

    def tune(options, device, method, gpus, console, stop):
        tuned.append((options.budget_s, options.db))
        with Store(options.db, device) as store:
            trials = [t for t in store.trials(trust="measured") if t.outcome == "ok" and t.key == KEYS[0]]
            store.set_winner(min(trials, key=lambda t: t.ms).id, confidence="A", trials=len(trials))
            store.export(options.out / f"{device.db_name}.sqlite")
        return 0

    monkeypatch.setattr(first_hour_run, "WorkerPool", Pool)
    monkeypatch.setattr(first_hour_run.session, "LazyFarm", lambda arch, method: Farm())
    monkeypatch.setattr(first_hour_run.session, "_toolchain", lambda method: TOOLS)
    monkeypatch.setattr(first_hour_run.session, "_tune", tune)
    monkeypatch.setattr(first_hour_run, "probe", lambda gpu, arch: simulated_probe())
    monkeypatch.setattr(first_hour, "kit_keys", lambda: KEYS[:2])
    monkeypatch.setattr(first_hour, "check_list", lambda arch: iter([*check_list(arch)][:4]))
    cell = PlannedCell(None, KEYS[0], 1.0)
    blank = dict.fromkeys(field.name for field in dataclasses.fields(cli.Options))
    given = {"cells": (cell,), "budget_s": 300.0, "db": tmp_path / "db.sqlite", "out": tmp_path / "out", "seed": 0}
    options = cli.Options(**blank | given)
    console = Console(record=True, width=200)
    with session.Stop() as stop:
        code = first_hour_run.run(options, device_of_sku("mi355x"), (0,), console, stop)
    text = console.export_text()
    assert code == 0 and tuned[0][0] < 300 and tuned[0][1] == tmp_path / "db.sqlite"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "amd-gfx950-mi355x-cu256.sqlite", "amd-gfx950-mi355x-cu256.json",
    }  # fmt: skip
    assert "4 of 4 calls" in text and "to send back" in text
    assert "bf16 causal d128 h32:8 s1024: predicted" in text  # the shipped row of that cell against its measurement


def test_a_shipped_row_is_held_against_what_was_measured(tmp_path):
    shipped, path = tmp_path / "shipped.sqlite", tmp_path / "db.sqlite"
    config, other = default_config("gfx950", KEYS[0]), AttentionConfig(64, 64, 2, 2)

    def add(store, trust, config, ms, tools, win=True):
        samples = {"samples": (ms,), "rel_err": 0.001} if trust == "measured" else {"ms_lo": 0.9, "ms_hi": 1.1}
        trial = store.add_trial(KEYS[0], tools, config, outcome="ok", trust=trust, ms=ms, **samples)
        if win:
            store.set_winner(trial, confidence="A", trials=1)

    with Store(shipped, device_of_sku("mi355x")) as store:
        add(store, "predicted", config, 1.0, TOOLS._replace(torch_version="", driver_version=""))
    with Store(path, device_of_sku("mi355x")) as store:
        add(store, "measured", other, 0.8, TOOLS)
        add(store, "measured", config, 1.2, TOOLS, win=False)
    (line,) = first_hour_run.against_shipped(path, shipped, TOOLS)
    assert "predicted 1 ms, measured 1.2 ms (outside the interval), 50.0% above the best" in line
