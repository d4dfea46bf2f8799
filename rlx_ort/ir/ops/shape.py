"""Ops that move data and compute nothing, sorting and running products, and lookups and updates at many indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType, promote
from rlx_ort.ir.op import Op, OpTypes, join_dims, known_shape, named, reshaped, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, NodeArgs, Operand
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType

SCATTER_MODES = ("set", "add", "mul", "max", "min")
"""How an update changes its element. Under `set`, indices must not repeat; the other modes combine all updates."""
_PAD_MODES = ("constant", "reflect", "edge")


class Reshape(Op, operands="x"):
    """The same elements with other dimensions; one may be -1. A size 0 means 0, not "as it was"."""

    dims: tuple[Dim, ...]

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(x.dtype, reshaped(self, x.shape, self.dims))


class Transpose(Op, operands="x"):
    """The axes in another order: axis i of the result is axis `perm[i]` of the input."""

    perm: tuple[int, ...]

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        perm = self.axis_tuple(self.perm, shape.rank)
        if len(perm) != shape.rank:
            raise GraphVerifyError(f"Transpose of {shape} needs {shape.rank} axes, got {self.perm}")
        return TensorType(x.dtype, Shape(shape[axis] for axis in perm))


class Expand(Op, operands="x"):
    """The input repeated along dimensions of size 1, by numpy's rules; -1 keeps a dimension."""

    dims: tuple[Dim, ...]

    def target(self, source: Shape) -> tuple[Dim, ...]:
        """Return the dimensions with each -1 replaced by the input's."""
        offset = len(self.dims) - source.rank
        if offset < 0 or any(dim == -1 for dim in self.dims[:offset]):
            raise GraphVerifyError(f"Expand cannot turn {source} into {list(self.dims)}")
        return tuple(source[place - offset] if dim == -1 else dim for place, dim in enumerate(self.dims))

    def _result(self, x: TensorType) -> TensorType:
        source = known_shape(self, x, "x")
        target = Shape(self.target(source))
        result = self.broadcast((source, target))
        for dim, wanted in zip(result or (), target, strict=True):
            self.expect_dim(dim, wanted, "a dimension of the result")
        return TensorType(x.dtype, target)


class Concat(Op):
    """Tensors of one dtype joined along an axis."""

    axis: int

    arity = (1, None)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape with the sizes along the axis summed."""
        names = [f"input {index}" for index in range(len(inputs))]
        tensors = [tensor_input(self, inputs, place, name) for place, name in enumerate(names)]
        dtype = self.same_dtype(*tensors, names=names)
        shapes = [known_shape(self, *named) for named in zip(tensors, names, strict=True)]
        axis = self.normal_axis(self.axis, shapes[0].rank)
        if any(shape.rank != shapes[0].rank for shape in shapes):
            raise GraphVerifyError(f"Concat needs inputs of one rank, got {', '.join(map(str, shapes))}")
        dims: list[Dim] = []
        for place, column in enumerate(zip(*shapes, strict=True)):
            if place == axis:
                sizes = [dim for dim in column if isinstance(dim, int)]
                dims.append(sum(sizes) if len(sizes) == len(column) else column[0] if len(column) == 1 else None)
                continue
            for dim in column[1:]:
                self.expect_dim(dim, join_dims(column), f"dimension {place} of every input")
            dims.append(join_dims(column))
        return (TensorType(dtype, Shape(dims)),)


class Narrow(Op, operands="x"):
    """`length` elements from `start` along one axis."""

    axis: int
    start: int
    length: int

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        axis = self.normal_axis(self.axis, shape.rank)
        size = shape[axis]
        if self.start < 0 or self.length < 0 or (isinstance(size, int) and self.start + self.length > size):
            raise GraphVerifyError(
                f"Narrow takes {self.length} elements from {self.start} along axis {axis}, which has {size}"
            )
        return TensorType(x.dtype, Shape(self.length if i == axis else dim for i, dim in enumerate(shape)))


class Slice(Op, operands="x"):
    """`x[start:end:step]` along some axes, by Python's rules: negative indices count from the end, None is open.

    A start of None is the beginning in the direction of the step, an end of None the end. A step is not 0; a negative
    one walks backwards.
    """

    axes: tuple[int, ...]
    starts: tuple[int | None, ...]
    ends: tuple[int | None, ...]
    steps: tuple[int, ...]

    def _result(self, x: TensorType) -> TensorType:
        """Return the sliced sizes; a dimension without a size stays only if it is taken whole."""
        shape = known_shape(self, x, "x")
        if len({len(self.axes), len(self.starts), len(self.ends), len(self.steps)}) != 1 or 0 in self.steps:
            raise GraphVerifyError("Slice needs a start, an end and a step that is not 0 for each axis")
        dims = list(shape)
        for axis, start, end, step in zip(
            self.axis_tuple(self.axes, shape.rank), self.starts, self.ends, self.steps, strict=True
        ):
            size = dims[axis]
            if isinstance(size, int):
                dims[axis] = len(range(*slice(start, end, step).indices(size)))
            elif abs(step) != 1 or start not in (None, 0 if step > 0 else -1) or end is not None:
                dims[axis] = None
        return TensorType(x.dtype, Shape(dims))


class Gather(Op, operands="table indices:indices"):
    """Entries of a table along an axis, picked by integer indices; negative ones count from the end.

    The result has the table's dimensions before the axis, those of the indices, then the table's after the axis.
    """

    axis: int = 0

    def _result(self, table: TensorType, indices: TensorType) -> TensorType:
        shape, picked = known_shape(self, table, "table"), known_shape(self, indices, "indices")
        axis = self.normal_axis(self.axis, shape.rank)
        return TensorType(table.dtype, Shape((*shape[:axis], *picked, *shape[axis + 1 :])))


class Pad(Op, operands="x"):
    """Elements added before and after each axis.

    The modes are `constant`, `reflect` (mirrored without the edge) and `edge` (the edge repeated).
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    mode: str = named("pad mode", _PAD_MODES, default="constant")
    value: float = 0.0

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        if len(self.before) != shape.rank or len(self.after) != shape.rank or min((*self.before, *self.after, 0)) < 0:
            raise GraphVerifyError(f"Pad of {shape} needs a number of at least 0 before and after each of its axes")
        grown = zip(shape, self.before, self.after, strict=True)
        dims = [dim + low + high if isinstance(dim, int) else None if low + high else dim for dim, low, high in grown]
        return TensorType(x.dtype, Shape(dims))


