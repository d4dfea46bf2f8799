"""Writing files so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside `path` for writing and put it in place of `path` when the block ends without an error.

    Its name is one that nobody can foresee, and a file or link that has it all the same is not written to.

    Raises:
        click.FileError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as stream:
            yield stream
        partial.replace(path)
    except OSError as err:
        raise click.FileError(str(path), err.strerror or str(err)) from err
    finally:
        partial.unlink(missing_ok=True)
