"""Import, then export: the same interface and, by ONNX's reference evaluator, the same results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from rlx_ort import DType, Graph, from_onnx, to_onnx
from rlx_ort.ir.graph import bind_dims
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.serde import from_json, to_json
from rlx_ort.ir.types import TensorType

X = np.array([[0.5, -1.0, 2.0], [3.0, 0.0, -4.0]], np.float32)

MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "a chain": (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N,3] x) => (float[N,3] y) { a = Neg (x) y = Abs (a) }',
        {"x": X},
    ),
    "weights": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,3] x) => (float[N,2] y)
        <float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {0.5, -0.5}> { m = MatMul (x, w) y = Add (m, b) }""",
        {"x": X},
    ),
    "a reshape by a constant": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[3,2] y)
        <int64[2] s = {3, -1}> { y = Reshape (x, s) }""",
        {"x": X},
    ),
    "constant nodes": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[2,3] y, int64[2] z)
        { c = Constant <value_float = 2.0> () y = Mul (x, c) z = Constant <value_ints = [4, 5]> () }""",
        {"x": X},
    ),
    "optional inputs left out in the middle": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[2,3] y)
        <float hi = {1.0}> { y = Clip (x, , hi) }""",
        {"x": X},
    ),
    "a result nobody reads": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (int64[2,1] i)
        <int64[1] k = {1}> { v, i = TopK (x, k) }""",
        {"x": X},
    ),
    "a result left out": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,1,3] x) => (float[1,1,2] h)
        <float[1,2,3] w = {1, 2, 3, 4, 5, 6}, float[1,2,2] r = {0.1, 0.2, 0.3, 0.4}> {
          , h = RNN <hidden_size = 2> (x, w, r)
        }""",
        {"x": X.reshape(2, 1, 3)},
    ),
    "a branch that reads from outside": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x, bool c) => (float[2,3] y) {
          n = Neg (x)
          y = If (c) <then_branch = t () => (float[2,3] a) { a = Abs (n) },
                      else_branch = e () => (float[2,3] a) { a = Identity (x) }>
        }""",
        {"x": X, "c": np.array(True)},
    ),
    "a branch inside a branch": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x, bool c) => (float[2,3] y) {
          n = Neg (x)
          y = If (c) <
            then_branch = t () => (float[2,3] a) {
              a = If (c) <then_branch = u () => (float[2,3] b) { b = Exp (n) },
                          else_branch = v () => (float[2,3] b) { b = Identity (x) }>
            },
            else_branch = e () => (float[2,3] a) { a = Identity (n) }>
        }""",
        {"x": X, "c": np.array(True)},
    ),
    "a branch that returns what it reads": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x, bool c) => (float[2,3] y) {
          y = If (c) <then_branch = t () => (float[2,3] a) { a = Identity (x) },
                      else_branch = e () => (float[2,3] a) <float[2,3] a = {1,2,3,4,5,6}> { }>
        }""",
        {"x": X, "c": np.array(False)},
    ),
    "a loop with a weight of its own": (
        """<ir_version: 10, opset_import: ["" : 21]> g (int64 n, bool c, float[3] s) => (float[3] y) {
          y = Loop (n, c, s) <body = b (int64 i, bool k, float[3] p) => (bool o, float[3] q)
            <float[3] w = {1, 2, 3}> { o = Identity (k) q = Add (p, w) }>
        }""",
        {"n": np.array(4), "c": np.array(True), "s": np.zeros(3, np.float32)},
    ),
    "a function that returns its input": (
        """<ir_version: 10, opset_import: ["" : 21, "f" : 1]> g (float[2,3] x) => (float[2,3] y)
        { a, b = f.P (x) y = Add (a, b) }
        <domain: "f", opset_import: ["" : 21]> P (u) => (u, v) { v = Neg (u) }""",
        {"x": X},
    ),
    "a sequence": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[4,3] y)
        { s = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 0> (s) }""",
        {"x": X},
    ),
    "strings": (
        """<ir_version: 10, opset_import: ["" : 21]> g (string[2] x) => (bool[2] y)
        <string[2] w = {"a", "b"}> { y = Equal (x, w) }""",
        {"x": np.array(["a", "c"], object)},
    ),
    "an output that is an input": (
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[2,3] y, float[2,3] z)
        { y = Neg (x) z = Identity (y) }""",
        {"x": X},
    ),
}


