"""zyfa-bench: errors and faults on real samples, contenders and rows with fakes, exit codes of the command line."""

import json
import math
import types

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

import zyfa.interface
from zyfa.archs import default_config
from zyfa.config import AttentionConfig
from zyfa.device import device_of_sku
from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref, relative_error
from zyfa.tuner import bench_alone, bench_cli, bench_speed, peers
from zyfa.tuner.bench_accuracy import fault, measure, samples_in, samples_of
from zyfa.tuner.bench_speed import Effort, rows_of, time_side_by_side
from zyfa.tuner.inputs import CHECKOUT_ACTIVATIONS, Shape, normal
from zyfa.tuner.peers import Contender, PeerSkipped
from zyfa.tuner.timing import Timing

SHAPE = Shape(1, 96, 4, 2, 32)
ROW_KEYS = {
    "name", "batch", "nheads", "nheads_k", "head_dim", "seqlen", "causal", "dtype", "recipe", "us", "us_lo", "us_hi",
    "tflops", "roofline", "path", "best_peer", "best_peer_us", "ratio",
}  # fmt: skip


def bench(*args):
    return CliRunner().invoke(bench_cli.cli, args)


# accuracy


@pytest.fixture(scope="module")
def rows():
    (sample,) = (s for s in samples_in(CHECKOUT_ACTIVATIONS) if s.name.endswith("L14"))
    return {row.precision: row for row in measure(sample, ("bf16", "fp8:per_tensor", "fp8:accurate"), True, "cpu")}


def test_errors_on_a_real_sample(rows):
    bf16, baseline, accurate = rows.values()
    assert 1e-3 < bf16.error < 3e-3 and bf16.recipe == "none" and bf16.cut is None and bf16.cosine > 0.99999
    assert 0.1 < baseline.error < 0.2 and baseline.recipe == "tensor" and baseline.cut == 0 and baseline.cosine < 0.995
    assert accurate.cut == pytest.approx(1 - accurate.error / baseline.error) and accurate.cut > 0.5
    assert (bf16.head_dim, bf16.seqlen, bf16.nheads, bf16.nheads_k) == (128, 512, 4, 2)


def test_on_the_cpu_the_call_is_the_emulation(rows):
    for row in rows.values():
        assert row.ratio == pytest.approx(1, abs=0.02) and fault(row) is None


def test_precision_fp8_is_emulated_with_the_recipe_that_runs():
    (sample,) = samples_of(["sink"], [(32, 32)], SHAPE, 0)
    (row,) = measure(sample, ["fp8"], False, "cpu")
    assert row.recipe != "none" and row.ratio == pytest.approx(1, abs=0.02) and row.cut is None and row.head_dim == 32


@pytest.mark.parametrize(
    "precision, ratio, bad",
    [
        ("bf16", 1.9, False),
        ("bf16", 2.1, True),
        ("bf16", 0.1, False),
        ("bf16", math.nan, True),
        ("fp8:fast", 1.4, False),
        ("fp8:fast", 1.6, True),
        ("fp8:fast", 0.4, False),
        ("fp8:fast", math.nan, True),
    ],
)
def test_fault(rows, precision, ratio, bad):
    row = rows["bf16" if precision == "bf16" else "fp8:accurate"]._replace(ratio=ratio, precision=precision)
    assert (fault(row) is not None) == bad
    assert not bad or (precision in fault(row) and row.name in fault(row))


