"""Imported nodes become IR ops where those say the same, and come out as the node that went in."""

from __future__ import annotations

import onnx
import pytest
from onnx import parser

from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.conv import Conv2d, ConvTranspose2d, Pool
from rlx_ort.ir.ops.elementwise import Activation, Binary, Cast, Clamp, Compare, StopGradient, Where
from rlx_ort.ir.ops.linalg import MatMul
from rlx_ort.ir.ops.norm import BatchNormInference, LayerNorm, Reduce, Softmax
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.shape import Concat, Gather, Reshape, Slice, Transpose

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


@pytest.mark.parametrize(
    ("size", "starts"), [("3", (-3,)), ("2", (0,)), ("n", None)], ids=["inside", "before the first", "no size"]
)
def test_a_backward_slice_starts_where_onnx_starts_it(size: str, starts: tuple[int, ...] | None) -> None:
    """ONNX begins at the first element where the start is before it; without a size the node stays as it is."""
    _, graph = read(
        f"(float[{size}] x) => (float[m] y)",
        "y = Slice (x, s, e, a, t)",
        weights="<int64[1] s = {-3}, int64[1] e = {-9}, int64[1] a = {0}, int64[1] t = {-1}>",
    )
    op = graph.nodes[-1].op
    assert op.starts == starts if isinstance(op, Slice) else starts is None


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
    _, graph = read(f"({X}) => (float[2,3] y)", "y = Softmax <axis = 0> (x)", 11)
    assert isinstance(graph.nodes[-1].op, OnnxNode)


def test_softmax_before_13_over_the_last_axis_is_the_same_function() -> None:
    """Flattening at the last axis changes nothing; that axis was the default for matrices."""
    for body in ("y = Softmax <axis = 1> (x)", "y = Softmax (x)"):
        _, graph = read(f"({X}) => (float[2,3] y)", body, 11)
        assert graph.nodes[-1].op == Softmax(-1)


IMAGE = "float[1,4,5,5] x"
LAYERS: list[tuple[type, str, str, str]] = [
    (Reshape, f"({X}) => (float[3,2] y)", "<int64[2] s = {3, -1}>", "y = Reshape (x, s)"),
    (Reshape, f"({X}) => (float[2,1,3] y)", "<int64[3] s = {0, 1, -1}>", "y = Reshape (x, s)"),
    (Slice, f"({X}) => (float[2,2] y)", "<int64[1] s = {0}, int64[1] e = {2}, int64[1] a = {1}, int64[1] t = {1}>",
     "y = Slice (x, s, e, a, t)"),
    (LayerNorm, f"({X}, float[3] g, float[3] b) => (float[2,3] y)", "",
     "y = LayerNormalization <axis = -1, epsilon = 0.125> (x, g, b)"),
    (BatchNormInference, f"({IMAGE}, float[4] s, float[4] b, float[4] m, float[4] v) => (float[1,4,5,5] y)", "",
     "y = BatchNormalization <epsilon = 0.125> (x, s, b, m, v)"),
    (Pool, f"({IMAGE}) => (float[1,4,3,3] y)", "",
     "y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x)"),
    (Pool, f"({IMAGE}) => (float[1,4,3,3] y)", "",
     "y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], count_include_pad = 1> (x)"),
    (ConvTranspose2d, f"({IMAGE}, float[4,2,2,2] w) => (float[1,2,10,10] y)", "",
     "y = ConvTranspose <strides = [2, 2], pads = [0, 0, 0, 0], output_padding = [0, 0], dilations = [1, 1], "
     "group = 1> (x, w)"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "signature", "weights", "body"), LAYERS, ids=[case[3].split()[2] for case in LAYERS])
def test_a_mapped_layer_comes_out_as_it_went_in(op: type, signature: str, weights: str, body: str) -> None:
    """The same operator with the same attributes, and constants of the same values."""
    before, graph = read(signature, body, weights=weights)
    assert isinstance(graph.nodes[-1].op, op)
    after = to_onnx(graph)
    assert node_of(after)[0] == node_of(before)[0]
    found, wanted = node_of(after)[3], node_of(before)[3]
    assert isinstance(found, dict)
    assert isinstance(wanted, dict)
    assert {name: found[name] for name in wanted} == wanted
    tensors = [  # a target of Reshape may come out with its -1 worked out
        {t.name: onnx.numpy_helper.to_array(t).tolist() for t in model.graph.initializer} for model in (before, after)
    ]
    (old,), (new,) = ([*model.graph.node] for model in (before, after))
    for left, right in zip(old.input, new.input, strict=True):
        values = tensors[1].get(right)
        if left in tensors[0] and op is not Reshape:
            assert values == tensors[0][left]
    assert from_onnx(after).nodes[-1].types == graph.nodes[-1].types


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        (f"({IMAGE}) => (float[1,4,5,5] y)", "y = MaxPool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (x)"),
        (f"({IMAGE}) => (float[1,4,3,3] y)", "y = MaxPool <kernel_shape = [3, 3], ceil_mode = 1> (x)"),
        (f"({IMAGE}) => (float[1,4,5,5] y)", "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)"),
        (f"({X}, float[3] g, float[3] b) => (float[2,3] y)", "y = LayerNormalization <stash_type = 0> (x, g, b)"),
        (f"({IMAGE}, int64[2] s) => (float[a,b] y)", "y = Reshape (x, s)"),
    ],
)  # fmt: skip
def test_a_layer_that_no_op_says_exactly_stays(signature: str, body: str) -> None:
    """Uneven padding, rounding up, padding that does not count, narrow sums, and targets known only at the run."""
    _, graph = read(signature, body)
    assert isinstance(graph.nodes[-1].op, OnnxNode)


def test_an_old_dropout_whose_mask_nobody_reads_is_an_identity() -> None:
    """Nothing is dropped at inference; where the mask is read, the node stays."""
    _, graph = read(f"({X}) => (float[2,3] y)", "y, m = Dropout <ratio = 0.5> (x)", 9)
    assert graph.nodes[-1].op == StopGradient()
    _, graph = read(f"({X}) => (float[2,3] y, float[2,3] m)", "y, m = Dropout <ratio = 0.5> (x)", 9)
    assert isinstance(graph.nodes[-1].op, OnnxNode)


def test_an_unsqueeze_with_axes_as_an_attribute_is_a_reshape() -> None:
    """The older form cannot go to opset 21 as it is."""
    _, graph = read(f"({X}) => (float[2,1,3] y)", "y = Unsqueeze <axes = [1]> (x)", 11)
    assert graph.nodes[-1].op == Reshape((2, 1, 3))


def test_clip_takes_its_bounds_from_attributes_and_constants() -> None:
    """Before opset 11 and since."""
    _, graph = read(f"({X}) => (float[2,3] y)", "y = Clip <min = 0.0, max = 6.0> (x)", 9)
    assert graph.nodes[-1].op == Clamp(0.0, 6.0)
    body = "l = Constant <value_float = 0.0> () h = Constant <value_float = 6.0> () y = Clip (x, l, h)"
    _, graph = read(f"({X}) => (float[2,3] y)", body)
    assert graph.nodes[-1].op == Clamp(0.0, 6.0)


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
