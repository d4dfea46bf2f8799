"""An adaptive choice follows what runs take: it leaves a device that became slow, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DevicePolicy, DeviceRouter, EngineError, Graph, GraphDevices, adaptive, graph_devices
from rlx_ort.adaptive import Choice
from rlx_ort.calibration import learned as learning
from rlx_ort.calibration import store
from rlx_ort.calibration.learned import Learned
from rlx_ort.execution import benchmark
from rlx_ort.execution.benchmark import DeviceBenchResult
from rlx_ort.providers.engine import runtime
from tests.unit.execution.conftest import MatMulSession

CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)
INPUTS = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
WANTED = (INPUTS["x"].astype(np.float64) @ WEIGHTS).astype(np.float32)
MS = 1_000_000
Build = Callable[..., Graph]


class Machine:
    """Devices on which a run moves the clock by `run_ns`; `ran` lists them, `fails` those whose runs fail."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.run_ns = {"cpu": 2 * MS, "cuda": 3 * MS, "webgpu": 90 * MS}
        self.ran: list[str] = []
        self.fails: set[str] = set()
        self.cold = 1.0

    def run(self, label: str) -> None:
        """Let a run on a device take its time; on the CPU after another device, `cold` times of it."""
        self.now_ns += int(self.run_ns[label] * (self.cold if label == "cpu" and self.ran[-1:] != ["cpu"] else 1.0))
        if label in self.fails:
            raise EngineError("the device was lost")
        self.ran.append(label)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, providers: Any) -> Machine:
    """Return a machine whose CPU takes 2 ms a run and CUDA 3 ms, and which knows that from a race."""
    found = Machine()
    compute = MatMulSession.run

    def run(session: MatMulSession, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        found.run(session.request.device.label)
        return compute(session, output_names, feeds)

    def choose(*_: object) -> Choice:
        return Choice(CPU, "measured", {"webgpu": 90.0 * MS}, {"cpu": 2.0 * MS, "cuda": 3.0 * MS})

    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "runtime_problem", lambda: None)
    monkeypatch.setattr(runtime, "runtime_version", lambda: (1, 31, 1))
    monkeypatch.setattr(runtime, "describe_runtime", lambda: "onnxruntime 1.31.1")
    monkeypatch.setattr(MatMulSession, "run", run)
    monkeypatch.setattr(adaptive, "choose", choose)
    monkeypatch.setattr(learning, "LEARNED", Learned(lambda: found.now_ns / 1e9))
    monkeypatch.setattr(graph_devices, "time", SimpleNamespace(perf_counter_ns=lambda: found.now_ns))
    store.forget()
    return found


@pytest.fixture
def runner(machine: Machine, matmul_graph: Build) -> GraphDevices:
    """Return a runner that chooses adaptively, after a few runs on the CPU."""
    runner = GraphDevices(matmul_graph(WEIGHTS), DevicePolicy().with_adaptive_pick())
    run_for(runner, machine, 0.05)
    assert set(machine.ran) == {"cpu"}
    return runner


def run_for(runner: GraphDevices, machine: Machine, seconds: float) -> list[str]:
    """Run again and again and return the devices that ran; every result must be right."""
    first, end_ns = len(machine.ran), machine.now_ns + seconds * 1e9
    while machine.now_ns < end_ns:
        np.testing.assert_array_equal(runner.run_resolved_with_inputs(INPUTS)[0], WANTED)
    return machine.ran[first:]


def test_a_device_that_became_slow_loses_its_place_within_a_few_runs(runner: GraphDevices, machine: Machine) -> None:
    """The CPU takes ten times as long: five runs of the last eight show it, then CUDA runs."""
    machine.run_ns["cpu"] = 20 * MS
    ran = run_for(runner, machine, 0.2)
    assert ran[:6] == ["cpu"] * 5 + ["cuda"]
    assert set(ran[6:]) == {"cuda"}


def test_a_device_that_stays_slow_is_tried_again_at_the_cost_of_one_run(runner: GraphDevices, machine: Machine) -> None:
    """In a minute of load the CPU gets one run every few seconds."""
    machine.run_ns |= {"cpu": 200 * MS, "cuda": 30 * MS}
    run_for(runner, machine, 2.0)
    ran = run_for(runner, machine, 60.0)
    assert 5 <= ran.count("cpu") <= 20
    assert "cpu cpu" not in " ".join(ran)


def test_a_device_that_recovered_gets_its_place_back_within_ten_seconds(runner: GraphDevices, machine: Machine) -> None:
    """Ten seconds after the load went the CPU runs, and nothing else."""
    machine.run_ns["cpu"] = 20 * MS
    run_for(runner, machine, 5.0)
    machine.run_ns["cpu"] = 2 * MS
    run_for(runner, machine, 10.0)
    assert set(run_for(runner, machine, 5.0)) == {"cpu"}


