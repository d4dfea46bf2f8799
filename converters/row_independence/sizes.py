"""Rules of operators that read, compute or move sizes and elements, and the arithmetic on sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.row_independence.facts import (
    BATCH,
    END,
    ONE,
    SMALL,
    AtMost,
    RefusedError,
    Size,
    Value,
    axis_at,
    constant_value,
    grid_of,
    is_no_size,
    moved,
    product,
    refuse_if,
    refuse_places,
    refuse_sizes,
)
from rlx_ort.converters.row_independence.proof import Node, Proof, Rule, elementwise, reshaped


def _cast(proof: Proof, node: Node) -> list[Value]:
    from onnx import TensorProto

    given = node.need(0)
    if node.attributes["to"] in (TensorProto.INT32, TensorProto.INT64):
        return [replace(given, data=None)]
    refuse_sizes(given, places=True)
    return [replace(given, content=None, data=None, below=None, cells=None)]


def _equal(proof: Proof, node: Node) -> list[Value]:
    """A comparison of sizes, whose result is known, or of elements."""
    one, other = node.need(0), node.need(1)
    result = elementwise(proof, node)[0]
    if not one.sized and not other.sized and (one.content is None or other.content is None):
        return [result]
    pairs = _pairs(one, other)
    content: list[Size | None] = []
    for left, right in pairs:
        if left is not None and left == right:
            content.append(Size(1))
        elif left is not None and right is not None and (
            (left.whole is not None and right.whole is not None) or is_no_size(left, right) or is_no_size(right, left)
        ):  # fmt: skip
            content.append(Size(0))
        elif any(size is not None and size.batched for size in (left, right)):
            raise RefusedError("compares the number of rows")
        else:
            content.append(None)
    return [replace(result, content=tuple(content))]


def _pairs(*values: Value) -> list[tuple[Size | None, ...]]:
    contents = [value.content for value in values]
    if any(content is None for content in contents) or any(value.axis is not None for value in values):
        raise RefusedError("computes with the number of rows")
    count = max(len(content or ()) for content in contents)
    return list(zip(*((c or ()) * (count if len(c or ()) == 1 else 1) for c in contents), strict=True))


def _where(proof: Proof, node: Node) -> list[Value]:
    """A choice between sizes, or an elementwise operator."""
    which, one, other = node.need(0), node.need(1), node.need(2)
    result = elementwise(proof, node)[0]
    if not any(value.sized for value in (which, one, other)) and (
        which.content is None or one.content is None or other.content is None
    ):
        return [result]
    content = []
    for choice, left, right in _pairs(which, one, other):
        if choice is None and not any(value.sized for value in (which, one, other)):
            return [result]
        if choice is None or choice.whole is None:
            raise RefusedError("chooses between sizes by a value that is not known")
        content.append(left if choice.whole else right)
    return [replace(result, content=tuple(content))]


def _arithmetic(proof: Proof, node: Node) -> list[Value]:
    """Arithmetic on sizes, or an elementwise operator."""
    one, other = node.need(0), node.need(1)
    if one.places or other.places:
        return [_counted(proof, node.proto.op_type, one, other)]
    if one.axis is not None or other.axis is not None:
        refuse_sizes(one, other)
        return elementwise(proof, node)
    result = replace(proof.typed(node.proto.output[0]))
    if one.shape is not None and other.shape is not None:
        result = proof.broadcast([one, other])
    if one.content is None or other.content is None:
        refuse_sizes(one, other)
        return [result]
    content = tuple([_computed(node.proto.op_type, left, right) for left, right in _pairs(one, other)])
    return [replace(result, content=content)]


def _counted(proof: Proof, name: str, one: Value, other: Value) -> Value:
    """Return the row's number times a size, or with an offset that is the same for all rows added."""
    number, free = (one, other) if one.places else (other, one)
    if number.places != (-1,) or number.below is None or free.axis is not None or free.sized:
        raise RefusedError("computes with the row's number")
    result = replace(proof.broadcast([number, free]), places=number.places)
    if name == "Mul" and number.below == ONE and free.content is not None and len(free.content) == 1:
        factor = free.content[0]
        if factor is not None and factor.number > 0:
            return replace(result, stride=number.stride * factor, below=ONE)
    if name == "Add" and (below := _below(free)) is not None:
        if ONE in (number.below, below):
            return replace(result, stride=number.stride, below=below if number.below == ONE else number.below)
        if number.below.whole is not None and below.whole is not None:
            return replace(result, stride=number.stride, below=Size(number.below.whole + below.whole - 1))
    raise RefusedError("computes with the row's number")