def reference(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    results: list[Any] = ReferenceEvaluator(model).run(None, dict(feeds))
    return results


def interface(values: Sequence[onnx.ValueInfoProto]) -> list[tuple[str, bytes]]:
    return [(value.name, value.type.SerializeToString(deterministic=True)) for value in values]


@pytest.mark.parametrize("name", MODELS)
def test_import_then_export_changes_neither_interface_nor_results(name: str) -> None:
    """Names, types and order of inputs and outputs stay, and so do the values."""
    text, feeds = MODELS[name]
    before = parser.parse_model(text)
    after = to_onnx(from_onnx(before))
    onnx.checker.check_model(after, full_check=True)
    assert interface(after.graph.input) == interface(before.graph.input)
    assert interface(after.graph.output) == interface(before.graph.output)
    for got, wanted in zip(reference(after, feeds), reference(before, feeds), strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert np.asarray(got).dtype == np.asarray(wanted).dtype


@pytest.mark.parametrize("name", MODELS)
def test_a_second_round_trip_changes_nothing(name: str) -> None:
    """The normal form of a model in normal form is that model."""
    once = to_onnx(from_onnx(parser.parse_model(MODELS[name][0])))
    assert to_onnx(from_onnx(once)).SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


FUNCTIONS = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]> g (float[2,3] x) => (float[2,3] y)
    { a = f.Twice <slope = 0.25> (x) y = f.Twice (a) }
    <domain: "f", opset_import: ["" : 21, "f" : 1]> Twice <slope: float = 0.5> (u) => (v)
    { t = f.Once <k: float = @slope> (u) v = f.Once <k: float = @slope> (t) }
    <domain: "f", opset_import: ["" : 21]> Once <k> (u) => (v)
    { t = LeakyRelu <alpha: float = @k> (u) v = Neg (t) }"""


def test_functions_are_inlined_with_the_attributes_of_each_call() -> None:
    """Defaults, references and functions that call functions give what the text says."""

    def once(u: np.ndarray[Any, np.dtype[np.float32]], k: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return -np.where(u < 0, u * np.float32(k), u)

    after = to_onnx(from_onnx(parser.parse_model(FUNCTIONS)))
    assert [node.op_type for node in after.graph.node] == ["LeakyRelu", "Neg"] * 4
    expected = once(once(once(once(X, 0.25), 0.25), 0.5), 0.5)
    np.testing.assert_array_equal(reference(after, {"x": X})[0], expected)


def test_values_inside_functions_have_types_too() -> None:
    """Inference looks into no function, so types are filled in once they are inlined."""
    graph = from_onnx(parser.parse_model(FUNCTIONS))
    assert {str(kind) for node in graph.nodes for kind in node.types} == {"f32(2, 3)"}


def test_an_input_that_a_function_call_leaves_out_is_absent_inside() -> None:
    """The function's nodes see no input there, as if it had not been written."""
    text = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]> g (float[2,3] x, float m) => (float[2,3] y)
    { y = f.C (x, , m) }
    <domain: "f", opset_import: ["" : 21]> C (u, low, high) => (v) { v = Clip (u, low, high) }"""
    after = to_onnx(from_onnx(parser.parse_model(text)))
    assert list(after.graph.node[0].input) == ["x", "", "m"]
    np.testing.assert_array_equal(reference(after, {"x": X, "m": np.float32(1)})[0], np.minimum(X, 1))


def weights_model(tensor: TensorProto, *, as_input: bool = False) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("w", tensor.data_type, tensor.dims)] if as_input else []
    output = helper.make_tensor_value_info("y", tensor.data_type, tensor.dims)
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", inputs, [output], [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("number", "count", "is_param"),
    [
        (TensorProto.FLOAT, 1, True),
        (TensorProto.FLOAT16, 1, True),
        (TensorProto.INT8, 1, True),
        (TensorProto.UINT8, 1, True),
        (TensorProto.INT64, 15, False),
        (TensorProto.INT64, 16, True),
        (TensorProto.BOOL, 127, False),
        (TensorProto.BOOL, 128, True),
        (TensorProto.STRING, 100, False),
    ],
)
def test_what_is_a_parameter_is_decided_by_type_and_size(number: int, count: int, is_param: bool) -> None:
    """Floats, 8-bit integers and anything of 128 bytes are weights; the rest are constants."""
    values: list[Any] = ["s"] * count if number == TensorProto.STRING else [1] * count
    graph = from_onnx(weights_model(helper.make_tensor("w", number, [count], values)))
    assert isinstance(graph.nodes[0].op, Param if is_param else Constant)
    assert ("w" in graph.weights) == is_param


def test_an_input_with_a_default_becomes_a_parameter() -> None:
    """It is set by name instead of being fed, whatever its type."""
    graph = from_onnx(weights_model(helper.make_tensor("w", TensorProto.INT64, [1], [3]), as_input=True))
    assert [value.name for value in graph.inputs] == []
    assert [value.name for value in graph.params] == ["w"]


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DType if dtype not in (DType.STRING, DType.C64, DType.C128)], ids=lambda d: d.value
)
def test_weights_of_every_dtype_keep_their_bytes(dtype: DType) -> None:
    """Raw data and typed data of each element type come out as the same packed bytes."""
    values = np.array([0, 1, 1], np.int8).astype(dtype.numpy)
    tensor = onnx.numpy_helper.from_array(values, "w")
    graph = from_onnx(weights_model(tensor))
    data = graph.weights["w"] if "w" in graph.weights else graph.nodes[0].op.data  # type: ignore[attr-defined]  # a Constant
    assert data.dtype is dtype
    assert data.buffer.tobytes() == tensor.raw_data
    np.testing.assert_array_equal(data.numpy().astype(np.float32), values.astype(np.float32))


def test_typed_fields_are_read_like_raw_data() -> None:
    """Old exporters write numbers one by one."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[2], int32_data=[0x3C00, 0xC000])
    np.testing.assert_array_equal(from_onnx(weights_model(tensor)).weights["w"].numpy(), [1.0, -2.0])


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_sparse_weights_become_dense(indices: list[Any]) -> None:
    """Both forms of indices, flat and per axis, name the same elements."""
    flat = np.array(indices, np.int64)
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [3.0, 4.0])
    sparse = helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(flat, "i"), [2, 3])
    model = weights_model(helper.make_tensor("w", TensorProto.FLOAT, [2, 3], [0.0] * 6))
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(sparse)
    np.testing.assert_array_equal(from_onnx(model).weights["w"].numpy(), [[0, 3, 0], [0, 0, 4]])


