"""The machine code of the Gluon kernel for gfx950, executed here: results against fp64, orders, and broken listings."""

import re

import pytest
import torch
from helpers import assert_correct, make_qkv
from listing_machine import executed
from test_listing_kernels import COMMON_FAULTS, assert_found, assert_lse, causals, changed

from zyfa.limits import knows_gluon
from zyfa.recipes import PRESETS
from zyfa.tuner.listing.launch import Executor

pytestmark = pytest.mark.skipif(not knows_gluon("gfx950"), reason="this Triton has no Gluon for gfx950")


def gluon(waves=4, keys=64, stages=2):
    """Fields of a config of the Gluon kernel."""
    return {"variant": "gluon", "BLOCK_M": 32 * waves, "num_warps": waves, "BLOCK_N": keys, "num_stages": stages}


def checked(q, k, v, recipe="none", tile=None, **same):
    """Executes a call with the Gluon kernel and compares output and log-sum-exp by the rule of all tests."""
    executor = Executor(late=True)
    out, lse = executed(q, k, v, recipe, executor, tile or gluon(), **same)
    assert executor.listings[-1][0] == "attn_gluon_amd"
    assert_correct(out, q, k, v, recipe, **same)
    assert_lse(lse, q, k, v, recipe, **same)


@causals
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("recipe", ["none", "tensor"])
def test_bf16_and_fp8(recipe, head_dim, causal):
    checked(*make_qkv(1, 256, 256, 2, 1, head_dim), recipe, causal=causal)


@pytest.mark.parametrize("recipe", ["block", "head", *PRESETS.values()])
def test_recipes_with_wide_tiles(recipe):
    """Two waves of 32 rows would do; eight share a tile of 256 rows, whose halves have scales of their own."""
    keys = 64 if recipe == "bf16qk" else 128
    checked(*make_qkv(1, 300, 300, 1, 1, 128), recipe, gluon(8, keys), causal=True)


# lengths, head_dim, mask, tile
FEATURES = {
    "ragged": ((113, 203), 128, {"causal": True}, gluon()),
    "fewer keys than a tile": ((70, 30), 64, {}, gluon(keys=128)),
    "rows without a key": ((203, 113), 64, {"causal": True}, gluon(keys=128)),
    "window": ((150, 150), 128, {"window_size": (40, 20)}, gluon()),
    "window to the left": ((300, 300), 64, {"window_size": (64, 0)}, gluon(2, stages=3)),
    "narrow heads": ((100, 150), 80, {"causal": True}, gluon()),
    "fp16": ((64, 96), 96, {"causal": True}, gluon(2)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature):
    lengths, head_dim, same, tile = FEATURES[feature]
    dtype = torch.float16 if feature == "fp16" else torch.bfloat16
    checked(*make_qkv(1, *lengths, 2, 1, head_dim, dtype=dtype), tile=tile, **same)


@pytest.mark.parametrize("recipe", ["block", "bf16qk"])
def test_quantised_windows_and_lengths(recipe):
    checked(*make_qkv(1, 200, 310, 1, 1, 80), recipe, gluon(stages=3), window_size=(70, 20))


def test_copies_do_not_read_behind_the_tensors():
    """The last key of the buffers is the last of the only tile, which the pipeline asks for again."""
    q, k, v = make_qkv(1, 40, 40, 1, 1, 128)
    k, v = (torch.cat([x, torch.full_like(x, float("nan"))], 1)[:, :40] for x in (k, v))
    checked(q, k, v, tile=gluon(2, stages=3))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_waits_and_barriers_allow_every_order(recipe, stages):
    """Memory as early or as late as waits allow, the first or the last wave ahead: the same bits."""
    q, k, v = make_qkv(1, 320, 320, 1, 1, 64)
    first, *others = (
        executed(q, k, v, recipe, Executor(late=late, backwards=backwards), gluon(stages=stages), causal=True)
        for late in (False, True)
        for backwards in (False, True)
    )
    for out, lse in others:
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


FAULTS = COMMON_FAULTS | {
    "a transposed read one chunk further": (
        r"(ds_read_b64_tr_b16 .* offset:)(\d+)$",
        lambda m: rf"\g<1>{int(m[2]) + 1088}",
        9,
    ),
    "K's tile is read from another row": (r"(ds_read_b128 .* offset:)(\d+)$", lambda m: rf"\g<1>{int(m[2]) + 1040}", 5),
    "a mask compares the wrong way": (r"v_cmp_lt_i32_e64", "v_cmp_ge_i32_e64", 5),
    "row maxima are not exchanged": (r"v_permlane32_swap_b32.*$", "s_nop 0", 0),
    "a store reaches behind the output": (r"(buffer|global)_store_dwordx2 .*$", r"\g<0> offset:4000", -1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_listing_is_found(fault):
    assert_found(changed(*FAULTS[fault]), changes=gluon())


def test_a_dropped_wait_for_the_copies_is_found_when_memory_is_late():
    """The wait in front of the loop's barrier."""
    q, k, v = make_qkv(1, 256, 256, 1, 1, 128)

    def patch(name: str, text: str) -> str:
        wait = list(re.finditer(r"vmcnt\(\d+\)", text[: text.index("s_barrier")]))[-1]
        return text[: wait.start()] + "vmcnt(63)" + text[wait.end() :]

    out, _ = executed(q, k, v, executor=Executor(patch), changes=gluon(), causal=True)
    assert_correct(out, q, k, v, causal=True)
    out, _ = executed(q, k, v, executor=Executor(patch, late=True), changes=gluon(), causal=True)
    with pytest.raises(AssertionError):
        assert_correct(out, q, k, v, causal=True)


def test_unknown_opcodes_still_fail():
    from zyfa.tuner.listing.parse import UnknownInstruction

    q, k, v = make_qkv(1, 64, 64, 1, 1, 64)
    with pytest.raises(UnknownInstruction, match="v_maximum9_f32"):
        executed(q, k, v, executor=Executor(changed(r"v_maximum3_f32", "v_maximum9_f32", 0)), changes=gluon(2))
