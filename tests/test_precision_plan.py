"""zyfa.plan_precision: exact choices on samples of real layers, budgets, times, files, and the command."""

import dataclasses

import pytest
import torch
from click.testing import CliRunner
from databases import CONFIG, H200, a_key, add_ok
from helpers import make_qkv

import zyfa
from zyfa import lookup
from zyfa.plan import RELATIVE_TIME, PrecisionPlan, layer_errors, plan_precision, relative_times
from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref, relative_error
from zyfa.tuner import bench_cli, bench_plan
from zyfa.tuner.inputs import CHECKOUT_ACTIVATIONS, load_activations
from zyfa.tuning_db import reader
from zyfa.tuning_db.certificates import set_front
from zyfa.tuning_db.store import Store

LAYERS = {path.stem.replace("_prose_S512", ""): path for path in sorted(CHECKOUT_ACTIVATIONS.glob("*.npz"))}


@pytest.fixture(scope="module")
def layers():
    return {name: load_activations(path) for name, path in LAYERS.items()}


@pytest.fixture(scope="module")
def plan(layers):
    return plan_precision(layers, 0.04)


def test_each_layer_gets_the_cheapest_that_it_can_bear(plan):
    assert {name: layer.precision for name, layer in plan.layers.items()} == {
        "qwen25coder-0.5b_L00": "fp8:balanced",
        "qwen25coder-1.5b_L00": "fp8:balanced",
        "qwen25coder-1.5b_L14": "fp8:balanced",
        "qwen25coder-1.5b_L27": "fp8:per_tensor",  # flat attention: plain FP8 has 2.9 %
        "smollm2-135m_L15": "fp8:balanced",
    }
    assert plan["qwen25coder-1.5b_L27"] == "fp8:per_tensor" and plan.beyond_budget == {}


def test_the_layer_where_per_tensor_fp8_fails_does_not_get_it(plan):
    layer = plan.layers["qwen25coder-1.5b_L00"]
    assert layer.errors["fp8:per_tensor"] == pytest.approx(0.57, abs=0.02)
    assert layer.error == layer.errors["fp8:balanced"] < 0.03 and layer.held_error < 0.03


@pytest.mark.parametrize(
    "budget, precision", [(0.023, "fp8:accurate"), (0.01, "bf16"), (0.0001, "bf16"), (0.2, "fp8:per_tensor")]
)
def test_the_budget_moves_a_layer_along_the_front(layers, budget, precision):
    name = "qwen25coder-1.5b_L14"
    assert plan_precision({name: layers[name]}, budget)[name] == precision


def test_no_cheaper_precision_was_within_the_budget(plan):
    for layer in plan.layers.values():
        cheaper = [p for p, time in RELATIVE_TIME.items() if time < layer.time]
        assert layer.time == RELATIVE_TIME[layer.precision]
        assert all(layer.errors[p] > plan.budget for p in cheaper)
    assert sum(layer.work for layer in plan.layers.values()) == pytest.approx(1)
    assert plan.time == pytest.approx(sum(RELATIVE_TIME[x.precision] * x.work for x in plan.layers.values()))


def test_what_is_planned_is_what_the_call_then_does(plan, layers):
    name = "qwen25coder-1.5b_L14"
    out = zyfa.attention(*layers[name], causal=True, precision=plan[name])
    ref = attention_ref(*layers[name], causal=True)
    held = torch.arange(512) % 4 == 3
    assert relative_error(out[:, held], ref[:, held]) == pytest.approx(plan.layers[name].held_error)
    assert relative_error(out[:, ~held], ref[:, ~held]) == pytest.approx(plan.layers[name].error)
    assert layer_errors(plan, {name: layers[name]}) == {name: pytest.approx(relative_error(out, ref))}


def test_held_out_rows_beyond_the_budget_are_named(plan):
    name = "smollm2-135m_L15"
    changed = dataclasses.replace(plan.layers[name], held_error=0.05)
    assert dataclasses.replace(plan, layers={name: changed}).beyond_budget == {name: 0.05}
    nan = dataclasses.replace(changed, held_error=float("nan"))
    assert list(dataclasses.replace(plan, layers={name: nan}).beyond_budget) == [name]


