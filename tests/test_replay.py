"""Recorded launches on other tensors: every address is the new call's, temporaries lie apart in one workspace."""

import dataclasses

import pytest
import torch
from helpers import assert_correct, make_qkv
from triton.tools.tensor_descriptor import TensorDescriptor

import zyfa
import zyfa.archs
from zyfa.config import AttentionConfig
from zyfa.kernels import launch
from zyfa.kernels.replay import Launch, Plan, Recorder, distinct


class Compiled:
    """Stands for a compiled kernel: remembers what it was launched with."""

    function, packed_metadata = 5, (4, 1, 0)

    def __init__(self):
        self.calls = []

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (stream, function, metadata) == (33, 5, (4, 1, 0)) and launch_metadata is enter is leave is None
        self.calls.append(((x, y, z), args))


@pytest.fixture(autouse=True)
def one_stream(monkeypatch, request):
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(Plan, "stream", lambda plan: 33)


class Kernel:
    """Stands for a jitted kernel of two tensors, a number and a constexpr."""

    arg_names = ("x", "y", "n", "BLOCK")

    def __init__(self):
        self.compiled = Compiled()

    def __getitem__(self, grid):
        return lambda *args, **constants: self.compiled


def record(x, y):
    kernel, recorder = Kernel(), Recorder()
    recorder.start(kernel, (7, 2), (x, y, 5), {"BLOCK": 64, "num_warps": 4})
    return kernel.compiled, recorder


def test_inputs_are_replaced_and_constants_kept():
    x, y = torch.zeros(8), torch.zeros(4)
    compiled, recorder = record(x, y)
    plan = Plan(recorder.launches, (x, None, y))
    new_x, new_y = torch.zeros(8), torch.zeros(4)
    plan.replay((new_x, None, new_y))
    assert compiled.calls == [((7, 2, 1), (new_x.data_ptr(), new_y.data_ptr(), 5, 64))]
    assert plan.workspace_bytes == 0


def test_temporaries_share_one_workspace_and_keep_their_offsets():
    x = torch.zeros(8)
    whole = torch.zeros(100)
    part, other = whole[10:], torch.zeros(3)
    compiled, recorder = record(whole, part)
    recorder.start(Kernel(), (1,), (x, other, 0), {"BLOCK": 1})
    plan = Plan(recorder.launches, (x,))
    plan.replay((x,))
    (_, (a, b, *_)), (_, (c, d, *_)) = compiled.calls[0], recorder.launches[1].compiled.calls[0]
    assert b - a == 40 and c == x.data_ptr()
    assert d - a == 512  # 400 bytes rounded up to the allocator's 256
    assert plan.workspace_bytes == 768


def test_one_tensor_given_twice_is_replayed_with_two():
    x = torch.zeros(8)
    inputs = distinct((x, None, x, x))
    assert inputs[0] is x and inputs[1] is None and len({id(t) for t in inputs}) == 4
    assert {t.data_ptr() for t in inputs if t is not None} == {x.data_ptr()}
    compiled, recorder = record(inputs[0], inputs[2])
    y, z = torch.zeros(8), torch.zeros(8)
    Plan(recorder.launches, inputs).replay((y, None, z, x))
    assert compiled.calls[0][1][:2] == (y.data_ptr(), z.data_ptr())


def test_a_call_on_one_tensor_thrice_leaves_a_plan_for_three(monkeypatch):
    """Through attention_forward: self-attention of one tensor first, then other tensors of the same layout."""
    compiled = Compiled()
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch.Recorder, "start", lambda self, kernel, grid, args, constants: self.launches.append(
        Launch(compiled, (1, 1, 1), args)))  # fmt: skip
    x, (q, k, v) = torch.zeros(1, 64, 2, 32).bfloat16(), make_qkv(1, 64, 64, 2, 2, 32)
    config = zyfa.AttentionConfig(64, 64, 4, 1)
    launch.attention_forward(x, x, x, config=config, arch="gfx950")
    out, _ = launch.attention_forward(q, k, v, config=config, arch="gfx950")
    ((_, args),) = compiled.calls
    assert args[:4] == tuple(t.data_ptr() for t in (q, k, v, out))


def test_descriptors_move_with_their_base():
    x = torch.zeros(64, 64)
    descriptor = TensorDescriptor(x, [64, 64], [64, 1], [16, 16])
    compiled, recorder = record(descriptor, x)
    new = torch.zeros(64, 64)
    Plan(recorder.launches, (x,)).replay((new,))
    moved = compiled.calls[0][1][0]
    assert moved.base.data_ptr() == new.data_ptr() and descriptor.base is x
    assert (moved.shape, moved.strides, moved.block_shape) == (descriptor.shape, descriptor.strides, [16, 16])


def test_a_view_of_an_input_is_no_temporary():
    """Its address would be taken from the workspace."""
    x = torch.zeros(8, 8)
    _, recorder = record(x, x[1:])
    with pytest.raises(AssertionError, match="a view of an input"):
        Plan(recorder.launches, (x,))


def test_an_interpreted_kernel_is_not_replayable():
    kernel, recorder = Kernel(), Recorder()
    kernel.compiled = None
    recorder.start(kernel, (1,), (1, 2, 3), {"BLOCK": 1})
    assert not recorder.replayable


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8:per_tensor", "fp8:fast", "fp8:balanced", "fp8:accurate"])
@pytest.mark.parametrize("kind", ["pointers", "descriptors", "gluon"])
def test_replays_compute_what_first_calls_compute(precision, kind):
    key = zyfa.AttentionKey("bf16" if precision == "bf16" else "fp8", 128, 128, 8, 2, 1, 700, 700, True)
    config = dataclasses.replace(zyfa.archs.plain_config("sm90", key), tensor_descriptors=kind == "descriptors")
    if kind == "gluon":
        config = AttentionConfig(128, 128, 8, 2, recipe=config.recipe, variant="gluon")
    for seed in range(3):  # the first call records, the others replay on other tensors
        q, k, v = make_qkv(1, 700, 700, 8, 2, 128, device="cuda", seed=seed)
        out, lse = zyfa.attention(q, k, v, causal=True, precision=precision, config=config, return_lse=True)
        recipe = "none" if precision == "bf16" else zyfa.recipes.PRESETS[precision[4:]]
        assert_correct(out, q, k, v, recipe, "sm90", causal=True)
        assert torch.isfinite(lse).all()


@pytest.mark.gpu
def test_replays_can_be_captured_in_a_graph():
    q, k, v = make_qkv(1, 512, 512, 8, 2, 128, device="cuda")
    want = zyfa.attention(q, k, v, causal=True, precision="fp8:balanced")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = zyfa.attention(q, k, v, causal=True, precision="fp8:balanced")
    new = make_qkv(1, 512, 512, 8, 2, 128, device="cuda", seed=1)
    for old, fresh in zip((q, k, v), new, strict=True):
        old.copy_(fresh)
    graph.replay()
    assert_correct(out, *new, zyfa.recipes.PRESETS["balanced"], "sm90", causal=True)
    assert not torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_replay_of_self_attention_reads_all_three_tensors(precision):
    x = make_qkv(1, 256, 256, 4, 4, 64, device="cuda")[0]
    zyfa.attention(x, x, x, precision=precision)
    q, k, v = make_qkv(1, 256, 256, 4, 4, 64, device="cuda", seed=1)
    recipe = "none" if precision == "bf16" else zyfa.explain(q, k, v, precision=precision).config.recipe
    assert_correct(zyfa.attention(q, k, v, precision=precision), q, k, v, recipe, "sm90")
