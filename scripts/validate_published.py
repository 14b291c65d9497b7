"""Checks the model against what others published about MI355X and MI300X: shapes, levels, and winning configs.

    .venv/bin/python scripts/validate_published.py --json benchmarks/mi355x/model.json --markdown out.md

Nothing is timed or compiled here. Shapes: one kernel (256 rows, 64 keys a trip) with two fitted numbers, its efficiency
and its fixed cost in trips, over the model's grid. Levels: predict() on the facts of the shipped MI355X database beside
published Triton kernels. Winners: where configs that others ship rank among all that the database holds for a cell.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuner import space
from zyfa.tuner.facts import Facts
from zyfa.tuner.gate import gate
from zyfa.tuner.grid import grid_time, trips
from zyfa.tuner.model import DEVICES, MODEL_VERSION, predict
from zyfa.tuner.plan import flops
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.reader import DATA

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "mi355x" / "published.json"
DATABASE = DATA / "amd-gfx950-mi355x-cu256.sqlite"
KERNEL = AttentionConfig(256, 64, 8, 2)  # the tile of all hand-written gfx950 kernels: 8 waves of 32 rows, 64 keys
OTHERS = ("AITER", "AOTriton")  # whose shipped configs are in space.SEEDS


class Point(NamedTuple):
    key: AttentionKey
    tflops: float


def published() -> list[tuple[dict, list[Point]]]:
    """(group, its points), of the file."""
    groups = json.loads(PUBLISHED.read_text(encoding="utf-8"))["groups"]
    return [(group, [_point(group["dtype"], row) for row in group["rows"]]) for group in groups]


def _point(dtype: str, row: list) -> Point:
    batch, nheads, nheads_k, head_dim, seqlen, causal, tflops = row
    return Point(AttentionKey(dtype, head_dim, head_dim, nheads, nheads_k, batch, seqlen, seqlen, causal), tflops)


# --- shapes -----------------------------------------------------------------------------------------------------------


def relative_tflops(key: AttentionKey, units: int, overhead: float) -> float:
    """Of the fixed kernel, up to a factor: work over the makespan in trips."""
    per_m = [sum(trips(m, key, KERNEL)) + overhead for m in range(-(-key.seqlen_q // KERNEL.BLOCK_M))]
    return flops(key) / grid_time(per_m, key.batch * key.nheads, units, KERNEL)


def fitted(points: Sequence[Point], units: int) -> tuple[float, float]:
    """(factor, fixed trips) with the least mean error in log time."""

    def at(overhead: float) -> tuple[float, float, float]:
        logs = [math.log(p.tflops / relative_tflops(p.key, units, overhead)) for p in points]
        middle = statistics.median(logs)
        return statistics.mean(abs(x - middle) for x in logs), math.exp(middle), overhead

    _, factor, overhead = min(at(n / 2) for n in range(65))
    return factor, overhead


def judged(points: Sequence[Point], units: int, factor: float, overhead: float, rescale: bool = False) -> dict:
    """Mean error and Kendall's tau of TFLOPS over shapes; constant: the error of one number for all."""
    told = [factor * relative_tflops(p.key, units, overhead) for p in points]
    if rescale:
        scale = statistics.median(p.tflops / t for p, t in zip(points, told, strict=True))
        told = [scale * t for t in told]
    middle = statistics.median(p.tflops for p in points)
    return {
        "points": len(points),
        "error": round(statistics.mean(abs(math.log(t / p.tflops)) for p, t in zip(points, told, strict=True)), 4),
        "tau": round(tau([p.tflops for p in points], told), 3),
        "constant_error": round(statistics.mean(abs(math.log(p.tflops / middle)) for p in points), 4),
    }


def tau(one: Sequence[float], two: Sequence[float]) -> float:
    pairs = [(one[i] - one[j]) * (two[i] - two[j]) for i in range(len(one)) for j in range(i)]
    return sum((x > 0) - (x < 0) for x in pairs) / len(pairs)


def shapes() -> dict:
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for group, points in published():
        groups[group["sku"], group["kernel"]] += points
    units = {sku: DEVICES[sku].units for sku, _ in groups}
    aiter, found = groups["mi355x", "AITER assembly"], {}
    full, causal = ([p for p in aiter if p.key.causal is mask] for mask in (False, True))
    few, many = ([p for p in aiter if p.key.nheads == heads] for heads in (32, 64))
    for name, train, test in (
        ("AITER, fitted to itself", aiter, aiter),
        ("AITER full -> causal", full, causal),
        ("AITER 32 -> 64 heads", few, many),
    ):
        found[name] = judged(test, 256, *fitted(train, 256))
    for (sku, kernel), points in groups.items():
        for head_dim in sorted({p.key.head_dim for p in points}):
            if (sku, kernel) != ("mi355x", "AITER assembly"):
                chosen = [p for p in points if p.key.head_dim == head_dim]
                name = f"AITER -> {kernel}, {sku}, D {head_dim}, one scale"
                found[name] = judged(chosen, units[sku], *fitted(aiter, 256), rescale=True)
    old = {p.key: p.tflops for p in groups["mi300x", "AITER assembly"]}
    found["baseline: order of MI300X -> MI355X"] = {
        "points": len(aiter), "tau": round(tau([p.tflops for p in aiter], [old[p.key] for p in aiter]), 3),
    }  # fmt: skip
    return found


# --- levels and winners: facts of the shipped database, priced by the model as it is now -----------------------------


