"""Calls of a signature seen before: right addresses, right plan, no stale one, and every error as on the first call."""

import pytest
import torch
from fake_gpu import addresses, qkv
from helpers import make_qkv
from test_interface import BAD_ARGUMENTS, BAD_SHAPES, GOOD

import zyfa
from zyfa import ready
from zyfa.config import AttentionConfig

A = AttentionConfig(64, 64, 4, 3)


pytestmark = [
    pytest.mark.usefixtures("nothing_shipped"),
    pytest.mark.filterwarnings("ignore:.*no tuned config:RuntimeWarning"),
]


def test_a_repeated_signature_is_launched_with_the_new_addresses(gpu, monkeypatch):
    zyfa.attention(*qkv(), causal=True)
    monkeypatch.setattr(zyfa.interface, "check_call", None)  # whoever checks again fails
    for seed in (1, 2):
        q, k, v = qkv(seed)
        out = zyfa.attention(q, k, v, causal=True)
        assert gpu.last().args[:4] == addresses(q, k, v, out) and gpu.recorded == 1
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert len(gpu.launches) == 3


def test_every_result_form_of_a_repeated_signature(gpu):
    q, k, v = qkv()
    given, sink = torch.empty_like(q), torch.zeros(4)
    for _ in range(2):
        out, lse = zyfa.attention(q, k, v, return_lse=True, sink=sink)
        assert (lse.shape, lse.dtype) == ((1, 4, 96), torch.float32)
        assert {*addresses(q, k, v, out, lse, sink)} <= {*gpu.last().args}
        assert zyfa.attention(q, k, v, out=given) is given
        assert gpu.last().args[3] == given.data_ptr()
    assert gpu.recorded == 2 and gpu.last().config.recipe == "none"


def test_heads_first_views_get_a_contiguous_output(gpu):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    for _ in range(2):
        out = zyfa.attention(q, k, v)
        assert out.is_contiguous() and not q.is_contiguous() and out.shape == q.shape


def test_the_value_head_dim_and_fp8_inputs_decide_the_output(gpu):
    q, k, v = make_qkv(1, 64, 64, 2, 2, 64, 32)
    scales = [torch.ones(1, 2)] * 3
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for _ in range(2):
        assert zyfa.attention(q, k, v).shape == (1, 64, 2, 32)
        out = zyfa.attention(*fp8, **{f"{n}_descale": s for n, s in zip("qkv", scales, strict=True)})
        assert (out.dtype, out.shape) == (torch.bfloat16, (1, 64, 2, 32))
    assert gpu.recorded == 2


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True}, {"softmax_scale": 0.5}, {"window_size": (16, 0)}, {"softcap": 2.0}, {"sink": torch.zeros(4)},
        {"precision": "fp8"}, {"precision": "fp8:accurate"}, {"config": A}, {"return_lse": True},
    ],
    ids=lambda change: " ".join(map(str, change)),
)  # fmt: skip
def test_every_argument_has_its_own_plan(gpu, change):
    """What is launched warm, with one signature after the other, is what is launched cold."""
    tensors = qkv()

    def launched(**same):
        start = len(gpu.launches)
        zyfa.attention(*tensors, **same)
        # Without addresses, and so without zeros: the address of an empty tensor is 0 when it is recorded.
        numbers = [[x for x in la.args if not isinstance(x, int) or 0 != x < 1 << 32] for la in gpu.launches[start:]]
        return [(la.kernel, la.config, n) for la, n in zip(gpu.launches[start:], numbers, strict=True)]

    cold = launched(), launched(**change)
    assert cold[0] != cold[1] and gpu.recorded == 2
    for _ in range(2):
        assert (launched(), launched(**change)) == cold
    assert gpu.recorded == 2


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_layout_and_alignment_of_each_tensor_have_their_own_plan(gpu, which):
    tensors = list(qkv())
    zyfa.attention(*tensors)
    x = tensors[which]
    padded = torch.zeros(*x.shape[:2], x.shape[2] + 1, 32, dtype=x.dtype)[:, :, : x.shape[2]]
    shifted = torch.zeros(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape)  # 8 bytes further
    for number, other in enumerate((padded, shifted), start=2):
        tensors[which] = other
        for _ in range(2):
            zyfa.attention(*tensors)
            assert gpu.recorded == number and gpu.last().args[which] == other.data_ptr()