def test_a_plan_survives_its_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": {"a": {}}}', '{"budget": 1}'])
def test_a_file_that_is_no_plan_is_named(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a precision plan"):
        PrecisionPlan.load(path)


def test_an_unknown_precision_in_a_file_is_named(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(path.read_text().replace('"fp8:balanced",', '"fp4",'))
    with pytest.raises(ValueError, match="'fp4' is unknown; known are bf16"):
        PrecisionPlan.load(path)


@pytest.mark.parametrize(
    "layers, budget, text",
    [
        ({}, 0.04, "captured_layers is empty"),
        ({"a": make_qkv(1, 16, 16, 2, 1, 16)}, 0, "budget is 0"),
        ({"a": make_qkv(1, 7, 16, 2, 1, 16)}, 0.04, "'a'.* has 7 query rows; at least 8"),
        ({"a": make_qkv(1, 16, 16, 2, 1, 16, dtype=torch.float32)}, 0.04, "accepted are bf16 or fp16"),
        ({"a": tuple(x[0] for x in make_qkv(1, 16, 16, 2, 1, 16))}, 0.04, r"'a'.* \(16, 2, 16\)"),
    ],
)
def test_bad_arguments_are_named(layers, budget, text):
    with pytest.raises(ValueError, match=text):
        plan_precision(layers, budget)


def test_times_come_from_rows_of_one_cell_and_trust(monkeypatch, tmp_path):
    monkeypatch.setattr(reader, "DATA", tmp_path)
    lookup.reset()
    fp8 = a_key(512, dtype="fp8")
    with Store(lookup.user_db_path(H200), H200) as store:
        add_ok(store, a_key(512), CONFIG, ms=2.0)
        winner = dataclasses.replace(CONFIG, recipe=PRESETS["balanced"])
        add_ok(store, fp8, winner, ms=1.5)
        fast = dataclasses.replace(CONFIG, recipe=PRESETS["fast"])
        set_front(store, add_ok(store, fp8, fast, ms=1.2, win=False), confidence="A", trials=1)
        accurate = dataclasses.replace(CONFIG, recipe=PRESETS["accurate"])
        add_ok(store, fp8, accurate, ms=0.1, win=False, trust="predicted")
    times = relative_times(make_qkv(1, 512, 512, 32, 8, 128), True, H200)
    lookup.reset()
    assert times == RELATIVE_TIME | {"fp8:balanced": 0.75, "fp8:fast": 0.6}


# --- zyfa-bench plan --------------------------------------------------------------------------------------------------


def command(*args):
    return CliRunner().invoke(bench_cli.cli, ["plan", *map(str, args)])


def test_the_command_plans_writes_and_checks(tmp_path):
    sample, out = LAYERS["qwen25coder-1.5b_L00"], tmp_path / "plan.json"
    made = command(sample, "--budget", "0.04", "--out", out)
    assert made.exit_code == 0 and "fp8:balanced" in made.output and "0.73 of bf16" in made.output
    assert PrecisionPlan.load(out)[sample.stem] == "fp8:balanced"
    checked = command(sample, "--check", out)
    assert checked.exit_code == 0 and "ok" in checked.output
    out.write_text(out.read_text().replace('"budget": 0.04', '"budget": 0.02'))
    worse = command(sample, "--check", out)
    assert worse.exit_code == 1 and "more than the budget of 2.00%" in worse.output


def test_layers_of_a_safetensors_file(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    q, k, v = (x.contiguous() for x in make_qkv(1, 16, 16, 2, 1, 16))
    path = tmp_path / "a.safetensors"
    save_file({"model.0.q": q, "model.0.k": k, "model.0.v": v}, path)
    ((name, found),) = bench_plan.load_layers(path).items()
    assert name == "model.0" and all(torch.equal(a, b) for a, b in zip(found, (q, k, v), strict=True))
    save_file({"model.0.q": q}, path)
    with pytest.raises(ValueError, match=r"lacks model\.0\.k: an \.npz file"):
        bench_plan.load_layers(path)


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "layers.pt"
    path.touch()
    result = command(path)
    assert result.exit_code == 2 and "neither .npz nor .safetensors" in result.output
