"""Every rule of the normal form, one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from rlx_ort import CompileOptions, ConversionError, DType, Graph, GraphVerifyError, ParamError, Value, from_onnx
from rlx_ort.converters.onnx_types import known_type_of
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.converters.to_onnx.exporter import export_model, exported
from rlx_ort.ir.ops.leaf import Capture, Input
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, SequenceType, Shape, TensorType, UnknownType

F32 = TensorType(DType.F32, Shape([2, 3]))


def imported(text: str) -> ExportedModel:
    return export_model(from_onnx(parsed(text)))


def proto(model: ExportedModel) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.skeleton)


def all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            found += all_nodes(attribute.g)
    return found


BRANCHES = """(float[2,3] x, bool c) => (float[2,3] y) {
  y = If (c) <
    then_branch = t () => (float[2,3] r) <float[2,3] w = {1, 2, 3, 4, 5, 6}> { r = Add (x, w) },
    else_branch = e () => (float[2,3] r) { s = Neg (x) r = Abs (s) }>
}"""


def test_every_node_and_value_has_a_name_of_its_own_bodies_included() -> None:
    """ONNX Runtime reports placement by name; two branches that call their result r share no name of a value either."""
    nodes = all_nodes(proto(imported(BRANCHES)).graph)
    outputs = [name for node in nodes for name in node.output]
    assert len(set(outputs)) == len(outputs)
    assert len(nodes) == 4
    assert all(node.name for node in nodes)
    assert len({node.name for node in nodes}) == len(nodes)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("<float[3] s = {1, 1, 1}> { y = LayerNormalization (x, s, ) }", ["x", "s"], ["y"]),
        ("{ y = Dropout (x) }", ["x"], ["y"]),
    ],
)
def test_empty_names_at_the_end_are_stripped(text: str, inputs: list[str], outputs: list[str]) -> None:
    """An explicit empty input crashes one of ONNX Runtime's fusions, and an empty output its BatchNormalization."""
    model = parsed("(float[2,3] x) => (float[2,3] y) " + text)
    (node,) = model.graph.node
    node.input[:], node.output[:] = [*inputs, ""], [*outputs, ""]
    (node,) = proto(export_model(from_onnx(model))).graph.node
    assert (list(node.input), list(node.output)) == (inputs, outputs)


def test_large_weights_of_bodies_stand_in_the_main_graph_and_small_ones_in_each_body() -> None:
    """External weights inside a body are not found by ONNX Runtime, and it does not move what bodies share."""
    text = """(float[n,32] x, bool c) => (float[m] y) <int64 zero = {0}> {
      z = Gather (x, zero)
      y = If (c) <
        then_branch = t () => (float[m] r) { s = Add (x, w) r = Gather (s, zero) },
        else_branch = e () => (float[m] r) { p = Gather (x, zero) r = Mul (p, z) }>
    }"""
    made = parsed(text)
    body = next(each.g for each in made.graph.node[1].attribute if each.name == "then_branch")
    body.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 32), np.float32), "w"))
    graph = proto(export_model(from_onnx(made))).graph
    bodies = [attribute.g for attribute in graph.node[1].attribute]
    assert sorted(tuple(tensor.dims) for tensor in graph.initializer) == [(), (1, 32)]
    assert [[tuple(tensor.dims) for tensor in each.initializer] for each in bodies] == [[()], [()]]
    assert len({tensor.name for each in (graph, *bodies) for tensor in each.initializer}) == 4


def test_nodes_no_output_needs_are_left_out_and_inputs_stay() -> None:
    """Dead code costs nothing; the interface is the user's."""
    graph = Graph()
    x, unused = graph.input("x", [2, 3]), graph.input("unused", [1])
    graph.param("dead", [4])
    graph.onnx_node("Exp", [unused], types=[TensorType(DType.F32, Shape([1]))])
    (y,) = graph.onnx_node("Neg", [x], types=[F32])
    graph.outputs = [y]
    model = export_model(graph)
    assert [node.op_type for node in model.nodes] == ["Neg"]
    assert model.params == ()
    assert list(model.input_types) == ["x", "unused"]


def outputs_of(graph: Graph) -> list[tuple[str, str]]:
    model = proto(export_model(graph))
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    return [(value.name, producers[value.name]) for value in model.graph.output]