def test_metadata_and_documentation_travel_with_the_model() -> None:
    """What people wrote on a model is still there."""
    model = parser.parse_model(MODELS["a chain"][0])
    model.metadata_props.add(key="author", value="someone")
    model.graph.doc_string = "what it does"
    graph = from_onnx(model)
    assert (graph.metadata, graph.doc) == ({"author": "someone"}, "what it does")
    after = to_onnx(graph)
    assert [(entry.key, entry.value) for entry in after.metadata_props] == [("author", "someone")]
    assert after.graph.doc_string == "what it does"


def test_the_modules_that_nodes_were_exported_from_are_kept() -> None:
    """As PyTorch's exporter notes them; they are in a graph's file too, and a graph with bound dims has them."""
    model = parser.parse_model(MODELS["a chain"][0])
    first, second, *_ = model.graph.node
    first.name = "one"
    first.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'net', 'net.layer.0', 'relu']")
    second.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'relu_1']")
    graph = from_onnx(model)
    assert graph.scopes == {"one": "net.layer.0"}
    assert from_json(*to_json(graph)).scopes == bind_dims(graph, {}).scopes == graph.scopes


def test_names_of_nodes_values_and_dims_are_kept() -> None:
    """Whoever knows the model finds its names in messages and reports."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float["batch size",3] x) => (float["batch size",3] y)
    { [first] a = Neg (x) [second] y = Abs (a) }"""
    graph = from_onnx(parser.parse_model(text))
    assert [node.name for node in graph.nodes] == ["x", "first", "second"]
    assert [node.output_names for node in graph.nodes] == [("x",), ("a",), ("y",)]
    assert graph.inputs[0].shape[0] == "batch size"
    assert graph.outputs[0].shape[0] == "batch size"


def test_a_node_without_a_name_is_called_by_its_result() -> None:
    """A message can always say which node it means."""
    graph = from_onnx(parser.parse_model(MODELS["a chain"][0]))
    assert [node.name for node in graph.nodes] == ["x", "a", "y"]


def test_custom_operators_keep_domain_version_and_attributes() -> None:
    """An operator nobody here knows is written back as it was."""
    text = """<ir_version: 10, opset_import: ["" : 21, "my.ops" : 3]> g (float[2] x) => (float[2] y)
    { y = my.ops.Blur <sigma = 1.5, kind = "fast", taps = [1, 2]> (x) }"""
    before = parser.parse_model(text)
    after = to_onnx(from_onnx(before))
    assert {entry.domain: entry.version for entry in after.opset_import}["my.ops"] == 3
    assert sorted(map(str, after.graph.node[0].attribute)) == sorted(map(str, before.graph.node[0].attribute))


def test_empty_lists_keep_their_kind() -> None:
    """An empty list may hold floats or integers."""
    node = helper.make_node("Odd", ["x"], ["y"], domain="my.ops")
    node.attribute.append(onnx.AttributeProto(name="f", type=onnx.AttributeProto.FLOATS))
    node.attribute.append(onnx.AttributeProto(name="s", type=onnx.AttributeProto.STRINGS))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("my.ops", 1)]
    before = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=imports, ir_version=10)
    after = to_onnx(from_onnx(before))
    kinds = {attribute.name: attribute.type for attribute in after.graph.node[0].attribute}
    assert kinds == {"f": onnx.AttributeProto.FLOATS, "s": onnx.AttributeProto.STRINGS}


def test_types_come_from_onnx_inference() -> None:
    """Values between input and output have types though the model declares none."""
    graph: Graph = from_onnx(parser.parse_model(MODELS["weights"][0]))
    product = next(node for node in graph.nodes if node.output_names == ("m",))
    assert str(product.types[0]) == "f32(N, 2)"


@pytest.mark.parametrize(("body", "wanted"), [("y = Transpose <perm = [1, 0, 2]> (x)", "s"), ("y = Tile (x, r)", 11)])
def test_a_declared_size_that_the_inputs_contradict_gives_way(body: str, wanted: str | int) -> None:
    """As PyTorch declares the length of an LSTM's outputs; a size that nothing contradicts stays."""
    model = parsed(f"(float[n,s,3] x, int64[3] r) => (float[11,k,3] y) {{ {body} }}")
    [output] = from_onnx(model).outputs
    assert isinstance(output.type, TensorType)
    assert output.type.shape is not None
    assert output.type.shape[0] == wanted
