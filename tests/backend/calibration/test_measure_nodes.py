"""Single nodes of any operator are measured on real devices, or have a reason why not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DType
from rlx_ort.calibration.measure import Node, measure_nodes
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType


def kind(*shape: int, dtype: DType = DType.F32) -> TensorType:
    """Return a tensor type."""
    return TensorType(dtype, Shape(shape))


def ints(*numbers: int) -> TensorData:
    """Return a known vector of integers."""
    return TensorData.from_array(np.array(numbers, np.int64))


def node(op_type: str, inputs: Sequence[Any], outputs: Sequence[TensorType], **attributes: Any) -> Node:
    """Return a node that is named after its operator."""
    return Node(op_type, op_type, tuple(inputs), tuple(outputs), attributes)


X = kind(16, 64)
LAYER = kind(1, 4 * 32, 32)
NODES = (
    node("Sin", [X], [X]),
    node("Softplus", [X], [X]),
    node("Mish", [X], [X]),
    node("ReduceMax", [X, ints(0)], [kind(1, 64)]),
    node("TopK", [X, ints(5)], [kind(16, 5), kind(16, 5, dtype=DType.I64)]),
    node("CumSum", [X, TensorData.from_array(np.array(1, np.int64))], [X]),
    node("Resize", [kind(1, 3, 8, 8), None, None, ints(1, 3, 16, 16)], [kind(1, 3, 16, 16)]),
    node("GridSample", [kind(1, 3, 8, 8), kind(1, 8, 8, 2)], [kind(1, 3, 8, 8)]),
    node("LSTM", [kind(4, 1, 32), LAYER, LAYER], [kind(4, 1, 1, 32)], hidden_size=32),
    node("GRU", [kind(4, 1, 32), kind(1, 96, 32), kind(1, 96, 32)], [kind(4, 1, 1, 32)], hidden_size=32),
    node("Einsum", [X, kind(64, 8)], [kind(16, 8)], equation="ij,jk->ik"),
    node("ScatterND", [X, kind(4, 1, dtype=DType.I64), kind(4, 64)], [X]),
    node("Pad", [X, ints(1, 1, 1, 1)], [kind(18, 66)]),
    node("Conv", [kind(1, 3, 16, 16), kind(8, 3, 3, 3)], [kind(1, 8, 14, 14)]),
)


def measured(device: Device | str, nodes: Sequence[Node], limit_s: float = 3.0) -> tuple[Mapping[str, float], Any]:
    """Return operator -> ns of each node that was measured, and the reasons of the others."""
    rows, reasons = measure_nodes(Device(device), nodes, limit_s)
    return {row.kernel.removeprefix("?"): row.ns for row in rows}, reasons


@pytest.mark.parametrize("case", NODES, ids=lambda case: case.op_type)
def test_an_operator_is_measured_on_the_cpu(case: Node) -> None:
    """Whatever its inputs are."""
    found, reasons = measured("cpu", [case])
    assert (set(found), reasons) == ({case.op_type}, {})
    assert 0 < found[case.op_type] < 1e8


def test_either_axis_of_a_reduction_has_its_own_time() -> None:
    """Two nodes of one operator have a row each, by the names that they were given."""
    shapes = {"rows": kind(1, 64), "columns": kind(1024, 1)}
    nodes = [
        Node(name, "ReduceMax", (kind(1024, 64), ints(axis)), (result,))
        for axis, (name, result) in enumerate(shapes.items())
    ]
    found, reasons = measured("cpu", nodes)
    assert (set(found), reasons) == ({"rows", "columns"}, {})
    assert all(ns > 0 for ns in found.values())


def test_a_node_without_a_size_has_a_reason() -> None:
    """The message names the input; the other node is measured."""
    open_ended = Node("open", "Sin", (TensorType(DType.F32, Shape(["n"])),), (X,))
    found, reasons = measured("cpu", [open_ended, NODES[0]])
    assert set(found) == {"Sin"}
    assert "no data can be made" in reasons["open"]


def test_ten_nodes_take_at_most_the_limit() -> None:
    """With what the last one takes too long."""
    measured("cpu", NODES[:1])
    start = time.perf_counter()
    measured("cpu", NODES[:10], 0.05)
    assert time.perf_counter() - start < 0.4  # without a limit 0.54 s on a quick machine


@pytest.mark.webgpu
def test_single_nodes_are_measured_on_webgpu() -> None:
    """Those that it has kernels of; the others say that it has none."""
    found, reasons = measured("webgpu", [NODES[0], NODES[7]])
    assert "Sin" in found
    assert set(found) | set(reasons) == {"Sin", "GridSample"}
