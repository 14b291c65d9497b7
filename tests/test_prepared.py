"""zyfa.prepare: the prepared callable launches what attention would, holds its workspace, and refuses other layouts."""

import dataclasses

import pytest
import torch
from fake_gpu import FakeGpu, addresses, qkv
from helpers import assert_correct, make_qkv

import zyfa
from zyfa import lookup, ready
from zyfa.archs import plain_config

on_cpu = pytest.mark.filterwarnings("ignore:.*no tuned config:RuntimeWarning")


@pytest.fixture
def gpu(monkeypatch):
    yield FakeGpu(monkeypatch)
    lookup.reset()


@on_cpu
def test_it_launches_with_the_addresses_of_its_call(gpu):
    f = zyfa.prepare(*qkv(), causal=True)
    for seed in (1, 2):
        q, k, v = qkv(seed)
        out = f(q, k, v)
        assert gpu.last().args[:4] == addresses(q, k, v, out) and out.shape == q.shape
        given = torch.empty_like(q)
        assert f(q, k, v, out=given) is given and gpu.last().args[3] == given.data_ptr()
    assert gpu.recorded == 1 and len(gpu.launches) == 5


@on_cpu
def test_bound_tensors_are_passed_and_the_lse_is_new(gpu):
    sink = torch.zeros(4)
    f = zyfa.prepare(*qkv(), sink=sink, return_lse=True)
    (out, lse), (_, other) = f(*qkv(1)), f(*qkv(2))
    assert lse.shape == (1, 4, 96) and lse.data_ptr() != other.data_ptr() and out.shape == (1, 96, 4, 32)
    assert {*addresses(sink, other)} <= {*gpu.last().args}


@on_cpu
def test_numbers_as_descales_are_filled_in_once(gpu):
    fp8 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    f = zyfa.prepare(*fp8, q_descale=0.5, k_descale=torch.tensor(2.0))
    first = gpu.last().args
    f(*fp8)
    held = f._extras[3:]
    assert [x.unique().tolist() for x in held] == [[0.5], [2.0], [1.0]]
    assert {*addresses(*held)} <= {*gpu.last().args} and {*addresses(*held)} <= {*first}


class Packed:
    """Stands for packed launches: notes (stream, workspace) of each run."""

    def __init__(self):
        self.runs = []

    def run(self, addresses, stream, base):
        self.runs.append((stream, base))


def packed(f):
    """The prepared callable, its launches packed as on an NVIDIA GPU."""
    made, plan = Packed(), f.ready.plan
    plan._packed, plan.base_bytes = [made], plan.workspace_bytes
    return made


@on_cpu
def test_each_stream_has_its_own_workspace(gpu):
    f = zyfa.prepare(*qkv(), precision="fp8")
    made = packed(f)
    for gpu.stream in (7, 8, 7, 8):
        f(*qkv(1))
    (one, two), again = dict(made.runs[:2]), made.runs[2:]
    assert (one, two) == (7, 8) and again == made.runs[:2]
    assert len({base for _, base in made.runs}) == 2 and all(base for _, base in made.runs)


@on_cpu
def test_bf16_needs_no_workspace(gpu):
    f = zyfa.prepare(*qkv())
    made = packed(f)
    f(*qkv(1))
    assert made.runs == [(7, 0)] and not f._workspaces


WRONG = [
    ("q", lambda x: x[:, :90], "got (1, 90, 4, 32)"),
    ("k", lambda x: x.half(), "of torch.float16"),
    ("v", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "with strides (6144, 32, 3072, 1)"),
    ("k", lambda x: x.to("meta"), "on meta"),
    ("q", lambda x: torch.zeros(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape), "8 bytes behind a multiple of 16"),
    ("out", lambda x: x[:, :90], "got (1, 90, 4, 32)"),
    ("out", lambda x: x.float(), "of torch.float32"),
    ("out", lambda x: torch.zeros(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape), "8 bytes behind a multiple of 16"),
]


@pytest.fixture(params=["quick", "plain"])
def with_and_without_guards(request, monkeypatch):
    """The second as under a torch that lacks what torch.compile guards its graphs with."""
    assert ready.TensorGuards is not None
    if request.param == "plain":
        monkeypatch.setattr(ready, "TensorGuards", None)


