"""Writing packages: both forms from the same files, whole or not at all, and the same bytes for the same content."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rlx_ort.deploy.container import Member, layout_of
from rlx_ort.errors import PackageError, WriteError, advice
from rlx_ort.storage import clear_unfinished, partial_path, put_in_place, remove, replacing, unfinished


@dataclass(frozen=True)
class Content:
    """A file to be written: its size, its CRC-32, and a function that yields its bytes each time it is called."""

    size: int
    crc32: int
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @classmethod
    def of(cls, data: bytes) -> Content:
        """Return the content that is these bytes."""
        return cls(len(data), zlib.crc32(data), lambda: (data,))


def write_package(
    target: Path,
    files: Mapping[str, Content],
    *,
    folder: bool,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
    before_move: Callable[[], object] | None = None,
) -> None:
    """Write the files as a package beside its place, flush it to the disk, and move it there.

    A file may replace a file. A folder replaces nothing, since no system exchanges two folders at once. `progress` is
    called with the bytes written since the last call, and `before_move` once all is written, to close the
    package that is about to be replaced.

    Raises:
        PackageError: something is there already, cannot be written, or changed while it was packed.
    """
    exists = target.exists() or target.is_symlink()
    if exists and (folder or target.is_dir()):
        raise PackageError(f"{target} exists and folders are not replaced; remove it, or choose another name")
    if exists and not overwrite:
        raise PackageError(f"{target} exists and was left as it is; {advice('overwrite=True', '--force')} replaces it")
    partial = partial_path(target)
    unfinished.add(partial)
    try:
        clear_unfinished(target.parent)
        if folder:
            write_folder(partial, files, progress)
            if before_move is not None:
                before_move()
            put_in_place(partial, target)
        else:
            with replacing(target) as stream:
                _write_archive(stream, files, progress)
                if before_move is not None:
                    before_move()
        _flush_folder(target.parent)
    except OSError as err:
        hint = "check the folder, its rights and its space; on Windows no process may have the old package open"
        raise WriteError(f"{target} cannot be written: {err}; {hint}") from err
    finally:
        unfinished.discard(partial)
        remove(partial)


def add_file(folder: Path, name: str, data: bytes) -> None:
    """Put a file into a package that is a folder, whole or not at all; one of that name is replaced.

    It is written beside the folder, since a package with half a file in it is none.

    Raises:
        PackageError: it cannot be written there, or not be moved from there into the folder.
    """
    try:
        clear_unfinished(folder.parent)
        with replacing(folder / name, beside=folder) as stream:
            stream.write(data)
        _flush_folder(folder)
    except OSError as err:
        raise WriteError(f"{name} of {folder} cannot be written: {err}; check the rights of both folders") from err


def write_folder(root: Path, files: Mapping[str, Content], progress: Callable[[int], object] | None = None) -> None:
    """Write files below a folder that does not exist yet.

    Raises:
        OSError: the folder exists, or something cannot be written.
    """
    root.mkdir()
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as stream:
            _write(stream, name, content, progress)
            stream.flush()
            os.fsync(stream.fileno())


def _write_archive(stream: BinaryIO, files: Mapping[str, Content], progress: Callable[[int], object] | None) -> None:
    ordered = sorted(files.items())
    layout = layout_of([Member(name, content.size, content.crc32) for name, content in ordered])
    for (name, content), (_, header) in zip(ordered, layout.headers, strict=True):
        stream.write(header)
        _write(stream, name, content, progress)
    stream.write(layout.tail)


def _write(stream: BinaryIO, name: str, content: Content, progress: Callable[[int], object] | None) -> None:
    size, crc = 0, 0
    for chunk in content.chunks():
        stream.write(chunk)
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        if progress is not None:
            progress(len(chunk))
    if (size, crc) != (content.size, content.crc32):
        raise PackageError(f"the source of {name} changed while it was packed; nothing was written")


def _flush_folder(folder: Path) -> None:
    """Make the new name durable where a folder can be flushed; Windows has no such call."""
    if hasattr(os, "O_DIRECTORY"):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
