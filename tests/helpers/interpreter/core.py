"""The walk over a graph, and the table of rules that each op is evaluated by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from rlx_ort import DType, Graph, Op
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.ops.leaf import Capture, Constant, Input, Param
from rlx_ort.ir.types import TensorType

__all__ = ["RULES", "Array", "evaluate", "result_dtype", "rule", "run_body", "sized", "wide"]

Array: TypeAlias = npt.NDArray[Any]
Rule: TypeAlias = Callable[..., Any]
RULES: dict[type[Op], Rule] = {}
"""Op class -> (node, op, inputs...) -> the result, or a tuple of the results."""

F = TypeVar("F", bound=Rule)


def rule(*ops: type[Op]) -> Callable[[F], F]:
    """Declare the decorated function to evaluate some op classes."""

    def declare(function: F) -> F:
        for op in ops:
            RULES[op] = function
        return function

    return declare


def wide(array: npt.ArrayLike) -> Array:
    """Return floats of any width as f64, other elements as they are."""
    values = np.asarray(array)
    known = DType.from_numpy(values.dtype)
    return values.astype(np.float64) if known.is_float else values


def sized(node: Node, values: npt.ArrayLike, index: int = 0) -> Array:
    """Return a result in the dtype that its type declares: f64 for floats, the very dtype for others."""
    dtype = result_dtype(node, index)
    return np.asarray(values).astype(np.float64 if dtype.is_float else dtype.numpy)


def result_dtype(node: Node, index: int = 0) -> DType:
    """Return the declared dtype of a result."""
    kind = node.types[index]
    assert isinstance(kind, TensorType)
    return kind.dtype


def evaluate(graph: Graph, feeds: Mapping[str, npt.ArrayLike]) -> list[Array]:
    """Return the outputs of a graph whose weights have data."""
    return run_body(graph, [feeds[value.name] for value in graph.inputs])


def run_body(graph: Graph, given: Sequence[npt.ArrayLike], captured: Sequence[Array | None] = ()) -> list[Array]:
    """Return the outputs of a graph for the values of its inputs, in order."""
    formal = iter(given)
    values: dict[Ref, Array] = {}
    for node in graph.nodes:
        for index, result in enumerate(_results(graph, node, values, formal, captured)):
            values[Ref(node.id, index)] = result
    return [values[value.ref] for value in graph.outputs]


def _results(
    graph: Graph, node: Node, values: Mapping[Ref, Array], formal: Any, captured: Sequence[Array | None]
) -> Sequence[Array]:
    op = node.op
    if isinstance(op, Input):
        return [wide(next(formal))]
    if isinstance(op, Constant):
        return [wide(op.data.numpy())]
    if isinstance(op, Param):
        return [wide(graph.weights[op.name].numpy())]
    if isinstance(op, Capture):
        found = captured[op.index]
        assert found is not None
        return [found]
    inputs = [None if ref is None else values[ref] for ref in node.inputs]
    with np.errstate(all="ignore"):
        results = RULES[type(op)](node, op, *inputs)
    return results if isinstance(results, tuple) else (np.asarray(results),)
