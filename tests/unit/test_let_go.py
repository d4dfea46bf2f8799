"""What failed is let go at once: on Windows no file that is open or mapped can be deleted or replaced.

Garbage collection is off in these tests, since nobody knows when it comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from sample_models.source_files import SOURCES, damaged, read_all, write_source
from sample_packages.packages import flip, make

from rlx_ort import CancelToken, CompileOptions, Graph, GraphDevices, limited, load, open_package, start_package
from rlx_ort.converters.onnx_ir_bridge import foreign_errors
from rlx_ort.converters.sources import read_weights
from rlx_ort.deploy.package import Package
from rlx_ort.errors import ConversionError, IntegrityError, RlxError, let_go
from rlx_ort.execution import background
from rlx_ort.providers.engine.process import budget


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held:
    """Stands for a session, or for the map of a file."""


def _failing(seen: list[weakref.ref[Held]]) -> Any:
    held = Held()
    seen.append(weakref.ref(held))
    raise KeyError("failed")


def _limited(call: Callable[[], Any]) -> None:
    limited(call, timeout_s=60.0)


def _committed(call: Callable[[], Any]) -> None:
    runs = background.BackgroundRuns()
    runs.commit(call)
    runs.sync()


def _overlapping(call: Callable[[], Any]) -> None:
    def run(inputs: Any) -> list[Any]:
        return call() if inputs else time.sleep(0.01) or []

    background.run_all(run, [{}, {"x": 1}, {"x": 1}], 2)


async def _failed(call: Awaitable[Any]) -> None:
    with contextlib.suppress(KeyError):  # an error that leaves `asyncio.run` is held by its task
        await call


def _awaited(call: Callable[[], Any]) -> None:
    asyncio.run(_failed(background.run_in_background(call)))


def _opening(call: Callable[[], Any]) -> None:
    pytest.importorskip("httptools")
    from rlx_ort.serving.models import opened_in_time

    async def opened() -> None:
        await _failed(opened_in_time(call, 60.0, CancelToken(), print))

    asyncio.run(opened())


@pytest.mark.parametrize("way", [_limited, _committed, _overlapping, _awaited, _opening])
def test_a_call_that_failed_in_a_thread_is_let_go(way: Callable[[Callable[[], Any]], None]) -> None:
    """The error came through the frame that waited for it, which must not hold the error."""
    seen: list[weakref.ref[Held]] = []
    with contextlib.suppress(KeyError):
        way(lambda: _failing(seen))
    until_s = time.monotonic() + 5.0
    while any(each() is not None for each in seen) and time.monotonic() < until_s:
        time.sleep(0.001)  # the thread lets its job go after it has answered
    assert seen
    assert [each() for each in seen] == [None] * len(seen)


def test_an_error_that_someone_keeps_can_let_go() -> None:
    """Its traceback stays, without the variables."""
    seen: list[weakref.ref[Held]] = []
    with pytest.raises(KeyError) as kept:
        _failing(seen)
    let_go(kept.value)
    assert seen[0]() is None
    assert kept.traceback[-1].name == "_failing"


def test_a_foreign_error_lets_go_of_what_its_package_had() -> None:
    """Also while our error, of which it is the cause, is handled; and no frame leads back from it to itself."""
    seen: list[weakref.ref[Held]] = []
    with pytest.raises(ConversionError) as kept, foreign_errors("x"):
        _failing(seen)
    assert seen[0]() is None
    cause = kept.value.__cause__
    assert cause is not None
    names = []
    link = cause.__traceback__
    while link is not None:
        names.append(link.tb_frame.f_code.co_name)
        link = link.tb_next
    assert names[-1] == "_failing"
    assert "foreign_errors" not in names


@pytest.mark.parametrize("way", ["run", "run_fastest", "run_resolved"])
def test_a_runner_that_is_dropped_gives_its_threads_and_its_memory_back(way: str) -> None:
    """Else the next session would run on one thread until the garbage collector comes."""
    graph = Graph()
    graph.outputs = [graph.exp(graph.input("x", ("n", 4)))]
    held, runner = budget().granted, GraphDevices(graph)
    for rows in (1, 2, 2, 2):  # the second time and later, a route answers
        inputs = {"x": np.ones((rows, 4), np.float32)}
        runner.run("cpu", inputs) if way == "run" else getattr(runner, way)(inputs)
    kept = weakref.ref(runner.compile("cpu"))
    assert kept() is not None
    del runner
    assert kept() is None
    assert budget().granted == held


def _in_use(folder: Path) -> set[str]:
    """Return the names of the files in a folder that this process has open or mapped.

    Windows renames no such file. psutil asks there in a thread that it ends after a tenth of a second, with the locks
    that it holds, so that the process may stand still.
    """
    if sys.platform == "win32":
        return {path.name for path in folder.iterdir() if path.is_file() and not _renamed(path)}
    process = psutil.Process()
    paths = [each.path for each in (*process.open_files(), *process.memory_maps())]
    return {Path(path).name for path in paths if Path(path).parent == folder.resolve()}


def _renamed(path: Path) -> bool:
    try:
        path.rename(path.with_suffix(".free")).rename(path)
    except PermissionError:
        return False
    return True


def test_files_in_use_are_seen(tmp_path: Path) -> None:
    """Or the tests below would prove nothing."""
    path = write_source("safetensors", tmp_path)
    weights = read_weights(path)
    assert _in_use(tmp_path) == {path.name}
    del weights
    assert _in_use(tmp_path) == set()


@pytest.mark.parametrize("kind", SOURCES)
def test_a_damaged_file_is_not_in_use_once_it_was_refused(kind: str, tmp_path: Path) -> None:
    """Wherever its reader noticed the damage."""
    if kind == "gguf":
        pytest.importorskip("gguf")
    path = write_source(kind, tmp_path)
    refused = set()
    for number, content in enumerate(damaged(path.read_bytes(), 100, seed=11)):
        copy = tmp_path / f"{number}{path.suffix}"
        copy.write_bytes(content)
        try:
            read_all(kind, copy)
        except ConversionError:
            refused.add(copy.name)
    assert len(refused) > 20
    assert _in_use(tmp_path) & refused == set()


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_damaged_package_is_not_in_use_once_it_was_refused(folder: bool, tmp_path: Path) -> None:
    """It is hashed in threads, whose errors must not form a cycle with the frame that waits."""
    package = make(tmp_path / "small.ortpackage", folder=folder)
    with Package(package) as opened:
        tensor = next(iter(opened.index.tensors))
        file, begin = opened.tensor(tensor)._file, opened.tensor(tensor)._offset
        place = file.path
        del file
    del opened
    flip(place, begin, 3)
    try:
        with Package(package) as found:
            found.check_all()
    except IntegrityError:
        refused = True
    del found
    assert refused
    inside = {path.parent for path in package.rglob("*")} if folder else {tmp_path}
    assert set().union(*map(_in_use, inside)) == set()
    assert os.path.lexists(package)


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize(
    "refuse",
    [
        lambda path: open_package(path, options=CompileOptions(dims={"columns": 2})),
        lambda path: open_package(path, verify_on_first_use=True),
        lambda path: start_package(path, "webgpu:99"),
        lambda path: load(path, options=CompileOptions(dims={"columns": 2})),
    ],
    ids=["a dim", "golden cases", "the start", "load"],
)
def test_a_package_that_cannot_be_opened_is_not_in_use(
    refuse: Callable[[Path], object], folder: bool, tmp_path: Path
) -> None:
    """Its runner, which was being made, leads back to itself."""
    package = make(tmp_path / "small.ortpackage", folder=folder, golden=[])
    with pytest.raises(RlxError) as refusal:
        refuse(package)
    let_go(refusal.value)
    inside = {path.parent for path in package.rglob("*")} if folder else {tmp_path}
    assert set().union(*map(_in_use, inside)) == set()
