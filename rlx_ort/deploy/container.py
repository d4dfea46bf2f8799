"""The two forms of a package behind one interface: files by name, each with its size, read or mapped in place.

A package is a folder, or one file: a zip archive in one canonical encoding. A zip file can encode the same content in
many ways, and readers disagree on ambiguous files: local headers that differ from the central directory, overlapping
members, bytes before, between and after them. A package therefore has exactly one encoding, which the list of members
determines. The reader computes it again and compares byte by byte. Only names, sizes and digests are left to check.

The encoding is an ordinary one that every zip tool reads (APPNOTE 6.3): members stored and sorted by name, dated
1980-01-01, a 64-bit extension only where a number needs it. The extra field of a local header is padded so that the
bytes of a large member begin at a multiple of 64 KiB, where every system can map them.

Hashing reads through the handle that is mapped, so both see the same file if its name is reused. Reads go through a
small buffer, so hashed pages do not count as memory of this process. This module imports little, because the quick
start of a warmed package loads it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from rlx_ort.deploy.names import INDEX, LARGEST_INDEX_BYTES, MANIFEST, MOST_FILES, SIGNATURE, check_names
from rlx_ort.errors import IntegrityError, PackageError, advice
from rlx_ort.providers.engine.stopping import check_stopped
from rlx_ort.storage import stamp_of

if TYPE_CHECKING:
    import numpy.typing as npt

LARGE_BYTES = 1 << 20
LARGE_ALIGNMENT = 1 << 16  # Windows maps files in steps of 64 KiB
_SMALL_ALIGNMENT = 64

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_DATE = 0x0021  # 1980-01-01
_VERSION, _VERSION64 = 20, 45
_PADDING_ID = 0x4C52  # an id that APPNOTE 4.5 leaves unassigned
_LONGEST_EXTRA = 0xFFFF
_ZIP64_ID = 0x0001
_LIMIT32 = 0xFFFFFFFF
_LARGEST_DIRECTORY = MOST_FILES * 400
_CHUNK_BYTES = 1 << 18


def is_link(status: os.stat_result) -> bool:
    """Return whether a status, taken without following, is that of a symbolic link or of a junction of Windows."""
    attributes = getattr(status, "st_file_attributes", 0)
    return stat.S_ISLNK(status.st_mode) or bool(attributes & stat.FILE_ATTRIBUTE_REPARSE_POINT)


class OpenFile:
    """A regular file that is read and mapped through one handle. Closes itself when it and its bytes are unused.

    `path` must not be a symbolic link; `name` is the file's name in messages. With `hard_links`, the file may have
    other names, through which it could be written to.

    Raises:
        IntegrityError: it is not a regular file of its own or cannot be opened; in methods, it cannot be read, is
            shorter, or was changed.
    """

    def __init__(self, path: Path, name: str, *, hard_links: bool = False) -> None:
        self.path = path
        self.name = name
        try:
            before = path.lstat()
            if is_link(before) or not stat.S_ISREG(before.st_mode):
                raise IntegrityError(f"{name} is not a regular file; packages hold plain files only")
            self._file = path.open("rb", buffering=0)
            self._closer = weakref.finalize(self, self._file.close)
            self._closer.atexit = False  # a daemon thread may still read, and would find a damaged package
            status = os.fstat(self._file.fileno())
        except OSError as err:
            raise IntegrityError(f"{name} of the package cannot be read: {err}") from err
        if (before.st_dev, before.st_ino) != (status.st_dev, status.st_ino):
            raise IntegrityError(f"{name} was replaced while it was opened; open the package again")
        if status.st_nlink != 1 and not hard_links:
            raise IntegrityError(
                f"{name} has {status.st_nlink} hard links, so it may be written to under another name; copy it"
                + advice(", or open the package with private=True", "")
            )
        self.size = status.st_size
        self._status = status
        self._changed_ns = status.st_ctime_ns
        self._lock = threading.Lock()
        self._view: npt.NDArray[np.uint8] | None = None

    @cached_property
    def stamp(self) -> tuple[int, ...]:
        """The identity of the file as it was opened; see `storage.stamp_of`."""
        return stamp_of(self._status)

    def read(self, offset: int, size: int) -> bytes:
        """Return some bytes of the file."""
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill a buffer from some place of the file; may be called from several threads."""
        filled = 0
        try:
            while filled < len(target):
                count = self._read_some(offset + filled, target[filled:])
                if not count:
                    raise IntegrityError(f"{self.name} is {len(target) - filled} bytes too short")
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
            check_stopped()
            if progress is not None:
                progress(len(part))
        return digest.hexdigest()

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Return some bytes as a read-only memory map; the whole file is mapped once, and nothing is read."""
        with self._lock:
            if self._view is None:
                try:
                    mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as err:  # ValueError: it was closed, or is empty by now
                    remedy = advice("; private=True reads it instead", "")
                    raise IntegrityError(f"{self.name} cannot be mapped: {err}{remedy}") from err
                self._view = np.frombuffer(mapped, np.uint8)
            return self._view[offset : offset + size]

    def check_unchanged(self) -> None:
        """Check that the file was not written to since it was opened."""
        if self.state() != (self.stamp, self._changed_ns):
            raise IntegrityError(f"{self.name} was changed while it was in use; open the package again")

    def state(self) -> tuple[tuple[int, ...], int] | None:
        """Return the file's identity and the time of its last change, which no call sets back; None if it is closed."""
        try:
            status = os.fstat(self._file.fileno())
        except (OSError, ValueError):
            return None
        # Losing its last name changes a file's ctime as well, and is harmless: the handle keeps the bytes.
        return stamp_of(status), status.st_ctime_ns if status.st_nlink else self._changed_ns

    def _read_some(self, offset: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return int(os.preadv(self._file.fileno(), [target], offset))
        with self._lock:  # Windows has one place in the file for all threads
            self._file.seek(offset)
            return self._file.readinto(target) or 0

    def close(self) -> None:
        """Close the handle; maps that were handed out stay."""
        self._closer()


class Member(NamedTuple):
    """A file inside the archive: its name, its size in bytes and its CRC-32."""

    name: str
    size: int
    crc: int


class Layout(NamedTuple):
    """Where everything is in the archive of some members.

    `headers` has (first byte, bytes) of each member's local header, padding included, `offsets` the first byte of each
    member's data. `tail` is the central directory and all that follows it, to the last byte of the file.
    """

    headers: tuple[tuple[int, bytes], ...]
    offsets: tuple[int, ...]
    directory_offset: int
    tail: bytes

    @property
    def size(self) -> int:
        """The bytes of the whole file."""
        return self.directory_offset + len(self.tail)


def layout_of(members: Sequence[Member]) -> Layout:
    """Return the layout of members that are sorted by name."""
    place = 0
    headers, offsets, directory = [], [], []
    for member in members:
        lead, header = _local_header(member, place)
        headers.append((place, bytes(lead) + header))
        directory.append(_central_entry(member, place + lead))
        place += lead + len(header)
        offsets.append(place)
        place += member.size
    central = b"".join(directory)
    return Layout(tuple(headers), tuple(offsets), place, central + _end(len(members), len(central), place))


def _local_header(member: Member, place: int) -> tuple[int, bytes]:
    """Return how many zero bytes come before the header, and the header."""
    name = member.name.encode("ascii")
    wide = member.size >= _LIMIT32
    extra = struct.pack("<2H2Q", _ZIP64_ID, 16, member.size, member.size) if wide else b""
    step = LARGE_ALIGNMENT if member.size >= LARGE_BYTES else _SMALL_ALIGNMENT
    padding = -(place + _LOCAL.size + len(name) + len(extra) + 4) % step
    lead = max(len(extra) + 4 + padding - _LONGEST_EXTRA, 0)  # beyond the extra field
    extra += struct.pack("<2H", _PADDING_ID, padding - lead) + bytes(padding - lead)
    size = _LIMIT32 if wide else member.size
    version = _VERSION64 if wide else _VERSION
    fixed = _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DATE, member.crc, size, size, len(name), len(extra))
    return lead, fixed + name + extra


