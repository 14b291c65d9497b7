"""Number formats and roundings that numpy lacks: fused multiply-add, BF16, FP8 (OCP), flushed denormals."""

import numpy as np

from .parse import ListingError

F32_MIN_NORMAL = np.float32(2.0**-126)


def fma(a, b, c) -> np.ndarray:
    """a * b + c of fp32 values, rounded once to nearest even.

    The product is exact in fp64. The sum is rounded to odd there, which leaves the second rounding to fp32 correct
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008); the error term is Knuth's TwoSum.
    """
    product = np.multiply(a, b, dtype=np.float64)
    c = np.asarray(c, np.float64)
    total = np.asarray(product + c)
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.view(np.int64)
    inexact_even = (np.abs(error) > 0) & ((bits & 1) == 0)  # the error of an infinite or NaN sum is NaN: left alone
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + inexact_even * step).view(np.float64).astype(np.float32)


def flush(x) -> np.ndarray:
    """fp32 with denormals replaced by zeros of their sign: what the transcendental unit reads and writes."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < F32_MIN_NORMAL, np.copysign(np.float32(0), x), x)


def to_bf16(x) -> np.ndarray:
    """uint32 whose low half is x rounded to BF16, to nearest even; NaN stays NaN."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decode_fp8(exponent_bits: int) -> np.ndarray:
    """The 256 values of E4M3 (4) or E5M2 (5) after the OCP 8-bit floating point specification."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = codes >> mantissa_bits & 2**exponent_bits - 1, codes & 2**mantissa_bits - 1
    fraction = mantissa / 2**mantissa_bits
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if exponent_bits == 4:
        value[(codes & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 31
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.where(codes >= 128, -value, value)


E4M3, E5M2 = _decode_fp8(4), _decode_fp8(5)
E4M3_MAX = 448.0


def to_e4m3(x, saturate: bool) -> np.ndarray:
    """uint32 codes of fp32 values in E4M3, to nearest even.

    Beyond 448 after rounding: NaN, or +-448 if `saturate` (MODE.FP16_OVFL). NaN stays NaN.
    """
    x = np.asarray(x, np.float32)
    if saturate and np.isinf(x).any():
        raise ListingError("the conversion of an infinity to FP8 while MODE.FP16_OVFL is set is not modelled")
    magnitude = np.abs(x).astype(np.float64)
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, -6), -6)
    steps = np.rint(np.ldexp(magnitude, 3 - exponent))  # units of the last place: 8..16 if normal
    code = np.where(np.isfinite(steps), steps, 0).astype(np.int64) + (exponent + 6) * 8
    over = (code > 0x7E) | np.isinf(x)
    code = np.where(over, 0x7E if saturate else 0x7F, code)
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint32)