@on_cpu
@pytest.mark.parametrize("name, change, message", WRONG, ids=[f"{name} {message}" for name, _, message in WRONG])
def test_other_layouts_are_refused(gpu, with_and_without_guards, name, change, message):
    q, k, v = qkv()
    f = zyfa.prepare(q, k, v)
    given = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    launched = len(gpu.launches)
    with pytest.raises(ValueError, match=f"{name} was prepared as") as error:
        f(**given | {name: change(given[name])})
    assert message in str(error.value) and len(gpu.launches) == launched
    f(**given)


@on_cpu
def test_what_is_no_plain_tensor_or_wants_gradients_is_refused(gpu, with_and_without_guards):
    q, k, v = qkv()
    f = zyfa.prepare(q, k, v)
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor, got list"):
        f(q, [1.0], v)
    with pytest.raises(TypeError, match=r"out must be a torch\.Tensor, got list"):
        f(q, k, v, out=[1.0])
    with pytest.raises(NotImplementedError, match="forward only"):
        f(q.clone().requires_grad_(), k, v)
    parameter = torch.nn.Parameter(q)
    with torch.no_grad():
        f(parameter, k, v)
    assert gpu.last().args[0] == q.data_ptr()


@on_cpu
def test_it_is_quick_again_in_another_mode(gpu, monkeypatch):
    """Modes that tensors carry, such as inference mode, are no reason to compare layouts on every call."""
    q, k, v = qkv()
    f = zyfa.prepare(q, k, v)
    slow = []
    monkeypatch.setattr(f, "_require", lambda **given: slow.append([*given]))
    f(q, k, v, out=torch.empty_like(q))
    assert not slow
    with torch.inference_mode():
        for _ in range(3):
            f(*qkv(1))
        assert len(slow) == 1 and gpu.last().args[1] != k.data_ptr()
    f(q, k, v)
    assert len(slow) == 2 and gpu.last().args[:3] == addresses(q, k, v)


class Tagged(torch.Tensor):
    pass


OTHERS = {
    "shorter": lambda x: x[:, :90], "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "half": lambda x: x.half(), "meta": lambda x: x.to("meta"), "gradient": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x), "subclass": lambda x: x.as_subclass(Tagged),
    "flat": lambda x: x.flatten(), "list": lambda x: x.tolist(), "none": lambda x: None,
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("place", range(3))
def test_the_quick_test_passes_equal_layouts_only(place, change):
    given = list(qkv())
    test = ready.quick_test(*given)
    assert test(*qkv(1)) and test(*(x.clone().requires_grad_().detach() for x in given))
    given[place] = change(given[place])
    assert not test(*given)


@on_cpu
def test_the_config_stays_when_choices_change(gpu):
    config = zyfa.AttentionConfig(64, 64, 4, 3)
    f = zyfa.prepare(*qkv(), config=config)
    lookup.reset()
    f(*qkv())
    assert gpu.last().config == config and gpu.recorded == 1


def test_arguments_are_those_of_attention():
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        zyfa.prepare(*qkv(), casual=True)
    with pytest.raises(TypeError, match="prepare takes no out"):
        zyfa.prepare(*qkv(), out=torch.empty(1))
    with pytest.raises(ValueError, match="precision must be one of"):
        zyfa.prepare(*qkv(), precision="fp4")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_on_the_cpu_it_is_attention(precision):
    f = zyfa.prepare(*qkv(), causal=True, precision=precision, return_lse=True)
    other, out = qkv(1), torch.empty_like(qkv()[0])
    for got, want in zip(
        f(*other), zyfa.attention(*other, causal=True, precision=precision, return_lse=True), strict=True
    ):
        assert torch.equal(got, want)
    assert f(*other, out=out)[0] is out and torch.equal(out, f(*other)[0])
    with pytest.raises(ValueError, match="q was prepared as"):
        f(other[0][:, :50], *other[1:])


def test_inside_a_compiled_region_it_is_the_operator():
    q, k, v = qkv()
    f = zyfa.prepare(q, k, v, causal=True)
    compiled = torch.compile(lambda q, k, v: f(q, k, v) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), zyfa.attention(q, k, v, causal=True) * 2)


# on a GPU

PRECISIONS = ["bf16", "fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate"]


