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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey, Cell, cell_of
from zyfa.device import device_of_sku
from zyfa.kernels import kernel_hash
from zyfa.recipes import PRESETS
from zyfa.toolchain import triton_version
from zyfa.tuner.compile import Build, CompileFarm, _loop_of, specialisation
from zyfa.tuner.facts import Facts
from zyfa.tuner.gate import gate
from zyfa.tuner.lengths import parse_numbers, parse_seq_lens
from zyfa.tuner.model import DEVICES, MODEL_VERSION, Prediction, predict
from zyfa.tuner.plan import key_of
from zyfa.tuner.space import FP8_RECIPES, broken_rule, seeds
from zyfa.tuning_db.content import Content, Crown, Record, read_content, write_content
from zyfa.tuning_db.portfolio import portfolio
from zyfa.tuning_db.reader import DATA, granularity_of
from zyfa.tuning_db.schema import Toolchain

SKUS = ("mi355x", "mi350x", "mi325x", "mi300x")
HEADS = ((8, 2), (32, 8), (64, 8), (128, 32))  # batch 1; a lookup finds the nearest of other counts and ratios
RECIPES = tuple(dict.fromkeys((*FP8_RECIPES, *PRESETS.values())))  # safe ones may win, each preset has its best kept
TIE = 0.03  # of two predictions: far below what the model can tell apart
KERNELS = 64  # that all cells of a GPU share at most
KEPT = 2  # tied kernels beside the winner
PRICED = 3  # builds of a loop for which every recipe and head_group is priced
GROUPS = (0, 1, 4, 8)
TURNED = 3  # best tiles of which neighbours are compiled
GROUPED = 8  # the head_group that is compiled for all that are not 0: they share their loops
VARIANTS: tuple[dict[str, Any], ...] = (
    {"num_stages": 2}, {"num_stages": 3}, {"waves_per_eu": 2}, {"async_copy": 1}, {"head_group": GROUPED},
)  # fmt: skip
LIMIT_S = 60.0  # of one build: what takes longer spills
FIELDS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


class Family(NamedTuple):
    """Calls that one build serves: all lengths and head counts of a dtype, mask and head dim, and one recipe's loop."""

    dtype: str
    head_dim: int
    causal: bool
    recipes: tuple[str, ...]

    def key(self, seqlen: int = 4096, nheads: int = 32, nheads_k: int = 8) -> AttentionKey:
        return AttentionKey(self.dtype, self.head_dim, self.head_dim, nheads, nheads_k, 1, seqlen, seqlen, self.causal)


def families(head_dims: Sequence[int]) -> list[Family]:
    """BF16, and FP8 once for every loop that its recipes compile to."""
    loops: dict[tuple, list[str]] = defaultdict(list)
    for recipe in RECIPES:
        loops[_loop_of(recipe)].append(recipe)
    of_dtype = [("bf16", ("none",)), *(("fp8", tuple(recipes)) for recipes in loops.values())]
    return [
        Family(dtype, d, causal, recipes) for d in head_dims for causal in (True, False) for dtype, recipes in of_dtype
    ]


# --- builds -----------------------------------------------------------------------------------------------------------


def tiles(family: Family, arch: str, most: int) -> list[AttentionConfig]:
    """Known good starting points, then legal tiles with one stage, each the farthest from all before it.

    Deeper pipelines spill more and take up to 20 times as long to compile; they are tried on the best tiles only.
    """
    key, recipe = family.key(), family.recipes[0]
    known = [replace(config, recipe=recipe) for config in seeds(key, arch, (recipe,)) if config.num_stages <= 2]
    legal = [config for config in _plain_tiles(recipe) if broken_rule(config, key, arch) is None]
    chosen = [config for config in dict.fromkeys(known) if broken_rule(config, key, arch) is None][:most]
    while len(chosen) < most and (left := [config for config in legal if config not in chosen]):
        chosen.append(max(left, key=lambda config: (min(_apart(config, c) for c in chosen), _tile(config))))
    return chosen


def _plain_tiles(recipe: str) -> list[AttentionConfig]:
    space = itertools.product((64, 128, 256), (32, 64, 128), (2, 4, 8))
    return [AttentionConfig(m, n, warps, 1, recipe=recipe) for m, n, warps in space]


def _tile(config: AttentionConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in FIELDS)


def _apart(one: AttentionConfig, two: AttentionConfig) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(_tile(one), _tile(two), strict=True))


def neighbours(config: AttentionConfig, family: Family, arch: str) -> list[AttentionConfig]:
    """The config with one knob turned that a tile does not hold."""
    turned = [replace(config, **change) for change in VARIANTS]
    return [c for c in turned if c != config and broken_rule(c, family.key(), arch) is None]


