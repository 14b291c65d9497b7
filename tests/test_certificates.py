"""Certificates and fronts in the database: what a reader is shown, and what is refused."""

import dataclasses
import math

import pytest
from databases import CONFIG, H200, TOOLS, a_certificate, a_key, add_ok, damage, make_db

from zyfa.errors import DatabaseError
from zyfa.tuning_db.certificates import add_certificate, certificates, put, worst_errors
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.reader import UNCERTIFIED, read
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
    [{"recipe": "tensor"}, {"trust": "predicted"}, {"causal": False}, {"head_dim": 64}, {"head_dim_v": 64},
     {"toolchain": TOOLS._replace(driver_version="2")}],
)  # fmt: skip
def test_only_its_own_certificate_shows_an_fp8_row(path, change):
    make_db(path, (KEY, {"config": SAFE}), (a_key(), {}))
    assert sorted(row.dtype for row in read(path)) == ["bf16", "fp8"]
    assert findings(path) == []
    (licence, stored), = read_content(path).certificates.items()  # fmt: skip
    damage(path, "DELETE FROM certificates")
    with Store(path) as store, store._writing():
        put(store, licence._replace(**change), stored)
    assert [row.dtype for row in read(path)] == ["bf16"]
    assert findings(path) == [f"{path}: 1 FP8 winners {UNCERTIFIED}"]


def test_a_winner_needs_its_certificate_first(store):
    trial = add_ok(store, KEY, SAFE, win=False, certified=False)
    for crown in (store.set_winner, store.set_front):
        with pytest.raises(ValueError, match="its recipe has no certificate"):
            crown(trial, confidence="A", trials=1)
    assert read(store.path) == []


@pytest.mark.parametrize("change", ["errors = '{\"normal\":[0.01]}'", "worst = 0.01", "created_at = 7", "causal = 0"])
def test_a_certificate_that_was_changed_does_not_match_its_seal(path, change):
    make_db(path, (KEY, {"config": SAFE}))
    damage(path, f"UPDATE certificates SET {change}")
    with pytest.raises(DatabaseError, match="certificate of recipe 'bf16qk' does not match its seal"):
        worst_errors(path)
    assert "does not match its seal" in findings(path)[0]


def test_a_front_has_the_best_of_each_recipe_beside_the_winner(path, store):
    safe, fast = add_ok(store, KEY, SAFE, ms=2.0), add_ok(store, KEY, FAST, ms=1.0, win=False)
    for trial in (safe, fast):
        store.set_front(trial, confidence="A", trials=3)
    assert [(row.config, row.ms) for row in read(path)] == [(SAFE, 2.0)]
    front = {row.config: (row.ms, row.trials, row.confidence) for row in read(path, view="front")}
    assert front == {SAFE: (2.0, 3, "A"), FAST: (1.0, 3, "A")}
    better = add_ok(store, KEY, dataclasses.replace(FAST, num_stages=2), ms=0.5, win=False)
    store.set_front(better, confidence="B", trials=4)
    assert sorted(row.ms for row in read(path, view="front")) == [0.5, 2.0]
    assert findings(path) == []


def test_only_an_ok_trial_with_its_error_is_in_a_front(store):
    wrong = store.add_trial(KEY, TOOLS, FAST, outcome="wrong", trust="measured", reason="error 1")
    for trial in (wrong, wrong + 1):
        with pytest.raises(ValueError, match="belongs not in fronts"):
            store.set_front(trial, confidence="A", trials=1)
    trial = add_ok(store, KEY, SAFE, win=False)
    with pytest.raises(ValueError, match="breaks the schema"):
        store.set_front(trial, confidence="D", trials=1)
