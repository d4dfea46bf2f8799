"""Control flow runs as written, functions are written out, and custom ops run by their library's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.execution.session import Session
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule

X = np.asarray([0.5, -1.0, 2.0], np.float32)


def run(graph: Graph, device: Device, **feeds: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Run on a device; loops have kernels on the CPU only, so it may help."""
    options = CompileOptions(placement=PlacementRule.ASSISTED)
    return Session(device, options).compile(graph).run(feeds)


def double(graph: Graph, x: Value) -> Value:
    return x * 2


def square(graph: Graph, x: Value) -> Value:
    return x * x


@pytest.mark.parametrize(("choice", "expected"), [(True, X * 2), (False, X * X)])
def test_if_runs_the_body_that_the_predicate_chooses(device: Device, choice: bool, expected: Any) -> None:
    """A scalar predicate picks one body."""
    g = Graph()
    x, p = g.input("x", [3]), g.input("p", [], "bool")
    g.outputs = [g.if_(p, double, square, [x])]
    assert run(g, device, x=X, p=np.asarray(choice))[0] == pytest.approx(expected)


def test_if_takes_a_predicate_of_one_element(device: Device) -> None:
    """A predicate (1, 1) counts as one choice, and the result keeps the bodies' shape."""
    g = Graph()
    x, p = g.input("x", [3]), g.input("p", [1, 1], "bool")
    g.outputs = [g.if_(p, double, square, [x])]
    (result,) = run(g, device, x=X, p=np.asarray([[False]]))
    assert result.shape == (3,)
    assert result == pytest.approx(X * X)


def test_if_with_a_larger_predicate_chooses_each_element(device: Device) -> None:
    """An elementwise predicate broadcasts against both bodies' results."""
    g = Graph()
    x, p = g.input("x", [3]), g.input("p", [2, 1], "bool")
    g.outputs = [g.if_(p, double, square, [x])]
    (result,) = run(g, device, x=X, p=np.asarray([[True], [False]]))
    assert result == pytest.approx(np.stack([X * 2, X * X]))


@pytest.mark.parametrize("choice", [True, False])
def test_if_returns_several_results_also_when_a_body_only_passes_them_on(device: Device, choice: bool) -> None:
    """A body may return a captured value as it is, and one value twice."""
    g = Graph()
    x, p = g.input("x", [3]), g.input("p", [], "bool")
    g.outputs = list(g.if_multi(p, lambda b, v: (v, v), lambda b, v: (b.neg(v), v), [x]))
    first, second = run(g, device, x=X, p=np.asarray(choice))
    assert first == pytest.approx(X if choice else -X)
    assert second == pytest.approx(X)


def test_bodies_use_constants_and_weights_of_the_graph_around_them(device: Device) -> None:
    """A parameter reaches a body as a captured value."""
    g = Graph()
    x, p = g.input("x", [3]), g.input("p", [], "bool")
    w = g.param("w", [3], data=np.asarray([1, 2, 3], np.float32))
    g.outputs = [g.if_(p, lambda b, v, u: v * u + [1.0, 0.0, 1.0], lambda b, v, u: v, [x, w])]
    assert run(g, device, x=X, p=np.asarray(True))[0] == pytest.approx(X * [1, 2, 3] + [1, 0, 1])


@pytest.mark.parametrize(("start", "expected", "passes"), [(1.0, 64.0, 6), (50.0, 50.0, 0), (100.0, 100.0, 0)])
def test_while_tests_before_each_pass(device: Device, start: float, expected: float, passes: int) -> None:
    """A condition that fails at once leaves the carried values as they were."""
    g = Graph()
    x, limit = g.input("x", []), g.input("limit", [])
    g.outputs = list(
        g.while_([x, 0.0], lambda b, v, n, top: b.lt_(v, top), lambda b, v, n, top: (v * 2, n + 1), [limit])
    )
    value, count = run(g, device, x=np.asarray(start, np.float32), limit=np.asarray(50, np.float32))
    assert (float(value), float(count)) == (expected, passes)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_while_stops_after_max_iterations(device: Device, most: int) -> None:
    """A limit ends a loop whose condition always holds."""
    g = Graph()
    x = g.input("x", [3])
    g.outputs = list(g.while_([x], lambda b, v: b.constant(True), lambda b, v: v + 1, max_iterations=most))
    assert run(g, device, x=X)[0] == pytest.approx(X + most)


