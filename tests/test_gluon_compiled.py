"""The Gluon kernel compiled for sm_90a without a GPU: spills, serialised products, matrix units; and its host side."""

import subprocess
import tempfile

import pytest
import torch
from helpers import lacking, launch_inputs

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels import launch
from zyfa.kernels.launch import attention_forward, runnable
from zyfa.limits import knows_gluon, lds_bytes
from zyfa.recipes import PRESETS
from zyfa.tuner.compile import _captured_stderr, _target

pytestmark = pytest.mark.skipif(not knows_gluon("sm90"), reason="this Triton has no Gluon")

# dtype of the key, recipe, head_dim, causal, tile, and the matrix units at work.
BUILDS = [
    ("bf16", "none", 128, True, (128, 128, 8), {"HGMMA.64x128x16.F32.BF16"}),
    ("fp16", "none", 64, False, (128, 128, 8), {"HGMMA.64x128x16.F32", "HGMMA.64x64x16.F32"}),
    ("bf16", "none", 256, True, (128, 64, 8), {"HGMMA.64x64x16.F32.BF16", "HGMMA.64x256x16.F32.BF16"}),
    ("fp8", "block", 128, False, (128, 128, 8), {"QGMMA.64x128x32.F32.E4M3.E4M3"}),
    ("fp8", PRESETS["balanced"], 64, True, (128, 128, 8), {"IGMMA.64x128x32.S8.S8", "QGMMA.64x64x32.F32.E4M3.E4M3"}),
]


def call(dtype, head_dim, causal, config, seqlen=4096, **same):
    """attention_forward on tensors without memory."""
    dtype = torch.float16 if dtype == "fp16" else torch.bfloat16
    q, k, v = (torch.empty((1, seqlen, n, head_dim), dtype=dtype, device="meta") for n in (32, 8, 8))
    with _target("sm90"), _captured_stderr():
        return attention_forward(q, k, v, config=config, arch="sm90", causal=causal, compile_only=True, **same)


def ptxas_says(ptx: str) -> str:
    """What ptxas tells about a kernel; it serialises WGMMA (C75xx) without failing, and Triton does not show that."""
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    "dtype, recipe, head_dim, causal, tile, units", BUILDS, ids=[f"{b[0]}-{b[1]}-{b[2]}" for b in BUILDS]
)
def test_no_spills_no_serialised_products_and_full_rate_units(dtype, recipe, head_dim, causal, tile, units):
    config = AttentionConfig(*tile, 2, recipe=recipe, variant="gluon", ping_pong=True)
    kernel = call(dtype, head_dim, causal, config)
    told = ptxas_says(kernel.asm["ptx"])
    assert "C75" not in told, told
    from zyfa.tuner.facts import facts_of

    facts = facts_of(kernel, "sm90")
    assert facts.scratch_bytes <= (16 if head_dim == 256 else 0)  # once a query block, not in the loops over keys
    over_keys = sorted(facts.loops, key=lambda loop: sum(loop.mix.values()))[:2]
    assert all("scratch" not in loop.mix for loop in over_keys)
    assert (facts.registers, facts.workgroups_per_unit) == (168, 1)  # 65,536 over twelve warps
    assert {op for loop in facts.loops for op in loop.mix if "GMMA" in op} == units
    key = AttentionKey("fp8" if recipe != "none" else dtype, head_dim, head_dim, 32, 8, 1, 4096, 4096, causal)
    assert lds_bytes(config, key, "sm90") <= facts.lds_bytes <= lds_bytes(config, key, "sm90") + 512


def config(recipe="none"):
    return AttentionConfig(128, 128, 8, 2, recipe=recipe, variant="gluon")


def test_calls_that_it_covers_keep_the_gluon_config():
    packed = torch.empty(512, 3 * 8 * 64, dtype=torch.bfloat16)[None, :, : 8 * 64].unflatten(-1, (8, 64))
    for x in (None, packed, torch.empty(1, 8, 512, 64, dtype=torch.bfloat16).transpose(1, 2)):
        assert runnable(config(), "sm90", launch_inputs(x), 0.0) == config()


