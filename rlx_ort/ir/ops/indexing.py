"""Sorting, reversing, triangles, lookups and updates at many places, and running products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.infer import axis_tuple, expect_dim, known_name, same_dtype
from rlx_ort.ir.op import Op, OpTypes, known_shape, normal_axis, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__ = [
    "SCATTER_MODES",
    "ArgSort",
    "CumMax",
    "CumProd",
    "GatherElements",
    "GatherNd",
    "IndexingBuilders",
    "Reverse",
    "ScatterElements",
    "ScatterNd",
    "Sort",
    "Trilu",
]

SCATTER_MODES = ("set", "add", "mul", "max", "min")
"""What an update does to the element it hits. Under `set`, places must not repeat; the other modes combine all."""


@dataclass(frozen=True, slots=True)
class Ordered(Op):
    """Base of the ops that run along one axis of numbers and keep the shape."""

    axis: int = -1

    arity: ClassVar[tuple[int, int | None]] = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        x = tensor_input(self, inputs, 0, "x")
        if not (x.dtype.is_float or x.dtype.is_integer):
            raise GraphVerifyError(f"{self.kind} takes numbers, not {x.dtype.value}; cast the input first")
        normal_axis(self, self.axis, known_shape(self, x, "x").rank)
        return (x,)


@dataclass(frozen=True, slots=True)
class Sort(Ordered):
    """The elements along an axis in order, the smallest first unless `descending`."""

    descending: bool = False


@dataclass(frozen=True, slots=True)
class ArgSort(Ordered):
    """The places (i64) of the elements along an axis in order; equal elements in order of place."""

    descending: bool = False

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape as i64."""
        Ordered.infer(self, inputs)
        return (TensorType(DType.I64, tensor_input(self, inputs, 0, "x").shape),)


@dataclass(frozen=True, slots=True)
class CumProd(Ordered):
    """The running product along an axis, which needs a size; written as log2(size) products of the whole."""

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        return (_running(self, inputs),)


@dataclass(frozen=True, slots=True)
class CumMax(Ordered):
    """The largest element so far along an axis, which needs a size."""

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        return (_running(self, inputs),)


@dataclass(frozen=True, slots=True)
class Reverse(Op):
    """The elements in reverse order along axes."""

    axes: tuple[int, ...]

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        x = tensor_input(self, inputs, 0, "x")
        axis_tuple(self, self.axes, known_shape(self, x, "x").rank)
        return (x,)


@dataclass(frozen=True, slots=True)
class Trilu(Op):
    """The upper or lower triangle of the last two dimensions; zeros elsewhere.

    Attributes:
        upper: which triangle stays.
        diagonal: the diagonal the triangle begins at: 0 the main one, above 0 to the right of it.
    """

    upper: bool = False
    diagonal: int = 0

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        x = tensor_input(self, inputs, 0, "x")
        shape = known_shape(self, x, "x")
        if shape.rank < 2:
            raise GraphVerifyError(f"Trilu needs matrices, x is {shape}; reshape it to rank 2 or more")
        return (x,)


@dataclass(frozen=True, slots=True)
class GatherElements(Op):
    """One element for each index: `out[i][j] = x[index[i][j]][j]` for axis 0, and so on for other axes."""

    axis: int = 0

    arity = (2, 2)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape of the indices."""
        x = tensor_input(self, inputs, 0, "x")
        indices = _indices(self, inputs, 1)
        _same_rank(self, x, indices, self.axis, "indices")
        return (TensorType(x.dtype, indices.shape),)


@dataclass(frozen=True, slots=True)
class GatherNd(Op):
    """Slices at places given by the last dimension of the indices.

    Attributes:
        batch_dims: leading dimensions that x and the indices share.
    """

    batch_dims: int = 0

    arity = (2, 2)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the indices' dimensions but the last, then those of x that are not indexed."""
        x = tensor_input(self, inputs, 0, "x")
        shape, picked, depth = _nd(self, inputs, self.batch_dims)
        for place in range(self.batch_dims):
            expect_dim(self, picked[place], shape[place], f"dimension {place} of the indices")
        return (TensorType(x.dtype, Shape((*picked[:-1], *shape[self.batch_dims + depth :]))),)


