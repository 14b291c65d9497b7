"""The machine code of the kernels for gfx950, executed here: results against fp64, and what a changed listing does."""

import math
import re

import pytest
import torch
from helpers import assert_correct, make_qkv, varlen
from listing_machine import executed

from zyfa.archs import ARCHS, default_config
from zyfa.config import AttentionKey
from zyfa.kernels.launch import prepare_operands
from zyfa.recipes import FP8_MAX, PRESETS, QUANT_ROWS, RECIPES
from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuner.compile import _target
from zyfa.tuner.listing import ListingError
from zyfa.tuner.listing.launch import Executor

causals = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def plain_lse(q, k, v, p_offset: int, **same):
    """The log-sum-exp in fp32 and base 2, to which a recipe's P offset is added and taken away again."""
    lse = attention_ref(q, k, v, dtype=torch.float32, return_lse=True, **same)[1]
    return ((lse / math.log(2) + p_offset) - p_offset) * math.log(2)


def assert_lse(lse, q, k, v, recipe="none", **same):
    """The rule of assert_correct for the log-sum-exp, whose plain dtype is fp32 unless Q and K are quantised."""
    want = attention_ref(q, k, v, return_lse=True, **same)[1]
    if recipe == "none" or RECIPES[recipe].qk == "bf16":
        base, factor = plain_lse(q, k, v, 0 if recipe == "none" else RECIPES[recipe].p_offset, **same), 2.0
    else:
        base, factor = emulate(q, k, v, recipe, return_lse=True, **same)[1], 1.5
    seen = torch.isfinite(want)
    assert torch.equal(lse[~seen], want[~seen].float())
    error, bound = relative_error(lse[seen], want[seen]), factor * relative_error(base[seen], want[seen])
    assert error <= bound, f"error {error:.3e} exceeds {factor} x the plain error: {bound:.3e}"


# --- results ---------------------------------------------------------------------------------------------------------


@causals
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bf16(head_dim, causal):
    q, k, v = make_qkv(1, 256, 256, 2, 1, head_dim)
    out, lse = executed(q, k, v, causal=causal)
    assert_correct(out, q, k, v, causal=causal)
    assert_lse(lse, q, k, v, causal=causal)


@pytest.mark.parametrize(
    "recipe, causal",
    [*((recipe, True) for recipe in (*PRESETS.values(), "mx")), ("tensor", False), ("bf16qk", False)],
)
def test_fp8_with_its_quantisers(recipe, causal):
    q, k, v = make_qkv(1, 256, 256, 1, 1, 128)
    out, lse = executed(q, k, v, recipe, causal=causal)
    assert_correct(out, q, k, v, recipe, causal=causal)
    assert_lse(lse, q, k, v, recipe, causal=causal)


@pytest.mark.parametrize("fill", [{"splits": 3}, {"pack_gqa": True}, {"splits": 2, "pack_gqa": True}], ids="-".join)
def test_split_keys_and_packed_heads(fill):
    q, k, v = make_qkv(1, 40, 200, 2, 1, 64)
    out, lse = executed(q, k, v, changes=fill, causal=True)
    assert_correct(out, q, k, v, causal=True)
    assert_lse(lse, q, k, v, causal=True)


