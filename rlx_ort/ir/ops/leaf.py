"""Leaves: inputs, parameters, constants and captures. They compute nothing and cost nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType


class _Leaf(Op):
    arity = (0, 0)
    is_leaf = True

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type that is a field of the leaf."""
        leaf: Any = self
        return (leaf.type,)


class Input(_Leaf):
    """Data fed to every run under a name."""

    name: str
    type: ValueType


class Param(_Leaf):
    """A weight: set under a name before the first run and kept. Its data, if any yet, is in `Graph.weights`.

    A `mutable` one changes often. Sessions take it as an input, so a change needs no new session, but kernels cannot
    prepack it.
    """

    name: str
    type: TensorType
    mutable: bool = False


class Constant(_Leaf):
    """A tensor written into the graph."""

    data: TensorData

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the data."""
        return (TensorType(self.data.dtype, Shape(self.data.shape)),)

    def describe(self) -> str:
        """Return the type only; the data may be long."""
        return f"Constant({self.infer(())[0]})"


class Capture(_Leaf):
    """In a body: a value of the enclosing graph, which the node that owns the body has as an extra input.

    `index` is its place among the inputs of the owning node.
    """

    index: int
    type: ValueType


@builder
def input(graph: Graph, name: str, shape: Iterable[Dim], dtype: DType | str = DType.F32) -> Value:
    """Add an input of every run.

    Raises:
        GraphVerifyError: the graph already has an input or parameter of that name.
    """
    return _named_leaf(graph, name, Input(name, TensorType(DType.parse(dtype), Shape(shape))))


@builder
def param(
    graph: Graph,
    name: str,
    shape: Iterable[Dim],
    dtype: DType | str = DType.F32,
    data: npt.ArrayLike | TensorData | None = None,
    *,
    mutable: bool = False,
) -> Value:
    """Add a weight; `data` gives it an initial value, else it must be set before the first run.

    Writeable arrays are copied. `TensorData` and read-only arrays, such as memory maps, are shared.

    A `mutable` weight may change between runs at no cost, but kernels that use it are slower.

    Raises:
        GraphVerifyError: the name is taken, a dimension has no size, or the data has another shape.
    """
    kind = TensorType(DType.parse(dtype), Shape(shape))
    if kind.shape is None or not kind.shape.is_static:
        raise GraphVerifyError(f"param {name!r} has shape {kind.shape}; a weight needs a size in every dimension")
    tensor = data if data is None or isinstance(data, TensorData) else TensorData.owned(data, kind.dtype)
    if tensor is not None and tensor.dtype is not kind.dtype:
        raise GraphVerifyError(f"param {name!r} is declared {kind.dtype.value}, its data is {tensor.dtype.value}")
    if tensor is not None and tensor.shape != kind.shape:
        raise GraphVerifyError(f"param {name!r} is declared {kind.shape}, its data has shape {tensor.shape}")
    value = _named_leaf(graph, name, Param(name, kind, mutable))
    if tensor is not None:
        graph.weights[name] = tensor
    return value


@builder
def constant(graph: Graph, data: npt.ArrayLike | TensorData, dtype: DType | str | None = None, name: str = "") -> Value:
    """Add a tensor whose values are part of the graph; copies writeable arrays, as `param` does."""
    if not isinstance(data, TensorData):
        data = TensorData.owned(data, None if dtype is None else DType.parse(dtype))
    return graph.append(Constant(data), name=name or "constant")


def _named_leaf(graph: Graph, name: str, op: Op) -> Value:
    if name in graph._names:
        raise GraphVerifyError(f"the name {name!r} is already taken in graph {graph.name!r}; choose another")
    return graph.add_node(op, (), name=name, output_names=(name,))[0]
