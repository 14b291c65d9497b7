"""The low-precision recipes as data: what is done to Q, K, V and P before the matrix units see them.

The arithmetic lives in kernels/quantize.py (GPU) and reference.py (CPU emulation of the same steps). What cuts the
error on real activations is what happens to Q and K *before* they are rounded, not the granularity of their scales:
e4m3 keeps three mantissa bits whatever its scale.
"""

import functools
from dataclasses import dataclass

QUANT_ROWS = 128  # rows that share a scale at granularity "block"; one quantiser program handles one such block

MX_GROUP = 32  # neighbouring channels that share a scale in the OCP microscaling formats

FP8_MAX = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
INT8_MAX = 127.0


@dataclass(frozen=True)
class Recipe:
    """One way to run attention in low precision. V and P are FP8 in all of them.

    qk: what Q and K become: "e4m3", "int8", or "bf16" (their own dtype, not quantised at all).
    granularity: which elements of Q and K share one scale: "tensor" (all), "head" (one batch entry and head), "block"
    (QUANT_ROWS consecutive rows of one head), "row", or "mx" (32 channels of a row, a power of two that the matrix unit
    itself applies; gfx950). The last three need no pass over the data for their scales.
    v_granularity: the same for V: "tensor", "head", "block" or "channel"; scales of V are powers of two. "" follows Q
    and K, with "block" for "row" and "mx": P V sums over the rows.
    k_mean: K minus its mean over the tokens. Exact: it moves all logits of a row alike, which the softmax ignores.
    q_mean: Q minus its mean over the tokens of the head; the logits that this takes away, one number per head and key,
    are added back exactly.
    hadamard: Q and K times one orthogonal +-1 matrix, which spreads outlier channels over all and cancels in Q K^T.
    equalise: before that, channel c of Q times s_c and of K over s_c, s_c the power of two nearest to
    sqrt(rms k_c / rms q_c), so that both use their range. With hadamard only: both are one product, without rounding.
    p_offset: P is kept as 2**p_offset times its value. It rides in the exponent of exp2, so numerator and row sum
    carry it alike and it cancels; 8 keeps P <= 256 under e4m3's maximum of 448.

    worst_error: the largest relative error of the output over five samples of real activations (512 tokens, causal,
    against float64; tests/test_recipes.py recomputes it). What a recipe can do to a layer, not what it usually does.

    Means, equalising and rotation go with "block", "row" and "mx": their statistics cost one pass, scales of a whole
    head or tensor after them would cost another.
    """

    name: str
    worst_error: float
    qk: str = "e4m3"
    granularity: str = "block"
    v_granularity: str = ""
    k_mean: bool = False
    q_mean: bool = False
    equalise: bool = False
    hadamard: bool = False
    p_offset: int = 8

    @property
    def qk_scales(self) -> str:
        """Where the attention kernel finds scales of Q and K: "none", "head" (or one for all), "block", "row", "mx"."""
        if self.qk == "bf16":
            return "none"
        return "head" if self.granularity == "tensor" else self.granularity

    @property
    def v_scaled_by(self) -> str:
        """v_granularity, resolved: "tensor", "head", "block" or "channel"."""
        return self.v_granularity or {"row": "block", "mx": "block"}.get(self.granularity, self.granularity)


def _all() -> tuple[Recipe, ...]:
    k = functools.partial(Recipe, k_mean=True)
    int8 = functools.partial(Recipe, qk="int8", k_mean=True, equalise=True, hadamard=True)
    kq = functools.partial(Recipe, k_mean=True, q_mean=True)
    return (
        Recipe("tensor", 0.581, granularity="tensor", p_offset=0),  # as peers ship it: P unscaled
        Recipe("head", 0.539, granularity="head"),
        Recipe("block", 0.576),
        Recipe("row", 0.482, granularity="row"),
        Recipe("mx", 0.643, granularity="mx"),
        k("block-kmean", 0.102),
        k("block-kmean-hadamard", 0.508, hadamard=True),
        k("block-kmean-equalise-hadamard", 0.060, equalise=True, hadamard=True),
        kq("block-kmean-qmean", 0.046),
        kq("block-kmean-qmean-hadamard", 0.171, hadamard=True),
        kq("block-kmean-qmean-equalise-hadamard", 0.041, equalise=True, hadamard=True),
        kq("row-kmean-qmean-equalise-hadamard", 0.040, granularity="row", equalise=True, hadamard=True),
        kq("mx-kmean-qmean-equalise-hadamard", 0.044, granularity="mx", equalise=True, hadamard=True),
        k("int8-kmean", 0.279, qk="int8"),
        k("int8-kmean-hadamard", 0.119, qk="int8", hadamard=True),
        int8("int8-kmean-equalise-hadamard", 0.029),
        int8("int8-row-kmean-equalise-hadamard", 0.027, granularity="row"),
        int8("int8-kmean-equalise-hadamard-vhead", 0.029, v_granularity="head"),
        int8("int8-kmean-equalise-hadamard-vchannel", 0.029, v_granularity="channel"),
        Recipe("bf16qk", 0.025, qk="bf16"),
    )


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _all()}

# What `precision="fp8:<preset>"` means; per_tensor is the baseline that every cut is stated against.
PRESETS: dict[str, str] = {
    "per_tensor": "tensor",
    "fast": "int8-kmean",
    "balanced": "int8-kmean-equalise-hadamard",
    "accurate": "bf16qk",
}


def p_offset(recipe: Recipe, fp8_format: str) -> int:
    """The recipe's P offset, less where the format's range is shorter (fnuz: 240)."""
    return min(recipe.p_offset, int(FP8_MAX[fp8_format]).bit_length() - 1)
