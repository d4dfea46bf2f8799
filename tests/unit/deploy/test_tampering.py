"""Tampering: whatever is changed in a package, the error is typed and names the file."""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from sample_packages.packages import SIZE, files_of, flip, make, repacked

from rlx_ort.deploy.package import Package
from rlx_ort.deploy.write import write_package
from rlx_ort.errors import IntegrityError, PackageError

NAMES = ["manifest.json", "rlx.json", "graph.json", "cpu-f32/model.onnx", "golden/data.bin", "LICENSE.txt"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return the small package as a file and as a folder; tests copy before they touch."""
    base = tmp_path_factory.mktemp("originals")
    return {folder: make(base / f"small{folder}.ortpackage", folder=folder) for folder in (False, True)}


def _copy(original: Path, folder: Path) -> Path:
    target = folder / "copy.ortpackage"
    return Path(shutil.copytree(original, target) if original.is_dir() else shutil.copy(original, target))


def _weights_files(package: Path) -> list[str]:
    return [name for name in files_of(package) if name.startswith("shared_assets/")]


def _use_all(package: Path) -> None:
    with Package(package) as opened:
        opened.check_all()


@pytest.mark.parametrize("name", [*NAMES, "weights 0", "weights 1"])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_one_bit_in_any_file_is_found(originals: dict[bool, Path], tmp_path: Path, folder: bool, name: str) -> None:
    """A flipped bit in each kind of file is refused with the name of that file."""
    original = originals[folder]
    if name.startswith("weights"):
        name = _weights_files(original)[int(name[-1])]
    package = _copy(original, tmp_path)
    if folder:
        flip(package / name, (package / name).stat().st_size // 2, 3)
    else:
        with Package(package) as opened:
            _, begin = opened._container.locate(name)
            place = begin + opened._container.sizes[name] // 2
        flip(package, place, 3)
    with pytest.raises(IntegrityError, match=name.split("/")[-1]):
        _use_all(package)


def test_one_bit_anywhere_in_the_file_form_is_found(originals: dict[bool, Path], tmp_path: Path) -> None:
    """No byte of the file, headers and padding included, can change: 200 places over the whole of it."""
    package = _copy(originals[False], tmp_path)
    size = package.stat().st_size
    for step in range(200):
        place = step * size // 200
        flip(package, place, step % 8)
        with pytest.raises(IntegrityError):
            _use_all(package)
        flip(package, place, step % 8)
    _use_all(package)


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_swapped_tensors_of_equal_size_are_found(originals: dict[bool, Path], tmp_path: Path, folder: bool) -> None:
    """Two weights that changed places are refused when either is used; the message names the tensor and the file."""
    package = _copy(originals[folder], tmp_path)
    with Package(package) as opened:
        weights = opened.graph().weights
        first, second = weights["first"], weights["second"]
        begin, other, size = first.source.offset, second.source.offset, first.nbytes
        path = Path(first.source.path)
    assert size == SIZE * SIZE * 4
    data = bytearray(path.read_bytes())
    data[begin : begin + size], data[other : other + size] = data[other : other + size], data[begin : begin + size]
    path.write_bytes(data)
    with Package(package) as opened:
        tensor = opened.graph().weights["first"]
        assert not tensor.is_verified
        with pytest.raises(IntegrityError, match=r"tensor 'tensor0' in .*weights\.bin"):
            tensor.numpy()


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("change", ["removed", "added"])
def test_removed_and_added_files_are_named(
    originals: dict[bool, Path], tmp_path: Path, folder: bool, change: str
) -> None:
    """A file that is gone, or that nobody listed, is refused at opening."""
    files = files_of(originals[folder])
    name = "LICENSE.txt" if change == "removed" else "extra.json"
    package = _copy(originals[folder], tmp_path)
    if change == "removed":
        del files[name]
        (package / name).unlink() if folder else repacked(package, files)
    else:
        (package / name).write_bytes(b"{}") if folder else repacked(package, {**files, name: b"{}"})
    with pytest.raises(IntegrityError, match=name):
        Package(package)


@pytest.mark.parametrize("name", ["weights 0", "rlx.json"])
def test_what_changes_after_the_check_is_not_written_again(
    originals: dict[bool, Path], tmp_path: Path, name: str
) -> None:
    """Bytes are hashed as they are copied, so the copy is whole and right, or there is none; even if the CRC fits."""
    package = _copy(originals[True], tmp_path)
    target = tmp_path / "out.ortpackage"
    with Package(package) as opened:
        opened.check_all()
        if name == "rlx.json":
            (package / name).write_bytes(b"{}")
            write_package(target, opened.contents(), folder=True)
            assert (target / name).read_bytes() == (originals[True] / name).read_bytes()
            return
        name = _weights_files(package)[0]
        flip(package / name, 100)
        files = opened.contents()
        forged = zlib.crc32((package / name).read_bytes())
        with pytest.raises(IntegrityError, match=r"weights\.bin"):
            write_package(target, {**files, name: replace(files[name], crc32=forged)}, folder=True)
    assert [path.name for path in tmp_path.iterdir()] == [package.name]


@pytest.mark.parametrize("name", ["manifest.json", "rlx.json"])
def test_an_older_manifest_with_newer_files_is_found(originals: dict[bool, Path], tmp_path: Path, name: str) -> None:
    """Putting back one file of an older release does not fit the digests of the newer one."""
    older = files_of(make(tmp_path / "older.ortpackage", seed=1, serial=4, version="1"))
    newer = files_of(originals[False])
    assert older[name] != newer[name]
    with pytest.raises(IntegrityError):
        _use_all(repacked(tmp_path / "mixed.ortpackage", {**newer, name: older[name]}))


def test_a_whole_older_package_is_found_by_its_serial_number(originals: dict[bool, Path], tmp_path: Path) -> None:
    """An older release is right in itself; who knows a newer one asks for its serial number at least."""
    older = make(tmp_path / "older.ortpackage", serial=4)
    Package(older).close()
    with pytest.raises(IntegrityError, match="serial number 4"):
        Package(older, min_serial=5)
    Package(originals[False], min_serial=5).close()


def test_another_package_is_found_by_its_digest(originals: dict[bool, Path], tmp_path: Path) -> None:
    """A pinned digest takes this package, in either form, and no other."""
    with Package(originals[False]) as opened:
        digest = opened.sha256
    Package(originals[True], sha256=digest).close()
    with pytest.raises(IntegrityError, match="another package"):
        Package(make(tmp_path / "other.ortpackage", seed=1), sha256=digest)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
@pytest.mark.parametrize("kind", ["symbolic", "folder", "hard"])
def test_links_in_a_folder_are_refused(originals: dict[bool, Path], tmp_path: Path, kind: str) -> None:
    """A link leads to what others may write, so it is named and refused."""
    package = _copy(originals[True], tmp_path)
    name = "golden" if kind == "folder" else "graph.json"
    away = tmp_path / "away"
    (package / name).rename(away)
    if kind == "hard":
        os.link(away, package / name)
    else:
        (package / name).symlink_to(away)
    with pytest.raises(IntegrityError, match=f"{name}.*link"):
        _use_all(package)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
def test_a_hard_link_of_the_file_form_is_refused(originals: dict[bool, Path], tmp_path: Path) -> None:
    """The archive itself must be nobody else's file as well."""
    package = _copy(originals[False], tmp_path)
    os.link(package, tmp_path / "second")
    with pytest.raises(IntegrityError, match="hard links"):
        Package(package)
    with Package(package, private=True) as opened:  # nothing that is written later reaches the copy
        assert opened.graph().weights["first"].source is None


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_the_path_that_is_given_may_be_a_link(originals: dict[bool, Path], tmp_path: Path, folder: bool) -> None:
    """Whoever gives the path chooses the package; only links inside of it are refused."""
    (tmp_path / "newest.ortpackage").symlink_to(originals[folder])
    _use_all(tmp_path / "newest.ortpackage")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(PackageError, match="circle"):
        Package(tmp_path / "circle")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_a_folder_is_refused(originals: dict[bool, Path], tmp_path: Path) -> None:
    """A special file is refused without being opened, which would wait for ever."""
    package = _copy(originals[True], tmp_path)
    os.mkfifo(package / "pipe.json")
    with pytest.raises(IntegrityError, match=r"pipe\.json"):
        Package(package)


def test_no_package_is_a_package_error(tmp_path: Path) -> None:
    """A path with nothing, an empty folder and a file of something else are refused without a crash."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.ortpackage").write_text("no archive, but long enough to be read as one", encoding="utf-8")
    for name in ("absent", "empty", "text.ortpackage"):
        with pytest.raises(PackageError, match=name):
            Package(tmp_path / name)
