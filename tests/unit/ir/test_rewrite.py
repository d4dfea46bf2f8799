"""Binding dims and removing dead nodes."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.graph import Graph, eliminate_dead_code
from rlx_ort.ir.ops.shape import Reshape
from rlx_ort.ir.verify import verify


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
