"""Control flow ops and ops that a user brings check what they are given, and say what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort import DType, Graph, GraphVerifyError, Value, verify
from rlx_ort.ir.ops.control import Custom, If, Scan, While
from rlx_ort.ir.serde import from_json, to_json
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType


def f32(*dims: int | str | None) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


BOOL = TensorType(DType.BOOL, Shape())


def body(*inputs: TensorType, add: float = 1.0) -> Graph:
    """Return a body that returns its first input plus a number."""
    graph = Graph("body")
    values = [graph.input(f"x{i}", kind.shape or (), kind.dtype) for i, kind in enumerate(inputs)]
    graph.outputs = [values[0] + add]
    return graph


def always(*inputs: TensorType, dims: tuple[int, ...] = ()) -> Graph:
    graph = Graph("cond")
    for i, kind in enumerate(inputs):
        graph.input(f"x{i}", kind.shape or (), kind.dtype)
    graph.outputs = [graph.constant([[True]] if dims else True)]
    return graph


def test_if_has_the_type_on_which_the_bodies_agree() -> None:
    """A size that one body knows is known."""
    op = If(body(f32("n", 3)), body(f32(2, 3)))
    assert op.infer([BOOL, f32("n", 3)]) == (f32(2, 3),)


def test_if_with_a_larger_predicate_broadcasts() -> None:
    """The predicate takes part in the shape of an elementwise choice."""
    op = If(body(f32(3)), body(f32(3)))
    assert op.infer([TensorType(DType.BOOL, Shape((2, 1))), f32(3)]) == (f32(2, 3),)
    assert op.elementwise([TensorType(DType.BOOL, Shape(("n",))), f32(3)])
    assert not op.elementwise([TensorType(DType.BOOL, Shape((1, 1))), f32(3)])


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        (If(body(f32(3)), body(f32(3))), [f32(), f32(3)], "bool predicate"),
        (If(body(f32(3)), body(f32(3))), [BOOL], "gives its then body 0 inputs"),
        (If(body(f32(3)), body(f32(4))), [BOOL, f32(3)], "else body"),
        (If(body(f32(3)), body(f32(3))), [BOOL, TensorType(DType.F64, Shape((3,)))], "then body to be f64"),
        (While(always(f32(3)), body(f32(3)), 2), [f32(3)], "carries 2 of 1"),
        (While(always(f32(3), dims=(1, 1)), body(f32(3)), 1, -1), [f32(3)], "after -1 iterations"),
        (While(body(f32()), body(f32()), 1), [f32()], "one bool of one element"),
        (While(always(f32(3), f32()), body(f32(), f32()), 1), [f32(3), f32()], "input 'x0' of its body"),
        (Scan(body(f32(3)), -1), [f32(3)], "negative"),
        (Scan(body(f32(3)), 4, num_xs=1), [f32(3)], "takes 2 inputs"),
        (Scan(body(f32(3), f32()), 4, num_xs=1), [f32(3), f32(5)], "the length of input 1 to be 4"),
        (Scan(body(f32(3), f32()), 4, num_xs=1), [f32(3), f32()], "a sequence as input 1"),
        (Scan(body(f32(3)), 0, num_checkpoints=2), [f32(3)], "checkpoints of at least one step"),
        (Scan(body(f32(3)), 4, True, num_checkpoints=2), [f32(3)], "not the trajectory"),
    ],
)
def test_what_does_not_fit_is_refused(op: If | While | Scan, inputs: list[TensorType], message: str) -> None:
    """Each message says what was wanted."""
    with pytest.raises(GraphVerifyError, match=message):
        op.infer(inputs)


def test_a_body_with_parameters_of_its_own_is_refused() -> None:
    """Weights belong to the graph around a body, which says so by name."""
    inner = Graph("body")
    inner.outputs = [inner.input("x", [3]) + inner.param("w", [3])]
    with pytest.raises(GraphVerifyError, match=r"parameters in its body: w; make them parameters of the graph around"):
        Scan(inner, 4).infer([f32(3)])


def test_a_body_that_changes_the_carried_type_is_refused() -> None:
    """The carried value keeps its shape."""
    g = Graph()
    with pytest.raises(GraphVerifyError, match="the result of its body to be"):
        g.scan(g.input("x", [3]), lambda b, c: b.concat([c, c], 0), 4)


def test_if_refuses_several_results_and_names_the_builder_for_them() -> None:
    """`if_` returns one value."""
    g = Graph()
    x = g.input("x", [3])
    with pytest.raises(GraphVerifyError, match="use if_multi"):
        g.if_(True, lambda b, v: (v, v), lambda b, v: (v, v), [x])


@pytest.mark.parametrize(("length", "count", "rows"), [(10, 3, (0, 3, 6)), (4, 4, (0, 1, 2, 3)), (2, 3, (0, 0, 1))])
def test_checkpoint_rows_are_spread_by_floor(length: int, count: int, rows: tuple[int, ...]) -> None:
    """Row t stands at floor(t * length / K)."""
    assert Scan(body(f32(3)), length, num_checkpoints=count).checkpoint_rows == rows


def test_scan_types_grow_with_its_length() -> None:
    """A trajectory has a row a step, checkpoints K rows; without either the last step is left."""
    assert Scan(body(f32(3)), 5, True).infer([f32(3)]) == (f32(5, 3),)
    assert Scan(body(f32(3)), 5, num_checkpoints=2).infer([f32(3)]) == (f32(2, 3),)
    assert Scan(body(f32(3)), 5).infer([f32(3)]) == (f32(3),)


def looped() -> Graph:
    """Return a graph with every kind of control flow, nested."""

    def step(b: Graph, carry: Value, weight: Value, row: Value) -> Value:
        return b.if_(b.lt_(b.sum(carry), 1.0), lambda c, v, w: v + w, lambda c, v, w: v - w, [carry, weight]) + row

    g = Graph()
    x, w, xs = g.input("x", ["n"]), g.input("w", ["n"]), g.input("xs", [4, "n"])
    last = g.scan_with_bcasts_and_xs(x, [w], [xs], step, 4)
    g.outputs = list(g.while_([last], lambda b, v: b.lt_(b.sum(v), 9.0), lambda b, v: v * 2, max_iterations=7))
    return g


def test_sound_control_flow_has_no_problems_and_binds_into_its_bodies() -> None:
    """Named dims get sizes in nested bodies as well."""
    g = looped()
    assert verify(g) == []
    bound = g.bind({"n": 3})
    assert verify(bound) == []
    assert bound.outputs[0].shape == (3,)
    scan = next(node for node in bound.nodes if isinstance(node.op, Scan))
    assert isinstance(scan.op, Scan)
    assert [value.shape for value in scan.op.body.inputs] == [(3,)] * 3


def test_control_flow_survives_json() -> None:
    """Bodies are written and read with their node."""
    text, tensors = to_json(looped())
    again = from_json(text, tensors)
    assert verify(again) == []
    assert to_json(again)[0] == text


KIND = TensorType(DType.F32, Shape(["n", 3]))


def test_a_custom_op_has_the_declared_results() -> None:
    """Its results are what the caller says, one value each."""
    g = Graph()
    x = g.input("x", ["n", 3])
    results = g.custom_op("Twin", [x], [KIND, TensorType(DType.I64, Shape(["n"]))], domain="my.ops")
    assert [value.type for value in results] == [KIND, TensorType(DType.I64, Shape(["n"]))]


@pytest.mark.parametrize(("name", "domain", "types"), [("", "my", [KIND]), ("X", "", [KIND]), ("X", "my", [])])
def test_a_custom_op_needs_name_domain_and_types(name: str, domain: str, types: list[TensorType]) -> None:
    """Nothing of it can be guessed."""
    g = Graph()
    with pytest.raises(GraphVerifyError, match="Custom"):
        g.custom_op(name, [g.input("x", [3])], types, domain=domain)


def test_a_function_must_take_the_inputs() -> None:
    """The message says how many inputs were given and wanted."""
    body = Graph("one")
    body.outputs = [body.exp(body.input("x", [3]))]
    g = Graph()
    x = g.input("x", [3])
    with pytest.raises(GraphVerifyError, match="gives its function 2 inputs, 'one' has 1"):
        g.custom_fn([x, x], body)
    with pytest.raises(GraphVerifyError, match=r"input 'x' of its function to be f32\(4,\)"):
        g.custom_fn([g.input("y", [4])], body)


def test_a_function_with_several_results_needs_the_other_builder() -> None:
    """`custom_fn` returns one value."""
    g = Graph()
    with pytest.raises(GraphVerifyError, match="use custom_fn_multi"):
        g.custom_fn([g.input("x", [3])], lambda b, v: (v, v))


def test_custom_ops_and_functions_survive_json() -> None:
    """Attributes of every kind and bodies come back as they were."""
    g = Graph()
    x = g.input("x", ["n", 3])
    attributes = {"a": 1, "b": 2.5, "c": "text", "d": (1, 2), "e": TensorData.from_array(np.arange(3))}
    (made,) = g.custom_op("Mine", [x], [KIND], domain="my.ops", attributes=attributes, version=3)
    g.outputs = [g.custom_fn([made], lambda b, v: b.exp(v))]
    text, tensors = to_json(g)
    again = from_json(text, tensors)
    assert verify(again) == []
    op = again.nodes[1].op
    assert isinstance(op, Custom)
    assert (dict(op.attributes), op.types, op.version) == (attributes, (KIND,), 3)
