"""Memory budgets with ONNX Runtime: what is measured is real, and results stay right while sessions come and go."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from developer_scripts import load_script

from rlx_ort import CompileOptions, Device, Graph, GraphDevices, memory_use
from rlx_ort.execution import residency
from rlx_ort.execution.residency import Residency
from rlx_ort.providers.hardware import private_bytes, release_free_heap
from rlx_ort.providers.webgpu import is_software

MIB = 1 << 20
PROCESS_BYTES = 12 * MIB
"""For the work of opening, and threads with the rest of their heaps: 2 to 6 MB with four threads of requests."""


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Residency:
    """Begin with no sessions and an empty compile cache."""
    made = Residency()
    monkeypatch.setattr(residency, "_residency", made)
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    return made


@pytest.fixture
def script() -> ModuleType:
    """Return scripts/memory_budget.py as a module."""
    return load_script("memory_budget")


def product(name: str, width: int, rows: int | str = "n") -> GraphDevices:
    """Return a runner of `tanh(x @ w) @ w`."""
    graph = Graph(name)
    x = graph.input("x", [rows, width])
    weight = np.random.default_rng(width).standard_normal((width, width)).astype(np.float32) / np.float32(width)
    w = graph.param("w", [width, width], data=weight)
    graph.outputs = [graph.tanh(x @ w) @ w]
    return GraphDevices(graph, options=CompileOptions(intra_op_threads=1))


@pytest.mark.parametrize("cache", [None, "off"])
def test_ten_models_are_served_within_a_third_of_the_memory_they_need(script: ModuleType, cache: str | None) -> None:
    """All results are right. Sessions from the cache map their weights, so fewer have to be closed."""
    found: dict[str, Any] = script.serve(Device.CPU, 240, 4, 6.0, cache)
    assert found["first_wrong"] == []
    assert found["measured_bytes"] == pytest.approx(found["needed_bytes"], rel=0.1)
    assert found["evictions"] > (5 if cache is None else 80)
    assert (found["from_cache"] > 0) is (cache is None)
    assert found["used_at_the_end"] <= found["budget_bytes"]
    if sys.platform.startswith("linux"):  # elsewhere the heap keeps what was freed
        assert found["peak_bytes"] <= found["budget_bytes"] + PROCESS_BYTES


def test_results_outlive_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that a caller holds is not touched when its session is closed to make room."""
    monkeypatch.setenv("RLX_DEVICE_MEMORY", "cpu=12MB")
    x = np.random.default_rng(1).standard_normal((16, 1024)).astype(np.float32)
    first = product("first", 1024)
    (held,) = first.run("cpu", {"x": x})
    kept = held.copy()
    others = [product(f"other_{number}", 1024 + 16 * number) for number in range(3)]
    for other in others:
        other.run("cpu", {"x": np.ones((16, 1024 + 16 * others.index(other)), np.float32)})
    (memory,) = memory_use()
    assert next(each for each in memory.models if each.model == "first").sessions == 0
    np.testing.assert_array_equal(held, kept)
    np.testing.assert_allclose(first.run("cpu", {"x": x})[0], kept, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere freed memory is not returned at once")
def test_a_closed_graph_is_listed_no_more() -> None:
    """Nothing has to collect it before."""
    compiled = product("closed", 64).compile("cpu")
    compiled.run({"x": np.ones((2, 64), np.float32)})
    assert [each.model for memory in memory_use() for each in memory.models] == ["closed"]
    compiled.close()
    assert memory_use() == []


def test_a_shrunk_arena_is_given_back(monkeypatch: pytest.MonkeyPatch, sessions: Residency) -> None:
    """By a run that ends before its first node; the next run grows the arena again."""
    monkeypatch.setenv("RLX_DEVICE_MEMORY", "cpu=4GB")
    runner = product("large", 512)
    large = {"x": np.ones((16384, 512), np.float32)}
    runner.run("cpu", {"x": large["x"][:1]})
    wanted = runner.run("cpu", {"x": large["x"][:1]})[0][0]
    for _ in range(2):
        np.testing.assert_allclose(runner.run("cpu", large)[0][0], wanted, rtol=1e-4)
        release_free_heap()
        (before,), real = memory_use(), private_bytes()
        (resident,) = sessions.residents()
        assert resident.shrink()
        freed = real - private_bytes()
        assert freed > 24 * MIB  # a tensor of 32 MiB
        assert before.used_bytes is not None
        assert memory_use()[0].used_bytes == pytest.approx(before.used_bytes - freed, abs=2 * MIB)
    np.testing.assert_allclose(runner.run("cpu", large)[0][0], wanted, rtol=1e-4)


@pytest.mark.webgpu
def test_webgpu_in_software_is_measured_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of the process, and the results are right."""
    if not is_software():
        pytest.skip("WebGPU runs on a GPU here, whose memory cannot be read")
    x = np.ones((2, 256), np.float32)
    runners = [product(name, 256, 2) for name in ("a", "b")]
    wanted = [runner.run("cpu", {"x": x})[0] for runner in runners]
    monkeypatch.setenv("RLX_DEVICE_MEMORY", "webgpu=400MB")
    for _ in range(2):
        for runner, right in zip(runners, wanted, strict=True):
            np.testing.assert_allclose(runner.run("webgpu", {"x": x})[0], right, rtol=1e-3, atol=1e-5)
    memory = next(each for each in memory_use() if each.device.kind == "webgpu")
    assert memory.source.endswith("private memory of the process")