FEATURES = {
    "ragged": ((113, 203), {"causal": True}),
    "rows without a key": ((203, 113), {"causal": True}),
    "window": ((150, 150), {"window_size": (40, 20)}),
    "softcap and sink": ((70, 150), {"softcap": 5.0, "sink": torch.tensor([0.5, 2.0])}),
    "fp16": ((64, 96), {"causal": True}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature):
    lengths, same = FEATURES[feature]
    q, k, v = make_qkv(1, *lengths, 2, 1, 80, dtype=torch.float16 if feature == "fp16" else torch.bfloat16)
    out, lse = executed(q, k, v, **same)
    assert_correct(out, q, k, v, **same)
    assert_lse(lse, q, k, v, **same)


def test_a_packed_fp8_batch_is_its_sequences():
    packed, recipe = varlen([40, 90], [150, 90]), PRESETS["accurate"]
    q, k, v = (x[0] for x in make_qkv(1, 130, 240, 1, 1, 64))
    out, _ = executed(q, k, v, recipe, causal=True, **packed)
    for rows, keys in ((slice(0, 40), slice(0, 150)), (slice(40, 130), slice(150, 240))):
        assert_correct(out[None, rows], q[None, rows], k[None, keys], v[None, keys], recipe, causal=True)


# Searched knobs that change the code most, and what shows in the listing that they did.
CHANGES = {
    "copies to LDS": ({"async_copy": 1, "num_stages": 3}, PRESETS["accurate"], r" lds$"),
    "16x16": ({"matrix_instr_nonkdim": 16, "BLOCK_N": 128}, PRESETS["accurate"], r"v_mfma_f32_16x16x128_f8f6f4"),
    "8 waves": ({"BLOCK_M": 256, "num_warps": 8}, "none", r"max_flat_workgroup_size: 512"),
    "few registers": ({"waves_per_eu": 3}, "none", r"vgpr_count: +168$"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_searched_configs(change):
    changes, recipe, sign = CHANGES[change]
    q, k, v = make_qkv(1, 256, 256, 1, 1, 128)
    executor = Executor(late=True)
    out, _ = executed(q, k, v, recipe, executor, changes, causal=True)
    assert_correct(out, q, k, v, recipe, causal=True)
    assert re.search(sign, executor.listings[-1][1], re.M)


@pytest.mark.parametrize("change", [{}, CHANGES["copies to LDS"][0]], ids=["default", "copies to LDS"])
def test_waits_and_barriers_allow_every_order(change):
    """Memory as early or as late as waits allow, the first or the last wave ahead: the same bits."""
    q, k, v = make_qkv(1, 192, 192, 1, 1, 128)
    first, *others = (
        executed(q, k, v, executor=Executor(late=late, backwards=backwards), changes=change, causal=True)
        for late in (False, True)
        for backwards in (False, True)
    )
    for out, lse in others:
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


# --- quantisers, bit by bit ------------------------------------------------------------------------------------------


def quantised(x, granularity: str, top: float, dtype, is_v: bool):
    """(codes, descales) of x (heads, rows, width) in fp32 arithmetic, one rounding a step as the kernel's text asks."""
    amax = x.abs().amax(2)
    shape = {"tensor": (1, -1), "head": (x.shape[0], -1), "block": (x.shape[0], -1, QUANT_ROWS)}[granularity]
    amax = amax.reshape(shape).amax(-1)
    scale = (amax * torch.tensor(1.0 / top)).clamp_min(1e-12)
    if is_v:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp_min(2.0**-30)
    rows = scale.reshape(-1, 1).expand(-1, x[..., 0].numel() // scale.numel()).reshape(x.shape[:2])
    inverse = (1.0 / rows)[..., None]
    if dtype == torch.int8:  # product and rounding are one instruction, of the exact product
        return (x.double() * inverse.double()).round().to(dtype), scale.flatten()
    return (x * inverse).to(dtype), scale.flatten()


@pytest.mark.parametrize("recipe", ["tensor", "head", "block", "int8-kmean"])
def test_quantisers_bit_by_bit(recipe):
    q, k, v = make_qkv(1, 256, 256, 2, 1, 64)
    rule, arch = RECIPES[recipe], ARCHS["gfx950"]
    config = default_config("gfx950", AttentionKey("fp8", 64, 64, 2, 1, 1, 256, 256, True))
    config = type(config).from_dict(config.to_dict() | {"recipe": recipe})
    with _target("gfx950"):
        ops, _ = prepare_operands(q, k, v, config=config, arch=arch, qk_scale=1.0, launcher=Executor())
    q, k, v = (x[0].transpose(0, 1).float() for x in (q, k, v))
    fp8 = torch.float8_e4m3fn
    if rule.k_mean:  # sums of 256 values in another order may differ in the last bit: take the kernel's word for K
        top, dtype, checked = 127.0, torch.int8, (q, None, v)
    else:
        top, dtype, checked = FP8_MAX["e4m3fn"], fp8, (q, k, v)
    for x, codes, descale, is_v in zip(checked, (ops.q, ops.k, ops.v), ops.descales, (False, False, True), strict=True):
        if x is None:
            continue
        want, scale = quantised(x, rule.granularity, FP8_MAX["e4m3fn"] if is_v else top, fp8 if is_v else dtype, is_v)
        assert torch.equal(descale, scale)
        assert torch.equal(codes[0].view(torch.uint8), want.view(torch.uint8))


# --- what a changed listing does -------------------------------------------------------------------------------------


def changed(pattern: str, replacement, nth: int):
    """A patch for Executor: the nth match (from the end if negative) in the listing of attn_fwd becomes replacement."""

    def patch(name: str, text: str) -> str:
        match = list(re.finditer(pattern, text, re.M))[nth]
        new = replacement if isinstance(replacement, str) else replacement(match)
        return text[: match.start()] + match.expand(new) + text[match.end() :]

    return patch


COMMON_FAULTS = {
    "an MFMA reads other registers": (r"(v_mfma_f32_\S+ \S+) v\[\d+:\d+\], (v\[\d+:\d+\])", r"\1 \2, \2", 8),
    "exp2 became log2": (r"v_exp_f32", "v_log_f32", 12),
    "the halves of a BF16 pair change places": (r"(v_cvt_pk_bf16_f32 \S+) (v\d+), (v\d+)", r"\1 \3, \2", 5),
}
FAULTS = COMMON_FAULTS | {
    "an MFMA drops its sum": (r"(v_mfma_f32_.*), [va]\[\d+:\d+\]$", r"\1, 0", 20),
    "a transposed read one row further": (
        r"(ds_read_b64_tr_b16 .* offset:)(\d+)$",
        lambda m: rf"\g<1>{int(m[2]) + 256}",
        9,
    ),
    "a mask compares the wrong way": (r"v_cmp_le_i32", "v_cmp_gt_i32", 3),
    "a half is not exchanged": (r"v_permlane32_swap_b32.*$", "s_nop 0", 6),
    "the scale of the output takes the wrong half": (r"(v_pk_mul_f32 .*)op_sel_hi:\[1,0\]", r"\1op_sel:[0,1]", -2),
    "a store reaches behind the output": (r"(buffer_store_dwordx4 .* offen)", r"\1 offset:4000", -1),
    "a branch is taken the other way": (r"s_cbranch_scc([01])", lambda m: f"s_cbranch_scc{1 - int(m[1])}", 0),
}


def assert_found(patch, **change):
    """A changed listing is refused, or computes something else."""
    q, k, v = make_qkv(1, 256, 256, 1, 1, 128)
    try:
        out, lse = executed(q, k, v, executor=Executor(patch), causal=True, **change)
    except ListingError:
        return
    with pytest.raises(AssertionError):
        assert_correct(out, q, k, v, causal=True)
        assert_lse(lse, q, k, v, causal=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_listing_is_found(fault):
    assert_found(changed(*FAULTS[fault]))


def test_a_dropped_wait_in_the_loop_is_found_when_memory_is_late():
    q, k, v = make_qkv(1, 256, 256, 1, 1, 128)
    patch = changed(r"s_waitcnt vmcnt\(0\)$", "s_nop 0", -1)
    out, _ = executed(q, k, v, executor=Executor(patch), causal=True)
    assert_correct(out, q, k, v, causal=True)
    out, _ = executed(q, k, v, executor=Executor(patch, late=True), causal=True)
    with pytest.raises(AssertionError):
        assert_correct(out, q, k, v, causal=True)


def test_an_unknown_opcode_is_named():
    q, k, v = make_qkv(1, 128, 128, 1, 1, 64)
    with pytest.raises(ListingError, match="no model of opcode v_exp_f64"):
        executed(q, k, v, executor=Executor(changed("v_exp_f32", "v_exp_f64", 0)))
