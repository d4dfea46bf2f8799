"""The one zip encoding that a list of members has as a package. Everything but the members' bytes follows from it.

A zip file may say the same thing in many ways, and readers disagree on files that say two things at once: local headers
that differ from the central directory, members that overlap, bytes before, between and after them. So a package has
exactly one encoding. The writer computes it, and the reader computes it again from what the file claims to hold and
compares byte by byte. What is left to check is names, sizes and digests.

The encoding is an ordinary one that every zip tool reads (APPNOTE 6.3): members stored and sorted by name, dated
1980-01-01, a 64-bit extension only where a number needs it. The extra field of a local header is padded so that the
bytes of a large member begin at a multiple of 64 KiB, where every system can map them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["END_BYTES", "LARGE_ALIGNMENT", "LARGE_BYTES", "Layout", "Member", "layout_of"]

LARGE_BYTES = 1 << 20
LARGE_ALIGNMENT = 1 << 16  # Windows maps files in steps of 64 KiB
_SMALL_ALIGNMENT = 64
END_BYTES = 22

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_DATE = 0x0021  # 1980-01-01
_VERSION, _VERSION64 = 20, 45
_PADDING_ID = 0x4C52  # an id that APPNOTE 4.5 gives to nobody
_LONGEST_EXTRA = 0xFFFF
_ZIP64_ID = 0x0001
_LIMIT32 = 0xFFFFFFFF


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
