"""What commands print and write: one JSON document or tables, progress on a terminal, and files written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status

_PIPE_COLUMNS = 200
"""Width of a table that goes to a pipe or file, which have no terminal width."""


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document in ASCII, which every terminal and pipe can carry; records become objects."""
    click.echo(json.dumps(document, indent=2, allow_nan=False, default=_plain))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Set) else str(value)


def emit(document: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], object]) -> None:
    """Print the result of a command: one JSON document with --json, else what `show` prints of it."""
    if as_json:
        print_json(document)
    else:
        show(document)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; cells are plain text, whatever brackets they hold."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_visible(cell)) for cell in row))
    _console(stderr=False).print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(_visible(name)), Text(_visible(value)))
    _console(stderr=False).print(grid)


def _visible(cell: object) -> str:
    """Return a text without terminal control characters, since names and licences come from untrusted files."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in str(cell))


def note(text: str) -> None:
    """Print a remark on stderr, so that it never mixes with the results."""
    click.echo(text, err=True)


def progress(text: str) -> contextlib.AbstractContextManager[Status | None]:
    """Show a spinner with a text while a block runs, which the block can update; None when stderr is no terminal."""
    return _console(stderr=True).status(text) if sys.stderr.isatty() else contextlib.nullcontext()


@contextlib.contextmanager
def counted(text: str) -> Iterator[Callable[[int], object] | None]:
    """Give a function that takes bytes done and shows their sum behind a text, or None without a terminal."""
    done = 0
    with progress(text) as shown:

        def add(count: int) -> None:
            nonlocal done
            done += count
            if shown is not None:
                shown.update(f"{text}: {binary_size(done)}")

        yield None if shown is None else add


class Steps:
    """A line with its time for each step of a command, and a bar for one that counts bytes."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    def begin(self, text: str) -> None:
        """Show what begins now; the step before it has ended."""
        self.count(1, 1)
        self._shown.add_task(text, total=None)

    def count(self, done: int, total: int) -> None:
        """Show how far the step is."""
        for task in self._shown.task_ids[-1:]:
            self._shown.update(task, completed=done, total=total)


@contextlib.contextmanager
def steps() -> Iterator[Steps]:
    """Give what shows the steps of a command on stderr; it shows nothing when that is no terminal."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), disable=not sys.stderr.isatty()) as shown:
        made = Steps(shown)
        yield made
        made.count(1, 1)


def first_line(failure: object) -> str:
    """Return the first line of an error or text for the cell of a table."""
    return next(iter(str(failure).splitlines()), "")


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside `path` for writing and put it in place of `path` when the block ends without an error.

    Raises:
        WriteError: the file cannot be written.
    """
    from rlx_ort import storage
    from rlx_ort.errors import WriteError

    try:
        with storage.replacing(path) as stream:
            yield stream
    except OSError as err:
        hint = "check the folder, its rights and the space on the disk"
        raise WriteError(f"{path} cannot be written: {err.strerror or err}; {hint}") from err
