"""What compiled code says of the kernels for gfx950: the plain one, default and predicted best, and the Gluon one.

    python scripts/compare_gfx950.py --head-dims 64 128

prints the table of docs/kernels.md. Nothing is run: the figures are those of the machine code's loop without masks, and
what the model makes of them.
"""

import argparse
from collections.abc import Iterable
from typing import NamedTuple

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import device_of_sku
from zyfa.limits import broken_limit
from zyfa.lookup import choose
from zyfa.recipes import PRESETS
from zyfa.tuner.compile import compile_config, pin_environment
from zyfa.tuner.facts import Facts, Loop
from zyfa.tuner.gate import gate, is_matrix
from zyfa.tuner.model import DEVICES, Prediction, predict
from zyfa.tuner.rates import matrix_slots

ARCH, SKU = "gfx950", "mi355x"
RECIPES = ("none", PRESETS["per_tensor"], PRESETS["balanced"])
GLUON_TILES = ((8, 128), (8, 64), (4, 128), (4, 64))  # waves, keys
# Columns of the table: classes of tuner.facts.Loop.mix that each counts, numbers of one cell apart.
COLUMNS = {
    "exp": (("trans",),), "packed": (("pk",),), "other vector": (("valu", "cvt", "agpr"),), "lane swaps": (("xlane",),),
    "LDS reads, writes": (("ds_read", "ds_tr"), ("ds_write",)), "loads, copies": (("vmem",), ("vmem_lds",)),
    "barriers, waits": (("barrier",), ("waitcnt",)), "scalar": (("salu",),),
}  # fmt: skip
BOUNDS = ("matrix", "vector", "lds", "l2")
HEADER = (
    "", "kernel and tile", "matrix", *COLUMNS, "registers (AGPR), spills", "LDS", "waves a SIMD",
    "slots: matrix, vector", "bounds: matrix, vector, LDS, L2", "predicted µs",
)  # fmt: skip


class Variant(NamedTuple):
    """One build and what is made of it."""

    name: str
    config: AttentionConfig
    facts: Facts
    prediction: Prediction


def key(recipe: str, head_dim: int, seqlen: int) -> AttentionKey:
    """Causal, 32 query and 8 KV heads."""
    return AttentionKey("bf16" if recipe == "none" else "fp8", head_dim, head_dim, 32, 8, 1, seqlen, seqlen, True)


def main_loop(facts: Facts) -> Loop:
    """The loop without masks: that of the fewest instructions."""
    return min(facts.loops, key=lambda loop: sum(loop.mix.values()))


def counts(loop: Loop) -> list[str]:
    """Instructions of one trip of a wave: matrix, then the cells under COLUMNS."""
    matrix = sum(n for kind, n in loop.mix.items() if is_matrix(kind))
    cells = ([sum(loop.mix.get(kind, 0) for kind in kinds) for kinds in column] for column in COLUMNS.values())
    return [str(matrix), *(", ".join(map(str, cell)) for cell in cells)]


def vector_slots(loop: Loop) -> int:
    """Issue slots of the vector pipe for a trip, as tuner.model counts them: two for an exponential or a lane swap."""
    twice = loop.mix.get("trans", 0) + loop.mix.get("xlane", 0)
    return 2 * twice + sum(loop.mix.get(kind, 0) for kind in ("pk", "valu", "cvt", "agpr"))


def per_64_keys(variant: Variant) -> tuple[float, float]:
    """Slots of the matrix and of the vector pipe for 64 keys of a wave's 32 rows."""
    loop, share = main_loop(variant.facts), 64 / variant.config.BLOCK_N
    rows = 32 * variant.config.num_warps / variant.config.BLOCK_M  # waves that share rows split the keys
    matrix = sum(n * matrix_slots(kind, ARCH) for kind, n in loop.mix.items() if is_matrix(kind))
    return matrix * share * rows, vector_slots(loop) * share * rows


def build(name: str, at: AttentionKey, config: AttentionConfig) -> Variant | None:
    """The variant, or None where a limit, the compiler or the gate says no."""
    if broken_limit(config, at, ARCH):
        return None
    facts = compile_config(at, config, ARCH).facts
    if facts is None or gate(facts, at, config, ARCH):
        return None
    return Variant(name, config, facts, predict(facts, at, config, DEVICES[SKU]))


def variants(recipe: str, at: AttentionKey) -> list[Variant]:
    """The plain kernel's default and best predicted tile, the Gluon kernel with the tile that the model prefers."""
    default = AttentionConfig(**default_config(ARCH, at).to_dict() | {"recipe": recipe})
    best = choose(at, device_of_sku(SKU), "" if recipe == "none" else recipe).config
    tiles = (AttentionConfig(32 * w, n, w, 2, recipe=recipe, variant="gluon") for w, n in GLUON_TILES)
    gluon = [built for tile in tiles if (built := build("Gluon", at, tile))]
    plain = [build("plain, default", at, default), build("plain, best predicted", at, best)]
    return [v for v in plain if v] + sorted(gluon, key=lambda v: v.prediction.ms)[:1]


def row(case: str, variant: Variant) -> tuple[str, ...]:
    """The cells of one line under HEADER."""
    name, config, facts, prediction = variant
    tile = f"{config.BLOCK_M}x{config.BLOCK_N}, {config.num_warps} waves, {config.num_stages} stages"
    registers = f"{facts.registers}" + (f" ({facts.agprs})" if facts.agprs else "") + f", {facts.spills}"
    us, low, high = (f"{1e3 * ms:.0f}" for ms in (prediction.ms, prediction.ms_lo, prediction.ms_hi))
    return (
        case, f"{name}: {tile}", *counts(main_loop(facts)), registers, str(facts.lds_bytes),
        f"{facts.waves_per_simd:g}", ", ".join(f"{slots:.0f}" for slots in per_64_keys(variant)),
        ", ".join(f"{1e3 * prediction.bounds[bound]:.0f}" for bound in BOUNDS), f"{us} ({low} to {high})",
    )  # fmt: skip


def markdown(lines: Iterable[tuple[str, ...]]) -> str:
    """A table of lines under HEADER."""
    table = [HEADER, ("---",) * len(HEADER), *lines]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in table)


def main() -> None:
    """Prints the table, a case after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seqlen", type=int, default=8192)
    options = parser.parse_args()
    pin_environment()
    lines = [
        row(f"D{head_dim} {'BF16' if recipe == 'none' else recipe}", variant)
        for head_dim in options.head_dims
        for recipe in options.recipes
        for variant in variants(recipe, key(recipe, head_dim, options.seqlen))
    ]
    print(markdown(lines))


if __name__ == "__main__":
    main()
