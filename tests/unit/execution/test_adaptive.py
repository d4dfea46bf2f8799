"""The adaptive choice: predictions that stand out are believed, others are measured once and remembered on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DeviceFallbackError, EngineError, Graph, GraphDevices, NoViableDeviceError, adaptive
from rlx_ort.calibration import store
from rlx_ort.execution.benchmark import DeviceBenchResult, Pace
from rlx_ort.providers import plugins
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.engine import runtime
from rlx_ort.selection.policy import Adaptive, DevicePickStrategy, DevicePolicy

CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)
INPUTS = {"x": np.ones((2, 4), np.float32)}
ADAPTIVE = DevicePolicy(pick=DevicePickStrategy.ADAPTIVE)
Build = Callable[..., Graph]


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and an engine that needs not be installed; returns where choices are kept."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "runtime_problem", lambda: None)
    monkeypatch.setattr(runtime, "runtime_version", lambda: (1, 31, 1))
    monkeypatch.setattr(runtime, "describe_runtime", lambda: "onnxruntime 1.31.1")
    monkeypatch.setattr(plugins, "find_plugins", lambda: ())
    store.forget()
    adaptive._pace.cache_clear()
    return tmp_path / "choices"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Replace the race: `times` is ns or a failure by device, `asked` who took part, `paces` the host's speed.

    Unless a test says otherwise, WebGPU wins.
    """
    script: dict[str, Any] = {"asked": [], "times": {"cuda": 9000, "webgpu": 5000}, "paces": []}

    def measure(devices: Iterable[Device], *rest: object, pace: Pace) -> list[DeviceBenchResult]:
        rows = []
        script["paces"].append(pace)
        for device in devices:
            script["asked"].append(device)
            time = script["times"].get(device.label, 1000)
            failed = time if isinstance(time, str) else ""
            rows.append(DeviceBenchResult(device, device.label, 0, None if failed else time, failed))
        return rows

    monkeypatch.setattr(adaptive, "race", measure)
    return script


def close_together(providers: Any) -> None:
    """Give CUDA and WebGPU predictions that are too close, and leave the CPU far behind."""
    providers["webgpu"].profile = CostProfile(100.0, 100.0, 100.0, 1_200.0, 1_200.0, 100.0, 100.0)


def test_a_prediction_that_stands_out_is_believed(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """Ten times as fast by shipped figures, which may be wrong by a factor of two: nothing is measured."""
    runner = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE)
    assert runner.resolve_with_inputs(INPUTS) == CUDA
    assert timed["asked"] == []
    assert runner.last_choice is not None
    assert runner.last_choice.how == "predicted"


def test_predictions_within_their_error_are_measured(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """The two that are close are timed, the third is not, and the measurement decides."""
    close_together(providers)
    runner = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE)
    assert runner.resolve_with_inputs(INPUTS) == WEBGPU
    assert set(timed["asked"]) == {CUDA, WEBGPU}


def test_predicted_and_measured_times_are_recorded(
    providers: Any, matmul_graph: Build, timed: Any, stored: Path
) -> None:
    """In the runner and in the file."""
    close_together(providers)
    runner = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE)
    runner.resolve_with_inputs(INPUTS)
    [file] = stored.iterdir()
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["measured"] == {"cuda": 9000.0, "webgpu": 5000.0}
    assert set(document["predicted"]) == {"cpu", "cuda", "webgpu"}
    assert runner.last_choice is not None
    assert runner.last_choice.measured == document["measured"]


def test_a_winner_is_remembered_for_other_processes(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """A second runner of an equal graph measures nothing."""
    close_together(providers)
    GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE).resolve_with_inputs(INPUTS)
    timed["asked"].clear()
    second = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE)
    assert second.resolve_with_inputs(INPUTS) == WEBGPU
    assert timed["asked"] == []
    assert second.last_choice is not None
    assert second.last_choice.how == "remembered"