@pytest.mark.parametrize(
    "make",
    [
        lambda graph: graph.input("x", [2]),
        lambda graph: graph.param("w", [2], data=[1.0, 2.0]),
        lambda graph: graph.constant([1.0, 2.0]),
    ],
    ids=["input", "parameter", "constant"],
)
def test_an_output_that_no_node_computes_goes_through_an_identity(make: Callable[[Graph], Value]) -> None:
    """Some providers cannot return what they were fed."""
    graph = Graph()
    graph.set_outputs([make(graph)], ["y"])
    assert outputs_of(graph) == [("y", "Identity")]


def test_outputs_named_like_the_input_or_parameter_they_are_keep_the_name() -> None:
    """ONNX lets an output be an input or an initializer itself; a name is not changed without need."""
    graph = Graph()
    x, w = graph.input("x", [2]), graph.param("w", [2], data=[1.0, 2.0])
    graph.set_outputs([x, w, x], ["x", "w", "again"])
    model = proto(export_model(graph))
    assert [value.name for value in model.graph.output] == ["x", "w", "again"]
    assert [(node.op_type, *node.output) for node in model.graph.node] == [("Identity", "again")]


def test_a_number_makes_no_output_another_one() -> None:
    """Numbers are handed out after the names that the user chose."""
    g = Graph("numbers")
    x = g.input("x", [2])
    g.set_outputs([g.mul(x, 2.0), g.mul(x, 3.0), g.mul(x, 4.0)], ["x", "x_2", "x_3"])
    model = proto(export_model(g))
    assert [value.name for value in model.graph.output] == ["x_4", "x_2", "x_3"]
    results = ReferenceEvaluator(model).run(["x_2", "x_3", "x_4"], {"x": np.ones(2, np.float32)})
    assert [result.tolist() for result in results] == [[3, 3], [4, 4], [2, 2]]


def test_names_of_the_users_that_look_like_generated_ones_stay() -> None:
    """What a lowering writes gets other names than values of the user that come later."""
    g = Graph("hostile")
    x, p = g.input("x", [2]), g.param("silu/constant", [2], data=np.ones(2, np.float32))
    first = g.silu(g.add(x, p, name="silu/Sigmoid_2"), name="silu")
    last = g.mul(first, 2.0, name="silu/Sigmoid")
    g.outputs = [last, first, first, g.mul(first, x, name="silu_2")]
    model = proto(export_model(g))
    assert [value.name for value in model.graph.output] == ["silu/Sigmoid", "silu", "silu_3", "silu_2"]
    names = [*(name for node in model.graph.node for name in node.output), "x"]
    names += [tensor.name for tensor in model.graph.initializer]
    assert len(set(names)) == len(names)


def test_results_of_a_node_of_several_have_free_names() -> None:
    """`name.0` may be the name of another node."""
    g = Graph("several")
    x = g.input("x", [2])
    taken = g.mul(x, 2.0, name="both.0")
    bodies = [lambda graph, value, by=by: (graph.mul(value, by), value) for by in (2.0, 3.0)]
    both = g.if_multi(g.gt_(g.sum(x, [0]), 0.0), *bodies, [x], name="both")
    later = g.mul(x, 5.0, name="both.1")
    g.outputs = [taken, *both, later]
    assert g.output_names == ["both.0", "both.0_2", "both.1", "both.1_2"]
    assert len(export_model(g).output_types) == 4


def test_an_output_named_like_another_input_gets_a_free_name() -> None:
    """One name cannot be two values."""
    graph = Graph()
    x, _ = graph.input("x", [2]), graph.input("z", [2])
    graph.set_outputs([x], ["z"])
    assert outputs_of(graph) == [("z_2", "Identity")]


def test_a_value_returned_twice_is_computed_once_and_copied() -> None:
    """Each output has a value and a name of its own, in the given order."""
    graph = Graph()
    x = graph.input("x", [2, 3])
    (y,) = graph.onnx_node("Neg", [x], types=[F32])
    graph.set_outputs([y, y, y], ["a", "b", "c"])
    assert outputs_of(graph) == [("a", "Neg"), ("b", "Identity"), ("c", "Identity")]


def test_a_body_that_returns_what_it_captured_copies_it() -> None:
    """A subgraph's output must be computed inside it."""
    body = Graph("body")
    body.set_outputs([body.add_node(Capture(1, F32), [])[0]], ["r"])
    graph = Graph()
    c, x = graph.input("c", [], DType.BOOL), graph.input("x", [2, 3])
    op = OnnxNode("If", attributes={"then_branch": body, "else_branch": body}, formal_inputs=1)
    graph.outputs = [graph.add_node(op, [c, x], types=[F32])[0]]
    for attribute in proto(export_model(graph)).graph.node[0].attribute:
        assert [node.op_type for node in attribute.g.node] == ["Identity"]