class Tile(Op, operands="x"):
    """The whole input repeated along each axis."""

    repeats: tuple[int, ...]

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        if len(self.repeats) != shape.rank or min((*self.repeats, 0)) < 0:
            raise GraphVerifyError(f"Tile of {shape} needs a number of at least 0 for each axis, got {self.repeats}")
        pairs = zip(shape, self.repeats, strict=True)
        dims = [dim * times if isinstance(dim, int) else dim if times == 1 else None for dim, times in pairs]
        return TensorType(x.dtype, Shape(dims))


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
        update_shape = known_shape(self, updates, "updates")
        if update_shape.rank != wanted.rank:
            raise GraphVerifyError(f"ScatterNd needs updates {wanted}, got {update_shape}")
        self.expect_dims(update_shape, wanted, "the updates")


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


class ShapeBuilders(LeafBuilders):
    """Builders of the ops that move, sort, look up and update data."""

    __slots__ = ()

    def reshape(self, x: Operand, new_shape: Iterable[Dim], **node: Unpack[NodeArgs]) -> Value:
        """Give the elements other dimensions; one may be -1, and dims may be named."""
        return self._add(Reshape(tuple(new_shape)), x, **node)

    def transpose(self, x: Operand, perm: Iterable[int], **node: Unpack[NodeArgs]) -> Value:
        """Put the axes in another order."""
        return self._add(Transpose(tuple(perm)), x, **node)

    def expand(self, x: Operand, shape: Iterable[Dim], *, name: str | None = None) -> Value:
        """Repeat the input along dimensions of size 1; -1 keeps a dimension."""
        return self._add(Expand(tuple(shape)), x, name=name)

    def concat(self, inputs: Sequence[Operand], axis: int, **node: Unpack[NodeArgs]) -> Value:
        """Join tensors along an axis."""
        if not inputs:
            raise GraphVerifyError("Concat takes at least 1 inputs, got 0")
        values = [self._as_value(item) for item in inputs]
        dtype = values[0].dtype
        for value in values[1:]:
            dtype = promote(dtype, value.dtype)
        return self._add(Concat(axis), *(value.cast(dtype) for value in values), **node)

    def narrow(self, x: Operand, axis: int, start: int, length: int, **node: Unpack[NodeArgs]) -> Value:
        """Take `length` elements from `start` along an axis."""
        return self._add(Narrow(axis, start, length), x, **node)

    def slice(
        self,
        x: Operand,
        axes: Sequence[int],
        starts: Sequence[int | None],
        ends: Sequence[int | None],
        steps: Sequence[int] | None = None,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Take `x[start:end:step]` along axes, by Python's rules."""
        op = Slice(tuple(axes), tuple(starts), tuple(ends), tuple(steps or (1,) * len(axes)))
        return self._add(op, x, **node)

    def gather(self, table: Operand, indices: Operand, axis: int = 0, **node: Unpack[NodeArgs]) -> Value:
        """Pick entries of a table along an axis; float indices drop their fraction.

        An index out of range is an error on the CPU; docs/ops.md has the behaviour of other devices.
        """
        return self._add(Gather(axis), table, indices, **node)

    def pad(
        self,
        x: Operand,
        before: Sequence[int],
        after: Sequence[int],
        mode: str = "constant",
        value: float = 0.0,
        **node: Unpack[NodeArgs],
    ) -> Value:
        """Add elements before and after each axis."""
        return self._add(Pad(tuple(before), tuple(after), mode, value), x, **node)

    def tile(self, x: Operand, repeats: Sequence[int], **node: Unpack[NodeArgs]) -> Value:
        """Repeat the whole input along each axis."""
        return self._add(Tile(tuple(repeats)), x, **node)

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