def trajectory(init: Any, length: int, w: Any, xs: Any) -> npt.NDArray[np.float64]:
    rows, carry = [], np.asarray(init, np.float64)
    for t in range(length):
        carry = carry * w + xs[t]
        rows.append(carry)
    return np.stack(rows) if rows else np.empty((0, len(init)))


@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 20])
def test_scan_carries_a_value_over_rows_of_sequences(device: Device, length: int) -> None:
    """The last carry and the trajectory agree with the recurrence, written out or as a loop."""
    xs, w = np.linspace(-1, 1, 2 * length).reshape(length, 2).astype(np.float32), np.asarray([0.5, -0.9], np.float32)
    g = Graph()
    init, seq, fixed = g.input("init", [2]), g.input("xs", [length, 2]), g.input("w", [2])

    def step(b: Graph, carry: Value, factor: Value, row: Value) -> Value:
        return carry * factor + row

    g.outputs = [
        g.scan_with_bcasts_and_xs(init, [fixed], [seq], step, length, save_trajectory=s) for s in (False, True)
    ]
    last, rows = run(g, device, init=np.ones(2, np.float32), xs=xs, w=w)
    expected = trajectory([1, 1], length, w, xs)
    assert rows.shape == (length, 2)
    assert rows == pytest.approx(expected, abs=1e-6)
    assert last == pytest.approx(expected[-1] if length else [1, 1], abs=1e-6)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (5, 2), (7, 3), (12, 5), (20, 20), (2, 3)])
