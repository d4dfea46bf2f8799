"""A package as one file: a zip archive that is read in place and accepted in its one encoding only."""

from __future__ import annotations

import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from rlx_ort.deploy.names import MOST_FILES, check_names
from rlx_ort.deploy.open_file import OpenFile
from rlx_ort.deploy.zip_layout import END_BYTES, Member, layout_of
from rlx_ort.errors import IntegrityError

__all__ = ["Archive"]

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_BYTES = 20
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LIMIT32 = 0xFFFFFFFF
_LARGEST_DIRECTORY = MOST_FILES * 400


class Archive:
    """An archive whose every byte outside of its members is what `zip_layout` says it must be.

    Compression, encryption, comments, links, directories, overlaps, gaps, and bytes before or after are all something
    else than that, and refused. Reads the central directory and one header a member.

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
        """Return the archive and where a member's bytes begin in it; see `Container.locate`."""
        return self._file, self._offsets[name]

    def close(self) -> None:
        """Close the handle; maps stay."""
        self._file.close()


def _members(file: OpenFile) -> list[Member]:
    """Return what the central directory lists, in its order; what it says beside that is compared later."""
    name = file.name
    if file.size < END_BYTES:
        raise IntegrityError(f"{name} is no package: {file.size} bytes are too few")
    magic, _, _, _, count, size, offset, _ = _END.unpack(file.read(file.size - END_BYTES, END_BYTES))
    if magic != b"PK\5\6":
        raise IntegrityError(f"{name} is no package: it does not end as one; it is cut short or has bytes behind it")
    if offset == _LIMIT32:
        place = file.size - END_BYTES - _LOCATOR_BYTES - _END64.size
        if place < 0:
            raise IntegrityError(f"{name} is no package: it is cut short")
        magic, _, _, _, _, _, _, count, size, offset = _END64.unpack(file.read(place, _END64.size))
        if magic != b"PK\6\6":
            raise IntegrityError(f"{name} is no package: its 64-bit end is not where it belongs")
    if count > MOST_FILES or size > _LARGEST_DIRECTORY or offset + size > file.size:
        raise IntegrityError(f"{name} is no package: it says {count} members in {size} bytes of directory at {offset}")
    directory = file.read(offset, size)
    members, place = [], 0
    while place < size:
        member, place = _entry(directory, place, name)
        members.append(member)
    if len(members) != count:
        raise IntegrityError(f"{name} says {count} members and lists {len(members)}")
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
