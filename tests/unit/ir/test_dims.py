"""Named dims, binding them, and removing dead nodes."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort import GraphVerifyError, verify
from rlx_ort.ir.graph import (
    DimBinding,
    Graph,
    dynamic_symbols,
    eliminate_dead_code,
    has_dynamic_dims,
    infer_bindings_from_inputs,
)
from rlx_ort.ir.ops.shape import Reshape


def _graph() -> Graph:
    graph = Graph("dims")
    x = graph.input("x", ["batch", 4])
    graph.input("y", ["batch", 2])
    graph.input("fixed", [3])
    graph.input("open", ["rows", "seq"])
    graph.outputs = [x + 1.0]
    return graph


def test_lengths_tell_named_dims() -> None:
    """12 elements of `(batch, 4)` are a batch of 3."""
    assert infer_bindings_from_inputs(_graph(), {"x": 12, "fixed": 3}) == {"batch": 3}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"x": 10}, "not a multiple of 4"),
        ({"x": 12, "y": 8}, "'y' makes 'batch' 4, but input 'x' makes it 3"),
        ({"open": 6}, "2 dims"),
        ({"fixed": 4}, "of 3 elements, got 4"),
        ({"z": 4}, "no tensor input 'z'"),
    ],
)
def test_lengths_that_do_not_come_out_even_are_refused(lengths: dict[str, int], said: str) -> None:
    """What one dim cannot explain raises and names the input."""
    with pytest.raises(GraphVerifyError, match=said):
        infer_bindings_from_inputs(_graph(), lengths)


def test_batch_and_sequence_bind_rows_for_several_sequences_only() -> None:
    """`rows` is all tokens together, and is left open for one sequence."""
    assert DimBinding.batch_seq(2, 5) == {"batch": 2, "seq": 5, "rows": 10}
    assert DimBinding.batch_seq(1, 5) == {"batch": 1, "seq": 5}
    assert DimBinding.batch_past_seq(2, 7) == {"batch": 2, "past_seq": 7}


def test_equal_bindings_have_one_hash_whatever_their_order() -> None:
    """So a binding may be a key of a cache."""
    first, second = DimBinding({"a": 1, "b": 2}), DimBinding({"b": 2}, a=1)
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(ValueError, match="size -1"):
        DimBinding(a=-1)


def test_symbols_are_listed_and_go_when_bound() -> None:
    """`Graph.bind` takes a binding."""
    graph = _graph()
    assert dynamic_symbols(graph) == ["batch", "rows", "seq"]
    assert has_dynamic_dims(graph)
    assert not has_dynamic_dims(graph.bind(DimBinding(batch=2, rows=3, seq=4)))


def test_bound_dims_spread_through_the_graph() -> None:
    """Every type that follows from a bound dim becomes static, also one that had no name."""
    g = Graph("g")
    x = g.input("x", ["b", "s", 8])
    flat = g.reshape(x, [-1, 8])
    g.outputs = [g.reshape(flat, ["b", "s", 2, 4])]
    bound = g.bind({"b": 2, "s": 3})
    assert [tuple(value.shape) for value in (bound.value(1), *bound.outputs)] == [(6, 8), (2, 3, 2, 4)]
    assert isinstance(bound.nodes[2].op, Reshape)
    assert bound.nodes[2].op.dims == (2, 3, 2, 4)
    assert verify(bound) == []


def test_binding_keeps_ids_names_and_the_old_graph() -> None:
    """The copy has the same nodes; the original keeps its names."""
    g = Graph("g")
    x = g.input("x", ["b", 4])
    w = g.param("w", [4, 4], data=np.eye(4, dtype=np.float32))
    g.set_outputs([g.matmul(x, w, name="mm")], ["y"])
    bound = g.bind({"b": 5})
    assert [(node.id, node.name) for node in bound.nodes] == [(node.id, node.name) for node in g.nodes]
    assert bound.output_names == ["y"]
    assert bound.weights["w"] is g.weights["w"]
    assert tuple(g.outputs[0].shape) == ("b", 4)


def test_size_that_does_not_fit_names_the_node() -> None:
    """A conflict is reported at the node where it shows."""
    g = Graph("g")
    g.outputs = [g.matmul(g.input("x", [2, "k"]), g.input("w", [4, 3]), name="projection")]
    with pytest.raises(GraphVerifyError, match=r"'projection'.*'k': 5"):
        g.bind({"k": 5})


def test_some_dims_may_stay_open() -> None:
    """Names that are not bound remain."""
    g = Graph("g")
    g.outputs = [g.relu(g.input("x", ["b", "s"]))]
    assert tuple(g.bind({"s": 3}).outputs[0].shape) == ("b", 3)


def test_dead_nodes_go_and_inputs_stay() -> None:
    """What no output needs is dropped, with its weights; the graph's inputs are its interface."""
    g = Graph("g")
    x, unused = g.input("x", [2, 2]), g.input("unused", [2])
    dead = g.param("dead", [2, 2], data=np.ones((2, 2)))
    g.matmul(x, dead)
    g.outputs = [g.relu(x)]
    small = eliminate_dead_code(g)
    assert [node.op.kind for node in small.nodes] == ["Input", "Input", "Activation"]
    assert [value.name for value in small.inputs] == ["x", unused.name]
    assert small.weights == {}
    assert verify(small) == []
    assert len(g) == 5


def test_new_nodes_after_a_rewrite_get_free_names() -> None:
    """The copy remembers which names are taken."""
    g = Graph("g")
    g.outputs = [g.relu(g.input("x", ["n"]))]
    bound = g.bind({"n": 2})
    bound.outputs = [bound.relu(bound.outputs[0])]
    assert verify(bound) == []


def test_a_size_for_an_unknown_dim_is_refused() -> None:
    """It would be ignored without a word."""
    g = Graph("g")
    g.set_outputs([g.relu(g.input("x", ("batch", 3), "f32"))])
    with pytest.raises(GraphVerifyError, match="no dim 'bacth'; did you mean 'batch'"):
        g.bind({"bacth": 3})
