"""Kinds that do not run are known by name and refused with a reason and a remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlx_ort import Graph, GraphVerifyError, verify
from rlx_ort.ir.ops.onnx import REFUSED_KINDS, refused_op
from rlx_ort.ir.serde import from_json, to_json


def graph_with(kind: str) -> Graph:
    g = Graph("g")
    x = g.input("x", [2])
    g.outputs = list(g.add_node(refused_op(kind, {"scale": "2"}), [g.relu(x)], types=[x.type], name="node_name"))
    return g


@pytest.mark.parametrize("kind", sorted(REFUSED_KINDS))
def test_verify_reports_the_node_the_reason_and_the_remedy(kind: str) -> None:
    """One problem, for the node, whatever the kind."""
    (problem,) = verify(graph_with(kind))
    reason, remedy = REFUSED_KINDS[kind]
    assert problem.node == 2
    assert "node_name" in problem.message
    assert reason in problem.message
    assert problem.remedy == remedy


def test_a_builder_that_infers_is_refused_at_once() -> None:
    """Without declared types the op cannot be added."""
    g = Graph("g")
    with pytest.raises(GraphVerifyError, match="gradient"):
        g.append(refused_op("ReluBackward"), g.input("x", [2]))


def test_a_refused_kind_survives_json() -> None:
    """A graph that holds one can be stored and read back."""
    text, tensors = to_json(graph_with("Svd"))
    op = from_json(text, tensors).nodes[2].op
    assert op == refused_op("Svd", {"scale": "2"})


def test_the_kinds_of_a_new_process_are_those_of_ops() -> None:
    """They are there without building a graph, and no base class is among them."""
    program = "import rlx_ort; print(*rlx_ort.op_kinds())"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, encoding="utf-8", check=True
    )
    kinds = set(found.stdout.split())
    assert {"MatMul", "Reshape", "LayerNorm", "Conv2d"} <= kinds
    assert not kinds & {"Op", "Leaf", "Movement", "AxisNorm", "Composite"}
