"""zyfa.attention inside torch.compile and torch.export: one operator, the same values."""

import pytest
import torch
from helpers import make_qkv

import zyfa
from zyfa.config import AttentionConfig


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_compiles_without_a_graph_break_to_the_same_values(precision):
    q, k, v = make_qkv(1, 70, 90, 4, 2, 32)

    def layer(q, k, v):
        out, lse = zyfa.attention(q * 1.0, k, v, causal=True, precision=precision, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q, k, v), layer(q, k, v), strict=True):
        assert torch.equal(got, want)


def test_exports_as_one_operator():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return zyfa.attention(q, k, v, causal=True)

    q, k, v = make_qkv(1, 40, 40, 2, 1, 32)
    program = torch.export.export(Layer(), (q, k, v))
    assert next(n.target for n in program.graph.nodes if n.op == "call_function") is torch.ops.zyfa.attention.default
    assert torch.equal(program.module()(q, k, v), zyfa.attention(q, k, v, causal=True))


@pytest.mark.parametrize("return_lse", [False, True])
def test_fake_tensors_have_the_shapes_of_the_result(return_lse):
    q, k, v = make_qkv(2, 30, 40, 4, 2, 64, 32)
    cu_q, cu_k = torch.tensor([0, 10, 30], dtype=torch.int32), torch.tensor([0, 25, 40], dtype=torch.int32)
    calls = [((q, k, v), {}), ((q[0], k[0], v[0]), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})]
    for tensors, same in calls:
        real = torch.ops.zyfa.attention(*tensors, return_lse=return_lse, **same)
        fake = torch.ops.zyfa.attention(
            *(x.to("meta") for x in tensors), return_lse=return_lse, **{n: x.to("meta") for n, x in same.items()}
        )
        for x, y in zip(fake, real, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_config_and_numbers_pass_through():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv(1, 40, 40, 2, 1, 32))
    config = AttentionConfig(64, 64, 4, 1, recipe="head")
    compiled = torch.compile(lambda: zyfa.attention(q, k, v, k_descale=0.5, config=config), backend="eager")
    assert torch.equal(compiled(), zyfa.attention(q, k, v, k_descale=0.5, config=config))


def test_inference_mode_and_no_grad_work():
    q, k, v = make_qkv(1, 40, 40, 2, 1, 32)
    want = zyfa.attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(zyfa.attention(q, k, v), want)
