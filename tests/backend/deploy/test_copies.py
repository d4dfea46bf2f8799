"""A damaged copy of a warmed package is found, although it starts from the compile cache."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sample_packages.keys import write_keys
from sample_packages.packages import SIZE, X, assert_right

from rlx_ort import Device, Graph, IntegrityError, load, open_package, start_package, warm_package
from rlx_ort.deploy.copies import PackageCopy
from rlx_ort.deploy.create import create_package
from rlx_ort.deploy.package import Package, sign_package
from rlx_ort.environment import override
from rlx_ort.ir.tensor import TensorData
from rlx_ort.options.compile_options import CacheUse, CompileOptions
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.repository import Repository


def _copied(path: Path, name: str) -> Path:
    target = path.with_name(name)
    return Path(shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target))


def _damage(path: Path, number: int = 0) -> None:
    """Change one bit of a weight."""
    with Package(path) as package:
        entry = [*package.index.tensors.values()][number]
        file, begin = package._container.locate(entry.file)
        place = file.path, begin + entry.offset
    with place[0].open("r+b") as stream:
        stream.seek(place[1])
        [byte] = stream.read(1)
        stream.seek(place[1])
        stream.write(bytes([byte ^ 1]))


def _answer(started: Path, way: Callable[[Path], object]) -> None:
    with way(started) as runner:
        outputs = runner.run({"x": X}) if way is start_package else runner.run("cpu", {"x": X})
        assert_right(outputs[0])


def _hashing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlx_ort-copy"]


def _wait() -> None:
    for thread in _hashing():
        thread.join()


@pytest.mark.parametrize("way", [start_package, open_package])
def test_a_damaged_copy_says_so_after_its_first_answer_and_is_refused_then(
    warmed: Path, way: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is right, the log names the file, and later starts raise, also in the other way."""
    copy = _copied(warmed, "copy.ortpackage")
    _damage(copy)
    with caplog.at_level(logging.WARNING, "rlx_ort.deploy"):
        _answer(copy, way)
        _wait()
    [record] = caplog.records
    assert "is damaged" in record.message
    assert "copy.ortpackage" in record.message
    for later in (start_package, open_package):
        with pytest.raises(IntegrityError, match="changed since it was packed"):
            later(copy)
    _answer(warmed, way)


def test_damage_that_was_mended_is_forgotten(warmed: Path) -> None:
    """The refusal is of the files as they were; another copy in their place starts."""
    copy = _copied(warmed, "copy.ortpackage")
    _damage(copy)
    _answer(copy, start_package)
    _wait()
    shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    _answer(_copied(warmed, "copy.ortpackage"), start_package)
    _wait()
    _answer(copy, start_package)


def test_a_copy_is_hashed_once(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was warmed never again, another one after its first answer, and a changed one again."""
    hashed = []

    def counted(copy: PackageCopy) -> threading.Thread:
        hashed.append(copy.path.name)
        return in_background(copy)

    in_background = PackageCopy.check_in_background
    monkeypatch.setattr(PackageCopy, "check_in_background", counted)
    copy = _copied(warmed, "copy.ortpackage")
    for path in (warmed, copy, copy, warmed):
        _answer(path, start_package)
        _wait()
    assert hashed == ["copy.ortpackage"]
    _damage(copy)
    _answer(copy, start_package)
    _wait()
    assert hashed == ["copy.ortpackage"] * 2


def test_a_damaged_copy_is_not_warmed(warmed: Path) -> None:
    """Everything is in the cache already, and the bytes are hashed all the same."""
    copy = _copied(warmed, "copy.ortpackage")
    _damage(copy)
    [row] = warm_package(copy, [Device.CPU])
    assert "changed since it was packed" in row.problem


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"schema": 1, "copies": {"x": 1}}', b"\xff"])
def test_a_list_of_copies_that_cannot_be_read_counts_as_none(warmed: Path, content: bytes) -> None:
    """It is written again."""
    [listed] = (warmed.parent / "cache" / "copies").glob("*.json")
    listed.write_bytes(content)
    _answer(warmed, start_package)
    _wait()
    assert str(warmed.name) in listed.read_text(encoding="utf-8")


def _twins() -> Graph:
    """Return relu(relu(x @ first) @ second), with two weights of the same bytes."""
    graph = Graph("twins")
    value = graph.input("x", ["rows", SIZE])
    data = np.random.default_rng(3).standard_normal((SIZE, SIZE)).astype(np.float32)
    for name in ("first", "second"):
        value = graph.relu(value @ graph.param(name, [SIZE, SIZE]))
        graph.weights[name] = TensorData.from_array(data)
    graph.outputs = [value]
    return graph


def _served(path: Path, key: Path) -> None:
    repository = Repository([path], ServeOptions(require_signature=str(key)))
    asyncio.run(repository.load_all())
    [entry] = repository.entries.values()
    if not entry.loaded:
        raise IntegrityError(entry.reason)


_CACHED = CompileOptions(cache=CacheUse.FOUND)
_WAYS: dict[str, Callable[[Path, Path], object]] = {
    "open_package": lambda path, key: open_package(path, require_signature=key).run("cpu", {"x": X}),
    "with options": lambda path, key: open_package(path, None, _CACHED, require_signature=key).run("cpu", {"x": X}),
    "compile": lambda path, key: open_package(path, require_signature=key).compile("cpu"),
    "start_package": lambda path, key: start_package(path, require_signature=key).run({"x": X}),
    "serve": _served,
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_damaged_copy_of_a_signed_package_never_runs(tmp_path: Path, folder: bool, number: int) -> None:
    """The compile cache has its weights, and yet each way of opening reads this copy and refuses it."""
    private, public = write_keys(tmp_path, "ours")
    create_package(_twins(), path := tmp_path / "twins.ortpackage", folder=folder)
    with Package(path) as package:
        sign_package(package, private)
    assert warm_package(path, [Device.CPU])[0].starts
    ways = {**_WAYS, "load": lambda path, _: load(path, None, _CACHED).run("cpu", {"x": X})}
    with override({"RLX_PACKAGE_KEY": str(public)}):
        for name, way in ways.items():
            way(path, public)
            copy = _copied(path, f"{name.replace(' ', '-')}.ortpackage")
            _damage(copy, number)
            for _ in range(2):
                with pytest.raises(IntegrityError, match=r"weights\.bin.*changed since it was packed"):
                    way(copy, public)


def test_a_session_from_the_cache_needs_the_weights_of_its_own_copy(warmed: Path) -> None:
    """Without a key as well, unless they were read whole before."""
    copy = _copied(warmed, "copy.ortpackage")
    with open_package(copy, options=_CACHED) as runner:
        runner.compile("cpu")
    _damage(copy)
    with (
        open_package(copy, options=_CACHED) as runner,
        pytest.raises(IntegrityError, match="changed since it was packed"),
    ):
        runner.compile("cpu")
