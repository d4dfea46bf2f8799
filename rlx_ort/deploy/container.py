"""The two forms of a package behind one interface: files by name, each with its size, read or mapped in place."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from rlx_ort.deploy.archive import Archive
from rlx_ort.deploy.names import INDEX, LARGEST_INDEX_BYTES, MANIFEST, MOST_FILES, SIGNATURE, check_names
from rlx_ort.deploy.open_file import OpenFile, is_link
from rlx_ort.errors import IntegrityError, PackageError

__all__ = ["Container", "Folder", "compare_files", "open_container", "read_index"]


class Folder:
    """A package as a folder, with the interface of `Archive`. Each file is opened once, at its first use.

    Attributes:
        sizes: name -> size in bytes of every file; the names were checked, the bytes were not.
        crcs: empty, since a folder keeps no CRC-32.

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
        """Return the file of that name, and 0, where its bytes begin.

        Raises:
            IntegrityError: it cannot be opened, or is a link.
        """
        if name not in self._open:
            self._open[name] = OpenFile(self.path / name, name, hard_links=self._hard_links)
        return self._open[name], 0

    def close(self) -> None:
        """Close the handles; maps stay."""
        for file in self._open.values():
            file.close()


Container: TypeAlias = Folder | Archive


def open_container(path: Path, *, hard_links: bool = False) -> Container:
    """Return the package at a path, in either form, with its names checked and nothing else read.

    The path itself may be a symbolic link, because the caller chooses the package. `hard_links` allows files with other
    names, which is safe for bytes that are copied before they are hashed.

    Raises:
        PackageError: there is nothing there.
        IntegrityError: the file or folder breaks a rule of the format.
    """
    try:
        path = path.resolve()
        status = path.stat()
    except (OSError, ValueError, RuntimeError) as err:  # RuntimeError: links in a circle
        raise PackageError(f"there is no package at {path}: {err}") from err
    if stat.S_ISDIR(status.st_mode):
        return Folder(path, hard_links=hard_links)
    return Archive(path, hard_links=hard_links)


def read_index(container: Container) -> bytes:
    """Return the bytes of a package's index, at most 64 MiB. No digest covers them, since they hold all digests.

    Raises:
        IntegrityError: there is none, it is too large, or an archive has another CRC-32 for it or for the signature.
    """
    path, sizes = container.path, container.sizes
    if INDEX not in sizes or MANIFEST not in sizes:
        raise IntegrityError(f"{path} is no package of this library: it has no {INDEX} or no {MANIFEST}")
    if sizes[INDEX] > LARGEST_INDEX_BYTES:
        raise IntegrityError(f"{INDEX} of {path} is {sizes[INDEX]} bytes; at most {LARGEST_INDEX_BYTES} are read")
    data = _read(container, INDEX)
    for name in (INDEX, SIGNATURE):  # these two no digest covers, so the container's own sum is compared
        if name in container.crcs and sizes[name] <= LARGEST_INDEX_BYTES:
            found = zlib.crc32(data if name == INDEX else _read(container, name))
            if found != container.crcs[name]:
                raise IntegrityError(f"{name} of {path} does not fit its CRC-32 in the archive")
    return data


def compare_files(container: Container, files: Mapping[str, tuple[int, int]]) -> None:
    """Compare the names, sizes and sums of a container with those that its index lists, name -> (bytes, CRC-32).

    Raises:
        IntegrityError: they differ; the message names the file.
    """
    path = container.path
    present = {name: size for name, size in container.sizes.items() if name not in (INDEX, SIGNATURE)}
    missing = sorted(set(files).difference(present))
    added = sorted(set(present).difference(files))
    if missing or added:
        what = [f"{name} is missing" for name in missing[:5]] + [f"{name} was added" for name in added[:5]]
        raise IntegrityError(f"{path} does not hold the files that its {INDEX} lists: {', '.join(what)}")
    for name, (size, crc) in files.items():
        if present[name] != size:
            raise IntegrityError(f"{name} of {path} has {present[name]} bytes, and its {INDEX} lists {size}")
        if container.crcs.get(name, crc) != crc:
            raise IntegrityError(f"{name} of {path} has another CRC-32 in the archive than in its {INDEX}")


def _read(container: Container, name: str) -> bytes:
    file, offset = container.locate(name)
    return file.read(offset, container.sizes[name])


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
