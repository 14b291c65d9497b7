"""Runs Triton kernels on the CPU, with right numbers: the fixture `interpret`, and what it repairs in Triton.

    def test_kernel(interpret):
        out, lse = interpret(attention_forward, q, k, v, config=config, arch="gfx950", return_lse=True)

`interpret(fn, *args, **kwargs)` returns what fn returns. fn is any importable function (of zyfa or of a test file)
that launches kernels on CPU tensors; arguments and result are copied between processes, so that a tensor that fn fills
in place must be returned to be seen. Whatever fn raises arrives as RuntimeError with fn's traceback in the text.

Why a child process: @triton.jit decides when it decorates, so that a kernel, the kernels it calls and Triton's own
library (tl.max, tl.sum) are all interpreted only if TRITON_INTERPRET=1 is set before the first import of Triton, and
then nothing in that process can be compiled any more. The tests' own process keeps compiling for gfx950, gfx942 and
sm90. Besides, the interpreter reads and writes raw memory: a kernel that strays kills the child, and one test fails.

What is repaired, in Triton 3.6 to 3.9 (test_interpreter.py shows both sides):
- casts to FP8 and BF16 drop the carry out of the mantissa, do not round ties to even, or truncate: torch casts instead.
  Beyond the largest value torch gives NaN (E4M3) or infinity (E5M2), so that a missing clamp shows.
- tl.dot and arithmetic on BF16 and FP8 work on the bit patterns: they are computed in fp32 and rounded once.
- tl.maximum, tl.minimum and tl.clamp hand NaN on (to Triton 3.7) where GPUs return the other operand.
- the waits of a programmatic dependent launch, which are inline assembly, do nothing.
- the FP8 formats of gfx942 (E4M3 and E5M2 fnuz) are unknown as target of a cast.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
from unittest import mock

import numpy as np
import torch

TIMEOUT_S = 240  # below pytest's own limit, so that the child is killed and the test named


class Interpreter:
    """A child process in which @triton.jit functions are interpreted. Close it after use."""

    def __init__(self, repaired: bool = True):
        self._repaired = repaired
        self._process = None

    def __call__(self, fn, *args, **kwargs):
        """fn(*args, **kwargs), run in the child; raises RuntimeError with the child's traceback."""
        if self._process is None:
            self._start()
        request = _dumps((fn, args, kwargs))
        try:
            self._pipe.send_bytes(request)
            if not self._pipe.poll(TIMEOUT_S):
                raise RuntimeError(f"the interpreter was stopped after {TIMEOUT_S} s")
            returned, value = _loads(self._pipe.recv_bytes())
        except BaseException as error:  # the child is dead or out of step: the next call starts another
            self._process.kill()
            self._process.join()
            exitcode, self._process = self._process.exitcode, None
            if isinstance(error, (EOFError, ConnectionError)):
                raise RuntimeError(f"the interpreter died with exit code {exitcode}: a stray pointer?") from None
            raise
        if not returned:
            raise RuntimeError(f"in the interpreter:\n{value}")
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._repaired), daemon=True)
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            self._process.start()
        theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _dumps(values) -> bytes:
    """torch.save and not pickle: pickle cannot read back FP8 tensors."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _loads(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)  # safe: both ends are this test run


def _serve(pipe, repaired: bool) -> None:
    """The child: answers (True, result) or (False, traceback) to each (fn, args, kwargs), until the parent is gone."""
    if repaired:
        repair()
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv_bytes()
            try:
                fn, args, kwargs = _loads(request)
                answer = _dumps((True, fn(*args, **kwargs)))
            except Exception:
                answer = _dumps((False, traceback.format_exc()))
            sys.stdout.flush()
            pipe.send_bytes(answer)


def repair() -> None:
    """Patches Triton's interpreter in this process. Idempotent it is not: call once."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    torch_dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5: torch.float8_e5m2, tl.float8e5b16: torch.float8_e5m2fnuz,
        tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64,
    }  # fmt: skip
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    as_bit_patterns = set(torch_dtypes) - {tl.float16, tl.float32, tl.float64}  # what numpy has no type for
    builder = interpreter.InterpreterBuilder
    convert, patch_core = interpreter._convert_float, interpreter._patch_lang_core
    dot, clamp_all = builder.create_dot, builder.create_clampf

    def convert_float(data, src, dst, rounding):
        """The bit patterns of `data` (of Triton type src) cast to dst, to nearest even unless `rounding` says else."""
        if not {src, dst} <= set(torch_dtypes) or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return convert(data, src, dst, rounding)
        numpy_bits = {n: str(t).removeprefix("torch.") for n, t in bits.items()}
        raw = data.reshape(-1).view(numpy_bits[src.primitive_bitwidth])
        cast = torch.from_numpy(raw.copy()).view(torch_dtypes[src]).to(torch_dtypes[dst])
        unsigned = f"uint{dst.primitive_bitwidth}"
        return cast.view(bits[dst.primitive_bitwidth]).numpy().view(unsigned).reshape(data.shape)

    def to_fp32(handle):
        if handle.dtype.scalar not in as_bit_patterns:
            return handle
        data = convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view("float32")
        return interpreter.TensorHandle(data, tl.float32)

    def rounded(handle, dtype):
        data = handle.data if handle.data.dtype == bool else convert_float(handle.data, tl.float32, dtype, None)
        return interpreter.TensorHandle(data, dtype)

    def create_dot(self, a, b, d, *precision):
        return dot(self, to_fp32(a), to_fp32(b), d, *precision)

    def create_dot_scaled(self, a, a_scale, _, b, b_scale, __, *rest):
        """e4m3 operands, e8m0 scales of 32 neighbours along the sum: a (M, K), (M, K / 32), b (K, N), (N, K / 32)."""
        scales = (np.exp2(scale.data.astype("float32") - 127).repeat(32, 1) for scale in (a_scale, b_scale))
        a, b = to_fp32(a).data * next(scales), to_fp32(b).data * next(scales).T
        return interpreter.TensorHandle(a @ b + rest[-1].data, tl.float32)

    def in_fp32(method, arity):
        def wrapper(self, *args):
            dtype = args[0].dtype.scalar
            if dtype not in as_bit_patterns:
                return method(self, *args)
            return rounded(method(self, *map(to_fp32, args[:arity]), *args[arity:]), dtype)

        return wrapper

    def patch_lang_core(lang, scope):
        patch_core(lang, scope)
        to_ir = lang.dtype.to_ir
        fnuz = {"fp8e4b8": tl.float8e4b8, "fp8e5b16": tl.float8e5b16}
        scope.set_attr(lang.dtype, "to_ir", lambda self, b: fnuz.get(self.name) or to_ir(self, b))

    def clamp(self, x, lo, hi, propagate_nan):
        if propagate_nan == tl.PropagateNan.ALL:
            return clamp_all(self, x, lo, hi, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, lo), hi)

    # launches run one after the other here
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None
    interpreter._convert_float = convert_float
    interpreter._patch_lang_core = patch_lang_core
    builder.create_dot = create_dot
    builder.create_dot_scaled = create_dot_scaled
    builder.binary_op = in_fp32(builder.binary_op, 2)
    builder.unary_op = in_fp32(builder.unary_op, 1)
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_clampf = clamp
    builder.create_fma = in_fp32(builder.create_fma, 3)
