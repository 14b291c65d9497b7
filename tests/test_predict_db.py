"""scripts/predict_db.py on simulated builds: what is compiled and shared, what wins, and that the file is sound."""

import dataclasses
import datetime
from concurrent.futures import Future

import pytest
from test_check_databases import FakeFarm
from test_first_hour import facts_for
from test_ranking import script

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, cell_of
from zyfa.recipes import PRESETS
from zyfa.tuner import certificate
from zyfa.tuner.check_databases import check
from zyfa.tuner.compile import Build, specialisation
from zyfa.tuner.plan import key_of
from zyfa.tuner.space import broken_rule
from zyfa.tuning_db.certificates import Certificate
from zyfa.tuning_db.content import read_content, write_content
from zyfa.tuning_db.reader import read

predict_db, predict_builds = script("predict_db"), script("predict_builds")
DAY = "2026-11-30"
NAME = "amd-gfx950-mi355x-cu256.sqlite"


def submit(key, config):
    future = Future()
    future.set_result(Build(facts_for(key, config), None, 0.0))
    return future


PROOFS = [
    Certificate(recipe, 128, 128, causal, {"normal": (0.5 if recipe in ("tensor", "int8-kmean") else 0.03,)})
    for recipe in PRESETS.values() for causal in (True, False)
]  # fmt: skip
WORST = predict_db.worst_of(PROOFS)


@pytest.fixture(scope="module")
def builds():
    return predict_db.builds_of(predict_db.families((128,)), "gfx950", submit, 5)


@pytest.fixture(scope="module")
def cells(builds):
    """Two lengths and two head counts, priced for an MI355X."""
    every = predict_db.cells_of((1024, 8192), (128,), ((8, 2), (32, 8)))
    return {cell: predict_db.priced_cell(cell, builds, "mi355x", WORST) for cell in every}


def may_win(config):
    return config.recipe in ("none", PRESETS["balanced"], PRESETS["accurate"])


def test_recipes_that_compile_to_one_loop_are_one_family():
    of_fp8 = [f.recipes for f in predict_db.families((128,)) if f.dtype == "fp8" and f.causal]
    assert sorted(recipe for recipes in of_fp8 for recipe in recipes) == sorted(PRESETS.values())
    assert (PRESETS["fast"], PRESETS["balanced"]) in of_fp8 and len(of_fp8) == 3
    assert len(predict_db.families((64, 128, 256))) == 3 * 2 * 4


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_tiles_are_legal_different_and_hold_the_default(arch, head_dim):
    for family in predict_db.families((head_dim,)):
        chosen = predict_builds.tiles(family, arch, 6)
        default = dataclasses.replace(default_config(arch, family.key()), recipe=family.recipes[0])
        assert default in chosen or broken_rule(default, family.key(), arch)
        assert len(set(chosen)) == len(chosen) <= 6 and all(c.num_stages <= 2 for c in chosen)
        assert all(broken_rule(config, family.key(), arch) is None for config in chosen)
        for near in predict_builds.neighbours(chosen[0], family, arch):
            assert broken_rule(near, family.key(), arch) is None and near != chosen[0]


def test_the_grid_has_lengths_head_counts_masks_and_dtypes():
    cells = predict_db.cells_of((512, 1024), (64, 128))
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2 * len(predict_db.HEADS)


def test_a_build_serves_only_cells_that_compile_to_it(builds):
    family = next(iter(builds))
    config = next(iter(builds[family]))
    long = family.key(1 << 17, 128, 32)  # 8 GiB of Q: 64-bit addresses
    assert specialisation(long, config, "gfx950") != specialisation(family.key(), config, "gfx950")
    assert predict_db.price(cell_of(long), builds, "mi355x") == {}


def test_what_is_kept_is_near_the_best_or_of_a_front_or_the_default(cells):
    for cell, priced in cells.items():
        able = [p.ms for config, (_, p) in priced.items() if may_win(config)]
        for config, (_, prediction) in priced.items():
            near = may_win(config) and prediction.ms <= 1.03 * min(able) * (1 + 1e-9)
            default = config == default_config("gfx950", key_of(cell))
            same = [p.ms for c, (_, p) in priced.items() if c.recipe == config.recipe]
            assert near or default or prediction.ms == min(same)
        assert {c.recipe for c in priced} == ({"none"} if cell.dtype == "bf16" else set(PRESETS.values()))