def test_a_device_that_is_slower_by_less_than_a_tenth_keeps_its_place(runner: GraphDevices, machine: Machine) -> None:
    """CUDA takes 3 ms; the CPU loses its place with 3.4, not with 3.2."""
    machine.run_ns["cpu"] = round(3.2 * MS)
    assert set(run_for(runner, machine, 1.0)) == {"cpu"}
    machine.run_ns["cpu"] = round(3.4 * MS)
    assert run_for(runner, machine, 0.05)[-1] == "cuda"


def test_the_first_run_on_a_device_does_not_count(runner: GraphDevices, machine: Machine) -> None:
    """It takes 50 ms more to compile kernels, and CUDA keeps its place."""
    machine.run_ns |= {"cpu": 20 * MS, "cuda": 53 * MS}
    run_for(runner, machine, 0.11)
    assert machine.ran[-1] == "cuda"
    machine.run_ns["cuda"] = 3 * MS
    assert set(run_for(runner, machine, 0.1)) == {"cuda"}


def test_a_run_that_fails_where_it_was_moved_is_answered_by_the_chosen_device(
    runner: GraphDevices, machine: Machine
) -> None:
    """The result is not lost, and CUDA is not tried again."""
    machine.run_ns["cpu"] = 20 * MS
    machine.fails.add("cuda")
    assert set(run_for(runner, machine, 30.0)) == {"cpu"}


def test_a_run_that_fails_on_the_chosen_device_is_an_error(runner: GraphDevices, machine: Machine) -> None:
    """As under every other strategy."""
    machine.fails.add("cpu")
    with pytest.raises(EngineError, match="lost"):
        runner.run_resolved_with_inputs(INPUTS)


def test_a_device_that_refuses_the_graph_takes_no_place(runner: GraphDevices, machine: Machine, providers: Any) -> None:
    """It is asked once, and the CPU goes on."""
    providers["cuda"].refuses["cuda"] = EngineError("out of memory on the card")
    machine.run_ns["cpu"] = 20 * MS
    assert set(run_for(runner, machine, 5.0)) == {"cpu"}


def test_a_router_follows_as_well(machine: Machine, matmul_graph: Build) -> None:
    """It says which device ran."""
    router = DeviceRouter(matmul_graph(WEIGHTS), DevicePolicy().with_adaptive_pick())
    machine.run_ns["cpu"] = 20 * MS
    assert [router.run(INPUTS)[0] for _ in range(5)] == [CPU, CPU, CUDA, CUDA, CUDA]


def test_another_runner_of_the_graph_profits(runner: GraphDevices, machine: Machine) -> None:
    """What runs took is known for the graph, not for the runner."""
    machine.run_ns["cpu"] = 20 * MS
    run_for(runner, machine, 0.2)
    second = GraphDevices(runner.graph, DevicePolicy().with_adaptive_pick())
    assert second.resolve_with_inputs(INPUTS) == CUDA


def test_a_graph_with_a_bound_handle_is_not_moved(runner: GraphDevices, machine: Machine) -> None:
    """Its state lies on the device that was chosen."""
    runner.compile_resolved_with_inputs(INPUTS).bind_handle("x", INPUTS["x"])
    machine.run_ns["cpu"] = 20 * MS
    assert set(run_for(runner, machine, 1.0)) == {"cpu"}


def test_without_the_adaptive_strategy_the_choice_stays(machine: Machine, matmul_graph: Build) -> None:
    """A benchmark's winner stays, however slow it becomes."""
    runner = GraphDevices(matmul_graph(WEIGHTS), DevicePolicy().with_benchmark_pick(1))
    winner = runner.resolve_with_inputs(INPUTS)
    machine.run_ns[winner.label] = 900 * MS
    assert set(run_for(runner, machine, 5.0)) == {winner.label}


def test_a_benchmark_corrects_an_adaptive_choice(
    machine: Machine, matmul_graph: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found CUDA far faster than a race had."""
    row = DeviceBenchResult(CUDA, "cuda", 0, 1000)
    monkeypatch.setattr(benchmark, "benchmark_devices", lambda *_: [row])
    runner = GraphDevices(matmul_graph(WEIGHTS), DevicePolicy().with_adaptive_pick())
    runner.benchmark(INPUTS)
    assert runner.resolve_with_inputs(INPUTS) == CUDA


def test_a_cold_first_run_does_not_cost_a_device_its_return(runner: GraphDevices, machine: Machine) -> None:
    """After a switch the CPU's first run takes twice as long, which is more than CUDA needs."""
    machine.run_ns["cpu"] = 40 * MS
    assert run_for(runner, machine, 2.0)[-1] == "cuda"
    machine.run_ns["cpu"], machine.cold = 2 * MS, 2.0
    assert run_for(runner, machine, 10.0)[-1] == "cpu"
