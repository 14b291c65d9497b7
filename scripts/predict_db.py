"""Makes the databases of GPUs that nobody has timed: compiles, predicts, and ships a few kernels for each cell.

    .venv/bin/python scripts/predict_db.py                                # all four, into tuning_db/data
    .venv/bin/python scripts/predict_db.py --sku mi355x --head-dims 128 --builds 8 --out /tmp/small

Builds are shared: by all lengths and head counts of a family (dtype, mask, head dim, loop of the FP8 recipe) and by the
SKUs of one architecture; a file in --out that was made with the same kernels and the same Triton gives its facts back.
Tiles of a family are compiled spread over the space, then neighbours of its best ones. Of configs within TIE of a
cell's best the one that most cells share is its winner, so that few kernels serve all; the others are kept beside it.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from predict_builds import GROUPED, RECIPES, Builds, Family, Known, builds_of, families, tile, toolchain

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey, Cell, cell_of
from zyfa.device import device_of_sku
from zyfa.tuner.certificate import certify, emulation
from zyfa.tuner.compile import CompileFarm, specialisation
from zyfa.tuner.facts import Facts
from zyfa.tuner.lengths import parse_numbers, parse_seq_lens
from zyfa.tuner.model import DEVICES, MODEL_VERSION, Prediction, predict
from zyfa.tuner.plan import key_of
from zyfa.tuner.space import MAX_RECIPE_ERROR, broken_rule
from zyfa.tuning_db.certificates import Certificate, Licence, Stored
from zyfa.tuning_db.content import Content, Crown, Record, Seat, write_content
from zyfa.tuning_db.portfolio import portfolio
from zyfa.tuning_db.reader import DATA, granularity_of

SKUS = ("mi355x", "mi350x", "mi325x", "mi300x")
HEADS = ((8, 2), (32, 8), (64, 8), (128, 32))  # batch 1; a lookup finds the nearest of other counts and ratios
TIE = 0.03  # of two predictions: far below what the model can tell apart
KERNELS = 64  # that all cells of a GPU share at most
KEPT = 1  # tied kernel beside the winner; with two a file exceeds what may be shipped
PRICED = 3  # builds of a loop for which every recipe and head_group is priced
GROUPS = (0, 1, 4, 8)
LIMIT_S = 60.0  # of one build: what takes longer spills


# --- one cell ---------------------------------------------------------------------------------------------------------

Priced = dict[AttentionConfig, tuple[Facts, Prediction]]
Worst = dict[tuple[str, int, bool], float]  # certified error of (recipe, head_dim, causal)


def certificates_of(arch: str, head_dims: Sequence[int]) -> list[Certificate]:
    """The errors of every preset's recipe, emulated: a predicted FP8 row is shown only with them."""
    found = []
    for head_dim, causal in itertools.product(head_dims, (True, False)):
        good, bad = certify(RECIPES, (head_dim, head_dim, causal), emulation(arch))
        found += good
        for reason in bad.values():
            print(f"not certified: {reason}")
    return found


def worst_of(certificates: Iterable[Certificate]) -> Worst:
    return {(c.recipe, c.head_dim, c.causal): c.worst for c in certificates}


def may_win(config: AttentionConfig, cell: Cell, worst: Worst) -> bool:
    """Not FP8, or its recipe is within the bound of the tuner."""
    error = worst.get((config.recipe, cell.head_dim, cell.causal), math.inf)
    return config.recipe == "none" or error <= MAX_RECIPE_ERROR


def price(cell: Cell, found: dict[Family, Builds], sku: str) -> Priced:
    """Predictions of a cell: of each loop the best builds, with every recipe and head_group that they serve."""
    key, device = key_of(cell), DEVICES[sku]
    priced: Priced = {}
    for family, builds in found.items():
        if (family.dtype, family.head_dim, family.causal) != (cell.dtype, cell.head_dim, cell.causal):
            continue
        fitting = {c: f for c, f in builds.items() if not c.head_group and _same_code(c, key, family, device.arch)}
        ms = {c: predict(facts, key, c, device).ms for c, facts in fitting.items()}
        default = default_config(device.arch, key)
        for config in sorted(ms, key=ms.__getitem__)[:PRICED] + [c for c in ms if tile(c) == tile(default)]:
            for recipe, group in itertools.product(family.recipes, GROUPS):
                turned = replace(config, recipe=recipe, head_group=group)
                facts = builds.get(replace(config, head_group=GROUPED if group else 0))
                if facts is not None and broken_rule(turned, key, device.arch) is None:
                    priced[turned] = facts, predict(facts, key, turned, device)
    return priced


