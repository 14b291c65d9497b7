"""zyfa.tuning_db.store: what is written stays, what is wrong is refused."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from databases import CONFIG, H200, TOOLS, a_key, add_ok, damage, make_db, read_only

from zyfa.config import AttentionConfig, cell_of
from zyfa.device import device_of_sku
from zyfa.errors import DatabaseError
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.store import Store

GOOD = {"outcome": "ok", "trust": "measured", "ms": 1.0, "samples": (1.0,), "rel_err": 0.01}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "deep" / "er" / "x.sqlite", H200) as store:
        yield store


def test_a_trial_comes_back_as_it_was_added(store):
    trial_id = store.add_trial(
        a_key(3000), TOOLS, CONFIG, outcome="ok", trust="measured", ms=0.75, ms_lo=0.7, ms_hi=0.8,
        samples=[0.7512345, 0.75], rel_err=0.002, is_default=True, facts={"registers": 128},
    )  # fmt: skip
    (trial,) = store.trials()
    assert trial.id == trial_id and trial.key == a_key(3000)
    assert (trial.toolchain, trial.config, trial.outcome, trial.trust) == (TOOLS, CONFIG, "ok", "measured")
    assert (trial.ms, trial.ms_lo, trial.ms_hi, trial.rel_err, trial.is_default) == (0.75, 0.7, 0.8, 0.002, True)
    assert trial.samples == pytest.approx((0.7512, 0.75)) and trial.facts == {"registers": 128}
    assert trial.reason == "" and trial.created_at.startswith("20") and trial.created_at.endswith("Z")


@pytest.mark.parametrize("outcome", ["illegal", "compile_failed", "gated", "wrong", "timed_out", "crashed"])
def test_a_failure_keeps_its_reason_and_has_no_time(store, outcome):
    store.add_trial(a_key(), TOOLS, CONFIG, outcome=outcome, trust="measured", reason="spills 12 registers")
    (trial,) = store.trials()
    assert (trial.outcome, trial.reason, trial.ms, trial.samples) == (outcome, "spills 12 registers", None, ())


@pytest.mark.parametrize(
    "change",
    [
        {"ms": float("nan")},
        {"ms": float("inf")},
        {"ms": 0.0},
        {"ms": 1e9},
        {"ms": None},
        {"ms_lo": 1.1},
        {"ms_hi": 0.9},
        {"samples": ()},  # measured, but nothing was timed
        {"samples": (1.0, float("nan"))},
        {"trust": "predicted"},  # predicted, but with timings
        {"trust": "guessed"},
        {"outcome": "fine"},
        {"outcome": "wrong"},  # a time that must not be believed
        {"rel_err": float("nan")},
        {"rel_err": -1.0},
        {"facts": {"x": float("nan")}},
    ],
    ids=str,
)
def test_what_cannot_be_true_is_refused_and_leaves_no_trace(store, change):
    with pytest.raises(ValueError):
        store.add_trial(a_key(), TOOLS, CONFIG, **GOOD | change)
    counts = [store._db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("trials", "configs", "cells")]
    assert counts == [0, 0, 0]


def test_a_window_has_no_place_yet(store):
    with pytest.raises(ValueError, match="window"):
        store.add_trial(a_key()._replace(window_class="local"), TOOLS, CONFIG, **GOOD)


def test_numpy_scalars_are_stored_as_numbers(store):
    key = a_key(1024)
    numpy_key = key._replace(seqlen_q=np.int64(1024), seqlen_k=np.int32(1024), batch=np.int64(1), causal=np.bool_(True))
    trial = store.add_trial(
        numpy_key, TOOLS, CONFIG, outcome="ok", trust="measured", ms=np.float32(0.5), ms_lo=np.float64(0.25),
        samples=np.array([0.5, 0.25], np.float32), rel_err=np.float32(0.5), is_default=np.bool_(True),
    )  # fmt: skip
    store.set_winner(trial, confidence="B", trials=np.int64(7), default_ms=np.float32(2))
    for table in ("trials", "cells", "shapes", "winners"):
        for row in store._db.execute(f"SELECT * FROM {table}"):
            assert sum(isinstance(value, bytes) for value in row) == (table == "trials"), table  # its samples
    found = store.winner(cell_of(key))
    assert found.trial.key == key and found.trial.samples == (0.5, 0.25)
    assert (found.trial.ms, found.trial.ms_lo, found.trials, found.default_ms) == (0.5, 0.25, 7, 2.0)


def test_what_repeats_is_stored_once(store):
    for seqlen in (1000, 1000, 1024, 2048):
        add_ok(store, a_key(seqlen), facts={"registers": 1})
    counts = {t: store._db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in TABLES}
    assert counts == {"cells": 2, "shapes": 3, "configs": 1, "toolchains": 1, "facts": 1, "trials": 4, "winners": 2}


TABLES = ("cells", "shapes", "configs", "toolchains", "facts", "trials", "winners")


def test_trials_are_selected_by_cell_toolchain_and_trust(store):
    other = TOOLS._replace(kernel_hash="k2")
    ids = [
        add_ok(store, a_key(1024)),
        add_ok(store, a_key(1000)),  # the same cell
        add_ok(store, a_key(2048)),
        add_ok(store, a_key(1024), toolchain=other),
        add_ok(store, a_key(1024), trust="predicted"),
    ]
    cell = cell_of(a_key(1024))
    assert [t.id for t in store.trials(cell)] == [ids[0], ids[1], ids[3], ids[4]]
    assert [t.id for t in store.trials(cell, TOOLS)] == [ids[0], ids[1], ids[4]]
    assert [t.id for t in store.trials(cell, TOOLS, "measured")] == ids[:2]
    assert [t.id for t in store.trials(trust="predicted")] == ids[4:]
    assert store.trials(cell_of(a_key(4096))) == []


def test_the_winner_is_the_newest_and_a_measured_one_first(store):
    cell = cell_of(a_key())
    assert store.winner(cell) is None
    add_ok(store, a_key(), trust="predicted", ms=0.1)
    assert store.winner(cell).trial.trust == "predicted"
    first, second = add_ok(store, a_key(), ms=3.0), add_ok(store, a_key(), ms=2.0)
    assert store.winner(cell).trial.id == second != first
    newer = TOOLS._replace(triton_version="3.9.0")
    third = add_ok(store, a_key(), ms=4.0, toolchain=newer)
    damage(store.path, "UPDATE winners SET tuned_at = '2099-01-01T00:00:00.000Z' WHERE toolchain = 2")
    assert store.winner(cell).trial.id == third
    assert store.winner(cell, TOOLS).trial.id == second
    assert store.winner(cell, TOOLS, "predicted").trial.ms == 0.1


def test_who_cannot_win(store):
    wrong = store.add_trial(a_key(), TOOLS, CONFIG, outcome="wrong", trust="measured", reason="error 0.3")
    unknown_error = store.add_trial(a_key(), TOOLS, CONFIG, **GOOD | {"rel_err": None})
    for trial in (wrong, unknown_error, 99):
        with pytest.raises(ValueError, match=f"trial {trial} belongs not in winners"):
            store.set_winner(trial, confidence="A", trials=1)
    with pytest.raises(ValueError, match="confidence"):
        store.set_winner(add_ok(store, a_key(), win=False), confidence="S", trials=1)
    assert read(store.path) == []


def test_a_trial_of_an_unknown_config_is_left_out_with_one_warning(store):
    add_ok(store, a_key())
    add_ok(store, a_key(), config=AttentionConfig(128, 64, 8, 2))
    damage(store.path, "UPDATE configs SET config = json_set(config, '$.WARP_SPEED', 9) WHERE id = 1")
    with pytest.warns(RuntimeWarning, match="1 trials left out.*WARP_SPEED") as caught:
        assert [t.config.BLOCK_M for t in store.trials()] == [128]
    assert len(caught) == 1


def test_one_file_holds_one_sku(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    with pytest.raises(DatabaseError, match="belongs to nvidia/sm90/h200/sm132, not to nvidia/sm90/h100/sm132"):
        Store(path, device_of_sku("h100"))
    assert len(read(path)) == 1


def test_a_foreign_database_is_left_alone(tmp_path):
    path = tmp_path / "x.sqlite"
    damage(path, "CREATE TABLE mine (a)")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="not a ZYFA tuning database"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"version https://git-lfs", b"<html>" * 1000], ids=["lfs", "html"])
def test_a_file_that_is_no_database_is_left_alone(tmp_path, content):
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=r"x\.sqlite: cannot be used for writing"):
        Store(path)
    assert path.read_bytes() == content


def test_an_unwritable_place_fails_early(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    with read_only(tmp_path):
        for target in (path, tmp_path / "new.sqlite", tmp_path / "folder" / "new.sqlite"):
            with pytest.raises(DatabaseError, match=target.name):
                Store(target, H200)


def test_a_locked_database_is_an_error_with_its_name(tmp_path, monkeypatch):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    with Store(path) as store:
        monkeypatch.setattr("zyfa.tuning_db.store.BUSY_S", 0.01)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match=r"x\.sqlite: cannot be written: database is locked"):
            add_ok(store, a_key())
        other.execute("ROLLBACK")
        add_ok(store, a_key())
        assert len(store.trials()) == 2


def test_a_full_disk_loses_only_the_trial_that_did_not_fit(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    with Store(path) as store:
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        written = 0
        with pytest.raises(DatabaseError, match="full"):
            for written in range(1000):
                add_ok(store, a_key(), win=False, facts={"text": "x" * 100 + str(written)})
        store._db.execute("PRAGMA max_page_count = 100000")
        assert len(store.trials()) == 1 + written
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_export_is_one_compact_file_with_everything(tmp_path):
    path, out = tmp_path / "x.sqlite", tmp_path / "out" / "shipped.sqlite"
    with Store(path, H200) as store:
        store._db.enable_wal()
        for seqlen in (512, 1024):
            add_ok(store, a_key(seqlen))
        for _ in range(2):  # replaces what is there
            store.export(out)
        trials = store.trials()
    assert [p.name for p in out.parent.iterdir()] == ["shipped.sqlite"]
    assert out.read_bytes()[18:20] == b"\x01\x01"  # no WAL
    assert read(out) == read(path) and len(read(out)) == 2
    with Store(out) as copy:
        assert copy.trials() == trials and copy.meta["sku"] == H200.sku_key


def facts_like(n):
    """As many different numbers and as long a hash as a compiled kernel has."""
    draw = random.Random(n)
    names = ("barrier", "cvt", "ds_read", "ds_write", "pk", "salu", "trans", "v_mfma_f32_32x32x16_bf16", "valu", "vmem")
    loops = [
        {"lds_read_bytes": 1024 * (n % 64), "lds_write_bytes": 0, "mix": {x: draw.randint(2, 300) for x in names}}
        for _ in range(2)
    ]
    return {
        "agprs": n % 256, "arch": "gfx950", "code_bytes": draw.randint(5000, 60000), "registers": draw.randint(64, 512),
        "code_hash": f"{draw.getrandbits(256):064x}", "lds_bytes": 1024 * (n % 160), "loops": loops, "scratch_bytes": 0,
        "spills": 0, "waves_per_simd": 2.0, "workgroups_per_unit": 2,
    }  # fmt: skip


def test_the_size_of_a_shipped_file(tmp_path):
    """28 cells of 48 measured trials with 30 samples and a noise of 0.5 %; 190 kernels: below 300 KB, loaded whole."""
    path, out = tmp_path / "x.sqlite", tmp_path / "out.sqlite"
    draw = random.Random(1)
    configs = [AttentionConfig(m, n, w, s, maxnreg=r) for m in (64, 128) for n in (32, 64, 128) for w in (4, 8)
               for s in (1, 2, 3) for r in (0, 168)]  # fmt: skip
    with Store(path, H200) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        for cell in range(28):
            key = a_key(512 << cell // 4, dtype="bf16", causal=bool(cell % 2), head_dim=128 if cell % 4 < 2 else 64)
            for n, config in enumerate(configs[:48]):
                ms = 0.0163 * (1 + n / 17) * 4 ** (cell // 4)
                facts = facts_like(n + 48 * (cell % 4))
                if n % 10 < 7:
                    more = {"ms": ms, "samples": [draw.gauss(ms, 0.005 * ms) for _ in range(30)], "rel_err": ms / 9}
                    trial = store.add_trial(key, TOOLS, config, **GOOD | more, facts=facts)
                else:
                    reason = "spills 12 registers to scratch"
                    store.add_trial(key, TOOLS, config, outcome="gated", trust="measured", reason=reason, facts=facts)
            store.set_winner(trial, confidence="A", trials=48)
        store.export(out)
    assert out.stat().st_size < 300_000
    assert len(read(out)) == 28


INTERRUPTED = """
import os, signal, sqlite3, sys
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
conn.execute("PRAGMA cache_size = 1")  # changed pages go to the file before the commit
conn.execute("BEGIN IMMEDIATE")
conn.execute("UPDATE winners SET trials = 99")
for number in range(1000):
    conn.execute("INSERT INTO facts (facts) VALUES (?)", (b"x" * 1000,))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_write_that_was_cut_short_is_never_seen(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(path)])
    assert os.path.getsize(f"{path}-journal") > 0
    with pytest.raises(DatabaseError, match="an interrupted write waits for the next zyfa-tune"):
        read(path)  # reading may not repair it
    Store(path).close()
    assert [row.trials for row in read(path)] == [1]
    assert not os.path.exists(f"{path}-journal")


