"""Scores the performance model on timed landscapes: held-out rank, regret and recall, against six baselines.

    .venv/bin/python scripts/validate_model.py                          # the shipped H200 database
    .venv/bin/python scripts/validate_model.py benchmarks/h200/landscapes --json out.json --markdown out.md
    .venv/bin/python scripts/validate_model.py --fit                    # what rates.FITS should hold

Landscapes (recorded files, folders of them, or databases of measured trials) are sorted by key and dealt to two halves
in turn; the model's open numbers are fitted on one half and scored on the other, both ways. Intervals: 95 % bootstrap
over landscapes. --fixed scores the shipped numbers without fitting, for landscapes that they were not fitted to.
"""

import argparse
import datetime
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from zyfa.archs import default_config
from zyfa.tuner import fitting, model
from zyfa.tuner.evidence import Landscape, Timed, load
from zyfa.tuner.gate import gate
from zyfa.tuner.grid import grid_time, trips
from zyfa.tuner.model import DEVICES, predict
from zyfa.tuner.ranking import Score, score, summary
from zyfa.tuner.rates import FITS, RATES, Fit, matrix_slots
from zyfa.tuning_db.reader import DATA

SHIPPED = DATA / "nvidia-sm90-h200-sm132.sqlite"
# What a model must reach, held out, before its order may be called a ranking and not only a pruning.
ACCEPT = {"tau_median": (">=", 0.5), "top5_median": ("<=", 0.05), "top5_p90": ("<=", 0.12)}
NEAR = 0.02  # of the best time: a config that would do as well
GATES = {  # rules that a gate could have; the first is the one in use
    "in use": lambda at, t: gate(t.facts, at.key, t.config, t.facts.arch) is not None,
    "scratch in a loop": lambda at, t: t.facts.scratch_in_loops > 0,
    "any scratch": lambda at, t: t.facts.scratch_bytes > 0,
}


# --- the model and its baselines: of a landscape, a score for each timed config, lower is better ----------------------


def by_model(at: Landscape, fit: Fit) -> list[float]:
    return [model.nominal_ms(t.facts, at.key, t.config, DEVICES[at.sku], fit) for t in at.timed]


def by_roofline(at: Landscape) -> list[float]:
    """Matrix work of the padded tiles alone, list-scheduled: FLOPs over the peak rate."""
    return [_roofline(at, t) for t in at.timed]