@dataclass(frozen=True, slots=True)
class ScatterElements(Op):
    """x with one element changed for each index; inputs x, indices, updates of the indices' shape.

    Attributes:
        axis: the axis the indices run along.
        mode: one of `SCATTER_MODES`.
    """

    axis: int = 0
    mode: str = "set"

    arity = (3, 3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", known_name("scatter mode", self.mode, SCATTER_MODES))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of x."""
        x, updates = _updated(self, inputs, self.mode)
        indices = _indices(self, inputs, 1)
        _same_rank(self, x, indices, self.axis, "indices")
        _same_rank(self, x, updates, self.axis, "updates")
        pairs = zip(known_shape(self, updates, "updates"), known_shape(self, indices, "indices"), strict=True)
        for place, (found, wanted) in enumerate(pairs):
            expect_dim(self, found, wanted, f"dimension {place} of the updates")
        return (x,)


@dataclass(frozen=True, slots=True)
class ScatterNd(Op):
    """x with slices changed at places given by the last dimension of the indices; inputs x, indices, updates.

    Attributes:
        mode: one of `SCATTER_MODES`.
    """

    mode: str = "set"

    arity = (3, 3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", known_name("scatter mode", self.mode, SCATTER_MODES))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of x."""
        x, updates = _updated(self, inputs, self.mode)
        shape, picked, depth = _nd(self, inputs, 0)
        wanted = Shape((*picked[:-1], *shape[depth:]))
        found = known_shape(self, updates, "updates")
        if found.rank != wanted.rank:
            raise GraphVerifyError(f"ScatterNd needs updates {wanted}, got {found}")
        for place, (dim, other) in enumerate(zip(found, wanted, strict=True)):
            expect_dim(self, dim, other, f"dimension {place} of the updates")
        return (x,)


def _running(op: Ordered, inputs: OpTypes) -> ValueType:
    Ordered.infer(op, inputs)
    x = tensor_input(op, inputs, 0, "x")
    shape = known_shape(op, x, "x")
    if not isinstance(shape[op.axis], int):
        raise GraphVerifyError(f"{op.kind} needs the size of axis {op.axis} of {shape}; bind the dimension first")
    return x


def _indices(op: Op, inputs: OpTypes, index: int) -> TensorType:
    indices = tensor_input(op, inputs, index, "indices")
    if not (indices.dtype.is_integer or indices.dtype.is_float):
        raise GraphVerifyError(f"{op.kind} needs integer indices, got {indices.dtype.value}")
    return indices


def _same_rank(op: Op, x: TensorType, other: TensorType, axis: int, name: str) -> None:
    rank = known_shape(op, x, "x").rank
    normal_axis(op, axis, rank)
    if known_shape(op, other, name).rank != rank:
        raise GraphVerifyError(f"{op.kind} needs {name} of rank {rank} like x, got {other}")


def _nd(op: Op, inputs: OpTypes, batch_dims: int) -> tuple[Shape, Shape, int]:
    """Return the shapes of x and the indices, and how many dimensions of x an index names."""
    shape = known_shape(op, tensor_input(op, inputs, 0, "x"), "x")
    picked = known_shape(op, _indices(op, inputs, 1), "indices")
    depth = picked[-1] if picked.rank else None
    room = shape.rank - batch_dims
    if not 0 <= batch_dims < min(shape.rank, picked.rank) or not isinstance(depth, int) or not 1 <= depth <= room:
        raise GraphVerifyError(
            f"{op.describe()} needs indices whose last dimension is 1 to {room}, for x {shape}; got {picked}"
        )
    return shape, picked, depth


def _updated(op: Op, inputs: OpTypes, mode: str) -> tuple[TensorType, TensorType]:
    x, updates = tensor_input(op, inputs, 0, "x"), tensor_input(op, inputs, 2, "updates")
    same_dtype(op, (x, updates), ("x", "updates"))
    if mode != "set" and not (x.dtype.is_float or x.dtype.is_integer):
        raise GraphVerifyError(f"{op.kind} with mode {mode!r} takes numbers, not {x.dtype.value}; cast x first")
    return x, updates


class IndexingBuilders(LeafBuilders):
    """Builders of sorting, lookups and updates."""

    __slots__ = ()

    def sort(self, x: Operand, axis: int = -1, descending: bool = False, *, name: str | None = None) -> Value:
        """Put the elements along an axis in order."""
        return self._add(Sort(axis, descending), self._as_value(x), name=name)

    def argsort(self, x: Operand, axis: int = -1, descending: bool = False, *, name: str | None = None) -> Value:
        """Return the places of the elements along an axis in order; equal elements in order of place."""
        return self._add(ArgSort(axis, descending), self._as_value(x), name=name)

    def cumprod(self, x: Operand, axis: int = -1, *, name: str | None = None) -> Value:
        """Return the running product along an axis of known size."""
        return self._add(CumProd(axis), self._as_value(x), name=name)

    def cummax(self, x: Operand, axis: int = -1, *, name: str | None = None) -> Value:
        """Return the largest element so far along an axis of known size."""
        return self._add(CumMax(axis), self._as_value(x), name=name)

    def reverse(self, x: Operand, axes: int | Sequence[int], *, name: str | None = None) -> Value:
        """Reverse the elements along axes."""
        op = Reverse((axes,) if isinstance(axes, int) else tuple(axes))
        return self._add(op, self._as_value(x), name=name)

    def trilu(self, x: Operand, upper: bool = False, diagonal: int = 0, *, name: str | None = None) -> Value:
        """Keep a triangle of the last two dimensions and put zeros elsewhere."""
        return self._add(Trilu(upper, diagonal), self._as_value(x), name=name)

    def gather_elements(self, x: Operand, indices: Operand, axis: int = 0, *, name: str | None = None) -> Value:
        """Pick one element for each index along an axis; float indices drop their fraction."""
        return self._add(GatherElements(axis), self._as_value(x), self._as_value(indices), name=name)

    def gather_nd(self, x: Operand, indices: Operand, batch_dims: int = 0, *, name: str | None = None) -> Value:
        """Pick slices at places given by the last dimension of the indices."""
        return self._add(GatherNd(batch_dims), self._as_value(x), self._as_value(indices), name=name)

    def scatter_elements(
        self,
        x: Operand,
        indices: Operand,
        updates: Operand,
        axis: int = 0,
        mode: str = "set",
        *,
        name: str | None = None,
    ) -> Value:
        """Change one element for each index along an axis (`SCATTER_MODES`)."""
        value = self._as_value(x)
        op = ScatterElements(axis, mode)
        return self._add(op, value, self._as_value(indices), self._as_value(updates, value), name=name)

    def scatter_nd(
        self, x: Operand, indices: Operand, updates: Operand, mode: str = "set", *, name: str | None = None
    ) -> Value:
        """Change slices at places given by the last dimension of the indices (`SCATTER_MODES`)."""
        value = self._as_value(x)
        op = ScatterNd(mode)
        return self._add(op, value, self._as_value(indices), self._as_value(updates, value), name=name)
