"""zyfa.lookup: which row is chosen, and that nothing in a database can make the choice fail."""

import os
import shutil
import sys
import threading
import warnings
from pathlib import Path

import pytest
from databases import CONFIG, H200, TOOLS, a_key, add_ok, backdate, damage, make_db, modes
from test_schema import BROKEN

from zyfa import lookup
from zyfa.archs import default_config
from zyfa.config import AttentionConfig, cell_of
from zyfa.device import Device, device_of_sku
from zyfa.limits import broken_limit
from zyfa.lookup import choose, describe, user_db_path
from zyfa.tuning_db import reader, schema
from zyfa.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("nothing_shipped")
A, B, C, D = (AttentionConfig(64, 64, 4, stages) for stages in (1, 2, 3, 4))


def user_db(*winners, device=H200):
    return make_db(user_db_path(device), *winners, device=device)


def shipped_db(*winners, device=H200):
    return make_db(reader.DATA / f"{device.db_name}.sqlite", *winners, device=device)


def listed_db(monkeypatch, *paths):
    monkeypatch.setenv("ZYFA_TUNING_DB", os.pathsep.join(map(str, paths)))


def chosen(key=None, device=H200):
    choice = choose(key or a_key(), device)
    return choice.config, choice.match, choice.trust


def test_an_exact_measured_row_is_found_by_every_key_of_its_cell():
    path = user_db((a_key(2048), {"config": A}))
    for seqlen in (1025, 1999, 2048):
        choice = choose(a_key(seqlen), H200)
        assert (choice.config, choice.match, choice.trust) == (A, "exact", "measured")
        assert choice.database == str(path) and choice.row.cell == cell_of(a_key(2048))
    assert chosen(a_key(2049)) == (A, "nearest", "measured")


def test_measured_near_beats_predicted_exact():
    user_db((a_key(2048), {"config": A, "trust": "predicted"}), (a_key(8192), {"config": B}))
    assert chosen() == (B, "nearest", "measured")


def test_predicted_exact_then_predicted_near_then_default():
    user_db((a_key(2048), {"config": A, "trust": "predicted"}), (a_key(8192), {"config": B, "trust": "predicted"}))
    assert chosen() == (A, "exact", "predicted")
    assert chosen(a_key(16384)) == (B, "nearest", "predicted")
    far = a_key(8192 * 16)
    assert chosen(far) == (default_config("sm90", far), "default", "none")


def test_the_order_of_databases_decides_between_equal_evidence(monkeypatch, tmp_path):
    listed = [make_db(tmp_path / f"{n}.sqlite", (a_key(), {"config": c})) for n, c in (("one", A), ("two", B))]
    user_db((a_key(), {"config": C}))
    shipped_db((a_key(), {"config": D}))
    for place in (*listed, user_db_path(H200)):
        listed_db(monkeypatch, *(path for path in listed if path.exists()))
        lookup.reset()
        assert choose(a_key(), H200).database == str(place)
        place.unlink()
    listed_db(monkeypatch)
    lookup.reset()
    assert chosen() == (D, "exact", "measured")


def test_evidence_comes_before_order(monkeypatch, tmp_path):
    listed_db(monkeypatch, make_db(tmp_path / "x.sqlite", (a_key(), {"config": A, "trust": "predicted"})))
    shipped_db((a_key(4096), {"config": B}))
    assert chosen() == (B, "nearest", "measured")
    shipped_db((a_key(), {"config": C}))
    lookup.reset()
    assert chosen() == (C, "exact", "measured")


def test_the_newest_of_several_toolchains():
    path = user_db((a_key(), {"config": A}), (a_key(), {"config": B, "toolchain": TOOLS._replace(kernel_hash="k2")}))
    backdate(path, 2, "2026-01-01T00:00:00.000Z")
    assert chosen() == (A, "exact", "measured")
    backdate(path, 2, "2099-01-01T00:00:00.000Z")
    lookup.reset()
    assert chosen() == (B, "exact", "measured")


@pytest.mark.parametrize(
    "other",
    [{"dtype": "fp16"}, {"head_dim": 64}, {"head_dim_v": 64}, {"causal": False}, {"window_class": "local"}],
    ids=lambda other: next(iter(other)),
)
def test_no_row_is_borrowed_across_classes(other):
    user_db((a_key(), {"config": A}))
    key = a_key()._replace(**other)
    assert chosen(key) == (default_config("sm90", key), "default", "none")


@pytest.mark.parametrize(
    "near, far",
    [
        ({"seqlen": 4096}, {"seqlen": 8192}),
        ({"seqlen": 1024}, {"seqlen": 8192}),
        ({"batch": 2}, {"batch": 4}),
        ({"nheads_k": 4}, {"nheads_k": 2}),
        ({"nheads_k": 2}, {"seqlen": 8192}),  # two octaves against four: both lengths count
        ({"seqlen_k": 8192}, {"seqlen": 8192}),
    ],
    ids=str,
)
def test_the_nearest_in_octaves(near, far):
    user_db((a_key(**far), {"config": B}), (a_key(**near), {"config": A}))
    assert chosen() == (A, "nearest", "measured")