def database_builds() -> dict[AttentionKey, dict[AttentionConfig, Facts]]:
    """Builds of each call, those that the gate discards included."""
    found: dict[AttentionKey, dict[AttentionConfig, Facts]] = defaultdict(dict)
    for record in read_content(DATABASE).trials:
        if record.facts != "{}":
            config = AttentionConfig.from_json(record.config)
            found[record.key][config] = Facts.from_dict(json.loads(record.facts))
    return found


def kept(key: AttentionKey, configs: dict[AttentionConfig, Facts]) -> dict[AttentionConfig, float]:
    """Predicted ms of the builds that pass the gate."""
    device = DEVICES["mi355x"]
    return {
        config: predict(facts, key, config, device).ms
        for config, facts in configs.items()
        if gate(facts, key, config, facts.arch) is None
    }


def levels(builds) -> list[dict]:
    """The best predicted BF16 config beside published Triton kernels of the same mask, in TFLOPS."""
    rows = []
    for group, points in published():
        for point in points if group["kernel"] in ("TLX (Triton)", "Gluon") else ():
            near = [key for key in builds if key.dtype == "bf16" and key.causal == point.key.causal]
            configs = builds[min(near, key=lambda key: abs(key.seqlen_k - point.key.seqlen_k))]
            key, device = point.key._replace(dtype="bf16"), DEVICES["mi355x"]
            ms = kept(key, configs)
            best = min(ms, key=ms.__getitem__)
            times = zip(("tflops", "hi", "lo"), predict(configs[best], key, best, device)[:3], strict=True)
            told = {name: round(flops(key) / ms / 1e9) for name, ms in times}
            rows.append({"kernel": group["kernel"], "seqlen": key.seqlen_k, "causal": key.causal,
                         "published": point.tflops, **told})  # fmt: skip
    return rows


def winners(builds) -> list[dict]:
    """Rank and predicted slowdown of the configs that AITER and AOTriton ship, in each cell that holds them.

    The rank is None where the gate discards the build.
    """
    rows = []
    for key, configs in sorted(builds.items()):
        ms = kept(key, configs)
        order = sorted(ms, key=ms.__getitem__)
        for seed in space.SEEDS:
            ours = [c for c in [*order, *configs] if seed.source.startswith(OTHERS) and _is(c, seed, key)]
            if ours:
                row = {"source": seed.source, "dtype": key.dtype, "causal": key.causal, "seqlen": key.seqlen_k}
                ranked = ours[0] in ms
                rank = order.index(ours[0]) + 1 if ranked else None
                slowdown = round(ms[ours[0]] / ms[order[0]] - 1, 3) if ranked else None
                rows.append(row | {"rank": rank, "of": len(order), "slowdown": slowdown})
    return rows


def _is(config: AttentionConfig, seed: space.Seed, key: AttentionKey) -> bool:
    """Whether a config is the seed's, whatever its recipe and what our space spells otherwise."""
    fits = key.dtype in seed.dtypes and key.causal in seed.causal and "gfx950".startswith(seed.arch)
    tile = {name: value for name, value in seed.fields.items() if name != "async_copy"}
    return fits and all(getattr(config, name) == value for name, value in tile.items())


def evidence() -> dict:
    builds = database_builds()
    found = winners(builds)
    top = sum(row["rank"] is not None and row["rank"] <= max(1, row["of"] // 10) for row in found)
    return {
        "model_version": MODEL_VERSION,
        "shapes": shapes(),
        "levels": levels(builds),
        "winners": found,
        "winners_in_top_decile": [top, len(found)],
        "winners_discarded": [sum(row["rank"] is None for row in found), len(found)],
    }


def markdown(found: dict) -> str:
    lines = ["| shapes | points | error of the time | tau | error of one constant |", "|---|---|---|---|---|"]
    for name, row in found["shapes"].items():
        error = f"{row['error']:.1%} | {row['tau']:.2f} | {row['constant_error']:.1%}" if "error" in row else (
            f"| {row['tau']:.2f} |"
        )  # fmt: skip
        lines.append(f"| {name} | {row['points']} | {error} |")
    lines += [
        "",
        "| kernel | mask | length | published TFLOPS | predicted for ours | interval |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["levels"]:
        mask = "causal" if row["causal"] else "full"
        lines.append(
            f"| {row['kernel']} | {mask} | {row['seqlen']} | {row['published']:.0f} | {row['tflops']} | "
            f"{row['lo']} to {row['hi']} |"
        )
    lines += [
        "",
        "| config shipped by others | cells | discarded | median rank | of | median slowdown |",
        "|---|---|---|---|---|---|",
    ]
    by_source = defaultdict(list)
    for row in found["winners"]:
        by_source[row["source"], row["dtype"]].append(row)
    for (source, dtype), rows in by_source.items():
        ranked = [row for row in rows if row["rank"] is not None]
        numbers = [statistics.median(row[name] for row in ranked) for name in ("rank", "of", "slowdown") if ranked]
        figures = "{:.0f} | {:.0f} | {:.1%}".format(*numbers) if ranked else "| |"
        lines.append(f"| {source}, {dtype} | {len(rows)} | {len(rows) - len(ranked)} | {figures} |")
    top, of = found["winners_in_top_decile"]
    return "\n".join([*lines, "", f"In the top decile: {top} of {of}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    given = parser.parse_args()
    found = evidence()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(markdown(found), encoding="utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
