"""Files that appear whole or not at all, and the folder of data kept between runs.

Everything that this package writes as one file is written here: beside its target under a hidden name, flushed to the
disk, then renamed. Readers see the old file or the new one, and a process that dies leaves the old one. What it was
writing then is removed by the next process that writes into the folder. The hidden name holds the id of the process and
a tag of its machine, by which `clear_unfinished` spares the files of processes that still run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlx_ort import environment
from rlx_ort.errors import let_go

_DEEPEST_JSON = 200  # a recursive reader takes up to four calls a level, of the 1,000 that Python allows
_SURROGATE = r"\\u[dD][89a-fA-F]"

_HIDDEN = r"\..*\.(?:(?:(?P<place>[0-9a-f]{8})-)?(?P<process>\d{1,9})-)?[0-9a-f]{16}\.(?:partial|converting)"
_STALE_S = 24 * 3600.0  # after the last write, a file of a process on another machine or in a container is abandoned
_SWEPT_AGAIN_S = 60.0
_CLOCK_S = 2.0  # the coarsest times of files, those of FAT
_RETRIES, _RETRY_S = 5, 0.05  # each wait is twice the one before, 0.75 s in all
_USER_MAPPED_FILE = 1224  # a code of Windows that has no `errno` of its own
_swept: dict[Path, float] = {}
_SHOWN = 24  # characters of a name that are a part of its hidden one, which may exceed Windows' 260 where it does not
_left: set[Path] = set()  # paths that `remove` could not remove

unfinished: set[Path] = set()
"""Files and folders that are being written; a sudden end of the process removes them."""


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
    now = time.monotonic()
    if now - _swept.get(partial.parent, -_SWEPT_AGAIN_S) >= _SWEPT_AGAIN_S:
        _swept[partial.parent] = now
        clear_unfinished(partial.parent)
    unfinished.add(partial)
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        put_in_place(partial, path)
    except BaseException:
        remove(partial)
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


def put_in_place(source: Path, target: Path) -> None:
    """Rename a file or a folder; retry for most of a second if Windows refuses, as a virus scanner may have it open.

    Raises:
        OSError: it cannot be renamed. Windows refuses as long as a file is open or mapped.
    """
    for attempt in range(_RETRIES):
        try:
            os.replace(source, target)  # noqa: PTH105  # the name by which tests make it fail as Windows does
            return
        except OSError as err:
            refused = isinstance(err, PermissionError) or getattr(err, "winerror", 0) == _USER_MAPPED_FILE
            if not refused or attempt + 1 == _RETRIES:
                raise
            time.sleep(_RETRY_S * 2**attempt)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing happens if there is none.

    Windows keeps a file that is open or mapped: by a virus scanner for a moment, so this retries for most of a second;
    and by the error that is being handled, which lets go. What stays is logged, and the next write of this process
    beside it removes it, or the next process.
    """
    import shutil  # takes 4 ms, which a start from the compile cache does without

    for attempt in range(_RETRIES):
        with contextlib.suppress(OSError):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        if not os.path.lexists(path):
            _left.discard(path)
            return
        if attempt == 0 and (error := sys.exc_info()[1]) is not None:
            let_go(error)
        else:
            time.sleep(_RETRY_S * 2 ** (attempt - 1))
    import logging  # as above

    _left.add(path)
    logging.getLogger("rlx_ort").warning("%s cannot be removed now, since it is in use", path)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder for files of a moment, removed by `remove` when the block ends.

    Raises:
        OSError: it cannot be made.
    """
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="rlx_ort-"))
    try:
        yield folder
    finally:
        remove(folder)


def partial_path(path: Path, kind: str = "partial") -> Path:
    """Return an unpredictable hidden name beside a path, for an incomplete file, with the process that writes it.

    It is `.NAME.<place>-<process>-<random>.KIND`; `clear_unfinished` knows the kinds `partial` and `converting`.
    """
    return path.with_name(f".{path.name[:_SHOWN]}.{_place()}-{os.getpid()}-{os.urandom(8).hex()}.{kind}")


def clear_unfinished(folder: Path, *, below: bool = False) -> list[Path]:
    """Remove the leftovers of killed processes in a folder, with `below` also in those below it, and return it.

    Nothing of a living process is removed. One of another machine or container, or of an older version, counts as alive
    until it has not written for a day.
    """
    import shutil  # takes 4 ms, which a start from the compile cache does without

    removed = []
    with contextlib.suppress(OSError):  # a folder that cannot be read is left as it is
        for path in [Path(entry.path) for entry in os.scandir(folder)]:
            match = re.fullmatch(_HIDDEN, path.name)
            with contextlib.suppress(OSError):  # another process was faster, or Windows has it open
                status = path.lstat()
                if match is not None and _is_abandoned(path, match["place"], match["process"]):
                    shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()
                    removed.append(path)
                elif below and stat.S_ISDIR(status.st_mode):
                    removed += clear_unfinished(path, below=True)
    return removed


def _is_abandoned(path: Path, place: str | None, process: str | None) -> bool:
    """Return whether the process that wrote the hidden file or folder at a path is gone."""
    if path in unfinished or path in _left:
        return path in _left
    inner = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    written_s: float = max(each.lstat().st_mtime for each in (path, *inner))
    if place != _place() or process is None:
        return written_s < time.time() - _STALE_S
    import psutil

    try:
        writer = psutil.Process(int(process))
        # The id may be that of another process by now, which began after the last write.
        return bool(writer.status() == psutil.STATUS_ZOMBIE or writer.create_time() > written_s + _CLOCK_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


@functools.cache
def _place() -> str:
    """Return a digest of where ids of processes are valid: this machine until it restarts, and this container."""
    import hashlib
    import platform

    facts = [platform.node()]
    with contextlib.suppress(OSError):
        facts += [
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:8]


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return device, file id, size and time of change, which differ once a file is replaced or written."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading that must be a regular one: pipes block, and devices may have no end.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # before it is opened, which has effects on some devices
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    stream = open(path, "rb", opener=_unblocked)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
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
            items = (
                item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
            )
            level = [inner for item in items for inner in item if isinstance(inner, dict | list)]
        if re.search(_SURROGATE, text):
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