def test_large_tensors_are_references_and_small_constants_are_inside() -> None:
    """Parameters are external whatever their size, constants from 128 bytes on."""
    graph = Graph()
    x = graph.input("x", [32])
    small, large = graph.constant(np.ones(31, np.float32)), graph.constant(np.ones(32, np.float32))
    w = graph.param("w", [1], data=[2.0])
    kind = TensorType(DType.F32, Shape([32]))
    (y,) = graph.onnx_node("Sum", [x, large, w], types=[kind])
    (z,) = graph.onnx_node("Neg", [small], types=[TensorType(DType.F32, Shape([31]))])
    graph.set_outputs([y, z], ["y", "z"])
    model = export_model(graph)
    external = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in proto(model).graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    (constant,) = model.constants
    assert external == {
        "w": {"location": "w", "offset": "0", "length": "4"},
        constant: {"location": constant, "offset": "0", "length": "128"},
    }
    assert model.params == ("w",)
    np.testing.assert_array_equal(model.constants[constant].numpy(), np.ones(32))


def test_equal_constants_are_written_once() -> None:
    """The same shape vector in a hundred places is one initializer."""
    graph = Graph()
    x = graph.input("x", [2, 3])
    values = [graph.onnx_node("Mul", [x, graph.constant(np.float32(2))], types=[F32])[0] for _ in range(3)]
    graph.set_outputs(values, ["a", "b", "c"])
    assert len(proto(export_model(graph)).graph.initializer) == 1


def test_strings_are_always_inside() -> None:
    """ONNX Runtime takes no strings from outside."""
    graph = Graph()
    graph.set_outputs([graph.constant(["text"] * 200)], ["y"])
    (tensor,) = proto(export_model(graph)).graph.initializer
    assert list(tensor.string_data) == [b"text"] * 200


def two_params() -> Graph:
    graph = Graph()
    x = graph.input("x", [32])
    small, large = graph.param("small", [31]), graph.param("large", [32])
    kind = TensorType(DType.F32, Shape([32]))
    (padded,) = graph.onnx_node("Pad", [small, graph.constant(np.array([0, 1], np.int64))], types=[kind])
    (y,) = graph.onnx_node("Sum", [x, padded, large], types=[kind])
    graph.outputs = [y]
    return graph


def weights(small: int = 31) -> dict[str, TensorData]:
    return {name: TensorData.from_array(np.ones(n, np.float32)) for name, n in (("small", small), ("large", 32))}


def test_small_parameters_are_put_inside_for_a_session() -> None:
    """Below 128 bytes the data is in the model, from there on it is a reference."""
    model = onnx.ModelProto.FromString(export_model(two_params()).model_bytes(weights()))
    outside = {t.name: t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer}
    assert outside["large"]
    assert not outside["small"]


def test_a_session_gets_no_shapes_with_open_dims_between_nodes() -> None:
    """The exported file declares them all; a session's model only those that Softmax reads and writes.

    Without them ONNX Runtime moves more transpositions; with those of Softmax it overwrites attention scores in place.
    """
    graph = Graph()
    x, fixed = graph.input("x", ["n", 4]), graph.input("fixed", [2, 4])
    weighted = graph.exp(graph.softmax(graph.abs(x, name="scores"), name="shares"))
    others = [graph.exp(graph.neg(x, name="open")), graph.exp(graph.neg(fixed, name="known"))]
    graph.set_outputs([weighted, *others], ["a", "b", "c"])
    exported = export_model(graph)
    model = onnx.ModelProto.FromString(exported.model_bytes({}))
    for proto_of, open_dims in ((exported.model, ["n", 4]), (model, None)):
        inferred = {kind.name: known_type_of(kind.type) for kind in proto_of.graph.value_info}
        assert inferred["known"] == TensorType(DType.F32, Shape([2, 4]))
        assert inferred["scores"] == inferred["shares"] == TensorType(DType.F32, Shape(["n", 4]))
        assert inferred["open"] == TensorType(DType.F32, None if open_dims is None else Shape(open_dims))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"small": weights()["small"]}, "'large'"),
        (weights(small=30), r"'small'.*f32\[31\].*f32\[30\]"),  # ONNX Runtime would not notice
    ],
    ids=["no data", "another shape"],
)
def test_a_parameter_without_its_data_is_named(given: dict[str, TensorData], message: str) -> None:
    """A session needs every weight."""
    with pytest.raises(ParamError, match=message):
        export_model(two_params()).model_bytes(given)


