"""Writing files so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside `path` for writing and put it in place of `path` when the block ends without an error.

    Raises:
        click.FileError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(path)
    except OSError as err:
        raise click.FileError(str(path), err.strerror or str(err)) from err
    finally:
        partial.unlink(missing_ok=True)
