"""Tiles of attn_gluon_amd in LDS: how they lie there, the asynchronous copies that bring them, their way to registers.

One copy instruction of a wave writes 1,024 bytes in a row, so rows can be padded only behind every such chunk. Rows
that a read takes together are therefore dealt to chunks in turn: each chunk begins PAD bytes further round the 64 banks
of four bytes, and reads of K (16 lanes, 16 bytes of one row each) and transposed reads of V (4 or 8 rows of 64 or 32
bytes) meet no bank twice. Which key a row of a chunk holds is settled once, in the offsets of the copies.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4

CHUNK_BYTES = 1024  # 64 lanes, 16 bytes each
# Elements of 16 bits that lie behind any buffer (its descriptor says 2**31 - 2 bytes), once or twice: copies of what is
# out of range write zeros. A copy's mask would switch its lanes off and leave what LDS held.
NOWHERE = gl.constexpr(3 << 29)
# Triton 3.9 spells it without the underscore.
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Options(NamedTuple):
    """The constants of one build."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_LSE: bool
    QK: str  # what Q and K are: "16" bits, "e4m3" or "int8"
    V_QUANTISED: bool
    QK_QUANTISED: bool
    QK_BLOCKS: bool  # scales of blocks of QUANT_ROWS rows, else one a head
    V_BLOCKS: bool
    QUANT_ROWS: int
    ROW_SHIFT: bool
    P_OFFSET: int
    PACKED: bool  # the exponents of two scores in one instruction
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_N: int
    CONSUMERS: int  # query rows in units of gluon_ring.ROWS, as _key_tiles counts them
    WARPS: int  # of 32 query rows each
    STAGES: int
    LONGEST_FIRST: bool
    HEAD_GROUP: int


class Tile(NamedTuple):
    """Tiles of K or of V: rows of WIDTH elements, of which COLUMNS are in the input."""

    ROWS: int
    WIDTH: int
    COLUMNS: int
    SIZE: int  # bytes of an element
    PAD: int  # elements behind each chunk
    IN_CHUNK: int  # rows of one chunk
    DEALT: int  # chunks that neighbouring rows are dealt to, before the next row of the first of them is filled
    SWAPPED: bool  # rows in the order in which FP8 operands hold the keys of P
    WARPS: int


def tile(rows: int, width: int, columns: int, size: int, pad: int, warps: int, swapped: bool = False) -> Tile:
    """The Tile with `pad` bytes behind each chunk."""
    in_chunk, dealt = CHUNK_BYTES // (width * size), width * size // pad
    return Tile(rows, width, columns, size, pad // size, in_chunk, dealt, swapped, warps)


@gluon.constexpr_function
def _s_layout(c):
    """Where the scores lie: 32 rows a wave, a row in two lanes, which hold four columns of each eight in turns."""
    return AMDMFMALayout(4, [32, 32, {"16": 16, "e4m3": 64, "int8": 32}[c.QK]], True, [c.WARPS, 1])


@gluon.constexpr_function
def _o_layout(c):
    """Where the output lies: as the scores do."""
    return AMDMFMALayout(4, [32, 32, 64 if c.V_QUANTISED else 16], True, [c.WARPS, 1])


@gluon.constexpr_function
def _copy_layout(t):
    """Lanes over rows: 16 bytes a lane, a chunk a wave."""
    lanes = t.WIDTH * t.SIZE // 16
    return gl.BlockedLayout([1, 16 // t.SIZE], [64 // lanes, lanes], [t.WARPS, 1], [1, 0])


@gluon.constexpr_function
def _smem_layout(t, BY_KEY):
    """A tile in LDS, its rows numbered by key for reading, or in the order in which copies fill them."""
    keys = [1 << bit for bit in range(t.ROWS.bit_length() - 1)]
    if BY_KEY:  # bits of a row in memory: its place in the chunk, then which chunk
        both = t.DEALT * t.IN_CHUNK
        keys = [k for k in keys if t.DEALT <= k < both] + [k for k in keys if k < t.DEALT or k >= both]
    bases = [[0, 1 << bit] for bit in range(t.WIDTH.bit_length() - 1)] + [[k, 0] for k in keys]
    return gl.PaddedSharedLayout([[t.IN_CHUNK * t.WIDTH, t.PAD]], bases, [], [t.ROWS, t.WIDTH])


@gluon.jit
def _allocate(dtype: gl.constexpr, STAGES: gl.constexpr, t: gl.constexpr):
    """Room for STAGES tiles."""
    shape: gl.constexpr = [STAGES, t.ROWS, t.WIDTH]
    return gl.allocate_shared_memory(dtype, shape, _smem_layout(t, False))


@gluon.jit
def _offsets(stride, there, t: gl.constexpr):
    """Offsets of the elements that a copy brings, within a tile; those of rows from `there` on are out of range.

    With FP8 a lane holds keys 0 to 3 and 8 to 11 of each 16 of P, its neighbour the others, and an operand wants eight
    in a row: keys 4 to 7 of V change places with 8 to 11, so P moves nowhere.
    """
    layout: gl.constexpr = _copy_layout(t)
    rows = gl.arange(0, t.ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, t.WIDTH, layout=gl.SliceLayout(0, layout))
    chunk = rows // t.IN_CHUNK
    rows = chunk % t.DEALT + rows % t.IN_CHUNK * t.DEALT + chunk // t.DEALT * (t.DEALT * t.IN_CHUNK)
    if t.SWAPPED:
        rows = (rows & ~12) | ((rows & 4) << 1) | ((rows & 8) >> 1)
    starts = rows * stride
    if t.SIZE == 2:  # quantisers fill whole blocks of rows and all columns
        starts += (rows >= there).to(gl.int32) * NOWHERE  # a product: of a choice newer compilers know no alignment
        if t.COLUMNS != t.WIDTH:
            cols += (cols >= t.COLUMNS).to(gl.int32) * NOWHERE
    return starts[:, None] + cols[None, :]


@gluon.jit
def _copy(smem, stage, X, stride, offsets, n, t: gl.constexpr):
    """Start the copy of tile n."""
    base = X + gl.cast(n * t.ROWS, gl.int64) * stride
    cdna4.async_copy.buffer_load_to_shared(smem.index(stage), base, offsets)


@gluon.jit
def _by_key(smem, stage, t: gl.constexpr):
    """The tile of a stage as (key, column)."""
    layout: gl.constexpr = _smem_layout(t, True)
    shape: gl.constexpr = [t.ROWS, t.WIDTH]
    tile = smem.index(stage)
    return tile.reinterpret(smem.dtype, shape, layout) if _REINTERPRET else tile._reinterpret(smem.dtype, shape, layout)