def _same_code(config: AttentionConfig, key: AttentionKey, family: Family, arch: str) -> bool:
    """Whether the family's build is the cell's: tensors beyond 2 GiB compile to other addresses."""
    legal = broken_rule(config, key, arch) is None
    return legal and specialisation(key, config, arch) == specialisation(family.key(), config, arch)


def keep(cell: Cell, priced: Priced, arch: str, worst: Worst) -> Priced:
    """What of a cell may be stored: all within TIE of the best that may win, the default, the best of each recipe.

    Nothing where no config may win; a recipe without a certificate is left out.
    """
    able = {c: p.ms for c, (_, p) in priced.items() if c.recipe == "none" or _certified(c, cell, worst)}
    winners = [config for config in able if may_win(config, cell, worst)]
    if not winners:
        return {}
    limit = (1 + TIE) * min(able[config] for config in winners)
    kept = [config for config in winners if able[config] <= limit]
    kept += [config for config in able if config == default_config(arch, key_of(cell))]
    kept += _best_each(able).values()
    return {config: priced[config] for config in dict.fromkeys(kept)}


def _certified(config: AttentionConfig, cell: Cell, worst: Worst) -> bool:
    return (config.recipe, cell.head_dim, cell.causal) in worst


def _best_each(ms: dict[AttentionConfig, float]) -> dict[str, AttentionConfig]:
    """Of each recipe the fastest config."""
    return {config.recipe: config for config in sorted(ms, key=ms.__getitem__, reverse=True)}


# --- one database -----------------------------------------------------------------------------------------------------

Records = dict[AttentionConfig, Record]


def content_of(sku: str, cells: dict[Cell, Priced], day: str, proofs: Sequence[Certificate]) -> Content:
    """The database of one SKU: few kernels as winners, what ties with them, the fronts, and certificates."""
    worst = worst_of(proofs)
    device = device_of_sku(sku)
    meta = {
        "sku": device.sku_key, "vendor": device.vendor, "arch": device.arch, "units": str(device.units),
        "names": json.dumps(dict(device.names)), "model_version": MODEL_VERSION,
    }  # fmt: skip
    every = {
        cell: {c: _record(cell, c, *p, device.arch, day) for c, p in priced.items()} for cell, priced in cells.items()
    }
    able = {cell: {c: r for c, r in rs.items() if may_win(c, cell, worst)} for cell, rs in every.items()}
    shared = _shared(meta, able, day)
    trials: list[Record] = []
    winners: dict[Seat, Crown] = {}
    fronts: dict[tuple[Seat, str], Crown] = {}
    for cell, records in every.items():
        crowns = {c: _crown(r, cells[cell][c][1].confidence, records, day) for c, r in records.items()}
        winner, ties = _chosen(able[cell], shared)
        front = {}
        if cell.dtype == "fp8":
            front = _best_each({c: r.ms or math.inf for c, r in records.items()}) | {winner.recipe: winner}
        stored = {winner, *ties, *front.values()}  # the winner knows the default's time
        trials += [record for config, record in records.items() if config in stored]
        seat = crowns[winner].seat
        winners[seat] = crowns[winner]
        fronts |= {(seat, recipe): crowns[config] for recipe, config in front.items()}
    return Content(meta, Counter(trials), winners, fronts, licences(proofs, day))


def _shared(meta: dict, able: dict[Cell, Records], day: str) -> dict[str, int]:
    """The configs that serve all cells within TIE, and their rank."""
    trials = [record for records in able.values() for record in records.values()]
    crowns = [_crown(min(records.values(), key=lambda r: r.ms or 0), "A", records, day) for records in able.values()]
    content = Content(meta, Counter(trials), {crown.seat: crown for crown in crowns}, {}, {})
    return {pick.config: number for number, pick in enumerate(portfolio(content, TIE, KERNELS).picks)}


def _chosen(able: Records, shared: dict[str, int]) -> tuple[AttentionConfig, list[AttentionConfig]]:
    """The winner of a cell, and the kernels that tie with it; a shared kernel wins over a private one."""
    ms = {c: r.ms or math.inf for c, r in able.items()}
    limit = (1 + TIE) * min(ms.values())
    tied = sorted((c for c in ms if ms[c] <= limit), key=lambda c: (shared.get(c.to_json(), KERNELS), ms[c]))
    others = [c for c in tied[1:] if tile(c) != tile(tied[0])]
    return tied[0], others[:KEPT]


