"""Whether a device takes a graph: kernels, versions, types, placement rules, messages and the memory of answers."""

from typing import Any

from rlx_ort.device import Device
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.ops.leaf import Input
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import Shape, TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.base import KernelClaim
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


def test_one_node_without_a_kernel_makes_a_graph_unsupported(machine: Any) -> None:
    """Strict is the rule for a device that is asked about by name."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    machine.add("cpu", kernels=machine.kernels("Relu", "Erf"))
    assert not supports_graph("gpu", machine.chain("Relu", "Erf"))


def test_a_device_that_is_away_supports_no_graph(machine: Any) -> None:
    """Support includes being here."""
    machine.add("gpu", kernels=machine.kernels("Relu"), answer=machine.away)
    assert not supports_graph("gpu", machine.chain("Relu"))


def test_a_device_without_a_provider_supports_no_graph(machine: Any) -> None:
    """Nothing is raised for a known name."""
    assert not supports_graph("tpu", machine.chain("Relu"))


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


def test_the_element_type_matters(machine: Any) -> None:
    """A kernel for f32 does not take f64."""
    machine.add("gpu", kernels=machine.kernels("Erf"))
    assert supports_graph("gpu", machine.chain("Erf"))
    assert not supports_graph("gpu", machine.chain("Erf", dtype=DType.F64))


def test_the_version_range_of_a_kernel_matters(machine: Any) -> None:
    """A kernel that ended before the operator's current version does not count: Erf was last changed in 13."""
    machine.add("gpu", kernels=(KernelClaim("", "Erf", 9, 12, {}),))
    assert not supports_graph("gpu", machine.chain("Erf"))
    machine.add("gpu", kernels=(KernelClaim("", "Erf", 13, None, {}),))
    assert supports_graph("gpu", machine.chain("Erf"))


def test_an_operator_that_onnx_defines_by_a_function_is_taken(machine: Any) -> None:
    """ONNX Runtime expands Mish, which is x tanh(softplus(x)), where no kernel takes it."""
    machine.add("gpu", kernels=machine.kernels("Softplus", "Tanh", "Mul"))
    assert supports_graph("gpu", machine.chain("Mish"))


def test_a_function_is_refused_when_a_node_of_its_body_has_no_kernel(machine: Any) -> None:
    """What Mish expands into must run on the device, with the element types it is asked for."""
    machine.add("gpu", kernels=machine.kernels("Softplus", "Mul"))
    assert not supports_graph("gpu", machine.chain("Mish"))
    machine.add("webgpu", kernels=machine.kernels("Softplus", "Tanh", "Mul"))
    assert not supports_graph("webgpu", machine.chain("Mish", dtype=DType.F64))


def test_a_function_that_the_cpu_has_a_kernel_for_is_not_expanded(machine: Any) -> None:
    """The device could run what Mish expands into, but the CPU takes Mish as it is, so it would run there."""
    machine.add("gpu", kernels=machine.kernels("Softplus", "Tanh", "Mul"))
    machine.add("cpu", kernels=machine.kernels("Mish"))
    assert not supports_graph("gpu", machine.chain("Mish"))


def test_the_cpu_takes_f16_nodes_through_f32(machine: Any) -> None:
    """ONNX Runtime inserts casts on the CPU, and on no other device."""
    machine.add("cpu", kernels=machine.kernels("Erf"))
    machine.add("gpu", kernels=machine.kernels("Erf"))
    half = machine.chain("Erf", dtype=DType.F16)
    assert supports_graph("cpu", half)
    assert not supports_graph("gpu", half)


def test_the_cpu_does_not_take_bf16_without_a_kernel(machine: Any) -> None:
    """No casts are inserted for bf16."""
    machine.add("cpu", kernels=machine.kernels("Erf"))
    assert not supports_graph("cpu", machine.chain("Erf", dtype=DType.BF16))


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
    assert supports_graph("gpu", graph, ASSISTED)
    assert not supports_graph("gpu", graph, STRICT)
    assert support_of(Device.GPU, graph, ASSISTED).cpu_nodes == {2}


def test_the_cpu_cannot_help_with_what_it_does_not_take(machine: Any) -> None:
    """Assisted is not anything goes."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    machine.add("cpu", kernels=machine.kernels("Sigmoid"))
    assert not supports_graph("gpu", machine.chain("Relu", "Erf"), ASSISTED)


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


def test_a_supported_graph_has_no_first_unsupported_op(machine: Any) -> None:
    """None means that all is fine."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    assert first_unsupported_op("gpu", machine.chain("Relu")) is None


def test_what_is_unsupported_depends_on_the_options(machine: Any) -> None:
    """With the CPU's help nothing is left."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    machine.add("cpu", kernels=machine.kernels("Erf"))
    graph = machine.chain("Relu", "Erf")
    assert first_unsupported_op("gpu", graph, ASSISTED) is None
    assert first_unsupported_op("gpu", graph, STRICT) is not None


def test_on_a_device_that_is_away_the_first_op_of_all_is_unsupported(machine: Any) -> None:
    """The reason names the device, not the op."""
    machine.add("cuda", answer=machine.away)
    found = first_unsupported_op("cuda", machine.chain("Relu"))
    assert found is not None
    assert found.index == 0
    assert "CUDA is not available: libfake.so is missing" in found.reason


def test_on_a_device_that_is_away_an_empty_graph_has_no_unsupported_op(machine: Any) -> None:
    """There is no node to name."""
    machine.add("cuda", answer=machine.away)
    assert first_unsupported_op("cuda", Graph("empty")) is None


def test_an_op_without_an_onnx_form_is_unsupported_everywhere_and_named(machine: Any) -> None:
    """Such an op is refused with its node, before anything is exported."""
    machine.add("cpu", kernels=machine.kernels("Relu"))
    graph = Graph("training")
    x = graph.input("x", [2])
    graph.outputs = graph.add_node(NoOnnxForm(), [x], name="grad")
    found = first_unsupported_op("cpu", graph)
    assert str(found) == "node 1 'grad' (NoOnnxForm): there is no ONNX form of it"


def test_an_op_that_no_output_needs_does_not_matter(machine: Any) -> None:
    """Dead nodes are not exported."""
    machine.add("cpu", kernels=machine.kernels("Relu"))
    graph = machine.chain("Relu")
    graph.add_node(NoOnnxForm(), graph.inputs)
    assert supports_graph("cpu", graph)


def test_an_op_is_supported_where_its_operator_has_a_kernel(machine: Any) -> None:
    """`supports` looks at the operator only, not at types."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    assert supports("gpu", OnnxNode("Relu"))
    assert not supports("gpu", OnnxNode("Erf"))


def test_a_leaf_is_supported_and_an_op_without_an_onnx_form_is_not(machine: Any) -> None:
    """Leaves are no kernels; training ops are none either."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    assert supports("gpu", Input("x", TensorType(DType.F32, Shape([1]))))
    assert not supports("gpu", NoOnnxForm())


def test_an_operator_may_be_asked_for_by_name(machine: Any) -> None:
    """Its kernels are looked up as those of a raw node."""
    machine.add("gpu", kernels=machine.kernels("Relu"))
    assert supports("gpu", "Relu")
    assert not supports("gpu", "Erf")


def test_no_op_is_supported_on_a_device_that_is_away(machine: Any) -> None:
    """Being here comes first."""
    machine.add("gpu", kernels=machine.kernels("Relu"), answer=machine.away)
    assert not supports("gpu", OnnxNode("Relu"))
    assert not supports("tpu", OnnxNode("Relu"))
