"""zyfa.tuning_db.merge, text and content: the order of files does not matter, and nothing is lost on the way."""

import json
from collections import Counter

import pytest
from contents import META, contents
from databases import CONFIG, TOOLS, a_key, make_db
from hypothesis import HealthCheck, given, settings

from zyfa.config import AttentionConfig, cell_of
from zyfa.errors import DatabaseError
from zyfa.tuning_db import text
from zyfa.tuning_db.content import Content, read_content, write_content
from zyfa.tuning_db.merge import changes, merged, pruned, served
from zyfa.tuning_db.portfolio import portfolio
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.verify import findings

OTHER = AttentionConfig(128, 64, 8, 2)
few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def merge(*parts):
    return merged(parts)[0]


@given(contents(), contents())
def test_merge_is_commutative(a, b):
    assert merge(a, b) == merge(b, a)


@given(contents(), contents(), contents())
def test_merge_is_associative(a, b, c):
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(a, b, c)


@given(contents(), contents())
def test_merge_is_idempotent_and_loses_no_trial(a, b):
    assert merge(a, a) == a
    both = merge(a, b)
    assert merge(both, a) == merge(both, b) == both
    assert a.trials <= both.trials and b.trials <= both.trials
    assert both.winners.keys() == a.winners.keys() | b.winners.keys()
    assert both.fronts.keys() == a.fronts.keys() | b.fronts.keys()
    assert both.certificates.keys() == a.certificates.keys() | b.certificates.keys()


@given(contents(), contents())
def test_every_conflict_is_listed(a, b):
    _, conflicts = merged([a, b])
    differ = {seat for seat in a.winners.keys() & b.winners.keys() if a.winners[seat] != b.winners[seat]}
    fronts = {seat for seat in a.fronts.keys() & b.fronts.keys() if a.fronts[seat] != b.fronts[seat]}
    assert {conflict.seat for conflict in conflicts} == differ | {seat for seat, _ in fronts}
    assert all(conflict.kept != conflict.dropped for conflict in conflicts)


@given(contents())
def test_the_text_is_the_content(content):
    lines = list(text.dump(content))
    assert text.load(lines) == content
    assert list(text.dump(text.load(lines))) == lines


@few
@given(contents())
def test_a_file_is_its_content(tmp_path, content):
    path = tmp_path / "x.sqlite"
    write_content(content, path)
    assert read_content(path) == content
    assert [p.name for p in tmp_path.iterdir()] == ["x.sqlite"]
    assert findings(path) == [] and len(read(path)) == len(content.winners)
    assert len(read(path, view="front")) == len(content.fronts)


def test_equal_contents_are_equal_files(tmp_path):
    a = read_content(make_db(tmp_path / "a.sqlite", (a_key(512), {}), (a_key(1024), {"ms": 2.0})))
    for name, order in (("x", 1), ("y", -1)):
        trials = Counter(dict(list(a.trials.items())[::order]))
        write_content(a._replace(trials=trials, winners=dict(list(a.winners.items())[::order])), tmp_path / name)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def crowned(tmp_path, confidence="A", trials=9, ms=1.0, when="2026-01-01T00:00:00.000Z"):
    content = read_content(make_db(tmp_path / "c.sqlite", (a_key(), {"ms": ms})))
    (tmp_path / "c.sqlite").unlink()
    (seat, crown), = content.winners.items()  # fmt: skip
    crown = crown._replace(confidence=confidence, trials=trials, tuned_at=when)
    return content._replace(winners={seat: crown})


@pytest.mark.parametrize(
    "better, worse",
    [
        ({}, {"confidence": "B", "trials": 99, "ms": 0.1, "when": "2026-09-01T00:00:00.000Z"}),
        ({}, {"trials": 8, "ms": 0.1, "when": "2026-09-01T00:00:00.000Z"}),
        ({"when": "2026-09-01T00:00:00.000Z"}, {"ms": 0.1}),
        ({"ms": 0.5}, {}),
    ],
)
def test_the_better_evidence_wins(tmp_path, better, worse):
    a, b = crowned(tmp_path, **better), crowned(tmp_path, **worse)
    (winner,) = merge(a, b).winners.values()
    assert winner == next(iter(a.winners.values()))


def test_two_gpus_are_no_one_file():
    other = Content(META | {"sku": "nvidia/sm90/h100/sm132"}, Counter(), {}, {}, {})
    with pytest.raises(DatabaseError, match="sku differs: nvidia/sm90/h100/sm132, nvidia/sm90/h200/sm132"):
        merge(Content(META, Counter(), {}, {}, {}), other)
    with pytest.raises(ValueError, match="contents is empty"):
        merged([])


def lines_of(tmp_path):
    return list(text.dump(read_content(make_db(tmp_path / "x.sqlite", (a_key(), {})))))


