"""Calls of a signature seen before: right addresses, right plan, no stale one, and every error as on the first call."""

import dataclasses
import threading

import pytest
import torch
from databases import a_key, make_db
from fake_gpu import FakeGpu
from helpers import make_qkv
from test_interface import BAD_ARGUMENTS, BAD_SHAPES, GOOD

import zyfa
from zyfa import lookup, ready
from zyfa.config import AttentionConfig
from zyfa.tuning_db import reader

A, B = AttentionConfig(64, 64, 4, 3), AttentionConfig(64, 32, 4, 1)


@pytest.fixture(autouse=True)
def no_databases(monkeypatch, tmp_path):
    monkeypatch.setattr(reader, "DATA", tmp_path / "shipped")
    lookup.reset()
    yield
    lookup.reset()


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def qkv(seed=0, seqlen=96, dtype=torch.bfloat16):
    return make_qkv(1, seqlen, seqlen, 4, 2, 32, seed=seed, dtype=dtype)


def addresses(*tensors):
    return tuple(x.data_ptr() for x in tensors)


pytestmark = pytest.mark.filterwarnings("ignore:.*no tuned config:RuntimeWarning")


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
        numbers = [[x for x in la.args if not isinstance(x, int) or x < 1 << 32] for la in gpu.launches[start:]]
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


def test_numbers_as_descales_are_filled_in_every_time(gpu):
    fp8 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    for _ in range(3):
        zyfa.attention(*fp8, q_descale=0.5)
    assert gpu.recorded == 1 and not ready._ready


def test_descales_in_full_are_passed_as_they_are(gpu):
    fp8 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    zyfa.attention(*fp8, q_descale=torch.ones(1, 4), k_descale=torch.ones(1, 2), v_descale=torch.ones(1, 2))
    scales = torch.ones(1, 4), torch.ones(1, 2), torch.ones(1, 2)
    zyfa.attention(*fp8, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert {*addresses(*scales)} <= {*gpu.last().args} and gpu.recorded == 1 and ready._ready


# choices that change


def user_db(config, seqlen=96, **more):
    key = a_key(seqlen, head_dim=32, nheads=4, nheads_k=2, causal=False)
    return make_db(lookup.user_db_path(zyfa.device.device_of_sku("h200")), (key, {"config": config} | more))


def test_another_database_counts_after_reset_and_not_before(gpu):
    user_db(A)
    zyfa.attention(*qkv())
    lookup.user_db_path(zyfa.device.device_of_sku("h200")).unlink()
    user_db(B)
    zyfa.attention(*qkv())
    assert gpu.last().config == A
    lookup.reset()
    for _ in range(2):
        zyfa.attention(*qkv())
        assert gpu.last().config == B
    assert gpu.recorded == 2 and len(ready._ready) == 1


def test_zyfa_tuning_db_counts_after_reset(gpu, monkeypatch, tmp_path):
    user_db(A)
    zyfa.attention(*qkv())
    key = a_key(96, head_dim=32, nheads=4, nheads_k=2, causal=False)
    monkeypatch.setenv("ZYFA_TUNING_DB", str(make_db(tmp_path / "other.sqlite", (key, {"config": B}))))
    zyfa.attention(*qkv())
    assert gpu.last().config == A
    lookup.reset()
    zyfa.attention(*qkv())
    assert gpu.last().config == B


def test_a_withdrawn_config_is_used_by_no_signature_of_its_cell(gpu):
    user_db(A)
    zyfa.attention(*qkv())
    assert gpu.last().config == A
    gpu.fail = RuntimeError("ptxas died")
    with pytest.warns(RuntimeWarning, match="the default runs instead"):
        zyfa.attention(*qkv(seqlen=100))  # the same cell
    for seqlen in (100, 96, 100, 96):
        zyfa.attention(*qkv(seqlen=seqlen))
        assert gpu.last().config not in (A, None)
    zyfa.attention(*qkv(), config=A)
    assert gpu.last().config == A, "the caller's own config is the caller's"


def test_a_failing_config_of_the_caller_fails_every_time(gpu):
    zyfa.attention(*qkv())
    for _ in range(2):
        gpu.fail = RuntimeError("ptxas died")
        with pytest.raises(RuntimeError, match="ptxas died"):
            zyfa.attention(*qkv(), config=A)


def test_equal_configs_of_each_call_share_the_record(gpu):
    for number in range(3):
        zyfa.attention(*qkv(number), config=dataclasses.replace(A))
    assert gpu.recorded == 1 and gpu.last().config == A


def test_log_prints_once_for_each_cell(gpu, monkeypatch, capfd):
    monkeypatch.setenv("ZYFA_LOG", "config")
    for seqlen in (96, 96, 100, 96):
        zyfa.attention(*qkv(seqlen=seqlen))
    assert capfd.readouterr().err.count("zyfa: device") == 1


# what is kept


def test_signatures_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(ready, "MAX_READY", 4)
    for seqlen in (*range(64, 74), 64):
        q, k, v = qkv(seqlen=seqlen)
        for _ in range(2):
            zyfa.attention(q, k, v)
            assert gpu.last().args[:3] == addresses(q, k, v) and len(ready._ready) <= 4


def test_no_tensor_of_a_call_is_kept(gpu):
    import gc
    import weakref

    tensors = [*qkv(), torch.zeros(4)]
    refs = [weakref.ref(x) for x in tensors]
    zyfa.attention(*tensors[:3], sink=tensors[3], precision="fp8")
    gpu.launches.clear()
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4 and ready._ready


class Marked(torch.Tensor):
    """A subclass, whose layout may not be all that there is to it."""


@pytest.mark.parametrize("name", ["q", "sink"])
def test_subclasses_are_checked_every_time(gpu, name):
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v, "sink": torch.zeros(4)}
    zyfa.attention(**given)
    known = len(ready._ready)
    zyfa.attention(**given | {name: given[name].as_subclass(Marked)})
    assert len(ready._ready) == known and gpu.recorded == 1


def test_threads_launch_what_they_ask_for(gpu):
    """Every launch has the tensors of one call, whoever runs beside it."""
    calls = [qkv(seed) for seed in range(4)]
    zyfa.attention(*calls[0], precision="fp8")
    wanted = {addresses(*call) for call in calls}

    def work(call):
        for _ in range(50):
            zyfa.attention(*call, precision="fp8")

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quantised = [la.args[:3] for la in gpu.launches if la.kernel == "quantize"]
    assert len(quantised) == 201 and {*quantised} == wanted and gpu.recorded == 1
