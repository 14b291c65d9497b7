"""The repaired interpreter is right where Triton's own is wrong, and compiling goes on beside it (interpreter.py)."""

import os
import signal

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreter import Interpreter
from triton.backends.compiler import GPUTarget

NARROW = {
    "e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
narrow = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW.keys())


@triton.jit
def _cast_kernel(X, Y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + offs, offs < n, other=0.0)
    tl.store(Y + offs, x.to(Y.dtype.element_ty), offs < n)


@triton.jit
def _tile(X, stride, SIZE: tl.constexpr):
    return tl.load(X + tl.arange(0, SIZE)[:, None] * stride + tl.arange(0, SIZE)[None, :])


@triton.jit
def _dot_kernel(A, B, C, rowmax, SIZE: tl.constexpr):
    c = tl.dot(_tile(A, SIZE, SIZE), _tile(B, SIZE, SIZE))
    tl.store(C + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :], c)
    tl.store(rowmax + tl.arange(0, SIZE), tl.max(c, 1))


@triton.jit
def _arithmetic_kernel(X, Y, out, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    x = tl.load(X + offs)
    y = tl.load(Y + offs)
    tl.store(out + offs, tl.where(x < y, x * y, x - y))


@triton.jit
def _nan_kernel(X, out, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    x = tl.load(X + offs)
    tl.store(out + offs, tl.maximum(x, 1.0))
    tl.store(out + SIZE + offs, tl.minimum(x, 1.0))
    tl.store(out + 2 * SIZE + offs, tl.clamp(x, 1.0, 2.0))
    tl.store(out + 3 * SIZE + offs, tl.maximum(x, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 4 * SIZE + offs, tl.clamp(x, 1.0, 2.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 5 * SIZE + offs, tl.max(x, 0))


def cast(x, dtype):
    """x (1-D) cast by the kernel: what a test hands to the interpreter."""
    y = torch.empty(x.shape, dtype=dtype)
    _cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def dot(a, b):
    c = torch.empty(a.shape, dtype=torch.float32)
    rowmax = torch.empty(a.shape[0], dtype=torch.float32)
    _dot_kernel[(1,)](a, b, c, rowmax, SIZE=a.shape[0])
    return c, rowmax


def arithmetic(x, y):
    out = torch.empty_like(x)
    _arithmetic_kernel[(1,)](x, y, out, SIZE=x.numel())
    return out


def around_nan(x):
    out = torch.empty(6, x.numel())
    _nan_kernel[(1,)](x, out, SIZE=x.numel())
    return out


def no_grid():
    _cast_kernel[(1, 1, 1, 1)](torch.zeros(4), torch.zeros(4), 4, BLOCK=4)


def stray():
    """What a stray pointer does in the end; a real one may corrupt the heap first and hang, now and then."""
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture(scope="module")
def as_shipped():
    interpreter = Interpreter(repaired=False)
    yield interpreter
    interpreter.close()


def finite_values(dtype):
    """Every finite value of a narrow dtype, ascending, in fp32 (exact)."""
    if dtype.itemsize == 1:
        x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    else:
        x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x.float()
    return x[x.isfinite()].unique()


def edge_values(dtype):
    """All values, the midpoints between neighbours and the fp32 values just beside them, what overflows, and noise."""
    values = finite_values(dtype)
    middle = ((values[1:].double() + values[:-1].double()) / 2).float()
    beside = [torch.nextafter(middle, torch.full_like(middle, side)) for side in (-torch.inf, torch.inf)]
    top = values.max() * torch.tensor([1.0, 1.03, 1.0358, 1.06, 1.0625, 1.07, 1.2, 2.0, 1e3])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    noise = torch.randn(100_000) * torch.exp2(torch.randint(-30, 20, (100_000,)).float())
    return torch.cat([values, middle, *beside, top, -top, special, noise])


def bits(x):
    """Bit patterns of x in fp32 (exact, signed zeros apart), one for every NaN."""
    x = x.float()
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int32)


@narrow
def test_casts_agree_with_torch(interpret, dtype):
    x = edge_values(dtype)
    assert torch.equal(bits(interpret(cast, x, dtype)), bits(x.to(dtype)))


@narrow
def test_casts_back_are_exact(interpret, dtype):
    x = finite_values(dtype).to(dtype)
    assert torch.equal(interpret(cast, x, torch.float32), x.float())


@pytest.mark.parametrize("dtype", list(NARROW.values())[:3], ids=list(NARROW)[:3])
def test_fp8_casts_pick_the_nearest_value(interpret, dtype):
    """Checked against a search over all 256 values, so that it does not rest on torch's casts alone."""
    values = finite_values(dtype).double().numpy()
    x = edge_values(dtype)
    x = x[x.abs() <= values.max()].double().numpy()
    distance = np.abs(x[:, None] - values[None, :])
    nearest = distance == distance.min(1, keepdims=True)
    odd = finite_values(dtype).to(dtype).view(torch.uint8).numpy() % 2 == 1
    tie = nearest.sum(1) > 1
    expected = values[np.where(tie, (nearest & ~odd).argmax(1), nearest.argmax(1))]
    assert tie.sum() > 200  # the grid of midpoints is really there
    got = interpret(cast, torch.from_numpy(x).float(), dtype).double().numpy()
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("dtype, least", [(torch.float8_e4m3fn, 0.01), (torch.bfloat16, 0.3)], ids=["e4m3fn", "bf16"])
def test_casts_as_shipped_are_wrong(as_shipped, dtype, least):
    """When this fails, Triton has mended its casts and interpreter.py can shrink."""
    x = torch.randn(100_000) * 30
    wrong = bits(as_shipped(cast, x, dtype)) != bits(x.to(dtype))
    assert wrong.float().mean() > least


def dot_error(run, dtype):
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    c, rowmax = run(dot, a, b)
    exact = a.double() @ b.double()
    return float(torch.linalg.norm(c - exact) / torch.linalg.norm(exact)), c, rowmax


@narrow
def test_dot(interpret, dtype):
    """The kernel calls another kernel and Triton's library, so all three are interpreted."""
    error, c, rowmax = dot_error(interpret, dtype)
    assert error < 1e-6
    assert torch.equal(rowmax, c.max(1).values)


def test_bf16_dot_as_shipped_is_wrong(as_shipped):
    assert dot_error(as_shipped, torch.bfloat16)[0] > 1e3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic(interpret, dtype):
    x, y = torch.randn(1024).to(dtype), torch.randn(1024).to(dtype)
    assert torch.equal(interpret(arithmetic, x, y), torch.where(x < y, x * y, x - y))


def test_nan_survives_only_where_asked(interpret):
    """IEEE maxNum and minNum, as on GPUs; propagate_nan=ALL keeps it."""
    nan = torch.nan
    expected = [[1, 1, 1, 3], [1, 1, 0, 1], [1, 1, 1, 2], [nan, 1, 1, 3], [nan, 1, 1, 2], [3, 3, 3, 3]]
    got = interpret(around_nan, torch.tensor([nan, 1.0, 0.0, 3.0]))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0, equal_nan=True)


def test_errors_carry_the_traceback_and_leave_the_interpreter_alive(interpret):
    with pytest.raises(RuntimeError, match="grid must have at most 3 dimensions"):
        interpret(no_grid)
    assert interpret(cast, torch.ones(4), torch.bfloat16).tolist() == [1.0] * 4


def test_a_stray_pointer_kills_only_the_child(interpret):
    with pytest.raises(RuntimeError, match="the interpreter died"):
        interpret(stray)
    assert interpret(cast, torch.ones(4), torch.bfloat16).tolist() == [1.0] * 4


def test_this_process_still_compiles(interpret):
    interpret(dot, torch.eye(32), torch.eye(32))
    pointer = "*bf16"
    signature = {"A": pointer, "B": pointer, "C": "*fp32", "rowmax": "*fp32", "SIZE": "constexpr"}
    source = triton.compiler.ASTSource(_dot_kernel, signature, {"SIZE": 32})
    compiled = triton.compile(source, target=GPUTarget("hip", "gfx950", 64))
    assert "v_mfma_f32_" in compiled.asm["amdgcn"]
