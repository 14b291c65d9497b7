"""The recipes' claims, recomputed on samples of real activations, and what each step of a recipe must not change."""

import statistics

import pytest
import torch
from helpers import make_qkv

from zyfa.recipes import PRESETS, RECIPES, p_offset
from zyfa.reference import attention_ref, emulate, hadamard, relative_error, smooth, turned
from zyfa.tuner.inputs import CHECKOUT_ACTIVATIONS, load_activations
from zyfa.tuner.space import FP8_RECIPES, MAX_RECIPE_ERROR

SAMPLES = sorted(CHECKOUT_ACTIVATIONS.glob("*.npz"))


@pytest.fixture(scope="module")
def errors():
    """{recipe: [relative error of each sample]}, and which samples have head dim 128."""
    table, wide = {name: [] for name in RECIPES}, []
    for path in SAMPLES:
        q, k, v = load_activations(path)
        wide.append(q.shape[-1] == 128)
        ref = attention_ref(q, k, v, causal=True)
        for name in RECIPES:
            table[name].append(relative_error(emulate(q, k, v, name, causal=True), ref))
    return table, wide


def test_five_samples_of_two_head_dims_are_there(errors):
    assert len(SAMPLES) == 5 and sum(errors[1]) == 3


@pytest.mark.parametrize("name", RECIPES)
def test_worst_error_is_what_the_recipe_states(errors, name):
    assert max(errors[0][name]) == pytest.approx(RECIPES[name].worst_error, rel=0.02)


@pytest.mark.parametrize("preset, least", [("fast", 0.62), ("balanced", 0.62), ("accurate", 0.72)])
def test_presets_cut_the_error_of_per_tensor_fp8(errors, preset, least):
    table, wide = errors
    cuts = [1 - e / base for e, base in zip(table[PRESETS[preset]], table["tensor"], strict=True)]
    assert statistics.median(cut for cut, is_wide in zip(cuts, wide, strict=True) if is_wide) >= least
    assert min(cuts) > 0, "worse than per-tensor on a sample"


def test_only_recipes_that_are_safe_everywhere_are_searched(errors):
    assert all(max(errors[0][name]) < MAX_RECIPE_ERROR for name in FP8_RECIPES)
    assert PRESETS["balanced"] in FP8_RECIPES and "tensor" not in FP8_RECIPES


@pytest.mark.parametrize("width", [16, 64, 128])
def test_hadamard_is_orthogonal_and_symmetric(width):
    h = hadamard(width)
    torch.testing.assert_close(h @ h, torch.eye(width), rtol=1e-5, atol=1e-5)
    assert torch.equal(h, h.T)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.k_mean])
def test_smoothing_changes_no_logit_but_by_one_number_a_row(name):
    q, k, _ = (x.transpose(1, 2).float() for x in make_qkv(2, 40, 50, 4, 2, 32))
    q8, k8, q_mean, centred = smooth(q, k, RECIPES[name])
    logits = q8 @ k8.repeat_interleave(2, 1).transpose(-1, -2)
    if q_mean is not None:
        logits = logits + q_mean @ centred.repeat_interleave(2, 1).transpose(-1, -2)
    removed = q @ k.repeat_interleave(2, 1).transpose(-1, -2) - logits
    spread = (removed - removed.mean(-1, keepdim=True)).abs().max()
    scale = logits.abs().max()
    assert spread < 1e-5 * scale


@pytest.mark.parametrize("width, of_q", [(64, 8), (128, 8), (256, 16)])
def test_the_equaliser_is_exact_in_16_bits_and_nearest_in_ratio(width, of_q):
    """Its factors, read off the products of unit vectors: powers of two, of Q the nearest to s / of_q."""
    s, eye = torch.exp2(torch.linspace(-9.9, 9.9, width)), torch.eye(width)[None, None]
    h = hadamard(width).sign()
    t_q, t_k = ((m[0, 0] @ h / width).diagonal() for m in turned(eye, eye, s[None, None]))
    for t in (t_q, t_k):
        assert torch.equal(t.bfloat16().float(), t) and torch.equal(t.half().float(), t) and (t.frexp()[0] == 0.5).all()
    assert torch.equal(t_q * t_k, torch.full([width], 1 / width))
    assert (t_q * of_q / s).log2().abs().max() <= 0.5 + 1e-5


def test_equalising_goes_with_the_rotation():
    assert all(r.hadamard for r in RECIPES.values() if r.equalise)


def test_p_stays_in_range_of_its_format():
    assert {p_offset(r, "e4m3fn") for r in RECIPES.values()} == {0, 8}
    assert max(p_offset(r, "e4m3fnuz") for r in RECIPES.values()) == 7
