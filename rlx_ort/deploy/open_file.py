"""`OpenFile`: a file of a package, or the whole of it, that is read, hashed and mapped through one handle.

Hashing reads through the handle that is mapped, so both see the same file if its name is reused. Reads go through a
small buffer, so hashed pages do not count as memory of this process. This module imports little, because the quick
start of a warmed package loads it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlx_ort.errors import IntegrityError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["OpenFile", "is_link"]

_CHUNK_BYTES = 1 << 18


def is_link(status: os.stat_result) -> bool:
    """Return whether a status, taken without following, is that of a symbolic link or of a junction of Windows."""
    attributes = getattr(status, "st_file_attributes", 0)
    return stat.S_ISLNK(status.st_mode) or bool(attributes & stat.FILE_ATTRIBUTE_REPARSE_POINT)


class OpenFile:
    """A regular file that is read and mapped through one handle. Closes itself when it and its bytes are unused.

    Args:
        path: the file; a symbolic link is refused.
        name: what to call it in messages.
        hard_links: whether the file may have other names, through which it could be written to.

    Raises:
        IntegrityError: it cannot be opened, or is not a regular file of its own.
    """

    def __init__(self, path: Path, name: str, *, hard_links: bool = False) -> None:
        self.path = path
        self.name = name
        try:
            before = path.lstat()
            if is_link(before) or not stat.S_ISREG(before.st_mode):
                raise IntegrityError(f"{name} is a link or no regular file; packages hold plain files only")
            self._file = path.open("rb", buffering=0)
            self._closer = weakref.finalize(self, self._file.close)
            status = os.fstat(self._file.fileno())
        except OSError as err:
            raise IntegrityError(f"{name} of the package cannot be read: {err}") from err
        if (before.st_dev, before.st_ino) != (status.st_dev, status.st_ino):
            raise IntegrityError(f"{name} was replaced while it was opened; open the package again")
        if status.st_nlink != 1 and not hard_links:
            raise IntegrityError(
                f"{name} has {status.st_nlink} hard links, so it may be written to under another name; copy it, "
                "or open the package with private=True"
            )
        self.size = status.st_size
        self._status = status
        self._changed_ns = status.st_ctime_ns
        self._lock = threading.Lock()
        self._view: npt.NDArray[np.uint8] | None = None

    @cached_property
    def stamp(self) -> tuple[int, ...]:
        """The identity of the file as it was opened; see `FileRange.stamp_of`."""
        return _stamp_of(self._status)

    def read(self, offset: int, size: int) -> bytes:
        """Return some bytes of the file.

        Raises:
            IntegrityError: there are not that many.
        """
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill a buffer from some place of the file; may be called from several threads.

        Raises:
            IntegrityError: the file ends before, or cannot be read.
        """
        filled = 0
        try:
            while filled < len(target):
                count = self._read_some(offset + filled, target[filled:])
                if not count:
                    raise IntegrityError(f"{self.name} ends {len(target) - filled} bytes too early")
                filled += count
        except (OSError, ValueError) as err:  # ValueError: it was closed
            raise IntegrityError(f"{self.name} of the package cannot be read: {err}") from err

    def sha256(self, offset: int, size: int, progress: Callable[[int], object] | None = None) -> str:
        """Return the digest of some bytes, hexadecimal; reads them through a buffer of 256 KiB.

        `progress` is called with the bytes done since the last call.
        """
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(size, _CHUNK_BYTES)))
        end = offset + size
        while offset < end:
            part = buffer[: min(len(buffer), end - offset)]
            self.read_into(offset, part)
            digest.update(part)
            offset += len(part)
            if progress is not None:
                progress(len(part))
        return digest.hexdigest()

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Return some bytes as a read-only memory map; the whole file is mapped once, and nothing is read.

        Raises:
            IntegrityError: the file cannot be mapped where it is.
        """
        with self._lock:
            if self._view is None:
                try:
                    mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as err:  # ValueError: it was closed, or is empty by now
                    raise IntegrityError(f"{self.name} cannot be mapped: {err}; private=True reads it instead") from err
                self._view = np.frombuffer(mapped, np.uint8)
            return self._view[offset : offset + size]

    def check_unchanged(self) -> None:
        """Check that the file was not written to since it was opened.

        Raises:
            IntegrityError: its size or one of its times is another one.
        """
        if self.state() != (self.stamp, self._changed_ns):
            raise IntegrityError(f"{self.name} was changed while it was in use; open the package again")

    def state(self) -> tuple[tuple[int, ...], int] | None:
        """Return the file's identity and the time of its last change, which no call sets back; None if it is closed."""
        try:
            status = os.fstat(self._file.fileno())
        except (OSError, ValueError):
            return None
        # Losing its last name changes a file's ctime as well, and is harmless: the handle keeps the bytes.
        return _stamp_of(status), status.st_ctime_ns if status.st_nlink else self._changed_ns

    def _read_some(self, offset: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return int(os.preadv(self._file.fileno(), [target], offset))
        with self._lock:  # Windows has one place in the file for all threads
            self._file.seek(offset)
            return self._file.readinto(target) or 0

    def close(self) -> None:
        """Close the handle; maps that were handed out stay."""
        self._closer()


def _stamp_of(status: os.stat_result) -> tuple[int, ...]:
    from rlx_ort.ir.tensor import FileRange  # loads ml_dtypes, which a start from the compile cache does without

    return FileRange.stamp_of(status)
