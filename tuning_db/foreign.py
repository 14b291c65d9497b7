"""The formats of other tuners, as far as they speak of prefill attention.

Kernel Tuner's T4 result files keep times, so ours survive the way there and back. AITER's JSON and AOTriton's SQLite
hold the choice for other kernels and no times: from there come seeds, configs worth measuring, and never rows.
"""

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from zyfa.config import AttentionConfig
from zyfa.errors import ConfigError, DatabaseError

from . import text
from .content import Content
from .reader import BUSY_S, MAX_BYTES, MAX_TEXT_BYTES, Row

MAX_SEEDS = 20_000
T4_SCHEMA = "1.0.0"

# Where others' names differ from ours; a name that is in neither has no counterpart in our kernel and is dropped.
_KNOBS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
_DTYPES = {"*bf16": "bf16", "torch.bfloat16": "bf16", "*fp16": "fp16", "torch.float16": "fp16"}
_FAILED = {"compile_failed": "compile", "timed_out": "timeout", "wrong": "correctness", "crashed": "runtime"}


class Seed(NamedTuple):
    """A config that another tuner chose, and for what; None where its file does not say."""

    gpu: str
    dtype: str | None
    head_dim: int | None
    causal: bool | None
    seqlen_q: int | None
    seqlen_k: int | None
    config: AttentionConfig


# --- AITER: gfx950-MHA-DEFAULT.json, {"fwd": {"default": {"BLOCK_M": 128, ...}, ...}, ...} ----------------------------


def seeds_of_aiter(path: str | os.PathLike) -> list[Seed]:
    """The forward configs of an AITER Triton file; raises DatabaseError where it has none."""
    values = _json_of(path)
    forward = values.get("fwd") if isinstance(values, dict) else None
    if not isinstance(forward, dict):
        raise DatabaseError(f"{path}: no AITER configuration of attention: it has no object fwd")
    gpu = Path(path).name.split("-")[0]
    configs = [config for knobs in forward.values() if isinstance(knobs, dict) and (config := _config(knobs))]
    return [Seed(gpu, None, None, None, None, None, config) for config in dict.fromkeys(configs)]


def aiter_of(rows: Iterable[Row]) -> dict:
    """AITER's form of the best rows; its one forward "default" is the config that serves most cells of 16 bits.

    Names beside "default" are AITER's own cases, so every cell goes under a key of ours, which it ignores.
    """
    rows = list(rows)
    common = Counter(row.config for row in rows if row.dtype != "fp8").most_common(1)
    default = {"default": _aiter(common[0][0])} if common else {}
    return {"fwd": default, "zyfa": {f"{' '.join(map(str, row.cell))}": _aiter(row.config) for row in rows}}


def _aiter(config: AttentionConfig) -> dict:
    return {name: getattr(config, name) for name in _KNOBS if name in config.to_dict()} | {"num_ctas": 1}


# --- AOTriton: a table FLASH$attn_fwd with columns inputs$..., tuned_kernel$..., compiler_options$... -----------------


def seeds_of_aotriton(path: str | os.PathLike) -> list[Seed]:
    """The forward rows of an AOTriton tuning database, which is read only; raises DatabaseError."""
    if os.path.getsize(path) > MAX_BYTES:
        raise DatabaseError(f"{path}: more than {MAX_BYTES} bytes")
    try:
        with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as conn:
            conn.row_factory = sqlite3.Row
            conn.execute("PRAGMA trusted_schema = OFF")
            conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT_BYTES)
            tables = [n for (n,) in conn.execute("SELECT name FROM sqlite_schema WHERE type = 'table' LIMIT 1000")]
            if "FLASH$attn_fwd" not in tables:
                raise DatabaseError(f"{path}: no AOTriton database: it has no table FLASH$attn_fwd")
            rows = conn.execute(f'SELECT * FROM "FLASH$attn_fwd" LIMIT {MAX_SEEDS}').fetchall()
    except sqlite3.Error as error:
        raise DatabaseError(f"{path}: {error}") from error
    return list(dict.fromkeys(seed for row in rows if (seed := _aotriton(dict(row)))))


def _aotriton(row: dict) -> Seed | None:
    given = {name.split("$")[-1]: value for name, value in row.items()}
    causal = given.get("CAUSAL", given.get("CAUSAL_TYPE"))
    dtype = _DTYPES.get(str(given.get("Q_dtype", "")).split(":")[0])
    config = _config(given)
    if config is None or dtype is None:
        return None
    lengths = given.get("Max_seqlen_q"), given.get("Max_seqlen_k")
    return Seed(
        str(given.get("gpu", "")), dtype, given.get("BLOCK_DMODEL"), None if causal is None else causal not in (0, "0"),
        *lengths, config,
    )  # fmt: skip


def _config(knobs: dict) -> AttentionConfig | None:
    """Our config of another kernel's knobs; None where it lacks one that we need, or one is no number."""
    try:
        return AttentionConfig.from_dict({name: knobs[name] for name in _KNOBS if name in knobs})
    except ConfigError:
        return None


# --- Kernel Tuner: T4 -------------------------------------------------------------------------------------------------


def t4_of(content: Content) -> dict:
    """A T4 object; beside its own fields each result carries the trial as `zyfa-db export` prints it."""
    lines = [json.loads(line) for line in list(text.dump(content))[1:]]
    results = [_t4_result(line) for line in lines if "trial" in line]
    rest = [line for line in lines if "trial" not in line]
    return {"schema_version": T4_SCHEMA, "metadata": {"zyfa": rest}, "results": results}


def _t4_result(line: dict) -> dict:
    samples = [us / 1e3 for us in line.get("samples_us", ())]
    measured = [{"name": "time", "value": line["ms"], "unit": "ms"}] if line["outcome"] == "ok" else []
    return {
        "timestamp": line["created_at"], "configuration": line["config"], "objectives": ["time"],
        "times": {"runtimes": samples}, "measurements": measured, "correctness": int(line["outcome"] == "ok"),
        "invalidity": "correct" if line["outcome"] == "ok" else _FAILED.get(line["outcome"], "constraints"),
        "zyfa": line,
    }  # fmt: skip


def content_of_t4(path: str | os.PathLike) -> Content:
    """Inverse of t4_of; raises DatabaseError for the T4 of other kernels, whose times say nothing of ours."""
    values = _json_of(path)
    try:
        rest, trials = values["metadata"]["zyfa"], [result["zyfa"] for result in values["results"]]
    except (KeyError, TypeError) as error:
        raise DatabaseError(f"{path}: T4 without our trials: times of other kernels say nothing of ours") from error
    winners = [line for line in rest if "winner" in line]
    before = [line for line in rest if "winner" not in line]  # facts and toolchains are named before they are used
    return text.load([text.HEAD, *map(json.dumps, [*before, *trials, *winners])])


def _json_of(path: str | os.PathLike):
    if os.path.getsize(path) > MAX_BYTES:
        raise DatabaseError(f"{path}: more than {MAX_BYTES} bytes")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{path}: not JSON: {error}") from error


def seed_lines(seeds: Iterable[Seed]) -> Iterator[dict]:
    """Each seed as plain values."""
    for seed in seeds:
        yield seed._asdict() | {"config": seed.config.to_dict()}
