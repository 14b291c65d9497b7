"""What a device cannot run at all: the one statement of hard limits, for lookup, search and verify.

Whether a config is worth trying is another question (zyfa.tuner.space). Nothing here rejects a config that runs: the
LDS estimate is a lower bound that was compared with 300 compiled kernels (tests/test_limits.py keeps some of them).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from .archs import ARCHS, Arch
from .config import AttentionConfig, AttentionKey, octave
from .recipes import QUANT_ROWS, RECIPES, Recipe

SCHED_STRATEGIES = ("", "max-ilp", "max-memory-clause", "iterative-ilp", "iterative-minreg", "iterative-maxocc")
AMD_DEFAULTS = {"waves_per_eu": 0, "matrix_instr_nonkdim": 0, "async_copy": -1, "sched_strategy": "", "xcds": 0}
NVIDIA_DEFAULTS = {"maxnreg": 0, "tensor_descriptors": False}
VARIANTS = ("triton", "gluon")
MAX_SPLITS = 16  # merge_splits is unrolled over them
# Bytes behind each KiB of a tile of attn_gluon_amd in LDS: of K what a lane reads of one key, of V (by the bytes of an
# element) what a transposed read takes of one key. So neighbouring keys begin in other banks.
LDS_PAD_K, LDS_PAD_V = 16, {1: 32, 2: 64}


def lds_bytes(config: AttentionConfig, key: AttentionKey, arch: str) -> int:
    """Bytes of shared memory that a program of this config surely needs; compiled code adds up to 5 % of padding."""
    qk_size, v_size = operand_bytes(config)
    k_tile = config.BLOCK_N * max(16, octave(key.head_dim)) * qk_size
    v_tile = config.BLOCK_N * max(16, octave(key.head_dim_v)) * v_size
    q_tile = config.BLOCK_M * max(16, octave(key.head_dim)) * qk_size
    if config.variant == "gluon" and ARCHS[arch].vendor == "amd":
        return _cdna4_bytes(config, k_tile, v_tile, v_size)
    if config.variant == "gluon":
        return _gluon_bytes(config, key, k_tile, v_tile, q_tile)
    if ARCHS[arch].vendor == "nvidia":
        return _hopper_bytes(config, k_tile, v_tile, q_tile)
    tiles = _gfx_buffers(config, arch, v_size == 1) * (k_tile + v_tile)
    if config.async_copy == 1 and v_size == 2 and config.num_stages > 1:
        tiles += tiles * 28 // 1024  # rows are padded against bank conflicts; less than that was never seen
    # Without buffers one tile at a time passes through LDS, and so does Q on its way to the registers.
    return max(q_tile, k_tile, v_tile, tiles + _gfx_p_bytes(config, v_size))


def operand_bytes(config: AttentionConfig) -> tuple[int, int]:
    """Bytes of one element of Q and K, and of P and V, as the matrix units read them."""
    if config.recipe == "none":
        return 2, 2
    return (2 if RECIPES[config.recipe].qk == "bf16" else 1), 1


def stages_output(num_warps: int, width_v: int) -> bool:
    """Whether attn_gluon's output passes through shared memory: where it is there and pays.

    With one consumer two programs share a multiprocessor's memory; rows of wide heads fill lines anyhow.
    """
    return num_warps > 4 and width_v <= 128


def _gluon_bytes(config: AttentionConfig, key: AttentionKey, k_tile: int, v_tile: int, q_tile: int) -> int:
    """Q, rings of K and V, fp32 sums of FP8 products that have left the matrix unit, output rows of 16 bits."""
    width = octave(key.head_dim_v)
    sums = config.BLOCK_M * width * 4 if config.recipe != "none" else 0
    output = config.BLOCK_M * width * 2 if stages_output(config.num_warps, width) else 0
    return q_tile + config.num_stages * (k_tile + v_tile) + sums + output


def _cdna4_bytes(config: AttentionConfig, k_tile: int, v_tile: int, v_size: int) -> int:
    """Rings of K and V, each KiB of them padded but the last."""
    rings = ((k_tile, LDS_PAD_K), (v_tile, LDS_PAD_V[v_size]))
    return sum(config.num_stages * (tile + tile // 1024 * pad) - pad for tile, pad in rings)


def _hopper_bytes(config: AttentionConfig, k_tile: int, v_tile: int, q_tile: int) -> int:
    """WGMMA (64 rows, four warps at least) reads Q, K and V from shared memory; smaller tiles keep Q in registers."""
    q_shared = q_tile if config.BLOCK_M >= 64 and config.num_warps >= 4 else 0
    tiles = max(k_tile, v_tile) if config.num_stages == 1 else config.num_stages * (k_tile + v_tile)
    return q_shared + tiles


def _gfx_buffers(config: AttentionConfig, arch: str, bits8: bool) -> int:
    """K and V buffers of the software pipeline: one less than stages if the newest tile waits in registers.

    From four stages on a chained-dot schedule with one buffer (two with async copy) may replace it.
    """
    is_async = config.async_copy == 1 and arch == "gfx950"
    if config.num_stages >= 4 and not (bits8 and arch == "gfx950"):
        return 2 if is_async else 1
    if config.num_stages == 1:
        return 0
    return config.num_stages if is_async else config.num_stages - 1


def _gfx_p_bytes(config: AttentionConfig, size: int) -> int:
    """P crosses waves through LDS when a wave owns fewer rows than one 32-row MFMA."""
    split = 32 * config.num_warps > config.BLOCK_M and config.matrix_instr_nonkdim != 16
    return config.BLOCK_M * config.BLOCK_N * size if split and config.num_stages > 1 else 0


class Limit(NamedTuple):
    """One hard limit; `holds` is false for a config that cannot run."""

    name: str
    holds: Callable[[AttentionConfig, AttentionKey, Arch], bool]


def _power_of_two(n: int, lo: int, hi: int) -> bool:
    return lo <= n <= hi and n & (n - 1) == 0


def _has_defaults(config: AttentionConfig, defaults: dict) -> bool:
    return all(getattr(config, name) == value for name, value in defaults.items())


def _is_mx(config: AttentionConfig) -> bool:
    return config.recipe != "none" and RECIPES[config.recipe].granularity == "mx"


def _has_q_mean(config: AttentionConfig) -> bool:
    """Then each query head adds numbers of its own to the logits of a key, and heads of one program differ in them."""
    return config.recipe in RECIPES and RECIPES[config.recipe].q_mean


def _alone(config: AttentionConfig) -> bool:
    """Whether a program has all keys of its rows, which are of one head."""
    return config.splits == 1 and not config.pack_gqa


def knows_sched_strategy() -> bool:
    """Whether the installed Triton takes sched_strategy (from 3.8 on; there async copy is also gfx950's default)."""
    import triton  # late: only rows that use the option need to know the version

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8)


