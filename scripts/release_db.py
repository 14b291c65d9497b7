"""Turns a tuning log into the file that is shipped, and its text for the pull request.

    .venv/bin/python scripts/release_db.py out/nvidia-sm90-h200-sm132.sqlite

Writes <key>.sqlite (compact, analysed, journal mode DELETE, stamped with version and day) and <key>.txt to
tuning_db/data/. Nothing is replaced, exit 1, where verify finds something, the file is too large, or no cell has a row.
"""

import argparse
import datetime
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

from zyfa.errors import DatabaseError
from zyfa.tuning_db import text
from zyfa.tuning_db.content import Content, read_content, write_content
from zyfa.tuning_db.reader import DATA, read
from zyfa.tuning_db.verify import findings

MAX_BYTES = 300_000  # a wheel carries several of these, and a repository every version of them


def stamped(content: Content, day: str) -> Content:
    return content._replace(meta=content.meta | {"released_with": version("zyfa"), "released_on": day})


def faults_of(path: Path) -> list[str]:
    """Why the file may not be shipped."""
    found = findings(path)
    if not found and not read(path):
        found.append(f"{path}: no cell has a row")
    if (size := path.stat().st_size) > MAX_BYTES:
        found.append(f"{path}: {size} bytes, more than {MAX_BYTES}; zyfa-db prune makes it smaller")
    return found


def release(source: Path, folder: Path, day: str) -> list[str]:
    """Writes both files and returns nothing, or writes nothing and returns why."""
    if found := findings(source):
        return found
    content = stamped(read_content(source), day)
    name = content.meta.get("sku", "unknown").replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f".{name}{suffix}.{os.getpid()}" for suffix in (".sqlite", ".txt")]
    try:
        write_content(content, parts[0])
        if found := faults_of(parts[0]):
            return found
        lines = "".join(f"{line}\n" for line in text.dump(content))
        parts[1].write_text(lines, encoding="utf-8", newline="\n")
        for part, suffix in zip(parts, (".sqlite", ".txt"), strict=True):
            os.replace(part, folder / f"{name}{suffix}")
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    report(folder / f"{name}.sqlite")
    return []


def report(path: Path) -> None:
    begun = time.perf_counter()
    rows = read(path)
    print(
        f"{path}: {path.stat().st_size} bytes, {len(rows)} rows, read in {1e3 * (time.perf_counter() - begun):.1f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=DATA, help="the folder (tuning_db/data)")
    parser.add_argument("--day", default=datetime.date.today().isoformat(), help="the stamp (today)")
    given = parser.parse_args()
    failed = 0
    for path in given.files:
        try:
            found = release(path, given.out, given.day)
        except (DatabaseError, ValueError) as error:
            found = [str(error)]
        failed += bool(found)
        for fault in found:
            print(fault, file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
