"""Landscapes, and how orders of their configs are scored: by hand, and by planting what must be found again."""

import dataclasses
import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from databases import CONFIG, H200, TOOLS
from test_model import SM90, key

from zyfa.config import AttentionConfig
from zyfa.tuner import claims, fitting, model
from zyfa.tuner.evidence import LEAST_NOISE, Landscape, Timed, from_database, load
from zyfa.tuner.ranking import kendall, quantile, score, summary
from zyfa.tuner.rates import DEVICES, FITS
from zyfa.tuning_db.store import Store

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = [AttentionConfig(m, n, 4, stages) for m in (64, 128) for n in (64, 128) for stages in (2, 3)]


def script(name):
    """A module of scripts/, which may import its neighbours as it does when it is run."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(*ms, noise=0.005):
    return [Timed(config, SM90, t, noise) for config, t in zip(CONFIGS, ms, strict=False)]


def test_tau_counts_pairs_that_noise_does_not_tie():
    assert kendall(timed(1, 2, 3), [10, 20, 30]) == 1
    assert kendall(timed(1, 2, 3), [30, 20, 10]) == -1
    assert kendall(timed(1, 2, 3), [20, 10, 30]) == pytest.approx(1 / 3)
    assert kendall(timed(1, 2, 3), [1, 1, 1]) == 0  # says nothing
    assert kendall(timed(1.0, 1.005, 3), [2, 1, 3]) == 1  # the first two are the same time
    assert kendall(timed(1.0, 1.001), [2, 1]) == 0


def test_regret_and_recall_by_hand():
    ms = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 3.0, 4.0]
    perfect = score(timed(*ms), ms)
    assert (perfect.tau, perfect.top1, perfect.top5, perfect.recall) == (1, 0, 0, 1)
    worst = score(timed(*ms), [-t for t in ms])
    assert worst.top1 == pytest.approx(3) and worst.top5 == pytest.approx(0.3) and worst.recall == 1  # of eight configs


def test_equal_scores_are_broken_in_many_orders():
    got = score(timed(1.0, 2.0), [0, 0])
    assert 0.2 < got.top1 < 0.8 and got.top5 == 0


def test_an_order_of_one_is_refused():
    with pytest.raises(ValueError, match="two configs"):
        score(timed(1.0), [1])


def test_quantiles_lie_between_order_statistics():
    assert [quantile([3, 1, 2], q) for q in (0, 0.5, 0.75, 1)] == [1, 2, 2.5, 3]


def test_intervals_hold_the_value_and_shrink_to_it_without_spread():
    rows = [score(timed(1.0, 2.0 + i), [1, 2]) for i in range(4)]
    got = summary(rows, resamples=50)
    assert got["tau_median"] == {"value": 1, "lo": 1, "hi": 1}
    mixed = summary([*rows, score(timed(1.0, 2.0), [2, 1])], resamples=200)["top1_p90"]
    assert mixed["lo"] < mixed["value"] < mixed["hi"]


# --- landscapes -------------------------------------------------------------------------------------------------------


def test_a_database_gives_its_timed_configs_with_facts(tmp_path):
    path = tmp_path / "db.sqlite"
    with Store(path, H200) as store:
        store._db.execute("PRAGMA synchronous = OFF")

        def add(config, ms, facts, outcome="ok"):
            times = {"ms": ms, "ms_lo": ms * 0.98, "ms_hi": ms * 1.02, "samples": (ms,), "rel_err": 0.1} if ms else {}
            return store.add_trial(key(), TOOLS, config, outcome=outcome, trust="measured", facts=facts, **times)

        winner = add(CONFIGS[0], 1.0, SM90.to_dict())
        add(CONFIGS[0], 1.2, {})  # a finalist's second timing
        add(CONFIGS[1], 2.0, SM90.to_dict())
        add(CONFIGS[2], 2.0, {})  # not known how it was compiled
        add(CONFIGS[3], None, SM90.to_dict(), "gated")
        store.set_winner(winner, confidence="A", trials=4)
    (at,) = from_database(path)
    assert (at.sku, at.key, at.untimed) == ("h200", key(), {"gated": 1})
    assert {t.config: t.ms for t in at.timed} == pytest.approx({CONFIGS[0]: 1.1, CONFIGS[1]: 2.0})
    assert at.timed[0].facts == SM90 and at.timed[0].noise == pytest.approx(0.02, rel=0.1)


def record(path, *lines, head=None):
    head = head or {"gpu": "NVIDIA H200", "key": key()._asdict()}
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, [head, *lines])).encode()))
    return path


def test_a_recorded_landscape_counts_gated_configs_that_were_timed(tmp_path):
    ok = {"config": CONFIG.to_dict(), "outcome": "ok", "samples_ms": [1.0] * 9, "facts": SM90.to_dict()}
    gated = ok | {"config": CONFIGS[0].to_dict(), "outcome": "gated", "samples_ms": [3.0, 3.1, 3.2]}
    failed = {"config": CONFIGS[1].to_dict(), "outcome": "compile_failed", "samples_ms": []}
    record(tmp_path / "one.jsonl.gz", ok, gated, failed)
    (at,) = load([tmp_path])
    assert (at.sku, at.key, at.untimed) == ("h200", key(), {"compile_failed": 1})
    assert [(t.config, t.ms) for t in at.timed] == [(CONFIG, 1.0), (CONFIGS[0], 3.1)]
    assert at.timed[0].noise == LEAST_NOISE


@pytest.mark.parametrize(
    "lines, said",
    [
        ([{"config": {"BLOCK": 1}, "outcome": "ok", "samples_ms": [1.0], "facts": SM90.to_dict()}], "x.jsonl.gz:2"),
        ([{"config": CONFIG.to_dict(), "outcome": "ok", "samples_ms": [0.0], "facts": SM90.to_dict()}], "possible"),
        ([], "no timed config"),
    ],
)
def test_a_broken_landscape_is_refused_with_its_line(tmp_path, lines, said):
    with pytest.raises(ValueError, match=said):
        load([record(tmp_path / "x.jsonl.gz", *lines)])


def test_what_is_no_landscape_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a database"):
        load([tmp_path / "x.csv"])


# --- fitting ----------------------------------------------------------------------------------------------------------


def planted(fit, lengths=(1024, 4096)):
    """Landscapes whose times are what the model gives with other numbers."""
    device = DEVICES["h200"]
    lone = dataclasses.replace(SM90, workgroups_per_unit=1, waves_per_simd=1.0)
    return [
        Landscape(
            "h200", at, tuple(
                Timed(c, facts, model.nominal_ms(facts, at, c, device, fit), LEAST_NOISE)
                for c, facts in zip(CONFIGS, [SM90, lone] * 4, strict=True)
            ), {},
        )
        for at in (key(seqlen=n) for n in lengths)
    ]  # fmt: skip


def test_planted_numbers_are_found_again():
    true = FITS["sm90"]._replace(overlap=(-0.15, 0.25, 0.85), stall=250, drain=35, clock_fraction=0.7)
    landscapes = planted(true)
    names = ("overlap.2", "stall", "drain", "clock_fraction")
    found = fitting.fit(landscapes, FITS["sm90"], names)
    assert fitting.loss(landscapes, FITS["sm90"]) > 0.05 and fitting.loss(landscapes, found) < 0.01
    assert found.clock_fraction == pytest.approx(0.7, abs=0.03)
    assert found.overhead == FITS["sm90"].overhead  # was not to move


def test_numbers_stay_in_their_range():
    low = fitting._moved(FITS["sm90"], "clock_fraction", 1.0)
    assert low is None and fitting._moved(FITS["sm90"], "overlap.0", -0.1).overlap[0] == -0.25


# --- the claim --------------------------------------------------------------------------------------------------------


def test_the_claim_is_what_was_measured():
    found = json.loads((ROOT / claims.CLAIM.source).read_text())
    row, gate = found["table"]["model"], found["gate"]["in use"]
    assert claims.Claim(
        model.MODEL_VERSION, claims.CLAIM.source, found["claim"], found["landscapes"], found["configs"],
        round(row["tau_median"]["value"], 2), round(row["top5_median"]["value"], 3), round(row["top5_p90"]["value"], 3),
        (gate["of_top5"], gate["top5"]),
    ) == claims.CLAIM  # fmt: skip
    assert found["model_version"] == model.MODEL_VERSION and found["numbers"] == "fitted on the other half"
    validate = script("validate_model")
    assert validate.verdict(found["table"]) == {"checks": found["checks"], "claim": found["claim"]}


def test_a_model_that_loses_to_a_baseline_may_only_prune():
    found = json.loads((ROOT / claims.CLAIM.source).read_text())["table"]
    found["random"]["top5_p90"]["value"] = 0.001
    assert script("validate_model").verdict(found)["claim"] == "prune"


def test_claims_differ_by_what_was_timed():
    ranks, prunes = (claims.CLAIM._replace(kind=kind) for kind in ("rank", "prune"))
    assert "ranks" in claims.claim_of("sm90", ranks) and "0 of the 140" in claims.claim_of("sm90", ranks)
    assert "unproven" in claims.claim_of("gfx950", ranks) and "--first-hour" in claims.claim_of("gfx950", ranks)
    assert "only that pruning is claimed" in claims.claim_of("sm90", prunes)
    assert "Nothing has been timed" in claims.claim_of("gfx950") and "--first-hour" in claims.claim_of("gfx950")


def test_held_out_landscapes_are_scored_with_numbers_of_the_others():
    validate = script("validate_model")
    landscapes = planted(FITS["sm90"]._replace(clock_fraction=0.7), (512, 1024, 2048, 4096))
    scored = validate.held_out(landscapes, fixed=False)
    assert sorted(at.key.seqlen_k for at, _ in scored) == [512, 1024, 2048, 4096]
    assert all(fit.clock_fraction < 0.8 for _, fit in scored)
    assert {fit for _, fit in validate.held_out(landscapes, fixed=True)} == {FITS["sm90"]}
    baselines = validate.scores(scored)
    assert baselines["model"][0].tau > 0.9 > baselines["random"][0].tau == 0


def test_the_nearest_length_of_the_same_class_is_the_nearest_shape():
    validate = script("validate_model")
    landscapes = planted(FITS["sm90"], (512, 1024, 8192))
    other = landscapes[2]._replace(key=key(seqlen=512, causal=True))
    scores = validate.by_nearest(landscapes[0], [*landscapes, other])
    assert scores == [t.ms for t in landscapes[1].timed]
    assert validate.by_nearest(other, [*landscapes, other]) == [0.0] * len(CONFIGS)


def test_a_gate_answers_for_the_fast_configs_that_it_discards():
    validate = script("validate_model")
    scratch = dataclasses.replace(SM90, scratch_bytes=5000)  # beyond what the gate lets through
    ms = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 3.0)
    facts = (scratch, SM90, SM90, SM90, SM90, SM90, scratch)
    one = Landscape("h200", key(), tuple(Timed(*each, 0.005) for each in zip(CONFIGS, facts, ms, strict=False)), {})
    two = one._replace(key=key(seqlen=512), timed=tuple(t._replace(facts=SM90) for t in one.timed))
    assert validate.discards([one, two])["in use"] == {
        "of_top5": 1, "top5": 10, "of_best": 1, "best": 2, "of_timed": 2, "timed": 14, "near_best": 1,
        "worst_cost": 0.1,
    }  # fmt: skip


def test_the_model_ranks_the_recorded_cells_with_the_warp_specialised_kernel():
    validate = script("validate_model")
    folder = ROOT / "benchmarks" / "h200" / "landscapes-gluon"
    landscapes = load([folder])
    assert sum(t.config.variant == "gluon" for at in landscapes for t in at.timed) == 144
    assert all(len(t.facts.loops) <= 4 for at in landscapes for t in at.timed if t.config.variant == "gluon")
    rows = [score(at.timed, validate.by_model(at, FITS["sm90"])) for at in landscapes]
    found, stored = summary(rows), json.loads((folder.parent / "model-gluon.json").read_text())
    assert found == stored["table"]["model"] and validate.discards(landscapes) == stored["gate"]
    assert {name: stored["checks"][name] for name in validate.ACCEPT} == dict.fromkeys(validate.ACCEPT, True)
    assert stored["gate"]["in use"]["near_best"] == stored["gate"]["in use"]["of_top5"] == 0