def _computed(name: str, left: Size | None, right: Size | None) -> Size | None:
    if left is None or right is None:
        refuse_if(any(size is not None and size.batched for size in (left, right)), "computes with the number of rows")
        return None
    if name == "Mul":
        return left * right
    if name == "Div":
        if right == ONE:
            return left
        exact = left.over(right) if left.number >= 0 and right.number > 0 else None
        if left.whole is not None and right.whole is not None:
            return Size(int(left.whole / right.whole)) if right.whole else None
        refuse_if(exact is None and (left.batched or right.batched), "divides the number of rows")
        return exact
    if left.whole is not None and right.whole is not None:
        return Size(left.whole + right.whole if name == "Add" else left.whole - right.whole)
    if right.whole == 0:
        return left
    if left.whole == 0 and name == "Add":
        return right
    refuse_if(left.batched or right.batched, "adds to the number of rows")
    return Size(1, (f"({left}{'+' if name == 'Add' else '-'}{right})",))


def _shape(proof: Proof, node: Node) -> list[Value]:
    sizes = proof.sizes(node.need(0))[node.attributes.get("start", 0) : node.attributes.get("end")]
    return [Value((Size(len(sizes)),), content=sizes)]


def _size(proof: Proof, node: Node) -> list[Value]:
    return [Value((), content=(product(proof.sizes(node.need(0))),))]


def _constant_node(proof: Proof, node: Node) -> list[Value]:
    from onnx import numpy_helper

    value = node.attributes.get("value")
    if value is not None and math.prod(value.dims) <= SMALL and not value.external_data:
        return [constant_value(numpy_helper.to_array(value))]
    for name in ("value_int", "value_ints"):
        if name in node.attributes:
            return [constant_value(np.array(node.attributes[name], np.int64))]
    return [proof.typed(node.proto.output[0])]


def _reshape(proof: Proof, node: Node) -> list[Value]:
    given, target = node.need(0), node.need(1)
    refuse_if(target.axis is not None, "the new shape differs between rows")
    if given.axis is None and not target.sized:
        result = proof.typed(node.proto.output[0])
        if target.content is not None and all(s is not None and s.whole not in (0, -1) for s in target.content):
            result = replace(result, shape=tuple([size for size in target.content if size is not None]))
        return [moved(given, replace(result, content=given.cells if given.content is None else given.content))]
    asked = target.asked
    if asked is None:
        raise RefusedError("the new shape is not known")
    sizes = list(proof.numbered(asked))
    if not node.attributes.get("allowzero", 0):
        sizes = [given.dims[place] if size.whole == 0 else size for place, size in enumerate(sizes)]
    if (open_at := next((at for at, size in enumerate(sizes) if size.whole == -1), None)) is not None:
        rest = product([size for at, size in enumerate(sizes) if at != open_at])
        count = proof.canonical(product(given.dims)).over(proof.canonical(rest))
        if count is None:
            raise RefusedError("the rows do not follow from the new shape")
        sizes[open_at] = count
    else:
        proof.note_exact(given.dims, sizes)
    result = reshaped(proof, given, sizes)
    if any(size.batched and at != result.axis for at, size in enumerate(asked)):
        raise RefusedError("gives another axis as many elements as there are rows")
    return [result]