def on_gpu(seed=0, seqlen=700):
    return make_qkv(1, seqlen, seqlen, 8, 2, 128, device="cuda", seed=seed)


def arguments(precision, descriptors):
    key = zyfa.AttentionKey("bf16" if precision == "bf16" else "fp8", 128, 128, 8, 2, 1, 700, 700, True)
    arch = zyfa.device.current_device(0).arch
    descriptors = descriptors and arch == "sm90"
    config = dataclasses.replace(plain_config(arch, key), tensor_descriptors=descriptors)
    return {"causal": True, "precision": precision, "config": config, "return_lse": True}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_first_launch_replay_and_prepared_agree_bit_for_bit(precision, descriptors, monkeypatch):
    """The first launch of the other signature goes through Triton, the replays through the driver."""
    from zyfa import ready
    from zyfa.kernels import launch

    same = arguments(precision, descriptors)
    for seed in range(3):
        monkeypatch.setattr(launch, "_plans", {})
        monkeypatch.setattr(ready, "_ready", {})
        q, k, v = on_gpu(seed)
        first = zyfa.attention(q, k, v, **same)
        if torch.version.cuda:
            assert all(plan._packed for plan in launch._plans.values())
        f = zyfa.prepare(*on_gpu(9), **same)
        other = zyfa.attention(*on_gpu(8), **same)  # moves every address
        for result in (zyfa.attention(q, k, v, **same), f(q, k, v), f(q, k, v)):
            assert all(torch.equal(x, y) for x, y in zip(result, first, strict=True))
        assert not torch.equal(first[0], other[0])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8:balanced"])
def test_a_prepared_callable_on_two_streams(precision):
    calls = [on_gpu(seed, 1000) for seed in range(2)]
    f = zyfa.prepare(*calls[0], causal=True, precision=precision)
    want = [zyfa.attention(*call, causal=True, precision=precision) for call in calls]
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(20):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                outs.append(f(*call))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[i % 2]) for i, out in enumerate(outs))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8:balanced"])
def test_a_prepared_callable_inside_a_capture(precision):
    q, k, v = on_gpu()
    f, out = zyfa.prepare(q, k, v, causal=True, precision=precision), torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f(q, k, v, out=out)
    for x, fresh in zip((q, k, v), on_gpu(1), strict=True):
        x.copy_(fresh)
    f(*on_gpu(2))  # a call outside has another workspace
    graph.replay()
    assert torch.equal(out, zyfa.attention(*on_gpu(1), causal=True, precision=precision))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.5, "one", "full"])
def test_fp8_inputs_with_every_form_of_a_descale(scale):
    """First call, replays, prepared and captured calls agree."""
    fp8, other = ([x.to(torch.float8_e4m3fn) for x in on_gpu(seed)] for seed in range(2))
    forms = {"one": torch.full((1,), 0.5, device="cuda"), "full": torch.full((1, 2), 0.5, device="cuda")}
    same = {"causal": True, "v_descale": forms.get(scale, scale)}
    plain = torch.full((1, 2), 0.5 if scale else 1.0, device="cuda")
    want = zyfa.attention(*other, causal=True, v_descale=plain)
    f = zyfa.prepare(*fp8, **same)
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        assert torch.equal(zyfa.attention(*other, **same), want) and torch.equal(f(*other), want)
    with torch.cuda.graph(graph):
        out = zyfa.attention(*fp8, **same)
    for x, fresh in zip(fp8, other, strict=True):
        x.copy_(fresh)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_a_tensor_on_the_host_is_refused_on_a_warm_signature():
    q, k, v = on_gpu()
    for _ in range(2):
        zyfa.attention(q, k, v)
        with pytest.raises(ValueError, match="q, k and v must be on one device; k is on cpu"):
            zyfa.attention(q, k.cpu(), v)


@pytest.mark.gpu
def test_replays_from_a_fresh_thread():
    """It has no CUDA context of its own before the launch."""
    import threading

    q, k, v = on_gpu()
    f, outs = zyfa.prepare(q, k, v, causal=True), [torch.zeros_like(q)]
    thread = threading.Thread(target=lambda: outs.append(f(q, k, v, out=outs[0])))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(outs) == 2
    assert_correct(outs[0], q, k, v, causal=True)