def _central_entry(member: Member, place: int) -> bytes:
    name = member.name.encode("ascii")
    wide, far = member.size >= _LIMIT32, place >= _LIMIT32
    numbers = [member.size, member.size] * wide + [place] * far
    extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64_ID, 8 * len(numbers), *numbers) if numbers else b""
    size, offset = (_LIMIT32 if wide else member.size), (_LIMIT32 if far else place)
    version = _VERSION64 if numbers else _VERSION
    sizes = (member.crc, size, size, len(name), len(extra))
    fixed = _CENTRAL.pack(b"PK\1\2", version, version, 0, 0, 0, _DATE, *sizes, 0, 0, 0, 0, offset)
    return fixed + name + extra


def _end(count: int, size: int, offset: int) -> bytes:
    if offset < _LIMIT32 and size < _LIMIT32 and count < 0xFFFF:
        return _END.pack(b"PK\5\6", 0, 0, count, count, size, offset, 0)
    wide = _END64.pack(b"PK\6\6", 44, _VERSION64, _VERSION64, 0, 0, count, count, size, offset)
    locator = _LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
    return wide + locator + _END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), size, _LIMIT32, 0)


class Archive:
    """An archive whose bytes outside of its members are exactly those of `layout_of`.

    Compression, encryption, comments, links, directories, overlaps, gaps, and bytes before or after are thereby
    refused. Reads the central directory and one header a member.

    Raises:
        IntegrityError: the file is no such archive; the message names the member that differs.
    """

    def __init__(self, path: Path, *, hard_links: bool = False) -> None:
        self.path = path
        self._file = OpenFile(path, path.name, hard_links=hard_links)
        try:
            members = _members(self._file)
            self._offsets = _checked(self._file, members)
        except BaseException:
            self._file.close()
            raise
        self.sizes: Mapping[str, int] = {member.name: member.size for member in members}
        self.crcs: Mapping[str, int] = {member.name: member.crc for member in members}

    def locate(self, name: str) -> tuple[OpenFile, int]:
        """Return the archive and where a member's bytes begin in it; see `Folder.locate`."""
        return self._file, self._offsets[name]

    def close(self) -> None:
        """Close the handle; maps stay."""
        self._file.close()


