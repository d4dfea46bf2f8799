"""`start_package` starts nothing that `open_package` would refuse by its structure, and stays with one package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sample_packages.packages import X, assert_right, files_of, make, repacked

from rlx_ort import IntegrityError, start_package
from rlx_ort.deploy.names import INDEX, MANIFEST
from rlx_ort.deploy.package import Package


def refused(path: Path) -> None:
    """Assert that neither the quick nor the full way opens a package."""
    for way in (start_package, Package):
        with pytest.raises(IntegrityError):
            way(path)


@pytest.mark.parametrize("kept", [[INDEX], [INDEX, MANIFEST]], ids=["index", "index and manifest"])
def test_the_index_alone_is_no_package(warmed: Path, tmp_path: Path, kept: list[str]) -> None:
    """The files that it lists must be there, though a start reads none of them."""
    files = files_of(warmed)
    refused(repacked(tmp_path / "bare.ortpackage", {name: files[name] for name in kept}))


def test_a_file_of_another_size_does_not_start(warmed: Path, tmp_path: Path) -> None:
    """Names, sizes and sums are compared with the index."""
    files = files_of(warmed)
    name = next(name for name in files if name.endswith(".bin"))
    refused(repacked(tmp_path / "longer.ortpackage", {**files, name: files[name] + b"x"}))


def test_an_index_that_would_unpack_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    """Compressed members are refused by the directory, as in every package."""
    path = tmp_path / "bomb.ortpackage"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(INDEX, bytes(1 << 24))
    with pytest.raises(IntegrityError, match="compressed"):
        start_package(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_in_place_of_the_index_is_not_waited_for(tmp_path: Path) -> None:
    """A package holds regular files only."""
    folder = make(tmp_path / "piped.ortpackage", folder=True)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    program = f"""
from rlx_ort.deploy.start import start_package
from rlx_ort.errors import IntegrityError
try:
    start_package({str(folder)!r})
except IntegrityError as err:
    assert "regular" in str(err), err
else:
    raise AssertionError("started")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_package_that_is_replaced_while_it_runs_is_not_mixed_with_the_new_one(warmed: Path, tmp_path: Path) -> None:
    """What is opened in full is the package it was started with, or an error."""
    with start_package(warmed) as started:
        assert started.quick
        assert_right(started.run({"x": X})[0])
        warmed.rename(tmp_path / "old.ortpackage")
        make(warmed, seed=1)
        with pytest.raises(IntegrityError, match="another package"):
            started.run({"x": X.tolist()})


def test_a_package_that_was_not_warmed_stays_the_same_after_it_was_closed(tmp_path: Path) -> None:
    """The digest of the first opening counts for the second."""
    path = make(tmp_path / "small.ortpackage")
    with start_package(path) as started:
        assert not started.quick
        started.close()
        make(path, seed=1)
        with pytest.raises(IntegrityError, match="another package"):
            started.run({"x": X})


def test_the_digest_and_the_serial_number_that_are_asked_for_start(warmed: Path) -> None:
    """Neither needs the package to be opened in full."""
    with Package(warmed) as package:
        digest = package.sha256
    with start_package(warmed, sha256=digest.upper(), min_serial=5) as started:
        assert started.quick
        assert_right(started.run({"x": X})[0])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"sha256": "0" * 64}, "another package"), ({"min_serial": 6}, "older package")],
    ids=["digest", "serial"],
)
def test_another_package_than_the_one_asked_for_does_not_start(
    warmed: Path, wanted: dict[str, str | int], message: str
) -> None:
    """In the words of `open_package`."""
    with pytest.raises(IntegrityError, match=message):
        start_package(warmed, **wanted)  # type: ignore[arg-type]  # one of the two
