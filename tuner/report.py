"""The end of a run as a table, as JSON and as a web page, all from the same rows."""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zyfa.config import cell_of
from zyfa.tuning_db.cli_tools import plain

from .cells import CellRun
from .page import write_page
from .progress import cell_name

_HEADS = ("cell", "default ms", "best ms", "speed-up", "error", "config", "trust")


def row_of(run: CellRun, trust: str) -> dict:
    """What is known of one cell at the end: plain values, None where there is none. Times in ms."""
    config, result = run.winner or (None, None)
    ms = result.ms if result else None
    return {
        "cell": cell_of(run.key)._asdict(),
        "name": cell_name(run.key),
        "state": run.state,
        "known_before": run.known,
        "default_ms": run.default_ms,
        "ms": ms,
        "ms_lo": result.ms_lo if result else None,
        "ms_hi": result.ms_hi if result else None,
        "speedup": run.default_ms / ms if run.default_ms and ms else None,
        "rel_err": result.rel_err if result else None,
        "config": config.to_dict() if config else None,
        "trust": trust if config else None,
        "confidence": run.confidence or None,
        "ties": run.ties,
        "incumbent": run.incumbent.to_dict() if run.incumbent else None,
        "gain_pct": run.gain,
        "outcomes": dict(run.outcomes),
        "reasons": dict(run.reasons),
    }


def _texts(row: dict) -> tuple[str, ...]:
    def number(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    config = " ".join(f"{k}={v}" for k, v in row["config"].items()) if row["config"] else why_none(row)
    trust = f"{row['trust']} {row['confidence'] or ''}".strip() if row["trust"] else ""
    speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
    error = number("rel_err", ".2g")
    texts = row["name"], number("default_ms", ".4g"), number("ms", ".4g"), speedup, error, config, trust
    return tuple(map(plain, texts))  # reasons quote compilers, and configs may be a stranger's


def why_none(row: dict) -> str:
    """Why a cell has no config: counts of each outcome and the commonest reasons."""
    counts = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in row["outcomes"].items())
    reasons = ", ".join(sorted(row["reasons"], key=row["reasons"].get, reverse=True)[:3])
    if row["outcomes"].get("ok"):
        return counts
    return f"no valid config ({counts or 'no trial ended'}{': ' + reasons if reasons else ''})"


def moved(row: dict) -> str:
    """What a recheck found of one cell."""
    if row["gain_pct"] is None or row["incumbent"] is None:
        return f"{row['name']}: {'known with this toolchain already' if row['known_before'] else 'nothing to compare'}"
    gain, low, high = row["gain_pct"]
    if row["incumbent"] == row["config"]:
        return f"{row['name']}: the winner stays"
    old, new = (" ".join(f"{k}={v}" for k, v in row[name].items()) for name in ("incumbent", "config"))
    return plain(f"{row['name']}: moved, {gain:.1f} % faster ({low:.1f} to {high:.1f}): {old} -> {new}")


def print_table(console: Console, rows: Sequence[dict]) -> None:
    """The final table; without a terminal nothing is cut off."""
    table = Table(*_HEADS)
    for row in rows:
        table.add_row(*map(Text, _texts(row)))
    if not console.is_terminal:
        console = Console(file=console.file, width=200)
    console.print(table)


def to_json(head: dict, rows: Sequence[dict]) -> str:
    """One JSON object: what was run, and its cells."""
    return json.dumps(head | {"cells": list(rows)}, indent=1, allow_nan=False)


def write_html(path: Path, head: dict, rows: Sequence[dict]) -> None:
    """A page that needs nothing but itself; every text is escaped."""
    heads = "".join(f"<th>{html.escape(text)}</th>" for text in _HEADS)
    body = "".join(f"<tr>{''.join(map(_html_cell, range(len(_HEADS)), _texts(row)))}</tr>\n" for row in rows)
    write_page(path, "zyfa-tune", head, f"<table><tr>{heads}</tr>\n{body}</table>")


def _html_cell(column: int, text: str) -> str:
    escaped = html.escape(text)
    if _HEADS[column] == "config":
        return f"<td><code>{escaped}</code></td>"
    return f"<td class='n'>{escaped}</td>" if 1 <= column <= 4 else f"<td>{escaped}</td>"
