"""Ops a user brings: functions are written out, and nodes of a library's domain run by its kernels."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.execution.session import Session
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType

X = np.asarray([[0.5, -1.0, 2.0]], np.float32)


def test_a_function_is_written_out_in_place_of_its_node(device: Device) -> None:
    """The exported model has the function's nodes and no trace of a call."""
    g = Graph()
    x, w = g.input("x", [1, 3]), g.param("w", [3], data=np.asarray([1, 2, 3], np.float32))

    def scaled(b: Graph, value: Value, weight: Value) -> Value:
        return b.exp(value * weight)

    g.outputs = [g.custom_fn([x, w], scaled) + 1]
    assert [node.op_type for node in export_model(g).nodes] == ["Mul", "Exp", "Add"]
    assert Session(device).compile(g).run({"x": X})[0] == pytest.approx(np.exp(X * [1, 2, 3]) + 1, rel=1e-5)


def test_a_function_may_be_used_twice_and_return_several_values(device: Device) -> None:
    """One graph as the body of two nodes, the second fed by the first."""
    body = Graph("both")
    left, right = body.input("left", [1, 3]), body.input("right", [1, 3])
    body.outputs = [left + right, left - right]
    g = Graph()
    x = g.input("x", [1, 3])
    total, difference = g.custom_fn_multi([x, x * 2], body)
    g.outputs = list(g.custom_fn_multi([total, difference], body))
    total_again, difference_again = Session(device).compile(g).run({"x": X})
    assert total_again == pytest.approx(2 * X)
    assert difference_again == pytest.approx(4 * X)


def test_functions_nest(device: Device) -> None:
    """A function that applies a function, and passes an input through."""
    g = Graph()
    x = g.input("x", [1, 3])
    g.outputs = list(
        g.custom_fn_multi([x], lambda b, v: (b.custom_fn([v, v], lambda c, u, w: u * w), v)),
    )
    square, same = Session(device).compile(g).run({"x": X})
    assert square == pytest.approx(X * X)
    assert same == pytest.approx(X)


def test_a_custom_op_runs_by_the_kernel_of_its_domain() -> None:
    """ONNX Runtime's own domain stands for a library: a node with an input, an attribute and a result type."""
    g = Graph()
    x = g.input("x", [1, 3])
    (result,) = g.custom_op("QuickGelu", [x], [TensorType(DType.F32, Shape([1, 3]))], domain="com.microsoft",
                            attributes={"alpha": 2.0})  # fmt: skip
    g.outputs = [result * 1]
    node = export_model(g).nodes[0]
    assert (node.domain, node.op_type, node.version) == ("com.microsoft", "QuickGelu", 1)
    assert Session("cpu").compile(g).run({"x": X})[0] == pytest.approx(X / (1 + np.exp(-2 * X)), rel=1e-5)


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