def test_the_ir_version_is_10_unless_a_type_is_newer() -> None:
    """Old cores read the model wherever that is possible."""
    expected = {DType.F32: 10, DType.I4: 10, DType.F4E2M1: 11, DType.F8E8M0: 12, DType.I2: 13}
    for dtype, version in expected.items():
        graph = Graph()
        graph.set_outputs([graph.input("x", [4], dtype)], ["y"])
        assert proto(export_model(graph)).ir_version == version


def test_the_same_graph_gives_the_same_hash_and_weights_do_not_count() -> None:
    """The hash keys caches of compiled models."""
    first, second = two_params(), two_params()
    second.weights.update(weights())
    assert export_model(first).sha256 == export_model(second).sha256


def test_named_dims_are_bound_by_the_options() -> None:
    """A bound dim is static in the whole model."""
    graph = Graph()
    x = graph.input("x", ["n", 3])
    graph.set_outputs([x], ["y"])
    model = export_model(graph, CompileOptions(dims={"n": 5}))
    assert str(model.input_types["x"]) == "f32(5, 3)"
    assert str(model.output_types["y"]) == "f32(5, 3)"


def test_exported_models_are_remembered_until_the_graph_changes() -> None:
    """Compiling for three devices exports once."""
    graph = two_params()
    first = exported(graph, None)
    assert exported(graph, None) is first
    assert exported(graph, CompileOptions(profile_prefix="p")) is first
    graph.set_outputs(graph.outputs, ["renamed"])
    assert list(exported(graph, None).output_types) == ["renamed"]


def test_maps_in_the_interface_are_written() -> None:
    """Classic machine-learning models return sequences of maps."""
    kind = SequenceType(MapType(DType.I64, TensorType(DType.F32, Shape())))
    graph = Graph()
    x = graph.input("x", [2, 3])
    (y,) = graph.onnx_node(
        "ZipMap", [x], {"classlabels_int64s": (0, 1, 2)}, types=[kind], domain="ai.onnx.ml", version=1
    )
    graph.set_outputs([y], ["y"])
    model = proto(export_model(graph))
    entry = model.graph.output[0].type.sequence_type.elem_type.map_type
    assert (entry.key_type, entry.value_type.tensor_type.elem_type) == (onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)
    assert from_onnx(model).outputs[0].type == kind


def test_nodes_know_the_users_node_and_their_types() -> None:
    """Placement, support and cost read all they need from the list of nodes."""
    model = imported(BRANCHES)
    by_type = {node.op_type: node for node in model.nodes}
    assert {model.origin_names[node.origin] for node in model.nodes} == {"y"}
    assert not by_type["If"].body
    assert all(by_type[name].body for name in ("Add", "Neg", "Abs"))
    assert by_type["Neg"].inputs == (F32,)
    assert by_type["Neg"].outputs == (F32,)
    assert by_type["Neg"].version == 21


def test_unknown_types_are_inferred_for_the_report() -> None:
    """A graph without types in the middle still has them in the exported model."""
    graph = Graph()
    x = graph.input("x", [2, 3])
    (h,) = graph.onnx_node("Transpose", [x], types=[UnknownType()])
    (y,) = graph.onnx_node("Neg", [h], types=[UnknownType()])
    graph.outputs = [y]
    assert [str(node.outputs[0]) for node in export_model(graph).nodes] == ["f32(3, 2)"] * 2


def node_names(*names: str) -> ExportedModel:
    nodes = tuple(ExportedNode.of(name, "", "Neg", 21, i, (), (), (), ()) for i, name in enumerate(names))
    return ExportedModel(None, (), nodes, {i: f"user {name}" for i, name in enumerate(names)}, {})  # type: ignore[arg-type]  # no model is needed


@pytest.mark.parametrize(
    ("session_node", "origin"),
    [
        ("mm", "mm"),
        ("mm/MatMulAddFusion", "mm"),
        ("mm_token_1", "mm"),
        ("mm_2", "mm_2"),
        ("mm_2/fused", "mm_2"),
        ("mm_3/fused", "mm"),
        ("mmx", ""),
        ("other", ""),
        ("_inlfunc_Mish_mm_tanh", "mm"),
        ("Memcpy_mm", ""),
    ],
)
def test_a_node_of_a_session_leads_back_to_the_users_node(session_node: str, origin: str) -> None:
    """The longest exported name that ends where a word ends."""
    found = node_names("mm", "mm_2").node_of(session_node)
    assert ("" if found is None else found.name) == origin


