"""The public failure cases of graph capture and torch.compile."""

import pytest
import torch
from helpers import assert_correct, make_qkv, varlen

import zyfa
from zyfa.archs import default_config
from zyfa.config import AttentionKey
from zyfa.device import Device, device_of_sku
from zyfa.lookup import choose, describe

case = pytest.mark.case
MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def captured(call):
    """(graph, result) of a call captured after one call outside, as torch asks for."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@case("O-CAP-01")
@pytest.mark.filterwarnings("ignore:.*no tuned config:RuntimeWarning")
def test_a_miss_is_a_default_and_never_a_search():
    """No database has this cell: choosing takes the default config at once."""
    key = AttentionKey("bf16", 136, 136, 7, 7, 3, 777, 777, True)
    device = device_of_sku("mi355x")
    choice = choose(key, device)
    assert (choice.match, choice.config) == ("default", default_config(device.arch, key))


@case("O-CAP-01")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8:balanced"])
def test_a_miss_inside_a_capture_replays_the_right_values(precision):
    q, k, v = make_qkv(1, 777, 777, 7, 7, 136, device="cuda")
    graph, out = captured(lambda: zyfa.attention(q, k, v, causal=True, precision=precision))
    fresh = make_qkv(1, 777, 777, 7, 7, 136, device="cuda", seed=1)
    for x, y in zip((q, k, v), fresh, strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, zyfa.attention(*fresh, causal=True, precision=precision))


@case("O-CAP-01")
@pytest.mark.gpu
def test_a_packed_batch_without_max_seqlen_is_captured_without_waiting():
    q, k, v = (x[0] for x in make_qkv(1, 300, 300, 4, 2, 64, device="cuda"))
    offsets = torch.tensor([0, 120, 300], dtype=torch.int32, device="cuda")
    same = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
    graph, out = captured(lambda: zyfa.attention(q, k, v, **same))
    offsets.copy_(torch.tensor([0, 30, 300], dtype=torch.int32))
    graph.replay()
    assert_correct(out[None, 30:], q[None, 30:], k[None, 30:], v[None, 30:], causal=True)


@case("O-CAP-02")
@pytest.mark.gpu
def test_a_first_launch_inside_a_capture_leaves_the_device_usable():
    """Head dim 248 is used by no other test. Either it works or it raises; a capture after one call outside works."""
    q, k, v = make_qkv(1, 100, 100, 2, 1, 248, device="cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = zyfa.attention(q, k, v, causal=True)
        graph.replay()
        assert_correct(out, q, k, v, causal=True)
    except RuntimeError as error:
        assert "captur" in str(error)
    graph, out = captured(lambda: zyfa.attention(q, k, v, causal=True))
    graph.replay()
    assert_correct(out, q, k, v, causal=True)


@case("O-CAP-02")
def test_the_docstring_says_that_a_capture_needs_an_earlier_call():
    assert "Capturing a graph needs one earlier call with the same arguments" in " ".join(
        zyfa.attention.__doc__.split()
    )


CALLS = {
    "s1000": lambda: (make_qkv(1, 1000, 1000, 2, 2, 16), {}),
    "gqa": lambda: (make_qkv(2, 70, 90, 6, 2, 32), {"causal": True}),
    "192/128": lambda: (make_qkv(1, 40, 50, 2, 1, 192, 128), {"causal": True}),
    "varlen": lambda: (tuple(x[0] for x in make_qkv(1, 70, 90, 4, 2, 32)), varlen([30, 40], [50, 40])),
    "fp8": lambda: (tuple(x.to(torch.float8_e4m3fn) for x in make_qkv(1, 40, 50, 2, 1, 32)), {}),
    "heads first": lambda: (tuple(x.transpose(1, 2) for x in make_qkv(1, 2, 2, 9, 9, 16)), {}),
    "no keys": lambda: (make_qkv(1, 4, 0, 2, 1, 16), {}),
}  # fmt: skip


@case("O-CAP-03")
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("name", CALLS)
def test_fake_and_real_results_agree(name, return_lse):
    (q, k, v), same = CALLS[name]()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if name == "fp8":  # the other two do arithmetic on the inputs, which torch has not for FP8
        checks = ("test_autograd_registration", "test_faketensor")
    op = torch.ops.zyfa.attention.default
    results = torch.library.opcheck(op, (q, k, v), same | {"return_lse": return_lse}, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


@case("O-CAP-03")
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_and_the_same_values(name):
    (q, k, v), same = CALLS[name]()
    compiled = torch.compile(
        lambda q, k, v: zyfa.attention(q, k, v, return_lse=True, **same), fullgraph=True, backend="aot_eager"
    )
    for got, want in zip(compiled(q, k, v), zyfa.attention(q, k, v, return_lse=True, **same), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride() and got.dtype == want.dtype


@case("O-CAP-04")
def test_a_compiler_sees_one_opaque_call():
    """Whatever the mode, Inductor gets the operator and not the kernels in it, so it has nothing to tune or fuse."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    q, k, v = make_qkv(1, 40, 40, 2, 1, 16)
    compiled = torch.compile(lambda *x: zyfa.attention(*x, causal=True) * 2, fullgraph=True, backend=backend)
    assert torch.equal(compiled(q, k, v), zyfa.attention(q, k, v, causal=True) * 2)
    called = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert sum("zyfa.attention" in name for name in called) == 1
    assert not any("triton" in name for name in called)


