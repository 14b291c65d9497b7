"""scripts/torture_db.py in small (kill -9, crowds, full disks, flipped bits), and damage case by case."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from databases import CONFIG, TOOLS, a_key, add_ok, damage, make_db

from zyfa import lookup
from zyfa.config import cell_of
from zyfa.device import device_of_sku
from zyfa.errors import DatabaseError
from zyfa.lookup import choose, user_db_path
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.store import Store

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "torture_db.py"


def test_nothing_is_lost_or_goes_unseen():
    small = ["--kills", "25", "--writers", "6", "--trials", "15", "--full", "6", "--flips", "120"]
    done = subprocess.run([sys.executable, str(SCRIPT), *small], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kill"]["kills"] == 25 and found["kill"]["lost"] == found["kill"]["faults"] == 0
    assert found["crowd"]["acknowledged"] == 90 and found["crowd"]["lost"] == found["crowd"]["failed"] == 0
    assert found["full"]["full"] > 0 and found["full"]["lost"] == found["full"]["faults"] == 0
    assert found["flip"]["unseen"] == found["flip"]["raised"] == 0
    assert found["flip"]["refused"] > 0 and found["flip"]["rows_left_out"] > 0


CHANGES = [
    ("UPDATE configs SET config = replace(config, '64', '32')", "seal"),  # legal, and never tuned
    ("UPDATE trials SET ms = ms / 2, ms_lo = ms_lo / 2", "seal"),
    ("UPDATE cells SET seqlen_q = 1024, seqlen_k = 1024", "seal"),
    ("UPDATE shapes SET nheads = 16", "seal"),
    ("UPDATE toolchains SET kernel_hash = 'k2'", "seal"),
    ("UPDATE winners SET tuned_at = '2099-01-01T00:00:00.000Z'", "seal"),
    ("UPDATE winners SET trial = 77", "1 winners lead to no valid trial"),
    ("UPDATE winners SET seal = ''", "seal"),
]


@pytest.mark.parametrize("sql, reason", CHANGES)
def test_a_legal_value_that_was_not_written_is_seen(tmp_path, sql, reason):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    damage(path, sql)
    skipped = []
    assert read(path, skipped) == [] and reason in skipped[0]


def test_a_message_that_is_no_text_is_a_database_error(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"INTEGER PRIMARY KEY", b"INTEGER PR\xc9MARY KEY", 1))
    with pytest.raises(DatabaseError, match=r"x\.sqlite: "):
        read(path)


def test_a_torn_page_is_seen(tmp_path):
    """The second half of each page of an older state: what a power cut leaves."""
    path = make_db(tmp_path / "x.sqlite", (a_key(512), {}))
    old = path.read_bytes()
    with Store(path) as store:
        for seqlen in (1024, 2048, 4096):
            add_ok(store, a_key(seqlen))
    new, rows = path.read_bytes(), read(path)
    for page in range(len(old) // 4096):
        half = slice(page * 4096 + 2048, (page + 1) * 4096)
        if old[half] != new[half]:
            path.write_bytes(new[: half.start] + old[half] + new[half.stop :])
            skipped = []
            try:
                found = read(path, skipped)
            except DatabaseError:
                continue
            assert found == rows or (skipped and all(row in rows for row in found))


def test_a_clock_set_back_keeps_the_later_winner(tmp_path, monkeypatch):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {"ms": 2.0}))
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    with Store(path) as store:
        add_ok(store, a_key(), ms=1.0)
        assert store.winner(cell_of(a_key())).trial.ms == 1.0
        assert [trial.ms for trial in store.trials()] == [2.0, 1.0]
    assert [row.ms for row in read(path)] == [1.0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_runtime_goes_on_with_any_byte_wrong(tmp_path, monkeypatch):
    """Every 37th byte of a user database inverted: choose never raises, and gives the tuned config or the default."""
    from zyfa.archs import default_config
    from zyfa.tuning_db import reader

    h200 = device_of_sku("h200")
    monkeypatch.setattr(reader, "DATA", tmp_path)
    path = make_db(user_db_path(h200), (a_key(), {"toolchain": TOOLS}))
    whole = path.read_bytes()
    allowed = {CONFIG, default_config("sm90", a_key())}
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        lookup.reset()
        assert choose(a_key(), h200).config in allowed
    lookup.reset()
