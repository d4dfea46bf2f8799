"""Whether a device takes a graph: kernels, functions, versions, types, placement rules, messages and memory."""

from typing import Any

import pytest

from rlx_ort import CompileOptions, Device, DType, Graph, PlacementRule
from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.ops.leaf import Input
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import Shape, TensorType, ValueType
from rlx_ort.providers.base import KernelClaim
from rlx_ort.selection.node_claims import function_body, is_function
from rlx_ort.selection.support import (
    dispatch_report_for_device,
    first_unsupported_op,
    support_of,
    supports,
    supports_graph,
)

ASSISTED = CompileOptions(placement=PlacementRule.ASSISTED)
STRICT = CompileOptions(placement=PlacementRule.STRICT)


class NoOnnxForm(Op):
    """An op that nothing writes as ONNX, as training ops are."""

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the first input."""
        first = inputs[0]
        assert first is not None
        return (first,)


MISH = "Softplus Tanh Mul"  # what the function of Mish computes, x tanh(softplus(x))
TAKEN: dict[str, tuple[dict[str, str], str, DType, CompileOptions | None, bool]] = {
    "a node without a kernel": ({"gpu": "Relu", "cpu": "Relu Erf"}, "Relu Erf", DType.F32, None, False),
    "the kernel's element type": ({"gpu": "Erf"}, "Erf", DType.F32, None, True),
    "another element type": ({"gpu": "Erf"}, "Erf", DType.F64, None, False),
    "a function whose nodes have kernels": ({"gpu": MISH}, "Mish", DType.F32, None, True),
    "a function of which a node has none": ({"gpu": "Softplus Mul"}, "Mish", DType.F32, None, False),
    "a function of another element type": ({"gpu": MISH}, "Mish", DType.F64, None, False),
    "a function that the CPU would take as it is": ({"gpu": MISH, "cpu": "Mish"}, "Mish", DType.F32, None, False),
    "f16, which is cast on the CPU": ({"cpu": "Erf"}, "Erf", DType.F16, None, True),
    "f16, which is cast nowhere else": ({"gpu": "Erf", "cpu": "Erf"}, "Erf", DType.F16, None, False),
    "bf16, which is not cast on the CPU": ({"cpu": "Erf"}, "Erf", DType.BF16, None, False),
    "help that the CPU cannot give": ({"gpu": "Relu", "cpu": "Sigmoid"}, "Relu Erf", DType.F32, ASSISTED, False),
}


@pytest.mark.parametrize(("kernels", "chain", "dtype", "options", "taken"), TAKEN.values(), ids=TAKEN)
def test_a_device_takes_a_graph_or_not(
    machine: Any, kernels: dict[str, str], chain: str, dtype: DType, options: CompileOptions | None, taken: bool
) -> None:
    """The first device is asked; strict is the rule for one that is asked about by name."""
    for kind, names in kernels.items():
        machine.add(kind, kernels=machine.kernels(*names.split()))
    assert supports_graph(next(iter(kernels)), machine.chain(*chain.split(), dtype=dtype), options) is taken


@pytest.mark.parametrize("name", ["gpu", "tpu"], ids=["away", "without a provider"])
def test_a_device_that_is_away_supports_no_graph(machine: Any, name: str) -> None:
    """And no op: being here comes first, and nothing is raised for a known name."""
    machine.add("gpu", kernels=machine.kernels("Relu"), answer=machine.away)
    assert not supports_graph(name, machine.chain("Relu"))
    assert not supports(name, OnnxNode("Relu"))


def test_an_empty_graph_is_supported(machine: Any) -> None:
    """There is nothing to refuse."""
    machine.add("gpu")
    assert supports_graph("gpu", Graph("empty"))


def test_every_node_of_a_graph_without_outputs_is_judged(machine: Any) -> None:
    """Also those that no other node needs, and the answers are those of the graph with outputs."""
    machine.add("gpu", kernels=machine.kernels("Relu", "Sigmoid"))
    taken, refused = machine.chain("Relu", "Sigmoid"), machine.chain("Relu", "Erf")
    wanted = first_unsupported_op("gpu", refused)
    taken.outputs = refused.outputs = []
    assert wanted is not None
    assert (supports_graph("gpu", taken), first_unsupported_op("gpu", taken)) == (True, None)
    assert (supports_graph("gpu", refused), first_unsupported_op("gpu", refused)) == (False, wanted)
    assert not dispatch_report_for_device(refused, "gpu").compile_ready


def test_a_provider_that_lists_no_kernels_supports_what_it_may_compile(machine: Any) -> None:
    """A compiling provider is supported when it is here; only a session can tell more."""
    machine.add("openvino", kernels=None)
    assert supports_graph("openvino", machine.chain("Relu"))


def test_the_version_range_of_a_kernel_matters(machine: Any) -> None:
    """A kernel that ended before the operator's current version does not count: Erf was last changed in 13."""
    machine.add("gpu", kernels=(KernelClaim("", "Erf", 9, 12, {}),))
    assert not supports_graph("gpu", machine.chain("Erf"))
    machine.add("gpu", kernels=(KernelClaim("", "Erf", 13, None, {}),))
    assert supports_graph("gpu", machine.chain("Erf"))


