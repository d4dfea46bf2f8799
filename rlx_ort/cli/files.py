"""Writing files so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

from rlx_ort import storage

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside `path` for writing and put it in place of `path` when the block ends without an error.

    Raises:
        click.FileError: the file cannot be written.
    """
    try:
        with storage.replacing(path) as stream:
            yield stream
    except OSError as err:
        raise click.FileError(str(path), err.strerror or str(err)) from err