Builds = dict[AttentionConfig, Facts]
Submit = Callable[[AttentionKey, AttentionConfig], "Future[Build]"]


class Known:
    """Compiles, unless a file that was made with the same kernels and the same Triton has the facts already."""

    def __init__(self, farm: CompileFarm, files: Iterable[Path]):
        self._farm, self.found = farm, 0
        self._facts: dict[tuple, Facts] = {}
        for path in files:
            for record in read_content(path).trials if path.exists() else ():
                config = AttentionConfig.from_json(record.config)
                if record.toolchain == toolchain() and record.facts != "{}":
                    same = specialisation(record.key, config, farm.arch)
                    self._facts[same] = Facts.from_dict(json.loads(record.facts))

    def submit(self, key: AttentionKey, config: AttentionConfig) -> "Future[Build]":
        facts = self._facts.get(specialisation(key, config, self._farm.arch))
        if facts is None:
            return self._farm.submit(key, config)
        self.found += 1
        done: Future[Build] = Future()
        done.set_result(Build(facts, None, 0.0))
        return done


def builds_of(wanted: Sequence[Family], arch: str, submit: Submit, most: int) -> dict[Family, Builds]:
    """What of each family compiles and passes the gate: `most` tiles, then neighbours of the best."""
    found = _compiled({family: tiles(family, arch, most) for family in wanted}, arch, submit)
    more = {}
    for family, builds in found.items():
        ms = {c: predict(facts, family.key(), c, _any_device(arch)).ms for c, facts in builds.items()}
        best = sorted(ms, key=ms.__getitem__)[:TURNED]
        around = itertools.chain.from_iterable(neighbours(config, family, arch) for config in best)
        more[family] = [config for config in dict.fromkeys(around) if config not in builds]
    for family, builds in _compiled(more, arch, submit).items():
        found[family] |= builds
    return found


def _any_device(arch: str):
    return next(device for device in DEVICES.values() if device.arch == arch)


def _compiled(wanted: dict[Family, list[AttentionConfig]], arch: str, submit: Submit) -> dict[Family, Builds]:
    jobs = [(family, c, submit(family.key(), c)) for family, configs in wanted.items() for c in configs]
    found: dict[Family, Builds] = {family: {} for family in wanted}
    for family, config, future in jobs:
        facts = future.result().facts
        if facts is not None and facts.loops and gate(facts, family.key(), config, arch) is None:
            found[family][config] = facts
    return found


# --- one cell ---------------------------------------------------------------------------------------------------------

Priced = dict[AttentionConfig, tuple[Facts, Prediction]]


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
        for config in sorted(ms, key=ms.__getitem__)[:PRICED] + [c for c in ms if _tile(c) == _tile(default)]:
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


def keep(cell: Cell, priced: Priced, arch: str) -> Priced:
    """What of a cell may be stored: all within TIE of the best that may win, the default, the best of each preset."""
    ms = {config: prediction.ms for config, (_, prediction) in priced.items()}
    winners = [config for config in ms if may_win(config)]
    if not winners:
        return {}
    limit = (1 + TIE) * min(ms[config] for config in winners)
    kept = [config for config in winners if ms[config] <= limit]
    kept += [config for config in ms if config == default_config(arch, key_of(cell))]
    for recipe in PRESETS.values():
        kept += sorted((c for c in ms if c.recipe == recipe), key=ms.__getitem__)[:1]
    return {config: priced[config] for config in dict.fromkeys(kept)}


def may_win(config: AttentionConfig) -> bool:
    return config.recipe in ("none", *FP8_RECIPES)


# --- one database -----------------------------------------------------------------------------------------------------


def toolchain() -> Toolchain:
    return Toolchain(kernel_hash(), triton_version(), "", "")


def content_of(sku: str, cells: dict[Cell, Priced], day: str) -> Content:
    """The database of one SKU: few kernels as winners, and what ties with them."""
    device = device_of_sku(sku)
    meta = {
        "sku": device.sku_key, "vendor": device.vendor, "arch": device.arch, "units": str(device.units),
        "names": json.dumps(dict(device.names)), "model_version": MODEL_VERSION,
    }  # fmt: skip
    every = {
        cell: {c: _record(cell, c, *p, device.arch, day) for c, p in priced.items()} for cell, priced in cells.items()
    }
    shared = _shared(meta, {cell: {c: r for c, r in rs.items() if may_win(c)} for cell, rs in every.items()}, day)
    trials: list[Record] = []
    crowns: list[Crown] = []
    for cell, records in every.items():
        winner, ties = _chosen(records, shared)
        presets = {c for recipe in PRESETS.values() for c in _best(records, recipe) if _tile(c) != _tile(winner)}
        others = [r for c, r in records.items() if c in ties or r.is_default or c in presets]
        trials += {r.config: r for r in (records[winner], *others)}.values()
        crowns.append(_crown(records[winner], cells[cell][winner][1].confidence, records, day))
    return Content(meta, Counter(trials), {crown.seat: crown for crown in crowns})


