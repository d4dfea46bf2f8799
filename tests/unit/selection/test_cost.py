"""Predicted times, computed by hand: one unit set, leaves free, launches, transfers, and the CPU's help."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from op_tests.cases import CASES, built

from rlx_ort import CalibrationError, Device, DType, Graph, GraphVerifyError, NoViableDeviceError, RlxError, cost_model
from rlx_ort.calibration.features import workload_of
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.selection.cost import (
    DEFAULT_DIM,
    BackendCostModel,
    ProfileCostModel,
    estimate_graph_cost,
    pick_best_device,
    total_ns,
)


@pytest.fixture(autouse=True)
def exported_for(machine: Any) -> None:
    """Graphs are exported for the CPU where the device of a model has no provider; it lists no kernels."""
    machine.add("cpu", kernels=None)


def model_of(profile: Any, device: Device = Device.CUDA) -> ProfileCostModel:
    """Return the model of a profile."""
    return ProfileCostModel(device, profile)


def matmul_graph(m: int | str, k: int, n: int) -> Graph:
    """Return a graph of one product of an input and a weight."""
    graph = Graph("mm")
    graph.outputs = [graph.input("x", [m, k]) @ graph.param("w", [k, n])]
    return graph


def idle() -> Graph:
    """Return a graph that gives its input back."""
    graph = Graph("idle")
    graph.outputs = [graph.input("x", [10])]
    return graph


def test_a_graph_that_computes_nothing_costs_a_round_trip(machine: Any) -> None:
    """An empty run still goes there and back."""
    assert estimate_graph_cost(idle(), model_of(machine.profile(roundtrip_ns=700.0))) == 700.0


def test_leaves_cost_nothing(machine: Any) -> None:
    """Inputs, weights and constants are not launched."""
    graph = idle()
    graph.input("other", [10])
    graph.param("w", [10])
    graph.constant([1.0, 2.0])
    assert estimate_graph_cost(graph, model_of(machine.profile(dispatch_ns=50.0))) == 0.0


def test_a_graph_without_nodes_has_no_prediction(machine: Any) -> None:
    """Prices are of what is exported, and such a graph cannot be."""
    with pytest.raises(GraphVerifyError, match="has no outputs"):
        estimate_graph_cost(Graph("empty"), model_of(machine.profile()))


def test_every_node_of_a_graph_without_outputs_counts(machine: Any) -> None:
    """As the contract prices it: the sum over all nodes."""
    graph = matmul_graph(8, 16, 4)
    priced = estimate_graph_cost(graph, model_of(machine.profile()))
    graph.outputs = []
    assert estimate_graph_cost(graph, model_of(machine.profile())) == priced > 0


class Rates:
    """A cost model with the methods of the original runtime, and nothing more; `figures` replace what they return."""

    def __init__(self, device: Device = Device.CPU, **figures: Any) -> None:
        self._device = device
        self._figures = {"sgemm_gflops": 2, "memory_bw": np.float32(1e12), "dispatch": 10, "roundtrip": 100.0} | figures

    def device(self) -> Device:
        """Return the device."""
        return self._device

    def sgemm_gflops(self, m: int, k: int, n: int) -> Any:
        """Return a rate that depends on the shape."""
        return self._figures["sgemm_gflops"] if m > 1 else 1.0

    def memory_bw(self) -> Any:
        """Return a bandwidth that never counts."""
        return self._figures["memory_bw"]

    def dispatch_overhead_ns(self) -> Any:
        """Return the time of a launch."""
        return self._figures["dispatch"]

    def roundtrip_overhead_ns(self) -> Any:
        """Return the time of an empty run."""
        return self._figures["roundtrip"]

    def num_threads(self) -> int:
        """Return one."""
        return 1


class DerivedRates(Rates, BackendCostModel):  # type: ignore[misc]  # the protocol declares the device as a property
    """The same, derived from the protocol, which only declares the other methods."""


@pytest.mark.parametrize("name", ["sgemm_gflops", "memory_bw", "dispatch", "roundtrip"])
@pytest.mark.parametrize("value", [0, None, -1.0, "3", True, math.inf])
def test_a_figure_that_is_no_rate_or_time_is_refused(name: str, value: Any) -> None:
    """A rate of 0 would make its part of a run free, so that the device wins every choice."""
    is_time = name in ("dispatch", "roundtrip")
    if is_time and value in (0, math.inf):
        assert estimate_graph_cost(idle(), Rates(**{name: value})) >= 0
        return
    with pytest.raises(CalibrationError, match=f"CPU gives {value!r} as {name}"):
        pick_best_device(idle(), [Rates(**{name: value})])


@pytest.mark.parametrize("name", ["gemm_gflops", "conv_gflops", "memory_bytes_per_ns"])
@pytest.mark.parametrize("value", [0.0, None, math.nan])
def test_a_profile_with_a_rate_that_is_none_is_refused(name: str, value: Any, machine: Any) -> None:
    """Whether it is shipped or made by a provider of one's own."""
    with pytest.raises(CalibrationError, match=name):
        machine.profile(**{name: value})


