"""zyfa.attention on CPU tensors: the right numbers, and errors before anything runs."""

import pytest
import torch
from helpers import assert_correct, make_qkv

import zyfa
from zyfa.device import Device
from zyfa.interface import _check_fp8
from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref, emulate, relative_error

SHAPES = [(64, 64), (113, 203), (203, 113), (1, 217)]  # square, odd, rows with no key, one query


@pytest.mark.parametrize("nheads_k", [8, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", SHAPES)
def test_bf16_is_as_exact_as_bf16_can_be(seqlen_q, seqlen_k, causal, nheads_k):
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, 8, nheads_k, 64)
    out, lse = zyfa.attention(q, k, v, causal=causal, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and lse.dtype == torch.float32
    assert_correct(out, q, k, v, causal=causal)
    want = attention_ref(q, k, v, causal=causal, return_lse=True)[1]
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp8", "fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate"])
def test_fp8_on_cpu_is_the_emulation_of_the_recipe(precision):
    q, k, v = make_qkv(2, 150, 150, 4, 2, 64)
    out = zyfa.attention(q, k, v, causal=True, precision=precision)
    recipe = PRESETS[precision[4:] or "balanced"]
    assert torch.equal(out, emulate(q, k, v, recipe, causal=True))
    assert relative_error(out, attention_ref(q, k, v, causal=True)) > 0.005  # it did quantise


def test_precision_bf16_and_auto_never_quantise():
    q, k, v = make_qkv(1, 64, 64, 2, 2, 32, dtype=torch.float16)
    assert torch.equal(zyfa.attention(q, k, v, precision="bf16"), zyfa.attention(q, k, v))
    assert_correct(zyfa.attention(q, k, v), q, k, v)


def test_fp8_inputs_use_every_heads_own_scale():
    q, k, v = make_qkv(1, 96, 96, 4, 2, 32)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    qs, ks, vs = (
        torch.tensor([[1.0, 2.0, 0.5, 1000.0]]),
        torch.tensor([[0.5, 0.25]]),
        torch.tensor([[2.0, 3.0]]),
    )
    out = zyfa.attention(q8, k8, v8, q_descale=qs, k_descale=ks, v_descale=vs)
    assert out.dtype == torch.bfloat16
    plain = [x8.double() * s[:, None, :, None].double() for x8, s in ((q8, qs), (k8, ks), (v8, vs))]
    assert relative_error(out, attention_ref(*plain)) < 0.04  # P in e4m3 and the bf16 output


@pytest.mark.parametrize(
    "form",
    [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.full((2, 2), 0.5)],
    ids=["number", "0-d", "one", "full"],
)
def test_every_form_of_a_descale_agrees(form):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv(2, 64, 64, 2, 2, 32))
    want = zyfa.attention(q, k, v, k_descale=torch.full((2, 2), 0.5))
    assert torch.equal(zyfa.attention(q, k, v, k_descale=form), want)


def test_strided_views_need_no_copy_and_give_the_same():
    qkv = torch.randn(2, 70, 4 * 32 * 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    q, k, v = (x.unflatten(-1, (4, 32)) for x in qkv.chunk(3, -1))
    assert not q.is_contiguous()
    assert torch.equal(
        zyfa.attention(q, k, v, causal=True),
        zyfa.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True),
    )


def test_out_is_written_in_place():
    q, k, v = make_qkv(1, 64, 64, 2, 1, 32)
    out = torch.full_like(q, float("nan"))
    assert zyfa.attention(q, k, v, out=out) is out
    assert torch.equal(out, zyfa.attention(q, k, v))


def test_empty_inputs_give_empty_or_zero():
    q, k, v = make_qkv(2, 4, 8, 2, 1, 32)
    assert zyfa.attention(q[:0], k[:0], v[:0]).shape == (0, 4, 2, 32)
    assert zyfa.attention(q[:, :0], k, v).shape == (2, 0, 2, 32)
    out, lse = zyfa.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (out == 0).all() and (lse == float("-inf")).all() and lse.shape == (2, 2, 4)


def test_varlen_equals_one_call_per_sequence():
    q, k, v = (x[0] for x in make_qkv(1, 90, 120, 4, 2, 32))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 50, 50, 90], [0, 30, 70, 120]))
    out, lse = zyfa.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert out.shape == (90, 4, 32) and lse.shape == (4, 90)
    one, one_lse = zyfa.attention(q[None, 50:], k[None, 70:], v[None, 70:], causal=True, return_lse=True)
    assert torch.equal(out[50:], one[0]) and torch.equal(lse[:, 50:], one_lse[0])


