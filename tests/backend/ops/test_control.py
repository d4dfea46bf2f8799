"""Control flow runs as written, functions are written out, and custom ops run by their library's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from op_tests.harness import check, run

from rlx_ort import CompileOptions, Device, DType, Graph, Session, Value, from_onnx
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.ops.control import Scan
from rlx_ort.ir.ops.leaf import Capture
from rlx_ort.ir.types import Shape, TensorType

X = np.asarray([0.5, -1.0, 2.0], np.float32)


def double(graph: Graph, x: Value) -> Value:
    return x * 2


def square(graph: Graph, x: Value) -> Value:
    return x * x


@pytest.mark.parametrize(
    "predicate",
    [True, False, [[False]], [[True], [False]]],
    ids=["yes", "no", "one element", "a choice for each element"],
)
def test_if_runs_the_body_that_the_predicate_chooses(device: Device, predicate: Any) -> None:
    """One element picks a body and leaves the shape of its result; more of them broadcast against both results."""
    build = lambda g, p, x: g.if_(p, double, square, [x])  # noqa: E731
    check(device, build, np.asarray(predicate), X, strict=False)


@pytest.mark.parametrize("choice", [True, False])
def test_if_returns_several_results_also_when_a_body_only_passes_them_on(device: Device, choice: bool) -> None:
    """A body may return a captured value as it is, and one value twice."""
    build = lambda g, p, x: g.if_multi(p, lambda b, v: (v, v), lambda b, v: (b.neg(v), v), [x])  # noqa: E731
    check(device, build, np.asarray(choice), X, strict=False)


def test_bodies_use_constants_and_weights_of_the_graph_around_them(device: Device) -> None:
    """A parameter reaches a body as a captured value."""

    def build(g: Graph, p: Value, x: Value) -> Value:
        w = g.param("w", [3], data=np.asarray([1, 2, 3], np.float32))
        return g.if_(p, lambda b, v, u: v * u + [1.0, 0.0, 1.0], lambda b, v, u: v, [x, w])

    check(device, build, np.asarray(True), X, strict=False)


@pytest.mark.parametrize(("start", "expected", "passes"), [(1.0, 64.0, 6), (50.0, 50.0, 0), (100.0, 100.0, 0)])
def test_while_tests_before_each_pass(device: Device, start: float, expected: float, passes: int) -> None:
    """A condition that fails at once leaves the carried values as they were."""
    build = lambda g, x, limit: g.while_(  # noqa: E731
        [x, 0.0], lambda b, v, n, top: b.lt_(v, top), lambda b, v, n, top: (v * 2, n + 1), [limit]
    )
    value, count = run(device, build, np.asarray(start, np.float32), np.asarray(50, np.float32), strict=False)
    assert (float(value), float(count)) == (expected, passes)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_while_stops_after_max_iterations(device: Device, most: int) -> None:
    """A limit ends a loop whose condition always holds."""
    build = lambda g, x: g.while_(  # noqa: E731
        [x], lambda b, v: b.constant(True), lambda b, v: v + 1, max_iterations=most
    )
    check(device, build, X, strict=False)


@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 20])
def test_scan_carries_a_value_over_rows_of_sequences(device: Device, length: int) -> None:
    """The last carry and the trajectory agree with the recurrence, written out or as a loop."""
    xs, w = np.linspace(-1, 1, 2 * length).reshape(length, 2).astype(np.float32), np.asarray([0.5, -0.9], np.float32)

    def build(g: Graph, init: Value, seq: Value, fixed: Value) -> list[Value]:
        step = lambda b, carry, factor, row: carry * factor + row  # noqa: E731
        return [
            g.scan_with_bcasts_and_xs(init, [fixed], [seq], step, length, save_trajectory=save)
            for save in (False, True)
        ]

    check(device, build, np.ones(2, np.float32), xs, w, strict=False)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (5, 2), (7, 3), (12, 5), (20, 20), (2, 3)])
def test_scan_checkpoints_are_rows_of_the_trajectory(device: Device, length: int, count: int) -> None:
    """Row t of K is the trajectory's row floor(t * length / K)."""
    build = lambda g, init: g.scan_checkpointed(init, lambda b, c: c + 1, length, count)  # noqa: E731
    (rows,) = run(device, build, np.zeros(2, np.float32), strict=False)
    assert rows.tolist() == [[1.0 + t * length // count] * 2 for t in range(count)]


@pytest.mark.parametrize("length", [2, 11])
def test_nested_bodies_see_what_the_bodies_around_them_captured(device: Device, length: int) -> None:
    """An If in a Scan in an If reads a value of the outermost graph, handed on from body to body."""

    def step(b: Graph, carry: Value, weight: Value) -> Value:
        return b.if_(b.lt_(b.sum(carry), 10.0), lambda c, v, u: v + u, lambda c, v, u: v - u, [carry, weight])

    def outer(b: Graph, start: Value, weight: Value) -> Value:
        return b.scan_with_bcasts_and_xs(start, [weight], [], step, length)

    build = lambda g, x, w, p: g.if_(p, outer, lambda b, v, u: v, [x, w])  # noqa: E731
    check(device, build, X, np.asarray([1, 2, 3], np.float32), np.asarray(True), strict=False)


def test_a_loop_inside_a_loop_counts_every_pass(device: Device) -> None:
    """A While whose body is a Scan of more steps than are written out."""
    build = lambda g, x: g.while_(  # noqa: E731
        [x, 0.0],
        lambda b, v, n: b.lt_(n, 3.0),
        lambda b, v, n: (b.scan(v, lambda c, u: u + 1, 10), n + 1),
    )
    check(device, build, np.zeros(1, np.float32), strict=False)


def test_a_capture_leaf_names_an_input_of_the_node(device: Device) -> None:
    """A body may read an input of its node by place instead of by a formal input."""

    def build(g: Graph, x: Value, w: Value) -> Value:
        body = Graph("step")
        carry, _ = body.input("carry", [3]), body.input("unused", [3])
        body.outputs = [carry + body.append(Capture(1, w.type), name="captured")]
        return g.append(Scan(body, 12, num_bcast=1), x, w)

    check(device, build, X, np.ones(3, np.float32), strict=False)


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
    build = lambda g, x: g.custom_fn_multi(g.custom_fn_multi([x, x * 2], body), body)  # noqa: E731
    check(device, build, ROW)


def test_functions_nest(device: Device) -> None:
    """A function that applies a function, and passes an input through."""
    twice = lambda b, v: (b.custom_fn([v, v], lambda c, u, w: u * w), v)  # noqa: E731
    check(device, lambda g, x: g.custom_fn_multi([x], twice), ROW)


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


@pytest.mark.parametrize(("reads", "writes"), [(1, 0), (-1, 1), (2, -1), (0, 2), (-3, -2)])
def test_an_imported_scan_goes_along_any_axis(device: Device, reads: int, writes: int) -> None:
    """Its steps are put together along another one; the body reads a value of the graph around it."""
    dims = ["n", "3"]
    dims.insert(reads % 3, "l")
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[n,3] s, float[{",".join(dims)}] x, float[3] k) => (t, y) {{
          t, y = Scan <num_scan_inputs = 1, scan_input_axes = [{reads}], scan_output_axes = [{writes}],
            body = b (float[n,3] p, float[n,3] c) => (float[n,3] q, float[n,3] f) {{ q = Add(p, c) f = Mul(q, k) }}
          > (s, x)
        }}"""
    )
    draw = np.random.default_rng(3)
    start, steps = draw.standard_normal((2, 3), np.float32), draw.standard_normal((5, 2, 3), np.float32)
    feeds = {"s": start, "x": np.moveaxis(steps, 0, reads), "k": np.asarray([1, 2, 3], np.float32)}
    totals = start + np.cumsum(steps, axis=0, dtype=np.float64)
    options = CompileOptions(placement="assisted")
    last, parts = Session(device, options).compile(from_onnx(model)).run(feeds)
    np.testing.assert_allclose(last, totals[-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts, np.moveaxis(totals * [1, 2, 3], 0, writes), rtol=1e-5, atol=1e-6)


def test_one_body_reads_a_constant_on_the_device_and_the_other_computes_sizes_with_it(device: Device) -> None:
    """Bodies that shared it had it in one place, where one of them cannot read it."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 16]> g (float[n,3] x, bool c) => (float[m] y) {
          y = If (c) <
            then_branch = t () => (float[m] a) <int64 zero = {0}> { part = Gather (x, zero) a = Mul (part, part) },
            else_branch = e () => (float[m] b) <int64 zero = {0}, int64[1] axis = {0}, int64[1] one = {1}> {
              s = Shape (x) n = Gather (s, zero) u = Unsqueeze (n, axis) p = Concat <axis = 0> (u, one)
              k = Expand (x, p) b = ReduceSum <keepdims = 0> (k, axis) }>
        }"""
    )
    compiled = Session(device, CompileOptions(placement="assisted")).compile(from_onnx(model))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for choice, wanted in ((True, x[0] ** 2), (False, x.sum(0))):
        np.testing.assert_allclose(compiled.run({"x": x, "c": np.array(choice)})[0], wanted)