def test_a_matrix_product_costs_two_flops_for_each_multiplication(machine: Any) -> None:
    """At 2 GFLOP/s, which is 2 FLOP per ns, 2mkn FLOP take mkn ns."""
    profile = machine.profile(gemm_gflops=2.0, memory_bytes_per_ns=1e9)
    assert estimate_graph_cost(matmul_graph(8, 16, 4), model_of(profile)) == pytest.approx(8 * 16 * 4)


def test_a_node_costs_the_longer_of_computing_and_moving_memory(machine: Any) -> None:
    """With endless arithmetic, the operands and the result are read and written at the memory's pace."""
    profile = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=2.0)
    moved = 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert estimate_graph_cost(matmul_graph(8, 16, 4), model_of(profile)) == pytest.approx(moved / 2.0)


def test_each_node_is_launched_once(machine: Any) -> None:
    """Three nodes, three launches, one round trip."""
    profile = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=1e12, dispatch_ns=10.0, roundtrip_ns=5.0)
    assert estimate_graph_cost(machine.chain("Erf", "Cos", "Sin"), model_of(profile)) == pytest.approx(35.0)


def test_dead_nodes_cost_nothing(machine: Any) -> None:
    """What no output needs is not exported."""
    profile = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=1e12, dispatch_ns=10.0)
    graph = machine.chain("Erf")
    graph.onnx_node("Cos", graph.inputs, types=[TensorType(DType.F32, Shape([2, 3]))])
    assert estimate_graph_cost(graph, model_of(profile)) == pytest.approx(10.0)


def test_inputs_are_uploaded_and_outputs_read_back(machine: Any) -> None:
    """Each transfer costs its latency and its bytes; a weight is there already."""
    profile = machine.profile(
        gemm_gflops=1e12,
        memory_bytes_per_ns=1e12,
        upload_bytes_per_ns=2.0,
        upload_latency_ns=100.0,
        readback_bytes_per_ns=4.0,
        readback_latency_ns=1000.0,
    )
    wanted = 100.0 + 8 * 16 * 4 / 2.0 + 1000.0 + 8 * 4 * 4 / 4.0
    assert estimate_graph_cost(matmul_graph(8, 16, 4), model_of(profile)) == pytest.approx(wanted)


def test_an_input_with_two_readers_is_uploaded_once(machine: Any) -> None:
    """The second reader finds it on the device."""
    profile = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=1e12, upload_bytes_per_ns=1.0)
    graph = machine.chain("Erf")
    graph.outputs += graph.onnx_node("Cos", graph.inputs, types=[TensorType(DType.F32, Shape([2, 3]))])
    assert estimate_graph_cost(graph, model_of(profile)) == pytest.approx(24.0)


def test_a_named_dim_has_the_size_that_is_given(machine: Any) -> None:
    """`dims` makes the estimate that of the static graph."""
    profile = machine.profile()
    static = estimate_graph_cost(matmul_graph(7, 16, 4), model_of(profile))
    assert estimate_graph_cost(matmul_graph("n", 16, 4), model_of(profile), dims={"n": 7}) == pytest.approx(static)


