"""Leaves: inputs, parameters, constants and captures. They compute nothing and cost nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import GraphCore, Value
from rlx_ort.ir.dtype import DType, promote
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType, fits, refined

A = TypeVar("A")
P = ParamSpec("P")
Operand: TypeAlias = "Value | npt.ArrayLike"
"""An operand for the builders: a value, or a number or array that becomes a constant."""


class NodeArgs(TypedDict, total=False):
    """Keywords of every builder that adds one value.

    `name` is the node's, by default the op's kind in lower case; a number is added if it is taken. `shape` is a
    declared shape, checked against the inferred one; names and sizes that it adds are kept.
    """

    name: str | None
    shape: Iterable[Dim] | None


def preset(
    builder: Callable[Concatenate[Any, A, P], Value], argument: A, doc: str
) -> Callable[Concatenate[Any, P], Value]:
    """Return a builder with its first argument set, as a method: `relu(x)` is `activation("relu", x)`."""

    def method(self: Any, /, *args: P.args, **keywords: P.kwargs) -> Value:
        return builder(self, argument, *args, **keywords)

    signature = inspect.signature(builder)
    first, _, *others = signature.parameters.values()
    method.__doc__ = doc
    method.__signature__ = signature.replace(parameters=[first, *others])  # type: ignore[attr-defined]  # help() reads it
    return method


class _Leaf(Op):
    """Base of the leaves."""

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
        self,
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
        value = self._named_leaf(name, Param(name, kind, mutable))
        if tensor is not None:
            self.weights[name] = tensor
        return value

    def constant(self, data: npt.ArrayLike | TensorData, dtype: DType | str | None = None, name: str = "") -> Value:
        """Add a tensor whose values are part of the graph; copies writeable arrays, as `param` does."""
        if not isinstance(data, TensorData):
            data = TensorData.owned(data, None if dtype is None else DType.parse(dtype))
        return self.append(Constant(data), name=name or "constant")

    @property
    def input_types(self) -> dict[str, ValueType]:
        """Input name -> type, in order."""
        return {value.name: value.type for value in self.inputs}

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
        return self.add_node(op, (), name=name, output_names=(name,))[0]

    def _add(
        self,
        op: Op,
        *operands: Operand | None,
        shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        name: str | None = None,
    ) -> Value:
        """Append a node with one result; operands that are None are left out.

        A declared shape or dtype is checked against the inferred one, and the shape may add names and sizes to it.
        """
        inputs = [self._as_value(item) for item in operands if item is not None]
        name = name or getattr(op, "function", None)  # an activation is named `gelu`, not `activation`
        if shape is None and dtype is None:
            return self.append(op, *inputs, name=name)
        (inferred,) = op.infer([value.type for value in inputs])
        return self.add_node(op, inputs, name=name, types=[_declared(op, inferred, shape, dtype)])[0]

    def _like(self, first: Operand, *rest: Operand | None) -> list[Value]:
        """Return operands as values: numbers and lists take the dtype of the first one, None is left out."""
        value = self._as_value(first)
        return [value, *(self._as_value(item, value) for item in rest if item is not None)]

    def _pair(self, lhs: Any, rhs: Any) -> tuple[Value, Value]:
        """Return two operands as values of one dtype; adds casts where needed."""
        left = self._as_value(lhs, rhs if isinstance(rhs, Value) else None)
        right = self._as_value(rhs, left)
        try:
            dtype = promote(left.dtype, right.dtype)
        except ValueError as err:
            raise GraphVerifyError(str(err)) from err
        return left.cast(dtype), right.cast(dtype)

    def _as_value(self, item: Any, like: Value | None = None) -> Value:
        """Return `item` as a value: numbers and arrays become constants.

        An array keeps its dtype. Plain numbers and lists of them take the dtype of `like`; fractions become f32 if
        there is no `like` or it is an integer.
        """
        if isinstance(item, Value):
            return item
        if isinstance(item, (np.ndarray, np.generic, TensorData)):
            return self.constant(item)
        array = np.asarray(item)
        if like is not None and (array.dtype.kind != "f" or like.dtype.is_float or like.dtype.is_complex):
            return self.constant(array, like.dtype)
        return self.constant(array, DType.F32 if array.dtype.kind == "f" else None)


def _declared(op: Op, inferred: ValueType, shape: Iterable[Dim] | None, dtype: DType | str | None) -> ValueType:
    """Return the inferred type with the declared sizes and names."""
    if not isinstance(inferred, TensorType):
        raise GraphVerifyError(f"{op.kind} gives no tensor, so it takes no declared shape")
    wanted = None if shape is None else Shape(shape)
    if dtype is not None and DType.parse(dtype) is not inferred.dtype:
        raise GraphVerifyError(f"{op.kind} is declared {DType.parse(dtype).value} and gives {inferred.dtype.value}")
    if wanted is None or inferred.shape is None:
        return TensorType(inferred.dtype, inferred.shape if wanted is None else wanted)
    if not fits(inferred.shape, wanted):
        raise GraphVerifyError(f"{op.kind} is declared with shape {wanted} and gives {inferred.shape}")
    return TensorType(inferred.dtype, refined(wanted, inferred.shape))