def test_shape_computation_needs_no_kernel_of_the_device(machine: Any) -> None:
    """ONNX Runtime keeps it on the CPU by design, strict or not."""
    machine.add("gpu", kernels=machine.kernels("Reshape", "Relu"))
    graph = Graph("shapes")
    x = graph.input("x", ["n", 4])
    (y,) = graph.onnx_node("Relu", [x], types=[TensorType(DType.F32, Shape(["n", 4]))])
    (size,) = graph.onnx_node("Shape", [x], types=[TensorType(DType.I64, Shape([2]))])
    (z,) = graph.onnx_node("Reshape", [y, size], types=[TensorType(DType.F32, Shape(["n", 4]))])
    graph.outputs = [z]
    assert supports_graph("gpu", graph)


def test_the_cpu_may_help_under_the_assisted_rule(machine: Any) -> None:
    """A node that only the CPU takes is its node, and the graph is supported."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    machine.add("cpu", kernels=machine.kernels("Erf"))
    graph = machine.chain("Relu", "Erf")
    assert (supports_graph("gpu", graph, ASSISTED), first_unsupported_op("gpu", graph, ASSISTED)) == (True, None)
    assert not supports_graph("gpu", graph, STRICT)
    assert first_unsupported_op("gpu", graph, STRICT) is not None
    assert support_of(Device.GPU, graph, ASSISTED).cpu_nodes == {2}


def test_a_graph_that_the_cpu_would_run_alone_is_not_supported_by_another_device(machine: Any) -> None:
    """At least one node must run on the device that was asked about."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    machine.add("cpu", kernels=machine.kernels("Erf"))
    graph = machine.chain("Erf")
    assert not supports_graph("gpu", graph, ASSISTED)
    assert "none of the graph's nodes" in str(support_of(Device.GPU, graph, ASSISTED).blocker)


def test_the_first_unsupported_op_is_the_users_node(machine: Any) -> None:
    """Index, name and operator are those of the graph as it was built, whatever the export renumbered."""
    machine.add("webgpu", kernels=machine.kernels("Relu"))
    graph = Graph("g")
    graph.input("unused", [1])
    x = graph.input("x", [2], DType.F64)
    f64 = TensorType(DType.F64, Shape([2]))
    graph.onnx_node("Cos", [x], types=[f64], name="dead")
    (y,) = graph.onnx_node("Sigmoid", [x], types=[f64], name="attn")
    graph.outputs = [y]
    found = first_unsupported_op("webgpu", graph)
    assert found is not None
    assert (found.index, found.name, found.kind) == (3, "attn", "Sigmoid")
    assert str(found) == "node 3 'attn' (Sigmoid): WebGPU has no kernel for ai.onnx::Sigmoid-21 (f64)"


