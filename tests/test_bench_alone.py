"""The attention kernel and the quantisers by themselves: what is launched again, rows, the share of a peak."""

import functools
import json

import pytest
import torch
from click.testing import CliRunner
from helpers import make_qkv

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels import driver, replay
from zyfa.recipes import PRESETS, RECIPES
from zyfa.tuner import bench_alone, bench_cli, bench_speed
from zyfa.tuner.bench_speed import rows_of
from zyfa.tuner.inputs import Shape, normal
from zyfa.tuner.model import quantiser_work
from zyfa.tuner.peers import Contender
from zyfa.tuner.rates import DEVICES, peak_tflops
from zyfa.tuner.timing import Timing

SHAPE = Shape(1, 96, 4, 2, 32)


class Compiled:
    """Stands for a compiled kernel; notes the pointers that each launch reads."""

    function = packed_metadata = None

    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        self.log.append((self.name, [x for x in args if isinstance(x, int)]))


@pytest.fixture
def started(monkeypatch):
    """(kernel, pointers) of every launch after the recording, which itself starts nothing."""
    log = []

    def start(recorder, kernel, grid, args, constants):
        recorder.launches.append(replay.Launch(Compiled(kernel.__name__, log), (1, 1, 1), args))

    monkeypatch.setattr(replay.Recorder, "start", start)
    monkeypatch.setattr(replay.Plan, "stream", lambda plan: 0)
    monkeypatch.setattr(driver, "driver", lambda: None)
    return log


def test_the_kernel_alone_reads_what_was_quantised_once_and_writes_one_output(started):
    qkv = make_qkv(1, 96, 96, 4, 2, 32)
    key = AttentionKey("fp8", 32, 32, 4, 2, 1, 96, 96, True)
    config = AttentionConfig(64, 64, 4, 2, recipe=PRESETS["balanced"])
    assert config.recipe == default_config("gfx950", key).recipe
    attend = bench_alone.kernel_alone(qkv, config, "gfx950", True)
    out = attend()
    assert attend() is out and out.shape == qkv[0].shape
    assert [name for name, _ in started] == ["attn_fwd"] * 2 and started[0] == started[1]
    assert out.data_ptr() in started[0][1] and not {x.data_ptr() for x in qkv} & set(started[0][1])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_quantisers_alone_are_all_launches_but_the_last(started, preset):
    qkv = make_qkv(1, 96, 96, 4, 2, 32)
    repeat = bench_alone.quantise_alone(qkv, PRESETS[preset], "gfx950")
    repeat()
    names, recipe = [name for name, _ in started], RECIPES[PRESETS[preset]]
    assert names[-1] == "quantize" and len(names) == quantiser_work(AttentionKey("fp8", *[32] * 7, True), recipe)[1]
    assert started[-1][1][:3] == [x.data_ptr() for x in qkv]


class FakeSampler:
    """As many ms as a launch says."""

    def __init__(self, launches):
        self.ms = launches[0]()
        self.ms = 0.2 if isinstance(self.ms, torch.Tensor) else self.ms

    def __call__(self):
        return self.ms


def alone(qkv, recipe, arch):
    return lambda: 0.4 if recipe == "bf16qk" else 0.25


def test_quantisers_are_rows_beside_a_copy_of_as_many_bytes():
    sets = [normal(SHAPE, seed) for seed in range(2)]
    rows = bench_alone.measure_quantisers(SHAPE, sets, "sm90", 3, FakeSampler, alone)
    assert [row["name"] for row in rows] == list(PRESETS)
    q, kv = 96 * 4 * 32, 96 * 2 * 32  # elements of Q, and of K or V
    by = {row["name"]: row for row in rows}
    assert by["accurate"]["mb"] == pytest.approx(3 * kv / 1e6), "V is read in two bytes and written in one"
    assert by["fast"]["mb"] == pytest.approx((3 * (q + 2 * kv) + 2 * kv) / 1e6)
    assert by["balanced"]["mb"] == pytest.approx((3 * (q + 2 * kv) + 2 * (q + kv)) / 1e6)
    assert by["accurate"]["ratio"] == pytest.approx(0.5) and by["balanced"]["ratio"] == pytest.approx(0.8)
    assert by["balanced"]["gb_s"] == pytest.approx(by["balanced"]["mb"] / 0.25)
    assert by["balanced"]["copy_gb_s"] == pytest.approx(by["balanced"]["mb"] / 0.2)


def test_quantise_prints_and_writes_a_row_for_each_preset_and_length(monkeypatch, tmp_path):
    facts = dict.fromkeys(("gpu", "driver", "torch", "triton", "date"), "x")
    measure = functools.partial(bench_alone.measure_quantisers, make_sampler=FakeSampler, alone=alone)
    monkeypatch.setattr(bench_cli, "_need_gpu", lambda: None)
    monkeypatch.setattr(bench_cli, "environment", lambda device: facts)
    monkeypatch.setattr("zyfa.device.current_device", lambda index: DEVICES["h200"])
    monkeypatch.setattr(bench_speed, "input_sets", lambda shape, device: [normal(shape, 0)])
    monkeypatch.setattr(bench_alone, "measure_quantisers", measure)
    path = tmp_path / "quantise.json"
    args = ["quantise", "--seq-lens", "128,256", "--heads", "4:2", "--head-dims", "32", "--rounds", "3"]
    result = CliRunner().invoke(bench_cli.cli, [*args, "--json", str(path)])
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert [(row["seqlen"], row["name"]) for row in written["rows"]] == [(n, p) for n in (128, 256) for p in PRESETS]
    assert "80%" in result.output and "copy" in written["method"]


def fake(dtype):
    return Contender("zyfa", dtype, "bf16", "none", "fake", [])


def test_roofline_is_the_share_of_the_documented_peak():
    at = Timing(0.4, 0.4, 0.4, (0.4,) * 3)
    timed = [(fake("bf16"), at), (fake("fp8"), at)]
    bf16, fp8 = rows_of(Shape(1, 4096, 32, 8, 128), False, timed, {}, "h200").rows
    assert bf16["tflops"] == pytest.approx(687.2, rel=1e-4) and bf16["roofline"] == pytest.approx(
        687.2 / 989.4, rel=1e-3
    )
    assert fp8["roofline"] == pytest.approx(bf16["roofline"] / 2)
    assert rows_of(SHAPE, False, timed, {}, "unknown-10de").rows[0]["roofline"] is None


@pytest.mark.parametrize("sku, bf16", [("h200", 989), ("mi355x", 2517), ("mi300x", 1307)])
def test_peaks_are_those_of_data_sheets(sku, bf16):
    assert peak_tflops(DEVICES[sku], "bf16") == pytest.approx(bf16, rel=2e-3)
    assert peak_tflops(DEVICES[sku], "fp8") == pytest.approx(2 * bf16, rel=2e-3)


@pytest.mark.gpu
def test_quantise_on_a_gpu(tmp_path):
    path = tmp_path / "quantise.json"
    result = CliRunner().invoke(bench_cli.cli, ["quantise", "--seq-lens", "2k", "--rounds", "3", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert all(row["us"] > 0 and row["gb_s"] > 0 for row in json.loads(path.read_text())["rows"])
