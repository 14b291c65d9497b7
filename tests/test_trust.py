"""zyfa.toolchain and what lookup makes of it: a grade for each row, a policy, and a config that fails to launch."""

import pytest
from databases import TOOLS, a_key, backdate, make_db

from zyfa import interface, lookup, toolchain
from zyfa.archs import default_config, plain_config
from zyfa.checks import Call
from zyfa.config import AttentionConfig, cell_of
from zyfa.device import device_of_sku
from zyfa.lookup import choose, describe, user_db_path
from zyfa.toolchain import Running, grade
from zyfa.tuning_db import reader

H200 = device_of_sku("h200")
A, B, C = (AttentionConfig(64, 64, 4, stages) for stages in (1, 2, 3))
HERE = Running("k1", "3.7.1", "2.13.0", "570.1")


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """This process runs the toolchain of the tests' rows; nothing is shipped."""
    monkeypatch.setattr(reader, "DATA", tmp_path / "shipped")
    monkeypatch.delenv("ZYFA_TRUST", raising=False)
    lookup.reset()
    monkeypatch.setattr(lookup, "running", lambda: HERE)
    yield
    monkeypatch.undo()
    lookup.reset()


def test_the_toolchain_of_a_row_and_of_this_process_have_the_same_fields():
    assert Running._fields == TOOLS._fields


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, "exact"),
        ({"torch_version": "", "driver_version": ""}, "exact"),  # a prediction: they took no part
        ({"triton_version": "3.7.0"}, "compatible"),
        ({"torch_version": "2.12.0"}, "compatible"),
        ({"driver_version": "580.0"}, "compatible"),
        ({"kernel_hash": "k0"}, "stale"),
        ({"triton_version": "3.8.0"}, "stale"),
        ({"triton_version": "3.7.1 DISABLE_LLVM_OPT=1"}, "stale"),
        ({"kernel_hash": ""}, "unknown"),
        ({"triton_version": ""}, "unknown"),
    ],
    ids=str,
)
def test_grades(change, expected):
    found, why = grade(HERE._replace(**change), HERE)
    assert found == expected
    if change and expected != "exact":
        assert next(iter(change.values())) in why


def test_codegen_variables_are_part_of_the_compiler(monkeypatch):
    plain = toolchain.triton_version()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert toolchain.triton_version() == f"{plain} TRITON_DEFAULT_FP_FUSION=0"
    assert grade(HERE, HERE._replace(triton_version="3.7.1 TRITON_DEFAULT_FP_FUSION=0"))[0] == "stale"


def rows(**configs):
    """A user database: each config under a toolchain of the named grade, the best grade oldest."""
    tools = {
        "exact": TOOLS, "compatible": TOOLS._replace(torch_version="2.12.0"), "stale": TOOLS._replace(kernel_hash="k0"),
    }  # fmt: skip
    winners = [(a_key(), {"config": config, "toolchain": tools[name]}) for name, config in configs.items()]
    path = make_db(user_db_path(H200), *winners)
    for number in range(1, len(winners) + 1):  # written within a millisecond of each other they might be equally new
        backdate(path, number, f"2026-01-0{number}T00:00:00.000Z")
    return path


def test_a_fresh_row_comes_before_a_newer_stale_one():
    rows(exact=A, compatible=B, stale=C)
    choice = choose(a_key(), H200)
    assert (choice.config, choice.grade) == (A, "exact")
    assert "grade    exact" in describe(choice, a_key(), H200)


def test_a_stale_row_is_used_and_explained():
    rows(stale=C)
    choice = choose(a_key(), H200)
    assert (choice.config, choice.match, choice.grade) == (C, "exact", "stale")
    assert "grade    stale: kernel_hash k0, here k1" in describe(choice, a_key(), H200)


def test_evidence_of_this_toolchain_wins_over_the_order_of_files(monkeypatch, tmp_path):
    stale = make_db(tmp_path / "x.sqlite", (a_key(), {"config": C, "toolchain": TOOLS._replace(kernel_hash="k0")}))
    monkeypatch.setenv("ZYFA_TUNING_DB", str(stale))
    rows(exact=A)
    assert choose(a_key(), H200).config == A


@pytest.mark.parametrize(
    "policy, configs, expected",
    [
        ("exact", {"compatible": B, "stale": C}, None),
        ("exact", {"exact": A, "stale": C}, A),
        ("compatible", {"compatible": B, "stale": C}, B),
        ("compatible", {"stale": C}, None),
        ("any", {"exact": A, "stale": C}, C),  # the newest
        ("prefer", {"exact": A, "stale": C}, A),
    ],
)
def test_policies(monkeypatch, policy, configs, expected):
    monkeypatch.setenv("ZYFA_TRUST", policy)
    rows(**configs)
    choice = choose(a_key(), H200)
    assert choice.config == (expected or default_config("sm90", a_key()))
    if expected is None:
        assert any(f"ZYFA_TRUST={policy} refuses" in miss for miss in choice.misses)


def test_a_policy_that_is_none_is_told_once(monkeypatch):
    monkeypatch.setenv("ZYFA_TRUST", "everything")
    rows(stale=C)
    with pytest.warns(RuntimeWarning, match="'everything'; accepted are prefer, exact, compatible, any") as caught:
        assert choose(a_key(), H200).config == C
        assert choose(a_key(512), H200).config == C
    assert len(caught) == 1


# --- a config that fails to launch ------------------------------------------------------------------------------------


def a_call():
    return Call(**{name: None for name in Call.__annotations__} | {"key": a_key()})


def test_a_row_that_does_not_compile_is_withdrawn_once():
    rows(exact=A)
    launched = []

    def launch(config):
        launched.append(config)
        if config == A:
            raise RuntimeError("PassManager::run failed")
        return "out", "lse"

    with pytest.warns(RuntimeWarning, match="and the plain default runs instead: .*PassManager") as caught:
        for _ in range(2):
            assert interface._launched(launch, a_call(), None, H200) == ("out", "lse")
    default = plain_config("sm90", a_key())
    assert launched == [A, default, default] and len(caught) == 1
    assert any("failed to launch" in miss for miss in choose(a_key(), H200).misses)
    assert cell_of(a_key(600)) != cell_of(a_key()) and choose(a_key(600), H200).config == A  # other cells keep it


def test_a_gluon_default_that_does_not_compile_gives_way_to_the_plain_kernel():
    def launch(config):
        if config.variant == "gluon":
            raise RuntimeError("ptxas")
        return config

    with pytest.warns(RuntimeWarning, match=r"default_config\(\).*the plain default runs instead"):
        assert interface._launched(launch, a_call(), None, H200) == plain_config("sm90", a_key())


@pytest.mark.parametrize("error", [RuntimeError("no config helps"), ValueError("sink")])
def test_what_no_row_caused_is_raised(error):
    def launch(config):
        raise error

    with pytest.warns(RuntimeWarning, match="no tuned config"), pytest.raises(type(error), match=str(error)):
        interface._launched(launch, a_call(), None, H200)
    with pytest.raises(type(error)):
        interface._launched(launch, a_call(), A, H200)


def test_a_wrong_argument_does_not_cost_the_row():
    rows(exact=A)
    with pytest.raises(TypeError):
        interface._launched(lambda config: (_ for _ in ()).throw(TypeError("sink")), a_call(), None, H200)
    assert choose(a_key(), H200).config == A
