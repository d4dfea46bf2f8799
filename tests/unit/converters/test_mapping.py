"""Imported nodes become IR ops where those say the same, and come out as the node that went in."""

from __future__ import annotations

import onnx
import pytest
from onnx import parser

from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.conv import Conv2d
from rlx_ort.ir.ops.elementwise import Activation, Binary, Cast, Compare, Where
from rlx_ort.ir.ops.linalg import MatMul
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.reduce import Reduce, Softmax
from rlx_ort.ir.ops.shape import Concat, Gather, Transpose

X = "float[2,3] x"
SAME: list[tuple[type, str, str]] = [
    *((Activation, f"({X}) => (float[2,3] y)", f"y = {op} (x)") for op in (
        "Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign",
        "Sin", "Softplus", "Sqrt", "Tan", "Tanh")),
    (Activation, f"({X}) => (float[2,3] y)", 'y = Gelu <approximate = "tanh"> (x)'),
    *((Binary, f"({X}, float[3] b) => (float[2,3] y)", f"y = {op} (x, b)") for op in (
        "Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")),
    *((Compare, f"({X}, float[3] b) => (bool[2,3] y)", f"y = {op} (x, b)") for op in (
        "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    (Where, f"(bool[2,3] c, {X}, float[3] b) => (float[2,3] y)", "y = Where (c, x, b)"),
    (Cast, f"({X}) => (int64[2,3] y)", "y = Cast <to = 7> (x)"),
    (MatMul, f"({X}, float[5,3,4] b) => (float[5,2,4] y)", "y = MatMul (x, b)"),
    (Transpose, f"({X}) => (float[3,2] y)", "y = Transpose <perm = [1, 0]> (x)"),
    (Concat, f"({X}, float[2,1] b) => (float[2,4] y)", "y = Concat <axis = 1> (x, b)"),
    (Softmax, f"({X}) => (float[2,3] y)", "y = Softmax <axis = 0> (x)"),
    (Gather, f"({X}, int64[4] i) => (float[2,4] y)", "y = Gather <axis = 1> (x, i)"),
]  # fmt: skip


def read(signature: str, body: str, version: int = 21, weights: str = "") -> tuple[onnx.ModelProto, Graph]:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]> g {signature} {weights} {{ {body} }}')
    return model, from_onnx(model)


def node_of(model: onnx.ModelProto) -> tuple[object, ...]:
    (node,) = model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return node.op_type, list(node.input), list(node.output), attributes


@pytest.mark.parametrize(("op", "signature", "body"), SAME, ids=[body.split()[2] for _, _, body in SAME])
def test_a_mapped_node_comes_out_as_it_went_in(op: type, signature: str, body: str) -> None:
    """The same operator with the same inputs, outputs and attributes."""
    before, graph = read(signature, body)
    assert isinstance(graph.nodes[-1].op, op)
    assert node_of(to_onnx(graph)) == node_of(before)


def test_a_convolution_keeps_its_window() -> None:
    """Attributes that the node left out come out as their defaults."""
    _, graph = read(
        "(float[1,2,5,5] x, float[4,1,3,3] w) => (float[1,4,3,3] y)",
        "y = Conv <group = 2, pads = [1, 1, 1, 1], strides = [2, 2]> (x, w)",
    )
    assert graph.nodes[-1].op == Conv2d((2, 2), (1, 1), (1, 1), 2)
    (node,) = to_onnx(graph).graph.node
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert found == {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2], "dilations": [1, 1]}


@pytest.mark.parametrize(
    ("version", "body", "weights"),
    [
        (11, "y = ReduceSum <axes = [1], keepdims = 1> (x)", ""),
        (17, "y = ReduceSum (x, a)", "<int64[1] a = {1}>"),
        (21, "y = ReduceSum (x, a)", "<int64[1] a = {1}>"),
        (17, "y = ReduceMean <axes = [-1]> (x)", ""),
    ],
)
def test_reductions_move_to_opset_21_wherever_their_axes_stand(version: int, body: str, weights: str) -> None:
    """Axes as an attribute and as an input are the same op."""
    _, graph = read(f"({X}) => (float[2,1] y)", body, version, weights)
    assert isinstance(graph.nodes[-1].op, Reduce)
    assert {entry.domain: entry.version for entry in to_onnx(graph).opset_import} == {"": 21}


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("(float[4] x, float[4] b) => (float y)", "y = MatMul (x, b)"),  # a dot product
        (f"({X}, int64[3] b) => (float[2,3] y)", "y = Pow (x, b)"),  # two dtypes
        (f"({X}) => (float[2,3] y)", "y = Max (x)"),  # one input
        (f"({X}) => (float[2,3] y)", "y = Elu <alpha = 2.0> (x)"),
        ("(double[2,3] x) => (double[2,3] y)", "y = Softplus (x)"),  # the op's own f64 form is another one
        ("(int16[2,3] x, int16[2,3] b) => (int16[2,3] y)", "y = Max (x, b)"),  # no CPU kernel: the op would cast
        (f"({X}) => (float8e4m3fn[2,3] y)", "y = Cast <to = 17> (x)"),
        (f"({X}, int64[1] a) => (float[2,1] y)", "y = ReduceSum (x, a)"),  # axes known only at run time
        (f"({X}) => (float[2,3] y)", "y = ReduceSum <noop_with_empty_axes = 1> (x)"),
        ("(float[1,2,5,5] x, float[2,2,3,3] w) => (float[1,2,5,5] y)", 'y = Conv <auto_pad = "SAME_UPPER"> (x, w)'),
        ("(float[1,2,5,5] x, float[2,2,3,3] w) => (float[1,2,4,4] y)", "y = Conv <pads = [0, 0, 1, 1]> (x, w)"),
        ("(float[1,2,5] x, float[2,2,3] w) => (float[1,2,3] y)", "y = Conv (x, w)"),
    ],
)  # fmt: skip
def test_a_node_that_no_op_says_exactly_stays_as_it_is(signature: str, body: str) -> None:
    """Nothing is approximated, and the node comes out unchanged."""
    before, graph = read(signature, body)
    assert isinstance(graph.nodes[-1].op, OnnxNode)
    assert node_of(to_onnx(graph)) == node_of(before)


def test_softmax_before_13_flattens_and_stays() -> None:
    """It is another function, though its attributes look alike."""
    _, graph = read(f"({X}) => (float[2,3] y)", "y = Softmax <axis = 1> (x)", 11)
    assert isinstance(graph.nodes[-1].op, OnnxNode)


def test_one_node_that_cannot_leave_its_opset_keeps_the_whole_model() -> None:
    """IR ops are written for opset 21, so a model that must stay at 17 keeps its nodes."""
    _, graph = read(f"({X}) => (float[2,1] y)", "a = Neg (x) y = ReduceL2 <axes = [1]> (a)", 17)
    assert all(isinstance(node.op, OnnxNode) for node in graph.nodes[1:])
    assert {entry.domain: entry.version for entry in to_onnx(graph).opset_import} == {"": 17}


def test_bodies_are_mapped_with_their_model() -> None:
    """A branch is part of the model."""
    _, graph = read(
        "(float[2,3] x, bool c) => (float[2,3] y)",
        "y = If (c) <then_branch = t () => (float[2,3] r) { r = Neg (x) }, "
        "else_branch = e () => (float[2,3] r) { r = Abs (x) }>",
    )
    kinds = {type(node.op).__name__ for body in graph.nodes[-1].op.bodies() for node in body.nodes}
    assert kinds == {"Capture", "Activation"}
