"""The search space: each rule with a config that breaks exactly it, candidates, suggestions and seeds."""

import dataclasses

import optuna
import pytest

from zyfa.archs import ARCHS, default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.grid_fill import default_for
from zyfa.recipes import PRESETS
from zyfa.tuner.space import FP8_RECIPES, RULES, UNITS, _candidates, broken_rule, candidates, domains, seeds, suggest


def key(dtype="bf16", head_dim=128, causal=True, nheads=32):
    return AttentionKey(dtype, head_dim, head_dim, nheads, nheads // 4, 1, 4096, 4096, causal)


FEW = key()._replace(seqlen_q=64, seqlen_k=32768)  # 32 programs
SPLITS = "splits keep their keys, and fill the units twice at most"
XCDS = "xcds is tried with the largest groups that give each die its own"
FP8 = {"recipe": "block"}
GOOD = {
    ("gfx950", "bf16"): AttentionConfig(128, 64, 4, 2),
    ("gfx950", "fp8"): AttentionConfig(128, 64, 4, 2, **FP8),
    ("sm90", "bf16"): AttentionConfig(64, 64, 4, 3),
    ("sm90", "fp8"): AttentionConfig(64, 128, 4, 2, variant="gluon", **FP8),
}
BROKEN = [
    (
        "gfx950",
        key(),
        {"BLOCK_M": 64, "num_warps": 8, "matrix_instr_nonkdim": 16},
        "a wave owns all rows of one MFMA",
    ),
    ("gfx950", key(), {"BLOCK_M": 64}, "a wave owns all rows of one MFMA"),
    ("gfx950", key("fp8"), {"BLOCK_N": 32}, "FP8 stays on the double-rate MFMA"),
    ("gfx950", key("fp8"), {"matrix_instr_nonkdim": 16}, "FP8 stays on the double-rate MFMA"),
    ("gfx950", key("fp8"), {"matrix_instr_nonkdim": 16, "BLOCK_N": 128}, None),
    ("gfx950", key("fp8"), {"num_stages": 4}, "FP8 on gfx950 has at most 3 stages"),
    ("gfx950", key(), {"BLOCK_M": 256, "BLOCK_N": 128}, None),
    ("gfx950", key(), {"waves_per_eu": 3}, "accumulator and scores fit in registers"),
    ("sm90", key(), {"maxnreg": 128, "BLOCK_N": 128}, "accumulator and scores fit in registers"),
    ("gfx950", key(causal=False), {"longest_first": False}, "longest_first has no effect without causal"),
    ("gfx950", key(), {"longest_first": False, "head_group": 8}, "natural order is tried with head_group=0 only"),
    ("gfx950", key(nheads=8), {"head_group": 8}, "head_group is smaller than batch x heads"),
    ("gfx950", key(), {"num_stages": 1, "async_copy": 1}, "async_copy has no effect with one stage"),
    ("gfx950", key(), {"BLOCK_M": 256, "num_warps": 8, "waves_per_eu": 1}, "waves_per_eu has no effect with 8 waves"),
    ("gfx950", key(), {"num_warps": 16}, "num_warps is 1, 2, 4 or 8"),
    ("sm90", key("fp8"), {"num_stages": 3}, "two gluon programs of one consumer share a multiprocessor"),
    ("sm90", key("fp8"), {"head_group": 4}, "gluon walks all heads together under a causal mask"),
    ("sm90", key("fp8", causal=False), {"head_group": 4}, None),
    ("gfx950", FEW, {"splits": 4, "matrix_instr_nonkdim": 16}, "another grid is tried with the compiler's schedule"),
    ("gfx950", FEW, {"splits": 4, "head_group": 4}, SPLITS),
    ("gfx950", FEW._replace(seqlen_k=1024), {"splits": 8}, SPLITS),  # of 128 keys
    ("gfx950", FEW._replace(seqlen_q=4096), {"splits": 2}, SPLITS),  # of 1024 programs
    ("gfx950", FEW, {"splits": 8}, None),
    ("gfx950", FEW, {"pack_gqa": True}, None),
    ("gfx950", FEW._replace(seqlen_q=128), {"pack_gqa": True}, "pack_gqa leaves fewer programs"),
    ("gfx950", FEW._replace(nheads_k=32), {"pack_gqa": True}, "pack_gqa leaves fewer programs"),
    ("gfx950", key(), {"xcds": 8}, XCDS),
    ("gfx950", key(), {"xcds": 8, "head_group": 1}, XCDS),
    ("gfx950", key(), {"xcds": 8, "head_group": 4}, None),
]


@pytest.mark.parametrize("arch, at, change, name", BROKEN)
def test_each_rule_names_itself(arch, at, change, name):
    good = GOOD[arch, at.dtype]
    assert broken_rule(good, at, arch) is None
    assert broken_rule(dataclasses.replace(good, **change), at, arch) == name


def test_int8_reaches_its_rate_with_narrower_heads_than_fp8():
    config = AttentionConfig(128, 128, 4, 2, matrix_instr_nonkdim=16, recipe="int8-kmean")
    assert broken_rule(config, key("fp8", 64), "gfx950") is None
    fp8 = dataclasses.replace(config, recipe="block")
    assert broken_rule(fp8, key("fp8", 64), "gfx950") == "FP8 stays on the double-rate MFMA"


def test_a_register_cap_excludes_a_sched_strategy(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.9.0")
    config = AttentionConfig(128, 64, 4, 2, sched_strategy="max-ilp")
    assert broken_rule(config, key(), "gfx950") is None
    capped = dataclasses.replace(config, waves_per_eu=2)
    assert broken_rule(capped, key(), "gfx950") == "sched_strategy is tried without a register cap"


def test_every_rule_has_a_case_here():
    tested = {name for *_, name in BROKEN} | {"sched_strategy is tried without a register cap"}
    assert {rule.name for rule in RULES} <= tested


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_candidates_are_legal_distinct_and_neither_few_nor_many(arch, dtype, head_dim, causal):
    at = key(dtype, head_dim, causal)
    configs = candidates(at, arch)
    assert len(set(configs)) == len(configs)
    assert 60 <= len(configs) <= 5000
    assert default_config(arch, at) in configs
    assert all(broken_rule(config, at, arch) is None for config in configs[::97])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 32768])
