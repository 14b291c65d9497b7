"""Small tuning databases for tests, and a way to damage them."""

import contextlib
import os
import sqlite3

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import device_of_sku
from zyfa.tuning_db.certificates import Certificate, add_certificate
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

H200 = device_of_sku("h200")
TOOLS = Toolchain("k1", "3.7.1", "2.13.0", "570.1")
CONFIG = AttentionConfig(64, 64, 4, 3)  # fits every architecture, differs from every default


def a_key(seqlen=2048, *, dtype="bf16", head_dim=128, nheads=32, nheads_k=8, batch=1, seqlen_k=None, causal=True):
    return AttentionKey(dtype, head_dim, head_dim, nheads, nheads_k, batch, seqlen, seqlen_k or seqlen, causal)


def add_ok(store, key, config=CONFIG, ms=1.0, trust="measured", toolchain=TOOLS, win=True, certified=True, **more):
    """Adds an ok trial, makes it the winner, certifies its recipe unless told otherwise, and returns its id."""
    samples = (ms, ms) if trust == "measured" else ()
    rel_err = 0.002 if trust == "measured" else None
    trial = store.add_trial(
        key, toolchain, config, outcome="ok", trust=trust, ms=ms, samples=samples, rel_err=rel_err, **more
    )
    if certified and key.dtype == "fp8":
        add_certificate(store, toolchain, trust, a_certificate(config.recipe, key))
    if win:
        store.set_winner(trial, confidence="A", trials=1)
    return trial


def a_certificate(recipe, key=None, errors=None):
    key = key or a_key(dtype="fp8")
    return Certificate(recipe, key.head_dim, key.head_dim_v, key.causal, errors or {"normal": (0.03, 0.04)})


def make_db(path, *winners, device=H200):
    """A database with one winner per (key, keyword arguments of add_ok)."""
    with Store(path, device) as store:
        store._db.execute("PRAGMA synchronous = OFF")  # half of the time of these tests
        for key, more in winners:
            add_ok(store, key, **more)
    return path


def damage(path, *statements):
    """Runs SQL on a database without any of the store's care."""
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("PRAGMA ignore_check_constraints = ON")
    conn.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        conn.execute(statement)
    conn.close()


def backdate(path, toolchain, when):
    """Gives the winners of a toolchain (its id) another time, and the seal that goes with it."""
    damage(path, f"UPDATE winners SET tuned_at = '{when}' WHERE toolchain = {toolchain}")
    with Store(path) as store:
        for (trial,) in store._db.execute("SELECT trial FROM winners").fetchall():
            store._seal("winners", trial)


@contextlib.contextmanager
def modes(folder, **mode_of):
    """Gives the folder and files in it (by name) other modes, and drops root's right to ignore them."""
    changed = {folder / name if name != "." else folder: mode for name, mode in mode_of.items()}
    for path in folder.parents:
        if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o055 != 0o055:
            path.chmod(0o755)  # so that the other user gets this far
    before = {path: path.stat().st_mode for path in changed}
    for path, mode in changed.items():
        path.chmod(mode)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in before.items():
            path.chmod(mode)


def read_only(folder):
    """The folder and its files can be read and not written."""
    return modes(folder, **{".": 0o555}, **{path.name: 0o444 for path in folder.iterdir()})
