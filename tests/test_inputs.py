"""Samples hold what was captured, and each family has the difficulty that it is named for."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuner.inputs import CHECKOUT_ACTIVATIONS, FAMILIES, TILE, Shape, load_activations

SAMPLES = sorted(CHECKOUT_ACTIVATIONS.glob("*.npz"))
SHAPE = Shape(1, 512, 4, 2, 64)


def logits_of(q, k):
    """(batch, nheads, seqlen, seqlen) in float64."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5


def test_samples_are_the_five_described_ones_and_small():
    readme = (CHECKOUT_ACTIVATIONS / "README.md").read_text()
    assert len(SAMPLES) == 5 and all(f"`{path.name}`" in readme for path in SAMPLES)
    assert sum(path.stat().st_size for path in CHECKOUT_ACTIVATIONS.iterdir()) <= 4 << 20


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_sample_has_the_layout_of_a_call_and_the_stored_bits(path):
    q, k, v = load_activations(path)
    head_dim = 128 if "1.5b" in path.name else 64
    nheads, nheads_k = (6, 3) if "smollm2" in path.name else (4, 2)
    assert q.shape == (1, 512, nheads, head_dim) and k.shape == v.shape == (1, 512, nheads_k, head_dim)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    with np.load(path) as stored:
        bits = int(stored["k"][1, 7, 3])
        assert len(stored["token_ids"]) == 512 and stored["q_heads"].shape == (nheads,)
    assert int(k[0, 7, 1, 3].view(torch.int16)) == bits


def test_sample_shows_what_random_numbers_hide():
    """Layer 0 of the 1.5B model: per-tensor FP8 makes an error of more than half, and K minus its mean repairs it."""
    q, k, v = load_activations(CHECKOUT_ACTIVATIONS / "qwen25coder-1.5b_prose_S512_L00.npz")
    ref = attention_ref(q, k, v, causal=True)
    assert relative_error(emulate(q, k, v, "tensor", causal=True), ref) > 0.5
    centred = k.float() - k.float().mean(1, keepdim=True)
    assert relative_error(attention_ref(q, centred, v, causal=True), ref) < 1e-5
    assert relative_error(emulate(q, centred.bfloat16(), v, "tensor", causal=True), ref) < 0.1


@pytest.mark.parametrize(
    "arrays, text",
    [
        ({"q": np.zeros((2, 4, 16), np.int16)}, "lacks ['k', 'v']"),
        (dict.fromkeys("qkv", np.zeros((2, 4, 16), np.float32)), "q is float32"),
        (dict.fromkeys("qkv", np.zeros((4, 16), np.int16)), "(4, 16)"),
    ],
)
def test_a_file_that_is_no_sample_is_named(tmp_path, arrays, text):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        load_activations(path)
    assert str(path) in str(error.value)


def test_default_folder_belongs_to_the_checkout():
    assert Path(__file__).parent / "data" / "activations" == CHECKOUT_ACTIVATIONS


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_a_function_of_shape_and_seed(name):
    shape = Shape(2, 160, 6, 3, 24)
    first, again, other = FAMILIES[name](shape, 1), FAMILIES[name](shape, 1), FAMILIES[name](shape, 2)
    assert [tuple(x.shape) for x in first] == [(2, 160, 6, 24), (2, 160, 3, 24), (2, 160, 3, 24)]
    assert all(x.dtype == torch.bfloat16 and torch.isfinite(x).all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_outlier_channels():
    q, k, _ = FAMILIES["outlier_channels"](SHAPE, 0)
    k_means, q_means = k.float().mean(1).abs(), q.float().mean(1).abs()
    assert ((k_means > 15) == (torch.arange(64) % 16 == 1)).all(), "four channels, in every head"
    assert (q_means[..., 0] > 15).all() and (q_means[..., 1:] < 1).all()


@pytest.mark.parametrize("name, token", [("sink", 0), ("late_sink", 384)])
def test_sinks_take_most_of_the_mass_and_give_nothing(name, token):
    q, k, v = FAMILIES[name](SHAPE, 0)
    mass = logits_of(q, k).softmax(-1).mean((0, 1, 2))
    assert mass.argmax() == token and 0.75 < mass[token] < 0.97
    assert v[:, token].float().std() < 0.02 < v[:, token + 1].float().std()


def test_underflow_loses_everything_without_a_p_offset():
    q, k, v = FAMILIES["underflow"](SHAPE, 0)
    logits = logits_of(q, k)
    assert (logits[..., 0] - 8).abs().max() < 0.3
    p = (logits - logits.amax(-1, keepdim=True)).exp()
    assert (p[..., 0] == 1).all() and p[..., 1:].max() < 2.0**-10  # rounds to 0 in e4m3
    assert (p * 2.0**8)[..., 1:].min() > 2.0**-6  # a normal number of e4m3
    ref = attention_ref(q, k, v)
    assert relative_error(emulate(q, k, v, "tensor"), ref) == 1.0, "the baseline has no offset"
    assert relative_error(emulate(q, k, v, "block"), ref) < 0.1


def test_staircase_brings_a_new_maximum_in_every_tile():
    q, k, _ = FAMILIES["staircase"](SHAPE, 0)
    tiles = logits_of(q, k).unflatten(-1, (4, TILE)).mean(-1).mean((0, 1, 2))
    torch.testing.assert_close(tiles - tiles[0], torch.arange(4.0, dtype=torch.float64), rtol=0, atol=0.1)


def test_long_staircase_stays_in_range():
    q, k, _ = FAMILIES["staircase"](Shape(1, 64 * TILE, 1, 1, 64), 0)
    last = logits_of(q[:, :16], k[:, -TILE:])
    assert 31 < last.mean() < 33
