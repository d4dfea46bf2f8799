"""Sorting, reversing, triangles, running products, and lookups and updates at many indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, known_shape, named
from rlx_ort.ir.ops.leaf import LeafBuilders, NodeArgs, Operand
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType

__all__ = [
    "SCATTER_MODES", "ArgSort", "CumMax", "CumProd", "GatherElements", "GatherNd", "IndexingBuilders", "Reverse",
    "ScatterElements", "ScatterNd", "Sort", "Trilu",
]  # fmt: skip

SCATTER_MODES = ("set", "add", "mul", "max", "min")
"""How an update changes its element. Under `set`, indices must not repeat; the other modes combine all updates."""


class Ordered(Op, operands="x:number"):
    """Base of the ops that run along one axis of numbers and keep the shape."""

    kind = ""  # a base, no op

    axis: int = -1

    def _result(self, x: TensorType) -> TensorType:
        self.normal_axis(self.axis, known_shape(self, x, "x").rank)
        return x


class Sort(Ordered):
    """The elements along an axis in order, the smallest first unless `descending`."""

    descending: bool = False


class ArgSort(Ordered):
    """The indices (i64) that sort the elements along an axis; equal elements in order of index."""

    descending: bool = False

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(DType.I64, Ordered._result(self, x).shape)


class _Running(Ordered):
    """Base of the ops that combine all elements so far along an axis, which needs a size."""

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, Ordered._result(self, x), "x")
        if not isinstance(shape[self.axis], int):
            raise GraphVerifyError(
                f"{self.kind} needs the size of axis {self.axis} of {shape}; bind the dimension first"
            )
        return x


class CumProd(_Running):
    """The running product along an axis, which needs a size; written as log2(size) products of the whole."""


class CumMax(_Running):
    """The largest element so far along an axis, which needs a size."""


class Reverse(Op, operands="x"):
    """The elements in reverse order along axes."""

    axes: tuple[int, ...]

    def _result(self, x: TensorType) -> None:
        self.axis_tuple(self.axes, known_shape(self, x, "x").rank)


class Trilu(Op, operands="x"):
    """The upper or lower triangle of the last two dimensions; zeros elsewhere.

    The triangle begins at a diagonal: 0 is the main one, above 0 lie those to the right of it.
    """

    upper: bool = False
    diagonal: int = 0

    def _result(self, x: TensorType) -> None:
        shape = known_shape(self, x, "x")
        if shape.rank < 2:
            raise GraphVerifyError(f"Trilu needs matrices, x is {shape}; reshape it to rank 2 or more")


class GatherElements(Op, operands="x indices:indices"):
    """One element for each index: `out[i][j] = x[index[i][j]][j]` for axis 0, and so on for other axes."""

    axis: int = 0

    def _result(self, x: TensorType, indices: TensorType) -> TensorType:
        _expect_same_rank(self, x, indices, "indices")
        return TensorType(x.dtype, indices.shape)


class GatherNd(Op, operands="x indices:indices"):
    """Slices at positions given by the last dimension of the indices.

    `batch_dims` leading dimensions are shared by x and the indices.
    """

    batch_dims: int = 0

    def _result(self, x: TensorType, indices: TensorType) -> TensorType:
        """Return the indices' dimensions but the last, then those of x that are not indexed."""
        shape, picked, depth = _nd(self, x, indices, self.batch_dims)
        self.expect_dims(picked[: self.batch_dims], shape[: self.batch_dims], "the indices")
        return TensorType(x.dtype, Shape((*picked[:-1], *shape[self.batch_dims + depth :])))


class ScatterElements(Op, operands="x indices:indices updates"):
    """x with one element changed for each index; the updates have the indices' shape."""

    axis: int = 0
    mode: str = named("scatter mode", SCATTER_MODES, default="set")

    def _result(self, x: TensorType, indices: TensorType, updates: TensorType) -> None:
        _check_updates(self, x, updates)
        wanted = _expect_same_rank(self, x, indices, "indices")
        self.expect_dims(_expect_same_rank(self, x, updates, "updates"), wanted, "the updates")


