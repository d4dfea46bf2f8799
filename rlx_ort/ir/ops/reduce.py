"""Reductions along axes: sums, softmax, running sums, and the indices of the largest elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, known_shape, named
from rlx_ort.ir.ops.leaf import LeafBuilders, NodeArgs, Operand, preset
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType

__all__ = ["REDUCTIONS", "ArgMax", "ArgMin", "Cumsum", "Reduce", "ReduceBuilders", "Softmax", "TopK"]

REDUCTIONS = ("sum", "mean", "max", "min", "prod")
"""Names of the reductions."""


class Reduce(Op, operands="x"):
    """A reduction over axes, which become 1 or are removed; without axes the input is unchanged."""

    function: str = named("reduction", REDUCTIONS)
    axes: tuple[int, ...]
    keep_dim: bool = False

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(x.dtype, _reduced(self, x, self.axes, self.keep_dim))


class Softmax(Op, operands="x"):
    """exp(x) along an axis, scaled to the sum 1."""

    axis: int = -1

    def _result(self, x: TensorType) -> None:
        self.expect_float(x, "x")
        if x.shape is not None:
            self.normal_axis(self.axis, x.shape.rank)


class Cumsum(Op, operands="x"):
    """The running sum along an axis; `exclusive` leaves the element itself out, `reverse` runs from the end."""

    axis: int
    exclusive: bool = False
    reverse: bool = False

    def _result(self, x: TensorType) -> None:
        self.expect_number(x)
        if x.shape is not None:
            self.normal_axis(self.axis, x.shape.rank)


class TopK(Op, operands="x"):
    """Indices of the k largest elements along the last axis, largest first; equal elements in order of index."""

    k: int
    dtype: DType = DType.I64

    def _result(self, x: TensorType) -> TensorType:
        self.expect_number(x)
        shape = known_shape(self, x, "x")
        size = shape[self.normal_axis(-1, shape.rank)]
        if self.k < 0 or (isinstance(size, int) and self.k > size):
            raise GraphVerifyError(f"TopK of {self.k} along a dimension of {size}")
        return TensorType(self.dtype, Shape((*shape[:-1], self.k)))


class _Extremum(Op, operands="x"):
    """Base of the ops that return the index (i64) of an element along an axis, the first one of equals."""

    axis: int = -1
    keep_dim: bool = False

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(DType.I64, _reduced(self, x, (self.axis,), self.keep_dim))


class ArgMax(_Extremum):
    """The index (i64) of the largest element along an axis, the first one of equals."""


class ArgMin(_Extremum):
    """The index (i64) of the smallest element along an axis, the first one of equals."""


def _reduced(op: Op, x: TensorType, axes: Sequence[int], keep_dim: bool) -> Shape:
    op.expect_number(x)
    shape = known_shape(op, x, "x")
    gone = op.axis_tuple(axes, shape.rank)
    if keep_dim:
        return Shape(1 if axis in gone else dim for axis, dim in enumerate(shape))
    return Shape(dim for axis, dim in enumerate(shape) if axis not in gone)


def _reduction(
    self: ReduceBuilders,
    function: str,
    x: Operand,
    axes: int | Sequence[int] | None = None,
    keep_dim: bool = False,
    **node: Unpack[NodeArgs],
) -> Value:
    return self.reduce(x, function, axes, keep_dim, **node)


class ReduceBuilders(LeafBuilders):
    """Builders of the reductions."""

    __slots__ = ()

    def reduce(
        self,
        input: Operand,
        op: str,
        axes: int | Sequence[int] | None,
        keep_dim: bool = False,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Reduce over axes by name (`REDUCTIONS`); None means all axes, an empty list none."""
        x = self._as_value(input)
        chosen = range(x.rank) if axes is None else (axes,) if isinstance(axes, int) else axes
        return self._add(Reduce(op, tuple(chosen), keep_dim), x, **node)

    sum = preset(_reduction, "sum", "Return the sum over axes.")
    mean = preset(_reduction, "mean", "Return the mean over axes; integers drop the fraction.")
    max = preset(_reduction, "max", "Return the largest element over axes.")
    min = preset(_reduction, "min", "Return the smallest element over axes.")
    prod = preset(_reduction, "prod", "Return the product over axes.")

    def softmax(self, input: Operand, axis: int = -1, **node: Unpack[NodeArgs]) -> Value:
        """Return the softmax along an axis."""
        return self._add(Softmax(axis), input, **node)

    def cumsum(
        self, input: Operand, axis: int, exclusive: bool = False, reverse: bool = False, **node: Unpack[NodeArgs]
    ) -> Value:
        """Return the running sum along an axis."""
        return self._add(Cumsum(axis, exclusive, reverse), input, **node)

    def topk(self, x: Operand, k: int, dtype: DType | str = DType.I64, **node: Unpack[NodeArgs]) -> Value:
        """Return the indices of the k largest elements along the last axis, largest first."""
        return self._add(TopK(k, DType.parse(dtype)), x, **node)

    def argmax(self, x: Operand, axis: int = -1, keep_dim: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the index of the largest element along an axis, the first one of equals."""
        return self._add(ArgMax(axis, keep_dim), x, **node)

    def argmin(self, x: Operand, axis: int = -1, keep_dim: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the index of the smallest element along an axis, the first one of equals."""
        return self._add(ArgMin(axis, keep_dim), x, **node)