SHAPES = {
    "sizes, and not integer work on real data": (
        """(float[N,4] x, int64[M] ids) => (float[a,b] y, int64[M] z)
        <int64 zero = {0}, int64[1] two = {2}, int64[1] minus = {-1}, int64[1] axis = {0}> {
          s = Shape (x)  n = Gather (s, zero)  u = Unsqueeze (n, axis)  h = Mul (u, two)
          t = Concat <axis = 0> (h, minus)  y = Reshape (x, t)  z = Add (ids, ids)
        }""",
        "s n u h t",
    ),
    # As Paddle's exports do, which cast constants; the sum of two constants is another constant.
    "sizes that are joined with what is computed beforehand": (
        """(float[N,4] x) => (float[a,b] y) <int32[1] zero = {0}, int32[1] one = {1}, int32[1] first = {0}> {
          s = Shape (x)  narrow = Cast <to = 6> (s)  part = Slice (narrow, zero, one)  n = Cast <to = 7> (part)
          c = Cast <to = 7> (one)  d = Add (c, c)  t = Concat <axis = 0> (n, d, d)  y = Reshape (x, t)
        }""",
        "s narrow part n t",
    ),
    # The square root of a head's size, as DeBERTa divides by it.
    "a scale that follows from a size, and not what it scales": (
        """(float[N,4] x) => (float[N,4] y) <int64 last = {1}, float factor = {3.0}> {
          s = Shape (x)  n = Gather (s, last)  f = Cast <to = 1> (n)  m = Mul (f, factor)  r = Sqrt (m)  y = Div (x, r)
        }""",
        "s n f m r",
    ),
    # A table of positions, of any rank, that is compared; `data` depends on an input.
    "positions and what follows from them, and not masks of data": (
        """(float[N,4] x, int64[N,4] ids) => (bool[a,b] y, bool[N,4] z, float[a,b] h)
        <int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}, int64[1,2] table = {1, 2}> {
          s = Shape (x)  n = Gather (s, zero)  r = Range (zero, n, one)  u = Unsqueeze (r, axis)
          grid = Add (u, table)  f = Cast <to = 1> (grid)  y = Less (u, table)
          data = Add (u, ids)  z = Less (data, one)  h = Sqrt (f)
        }""",
        "s n r u grid f y",
    ),
}


@pytest.mark.parametrize(("text", "marked"), SHAPES.values(), ids=SHAPES)
def test_nodes_that_only_compute_shapes_are_marked(text: str, marked: str) -> None:
    """ONNX Runtime keeps them on the CPU."""
    assert {node.name for node in imported(text).nodes if node.shape_only} == set(marked.split())


def test_a_captured_value_that_is_absent_is_named() -> None:
    """A body cannot read an input its node does not have."""
    body = Graph("body")
    body.set_outputs([body.add_node(Capture(1, F32), [])[0]], ["r"])
    graph = Graph()
    c = graph.input("c", [], DType.BOOL)
    op = OnnxNode("If", attributes={"then_branch": body, "else_branch": body}, formal_inputs=1)
    graph.outputs = [graph.add_node(op, [c, None], types=[F32])[0]]
    with pytest.raises((ConversionError, GraphVerifyError), match="captures input 1"):
        export_model(graph)


def test_inputs_of_bodies_are_their_formal_inputs() -> None:
    """A Loop body's inputs come in the order they were added."""
    body = Graph("body")
    leaves = [
        body.add_node(Input(name, kind), [], name=name)[0]
        for name, kind in (
            ("i", TensorType(DType.I64, Shape())),
            ("k", TensorType(DType.BOOL, Shape())),
            ("v", F32),
        )
    ]
    (doubled,) = body.onnx_node("Add", [leaves[2], leaves[2]], types=[F32])
    body.set_outputs([leaves[1], doubled], ["again", "next"])
    graph = Graph()
    n, c, x = graph.input("n", [], DType.I64), graph.input("c", [], DType.BOOL), graph.input("x", [2, 3])
    (y,) = graph.onnx_node("Loop", [n, c, x], {"body": body}, types=[F32])
    graph.outputs = [y]
    model = proto(export_model(graph))
    onnx.checker.check_model(model, full_check=True)
    data = np.ones((2, 3), np.float32)
    (result,) = ReferenceEvaluator(model).run(None, {"n": np.array(3), "c": np.array(True), "x": data})  # type: ignore[misc]  # it returns a list
    np.testing.assert_array_equal(result, data * 8)