@functools.cache
def knows_gluon(arch: str) -> bool:
    """Whether the installed Triton has what the Gluon kernel for arch is written in."""
    try:
        if arch == "gfx950":
            from .kernels import attn_gluon_amd  # noqa: F401 - the import is the question
        else:
            from .kernels import attn_gluon  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _gluon_scales(recipe: Recipe) -> bool:
    """It multiplies scores by one number a tile, adds no biases of keys, and scales V by tiles or heads."""
    return recipe.qk_scales in ("none", "head", "block") and not recipe.q_mean and recipe.v_scaled_by != "channel"


def _gluon_runs(config: AttentionConfig, key: AttentionKey, arch: Arch) -> bool:
    """What the Gluon kernel of arch is written for."""
    if config.variant == "triton":
        return not config.ping_pong
    if config.recipe != "none" and not _gluon_scales(RECIPES[config.recipe]):
        return False
    runs = {"sm90": _hopper_runs, "gfx950": _cdna4_runs}.get(arch.name)
    return runs is not None and runs(config, key)


def _hopper_runs(config: AttentionConfig, key: AttentionKey) -> bool:
    """attn_gluon: one or two consumers of 64 rows; scores and output must fit their registers.

    FP8 takes heads up to 128 wide, whose sums leave room in shared memory.
    """
    widths = octave(key.head_dim), octave(key.head_dim_v)
    fp8 = config.recipe != "none"
    return (
        config.num_warps in (4, 8)
        and config.num_warps * 16 == config.BLOCK_M
        and not (config.ping_pong and config.num_warps == 4)
        and config.maxnreg == 0
        and not config.tensor_descriptors
        and all(64 <= width <= (128 if fp8 else 256) for width in widths)
        and config.BLOCK_N in ((64,) if widths[1] > 128 else (64, 128))
    )