def test_one_tensor_thrice_and_three_tensors_share_a_signature(gpu):
    x = torch.zeros(1, 64, 2, 32).bfloat16()
    zyfa.attention(x, x, x)
    q, k, v = make_qkv(1, 64, 64, 2, 2, 32)
    zyfa.attention(q, k, v)
    assert gpu.last().args[:3] == addresses(q, k, v) and gpu.recorded == 1
    zyfa.attention(x, x, x)
    assert gpu.last().args[:3] == addresses(x, x, x) and gpu.recorded == 1


def test_temporaries_of_each_call_lie_in_its_own_workspace(gpu, monkeypatch):
    made = []
    workspace = zyfa.kernels.replay.Plan.workspace

    def noted(plan):
        made.append(workspace(plan))
        return made[-1]

    monkeypatch.setattr(zyfa.kernels.replay.Plan, "workspace", noted)
    zyfa.attention(*qkv(), precision="fp8")
    for number in (1, 2):
        q, k, v = qkv(number)
        out = zyfa.attention(q, k, v, precision="fp8")
        attn, (lo, hi) = gpu.last(), (made[-1].data_ptr(), made[-1].data_ptr() + made[-1].numel())
        assert len(made) == number and attn.args[3] == out.data_ptr() and all(lo <= a < hi for a in attn.args[:3])
        assert gpu.last("quantize").args[:3] == addresses(q, k, v)


# errors


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("change, message", BAD_SHAPES, ids=[m for _, m in BAD_SHAPES])
def test_bad_shapes_raise_whatever_was_called_before(gpu, change, message, warm):
    good = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in GOOD.items()}
    bad = good | {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in change.items()}
    _raises_twice(ValueError, message, good, bad, warm)


OTHERS = [
    *BAD_ARGUMENTS,
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale"),
    ({"window_size": [-2, 0]}, ValueError, "at least -1"),
    ({"window_size": None}, TypeError, "window_size must be two integers"),
    ({"k": torch.zeros(1, 8, 2, 32).half()}, TypeError, "k is torch.float16"),
    ({"k": torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16, device="meta")}, ValueError, "on one device"),
    ({"v": torch.zeros(1, 8, 32, 2, dtype=torch.bfloat16).transpose(2, 3)}, ValueError, "contiguous in its last"),
    ({"k": [1.0]}, TypeError, "k must be a torch.Tensor"),
    ({"out": torch.zeros(1, 8, 4, 32, dtype=torch.bfloat16, device="meta")}, ValueError, "out must be"),
    ({"config": AttentionConfig(64, 48, 4, 1)}, ValueError, "config does not fit"),
    ({"config": AttentionConfig(64, 64, 4, 1, recipe="int8")}, ValueError, "config does not fit"),
    ({"precision": ["fp8"]}, ValueError, "precision must be one of"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("change, kind, message", OTHERS, ids=[f"{next(iter(c))}: {m}" for c, _, m in OTHERS])
def test_bad_arguments_raise_whatever_was_called_before(gpu, change, kind, message, warm):
    good = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in GOOD.items()}
    _raises_twice(kind, message, good, good | change, warm)


def _raises_twice(kind, message, good, bad, warm):
    for _ in range(2):
        if warm:
            zyfa.attention(**good)
        with pytest.raises(kind) as error:
            zyfa.attention(**bad)
        assert message in str(error.value)


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_gradients_are_refused_on_a_warm_signature(gpu, which):
    tensors = list(qkv())
    zyfa.attention(*tensors)
    tensors[which] = tensors[which].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="forward only"):
        zyfa.attention(*tensors)
    with torch.no_grad():
        zyfa.attention(*tensors)
    with torch.inference_mode():
        zyfa.attention(*tensors)
    assert gpu.recorded == 1 and gpu.last().args[which] == tensors[which].data_ptr()


