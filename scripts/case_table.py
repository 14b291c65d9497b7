"""Writes docs/cases.md: every public failure case of attention, the tests that prove it, and where they run.

Read from the `case` marks in tests/cases, so that the page cannot claim a test that is not there.
    .venv/bin/python scripts/case_table.py            writes the page
    .venv/bin/python scripts/case_table.py --check    exits with 1 if it is not in step
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cases.md"
CLASSES = {  # of case ids: (how many, what they are about)
    "NUM": (9, "numerics"), "MSK": (8, "masking"), "SHP": (8, "shapes"), "STR": (7, "strides"),
    "OVF": (5, "overflow"), "CAP": (7, "capture and compile"),
}  # fmt: skip
PLACES = ("CPU", "interpreter", "compiled", "GPU")
COMPILING = {"_target", "accesses", "compile_config"}  # names by which a test compiles for gfx950
DECISIONS = {
    "O-NUM-07": "FP8 inputs without a scale mean 1.0. A scale tensor on another device than q is refused: copying it "
    "would wait for the GPU.",
    "O-NUM-08": "q_descale is (batch, nheads), one element or a number; no other shape is guessed at.",
    "O-MSK-08": "max_seqlen is derived when absent. Too small: an error where the offsets are on the CPU; on a GPU, "
    "where looking would wait, the rows it leaves out are NaN (in FP8 the sequence whose keys it cuts). Deriving the "
    "grid on the device instead would cost every program a search.",
    "O-STR-02": "Refused, not copied: a copy that nobody asked for hides its cost.",
    "O-STR-06": "There is no layout argument: the one layout is (batch, seqlen, nheads, head_dim), and heads first is "
    "x.transpose(1, 2), which copies nothing.",
    "O-OVF-01": "Rows more than 2^23 elements apart are refused: offsets inside a tile are 32-bit, which keeps them in "
    "one register.",
    "O-CAP-02": "There is no warm-up function: one call with the same arguments before the capture does it, as torch's "
    "own capture asks for, and covers exactly the specialisations that will run.",
    "O-CAP-07": "Forward only: NotImplementedError, and through the operator a backward that raises.",
}


class Test(NamedTuple):
    case: str
    name: str  # file.py::function
    place: str


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _place(function: ast.FunctionDef, decorators: str) -> str:
    if "mark.gpu" in decorators:
        return "GPU"
    if "interpret" in {a.arg for a in function.args.args}:
        return "interpreter"
    return "compiled" if _names(function) & COMPILING else "CPU"


def tests_in(path: Path) -> Iterator[Test]:
    """The tests of a file that carry a case mark, one entry for each mark."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "case":
                    yield Test(ast.literal_eval(mark.args[0]), f"{path.name}::{node.name}", _place(node, decorators))


def all_tests() -> list[Test]:
    return [test for path in sorted((ROOT / "tests" / "cases").glob("test_*.py")) for test in tests_in(path)]


def case_ids() -> list[str]:
    """Every id of these classes."""
    return [f"O-{name}-{i:02d}" for name, (count, _) in CLASSES.items() for i in range(1, count + 1)]


def summary(tests: list[Test]) -> list[str]:
    """Per class: how many cases have a test at each place."""
    lines = [f"| class | cases | {' | '.join(PLACES)} |", f"|---|---|{'---|' * len(PLACES)}"]
    for name, (count, title) in CLASSES.items():
        places = Counter(place for _, place in {(t.case, t.place) for t in tests if t.case[2:5] == name})
        lines.append(f"| {title} | {count} | {' | '.join(str(places[place]) for place in PLACES)} |")
    return lines


def page(tests: list[Test]) -> str:
    """The text of docs/cases.md."""
    lines = [
        "# Public failure cases", "",
        "Failures that users of other attention libraries reported, and the tests (in `tests/cases`) that ZYFA answers "
        "each with the right value. Written by `scripts/case_table.py`.", "",
        "CPU: `zyfa.attention` on CPU tensors. Interpreter: the kernels themselves, by Triton's interpreter. Compiled: "
        "gfx950 machine code. GPU: skipped where there is none. The counts are cases that have a test there.", "",
        *summary(tests), "", "| case | test | where |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {test.case} | `{test.name}` | {test.place} |" for test in sorted(tests)]
    lines += ["", "## Decided otherwise, or left open by the case", "", "| case | decision |", "|---|---|"]
    lines += [f"| {case} | {text} |" for case, text in sorted(DECISIONS.items())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    text = page(all_tests())
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    print("\n".join(summary(all_tests())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
