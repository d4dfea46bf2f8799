"""Graphs of which a whole run is timed, where `graphs` has chains whose links are."""

from __future__ import annotations

import numpy as np

from rlx_ort.calibration.graphs import Chain
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = [
    "additions",
    "copied",
    "lone_product",
    "lookup",
    "readback",
    "reduced",
    "transfers",
    "turned_sign",
    "upload",
]


def transfers(inputs: int, outputs: int) -> Graph:
    """Return a graph of one tiny op an output, with so many inputs; extra inputs are added to the first op."""
    graph = Graph("transfers")
    values = [graph.input(f"x{index}", [4]) for index in range(inputs)]
    kind = TensorType(DType.F32, Shape([4]))
    total = values[0]
    for value in values[1:]:
        (total,) = graph.onnx_node("Add", [total, value], types=[kind])
    results = []
    for _ in range(outputs):
        (total,) = graph.onnx_node("Neg", [total], types=[kind])
        results.append(total)
    graph.outputs = results
    return graph


def upload() -> Graph:
    """Return a graph whose large tensor comes from the host."""
    graph = Graph("upload")
    graph.outputs = [_first_of(graph, graph.input("data", ["d0"]))]
    return graph


def readback() -> Graph:
    """Return a graph that makes a large tensor, which goes to the host."""
    chain = Chain("readback", 1)
    chain.graph.outputs = [chain.value]
    return chain.graph


def turned_sign(*, whole: bool) -> Graph:
    """Return a graph that turns the sign of a large input, whose result goes to the host, or one element of it."""
    graph = Graph("turned_sign")
    kind = TensorType(DType.F32, Shape(["d0"]))
    (value,) = graph.onnx_node("Neg", [graph.input("data", ["d0"])], types=[kind])
    graph.outputs = [value if whole else _first_of(graph, value)]
    return graph


def lone_product(m: int, k: int, n: int) -> Graph:
    """Return one product of an input (m, k) and a weight (k, n)."""
    graph = Graph("lone")
    x, kind = graph.input("x", [m, k]), TensorType(DType.F32, Shape([m, n]))
    graph.outputs = list(graph.onnx_node("MatMul", [x, _weight(graph, k, n)], types=[kind]))
    return graph


def copied(side: int, lookups: int, *, multiplied: bool) -> Graph:
    """Return rows that are looked up in a table, put together to (m, side) and, if `multiplied`, multiplied.

    The table is an input, and so are the numbers of the rows of each lookup; the weight is square.
    """
    graph = Graph("copied")
    table, narrow = graph.input("table", ["r", side // lookups]), TensorType(DType.F32, Shape(["m", side // lookups]))
    wide = TensorType(DType.F32, Shape(["m", side]))
    numbers = [graph.input(f"rows{at}", ["m"], DType.I64) for at in range(lookups)]
    parts = [graph.onnx_node("Gather", [table, rows], types=[narrow])[0] for rows in numbers]
    (rows,) = graph.onnx_node("Concat", parts, {"axis": 1}, types=[wide])
    if multiplied:
        (rows,) = graph.onnx_node("MatMul", [rows, _weight(graph, side, side)], types=[wide])
    graph.outputs = [rows]
    return graph


def additions(links: int) -> Graph:
    """Return a chain of additions to an input (n), whose first element is the output."""
    graph = Graph("additions")
    first = value = graph.input("x", ["n"])
    for _ in range(links):
        (value,) = graph.onnx_node("Add", [value, first], types=[TensorType(DType.F32, Shape(["n"]))])
    graph.outputs = [_first_of(graph, value)]
    return graph


def lookup() -> Graph:
    """Return a graph that looks rows up in a table, both of which are inputs; one element of them is the output."""
    graph = Graph("lookup")
    table, rows = graph.input("table", ["r", "w"]), graph.input("rows", ["n"], DType.I64)
    (found,) = graph.onnx_node("Gather", [table, rows], types=[TensorType(DType.F32, Shape(["n", "w"]))])
    start, end = (graph.constant(np.full(2, at, np.int64)) for at in (0, 1))
    graph.outputs = list(graph.onnx_node("Slice", [found, start, end], types=[TensorType(DType.F32, Shape([1, 1]))]))
    return graph


def reduced(op_type: str) -> Graph:
    """Return a graph that reduces all rows of an input (r, w) to one, (1, w)."""
    graph = Graph("reduced")
    axis = graph.constant(np.zeros(1, np.int64))
    kind = TensorType(DType.F32, Shape([1, "w"]))
    graph.outputs = list(graph.onnx_node(op_type, [graph.input("x", ["r", "w"]), axis], types=[kind]))
    return graph


def _first_of(graph: Graph, value: Value) -> Value:
    """Return the first element of a vector."""
    ends = [graph.constant(np.full(1, end, np.int64)) for end in (0, 1)]
    return graph.onnx_node("Slice", [value, *ends], types=[TensorType(DType.F32, Shape([1]))])[0]


def _weight(graph: Graph, k: int, n: int) -> Value:
    """Add a weight (k, n) to a graph."""
    data = np.resize(np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32), (k, n))
    graph.weights["w"] = TensorData.from_array(data * np.float32(k**-0.5), DType.F32)
    return graph.param("w", [k, n])
