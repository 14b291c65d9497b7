"""Tiles of attn_gluon on their way: which a program takes, in which order, and the warp that brings them by TMA."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .attn_fwd import _tile_of, _visible

ROWS = gl.constexpr(64)  # of one consumer: the height of one WGMMA


class Options(NamedTuple):
    """The constants of one build. CONSUMERS: four warps and ROWS rows each. REGISTERS: a thread of theirs."""

    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_LSE: bool
    QK_QUANTISED: bool
    V_QUANTISED: bool
    QK_BLOCKS: bool  # scales of blocks of QUANT_ROWS rows, else one a head
    V_BLOCKS: bool
    FP16: bool
    QUANT_ROWS: int
    ROW_SHIFT: bool
    P_OFFSET: int
    HEAD_DIM_V: int
    STAGED: bool  # output passes through shared memory and leaves in whole lines
    BLOCK_DV: int
    BLOCK_N: int
    CONSUMERS: int
    STAGES: int
    PING_PONG: bool
    LONGEST_FIRST: bool
    HEAD_GROUP: int
    REGISTERS: int
    Q_IN_REGISTERS: bool
    OVERLAP: bool  # of quantisers before it


@gluon.constexpr_function
def _s_layout(c):
    """Where the scores of a consumer lie: the layout of a WGMMA's sums."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, c.BLOCK_N, 32 if c.QK_QUANTISED else 16])


@gluon.constexpr_function
def _o_layout(c):
    """Where the output of a consumer lies: the layout of a WGMMA's sums."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, c.BLOCK_DV, 32 if c.V_QUANTISED else 16])


@gluon.jit
def _ring(X, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """(tiles of a descriptor, barriers of full slots, barriers of empty slots) in shared memory."""
    smem = gl.allocate_shared_memory(X.dtype, [SLOTS] + X.block_type.shape, X.layout)  # noqa: RUF005 - Triton's Python
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return smem, full, empty


@gluon.jit
def _named_barrier(op: gl.constexpr, number: gl.constexpr):
    """bar.sync or bar.arrive on a hardware barrier of both consumers; 0 to 7 are the compiler's."""
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar." + op + " " + number + ", 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _take_turn(WG: gl.constexpr, c: gl.constexpr):
    """Wait until the other consumer has issued its products: one multiplies while the other is in its softmax."""
    if c.PING_PONG:
        _named_barrier("sync", "8" if WG == 0 else "9")


@gluon.jit
def _pass_turn(WG: gl.constexpr, c: gl.constexpr):
    if c.PING_PONG:
        _named_barrier("arrive", "9" if WG == 0 else "8")


@gluon.jit
def _tile_at(i):
    """The i-th tile of this program: programs take turns, forth and back, which evens out tiles that get shorter."""
    programs = gl.num_programs(0)
    turn = gl.program_id(0)
    if i % 2 == 1:
        turn = programs - 1 - turn
    return i * programs + turn


@gluon.jit
def _tiles_of_program(num_tiles):
    """How many tiles this program takes."""
    rounds = num_tiles // gl.num_programs(0)
    return rounds + gl.where(_tile_at(rounds) < num_tiles, 1, 0)


@gluon.jit
def _key_tiles(m, sizes, c: gl.constexpr):
    """Key tiles of a query block, [first, last]: at least one; masked from `masked` up to last and below `full`."""
    _, _, _, seqlen_q, seqlen_k, _, window_left, window_right = sizes
    lo, full_lo, full_hi, hi = _visible(
        m, seqlen_q, seqlen_k, window_left, window_right, c.HAS_LEFT, c.HAS_RIGHT, c.CONSUMERS * ROWS, c.BLOCK_N
    )
    first = lo // c.BLOCK_N
    last = gl.maximum((hi + c.BLOCK_N - 1) // c.BLOCK_N - 1, first)
    masked = gl.minimum(gl.maximum(full_lo, full_hi) // c.BLOCK_N, last)
    full = gl.minimum(full_lo // c.BLOCK_N, masked)
    return first, full, masked, last


@gluon.jit
def _advance(stage, phase, c: gl.constexpr):
    """The next slot of a ring and its phase."""
    stage += 1
    if stage == c.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _part(tiles, part: gl.constexpr):
    """(last tile, number) of the tiles before the last that are masked on the right, unmasked, masked on the left."""
    first, full, masked, last = tiles
    if part == 0:
        top, end = last, masked
    elif part == 1:
        top, end = masked, full
    else:
        top, end = full, first
    return top - 1, top - end


@gluon.jit
def _produce(Q, K, V, rings, sizes, c: gl.constexpr):
    """The producer: every Q, K and V tile of this program, in the order in which the consumers ask for them."""
    batch_heads, nheads, group, num_m_blocks = sizes[0], sizes[1], sizes[2], sizes[5]
    q_ring, k_ring, v_ring = rings[0], rings[1], rings[2]
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_full, v_empty = v_ring
    CONSUMERS: gl.constexpr = c.CONSUMERS
    num_tiles = num_m_blocks * batch_heads
    stage = 0
    phase = 1  # a fresh ring is empty: the wait for the phase before the first passes
    for i in range(_tiles_of_program(num_tiles)):
        m, bh = _tile_of(_tile_at(i), num_m_blocks, batch_heads, c.HEAD_GROUP, c.LONGEST_FIRST)
        b = bh // nheads
        h = bh % nheads
        first, _, _, last = _key_tiles(m, sizes, c)
        mbarrier.wait(q_empty, (i & 1) ^ 1)
        mbarrier.expect(q_full, c.CONSUMERS * Q.block_type.nbytes)
        for w in gl.static_range(CONSUMERS):
            rows = (m * c.CONSUMERS + w) * ROWS
            tma.async_copy_global_to_shared(Q, [b, h, rows, 0], q_full, q_smem.index(w))
        for j in range(last - first + 1):
            key = (last - j) * c.BLOCK_N
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), K.block_type.nbytes)
            tma.async_copy_global_to_shared(K, [b, h // group, key, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), V.block_type.nbytes)
            if c.V_QUANTISED:
                tma.async_copy_global_to_shared(V, [b, h // group, 0, key], v_full.index(stage), v_smem.index(stage))
            else:
                tma.async_copy_global_to_shared(V, [b, h // group, key, 0], v_full.index(stage), v_smem.index(stage))
            stage, phase = _advance(stage, phase, c)