def _cdna4_runs(config: AttentionConfig, key: AttentionKey) -> bool:
    """attn_gluon_amd: waves of 32 rows, K and V in at least two buffers, 16 bytes a copy.

    With eight waves, which share 512 registers in twos, 128 keys of 16 bits and more than 64 columns spill 50 to 91.
    """
    widths = octave(key.head_dim), octave(key.head_dim_v)
    qk_size, v_size = operand_bytes(config)
    own = AMD_DEFAULTS | {"waves_per_eu": config.waves_per_eu}
    return (
        config.num_warps in (2, 4, 8)
        and config.num_warps * 32 == config.BLOCK_M
        and config.num_stages > 1
        and not config.ping_pong
        and _has_defaults(config, own)
        and all(64 <= width <= 128 for width in widths)
        and all(size == 1 or dim % 8 == 0 for size, dim in ((qk_size, key.head_dim), (v_size, key.head_dim_v)))
        and config.BLOCK_N in ((64, 128) if qk_size == 1 or max(widths) == 64 or config.num_warps < 8 else (64,))
    )


LIMITS = (
    Limit("BLOCK_M is a power of two from 16 to 256", lambda c, k, a: _power_of_two(c.BLOCK_M, 16, 256)),
    # Keys of one tile share a scale, so a tile must not straddle two blocks of QUANT_ROWS.
    Limit("BLOCK_N is a power of two from 16 to 128", lambda c, k, a: _power_of_two(c.BLOCK_N, 16, QUANT_ROWS)),
    Limit("num_warps is 1, 2, 4 or 8", lambda c, k, a: _power_of_two(c.num_warps, 1, 8)),
    Limit("num_stages is 1 to 5", lambda c, k, a: 1 <= c.num_stages <= 5),
    Limit("head_group is not negative", lambda c, k, a: c.head_group >= 0),
    Limit(f"splits is 1 to {MAX_SPLITS}", lambda c, k, a: 1 <= c.splits <= MAX_SPLITS),
    Limit("xcds is 0 or 8", lambda c, k, a: c.xcds in (0, 8)),
    Limit("the gluon variant has neither splits nor pack_gqa", lambda c, k, a: c.variant == "triton" or _alone(c)),
    Limit("pack_gqa needs a recipe without q_mean", lambda c, k, a: not (c.pack_gqa and _has_q_mean(c))),
    Limit("recipe is known", lambda c, k, a: c.recipe == "none" or c.recipe in RECIPES),
    Limit("recipe is none for bf16 and fp16 only", lambda c, k, a: (c.recipe == "none") == (k.dtype != "fp8")),
    Limit("AMD knobs stay at their defaults", lambda c, k, a: a.vendor == "amd" or _has_defaults(c, AMD_DEFAULTS)),
    Limit(
        "NVIDIA knobs stay at their defaults", lambda c, k, a: a.vendor == "nvidia" or _has_defaults(c, NVIDIA_DEFAULTS)
    ),
    Limit("waves_per_eu is 0 to 8", lambda c, k, a: 0 <= c.waves_per_eu <= 8),
    Limit("matrix_instr_nonkdim is 0, 16 or 32", lambda c, k, a: c.matrix_instr_nonkdim in (0, 16, 32)),
    Limit("async_copy is -1, 0 or 1", lambda c, k, a: c.async_copy in (-1, 0, 1)),
    Limit("sched_strategy is known", lambda c, k, a: c.sched_strategy in SCHED_STRATEGIES),
    Limit("sched_strategy needs Triton 3.8", lambda c, k, a: not c.sched_strategy or knows_sched_strategy()),
    Limit("variant is triton or gluon", lambda c, k, a: c.variant in VARIANTS),
    Limit("the gluon variant runs this tile, recipe and head dim, and its options are its own", _gluon_runs),
    Limit("this Triton has Gluon", lambda c, k, a: c.variant != "gluon" or knows_gluon(a.name)),
    Limit(
        "maxnreg is 0 or a multiple of 8 from 24 to 255",
        lambda c, k, a: c.maxnreg == 0 or (24 <= c.maxnreg <= 255 and c.maxnreg % 8 == 0),
    ),
    Limit("MX scales need gfx950's scaled matrix instructions", lambda c, k, a: a.name == "gfx950" or not _is_mx(c)),
    # An 8-bit dot sums at least 32 products on NVIDIA: over keys for P V.
    Limit("FP8 needs BLOCK_N >= 32", lambda c, k, a: a.vendor == "amd" or k.dtype != "fp8" or c.BLOCK_N >= 32),
    Limit("K and V tiles fit in shared memory", lambda c, k, a: lds_bytes(c, k, a.name) <= a.lds_bytes),
)


def broken_limit(config: AttentionConfig, key: AttentionKey, arch: str) -> str | None:
    """Name of the first hard limit of arch ("gfx950", "gfx942" or "sm90") that config breaks for key; else None."""
    facts = ARCHS[arch]
    return next((limit.name for limit in LIMITS if not limit.holds(config, key, facts)), None)
