"""The host side of the quantisers: buffers, scales, how the work is cut into programs, and their launches."""

from typing import NamedTuple

import torch

from ..archs import Arch
from ..recipes import FP8_MAX, INT8_MAX, MX_GROUP, QUANT_ROWS, Recipe, p_offset
from .operands import Operands, Shape, ahead, strides_of
from .quantize import quantize
from .replay import Compiler, Recorder
from .statistics import channel_amax, chunk_amax, column_sums

FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
# Chunks of a head in a first pass, few or many: every program of quantize reads the results of its head's chunks again,
# from L2 (512 bytes a chunk and sum at head dim 128; its own block has 32 KB), and each pair of counts is a build.
CHUNKS = (8, 32)
PROGRAMS = 512  # of a first pass: about what a GPU holds at a time
RESIDENT = 264  # programs that rotate: two on each multiprocessor of an H100 or H200
MAX_RUN = 64
_WHOLE = ("head", "tensor")  # granularities whose scales need chunk_amax first


def chunks_of(*tensors: tuple[int, int]) -> list[int]:
    """In how many chunks a first pass over tensors of (heads, row blocks of a head) takes the heads of each.

    Programs get about as much work in all tensors, and there are about PROGRAMS of them, in large tensors.
    """
    share = sum(heads * blocks for heads, blocks in tensors) // PROGRAMS  # blocks of a program
    few, many = CHUNKS
    return [few if blocks <= few * max(1, 2 * share) else many for _, blocks in tensors]