GOOD = {"q": (1, 8, 4, 32), "k": (1, 8, 2, 32), "v": (1, 8, 2, 32)}
BAD_SHAPES = [
    ({"k": (1, 8, 3, 32), "v": (1, 8, 3, 32)}, "nheads 4 and nheads_k 3"),
    ({"k": (1, 8, 2, 16)}, "k must have the head_dim of q, 32, got 16"),
    ({"v": (1, 9, 2, 32)}, "k and v must agree"),
    ({"k": (2, 8, 2, 32), "v": (2, 8, 2, 32)}, "k must have the batch of q, 1, got 2"),
    ({"q": (8, 4, 32)}, "q must be (batch, seqlen, nheads, head_dim), got shape (8, 4, 32)"),
    ({"q": (1, 8, 4, 20), "k": (1, 8, 2, 20)}, "head_dim must be a multiple of 8 from 16 to 256, got 20"),
    ({"q": (1, 8, 4, 264), "k": (1, 8, 2, 264)}, "got 264"),
]


@pytest.mark.parametrize("change, message", BAD_SHAPES, ids=[m for _, m in BAD_SHAPES])
def test_bad_shapes_name_argument_and_value(change, message):
    shapes = GOOD | change
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with pytest.raises(ValueError) as error:
        zyfa.attention(**tensors)
    assert message in str(error.value)


BAD_ARGUMENTS = [
    ({"precision": "fp4"}, ValueError, "precision must be one of"),
    ({"window_size": 128}, TypeError, "window_size must be two integers"),
    ({"window_size": (-2, 0)}, ValueError, "at least -1"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"q_descale": 1.0}, ValueError, "belong to FP8 inputs"),
    ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, ValueError, "go together"),
    ({"sink": torch.zeros(3)}, ValueError, "sink must have shape (4,)"),
    ({"out": torch.zeros(1, 8, 4, 32)}, ValueError, "out must be (1, 8, 4, 32) of torch.bfloat16"),
]


@pytest.mark.parametrize("change, kind, message", BAD_ARGUMENTS, ids=[m for *_, m in BAD_ARGUMENTS])
def test_bad_arguments_raise_before_anything_runs(change, kind, message):
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in GOOD.items()}
    with pytest.raises(kind) as error:
        zyfa.attention(**tensors, **change)
    assert message in str(error.value)


def test_wrong_dtypes_are_named():
    q, k, v = (torch.zeros(s) for s in GOOD.values())
    with pytest.raises(TypeError, match=r"q is torch\.float32"):
        zyfa.attention(q, k, v)
    with pytest.raises(TypeError, match=r"k is torch\.float16, q is torch\.bfloat16"):
        zyfa.attention(q.bfloat16(), k.half(), v.half())


@pytest.mark.parametrize("arch, wrong", [("gfx950", "fnuz"), ("sm90", "fnuz"), ("gfx942", "fn")])
def test_the_other_fp8_format_raises_on_a_gpu(arch, wrong):
    """The same bits mean other numbers there: never reinterpreted."""
    q = torch.zeros(1, 8, 4, 32, dtype=getattr(torch, f"float8_e4m3{wrong}"))
    device = Device("amd" if arch.startswith("gfx") else "nvidia", arch, "some", 100)
    with pytest.raises(TypeError, match=f"q is torch.float8_e4m3{wrong}, but FP8 on {arch} is float8_e4m3"):
        _check_fp8(q, device)
    with pytest.raises(ValueError, match="which ZYFA has no kernels for; supported are gfx950, gfx942, sm90"):
        _check_fp8(q, Device("nvidia", "sm80", "a100", 108))


@pytest.mark.parametrize("name", ["k", "v", "sink", "cu_seqlens_k"])
def test_tensors_of_another_device_are_named(name):
    q, k, v = (x[0] for x in make_qkv(1, 8, 8, 4, 2, 32))
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    given = {"q": q, "k": k, "v": v, "sink": torch.zeros(4), "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    with pytest.raises(ValueError, match=name) as error:
        zyfa.attention(**given | {name: given[name].to("meta")})
    assert "meta" in str(error.value) and "cpu" in str(error.value)


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan"), float("inf")])
def test_scales_that_are_no_scales_raise(scale):
    q, k, v = make_qkv(1, 8, 8, 2, 1, 32)
    with pytest.raises(ValueError, match="softmax_scale must be positive and finite, got"):
        zyfa.attention(q, k, v, softmax_scale=scale)
    if scale:
        with pytest.raises(ValueError, match="softcap must be at least 0"):
            zyfa.attention(q, k, v, softcap=scale)


def test_a_call_that_needs_gradients_raises():
    q, k, v = make_qkv(1, 8, 8, 2, 1, 32)
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="forward only"):
        zyfa.attention(q, k, v)
    with torch.no_grad():
        assert zyfa.attention(q, k, v).shape == q.shape


def test_explain_says_that_cpu_tensors_ask_no_database():
    q, k, v = make_qkv(1, 8, 8, 2, 1, 32)
    assert "no database is asked" in str(zyfa.explain(q, k, v, causal=True))
