"""Certifying recipes: which inputs, what a NaN does, what is stored, and which recipes a run may then choose."""

import dataclasses
import math
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from databases import CONFIG, TOOLS, a_key

from zyfa.archs import default_config
from zyfa.device import device_of_sku
from zyfa.recipes import RECIPES
from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuner import certificate
from zyfa.tuner.axis import RecipeAxis
from zyfa.tuner.certificate import SEEDS, STATED, build_ahead, certified, certify, emulation, guarded, kernel
from zyfa.tuner.inputs import FAMILIES, Shape, load_activations
from zyfa.tuner.space import FP8_RECIPES, MAX_RECIPE_ERROR
from zyfa.tuning_db.certificates import certificates
from zyfa.tuning_db.store import Store

AT = (128, 128, True)


@pytest.fixture(scope="module")
def wide():
    """{recipe: certificate} at head dim 128."""
    found, bad = certify(("tensor", "int8-kmean", *FP8_RECIPES), AT, emulation("gfx950"))
    assert bad == {}
    return {c.recipe: c for c in found}


@pytest.fixture
def short(monkeypatch):
    """Two small families, no samples."""
    monkeypatch.setattr(certificate, "SEQLEN", 40)
    monkeypatch.setattr(certificate, "FAMILIES", {name: FAMILIES[name] for name in ("normal", "sink")})


def test_a_certificate_covers_families_seeds_and_activations_of_its_head_dim(wide):
    for c in wide.values():
        assert set(c.errors) == {*FAMILIES, STATED, *(f"qwen25coder-1.5b_prose_S512_L{n}" for n in ("00", "14", "27"))}
        assert {len(c.errors[name]) for name in FAMILIES} == {len(SEEDS)}


def test_its_errors_are_those_of_the_emulation(wide):
    path = certificate.CHECKOUT_ACTIVATIONS / "qwen25coder-1.5b_prose_S512_L00.npz"
    qkv = load_activations(path)
    error = relative_error(emulate(*qkv, "tensor", causal=True), attention_ref(*qkv, causal=True))
    assert wide["tensor"].errors[path.stem] == (pytest.approx(error),) and error == pytest.approx(0.581, abs=0.01)


def test_the_bound_separates_recipes_that_lose_a_layer_from_those_that_do_not(wide):
    assert all(wide[name].worst < MAX_RECIPE_ERROR for name in FP8_RECIPES)
    assert wide["tensor"].worst > 0.9, "P without an offset loses the underflow family"


def test_what_lost_a_layer_at_another_head_dim_is_not_safe_here(wide):
    assert max(x for name, (x, *_) in wide["int8-kmean"].errors.items() if name != STATED) < MAX_RECIPE_ERROR
    assert wide["int8-kmean"].worst == 0.279


def test_where_no_sample_fits_the_stated_error_stands(short, monkeypatch, tmp_path):
    for at in ((32, 32, True), (128, 64, False)):
        (c,), _ = certify(["int8-kmean"], at, emulation("gfx950"))
        assert c.errors[STATED] == (RECIPES["int8-kmean"].worst_error,) and c.worst == 0.279
    monkeypatch.setattr(certificate, "CHECKOUT_ACTIVATIONS", tmp_path)
    (c,), _ = certify(["int8-kmean"], (64, 64, True), emulation("gfx950"))
    assert c.worst == 0.279, "a wheel has no samples and is no less strict"


def test_an_output_that_is_not_finite_earns_none_and_is_named(short, tmp_path):
    exact = emulation("gfx950")

    def attend(qkv, recipe, causal):
        out = exact(qkv, recipe, causal)
        if recipe == "block":
            out[0, 3, 1, 2] = math.nan
        return out

    said = []
    with Store(tmp_path / "db.sqlite", device_of_sku("mi355x")) as store:
        args = (store, TOOLS, "predicted", [(32, 32, True)], ("block", "bf16qk"), attend, said.append)
        assert list(certified(*args)) == [("bf16qk", (32, 32, True))]
        assert [c.recipe for c in certificates(store, TOOLS, "predicted")] == ["bf16qk"]
    assert len(said) == 1 and "block at head dim 32: output not finite on" in said[0]


def test_a_recipe_that_the_device_cannot_run_is_left_out_with_the_limit(short, monkeypatch):
    limit = lambda config, key, arch: "tiles fit" if config.recipe == "bf16qk" else "else"  # noqa: E731
    monkeypatch.setattr(certificate, "broken_limit", limit)
    found, bad = certify(["bf16qk"], (256, 256, True), kernel("sm90", torch.device("cpu")))
    assert (found, bad) == ([], {"bf16qk": "recipe bf16qk at head dim 256: tiles fit"})


