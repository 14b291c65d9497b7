"""zyfa-db as a user types it."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from databases import CONFIG, H200, TOOLS, a_key, add_ok, damage, make_db
from test_schema import BROKEN

from zyfa.config import AttentionConfig
from zyfa.device import device_of_sku
from zyfa.tuning_db.cli import cli
from zyfa.tuning_db.store import Store
from zyfa.tuning_db.verify import findings


@pytest.fixture
def db(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(1024), {"trust": "predicted"}), (a_key(2048), {"ms": 0.5}))
    with Store(path) as store:
        store.add_trial(a_key(), TOOLS, CONFIG, outcome="gated", trust="measured", reason="spills")
    return path


def zyfa_db(*args, code=0):
    result = CliRunner().invoke(cli, list(map(str, args)))
    assert result.exit_code == code, result.output
    return result


DOCS = Path(__file__).resolve().parent.parent / "docs" / "database.md"


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.commands)], ids=str)
def test_help_has_examples(command):
    assert " ".join(("zyfa-db", *command)) in zyfa_db(*command, "-h").output.split("\n\n", 1)[1]


def test_every_command_and_option_is_documented():
    text = DOCS.read_text()
    assert [name for name in cli.commands if f"`zyfa-db {name}" not in text] == []
    options = {opt for c in cli.commands.values() for p in c.params for opt in p.opts if opt.startswith("--")}
    assert sorted(option for option in options if f"`{option}" not in text) == []


def test_show_selects_and_prints_csv(db):
    (row,) = json.loads(zyfa_db("show", "--json", "--trust", "measured", "--dtype", "bf16", db).stdout)
    assert row["seqlen_q"] == 2048
    assert json.loads(zyfa_db("show", "--json", "--seqlen", 4096, db).stdout) == []
    rows = list(csv.DictReader(zyfa_db("show", "--csv", db).stdout.splitlines()))
    assert [(row["seqlen_k"], row["ms"], AttentionConfig.from_json(row["config"])) for row in rows] == [
        ("1024", "1.0", CONFIG), ("2048", "0.5", CONFIG),
    ]  # fmt: skip


def test_info(db):
    (info,) = json.loads(zyfa_db("info", "--json", db).stdout)
    assert info["sku"] == H200.sku_key and info["schema"] == 2 and info["bytes"] == db.stat().st_size
    assert (info["cells"], info["configs"], info["trials"]) == (2, 1, 3)
    assert info["outcomes"] == {"ok": 2, "gated": 1} and info["winners"] == {"measured": 1, "predicted": 1}
    assert info["toolchains"] == [list(TOOLS)]
    assert f"sku           {H200.sku_key}\n" in zyfa_db("info", db).stdout


def test_show(db):
    rows = json.loads(zyfa_db("show", "--json", db).stdout)
    assert [(r["seqlen_q"], r["trust"], r["ms"]) for r in rows] == [(1024, "predicted", 1.0), (2048, "measured", 0.5)]
    assert AttentionConfig.from_dict(rows[0]["config"]) == CONFIG
    lines = zyfa_db("show", db).stdout.splitlines()
    assert lines[0] == f"-- {H200.sku_key}" and lines[1].split()[:4] == ["dtype", "dim", "mask", "ratio"]
    assert lines[3].split()[:7] == ["bf16", "128", "causal", "4", "32", "2048", "500"]


def test_show_reports_the_rows_that_it_leaves_out(db):
    damage(db, "UPDATE winners SET confidence = 'S' WHERE trust = 'measured'")
    result = zyfa_db("show", "--json", db)
    assert [r["trust"] for r in json.loads(result.stdout)] == ["predicted"]
    assert "confidence is 'S'" in result.stderr


def test_text_of_strangers_cannot_steer_the_terminal(db):
    damage(db, "UPDATE meta SET value = 'x' || char(27) || '[2J' WHERE key = 'names'")
    out = zyfa_db("info", db).stdout
    assert "\x1b" not in out and "x\\x1b[2J" in out


def test_verify_passes_what_the_store_writes(db, tmp_path):
    assert zyfa_db("verify", db).stdout == f"{db}: ok\n"
    with Store(db) as store:
        store.export(tmp_path / "out.sqlite")
    assert findings(tmp_path / "out.sqlite") == []


@pytest.mark.parametrize(
    "sql, finding",
    [
        ("DELETE FROM trials WHERE id = 2", "measured winner of cell 2: trial 2 does not exist"),
        ("UPDATE winners SET trial = 3 WHERE trial = 2", "measured winner of cell 2: trial 3 is gated"),
        ("UPDATE winners SET trial = 1 WHERE trial = 2", "has another cell, toolchain or trust"),
        ("UPDATE trials SET trust = 'predicted'", "measured winner of cell 2: trial 2 has another cell, toolchain or"),
        ("UPDATE trials SET rel_err = NULL", "measured winner of cell 2: trial 2 has no rel_err"),
        ("UPDATE trials SET samples = x''", "CHECK constraint failed in trials"),
        ("UPDATE trials SET ms = -1.0", "CHECK constraint failed in trials"),
        ("UPDATE trials SET shape = 77 WHERE id = 3", "trials 3 refers to a row that shapes lacks"),
        ("UPDATE shapes SET seqlen_q = 9999", "lies in another cell"),
        ("UPDATE configs SET config = replace(config, ':', ': ')", "not in its canonical spelling"),
        ("UPDATE configs SET config = json_set(config, '$.num_warps', 3)", "num_warps is 1, 2, 4 or 8"),
        ("UPDATE configs SET config = json_set(config, '$.x', 3)", "unknown config fields"),
        ("UPDATE configs SET granularity = 'head'", "granularity is head, that of its recipe none"),
        ("UPDATE meta SET value = 'amd' WHERE key = 'vendor'", "contradicts vendor"),
        ("DELETE FROM meta WHERE key = 'sku'", "sku is None"),
        ("UPDATE meta SET value = 'sm80' WHERE key = 'arch'", "none of gfx950, gfx942, sm90"),
    ],
)
def test_verify_finds(db, sql, finding):
    damage(db, sql)
    out = zyfa_db("verify", db, code=1).stdout
    assert finding in out and all(line.startswith(str(db)) for line in out.splitlines())


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_reported_not_raised(db, kind):
    BROKEN[kind][0](db)
    assert str(db) in zyfa_db("verify", db, code=1).stdout
    for command in ("info", "show"):
        assert zyfa_db(command, db, code=1).stderr.startswith(f"zyfa-db: {db}: ")


def test_one_bad_file_among_good_ones(db, tmp_path):
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(b"")
    lines = zyfa_db("verify", db, bad, code=1).stdout.splitlines()
    assert lines == [f"{db}: ok", f"{bad}: the database is empty"]


def test_usage_errors_exit_2():
    zyfa_db("info", code=2)
    zyfa_db("explode", code=2)


def test_without_click_one_line_says_what_to_install():
    code = "import sys; sys.modules['click'] = None; from zyfa.tuning_db.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "zyfa-db needs click: pip install zyfa[tune]\n")


def test_as_a_module(db):
    command = [sys.executable, "-m", "zyfa.tuning_db", "verify", str(db)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{db}: ok\n")


def test_a_shipped_file_opens_in_other_tools(db, tmp_path):
    from sqlite_utils import Database

    with Store(db) as store:
        add_ok(store, a_key(4096))
        store.export(tmp_path / "out.sqlite")
    found = list(Database(tmp_path / "out.sqlite").query("SELECT seqlen_q, trust FROM best ORDER BY 1"))
    assert found == [
        {"seqlen_q": 1024, "trust": "predicted"},
        {"seqlen_q": 2048, "trust": "measured"},
        {"seqlen_q": 4096, "trust": "measured"},
    ]


def test_info_tells_of_the_gpus_here(monkeypatch):
    from zyfa.device import identify
    from zyfa.tuning_db import cli as module

    models = (132, "NVIDIA H200", 0x2335), (60, "NVIDIA H100", 0x2330)
    monkeypatch.setattr(module, "visible_devices", lambda: [identify("nvidia", "sm90", *model) for model in models])
    told = json.loads(zyfa_db("info", "--here", "--json").stdout)
    assert [gpu["key"] for gpu in told] == ["nvidia/sm90/h200/sm132", "nvidia/sm90/h100/sm60"]
    assert "60 sm visible of 132" in told[1]["units"]
    monkeypatch.setattr(module, "visible_devices", list)
    assert "no NVIDIA or AMD GPU" in zyfa_db("info", "--here").stderr


def test_verify_recompiles_what_it_is_asked_to(tmp_path):
    """A file without rows is a finding of the recompiling check, which runs in a process of its own."""
    path = tmp_path / "amd-gfx950-mi355x-cu256.sqlite"
    Store(path, device_of_sku("mi355x")).close()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zyfa.tuning_db", "verify", "--recompile", str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "holds no rows" in done.stdout and "1 findings" in done.stdout