def test_the_wrong_fp8_format_is_refused_every_time(gpu):
    fp8 = [x.to(torch.float8_e4m3fnuz) for x in qkv()]
    for _ in range(2):
        with pytest.raises(TypeError, match="the same bits mean other numbers"):
            zyfa.attention(*fp8)


# what is decided by values


def test_offsets_without_max_seqlen_are_read_every_time(gpu):
    q, k, v = (x[0] for x in qkv())
    offsets = torch.tensor([0, 40, 96], dtype=torch.int32)
    same = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    for lengths, longest in (((0, 40, 96), 56), ((0, 10, 96), 86), ((0, 40, 96), 56)):
        offsets.copy_(torch.tensor(lengths))
        zyfa.attention(q, k, v, **same)
        assert longest in gpu.last().args
    offsets.copy_(torch.tensor((0, 90, 40)))
    with pytest.raises(ValueError, match="must ascend"):
        zyfa.attention(q, k, v, **same)


def test_a_scale_in_a_tensor_is_read_every_time(gpu):
    scale = torch.tensor(0.5)
    for value in (0.5, 0.25):
        scale.fill_(value)
        zyfa.attention(*qkv(), softmax_scale=scale)
    scale.fill_(-1.0)
    with pytest.raises(ValueError, match="softmax_scale must be positive"):
        zyfa.attention(*qkv(), softmax_scale=scale)


def test_numbers_as_descales_are_filled_in_once(gpu):
    fp8 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    for _ in range(3):
        zyfa.attention(*fp8, q_descale=0.5)
        zyfa.attention(*fp8, q_descale=2)
    (half, two) = (call._used((None,) * 6)[3:] for call in ready._ready.values())
    assert [x.unique().item() for x in (*half, *two)] == [0.5, 1, 1, 2, 1, 1]
    assert {*addresses(*two)} <= {*gpu.last().args} and gpu.recorded == 1
    assert {*addresses(*half)} <= {*gpu.launches[-3].args}, "one launch moves V, one attends"


def test_one_element_as_descale_is_read_every_time(gpu):
    fp8, scale, seen = [x.to(torch.float8_e4m3fn) for x in qkv()], torch.ones(1), []

    def noted(*args):
        seen.append(expand(*args))
        return seen[-1]

    expand = zyfa.interface.expand_descale
    zyfa.attention(*fp8, k_descale=scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zyfa.interface, "expand_descale", noted)
        for value in (2.0, 3.0):
            scale.fill_(value)
            zyfa.attention(*fp8, k_descale=scale)
            assert seen[-1].unique().item() == value and seen[-1].shape == (1, 2)
            assert seen[-1].data_ptr() in gpu.last().args
    assert len(seen) == 2 and gpu.recorded == 1


def test_what_is_filled_in_during_a_capture_is_not_kept(gpu, monkeypatch):
    """It lies in the memory of the graph; and what is kept may be forgotten before the graph is."""
    fp8 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        zyfa.attention(*fp8)
        assert not ready._ready
    zyfa.attention(*fp8)
    (call,) = ready._ready.values()
    held = {*addresses(*call._used((None,) * 6)[3:])}
    zyfa.attention(*fp8)
    assert held <= {*gpu.last().args}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    zyfa.attention(*fp8)
    assert not held & {*gpu.last().args}


def test_descales_in_full_are_passed_as_they_are(gpu):
    fp8 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    zyfa.attention(*fp8, q_descale=torch.ones(1, 4), k_descale=torch.ones(1, 2), v_descale=torch.ones(1, 2))
    scales = torch.ones(1, 4), torch.ones(1, 2), torch.ones(1, 2)
    zyfa.attention(*fp8, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert {*addresses(*scales)} <= {*gpu.last().args} and gpu.recorded == 1 and ready._ready
