"""What a graph needs and the table lacks is measured on the CPU, kept, and used; nothing is measured unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx_ort import CalibrationProfile, Device, DType, EngineError, Graph, environment
from rlx_ort.calibration import on_demand, store
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.selection.cost import Term
from rlx_ort.selection.predict import calibrate, explain, measure_unknown

LONG_S = 10.0  # enough beside other work


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> CalibrationProfile:
    """Return a quick calibration of the CPU, made once for all tests."""
    with environment.override({"RLX_CACHE_DIR": str(tmp_path_factory.mktemp("calibration"))}):
        return calibrate("cpu", quick=True)


@pytest.fixture
def profile(measured: CalibrationProfile, fresh: Path) -> CalibrationProfile:
    """Store the calibration in the cache folder of the test, and return it."""
    store.keep(Device.CPU, measured)
    return measured


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has measured nothing and refused nothing."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(on_demand, "_refused", set())
    store.forget()
    return tmp_path / "calibration"


def determinants(rows: int | str = 400) -> Graph:
    """Return a graph of one operator that is not in the table."""
    graph = Graph("determinants")
    x = graph.input("x", [rows, 6, 6])
    graph.outputs = list(graph.onnx_node("Det", [x], types=[TensorType(DType.F32, Shape([rows]))]))
    return graph


def part(graph: Graph, dims: dict[str, int] | None = None) -> Term:
    """Return the part of the prediction that is the operator's."""
    estimate = explain(graph, "cpu", dims=dims)
    assert estimate is not None
    return next(term for term in estimate.terms if term.kind == "Det")


def test_an_operator_outside_the_table_is_assumed_until_it_is_measured(profile: CalibrationProfile) -> None:
    """The row is in the file."""
    graph = determinants()
    assert part(graph).how == "assumed"
    assert measure_unknown(graph, "cpu", limit_s=LONG_S) == 1
    assert part(graph).how == "measured"
    store.forget()
    found = store.find(Device.CPU).profile
    assert found is not None
    assert found.rows[: len(profile.rows)] == profile.rows
    assert [row.kernel.partition("-")[0] for row in found.rows[len(profile.rows) :]] == ["?Det"]


def test_what_is_known_is_not_measured_again(profile: CalibrationProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the graph nor for another one with the same operator."""
    measure_unknown(determinants(), "cpu", limit_s=LONG_S)
    monkeypatch.setattr(on_demand, "measure_nodes", lambda *given: pytest.fail("something was measured"))
    assert measure_unknown(determinants(), "cpu") == 0
    assert measure_unknown(determinants(500), "cpu") == 0


def test_a_table_that_has_everything_is_left_alone(
    profile: CalibrationProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product, which is measured first of all."""
    monkeypatch.setattr(on_demand, "measure_nodes", lambda *given: pytest.fail("something was measured"))
    graph = Graph("known")
    graph.outputs = [graph.input("x", [64, 512]) @ graph.param("w", [512, 512])]
    assert measure_unknown(graph, "cpu") == 0


def test_a_graph_with_a_named_dim_is_measured_at_two_sizes(profile: CalibrationProfile) -> None:
    """Between them times are interpolated."""
    graph = determinants("n")
    assert measure_unknown(graph, "cpu", dims={"n": 400}, limit_s=LONG_S) == 2
    assert [part(graph, {"n": rows}).how for rows in (100, 200, 400)] == ["measured"] * 3
    assert part(graph, {"n": 100}).ns < part(graph, {"n": 400}).ns


def test_a_device_without_a_profile_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a default profile says is no basis for rows."""
    monkeypatch.setattr(on_demand, "measure_nodes", lambda *given: pytest.fail("something was measured"))
    assert measure_unknown(determinants(), "cpu") == 0
    assert store.find(Device.CPU).profile is None


def test_what_cannot_be_measured_is_tried_once(profile: CalibrationProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays assumed, and is not refused on every choice."""
    tries = []

    def refuse(device: Device, nodes: list[on_demand.Node], limit_s: float) -> tuple[list[object], dict[str, str]]:
        tries.append(nodes)
        return [], {node.name: "no kernel" for node in nodes}

    monkeypatch.setattr(on_demand, "measure_nodes", refuse)
    assert measure_unknown(determinants(), "cpu") == measure_unknown(determinants(), "cpu") == 0
    assert len(tries) == 1
    assert part(determinants()).how == "assumed"


def test_what_there_was_no_time_for_is_tried_again(
    profile: CalibrationProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later choice may have more."""
    with monkeypatch.context() as patch:
        patch.setattr(
            on_demand, "measure_nodes", lambda device, nodes, limit_s: ([], {node.name: "no time" for node in nodes})
        )
        assert measure_unknown(determinants(), "cpu") == 0
    assert measure_unknown(determinants(), "cpu") == 1


def test_the_automatic_calibration_measures_a_graph_once(
    profile: CalibrationProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prediction of the graph does; without the variable none does."""
    graph, asked = determinants(), []
    real = on_demand.measure_unknown
    monkeypatch.setattr(on_demand, "measure_unknown", lambda *given: (asked.append(given), real(*given))[1])
    assert part(graph).how == "assumed"
    with environment.override({"RLX_AUTO_CALIBRATE": "1"}):
        assert part(graph).how == "measured"
        assert part(graph).how == "measured"
    assert len(asked) == 1


def test_a_prediction_survives_that_its_graph_cannot_be_measured(
    profile: CalibrationProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator stays assumed, with a warning."""

    def fail(*given: object) -> None:
        raise EngineError("the device was lost")

    monkeypatch.setattr(on_demand, "measure_nodes", fail)
    with environment.override({"RLX_AUTO_CALIBRATE": "1"}):
        assert part(determinants()).how == "assumed"
    assert "the device was lost" in caplog.text


def test_calibrating_for_a_graph_measures_what_it_needs(profile: CalibrationProfile) -> None:
    """The rows that are there are kept as they are."""
    found = calibrate("cpu", graph=determinants())
    assert found.rows[: len(profile.rows)] == profile.rows
    assert len(found.rows) == len(profile.rows) + 1
    assert found.measured == profile.measured
