"""A package as one file: a zip archive in one canonical encoding, which is read in place.

A zip file can encode the same content in many ways, and readers disagree on ambiguous files: local headers that differ
from the central directory, overlapping members, bytes before, between and after them. A package therefore has exactly
one encoding, which the list of members determines. The reader computes it again and compares byte by byte. Only names,
sizes and digests are left to check.

The encoding is an ordinary one that every zip tool reads (APPNOTE 6.3): members stored and sorted by name, dated
1980-01-01, a 64-bit extension only where a number needs it. The extra field of a local header is padded so that the
bytes of a large member begin at a multiple of 64 KiB, where every system can map them.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlx_ort.deploy.names import MOST_FILES, check_names
from rlx_ort.deploy.open_file import OpenFile
from rlx_ort.errors import IntegrityError

__all__ = ["Archive", "LARGE_ALIGNMENT", "LARGE_BYTES", "Layout", "Member", "layout_of"]

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


class Member(NamedTuple):
    """A file inside the archive: its name, its size in bytes and its CRC-32."""

    name: str
    size: int
    crc: int


class Layout(NamedTuple):
    """Where everything is in the archive of some members.

    Attributes:
        headers: (first byte, bytes) of each member's local header, padding included.
        offsets: first byte of each member's data.
        directory_offset: first byte of the central directory.
        tail: the central directory and all that follows it, to the last byte of the file.
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
    lead = max(len(extra) + 4 + padding - _LONGEST_EXTRA, 0)  # what the extra field cannot hold
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
        raise IntegrityError(f"{name} is no package: {file.size} bytes are too few")
    magic, _, _, _, count, size, offset, _ = _END.unpack(file.read(file.size - _END.size, _END.size))
    if magic != b"PK\5\6":
        raise IntegrityError(f"{name} is no package: it does not end as one; it is cut short or has bytes behind it")
    if offset == _LIMIT32:
        place = file.size - _END.size - _LOCATOR.size - _END64.size
        if place < 0:
            raise IntegrityError(f"{name} is no package: it is cut short")
        magic, _, _, _, _, _, _, count, size, offset = _END64.unpack(file.read(place, _END64.size))
        if magic != b"PK\6\6":
            raise IntegrityError(f"{name} is no package: its 64-bit end is not where it belongs")
    if count > MOST_FILES or size > _LARGEST_DIRECTORY or offset + size > file.size:
        raise IntegrityError(f"{name} is no package: {count} members, {size} bytes of directory at {offset}")
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
        raise IntegrityError(f"{archive}: its central directory is broken at byte {place}")
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
