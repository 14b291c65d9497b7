"""zyfa-db merge, diff, export, import, prune, portfolio as a user types them; files of other tuners."""

import json
import sqlite3
import subprocess
import sys

import pytest
from databases import CONFIG, a_key, damage, make_db
from test_db_cli import zyfa_db

from zyfa.config import AttentionConfig
from zyfa.errors import DatabaseError
from zyfa.tuning_db import foreign
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.reader import read

OTHER = AttentionConfig(128, 64, 8, 2)


@pytest.fixture
def two(tmp_path):
    old = make_db(tmp_path / "old.sqlite", (a_key(512), {}), (a_key(1024), {"ms": 2.0}))
    return old, make_db(tmp_path / "new.sqlite", (a_key(512), {"config": OTHER, "ms": 0.5}), (a_key(2048), {}))


def test_merge_keeps_all_and_lists_conflicts(two, tmp_path):
    both = tmp_path / "both.sqlite"
    said = json.loads(zyfa_db("merge", "--json", *two, "-o", both).stdout)
    assert (said["trials"], said["winners"]) == (4, 3)
    (conflict,) = said["conflicts"]
    assert '"BLOCK_M"' in conflict["kept"] and conflict["kept"] != conflict["dropped"]
    assert [row.seqlen_q for row in sorted(read(both), key=lambda row: row.cell)] == [512, 1024, 2048]
    before = both.read_bytes()
    assert f"{both}: 4 trials, 3 winners" in zyfa_db("merge", both, two[1], "-o", both).stdout
    assert both.read_bytes() == before


def test_merge_refuses_another_gpu_and_leaves_the_output(two, tmp_path):
    from zyfa.device import device_of_sku

    h100 = make_db(tmp_path / "h100.sqlite", (a_key(), {}), device=device_of_sku("h100"))
    assert "sku differs" in zyfa_db("merge", two[0], h100, "-o", tmp_path / "x", code=1).stderr
    assert not (tmp_path / "x").exists()


def test_damage_is_not_sealed_again(two, tmp_path):
    damage(two[0], "UPDATE configs SET config = replace(config, '64', '32')")
    for command in (("merge", *two), ("prune", two[0])):
        assert "does not match its seal" in zyfa_db(*command, "-o", tmp_path / "x", code=1).stderr
    assert "does not match its seal" in zyfa_db("export", two[0], code=1).stderr
    assert not (tmp_path / "x").exists()


def test_diff_tells_what_changes(two):
    kinds = {c["cell"]["seqlen_q"]: c["kind"] for c in json.loads(zyfa_db("diff", "--json", *two).stdout)}
    assert kinds == {512: "config", 1024: "removed", 2048: "added"}
    lines = zyfa_db("diff", "--exit-code", *two, code=1).stdout.splitlines()
    assert len(lines) == 4 and "1000 measured" in lines[1] and "500 measured" in lines[1] and "0.500" in lines[1]
    zyfa_db("diff", "--exit-code", two[0], two[0])


@pytest.mark.parametrize("form", ["text", "t4"])
def test_what_is_exported_comes_back(two, tmp_path, form):
    zyfa_db("export", "--to", form, two[0], "-o", tmp_path / "out")
    zyfa_db("import", "--from", form, tmp_path / "out", "-o", tmp_path / "back.sqlite")
    assert read_content(tmp_path / "back.sqlite") == read_content(two[0])


