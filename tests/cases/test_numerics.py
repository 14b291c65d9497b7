"""The public failure cases of numbers: scales, casts, accumulators, sentinels and bases."""

import itertools
import math

import pytest
import torch
from helpers import assert_correct, interpreted, make_qkv

import zyfa
from zyfa.archs import ARCHS
from zyfa.kernels.operands import shape_of
from zyfa.kernels.quantiser import Quantiser
from zyfa.kernels.replay import Recorder
from zyfa.recipes import FP8_MAX, PRESETS, RECIPES, p_offset
from zyfa.reference import attention_ref, emulate, relative_error

case = pytest.mark.case
SCALED = ["tensor", "head"]  # one scale a tensor, one a head


@case("O-NUM-01")
@pytest.mark.parametrize("precision", ["fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate"])
def test_zero_inputs_on_the_cpu(precision):
    q, k, v = make_qkv(2, 128, 128, 8, 8, 128)
    assert (zyfa.attention(q, k, v * 0, precision=precision) == 0).all()
    want = v.double().mean(1, keepdim=True).expand_as(v)
    base = emulate(torch.zeros_like(q), torch.zeros_like(k), v, PRESETS[precision[4:]])
    out = zyfa.attention(q, k * 0, v, precision=precision)
    assert relative_error(out, want) <= 1.5 * relative_error(base, want)


@case("O-NUM-01")
@pytest.mark.parametrize("recipe", SCALED)
@pytest.mark.parametrize("zero", ["v", "k", "head", "row"])
def test_zero_inputs_in_the_kernels(interpret, zero, recipe):
    q, k, v = make_qkv(1, 64, 130, 2, 2, 16)
    whole, _ = interpreted(interpret, q, k, v, recipe)
    {"v": v, "k": k, "head": v[:, :, 0], "row": k[:, 7]}[zero].zero_()
    out, lse = interpreted(interpret, q, k, v, recipe)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    if zero == "k":
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(130)), rtol=1e-6, atol=1e-6)
    if zero in ("v", "head"):
        assert (out[:, :, 0] == 0).all()
    if zero == "head" and recipe == "head":  # the floor of one head's scale leaves the other's bits alone
        assert torch.equal(out[:, :, 1], whole[:, :, 1])
    if zero != "v":
        assert_correct(out, q, k, v, recipe)


def cast_to_fp8(values, arch: str):
    """What the quantiser stores for bf16 values under a scale of one."""
    x = values.repeat(128, 2)[None, :, None].bfloat16()
    ones = tuple(torch.ones(1, 1) for _ in range(3))
    run = Quantiser(shape_of(x, x, x), RECIPES["head"], ARCHS[arch], Recorder())
    return run.run(x, x, x, ones).q[0, 0, 0, : len(values)].float()


@case("O-NUM-02")
@pytest.mark.parametrize("arch", ["gfx950", "sm90"])
def test_the_cast_saturates_and_keeps_nan(interpret, arch):
    values = torch.tensor([448, 449, 464, 465, 480, 1e4, -1e4, float("nan")])
    want = torch.tensor([448.0, 448, 448, 448, 448, 448, -448, float("nan")])
    torch.testing.assert_close(interpret(cast_to_fp8, values, arch), want, rtol=0, atol=0, equal_nan=True)


@case("O-NUM-03")
@pytest.mark.parametrize("seqlen_q", [1, 16])
def test_no_jump_where_a_key_tile_ends(seqlen_q):
    """Error against the length of the keys, on either side of every multiple of the tile."""
    lengths = [127, 128, 129, 130, 255, 256, 257, 1023, 1024, 1025]
    q, k, v = make_qkv(1, seqlen_q, 1025, 6, 1, 128)
    errors = []
    for n in lengths:
        out, ref = emulate(q, k[:, :n], v[:, :n], "block"), attention_ref(q, k[:, :n], v[:, :n])
        assert torch.nn.functional.cosine_similarity(out.double().flatten(), ref.flatten(), 0) >= 0.998
        errors.append(relative_error(out, ref))
    for before, after in itertools.pairwise(errors):
        assert after <= 1.5 * before, dict(zip(lengths, errors, strict=True))


