"""The check of shipped databases: a sound file passes, and each kind of bad row is caught, one planted at a time."""

import dataclasses
import shutil
from collections import Counter
from concurrent.futures import Future

import pytest
from databases import a_certificate, a_key, damage
from test_facts import stored

from zyfa.config import AttentionConfig
from zyfa.device import device_of_sku
from zyfa.kernels import kernel_hash
from zyfa.toolchain import triton_version
from zyfa.tuner import check_databases
from zyfa.tuner.check_databases import check
from zyfa.tuner.compile import Build, compile_config
from zyfa.tuner.model import DEVICES, MODEL_VERSION, predict
from zyfa.tuning_db.certificates import add_certificate
from zyfa.tuning_db.content import read_content, write_content
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

NAME = "amd-gfx950-mi355x-cu256.sqlite"
CONFIG = AttentionConfig(128, 64, 4, 1)
FACTS = stored("gfx950-bf16", "3.7.1")
TOOLS = Toolchain(kernel_hash(), triton_version(), "", "")
H200_CONFIG = AttentionConfig(64, 128, 4, 2, recipe="block")


class FakeFarm:
    """Compiles to these facts, or fails."""

    def __init__(self, facts=FACTS, failure=None):
        self.build, self.asked = Build(facts, failure, 0.0), []

    def submit(self, key, config):
        self.asked.append(config)
        future = Future()
        future.set_result(self.build)
        return future


def add(store, key, config=CONFIG, facts=FACTS, trust="predicted", toolchain=TOOLS, confidence=None, **changes):
    told = predict(facts, key, config, DEVICES["mi355x" if facts.arch == "gfx950" else "h200"])
    values = {"ms": told.ms, "ms_lo": told.ms_lo, "ms_hi": told.ms_hi, "facts": facts.to_dict()} | changes
    trial = store.add_trial(key, toolchain, config, outcome="ok", trust=trust, **values)
    if key.dtype == "fp8":
        add_certificate(store, toolchain, trust, a_certificate(config.recipe, key))
    store.set_winner(trial, confidence=confidence or told.confidence, trials=1)


def make(path, *rows, sku="mi355x", model_version=MODEL_VERSION):
    with Store(path, device_of_sku(sku), model_version) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        for key, changes in rows:
            add(store, key, **changes)
    return path


def faults(path, farm=None, everything=False):
    return list(check(path, farm or FakeFarm(), everything))


def one(path, farm=None):
    """The only fault."""
    (fault,) = faults(path, farm)
    return fault


def test_a_sound_file_has_no_faults(tmp_path):
    farm = FakeFarm()
    path = make(tmp_path / NAME, (a_key(4096), {}), (a_key(8192), {}))
    assert faults(path, farm) == []
    assert farm.asked == [CONFIG]  # both rows are one build


def test_a_row_whose_code_spills(tmp_path):
    spilling = dataclasses.replace(FACTS, spills=9, scratch_bytes=36)
    path = make(tmp_path / NAME, (a_key(4096), {"facts": spilling}))
    assert "would be gated: spills: 9 registers" in one(path)
    path = make(tmp_path / "fresh" / NAME, (a_key(4096), {}))
    assert "would be gated: spills: 9 registers" in one(path, FakeFarm(spilling))  # only the fresh build shows it


def test_a_config_that_spills_when_really_compiled(tmp_path):
    config = dataclasses.replace(CONFIG, num_stages=2, waves_per_eu=3)
    build = compile_config(a_key(4096), config, "gfx950")
    path = make(tmp_path / NAME, (a_key(4096), {"config": config}))
    assert build.facts.scratch_bytes > 0
    assert any("would be gated: spills" in fault for fault in faults(path, FakeFarm(build.facts)))


def test_a_file_of_another_gpu(tmp_path):
    path = make(tmp_path / NAME, (a_key(4096), {}))
    shutil.copy(path, tmp_path / "amd-gfx950-mi350x-cu256.sqlite")
    assert "holds rows of amd/gfx950/mi355x/cu256" in one(tmp_path / "amd-gfx950-mi350x-cu256.sqlite")


def test_a_gpu_that_does_not_exist(tmp_path):
    path = make(tmp_path / "amd-gfx950-mi355x-cu304.sqlite", (a_key(4096), {}))
    damage(path, "UPDATE meta SET value = 'amd/gfx950/mi355x/cu304' WHERE key = 'sku'",
           "UPDATE meta SET value = '304' WHERE key = 'units'")  # fmt: skip
    assert "amd/gfx950/mi355x/cu304 is no GPU of the table" in faults(path)[0]


def test_facts_of_another_architecture(tmp_path):
    other = dataclasses.replace(FACTS, arch="gfx942")
    with Store(tmp_path / NAME, device_of_sku("mi355x"), MODEL_VERSION) as store:
        told = predict(FACTS, a_key(4096), CONFIG, DEVICES["mi355x"])
        trial = store.add_trial(a_key(4096), TOOLS, CONFIG, outcome="ok", trust="predicted", ms=told.ms,
                                facts=other.to_dict())  # fmt: skip
        store.set_winner(trial, confidence=told.confidence, trials=1)
    assert any("facts are of gfx942" in fault for fault in faults(tmp_path / NAME))


