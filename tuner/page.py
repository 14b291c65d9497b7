"""What the web pages of all commands share: one file that needs nothing but itself."""

import html
from collections.abc import Mapping
from pathlib import Path

_STYLE = """body{font:15px/1.4 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884}
td.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:.85em}"""


def write_page(path: Path, title: str, facts: Mapping[str, object], content: str) -> None:
    """Writes a page: title and facts, which are escaped, and content, which is HTML."""
    items = "".join(f"<li>{html.escape(str(k))}: {html.escape(str(v))}</li>" for k, v in facts.items())
    title = html.escape(title)
    path.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width,initial-scale=1'><title>{title}</title>"
        f"<style>{_STYLE}</style><h1>{title}</h1><ul>{items}</ul>{content}</html>\n",
        encoding="utf-8",
    )
