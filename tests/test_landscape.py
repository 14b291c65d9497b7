"""Landscape files, the recording of them with fake compilers and GPUs, and what a sample of a space holds."""

import gzip
import json
from collections import Counter

import pytest
from fake_landscape import DEFAULT, KEY, FakeFarm, candidates, make_tools, time_of
from test_coordinator import MEASURE, FakePool

from zyfa.config import AttentionConfig
from zyfa.tuner.exhaustive import Recording
from zyfa.tuner.landscape import Entry, Recorder, compact, name_of, read, sample
from zyfa.tuner.plan import grid
from zyfa.tuner.study import CellStudy
from zyfa.tuner.worker import Result

HEAD = {
    "gpu": "H200", "driver": "580", "torch": "2.11", "triton": "3.6.0", "date": "2026-11-30", "method": "all",
    "kernel_hash": "k", "key": KEY._asdict(),
}  # fmt: skip
OTHER = AttentionConfig(128, 64, 4, 2)
CELLS = grid([512, 1024], ("bf16",), (128,), ((32, 8),), (1,), (True, False))


def write(path, *entries):
    recorder = Recorder(path, HEAD)
    for entry in entries:
        recorder.add(entry)
    return path


def test_a_landscape_comes_back_as_it_was_written(tmp_path):
    entries = [Entry(DEFAULT, "ok", (2.0, 1.0, 1.5), 0.002, {"registers": 99}), Entry(OTHER, "gated")]
    path = write(tmp_path / "x.jsonl.gz", *entries)
    for _ in range(2):
        found = read(path)
        assert (found.name, found.head, found.key) == ("x", HEAD, KEY)
        assert list(found.entries.values()) == entries
        assert [e.ms for e in found.entries.values()] == [1.5, None] and found.best_ms == 1.5
        compact(path)


def test_the_lines_are_what_is_documented(tmp_path):
    path = write(tmp_path / "x.jsonl.gz", Entry(DEFAULT, "ok", (2.0,), 0.002, {"registers": 99}))
    head, line = gzip.decompress(path.read_bytes()).splitlines()
    assert json.loads(head) == HEAD
    assert json.loads(line) == {
        "config": DEFAULT.to_dict(), "outcome": "ok", "samples_ms": [2.0], "rel_err": 0.002, "facts": {"registers": 99},
    }  # fmt: skip


def test_a_recording_that_was_killed_is_continued(tmp_path):
    path = write(tmp_path / "x.jsonl.gz", Entry(DEFAULT, "ok", (2.0,)), Entry(OTHER, "gated"))
    whole = path.read_bytes()
    for cut in (1, 5, 20, 40):
        path.write_bytes(whole[:-cut])
        done = Recorder(path, HEAD).done
        assert DEFAULT in done and set(read(path).entries) == done
        if OTHER not in done:  # cut within its line
            write(path, Entry(OTHER, "gated"))
        assert list(read(path).entries) == [DEFAULT, OTHER]
    assert OTHER not in done
    with pytest.raises(ValueError, match="another GPU"):
        Recorder(path, HEAD | {"kernel_hash": "new"})


@pytest.mark.parametrize("text", [b"", b"no gzip", gzip.compress(b"{}\n", mtime=0), gzip.compress(b"[1]\n", mtime=0)])
def test_what_is_no_landscape_is_refused(tmp_path, text):
    (tmp_path / "x.jsonl.gz").write_bytes(text)
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz: no landscape"):
        read(tmp_path / "x.jsonl.gz")


@pytest.mark.parametrize("entry", [Entry(DEFAULT, "ok"), Entry(DEFAULT, "wrong", (1.0,)), Entry(DEFAULT, "fine")])
def test_an_entry_that_contradicts_itself_is_refused(entry):
    with pytest.raises(ValueError, match="samples"):
        Entry.from_dict(entry.to_dict())


def test_names_tell_the_cell():
    assert name_of(KEY) == "bf16-causal-d128-h32x8-s1024"
    assert name_of(KEY._replace(causal=False, batch=2, head_dim_v=64, seqlen_q=1)) == (
        "bf16-full-d128x64-h32x8-b2-s1x1024"
    )


