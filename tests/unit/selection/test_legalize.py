"""Legalisation and the dispatch report: truthful, with the user's nodes, and without a live device."""

from typing import Any

import pytest

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, LegalizeError
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.selection.legalize import (
    DispatchSummary,
    dispatch_report_for_device,
    dispatch_report_for_device_with_options,
    format_dispatch_report,
    legalize_graph_for_device,
    legalize_graph_for_device_with_options,
    legalize_graph_for_device_with_report,
)

ASSISTED = CompileOptions(placement=PlacementRule.ASSISTED)


def test_a_graph_that_the_device_takes_comes_back(machine: Any) -> None:
    """Nothing is rewritten, so it is the same graph."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    graph = machine.chain("Erf")
    assert legalize_graph_for_device(graph, "gpu") is graph


def test_the_report_comes_with_the_graph(machine: Any) -> None:
    """Both answers are of one look at the graph."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    graph = machine.chain("Erf")
    legal, report = legalize_graph_for_device_with_report(graph, "gpu")
    assert legal is graph
    assert report == dispatch_report_for_device(graph, "gpu")


def test_the_report_counts_nodes_by_kind_sorted_and_without_leaves(machine: Any) -> None:
    """One row for each operator; imported nodes say which."""
    machine.add("gpu", kernels=machine.kernels("Erf", "Cos"))
    report = dispatch_report_for_device(machine.chain("Erf", "Cos", "Erf"), "gpu")
    assert report.summaries == (
        DispatchSummary("OnnxNode", 1, "native", "ai.onnx::Cos-21"),
        DispatchSummary("OnnxNode", 2, "native", "ai.onnx::Erf-21"),
    )
    assert (report.compile_ready, report.still_unsupported, report.common_lowered_kinds) == (True, (), ())


def test_the_report_names_back_end_policy_and_claims(machine: Any) -> None:
    """The header of the report tells what was asked of whom."""
    machine.add("gpu", kernels=machine.kernels("Erf", "Cos"))
    report = dispatch_report_for_device(machine.chain("Erf"), "gpu")
    assert (report.device, report.policy, report.supported_claim_count) == (Device.GPU, "prefer-native", 2)
    assert "GPU (wgpu)" in report.backend_name


def test_the_static_report_lists_what_is_unsupported(machine: Any) -> None:
    """The original's static report was always ready and never listed anything."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    report = dispatch_report_for_device(machine.chain("Erf", "Cos"), "gpu")
    assert not report.compile_ready
    assert [(node.index, node.kind) for node in report.still_unsupported] == [(2, "Cos")]
    assert [row.path for row in report.summaries] == ["unsupported", "native"]


def test_a_graph_that_is_refused_raises_with_every_node_and_the_report(machine: Any) -> None:
    """The error has the device, the count, one line a node, what to do, and the report."""
    machine.add("webgpu", kernels=machine.kernels("Erf"))
    with pytest.raises(LegalizeError) as caught:
        legalize_graph_for_device(machine.chain("Cos", "Erf", "Sin"), "webgpu")
    text = str(caught.value)
    assert "WebGPU cannot take graph 'chain': 2 unsupported nodes" in text
    assert "  node 1 'cos' (Cos): WebGPU has no kernel for ai.onnx::Cos-21 (f32)" in text
    assert "node 3 'sin' (Sin)" in text
    assert "PlacementRule.ASSISTED" in text
    assert format_dispatch_report(caught.value.report) in text
    assert len(caught.value.report.still_unsupported) == 2


def test_a_graph_is_legal_on_a_device_that_is_away_but_lists_its_kernels(machine: Any) -> None:
    """Legalising needs no live device."""
    machine.add("cuda", kernels=machine.kernels("Erf"), answer=machine.away)
    graph = machine.chain("Erf")
    assert legalize_graph_for_device(graph, "cuda") is graph


@pytest.mark.parametrize("ask", [legalize_graph_for_device, dispatch_report_for_device])
def test_a_device_without_a_provider_is_an_error_with_a_remedy(ask: Any, machine: Any) -> None:
    """The error names the device and what would help."""
    with pytest.raises(DeviceUnavailableError, match="MLX") as caught:
        ask(machine.chain("Erf"), "mlx")
    assert caught.value.remedy


def test_a_device_that_is_away_and_lists_nothing_is_an_error_with_its_remedy(machine: Any) -> None:
    """Nothing can be said, and the error says why."""
    machine.add("cuda", kernels=None, answer=machine.away)
    with pytest.raises(DeviceUnavailableError, match="libfake") as caught:
        dispatch_report_for_device(machine.chain("Erf"), "cuda")
    assert caught.value.remedy == "install libfake"


def test_a_compiling_provider_is_not_called_native(machine: Any) -> None:
    """It lists no kernels, so only a session can tell, and the report says so."""
    machine.add("openvino", kernels=None)
    report = dispatch_report_for_device(machine.chain("Erf"), "openvino")
    assert (report.compile_ready, report.supported_claim_count) == (True, 0)
    assert [row.path for row in report.summaries] == ["compiled"]


def test_nodes_that_the_cpu_takes_over_are_shown_as_its_own(machine: Any) -> None:
    """With the CPU's help the graph is ready, and the report does not call its nodes native."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    machine.add("cpu", kernels=machine.kernels("Cos"))
    graph = machine.chain("Erf", "Cos")
    legal, report = legalize_graph_for_device_with_options(graph, "gpu", ASSISTED)
    assert legal is graph
    assert {row.logical_name: row.path for row in report.summaries} == {
        "ai.onnx::Erf-21": "native",
        "ai.onnx::Cos-21": "cpu",
    }


def test_a_graph_of_which_nothing_would_run_on_the_device_is_refused(machine: Any) -> None:
    """The CPU may help, not replace the device."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    machine.add("cpu", kernels=machine.kernels("Cos"))
    report = dispatch_report_for_device_with_options(machine.chain("Cos"), "gpu", ASSISTED)
    assert not report.compile_ready
    with pytest.raises(LegalizeError, match="none of the graph's nodes"):
        legalize_graph_for_device_with_options(machine.chain("Cos"), "gpu", ASSISTED)


def test_the_text_has_a_header_a_line_a_kind_and_the_leftovers(machine: Any) -> None:
    """The report can be read as text."""
    machine.add("webgpu", kernels=machine.kernels("Erf"))
    lines = format_dispatch_report(dispatch_report_for_device(machine.chain("Erf", "Cos"), "webgpu")).splitlines()
    assert lines == [
        "dispatch report: WebGPU, policy prefer-native, 1 kernels listed, not ready to compile",
        "  OnnxNode: 1 x unsupported [ai.onnx::Cos-21]",
        "  OnnxNode: 1 x native [ai.onnx::Erf-21]",
        "  unsupported: node 2 'cos' (Cos): WebGPU has no kernel for ai.onnx::Cos-21 (f32)",
    ]
