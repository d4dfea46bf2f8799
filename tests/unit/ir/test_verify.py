"""`verify` finds each defect that is planted in a sound graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlx_ort import DType, Graph, GraphVerifyError
from rlx_ort.ir.core import Ref
from rlx_ort.ir.ops.leaf import Capture, Input
from rlx_ort.ir.ops.norm import Softmax
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.ir.verify import check, verify


def sound_graph() -> Graph:
    """Return input 0, param 1, matmul 2, relu 3."""
    g = Graph("net")
    x = g.input("x", ["n", 4])
    w = g.param("w", [4, 2], data=np.ones((4, 2), np.float32))
    g.outputs = [g.activation("relu", g.matmul(x, w, name="mm"), name="act")]
    return g


def _missing_capture(g: Graph) -> None:
    body = Graph("body")
    body.outputs = [body.append(Capture(3, TensorType(DType.F32, Shape([2]))))]
    (value,) = g.onnx_node("If", [g.value(0)], {"then_branch": body}, types=[TensorType(DType.F32, Shape([2]))])
    g.outputs = [value]


F16 = TensorType(DType.F16, Shape(["n", 2]))
ARITY = lambda g: setattr(g.nodes[2], "inputs", (Ref(0),))  # noqa: E731
# name -> what plants the defect, the node that is named, and words of the message
DEFECTS: dict[str, tuple[Callable[[Graph], object], int | None, str]] = {
    "dangling": (lambda g: setattr(g.nodes[3], "inputs", (Ref(9),)), 3, "node 9, which does not exist"),
    "forward": (lambda g: setattr(g.nodes[2], "inputs", (Ref(3), Ref(1))), 2, "comes no earlier"),
    "missing result": (lambda g: setattr(g.nodes[3], "inputs", (Ref(2, 1),)), 3, "result 1 of node 2, which has 1"),
    "arity": (ARITY, 2, "takes 2 inputs and has 1"),
    "wrong shape": (
        lambda g: setattr(g.nodes[2], "types", (TensorType(DType.F32, Shape(["n", 3])),)),
        2,
        r"declares result 0 as f32\(n, 3\), its inputs give f32\(n, 2\)",
    ),
    "wrong dtype": (lambda g: setattr(g.nodes[3], "types", (F16,)), 3, "declares result 0 as f16"),
    "bad attribute": (lambda g: setattr(g.nodes[3], "op", Softmax(5)), 3, "has axis 5"),
    "same name": (lambda g: setattr(g.nodes[3], "name", "mm"), 3, "has the same name"),
    "same value name": (lambda g: setattr(g.nodes[3], "output_names", ("mm",)), 3, "both have a result named 'mm'"),
    "same feed": (lambda g: setattr(g.nodes[1], "op", Input("x", g.nodes[1].types[0])), 1, "both fed as 'x'"),
    "dangling output": (lambda g: setattr(g, "_outputs", [("y", Ref(12))]), None, "node 12, which does not exist"),
    "no output": (lambda g: setattr(g, "_outputs", []), None, "has no outputs"),
    "output names": (lambda g: setattr(g, "_outputs", [("y", Ref(2)), ("y", Ref(3))]), None, "output 1 is named 'y'"),
    "weight type": (lambda g: g.weights.update(w=TensorData.from_array(np.ones((2, 4), "f4"))), 1, "its data is"),
    "weight of nothing": (
        lambda g: g.weights.update(v=TensorData.from_array(np.ones(2, "f4"))),
        None,
        "not a parameter",
    ),
    "wrong id": (lambda g: setattr(g.nodes[3], "id", 7), 3, "stands at place 3"),
    "capture outside": (lambda g: setattr(g.nodes[0], "op", Capture(0, g.nodes[0].types[0])), 0, "is not a body"),
    "missing capture": (_missing_capture, 4, "captures input 3"),
}


def test_sound_graph_has_no_problems() -> None:
    """Nothing is reported where nothing is wrong."""
    assert verify(sound_graph()) == []
    check(sound_graph())


@pytest.mark.parametrize(("plant", "node", "message"), DEFECTS.values(), ids=DEFECTS)
def test_planted_defect_is_found_with_a_remedy(
    plant: Callable[[Graph], object], node: int | None, message: str
) -> None:
    """The defect is reported at its node, in words, and with what to do."""
    g = sound_graph()
    plant(g)
    with pytest.raises(GraphVerifyError, match=message):
        check(g)
    found = [problem for problem in verify(g) if problem.node == node]
    assert found
    assert all(problem.remedy for problem in found)


def test_problem_names_the_node_of_the_user() -> None:
    """The message holds the name that the user gave."""
    g = sound_graph()
    ARITY(g)
    assert "'mm'" in str(verify(g)[0])


def test_defect_inside_a_body_is_found() -> None:
    """Bodies are verified like graphs, and the message says whose body it is."""
    g = Graph("outer")
    body = Graph("then")
    inner = body.constant([1.0, 2.0])
    body.outputs = [body.relu(inner)]
    condition = g.input("c", [], "bool")
    kind = TensorType(DType.F32, Shape([2]))
    (value,) = g.onnx_node("If", [condition], {"then_branch": body, "else_branch": body}, types=[kind])
    g.outputs = [value]
    assert verify(g) == []
    body.nodes[1].types = (replace(kind, shape=Shape([3])),)
    assert "body 'then'" in str(verify(g)[0])


def test_scalar_and_one_element_are_compatible() -> None:
    """A declared shape (1,) is accepted where inference gives a scalar."""
    g = Graph("g")
    g.outputs = [g.sum(g.input("x", [3]))]
    g.nodes[1].types = (TensorType(DType.F32, Shape([1])),)
    assert verify(g) == []


def test_onnx_node_keeps_its_declared_types() -> None:
    """What nothing can infer is not reported."""
    g = Graph("g")
    kind = TensorType(DType.F32, Shape([7]))
    g.outputs = list(g.add_node(OnnxNode("Mystery", "com.example", 1), [g.input("x", [3])], types=[kind]))
    assert verify(g) == []


def test_what_reads_a_changed_node_is_looked_at() -> None:
    """An input that was replaced as a whole is sound itself; the product that reads it is not any more."""
    graph = sound_graph()
    kind = TensorType(DType.F32, Shape(["n", 5]))
    graph.nodes[0].op, graph.nodes[0].types = Input("x", kind), (kind,)
    assert [problem.node for problem in verify(graph)] == [2]


def test_nodes_of_another_graph_are_looked_at() -> None:
    """A node that was sound where it was built may not be so among other nodes."""
    source, graph = sound_graph(), Graph("other")
    x = graph.input("x", ["n", 3])
    graph.nodes += source.nodes[1:]
    graph.outputs = [x]
    assert [problem.node for problem in verify(graph)] == [2]


def test_a_node_that_is_put_back_behind_another_is_looked_at() -> None:
    """What was known of a place is forgotten once the place is given to a new node."""
    graph = sound_graph()
    last = graph.nodes.pop()
    graph.nodes.pop()
    graph.append(Softmax(0), graph.inputs[0], name="mm")
    graph.nodes.append(last)
    last.inputs = tuple(last.inputs)
    assert [problem.node for problem in verify(graph)] == [3]


def test_a_body_that_was_changed_is_looked_at_with_its_owner() -> None:
    """An op infers from its bodies, which may grow after it was added."""
    graph = Graph("outer")
    x, flag = graph.input("x", [4]), graph.input("flag", [], "bool")
    body = Graph("body")
    y = body.input("y", [4])
    body.outputs = [body.activation("relu", y)]
    graph.outputs = [graph.if_(flag, body, body, [x])]
    assert verify(graph) == []
    body.outputs = [body.reduce(y, "sum", [0], True)]
    assert [problem.node for problem in verify(graph)] == [2]