def test_grids_that_fill_the_gpu_are_not_varied(arch, seqlen):
    at = key()._replace(seqlen_q=seqlen, seqlen_k=seqlen)
    assert {"splits", "pack_gqa"}.isdisjoint(domains(at, arch))
    assert {"splits", "pack_gqa"} <= set(domains(FEW, arch))
    assert "splits" not in domains(FEW._replace(seqlen_k=512), arch)
    assert "pack_gqa" not in domains(FEW._replace(nheads_k=32), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_short_queries_search_splits_and_packed_heads(arch):
    configs = candidates(FEW, arch)
    assert len(set(configs)) == len(configs)
    assert {(1, False), (8, False), (1, True), (8, True)} <= {(c.splits, c.pack_gqa) for c in configs}
    assert default_for(FEW, arch, UNITS[arch]) in configs


@pytest.mark.parametrize("arch", ["gfx950", "sm90"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_that_fill_the_gpu_share_their_candidates(arch, causal):
    at = [key("bf16", 128, causal)._replace(seqlen_q=n, seqlen_k=n) for n in (512, 3000, 32768)]
    assert len({id(candidates(k, arch)) for k in at}) == 1
    assert all(candidates(k, arch) == _candidates.__wrapped__(k, arch, FP8_RECIPES) for k in at[:2])
    short = at[0]._replace(seqlen_q=64)
    assert candidates(short, arch) == _candidates.__wrapped__(short, arch, FP8_RECIPES) != candidates(at[0], arch)


@pytest.mark.parametrize("dtype, head_dim", [("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp8", 64), ("fp8", 128)])
def test_hopper_searches_and_starts_from_the_gluon_variant(dtype, head_dim):
    at = key(dtype, head_dim)
    assert any(config.variant == "gluon" for config in candidates(at, "sm90"))
    assert {config.ping_pong for config in candidates(at, "sm90") if config.variant == "gluon"} == {False, True}
    assert any(config.variant == "gluon" for config in seeds(at, "sm90"))


def test_a_triton_without_gluon_does_not_search_it(monkeypatch):
    monkeypatch.setattr("zyfa.tuner.space.knows_gluon", lambda arch: False)
    assert "variant" not in domains(key(), "sm90")
    assert "variant" not in domains(key(), "gfx950")


def test_newer_triton_brings_sched_strategies_and_async_copy_off(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.7.1")
    assert domains(key(), "gfx950")["async_copy"] == (-1, 1)
    assert "sched_strategy" not in domains(key(), "gfx950")
    monkeypatch.setattr("triton.__version__", "3.8.0")
    assert domains(key(), "gfx950")["async_copy"] == (-1, 0)
    assert "iterative-ilp" in domains(key(), "gfx950")["sched_strategy"]


def test_fields_without_effect_are_no_dimensions():
    assert "longest_first" not in domains(key(causal=False), "sm90")
    assert "recipe" not in domains(key("bf16"), "sm90")
    assert domains(key("fp8"), "sm90")["recipe"] == (
        "int8-kmean-equalise-hadamard",
        "block-kmean-equalise-hadamard",
        "block-kmean-qmean",
        "block-kmean-qmean-equalise-hadamard",
        "bf16qk",
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_suggest_draws_from_static_categories(arch):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    at = key("fp8")
    for _ in range(50):
        trial = study.ask()
        config = suggest(trial, at, arch)
        assert {name: getattr(config, name) for name in trial.params} == trial.params
        study.tell(trial, 0.0)
    assert len({frozenset(trial.distributions) for trial in study.trials}) == 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_seeds_are_legal_and_start_with_the_default(arch, dtype):
    for head_dim in (64, 128, 256):
        at = key(dtype, head_dim)
        configs = seeds(at, arch)
        assert configs[0] == default_config(arch, at)
        assert len(set(configs)) == len(configs)
        assert all(broken_rule(config, at, arch) is None for config in configs)
    assert len(seeds(key(dtype), arch)) >= 3


def test_recipes_widen_or_narrow_the_fp8_axis_only():
    plain = domains(key("fp8"), "sm90", ("block", "head", "tensor"))["recipe"]
    assert plain == (PRESETS["balanced"], "block", "head", "tensor")  # the default's is always there
    assert {c.recipe for c in candidates(key("fp8"), "sm90", ("tensor",))} == {PRESETS["balanced"], "tensor"}
    assert "tensor" in {c.recipe for c in seeds(key("fp8"), "sm90", ("tensor",))}
    assert "recipe" not in domains(key("bf16"), "sm90", ("tensor",))