@pytest.mark.parametrize("change", ["shape", "dtype", "version", "graph"])
def test_another_question_is_measured_again(
    change: str, providers: Any, matmul_graph: Build, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inputs, another ONNX Runtime and another graph have winners of their own."""
    close_together(providers)
    GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE).resolve_with_inputs(INPUTS)
    timed["asked"].clear()
    graph, inputs = matmul_graph(WEIGHTS), INPUTS
    if change == "shape":
        inputs = {"x": np.ones((3, 4), np.float32)}
    elif change == "dtype":
        inputs = {"x": np.ones((2, 4), np.float64)}
    elif change == "version":
        monkeypatch.setattr(runtime, "describe_runtime", lambda: "onnxruntime 1.32.0")
        store.forget()
    else:
        graph.outputs = [graph.outputs[0], graph.relu(graph.outputs[0])]
    GraphDevices(graph, ADAPTIVE).resolve_with_inputs(inputs)
    assert set(timed["asked"]) == {CUDA, WEBGPU}


def test_a_device_that_fails_is_passed_over_and_not_remembered(
    providers: Any, matmul_graph: Build, timed: Any, stored: Path
) -> None:
    """The other one wins; next time the failed one gets its chance."""
    close_together(providers)
    timed["times"] = {"cuda": "out of memory", "webgpu": 5000}
    runner = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE)
    assert runner.resolve_with_inputs(INPUTS) == WEBGPU
    assert runner.last_choice is not None
    assert runner.last_choice.failed == {"cuda": "out of memory"}
    assert not stored.exists() or not list(stored.iterdir())


def test_when_all_close_devices_fail_the_next_best_is_taken(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """The CPU was too slow to be measured, and is what is left."""
    close_together(providers)
    timed["times"] = {"cuda": "lost", "webgpu": "lost", "cpu": 70_000}
    assert GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE).resolve_with_inputs(INPUTS) == CPU


def test_when_every_device_fails_each_is_an_attempt(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """The error names them all."""
    close_together(providers)
    timed["times"] = dict.fromkeys(("cpu", "cuda", "webgpu"), "lost")
    with pytest.raises(DeviceFallbackError) as caught:
        GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE).resolve_with_inputs(INPUTS)
    assert {device for device, _ in caught.value.attempts} == {CPU, CUDA, WEBGPU}


@pytest.mark.parametrize(
    ("policy", "taken", "not_taken"),
    [(ADAPTIVE.with_prefer(["cuda"]), 5200, 5300), (ADAPTIVE, 5100, 5200)],
    ids=["preferred", "predicted the quicker one"],
)
def test_a_small_difference_in_the_race_does_not_decide(
    policy: DevicePolicy, taken: int, not_taken: int, providers: Any, matmul_graph: Build, timed: Any
) -> None:
    """A preferred device may be 4 % slower and not 6 %; the prediction decides what is within 2 %."""
    close_together(providers)
    for slower, wanted in ((taken, CUDA), (not_taken, WEBGPU)):
        timed["times"] = {"cuda": slower, "webgpu": 5000}
        inputs = {"x": np.ones((slower, 4), np.float32)}
        assert GraphDevices(matmul_graph(WEIGHTS), policy).resolve_with_inputs(inputs) == wanted


def test_a_denied_device_is_neither_measured_nor_chosen(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """Of two that are close, the allowed one is taken without a look at the other."""
    close_together(providers)
    runner = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE.with_deny(["webgpu"]))
    assert runner.resolve_with_inputs(INPUTS) == CUDA
    assert timed["asked"] == []


def test_a_policy_that_leaves_nothing_says_why(providers: Any, matmul_graph: Build) -> None:
    """As every other way of choosing does."""
    policy = DevicePolicy(allow=(), pick=Adaptive())
    with pytest.raises(NoViableDeviceError):
        GraphDevices(matmul_graph(WEIGHTS), policy).resolve_with_inputs(INPUTS)


def test_the_measured_device_is_the_one_that_runs(providers: Any, matmul_graph: Build, timed: Any) -> None:
    """`compile_resolved_with_inputs` takes what the strategy chose."""
    close_together(providers)
    compiled = GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE).compile_resolved_with_inputs(INPUTS)
    assert compiled.device == WEBGPU
    np.testing.assert_array_equal(compiled.run(INPUTS)[0], INPUTS["x"] @ WEIGHTS)


def test_what_is_unknown_is_measured_before_devices_are_compared(
    providers: Any, matmul_graph: Build, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device that may be chosen, at the sizes of the inputs; where that fails, one is chosen anyway."""
    asked: list[tuple[Device, dict[str, int]]] = []

    def refuse(graph: Graph, device: Device, options: Any, dims: dict[str, int]) -> int:
        asked.append((device, dims))
        raise EngineError("lost")

    monkeypatch.setattr(adaptive, "measure_unknown", refuse)
    close_together(providers)
    assert GraphDevices(matmul_graph(WEIGHTS), ADAPTIVE).resolve_with_inputs(INPUTS) == WEBGPU
    assert {device for device, _ in asked} == {CPU, CUDA, WEBGPU}
    assert all(dims == {"n": 2} for _, dims in asked)