@case("O-NUM-03")
@pytest.mark.parametrize("seqlen_k", [127, 128, 129, 257])
@pytest.mark.parametrize("BLOCK_N", [32, 64, 128])
def test_the_kernel_has_no_jump_either(interpret, BLOCK_N, seqlen_k):
    q, k, v = make_qkv(1, 16, seqlen_k, 1, 1, 128)
    out, _ = interpreted(interpret, q, k, v, "block", BLOCK_M=16, BLOCK_N=BLOCK_N)
    assert_correct(out, q, k, v, "block")


@case("O-NUM-03")
@pytest.mark.gpu
@pytest.mark.parametrize("BLOCK_N", [32, 64, 128])
@pytest.mark.parametrize("seqlen_q", [1, 16])
def test_no_jump_on_a_gpu(seqlen_q, BLOCK_N):
    config = zyfa.AttentionConfig(64, BLOCK_N, 4, 2, recipe="block")
    for n in (127, 128, 129, 130, 255, 256, 257, 1023, 1024, 1025):
        q, k, v = make_qkv(1, seqlen_q, n, 6, 1, 128, device="cuda")
        out = zyfa.attention(q, k, v, precision="fp8", config=config)
        assert_correct(out, q, k, v, "block")


@case("O-NUM-03")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8_format", FP8_MAX)
def test_p_stays_in_the_range_of_its_format(recipe, fp8_format):
    """P is at most 1 against the running maximum, so 2**offset bounds what is cast."""
    assert 2.0 ** p_offset(RECIPES[recipe], fp8_format) <= FP8_MAX[fp8_format]


def with_outlier_channels(seqlen: int, heads: int, device="cpu"):
    q, k, v = make_qkv(1, seqlen, seqlen, heads, heads, 128, device=device)
    k[..., ::32] += 30.0
    return q, k, v


@case("O-NUM-04")
def test_smoothing_saves_keys_with_outlier_channels():
    errors = {}
    for name, (q, k, v) in {
        "outlier": with_outlier_channels(512, 2),
        "normal": make_qkv(1, 512, 512, 2, 2, 128),
    }.items():
        k = k if name == "outlier" else torch.randn_like(k)
        ref = attention_ref(q, k, v)
        errors[name] = [relative_error(emulate(q, k, v, recipe), ref) for recipe in ("tensor", "head", "block-kmean")]
    per_tensor, per_head, smoothed = errors["outlier"]
    assert smoothed < 0.5 * min(per_tensor, per_head)
    assert errors["normal"][2] <= min(errors["normal"][:2])


@case("O-NUM-04")
@pytest.mark.parametrize("recipe", ["tensor", "head", "block-kmean"])
def test_outlier_channels_in_the_kernels(interpret, recipe):
    q, k, v = with_outlier_channels(128, 1)
    assert_correct(interpreted(interpret, q, k, v, recipe)[0], q, k, v, recipe)


@case("O-NUM-04")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate"])
def test_outlier_channels_on_a_gpu(precision):
    q, k, v = with_outlier_channels(4096, 8, "cuda")
    assert_correct(zyfa.attention(q, k, v, precision=precision), q, k, v, PRESETS[precision[4:]])


