"""Facts of each GPU architecture that the runtime and the tuner share: limits, number formats, default configs.

Sources: LLVM's AMDGPU target description and AMD's CDNA3/CDNA4 documents for gfx942/gfx950 (LDS 64 and 160 KB per
compute unit, FP8 fnuz against OCP), the CUDA programming guide for sm90 (227 KB of shared memory a block).
"""

from dataclasses import dataclass

from .config import AttentionConfig, AttentionKey
from .recipes import PRESETS


@dataclass(frozen=True)
class Arch:
    """One architecture. lds_bytes is the most shared memory that one program may use."""

    name: str
    vendor: str
    warp_size: int
    lds_bytes: int
    max_registers: int  # 32-bit registers that one lane can own
    fp8_format: str  # what the matrix units and Triton call FP8 here: "e4m3fn" or "e4m3fnuz"
    v_k_major: bool  # the FP8 matrix unit wants V with keys contiguous, so the quantiser stores V transposed
    # The FP8 matrix unit keeps fewer bits of a sum than fp32: sums over tiles must leave it. On an H200, 128k keys with
    # V of mean 1 gave 57 % error in one long sum (5 % at 4k), and it cost 3-6 % of the time at 8k to leave it.
    short_fp8_sum: bool
    overlaps: bool  # a launch may start while the one before ends: programmatic dependent launch


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("gfx950", "amd", 64, 160 * 1024, 512, "e4m3fn", v_k_major=False, short_fp8_sum=False, overlaps=False),
        Arch("gfx942", "amd", 64, 64 * 1024, 512, "e4m3fnuz", v_k_major=False, short_fp8_sum=False, overlaps=False),
        Arch("sm90", "nvidia", 32, 227 * 1024, 255, "e4m3fn", v_k_major=True, short_fp8_sum=True, overlaps=True),
    )
}


def plain_config(arch: str, key: AttentionKey, recipe: str = "") -> AttentionConfig:
    """The tile of attn_fwd that is legal for every shape and feature; recipe: of FP8, "" is that of "balanced".

    AMD: 32 rows a wave fill one 32x32 MFMA. Hopper: the tile that one public sweep at 8k found best (BF16 64x64,
    FP8 64x128; four warps). Head dims above 128 halve BLOCK_N so that the tiles keep fitting, and FP8 on Hopper, which
    holds two accumulators, takes eight warps: four spill 368 bytes a thread.
    """
    fp8 = key.dtype == "fp8"
    recipe = (recipe or PRESETS["balanced"]) if fp8 else "none"
    wide = max(key.head_dim, key.head_dim_v) > 128
    if arch.startswith("gfx"):
        block_n = 32 if wide and not fp8 else 64
        return AttentionConfig(128, block_n, 4, 1 if wide or arch == "gfx942" else 2, recipe=recipe)
    block_n = (64 if wide else 128) if fp8 else (32 if wide else 64)
    return AttentionConfig(64, block_n, 8 if wide and fp8 else 4, 2, recipe=recipe)


def default_config(arch: str, key: AttentionKey, recipe: str = "") -> AttentionConfig:
    """The config for a key when no database knows better; recipe: of FP8, "" is that of "balanced".

    On Hopper the Gluon kernel where it takes the key and the recipe, with two consumers, in turns with 16 bits: in a
    tuning run on an H200 it won all 28 cells of the default grid, 26 of them with this tile. Else, and where the
    installed Triton has no Gluon, plain_config(). What it lacks beyond the key (softcap, sinks, packed sequences) runs
    the plain tile, too.
    """
    plain = plain_config(arch, key, recipe)
    if arch != "sm90":
        return plain
    from .limits import broken_limit  # late: it imports this module

    for block_n in (128, 64):
        gluon = AttentionConfig(128, block_n, 8, 2, recipe=plain.recipe, variant="gluon", ping_pong=key.dtype != "fp8")
        if broken_limit(gluon, key, arch) is None:
            return gluon
    return plain
