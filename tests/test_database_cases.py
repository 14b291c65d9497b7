"""docs/cases-database.md lists every case of its classes with tests that exist, and what no other file tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from databases import CONFIG, a_key, add_ok, make_db

from zyfa import lookup
from zyfa.device import device_of_sku
from zyfa.lookup import choose, user_db_path
from zyfa.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("nothing_shipped")
TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent / "docs" / "cases-database.md"
CASES = {"DBC": 9, "DBX": 8, "FPR": 11, "CLI": 9, "PKG": 7}
H200 = device_of_sku("h200")


def test_every_case_is_listed_once():
    ids = re.findall(r"^\| (O-[A-Z]+-\d+) ", TABLE.read_text(), re.M)
    assert len(ids) == len(set(ids))
    assert {f"O-{name}-{n:02d}" for name, count in CASES.items() for n in range(1, count + 1)} <= set(ids)


def test_every_test_named_exists():
    for row in TABLE.read_text().splitlines()[8:]:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"


def test_a_fork_carries_no_connection(tmp_path):
    """The parent looks up and forks; children look up and write, and end as they like."""
    path = make_db(user_db_path(H200), (a_key(), {}))
    assert choose(a_key(), H200).config == CONFIG
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                lookup.reset()
                with Store(path, H200) as store:
                    add_ok(store, a_key(512), win=False)
                os._exit(0 if choose(a_key(), H200).config == CONFIG else 1)
            finally:
                os._exit(2)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    with Store(path, H200) as store:
        assert len(store.trials()) == 5
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_choosing_writes_nothing(user_data_home):
    make_db(user_db_path(H200), (a_key(), {}))
    before = {p: p.read_bytes() for p in user_data_home.rglob("*") if p.is_file()}
    choose(a_key(), H200)
    assert {p: p.read_bytes() for p in user_data_home.rglob("*") if p.is_file()} == before


def run(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return done.stdout


CHOOSE = """
from zyfa.config import AttentionKey
from zyfa.device import device_of_sku
from zyfa.lookup import choose
for seqlen in (300, 512, 2048, 9000):
    key = AttentionKey("bf16", 128, 128, 32, 8, 1, seqlen, seqlen, True)
    choice = choose(key, device_of_sku("h200"))
    print(choice.config, choice.match, choice.database)
"""


def test_every_process_chooses_the_same():
    """Ties of two files and of equal distances fall alike, whatever the hash seed."""
    make_db(user_db_path(H200), (a_key(1024), {}), (a_key(4096), {"ms": 0.5}))
    assert run(CHOOSE) == run(CHOOSE)


def test_looking_into_a_file_makes_no_gpu_context(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    code = """
import sys, torch
from click.testing import CliRunner
from zyfa.tuning_db.cli import cli
print(CliRunner().invoke(cli, ["show", sys.argv[1]]).exit_code, torch.cuda.is_initialized())
"""
    assert run(code, str(path)) == "0 False\n"


def test_reasons_cannot_steer_terminal_or_page(tmp_path):
    from rich.console import Console

    from zyfa.tuner.report import print_table, write_html

    row = {
        "name": "bf16", "state": "failed", "default_ms": None, "ms": None, "speedup": None, "rel_err": None,
        "trust": None, "config": None, "confidence": None, "outcomes": {"crashed": 1}, "reasons": {"\x1b[2J<b>\x9b": 1},
    }  # fmt: skip
    with open(tmp_path / "out", "w") as file:
        print_table(Console(file=file, force_terminal=False), [row])
    write_html(tmp_path / "page", {}, [row])
    for text in ((tmp_path / "out").read_text(), (tmp_path / "page").read_text()):
        assert "\x1b" not in text and "\x9b" not in text and "x1b[2J" in text
    assert "<b>" not in (tmp_path / "page").read_text()
