"""Legalisation and the dispatch report: truthful, with the user's nodes, and without a live device."""

import json
from typing import Any

import pytest

from rlx_ort import CompileOptions, Device, DType, Graph, PlacementRule, PrecisionPolicy, verify
from rlx_ort.errors import DeviceUnavailableError, LegalizeError
from rlx_ort.execution.placement import (
    DispatchSummary,
    PlacedNode,
    Placement,
    format_dispatch_report,
    merge_placement,
    report_as_dict,
)
from rlx_ort.ir.ops.onnx import refused_op
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy
from rlx_ort.providers.base import KernelClaim
from rlx_ort.selection.support import dispatch_report_for_device, legalize_graph_for_device

ASSISTED = CompileOptions(placement=PlacementRule.ASSISTED)


def test_the_report_comes_with_the_graph(machine: Any) -> None:
    """Both answers are of one look at the graph."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    graph = machine.chain("Erf")
    legal, report = legalize_graph_for_device(graph, "gpu")
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
    """The header of the report names the device, the policy and the number of claims."""
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
    assert legalize_graph_for_device(graph, "cuda")[0] is graph


@pytest.mark.parametrize("ask", [legalize_graph_for_device, dispatch_report_for_device])
def test_a_device_without_a_provider_is_an_error_with_a_remedy(ask: Any, machine: Any) -> None:
    """The error names the device and what would help."""
    with pytest.raises(DeviceUnavailableError, match="TPU") as caught:
        ask(machine.chain("Erf"), "tpu")
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
    legal, report = legalize_graph_for_device(graph, "gpu", ASSISTED)
    assert legal is graph
    assert {row.logical_name: row.path for row in report.summaries} == {
        "ai.onnx::Erf-21": "native",
        "ai.onnx::Cos-21": "cpu",
    }


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


def _block() -> Graph:
    """Two kinds with both forms, one with a single form of several nodes, one that is one node."""
    g = Graph("block")
    x = g.input("x", [2, 4])
    normal = g.rms_norm(x, g.param("gamma", [4]), name="norm")
    mixed = g.lora_matmul(normal, g.param("w", [4, 4]), g.param("a", [4, 1]), g.param("b", [1, 4]), name="lora")
    g.silu(x)  # nobody needs it
    g.outputs = [g.silu(g.relu(mixed))]
    return g


BASIC = ("Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul", "MatMul", "Relu", "Sigmoid")


def _path_of(machine: Any, *more: KernelClaim) -> dict[str, str]:
    machine.add("gpu", kernels=(*machine.kernels(*BASIC), *more))
    report = dispatch_report_for_device(_block(), "gpu")
    return {name: row.path for row in report.summaries for name in row.nodes}


def test_ops_without_a_fused_kernel_go_by_basic_ones(machine: Any) -> None:
    """The report separates chosen forms from the only possible ones, and leaves unused nodes out."""
    assert _path_of(machine) == {"norm": "common-ir", "silu_2": "common-ir", "lora": "rewritten", "relu": "native"}


def test_a_fused_kernel_makes_a_node_native(machine: Any) -> None:
    """The provider lists QuickGelu, which is silu in one node."""
    kernel = KernelClaim("com.microsoft", "QuickGelu", 1, None, {"T": frozenset({DType.F32})})
    found = _path_of(machine, kernel)
    assert (found["silu_2"], found["norm"]) == ("native", "common-ir")


def test_the_report_says_which_policy_was_in_force(machine: Any) -> None:
    """It is that of the options."""
    options = CompileOptions(kernel_dispatch=KernelDispatch(KernelDispatchPolicy.FORCE_COMMON))
    machine.add("gpu", kernels=machine.kernels(*BASIC))
    assert dispatch_report_for_device(_block(), "gpu", options).policy == "force-common"


def test_a_decomposed_node_whose_basic_op_lacks_a_kernel_is_refused_under_its_own_name(machine: Any) -> None:
    """The user knows `norm`, not the Pow it became."""
    machine.add("gpu", kernels=machine.kernels(*(name for name in BASIC if name != "Pow")))
    with pytest.raises(LegalizeError, match=r"'norm' \(RmsNorm\): GPU \(wgpu\) has no kernel for ai.onnx::Pow-21"):
        legalize_graph_for_device(_block(), "gpu")


def test_a_forced_form_that_cannot_be_had_is_refused_with_the_node(machine: Any) -> None:
    """Nothing lists a fused normalisation here."""
    options = CompileOptions(kernel_dispatch=KernelDispatch(force_native_kinds=frozenset({"RmsNorm"})))
    machine.add("gpu", kernels=machine.kernels(*BASIC))
    with pytest.raises(LegalizeError, match=r"'norm' .RmsNorm.: gpuEP has no kernel") as caught:
        legalize_graph_for_device(_block(), "gpu", options)
    assert {row.path for row in caught.value.report.summaries} == {"unknown"}


def _kinds(graph: Graph) -> set[str]:
    return {node.op.kind for node in graph.nodes if not node.op.is_leaf}


def test_an_op_without_a_native_kernel_comes_back_as_the_basic_ops_that_the_device_takes(machine: Any) -> None:
    """The normalisation is gone, its basic ops have kernels, and there is nothing left to rewrite."""
    machine.add("gpu", kernels=machine.kernels(*BASIC))
    legal, report = legalize_graph_for_device(_block(), "gpu")
    assert report.common_lowered_kinds == ("Activation", "RmsNorm")
    assert "RmsNorm" not in _kinds(legal)
    again, after = legalize_graph_for_device(legal, "gpu")
    assert again is legal
    assert after.common_lowered_kinds == ()


def test_an_op_with_a_native_kernel_stays(machine: Any) -> None:
    """Only what the device refuses is rewritten."""
    kernel = KernelClaim("com.microsoft", "QuickGelu", 1, None, {"T": frozenset({DType.F32})})
    machine.add("gpu", kernels=(*machine.kernels(*BASIC), kernel))
    graph = _block()
    legal, _ = legalize_graph_for_device(graph, "gpu")
    assert "RmsNorm" not in _kinds(legal)
    assert legal.outputs[0].node.op == graph.outputs[0].node.op


def test_a_rewritten_graph_keeps_the_interface_and_leaves_the_old_one_alone(machine: Any) -> None:
    """Inputs, parameters, weights and outputs have their names and types, and the graph passes verification."""
    machine.add("gpu", kernels=machine.kernels(*BASIC))
    graph = _block()
    before = list(graph.nodes)
    legal, _ = legalize_graph_for_device(graph, "gpu")

    def interface(of: Graph) -> list[Any]:
        return [[(v.name, v.type) for v in values] for values in (of.inputs, of.params, of.outputs)] + [of.output_names]

    assert interface(legal) == interface(graph)
    assert verify(legal) == []
    assert graph.nodes == before


def test_a_replaced_node_keeps_the_name_of_its_result(machine: Any) -> None:
    """Other nodes may have taken the names that new ones would get."""
    g = Graph("names")
    x = g.input("in0", [2, 4])
    first = g.activation("silu", x, name="in1")
    g.set_outputs([g.activation("silu", first * g.activation("relu", x, name="in1.0"), name="in1/Mul")], ["y"])
    machine.add("gpu", kernels=machine.kernels(*BASIC))
    legal, _ = legalize_graph_for_device(g, "gpu")
    results = [name for node in legal.nodes for name in node.output_names]
    assert {"in0", "in1", "in1.0", "in1/Mul"} <= set(results)
    assert len(set(results)) == len(results)
    assert verify(legal) == []


def test_a_precision_policy_leaves_rewriting_to_compiling(machine: Any) -> None:
    """The policy's classes are those of the ops of the graph given, a normalisation being a reduction."""
    machine.add("gpu", kernels=machine.kernels(*BASIC, "Cast", dtypes=frozenset({DType.F32, DType.F16})))
    graph = _block()
    policy = PrecisionPolicy.auto_mixed_conservative()
    legal, report = legalize_graph_for_device(graph, "gpu", CompileOptions(precision_policy=policy))
    assert legal is graph
    assert "RmsNorm" in report.common_lowered_kinds


