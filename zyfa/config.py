"""The two types that carry the design: what a call asks for (AttentionKey) and how it is run (AttentionConfig).

A leaf module: standard library only, imports nothing of ZYFA but its errors.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import NamedTuple

from .errors import ConfigError

DTYPES = ("bf16", "fp16", "fp8")
WINDOW_CLASSES = ("none", "local")


class AttentionKey(NamedTuple):
    """What one call asks for, as far as the choice of a configuration depends on it.

    `dtype` is what the matrix units multiply: "bf16", "fp16" or "fp8" (quantised inside or given as FP8).
    `window_class` is "local" when the call limits attention to a window on the left, else "none".
    A NamedTuple because it is hashed on every call (0.8 us; a frozen dataclass takes 2.5 us).
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    nheads: int
    nheads_k: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    window_class: str = "none"


class Cell(NamedTuple):
    """The keys that share one database row; batch x heads are upper ends of octaves, lengths of half octaves.

    A row of the upper half serves the whole octave, unless the lower half (3/4 of its lengths) has a row of its own.
    The first six fields are the *class*: rows are never borrowed across them.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    nheads_ratio: int
    causal: bool
    window_class: str
    batch_heads: int
    seqlen_q: int
    seqlen_k: int


def octave(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n <= 1."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def half_octave(n: int) -> int:
    """The smallest number that is at least n and a power of two or, from 3 on, three quarters of one."""
    whole = 1 << (n - 1).bit_length() if n > 1 else 1  # octave(n), without the call
    half = whole - (whole >> 2)
    return half if n <= half else whole


def octave_of(cell: Cell) -> Cell:
    """The cell whose row serves this one where it has none: the same with lengths at the upper ends of octaves."""
    return cell._replace(seqlen_q=octave(cell.seqlen_q), seqlen_k=octave(cell.seqlen_k))


def cell_of(key: AttentionKey) -> Cell:
    """The cell that a key falls in."""
    dtype, head_dim, head_dim_v, nheads, nheads_k, batch, seqlen_q, seqlen_k, causal, window_class = key
    return Cell(
        dtype, head_dim, head_dim_v, nheads // nheads_k, causal, window_class,
        octave(batch * nheads), half_octave(seqlen_q), half_octave(seqlen_k),
    )  # fmt: skip


@dataclass(frozen=True)
class AttentionConfig:
    """How the prefill kernel is compiled and launched. Field names are kernel arguments, JSON keys and flags alike."""

    BLOCK_M: int  # query rows of one program
    BLOCK_N: int  # keys of one loop trip
    num_warps: int  # waves on AMD
    num_stages: int  # buffers of the software pipeline
    longest_first: bool = True  # causal: the programs with most keys start first
    head_group: int = 0  # heads that are walked together, for L2; 0 = all of them
    splits: int = 1  # programs that share the keys of a query block; another kernel merges what they find
    pack_gqa: bool = False  # the rows of a program are those of all query heads of one KV head
    recipe: str = "none"  # a name in zyfa.recipes.RECIPES; "none" runs in the dtype of the inputs
    # AMD
    waves_per_eu: int = 0  # register cap by occupancy; 0 leaves it to the compiler
    matrix_instr_nonkdim: int = 0  # rows of one MFMA; 0 leaves it to the compiler
    async_copy: int = -1  # global to LDS without registers: 1 on, 0 off, -1 the compiler's default
    sched_strategy: str = ""  # LLVM's amdgpu-sched-strategy (Triton >= 3.8); "" is the default
    xcds: int = 0  # dies that program ids go to in turn, each of which gets neighbouring tiles; 0 leaves them apart
    # NVIDIA
    maxnreg: int = 0  # register cap per thread; 0 = none
    tensor_descriptors: bool = False  # K and V tiles through the TMA unit instead of pointers
    variant: str = "triton"  # the kernel: attn_fwd ("triton"), or "gluon": attn_gluon (Hopper), attn_gluon_amd (gfx950)
    ping_pong: bool = False  # attn_gluon: the two consumers take turns at the tensor cores

    def to_dict(self) -> dict:
        """The fields that differ from their defaults, and always the four that have none."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        }

    def to_json(self) -> str:
        """One canonical spelling, so that equal configs are equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, values: dict) -> "AttentionConfig":
        """The config of a dict; raises ConfigError on an unknown or missing field or a wrong type."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := set(values) - set(fields):
            raise ConfigError(f"unknown config fields {sorted(unknown)}; known are {sorted(fields)}")
        for name, value in values.items():
            kind = fields[name].type
            if type(value) is not kind:
                raise ConfigError(f"{name}={value!r} is not {getattr(kind, '__name__', kind)}")
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ConfigError(f"config lacks {missing}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> "AttentionConfig":
        """Inverse of to_json; raises ConfigError on anything that is not a config."""
        try:
            values = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"config is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"config is {type(values).__name__}, not an object")
        return cls.from_dict(values)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_dict().items())