def test_how_far_a_row_is_borrowed():
    user_db((a_key(2048), {"config": A}))
    assert chosen(a_key(2048 * 8)) == (A, "nearest", "measured")  # 3 + 3 octaves
    beyond = choose(a_key(2048 * 8, batch=2), H200)
    assert beyond.match == "default"
    assert any("within 6 octaves (the nearest is 7 away)" in miss for miss in beyond.misses)


def test_a_row_that_does_not_fit_is_passed_over_with_one_warning():
    too_big = AttentionConfig(256, 128, 8, 5)
    assert broken_limit(too_big, a_key(), "sm90")
    path = user_db((a_key(), {"config": too_big}), (a_key(4096), {"config": B}))
    with pytest.warns(RuntimeWarning, match="cannot run") as caught:
        assert chosen() == (B, "nearest", "measured")
        assert chosen(a_key(2000, batch=2)) == (B, "nearest", "measured")
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    assert any('"BLOCK_M":256' in miss for miss in choose(a_key(), H200).misses)


def test_rows_of_a_related_gpu_are_borrowed_last_and_labelled(monkeypatch, tmp_path):
    h100, half = device_of_sku("h100"), Device("nvidia", "sm90", "h200", 66)
    path = make_db(tmp_path / "x.sqlite", (a_key(), {"config": A}), device=h100)
    listed_db(monkeypatch, path)
    with pytest.warns(RuntimeWarning, match="no tuned config for this GPU"):
        choice = choose(a_key(), H200)
    assert (choice.config, choice.match, choice.trust) == (A, "borrowed", "measured")
    assert any("has rows of nvidia/sm90/h100/sm132 only" in m for m in choice.misses)
    assert "of nvidia/sm90/h100/sm132, another GPU" in describe(choice, a_key(), H200)
    assert chosen(device=h100) == (A, "exact", "measured")
    lookup.reset()
    make_db(tmp_path / "y.sqlite", (a_key(), {"config": B}), device=half)  # as close in name, not in units
    listed_db(monkeypatch, tmp_path / "y.sqlite", path)
    with pytest.warns(RuntimeWarning, match="rows of a related GPU are borrowed"):
        assert chosen() == (A, "borrowed", "measured")
    assert chosen(device=half) == (B, "exact", "measured")  # a partition is another device


def test_own_rows_come_before_borrowed_ones(monkeypatch, tmp_path):
    listed_db(monkeypatch, make_db(tmp_path / "x.sqlite", (a_key(), {"config": A}), device=device_of_sku("h100")))
    user_db((a_key(4096), {"config": B, "trust": "predicted"}))
    assert chosen() == (B, "nearest", "predicted")


def test_no_row_crosses_architectures(monkeypatch, tmp_path):
    listed_db(monkeypatch, make_db(tmp_path / "x.sqlite", (a_key(), {"config": A}), device=device_of_sku("mi300x")))
    with pytest.warns(RuntimeWarning, match="no tuned config"):
        assert chosen(device=device_of_sku("mi355x"))[1] == "default"


def test_a_shipped_file_of_a_related_gpu_is_found():
    shipped_db((a_key(), {"config": A}), device=device_of_sku("mi355x"))
    with pytest.warns(RuntimeWarning, match="borrowed"):
        assert chosen(device=device_of_sku("mi350x")) == (A, "borrowed", "measured")


