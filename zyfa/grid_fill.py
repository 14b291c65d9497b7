"""How many programs a call starts, and the default config of one that starts too few for its GPU."""

import dataclasses

from .archs import ARCHS, default_config, plain_config
from .config import AttentionConfig, AttentionKey
from .limits import broken_limit

MAX_SPLITS = 8  # of a default
# Keys of a split, by the model (docs/kernels.md): with fewer the merge costs more than it saves, and more programs than
# units, which hide each other's waits, pay later than units that would be idle.
MIN_SHARE, LONG_SHARE = 512, 4096


def query_blocks(key: AttentionKey, config: AttentionConfig) -> int:
    """Blocks of BLOCK_M rows; packed, the rows of all query heads of a KV head follow each other."""
    rows = key.seqlen_q * (key.nheads // key.nheads_k if config.pack_gqa else 1)
    return -(-rows // config.BLOCK_M)


def grid_heads(key: AttentionKey, config: AttentionConfig) -> int:
    """Heads that have programs of their own, over the batch."""
    return key.batch * (key.nheads_k if config.pack_gqa else key.nheads)


def programs(key: AttentionKey, config: AttentionConfig) -> int:
    """Programs of the attention kernel."""
    return query_blocks(key, config) * grid_heads(key, config) * config.splits


def default_for(key: AttentionKey, arch: str, units: int, recipe: str = "") -> AttentionConfig:
    """default_config(), with another recipe if one is named, filled() for a GPU of so many units.

    The Gluon kernel splits no keys: where it leaves half of the units idle and the plain one would not, that one runs.
    """
    config = default_config(arch, key, recipe)
    if config.variant != "gluon":
        return filled(config, key, arch, units) if arch in ARCHS else config
    if 2 * programs(key, config) > units:
        return config
    plain = filled(plain_config(arch, key, recipe), key, arch, units)
    return plain if plain.splits > 1 else config


def filled(config: AttentionConfig, key: AttentionKey, arch: str, units: int) -> AttentionConfig:
    """The config with packed heads where that leaves fewer programs, and with split keys where those fill the GPU.

    units: compute units or multiprocessors of the GPU. How many keys a window leaves is not in the key: there none are
    split. Where arch cannot run the result, as with the Gluon kernel, the config comes back as it is.
    """
    packed = dataclasses.replace(config, pack_gqa=True)
    if programs(key, packed) < programs(key, config) and broken_limit(packed, key, arch) is None:
        config = packed
    split = dataclasses.replace(config, splits=_splits(key, config, units))
    return split if broken_limit(split, key, arch) is None else config


def _splits(key: AttentionKey, config: AttentionConfig, units: int) -> int:
    """1, 2, 4 or 8: doubled as long as the programs find units and keys."""
    splits, whole = 1, query_blocks(key, config) * grid_heads(key, config)
    while key.window_class == "none" and splits < MAX_SPLITS:
        started = 2 * splits * whole
        share = MIN_SHARE if started <= units else LONG_SHARE
        if started > 2 * units or 2 * splits * share > key.seqlen_k:
            break
        splits *= 2
    return splits
