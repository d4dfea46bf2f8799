"""Models that are damaged, wrong or hostile are refused with a `ConversionError`, never with anything else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.errors import ConversionError, GraphError

GOOD = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { a = Neg (x) y = Abs (a) }'


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(text)


def graph_of(nodes: list[onnx.NodeProto], initializers: tuple[TensorProto, ...] = ()) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph(nodes, "g", [x], [y], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def nest(graph: onnx.GraphProto, depth: int) -> None:
    """Fill a graph with `depth` bodies inside one another, in place: protobuf copies no message that deep."""
    for _ in range(depth):
        node = graph.node.add(op_type="If", input=["c"], output=["y"])
        other = node.attribute.add(name="else_branch", type=onnx.AttributeProto.GRAPH).g
        other.node.add(op_type="Identity", input=["x"], output=["y"])
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        for body in (graph, other):
            body.output.add(name="y")
    graph.node.add(op_type="Identity", input=["x"], output=["y"])


def test_empty_bytes_are_refused() -> None:
    """No bytes at all are no model."""
    with pytest.raises(ConversionError, match="empty"):
        from_onnx(b"")


def test_random_bytes_are_refused() -> None:
    """Two hundred random strings are refused one by one, as typed errors."""
    rng = random.Random(7)
    for _ in range(200):
        with pytest.raises(ConversionError):
            from_onnx(rng.randbytes(rng.randrange(1, 200)))


def test_truncated_models_are_refused_or_mean_less() -> None:
    """A model cut anywhere gives a typed error, or parses as a smaller message that is judged as such."""
    data = model(GOOD).SerializeToString()
    for end in range(len(data)):
        try:
            from_onnx(data[:end])
        except GraphError:
            continue


def test_models_with_flipped_bytes_never_escape_the_error_tree() -> None:
    """Four hundred damaged copies import or are refused with a typed error."""
    data = model(GOOD).SerializeToString()
    rng = random.Random(3)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            from_onnx(bytes(damaged))
        except GraphError:
            continue


def test_a_file_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "notes.onnx"
    path.write_text("hello", encoding="utf-8")
    with pytest.raises(ConversionError, match=r"notes\.onnx"):
        from_onnx(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(ConversionError, match=r"absent\.onnx"):
        from_onnx(tmp_path / "absent.onnx")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    """A folder is no model file."""
    with pytest.raises(ConversionError, match="no regular file"):
        from_onnx(tmp_path)


def test_a_message_without_a_graph_is_refused() -> None:
    """A message of the right kind that holds no graph is no model."""
    with pytest.raises(ConversionError, match="no graph"):
        from_onnx(onnx.ModelProto(ir_version=10).SerializeToString())


def test_a_cycle_is_refused_naming_a_node_of_it() -> None:
    """The node that leads into the cycle is not blamed."""
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"], name="first"),
        helper.make_node("Neg", ["a"], ["b"], name="second"),
        helper.make_node("Abs", ["b"], ["y"], name="after"),
    ]
    with pytest.raises(ConversionError, match=r"'(first|second)'.*cycle"):
        from_onnx(graph_of(nodes))


def test_nodes_in_the_wrong_order_are_sorted() -> None:
    """Order is mended where that is possible."""
    nodes = [helper.make_node("Abs", ["a"], ["y"], name="abs"), helper.make_node("Neg", ["x"], ["a"], name="neg")]
    graph = from_onnx(graph_of(nodes))
    assert [node.name for node in graph.nodes][-2:] == ["neg", "abs"]


def test_a_name_defined_twice_is_refused() -> None:
    """Two nodes with one result break static single assignment."""
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"], name="again")]
    with pytest.raises(ConversionError, match=r"'again'.*'y'"):
        from_onnx(graph_of(nodes))


def test_a_node_that_defines_an_input_is_refused() -> None:
    """An input is defined already."""
    nodes = [helper.make_node("Neg", ["x"], ["x"]), helper.make_node("Neg", ["x"], ["y"])]
    with pytest.raises(ConversionError, match="'x'"):
        from_onnx(graph_of(nodes))


def test_two_initializers_of_one_name_are_refused() -> None:
    """Which of them would count is anybody's guess."""
    weights = tuple(helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0]) for _ in range(2))
    with pytest.raises(ConversionError, match="'w'"):
        from_onnx(graph_of([helper.make_node("Add", ["x", "w"], ["y"])], weights))


