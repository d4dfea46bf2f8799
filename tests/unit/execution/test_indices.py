"""Which fed indices are out of range, as numpy indexes and ONNX defines it; no session is opened."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from rlx_ort import CompileOptions, EngineError, Graph, Value, from_onnx
from rlx_ort.converters.to_onnx.exporter import exported
from rlx_ort.execution.indices import IndexCheck, index_check
from rlx_ort.faults import Fault, fault_of


def check_of(graph: Graph) -> IndexCheck | None:
    """Return the check of the inputs of a graph."""
    model = exported(graph, CompileOptions())
    return index_check(model.nodes, model.input_types, model.known)


def built(build: Callable[[Graph, Value, Value], Value], table: list[Any], indices: list[Any]) -> IndexCheck | None:
    """Return the check of a graph over a table `x` and int64 indices `i`."""
    graph = Graph("indexed")
    graph.outputs = [build(graph, graph.input("x", table), graph.input("i", indices, "i64"))]
    return check_of(graph)


def passes(check: IndexCheck | None, **feeds: Any) -> bool:
    """Return whether inputs pass; an error is the caller's and names the input."""
    assert check is not None
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    failure = None
    try:
        check(arrays)
    except EngineError as err:
        failure = err
    assert failure is None or ("input 'i'" in str(failure) and fault_of(failure) == (Fault.CALLER, "inputs"))
    return failure is None


ROWS = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(("index", "right"), [(-5, False), (-4, True), (3, True), (4, False), (2**40, False)])
@pytest.mark.parametrize(
    "build",
    [
        lambda g, x, i: g.gather(x, i, 0),
        lambda g, x, i: g.gather(x, g.cast(i, "i32"), 0),
        lambda g, x, i: g.gather(x, g.reshape(i, [1, -1, 1]), 0),
        lambda g, x, i: g.gather(x, g.concat([g.constant(np.array([1])), i], 0), -2),
        lambda g, x, i: g.gather_nd(x, g.reshape(i, [-1, 1])),
    ],
    ids=["plain", "cast", "reshaped", "joined", "coordinate"],
)
def test_an_index_is_followed_to_the_input_it_comes_from(build: Any, index: int, right: bool) -> None:
    """Operators that move elements are no obstacle, and indices count from the end."""
    assert passes(built(build, [4, 3], ["n"]), x=ROWS, i=np.array([0, index])) is right


def test_each_coordinate_has_its_own_range() -> None:
    """The second one selects a column, of which there are fewer than rows."""
    check = built(lambda g, x, i: g.gather_nd(x, i), [4, 3], ["n", 2])
    assert passes(check, x=ROWS, i=[[3, -3], [-4, 2]])
    assert not passes(check, x=ROWS, i=[[0, 3]])
    assert not passes(check, x=ROWS, i=[[4, 0]])
    assert passes(check, x=ROWS, i=np.zeros((0, 2), np.int64))


def test_a_named_dim_of_the_table_has_the_size_of_the_run() -> None:
    """The bound changes from run to run."""
    check = built(lambda g, x, i: g.gather(x, i, 0), ["rows", 3], ["n"])
    assert passes(check, x=ROWS, i=[3])
    assert not passes(check, x=ROWS[:3], i=[3])


def test_elements_that_a_slice_leaves_out_are_not_judged() -> None:
    """A mark at the end of a row, such as -100, may be cut off before the lookup."""
    check = built(lambda g, x, i: g.gather(x, g.slice(i, [1], [0], [-1]), 0), [4, 3], [1, "n"])
    assert passes(check, x=ROWS, i=[[0, 3, -100]])
    assert not passes(check, x=ROWS, i=[[0, -100, 3]])


def test_indices_that_the_graph_computes_are_not_judged() -> None:
    """What is fed says nothing about them."""
    assert built(lambda g, x, i: g.gather(x, g.binary("add", i, i), 0), [4, 3], ["n"]) is None


@pytest.mark.parametrize(
    ("places", "right"), [([[0, 1, 3]], True), ([[0, 1, 4]], False), ([[0, -1, 1]], False), ([1], True), ([2], False)]
)
def test_the_places_of_a_rotation_are_rows_of_its_table(places: list[Any], right: bool) -> None:
    """A place does not count from the end; a single one is the first of as many as are rotated."""
    given, value = np.array(places), onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(
        "RotaryEmbedding", ["x", "i", "c", "s"], ["y"], domain="com.microsoft", num_heads=2, name="rotate"
    )
    inputs = [value("x", 1, [1, 3, 8]), value("i", 7, given.shape), value("c", 1, [4, 2]), value("s", 1, [4, 2])]
    graph = onnx.helper.make_graph([node], "g", inputs, [value("y", 1, [1, 3, 8])])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    check = check_of(from_onnx(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)))
    assert passes(check, x=np.zeros((1, 3, 8), np.float32), i=given) is right
