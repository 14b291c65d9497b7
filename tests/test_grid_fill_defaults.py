"""Default configs of calls with few programs: how many there are, and what the default does about it."""

import pytest

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import TARGETS, device_of_sku
from zyfa.grid_fill import default_for, filled, programs
from zyfa.limits import broken_limit
from zyfa.lookup import choose


def key(seqlen_q, seqlen_k, nheads=32, nheads_k=8, dtype="bf16", batch=1):
    return AttentionKey(dtype, 128, 128, nheads, nheads_k, batch, seqlen_q, seqlen_k, True)


TILE = AttentionConfig(128, 64, 4, 2)


def test_programs_by_hand():
    at = key(200, 8192, batch=2)
    assert programs(at, TILE) == 2 * 64
    assert programs(at, AttentionConfig(128, 64, 4, 2, splits=4)) == 4 * 2 * 64
    assert programs(at, AttentionConfig(128, 64, 4, 2, pack_gqa=True)) == 7 * 16  # 800 rows of each KV head


@pytest.mark.parametrize(
    "at, units, splits, pack",
    [
        (key(128, 32768), 256, 8, False),  # 32 programs, which 8 splits make 256
        (key(32, 32768), 256, 8, True),  # 8 programs of 32 queries x 4 heads
        (key(120, 32768), 256, 8, False),  # 480 rows fill four blocks, as many as the heads do
        (key(128, 4096), 256, 8, False),  # of 512 keys
        (key(128, 1024), 256, 2, False),
        (key(128, 512), 256, 1, False),
        (key(1024, 32768), 256, 2, False),  # two programs a unit, 16k keys each
        (key(1024, 4096), 256, 1, False),  # 2k keys each would not pay for that
        (key(4096, 4096), 256, 1, False),
        (key(32, 4096, batch=64), 256, 1, True),
        (key(128, 32768)._replace(window_class="local"), 256, 1, False),
    ],
)
def test_the_grid_decides(at, units, splits, pack):
    config = filled(TILE, at, "gfx950", units)
    assert (config.splits, config.pack_gqa) == (splits, pack)
    assert (config.BLOCK_M, config.BLOCK_N, config.num_warps) == (128, 64, 4)


def test_what_cannot_be_split_or_packed_stays():
    gluon = AttentionConfig(128, 128, 8, 2, variant="gluon")
    assert filled(gluon, key(32, 32768), "sm90", 132) == gluon
    biased = AttentionConfig(128, 64, 4, 2, recipe="block-kmean-qmean")
    config = filled(biased, key(32, 32768, dtype="fp8"), "gfx950", 256)
    assert (config.pack_gqa, config.splits) == (False, 8)


@pytest.mark.parametrize("sku", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_defaults_are_legal_and_those_of_full_grids_are_the_architectures(sku, dtype):
    _, arch, units = TARGETS[sku]
    for seqlen in (512, 1024, 4096, 32768):
        assert default_for(key(seqlen, seqlen, dtype=dtype), arch, units) == default_config(
            arch, key(seqlen, seqlen, dtype=dtype)
        )
    for seqlen_q in (1, 16, 128, 512):
        at = key(seqlen_q, 32768, dtype=dtype)
        assert broken_limit(default_for(at, arch, units), at, arch) is None


def test_lookup_gives_and_shows_the_filled_default(nothing_shipped):
    choice = choose(key(32, 32768), device_of_sku("mi355x"))
    assert (choice.match, choice.config.splits, choice.config.pack_gqa) == ("default", 8, True)
    assert "splits=8 pack_gqa=True" in str(choice.config)
