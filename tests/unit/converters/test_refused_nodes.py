"""Nodes, names and tensors that break ONNX's rules are refused at import, with the node and what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper
from onnx_text import parsed

from rlx_ort import ConversionError, from_onnx
from rlx_ort.ir.types import TensorType


def model(graph: str) -> onnx.ModelProto:
    return parsed(graph, imports='"f": 1')


def refused(proto: onnx.ModelProto | bytes, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        from_onnx(proto)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("(float[2] x) => (float[2] y) { y = Softmax <axis = 1.5> (x) }", "'axis' as FLOAT.*Softmax.*as INT"),
        ("(float[2] x) => (float[2] y) { y = Softmax <axis = [1]> (x) }", "'axis' as INTS.*as INT"),
        ("(float[2, 2] x) => (float[2, 2] y) { y = Transpose <perm = 1> (x) }", "'perm' as INT;.*as INTS"),
        ("(float[2] x) => (float[2] y) { y = Softmax <axiss = 1> (x) }", "'axiss'.*axis"),
        ("(float[2] x) => (float[2] y) { y = Cast (x) }", "no attribute to"),
        ("(float[2] x) => (float[2] y) { y = Softmax <axis = 1099511627776> (x) }", "beyond 32 bits"),
        ("(float[2] x) => (float[2] y) { y = Add (x) }", "1 inputs.*2 to 2"),
        ("(float[2] x) => (float[2] y) { y, z = Neg (x) }", "2 outputs.*1 to 1"),
        ('(float[2] x) => (float[2] y) { y = Add (x, "") }', "leaves out input 1"),
        ('(float[2] x) => (float[2] y) { y = Max (x, "", x) }', "leaves out input 1"),
        ("(float[4] x) => (float[2] y, float[2] z) { y, z = Split <num_outputs = 3> (x) }", "2 outputs and num"),
        (
            "(float[1, 1, 4, 4] x) => (float[a, b, c, d] y) "
            "{ y = MaxPool <kernel_shape = [2, 2], strides = [0, 1]> (x) }",
            "'strides' with 0",
        ),
        (
            "(float[1, 1, 4, 4] x) => (float[a, b, c, d] y) "
            "{ y = AveragePool <kernel_shape = [2, 4611686018427387904], auto_pad = \"SAME_UPPER\"> (x) }",
            "window of more than",
        ),
        ("(float[2] x) => (float[2] y) { y = Softmax <axis: int = @k> (x) }", "'k', which no function"),
        (
            "(float[2] x) => (float[2] y) { y = f.F <j = 1> (x) } "
            '<domain: "f", opset_import: ["" : 21]> F <k> (a) => (b) { b = Neg (a) }',
            "does not declare",
        ),
        (
            "(float[2] x) => (float[2] y) { y = f.F <k = 1.5> (x) } "
            '<domain: "f", opset_import: ["" : 21]> F <k> (a) => (b) { b = Softmax <axis: int = @k> (a) }',
            "of another type",
        ),
        (
            "(float[2] x) => (float[2] y) { y = Softmax (x) } "
            '<domain: "", opset_import: ["" : 21]> Softmax (a) => (b) { b = Neg (a) }',
            "name of an operator",
        ),
        (
            "(float[1, 3, 4, 4] x, float[2, 3, 2, 2] w, float[4] b) => (float[p, q, r, s] y) { y = Conv (x, w, b) }",
            r"bias of shape \[4\].*\[2, 3, 2, 2\]",
        ),
        (
            "(float[1, 3, 4, 4] x, float[2, 3, 2, 2] w) => (float[p, q, r, s] y) "
            "{ y = Conv <kernel_shape = [3, 2]> (x, w) }",
            r"kernel_shape of \[3, 2\]",
        ),
        (
            "(float[1, 3, 4, 4] x, float[2, 3, 2, 3] w) => (float[p, q, r, s] y) "
            "{ y = Conv <dilations = [1, 2]> (x, w) }",
            "window that exceeds its padded input.*by 1",
        ),
        (
            "(float[1, 4, 4, 4] x, float[4, 3, 2, 2] w, float[3] b) => (float[p, q, r, s] y) "
            "{ y = ConvTranspose <group = 2> (x, w, b) }",
            r"bias of shape \[3\]",
        ),
        (
            "(float[1, 4, 4, 4] x, float[2, 2, 2, 2] w) => (float[p, q, r, s] y) { y = Conv (x, w) }",
            "input of 4 channels.*read 2",
        ),
        (
            "(float[1, 3, 4, 4] x, float[4, 3, 2, 2] w) => (float[p, q, r, s] y) { y = ConvTranspose (x, w) }",
            "input of 3 channels.*read 4",
        ),
        (
            "(float[1, 4, 4, 4] x, float[3, 2, 2, 2] w) => (float[p, q, r, s] y) { y = Conv <group = 2> (x, w) }",
            "3 output channels in 2 groups",
        ),
        (
            "(float[1, 4, 4, 4] x, float[4, 3, 2, 2] w) => (float[p, q, r, s] y) "
            "{ y = ConvTranspose <strides = [3, 1], output_padding = [1, 1]> (x, w) }",
            r"output_padding of \[1, 1\]",
        ),
    ],
)  # fmt: skip
def test_a_node_that_breaks_its_schema_is_refused(graph: str, message: str) -> None:
    """The message has what was found and what is wanted."""
    refused(model(graph), message)


def test_an_attribute_twice_is_refused() -> None:
    """Which of the two counts is not defined."""
    proto = model("(float[2] x) => (float[2] y) { y = Softmax <axis = 0> (x) }")
    proto.graph.node[0].attribute.append(helper.make_attribute("axis", 0))
    refused(proto, "attribute twice: axis")


def test_an_attribute_of_a_new_type_number_is_refused() -> None:
    """A damaged type reads as another one."""
    proto = model("(float[2] x) => (float[2] y) { y = Softmax <axis = 0> (x) }")
    proto.graph.node[0].attribute[0].type = AttributeProto.UNDEFINED
    refused(proto, "'axis' as UNDEFINED")


def test_an_open_end_of_64_bits_is_no_fault() -> None:
    """Shape cuts its end to the rank, as Slice does."""
    graph = "(float[2, 3] x) => (int64[a] y) { y = Shape <start = 1, end = 9223372036854775807> (x) }"
    assert from_onnx(model(graph)).output_names == ["y"]


def test_absent_inputs_at_the_end_are_no_fault() -> None:
    """Exporters write them, also beyond what the operator takes."""
    assert from_onnx(model('(float[2] x) => (float[2] y) { y = Relu (x, "") }')).output_names == ["y"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda graph: graph.node[0].output,
        lambda graph: graph.node[0].input,
        lambda graph: [graph.node[0].attribute[0], "name"],
        lambda graph: [graph.input[0], "name"],
        lambda graph: [graph.output[0], "name"],
        lambda graph: [graph.initializer[0], "name"],
        lambda graph: [graph, "name"],
        lambda graph: [graph.input[0].type.tensor_type.shape.dim[0], "dim_param"],
    ],
)
def test_a_name_that_is_no_utf_8_is_refused(damage: Callable[[onnx.GraphProto], Any]) -> None:
    """Wherever it is; protobuf gives bytes for it."""
    proto = model(
        "(float[n, 2] x) => (float[n, 2] y) <float[2] w = {1.0, 2.0}> { t = Softmax <axis = 1> (x) y = Add (t, w) }"
    )
    place = damage(proto.graph)
    if isinstance(place, list):
        setattr(*place, "placeholder")
    else:
        place[0] = "placeholder"
    refused(proto.SerializeToString().replace(b"placeholder", b"placeh\xff\xfeder"), "UTF-8|damaged")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_type": TensorProto.INT64, "dims": [2], "float_data": [1.0, 2.0]}, "float_data.*int64_data"),
        ({"data_type": TensorProto.FLOAT, "dims": [2], "float_data": [1.0, 2.0], "raw_data": bytes(8)}, "raw_data and"),
        ({"data_type": TensorProto.FLOAT, "dims": [2], "float_data": [1.0]}, "1 numbers, 2 are needed"),
        ({"data_type": TensorProto.INT4, "dims": [3], "int32_data": [1, 2, 3]}, "3 numbers, 2 are needed"),
        ({"data_type": TensorProto.INT4, "dims": [3], "raw_data": bytes(3)}, "needs 2 bytes"),
        ({"data_type": TensorProto.STRING, "dims": [1], "raw_data": b"x"}, "string_data"),
        ({"data_type": TensorProto.STRING, "dims": [2**40], "string_data": [b"x"]}, "numbers|needed"),
        ({"data_type": TensorProto.STRING, "dims": [2**62, 2**62]}, "needed"),
        ({"data_type": TensorProto.FLOAT, "dims": [-(2**63)]}, "not a whole tensor"),
        ({"data_type": TensorProto.FLOAT, "dims": [2**62, 2**62], "raw_data": bytes(8)}, "needs"),
    ],
)
def test_a_tensor_with_wrong_data_is_refused(fields: dict[str, Any], message: str) -> None:
    """Its data is in one field, that of its type, and as much as its shape says."""
    proto = model("(float[2] x) => (float[2] y) { y = Neg (x) }")
    proto.graph.initializer.append(TensorProto(name="w", **fields))
    refused(proto, message)


def test_4_bit_data_in_either_field_is_read_alike() -> None:
    """Two numbers a byte, the first in the low bits; the last byte of an odd count has one."""
    arrays = []
    for fields in ({"int32_data": [0x21, 0x0F]}, {"raw_data": b"\x21\x0f"}):
        proto = model("(float[2] x) => (float[2] y) { y = Neg (x) }")
        proto.graph.initializer.append(TensorProto(name="w", data_type=TensorProto.INT4, dims=[3], **fields))
        proto.graph.output.add(name="w")
        arrays.append(from_onnx(proto).weights["w"].numpy().astype(np.int8))
    assert [array.tolist() for array in arrays] == [[1, 2, -1], [1, 2, -1]]


def test_a_default_of_another_type_than_its_input_is_refused() -> None:
    """One of the two declarations is wrong."""
    proto = model("(float[2] x, int64[2] w) => (float[2] y) { y = Neg (x) }")
    proto.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0]))
    refused(proto, "'w' is i64, its default f32")


def test_dims_called_by_a_question_mark_need_not_be_equal() -> None:
    """Paddle's exports call every dim of unknown size so; the graph calls each by its place."""
    proto = model("(float[h, w, 3] x) => (y) { y = Neg (x) }")
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[:2]:
        dim.dim_param = "?"
    graph = from_onnx(proto)
    kind = graph.inputs[0].type
    assert isinstance(kind, TensorType)
    assert kind.shape == ("x[0]", "x[1]", 3)
    assert [dim.dim_param for dim in proto.graph.input[0].type.tensor_type.shape.dim] == ["?", "?", ""]
    assert graph.bind({"x[1]": 5}).outputs[0].shape == ("x[0]", 5, 3)


def test_negative_sizes_of_an_input_are_open() -> None:
    """Exporters write -1; shape inference of a Slice would end the process."""
    proto = model(
        "(float[n, 4] x) => (float[a, 4] y) <int64[1] one = {1}, int64[1] two = {2}> { y = Slice (x, one, two) }"
    )
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -(2**63)
    kind = from_onnx(proto).inputs[0].type
    assert isinstance(kind, TensorType)
    assert kind.shape == ("x[0]", 4)


@pytest.mark.parametrize("sizes", [[2**40], [3_000_000]])
def test_long_vectors_are_imported_at_once(sizes: Sequence[int]) -> None:
    """ONNX's data propagation would make a message for each element of every vector."""
    proto = model("(float[2] x) => (float[a] y) { t = Mul (x, x) y = Cast <to = 1> (t) }")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = sizes[0]
    graph = from_onnx(proto)
    kind = graph.outputs[0].type
    assert isinstance(kind, TensorType)
    assert kind.shape == (sizes[0],)
