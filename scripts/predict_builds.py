"""The builds behind scripts/predict_db.py: families of calls that share code, the tiles tried, and the cache."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels import kernel_hash
from zyfa.recipes import PRESETS
from zyfa.toolchain import triton_version
from zyfa.tuner.compile import Build, CompileFarm, _loop_of, specialisation
from zyfa.tuner.facts import Facts
from zyfa.tuner.gate import gate
from zyfa.tuner.model import DEVICES, predict
from zyfa.tuner.space import broken_rule, seeds
from zyfa.tuning_db.content import read_content
from zyfa.tuning_db.schema import Toolchain

RECIPES = tuple(PRESETS.values())  # each has its best in a cell's front; those within the error bound may win
GROUPED = 8  # the head_group that is compiled for all that are not 0: they share their loops
TURNED = 3  # best tiles of which neighbours are compiled
VARIANTS: tuple[dict[str, Any], ...] = (
    {"num_stages": 2}, {"num_stages": 3}, {"waves_per_eu": 2}, {"async_copy": 1}, {"head_group": GROUPED},
)  # fmt: skip
FIELDS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


def toolchain() -> Toolchain:
    return Toolchain(kernel_hash(), triton_version(), "", "")


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
        chosen.append(max(left, key=lambda config: (min(_apart(config, c) for c in chosen), tile(config))))
    return chosen


def _plain_tiles(recipe: str) -> list[AttentionConfig]:
    space = itertools.product((64, 128, 256), (32, 64, 128), (2, 4, 8))
    return [AttentionConfig(m, n, warps, 1, recipe=recipe) for m, n, warps in space]


def tile(config: AttentionConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in FIELDS)


def _apart(one: AttentionConfig, two: AttentionConfig) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(tile(one), tile(two), strict=True))


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
