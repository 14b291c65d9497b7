"""The table that compares the kernels for gfx950: what is counted, from loops whose figures are known."""

import importlib.util
from pathlib import Path

import pytest

from zyfa.config import AttentionConfig
from zyfa.tuner.facts import Facts, Loop
from zyfa.tuner.model import Prediction

MIX = {
    "v_mfma_f32_32x32x64_f8f6f4": 8, "trans": 33, "pk": 24, "valu": 118, "cvt": 16, "agpr": 2, "xlane": 6, "ds_read": 8,
    "ds_tr": 16, "ds_write": 4, "vmem": 4, "vmem_lds": 1, "barrier": 2, "waitcnt": 12, "salu": 3, "nop": 22,
}  # fmt: skip
PREDICTED = Prediction(0.59, 0.498, 0.77, "A", {"matrix": 0.144, "vector": 0.266, "lds": 0.108, "l2": 0.075})


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).resolve().parent.parent / "scripts" / "compare_gfx950.py"
    spec = importlib.util.spec_from_file_location("compare_gfx950", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variant(script, agprs=0, **change):
    config = AttentionConfig(**{"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, **change})
    masked = Loop(MIX | {"valu": 250}, 16384, 4096)
    loops = (masked, Loop(MIX, 16384, 4096))
    facts = Facts("gfx950", 201, agprs, 0, 0, 16384, 2, 2.0, 12212, "", loops)
    return script.Variant("plain, default", config, facts, PREDICTED)


def test_a_line_holds_the_loop_without_masks(script):
    cells = dict(zip(script.HEADER, script.row("D128 tensor", variant(script)), strict=True))
    assert cells == {
        "": "D128 tensor", "kernel and tile": "plain, default: 128x64, 4 waves, 2 stages", "matrix": "8", "exp": "33",
        "packed": "24", "other vector": "136", "lane swaps": "6", "LDS reads, writes": "24, 4", "loads, copies": "4, 1",
        "barriers, waits": "2, 12", "scalar": "3", "registers (AGPR), spills": "201, 0", "LDS": "16384",
        "waves a SIMD": "2", "slots: matrix, vector": "128, 238",
        "bounds: matrix, vector, LDS, L2": "144, 266, 108, 75",
        "predicted µs": "590 (498 to 770)",
    }  # fmt: skip
    assert "201 (7), 0" in script.row("", variant(script, agprs=7))


def test_slots_are_of_64_keys_and_32_rows(script):
    """8 MFMAs of 16 slots; 33 exponentials and 6 swaps of two slots, 24 + 118 + 16 + 2 of one."""
    assert script.per_64_keys(variant(script)) == (128, 238)
    assert script.per_64_keys(variant(script, BLOCK_N=128)) == (64, 119)
    assert script.per_64_keys(variant(script, BLOCK_M=64)) == (256, 476)  # two waves share 32 rows


def test_the_variants_of_one_case(script, monkeypatch):
    built = []

    def build(name, at, config):
        built.append((name, config))
        if (config.variant, config.BLOCK_N, config.num_warps) == ("gluon", 64, 8):
            return None  # as if it spilled
        return variant(script)._replace(
            name=name, config=config, prediction=PREDICTED._replace(ms=config.BLOCK_N / 100)
        )

    monkeypatch.setattr(script, "build", build)
    found = script.variants("tensor", script.key("tensor", 128, 8192))
    assert [v.name for v in found] == ["plain, default", "plain, best predicted", "Gluon"]
    assert (found[0].config.BLOCK_M, found[0].config.recipe, found[0].config.variant) == (128, "tensor", "triton")
    assert (found[2].config.BLOCK_M, found[2].config.BLOCK_N, found[2].config.variant) == (128, 64, "gluon")
    assert sum(name == "Gluon" for name, _ in built) == 4


def test_what_a_limit_forbids_is_not_built(script):
    at = script.key("none", 128, 8192)
    assert script.build("Gluon", at, AttentionConfig(256, 128, 8, 2, variant="gluon")) is None


def test_the_table_is_markdown(script):
    lines = script.markdown([tuple("x" * len(script.HEADER))]).splitlines()
    assert len(lines) == 3 and {line.count("|") for line in lines} == {len(script.HEADER) + 1}