def _transpose(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    if given.axis is None:
        refuse_sizes(given)
        result, grid = proof.typed(node.proto.output[0]), grid_of(given)
        if grid is None:
            return [result]
        turned = grid.transpose(node.attributes.get("perm"))
        return [Value(tuple(map(Size, turned.shape)), content=tuple(turned.reshape(-1)))]
    order = node.attributes.get("perm") or list(range(given.rank))[::-1]
    axis = None if given.axis is None else order.index(given.axis)
    return [moved(given, Value(tuple([given.dims[at] for at in order]), axis))]


def _unsqueeze(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    axes = node.numbers(1, "axes") or []
    rank = given.rank + len(axes)
    new = {axis_at(axis, rank) for axis in axes}
    sizes = iter(enumerate(given.dims))
    shape, at_axis = list[Size](), None
    for place in range(rank):
        if place in new:
            shape.append(ONE)
            continue
        at, size = next(sizes)
        at_axis = place if at == given.axis else at_axis
        shape.append(size)
    return [moved(given, Value(tuple(shape), at_axis, given.content, given.data))]


def _squeeze(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    axes = node.numbers(1, "axes")
    if axes is None:
        refuse_if(given.axis is not None, "drops an axis of rows if there is one row")
        return [replace(proof.typed(node.proto.output[0]), content=given.content)]
    gone = {axis_at(axis, given.rank) for axis in axes}
    refuse_if(given.axis in gone, "drops the axis of rows")
    shape = [size for at, size in enumerate(given.dims) if at not in gone]
    axis = None if given.axis is None else given.axis - sum(at < given.axis for at in gone)
    return [moved(given, Value(tuple(shape), axis, given.content, given.data))]


def _expand(proof: Proof, node: Node) -> list[Value]:
    given, target = node.need(0), node.need(1)
    refuse_sizes(given)
    sizes = target.asked
    refuse_if(target.axis is not None or (given.axis is not None and sizes is None), "the new shape is not known")
    if sizes is None:
        return [proof.typed(node.proto.output[0])]
    axes = [at for at, size in enumerate(sizes) if size.batched]
    refuse_if(len(axes) > 1, "repeats values along two axes, as often as there are rows")
    return [moved(given, proof.broadcast([given, Value(proof.numbered(sizes), axes[0] if axes else None)]))]


def _constant_of_shape(proof: Proof, node: Node) -> list[Value]:
    target = node.need(0)
    refuse_if(target.axis is not None, "the new shape differs between rows")
    sizes = target.asked
    if sizes is None:
        return [proof.typed(node.proto.output[0])]
    axes = [at for at, size in enumerate(sizes) if size.batched]
    refuse_if(len(axes) > 1, "makes two axes of rows")
    value = node.attributes.get("value")
    content = None
    if not axes and len(sizes) == 1 and sizes[0].whole is not None and sizes[0].whole <= SMALL and value is not None:
        from onnx import numpy_helper

        array = numpy_helper.to_array(value).reshape(-1)
        content = (Size(int(array[0])),) * sizes[0].whole if array.dtype.kind in "iu" else None
    return [Value(proof.numbered(sizes), axes[0] if axes else None, content)]


def _range(proof: Proof, node: Node) -> list[Value]:
    contents = [value.content or (None,) for value in (node.need(0), node.need(1), node.need(2))]
    start, end, step = (content[0] for content in contents)
    if end is not None and end.batched:
        refuse_if(start != Size(0) or step != ONE or end != Size(1, (BATCH,)), "counts over the number of rows")
        return [Value(proof.numbered([end]), 0, places=(-1,), below=ONE)]
    if any(node.need(place).sized or node.need(place).axis is not None for place in range(3)):
        raise RefusedError("counts over the number of rows")
    size = end if start == Size(0) and step == ONE and end is not None else proof.unknown()
    whole = (None if start is None else start.whole, None if step is None else step.whole)
    rises = whole[0] is not None and whole[1] is not None and whole[0] >= 0 and whole[1] > 0
    return [Value((size,), below=end if rises else None)]


def _tile(proof: Proof, node: Node) -> list[Value]:
    given, times = node.need(0), node.need(1)
    refuse_sizes(given)
    refuse_if(times.axis is not None, "the repeats differ between rows")
    repeats = times.asked
    if repeats is None:
        refuse_if(given.axis is not None, "the repeats are not known")
        return [proof.typed(node.proto.output[0])]
    axes = [at for at, size in enumerate(repeats) if size.batched]
    refuse_if(given.axis is not None and (axes or repeats[given.axis] != ONE), "repeats the rows")
    refuse_if(len(axes) > 1, "makes two axes of rows")
    shape = tuple([size * count for size, count in zip(given.dims, proof.numbered(repeats), strict=True)])
    return [Value(shape, axes[0] if axes else given.axis)]


def _concat(proof: Proof, node: Node) -> list[Value]:
    values = [value for value in node.inputs if value is not None]
    axes = {value.axis for value in values}
    if axes == {None}:
        result = proof.typed(node.proto.output[0])
        if all(value.content is not None for value in values):
            content = tuple([size for value in values for size in value.content or ()])
            return [Value((Size(len(content)),), content=content)]
        refuse_if(any(value.sized for value in values), "joins the number of rows with values that are not known")
        parts = [_elements(value) for value in values]
        if all(part is not None for part in parts):
            return [replace(result, content=tuple([size for part in parts for size in part or ()]))]
        return [result]
    first = next(value for value in values if value.axis is not None)
    if any(not proof.has_rows(value, first.axis or 0, first.rows) for value in values):
        raise RefusedError("joins values with rows and values without, or with rows on other axes")
    axis = axis_at(node.attributes["axis"], first.rank)
    refuse_if(axis == first.axis, "joins along the axis of rows")
    total = [value.dims[axis].whole for value in values]
    size = proof.unknown() if None in total else Size(sum(each for each in total if each is not None))
    shape = (*first.dims[:axis], size, *first.dims[axis + 1 :])
    places: tuple[int, ...] = ()
    if any(value.places for value in values):
        if axis != first.rank - 1 or any(
            value.dims[axis] != ONE or (value.places and not value.row_number) for value in values
        ):
            raise RefusedError("computes with the row's number")
        places = tuple([at for at, value in enumerate(values) if value.places])
    return [Value(shape, first.axis, places=places)]


def _elements(value: Value) -> tuple[Size | None, ...] | None:
    """Return the elements of a small value of rank 1, each None if not known; None if their number is not."""
    if value.content is not None:
        return value.content
    count = value.shape[0].whole if value.shape is not None and len(value.shape) == 1 else None
    return None if count is None or count > SMALL else (None,) * count


def _split(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    node.same_for_all(1)
    if given.axis is None:
        refuse_if(given.sized, "splits a shape")
        return [proof.typed(name) for name in node.proto.output]
    axis = axis_at(node.attributes.get("axis", 0), given.rank)
    refuse_if(axis == given.axis, "splits the axis of rows")
    parts = [proof.rows(node, at, given.axis, given.rows, given.rank).dims for at in range(len(node.proto.output))]
    return [Value((*given.dims[:axis], part[axis], *given.dims[axis + 1 :]), given.axis) for part in parts]


def _sliced(node: Node, given: Value) -> npt.NDArray[Any] | None:
    """Return the cells that a slice takes from a value without rows; None if they are not known."""
    grid = grid_of(given)
    if grid is None:
        return None
    try:
        starts, ends = node.numbers(1, "starts") or [], node.numbers(2, "ends") or []
        axes, steps = node.numbers(3, "axes") or list(range(len(starts))), node.numbers(4, "steps") or [1] * len(starts)
    except RefusedError:
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = axis_at(axis, grid.ndim)
        if step < 0 and start < -grid.shape[place]:  # ONNX starts at the first element, Python takes none
            return None
        grid = grid[(slice(None),) * place + (slice(start, end, step),)]
    return grid


def _slice(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    starts, ends = node.get(1), node.get(2)
    if given.content is not None and given.axis is None:
        try:
            start, end = node.numbers(1, "starts"), node.numbers(2, "ends")
            step = node.numbers(4, "steps") or [1]
        except RefusedError:
            if given.sized:
                raise
            return [proof.typed(node.proto.output[0])]
        assert start is not None and end is not None  # noqa: S101, PT018  # the operator has both
        if step[0] < 0 and start[0] < -len(given.content):  # ONNX starts at the first element, Python takes none
            raise RefusedError("starts before the first size")
        content = given.content[start[0] : end[0] : step[0]]
        return [Value((Size(len(content)),), content=content)]
    if given.axis is None:
        for value in (starts, ends):
            refuse_if(value is not None and value.differs, "cuts a value without rows as many rows as there are")
        if (cells := _sliced(node, given)) is not None:
            return [Value(tuple(map(Size, cells.shape)), content=tuple(cells.reshape(-1)))]
        result = proof.typed(node.proto.output[0])
        cut = node.get(3)
        if given.shape is None or result.shape is None or cut is None or cut.content is None:
            return [result]
        axes = [axis_at(axis, given.rank) for axis in node.numbers(3, "axes") or []]
        dims = [result.dims[at] if at in axes else size for at, size in enumerate(given.dims)]
        by = node.get(4)
        if starts is not None and ends is not None and (by is None or by.content == (ONE,) * len(axes)):
            for at, first, last in zip(axes, starts.content or (), ends.content or (), strict=False):
                if first == Size(0) and last is not None and last.symbols and is_no_size(Size(-1), last):
                    dims[at] = Size(1, (AtMost(last, proof.number()),))
        return [Value(tuple(dims))]
    named = node.numbers(3, "axes")
    count = len(starts.content or ()) if starts is not None else len(node.attributes["starts"])
    axes = [axis_at(axis, given.rank) for axis in (list(range(count)) if named is None else named)]
    steps = node.numbers(4, "steps") or [1] * len(axes)
    for at, axis in enumerate(axes):
        begin, end_size = (
            (value.content[at] if value is not None and value.content is not None and value.axis is None else None)
            if value is not None
            else Size(node.attributes[name][at])
            for value, name in ((starts, "starts"), (ends, "ends"))
        )
        if axis == given.axis:
            to_end = end_size is not None and (end_size.whole or 0) >= END - 1
            whole = to_end or end_size in (proof.sizes(given)[axis], given.rows)
            refuse_if(begin != Size(0) or not whole or steps[at] != 1, "takes some of the rows")
        elif any(size is not None and size.batched for size in (begin, end_size)):
            raise RefusedError("computes with the number of rows")
    for value in (starts, ends):
        refuse_if(value is not None and value.axis is not None, "takes other elements of each row")
    result = proof.rows(node, 0, given.axis, given.rows, given.rank)
    kept = [size if at not in axes else result.dims[at] for at, size in enumerate(given.dims)]
    kept[given.axis] = given.rows
    return [Value(tuple(kept), given.axis)]


def _gather(proof: Proof, node: Node) -> list[Value]:
    given, index = node.need(0), node.need(1)
    refuse_places(given)
    refuse_if(index.sized or (given.sized and index.axis is not None), "computes with the number of rows")
    if given.content is not None and index.axis is None and given.axis is None:
        if index.content is None or any(each is None or each.whole is None for each in index.content):
            refuse_if(given.sized, "takes an unknown size")
            return [proof.typed(node.proto.output[0])]
        content = tuple([given.content[int(each.whole)] for each in index.content if each and each.whole is not None])
        return [Value(index.shape, content=content)]
    if given.shape is None or index.shape is None:
        if given.axis is None and index.axis is None:
            return [proof.typed(node.proto.output[0])]
        raise RefusedError("reads a value of open rank")
    axis = axis_at(node.attributes.get("axis", 0), given.rank)
    shape = (*given.dims[:axis], *index.dims, *given.dims[axis + 1 :])
    if index.places:
        assert index.axis is not None  # noqa: S101  # rows have numbers where there are rows
        refuse_if(not _in_own_row(proof, given, axis, index), "takes rows by number")
        return [Value(shape, axis + index.axis)]
    if given.axis is None:
        return [Value(shape, None if index.axis is None else axis + index.axis)]
    refuse_if(index.axis is not None or given.axis == axis, "takes rows by number")
    return [Value(shape, given.axis if given.axis < axis else given.axis + index.rank - 1)]


def _in_own_row(proof: Proof, given: Value, axis: int, index: Value) -> bool:
    """Return whether each row's index lies in its own part of the axis of rows, of as many elements as the stride."""
    stride, below = index.stride, index.below
    if given.axis != axis or index.places != (-1,) or given.rows != proof.one_batch * stride or below is None:
        return False
    if below in (ONE, stride):
        return True
    return below.whole is not None and stride.whole is not None and below.whole <= stride.whole


def _resize(proof: Proof, node: Node) -> list[Value]:
    given, scales, sizes = node.need(0), node.get(2 if node.version > 10 else 1), node.get(3)
    if given.axis is None:
        node.same_for_all(*range(len(node.inputs)))
        return [proof.typed(node.proto.output[0])]
    node.same_for_all(1, 2)
    refuse_if(sizes is not None and sizes.axis is not None, "gives rows other sizes")
    axes = node.attributes.get("axes")
    places = [axis_at(axis, given.rank) for axis in (range(given.rank) if axes is None else axes)]
    if sizes is not None and sizes.sized:
        counts = [size is not None and size.batched for size in sizes.content or ()]
        if any(count for count, place in zip(counts, places, strict=True) if place != given.axis):
            raise RefusedError("gives another axis as many elements as there are rows")
    if given.axis in places:
        at = places.index(given.axis)
        same = (given.rows, proof.sizes(given)[given.axis])
        kept = sizes is not None and sizes.content is not None and sizes.content[at] in same
        if kept and node.attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            raise RefusedError("keeps the ratio of the sizes")
        kept = kept or (
            scales is not None and scales.data is not None and scales.data.size > at and scales.data[at] == 1
        )
        refuse_if(not kept, "may change the number of rows")
    if node.attributes.get("mode", b"nearest") != b"nearest" and (given.axis != 0 or given.rank < 4):
        raise RefusedError("interpolates along the rows, where a weight of 0 lets NaN through")
    refuse_if(node.attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize", "crops along all axes")
    return [proof.rows(node, 0, given.axis, given.rows, given.rank)]


def _below(value: Value) -> Size | None:
    """Return an upper bound of the elements of a value without rows; None if not known or some may be negative."""
    if value.data is not None and value.data.size and value.data.dtype.kind in "iu":
        return Size(int(value.data.max()) + 1) if value.data.min() >= 0 else None
    return value.below


def _kept(proof: Proof, node: Node) -> list[Value]:
    return [node.need(0)]


RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _arithmetic for name in ("Add", "Sub", "Mul", "Div")},
    ("", "Cast"): _cast,
    ("", "Concat"): _concat,
    ("", "Constant"): _constant_node,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "Equal"): _equal,
    ("", "Expand"): _expand,
    ("", "Gather"): _gather,
    ("", "Identity"): _kept,
    ("", "Range"): _range,
    ("", "Reshape"): _reshape,
    ("", "Resize"): _resize,
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Tile"): _tile,
    ("", "Transpose"): _transpose,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Where"): _where,
}
"""Only these may read or carry sizes that depend on the number of rows."""