def _members(file: OpenFile) -> list[Member]:
    """Return the members that the central directory lists, in its order; its other fields are compared later."""
    name = file.name
    if file.size < _END.size:
        raise IntegrityError(f"{name} is not a package: it has only {file.size} bytes")
    magic, _, _, _, count, size, offset, _ = _END.unpack(file.read(file.size - _END.size, _END.size))
    if magic != b"PK\5\6" and file.read(0, 2) != b"PK":
        raise IntegrityError(
            f"{name} is not a package; make one from a model with: rlx-ort package create {name} -o NAME"
        )
    if magic != b"PK\5\6":
        raise IntegrityError(f"{name} is not a package, or a damaged one: it is truncated or has trailing bytes")
    if offset == _LIMIT32:
        place = file.size - _END.size - _LOCATOR.size - _END64.size
        if place < 0:
            raise IntegrityError(f"{name} is not a package, or a damaged one: it is truncated")
        magic, _, _, _, _, _, _, count, size, offset = _END64.unpack(file.read(place, _END64.size))
        if magic != b"PK\6\6":
            raise IntegrityError(f"{name} is not a package, or a damaged one: its ZIP64 end record is misplaced")
    if count > MOST_FILES or size > _LARGEST_DIRECTORY or offset + size > file.size:
        raise IntegrityError(
            f"{name} is not a package: its end record claims {count} members, listed in {size} bytes at {offset}"
        )
    directory = file.read(offset, size)
    members, place = [], 0
    while place < size:
        member, place = _entry(directory, place, name)
        members.append(member)
    if len(members) != count:
        raise IntegrityError(f"{name} claims {count} members and lists {len(members)}")
    return members


