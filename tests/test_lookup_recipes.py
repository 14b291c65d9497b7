"""zyfa.lookup for calls that name a recipe: its own best row, else the tuned tile."""

import dataclasses

import pytest
from databases import CONFIG, H200, a_key, add_ok

from zyfa import lookup
from zyfa.archs import default_config, plain_config
from zyfa.config import AttentionConfig
from zyfa.device import device_of_sku
from zyfa.limits import knows_gluon
from zyfa.lookup import _with_recipe, choose, faster_plain, withdraw
from zyfa.recipes import PRESETS
from zyfa.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("nothing_shipped")
KEY = a_key(dtype="fp8")
WINNER = dataclasses.replace(CONFIG, recipe=PRESETS["balanced"])
FAST = AttentionConfig(128, 64, 4, 2, recipe=PRESETS["per_tensor"])


def user_db(*members, trust="measured"):
    """The winner, and (key, config) of a front."""
    with Store(lookup.user_db_path(H200), H200) as store:
        add_ok(store, KEY, WINNER, ms=2.0)
        for key, config in members:
            store.set_front(add_ok(store, key, config, ms=1.0, win=False, trust=trust), confidence="A", trials=1)


def test_a_recipe_beyond_the_bound_runs_in_its_own_config_when_it_is_named():
    user_db((KEY, FAST))
    assert choose(KEY, H200).config == WINNER
    choice = choose(KEY, H200, FAST.recipe)
    assert (choice.config, choice.match, choice.trust, choice.row.ms) == (FAST, "exact", "measured", 1.0)
    assert choose(KEY, H200, FAST.recipe) is choice


def test_the_winner_is_a_row_of_its_recipe():
    user_db()
    choice = choose(KEY, H200, WINNER.recipe)
    assert (choice.config, choice.match) == (WINNER, "exact")


def test_without_a_row_of_its_own_the_tuned_tile_runs_it():
    user_db()
    choice = choose(KEY, H200, FAST.recipe)
    assert choice.config == dataclasses.replace(WINNER, recipe=FAST.recipe)
    assert "the tuned tile runs it" in choice.misses[0] and choice.row.config == WINNER


def test_the_nearest_row_of_a_recipe_is_borrowed():
    user_db((a_key(4096, dtype="fp8"), FAST))
    choice = choose(KEY, H200, FAST.recipe)
    assert (choice.config, choice.match) == (FAST, "nearest")


def test_a_prediction_does_not_outrank_a_measured_tile():
    user_db((KEY, FAST), trust="predicted")
    assert choose(KEY, H200, FAST.recipe).config == dataclasses.replace(WINNER, recipe=FAST.recipe)


def test_a_tile_that_does_not_fit_the_recipe_gives_way_to_the_default():
    wide = AttentionConfig(256, 128, 8, 5, recipe=PRESETS["balanced"])  # 196608 B; bf16 Q and K, 4 stages: 262144
    with Store(lookup.user_db_path(H200), H200) as store:
        add_ok(store, KEY, wide)
    assert choose(KEY, H200).config == wide
    choice = choose(KEY, H200, "bf16qk")
    assert choice.config == default_config("sm90", KEY, "bf16qk")


def test_no_database_means_the_default_tile_with_the_recipe():
    with pytest.warns(RuntimeWarning, match="no tuned config"):
        choice = choose(KEY, H200, "bf16qk")
    assert (choice.match, choice.config.recipe) == ("default", "bf16qk")


def test_a_recipe_on_a_tile_tuned_for_another():
    """16-bit K tiles are twice as large: one stage fewer, never none; the other way nothing changes."""
    tuned = AttentionConfig(64, 128, 4, 3, recipe="block-kmean-qmean")
    assert _with_recipe(tuned, KEY, H200, "bf16qk") == AttentionConfig(64, 128, 4, 2, recipe="bf16qk")
    assert _with_recipe(tuned, KEY, H200, "tensor").num_stages == 3
    single, wide = AttentionConfig(64, 128, 4, 1, recipe="block"), AttentionConfig(64, 128, 4, 2, recipe="bf16qk")
    assert _with_recipe(single, KEY, H200, "bf16qk").num_stages == 1
    assert _with_recipe(wide, KEY, H200, "int8-kmean").num_stages == 2


def test_a_row_of_a_recipe_that_fails_is_withdrawn_for_that_recipe_only():
    user_db((KEY, FAST))
    assert choose(KEY, H200, FAST.recipe).config == FAST
    with pytest.warns(RuntimeWarning, match="failed to launch"):
        assert withdraw(KEY, H200, RuntimeError("ptxas"), FAST.recipe)
    assert choose(KEY, H200, FAST.recipe).config == plain_config("sm90", KEY, FAST.recipe)
    assert choose(KEY, H200).config == WINNER


@pytest.mark.parametrize(
    "fp8, bf16, dtype",
    [({"ms": 2.0}, {"ms": 1.9}, "none"), ({"ms": 2.0}, {"ms": 2.0}, "none"), ({"ms": 1.9}, {"ms": 2.0}, "fp8"),
     ({"ms": 2.0, "trust": "predicted"}, {"ms": 1.0}, "fp8"), ({"ms": 2.0}, {"ms": 1.0, "trust": "predicted"}, "fp8")],
)  # fmt: skip
def test_fp8_gives_way_to_bf16_where_both_were_timed_and_it_is_no_faster(fp8, bf16, dtype):
    with Store(lookup.user_db_path(H200), H200) as store:
        add_ok(store, KEY, WINNER, **fp8)
        add_ok(store, a_key(), CONFIG, **bf16)
    choice = faster_plain(choose(KEY, H200), KEY, H200)
    assert choice.config == (CONFIG if dtype == "none" else WINNER)
    assert "fp8: 2000 us" in choice.misses[0] if dtype == "none" else choice is choose(KEY, H200)
    far = a_key(8192, dtype="fp8")  # rows of other lengths say nothing about which is faster there
    assert faster_plain(choose(far, H200), far, H200).config == WINNER
    batch = KEY._replace(batch=16)  # the same lengths with more heads: the rows of this cell are the nearest
    assert choose(batch, H200).match == "nearest"
    assert faster_plain(choose(batch, H200), batch, H200).config == (CONFIG if dtype == "none" else WINNER)


def test_untuned_fp8_gives_way_to_bf16_on_hopper_only():
    """Nothing is stored; a recipe by name never comes here."""
    if not knows_gluon("sm90"):
        pytest.skip("this Triton has no Gluon: the plain kernel's defaults stand")
    choice = faster_plain(choose(KEY, H200), KEY, H200)
    assert (choice.match, choice.config.recipe, choice.config.variant) == ("default", "none", "gluon")
    assert "untuned FP8 is slower" in choice.misses[0]
    amd = device_of_sku("mi355x")
    assert faster_plain(choose(KEY, amd), KEY, amd).config.recipe == PRESETS["balanced"]
