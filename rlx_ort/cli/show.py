"""What commands print: one JSON document, or tables for people; progress only on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["binary_size", "duration", "note", "print_facts", "print_json", "print_table", "progress"]

_PIPE_COLUMNS = 200
"""Width of a table that goes to a pipe or file, where there is no terminal to ask."""


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document in ASCII, which every terminal and pipe can carry."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; cells are plain text, whatever brackets they hold."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    _console(stderr=False).print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(name), Text(str(value)))
    _console(stderr=False).print(grid)


def note(text: str) -> None:
    """Print a remark on stderr, so that it never mixes with the results."""
    click.echo(text, err=True)


def progress(text: str) -> contextlib.AbstractContextManager[object]:
    """Show a spinner with a text while a block runs; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    return _console(stderr=True).status(text)


def duration(nanoseconds: float | None) -> str:
    """Return a time in the unit people would choose, or a dash when it is not known."""
    if nanoseconds is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def binary_size(count: int) -> str:
    """Return a number of bytes in the binary unit people would choose."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_COLUMNS
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)