def _roofline(at: Landscape, t: Timed) -> float:
    device, config, key = DEVICES[at.sku], t.config, at.key
    loop = min(t.facts.loops, key=lambda loop: sum(loop.mix.values()))
    slots = sum(n * matrix_slots(op, device.arch) for op, n in loop.mix.items() if model.is_matrix(op))
    per_m = [
        sum(trips(m, key, config)) * slots * config.num_warps / 4 for m in range(-(-key.seqlen_q // config.BLOCK_M))
    ]
    return grid_time(per_m, key.batch * key.nheads, device.units, config)


def by_occupancy(at: Landscape) -> list[float]:
    return [-t.facts.waves_per_simd for t in at.timed]


def by_spills(at: Landscape) -> list[float]:
    return [float(t.facts.scratch_bytes + t.facts.scratch_in_loops) for t in at.timed]


def by_default(at: Landscape) -> list[float]:
    """The default config first, all others equal."""
    default = default_config(at.timed[0].facts.arch, at.key)
    return [0.0 if t.config == default else 1.0 for t in at.timed]


def by_nearest(at: Landscape, others: Sequence[Landscape]) -> list[float]:
    """Times of the nearest length of the same class where it has the config, else a time above all of those."""
    same = [o for o in others if o is not at and _class(o) == _class(at)]
    if not same:
        return [0.0] * len(at.timed)
    nearest = min(same, key=lambda o: (abs(math.log2(o.key.seqlen_k / at.key.seqlen_k)), o.key))
    times = {t.config: t.ms for t in nearest.timed}
    return [times.get(t.config, 1e9) for t in at.timed]


def _class(at: Landscape) -> tuple:
    key = at.key
    return at.sku, key.dtype, key.head_dim, key.head_dim_v, key.causal, key.window_class, key.nheads, key.nheads_k


# --- the evidence ----------------------------------------------------------------------------------------------------


def halves(landscapes: Sequence[Landscape]) -> tuple[list[Landscape], list[Landscape]]:
    return list(landscapes[::2]), list(landscapes[1::2])


def held_out(landscapes: Sequence[Landscape], fixed: bool) -> list[tuple[Landscape, Fit]]:
    """Every landscape with the numbers to score it with: fitted without it, or the shipped ones."""
    if fixed:
        return [(at, FITS[at.timed[0].facts.arch]) for at in landscapes]
    one, two = halves(landscapes)
    start = FITS[landscapes[0].timed[0].facts.arch]
    return [
        (at, found) for train, test in ((one, two), (two, one)) for found in [fitting.fit(train, start)] for at in test
    ]


def scores(scored: Sequence[tuple[Landscape, Fit]]) -> dict[str, list[Score]]:
    everything = [at for at, _ in scored]
    rows = {"model": [score(at.timed, by_model(at, fit)) for at, fit in scored]}
    baselines = {
        "random": lambda at: [0.0] * len(at.timed),
        "default": by_default,
        "occupancy": by_occupancy,
        "spills": by_spills,
        "roofline": by_roofline,
        "nearest shape": lambda at: by_nearest(at, everything),
    }
    return rows | {name: [score(at.timed, by(at)) for at in everything] for name, by in baselines.items()}


def discards(landscapes: Sequence[Landscape]) -> dict[str, dict[str, float]]:
    """Of the five fastest of each landscape, of the fastest alone, and of those within NEAR of it, how many each gate
    would throw away, and what the worst landscape would lose.

    A config that was gated counts where it was timed all the same, as zyfa-tune --exhaustive does.
    """
    found, best = {}, {at.key: min(t.ms for t in at.timed) for at in landscapes}
    for name, rule in GATES.items():
        fastest = [(at, t) for at in landscapes for t in sorted(at.timed, key=lambda t: t.ms)[:5]]
        firsts = [(at, min(at.timed, key=lambda t: t.ms)) for at in landscapes]
        found[name] = {
            "of_top5": sum(rule(at, t) for at, t in fastest),
            "top5": len(fastest),
            "of_best": sum(rule(at, t) for at, t in firsts),
            "best": len(firsts),
            "of_timed": sum(rule(at, t) for at in landscapes for t in at.timed),
            "timed": sum(len(at.timed) for at in landscapes),
            "near_best": sum(rule(at, t) and t.ms <= (1 + NEAR) * best[at.key] for at in landscapes for t in at.timed),
            "worst_cost": round(max(_cost(at, rule) for at in landscapes), 4),
        }
    return found


def _cost(at: Landscape, rule) -> float:
    """How much slower the best config is that a gate lets through than the best of all; inf if it lets none through."""
    kept = [t.ms for t in at.timed if not rule(at, t)]
    return min(kept, default=math.inf) / min(t.ms for t in at.timed) - 1


def reliability(scored: Sequence[tuple[Landscape, Fit]]) -> dict[str, dict[str, float]]:
    """Per grade: configs, how far times are from the prediction, and how often they lie in its interval."""
    found: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for at, fit in scored:
        for t in at.timed:
            p = predict(t.facts, at.key, t.config, DEVICES[at.sku], fit)
            found[p.confidence].append((abs(math.log(p.ms / t.ms)), p.ms_lo <= t.ms <= p.ms_hi))
    return {
        grade: {
            "configs": len(rows),
            "median_log_error": round(statistics.median(e for e, _ in rows), 4),
            "inside_interval": round(statistics.mean(inside for _, inside in rows), 3),
        }
        for grade, rows in sorted(found.items())
    }


def verdict(table: dict) -> dict:
    """Whether the model may be said to rank: every limit kept, and no baseline better at finding a fast config."""
    mine = table["model"]
    checks = {
        name: mine[name]["value"] >= bound if sign == ">=" else mine[name]["value"] <= bound
        for name, (sign, bound) in ACCEPT.items()
    }
    checks["beats_baselines"] = all(
        mine["tau_median"]["value"] > row["tau_median"]["value"]
        and mine["top5_p90"]["value"] <= row["top5_p90"]["value"]
        for name, row in table.items()
        if name != "model"
    )
    return {"checks": checks, "claim": "rank" if all(checks.values()) else "prune"}


def evidence(landscapes: Sequence[Landscape], fixed: bool) -> dict:
    scored = held_out(landscapes, fixed)
    each = scores(scored)
    table = {name: summary(rows) for name, rows in each.items()}
    worst = sorted(zip(scored, each["model"], strict=True), key=lambda row: -row[1].top5)[:5]
    return {
        "model_version": model.MODEL_VERSION,
        "numbers": "shipped" if fixed else "fitted on the other half",
        "landscapes": len(landscapes),
        "configs": sum(len(at.timed) for at in landscapes),
        "table": table,
        "gate": discards(landscapes),
        "untimed": {kind: sum(at.untimed.get(kind, 0) for at in landscapes) for kind in _kinds(landscapes)},
        "grades": reliability(scored),
        "worst": [{"key": at.key._asdict(), "top5": round(s.top5, 4), "tau": round(s.tau, 3)} for (at, _), s in worst],
        **verdict(table),
    }


def _kinds(landscapes: Sequence[Landscape]) -> list[str]:
    return sorted({kind for at in landscapes for kind in at.untimed})


# --- what is printed -------------------------------------------------------------------------------------------------


def markdown(found: dict) -> str:
    lines = [
        f"Model {found['model_version']}, {found['landscapes']} landscapes, {found['configs']} timed configs, numbers "
        f"{found['numbers']}. Regret: time over the best, minus 1. In brackets: 95 % bootstrap over landscapes.",
        "",
        "| order | tau, median | top-1 regret, median | p90 | top-5 regret, median | p90 | 5 fastest in top 10 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["table"].items():
        cells = [
            _cell(row[s], s)
            for s in ("tau_median", "top1_median", "top1_p90", "top5_median", "top5_p90", "recall_mean")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    near = f"within {NEAR:.0%} of the best"
    lines += ["", f"| gate | discards of the five fastest | of the fastest | of all timed | {near} | costs at most |"]
    lines.append("|---" * 6 + "|")
    for name, n in found["gate"].items():
        counts = (f"{n[f'of_{which}']} of {n[which]}" for which in ("top5", "best", "timed"))
        lines.append(f"| {name} | {' | '.join(counts)} | {n['near_best']} | {n['worst_cost']:.1%} |")
    lines += ["", "| grade | configs | median error of the time | inside the interval |", "|---|---|---|---|"]
    for grade, n in found["grades"].items():
        error, inside = math.expm1(n["median_log_error"]), n["inside_interval"]
        lines.append(f"| {grade} | {n['configs']} | {error:.1%} | {inside:.0%} |")
    failed = [name for name, ok in found["checks"].items() if not ok]
    lines += ["", f"Claim: {found['claim']}" + (f" (failed: {', '.join(failed)})" if failed else "")]
    if found["untimed"]:
        lines.append(f"Without a time: {', '.join(f'{n} {kind}' for kind, n in found['untimed'].items())}")
    return "\n".join(lines) + "\n"


def _cell(numbers: dict, name: str) -> str:
    form = ".2f" if name.startswith(("tau", "recall")) else ".1%"
    return f"{numbers['value']:{form}} ({numbers['lo']:{form}} to {numbers['hi']:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[SHIPPED], help="landscapes (the shipped H200 database)")
    parser.add_argument("--fixed", action="store_true", help="score the shipped numbers, fit nothing")
    parser.add_argument("--fit", action="store_true", help="fit on everything and print the numbers, score nothing")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    given = parser.parse_args()
    landscapes = load(given.paths)
    if given.fit:
        arch = landscapes[0].timed[0].facts.arch
        found = fitting.fit(landscapes, FITS[arch])
        return print(f"{arch}, {RATES[arch].clocks} clocks a slot: {found}, loss {fitting.loss(landscapes, found):.4f}")
    found = evidence(landscapes, given.fixed)
    found = {"sources": [path.name for path in given.paths], "date": datetime.date.today().isoformat(), **found}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = markdown(found)
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    return print(text)


if __name__ == "__main__":
    main()