def test_a_dim_without_a_size_has_the_stated_default(machine: Any) -> None:
    """Nothing is priced as empty because it is dynamic."""
    profile = machine.profile()
    static = estimate_graph_cost(matmul_graph(DEFAULT_DIM, 16, 4), model_of(profile))
    assert estimate_graph_cost(matmul_graph("n", 16, 4), model_of(profile)) == pytest.approx(static)


def test_a_convolution_has_a_rate_of_its_own(machine: Any) -> None:
    """The convolution rate prices it, not that of matrix products."""
    graph = Graph("conv")
    x = graph.input("x", [1, 3, 8, 8])
    w = graph.param("w", [4, 3, 3, 3])
    graph.outputs = [graph.conv2d(x, w, padding=1)]
    fast = machine.profile(gemm_gflops=1e-9, conv_gflops=1.0, memory_bytes_per_ns=1e12)
    # 4 x 8 x 8 outputs of 3 x 3 x 3 multiply-adds each.
    assert estimate_graph_cost(graph, model_of(fast)) == pytest.approx(2 * 4 * 8 * 8 * 27, rel=0.05)


def test_nodes_that_the_cpu_takes_are_priced_there_with_their_copies(machine: Any) -> None:
    """The value goes to the CPU and its result comes back, each with its latency."""
    device = machine.profile(
        gemm_gflops=1e12, memory_bytes_per_ns=1e12, dispatch_ns=1.0, upload_latency_ns=100.0, readback_latency_ns=1000.0
    )
    cpu = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=1e12, dispatch_ns=7.0)
    graph = machine.chain("Erf", "Cos", "Sin")  # nodes 1, 2, 3; the middle one is the CPU's
    predicted = estimate_graph_cost(graph, model_of(device), cpu_nodes={2}, cpu_model=model_of(cpu, Device.CPU))
    launches = 1.0 + 7.0 + 1.0
    copies = 100.0 + 1000.0 + 100.0 + 1000.0  # input up, to the CPU, back up, output down
    assert predicted == pytest.approx(launches + copies)


def test_an_input_that_only_the_cpu_reads_is_not_uploaded(machine: Any) -> None:
    """It is where it is needed, and so is an output that the CPU computes."""
    device = machine.profile(memory_bytes_per_ns=1e12, gemm_gflops=1e12, upload_latency_ns=1.0, readback_latency_ns=1.0)
    cpu = machine.profile(memory_bytes_per_ns=1e12, gemm_gflops=1e12)
    graph = machine.chain("Cos")
    predicted = estimate_graph_cost(graph, model_of(device), cpu_nodes={1}, cpu_model=model_of(cpu, Device.CPU))
    assert predicted == pytest.approx(0.0, abs=1e-6)


def test_a_model_answers_with_the_figures_of_its_profile(machine: Any) -> None:
    """Nothing is converted: GFLOP/s, bytes per ns, ns."""
    profile = machine.profile(gemm_gflops=12000.0, memory_bytes_per_ns=900.0, dispatch_ns=3000.0, roundtrip_ns=35000.0)
    model = ProfileCostModel(Device.CUDA, profile, threads=4)
    figures = (model.sgemm_gflops(64, 64, 64), model.memory_bw(), model.dispatch_overhead_ns())
    assert figures == (12000.0, 900.0, 3000.0)
    assert (model.roundtrip_overhead_ns(), model.num_threads()) == (35000.0, 4)


def test_a_provider_without_a_profile_has_no_model(machine: Any) -> None:
    """Nothing is invented for it."""
    machine.add("gpu")
    machine.add("cpu", profile=machine.profile())
    assert cost_model(Device.GPU) is None
    assert cost_model(Device.MLX) is None
    assert cost_model(Device.CPU) is not None