@lacking(**{"stride 0": torch.empty(1, 1, 8, 64, dtype=torch.bfloat16).expand(1, 512, 8, 64)})
def test_calls_that_it_lacks_run_the_plain_kernel_with_the_same_recipe(lacks, softcap):
    got = runnable(config(), "sm90", lacks, softcap)
    assert (got.variant, got.recipe, got.ping_pong) == ("triton", "none", False)


def test_quantised_calls_fall_back_for_features_but_not_for_layouts():
    odd = torch.empty(1, 512, 8 * 64 + 1, dtype=torch.bfloat16)[..., 1:].unflatten(-1, (8, 64))
    fp8 = config(PRESETS["balanced"])
    assert runnable(fp8, "sm90", launch_inputs(odd), 0.0) == fp8  # the kernel reads the quantiser's buffers
    assert runnable(config("bf16qk"), "sm90", launch_inputs(odd), 0.0).variant == "triton"
    got = runnable(fp8, "sm90", launch_inputs(), 20.0)
    assert (got.variant, got.recipe) == ("triton", PRESETS["balanced"])


def test_the_plain_config_is_left_alone():
    plain = AttentionConfig(64, 64, 4, 2)
    assert runnable(plain, "sm90", launch_inputs(sink=torch.zeros(8)), 20.0) is plain


class Descriptors:
    """Starts nothing; keeps the grid of quantize and the descriptors of attn_gluon."""

    def start(self, kernel, grid, args, constants):
        if kernel.__name__ == "attn_gluon":
            self.descriptors, self.options = args[:3], constants["c"]
        else:
            self.quantised = grid


def fp8_inputs(head_dim=128, **change):
    """What a call on FP8 inputs of (2, 300, 8 or 2 heads) starts."""
    q, k, v = (torch.zeros(2, 300, n, head_dim).to(torch.float8_e4m3fn) for n in (8, 2, 2))
    q = change.get("q", q)
    scales = [torch.ones(2, n) for n in (8, 2, 2)]
    started = Descriptors()
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    same = (config(PRESETS["balanced"]), "sm90", None, (-1, 0), 0.0, None, None)
    launch._start(started, (q, k, v, out, None, None, None, None, *scales), *same)
    return started, q


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp8_inputs_are_read_where_they_lie_and_only_v_moves(head_dim):
    started, given = fp8_inputs(head_dim)
    q, k, v = started.descriptors
    assert q.base is given and (q.shape, q.strides) == (
        [2, 8, 300, head_dim],
        [2400 * head_dim, head_dim, 8 * head_dim, 1],
    )
    assert k.shape == [2, 2, 300, head_dim] and v.shape == [2, 2, head_dim, 384], "V in our buffer, padded"
    assert started.quantised == (2 * 2 * 3,) and started.options.QK_QUANTISED and not started.options.QK_BLOCKS
    apart = torch.zeros(2, 300, 8, 3 * head_dim).to(torch.float8_e4m3fn)[..., :head_dim]
    assert fp8_inputs(head_dim, q=apart)[0].descriptors[0].strides[1:] == [3 * head_dim, 24 * head_dim, 1]


def test_fp8_inputs_that_tma_does_not_reach_or_that_are_narrower_than_the_kernel_move():
    started, _ = fp8_inputs(72)
    assert started.descriptors[0].shape == [2, 8, 384, 128] and started.quantised == (2 * 12 * 3,)
    odd = torch.zeros(2, 300, 8, 129).to(torch.float8_e4m3fn)[..., :128]
    started, _ = fp8_inputs(q=odd)
    assert started.descriptors[0].shape == [2, 8, 384, 128] and started.descriptors[1].shape == [2, 2, 384, 128]


def test_fp8_inputs_compile():
    q, k, v = (torch.empty((1, 4096, n, 128), dtype=torch.float8_e4m3fn, device="meta") for n in (32, 8, 8))
    scales = [torch.empty(1, n, device="meta") for n in (32, 8, 8)]
    with _target("sm90"), _captured_stderr():
        kernel = attention_forward(q, k, v, config=config("head"), arch="sm90", descales=scales, compile_only=True)
    assert "C75" not in ptxas_says(kernel.asm["ptx"])