def _entry(directory: bytes, place: int, archive: str) -> tuple[Member, int]:
    """Return the member that an entry describes, and the end of the entry."""
    try:
        fields = _CENTRAL.unpack_from(directory, place)
    except struct.error as err:
        raise IntegrityError(f"{archive}: its central directory is cut short") from err
    magic, flags, method = fields[0], fields[3], fields[4]
    crc, size, name_size, extra_size, attributes = fields[7], fields[9], fields[10], fields[11], fields[15]
    start = place + _CENTRAL.size
    raw = directory[start : start + name_size]
    extra = directory[start + name_size : start + name_size + extra_size]
    if magic != b"PK\1\2" or len(raw) != name_size or len(extra) != extra_size:
        raise IntegrityError(f"{archive}: its central directory is corrupt at byte {place}")
    try:
        name = raw.decode("ascii")
    except UnicodeDecodeError as err:
        raise IntegrityError(f"{archive} has a member {raw!r}; names are ASCII") from err
    # What follows would fail the comparison with the one encoding as well, but with a message that helps less.
    if flags & 1:
        raise IntegrityError(f"{archive}: member {name!r} is encrypted; packages are signed, not encrypted")
    if method:
        raise IntegrityError(f"{archive}: member {name!r} is compressed; members are stored, to be mapped in place")
    if stat.S_ISLNK(attributes >> 16):
        raise IntegrityError(f"{archive}: member {name!r} is a link")
    if size == _LIMIT32 and len(extra) >= 12:
        size = int.from_bytes(extra[4:12], "little")
    return Member(name, size, crc), start + name_size + extra_size


def _checked(file: OpenFile, members: list[Member]) -> dict[str, int]:
    """Return where the bytes of each member begin, after comparing all other bytes with the one encoding."""
    names = [member.name for member in members]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise IntegrityError(f"{file.name} has two members named {twice!r}")
    check_names(names)
    if names != sorted(names):
        raise IntegrityError(f"{file.name}: its members are not sorted by name, as this library writes them")
    if sum(member.size for member in members) > file.size:
        raise IntegrityError(f"{file.name}: its members claim more bytes than the file has; they overlap")
    layout = layout_of(members)
    if layout.size != file.size:
        raise IntegrityError(
            f"{file.name} has {file.size} bytes where its members make {layout.size}; it was not written by this "
            "library, or something was put before, between or behind its members"
        )
    for member, (place, header) in zip(members, layout.headers, strict=True):
        if file.read(place, len(header)) != header:
            raise IntegrityError(f"{file.name}: the header of member {member.name!r} disagrees with the directory")
    if file.read(layout.directory_offset, len(layout.tail)) != layout.tail:
        raise IntegrityError(f"{file.name}: its central directory is not in the one encoding of a package")
    return dict(zip(names, layout.offsets, strict=True))


class Folder:
    """A package as a folder, with the interface of `Archive`. Each file is opened once, at its first use.

    `sizes` are in bytes; their names were checked, the bytes were not. `crcs` is empty, since a folder keeps no CRC-32.

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
        """Return the file of that name, and 0, where its bytes begin."""
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
        raise IntegrityError(f"{path} is not a package of this library: {INDEX} or {MANIFEST} is missing")
    if sizes[INDEX] > LARGEST_INDEX_BYTES:
        raise IntegrityError(f"{INDEX} of {path} is {sizes[INDEX]} bytes; at most {LARGEST_INDEX_BYTES} are read")
    data = read_file(container, INDEX)
    for name in (INDEX, SIGNATURE):  # these two no digest covers, so the container's own sum is compared
        if name in container.crcs and sizes[name] <= LARGEST_INDEX_BYTES:
            checksum = zlib.crc32(data if name == INDEX else read_file(container, name))
            if checksum != container.crcs[name]:
                raise IntegrityError(f"{name} of {path} does not match its CRC-32 in the archive")
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


def read_file(container: Container, name: str) -> bytes:
    """Return the bytes of a file, unverified."""
    file, offset = container.locate(name)
    return file.read(offset, container.sizes[name])


def _files(folder: Path, prefix: str = "", depth: int = 0) -> list[tuple[str, int]]:
    """Return (name, size) of the files below a folder, following no link."""
    files: list[tuple[str, int]] = []
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
                files += inner
            elif stat.S_ISREG(status.st_mode):
                files.append((name, status.st_size))
            else:
                raise IntegrityError(f"{name} is not a regular file; packages hold plain files and folders only")
            if len(files) > MOST_FILES:
                raise IntegrityError(f"{folder} has more than {MOST_FILES} files; is it a package?")
    except OSError as err:
        raise IntegrityError(f"folder {prefix or folder} of the package cannot be read: {err}") from err
    return files
