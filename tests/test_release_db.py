"""scripts/release_db.py: what is shipped is compact, sound, and has its text beside it."""

import sqlite3
import subprocess
import sys
from pathlib import Path

from databases import a_key, add_ok, damage, make_db
from sqlite_utils import Database

from zyfa.tuning_db import text
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.store import Store

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "release_db.py"
NAME = "nvidia-sm90-h200-sm132"


def release(folder, *files):
    command = [sys.executable, str(SCRIPT), "--out", str(folder), "--day", "2026-11-30", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_release_is_the_log_in_two_forms(tmp_path):
    log, out = make_db(tmp_path / "log.sqlite", (a_key(512), {}), (a_key(1024), {})), tmp_path / "out"
    done = release(out, log)
    assert done.returncode == 0 and "2 rows" in done.stdout, done.stderr
    assert sorted(path.name for path in out.iterdir()) == [f"{NAME}.sqlite", f"{NAME}.txt"]
    shipped, content = out / f"{NAME}.sqlite", read_content(log)
    assert shipped.read_bytes()[18:20] == b"\x01\x01"  # no WAL
    assert read_content(shipped).trials == content.trials and read(shipped) == read(log)
    assert read_content(shipped).meta["released_on"] == "2026-11-30"
    assert text.load((out / f"{NAME}.txt").read_text().splitlines()) == read_content(shipped)
    before = shipped.read_bytes()
    release(out, log)
    assert shipped.read_bytes() == before
    assert sqlite3.connect(shipped).execute("SELECT count(*) FROM sqlite_stat1").fetchone()[0] > 0


def test_other_tools_open_what_is_shipped(tmp_path):
    release(tmp_path, make_db(tmp_path / "log.sqlite", (a_key(512), {})))
    db = Database(tmp_path / f"{NAME}.sqlite")
    assert [row["seqlen_q"] for row in db.query("SELECT * FROM best")] == [512]
    assert db["trials"].count == 1 and "best" in db.view_names() and db["trials"].strict


def test_what_is_not_sound_replaces_nothing(tmp_path):
    log, out = make_db(tmp_path / "log.sqlite", (a_key(512), {})), tmp_path / "out"
    release(out, log)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    damage(log, "UPDATE winners SET confidence = 'S'")
    done = release(out, log)
    assert done.returncode == 1 and "confidence is 'S'" in done.stderr
    (tmp_path / "text").write_text("no database")
    assert "not a SQLite database" in release(out, tmp_path / "text").stderr
    empty = make_db(tmp_path / "empty.sqlite")
    assert "no cell has a row" in release(out, empty).stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_what_is_too_large_is_refused_with_advice(tmp_path):
    with Store(make_db(tmp_path / "log.sqlite", (a_key(512), {}))) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        for number in range(4):
            noise = "".join(chr(33 + (i * i * (number + 7)) % 93) for i in range(90_000))
            add_ok(store, a_key(), reason=noise, win=False)
    done = release(tmp_path / "out", tmp_path / "log.sqlite")
    assert done.returncode == 1 and "zyfa-db prune makes it smaller" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
