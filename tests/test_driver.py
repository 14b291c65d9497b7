"""Launches packed for the CUDA driver: what the fake driver reads back is what Triton's launcher would have passed."""

import ctypes
import dataclasses
import functools
import itertools
import threading

import pytest
import torch
from fake_gpu import FakeDriver
from helpers import make_qkv

from zyfa.archs import plain_config
from zyfa.config import AttentionKey
from zyfa.kernels import driver, replay
from zyfa.kernels.driver import _entry_sizes
from zyfa.kernels.launch import _start
from zyfa.kernels.replay import Compiler, Launch, Plan
from zyfa.tuner.compile import _target


class Recorder:
    """Compiles for sm90 and records, as if it had launched."""

    def __init__(self):
        self.launches = []

    def start(self, kernel, grid, args, constants):
        compiled = Compiler().start(kernel, grid, args, constants)
        compiled.module, compiled.function = object(), 1000 + len(self.launches)  # loaded, as far as anybody asks
        constexprs = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        self.launches.append(Launch(compiled, (*grid, 1, 1)[:3], args + constexprs))
        return compiled


def inputs_of(seed=0):
    q, k, v = make_qkv(1, 200, 200, 4, 2, 64, seed=seed)
    return (q, k, v, torch.empty_like(q), *[None] * 7)


@functools.cache
def recorded(precision: str, descriptors: bool):
    """(launches, inputs) of a causal call on sm90."""
    key = AttentionKey(precision, 64, 64, 4, 2, 1, 200, 200, True)
    config = dataclasses.replace(plain_config("sm90", key), tensor_descriptors=descriptors)
    recorder, inputs = Recorder(), inputs_of()
    with _target("sm90"):
        _start(recorder, inputs, config, "sm90", None, (-1, 0), 0.0, None, None)
    return recorder.launches, inputs


CASES = [("bf16", False), ("bf16", True), ("fp8", True)]


@pytest.fixture(params=CASES, ids=["bf16", "bf16 descriptors", "fp8 descriptors"])
def record(request):
    return recorded(*request.param)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "driver", fake.functions)
    monkeypatch.setattr(replay.Plan, "stream", lambda plan: 33)
    return fake


def plan_of(cuda, record) -> Plan:
    launches, inputs = record
    plan = Plan(launches, inputs)
    assert plan._packed
    for compiled, *_ in launches:
        cuda.sizes[compiled.function] = _entry_sizes(compiled.asm["ptx"], compiled.metadata.name)
    return plan


def expected(launch: Launch, inputs, old) -> list:
    """The non-constexpr arguments, tensors replaced by those of another call; None for one in the workspace."""
    compiled, _, args = launch
    by_id = {id(x): new.data_ptr() for x, new in zip(old, inputs, strict=True) if x is not None}
    values = []
    for kind, x in zip(compiled.src.signature.values(), args, strict=True):
        if kind == "constexpr":
            continue
        if hasattr(x, "block_shape"):
            values += [by_id.get(id(x.base)), *x.shape, *x.strides]
        else:
            values.append(by_id.get(id(x)) if isinstance(x, torch.Tensor) else x)
    return [*values, 0, 0]


def test_parameters_are_what_the_kernel_reads(cuda, record):
    """On the tensors of another call: sizes as in the PTX, values as recorded, addresses as given."""
    launches, old = record
    plan, new = plan_of(cuda, record), inputs_of(seed=1)
    plan.replay(new)
    assert len(cuda.launches) == len(launches)
    for launch, (grid, block, shared, stream, function, values) in zip(launches, cuda.launches, strict=True):
        num_warps, _, shared_bytes = launch.compiled.packed_metadata
        assert (grid, block, stream) == (launch.grid, (32 * num_warps, 1, 1), 33)
        assert (shared, function) == (shared_bytes, launch.compiled.function)
        for got, want in zip(values, expected(launch, new, old), strict=True):
            if isinstance(want, float):
                assert ctypes.c_float.from_buffer_copy(got).value == pytest.approx(want, rel=1e-6)
            elif want is not None:
                assert int.from_bytes(got[:8], "little", signed=True) == want


