"""Files that appear whole or not at all, and the folder of what is kept between runs.

Everything that this package writes as one file is written here: beside its target under a hidden name, flushed to the
disk, then renamed. Readers see the old file or the new one, and a process that dies leaves the old one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlx_ort import environment

_DEEPEST_JSON = 200  # a recursive reader takes up to four calls a level, of the 1,000 that Python allows
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

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


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return a JSON document that can be walked recursively and whose texts can be written as UTF-8.

    `hooks` are those of `json.loads`.

    Raises:
        ValueError: it is no JSON, no UTF-8, nested more than 200 levels deep, or has a number of thousands of digits
            or half a surrogate pair in it. No other exception.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        document = json.loads(text, **hooks)
        level, depth = [document], 0
        while level:
            depth += 1
            if depth > _DEEPEST_JSON:
                raise ValueError(f"it is nested more than {_DEEPEST_JSON} levels deep")
            items = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
            level = [inner for item in items for inner in item if isinstance(inner, dict | list)]
        if _SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RecursionError as err:
        raise ValueError(f"it is nested more than {_DEEPEST_JSON} levels deep") from err
    return document


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