def test_what_is_stored_is_not_asked_again(short, tmp_path):
    calls = []

    def attend(qkv, recipe, causal):
        calls.append(recipe)
        return emulate(*qkv, recipe, causal=causal)

    with Store(tmp_path / "db.sqlite", device_of_sku("mi355x")) as store:
        args = (store, TOOLS, "predicted", [(32, 32, True)])
        first = certified(*args, ("bf16qk",), attend, print)
        asked = len(calls)
        again = certified(*args, ("bf16qk", "head"), attend, print)
    assert asked == 2 * len(SEEDS) and calls[asked:] == ["head"] * asked
    assert again["bf16qk", (32, 32, True)] == pytest.approx(first["bf16qk", (32, 32, True)], rel=0.01)


def test_guard_rows_surround_the_input():
    x = torch.arange(12.0).view(1, 3, 2, 2)
    view = guarded(x, torch.device("cpu"))
    assert torch.equal(view, x) and view.stride(-1) == 1
    around = view.as_strided((1, 5, 2, 2), view.stride(), view.storage_offset() - view.stride(1))
    assert around[:, 0].isnan().all() and around[:, -1].isnan().all()


def kernel_on_cpu(qkv, recipe, causal):
    """Runs in the interpreter's process."""
    return kernel("gfx950", torch.device("cpu"))(qkv, recipe, causal)


@pytest.mark.parametrize("recipe", ["tensor", "block-kmean-qmean", "int8-kmean-equalise-hadamard", "bf16qk"])
def test_between_guard_rows_the_kernel_computes_its_recipe(interpret, recipe):
    qkv = tuple(x.contiguous() for x in FAMILIES["outlier_channels"](Shape(1, 40, 4, 2, 16), 0))
    out, ref = interpret(kernel_on_cpu, qkv, recipe, True), attention_ref(*qkv, causal=True)
    exact = relative_error(emulate(*qkv, recipe, causal=True), ref)
    assert relative_error(out, ref) <= 1.5 * exact


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_earns_the_certificate_of_its_emulation(causal):
    from zyfa.device import current_device

    arch = current_device(0).arch
    mine, bad = certify(tuple(RECIPES), (128, 128, causal), kernel(arch, torch.device("cuda", 0)))
    exact, _ = certify([c.recipe for c in mine], (128, 128, causal), emulation(arch))
    assert set(bad) == {name for name, r in RECIPES.items() if r.granularity == "mx" and arch != "gfx950"}
    for c, e in zip(mine, exact, strict=True):
        for name in c.errors:
            assert all(x <= 1.5 * y for x, y in zip(c.errors[name], e.errors[name], strict=True)), (c.recipe, name)


AXIS = RecipeAxis(("block", "bf16qk", "head"), {("block", AT): 0.2, ("bf16qk", AT): 0.03}, 0.05, front=False)


def test_only_recipes_within_the_bound_are_searched_and_win():
    key = a_key(dtype="fp8")
    assert AXIS.searched(key) == ("bf16qk",)
    assert AXIS.admits(key, dataclasses.replace(CONFIG, recipe="bf16qk")) and AXIS.admits(a_key(), CONFIG)
    assert not any(AXIS.admits(key, dataclasses.replace(CONFIG, recipe=r)) for r in ("block", "head", "tensor"))
    assert AXIS.without_any([key, a_key()]) is None


def test_a_front_searches_what_is_certified_and_admits_no_more():
    axis, key = dataclasses.replace(AXIS, front=True), a_key(dtype="fp8")
    assert axis.searched(key) == ("block", "bf16qk")
    assert not axis.admits(key, dataclasses.replace(CONFIG, recipe="block"))


def test_a_bound_that_nothing_meets_is_named_with_what_there_is():
    why = dataclasses.replace(AXIS, max_error=0.01).without_any([a_key(dtype="fp8")])
    assert why == "no recipe is within 0.01 at head dim 128; certified are bf16qk 0.030, block 0.200"


def test_what_is_missing_is_built_side_by_side_before_any_of_it_runs(short, tmp_path):
    """One build for each recipe and class that is not known, at the default tile; what breaks a limit has none."""
    order, classes = [], [(64, 64, True), (64, 64, False)]

    def compile(key, config):
        order.append((key.head_dim, key.causal, config.recipe, config == default_config("sm90", key, config.recipe)))
        done = Future()
        done.set_result(None)
        return done

    def attend(qkv, recipe, causal):
        order.append("run")
        return emulate(*qkv, recipe, causal=causal)

    ahead = partial(build_ahead, compile, "sm90")
    with Store(tmp_path / "db.sqlite", device_of_sku("h200")) as store:
        args = (store, TOOLS, "measured", classes)
        certified(*args, ("bf16qk",), attend, print)
        order.clear()
        certified(*args, ("bf16qk", "head", "mx"), attend, print, ahead)
        built = len(order) - order.count("run")
        assert order[:built] == [(64, True, "head", True), (64, False, "head", True)], "mx is for gfx950 alone"
        order.clear()
        certified(*args, ("bf16qk", "head", "mx"), attend, print, ahead)
        assert order == [], "nothing is missing"
