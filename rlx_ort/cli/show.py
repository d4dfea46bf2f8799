"""Output of commands: one JSON document or tables, progress on a terminal, and files written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

_WRAPPED = 28  # cells up to this width are never wrapped
_BETWEEN, _EDGES = 3, 2  # columns of the terminal between two columns of a table, and around it
_PIPE_COLUMNS = 200
"""Width of a table that goes to a pipe or file, which have no terminal width."""


JSON_SCHEMA = 1
"""The schema of the documents of --json: grows when an entry changes its meaning or goes, not when one is added."""

_PRINTED = "rlx_ort.printed_json"
_QUIET = "rlx_ort.quiet"


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document in ASCII, which every terminal and pipe can carry; records become objects."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_PRINTED] = True
    click.echo(json.dumps({"schema": JSON_SCHEMA, **document}, indent=2, allow_nan=False, default=_plain))


def print_failure(context: click.Context, kind: str, message: str, exit_code: int) -> None:
    """Print an error as a JSON document, unless the command has printed its own."""
    if not context.meta.get(_PRINTED):
        print_json({"error": {"type": kind, "message": message, "exit_code": exit_code}})
        context.meta[_PRINTED] = True


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Set) else str(value)


def emit(document: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Print the result of a command: one JSON document with --json, else by `show`, if there is one."""
    if as_json:
        print_json(document)
    elif show is not None:
        show(document)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; cells are plain text, whatever brackets they hold.

    Columns without any text are left out. A table that is wider than the terminal is printed in parts, each with the
    first column; only long texts are wrapped.
    """
    cells = [[_visible(cell) for cell in row] for row in rows]
    kept = [at for at in range(len(columns)) if at == 0 or not cells or any(row[at] for row in cells)]
    console = _console(stderr=False)
    for part in _parts([_width(columns[at], [row[at] for row in cells]) for at in kept], console.width):
        places = [kept[at] for at in part]
        console.print(_table([columns[at] for at in places], [[row[at] for at in places] for row in cells], title))
        title = None


def print_wrapped(text: str) -> None:
    """Print a text in lines no longer than the terminal, all but the first indented."""
    click.echo(textwrap.fill(_visible(text), _console(stderr=False).width, subsequent_indent="  "))


def print_digests(rows: Iterable[tuple[str, str]]) -> None:
    """Print digests and their owners, one a line that is never wrapped or cut, so that a digest can be copied."""
    for digest, owner in rows:
        click.echo(f"{digest}  {_visible(owner)}")


def print_rest(what: str, rows: Sequence[tuple[str, str, str]], in_full: bool) -> None:
    """Print devices that cannot be used, as device, reason and remedy: in one line, or in full.

    In full the remedies follow the table, each in a line of its own that is not broken, so that it can be copied.
    """
    if not rows:
        return
    if not in_full:
        listed = ", ".join(device for device, *_ in rows)
        click.echo(textwrap.fill(f"{what}: {listed}; --all shows why", _console(stderr=False).width))
        return
    print_table(("device", "why not"), [row[:2] for row in rows])
    remedies: dict[str, list[str]] = {}
    for device, _, remedy in rows:
        if remedy:
            remedies.setdefault(remedy, []).append(device)
    for remedy, devices in remedies.items():
        click.echo(f"for {', '.join(devices)}:\n  {_visible(remedy)}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        wide = _width(column, [row[at] for row in rows]) > _WRAPPED
        table.add_column(column, overflow="fold", no_wrap=not wide)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _width(column: str, cells: Iterable[str]) -> int:
    return max(len(line) for cell in (column, *cells) for line in (cell.splitlines() or [""]))


def _parts(widths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the columns of each part of a table, by their widths; the first column is in every part."""
    part, used = [0], min(widths[0], _WRAPPED)
    for at in range(1, len(widths)):
        needed = _BETWEEN + min(widths[at], _WRAPPED)
        if used + needed + _EDGES > most and len(part) > 1:
            yield part
            part, used = [0], min(widths[0], _WRAPPED)
        part.append(at)
        used += needed
    yield part


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


def set_loudness(context: click.Context, param: click.Parameter, value: int) -> None:
    """Apply --verbose or --quiet until the command ends."""
    if not value or context.resilient_parsing:
        return
    if param.name == "quiet":
        context.meta[_QUIET] = True
        level = logging.ERROR
    else:
        level = logging.INFO if value == 1 else logging.DEBUG
    context.with_resource(_logged(level))


@contextlib.contextmanager
def _logged(level: int) -> Iterator[None]:
    logger, handler = logging.getLogger("rlx_ort"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(_QUIET, False)


def note(text: str) -> None:
    """Print a remark on stderr, so that it never mixes with the results; nothing with --quiet."""
    if not _is_quiet():
        click.echo(text, err=True)


def print_piece(text: str) -> None:
    """Print a part of a text that goes on, at once, without control characters that the terminal would obey."""
    click.echo(_visible(text), nl=False)
    sys.stdout.flush()


def progress(text: str) -> contextlib.AbstractContextManager[Status | None]:
    """Show a spinner with a text while a block runs, which the block can update; None when stderr is no terminal."""
    return _console(stderr=True).status(text) if _is_watched() else contextlib.nullcontext()


def _is_watched() -> bool:
    """Return whether progress is shown: on a terminal, without --quiet."""
    return is_terminal(sys.stderr) and not _is_quiet()


@contextlib.contextmanager
def bar(text: str, total: float | None = None) -> Iterator[Callable[[float, str], object] | None]:
    """Show a text and a bar while a block runs; one without a total only moves.

    Gives a function that takes how far the block is, of the total, and a new text; None where nothing is shown.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not _is_watched():
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as shown:
        task = shown.add_task(text, total=total)
        yield lambda done, now: shown.update(task, completed=done, description=now)


@contextlib.contextmanager
def counted(text: str, total: int | None = None) -> Iterator[Callable[[int], object] | None]:
    """Give a function that takes bytes done and shows their sum, of the total if there is one; None as in `bar`."""
    done = 0
    with bar(text, total) as show:

        def add(count: int) -> None:
            nonlocal done
            done += count
            if show is not None:
                show(done, f"{text}: {binary_size(done)}" + (f" of {binary_size(total)}" if total else ""))

        yield None if show is None else add


@contextlib.contextmanager
def steps() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Show a line with its time for each step of a command, on a terminal, and a bar for one that counts bytes.

    Gives a function that begins a step, by its text, and one that takes how far the step is, and of how much.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), disable=not _is_watched()) as shown:

        def count(done: int, total: int) -> None:
            for task in shown.task_ids[-1:]:
                shown.update(task, completed=done, total=total)

        def begin(text: str) -> None:
            count(1, 1)  # the step before has ended
            shown.add_task(text, total=None)

        yield begin, count
        count(1, 1)


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
    return f"{nanoseconds:.3g} ns" if nanoseconds >= 0.1 or not nanoseconds else "< 0.1 ns"


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
    shown = is_terminal(stream)
    width, forced = (None, None) if shown else (_PIPE_COLUMNS, False)
    return Console(file=stream, width=width, force_terminal=forced, markup=False, emoji=False, highlight=False)


def is_terminal(stream: IO[str]) -> bool:
    """Return whether a stream goes to a terminal. One has a size; NUL, which Windows takes for one, has none."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()) is not None
    except (OSError, ValueError):
        return False


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
