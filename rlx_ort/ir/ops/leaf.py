"""Leaves: what a graph reads. They compute nothing and cost nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import GraphCore, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["Capture", "Constant", "Input", "LeafBuilders", "Param"]


@dataclass(frozen=True, slots=True)
class Leaf(Op):
    """Base of the leaves."""

    arity = (0, 0)

    @property
    def is_leaf(self) -> bool:
        """True: a leaf is never a kernel."""
        return True

    def flops(self, inputs: OpTypes, outputs: OpTypes) -> int:
        """Return 0."""
        return 0

    def bytes_moved(self, inputs: OpTypes, outputs: OpTypes) -> int:
        """Return 0: whoever reads the data pays for it."""
        return 0


@dataclass(frozen=True, slots=True)
class Input(Leaf):
    """Data fed to every run under a name."""

    name: str
    type: ValueType

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the declared type."""
        return (self.type,)


@dataclass(frozen=True, slots=True)
class Param(Leaf):
    """A weight: set under a name before the first run and kept. Its data, if any yet, is in `Graph.weights`."""

    name: str
    type: TensorType

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the declared type."""
        return (self.type,)


@dataclass(frozen=True, slots=True)
class Constant(Leaf):
    """A tensor written into the graph."""

    data: TensorData

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the data."""
        return (TensorType(self.data.dtype, Shape(self.data.shape)),)

    def describe(self) -> str:
        """Return the type only; the data may be long."""
        return f"Constant({self.infer(())[0]})"


@dataclass(frozen=True, slots=True)
class Capture(Leaf):
    """In a body: a value of the enclosing graph, which the node that owns the body has as an extra input.

    Attributes:
        index: place among the owning node's inputs.
    """

    index: int
    type: ValueType

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the captured value."""
        return (self.type,)


class LeafBuilders(GraphCore):
    """Builders of the leaves."""

    __slots__ = ()

    def input(self, name: str, shape: Iterable[Dim], dtype: DType | str = DType.F32) -> Value:
        """Add an input of every run.

        Raises:
            GraphVerifyError: the graph already has an input or parameter of that name.
        """
        return self._named_leaf(name, Input(name, TensorType(DType.parse(dtype), Shape(shape))))

    def param(
        self, name: str, shape: Iterable[Dim], dtype: DType | str = DType.F32, data: npt.ArrayLike | None = None
    ) -> Value:
        """Add a weight; `data` gives it an initial value, else it must be set before the first run.

        Raises:
            GraphVerifyError: the name is taken, a dimension has no size, or the data has another shape.
        """
        kind = TensorType(DType.parse(dtype), Shape(shape))
        if kind.shape is None or not kind.shape.is_static:
            raise GraphVerifyError(f"param {name!r} has shape {kind.shape}; a weight needs a size in every dimension")
        tensor = None if data is None else TensorData.from_array(data, kind.dtype)
        if tensor is not None and tensor.shape != kind.shape:
            raise GraphVerifyError(f"param {name!r} is declared {kind.shape}, its data has shape {tensor.shape}")
        value = self._named_leaf(name, Param(name, kind))
        if tensor is not None:
            self.weights[name] = tensor
        return value

    def constant(self, data: npt.ArrayLike | TensorData, dtype: DType | str | None = None, name: str = "") -> Value:
        """Add a tensor whose values are part of the graph."""
        if not isinstance(data, TensorData):
            data = TensorData.from_array(data, None if dtype is None else DType.parse(dtype))
        return self.add(Constant(data), name=name or "constant")

    @property
    def inputs(self) -> list[Value]:
        """The inputs, in the order they were added."""
        return [self.value(node.id) for node in self.nodes if isinstance(node.op, Input)]

    @property
    def params(self) -> list[Value]:
        """The parameters, in the order they were added."""
        return [self.value(node.id) for node in self.nodes if isinstance(node.op, Param)]

    def _named_leaf(self, name: str, op: Op) -> Value:
        if name in self._names:
            raise GraphVerifyError(f"the name {name!r} is already taken in graph {self.name!r}; choose another")
        return self.add_node(op, (), name=name)[0]

    def _as_value(self, item: Any, like: Value | None = None) -> Value:
        """Return `item` as a value: a Python scalar or array becomes a constant, of the dtype of `like`."""
        if isinstance(item, Value):
            return item
        dtype = None
        if like is not None and isinstance(item, (int, float, bool)):
            fractional = isinstance(item, float) and not like.dtype.is_float and not like.dtype.is_complex
            dtype = DType.F32 if fractional else like.dtype
        elif isinstance(item, float):
            dtype = DType.F32
        return self.constant(item, dtype)
