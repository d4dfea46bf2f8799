"""Chains of one operator over (rows, width), by the name that its rows have in a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rlx_ort.calibration.graphs import Chain
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value

__all__ = ["NODES_A_LINK", "elementwise"]

NODES_A_LINK: Mapping[str, int] = {"Where": 2, "Cast": 2, "Concat": 3}
"""Nodes of about one cost each that a link is made of, and that share its time; one where nothing is said."""


def elementwise(op_type: str, links: int, width: int, dtype: DType = DType.F32) -> Graph:
    """Return a chain of an op over (rows, width); `_LINKS` says how each op is chained."""
    chain = Chain(op_type.lower(), 3 if op_type == "TransposeRows" else 2, dtype)
    first = chain.value
    link = _LINKS.get(op_type)
    for _ in range(links):
        chain.value = _unary(chain, op_type) if link is None else link(chain, first, width)
    return chain.done()


def _unary(chain: Chain, op_type: str) -> Value:
    return chain.op(op_type, [chain.value], chain.dims)


def _binary(op_type: str) -> Callable[[Chain, Value, int], Value]:
    return lambda chain, first, width: chain.op(op_type, [chain.value, first], chain.dims)


def _broadcast(chain: Chain, first: Value, width: int) -> Value:
    return chain.op("Add", [chain.value, chain.weight((width,), 0.1)], chain.dims)


def _pow(chain: Chain, first: Value, width: int) -> Value:
    exponent = chain.graph.constant(np.array([1.5], chain.dtype.numpy))
    return chain.op("Pow", [chain.value, exponent], chain.dims)


def _where(chain: Chain, first: Value, width: int) -> Value:
    mask = chain.op("Greater", [chain.value, first], chain.dims, dtype=DType.BOOL)
    return chain.op("Where", [mask, chain.value, first], chain.dims)


def _cast(chain: Chain, first: Value, width: int) -> Value:
    there = chain.op("Cast", [chain.value], chain.dims, {"to": 6}, dtype=DType.I32)
    return chain.op("Cast", [there], chain.dims, {"to": 1})


def _softmax(chain: Chain, first: Value, width: int) -> Value:
    return chain.op("Softmax", [chain.value], chain.dims, {"axis": -1})


def _layer_norm(chain: Chain, first: Value, width: int) -> Value:
    scale, bias = chain.weight((width,), 1.0), chain.weight((width,), 1.0)
    return chain.op("LayerNormalization", [chain.value, scale, bias], chain.dims, {"axis": -1})


def _reduce(op_type: str, axis: int) -> Callable[[Chain, Value, int], Value]:
    """Return what reduces the first tensor anew each time, and adds up the small results: nothing large is written."""

    def link(chain: Chain, first: Value, width: int) -> Value:
        dims: list[int | str] = ["d0", 1] if axis else [1, width]
        small = chain.op(op_type, [first, chain.graph.constant(np.array([axis], np.int64))], dims, {"keepdims": 1})
        return small if chain.value is first else chain.op("Add", [chain.value, small], dims)

    return link


def _transpose(chain: Chain, first: Value, width: int) -> Value:
    chain.dims.reverse()
    return chain.op("Transpose", [chain.value], chain.dims, {"perm": (1, 0)})


def _transpose_rows(chain: Chain, first: Value, width: int) -> Value:
    """Exchange the axes before the last one, as attention does with its heads: whole rows of 64 are moved."""
    chain.dims = [chain.dims[1], chain.dims[0], chain.dims[2]]
    return chain.op("Transpose", [chain.value], chain.dims, {"perm": (1, 0, 2)})


def _gather(chain: Chain, first: Value, width: int) -> Value:
    rows = chain.graph.inputs
    index = next((value for value in rows if value.name == "rows"), None)
    if index is None:
        index = chain.graph.input("rows", ["d0"], DType.I64)
    return chain.op("Gather", [chain.value, index], chain.dims, {"axis": 0})


def _gather_added(chain: Chain, first: Value, width: int) -> Value:
    """Add what was looked up to what it was looked up in, as models do: another lookup finds more in the caches."""
    return chain.op("Add", [_gather(chain, first, width), chain.value], chain.dims)


def _concat(chain: Chain, first: Value, width: int) -> Value:
    half = chain.graph.constant(np.array([width // 2], np.int64))
    zero, end, axis = (chain.graph.constant(np.array([number], np.int64)) for number in (0, width, 1))
    left = chain.op("Slice", [chain.value, zero, half, axis], ["d0", width // 2])
    right = chain.op("Slice", [chain.value, half, end, axis], ["d0", width // 2])
    return chain.op("Concat", [right, left], chain.dims, {"axis": 1})


def _reshape(chain: Chain, first: Value, width: int) -> Value:
    shape = chain.graph.constant(np.array([-1, width], np.int64))
    return chain.op("Reshape", [chain.value, shape], chain.dims)


_LINKS: dict[str, Callable[[Chain, Value, int], Value]] = {
    "Add": _binary("Add"),
    "Mul": _binary("Mul"),
    "Div": _binary("Div"),
    "AddRow": _broadcast,
    "Pow": _pow,
    "Where": _where,
    "Cast": _cast,
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "ReduceMean": _reduce("ReduceMean", 1),
    "SumColumns": _reduce("ReduceSum", 0),
    "MaxColumns": _reduce("ReduceMax", 0),
    "Transpose": _transpose,
    "TransposeRows": _transpose_rows,
    "Gather": _gather,
    "GatherAdded": _gather_added,
    "Concat": _concat,
    "Reshape": _reshape,
}
