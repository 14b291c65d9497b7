"""The recipe as an axis of the tuner: the error bound decides the winner, --pareto keeps the best of each recipe."""

import sqlite3
from dataclasses import replace

import pytest
from click.testing import CliRunner
from databases import a_certificate
from fake_landscape import BEST, DEFAULT, FakeFarm, make_tools, time_of
from test_coordinator import MEASURE, PREDICT, FakePool, run

from zyfa.config import cell_of
from zyfa.device import device_of_sku
from zyfa.recipes import PRESETS
from zyfa.tuner import axis, cli, session
from zyfa.tuner.plan import grid
from zyfa.tuning_db.certificates import add_certificate
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.store import Store

CELLS = grid([512], ("fp8",), (128,), ((32, 8),), (1,), (True,))
KEY = CELLS[0].key
TILES = (DEFAULT, replace(BEST, num_stages=2))
SEEDS = tuple(replace(tile, recipe=recipe) for recipe in ("bf16qk", "tensor", "block") for tile in TILES)
CERTIFIED = ("bf16qk", "tensor", "block")
SETUP = {
    "fronted": lambda key, config: config.recipe in CERTIFIED,
    "admits": lambda key, config: config.recipe == "bf16qk",
}
LOOSE = {"admits": SETUP["fronted"]}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "db.sqlite", device_of_sku("h200")) as store:
        yield store


def certify_all(store, setup):
    for recipe in CERTIFIED:
        add_certificate(store, setup.toolchain, setup.trust, a_certificate(recipe, KEY))


@pytest.mark.parametrize("setup", [PREDICT, MEASURE], ids=["predict", "measure"])
def test_the_winner_is_admitted_and_the_front_has_each_recipe(store, setup):
    setup = replace(setup, **SETUP)
    certify_all(store, setup)
    (r,), _, _ = run(setup, store, cells=CELLS, seeds=SEEDS)
    best = min(time_of(KEY, tile) for tile in TILES)
    (row,) = read(store.path)
    assert r.winner[0] == row.config and row.config.recipe == "bf16qk" and row.ms == best
    front = {row.config.recipe: row for row in read(store.path, view="front")}
    assert {"bf16qk", "tensor", "block"} <= set(front)
    for recipe in ("bf16qk", "tensor", "block"):
        assert (front[recipe].ms, front[recipe].trials) == (best, 2)
        assert front[recipe].cell == cell_of(KEY)


def test_the_best_of_each_recipe_is_timed_beside_the_finalists(store):
    pool = FakePool()
    certify_all(store, MEASURE)
    run(replace(MEASURE, **SETUP), store, cells=CELLS, seeds=SEEDS, pool=pool)
    ((_, configs),) = pool.comparisons
    assert {"bf16qk", "tensor", "block"} <= {config.recipe for config in configs}


def test_without_a_recipe_that_may_win_the_cell_fails_and_keeps_its_trials(store):
    (r,), _, _ = run(replace(MEASURE, admits=lambda key, config: False), store, cells=CELLS, seeds=SEEDS)
    assert r.state == "failed" and r.winner is None
    assert read(store.path) == [] and len(store.trials()) >= len(SEEDS)


def test_a_stored_winner_beyond_a_new_bound_is_chosen_again(store):
    certify_all(store, PREDICT)
    tensor_first = [replace(c, recipe="tensor") for c in TILES] + list(SEEDS)
    run(replace(PREDICT, admits=lambda key, config: config.recipe == "tensor"), store, cells=CELLS, seeds=tensor_first)
    strict = replace(PREDICT, admits=SETUP["admits"])
    (r,), _, _ = run(strict, store, cells=CELLS, seeds=SEEDS)
    assert r.winner[0].recipe == "bf16qk" and not r.known
    assert [row.config.recipe for row in read(store.path)] == ["bf16qk"]


def test_a_front_asked_for_later_tries_the_recipes_that_the_search_left_out(store):
    """A search that has ended is done again only as far as its front lacks recipes."""
    certify_all(store, PREDICT)
    short = replace(PREDICT, effort=replace(PREDICT.effort, trials=2))
    run(replace(short, **LOOSE), store, cells=CELLS, seeds=SEEDS[:2])
    assert len(store.trials()) == 2 and read(store.path, view="front") == []
    (r,), _, _ = run(replace(short, **SETUP), store, cells=CELLS, seeds=SEEDS)
    assert {"bf16qk", "tensor", "block"} <= {row.config.recipe for row in read(store.path, view="front")}
    assert not r.known and len(store.trials()) <= 2 + len(SEEDS)
    (r,), _, _ = run(replace(short, **SETUP), store, cells=CELLS, seeds=SEEDS)
    assert r.known, "and then there is nothing to do"


# --- zyfa-tune --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """zyfa-tune on the fake landscape with certificates that cost nothing; the recipes' errors are those stated."""
    asked = []

    def certified(store, toolchain, trust, classes, recipes, attend, say, ahead):
        asked.append((trust, tuple(recipes)))
        worst = {(recipe, at): 0.03 if recipe == "bf16qk" else 0.2 for recipe in CERTIFIED for at in classes}
        for recipe, at in worst:
            add_certificate(store, toolchain, trust, a_certificate(recipe, KEY, {"x": (worst[recipe, at],)}))
        return worst

    monkeypatch.setattr(axis, "certified", certified)
    monkeypatch.setattr(session, "_tools", lambda device, method, lazy, axis: make_tools(FakeFarm(), seeds=SEEDS))

    def call(*args):
        args = (
            "--target",
            "mi355x",
            "--seq-lens",
            "512",
            "--dtypes",
            "fp8",
            "--causal",
            "yes",
            "--effort",
            "quick",
            *args,
        )
        return CliRunner().invoke(cli.main, [*args, "--db", str(tmp_path / "db.sqlite")]), asked

    return call


def test_pareto_stores_a_front_and_the_winner_keeps_the_bound(tune, tmp_path):
    result, asked = tune("--pareto")
    assert result.exit_code == 0, result.output
    assert asked[0][0] == "predicted" and set(PRESETS.values()) <= set(asked[0][1])
    with sqlite3.connect(tmp_path / "db.sqlite") as conn:
        assert conn.execute("SELECT config LIKE '%bf16qk%' FROM best").fetchall() == [(1,)]
        assert {name for (name,) in conn.execute("SELECT recipe FROM fronts")} >= {"bf16qk", "tensor", "block"}


def test_a_bound_that_no_recipe_meets_is_wrong_usage(tune):
    result, _ = tune("--max-error", "0.001")
    assert result.exit_code == 2 and "no recipe is within 0.001" in result.output


@pytest.mark.parametrize(
    "args, text",
    [(("--recipes", "int4"), "int8-kmean"), (("--max-error", "200"), "a ratio from 1 to 100")],
)
def test_wrong_values_are_named_with_what_is_accepted(tune, args, text):
    result, _ = tune(*args)
    assert result.exit_code == 2 and text in result.output


def test_recipe_groups_and_names_mix():
    assert cli.parse_recipes("presets,block,tensor") == (*PRESETS.values(), "block")
