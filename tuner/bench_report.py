"""A zyfa-bench run as one web page that needs nothing but itself: facts, a bar for each row, and all numbers."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from .page import write_page


def write_report(path: Path, title: str, facts: Mapping[str, object], rows: Sequence[Mapping], value: str) -> None:
    """Writes the rows (one form, name first) with bars of `value` and its interval value_lo .. value_hi."""
    heads = "".join(f"<th>{_text(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>\n" for row in rows)
    write_page(path, title, facts, f"{bars(rows, value)}<table><tr>{heads}</tr>\n{body}</table>")


def bars(rows: Sequence[Mapping], value: str) -> str:
    """An SVG with one horizontal bar a row, its length the value, with a line over the interval."""
    most = max(row[f"{value}_hi"] for row in rows)
    drawn = []
    for y, row in zip(range(0, 24 * len(rows), 24), rows, strict=True):
        length, lo, hi = (600 * row[name] / most for name in (value, f"{value}_lo", f"{value}_hi"))
        drawn.append(
            f"<text x='250' y='{y + 16}' text-anchor='end'>{_text(row['name'])}</text>"
            f"<rect x='260' y='{y + 4}' width='{length:.1f}' height='16' fill='#47a'/>"
            f"<path d='M{260 + lo:.1f} {y + 12}H{260 + hi:.1f}' stroke='currentColor'/>"
            f"<text x='{266 + hi:.1f}' y='{y + 16}'>{row[value]:.4g}</text>"
        )
    return (
        f"<svg viewBox='0 0 940 {24 * len(rows)}' font-size='13' fill='currentColor' role='img' "
        f"aria-label='{_text(value)}'>{''.join(drawn)}</svg>"
    )


def _text(x: object) -> str:
    return html.escape(str(x), quote=True)


def _cell(x: object) -> str:
    if isinstance(x, float):
        return f"<td class='n'>{x:.4g}</td>"
    return f"<td>{'' if x is None else _text(x)}</td>"
