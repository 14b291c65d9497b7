"""zyfa.tuning_db.schema and reader: what a file must be, and what is believed of it."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys

import pytest
from databases import CONFIG, H200, TOOLS, a_certificate, a_key, add_ok, backdate, damage, make_db, read_only

from zyfa.config import AttentionConfig, cell_of
from zyfa.errors import DatabaseError, SchemaTooNew
from zyfa.tuning_db import reader, schema
from zyfa.tuning_db.certificates import add_certificate
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.store import Store
from zyfa.tuning_db.verify import findings


@pytest.fixture
def db(tmp_path):
    return make_db(tmp_path / "a b?#%41.sqlite", (a_key(), {}))  # a name that a URI would mistake


def test_the_view_has_the_columns_of_the_contract(db):
    names = (
        "sku arch dtype head_dim head_dim_v nheads_ratio causal window_class batch_heads seqlen_q seqlen_k config "
        "granularity ms ms_lo ms_hi tflops rel_err trust confidence trials kernel_hash triton_version torch_version "
        "driver_version tuned_at"
    )
    conn = sqlite3.connect(db)
    assert " ".join(column[0] for column in conn.execute("SELECT * FROM best").description) == names
    assert " ".join(reader.Row._fields) == names


def test_tables_are_strict_and_the_file_says_whose_it_is(db):
    conn = sqlite3.connect(db)
    assert conn.execute("PRAGMA application_id").fetchone() == (0x5A594641,)
    assert conn.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS),)
    loose = conn.execute("SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' AND NOT strict")
    assert [name for (name,) in loose if not name.startswith("sqlite_")] == []


def test_a_row_comes_back_as_it_was_stored(db):
    (row,) = read(db)
    assert row.cell == cell_of(a_key())
    assert row.config == CONFIG and row.granularity == "none"
    assert row.toolchain == TOOLS and row.causal is True
    assert (row.sku, row.arch) == ("nvidia/sm90/h200/sm132", "sm90")
    assert (row.ms, row.ms_lo, row.ms_hi, row.rel_err, row.trust, row.trials) == (1.0, 1.0, 1.0, 0.002, "measured", 1)


def unmasked_pairs(seqlen_q, seqlen_k, causal):
    if not causal:
        return seqlen_q * seqlen_k
    return sum(min(max(i + 1 + seqlen_k - seqlen_q, 0), seqlen_k) for i in range(seqlen_q))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(8, 8), (7, 20), (20, 7), (1, 9), (9, 1), (1000, 999)])
def test_tflops_count_the_unmasked_pairs_of_the_shape_timed(tmp_path, seqlen_q, seqlen_k, causal):
    key = a_key(seqlen_q, seqlen_k=seqlen_k, causal=causal, batch=3)._replace(head_dim=192)
    (row,) = read(make_db(tmp_path / "x.sqlite", (key, {"ms": 0.5})))
    flops = 2 * (192 + 128) * 3 * 32 * unmasked_pairs(seqlen_q, seqlen_k, causal)
    assert row.tflops == pytest.approx(flops / 0.5e-3 / 1e12, rel=1e-12)


def test_granularity_is_that_of_the_recipe(tmp_path):
    fp8 = AttentionConfig(64, 128, 4, 2, recipe="head")
    (row,) = read(make_db(tmp_path / "x.sqlite", (a_key(dtype="fp8"), {"config": fp8})))
    assert row.granularity == "head" and row.config == fp8


def test_a_file_of_schema_1_keeps_its_bf16_rows_and_shows_fp8_once_it_is_certified(tmp_path):
    """Written before certificates were: FP8 rows wait for one, nothing else changes."""
    path, key = tmp_path / "x.sqlite", a_key(dtype="fp8")
    fp8 = AttentionConfig(64, 128, 4, 2, recipe="head")
    make_db(path, (a_key(), {}), (key, {"config": fp8}))
    first = schema._expected(1)["best"][1]
    damage(path, "DROP VIEW best", "DROP VIEW front", "DROP TABLE certificates", "DROP TABLE fronts", first,
           "PRAGMA user_version = 1")  # fmt: skip
    skipped = []
    assert [row.dtype for row in read(path, skipped)] == ["bf16"] and read(path, view="front") == []
    assert skipped == [f"1 FP8 winners {reader.UNCERTIFIED}"]
    content = read_content(path)
    assert (len(content.winners), len(content.trials)) == (1, 2)
    with Store(path) as store:
        assert [row.dtype for row in read(path)] == ["bf16"]
        add_certificate(store, TOOLS, "measured", a_certificate("head", key))
    assert sorted(row.dtype for row in read(path)) == ["bf16", "fp8"] and findings(path) == []


def test_every_toolchain_has_its_row_newest_first(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {}))
    with Store(path) as store:
        add_ok(store, a_key(), ms=2.0, toolchain=TOOLS._replace(triton_version="3.9.0"))
    backdate(path, 2, "2026-01-01T00:00:00.000Z")
    assert [row.triton_version for row in read(path)] == ["3.7.1", "3.9.0"]


@pytest.mark.parametrize(
    "sql, reason",
    [
        ("UPDATE configs SET config = '{\"BLOCK_M\":64'", "not JSON"),
        ("UPDATE configs SET config = '{\"BLOCK_M\":64}'", "lacks"),
        ("UPDATE configs SET config = json_set(config, '$.WARP_SPEED', 9)", "WARP_SPEED"),
        ("UPDATE configs SET config = json_set(config, '$.BLOCK_M', '64')", "BLOCK_M='64' is not int"),
        ("UPDATE configs SET config = json_set(config, '$.head_group', 99999999999)", "no kernel argument"),
        ("UPDATE configs SET config = json_set(config, '$.recipe', 'magic')", "'magic' is unknown"),
        ("UPDATE configs SET granularity = 'block'", "granularity is block"),
        ("UPDATE cells SET dtype = 'fp32'", "dtype is 'fp32', not one of"),
        ("UPDATE cells SET seqlen_q = 0", "seqlen_q is 0"),
        ("UPDATE cells SET head_dim = 5000000000", "head_dim is 5000000000"),
        ("UPDATE trials SET ms = 9e999, ms_hi = 9e999", "ms is inf"),
        ("UPDATE trials SET ms = NULL", "ms is None"),
        ("UPDATE trials SET ms = -1.0, ms_lo = -1.0", "ms is -1.0"),
        ("UPDATE trials SET ms_lo = 1.5", "not between"),
        ("UPDATE winners SET confidence = 'S'", "confidence is 'S'"),
        ("UPDATE toolchains SET triton_version = char(27) || '[2J'", r"triton_version is '\\x1b"),
    ],
)
def test_a_bad_row_is_left_out_with_its_reason(tmp_path, sql, reason):
    bad = AttentionConfig(128, 64, 8, 2)
    path = make_db(tmp_path / "x.sqlite", (a_key(), {"config": bad}))
    damage(path, sql)
    skipped = []
    assert read(path, skipped) == []
    assert len(skipped) == 1 and re.search(reason, skipped[0]), skipped


def test_the_rows_beside_a_bad_one_are_read(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(1024), {}), (a_key(2048), {"config": AttentionConfig(128, 64, 8, 2)}))
    damage(path, "UPDATE configs SET config = '[]' WHERE id = 2")
    skipped = []
    assert [row.seqlen_q for row in read(path, skipped)] == [1024]
    assert skipped == ["row 2: config is list, not an object"]


def test_a_winner_that_is_not_ok_is_no_row(db):
    damage(db, "UPDATE trials SET outcome = 'wrong'")
    assert read(db) == []


def test_a_predicted_trial_cannot_be_shown_as_measured(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(), {"trust": "predicted"}))
    damage(path, "UPDATE winners SET trust = 'measured'")
    assert read(path) == []


BROKEN = {
    "missing": (lambda p: p.unlink(), "No such file"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "directory": (lambda p: (p.unlink(), p.mkdir()), "directory"),
    "lfs pointer": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "html": (lambda p: p.write_text("<html>404</html>"), "not a SQLite database"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "malformed"),
    "header only": (lambda p: p.write_bytes(p.read_bytes()[:100]), "malformed|not a ZYFA"),
    "huge": (lambda p: os.truncate(p, reader.MAX_BYTES + 1), "more than the"),
    "other application": (lambda p: damage(p, "PRAGMA application_id = 1"), "application_id is 0x1"),
    "no tables": (lambda p: damage(p, "DROP VIEW best"), "best is missing"),
    "schema 0": (lambda p: damage(p, "PRAGMA user_version = 0"), "schema 0 never existed"),
    "schema -1": (lambda p: damage(p, "PRAGMA user_version = -1"), "schema -1 never existed"),
    "view for table": (
        lambda p: damage(p, "ALTER TABLE meta RENAME TO m", "CREATE VIEW meta AS SELECT 'sku' key, 'x' value"),
        "not schema 2",
    ),
    "another view": (lambda p: damage(p, "CREATE VIEW bomb AS SELECT 1"), "bomb does not belong there"),
    "trigger": (lambda p: damage(p, "CREATE TRIGGER t AFTER INSERT ON meta BEGIN SELECT 1; END"), "t does not belong"),
    "endless view": (
        lambda p: damage(
            p,
            "DROP VIEW best",
            "CREATE VIEW best AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i sku FROM n",
        ),
        "best differs",
    ),
    "huge value": (lambda p: damage(p, "UPDATE meta SET value = printf('%.*c', 2000000, 'x')"), "too big"),
    "not UTF-8": (lambda p: damage(p, "UPDATE meta SET value = CAST(x'ff' AS TEXT) WHERE key = 'sku'"), "UTF-8"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_file_raises_with_file_and_reason(db, kind):
    breaks, reason = BROKEN[kind]
    breaks(db)
    with pytest.raises(DatabaseError, match=reason) as info:
        read(db)
    assert str(db) in str(info.value)


def test_a_newer_schema_is_refused_by_reader_and_writer(db):
    damage(db, f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    before = db.read_bytes()
    for attempt in (read, Store):
        with pytest.raises(SchemaTooNew, match=r"newer ZYFA.*upgrade zyfa"):
            attempt(db)
    assert db.read_bytes() == before


def test_a_row_flood_is_refused(db, monkeypatch):
    monkeypatch.setattr(reader, "MAX_ROWS", 0)
    with pytest.raises(DatabaseError, match="more than 0 rows"):
        read(db)


def test_a_database_in_use_is_read_with_its_latest_rows(tmp_path):
    path = make_db(tmp_path / "x.sqlite", (a_key(1024), {}))
    with Store(path) as store:
        store._db.enable_wal()
        add_ok(store, a_key(2048))
        assert os.path.getsize(f"{path}-wal") > 0  # where the second row is; immutable=1 would not see it
        assert [row.seqlen_q for row in read(path)] == [2048, 1024]


def test_only_files_that_nobody_writes_are_opened_immutable(db, monkeypatch):
    assert reader._uri(db).endswith("?mode=ro")
    damage(db, "PRAGMA journal_mode = WAL")
    assert reader._uri(db).endswith("?mode=ro&immutable=1")  # no log beside it
    damage(db, "PRAGMA journal_mode = DELETE")
    monkeypatch.setattr(reader, "DATA", db.resolve().parent)
    assert reader._uri(db).endswith("?mode=ro&immutable=1")
    assert len(read(db)) == 1


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_read_only_directory(db, mode):
    damage(db, f"PRAGMA journal_mode = {mode}")
    with read_only(db.parent):
        assert len(read(db)) == 1
        assert [p.name for p in db.parent.iterdir()] == [db.name]


def test_reading_loads_no_writer():
    heavy = ("sqlite_utils", "click", "optuna", "rich", "sqlalchemy")
    code = f"import sys, zyfa.tuning_db.reader, zyfa.lookup; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_creating_is_idempotent(tmp_path):
    path = tmp_path / "x.sqlite"
    for _ in range(2):
        with Store(path, H200) as store:
            assert store.meta["sku"] == H200.sku_key
    assert read(path) == []


@pytest.mark.parametrize("before", range(5))
def test_a_file_that_is_being_created_is_empty_or_whole(tmp_path, before):
    """Another process creates the file before the n-th statement of version_of, or has to wait for it."""
    path, statements = tmp_path / "x.sqlite", []
    ours, other = sqlite3.connect(path, isolation_level=None), sqlite3.connect(path, isolation_level=None, timeout=0)

    def create(statement):
        statements.append(statement)
        if len(statements) == before + 1:
            with contextlib.suppress(sqlite3.OperationalError):
                schema.migrate(other, path)
            other.rollback()

    ours.set_trace_callback(create)
    assert schema.version_of(ours, path) in (0, len(schema.MIGRATIONS))
    ours.set_trace_callback(None)
    assert len(statements) > before
    schema.migrate(other, path)
    assert schema.version_of(ours, path) == len(schema.MIGRATIONS)
