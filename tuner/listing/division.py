"""The three instructions of a correctly rounded fp32 division: v_div_scale, v_div_fmas, v_div_fixup.

After their listings in AMD's "CDNA3 Instruction Set Architecture" (2024), VOP3 chapter.
"""

import numpy as np

from .floats import fma
from .operands import Step, source, target, unknown
from .parse import Instruction
from .state import VCC, Wave, mask_of

F, D = np.float32, np.float64


def div_scale(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_div_scale_f32: brings numerator or denominator into a range where the quotient's steps neither over- nor
    underflow; the mask says whose result v_div_fmas must scale back."""
    to, out, *texts = ins.operands
    readers = [source(ins, text, "f") for text in texts]
    put, put_mask = target(ins, to, "f"), target(ins, out, "m")

    def step(w: Wave) -> None:
        value, scaled = scale_of_division(*(np.broadcast_to(read(w), 64) for read in readers))
        put(w, value)
        put_mask(w, scaled)

    return step


def scale_of_division(x, denominator, numerator):
    """(x, one of the other two, times 2**64, 2**-64 or 1; was the quotient scaled?), by the cases of the ISA."""
    d, n = denominator.astype(D), numerator.astype(D)
    exponents = [np.frexp(np.where(np.isfinite(v) & (v != 0), v, 1))[1] for v in (d, n)]
    tiny = 2.0**-126
    with np.errstate(all="ignore"):
        inverse, quotient = np.abs(1 / d) < tiny, np.abs(n / d) < tiny
    is_d, is_n = x == denominator, x == numerator
    up, down, same = x * F(2.0**64), x * F(2.0**-64), x
    cases = [
        ((d == 0) | (n == 0), F(np.nan), False),
        (exponents[1] - exponents[0] >= 96, np.where(is_d, up, same), True),
        (np.abs(d) < tiny, up, False),
        (inverse & quotient, np.where(is_d, up, same), True),
        (inverse, down, False),
        (quotient, np.where(is_n, up, same), True),
        (exponents[1] <= -103, up, False),  # biased exponent of the numerator <= 23
    ]
    conditions = [c for c, _, _ in cases]
    value = np.select(conditions, [v for _, v, _ in cases], same).astype(F)
    return value, np.select(conditions, [np.full(64, s) for _, _, s in cases], False)


def div_fmas(ins: Instruction, modifiers: dict, labels: dict) -> Step:
    """v_div_fmas_f32 where no quotient was scaled."""
    to, *texts = ins.operands
    a, b, c = (source(ins, text, "f") for text in texts)
    put = target(ins, to, "f")

    def step(w: Wave) -> None:
        if (mask_of(w.scalar64(VCC)) & w.mask).any():
            raise unknown(ins, "a quotient near the ends of fp32")
        put(w, fma(a(w), b(w), c(w)))

    return step


def div_fixup(quotient, denominator, numerator):
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), F(-1), F(1))
    nan = np.isnan(denominator) | np.isnan(numerator)
    nan |= (denominator == 0) & (numerator == 0) | np.isinf(denominator) & np.isinf(numerator)
    infinite, zero = (denominator == 0) | np.isinf(numerator), np.isinf(denominator) | (numerator == 0)
    return np.select([nan, infinite, zero], [F(np.nan), sign * F(np.inf), sign * F(0)], sign * np.abs(quotient))


BUILDERS = {"v_div_scale_f32": div_scale, "v_div_fmas_f32": div_fmas}