def _best(records: dict[AttentionConfig, Record], recipe: str) -> list[AttentionConfig]:
    return sorted((c for c in records if c.recipe == recipe), key=lambda c: records[c].ms or math.inf)[:1]


def _shared(meta: dict, every: dict[Cell, dict[AttentionConfig, Record]], day: str) -> dict[str, int]:
    """The configs that serve all cells within TIE, and their rank."""
    trials = [record for records in every.values() for record in records.values()]
    crowns = [_crown(min(records.values(), key=lambda r: r.ms or 0), "A", records, day) for records in every.values()]
    content = Content(meta, Counter(trials), {crown.seat: crown for crown in crowns})
    return {pick.config: number for number, pick in enumerate(portfolio(content, TIE, KERNELS).picks)}


def _chosen(
    records: dict[AttentionConfig, Record], shared: dict[str, int]
) -> tuple[AttentionConfig, list[AttentionConfig]]:
    """The winner of a cell, and the kernels that tie with it; a shared kernel wins over a private one."""
    able = {c: r.ms or math.inf for c, r in records.items() if may_win(c)}
    limit = (1 + TIE) * min(able.values())
    tied = sorted(
        (c for c, ms in able.items() if ms <= limit), key=lambda c: (shared.get(c.to_json(), KERNELS), able[c])
    )
    others = [c for c in tied[1:] if _tile(c) != _tile(tied[0])]
    return tied[0], others[:KEPT]


def _record(cell: Cell, config: AttentionConfig, facts: Facts, told: Prediction, arch: str, day: str) -> Record:
    key, at = key_of(cell), int(datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())
    text = json.dumps(facts.to_dict(), sort_keys=True, separators=(",", ":"))
    return Record(
        key, toolchain(), config.to_json(), granularity_of(config), "ok", "predicted",
        int(config == default_config(arch, key)), told.ms, told.ms_lo, told.ms_hi, (), None, "", text, at,
    )  # fmt: skip


def _crown(record: Record, confidence: str, records: dict[AttentionConfig, Record], day: str) -> Crown:
    default = next((r.ms for r in records.values() if r.is_default), None)
    return Crown(record, confidence, len(records), default, f"{day}T00:00:00.000Z")


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


def priced_cell(cell: Cell, found: dict[Family, Builds], sku: str) -> Priced:
    return keep(cell, price(cell, found, sku), DEVICES[sku].arch)


def make(sku: str, found: dict[Family, Builds], cells: Sequence[Cell], day: str, out: Path, jobs: int) -> int:
    """Prices every cell in several processes and releases the file; returns the exit code of the release."""
    with ProcessPoolExecutor(jobs) as pool:
        work = functools.partial(priced_cell, found=found, sku=sku)
        priced = dict(zip(cells, pool.map(work, cells, chunksize=8), strict=True))
    priced = {cell: configs for cell, configs in priced.items() if configs}
    content = content_of(sku, priced, day)
    kernels = {(c.record.config, c.seat.cell[:5]) for c in content.winners.values()}
    print(f"{sku}: {len(priced)} of {len(cells)} cells, {len({config for config, _ in kernels})} winning configs, "
          f"{len(content.trials)} trials")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{device_of_sku(sku).db_name}.sqlite"
        write_content(content, path)
        release = [sys.executable, str(Path(__file__).with_name("release_db.py")), str(path)]
        return subprocess.run([*release, "--out", str(out), "--day", day]).returncode


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
    cells, failed = cells_of(given.seq_lens, given.head_dims), 0
    skus = given.sku or SKUS
    for arch in dict.fromkeys(DEVICES[sku].arch for sku in skus):
        begun = time.monotonic()
        old = [given.out / f"{device_of_sku(sku).db_name}.sqlite" for sku in SKUS if DEVICES[sku].arch == arch]
        with CompileFarm(arch, given.jobs, LIMIT_S) as farm:
            known = Known(farm, old)
            found = builds_of(families(given.head_dims), arch, known.submit, given.builds)
        count = sum(map(len, found.values()))
        print(f"{arch}: {count} builds pass, {known.found} known before, {time.monotonic() - begun:.0f} s", flush=True)
        for sku in skus:
            if DEVICES[sku].arch == arch:
                failed += make(sku, found, cells, given.day, given.out, given.jobs) != 0
                print(f"{sku}: {time.monotonic() - begun:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
