"""Runs that replay recorded launches are priced by the rows of recorded launches, where runs are recorded."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from rlx_ort import CompileOptions, Device, PlacementRule
from rlx_ort.calibration import store
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.selection.predict import explain, predicted_ns

ROWS = (
    Row("run", (), 50_000.0),
    Row("launch", (), 5000.0),
    Row("MatMul", (64, 64 * 64), 1000.0),
    Row("Add", (1024,), 100.0),
    Row("Erf", (1024,), 3000.0),
)
RECORDED = (Row("run:recorded", (), 20_000.0), Row("launch:recorded", (), 1000.0))
PLAIN_NS, RECORDED_NS = 50_000.0 - 5000.0 + 0.8 * 5000.0, 20_000.0 - 1000.0 + 3000.0


def calibrated(machine: Any, monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    """Add a GPU that has a kernel of Erf and a profile of these rows."""
    machine.add("cuda", kernels=machine.kernels("Erf"), profile=machine.profile())
    model = MeasuredCostModel(Device.CUDA, CalibrationProfile(ProfileKey("cuda", "cudaEP", "Fake 1"), rows))
    monkeypatch.setattr(store, "measured_model", lambda device: model if device == Device.CUDA else None)


@pytest.mark.parametrize(("device_graph", "wanted"), [("auto", RECORDED_NS), (True, RECORDED_NS), (False, PLAIN_NS)])
def test_the_option_decides_between_plain_and_recorded_launches(
    device_graph: bool | Literal["auto"], wanted: float, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without its node, and a node of 3 us or most of a launch; choosing and explaining agree."""
    calibrated(machine, monkeypatch, *ROWS, *RECORDED)
    options = CompileOptions(device_graph=device_graph)
    estimate = explain(machine.chain("Erf", shape=(32, 32)), "cuda", options)
    assert estimate is not None
    assert estimate.total_ns == pytest.approx(wanted)
    assert predicted_ns(machine.chain("Erf", shape=(32, 32)), Device.CUDA, options) == pytest.approx(wanted)


def test_a_device_that_records_nothing_is_priced_by_plain_launches(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its profile has no row of recorded launches."""
    calibrated(machine, monkeypatch, *ROWS)
    estimate = explain(machine.chain("Erf", shape=(32, 32)), "cuda")
    assert estimate is not None
    assert estimate.total_ns == pytest.approx(PLAIN_NS)


def test_a_graph_of_which_the_cpu_takes_nodes_is_priced_by_plain_launches(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is wholly on the device is recorded."""
    calibrated(machine, monkeypatch, *ROWS, *RECORDED)
    machine.add("cpu", kernels=machine.kernels("Erf", "Cos"), profile=machine.profile())
    estimate = explain(
        machine.chain("Erf", "Cos", shape=(32, 32)), "cuda", CompileOptions(placement=PlacementRule.ASSISTED)
    )
    assert estimate is not None
    assert estimate.terms[0].ns == pytest.approx(50_000.0 - 5000.0)  # the round trip
