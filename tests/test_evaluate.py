"""What a worker accepts as correct. The launches are faked on the CPU; one test runs real kernels on a GPU."""

import pytest
import torch

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuner import evaluate
from zyfa.tuner.evaluate import RAGGED, Evaluator, expected, make_inputs, row_slices
from zyfa.tuner.timing import Repeats
from zyfa.tuner.worker import Job

CPU = torch.device("cpu")
KEY = AttentionKey("bf16", 32, 32, 4, 2, 1, 256, 256, True)
CONFIG = AttentionConfig(64, 64, 4, 2)


def right(q, k, v, *, config, arch, causal, out):
    if config.recipe != "none":
        out.copy_(emulate(q, k, v, config.recipe, arch=arch, causal=causal))
    else:
        out.copy_(attention_ref(q, k, v, causal=causal, dtype=torch.float32, p_dtype=q.dtype))


def drops_the_tail_of_k(q, k, v, *, config, arch, causal, out):
    n = k.shape[1] // 64 * 64
    out.copy_(attention_ref(q, k[:, :n], v[:, :n], causal=False, dtype=torch.float32))


def writes_even_tiles(q, k, v, *, out, **rest):
    whole = torch.empty_like(out)
    right(q, k, v, out=whole, **rest)
    out.view(out.shape[0], -1, *out.shape[2:])[:, ::2] = whole[:, ::2]


def writes_beyond(q, k, v, *, out, **rest):
    right(q, k, v, out=out, **rest)
    if out.shape[1] % 64:  # room for one more row
        torch.as_strided(out, (1,), (1,), out.shape[1] * out.stride(1))[0] = 0.0


def ignores_causal(q, k, v, *, causal, **rest):
    right(q, k, v, causal=False, **rest)


def nan_in_one_head(q, k, v, *, out, **rest):
    right(q, k, v, out=out, **rest)
    out[0, 7, 1, 3] = float("nan")  # a head and a row that are not compared with the reference


def check(monkeypatch, launch, key=KEY, config=CONFIG):
    monkeypatch.setattr(evaluate, "attention_forward", launch)
    return Evaluator(CPU, "gfx950")._checked(Job(key, (config,), Repeats(), 2.0), config)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_a_right_kernel_passes_and_its_error_is_kept(monkeypatch, dtype, causal):
    key = KEY._replace(dtype=dtype, causal=causal)
    recipe = default_config("gfx950", key).recipe
    result = check(monkeypatch, right, key, AttentionConfig(64, 64, 4, 2, recipe=recipe))
    assert (result.outcome, result.reason) == ("ok", "")
    assert 1e-5 < result.rel_err < (0.005 if dtype != "fp8" else 0.2)


@pytest.mark.parametrize(
    "launch, key",
    [
        (drops_the_tail_of_k, KEY._replace(causal=False)),
        (writes_even_tiles, KEY),
        (writes_beyond, KEY),
        (ignores_causal, KEY),
        (nan_in_one_head, KEY),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_kernels_are_rejected_even_after_a_right_one(monkeypatch, launch, key):
    assert check(monkeypatch, right, key).outcome == "ok"
    result = check(monkeypatch, launch, key)
    assert result.outcome == "wrong" and result.ms is None
    assert result.reason.startswith("error ")


def test_the_dropped_tail_shows_at_ragged_lengths_only(monkeypatch):
    result = check(monkeypatch, drops_the_tail_of_k, KEY._replace(causal=False))
    assert f"without the last {RAGGED} rows" in result.reason


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(2048, 2048), (1000, 2048), (2048, 1000), (1, 64)])
def test_checked_rows_equal_the_whole_reference(seqlen_q, seqlen_k):
    key = KEY._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    inputs = make_inputs(key, CPU, 0)
    wanted = expected(key, inputs, "none", "gfx950", 2.0)
    whole = attention_ref(inputs.q, inputs.k, inputs.v, causal=True)
    compared = torch.cat([whole[:, lo:hi, wanted.heads] for lo, hi in wanted.slices], 1)
    assert relative_error(wanted.exact, compared) < 1e-12
    assert wanted.slices[-1][1] == seqlen_q


def test_checked_rows_begin_where_scales_do():
    assert row_slices(KEY._replace(seqlen_q=4096, seqlen_k=4096)) == [(0, 256), (2048, 2304), (3840, 4096)]
    assert row_slices(KEY._replace(seqlen_q=4059, seqlen_k=4059)) == [(0, 256), (1920, 2176), (3712, 4059)]


def test_inputs_are_rotated_and_kept(monkeypatch):
    evaluator = Evaluator(CPU, "gfx950", cache_bytes=2_000_000)
    sets = evaluator._sets(KEY)
    assert (len(sets) - 1) * sets[0].nbytes >= 2_000_000
    assert not torch.equal(sets[0].q, sets[1].q)
    assert evaluator._sets(KEY._replace(causal=False, dtype="fp8"))[0].q is sets[0].q


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_real_kernels_are_checked_timed_and_compared(dtype):
    from zyfa.device import current_device

    arch = current_device(0).arch
    key = KEY._replace(dtype=dtype, head_dim=128, head_dim_v=128, seqlen_q=1024, seqlen_k=1024)
    default = default_config(arch, key)
    evaluator = Evaluator.on_gpu(0, arch)
    (alone,) = evaluator(Job(key, (default,), Repeats(), 2.0))
    assert alone.outcome == "ok" and alone.ms_lo <= alone.ms <= alone.ms_hi and len(alone.samples) >= 5
    both = evaluator(Job(key, (default, default), Repeats(heat_ms=0.0, min_rounds=7), 2.0))
    assert [r.outcome for r in both] == ["ok", "ok"]
    assert len(both[0].samples) == len(both[1].samples) >= 7
