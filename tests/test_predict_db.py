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
from zyfa.tuner.check_databases import check
from zyfa.tuner.compile import Build, specialisation
from zyfa.tuner.plan import key_of
from zyfa.tuner.space import FP8_RECIPES, broken_rule
from zyfa.tuning_db.content import write_content
from zyfa.tuning_db.reader import read

predict_db = script("predict_db")
DAY = "2026-11-30"
NAME = "amd-gfx950-mi355x-cu256.sqlite"


def submit(key, config):
    future = Future()
    future.set_result(Build(facts_for(key, config), None, 0.0))
    return future


@pytest.fixture(scope="module")
def builds():
    return predict_db.builds_of(predict_db.families((128,)), "gfx950", submit, 5)


@pytest.fixture(scope="module")
def cells(builds):
    """Two lengths and two head counts, priced for an MI355X."""
    every = predict_db.cells_of((1024, 8192), (128,), ((8, 2), (32, 8)))
    return {cell: predict_db.priced_cell(cell, builds, "mi355x") for cell in every}


def test_recipes_that_compile_to_one_loop_are_one_family():
    of_fp8 = [f.recipes for f in predict_db.families((128,)) if f.dtype == "fp8" and f.causal]
    assert sorted(recipe for recipes in of_fp8 for recipe in recipes) == sorted({*FP8_RECIPES, *PRESETS.values()})
    assert ("int8-kmean-equalise-hadamard", "int8-kmean") in of_fp8 and len(of_fp8) == 4
    assert len(predict_db.families((64, 128, 256))) == 3 * 2 * 5


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_tiles_are_legal_different_and_start_with_the_default(arch, head_dim):
    for family in predict_db.families((head_dim,)):
        chosen = predict_db.tiles(family, arch, 6)
        default = default_config(arch, family.key())
        assert chosen[0] == dataclasses.replace(default, recipe=family.recipes[0])
        assert len(set(chosen)) == len(chosen) <= 6 and all(c.num_stages <= 2 for c in chosen)
        assert all(broken_rule(config, family.key(), arch) is None for config in chosen)
        for near in predict_db.neighbours(chosen[0], family, arch):
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


def test_what_is_kept_is_near_the_best_or_a_preset_or_the_default(cells):
    for cell, priced in cells.items():
        able = [p.ms for config, (_, p) in priced.items() if predict_db.may_win(config)]
        for config, (_, prediction) in priced.items():
            near = predict_db.may_win(config) and prediction.ms <= 1.03 * min(able) * (1 + 1e-9)
            default = config == default_config("gfx950", key_of(cell))
            assert near or default or config.recipe in PRESETS.values()
        assert {c.recipe for c in priced} >= ({"none"} if cell.dtype == "bf16" else set(PRESETS.values()))


def test_winners_are_few_near_the_best_and_safe(cells):
    content = predict_db.content_of("mi355x", cells, DAY)
    assert len(content.winners) == len(cells) == 2 * 2 * 2 * 2
    for seat, crown in content.winners.items():
        able = [p.ms for config, (_, p) in cells[seat.cell].items() if predict_db.may_win(config)]
        assert crown.record.ms <= 1.03 * min(able) * (1 + 1e-9) and crown.trials == len(cells[seat.cell])
        assert AttentionConfig.from_json(crown.record.config).recipe in ("none", *FP8_RECIPES)
        assert crown.default_ms and crown.tuned_at.startswith(DAY)
    best_each = {min((c for c in priced if predict_db.may_win(c)), key=lambda c: priced[c][1].ms).to_json()
                 for priced in cells.values()}  # fmt: skip
    assert len({crown.record.config for crown in content.winners.values()}) <= len(best_each)


def test_the_file_passes_the_check_of_shipped_databases(tmp_path, cells):
    write_content(predict_db.content_of("mi355x", cells, DAY), tmp_path / NAME)
    rows = read(tmp_path / NAME)
    assert len(rows) == len(cells) and {row.trust for row in rows} == {"predicted"}

    class Farm(FakeFarm):
        def submit(self, key, config):
            return submit(key, config)

    assert list(check(tmp_path / NAME, Farm(), everything=True)) == []


def test_the_same_grid_gives_the_same_file(tmp_path, cells):
    for name in ("one.sqlite", "two.sqlite"):
        write_content(predict_db.content_of("mi355x", cells, DAY), tmp_path / name)
    assert (tmp_path / "one.sqlite").read_bytes() == (tmp_path / "two.sqlite").read_bytes()
    record = next(iter(predict_db.content_of("mi355x", cells, DAY).trials))
    assert datetime.datetime.fromtimestamp(record.created_at, datetime.UTC).date().isoformat() == DAY


def test_facts_of_an_earlier_file_are_used_again(tmp_path, cells, builds):
    write_content(predict_db.content_of("mi355x", cells, DAY), tmp_path / NAME)

    class Farm:
        arch, asked = "gfx950", 0

        def submit(self, key, config):
            self.asked += 1
            return submit(key, config)

    farm = Farm()
    known = predict_db.Known(farm, [tmp_path / NAME, tmp_path / "absent.sqlite"])
    again = predict_db.builds_of(predict_db.families((128,)), "gfx950", known.submit, 5)
    assert known.found > 5 and farm.asked < known.found + farm.asked
    assert again == builds