def test_accuracy_prints_writes_and_accepts(tmp_path):
    path = tmp_path / "accuracy.json"
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "one.npz").symlink_to(next(CHECKOUT_ACTIVATIONS.glob("smollm2*.npz")))
    args = ("--families", "normal", "--head-dims", "32", "--seqlen", "64", "--recipes", "bf16,fp8:per_tensor")
    result = bench("accuracy", "--activations", str(folder), *args, "--device", "cpu", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "normal" in result.output and "one" in result.output
    written = json.loads(path.read_text())
    assert written["gpu"] == "cpu" and written["torch"] == torch.__version__ and len(written["rows"]) == 4
    assert {row["precision"] for row in written["rows"]} == {"bf16", "fp8:per_tensor"}


def test_accuracy_fails_when_the_kernel_does_not_compute_the_recipe(monkeypatch, tmp_path):
    real = zyfa.interface.attention
    monkeypatch.setattr(zyfa.interface, "attention", lambda *a, **kw: real(*a, **kw) * 1.1)
    path = tmp_path / "accuracy.json"
    args = ("--families", "normal", "--head-dims", "32", "--seqlen", "64", "--recipes", "bf16", "--json", str(path))
    monkeypatch.setattr(bench_cli, "samples_in", lambda folder: [])
    result = bench("accuracy", "--device", "cpu", *args)
    assert result.exit_code == 1 and "normal D32 bf16" in result.stderr
    assert json.loads(path.read_text())["rows"][0]["ratio"] > 10, "what was measured is written all the same"


@pytest.mark.parametrize(
    "args, text",
    [
        (["accuracy", "--families", "sinks"], "late_sink"),
        (["accuracy", "--recipes", "int4"], "fp8:balanced"),
        (["accuracy", "--head-dims", "20"], "multiples of 8"),
        (["accuracy", "--head-dims", "64,192/128/64"], "192/128"),
        (["accuracy", "--activations", "/nowhere"], "/nowhere"),
        (["speed", "--seq-lens", "32k..512"], "backwards"),
        (["speed", "--heads", "32:5"], "32:8"),
        (["speed", "--causal", "maybe"], "both"),
    ],
)
def test_bad_usage_exits_with_2_and_the_accepted_forms(args, text):
    result = bench(*args)
    assert result.exit_code == 2 and text in result.stderr


def test_outside_a_checkout_the_folder_must_be_given(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_cli, "CHECKOUT_ACTIVATIONS", tmp_path / "no")
    result = bench("accuracy", "--device", "cpu")
    assert result.exit_code == 2 and "--activations DIR is needed" in result.stderr


@pytest.mark.parametrize("args", [["speed"], ["overhead"], ["accuracy", "--device", "cuda"]])
def test_without_a_gpu_speed_is_refused(monkeypatch, args):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench(*args)
    assert result.exit_code == 2 and "needs a GPU" in result.stderr


def test_nan_is_null_in_json(tmp_path):
    path = tmp_path / "x.json"
    bench_cli._write(path, "none", [{"ratio": math.nan, "us": 1.0}], "cpu")
    assert json.loads(path.read_text())["rows"] == [{"ratio": None, "us": 1.0}]


# peers


@pytest.fixture(scope="module")
def sets():
    return [normal(SHAPE, seed) for seed in range(2)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gqa", [True, False], ids=["shared heads", "expanded heads"])
def test_sdpa_computes_the_call_for_every_input_set(sets, causal, gqa, monkeypatch):
    real = torch.nn.functional.scaled_dot_product_attention

    def without_gqa(*args, **kwargs):
        if kwargs["enable_gqa"] and not gqa:
            raise RuntimeError("No available kernel")
        return real(*args, **kwargs)

    monkeypatch.setattr(peers, "scaled_dot_product_attention", without_gqa)
    contender = peers.sdpa("sdpa-math", SDPBackend.MATH, sets, causal)
    assert ("expanded" in contender.path) == (not gqa)
    for launch, qkv in zip(contender.launches, sets, strict=True):
        assert relative_error(launch(), attention_ref(*qkv, causal=causal)) < 0.01


def test_a_backend_that_is_not_there_is_skipped_with_its_reason(sets):
    with pytest.raises(PeerSkipped, match="No viable backend"):
        peers.sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, sets, True)


def test_fa3_that_is_not_there_is_skipped(sets, monkeypatch):
    monkeypatch.setattr(peers.importlib, "import_module", _missing)
    with pytest.raises(PeerSkipped, match="fa3_fwd_interface"):
        peers.fa3("fa3", sets, True)


def _missing(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_fa3_that_lacks_a_part_says_which(sets, monkeypatch):
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: _missing("einops"))
    with pytest.raises(ModuleNotFoundError, match="einops"):
        peers.fa3("fa3", sets, True)


@pytest.mark.parametrize("make", [peers.fa3, peers.fa3_fp8, peers.fa3_fp8_inputs])
@pytest.mark.parametrize("with_lse", [True, False])
def test_fa3_gets_what_it_takes(sets, monkeypatch, make, with_lse):
    def flash_attn_func(q, k, v, causal, **descales):
        assert all(x.shape == (1, 2) and x.dtype == torch.float32 for x in descales.values())
        assert len(descales) == (3 if q.dtype == torch.float8_e4m3fn else 0)
        scales = [x[0, 0] for x in descales.values()] or [1.0, 1.0, 1.0]
        q, k, v = (x.float() * scale for x, scale in zip((q, k, v), scales, strict=True))
        out = attention_ref(q, k, v, causal=causal)
        return (out, None) if with_lse else out

    module = types.SimpleNamespace(flash_attn_func=flash_attn_func, __name__="fake")
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    contender = make("fa3", sets, True)
    bound = 0.12 if contender.dtype == "fp8" else 1e-6
    assert relative_error(contender.launches[1](), attention_ref(*sets[1], causal=True)) < bound
    assert contender.starts_from == ("fp8" if make is peers.fa3_fp8_inputs else "bf16")


# speed


def fake(name, out, dtype="bf16", starts_from="bf16"):
    return Contender(name, dtype, starts_from, "none", "fake", [lambda: out])


class FakeSampler:
    """1 ms, then what it was given."""

    def __init__(self, launches):
        self.calls = len(launches)
        for launch in launches:
            launch()

    def __call__(self):
        return 0.1


def test_a_contender_that_fails_or_errs_is_left_out_and_named():
    out = torch.ones(1, 4, 1, 8)

    def broken():
        raise RuntimeError("no kernel image\nmore")

    contenders = [
        fake("zyfa", out),
        fake("peer", out + 0.01),
        fake("wrong", -out),
        fake("nan", out * math.nan),
        fake("broken", out)._replace(launches=[broken]),
    ]
    timed, skipped = time_side_by_side(contenders, 3, Effort(3, 0.1), FakeSampler)
    assert [contender.name for contender, _ in timed] == ["zyfa", "peer"]
    assert all(timing.ms == 0.1 and len(timing.samples) == 3 for _, timing in timed)
    assert skipped["broken bf16"] == "no kernel image"
    assert "wrong result: 2" in skipped["wrong bf16"] and "nan" in skipped["nan bf16"]


def test_without_the_first_contender_there_is_nothing_to_compare():
    with pytest.raises(RuntimeError, match="mine"):
        time_side_by_side([fake("zyfa", None)._replace(launches=[_raise])], 1, Effort(3, 0.1), FakeSampler)


def _raise():
    raise RuntimeError("mine")


def test_every_input_set_is_launched_in_turn():
    seen = []
    launches = [lambda i=i: seen.append(i) or torch.ones(1, 1, 1, 1) for i in range(3)]
    time_side_by_side([fake("zyfa", None)._replace(launches=launches)], 7, Effort(3, 0.01), FakeSampler)
    assert seen == [0, 0, 1, 2, 0, 1, 2, 0], "once to check, then seven calls over three sets"


def timing(*us):
    return Timing(sorted(us)[1] / 1e3, min(us) / 1e3, max(us) / 1e3, tuple(x / 1e3 for x in us))


def test_rows_compare_with_the_fastest_peer_that_does_the_same():
    timed = [
        (fake("zyfa", None), timing(80, 100, 120)),
        (fake("zyfa", None, "fp8"), timing(50, 50, 50)),
        (fake("zyfa-fp8-inputs", None, "fp8", "fp8"), timing(40, 40, 40)),
        (fake("sdpa-cudnn", None), timing(88, 105, 120)),
        (fake("fa3", None), timing(110, 110, 110)),
        (fake("fa3-fp8", None, "fp8"), timing(200, 200, 200)),
        (fake("fa3-fp8-inputs", None, "fp8", "fp8"), timing(30, 30, 30)),
    ]
    shape = Shape(2, 1000, 32, 8, 128)
    result = rows_of(shape, True, timed, {"absent": "why"})
    assert all(set(row) == ROW_KEYS for row in result.rows) and result.skipped == {"absent": "why"}
    best = {(row["name"], row["dtype"]): (row["best_peer"], round(row["ratio"], 4)) for row in result.rows}
    assert best["zyfa", "bf16"] == ("sdpa-cudnn", 1.05)
    assert best["zyfa", "fp8"] == ("sdpa-cudnn", 2.1), "a faster BF16 peer counts against FP8"
    assert best["zyfa-fp8-inputs", "fp8"] == ("fa3-fp8-inputs", 0.75)
    assert best["sdpa-cudnn", "bf16"] == ("sdpa-cudnn", 1.0) and best["fa3", "bf16"] == ("sdpa-cudnn", 0.9545)
    row = result.rows[0]
    assert row["tflops"] == pytest.approx(4 * 2 * 32 * 128 * (1000 * 1001 // 2) / 100e-6 / 1e12)
    assert (row["us"], row["us_lo"], row["us_hi"]) == pytest.approx((100, 80, 120))
    assert result.spreads[0] == pytest.approx((1.0, 1.1)), "of paired rounds: 88/80, 105/100, 120/120"


def test_rows_without_a_peer_claim_nothing():
    (row,) = rows_of(SHAPE, False, [(fake("zyfa", None), timing(1, 2, 3))], {}).rows
    assert row["best_peer"] is row["best_peer_us"] is row["ratio"] is None
    assert row["tflops"] == pytest.approx(4 * 4 * 32 * 96 * 96 / 2e-6 / 1e12)


def test_speed_writes_the_contract_form_and_names_who_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_cli, "_need_gpu", lambda: None)
    monkeypatch.setattr(
        bench_cli, "environment", lambda device: dict.fromkeys(("gpu", "driver", "torch", "triton", "date"), "x")
    )
    monkeypatch.setattr(bench_speed, "input_sets", lambda shape, device: [shape])

    def measure_shape(shape, causal, dtypes, sets, effort):
        assert sets == [shape] and dtypes == ("bf16",) and effort is bench_speed.QUICK
        timed = [(fake("zyfa", None), timing(8, 10, 12)), (fake("fa3", None), timing(20, 20, 20))]
        return rows_of(shape, causal, timed, {"sdpa-cudnn": "no GPU"})

    monkeypatch.setattr(bench_speed, "measure_shape", measure_shape)
    path = tmp_path / "speed.json"
    result = bench("speed", "--seq-lens", "512,1k", "--dtypes", "bf16", "--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert set(written) == {"gpu", "driver", "torch", "triton", "date", "method", "rows"}
    assert "sdpa-cudnn (no GPU)" in written["method"] and len(written["rows"]) == 2 * 2 * 2
    assert all(row["ratio"] == pytest.approx(row["best_peer_us"] / row["us"]) for row in written["rows"])
    assert "2.00" in result.output and "sdpa-cudnn skipped: no GPU" in result.output


def pretend_gpu(monkeypatch, tuned):
    """explain() as on an H200 whose database holds `tuned` for every call; calls still run on the CPU."""

    def explain(*qkv, causal, precision):
        dtype = "fp8" if precision.startswith("fp8") or qkv[0].element_size() == 1 else "bf16"
        config = tuned or default_config("sm90", bench_speed.key_of(SHAPE, dtype, causal))
        call = types.SimpleNamespace(key=bench_speed.key_of(SHAPE, dtype, causal))
        choice = types.SimpleNamespace(match="exact", trust="measured")
        return types.SimpleNamespace(device=device_of_sku("h200"), call=call, choice=choice, config=config)

    monkeypatch.setattr(zyfa.interface, "explain", explain)
    monkeypatch.setattr(bench_speed, "current_device", lambda index: device_of_sku("h200"))
    monkeypatch.setattr(bench_alone, "kernel_alone", kernel_alone)


def kernel_alone(qkv, config, arch, causal):
    assert arch == "sm90"
    return lambda: zyfa.attention(*qkv, causal=causal, precision="fp8", config=config)


def test_ours_is_timed_tuned_and_default(sets, monkeypatch):
    pretend_gpu(monkeypatch, AttentionConfig(128, 128, 8, 2, recipe="head"))
    tuned, default = bench_speed.ours(sets, True, "fp8")
    assert (tuned.name, tuned.recipe, default.name) == ("zyfa", "head", "zyfa-default")
    assert default.recipe in default.path and default.recipe != "none"
    assert tuned.path == "exact measured: BLOCK_M=128 BLOCK_N=128 num_warps=8 num_stages=2 recipe=head"
    pretend_gpu(monkeypatch, None)
    assert [contender.name for contender in bench_speed.ours(sets, True, "bf16")] == ["zyfa"], "nothing to compare with"


OURS_ALL = ["zyfa", "zyfa", "zyfa-fp8-inputs", "zyfa-fp8-kernel", "zyfa-fp8-kernel-balanced"]


def test_a_whole_shape(sets, monkeypatch):
    pretend_gpu(monkeypatch, None)
    fakes = [peers.Peer("math", "bf16", _math_peer), peers.Peer("absent", "fp8", peers.fa3)]
    monkeypatch.setattr(peers.importlib, "import_module", _missing)
    made, absent = bench_speed.contenders_of(sets, True, ("bf16", "fp8"), fakes)
    assert [c.name for c in made] == [*OURS_ALL, "math"] and list(absent) == ["absent"]
    ref = attention_ref(*sets[1], causal=True)
    errors = [relative_error(contender.launches[1](), ref) for contender in made]
    assert errors[0] < 0.01 and errors[-1] < 0.01 and all(0.01 < error < 0.15 for error in errors[1:-1])
    assert [c.recipe for c in made[3:5]] == ["tensor", PRESETS["balanced"]]
    result = bench_speed.measure_shape(SHAPE, True, ("bf16",), sets, Effort(3, 0.1), FakeSampler)
    assert {row["name"]: (row["best_peer"], row["ratio"]) for row in result.rows}["zyfa"] == ("sdpa-flash", 1.0)
    assert {"fa3", "sdpa-cudnn"} <= set(result.skipped) and "fa3-fp8" not in result.skipped


def _math_peer(name, sets, causal):
    return peers.sdpa(name, SDPBackend.MATH, sets, causal)


@pytest.mark.gpu
def test_speed_on_a_gpu(tmp_path):
    path = tmp_path / "speed.json"
    result = bench("speed", "--seq-lens", "512", "--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert all(set(row) == ROW_KEYS and row["us"] > 0 for row in rows)
    ours = {("zyfa", "bf16"), *((name, "fp8") for name in OURS_ALL)}
    assert ours <= {(r["name"], r["dtype"]) for r in rows}
    assert any(row["name"].startswith("sdpa") for row in rows)


@pytest.mark.gpu
def test_accuracy_on_a_gpu():
    result = bench("accuracy", "--device", "cuda")
    assert result.exit_code == 0, result.output