def test_pipes(two, tmp_path):
    command = f"{sys.executable} -m zyfa.tuning_db"
    line = f"{command} export {two[0]} | {command} import - -o {tmp_path}/b.sqlite"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}/b.sqlite: 2 trials, 2 winners\n" and done.stderr == ""
    done = subprocess.run(f"{command} export {two[0]} | true", shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_import_says_what_is_missing(two, tmp_path):
    (tmp_path / "x.txt").write_text("no dump\n")
    assert "-o is missing" in zyfa_db("import", two[0], code=2).stderr
    assert "line 1: the first line is not" in zyfa_db("import", tmp_path / "x.txt", "-o", "y", code=1).stderr
    assert "zyfa-db: " in zyfa_db("import", two[0], "-o", "y", code=1).stderr  # a database is no text


def test_prune_and_portfolio(tmp_path):
    more = [
        (a_key(), {"ms": ms, "win": ms == 1.0, "config": OTHER if ms > 1 else CONFIG}) for ms in (1.0, 2.0, 3.0, 4.0)
    ]
    db = make_db(tmp_path / "x.sqlite", *more)
    assert "2 of 4 trials, 1 of 1 winners" in zyfa_db("prune", "--keep", 2, db, "-o", db).stdout
    (pick,) = json.loads(zyfa_db("portfolio", "--json", db).stdout)["picks"]
    assert AttentionConfig.from_dict(pick["config"]) == CONFIG and pick["worst"] == 1.0
    assert zyfa_db("portfolio", db).stdout.splitlines()[1].split()[:2] == ["1", "1.000"]


# --- other tuners -----------------------------------------------------------------------------------------------------

AITER = {
    "fwd": {
        "default": {
            "BLOCK_M": 128,
            "BLOCK_N": 64,
            "PRELOAD_V": True,
            "waves_per_eu": 2,
            "num_warps": 4,
            "num_stages": 1,
        },
        "pe": {"BLOCK_M": 256, "BLOCK_N": 64, "waves_per_eu": 2, "num_warps": 8, "num_ctas": 1, "num_stages": 3},
        "odd": {"BLOCK_M": 256},
    },
    "bkwd_fused": {"preprocess_kernel": {"PRE_BLOCK": 128}},
}


def test_aiter_configs_are_seeds(tmp_path):
    path = tmp_path / "gfx950-MHA-DEFAULT.json"
    path.write_text(json.dumps(AITER))
    lines = [json.loads(line) for line in zyfa_db("import", "--from", "aiter", path).stdout.splitlines()]
    assert [line["gpu"] for line in lines] == ["gfx950", "gfx950"]
    assert lines[0]["config"] == {"BLOCK_M": 128, "BLOCK_N": 64, "waves_per_eu": 2, "num_warps": 4, "num_stages": 1}
    assert "seeds" in zyfa_db("import", "--from", "aiter", path, "-o", "x", code=2).stderr
    path.write_text("[]")
    assert "no AITER configuration" in zyfa_db("import", "--from", "aiter", path, code=1).stderr


def test_our_aiter_file_is_read_back(two, tmp_path):
    path = tmp_path / "sm90-MHA-DEFAULT.json"
    zyfa_db("export", "--to", "aiter", two[0], "-o", path)
    (seed,) = foreign.seeds_of_aiter(path)
    assert seed.config == CONFIG
    assert len(json.loads(path.read_text())["zyfa"]) == 2


def aotriton(path):
    """The columns that matter of AOTriton's table, as its tuner fills them."""
    conn = sqlite3.connect(path)
    names = ["gpu", "inputs$Q_dtype", "inputs$Max_seqlen_q", "inputs$Max_seqlen_k", "inputs$CAUSAL_TYPE"]
    names += ["inputs$BLOCK_DMODEL", "tuned_kernel$BLOCK_M", "tuned_kernel$BLOCK_N", "tuned_kernel$PRE_LOAD_V"]
    names += ["compiler_options$waves_per_eu", "compiler_options$num_warps", "compiler_options$num_stages"]
    conn.execute(
        'CREATE TABLE "FLASH$attn_fwd" (id INTEGER PRIMARY KEY, {})'.format(", ".join(f'"{n}"' for n in names))
    )
    for dtype, causal in (("*bf16:16", 3), ("*fp16:16", 0), ("*fp32:16", 0)):
        row = ["gfx950_mod0", dtype, 8192, 8192, causal, 128, 128, 64, 0, 2, 4, 1]
        conn.execute('INSERT INTO "FLASH$attn_fwd" VALUES (NULL, {})'.format(", ".join("?" * len(row))), row)
    conn.commit()
    conn.close()
    return path


def test_aotriton_rows_are_seeds(tmp_path):
    path = aotriton(tmp_path / "tuning_database.sqlite3")
    seeds = foreign.seeds_of_aotriton(path)
    assert [seed[:6] for seed in seeds] == [
        ("gfx950_mod0", "bf16", 128, True, 8192, 8192), ("gfx950_mod0", "fp16", 128, False, 8192, 8192),
    ]  # fmt: skip
    assert seeds[0].config == AttentionConfig(128, 64, 4, 1, waves_per_eu=2)
    assert len(zyfa_db("import", "--from", "aotriton", path).stdout.splitlines()) == 2


def test_other_files_are_no_aotriton_database(two, tmp_path):
    assert "no table FLASH$attn_fwd" in zyfa_db("import", "--from", "aotriton", two[0], code=1).stderr
    (tmp_path / "x").write_text("text" * 300)
    assert "not a database" in zyfa_db("import", "--from", "aotriton", tmp_path / "x", code=1).stderr


def test_t4_has_the_fields_of_kernel_tuner(two):
    t4 = foreign.t4_of(read_content(two[0]))
    result = t4["results"][0]
    assert t4["schema_version"] == "1.0.0" and result["configuration"] == CONFIG.to_dict()
    assert result["measurements"] == [{"name": "time", "value": 1.0, "unit": "ms"}]
    assert (result["times"]["runtimes"], result["invalidity"], result["correctness"]) == ([1.0, 1.0], "correct", 1)


def test_t4_of_another_kernel_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"schema_version": "1.0.0", "metadata": {}, "results": []}))
    with pytest.raises(DatabaseError, match="times of other kernels say nothing of ours"):
        foreign.content_of_t4(tmp_path / "x.json")