def test_scan_checkpoints_are_rows_of_the_trajectory(device: Device, length: int, count: int) -> None:
    """Row t of K is the trajectory's row floor(t * length / K)."""
    g = Graph()
    init = g.input("init", [2])
    g.outputs = [g.scan_checkpointed(init, lambda b, c: c + 1, length, count)]
    expected = [[1.0 + t * length // count] * 2 for t in range(count)]
    assert run(g, device, init=np.zeros(2, np.float32))[0] == pytest.approx(np.asarray(expected))


@pytest.mark.parametrize("length", [2, 11])
def test_nested_bodies_see_what_the_bodies_around_them_captured(device: Device, length: int) -> None:
    """An If in a Scan in an If reads a value of the outermost graph, handed on from body to body."""

    def step(b: Graph, carry: Value, weight: Value) -> Value:
        return b.if_(b.lt_(b.sum(carry), 10.0), lambda c, v, u: v + u, lambda c, v, u: v - u, [carry, weight])

    def outer(b: Graph, start: Value, weight: Value) -> Value:
        return b.scan_with_bcasts_and_xs(start, [weight], [], step, length)

    g = Graph()
    x, w, p = g.input("x", [3]), g.input("w", [3]), g.input("p", [], "bool")
    g.outputs = [g.if_(p, outer, lambda b, v, u: v, [x, w])]
    expected, weight = X.astype(np.float64), np.asarray([1.0, 2.0, 3.0])
    for _ in range(length):
        expected = expected + weight if expected.sum() < 10 else expected - weight
    (result,) = run(g, device, x=X, w=weight.astype(np.float32), p=np.asarray(True))
    assert result == pytest.approx(expected)


def test_a_loop_inside_a_loop_counts_every_pass(device: Device) -> None:
    """A While whose body is a Scan of more steps than are written out."""
    g = Graph()
    x = g.input("x", [1])
    total, _ = g.while_(
        [x, 0.0],
        lambda b, v, n: b.lt_(n, 3.0),
        lambda b, v, n: (b.scan(v, lambda c, u: u + 1, 10), n + 1),
    )
    g.outputs = [total]
    assert run(g, device, x=np.zeros(1, np.float32))[0] == pytest.approx([30.0])


def test_a_capture_leaf_names_an_input_of_the_node(device: Device) -> None:
    """A body may read an input of its node by place instead of by a formal input."""
    from rlx_ort.ir.ops.control import Scan
    from rlx_ort.ir.ops.leaf import Capture

    g = Graph()
    x, w = g.input("x", [3]), g.input("w", [3])
    body = Graph("step")
    carry, _ = body.input("carry", [3]), body.input("unused", [3])
    captured = body.append(Capture(1, w.type), name="captured")
    body.outputs = [carry + captured]
    g.outputs = [g.append(Scan(body, 12, num_bcast=1), x, w)]
    assert run(g, device, x=X, w=np.ones(3, np.float32))[0] == pytest.approx(X + 12)


ROW = np.asarray([[0.5, -1.0, 2.0]], np.float32)


def test_a_function_is_written_out_in_place_of_its_node(device: Device) -> None:
    """The exported model has the function's nodes and no trace of a call."""
    g = Graph()
    x, w = g.input("x", [1, 3]), g.param("w", [3], data=np.asarray([1, 2, 3], np.float32))

    def scaled(b: Graph, value: Value, weight: Value) -> Value:
        return b.exp(value * weight)

    g.outputs = [g.custom_fn([x, w], scaled) + 1]
    assert [node.op_type for node in export_model(g).nodes] == ["Mul", "Exp", "Add"]
    assert Session(device).compile(g).run({"x": ROW})[0] == pytest.approx(np.exp(ROW * [1, 2, 3]) + 1, rel=1e-5)


def test_a_function_may_be_used_twice_and_return_several_values(device: Device) -> None:
    """One graph as the body of two nodes, the second fed by the first."""
    body = Graph("both")
    left, right = body.input("left", [1, 3]), body.input("right", [1, 3])
    body.outputs = [left + right, left - right]
    g = Graph()
    x = g.input("x", [1, 3])
    total, difference = g.custom_fn_multi([x, x * 2], body)
    g.outputs = list(g.custom_fn_multi([total, difference], body))
    total_again, difference_again = Session(device).compile(g).run({"x": ROW})
    assert total_again == pytest.approx(2 * ROW)
    assert difference_again == pytest.approx(4 * ROW)


def test_functions_nest(device: Device) -> None:
    """A function that applies a function, and passes an input through."""
    g = Graph()
    x = g.input("x", [1, 3])
    g.outputs = list(
        g.custom_fn_multi([x], lambda b, v: (b.custom_fn([v, v], lambda c, u, w: u * w), v)),
    )
    square, same = Session(device).compile(g).run({"x": ROW})
    assert square == pytest.approx(ROW * ROW)
    assert same == pytest.approx(ROW)


def test_a_custom_op_runs_by_the_kernel_of_its_domain() -> None:
    """ONNX Runtime's own domain stands for a library: a node with an input, an attribute and a result type."""
    g = Graph()
    x = g.input("x", [1, 3])
    (result,) = g.custom_op("QuickGelu", [x], [TensorType(DType.F32, Shape([1, 3]))], domain="com.microsoft",
                            attributes={"alpha": 2.0})  # fmt: skip
    g.outputs = [result * 1]
    node = export_model(g).nodes[0]
    assert (node.domain, node.op_type, node.version) == ("com.microsoft", "QuickGelu", 1)
    assert Session("cpu").compile(g).run({"x": ROW})[0] == pytest.approx(ROW / (1 + np.exp(-2 * ROW)), rel=1e-5)


def test_a_function_may_be_used_for_two_sizes_of_a_named_dimension(device: Device) -> None:
    """A name in a function belongs to each use of it."""
    body = Graph("flat")
    value = body.input("value", ["m", "n", 2])
    body.outputs = [body.expand(body.reshape(value, ["m", -1]), [2, "m", -1])]
    g = Graph()
    x, y = g.input("x", ["m", "n", 2]), g.input("y", ["n", "m", 2])
    g.outputs = [g.custom_fn([x], body), g.custom_fn([y], body)]
    data = np.arange(12, dtype=np.float32)
    first, second = Session(device).compile(g).run({"x": data.reshape(2, 3, 2), "y": data.reshape(3, 2, 2)})
    assert first == pytest.approx(np.tile(data.reshape(1, 2, 6), (2, 1, 1)))
    assert second == pytest.approx(np.tile(data.reshape(1, 3, 4), (2, 1, 1)))
