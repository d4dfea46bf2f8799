"""Graphs survive JSON unchanged; wrong files say where they are wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import ConversionError, DType, Graph, verify
from rlx_ort.ir.ops.leaf import Capture
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.serde import SCHEMA, from_json, load_json, save_json, to_json
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType


def assert_same(left: Graph, right: Graph) -> None:
    assert (left.name, left.doc, left.metadata) == (right.name, right.doc, right.metadata)
    assert left.nodes == right.nodes
    assert left._outputs == right._outputs
    assert left.weights == right.weights


def network() -> Graph:
    rng = np.random.default_rng(0)
    g = Graph("net")
    g.doc, g.metadata = "a small net", {"author": "tests"}
    x = g.input("x", ["b", "s", 8])
    w = g.param("w", [8, 8], data=rng.normal(size=(8, 8)))
    g.param("unset", [3], "i8")
    table = g.constant(rng.normal(size=(40, 8)).astype(np.float32))
    h = g.attention_kind(x @ w, x, x, 2, 4, "sliding:3", softcap=30.0)
    h = g.layer_norm(h, np.ones(8, np.float32), np.zeros(8, np.float32)) + g.gather(table, 3)
    h = g.clamp(g.slice(h, [2], [None], [None], [-1]), float("-inf"), 2.0)
    g.set_outputs([h, g.reshape(h, [-1, 8]), g.cast(h, "bf16")], ["y", "flat", "half"])
    return g


def test_text_round_trip_keeps_everything() -> None:
    """Nodes, types, names, outputs, weights, doc and metadata come back equal, and the graph is sound."""
    g = network()
    back = from_json(*to_json(g))
    assert_same(g, back)
    assert verify(back) == []


def test_files_round_trip_and_large_tensors_stand_beside(tmp_path: Path) -> None:
    """Weights and large constants are in a safetensors file that the safetensors library reads too."""
    from safetensors.numpy import load_file

    g = network()
    save_json(g, tmp_path / "net.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.json", "net.safetensors"]
    back = load_json(tmp_path / "net.json")
    assert_same(g, back)
    stored = load_file(tmp_path / "net.safetensors")
    assert any(np.array_equal(array, g.weights["w"].numpy()) for array in stored.values())
    assert len((tmp_path / "net.json").read_text("utf-8")) < 20_000


def test_small_graph_is_one_file(tmp_path: Path) -> None:
    """Constants up to 1 KB are inside the text."""
    g = Graph("g")
    g.outputs = [g.constant(np.arange(256, dtype=np.float32))]
    save_json(g, tmp_path / "g.json")
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]
    assert_same(g, load_json(tmp_path / "g.json"))


def test_saving_a_loaded_graph_over_itself_works(tmp_path: Path) -> None:
    """The maps of the old file stay valid while the new one takes its place."""
    save_json(network(), tmp_path / "net.json")
    back = load_json(tmp_path / "net.json")
    save_json(back, tmp_path / "again.json")
    assert_same(load_json(tmp_path / "again.json"), network())


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DType if dtype is not DType.STRING], ids=lambda dtype: dtype.value
)
@pytest.mark.parametrize("count", [3, 3000])
def test_tensors_of_every_dtype_round_trip(dtype: DType, count: int, tmp_path: Path) -> None:
    """Packed, 8-bit float and complex types are kept bit for bit, inline and in the file."""
    values = (np.arange(count) % 2).astype(np.float32).astype(dtype.numpy)
    g = Graph("g")
    g.outputs = [g.constant(TensorData.from_array(values, dtype))]
    save_json(g, tmp_path / "g.json")
    assert_same(g, load_json(tmp_path / "g.json"))


def test_onnx_nodes_round_trip_with_tensors_bodies_and_other_types() -> None:
    """Attributes of every kind, nested graphs with captures, and types that are no tensors come back equal."""
    kind = TensorType(DType.F32, Shape(["n"]))
    body = Graph("then")
    body.outputs = [body.relu(body.append(Capture(1, kind)))]
    g = Graph("g")
    c, x = g.input("c", [], "bool"), g.input("x", ["n"])
    attributes = {
        "then_branch": body,
        "tensor": TensorData.from_array(np.array([1, -2], ml_dtypes.int4)),
        "texts": ("a", "b"),
        "raw": b"\x00\xff",
        "many": (1, 2, 3),
        "fractions": (0.5, float("inf")),
        "words": TensorData.from_array(np.array(["x", "ü"], object)),
    }
    types = [SequenceType(kind), OptionalType(SequenceType(kind)), MapType(DType.STRING, kind), UnknownType(),
             TensorType(DType.STRING, None)]  # fmt: skip
    g.outputs = list(g.onnx_node("Odd", [c, x], attributes, types=types, domain="com.example", version=3))
    back = from_json(*to_json(g))
    ours, theirs = g.nodes[2].op, back.nodes[2].op
    assert isinstance(ours, OnnxNode)
    assert isinstance(theirs, OnnxNode)
    assert_same(ours.bodies()[0], theirs.bodies()[0])
    same_body = {**theirs.attributes, "then_branch": body}  # graphs are compared above, they are equal by identity only
    back.nodes[2].op = replace(theirs, attributes=same_body)
    assert_same(g, back)


def broken(path: str, value: object) -> str:
    """Return the JSON of a two-node graph with the entry at a dotted path replaced."""
    g = Graph("g")
    g.outputs = [g.softmax(g.input("x", [2, 3]))]
    document = json.loads(to_json(g)[0])
    *parents, last = path.split(".")
    item = document
    for step in parents:
        item = item[int(step) if step.isdecimal() else step]
    item[int(last) if last.isdecimal() else last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", "is not a graph"),
        ("schema", SCHEMA + 1, "update rlx_ort"),
        ("schema", "1", "not a version number"),
        ("graph", [], "graph: dict expected, got list"),
        ("graph.nodes", {}, r"graph\.nodes: list expected"),
        ("graph.nodes.1.op", "Softermax", r"graph\.nodes\[1\]: unknown op 'Softermax'"),
        ("graph.nodes.1.attributes", {"axes": 1}, "no attribute 'axes'; known: axis"),
        ("graph.nodes.1.attributes.axis", "last", r"nodes\[1\]\.attributes\.axis: 'last' is not a valid"),
        ("graph.nodes.1.inputs", [[1, 0]], r"nodes\[1\]\.inputs\[0\]: \[1, 0\] is not a result of an earlier node"),
        ("graph.nodes.1.inputs", [[0, 0, 0]], "a list of two"),
        ("graph.nodes.1.types", [{"$tensor_type": ["f99", [1]]}], "'f99' is none of"),
        ("graph.nodes.1.types", [{"$tensor_type": ["f32", [-1]]}], "negative"),
        ("graph.nodes.1.types", [{"$set": 1}], r"unknown key '\$set'"),
        ("graph.nodes.1.output_names", [], "1 types and 0 output names"),
        ("graph.outputs.0.value", [5, 0], r"graph\.outputs\[0\]"),
        ("graph.weights", {"w": {"dtype": "f32", "shape": [2], "stored": "t9"}}, "named 't9'"),
        ("graph.weights", {"w": {"dtype": "f32", "shape": [2], "data": "AAAA"}}, "needs 8 bytes, got 3"),
        ("graph.weights", {"w": {"dtype": "f32", "shape": [2], "data": "?"}}, r"graph\.weights\.w"),
    ],
)
def test_wrong_entry_is_reported_where_it_stands(path: str, value: object, message: str) -> None:
    """The error names the place in the document."""
    with pytest.raises(ConversionError, match=message):
        from_json(broken(path, value))


def test_text_that_is_no_json_is_reported_with_its_line() -> None:
    """The error of a truncated file has line and column."""
    with pytest.raises(ConversionError, match="line 2, column"):
        from_json('{"format":\n  oops')


def test_missing_file_is_a_conversion_error(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(ConversionError, match=r"none\.json"):
        load_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((lambda own, other, content=content: content, r"a\.safetensors")
          for content in (b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]")),
        (lambda own, other: own[:-100], "reaches from byte"),
        (lambda own, other: other, "belongs to another save"),
    ],
    ids=["empty", "garbage", "a list", "truncated", "of another save"],
)  # fmt: skip
def test_damaged_tensor_file_is_refused(damage: Callable[[bytes, bytes], bytes], message: str, tmp_path: Path) -> None:
    """When the file beside the JSON is opened, before anything of it is read."""
    for name in ("a", "b"):
        save_json(network(), tmp_path / f"{name}.json")
    own, other = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("a", "b"))
    (tmp_path / "a.safetensors").write_bytes(damage(own, other))
    with pytest.raises(ConversionError, match=message):
        load_json(tmp_path / "a.json")


def test_failed_save_leaves_the_old_files(tmp_path: Path) -> None:
    """An op that cannot be encoded fails before anything is written."""
    save_json(network(), tmp_path / "a.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bad = Graph("bad")
    bad.outputs = list(bad.onnx_node("X", [], {"a": object()}, types=[UnknownType()]))  # type: ignore[dict-item]  # on purpose
    with pytest.raises(ConversionError, match="cannot hold a object"):
        save_json(bad, tmp_path / "a.json")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file mode")
def test_files_have_the_rights_of_any_new_file(tmp_path: Path) -> None:
    """Others may read a graph where they may read what else the process writes."""
    (tmp_path / "plain").touch()
    graph = Graph("g")
    graph.outputs = [graph.param("w", (600,), data=np.ones(600, np.float32)) + graph.input("x", [600])]
    save_json(graph, tmp_path / "g.json")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_the_tensors_of_a_graph_file_are_not_read_through_a_link_out_of_its_folder(tmp_path: Path) -> None:
    """The name of the side file comes from a stranger, as does the link."""
    graph = Graph("g")
    graph.outputs = [graph.input("x", [1024]) + graph.param("w", [1024], data=np.ones(1024, np.float32))]
    (tmp_path / "own").mkdir()
    save_json(graph, tmp_path / "own" / "g.json")
    side = tmp_path / "own" / "g.safetensors"
    side.rename(tmp_path / "g.safetensors")
    try:
        side.symlink_to(tmp_path / "g.safetensors")
    except OSError as err:
        pytest.skip(f"no links here: {err}")
    with pytest.raises(ConversionError, match="link that leaves the folder"):
        load_json(tmp_path / "own" / "g.json")