def test_a_gpu_without_kernels_gets_no_row(monkeypatch, tmp_path):
    old = Device("nvidia", "sm80", "a100", 108)
    listed_db(monkeypatch, make_db(tmp_path / "x.sqlite", (a_key(), {"config": A}), device=old))
    assert chosen(device=old)[1] == "default"


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("place", ["listed", "user", "shipped"])
def test_a_broken_database_costs_one_warning_and_the_next_step(monkeypatch, tmp_path, kind, place):
    path = {"listed": tmp_path / "x.sqlite", "user": user_db_path(H200), "shipped": None}[place]
    path = make_db(path or reader.DATA / f"{H200.db_name}.sqlite", (a_key(), {"config": A}))
    if place == "listed":
        listed_db(monkeypatch, path)
    BROKEN[kind][0](path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seqlen in (2048, 4096, 2048):
            assert chosen(a_key(seqlen)) == (default_config("sm90", a_key(seqlen)), "default", "none")
    assert len(caught) == 1, [str(w.message) for w in caught]
    text = str(caught[0].message)
    assert str(path) in text and "run zyfa-tune" in text
    fallback = tmp_path / "fallback.sqlite"
    listed_db(monkeypatch, *([path] if place == "listed" else []), make_db(fallback, (a_key(), {"config": B})))
    lookup.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert choose(a_key(), H200).database == str(fallback)


def test_a_newer_schema_is_skipped_with_advice():
    damage(user_db((a_key(), {})), f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    with pytest.warns(RuntimeWarning, match="newer ZYFA.*upgrade zyfa"):
        assert chosen()[1] == "default"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_unreadable_place(monkeypatch, user_data_home, what):
    path = user_db((a_key(), {}))
    monkeypatch.setattr(reader, "DATA", user_data_home / "shipped")
    closed = modes(path.parent, **{path.name if what == "file" else ".": 0})
    with closed, pytest.warns(RuntimeWarning, match="Permission denied") as caught:
        assert chosen()[1] == "default"
    assert len(caught) == 1 and str(path) in str(caught[0].message)


def test_no_database_anywhere_is_told_once_with_what_was_looked_for():
    with pytest.warns(RuntimeWarning) as caught:
        for seqlen in (512, 1024, 2048):
            assert chosen(a_key(seqlen))[1] == "default"
    assert len(caught) == 1
    text = str(caught[0].message)
    assert H200.sku_key in text and str(user_db_path(H200)) in text and "zyfa-tune" in text


def test_bad_rows_are_told_once_and_the_others_used():
    path = user_db((a_key(), {"config": CONFIG}), (a_key(4096), {"config": A}), (a_key(8192), {"config": CONFIG}))
    damage(path, "UPDATE configs SET config = json_set(config, '$.WARP_SPEED', 9) WHERE id = 1")
    with pytest.warns(RuntimeWarning, match="2 rows left out, first row 1: .*WARP_SPEED") as caught:
        assert chosen() == (A, "nearest", "measured")
        assert chosen(a_key(4096)) == (A, "exact", "measured")
    assert len(caught) == 1


def test_a_log_that_was_left_behind_is_read(tmp_path):
    """A writer in WAL mode that was killed leaves rows in the log."""
    path = user_db((a_key(4096), {"config": B}))
    with Store(path) as store:
        store._db.enable_wal()
        add_ok(store, a_key(), config=A)
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(f"{path}{suffix}", tmp_path / f"copy{suffix}")
    path.unlink()
    for suffix in ("", "-wal", "-shm"):
        shutil.move(tmp_path / f"copy{suffix}", f"{path}{suffix}")
    assert chosen() == (A, "exact", "measured")


def test_choices_are_remembered_until_reset():
    path = user_db((a_key(), {"config": A}))
    first = choose(a_key(), H200)
    path.unlink()
    assert choose(a_key(2000), H200) is first
    lookup.reset()
    with pytest.warns(RuntimeWarning, match="no tuned config"):
        assert chosen()[1] == "default"


def test_devices_are_kept_apart_in_either_order():
    h100 = device_of_sku("h100")
    user_db((a_key(), {"config": A}))
    user_db((a_key(), {"config": B}), device=h100)
    for devices in ((H200, h100), (h100, H200)):
        lookup.reset()
        assert {d.sku: chosen(device=d)[0] for d in devices} == {"h200": A, "h100": B}


def test_threads_that_choose_first_together():
    user_db((a_key(), {"config": A}))
    found = []
    threads = [threading.Thread(target=lambda: found.append(chosen())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(A, "exact", "measured")] * 16


def test_the_log_names_each_config_once(monkeypatch, capsys):
    user_db((a_key(), {"config": A}))
    monkeypatch.setenv("ZYFA_LOG", "config")
    for seqlen in (2048, 2000, 4096):
        choose(a_key(seqlen), H200)
    err = capsys.readouterr().err
    assert err.count("config   ") == 2 and err.count(str(A)) == 2


def test_the_description_tells_where_and_why():
    path = user_db((a_key(8192), {"config": A, "ms": 0.5}))
    text = describe(choose(a_key(), H200), a_key(), H200)
    fields = [line.split(maxsplit=1) for line in text.splitlines()]
    assert ["device", "nvidia/sm90/h200/sm132"] in fields and ["match", "nearest"] in fields
    assert ["trust", "measured"] in fields and ["database", str(path)] in fields
    assert any(f[0] == "cell" and "seqlen_q=2048" in f[1] for f in fields)
    assert any(f[0] == "row" and "seqlen_q=8192" in f[1] for f in fields)
    assert ["config", str(A)] in fields and ["missed", "exact measured: no such row"] in fields
    assert "500 us" in text and "Triton 3.7.1" in text


@pytest.mark.parametrize(
    "platform, env, home_part",
    [
        ("linux", {"XDG_DATA_HOME": "/data"}, "/data/zyfa"),
        ("linux", {"XDG_DATA_HOME": "relative"}, "~/.local/share/zyfa"),
        ("linux", {"XDG_DATA_HOME": ""}, "~/.local/share/zyfa"),
        ("darwin", {}, "~/Library/Application Support/zyfa"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/zyfa"),
        ("win32", {"LOCALAPPDATA": ""}, "~/AppData/Local/zyfa"),
    ],
)
def test_the_user_database_lies_where_the_platform_keeps_data(monkeypatch, platform, env, home_part):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/u")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    expected = Path(home_part.replace("~", "/home/u")) / "nvidia-sm90-h200-sm132.sqlite"
    assert user_db_path(H200) == expected


def test_a_user_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setattr(Path, "home", no_home)
    shipped_db((a_key(), {"config": A}))
    choice = choose(a_key(), H200)
    assert choice.config == A and any("home directory" in miss for miss in choice.misses)
