"""Ops that move data and compute nothing, sorting and running products, and lookups and updates at many indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType, promote
from rlx_ort.ir.op import Op, OpTypes, join_dims, known_shape, named, reshaped, tensor_input
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType

SCATTER_MODES = ("set", "add", "mul", "max", "min")
"""How an update changes its element. Under `set`, indices must not repeat; the other modes combine all updates."""
_PAD_MODES = ("constant", "reflect", "edge")


class Reshape(Op, operands="x", builder="reshape x new_shape:dims"):
    """The same elements with other dimensions; one may be -1. A size 0 means 0, not "as it was"."""

    dims: tuple[Dim, ...]

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(x.dtype, reshaped(self, x.shape, self.dims))


class Transpose(Op, operands="x", builder="transpose"):
    """The axes in another order: axis i of the result is axis `perm[i]` of the input."""

    perm: tuple[int, ...]

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        perm = self.axis_tuple(self.perm, shape.rank)
        if len(perm) != shape.rank:
            raise GraphVerifyError(f"Transpose of {shape} needs {shape.rank} axes, got {self.perm}")
        return TensorType(x.dtype, Shape(shape[axis] for axis in perm))


class Expand(Op, operands="x", builder="expand x shape:dims"):
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


class Narrow(Op, operands="x", builder="narrow"):
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
                dims[axis] = len(range(size)[start:end:step])
            elif abs(step) != 1 or start not in (None, 0 if step > 0 else -1) or end is not None:
                dims[axis] = None
        return TensorType(x.dtype, Shape(dims))


class Gather(Op, operands="table indices:indices", builder="gather"):
    """Entries of a table along an axis, picked by integer indices; negative ones count from the end.

    The result has the table's dimensions before the axis, those of the indices, then the table's after the axis.
    """

    axis: int = 0

    def _result(self, table: TensorType, indices: TensorType) -> TensorType:
        shape, picked = known_shape(self, table, "table"), known_shape(self, indices, "indices")
        axis = self.normal_axis(self.axis, shape.rank)
        return TensorType(table.dtype, Shape((*shape[:axis], *picked, *shape[axis + 1 :])))


class Pad(Op, operands="x", builder="pad"):
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


class Tile(Op, operands="x", builder="tile"):
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


class Sort(Ordered, builder="sort"):
    """The elements along an axis in order, the smallest first unless `descending`."""

    descending: bool = False


class ArgSort(Ordered, builder="argsort"):
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


class CumProd(_Running, builder="cumprod"):
    """The running product along an axis, which needs a size; written as log2(size) products of the whole."""


class CumMax(_Running, builder="cummax"):
    """The largest element so far along an axis, which needs a size."""


class Reverse(Op, operands="x", builder="reverse"):
    """The elements in reverse order along axes."""

    axes: tuple[int, ...]

    def _result(self, x: TensorType) -> None:
        self.axis_tuple(self.axes, known_shape(self, x, "x").rank)


class Trilu(Op, operands="x", builder="trilu"):
    """The upper or lower triangle of the last two dimensions; zeros elsewhere.

    The triangle begins at a diagonal: 0 is the main one, above 0 lie those to the right of it.
    """

    upper: bool = False
    diagonal: int = 0

    def _result(self, x: TensorType) -> None:
        shape = known_shape(self, x, "x")
        if shape.rank < 2:
            raise GraphVerifyError(f"Trilu needs matrices, x is {shape}; reshape it to rank 2 or more")


class GatherElements(Op, operands="x indices:indices", builder="gather_elements"):
    """One element for each index: `out[i][j] = x[index[i][j]][j]` for axis 0, and so on for other axes."""

    axis: int = 0

    def _result(self, x: TensorType, indices: TensorType) -> TensorType:
        _expect_same_rank(self, x, indices, "indices")
        return TensorType(x.dtype, indices.shape)


class GatherNd(Op, operands="x indices:indices", builder="gather_nd"):
    """Slices at positions given by the last dimension of the indices.

    `batch_dims` leading dimensions are shared by x and the indices.
    """

    batch_dims: int = 0

    def _result(self, x: TensorType, indices: TensorType) -> TensorType:
        """Return the indices' dimensions but the last, then those of x that are not indexed."""
        shape, picked, depth = _nd(self, x, indices, self.batch_dims)
        self.expect_dims(picked[: self.batch_dims], shape[: self.batch_dims], "the indices")
        return TensorType(x.dtype, Shape((*picked[:-1], *shape[self.batch_dims + depth :])))


class ScatterElements(Op, operands="x indices:indices updates", builder="scatter_elements"):
    """x with one element changed for each index; the updates have the indices' shape."""

    axis: int = 0
    mode: str = named("scatter mode", SCATTER_MODES, default="set")

    def _result(self, x: TensorType, indices: TensorType, updates: TensorType) -> None:
        _check_updates(self, x, updates)
        wanted = _expect_same_rank(self, x, indices, "indices")
        self.expect_dims(_expect_same_rank(self, x, updates, "updates"), wanted, "the updates")


class ScatterNd(Op, operands="x indices:indices updates", builder="scatter_nd"):
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


@builder
def concat(graph: Graph, inputs: Sequence[Operand], axis: int, **node: Unpack[NodeArgs]) -> Value:
    """Join tensors along an axis."""
    if not inputs:
        raise GraphVerifyError("Concat takes at least 1 inputs, got 0")
    values = [graph._as_value(item) for item in inputs]
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = promote(dtype, value.dtype)
    return graph._add(Concat(axis), *(value.cast(dtype) for value in values), **node)


@builder
def slice(
    graph: Graph,
    x: Operand,
    axes: Sequence[int],
    starts: Sequence[int | None],
    ends: Sequence[int | None],
    steps: Sequence[int] | None = None,
    **node: Unpack[NodeArgs],
) -> Value:
    """Take `x[start:end:step]` along axes, by Python's rules."""
    op = Slice(tuple(axes), tuple(starts), tuple(ends), tuple(steps or (1,) * len(axes)))
    return graph._add(op, x, **node)