def test_the_best_device_is_the_one_with_the_smallest_cost(machine: Any) -> None:
    """The order of the models does not matter for that."""
    slow = model_of(machine.profile(roundtrip_ns=2.0), Device.CUDA)
    fast = model_of(machine.profile(roundtrip_ns=1.0), Device.CPU)
    assert pick_best_device(idle(), [slow, fast]) == Device.CPU
    assert pick_best_device(idle(), [fast, slow]) == Device.CPU


def test_of_equal_devices_the_earlier_is_the_best(machine: Any) -> None:
    """A tie is decided by the order of the models."""
    models = [model_of(machine.profile(), Device.GPU), model_of(machine.profile(), Device.CUDA)]
    assert pick_best_device(idle(), models) == Device.GPU


def test_a_prediction_that_is_no_number_loses(machine: Any) -> None:
    """NaN and infinity are no times."""
    broken = [model_of(machine.profile(roundtrip_ns=bad), Device.GPU) for bad in (math.nan, math.inf)]
    good = model_of(machine.profile(roundtrip_ns=1e12), Device.CPU)
    assert pick_best_device(idle(), [*broken, good]) == Device.CPU


@pytest.mark.parametrize("times", [[], [math.nan], [math.inf, math.nan]])
def test_without_a_usable_prediction_there_is_no_best_device(times: list[float], machine: Any) -> None:
    """The original answered CPU, whether it was there and allowed or not."""
    models = [model_of(machine.profile(roundtrip_ns=time), Device.GPU) for time in times]
    with pytest.raises(NoViableDeviceError):
        pick_best_device(idle(), models)


@pytest.mark.parametrize("kind", [Rates, DerivedRates])
def test_a_model_of_your_own_needs_only_its_rates(kind: type[Rates]) -> None:
    """A product takes its FLOP over the rate for its shape, a launch and a round trip; transfers are free."""
    assert estimate_graph_cost(matmul_graph(8, 16, 4), kind()) == pytest.approx(100.0 + 10.0 + 8 * 16 * 4)
    assert estimate_graph_cost(matmul_graph(1, 16, 4), kind()) == pytest.approx(110.0 + 2 * 16 * 4)


def test_the_best_of_two_models_of_your_own_is_picked() -> None:
    """The device is read from the method."""
    assert pick_best_device(matmul_graph(8, 16, 4), [Rates(), Rates(Device.CUDA, sgemm_gflops=4.0)]) == Device.CUDA


def test_the_default_model_of_the_cpu_counts_the_cores_of_the_process(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads are the process's share of the cores on the CPU, and 1 on an accelerator."""
    from rlx_ort.providers import hardware

    monkeypatch.setattr(hardware, "core_share", lambda: hardware.CoreShare(8, 4, 3, 2.5))
    machine.add("gpu", profile=machine.profile())
    machine.add("cpu", profile=machine.profile())
    found = [cost_model(device) for device in (Device.CPU, Device.GPU)]
    assert [model and model.num_threads() for model in found] == [2, 1]


ROUNDTRIP_NS, DISPATCH_NS = 1000.0, 10.0


def case_graph(name: str) -> Graph:
    """Return the graph of a case, in the first of three dtypes that its op takes."""
    for dtype in (DType.F32, DType.I32, DType.BOOL):
        try:
            return built(CASES[name], dtype)[0]
        except RlxError:
            continue
    raise AssertionError(f"{name} takes none of the dtypes")


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_op_costs_the_launches_of_what_it_is_exported_to(name: str, machine: Any) -> None:
    """What is folded and what only names memory anew is free; the price is finite, and that of the exported model."""
    machine.add("cpu", kernels=None)
    model = ProfileCostModel(Device.CPU, machine.profile(roundtrip_ns=ROUNDTRIP_NS, dispatch_ns=DISPATCH_NS))
    graph = case_graph(name)
    predicted = estimate_graph_cost(graph, model)
    workload = workload_of(export_model(graph))
    launched = sum(count for kernel, count in workload.counts.items() if kernel.name != "View")
    assert ROUNDTRIP_NS + launched * DISPATCH_NS <= predicted < math.inf
    assert predicted == pytest.approx(total_ns(workload, model))
