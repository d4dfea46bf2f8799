"""Files that appear whole or not at all, and the folder of what is kept between runs.

Everything that this package writes as one file is written here: beside its target under a hidden name, flushed to the
disk, then renamed. Readers see the old file or the new one, and a process that dies leaves the old one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlx_ort import environment

unfinished: set[Path] = set()
"""Files and folders that are being written; what ends the process at once removes them."""


@contextlib.contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a stream to a new file that takes the place of `path` when the block ends; if it raises, nothing is left.

    Args:
        path: the file to write; its folder must exist. Windows refuses to replace a file that is open or mapped.
        beside: where the new file lies until then, next to this path and on the same file system; `path` by default.

    Raises:
        OSError: the file cannot be written or not be put into place.
    """
    partial = partial_path(beside or path)
    unfinished.add(partial)
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    finally:
        unfinished.discard(partial)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file by `replacing`.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    with replacing(path) as stream:
        stream.write(data)


def partial_path(path: Path) -> Path:
    """Return an unpredictable name beside a path, for what is not complete yet: `.NAME.<hex>.partial`."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading that must be a regular one: pipes block, and devices may have no end.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # before it is opened, which has effects on some devices
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    stream = open(path, "rb", opener=_unblocked)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return stream


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    with open_regular(path) as stream:
        return stream.read()


def _unblocked(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe put there meanwhile does not block either


def cache_root() -> Path:
    """Return the folder of everything that is kept between runs, not created; `RLX_CACHE_DIR` moves it."""
    named = environment.get("CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return platformdirs.user_cache_path("rlx_ort", appauthor=False)


def cache_folder(name: str) -> Path:
    """Return a folder below `cache_root`, created.

    Raises:
        OSError: it cannot be created.
    """
    folder = cache_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