def test_all_launches_but_the_first_may_start_early(cuda):
    """CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h; what runs before the first one never waits."""
    launches, _ = record = recorded("fp8", True)
    assert len(launches) == 3 and all("griddepcontrol.wait" in launch.compiled.asm["ptx"] for launch in launches)
    plan_of(cuda, record).run([256, 512, 768, 1024], 1 << 40)
    assert cuda.attributes == [[], [(6, 1)], [(6, 1)]]


def test_a_call_of_one_launch_waits_for_nothing(cuda):
    ((compiled, *_),), _ = record = recorded("bf16", True)
    assert "griddepcontrol" not in compiled.asm["ptx"]
    plan_of(cuda, record).run([256, 512, 768, 1024], 1 << 40)
    assert cuda.attributes == [[]]


def test_temporaries_lie_apart_in_the_workspace(cuda):
    launches, _ = record = recorded("fp8", True)
    plan = plan_of(cuda, record)
    base = 1 << 40
    plan.run([256, 512, 768, 1024], base)
    temporaries = {}
    for launch, (*_, values) in zip(launches, cuda.launches, strict=True):
        kinds = [k for k in launch.compiled.src.signature.values() if k != "constexpr"]
        tensors = [x for k, x in zip(launch.compiled.src.signature.values(), launch.args, strict=True) if k[0] == "*"]
        addresses = [int.from_bytes(v, "little") for k, v in zip(kinds, values, strict=False) if k[0] == "*"]
        if not any(k.startswith("tensordesc") for k in kinds):
            temporaries |= {a: x for a, x in zip(addresses, tensors, strict=True) if a >= base}
    spans = sorted((a, a + x.numel() * x.element_size()) for a, x in temporaries.items())
    assert len(spans) >= 6 and spans[-1][1] <= base + plan.workspace_bytes
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_tensor_maps_are_encoded_once_and_moved(cuda):
    plan = plan_of(cuda, recorded("bf16", True))
    (where, kind, rank, sizes, strides, box, steps, swizzle), _ = cuda.encoded
    assert where % 128 == 0 and (rank, steps) == (2, [1, 1]) and box == [64, 64]
    assert kind == 9 and swizzle == 3  # bfloat16, 128 bytes
    assert sizes == [128, 200] and strides == [2 * 128]  # two heads of 64 side by side in a row
    for first in (1 << 30, 1 << 31, 1 << 30):
        plan.run([first, first + 4096, first + 8192, first + 16384], 0)
        maps = [int.from_bytes(x[:8], "little") for x in cuda.launches[-1][-1] if len(x) == 128]
        assert maps == [first + 4096, first + 8192]
    assert len(cuda.encoded) == 2


@pytest.mark.parametrize("moved", [{"base": 1 << 41}, {"addresses": [256, 512, 768, 4096]}], ids=["workspace", "out"])
def test_whatever_moved_is_written_again(cuda, moved):
    """A run on the addresses of the one before writes none; the next one that differs in any writes all."""
    plan, here = plan_of(cuda, recorded("fp8", True)), {"addresses": [256, 512, 768, 1024], "base": 1 << 40}
    runs = []
    for place in (here, here, here | moved, here):
        cuda.launches.clear()
        plan.run(**place)
        runs.append(cuda.launches.copy())
    assert runs[0] == runs[1] == runs[3] != runs[2]


def test_a_new_stream_is_used_at_once(cuda, monkeypatch, record):
    plan = plan_of(cuda, record)
    for stream in (33, 44, 33):
        monkeypatch.setattr(replay.Plan, "stream", lambda plan, stream=stream: stream)
        plan.run([256, 512, 768, 1024], 1 << 40)
        assert {launch[3] for launch in cuda.launches[-len(record[0]) :]} == {stream}


def test_a_thread_without_a_context_enters_the_recorded_one(cuda, record):
    """Moving a tensor map needs a context as launching does; the launches are those of a thread that has one."""
    plan, moved = plan_of(cuda, record), [256, 512, 768, 1024]
    plan.run(moved, 1 << 40)
    want = cuda.launches.copy()
    plan.run([4096] * 4, 1 << 41)
    cuda.launches.clear()
    cuda.status = [201]
    plan.run(moved, 1 << 40)
    assert cuda.entered == [4711] and cuda.launches == want