def test_the_first_of_several_unsupported_ops_is_the_first_in_the_graph(machine: Any) -> None:
    """Graph order decides."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    found = first_unsupported_op("gpu", machine.chain("Relu", "Erf", "Sigmoid"))
    assert found is not None
    assert found.kind == "Erf"


def test_on_a_device_that_is_away_the_first_op_of_all_is_unsupported(machine: Any) -> None:
    """The reason names the device, not the op; an empty graph has no node to name."""
    machine.add("cuda", answer=machine.away)
    assert first_unsupported_op("cuda", Graph("empty")) is None
    found = first_unsupported_op("cuda", machine.chain("Relu"))
    assert found is not None
    assert found.index == 0
    assert "CUDA is not available: libfake.so is missing" in found.reason


def test_an_op_without_an_onnx_form_is_unsupported_everywhere_and_named(machine: Any) -> None:
    """Such an op is refused with its node, before anything is exported."""
    machine.add("cpu", kernels=machine.kernels("Relu"))
    graph = Graph("training")
    x = graph.input("x", [2])
    graph.outputs = graph.add_node(NoOnnxForm(), [x], name="grad")
    found = first_unsupported_op("cpu", graph)
    assert str(found) == "node 1 'grad' (NoOnnxForm): it has no ONNX form"


def test_an_op_that_no_output_needs_does_not_matter(machine: Any) -> None:
    """Dead nodes are not exported."""
    machine.add("cpu", kernels=machine.kernels("Relu"))
    graph = machine.chain("Relu")
    graph.add_node(NoOnnxForm(), graph.inputs)
    assert supports_graph("cpu", graph)


def test_an_op_is_supported_where_its_operator_has_a_kernel(machine: Any) -> None:
    """By name or as a node, whatever its types; leaves need no kernel, and ops without an ONNX form have none."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    leaf = Input("x", TensorType(DType.F32, Shape([1])))
    assert all(supports("gpu", op) for op in ("Relu", OnnxNode("Relu"), leaf))
    assert not any(supports("gpu", op) for op in ("Erf", OnnxNode("Erf"), NoOnnxForm()))


def call(op_type: str, *inputs: ValueType) -> ExportedNode:
    """Return a node of opset 21 with one result of the type of its first input."""
    return ExportedNode.of("n", "", op_type, 21, 1, inputs, inputs[:1], (), ())


@pytest.mark.parametrize(
    ("op_type", "expanded"), [("Mish", True), ("HardSwish", True), ("Erf", False), ("Conv", False)]
)
def test_an_operator_with_a_function_is_expanded(op_type: str, expanded: bool) -> None:
    """ONNX writes Mish and HardSwish as functions, Erf and Conv as operators of their own."""
    assert is_function("", op_type, 21) == expanded


def test_a_function_whose_body_has_changed_its_meaning_is_not_expanded() -> None:
    """Softplus is written with opset 18's CastLike: it expands in a model of opset 18 and not of 21."""
    assert is_function("", "Softplus", 18)
    assert not is_function("", "Softplus", 21)


def test_an_operator_that_onnx_does_not_know_is_not_expanded() -> None:
    """Operators of ONNX Runtime have no schema in ONNX."""
    assert not is_function("com.microsoft", "FusedMatMul", 1)


def test_a_body_has_the_types_of_the_call() -> None:
    """Every node of x tanh(softplus(x)) computes in the type that Mish was asked for."""
    f64 = TensorType(DType.F64, Shape([4]))
    body = function_body(call("Mish", f64))
    assert body is not None
    assert [node.op_type for node in body] == ["Softplus", "Tanh", "Mul"]
    assert {kind.dtype for node in body for kind in node.outputs if isinstance(kind, TensorType)} == {DType.F64}


def test_a_body_that_depends_on_attributes_is_not_looked_into() -> None:
    """GroupNormalization is built for its number of groups, and SequenceMap for its body."""
    f32 = TensorType(DType.F32, Shape([2, 4, 8]))
    assert function_body(call("GroupNormalization", f32, f32, f32)) is None
    assert function_body(call("SequenceMap", f32)) is None


def test_a_body_of_a_domain_that_lacks_an_opset_for_it_is_not_expanded() -> None:
    """The functions of ai.onnx.preview are made of operators of ai.onnx, whose version a single node does not say."""
    f32 = TensorType(DType.F32, Shape([1, 2, 3, 4]))
    assert (
        function_body(ExportedNode.of("n", "ai.onnx.preview", "FlexAttention", 1, 1, (f32,) * 3, (f32,), (), ()))
        is None
    )
