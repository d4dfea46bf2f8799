"""Memory that is counted before a session is opened, against the real one, and devices that are too small."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from developer_scripts import load_script

from rlx_ort import Device, DevicePolicy, Graph, GraphDevices, to_onnx
from rlx_ort.errors import MemoryBudgetError, NoViableDeviceError
from rlx_ort.execution.residency import residency
from rlx_ort.execution.resident import opening_bytes
from rlx_ort.providers import cpu
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.hardware import swap_bytes
from rlx_ort.selection.memory import memory_need

MIB = 1 << 20
WIDTH = 1024


def perceptron() -> Graph:
    """Return six wide layers with 24 MiB of weights, which differ, since ONNX Runtime packs equal ones once."""
    graph, draw = Graph("perceptron"), np.random.default_rng(0)
    value = graph.input("x", ("batch", WIDTH))
    for layer in range(6):
        data = draw.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH)
        value = graph.relu(value @ graph.param(f"w{layer}", (WIDTH, WIDTH), data=data))
    graph.outputs = [value]
    return graph


def convolutions() -> Graph:
    """Return a convolutional network with residual sums, whose activations weigh more than its weights."""
    graph = Graph("convolutions")
    value = graph.input("x", ("batch", 32, 64, 64))
    for layer in range(4):
        weight = graph.param(f"w{layer}", (32, 32, 3, 3), data=np.full((32, 32, 3, 3), 1e-3, np.float32))
        value = graph.relu(value + graph.conv2d(value, weight, padding=1))
    graph.outputs = [value]
    return graph


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere freed memory is not returned at once")
@pytest.mark.parametrize(
    ("graph", "batch"), [(perceptron(), 4096), (convolutions(), 64)], ids=["perceptron", "convolutions"]
)
def test_the_counted_memory_is_the_real_one(graph: Graph, batch: int, tmp_path: Path) -> None:
    """Within a fifth, as the heap of a process differs from run to run by some MB; docs/results has real models."""
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(graph).SerializeToString())
    script = load_script("memory_budget")
    row = script.fresh(script.counted, str(path), "cpu", {"batch": batch})
    assert row["real"] > 60 * MIB
    assert row["ratio"] == pytest.approx(1.0, abs=0.2)


def test_a_device_without_room_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name an error, in an automatic choice a reason; with room the same graph runs."""
    monkeypatch.setattr(CpuProvider, "memory_limit", lambda *_: 20 * MIB)
    runner, x = GraphDevices(perceptron(), policy=DevicePolicy.only("cpu")), np.ones((1, WIDTH), np.float32)
    with pytest.raises(MemoryBudgetError, match=r"CPU has 20,971,520 bytes .* 'perceptron', .* weights 25,165,824"):
        runner.run("cpu", {"x": x})
    assert [each for each in residency().residents(Device.CPU) if each.model == "perceptron" and each.sessions] == []
    with pytest.raises(NoViableDeviceError, match="cannot hold graph 'perceptron'"):
        runner.run_fastest({"x": x})
    monkeypatch.setattr(CpuProvider, "memory_limit", lambda *_: 200 * MIB)
    roomy = GraphDevices(perceptron())
    assert roomy.run("cpu", {"x": x})[0].shape == (1, WIDTH)
    monkeypatch.setattr(CpuProvider, "memory_limit", lambda *_: None)
    assert roomy.run("cpu", {"x": np.ones((2, WIDTH), np.float32)})[0].shape == (2, WIDTH)


def test_inputs_count_where_the_weights_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any session is opened."""
    monkeypatch.setattr(CpuProvider, "memory_limit", lambda *_: 100 * MIB)
    runner = GraphDevices(perceptron())
    with pytest.raises(MemoryBudgetError, match="activations"):
        runner.run("cpu", {"x": np.ones((1 << 15, WIDTH), np.float32)})
    assert runner.run("cpu", {"x": np.ones((1, WIDTH), np.float32)})[0].shape == (1, WIDTH)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what a session keeps is not read while it opens")
def test_an_opening_under_a_budget_corrects_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the session kept takes the place of what was counted for it."""
    runner = GraphDevices(perceptron())
    before = memory_need(runner.graph, "cpu", None, {"batch": 1})
    monkeypatch.setenv("RLX_DEVICE_MEMORY", "cpu=1GB")
    runner.run("cpu", {"x": np.ones((1, WIDTH), np.float32)})
    after = memory_need(runner.graph, "cpu", None, {"batch": 1})
    assert before is not None
    assert after is not None
    assert (before.correction, after.packed) == (0, before.packed)
    assert after.packed + after.runtime + after.correction == opening_bytes(runner.graph, Device.CPU)
    assert after.total - after.correction == before.total
    assert abs(after.correction) < 8 * MIB


@pytest.mark.parametrize(("swap", "limit"), [(5, MIB + 5), (None, None)], ids=["fixed", "as it is needed"])
def test_the_machine_may_swap(monkeypatch: pytest.MonkeyPatch, swap: int | None, limit: int | None) -> None:
    """The CPU's limit is the memory of the process and what the system may swap out; Windows lets its file grow."""
    monkeypatch.setattr(cpu, "swap_bytes", lambda: swap)
    assert CpuProvider().memory_limit(Device.CPU, GraphDevices(perceptron()).options, MIB) == limit


def test_the_swap_of_this_machine_is_read() -> None:
    """Without performance counters, which may be off on Windows."""
    assert (swap_bytes() is None) == (sys.platform != "linux")