@case("O-NUM-05")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_logits_below_any_sentinel(interpret, causal):
    q, k = (torch.full((1, 64, 1, 128), x, dtype=torch.bfloat16) for x in (25.0, -25.0))
    v = make_qkv(1, 64, 64, 1, 1, 128)[2]
    seen = torch.arange(1, 65) if causal else torch.full((64,), 64)
    mean = v.double().cumsum(1)[:, seen - 1] / seen.view(1, -1, 1, 1)
    on_cpu = zyfa.attention(q, k, v, causal=causal, return_lse=True)
    for out, lse in (on_cpu, interpreted(interpret, q, k, v, causal=causal)):
        assert relative_error(out, mean) <= 2 * relative_error(mean.bfloat16(), mean)
        want = -80000 / math.sqrt(128) + seen.double().log()
        torch.testing.assert_close(lse[0, 0].double(), want, rtol=1e-6, atol=0)
    if not causal:
        assert on_cpu[1][0, 0, 0].item() == pytest.approx(-7066.91, abs=0.01)


@case("O-NUM-06")
def test_hopper_sums_leave_the_fp8_unit_after_every_tile(interpret):
    assert interpret(short_sum_of, "sm90") and not interpret(short_sum_of, "gfx950")


def short_sum_of(arch: str) -> bool:
    """The SHORT_SUM that an FP8 launch passes to the kernel."""
    from unittest import mock

    from zyfa.kernels import launch

    q, k, v = make_qkv(1, 16, 32, 1, 1, 16)
    config = zyfa.AttentionConfig(16, 32, 4, 1, recipe="block")
    launcher = mock.Mock()
    launch._start(launcher, (q, k, v, torch.empty_like(q), *[None] * 7), config, arch, None, (-1, -1), 0.0, None, None)
    return launcher.start.call_args.args[3]["SHORT_SUM"]


@case("O-NUM-06")
@pytest.mark.gpu
def test_fp8_error_does_not_grow_with_the_context():
    errors = []
    for seqlen_k in (4096, 32768, 131072):
        q, k, v = make_qkv(1, 128, seqlen_k, 4, 4, 128, device="cuda")
        v = v + 1.0
        errors.append(relative_error(zyfa.attention(q, k, v, precision="fp8"), attention_ref(q, k, v)))
    assert errors[2] <= 2 * errors[0], errors


def fp8_inputs(heads=2, heads_k=2, seqlen=48):
    return tuple(x.to(torch.float8_e4m3fn) for x in make_qkv(1, seqlen, seqlen, heads, heads_k, 32))


@case("O-NUM-07")
@pytest.mark.parametrize(
    "form", [float, torch.tensor, lambda x: torch.tensor([x]), lambda x: torch.full((1, 2), x)],
    ids=["number", "0-d", "one", "full"],
)  # fmt: skip
def test_k_scale_multiplies_logits_and_v_scale_the_output(form):
    q, k, v = fp8_inputs()
    out = zyfa.attention(q, k, v, k_descale=form(0.05), v_descale=form(0.25), softmax_scale=1.0)
    plain = zyfa.attention(q, k, v, softmax_scale=0.05)
    assert torch.equal(out, plain * 0.25)  # a power of two: exact
    out = zyfa.attention(q, k, v, k_descale=form(0.05), v_descale=form(0.2))
    exact = attention_ref(q.double(), k.double() * 0.05, v.double() * 0.2)
    base = emulate(q, k, v, "head", descales=(torch.ones(1, 2), torch.full((1, 2), 0.05), torch.full((1, 2), 0.2)))
    assert relative_error(out, exact) <= 1.5 * relative_error(base, exact)


@case("O-NUM-07")
def test_fp8_without_scales_means_one_and_a_cpu_scale_is_refused():
    from zyfa.checks import expand_descale

    q, k, v = fp8_inputs()
    ones = {f"{name}_descale": 1.0 for name in "qkv"}
    assert torch.equal(zyfa.attention(q, k, v), zyfa.attention(q, k, v, **ones))
    with pytest.raises(ValueError, match=r"k_descale must be on meta, got cpu: move it once, outside the hot path"):
        expand_descale("k_descale", torch.ones(1), 1, 2, torch.device("meta"))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="k_descale must be positive and finite"):
            zyfa.attention(q, k, v, k_descale=bad)


