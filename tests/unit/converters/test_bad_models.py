"""Models that are damaged, wrong or hostile are refused with a `ConversionError`, never with anything else."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper, parser

from rlx_ort import ConversionError, from_onnx


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


def without_opset() -> onnx.ModelProto:
    proto = graph_of([NEG])
    del proto.opset_import[:]
    return proto


NEG, ADD = helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Add", ["x", "w"], ["y"])
TWO = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
REFUSED: dict[str, tuple[onnx.ModelProto | bytes, str]] = {
    "empty": (b"", "empty"),
    "no graph": (onnx.ModelProto(ir_version=10).SerializeToString(), "no graph"),
    "a name defined twice": (graph_of([NEG, helper.make_node("Abs", ["x"], ["y"], name="again")]), r"'again'.*'y'"),
    "an input defined again": (graph_of([helper.make_node("Neg", ["x"], ["x"]), NEG]), "'x'"),
    "two initializers of one name": (graph_of([ADD], (TWO, TWO)), "'w'"),
    "an undefined input": (
        graph_of([helper.make_node("Add", ["x", "ghost"], ["y"], name="lonely")]),
        "'lonely'.*'ghost'",
    ),
    "an undefined output": (graph_of([helper.make_node("Neg", ["x"], ["z"])]), "'y'"),
    "an unknown type": (graph_of([ADD], (TensorProto(name="w", data_type=99, dims=[1], raw_data=bytes(4)),)), "99"),
    "no opset": (without_opset(), "opset"),
}


@pytest.mark.parametrize(("proto", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_sound_model_is_refused(proto: onnx.ModelProto | bytes, message: str) -> None:
    """The message names the node or the value."""
    with pytest.raises(ConversionError, match=message):
        from_onnx(proto)


@pytest.mark.parametrize(
    ("name", "message"), [("notes.onnx", r"notes\.onnx"), ("absent.onnx", r"absent\.onnx"), (".", "not a regular file")]
)
def test_a_path_that_leads_to_no_model_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    """A text, a file that is not there, and a folder."""
    (tmp_path / "notes.onnx").write_text("hello", encoding="utf-8")
    with pytest.raises(ConversionError, match=message):
        from_onnx(tmp_path / name)


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


@pytest.mark.parametrize("depth", [31, 500])
def test_bodies_nested_too_deep_are_refused(depth: int) -> None:
    """Bodies inside one another are refused before Python's stack or protobuf's limit ends."""
    deep, allowed = graph_of([]), graph_of([])
    for proto, levels in ((deep, depth), (allowed, 30)):
        proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
        nest(proto.graph, levels)
    with pytest.raises(ConversionError, match="deep"):
        from_onnx(deep)
    assert from_onnx(allowed).output_names == ["y"]


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
