"""What notebooks show of graphs, reports and outputs, as HTML in which every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html_listing", "html_table"]

_SHOWN_LINES = 200


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a caption."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_listing(title: str, text: str) -> str:
    """Return a listing that opens at a click, of which the first lines are shown."""
    lines = text.splitlines()
    more = f"\n... {len(lines) - _SHOWN_LINES} lines more" if len(lines) > _SHOWN_LINES else ""
    shown = "\n".join(lines[:_SHOWN_LINES])
    return f"<details><summary>{escape(title)}</summary><pre>{escape(shown + more)}</pre></details>"