def test_a_sample_has_every_stratum_and_what_comes_first():
    legal = candidates()
    chosen = sample(legal, 60, [OTHER, AttentionConfig(999, 1, 1, 1)])
    assert len(chosen) == len(set(chosen)) == 60 and chosen[0] == OTHER and set(chosen) <= set(legal)
    tiles = Counter((c.BLOCK_M, c.BLOCK_N, c.num_warps) for c in chosen)
    assert len(tiles) == len({(c.BLOCK_M, c.BLOCK_N, c.num_warps) for c in legal})
    assert max(tiles.values()) <= 2
    assert sample(legal[::-1], 60, [OTHER]) == chosen
    assert set(sample(legal, 10**6)) == set(legal)


def test_a_recorded_space_is_searched_like_any_other(tmp_path):
    space = read(write(tmp_path / "x.jsonl.gz", *(Entry(c, "ok", (time_of(KEY, c),)) for c in candidates()))).space()
    study = CellStudy(space, [DEFAULT], 0)
    for _ in range(30):
        config = study.ask()
        study.tell(config, time_of(KEY, config))
    assert set(study.times) <= set(candidates()) and study.times[study.best] <= 1.2 * min(
        time_of(KEY, c) for c in candidates()
    )


def test_recording_writes_every_config_of_every_cell(tmp_path):
    wrong = AttentionConfig(64, 32, 2, 1)
    farm, pool = FakeFarm(), FakePool({wrong: Result("wrong", reason="error 1 exceeds 0.1")})
    ticks = []
    recording = Recording(CELLS, 0, tmp_path, "H200", MEASURE, make_tools(farm), pool)
    paths = recording.run(lambda: False, lambda: ticks.append(1))
    assert len(paths) == 4 and ticks and recording.done == recording.total == 4 * len(candidates())
    assert len(farm.asked) == len(candidates())  # one build serves all lengths
    assert all(len(gpus) == 1 for gpus in pool.gpus_of_cell.values()) and not pool.comparisons
    for cell, path in zip(CELLS, paths, strict=True):
        found = read(path)
        assert found.key == cell.key and set(found.entries) == set(candidates())
        outcomes = {c: e.outcome for c, e in found.entries.items()}
        assert outcomes[wrong] == "wrong" and {"ok", "gated", "compile_failed", "crashed"} <= set(outcomes.values())
        entry = found.entries[DEFAULT]
        assert entry.ms == time_of(cell.key, DEFAULT) and len(entry.samples_ms) == 5 and entry.facts == {"code": "fine"}
        assert found.head["method"].startswith("all 224 legal configs")


def test_a_stopped_recording_goes_on_with_the_rest(tmp_path):
    def record(stopped, farm):
        recording = Recording(CELLS[:1], 50, tmp_path, "H200", MEASURE, make_tools(farm), FakePool())
        (path,) = recording.run(lambda: stopped(recording), lambda: None)
        return recording, path

    first, path = record(lambda recording: recording.done >= 10, FakeFarm(0.01))
    assert 10 <= first.done < 50
    farm = FakeFarm()
    second, path = record(lambda recording: False, farm)
    assert second.done == 50 == len(read(path).entries)
    assert not set(farm.asked) & set(first._recorders[CELLS[0].key].done - {DEFAULT}) or len(farm.asked) <= 50 - 10
    assert read(path).head["method"].startswith("50, stratified by tile, warps and recipe, of 224")


def test_what_the_gate_refuses_is_timed_and_stays_gated(tmp_path):
    broken = AttentionConfig(64, 32, 2, 1)
    gated = lambda facts, key, config: "spills: 9" if config.num_stages == 1 else None  # noqa: E731
    pool = FakePool({broken: Result("compile_failed", reason="out of shared memory")})
    tools = make_tools(FakeFarm(), gate=gated)
    (path,) = Recording(CELLS[:1], 0, tmp_path, "H200", MEASURE, tools, pool).run(lambda: False, lambda: None)
    found = read(path)
    refused = {c: e for c, e in found.entries.items() if e.outcome == "gated"}
    assert set(refused) == {c for c in candidates() if c.num_stages == 1}
    assert all(e.ms is None and e.facts == tools.compile(KEY, c).result().facts.to_dict() for c, e in refused.items())
    times = {c: e.samples_ms for c, e in refused.items()}
    assert times.pop(broken) == () and all(ms[0] == time_of(CELLS[0].key, c) for c, ms in times.items())
    assert found.best_ms == min(e.ms for e in found.entries.values() if e.outcome == "ok")
