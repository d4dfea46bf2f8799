"""What is written and removed while files are in use, where Windows refuses what Linux allows."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from sample_packages.packages import make
from windows_files import WindowsFiles, windows_files

from rlx_ort import ConversionError, Graph, storage
from rlx_ort.converters.files import save_onnx, staging
from rlx_ort.deploy.triton import export_triton
from rlx_ort.storage import clear_unfinished, remove, write_atomic

__all__ = ["windows_files"]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _fail(folder: Path, held: list[np.memmap] | None = None) -> None:
    with staging(folder / "model") as stage:
        for name in ("data", "model"):
            stage.path.with_name(name).write_bytes(bytes(8))
        _check(stage.path.with_name("data"), held)


def _check(path: Path, held: list[np.memmap] | None) -> None:
    found = np.memmap(path, np.uint8)
    if held is not None:
        held.append(found)
    raise ConversionError("the result is wrong")


def test_an_error_that_maps_what_was_written_leaves_no_folder(tmp_path: Path, windows_files: WindowsFiles) -> None:
    """The result of a conversion is mapped by the frames of the error that says it is wrong."""
    with pytest.raises(ConversionError):
        _fail(tmp_path)
    assert _names(tmp_path) == []
    assert windows_files.refusals  # without which this proves nothing


def test_what_the_caller_maps_is_logged_and_removed_later(
    tmp_path: Path, windows_files: WindowsFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the next write of this process beside it; the other files of the folder go at once."""
    monkeypatch.setattr(storage, "_RETRY_S", 0.0)
    held: list[np.memmap] = []
    with caplog.at_level(logging.WARNING), pytest.raises(ConversionError):
        _fail(tmp_path, held)
    [left] = tmp_path.iterdir()
    assert _names(left) == ["data"]
    assert str(left) in caplog.text
    held.clear()
    assert clear_unfinished(tmp_path) == [left]


def test_a_file_that_a_scanner_has_open_for_a_moment_is_put_in_place(
    tmp_path: Path, windows_files: WindowsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every way of writing; and what is replaced may be open as well."""
    monkeypatch.setattr(storage, "_RETRY_S", 0.0)
    graph = Graph("g")
    graph.outputs = [graph.input("x", [1, 2]) @ graph.param("w", [2, 2], data=np.ones((2, 2), np.float32))]
    package, model = tmp_path / "p.ortpackage", tmp_path / "m.onnx"
    ways = {
        tmp_path / "text": lambda: write_atomic(tmp_path / "text", b"new"),
        package: lambda: make(package),
        tmp_path / "folder": lambda: export_triton(graph, tmp_path, name="folder", overwrite=True),
        model: lambda: save_onnx(graph, model, external_data=True, overwrite=True),
    }
    for place, write in ways.items():
        for _ in range(2):
            windows_files.busy[str(place)] = 3
            write()
            assert windows_files.busy.pop(str(place)) == 0
        assert place.exists()
    assert _names(tmp_path) == sorted(place.name for place in ways)


def test_a_file_that_stays_open_is_refused_and_keeps_its_content(
    tmp_path: Path, windows_files: WindowsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the retries, and what was written beside it is gone."""
    monkeypatch.setattr(storage, "_RETRY_S", 0.0)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb"), pytest.raises(PermissionError):
        write_atomic(path, b"new")
    assert _names(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_removing_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    """Neither an error nor a wait."""
    remove(tmp_path / "none")
    assert _names(tmp_path) == []


def test_a_file_that_is_mapped_for_a_moment_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has a code of its own for it, which Python takes for a wrong argument."""
    monkeypatch.setattr(storage, "_RETRY_S", 0.0)
    rename, refused = os.replace, []

    def mapped(source: Path, target: Path) -> None:
        if len(refused) < 3:
            err = OSError(errno.EINVAL, "The requested operation cannot be performed on a file with a mapped section")
            err.winerror = 1224  # type: ignore[attr-defined]  # exists on Windows only
            refused.append(err)
            raise err
        rename(source, target)

    monkeypatch.setattr(os, "replace", mapped)
    write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(refused) == 3


def test_the_hidden_name_of_a_file_is_short(tmp_path: Path) -> None:
    """Windows allows 260 characters in a path, and the hidden one is longer than that of a usual model by some 50."""
    assert len(storage.partial_path(tmp_path / ("n" * 200)).name) <= 80