@case("O-CAP-04")
@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_mode_of_compile_on_a_gpu(precision, mode):
    q, k, v = make_qkv(1, 1000, 1000, 4, 2, 64, device="cuda")
    compiled = torch.compile(
        lambda q, k, v: zyfa.attention(q, k, v, causal=True, precision=precision), fullgraph=True, mode=mode
    )
    want = zyfa.attention(q, k, v, causal=True, precision=precision)
    for _ in range(3):
        assert torch.equal(compiled(q, k, v), want)


@case("O-CAP-05")
@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_one_graph_serves_every_length(precision):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*args):  # the long ones only count graphs
            q = next(x for x in args if isinstance(x, torch.Tensor))
            return graph(*args) if q.shape[1] < 700 else (torch.zeros_like(q),)

        return run

    compiled = torch.compile(
        lambda q, k, v: zyfa.attention(q, k, v, causal=True, precision=precision), dynamic=True, backend=backend
    )
    for seqlen in range(512, 4097, 100):
        q, k, v = make_qkv(1, seqlen, seqlen, 1, 1, 16)
        out = compiled(q, k, v)
        if seqlen < 700:
            assert torch.equal(out, zyfa.attention(q, k, v, causal=True, precision=precision))
        assert out.shape == q.shape
    assert 1 <= len(graphs) <= 2


@case("O-CAP-06")
def test_logging_knows_no_tensor(monkeypatch, capfd):
    """What is printed is made of the key, which holds numbers and words only."""
    monkeypatch.setenv("ZYFA_LOG", "config")
    q, k, v = make_qkv(1, 40, 40, 2, 1, 16)
    key = zyfa.explain(q, k, v, causal=True).call.key
    assert {type(value) for value in key} <= {int, str, bool}
    device = Device("nvidia", "sm90", "unknown-gpu", 7)
    with pytest.warns(RuntimeWarning, match="no tuned config"):
        choice = choose(key._replace(head_dim=248), device)
    assert describe(choice, key, device).splitlines()[0] in capfd.readouterr().err


@case("O-CAP-06")
@pytest.mark.gpu
def test_logging_inside_a_capture(monkeypatch):
    from zyfa import lookup

    monkeypatch.setenv("ZYFA_LOG", "config")
    q, k, v = make_qkv(1, 300, 300, 4, 2, 64, device="cuda")
    zyfa.attention(q, k, v)
    lookup.reset()  # so that the capture itself chooses and prints
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = zyfa.attention(q, k, v)
    graph.replay()
    assert_correct(out, q, k, v)


@case("O-CAP-07")
@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_gradients_are_refused_and_never_lost(which):
    tensors = list(make_qkv(1, 20, 20, 2, 1, 16))
    want = zyfa.attention(*tensors)
    tensors[which].requires_grad_()
    with pytest.raises(NotImplementedError, match="forward only"):
        zyfa.attention(*tensors)
    out, _ = torch.ops.zyfa.attention(*tensors)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="autograd"):
        out.float().sum().backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(zyfa.attention(*tensors), want)


@case("O-CAP-07")
def test_gradients_are_refused_inside_a_compiled_region():
    q, k, v = make_qkv(1, 20, 20, 2, 1, 16)
    q.requires_grad_()
    compiled = torch.compile(lambda q, k, v: zyfa.attention(q, k, v).float().sum(), backend="aot_eager")
    with pytest.raises(Exception, match=r"autograd|forward only"):
        compiled(q, k, v).backward()


@pytest.mark.gpu
def test_streams_of_several_threads_do_not_mix():
    q, k, v = make_qkv(1, 1000, 1000, 8, 2, 128, device="cuda")
    want = zyfa.attention(q, k, v, causal=True, precision="fp8")
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in range(4)], []
    for stream in streams:
        with torch.cuda.stream(stream):
            outs += [zyfa.attention(q, k, v, causal=True, precision="fp8") for _ in range(5)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