def test_a_prediction_marked_measured(tmp_path):
    """On a GPU that nobody has timed, and on one that was timed."""
    timings = {"samples": (0.5,), "rel_err": 0.001, "trust": "measured"}
    path = make(tmp_path / NAME, (a_key(4096), timings))
    assert "nobody has timed a gfx950" in faults(path)[0]
    name = "nvidia-sm90-h200-sm132.sqlite"
    facts = stored("sm90-fp8", "3.7.1")
    row = a_key(4096, dtype="fp8"), {"facts": facts, "config": H200_CONFIG, **timings}
    assert "names no driver" in one(make(tmp_path / name, row, sku="h200"), FakeFarm(facts))


def test_a_measurement_marked_predicted(tmp_path):
    path = make(tmp_path / NAME, (a_key(4096), {"rel_err": 0.001}))
    assert "like a measurement" in one(path)


def test_a_time_that_the_model_does_not_give(tmp_path):
    told = predict(FACTS, a_key(4096), CONFIG, DEVICES["mi355x"])
    path = make(tmp_path / NAME, (a_key(4096), {"ms": told.ms * 0.9, "ms_lo": told.ms_lo * 0.9}))
    assert "the model" in one(path) and f"{told.ms:.6g} ms" in one(path)


def test_a_grade_that_the_model_does_not_give(tmp_path):
    assert "says grade C, the model A" in one(make(tmp_path / NAME, (a_key(4096), {"confidence": "C"})))


def test_predictions_of_another_model(tmp_path):
    assert "of model v0, this is" in one(make(tmp_path / NAME, (a_key(4096), {}), model_version="v0"))


def test_a_prediction_without_facts(tmp_path):
    content = read_content(make(tmp_path / "whole.sqlite", (a_key(4096), {})))
    (crown,) = content.winners.values()
    bare = crown._replace(record=crown.record._replace(facts="{}"))
    write_content(content._replace(trials=Counter([bare.record]), winners={bare.seat: bare}), tmp_path / NAME)
    assert "has no facts" in one(tmp_path / NAME)


def test_code_that_this_compiler_does_not_make(tmp_path):
    other = dataclasses.replace(FACTS, code_hash="f" * 64)
    path = make(tmp_path / NAME, (a_key(4096), {"facts": other}))
    assert "its code is ffffffffffff, this Triton compiles it to" in one(path)


def test_another_compiler_may_make_other_code_and_that_is_said(tmp_path, capsys):
    other = dataclasses.replace(FACTS, code_hash="f" * 64)
    tools = TOOLS._replace(triton_version="3.6.0")
    path = make(tmp_path / NAME, (a_key(4096), {"facts": other, "toolchain": tools}))
    assert faults(path) == []
    assert "1 of 1 builds differ from those of Triton 3.6.0" in capsys.readouterr().out


def test_a_row_tuned_for_other_kernels(tmp_path):
    path = make(tmp_path / NAME, (a_key(4096), {"toolchain": TOOLS._replace(kernel_hash="k0")}))
    assert f"tuned for kernel k0, this is {kernel_hash()}: tune again" in one(path)


def test_a_config_beyond_the_limits(tmp_path):
    path = make(tmp_path / NAME, (a_key(4096), {"config": AttentionConfig(128, 64, 4, 8)}))
    assert any("num_stages is 1 to 5" in fault for fault in faults(path))


def test_a_config_that_does_not_compile(tmp_path):
    path = make(tmp_path / NAME, (a_key(4096), {}))
    assert "does not compile: MLIRError" in one(path, FakeFarm(None, "MLIRError: no"))


def test_a_time_below_what_the_matrix_units_need(tmp_path):
    name = "nvidia-sm90-h200-sm132.sqlite"
    facts = stored("sm90-fp8", "3.7.1")
    tools = Toolchain(kernel_hash(), "3.6.0", "2.11.0", "580.1")
    row = {"facts": facts, "config": H200_CONFIG, "trust": "measured", "toolchain": tools, "samples": (0.01,)}
    times = {"ms": 0.01, "ms_lo": 0.01, "ms_hi": 0.01, "rel_err": 0.01}
    path = make(tmp_path / name, (a_key(4096, dtype="fp8"), row | times), sku="h200")
    assert "faster than the matrix units" in one(path, FakeFarm(facts))


@pytest.mark.parametrize(
    "change", ["UPDATE winners SET confidence = 'B'", "UPDATE trials SET ms = ms * 0.99", "DROP VIEW best"]
)
def test_a_damaged_file(tmp_path, change):
    path = make(tmp_path / NAME, (a_key(4096), {}))
    damage(path, change)
    assert faults(path)


def test_an_empty_file(tmp_path):
    assert "holds no rows" in one(make(tmp_path / NAME))


def test_the_sample_is_spread_and_all_is_all(tmp_path):
    rows = [(a_key(4096), {}), (a_key(4096, causal=False), {}), (a_key(4096, dtype="fp16"), {})]
    path = make(tmp_path / NAME, *rows)
    checked = list(check_databases._rows(read_content(path)))
    assert len(check_databases.spread(checked, 2)) == 2 and len(check_databases.spread(checked, 9)) == 3
    farm = FakeFarm()
    faults(path, farm, everything=True)
    assert len(farm.asked) == 3


def test_exit_code_and_closing_line(tmp_path, capsys):
    path = make(tmp_path / NAME)
    assert check_databases.main([str(path)]) == 1
    assert "1 databases checked" in capsys.readouterr().out
