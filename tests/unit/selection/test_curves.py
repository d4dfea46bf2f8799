"""Predicted times over one dim are read from a curve, and choices for new sizes with them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DevicePolicy, Graph, fastest_device_for
from rlx_ort.calibration import store
from rlx_ort.selection import candidates, predict
from rlx_ort.selection.predict import BatchCurve, batch_curve, predicted_ns
from tests.unit.selection.conftest import Machine

CPU, CUDA = Device.CPU, Device.CUDA


def mlp(name: str = "mlp") -> Graph:
    """Return `relu(x[batch, tokens, 64] @ w[64, 64])`."""
    graph = Graph(name)
    graph.outputs = [graph.relu(graph.input("x", ["batch", "tokens", 64]) @ graph.param("w", [64, 64]))]
    return graph


def feeds(batch: int, tokens: int = 4) -> dict[str, Any]:
    """Return inputs of these sizes."""
    return {"x": np.ones((batch, tokens, 64), np.float32)}


@pytest.fixture
def two(machine: Machine) -> Machine:
    """Return a machine with a slow CPU, and a fast device to which launches take 50 us."""
    takes = machine.kernels("MatMul", "Relu")
    machine.add("cpu", kernels=takes, profile=machine.profile())
    machine.add("cuda", kernels=takes, profile=machine.profile(gemm_gflops=20.0, roundtrip_ns=50_000.0))
    return machine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Device, int]]:
    """Return the list to which each whole prediction adds its device and batch."""
    found: list[tuple[Device, int]] = []

    def counted(graph: Graph, device: Device, options: CompileOptions, dims: Any = None) -> float | None:
        found.append((device, dims["batch"]))
        return predicted_ns(graph, device, options, dims)

    monkeypatch.setattr(predict, "predicted_ns", counted)
    monkeypatch.setattr(candidates, "predicted_ns", counted)
    return found


@pytest.mark.parametrize("size", [1, 2, 8, 1024])
def test_a_curve_is_exact_at_powers_of_two(size: int) -> None:
    """There it was made."""
    assert BatchCurve(lambda n: 1000.0 + 7 * n * n).ns(size) == 1000 + 7 * size * size


@pytest.mark.parametrize(
    ("predict", "most"),
    [
        (lambda n: 5000.0, 0.0),
        (lambda n: 300.0 * n, 0.0),
        (lambda n: 5000.0 + 300 * n, 0.01),
        (lambda n: 5000.0 + 3 * n**1.5, 0.01),
        (lambda n: max(5000.0, 230.0 * n), 0.02),
        (lambda n: 200.0 + max(5000.0, 37.0 * n) + max(9000.0, 11.0 * n), 0.02),
    ],
)
def test_a_curve_is_close_between_its_points(predict: Any, most: float) -> None:
    """Smooth times to 1 %, those with a bend to 2 %."""
    curve = BatchCurve(predict)
    for size in range(1, 1025):
        assert curve.ns(size) == pytest.approx(predict(size), rel=most + 1e-9)


def test_a_curve_of_a_device_without_a_profile_has_no_times() -> None:
    """As its predictions."""
    assert BatchCurve(lambda size: None).ns(5) is None


def test_an_empty_batch_counts_as_one() -> None:
    """There is no logarithm of nothing."""
    assert BatchCurve(lambda size: 10.0 * size).ns(0) == 10


def test_the_first_named_dim_of_the_inputs_is_the_batch(two: Machine) -> None:
    """Unless another one is named; sizes of the others are given."""
    graph, options = mlp(), CompileOptions()
    assert batch_curve(graph, CPU, dims={"tokens": 4}).ns(8) == predicted_ns(
        graph, CPU, options, {"batch": 8, "tokens": 4}
    )
    assert batch_curve(graph, CPU, "tokens", dims={"batch": 3}).ns(16) == predicted_ns(
        graph, CPU, options, {"batch": 3, "tokens": 16}
    )


def test_a_graph_without_named_dims_has_no_curve(two: Machine) -> None:
    """The error says so."""
    graph = Graph("fixed")
    graph.outputs = [graph.relu(graph.input("x", [2, 3]))]
    with pytest.raises(ValueError, match="named dim"):
        batch_curve(graph, CPU)


def test_a_new_batch_size_of_a_known_graph_needs_no_prediction(two: Machine, asked: list[Any]) -> None:
    """After some sizes between two powers of two the others are read from the curve."""
    graph = mlp()
    for batch in (64, 65):
        fastest_device_for(graph, inputs=feeds(batch))
    asked.clear()
    for batch in range(66, 128):
        fastest_device_for(graph, inputs=feeds(batch))
    assert asked == []


def test_the_choice_is_the_same_as_without_the_curve(two: Machine) -> None:
    """For each batch, unless the two devices are within 5 % of each other."""
    graph, chosen = mlp(), set()
    for batch in range(1, 400):
        cpu, cuda = (
            predicted_ns(graph, device, CompileOptions(), {"batch": batch, "tokens": 4}) or 0 for device in (CPU, CUDA)
        )
        device = fastest_device_for(graph, inputs=feeds(batch))
        chosen.add(device)
        if not 1 / 1.05 <= cpu / cuda <= 1.05:
            assert device == (CPU if cpu < cuda else CUDA)
    assert chosen == {CPU, CUDA}


def test_a_preference_counts_with_curves_as_well(two: Machine) -> None:
    """Of two that are equal the preferred one is taken, for each batch."""
    two.add("webgpu", kernels=two.kernels("MatMul", "Relu"), profile=two.profile())
    policy = DevicePolicy.only("cpu,webgpu").with_prefer("webgpu")
    graph = mlp()
    assert {fastest_device_for(graph, policy, inputs=feeds(batch)) for batch in range(1, 40)} == {Device.WEBGPU}


def test_curves_are_forgotten_when_a_device_was_calibrated(
    two: Machine, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rankings are."""
    graph = mlp()
    for batch in (64, 65):
        fastest_device_for(graph, inputs=feeds(batch))
    asked.clear()
    monkeypatch.setattr(store, "generation", lambda: -1)
    fastest_device_for(graph, inputs=feeds(66))
    assert {batch for _, batch in asked} == {66}


def test_a_graph_is_freed_after_choices_by_curves(two: Machine) -> None:
    """What is remembered of a graph does not refer to it."""
    graph = mlp()
    kept = weakref.ref(graph)
    for batch in (1, 2, 3):
        fastest_device_for(graph, inputs=feeds(batch))
    del graph
    gc.collect()
    assert kept() is None