@case("O-NUM-07")
def test_scales_in_the_kernel(interpret):
    q, k, v = fp8_inputs()
    scales = torch.ones(1, 2), torch.full((1, 2), 0.05), torch.full((1, 2), 0.2)
    out, _ = interpreted(interpret, q, k, v, "head", descales=scales)
    exact = attention_ref(q.double(), k.double() * 0.05, v.double() * 0.2)
    assert relative_error(out, exact) <= 1.5 * relative_error(emulate(q, k, v, "head", descales=scales), exact)


@case("O-NUM-07")
def test_a_scale_of_zero_gives_no_nan_under_a_mask(interpret):
    q, k, v = fp8_inputs()
    scales = torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)
    out, lse = interpreted(interpret, q, k, v, "head", descales=scales, causal=True)
    torch.testing.assert_close(lse, torch.arange(1, 49).log().expand(1, 2, 48), rtol=1e-6, atol=1e-6)
    assert torch.isfinite(out).all()


@case("O-NUM-08")
def test_every_query_head_uses_its_own_scale(interpret):
    q, k, v = fp8_inputs(8, 2)
    scale = torch.linspace(0.5, 2.0, 8)[None]
    out = zyfa.attention(q, k, v, q_descale=scale)
    strided = torch.stack([scale[0], scale[0]], 1)[:, :1].t()
    assert not strided.is_contiguous() or strided.stride(1) != 1
    assert torch.equal(zyfa.attention(q, k, v, q_descale=strided), out)
    for head in (0, 5, 7):
        louder = scale.clone()
        louder[0, head] *= 1000
        changed = (zyfa.attention(q, k, v, q_descale=louder) != out).flatten(3).any(3).any(1)[0]
        assert changed.tolist() == [i == head for i in range(8)]
    ones = torch.ones(1, 2)
    in_kernel, _ = interpreted(interpret, q, k, v, "head", descales=(scale, ones, ones))
    exact = attention_ref(q.double() * scale[:, None, :, None].double(), k.double(), v.double())
    assert relative_error(in_kernel, exact) <= 1.5 * relative_error(out, exact)


@case("O-NUM-08")
@pytest.mark.parametrize("shape", [(1, 2), (8,), (8, 1), (2, 8)], ids=str)
def test_other_shapes_of_a_scale_raise(shape):
    q, k, v = fp8_inputs(8, 2)
    with pytest.raises(ValueError, match=r"q_descale must be a number, one element, or \(1, 8\); got shape"):
        zyfa.attention(q, k, v, q_descale=torch.ones(shape))
    assert torch.equal(zyfa.attention(q, k, v, q_descale=torch.ones(1)), zyfa.attention(q, k, v))


@case("O-NUM-09")
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_halves_merge_by_natural_lse(with_sink):
    """The sink goes to one of the parts: it is in the lse, and would count twice."""
    q, k, v = make_qkv(1, 64, 4096, 2, 1, 64)
    sink = torch.tensor([6.0, -2.0]) if with_sink else None
    whole, whole_lse = zyfa.attention(q, k, v, sink=sink, return_lse=True)
    a, lse_a = zyfa.attention(q, k[:, :2048], v[:, :2048], sink=sink, return_lse=True)
    b, lse_b = zyfa.attention(q, k[:, 2048:], v[:, 2048:], return_lse=True)
    lse = torch.logaddexp(lse_a, lse_b)
    weights = [(x - lse).exp().transpose(1, 2)[..., None] for x in (lse_a, lse_b)]
    merged = a.float() * weights[0] + b.float() * weights[1]
    assert (merged - whole.float()).abs().max() < 1e-3
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


@case("O-NUM-09")
def test_lse_of_the_kernel_is_natural(interpret):
    q, k, v = make_qkv(1, 16, 100, 1, 1, 16)
    lse = interpreted(interpret, q, k, v)[1]
    torch.testing.assert_close(lse.double(), attention_ref(q, k, v, return_lse=True)[1], rtol=1e-5, atol=1e-5)
    assert lse.dtype == torch.float32
