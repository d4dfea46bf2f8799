"""The two forms of a package behind one face: files by name, each with its size, read or mapped where it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rlx_ort.deploy.archive import Archive
from rlx_ort.deploy.mapped import OpenFile, is_link
from rlx_ort.deploy.names import MOST_FILES, check_names
from rlx_ort.errors import IntegrityError, PackageError

__all__ = ["Container", "Folder", "open_container"]


class Container(Protocol):
    """The files of a package. Names were checked; their bytes were not."""

    @property
    def path(self) -> Path:
        """The folder or file."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Name -> size in bytes of every file."""

    @property
    def crcs(self) -> Mapping[str, int]:
        """Name -> CRC-32 that the container itself keeps; empty when it keeps none."""

    def locate(self, name: str) -> tuple[OpenFile, int]:
        """Return an open file and the place where a file of the package begins in it.

        Raises:
            IntegrityError: it cannot be opened, or is a link.
        """

    def close(self) -> None:
        """Close what nobody has mapped."""


class Folder:
    """A package as a folder. Each file is opened once, when it is first asked for.

    Raises:
        IntegrityError: it holds a link, a special file, an empty folder, or a name that is not allowed.
    """

    def __init__(self, path: Path, *, hard_links: bool = False) -> None:
        self.path = path
        self._hard_links = hard_links
        self.crcs: Mapping[str, int] = {}
        self.sizes: Mapping[str, int] = dict(sorted(_files(path)))
        check_names(self.sizes)
        self._open: dict[str, OpenFile] = {}

    def locate(self, name: str) -> tuple[OpenFile, int]:
        """Return the file of that name and 0; see `Container.locate`."""
        if name not in self._open:
            self._open[name] = OpenFile(self.path / name, name, hard_links=self._hard_links)
        return self._open[name], 0

    def close(self) -> None:
        """Close the handles; maps stay."""
        for file in self._open.values():
            file.close()


def open_container(path: Path, *, hard_links: bool = False) -> Container:
    """Return the package at a path, in either form, with its names checked and nothing else read.

    The path itself may be a symbolic link, for whoever gives it chooses the package. `hard_links` says whether files
    may have other names, which is safe for bytes that are copied before they are hashed.

    Raises:
        PackageError: there is nothing there.
        IntegrityError: what is there breaks a rule of the format.
    """
    try:
        path = path.resolve()
        status = path.stat()
    except (OSError, ValueError, RuntimeError) as err:  # RuntimeError: links in a circle
        raise PackageError(f"there is no package at {path}: {err}") from err
    if stat.S_ISDIR(status.st_mode):
        return Folder(path, hard_links=hard_links)
    return Archive(path, hard_links=hard_links)


def _files(folder: Path, prefix: str = "", depth: int = 0) -> list[tuple[str, int]]:
    """Return (name, size) of the files below a folder, following no link."""
    found: list[tuple[str, int]] = []
    try:
        with os.scandir(folder) as entries:
            listed = list(entries)
        for entry in listed:
            name = prefix + entry.name
            status = entry.stat(follow_symlinks=False)
            if is_link(status):
                raise IntegrityError(f"{name} is a link; packages hold plain files and folders only")
            if stat.S_ISDIR(status.st_mode):
                if depth > 8:
                    raise IntegrityError(f"{name} lies deeper than folders of a package do")
                inner = _files(Path(entry.path), f"{name}/", depth + 1)
                if not inner:
                    raise IntegrityError(f"{name} is an empty folder, which no package has")
                found += inner
            elif stat.S_ISREG(status.st_mode):
                found.append((name, status.st_size))
            else:
                raise IntegrityError(f"{name} is no regular file; packages hold plain files and folders only")
            if len(found) > MOST_FILES:
                raise IntegrityError(f"{folder} has more than {MOST_FILES} files; is it a package?")
    except OSError as err:
        raise IntegrityError(f"folder {prefix or folder} of the package cannot be read: {err}") from err
    return found