class Quantiser(NamedTuple):
    """One quantising run: what to do, where, and by whom its kernels are started."""

    shape: Shape
    recipe: Recipe
    arch: Arch
    launcher: Compiler | Recorder
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    qk_scale: float = 1.0  # softmax_scale * log2(e): corrections are written in the kernel's units
    row_shift: bool = False  # are the true logits of a row needed (lse, softcap, sink)?
    v_interleaved: bool = False  # V's keys in the order of attn_gluon
    in_place: bool = False  # given FP8 inputs: the kernel reads Q and K where they lie, only V moves

    @property
    def moves_qk(self) -> bool:
        """Whether Q and K get buffers; else the kernel reads the inputs."""
        return self.recipe.qk != "bf16" and not self.in_place

    def _empty(self, *size: int, dtype=torch.float32, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=like.device)

    def _buffers(self, q):
        """Eight-bit Q, K and V; the batch axis is folded into the rows for varlen. Q, K are None if not quantised."""
        shape, fp8 = self.shape, FP8_DTYPES[self.arch.fp8_format]
        batch = 1 if shape.varlen else shape.batch
        v_shape = (shape.block_dv, shape.rows8_k) if self.arch.v_k_major else (shape.rows8_k, shape.block_dv)
        v8 = self._empty(batch, shape.nheads_k, *v_shape, dtype=fp8, like=q)
        if not self.moves_qk:
            return None, None, v8
        qk = torch.int8 if self.recipe.qk == "int8" else fp8
        q8 = self._empty(batch, shape.nheads, shape.rows8_q, shape.block_d, dtype=qk, like=q)
        return q8, self._empty(batch, shape.nheads_k, shape.rows8_k, shape.block_d, dtype=qk, like=q), v8

    def _scales_per_head(self, rows8: int, width: int, granularity: str) -> int:
        """How many scales a head has; 0 where all heads share one."""
        blocks = rows8 // QUANT_ROWS
        counts = {"block": blocks, "row": rows8, "mx": rows8 * (width // MX_GROUP), "head": 1, "channel": width}
        return counts.get(granularity, 0)

    def _descale_strides(self, qk: str, v: str) -> tuple[int, int, int]:
        shape = self.shape
        return (
            self._scales_per_head(shape.rows8_q, shape.block_d, qk),
            self._scales_per_head(shape.rows8_k, shape.block_d, qk),
            self._scales_per_head(shape.rows8_k, shape.block_dv, v),
        )

    def _descales(self, q, qk: str, v: str) -> tuple[torch.Tensor | None, ...]:
        """Room for the scales of Q, K and V, fp32, of Q and K e8m0 for "mx"; None where there are none to write."""
        shape, folded = self.shape, 1 if self.shape.varlen else self.shape.batch
        kinds = ("none" if self.recipe.qk == "bf16" else qk,) * 2 + (v,)
        heads = (shape.nheads, shape.nheads_k, shape.nheads_k)
        found: list[torch.Tensor | None] = []
        for kind, per_head, n in zip(kinds, self._descale_strides(qk, v), heads, strict=True):
            count = per_head * n * (shape.batch if kind in ("head", "channel") else folded) or 1
            dtype = torch.uint8 if kind == "mx" else torch.float32
            found.append(None if kind in ("given", "none") else self._empty(count, dtype=dtype, like=q))
        return tuple(found)

    def _magnitudes(self, q, k, v, qk: str, by: str, common) -> tuple[tuple, dict]:
        """((maxima of Q, of K, of V), chunks of each) where scales take a pass of their own, else (Nones, {})."""
        shape, of_qk, of_v = self.shape, qk in _WHOLE and self.recipe.qk != "bf16", by in _WHOLE
        if by == "channel":
            v_amax, chunks = self._channels(v, common)
            return (None, None, v_amax), {"CHUNKS_V": chunks}
        if not (of_qk or of_v):
            return (None, None, None), {}
        heads_q, heads_k = shape.batch * shape.nheads, shape.batch * shape.nheads_k
        blocks = (shape.blocks_q, shape.blocks_k)
        chunks = max(chunks_of((heads_q * of_qk, blocks[0]), (heads_k * (of_qk + of_v), blocks[1])))
        counts = [heads_q * chunks * of_qk, heads_k * chunks * of_qk, heads_k * chunks * of_v]
        amax = self._empty(sum(counts), like=q).split(counts)
        args = (q, k, v, *amax, self.cu_seqlens_q, self.cu_seqlens_k, *strides_of(q), *strides_of(k), *strides_of(v))
        args += (*counts[:2], shape.nheads, shape.nheads_k, *blocks, shape.seqlen_q, shape.seqlen_k)
        self.launcher.start(chunk_amax, (sum(counts),), args, common | {"CHUNKS": chunks})
        return amax, {"CHUNKS_QK": chunks, "CHUNKS_V": chunks}

    def _channels(self, v, common) -> tuple[torch.Tensor, int]:
        """(maxima of V's channels, chunks)."""
        shape = self.shape
        heads = shape.batch * shape.nheads_k
        (chunks,) = chunks_of((heads, shape.blocks_k))
        v_amax = self._empty(heads * chunks * shape.block_dv, like=v)
        args = (v, v_amax, self.cu_seqlens_k, *strides_of(v), shape.nheads_k, shape.blocks_k, shape.seqlen_k)
        constants = {n: c for n, c in common.items() if n not in ("HEAD_DIM", "BLOCK_D")} | {"CHUNKS_V": chunks}
        self.launcher.start(channel_amax, (heads * chunks,), args, constants)
        return v_amax, chunks

    def _statistics(self, q, k, common) -> tuple[tuple, dict]:
        """((sums of Q, of K, rotation), chunks of each), as far as the recipe asks for means, equaliser or rotation."""
        recipe, shape = self.recipe, self.shape
        if not (recipe.k_mean or recipe.q_mean or recipe.equalise or recipe.hadamard):
            return (None, None, None), {}
        span = 1 if recipe.q_mean else shape.nheads // shape.nheads_k  # heads of Q that are summed together
        n_q = shape.batch * shape.nheads // span if recipe.q_mean or recipe.equalise else 0
        n_k = shape.batch * shape.nheads_k
        chunks_q, chunks_k = chunks_of((n_q, span * shape.blocks_q), (n_k, shape.blocks_k))
        counts = (n_q * chunks_q, n_k * chunks_k)
        sums = self._empty(2 * sum(counts) * shape.block_d, like=q).split([2 * n * shape.block_d for n in counts])
        order = (shape.block_d, shape.block_d)
        rotation = self._empty(*order, dtype=torch.bfloat16, like=q) if recipe.hadamard else None
        args = (q, k, *sums, rotation, self.cu_seqlens_q, self.cu_seqlens_k, *strides_of(q), *strides_of(k))
        args += (counts[0], span, shape.nheads, shape.nheads_k, shape.blocks_q, shape.blocks_k)
        chunks = {"CHUNKS_Q": chunks_q, "CHUNKS_K": chunks_k}
        constants = {n: v for n, v in common.items() if n not in ("HEAD_DIM_V", "BLOCK_DV")} | chunks
        constants |= {"SQUARES": recipe.equalise, "HADAMARD": recipe.hadamard}
        self.launcher.start(column_sums, (sum(counts),), (*args, shape.seqlen_q, shape.seqlen_k), constants)
        return (*sums, rotation), chunks

    def _blocks_of_program(self) -> int:
        """Row blocks of Q and K that a program rounds: where it first adds up sums and loads a rotation, as many as
        leave RESIDENT programs.

        Before its first block such a program takes as long as for four more: at 32k (H200, 32/8 heads of 128) all
        quantisers took 518 us with two blocks each, 395 with four, 333 with eight. On gfx950 more than one takes 260
        registers and leaves a SIMD one wave.
        """
        shape, recipe = self.shape, self.recipe
        if self.arch.vendor == "amd" or not recipe.hadamard:
            return 1
        tensors = ((shape.batch * shape.nheads, shape.blocks_q), (shape.batch * shape.nheads_k, shape.blocks_k))
        run, longest = 1, max(shape.blocks_q, shape.blocks_k, 1)
        while run < min(longest, MAX_RUN) and sum(n * -(-blocks // run) for n, blocks in tensors) > RESIDENT:
            run += 1
        return run

    def _lanes(self, rounds: bool = False) -> dict:
        """Warps, and on NVIDIA registers of a lane: three programs a multiprocessor, two where rotating fills it.

        Rounding takes four warps: with eight, `balanced` took 29.2 us at 512 tokens (H200, 32/8 heads of 128) instead
        of 22.6, at 8k 90.7 instead of 84.1, `fast` 50.3 instead of 49.3; with sixteen 33.0, 100.9 and 59.8.
        """
        if self.arch.vendor == "amd":
            return {"num_warps": 4}
        if max(self.shape.block_d, self.shape.block_dv) > 128:
            return {"num_warps": 8}
        if not rounds:
            return {"num_warps": 8, "maxnreg": 80}
        return {"num_warps": 4, "maxnreg": 255 if self.recipe.hadamard else 160}

    def run(self, q, k, v, given=None) -> Operands:
        """Q, K and V in eight bits. `given`: the caller's scales; the inputs are FP8 and change no more than layout."""
        shape, recipe = self.shape, self.recipe
        qk, by = ("given", "given") if given else (recipe.granularity, recipe.v_scaled_by)
        x8 = self._buffers(q)
        descales = self._descales(q, qk, by)
        run = self._blocks_of_program()
        n_v = shape.batch * shape.nheads_k * shape.blocks_k
        n_k = shape.batch * shape.nheads_k * -(-shape.blocks_k // run)
        n_q = shape.batch * shape.nheads * -(-shape.blocks_q // run)
        if not self.moves_qk:
            n_q = n_k = 0
        common = {
            "VARLEN": shape.varlen, "HEAD_DIM": shape.head_dim, "HEAD_DIM_V": shape.head_dim_v,
            "BLOCK_D": shape.block_d, "BLOCK_DV": shape.block_dv, "QUANT_ROWS": QUANT_ROWS,
            "num_stages": 1, **self._lanes(), **ahead(self.arch, shape),
        }  # fmt: skip
        amax, amax_chunks = self._magnitudes(q, k, v, qk, by, common)
        sums, sums_chunks = self._statistics(q, k, common)
        batch = 1 if shape.varlen else shape.batch
        row_shift = col_bias = None
        if recipe.k_mean and self.row_shift:
            row_shift = self._empty(batch * shape.nheads, shape.rows8_q, like=q)
        if recipe.q_mean:
            col_bias = self._empty(batch * shape.nheads, shape.rows8_k, like=q)
        constants = common | self._lanes(rounds=True) | {
            "QK": self.moves_qk,
            "QK_TOP": INT8_MAX if recipe.qk == "int8" else FP8_MAX[self.arch.fp8_format],
            "V_TOP": FP8_MAX[self.arch.fp8_format], "GRANULARITY": qk, "V_GRANULARITY": by,
            "V_TRANSPOSED": self.arch.v_k_major, "V_INTERLEAVED": self.v_interleaved,
            "K_MEAN": recipe.k_mean, "Q_MEAN": recipe.q_mean, "EQUALISE": recipe.equalise,
            "HADAMARD": recipe.hadamard, "ROW_SHIFT": row_shift is not None,
            "CHUNKS_Q": 0, "CHUNKS_K": 0, "CHUNKS_QK": 0, "CHUNKS_V": 0,
            "STAGES": 0 if run == 1 else 2 if shape.block_d <= 128 else 1,  # two would take 288 KB of shared memory
        } | amax_chunks | sums_chunks  # fmt: skip
        inputs = (self.cu_seqlens_q, self.cu_seqlens_k, *strides_of(q), *strides_of(k), *strides_of(v))
        lengths = (
            shape.batch, shape.nheads, shape.nheads_k, shape.blocks_q, shape.blocks_k, shape.rows8_q, shape.rows8_k,
            shape.seqlen_q, shape.seqlen_k,
        )  # fmt: skip

        def start(n_q: int, n_k: int, programs: int, **change) -> None:
            args = (q, k, v, *x8, *descales, *amax, *sums, row_shift, col_bias, self.qk_scale)
            self.launcher.start(quantize, (programs,), (*args, *inputs, n_q, n_k, run, *lengths), constants | change)

        if shape.block_d == shape.block_dv or not self.moves_qk:
            start(n_q, n_k, n_q + n_k + n_v)
        else:  # one build of the kernel has one width: Q and K first, V by itself
            start(n_q, n_k, n_q + n_k, HEAD_DIM_V=shape.head_dim, BLOCK_DV=shape.block_d)
            start(0, 0, n_v, QK=False)
        return self._operands(q, k, x8, given or descales, qk, by, row_shift, col_bias)

    def _operands(self, q, k, x8, descales, qk: str, by: str, row_shift, col_bias) -> Operands:
        q8, k8, v8 = x8
        quantised, given = q8 is not None, qk == "given"
        return Operands(
            q8 if quantised else q,
            k8 if quantised else k,
            v8,
            _buffer_strides(q8) if quantised else strides_of(q),
            _buffer_strides(k8) if quantised else strides_of(k),
            _buffer_strides(v8),
            descales=descales,
            descale_strides=(1, 1, 1) if given else self._descale_strides(qk, by),
            row_shift=row_shift,
            col_bias=col_bias,
            qk_scales="head" if given else self.recipe.qk_scales,
            v_scales="head" if given or by == "tensor" else by,
            p_offset=p_offset(self.recipe, self.arch.fp8_format),
            v_transposed=self.arch.v_k_major,
            in_place=self.in_place,
        )


def _buffer_strides(x8: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) of a (batch, heads, rows, width) buffer; the row is a channel if V is stored transposed.

    With varlen the batch axis is folded into the rows: its stride is 0, whatever b is.
    """
    return 0 if x8.shape[0] == 1 else x8.stride(0), x8.stride(2), x8.stride(1)
