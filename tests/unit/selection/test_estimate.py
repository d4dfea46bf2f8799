"""A prediction from an exported model is the sum of its parts, and a hand-made profile decides as arithmetic says."""

from __future__ import annotations

from typing import Any

import pytest

from rlx_ort import Device, DevicePolicy, Graph, cost_model, device_report, explain, fastest_device_for
from rlx_ort.calibration import store
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row


def dense(rows: int) -> Graph:
    """Return a product of some rows with a square weight."""
    graph = Graph("dense")
    graph.outputs = [graph.input("x", [rows, 64]) @ graph.param("w", [64, 64])]
    return graph


def measured(label: str, roundtrip_us: float, product_us: tuple[float, float]) -> CalibrationProfile:
    """Return a profile that has a round trip, and products of 1 and of 1024 rows, in microseconds."""
    rows = (
        Row("run", (), roundtrip_us * 1e3),
        Row("launch", (), 0.0),
        Row("MatMul", (1, 64 * 64), product_us[0] * 1e3),
        Row("MatMul", (1024, 64 * 64), product_us[1] * 1e3),
        Row("Add", (1024,), 100.0),
    )
    return CalibrationProfile(ProfileKey(label, f"{label}EP", "Fake 1"), rows, measured="2026-11-01")


@pytest.fixture
def calibrated(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that starts at once and a GPU that computes fast, both measured."""
    for kind in ("cpu", "cuda"):
        machine.add(kind, kernels=machine.kernels("MatMul"), profile=machine.profile())
    models = {
        "cpu": MeasuredCostModel(Device.CPU, measured("cpu", 10, (2, 2048))),
        "cuda": MeasuredCostModel(Device.CUDA, measured("cuda", 50, (5, 20))),
    }
    monkeypatch.setattr(store, "measured_model", lambda device: models.get(device.label))


@pytest.mark.parametrize(
    ("rows", "wanted"), [(1, Device.CPU), (16, Device.CPU), (64, Device.CUDA), (1024, Device.CUDA)]
)
def test_the_choice_follows_the_measured_figures(calibrated: None, rows: int, wanted: Device) -> None:
    """10 + 2 x rows against 50 + 5 to 20 microseconds: the two meet between 16 and 64 rows."""
    assert fastest_device_for(dense(rows)) == wanted


def test_a_preference_counts_within_five_percent_of_a_measured_best(calibrated: None) -> None:
    """At 24 rows the CPU takes 58.0 and the GPU 59.5 microseconds, at 16 the difference is 75 %."""
    policy = DevicePolicy().with_prefer(["cuda"])
    assert fastest_device_for(dense(24)) == Device.CPU
    assert fastest_device_for(dense(24), policy) == Device.CUDA
    assert fastest_device_for(dense(16), policy) == Device.CPU


def test_the_report_says_where_the_figures_come_from(calibrated: None) -> None:
    """A calibration says so, and what it was of."""
    row = next(row for row in device_report(dense(8)) if row.device == Device.CUDA)
    assert row.profile_source is not None
    assert row.profile_source.startswith("calibration of 2026-11-01")


def test_a_prediction_is_the_sum_of_its_parts(calibrated: None) -> None:
    """The parts are the round trip, the transfers and the nodes, and nothing is left over."""
    estimate = explain(dense(1024), "cuda")
    assert estimate is not None
    assert sum(term.ns for term in estimate.terms) == pytest.approx(estimate.total_ns)
    assert estimate.total_ns == pytest.approx(70_000.0)


def test_the_largest_part_is_explained_first(calibrated: None) -> None:
    """On the CPU the product, on the GPU the way there and back."""
    on_cpu, on_gpu = (explain(dense(1024), device) for device in ("cpu", "cuda"))
    assert on_cpu is not None
    assert on_gpu is not None
    assert on_cpu.explain()[0].name == "MatMul"
    assert on_gpu.explain()[0].name == "round trip"


def test_what_is_beyond_the_top_is_one_part(machine: Any) -> None:
    """Nothing of the total is hidden."""
    machine.add("cuda", kernels=machine.kernels("Erf", "Cos", "Sin"), profile=machine.profile(dispatch_ns=10.0))
    estimate = explain(machine.chain("Erf", "Cos", "Sin"), "cuda")
    assert estimate is not None
    parts = estimate.explain(1)
    assert parts[-1].name == "everything else"
    assert sum(part.ns for part in parts) == pytest.approx(estimate.total_ns)


def test_a_choice_is_made_anew_when_the_graph_grows(calibrated: None) -> None:
    """What was remembered was about another graph."""
    graph = dense(1024)
    assert fastest_device_for(graph) == Device.CUDA
    graph.outputs = [graph.input("y", [1, 64]) @ graph.param("v", [64, 64])]
    assert fastest_device_for(graph) == Device.CPU


def test_a_cost_model_is_found_by_a_device_s_name(machine: Any) -> None:
    """A name stands for the device."""
    machine.add("gpu", profile=machine.profile())
    model = cost_model("gpu")
    assert model is not None
    assert model.device == Device.GPU
