"""The document joins prediction, placement and measurement node by node."""

from __future__ import annotations

import functools
import json
import platform
from typing import Any

import numpy as np
import pytest

import rlx_ort
from rlx_ort import CompileOptions, Device, DType, Graph, UnsupportedOp, explain
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.report.document import document, splits_of, view_of
from rlx_ort.selection.support import Support

X = np.random.default_rng(0).standard_normal((4, 16, 16)).astype(np.float32)


def _graph() -> Graph:
    """Return a graph of which WebGPU leaves one node to the CPU: doubled, its determinant, doubled."""
    graph = Graph("split")
    x = graph.input("x", ["batch", 16, 16])
    doubled = graph.add(x, x, name="doubled")
    [found] = graph.onnx_node("Det", [doubled], types=[TensorType(DType.F32, Shape(["batch"]))], name="found")
    graph.outputs = [graph.add(found, found, name="twice")]
    return graph


def test_a_view_has_what_the_prediction_and_the_run_have_of_each_node() -> None:
    """Parts add up to the predicted time, and each node that ran has a time, an operator and a provider."""
    graph = _graph()
    view, traced = view_of(graph, functools.partial(Device, "cpu"), CompileOptions(), {"x": X}, {"batch": 4})
    estimate = explain(graph, "cpu", None, {"batch": 4})
    assert estimate is not None
    assert sum(part["predicted_ns"] for part in view["parts"]) == pytest.approx(estimate.total_ns)
    assert view["predicted_ns"] == pytest.approx(estimate.total_ns)
    assert [(node["name"], node["op"], node["ep"]) for node in view["nodes"]] == [
        ("doubled", "Add", "CPUExecutionProvider"),
        ("found", "Det", "CPUExecutionProvider"),
        ("twice", "Add", "CPUExecutionProvider"),
    ]
    assert all(node["measured_ns"] > 0 and node["predicted_ns"] > 0 for node in view["nodes"])
    assert view["edges"] == [(0, 1, -1), (1, 2, -1)]
    assert (view["crossings"], view["placement_share"]) == ([], 1.0)
    assert [phase["name"] for phase in view["timeline"]] == ["choose", "export", "open", "copy in", "run", "copy out"]
    assert view["measured_ns"] > 0
    assert view["roofline"]["rates"] in ("measured", "predicted")  # a run of three tiny nodes is mostly overhead
    assert traced.device == Device.CPU
    json.dumps(document("split", [], [view]), allow_nan=False)


@pytest.mark.webgpu
def test_crossings_are_marked_and_priced() -> None:
    """The value to the CPU and the one back, with their bytes, on the edges that they cross."""
    graph = _graph()
    choose = functools.partial(Device, "webgpu")
    view, _ = view_of(graph, choose, CompileOptions(), {"x": X}, {"batch": 4}, measured_ns=1.0)
    assert [(row["to_device"], row["nbytes"]) for row in view["crossings"]] == [(False, X.nbytes), (True, 16)]
    assert all(row["predicted_ns"] > 0 for row in view["crossings"])
    assert view["edges"] == [(0, 1, 0), (1, 2, 1)]
    assert [node["ep"] for node in view["nodes"]] == [f"{ep}ExecutionProvider" for ep in ("WebGpu", "CPU", "WebGpu")]


@pytest.mark.webgpu
def test_what_a_device_does_not_take_is_listed_once_with_the_reason() -> None:
    """`gpu`, `vulkan` and `webgpu` are one device; no option moves a determinant to it."""
    devices = [Device(kind) for kind in ("gpu", "vulkan", "webgpu", "cpu", "tpu")]
    [split] = splits_of(_graph(), devices, CompileOptions(), {"batch": 4})
    assert (split["device"], split["nodes"], split["repairs"]) == ("gpu", ["found (Det)"], [])
    assert "Det" in split["reason"]


def test_an_option_that_repairs_a_split_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried: here the device takes the node once sizes are fixed."""

    def judged(device: Device, graph: Graph, options: CompileOptions) -> Support:
        return Support(() if options.dims else (UnsupportedOp(1, "found", "Det", "no kernel"),))

    monkeypatch.setattr("rlx_ort.report.document.support_of", judged)
    [split] = splits_of(_graph(), [Device.CPU], CompileOptions(), {"batch": 4})
    assert split["repairs"] == ["fix the sizes: --dim batch=4"]


def _product() -> tuple[Graph, dict[str, Any]]:
    graph = Graph("product")
    x = graph.input("x", [512, 512])
    graph.outputs = [graph.matmul(x, x, name="product")]
    return graph, {"x": np.ones((512, 512), np.float32)}


def test_rates_of_a_roofline_are_measured_below_measured_limits() -> None:
    """A product's rate is its operations by its measured time; without a calibration the limits are measured too."""
    graph, inputs = _product()
    view, _ = view_of(graph, functools.partial(Device, "cpu"), CompileOptions(), inputs, {}, measured_ns=1.0)
    roof, [node] = view["roofline"], view["nodes"]
    assert (roof["rates"], roof["limits"]) == ("measured", "measured for this page")
    [[point]] = roof["kinds"].values()
    assert point.rate == pytest.approx(2 * 512**3 / node["measured_ns"])
    assert roof["peak"] >= point.rate
    assert roof["bandwidth"] > 0


def test_rates_of_a_roofline_are_predicted_where_nodes_take_little_of_a_run() -> None:
    """A profile may count launches only; such times say nothing of a node's rate."""
    graph, inputs = _product()
    view, _ = view_of(graph, functools.partial(Device, "cpu"), CompileOptions(), inputs, {}, measured_ns=1e15)
    assert view["roofline"]["rates"] == "predicted"


def test_a_document_names_the_machine_the_versions_and_the_date() -> None:
    """So that a page that was sent to someone can be read."""
    made = document("m", [], [])
    assert made["machine"]
    assert (made["version"], made["python"]) == (rlx_ort.__version__, platform.python_version())
    assert made["date"].startswith("20")
