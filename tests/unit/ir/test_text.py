"""Graphs as text."""

from __future__ import annotations

import numpy as np

from rlx_ort import DType, Graph
from rlx_ort.ir.core import format_graph
from rlx_ort.ir.types import Shape, TensorType


def test_listing_names_nodes_types_and_outputs() -> None:
    """One line a node, without the data of weights."""
    g = Graph("mlp")
    x = g.input("x", ["n", 4])
    w = g.param("w", [4, 2], data=np.ones((4, 2)))
    g.set_outputs([g.softmax(g.matmul(x, w, name="mm"))], ["y"])
    lines = format_graph(g).splitlines()
    assert lines[0] == "graph mlp"
    assert lines[3] == "  mm: f32(n, 2) = MatMul() (x, w)"
    assert lines[4] == "  softmax: f32(n, 2) = Softmax(axis=-1) (mm)"
    assert lines[5] == "  return y = softmax"


def test_bodies_stand_below_their_node() -> None:
    """The body of a node is indented."""
    body = Graph("then")
    body.outputs = [body.constant([1.0], "f32")]
    g = Graph("g")
    types = [TensorType(DType.F32, Shape([1]))]
    g.outputs = list(g.onnx_node("If", [g.input("c", [], "bool")], {"then_branch": body}, types=types))
    assert "\n    graph then\n      constant: f32(1,) = Constant(f32(1,))\n" in format_graph(g)
