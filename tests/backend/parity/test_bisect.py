"""A planted error is found and named: a weight, an attribute, an operator; renamed, in f16, and with little memory."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from rlx_ort import CompileOptions, Graph, Precision, to_onnx
from rlx_ort.parity.bisect import Divergence, bisect
from rlx_ort.parity.compare import compare
from rlx_ort.parity.metrics import Tolerance

WIDTH, BLOCKS = 32, 250  # 1,000 nodes


@pytest.fixture(scope="module")
def deep() -> onnx.ModelProto:
    """Return a model of 1,000 nodes: product, activation, sum and normalisation in turn, with a weight in each."""
    return to_onnx(_graph(BLOCKS))


def _graph(blocks: int) -> Graph:
    graph, source = Graph("deep"), np.random.default_rng(0)
    x = graph.input("x", ["batch", WIDTH])
    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    for index in range(blocks):
        data = source.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        x = graph.layer_norm(graph.gelu(x @ graph.param(f"w{index}", [WIDTH, WIDTH], data=data)) + x, ones, zeros)
    graph.outputs = [x]
    return graph


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _with_weight(model: onnx.ModelProto, name: str, change: float) -> onnx.ModelProto:
    """Return the model with one element of one weight changed."""
    changed = _copy(model)
    tensor = next(tensor for tensor in changed.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor).copy()
    array[3, 5] += change
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return changed


def _find(a: onnx.ModelProto, b: onnx.ModelProto, tolerance: Tolerance | None = None, **more: int) -> Divergence | None:
    comparison = compare(a, b, tolerance=tolerance)
    assert not comparison.ok
    return bisect(a, b, comparison.inputs, tolerance=comparison.tolerance, **more)


def test_a_changed_weight_is_named(deep: onnx.ModelProto) -> None:
    """One element of one of 250 weights: the product that reads it, and the weight."""
    assert len(deep.graph.node) == 4 * BLOCKS
    found = _find(deep, _with_weight(deep, "w137", 0.1))
    assert found is not None
    node = next(node for node in deep.graph.node if "w137" in node.input)
    assert (found.node, found.op_type, found.before) == (node.name, "MatMul", 0.0)
    assert len(found.causes) == 1
    assert found.causes[0].startswith("weight 'w137' differs in 1 of 1024 elements, by 0.1")


def test_a_changed_attribute_is_named(deep: onnx.ModelProto) -> None:
    """The epsilon of one of 250 normalisations: that node, and both values."""
    changed = _copy(deep)
    node = [node for node in changed.graph.node if node.op_type == "LayerNormalization"][200]
    for attribute in node.attribute:
        if attribute.name == "epsilon":
            attribute.f = 0.25
    found = _find(deep, changed)
    assert found is not None
    assert found.node == node.name
    assert "'epsilon'" in found.causes[0]
    assert "0.25" in found.causes[0]


def test_another_operator_is_named(deep: onnx.ModelProto) -> None:
    """A Gelu that became a Relu."""
    changed = _copy(deep)
    node = [node for node in changed.graph.node if node.op_type == "Gelu"][99]
    node.op_type, node.domain = "Relu", ""
    del node.attribute[:]
    found = _find(deep, changed)
    assert found is not None
    assert (found.node, found.causes) == (node.name, ("the operator is Gelu in one and Relu in the other",))


def test_names_need_not_agree(deep: onnx.ModelProto) -> None:
    """With every node and value renamed, the same node is found, under both of its names."""
    changed = _with_weight(deep, "w42", 0.1)
    original = next(node.name for node in deep.graph.node if "w42" in node.input)
    expected = _rename_all(changed, original)
    found = _find(deep, changed)
    assert found is not None
    assert (found.node, found.other_node) == (original, expected)


def _rename_all(model: onnx.ModelProto, watched: str) -> str:
    """Give every node and value a new name, and return what became of one node's name."""
    names: dict[str, str] = {}
    becomes = ""
    for index, node in enumerate(model.graph.node):
        becomes = f"n{index}" if node.name == watched else becomes
        node.name = f"n{index}"
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for place, name in enumerate(node.output):
            names[name] = node.output[place] = f"v{index}.{place}"
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.name = names[value.name]
    return becomes


def test_batches_find_the_same_node(deep: onnx.ModelProto) -> None:
    """With memory for a few values at a time the result is the same, and the search ends at the divergence."""
    changed = _with_weight(deep, "w30", 0.1)
    one, many = _find(deep, changed), _find(deep, changed, batch_bytes=100_000)
    assert one is not None
    assert many is not None
    assert one.node == many.node
    assert many.compared < one.compared


def test_in_another_precision_the_node_where_the_error_jumps_is_named() -> None:
    """A model in f16 differs everywhere by a little; a wrong weight in it stands out."""
    graph = _graph(12)
    exact = to_onnx(graph)
    half = _with_weight(to_onnx(graph, CompileOptions(precision=Precision.F16)), "w8", 2.0)
    found = _find(exact, half, Tolerance(5e-3))
    assert found is not None
    assert found.node == next(node.name for node in exact.graph.node if "w8" in node.input)
    assert found.before > 0
    assert found.found.relative_l2 > 5 * found.before


def test_models_that_agree_have_no_such_node(deep: onnx.ModelProto) -> None:
    """Nothing is named where nothing differs."""
    inputs = compare(deep, deep).inputs
    assert bisect(deep, _copy(deep), inputs) is None


def test_the_owner_of_a_body_is_named() -> None:
    """A difference inside a branch is put down to the If."""
    text = """
<ir_version: 8, opset_import: ["": 18]>
m (float[4] x, bool f) => (float[4] y) {
  a = Neg (x)
  y = If (f) <then_branch = t () => (float[4] u) { u = Relu (a) }, else_branch = e () => (float[4] v) { v = Neg (x) }>
}
"""
    a, b = parser.parse_model(text), parser.parse_model(text.replace("Relu", "Abs"))
    inputs = {"x": np.array([1, -2, 3, -4], np.float32), "f": np.array(True)}
    found = bisect(a, b, inputs)
    assert found is not None
    assert (found.op_type, found.output, found.before) == ("If", "y", 0.0)
    assert "branch" in found.causes[0]


@pytest.mark.webgpu
def test_a_device_is_searched_without_a_fault_in_it() -> None:
    """On two devices, with the tolerance of two devices, no node is to blame."""
    graph = _graph(3)
    inputs = {"x": np.random.default_rng(0).standard_normal((2, WIDTH)).astype(np.float32)}
    assert bisect(graph, graph, inputs, devices=("cpu", "webgpu"), tolerance=Tolerance(1e-3)) is None