class ScatterNd(Op, operands="x indices:indices updates"):
    """x with slices changed at positions given by the last dimension of the indices."""

    mode: str = named("scatter mode", SCATTER_MODES, default="set")

    def _result(self, x: TensorType, indices: TensorType, updates: TensorType) -> None:
        _check_updates(self, x, updates)
        shape, picked, depth = _nd(self, x, indices, 0)
        wanted = Shape((*picked[:-1], *shape[depth:]))
        found = known_shape(self, updates, "updates")
        if found.rank != wanted.rank:
            raise GraphVerifyError(f"ScatterNd needs updates {wanted}, got {found}")
        self.expect_dims(found, wanted, "the updates")


def _expect_same_rank(op: GatherElements | ScatterElements, x: TensorType, other: TensorType, name: str) -> Shape:
    """Return the shape of an input that has the rank of x."""
    rank = known_shape(op, x, "x").rank
    op.normal_axis(op.axis, rank)
    shape = known_shape(op, other, name)
    if shape.rank != rank:
        raise GraphVerifyError(f"{op.kind} needs {name} of rank {rank} like x, got {other}")
    return shape


def _nd(op: Op, x: TensorType, indices: TensorType, batch_dims: int) -> tuple[Shape, Shape, int]:
    """Return the shapes of x and the indices, and how many dimensions of x an index selects."""
    shape, picked = known_shape(op, x, "x"), known_shape(op, indices, "indices")
    depth = picked[-1] if picked.rank else None
    room = shape.rank - batch_dims
    if not 0 <= batch_dims < min(shape.rank, picked.rank) or not isinstance(depth, int) or not 1 <= depth <= room:
        raise GraphVerifyError(
            f"{op.describe()} needs indices whose last dimension is 1 to {room}, for x {shape}; got {picked}"
        )
    return shape, picked, depth


def _check_updates(op: ScatterElements | ScatterNd, x: TensorType, updates: TensorType) -> None:
    op.same_dtype(x, updates, names=("x", "updates"))
    if op.mode != "set":
        op.expect_number(x, "x")


class IndexingBuilders(LeafBuilders):
    """Builders of sorting, lookups and updates."""

    __slots__ = ()

    def sort(self, x: Operand, axis: int = -1, descending: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Put the elements along an axis in order."""
        return self._add(Sort(axis, descending), x, **node)

    def argsort(self, x: Operand, axis: int = -1, descending: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Return the indices that sort the elements along an axis; equal elements in order of index."""
        return self._add(ArgSort(axis, descending), x, **node)

    def cumprod(self, x: Operand, axis: int = -1, **node: Unpack[NodeArgs]) -> Value:
        """Return the running product along an axis of known size."""
        return self._add(CumProd(axis), x, **node)

    def cummax(self, x: Operand, axis: int = -1, **node: Unpack[NodeArgs]) -> Value:
        """Return the largest element so far along an axis of known size."""
        return self._add(CumMax(axis), x, **node)

    def reverse(self, x: Operand, axes: int | Sequence[int], **node: Unpack[NodeArgs]) -> Value:
        """Reverse the elements along axes."""
        op = Reverse((axes,) if isinstance(axes, int) else tuple(axes))
        return self._add(op, x, **node)

    def trilu(self, x: Operand, upper: bool = False, diagonal: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Keep a triangle of the last two dimensions and put zeros elsewhere."""
        return self._add(Trilu(upper, diagonal), x, **node)

    def gather_elements(self, x: Operand, indices: Operand, axis: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Pick one element for each index along an axis; float indices drop their fraction."""
        return self._add(GatherElements(axis), x, indices, **node)

    def gather_nd(self, x: Operand, indices: Operand, batch_dims: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Pick slices at positions given by the last dimension of the indices."""
        return self._add(GatherNd(batch_dims), x, indices, **node)

    def scatter_elements(
        self, x: Operand, indices: Operand, updates: Operand, axis: int = 0, mode: str = "set", **node: Unpack[NodeArgs]
    ) -> Value:
        """Change one element for each index along an axis (`SCATTER_MODES`)."""
        value, changes = self._like(x, updates)
        return self._add(ScatterElements(axis, mode), value, indices, changes, **node)

    def scatter_nd(
        self, x: Operand, indices: Operand, updates: Operand, mode: str = "set", **node: Unpack[NodeArgs]
    ) -> Value:
        """Change slices at positions given by the last dimension of the indices (`SCATTER_MODES`)."""
        value, changes = self._like(x, updates)
        return self._add(ScatterNd(mode), value, indices, changes, **node)
