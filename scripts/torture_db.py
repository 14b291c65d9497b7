"""Does to a tuning database what kills, full disks, crowds and bad memory do, and counts what that costs.

    .venv/bin/python scripts/torture_db.py                       the full programme, some minutes
    .venv/bin/python scripts/torture_db.py --kills 20 --flips 50 --full 5 --writers 4 --trials 10

Prints one JSON object; exit 1 if an acknowledged trial was lost, damage went unseen, or anything raised.
"""

import argparse
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import device_of_sku
from zyfa.errors import DatabaseError
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store
from zyfa.tuning_db.verify import findings

DEVICE = device_of_sku("h200")
TOOLS = Toolchain("torture", "3.7.1", "2.13.0", "570.1")
KILLS_PER_FILE = 100


def write(path: Path, writer: int, trials: int, acknowledge) -> None:
    """Adds trials, each of which becomes a winner, and acknowledges it with a byte once it is on disk."""
    with Store(path, DEVICE) as store:
        for number in range(trials):
            key = AttentionKey("bf16", 128, 128, 32, 8, 1, 512 << number % 7, 512 << number % 7, True)
            config = AttentionConfig(64, 64, 4, 1 + (writer + number) % 5)
            trial = store.add_trial(
                key, TOOLS, config, outcome="ok", trust="measured", ms=1.0 + number, samples=(1.0, 1.1), rel_err=0.002,
                reason=f"writer {writer}", facts={"registers": number % 50},
            )  # fmt: skip
            acknowledge()
            store.set_winner(trial, confidence="A", trials=1)


def fork(path: Path, writer: int, trials: int, file_limit: int | None = None) -> tuple[int, int]:
    """(process id, pipe with one byte per acknowledged trial) of a child that writes; a full disk ends it with 3."""
    out, into = os.pipe()
    child = os.fork()
    if child:
        os.close(into)
        return child, out
    os.close(out)
    code = 1
    try:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
        write(path, writer, trials, lambda: os.write(into, b"."))
        code = 0
    except DatabaseError as error:
        code = 3 if file_limit is not None else 4
        if code == 4:
            print(f"writer {writer}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def ended(child: int, out: int) -> tuple[int, int]:
    """(acknowledged trials, exit code or minus the signal) of a child that has ended or is about to."""
    acknowledged = 0
    while got := os.read(out, 4096):
        acknowledged += len(got)
    os.close(out)
    return acknowledged, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stored(path: Path) -> int:
    """How many trials the file has after a writer has opened it, as the next run of zyfa-tune would."""
    if not path.exists():
        return 0
    with Store(path, DEVICE) as store:
        return len(store.trials())


def kills(folder: Path, number: int) -> dict:
    """kill -9 of a writer at a random moment, again and again on one file."""
    counts = {"kills": 0, "acknowledged": 0, "lost": 0, "faults": 0}
    for batch in range(0, number, KILLS_PER_FILE):
        path, acknowledged = folder / f"kill{batch}.sqlite", 0
        for writer in range(batch, min(batch + KILLS_PER_FILE, number)):
            child, out = fork(path, writer, 10_000)
            time.sleep(random.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
            more, code = ended(child, out)
            acknowledged += more
            counts["kills"] += code == -signal.SIGKILL
        counts["acknowledged"] += acknowledged
        counts["lost"] += max(0, acknowledged - stored(path))
        counts["faults"] += len(findings(path))
    return counts


def crowd(folder: Path, writers: int, trials: int) -> dict:
    """Many processes create and fill one file together."""
    path, begun = folder / "crowd.sqlite", time.monotonic()
    ends = [ended(*child) for child in [fork(path, writer, trials) for writer in range(writers)]]
    acknowledged, failed = sum(n for n, _ in ends), sum(code != 0 for _, code in ends)
    return {
        "writers": writers, "acknowledged": acknowledged, "lost": writers * trials - stored(path), "failed": failed,
        "faults": len(findings(path)), "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def full(folder: Path, number: int) -> dict:
    """A disk that is full at a random moment: the file may not grow beyond a random size."""
    counts = {"full": 0, "acknowledged": 0, "lost": 0, "faults": 0, "other_ends": 0}
    for case in range(number):
        path = folder / f"full{case}.sqlite"
        fork_and_end = ended(*fork(path, case, 5))  # something to lose
        limit = path.stat().st_size + random.randrange(-8192, 16_000)
        more, code = ended(*fork(path, case, 400, limit))
        acknowledged = fork_and_end[0] + more
        counts["full"] += code == 3
        counts["other_ends"] += code not in (0, 3)
        counts["acknowledged"] += acknowledged
        counts["lost"] += max(0, acknowledged - stored(path))
        counts["faults"] += len(findings(path))
        path.unlink()
    return counts


def flips(folder: Path, number: int) -> dict:
    """One bit of a shipped file turned over: refused, a row left out, or not to be seen in what the runtime reads."""
    log, path = folder / "log.sqlite", folder / "shipped.sqlite"
    write(log, 0, 60, lambda: None)
    with Store(log) as store:
        store.export(path)
    whole, rows = path.read_bytes(), read(path)
    counts = {"flips": number, "refused": 0, "rows_left_out": 0, "harmless": 0, "unseen": 0, "raised": 0}
    for _ in range(number):
        bit = random.randrange(8 * len(whole))
        path.write_bytes(flipped(whole, bit))
        counts[judge(path, rows)] += 1
    return counts


def flipped(whole: bytes, bit: int) -> bytes:
    return whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :]


def judge(path: Path, rows: list) -> str:
    """What reading a damaged file came to, given the rows of the whole one."""
    skipped: list[str] = []
    try:
        found = read(path, skipped)
    except DatabaseError:
        return "refused"
    except Exception as error:
        print(f"raised {error!r}", file=sys.stderr)
        return "raised"
    mine = [row for row in found if (row.sku, row.arch) == (rows[0].sku, rows[0].arch)]  # as lookup takes them
    if mine == rows:
        return "harmless"
    told = skipped or len(mine) < len(found)
    return "rows_left_out" if told and all(row in rows for row in mine) else "unseen"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("kills", 2000),
        ("writers", 32),
        ("trials", 200),
        ("full", 200),
        ("flips", 500),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    given = parser.parse_args()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "sqlite": sqlite3.sqlite_version,
            "kill": kills(Path(folder), given.kills),
            "crowd": crowd(Path(folder), given.writers, given.trials),
            "full": full(Path(folder), given.full),
            "flip": flips(Path(folder), given.flips),
        }
    print(json.dumps(result, indent=1))
    bad = ("lost", "faults", "failed", "other_ends", "unseen", "raised")
    return int(any(part.get(name) for part in result.values() if isinstance(part, dict) for name in bad))


if __name__ == "__main__":
    sys.exit(main())
