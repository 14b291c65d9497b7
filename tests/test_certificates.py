"""Certificates and fronts in the database: what a reader is shown, and what is refused."""

import dataclasses
import math

import pytest
from databases import CONFIG, H200, TOOLS, a_certificate, a_key, add_ok, damage, make_db

from zyfa.tuning_db.certificates import add_certificate, certificates, set_front
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.store import Store
from zyfa.tuning_db.verify import findings

KEY = a_key(dtype="fp8")
SAFE = dataclasses.replace(CONFIG, recipe="bf16qk")
FAST = dataclasses.replace(CONFIG, recipe="tensor")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "db.sqlite"


@pytest.fixture
def store(path):
    with Store(path, H200) as store:
        yield store


def test_a_certificate_comes_back_and_knows_its_worst(store):
    errors = {"normal": (0.01, 0.02), "sink": (0.03, 0.011)}
    add_certificate(store, TOOLS, "measured", a_certificate("bf16qk", errors=errors))
    (found,) = certificates(store, TOOLS, "measured")
    assert found == ("bf16qk", 128, 128, True, errors) and found.worst == 0.03
    assert certificates(store, TOOLS, "predicted") == []
    assert certificates(store, TOOLS._replace(kernel_hash="k2"), "measured") == []


def test_the_last_certificate_counts(store):
    for error in (0.01, 0.04):
        add_certificate(store, TOOLS, "measured", a_certificate("bf16qk", errors={"normal": (error,)}))
    assert [c.worst for c in certificates(store, TOOLS, "measured")] == [0.04]


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_no_number_earns_no_certificate(store, error):
    with pytest.raises(ValueError, match="bf16qk has an error that is not finite"):
        add_certificate(store, TOOLS, "measured", a_certificate("bf16qk", errors={"sink": (error, 0.1)}))
    assert certificates(store, TOOLS, "measured") == []


@pytest.mark.parametrize(
    "change",
    ["recipe = 'tensor'", "trust = 'predicted'", "causal = 0", "head_dim = 64", "head_dim_v = 64", "toolchain = 2"],
)
def test_only_its_own_certificate_shows_an_fp8_row(path, change):
    make_db(path, (KEY, {"config": SAFE}), (a_key(), {"toolchain": TOOLS._replace(driver_version="2")}))
    assert sorted(row.dtype for row in read(path)) == ["bf16", "fp8"]
    assert findings(path) == []
    damage(path, f"UPDATE certificates SET {change}")
    assert [row.dtype for row in read(path)] == ["bf16"]
    assert any("1 of 2 are not in the view best: no certificate" in line for line in findings(path))


def test_a_front_has_the_best_of_each_recipe_beside_the_winner(path, store):
    safe, fast = add_ok(store, KEY, SAFE, ms=2.0), add_ok(store, KEY, FAST, ms=1.0, win=False)
    for trial in (safe, fast):
        set_front(store, trial, confidence="A", trials=3)
    assert [(row.config, row.ms) for row in read(path)] == [(SAFE, 2.0)]
    front = {row.config: (row.ms, row.trials, row.confidence) for row in read(path, view="front")}
    assert front == {SAFE: (2.0, 3, "A"), FAST: (1.0, 3, "A")}
    better = add_ok(store, KEY, dataclasses.replace(FAST, num_stages=2), ms=0.5, win=False)
    set_front(store, better, confidence="B", trials=4)
    assert sorted(row.ms for row in read(path, view="front")) == [0.5, 2.0]
    assert findings(path) == []


def test_only_an_ok_trial_with_its_error_is_in_a_front(store):
    wrong = store.add_trial(KEY, TOOLS, FAST, outcome="wrong", trust="measured", reason="error 1")
    for trial in (wrong, wrong + 1):
        with pytest.raises(ValueError, match="belongs to no front"):
            set_front(store, trial, confidence="A", trials=1)
    trial = add_ok(store, KEY, SAFE, win=False)
    with pytest.raises(ValueError, match="breaks the schema"):
        set_front(store, trial, confidence="D", trials=1)


def test_the_recipe_column_is_that_of_the_config(path):
    make_db(path, (KEY, {"config": SAFE}))
    damage(path, "UPDATE configs SET recipe = 'block'", "UPDATE certificates SET recipe = 'block'")
    assert any("are ('block', 'block'), those of the config ('block', 'bf16qk')" in line for line in findings(path))
