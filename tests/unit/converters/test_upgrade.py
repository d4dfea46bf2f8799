"""Imported nodes at opset 21: what stays as it came, and what moves there; how a Reshape is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import parser

from rlx_ort import Graph, from_onnx, to_onnx
from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.graph import section
from rlx_ort.ir.ops.onnx import OnnxNode

X = "float[2,3] x"
DATA = np.array([[-2.5, 0.5, 7.0], [3.0, -1.0, 2.0]], np.float32)


def read(signature: str, body: str, version: int = 21, weights: str = "") -> tuple[onnx.ModelProto, Graph]:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]> g {signature} {weights} {{ {body} }}')
    return model, from_onnx(model)


def opset(graph: Graph) -> int:
    return next(entry.version for entry in to_onnx(graph).opset_import if entry.domain == "")


def computed(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    return list(onnx.reference.ReferenceEvaluator(model).run(None, dict(feeds)))


@pytest.mark.parametrize(
    ("signature", "body", "weights"),
    [
        (f"({X}, float[3] b) => (float[2,3] y)", "y = Add (x, b)", ""),
        (f"({X}) => (float[2,3] y)", "y = Softmax <axis = 0> (x)", ""),
        (f"({X}) => (float[2,3] y)", "y = Elu <alpha = 2.0> (x)", ""),
        (f"({X}) => (float[3,2] y)", "y = Reshape (x, s)", "<int64[2] s = {3, -1}>"),
        ("(float[1,2,5,5] x, float[2,2,3,3] w) => (float[1,2,5,5] y)", 'y = Conv <auto_pad = "SAME_UPPER"> (x, w)', ""),
        ("(float[1,2,5,5] x, float[2,2,3,3] w) => (float[1,2,3,3] y)", "y = Conv (x, w)", ""),
        ("(float[1,4,5,5] x) => (float[1,4,3,3] y)", "y = MaxPool <kernel_shape = [3, 3]> (x)", ""),
    ],
)
def test_a_node_comes_out_as_it_went_in(signature: str, body: str, weights: str) -> None:
    """The same operator with the same attributes, none of them written out that was left to its default."""
    model, graph = read(signature, body, weights=weights)
    assert isinstance(graph.nodes[-1].op, OnnxNode)
    (before,), (after,) = (each.graph.node for each in (model, to_onnx(graph)))
    assert before.op_type == after.op_type
    assert [*before.attribute] == [*after.attribute]
    assert [*before.output] == [*after.output]


@pytest.mark.parametrize(
    ("version", "body", "outputs"),
    [
        (9, "y = Clip <min = -1.0, max = 3.0> (x)", "float[2,3] y"),
        (9, "y = Clip <max = 3.0> (x)", "float[2,3] y"),
        (9, "y = Pad <pads = [0, 1, 1, 0], value = 4.0> (x)", "float[3,4] y"),
        (9, 'y = Pad <mode = "reflect", pads = [0, 1, 1, 0]> (x)', "float[3,4] y"),
        (9, "y = Slice <starts = [1], ends = [1000], axes = [1]> (x)", "float[2,2] y"),
        (9, "y = Slice <starts = [0, -2], ends = [1, 9]> (x)", "float[1,2] y"),
        (11, "y, z = Split <axis = 1, split = [1, 2]> (x)", "float[2,1] y, float[2,2] z"),
        (11, "y, z = Split (x)", "float[1,3] y, float[1,3] z"),
        (13, "y, z = Split (x)", "float[1,3] y, float[1,3] z"),
        (11, "y = Unsqueeze <axes = [0, 3]> (x)", "float[1,2,3,1] y"),
        (11, "u = Unsqueeze <axes = [1]> (x) y = Squeeze <axes = [1]> (u)", "float[2,3] y"),
        (9, "y, z = TopK <axis = 1, k = 2> (x)", "float[2,2] y, int64[2,2] z"),
        (11, "y = ReduceSum <axes = [1], keepdims = 0> (x)", "float[2] y"),
        (17, "y = ReduceMean <axes = [-1]> (x)", "float[2,1] y"),
        (17, "y = ReduceL2 (x)", "float[1,1] y"),
        (11, "y = LogSoftmax (x)", "float[2,3] y"),
        (11, "y = Softmax <axis = 1> (x)", "float[2,3] y"),
    ],
)
def test_a_node_of_an_older_opset_moves_to_opset_21(version: int, body: str, outputs: str) -> None:
    """Attributes that became inputs are constants there, and the results are the same."""
    model, graph = read(f"({X}) => ({outputs})", body, version)
    exported = to_onnx(graph)
    onnx.checker.check_model(exported)
    assert opset(graph) == 21
    for found, wanted in zip(computed(exported, {"x": DATA}), computed(model, {"x": DATA}), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_an_old_dropout_whose_mask_nobody_reads_is_an_identity() -> None:
    """Nothing is dropped at inference; where the mask is read, the node stays."""
    _, graph = read(f"({X}) => (float[2,3] y)", "y, m = Dropout <ratio = 0.5> (x)", 9)
    assert [node.op_type for node in to_onnx(graph).graph.node] == ["Identity"]
    _, graph = read(f"({X}) => (float[2,3] y, float[2,3] m)", "y, m = Dropout <ratio = 0.5> (x)", 9)
    assert [node.op_type for node in to_onnx(graph).graph.node] == ["Dropout"]


def test_one_node_that_cannot_leave_its_opset_keeps_the_whole_model() -> None:
    """A model has one opset, so its other nodes keep the form that they have there."""
    body = 'a = Clip <min = 0.0> (x) y = Upsample <mode = "nearest", scales = [1.0, 2.0]> (a)'
    model, graph = read(f"({X}) => (float[2,6] y)", body, 7)
    assert opset(graph) == 7
    assert [*to_onnx(graph).graph.node[0].attribute] == [*model.graph.node[0].attribute]


def test_the_nodes_of_a_body_move_with_their_model() -> None:
    """A branch is part of the model, and its constants stand in it."""
    body = (
        "n = Neg (x) y = If (c) <then_branch = t () => (float[1,2,3] r) { r = Unsqueeze <axes = [0]> (n) }, "
        "else_branch = e () => (float[1,2,3] r) { a = Abs (n) r = Unsqueeze <axes = [0]> (a) }>"
    )
    model, graph = read("(float[2,3] x, bool c) => (float[1,2,3] y)", body, 11)
    exported = to_onnx(graph)
    assert opset(graph) == 21
    for flag in (True, False):
        feeds = {"x": DATA, "c": np.array(flag)}
        np.testing.assert_array_equal(computed(exported, feeds)[0], computed(model, feeds)[0])


@pytest.mark.parametrize(("shape", "kept"), [("-1, 2", False), ("3, 2", False), ("0, 2", True)])
def test_zeros_are_allowed_where_there_are_some(shape: str, kept: bool) -> None:
    """Elsewhere `allowzero` says nothing, and is left out: DirectML takes -1 for a size beside it."""
    text = f"""(float[n,m] x) => (float[a,b] y) <int64[2] s = {{{shape}}}> {{ y = Reshape <allowzero = 1> (x, s) }}"""
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    (node,) = export_model(graph).model.graph.node
    assert bool(node.attribute) == kept


@pytest.mark.parametrize(("last", "trusted", "kept"), [("-1", False, False), ("6", False, True), ("-1", True, True)])
def test_a_shape_that_is_computed_may_have_zeros_unless_it_has_minus_one(last: str, trusted: bool, kept: bool) -> None:
    """ONNX forbids a zero beside -1, which PyTorch's second exporter joins with sizes; some kernels misread that."""
    text = f"""(float[n,m] x) => (float[a,b] y) <int64[1] rest = {{{last}}}> {{
      n = Shape <start = 0, end = 1> (x) s = Concat <axis = 0> (n, rest) y = Reshape <allowzero = 1> (x, s)
    }}"""
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    kernels = KernelSet("some", trusted, lambda domain, op_type, *_: trusted or op_type != "Reshape")
    assert bool(export_model(graph, kernels=kernels).model.graph.node[-1].attribute) == kept


def test_a_section_knows_the_constants_in_the_shapes_that_it_reads() -> None:
    """The shape is joined before the cut; a stage that only reads it would not know of the -1."""
    text = """(float[n,m] x) => (float[a,b] y) <int64[1] rest = {-1}> {
      n = Shape <start = 0, end = 1> (x) s = Concat <axis = 0> (n, rest) z = Neg (x) y = Reshape <allowzero = 1> (z, s)
    }"""
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    cut, end = len(graph.nodes) - 1, len(graph.nodes)
    first, second = section(graph, 0, cut, {"n", "s"}), section(graph, cut, end, {"n", "s"})
    kernels = KernelSet("some", False, lambda domain, op_type, *_: op_type != "Reshape")
    assert not export_model(second, kernels=kernels).model.graph.node[-1].attribute
    assert {"n", "z"} <= {*second.input_types} - {"x"} <= {value.name for value in first.outputs}