WRITER = """
import sys
from databases import CONFIG, H200, TOOLS, a_key, add_ok
from zyfa.tuning_db.store import Store
with Store(sys.argv[1], H200) as store:
    for number in range(int(sys.argv[2])):
        add_ok(store, a_key(512 << number % 7), reason=sys.argv[3])
        print(number, flush=True)
"""


def start_writer(path, trials, name=""):
    env = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    args = [sys.executable, "-c", WRITER, str(path), str(trials), name]
    return subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_eight_processes_lose_nothing(tmp_path):
    """They also race to create the file."""
    path = tmp_path / "x.sqlite"
    writers = [start_writer(path, 25, f"writer {i}") for i in range(8)]
    for writer in writers:
        out, err = writer.communicate(timeout=120)
        assert writer.returncode == 0 and len(out.split()) == 25, err
    with Store(path) as store:
        counts = store._db.execute("SELECT reason, count(*) FROM trials GROUP BY 1").fetchall()
        assert counts == [(f"writer {i}", 25) for i in range(8)]
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert store._db.execute("SELECT count(*), count(DISTINCT config) FROM configs").fetchone() == (1, 1)


def test_threads_that_share_a_store_lose_nothing(store):
    """With switches in the middle of a transaction; whoever reads sees whole trials."""

    def write(number):
        return [add_ok(store, a_key(512 << n % 7), reason=f"thread {number}", facts={"n": n}) for n in range(25)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            written = [threads.submit(write, number) for number in range(4)]
            while not all(each.done() for each in written):
                seen = len(store.trials())
                assert seen <= len(store.trials())
    finally:
        sys.setswitchinterval(interval)
    ids = [trial for each in written for trial in each.result()]
    assert sorted(ids) == list(range(1, 101))
    assert Counter(trial.reason for trial in store.trials()) == {f"thread {n}": 25 for n in range(4)}
    assert {trial.id: trial.facts["n"] for trial in store.trials()} == {ids[i]: i % 25 for i in range(100)}


@pytest.mark.parametrize("after", [1, 7, 20])
def test_kill_minus_9_keeps_every_acknowledged_trial(tmp_path, after):
    path = tmp_path / "x.sqlite"
    writer = start_writer(path, 10_000)
    acknowledged = [int(writer.stdout.readline()) for _ in range(after)]
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in writer.communicate()[0].split()]
    with Store(path) as store:  # rolls back what was half written
        assert len(store.trials()) in (len(acknowledged), len(acknowledged) + 1)
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(read(path)) in (min(len(acknowledged), 7), min(len(acknowledged) + 1, 7))  # or killed before it said so
