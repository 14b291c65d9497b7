"""The quantisers by themselves: how many launches they take, how heads are cut into chunks, what lies where."""

import pytest
import torch
from helpers import make_qkv

from zyfa.archs import ARCHS
from zyfa.kernels.operands import shape_of
from zyfa.kernels.quantiser import Quantiser, chunks_of
from zyfa.kernels.replay import Compiler, Recorder
from zyfa.recipes import PRESETS, RECIPES
from zyfa.tuner.compile import _target

FP8 = torch.float8_e4m3fn


class Names:
    """Starts nothing; notes what would be started."""

    def __init__(self):
        self.started = []

    def start(self, kernel, grid, args, constants):
        self.started.append((kernel.__name__, grid))
        missing = set(kernel.arg_names[len(args) :]) - set(constants)
        assert not missing, f"{kernel.__name__} is not given {missing}"


def started(recipe, arch="sm90", dims=(128, 128), given=None, dtype=torch.bfloat16, in_place=False):
    q, k, v = (
        torch.empty(2, 1000, n, d, device="meta", dtype=dtype)
        for n, d in ((32, dims[0]), (8, dims[0]), (8, dims[1]))
    )  # fmt: skip
    names = Names()
    Quantiser(shape_of(q, k, v), RECIPES[recipe], ARCHS[arch], names, in_place=in_place).run(q, k, v, given)
    return names.started


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_launch_before_rounding_at_most_but_for_scales_of_v_beside_means(recipe):
    kernels = [name for name, _ in started(recipe)]
    r = RECIPES[recipe]
    extra = r.k_mean and r.v_scaled_by in ("head", "channel")
    assert kernels[-1] == "quantize" and len(kernels) <= 2 + extra
    assert (kernels == ["quantize"]) == (not r.k_mean and r.granularity not in ("head", "tensor"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_takes_three_launches_with_attention_and_none_of_them_is_empty(preset):
    grids = [grid for _, grid in started(PRESETS[preset])]
    assert len(grids) <= 2 and all(grid[0] > 0 for grid in grids)


def test_different_widths_take_one_launch_more():
    assert [name for name, _ in started("block", dims=(128, 64))] == ["quantize", "quantize"]


def test_given_inputs_move_as_little_as_their_layout_allows():
    scales = tuple(torch.ones(2, n, device="meta") for n in (32, 8, 8))
    blocks = 2 * 8 * (1024 // 128)
    assert started("head", given=scales, dtype=FP8) == [("quantize", (6 * blocks,))]
    assert started("head", given=scales, dtype=FP8, in_place=True) == [("quantize", (blocks,))], "V alone"
    assert started("head", dims=(128, 64), given=scales, dtype=FP8, in_place=True) == [("quantize", (blocks,))]


def test_chunks_give_every_program_about_the_same_work():
    assert chunks_of((8, 4)) == [8], "512 rows: no program without a block needs to be added"
    assert chunks_of((8, 256)) == [32], "K alone at 32k: 256 programs"
    assert chunks_of((8, 1024), (8, 256)) == [32, 8], "the heads of Q that share a head of K have four times its rows"
    assert chunks_of((128, 64), (32, 64), (32, 64)) == [8, 8, 8], "many heads fill the GPU by themselves"
    assert chunks_of((0, 64), (8, 64)) == [32, 32], "what is not read counts for nothing"


def quantised(q, k, v, recipe, arch="sm90", interleaved=False, given=None):
    """(K and V in eight bits, their scales): what a test hands to the interpreter."""
    run = Quantiser(shape_of(q, k, v), RECIPES[recipe], ARCHS[arch], Recorder(), v_interleaved=interleaved)
    ops = run.run(q, k, v, given)
    return ops.k, ops.v, ops.descales[1], ops.descales[2]


def test_means_come_from_all_chunks(interpret):
    """1,100 rows are 9 blocks, more than one for some chunks; the mean is taken off exactly before rounding."""
    q, k, v = make_qkv(2, 20, 1100, 2, 2, 16)
    k8, _, scales, _ = interpret(quantised, q, k, v, "int8-kmean")
    smooth = (k.double() - k.double().mean(1, keepdim=True)).transpose(1, 2)
    smooth = torch.nn.functional.pad(smooth, (0, k8.shape[3] - 16, 0, k8.shape[2] - 1100))
    blocks = smooth.unflatten(2, (-1, 128))
    scale = blocks.abs().amax((3, 4)) / 127
    torch.testing.assert_close(scales.view(scale.shape).double(), scale, rtol=1e-5, atol=0)
    off = (k8.double() - (blocks / scale[..., None, None]).round().flatten(2, 3)).abs()
    assert off.max() <= 1 and (off > 0).double().mean() < 1e-3, "halves may round either way"


@pytest.mark.parametrize("recipe", ["tensor", "head"])
def test_whole_scales_come_from_all_chunks(interpret, recipe):
    """The largest value lies in the last row of the last block, of one head."""
    q, k, v = make_qkv(2, 20, 1100, 2, 2, 16)
    k[1, -1, 0, 3], v[0, -1, 1, 3] = 100.0, -100.0
    *_, k_scales, v_scales = interpret(quantised, q, k, v, recipe)
    heads = (0, 1, 2, 3) if recipe == "tensor" else (1, 3)
    k_top, v_top = (x.float().abs().amax(heads).flatten() / 448 for x in (k, v))
    torch.testing.assert_close(k_scales, k_top, rtol=1e-6, atol=0)
    torch.testing.assert_close(v_scales, 2.0 ** v_top.log2().ceil(), rtol=0, atol=0)


@pytest.mark.parametrize("given", [False, True], ids=["block", "given"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_transposed_v_has_every_row_where_the_matrix_unit_wants_it(interpret, interleaved, given):
    rows = 200
    v = (torch.arange(rows)[:, None] % 113 - torch.arange(16) * 2).clamp(-16, 16)[None, :, None]
    v = v.to(FP8 if given else torch.bfloat16).expand(1, rows, 2, 16).contiguous()
    scales = tuple(torch.ones(1, 2) for _ in range(3)) if given else None
    _, v8, _, scale = interpret(quantised, v, v, v, "block", "sm90", interleaved, scales)
    got = v8.float() * (scale.view(1, 2, 1, -1).repeat_interleave(128, 3) if not given else 1.0)
    place = torch.arange(256)
    if interleaved:  # position 4t + 2i + j of each 16 holds row 8i + 2t + j
        t, i, j = place % 16 // 4, place % 4 // 2, place % 2
        place = place // 16 * 16 + 8 * i + 2 * t + j
    want = torch.nn.functional.pad(v.float(), (0, 0, 0, 0, 0, 56)).permute(0, 2, 3, 1)[..., place]
    assert torch.equal(got, want)


def quantised_in_runs(q, k, v, recipe, run):
    """All that is quantised, by programs of `run` row blocks."""
    Quantiser._blocks_of_program = lambda self: run
    quantiser = Quantiser(shape_of(q, k, v), RECIPES[recipe], ARCHS["sm90"], Recorder(), row_shift=True)
    ops = quantiser.run(q, k, v)
    return ops.q, ops.k, ops.v, *ops.descales, ops.row_shift


@pytest.mark.parametrize("recipe", ["int8-kmean-equalise-hadamard", "block-kmean-qmean-equalise-hadamard"])
def test_a_program_of_several_blocks_writes_what_programs_of_one_write(interpret, recipe):
    """600 rows are five blocks of queries, two programs of four; 300 are three of keys."""
    q, k, v = make_qkv(2, 600, 300, 4, 2, 16)
    one, four = (interpret(quantised_in_runs, q, k, v, recipe, run) for run in (1, 4))
    for a, b in zip(one, four, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_large_calls_take_programs_of_several_blocks():
    def run(seqlen, arch="sm90", recipe=PRESETS["balanced"]):
        x = torch.empty(1, seqlen, 32, 128, device="meta")
        quantiser = Quantiser(shape_of(x, x, x), RECIPES[recipe], ARCHS[arch], Names())
        return quantiser._blocks_of_program()

    assert [run(n) for n in (512, 1024, 2048, 4096, 8192)] == [1, 2, 4, 8, 16], "64 heads: four programs each"
    assert run(8192, "gfx950") == run(8192, recipe="int8-kmean") == run(8192, recipe="bf16qk") == 1


class Compiled(Compiler):
    """Compiles and keeps what it compiled."""

    def __init__(self):
        self.kernels = []

    def start(self, kernel, grid, args, constants):
        self.kernels.append(super().start(kernel, grid, args, constants))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("recipe", [PRESETS["balanced"], PRESETS["fast"], "block-kmean-qmean-equalise-hadamard"])
@pytest.mark.parametrize("seqlen", [512, 8192])
def test_every_launch_fits_in_shared_memory(recipe, head_dim, seqlen):
    """Triton compiles what no multiprocessor can start."""
    q, k = (torch.empty(1, seqlen, n, head_dim, device="meta", dtype=torch.bfloat16) for n in (32, 8))
    compiled = Compiled()
    with _target("sm90"):
        Quantiser(shape_of(q, k, k), RECIPES[recipe], ARCHS["sm90"], compiled, v_interleaved=True).run(q, k, k)
    assert max(kernel.metadata.shared for kernel in compiled.kernels) <= ARCHS["sm90"].lds_bytes
