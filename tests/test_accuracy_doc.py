"""The numbers of docs/accuracy.md and README.md are those of the benchmark file."""

import json
import re
import statistics
from pathlib import Path

import pytest

from zyfa.recipes import PRESETS
from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuner.inputs import Shape, outlier_channels

ROOT = Path(__file__).resolve().parent.parent
ROWS = json.loads((ROOT / "benchmarks/cpu-emulation/accuracy.json").read_text())["rows"]
SAMPLES = ("1.5b_prose_S2048_L00", "1.5b_prose_S2048_L14", "1.5b_prose_S2048_L27", "0.5b_prose_S1024_L00", "L15")


def of(recipe):
    """The rows of the five samples, in the order of the tables."""
    rows = [row for row in ROWS if (row["recipe"], row["family"]) == (recipe, "activations")]
    return [next(row for row in rows if row["name"].endswith(sample)) for sample in SAMPLES]


def cells(path, start):
    (line,) = [line for line in (ROOT / path).read_text().splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("preset, recipe", PRESETS.items())
def test_presets_on_real_activations(preset, recipe):
    name, text, *numbers = cells("docs/accuracy.md", f"`{preset}` | `{recipe}`")
    cuts = [row["cut"] for row in of(recipe)]
    errors = [f"{row['error']:.1%}".replace("%", " %") for row in of(recipe)]
    assert (name, text) == (f"`{preset}`", f"`{recipe}`") and numbers[:5] == errors
    wanted = [f"{100 * cut:.0f} %" for cut in (statistics.median(cuts[:3]), min(cuts))]
    assert numbers[5:] == wanted


@pytest.mark.parametrize("preset, recipe", PRESETS.items())
def test_the_readme(preset, recipe):
    errors = [row["error"] for row in of(recipe)]
    (line,) = [x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith(f'| `"fp8:{preset}"` |')]
    wanted = [f"{100 * x:.1f}" for x in (errors[0], statistics.median(errors), max(errors))]
    assert re.findall(r"(\d+\.\d) %", line) == wanted


@pytest.mark.parametrize("preset, recipe", PRESETS.items())
def test_every_head_dim(preset, recipe):
    (line,) = [x for x in (ROOT / "docs/accuracy.md").read_text().splitlines() if re.match(rf"\| `{preset}` \| \d", x)]
    rows = [row for row in ROWS if row["recipe"] == recipe and row["family"] != "activations"]
    dims = sorted({(max(r["head_dim"], r["head_dim_v"]), r["head_dim"], r["head_dim_v"]) for r in rows})
    errors = [[100 * r["error"] for r in rows if (r["head_dim"], r["head_dim_v"]) == dim[1:]] for dim in dims]
    wanted = [f"{statistics.median(e):.1f} / {max(e):.1f}".replace("100.0", "100") for e in errors]
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == wanted


FINER = re.findall(r"^\| `([\w-]+)` \| \d\.\d % \|", (ROOT / "docs/accuracy.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("recipe", FINER)
def test_finer_scales(recipe):
    assert len(FINER) == 7
    lines = [x for x in (ROOT / "docs/accuracy.md").read_text().splitlines() if x.startswith(f"| `{recipe}` |")]
    (line,) = [x for x in lines if " / " not in x]
    assert re.findall(r"(\d\.\d) %", line) == [f"{100 * row['error']:.1f}" for row in of(recipe)]


@pytest.mark.parametrize("preset, recipe", PRESETS.items())
def test_the_speed_of_the_presets(preset, recipe):
    points = json.loads((ROOT / "benchmarks/h200/front.json").read_text())["rows"]
    of_recipe = {(p["cell"]["seqlen_q"], p["cell"]["causal"]): p["speedup"] for p in points if p["recipe"] == recipe}
    text = (ROOT / "docs/accuracy.md").read_text().replace(", causal / full", "")
    (line,) = re.findall(rf"^\| speed of `{preset}` \| (\d\.\d\d / .*) \|$", text, re.MULTILINE)
    wanted = [f"{of_recipe[n, True]:.2f} / {of_recipe[n, False]:.2f}" for n in (2048, 4096, 8192, 16384, 32768)]
    assert line.split(" | ") == wanted


def test_the_cuts_on_an_h200():
    rows = json.loads((ROOT / "benchmarks/h200/accuracy.json").read_text())["rows"]
    text = (ROOT / "docs/accuracy.md").read_text()
    assert min(row["ratio"] for row in rows) >= 0.985 and max(row["ratio"] for row in rows) <= 1.03
    for preset, recipe in list(PRESETS.items())[1:]:
        named = [r for r in rows if (r["recipe"], r["family"]) == (recipe, "activations")]
        cuts = [r["cut"] for r in named]
        wide = statistics.median(r["cut"] for r in named if r["head_dim"] == 128)
        assert f"`{preset}` {100 * wide:.0f} %" in text and min(cuts) > 0


@pytest.mark.parametrize("recipe", dict.fromkeys(row["recipe"] for row in ROWS))
def test_the_comparison(recipe):
    start = "bf16" if recipe == "none" else f"`{recipe}`"
    lines = [x for x in (ROOT / "docs/accuracy.md").read_text().splitlines() if x.startswith(f"| {start} |")]
    compared = [x for x in lines if re.search(r"\d / \d", x) and "0.2 / 0.2" not in x]
    digits = 2 if recipe == "none" else 1
    for line in compared:
        ours = [cell.split("/")[0].strip() for cell in line.strip("|").split("|")[1:6]]
        assert ours == [f"{100 * row['error']:.{digits}f}" for row in of(recipe)]
    theirs_lacks = recipe in ("block", "block-kmean-equalise-hadamard") or recipe.startswith(("int8-", "row-", "mx-"))
    assert compared or theirs_lacks


@pytest.mark.parametrize("recipe", dict.fromkeys(row["recipe"] for row in ROWS if row["recipe"] != "none"))
def test_the_file_is_of_todays_arithmetic(recipe):
    """A row of each recipe, computed again."""
    (row,) = [r for r in ROWS if (r["recipe"], r["name"], r["head_dim"]) == (recipe, "outlier_channels", 64)]
    qkv = outlier_channels(Shape(row["batch"], row["seqlen"], row["nheads"], row["nheads_k"], 64), 0)
    error = relative_error(emulate(*qkv, recipe, causal=True), attention_ref(*qkv, causal=True))
    assert error == pytest.approx(row["error"], rel=1e-3)