def _record(cell: Cell, config: AttentionConfig, facts: Facts, told: Prediction, arch: str, day: str) -> Record:
    key, at = key_of(cell), _seconds(day)
    text = json.dumps(facts.to_dict(), sort_keys=True, separators=(",", ":"))
    return Record(
        key, toolchain(), config.to_json(), granularity_of(config), "ok", "predicted",
        int(config == default_config(arch, key)), told.ms, told.ms_lo, told.ms_hi, (), None, "", text, at,
    )  # fmt: skip


def _crown(record: Record, confidence: str, records: Records, day: str) -> Crown:
    default = next((r.ms for r in records.values() if r.is_default), None)
    return Crown(record, confidence, len(records), default, f"{day}T00:00:00.000Z")


def licences(certificates: Iterable[Certificate], day: str) -> dict[Licence, Stored]:
    """The certificates as a database holds them: errors to three digits."""
    found = {}
    for certificate in certificates:
        errors = {name: [float(f"{error:.3g}") for error in values] for name, values in certificate.errors.items()}
        text = json.dumps(errors, sort_keys=True, separators=(",", ":"))
        found[Licence(toolchain(), "predicted", *certificate[:4])] = Stored(text, _seconds(day))
    return found


def _seconds(day: str) -> int:
    return int(datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())


# --- all of it --------------------------------------------------------------------------------------------------------


def cells_of(seq_lens: Sequence[int], head_dims: Sequence[int], heads=HEADS) -> list[Cell]:
    keys = (
        Family(dtype, head_dim, causal, ()).key(seqlen, *pair)
        for dtype in ("bf16", "fp8")
        for head_dim in head_dims
        for causal in (True, False)
        for pair in heads
        for seqlen in seq_lens
    )
    return list(dict.fromkeys(map(cell_of, keys)))


def priced_cell(cell: Cell, found: dict[Family, Builds], sku: str, worst: Worst) -> Priced:
    return keep(cell, price(cell, found, sku), DEVICES[sku].arch, worst)


def make(sku: str, found: dict[Family, Builds], cells: Sequence[Cell], proofs: list[Certificate], given) -> int:
    """Prices every cell in several processes and releases the file; returns the exit code of the release."""
    worst = worst_of(proofs)
    with ProcessPoolExecutor(given.jobs) as pool:
        work = functools.partial(priced_cell, found=found, sku=sku, worst=worst)
        priced = dict(zip(cells, pool.map(work, cells, chunksize=8), strict=True))
    priced = {cell: configs for cell, configs in priced.items() if configs}
    content = content_of(sku, priced, given.day, proofs)
    kernels = {crown.record.config for crown in content.winners.values()}
    print(f"{sku}: {len(priced)} of {len(cells)} cells, {len(kernels)} winning configs, {len(content.trials)} trials")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{device_of_sku(sku).db_name}.sqlite"
        write_content(content, path)
        release = [sys.executable, str(Path(__file__).with_name("release_db.py")), str(path)]
        return subprocess.run([*release, "--out", str(given.out), "--day", given.day]).returncode


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = parse_seq_lens("512..32k")
    dims = functools.partial(parse_numbers, what="head dim", low=16, high=256, step=8)
    parser.add_argument("--sku", choices=SKUS, action="append", help="one GPU, again for more (all four)")
    parser.add_argument("--seq-lens", type=parse_seq_lens, default=lengths, help="lengths (512..32k)")
    parser.add_argument("--head-dims", type=dims, default=(64, 128, 256), help="head dims (64,128,256)")
    parser.add_argument("--builds", type=int, default=9, help="tiles of a family that are compiled first (9)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--out", type=Path, default=DATA, help="the folder (tuning_db/data)")
    parser.add_argument("--day", default=datetime.date.today().isoformat(), help="the stamp (today)")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    torch.set_num_threads(1)  # certificates come from small tensors: two threads on busy cores took 26 times as long
    cells, failed = cells_of(given.seq_lens, given.head_dims), 0
    skus = given.sku or SKUS
    for arch in dict.fromkeys(DEVICES[sku].arch for sku in skus):
        begun = time.monotonic()
        old = [given.out / f"{device_of_sku(sku).db_name}.sqlite" for sku in SKUS if DEVICES[sku].arch == arch]
        with CompileFarm(arch, given.jobs, LIMIT_S) as farm:
            known = Known(farm, old)
            found = builds_of(families(given.head_dims), arch, known.submit, given.builds)
        proofs = certificates_of(arch, given.head_dims)
        count = sum(map(len, found.values()))
        print(f"{arch}: {count} builds pass, {known.found} known before, {time.monotonic() - begun:.0f} s", flush=True)
        for sku in skus:
            if DEVICES[sku].arch == arch:
                failed += make(sku, found, cells, proofs, given) != 0
                print(f"{sku}: {time.monotonic() - begun:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
