"""Stores machine code of the attention kernel as the running Triton compiles it: what tests/test_facts.py reads.

    python scripts/record_listings.py gfx950 tests/data/listings

One architecture a process: Triton 3.6 keeps the FP8 conversion of the first AMD target for all that follow. Kept are
the span from the first matrix loop to the last, with labels or addresses, and the lines that state resources; of the
warp-specialised kernel all instructions, for its partitions are entered through a table and wait behind the code.
"""

import argparse
import gzip
import re
from pathlib import Path

import triton

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.kernels.launch import compile_for
from zyfa.tuner import facts
from zyfa.tuner.compile import _target, pin_environment
from zyfa.tuner.flow import Instruction, matrix_loops

_KEY = AttentionKey("bf16", 128, 128, 32, 8, 1, 4096, 4096, True)
_GFX, _SM90 = AttentionConfig(128, 64, 4, 1), AttentionConfig(64, 128, 4, 2, recipe="block")
KERNELS = {  # name in the file: key, config
    "gfx950": {
        "bf16": (_KEY, _GFX),
        "fp8": (_KEY._replace(dtype="fp8"), AttentionConfig(128, 64, 4, 2, recipe="block")),
    },
    "gfx942": {"fp8": (_KEY._replace(dtype="fp8"), AttentionConfig(128, 64, 4, 1, recipe="block"))},
    "sm90": {
        "fp8": (_KEY._replace(dtype="fp8"), _SM90),
        "gluon": (_KEY, AttentionConfig(128, 64, 8, 2, variant="gluon", ping_pong=True)),
    },
}


def trimmed_gfx(listing: str) -> str:
    """Labels and instructions from the first matrix loop to the last, and the fields of the kernel descriptor."""
    body, rest = re.split(r"^\.Lfunc_end\d+:.*$", listing, maxsplit=1, flags=re.M)
    lines = [re.sub(r"\s*;.*", "", line) for line in body.splitlines()]
    kept = [line for line in lines if re.match(r"\.L\w+:|\s+[a-z][a-z0-9_]+\b", line)]
    first, last = _span(facts._parse_gfx("\n".join(kept)), lambda op: op.startswith("v_mfma"))
    numbers = [n for n, line in enumerate(kept) if not line.startswith(".L")]
    start, stop = numbers[first], numbers[last] + 1
    while kept[start - 1].startswith(".L"):
        start -= 1
    fields = [line for line in rest.splitlines() if any(re.search(f, line) for f in facts._GFX_FIELDS.values())]
    return "\n".join([*kept[start:stop], ".Lfunc_end0:", *fields, ""])


def trimmed_sass(listing: str, whole: bool) -> str:
    """Instructions from the first matrix loop to the last, or all, with addresses, without encodings; and the usage."""
    kept = [re.sub(r"\s*/\* 0x[0-9a-f]{16} \*/\s*$", "", line) for line in listing.splitlines()]
    code = [line for line in kept if facts._SASS_LINE.match(line)]
    first, last = _span(facts._parse_sass("\n".join(code)), lambda op: facts._MATRIX.match(op) is not None)
    first, last = (0, len(code)) if whole else (first, last)
    usage = [line for line in kept if facts._SASS_USAGE.search(line)]
    return "\n".join([*usage, *code[first : last + 1], ""])


def _span(code: list[Instruction], is_matrix) -> tuple[int, int]:
    """Index of the first and of the last instruction of all matrix loops."""
    place = {id(instruction): n for n, instruction in enumerate(code)}
    inside = [place[id(instruction)] for body in matrix_loops(code, is_matrix) for instruction in body]
    return min(inside), max(inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=KERNELS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    pin_environment()
    for name, (key, config) in KERNELS[given.arch].items():
        with _target(given.arch):
            kernel = compile_for(key, config, given.arch)
        if given.arch == "sm90":
            text = trimmed_sass(facts.sass_listing(kernel.asm["cubin"]), config.variant == "gluon")
        else:
            text = trimmed_gfx(kernel.asm["amdgcn"])
        path = given.folder / f"{given.arch}-{name}-triton{triton.__version__}.txt.gz"
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(path, path.stat().st_size, kernel.metadata.shared, facts.facts_of(kernel, given.arch))


if __name__ == "__main__":
    main()
