"""The configs that are worth trying: values as data, legality as named rules, starting points with their source.

Hard limits of a device are zyfa.limits; a rule here says that a config, though it may run, cannot be the best or
differs from another config in nothing.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from zyfa.archs import ARCHS, Arch, default_config
from zyfa.config import AttentionConfig, AttentionKey, octave
from zyfa.device import TARGETS
from zyfa.grid_fill import MIN_SHARE, programs
from zyfa.limits import broken_limit, knows_gluon, knows_sched_strategy, lds_bytes
from zyfa.recipes import PRESETS, RECIPES

if TYPE_CHECKING:
    import optuna

# `precision="fp8"` may run any recipe whose worst certified error (certificate.py) is within this, unless --max-error
# says otherwise. On flat random inputs plain FP8 makes 4 to 6.2 % whatever is done to Q and K first, at every head
# dim, so a lower bound would judge the inputs; recipes that lose real layers make 10 to 58 % there.
MAX_RECIPE_ERROR = 0.07
# Scales of rows, of MX groups and of V's heads and channels are left out: on the samples they err as those of blocks
# do, to 0.2 %, and cost a product a score, a load a tile or a pass over V.
FP8_RECIPES = (
    PRESETS["balanced"],
    *(
        r.name
        for r in RECIPES.values()
        if r.worst_error <= MAX_RECIPE_ERROR and r.name != PRESETS["balanced"]
        and r.granularity not in ("row", "mx") and not r.v_granularity
    ),
)  # fmt: skip

# Of the largest part of an architecture: what a grid has to fill.
UNITS = {arch: max(units for _, of, units in TARGETS.values() if of == arch) for arch in ARCHS}

_COMMON: dict[str, tuple] = {
    "BLOCK_N": (32, 64, 128),
    "longest_first": (True, False),
    "head_group": (0, 1, 4, 8),
    "splits": (1, 2, 4, 8),
    "pack_gqa": (False, True),
}

# What the search may choose from. -1 and "" leave a choice to the compiler; async_copy's other value is added below.
SPACE: dict[str, dict[str, tuple]] = {
    "gfx950": _COMMON
    | {
        "BLOCK_M": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "waves_per_eu": (0, 1, 2, 3),
        "matrix_instr_nonkdim": (0, 16),  # 0 is 32 for every tile of this space
        "xcds": (0, 8),
        "sched_strategy": ("", "max-ilp", "iterative-ilp", "iterative-minreg"),
    },
    "gfx942": _COMMON
    | {
        "BLOCK_M": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3),
        "waves_per_eu": (0, 2),
        "matrix_instr_nonkdim": (0, 16),
        "xcds": (0, 8),
        "sched_strategy": ("", "max-ilp", "iterative-ilp", "iterative-minreg"),
    },
    "sm90": _COMMON
    | {
        "BLOCK_M": (64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "maxnreg": (0, 128, 168),
        "tensor_descriptors": (False, True),
        "variant": ("triton", "gluon"),
        "ping_pong": (False, True),
    },
}
# Fields that the gluon variant fixes (zyfa.limits); without them its part of the product is small.
GLUON = {
    "maxnreg": (0,), "tensor_descriptors": (False,), "longest_first": (True,), "variant": ("gluon",), "splits": (1,),
    "pack_gqa": (False,),
}  # fmt: skip
PLAIN = {"variant": ("triton",), "ping_pong": (False,)}
# Fields that change the grid and not the loop, and those of the loop's schedule, which they are not multiplied with.
GRID = {"splits": (1,), "pack_gqa": (False,), "xcds": (0,)}
SCHEDULE = {"waves_per_eu": (0,), "matrix_instr_nonkdim": (0,), "async_copy": (-1,), "sched_strategy": ("",)}


class Rule(NamedTuple):
    """One rule; `ok` is false for a config that is not worth trying."""

    name: str
    ok: Callable[[AttentionConfig, AttentionKey, Arch], bool]


def _mfma_rows(config: AttentionConfig, arch: Arch) -> int:
    """Rows of the smallest tile that one wave can multiply alone."""
    return 32 if arch.vendor == "amd" and config.matrix_instr_nonkdim != 16 else 16


def _full_rate_fp8(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """The double-rate f8f6f4 instructions sum 64 products (32x32) or 128 (16x16): over keys for PV, head_dim for QK.

    Narrow heads cannot help it at 32x32; INT8 needs half of these sums.
    """
    if arch.name != "gfx950" or key.dtype != "fp8":
        return True
    if config.matrix_instr_nonkdim != 16:
        return config.BLOCK_N >= 64
    return config.BLOCK_N >= 128 and key.head_dim >= {"e4m3": 128, "int8": 64}.get(RECIPES[config.recipe].qk, 0)


def _register_budget(config: AttentionConfig, arch: Arch) -> float:
    """Registers of one lane that accumulator and scores may fill; Q, P, tiles in flight and addresses need the rest.

    Half of what AMD grants (in a sweep of 81 gfx950 builds all 19 above it spilled, and 16 of the 62 within), four
    fifths on Hopper, where Q and P never lie in registers as a whole.
    """
    if arch.vendor == "nvidia":
        return 0.8 * (config.maxnreg or arch.max_registers)
    waves_per_simd = max(config.waves_per_eu, config.num_warps // 4, 1)
    return 0.5 * arch.max_registers / waves_per_simd


def _fits_registers(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    if config.variant == "gluon":
        return True  # compiled without spills wherever its limits hold
    sums = 2 if arch.short_fp8_sum and key.dtype == "fp8" else 1  # the long sum and the tile's
    columns = config.BLOCK_N + sums * octave(key.head_dim_v)
    return config.BLOCK_M * columns / (config.num_warps * arch.warp_size) <= _register_budget(config, arch)


def _owns_its_rows(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """Else waves split the keys and P crosses them through LDS (33 ds_write and 4 barriers a trip on gfx950).

    On Hopper two warp groups may split a head wider than 128: one alone spills its accumulators.
    """
    if config.variant == "gluon":
        return True  # by its limits
    rows = 8 if arch.vendor == "nvidia" and key.head_dim_v > 128 else _mfma_rows(config, arch)
    return rows * config.num_warps <= config.BLOCK_M


def _halves_shared_memory(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """One consumer leaves half of the threads idle unless two programs share a multiprocessor."""
    if config.variant != "gluon" or config.num_warps > 4:
        return True
    return 2 * (lds_bytes(config, key, arch.name) + 2048) <= arch.lds_bytes


def _one_of_grid_and_schedule(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    return any(all(getattr(config, name) == value for name, (value,) in part.items()) for part in (GRID, SCHEDULE))


def _splits_fill(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """Half of what a default leaves a split at least; the orders of heads are tried with whole keys only."""
    if config.splits == 1:
        return True
    ordered = config.head_group == 0 and config.longest_first
    return ordered and config.splits * MIN_SHARE <= 2 * key.seqlen_k and programs(key, config) <= 2 * UNITS[arch.name]


def _packs_rows(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """Blocks that are full anyhow gain nothing; K and V of the heads of a group meet in L2."""
    packed = dataclasses.replace(config, pack_gqa=True)
    apart = dataclasses.replace(config, pack_gqa=False)
    return not config.pack_gqa or programs(key, packed) < programs(key, apart)


def _own_heads(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """A die gets heads of its own if a group is an eighth of all; the largest such group is the one that is tried."""
    share = key.batch * key.nheads // 8
    fitting = [group for group in _COMMON["head_group"] if 0 < group <= share]
    return not config.xcds or (bool(fitting) and config.head_group == fitting[-1])


def _leaves_units(key: AttentionKey, arch: str) -> bool:
    """Whether blocks of 128 rows leave a quarter of the units idle, and there are keys to split."""
    tile = AttentionConfig(128, 64, 4, 1)
    return 4 * programs(key, tile) < 3 * UNITS[arch] and key.seqlen_k >= 2 * MIN_SHARE


RULES = (
    Rule("a wave owns all rows of one MFMA", _owns_its_rows),
    Rule("FP8 stays on the double-rate MFMA", _full_rate_fp8),
    # An assertion of the compiler's ping-pong schedule in Triton 3.6 to 3.9.
    Rule(
        "FP8 on gfx950 has at most 3 stages", lambda c, k, a: a.name != "gfx950" or k.dtype != "fp8" or c.num_stages < 4
    ),
    Rule("accumulator and scores fit in registers", _fits_registers),
    Rule("longest_first has no effect without causal", lambda c, k, a: k.causal or c.longest_first),
    # Longest first is what list scheduling wants; the natural order is kept as a control where it can matter most.
    Rule("natural order is tried with head_group=0 only", lambda c, k, a: c.longest_first or c.head_group == 0),
    Rule(
        "head_group is smaller than batch x heads",
        lambda c, k, a: c.head_group == 0 or c.head_group < k.batch * k.nheads,
    ),
    Rule("async_copy has no effect with one stage", lambda c, k, a: c.num_stages > 1 or c.async_copy == -1),
    # A workgroup of 8 waves puts two on each SIMD, which caps registers at 256 like waves_per_eu=2.
    Rule("waves_per_eu has no effect with 8 waves", lambda c, k, a: c.num_warps < 8 or c.waves_per_eu == 0),
    Rule("two gluon programs of one consumer share a multiprocessor", _halves_shared_memory),
    # Programs take query blocks in turns; only longest first over all heads gives them equal work under a mask.
    Rule(
        "gluon walks all heads together under a causal mask",
        lambda c, k, a: c.variant != "gluon" or not k.causal or (c.head_group == 0 and c.longest_first),
    ),
    Rule("another grid is tried with the compiler's schedule", _one_of_grid_and_schedule),
    Rule("splits keep their keys, and fill the units twice at most", _splits_fill),
    Rule("pack_gqa leaves fewer programs", _packs_rows),
    Rule("xcds is tried with the largest groups that give each die its own", _own_heads),
    Rule("sched_strategy is tried without a register cap", lambda c, k, a: not c.sched_strategy or c.waves_per_eu == 0),
)


def broken_rule(config: AttentionConfig, key: AttentionKey, arch: str) -> str | None:
    """Name of the first hard limit or rule that config breaks for key on arch; None if it is legal."""
    if limit := broken_limit(config, key, arch):
        return limit
    facts = ARCHS[arch]
    return next((rule.name for rule in RULES if not rule.ok(config, key, facts)), None)


def domains(key: AttentionKey, arch: str, recipes: tuple[str, ...] = FP8_RECIPES) -> dict[str, tuple]:
    """The values of each field that matters for key on arch, first the safest; fields left out keep their default.

    recipes: what FP8 may be made of.
    """
    space = dict(SPACE[arch])
    newer = space.pop("sched_strategy", None)
    if newer and knows_sched_strategy():
        space["sched_strategy"] = newer
    if arch == "gfx950":
        space["async_copy"] = (-1, 0) if knows_sched_strategy() else (-1, 1)
    if "variant" in space and not knows_gluon(arch):
        del space["variant"], space["ping_pong"]
    if not key.causal:
        del space["longest_first"]
    if not _leaves_units(key, arch):
        del space["splits"]
    if key.nheads == key.nheads_k or key.seqlen_q >= max(space["BLOCK_M"]):
        del space["pack_gqa"]
    if key.dtype == "fp8":
        space["recipe"] = tuple(dict.fromkeys((default_config(arch, key).recipe, *recipes)))
    return space


LONG = 1 << 17  # keys and queries: no grid of this length leaves units idle


def candidates(key: AttentionKey, arch: str, recipes: tuple[str, ...] = FP8_RECIPES) -> tuple[AttentionConfig, ...]:
    """Every legal config for key on arch with these FP8 recipes, in an order that depends on nothing else.

    Where no field fills a small grid no rule asks for lengths: all such keys share one list, which takes 0.1 s to make.
    """
    if not {"splits", "pack_gqa"} & domains(key, arch, recipes).keys():
        key = key._replace(seqlen_q=LONG, seqlen_k=LONG)
    return _candidates(key, arch, recipes)


@functools.lru_cache(maxsize=64)
def _candidates(key: AttentionKey, arch: str, recipes: tuple[str, ...]) -> tuple[AttentionConfig, ...]:
    space = domains(key, arch, recipes)
    parts = [space]
    if "variant" in space:
        parts = [_narrowed(space, PLAIN), _narrowed(space, GLUON)]
    parts = [narrow for part in parts for narrow in (_narrowed(part, GRID), _narrowed(part, SCHEDULE))]
    every = dict.fromkeys(config for part in parts for config in _product(part))
    return tuple(config for config in every if broken_rule(config, key, arch) is None)


def _narrowed(space: dict[str, tuple], fixed: dict[str, tuple]) -> dict[str, tuple]:
    return space | {name: values for name, values in fixed.items() if name in space}


def _product(space: dict[str, tuple]) -> Iterator[AttentionConfig]:
    for values in itertools.product(*space.values()):
        yield AttentionConfig(**dict(zip(space, values, strict=True)))


def suggest(
    trial: "optuna.Trial", key: AttentionKey, arch: str, recipes: tuple[str, ...] = FP8_RECIPES
) -> AttentionConfig:
    """The config that a trial asks for. It may be illegal: tell broken_rule() to the study as a constraint.

    The categories never depend on earlier choices, as TPE needs; a conditional space would split its history.
    """
    space = domains(key, arch, recipes)
    return AttentionConfig(**{name: trial.suggest_categorical(name, values) for name, values in space.items()})


class Seed(NamedTuple):
    """A starting point and where it was found good."""

    source: str
    arch: str
    dtypes: tuple[str, ...]
    causal: tuple[bool, ...]
    fields: dict


_16_BIT = ("bf16", "fp16")
_ALL = (*_16_BIT, "fp8")
_BOTH = (False, True)
SEEDS = (
    Seed(
        "AITER's shipped Triton default for gfx950 and gfx942", "gfx", _ALL, _BOTH,
        {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2},
    ),
    Seed(
        "tile of the hand-written gfx950 kernels: 8 waves x 32 rows, K and V double-buffered", "gfx950", _ALL, _BOTH,
        {"BLOCK_M": 256, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    ),
    Seed(
        "AOTriton's winner for full attention, D128, S >= 1024", "gfx950", _16_BIT, (False,),
        {"BLOCK_M": 256, "BLOCK_N": 64, "num_warps": 8, "num_stages": 4, "async_copy": 1},
    ),
    Seed(
        "AOTriton's winner for causal, D128, S >= 1024", "gfx950", _16_BIT, (True,),
        {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 1},
    ),
    Seed(
        "AITER's FP8 attention in Triton", "gfx950", ("fp8",), _BOTH,
        {"BLOCK_M": 256, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
    ),
    Seed(
        "AITER's small-grid entry: more and smaller workgroups", "gfx", _ALL, _BOTH,
        {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 2, "num_stages": 1, "waves_per_eu": 2},
    ),
    Seed(
        "best of a sweep on one H200 at 8k, D128, full", "sm90", _16_BIT, (False,),
        {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "tensor_descriptors": True},
    ),
    Seed(
        "best of a sweep on one H200 at 8k, D128, causal", "sm90", _16_BIT, (True,),
        {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "tensor_descriptors": True},
    ),
    Seed(
        "best of a sweep on one H200 at 8k, D128, FP8", "sm90", ("fp8",), _BOTH,
        {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3, "tensor_descriptors": True},
    ),
    Seed(
        "two warp groups share K and V, as in FlashAttention-3", "sm90", _ALL, _BOTH,
        {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2, "tensor_descriptors": True},
    ),
    Seed(
        "best on one H200 from 1k to 8k, D64 and D128, BF16 and causal FP8", "sm90", _ALL, _BOTH,
        {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2, "variant": "gluon", "ping_pong": True},
    ),
    Seed(
        "best on one H200 at 8k, D128, FP8, full: two programs a multiprocessor", "sm90", ("fp8",), _BOTH,
        {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "variant": "gluon"},
    ),
    Seed(
        "best on one H200 at 4k, D256", "sm90", _16_BIT, _BOTH,
        {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "variant": "gluon", "ping_pong": True},
    ),
)  # fmt: skip


def _of_this_space(seed: Seed, key: AttentionKey, arch: str) -> AttentionConfig:
    """The seed with values that this space spells: the compiler's default instead of an explicit equal."""
    config = {**seed.fields, "recipe": default_config(arch, key).recipe}
    if config.get("async_copy", -1) not in domains(key, arch).get("async_copy", (-1,)):
        config["async_copy"] = -1
    return AttentionConfig(**config)


def seeds(
    key: AttentionKey, arch: str, recipes: tuple[str, ...] = FP8_RECIPES, tiles: int = 1
) -> list[AttentionConfig]:
    """Legal starting points without repeats: the default config, known good ones, `tiles` of them with each recipe."""
    fitting = [
        _of_this_space(seed, key, arch)
        for seed in SEEDS
        if arch.startswith(seed.arch) and key.dtype in seed.dtypes and key.causal in seed.causal
    ]
    if key.dtype == "fp8":  # which recipe is fastest depends on the length more than on the tile
        fitting += [dataclasses.replace(tile, recipe=recipe) for recipe in recipes for tile in fitting[:tiles]]
    legal = [config for config in fitting if broken_rule(config, key, arch) is None]
    return list(dict.fromkeys([default_config(arch, key), *legal]))