def test_recipes_without_a_certificate_are_left_out(cells, builds):
    cell = next(cell for cell in cells if cell.dtype == "fp8")
    some = {name: error for name, error in WORST.items() if name[0] != "tensor"}
    priced = predict_db.priced_cell(cell, builds, "mi355x", some)
    assert {c.recipe for c in priced} == {*PRESETS.values()} - {"tensor"}
    assert predict_db.priced_cell(cell, builds, "mi355x", dict.fromkeys(WORST, 0.9)) == {}  # nothing may win


def test_winners_are_few_near_the_best_and_within_the_error_bound(cells):
    content = predict_db.content_of("mi355x", cells, DAY, PROOFS)
    assert len(content.winners) == len(cells) == 2 * 2 * 2 * 2
    for seat, crown in content.winners.items():
        able = [p.ms for config, (_, p) in cells[seat.cell].items() if may_win(config)]
        assert crown.record.ms <= 1.03 * min(able) * (1 + 1e-9) and crown.trials == len(cells[seat.cell])
        assert may_win(AttentionConfig.from_json(crown.record.config))
        assert crown.default_ms and crown.tuned_at.startswith(DAY)
    best_each = {min(filter(may_win, priced), key=lambda c: priced[c][1].ms).to_json() for priced in cells.values()}
    assert len({crown.record.config for crown in content.winners.values()}) <= len(best_each)


def test_every_fp8_cell_has_a_front_of_all_presets(cells):
    content = predict_db.content_of("mi355x", cells, DAY, PROOFS)
    for seat, winner in content.winners.items():
        front = {recipe: crown for (at, recipe), crown in content.fronts.items() if at == seat}
        assert set(front) == (set(PRESETS.values()) if seat.cell.dtype == "fp8" else set())
        assert all(AttentionConfig.from_json(c.record.config).recipe == recipe for recipe, c in front.items())
        assert not front or winner in front.values()


class Farm(FakeFarm):
    arch, asked_for = "gfx950", 0

    def submit(self, key, config):
        self.asked_for += 1
        return submit(key, config)


def test_the_file_passes_the_check_of_shipped_databases(tmp_path, cells):
    write_content(predict_db.content_of("mi355x", cells, DAY, PROOFS), tmp_path / NAME)
    rows = read(tmp_path / NAME)
    assert len(rows) == len(cells) and {row.trust for row in rows} == {"predicted"}
    assert len(read(tmp_path / NAME, view="front")) == 4 * sum(cell.dtype == "fp8" for cell in cells)
    assert list(check(tmp_path / NAME, Farm(), everything=True)) == []


def test_the_same_grid_gives_the_same_file(tmp_path, cells):
    for name in ("one.sqlite", "two.sqlite"):
        write_content(predict_db.content_of("mi355x", cells, DAY, PROOFS), tmp_path / name)
    assert (tmp_path / "one.sqlite").read_bytes() == (tmp_path / "two.sqlite").read_bytes()
    content = read_content(tmp_path / "one.sqlite")
    assert content == predict_db.content_of("mi355x", cells, DAY, PROOFS)
    record = next(iter(content.trials))
    assert datetime.datetime.fromtimestamp(record.created_at, datetime.UTC).date().isoformat() == DAY


def test_facts_of_an_earlier_file_are_used_again(tmp_path, cells, builds):
    write_content(predict_db.content_of("mi355x", cells, DAY, PROOFS), tmp_path / NAME)
    farm = Farm()
    known = predict_db.Known(farm, [tmp_path / NAME, tmp_path / "absent.sqlite"])
    again = predict_db.builds_of(predict_db.families((128,)), "gfx950", known.submit, 5)
    assert known.found > 5 and again == builds and farm.asked_for > 0


def test_certificates_are_emulated_for_every_class(monkeypatch):
    every = list(certificate.certificate_inputs(64, 64))
    monkeypatch.setattr(certificate, "certificate_inputs", lambda *dims: every[2:4])  # one hard family
    found = predict_db.certificates_of("gfx942", (64,))
    worst = predict_db.worst_of(found)
    assert len(found) == 2 * len(PRESETS) and worst["tensor", 64, True] > 0.07 > worst[PRESETS["accurate"], 64, True]