def test_other_errors_are_raised_with_their_name(cuda, record):
    plan = plan_of(cuda, record)
    cuda.status = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700 in a replayed launch: some error"):
        plan.run([256, 512, 768, 1024], 0)
    plan.run([256, 512, 768, 1024], 0)
    assert len(cuda.launches) == len(record[0]), "the plan can still be run"


class Interrupted(list):
    """Is left after its first item."""

    def __iter__(self):
        yield self[0]
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing_half_moved(cuda):
    """Afterwards the addresses of the run before are again those of every launch."""
    plan = plan_of(cuda, recorded("fp8", True))
    (packed,), here, there = plan._packed, ([256, 512, 768, 1024], 1 << 40), ([4352, 4608, 4864, 5120], 1 << 41)
    plan.run(*here)
    want = cuda.launches.copy()

    def moved_then_interrupted(pointer, address):
        cuda.move(pointer, address)
        raise KeyboardInterrupt

    for name, broken in (
        ("_offsets", Interrupted(packed._offsets)),
        ("_driver", packed._driver._replace(move=moved_then_interrupted)),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(packed, name, broken)
            plan.run(*there)
        cuda.launches.clear()
        plan.run(*here)
        assert cuda.launches == want


def test_where_the_kernel_reads_other_parameters_triton_launches(cuda, record, monkeypatch):
    monkeypatch.setattr(driver, "_entry_sizes", lambda ptx, name: _entry_sizes(ptx, name)[:-1])
    assert Plan(*record)._packed == []


@pytest.mark.parametrize(
    "change",
    [{"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_cooperative_grid": True}],
    ids=str,
)
def test_what_only_tritons_launcher_does_is_left_to_it(cuda, record, change, monkeypatch):
    launches, inputs = record
    compiled = launches[-1].compiled
    monkeypatch.setattr(compiled, "metadata", compiled.metadata._replace(**change))
    assert Plan(launches, inputs)._packed == []


class Watched:
    """Stands for a compiled kernel that Triton launches."""

    function, packed_metadata = 5, (4, 1, 0)

    def __init__(self):
        self.calls = []

    def run(self, *args):
        self.calls.append(args)

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("hooked", grid, *args))


def small_plan(compiled, cells):
    x, temporary = torch.zeros(8), torch.zeros(100)
    plan = Plan([Launch(compiled, (3, 1, 1), (x, temporary, 5))], (x,))

    class Packed:
        def run(self, addresses, stream, base):
            cells.append((addresses, stream, base))

    plan._packed = [Packed()]
    return plan


def test_who_watches_launches_sees_replays(cuda, monkeypatch):
    import triton

    compiled, cells = Watched(), []
    plan = small_plan(compiled, cells)
    plan.run([64], 4096)
    assert cells == [([64], 33, 4096)] and compiled.calls == []
    hook = type(triton.knobs.runtime.launch_enter_hook)()
    hook.add(lambda metadata: None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    plan.run([64], 4096)
    ((*hooked, workspace, five),) = compiled.calls
    assert (hooked, five) == (["hooked", (3, 1, 1), 64], 5) and workspace != 4096 and len(cells) == 1


def test_while_another_thread_launches_nothing_is_shared(cuda):
    """Whoever finds the parameters in use launches through Triton with a workspace of its own."""
    compiled, inside, go = Watched(), threading.Event(), threading.Event()
    plan = small_plan(compiled, [])

    class Slow:
        def run(self, addresses, stream, base):
            inside.set()
            go.wait(10)

    plan._packed = [Slow()]
    thread = threading.Thread(target=plan.run, args=([64], 4096))
    thread.start()
    assert inside.wait(10)
    plan.run([128], 4096)
    go.set()
    thread.join()
    ((*_, address, workspace, five),) = compiled.calls
    assert (address, five) == (128, 5) and workspace != 4096