@pytest.mark.parametrize(
    "number, old, new, reason",
    [
        (0, "form 2", "form 3", "line 1: the first line is not"),
        (3, '"kernel_hash":"k1"', '"kernel_hash":1', "line 4: kernel_hash is 1, not str"),
        (4, '["bf16",128,', '["bf16","128",', "line 5: head_dim is '128', not int"),
        (4, '"ms":1.0', '"ms":NaN', "line 5: NaN is no number"),
        (4, '"outcome":"ok",', "", "line 5: 'outcome'"),
        (5, '"trials":1', '"trials":1}', "line 6: "),
        (5, '"winner":"', '"winner":"z', "line 6: 'z"),
    ],
)
def test_a_text_that_was_changed_by_hand(tmp_path, number, old, new, reason):
    lines = lines_of(tmp_path)
    assert old in lines[number]
    lines[number] = lines[number].replace(old, new)
    with pytest.raises(DatabaseError, match=reason):
        text.load(lines)


def test_a_text_may_not_say_what_the_schema_forbids(tmp_path):
    lines = [line.replace('"outcome":"ok"', '"outcome":"fine"') for line in lines_of(tmp_path)]
    with pytest.raises(ValueError, match="CHECK constraint failed"):
        write_content(text.load(lines), tmp_path / "y.sqlite")
    assert not (tmp_path / "y.sqlite").exists()


def test_a_new_trial_adds_lines_and_changes_none(tmp_path):
    one = (a_key(), {"ms": 1.0})
    before = read_content(make_db(tmp_path / "a.sqlite", one))
    after = read_content(make_db(tmp_path / "b.sqlite", (a_key(512), {})))
    both = set(text.dump(merge(before, after)))
    assert set(text.dump(before)) <= both and len(both) == len(lines_of(tmp_path)) + 2


def test_changes_are_what_callers_get(tmp_path):
    old = read(
        make_db(tmp_path / "a.sqlite", (a_key(512), {}), (a_key(1024), {}), (a_key(2048), {}), (a_key(4096), {}))
    )
    new = make_db(
        tmp_path / "b.sqlite", (a_key(512), {}), (a_key(1024), {"config": OTHER}), (a_key(2048), {"ms": 0.5}),
        (a_key(8192), {}), (a_key(512), {"trust": "predicted", "ms": 0.01}),
    )  # fmt: skip
    found = changes(old, read(new))
    assert [(c.cell.seqlen_q, c.kind) for c in found] == [
        (1024, "config"), (2048, "time"), (4096, "removed"), (8192, "added"),
    ]  # fmt: skip
    assert changes(old, old) == []
    assert served(read(new))[cell_of(a_key(512))].trust == "measured"


def test_pruning_keeps_what_decides(tmp_path):
    winners = [(a_key(), {"ms": ms, "win": ms == 0.5, "is_default": ms == 4.0}) for ms in (3.0, 2.0, 0.5, 1.0, 4.0)]
    content = read_content(make_db(tmp_path / "x.sqlite", *winners))
    left = pruned(content, keep=2)
    assert sorted(r.ms for r in left.trials) == [0.5, 1.0, 4.0] and left.winners == content.winners
    assert pruned(left, keep=2) == left


def test_pruning_old_kernels(tmp_path):
    old = {"toolchain": TOOLS._replace(kernel_hash="a-old")}
    content = read_content(make_db(tmp_path / "x.sqlite", (a_key(512), old), (a_key(512), {})))
    left = pruned(content, keep=9, newest_kernel=True)
    assert {r.toolchain.kernel_hash for r in left.trials} == {"k1"} == {s.toolchain.kernel_hash for s in left.winners}


def test_a_portfolio_covers_with_few(tmp_path):
    third = AttentionConfig(64, 32, 4, 2)
    times = {512: {CONFIG: 1.0, OTHER: 1.04}, 1024: {CONFIG: 1.2, OTHER: 1.0}, 2048: {OTHER: 1.06, third: 1.0}}
    trials = [
        (a_key(seqlen), {"config": config, "ms": ms, "win": ms == 1.0})
        for seqlen, configs in times.items()
        for config, ms in configs.items()
    ]
    content = read_content(make_db(tmp_path / "x.sqlite", *trials))
    found = portfolio(content, within=0.05, most=9)
    assert [(json.loads(p.config)["BLOCK_M"], len(p.cells), p.worst) for p in found.picks] == [
        (128, 2, 1.04),
        (64, 1, 1),
    ]
    assert found.uncovered == ()
    assert [c.seqlen_q for c in portfolio(content, within=0.05, most=1).uncovered] == [2048]
    assert len(portfolio(content, within=0.07, most=9).picks) == 1
    with pytest.raises(ValueError, match="within is -1"):
        portfolio(content, -1, 1)
