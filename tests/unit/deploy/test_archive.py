"""The one-file form: an ordinary zip for other tools, and for us one encoding and no other."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_packages.packages import files_of, make, repacked

from rlx_ort.deploy.container import LARGE_ALIGNMENT, Archive, Member, layout_of
from rlx_ort.deploy.package import Package
from rlx_ort.errors import IntegrityError

GIB = 1 << 30


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the small package as a file; tests copy it before they touch it."""
    return make(tmp_path_factory.mktemp("archive") / "small.ortpackage")


def test_zip_tools_read_it(package: Path) -> None:
    """The standard library finds every member, stored, with right sums."""
    with zipfile.ZipFile(package) as archive:
        assert archive.testzip() is None
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert "manifest.json" in archive.namelist()


def test_the_same_content_gives_the_same_bytes(package: Path, tmp_path: Path) -> None:
    """Two packages of one model and recipe are equal, byte by byte."""
    assert make(tmp_path / "again.ortpackage").read_bytes() == package.read_bytes()


def test_both_forms_hold_the_same_files(package: Path, tmp_path: Path) -> None:
    """The folder has what the file has, byte by byte."""
    assert files_of(make(tmp_path / "folder.ortpackage", folder=True)) == files_of(package)


def test_large_members_begin_where_every_system_can_map_them(tmp_path: Path) -> None:
    """A member of 1 MiB begins at a multiple of 64 KiB, for any length of what stands before it."""
    for size in range(0, 70_000, 997):
        layout = layout_of([Member("a.json", size, 0), Member("b.bin", 1 << 20, 0)])
        assert layout.offsets[1] % LARGE_ALIGNMENT == 0
        assert layout.offsets[1] == layout.headers[1][0] + len(layout.headers[1][1])


@pytest.mark.parametrize("size", [65536 - 118 + step for step in range(0, 60, 4)])
def test_padding_beyond_an_extra_field_still_makes_a_zip(tmp_path: Path, size: int) -> None:
    """Where the padding does not fit the header's field, zip tools and we still read the archive."""
    files = {"a.json": bytes(size), "b.bin": bytes(1 << 20), "c.json": b"{}"}
    path = repacked(tmp_path / "padded.ortpackage", files)
    assert files_of(path) == files
    assert dict(Archive(path).sizes) == {name: len(data) for name, data in files.items()}


def test_members_above_four_gigabytes_are_read(tmp_path: Path) -> None:
    """Sizes and offsets beyond 32 bits are where zip tools and we find them; the data is a hole on the disk."""
    members = [Member("a.bin", 5 * GIB, 0), Member("b.bin", 1 << 20, 0), Member("c.json", 0, 0)]
    layout = layout_of(members)
    path = tmp_path / "huge.ortpackage"
    with path.open("wb") as stream:
        for place, header in layout.headers:
            stream.seek(place)
            stream.write(header)
        stream.seek(layout.directory_offset)
        stream.write(layout.tail)
    with zipfile.ZipFile(path) as archive:
        assert [(entry.filename, entry.file_size) for entry in archive.infolist()] == [
            (m.name, m.size) for m in members
        ]
    assert [Archive(path).locate(member.name)[1] for member in members] == list(layout.offsets)


def _zipped(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED, link: str = "") -> Path:
    """Write a zip archive as the standard library does, with one member that says it is a link."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o120777 if name == link else 0o100644) << 16
            archive.writestr(entry, data, method)
    return path


@pytest.mark.parametrize(
    ("written", "message"),
    [
        pytest.param({}, ".", id="another encoding"),
        pytest.param({"method": zipfile.ZIP_DEFLATED}, r"LICENSE\.txt.*compressed", id="compressed"),
        pytest.param({"link": "graph.json"}, r"graph\.json.*link", id="a link"),
    ],
)
def test_a_zip_of_another_writer_is_refused(package: Path, tmp_path: Path, written: Any, message: str) -> None:
    """What a reader is to make of another encoding would be open; no bomb is inflated; the message names the member."""
    with pytest.raises(IntegrityError, match=message):
        Package(_zipped(tmp_path / "other.zip", files_of(package), **written))


def _patched(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def _entry(data: bytes) -> int:
    return data.index(b"PK\1\2")  # the first of the directory


JUNK = b"#!/bin/sh\nexit\n"
CHANGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "encrypted": (lambda data: _patched(data, _entry(data) + 8, b"\1"), "encrypted"),
    "a local header that disagrees": (
        lambda data: _patched(data, data.index(b"graph.json"), b"other"),
        r"header of member 'graph\.json'",
    ),
    "members that overlap, as in zip bombs": (
        lambda data: _patched(data, _entry(data) + 20, struct.pack("<2I", len(data), len(data))),
        "overlap",
    ),
    "a script before them": (lambda data: JUNK + data, "."),
    "a script behind them": (lambda data: data + JUNK, "."),
    "a script as a comment": (lambda data: data[:-2] + struct.pack("<H", len(JUNK)) + JUNK, "."),
    "a script between them": (lambda data: data[: _entry(data)] + JUNK + data[_entry(data) :], "."),
    **{f"cut at {at}": (lambda data, at=at: data[:at], ".") for at in (0, 10, 21, 22, 100, -1, -30)},
}


@pytest.mark.parametrize(("change", "message"), CHANGED.values(), ids=CHANGED)
def test_bytes_that_were_changed_are_refused(
    package: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    """A file that readers would take differently, or that is something else as well, is no package."""
    path = tmp_path / "changed.ortpackage"
    path.write_bytes(change(package.read_bytes()))
    with pytest.raises(IntegrityError, match=message):
        Package(path)


def test_two_members_of_one_name_are_refused(package: Path, tmp_path: Path) -> None:
    """Readers differ in which of the two they take."""
    files = sorted(files_of(package).items())
    path = tmp_path / "twice.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files:
            archive.writestr(name, data)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("graph.json", b"{}")
    with pytest.raises(IntegrityError, match=r"two members named 'graph\.json'"):
        Package(path)