def test_an_undefined_input_is_refused_naming_node_and_value() -> None:
    """The message says who reads what."""
    with pytest.raises(ConversionError, match=r"'lonely'.*'ghost'"):
        from_onnx(graph_of([helper.make_node("Add", ["x", "ghost"], ["y"], name="lonely")]))


def test_an_undefined_output_is_refused() -> None:
    """An output nobody computes."""
    with pytest.raises(ConversionError, match="'y'"):
        from_onnx(graph_of([helper.make_node("Neg", ["x"], ["z"])]))


@pytest.mark.parametrize("depth", [31, 500])
def test_bodies_nested_too_deep_are_refused(depth: int) -> None:
    """Bodies inside one another are refused before Python's stack or protobuf's limit ends."""
    proto = graph_of([])
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    nest(proto.graph, depth)
    with pytest.raises(ConversionError, match="deep"):
        from_onnx(proto)


def test_bodies_nested_as_deep_as_allowed_are_read() -> None:
    """Thirty levels import."""
    proto = graph_of([])
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    nest(proto.graph, 30)
    assert from_onnx(proto).output_names == ["y"]


def test_a_function_that_calls_itself_is_refused() -> None:
    """Inlining it would never end."""
    text = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
        g (float[2] x) => (float[2] y) { y = f.F (x) }
        <domain: "f", opset_import: ["" : 21, "f" : 1]> F (a) => (b) { b = f.G (a) }
        <domain: "f", opset_import: ["" : 21, "f" : 1]> G (a) => (b) { b = f.F (a) }"""
    with pytest.raises(ConversionError, match="calls itself"):
        from_onnx(model(text))


def test_functions_that_multiply_without_end_are_refused() -> None:
    """Thirty levels of functions that call the next one twice would be a thousand million nodes."""
    levels = [
        f'<domain: "f", opset_import: ["" : 21, "f" : 1]> F{i} (a) => (b) {{ t = f.F{i + 1} (a) b = f.F{i + 1} (t) }}'
        for i in range(30)
    ]
    last = '<domain: "f", opset_import: ["" : 21]> F30 (a) => (b) { b = Neg (a) }'
    head = '<ir_version: 10, opset_import: ["" : 21, "f" : 1]> g (float[2] x) => (float[2] y) { y = f.F0 (x) }'
    with pytest.raises(ConversionError, match="nodes once its functions are inlined"):
        from_onnx(model("\n".join([head, *levels, last])))


def test_a_tensor_with_too_little_data_is_refused() -> None:
    """The declared shape and the data must agree."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], raw_data=np.zeros(1, "<f4").tobytes())
    with pytest.raises(ConversionError, match="'w'"):
        from_onnx(graph_of([helper.make_node("Add", ["x", "w"], ["y"])], (weight,)))


def test_a_tensor_of_negative_size_is_refused() -> None:
    """A dimension cannot be negative."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-2])
    with pytest.raises(ConversionError, match="'w'"):
        from_onnx(graph_of([helper.make_node("Add", ["x", "w"], ["y"])], (weight,)))


def test_a_tensor_of_an_unknown_type_is_refused() -> None:
    """A number that names no element type."""
    weight = TensorProto(name="w", data_type=99, dims=[1], raw_data=b"\0\0\0\0")
    with pytest.raises(ConversionError, match="99"):
        from_onnx(graph_of([helper.make_node("Add", ["x", "w"], ["y"])], (weight,)))


def test_a_model_without_an_opset_is_refused() -> None:
    """Without a version nobody can say what a node means."""
    proto = graph_of([helper.make_node("Neg", ["x"], ["y"])])
    del proto.opset_import[:]
    with pytest.raises(ConversionError, match="opset"):
        from_onnx(proto)


def test_a_sparse_tensor_with_indices_out_of_range_is_refused() -> None:
    """An index beyond the shape would write elsewhere."""
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0]),
        helper.make_tensor("i", TensorProto.INT64, [1], [7]),
        [2],
    )
    proto = graph_of([helper.make_node("Add", ["x", "w"], ["y"])])
    proto.graph.sparse_initializer.append(sparse)
    with pytest.raises(ConversionError, match="indices"):
        from_onnx(proto)