def test_a_refused_kind_says_why_and_what_to_do(machine: Any) -> None:
    """Gradients and graphics are known kinds that run nowhere."""
    g = Graph("train")
    x = g.input("x", [2])
    (out,) = g.add_node(refused_op("ReluBackward"), [x], name="grad", types=[x.type])
    g.outputs = [out]
    machine.add("gpu", kernels=machine.kernels("Relu"))
    with pytest.raises(LegalizeError, match=r"'grad' .ReluBackward.: it computes a gradient.*; cut the graph"):
        legalize_graph_for_device(g, "gpu")


def test_a_placement_says_where_the_nodes_of_each_row_are(machine: Any) -> None:
    """Nodes are counted once a provider; those that left no node of their own are merged."""
    machine.add("gpu", kernels=machine.kernels(*BASIC))
    report = dispatch_report_for_device(_block(), "gpu")
    placed = [
        PlacedNode("norm", "Pow", "GpuEP", "norm"),
        PlacedNode("norm/Add", "Add", "GpuEP", "norm"),
        PlacedNode("lora", "MatMul", "GpuEP", "lora"),
        PlacedNode("lora/Add", "Add", "CpuEP", "lora"),
        PlacedNode("silu", "Mul", "GpuEP", "silu_2"),
    ]
    by_ep = {ep: tuple(node for node in placed if node.provider == ep) for ep in ("GpuEP", "CpuEP")}
    merged = merge_placement(report, Placement("GpuEP", by_ep))
    assert {row.nodes: dict(row.placed) for row in merged.summaries} == {
        ("norm",): {"GpuEP": 1},
        ("lora",): {"CpuEP": 1, "GpuEP": 1},
        ("silu_2",): {"GpuEP": 1},
        ("relu",): {"merged": 1},
    }
    text = format_dispatch_report(merged)
    assert "  LoraMatMul: 1 x rewritten, 1 on CpuEP, 1 on GpuEP" in text
    assert "  Activation: 1 x native, 1 merged into other nodes" in text


def test_the_report_can_be_written_as_json(machine: Any) -> None:
    """All of it survives the round trip."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    report = dispatch_report_for_device(machine.chain("Erf", "Cos"), "gpu")
    found = json.loads(json.dumps(report_as_dict(report)))
    assert (found["device"], found["policy"], found["compile_ready"]) == ("gpu", "prefer-native", False)
    assert found["ops"][1] == {
        "kind": "OnnxNode",
        "onnx": "ai.onnx::Erf-21",
        "path": "native",
        "count": 1,
        "nodes": ["erf"],
        "placed": {},
    }
    (refused,) = found["unsupported"]
    assert (refused["node"], refused["kind"]) == ("cos", "Cos")
