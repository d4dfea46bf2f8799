"""ONNX forms of the ops that move, sort and update data, and the reshape and slice that other families use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import (
    FILLED_TOPK,
    compute_dtype,
    filled_rows,
    from_compute,
    op_in,
    to_compute,
)
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape, reshaped
from rlx_ort.ir.ops import shape as ops
from rlx_ort.ir.ops.shape import Concat, Expand, Gather, Narrow, Pad, Reshape, Slice, Tile, Transpose
from rlx_ort.ir.types import Dim, Shape, TensorType

_END = 2**63 - 1
_TRILU = frozenset({DType.F32, DType.F64, DType.F16, DType.BF16, DType.I32, DType.I64, DType.U64, DType.BOOL})
# The CPU kernels of the scatter ops combine no f16 or bf16; sums are better in f32 anyway.
_NARROW = frozenset({DType.F16, DType.BF16})


def reshape(emit: Emitter, value: ModelValue, source: Shape | None, target: Sequence[Dim]) -> Any:
    """Write a reshape of a value of shape `source`; at most one dimension of `target` may be None (left over).

    The target is a constant wherever ONNX can express it, because a shape computed at run time costs nodes and keeps
    providers from knowing the result.

    Raises:
        ConversionError: more than one dimension is unknown.
    """
    named = {place for place, dim in enumerate(target) if isinstance(dim, str)}
    kept = {place for place, (dim, old) in enumerate(zip(target, source or (), strict=False)) if dim == old}
    unknown = {place for place, dim in enumerate(target) if dim is None}
    if len(unknown) > 1:
        text = f"{emit.node} needs a shape with {len(unknown)} unknown dimensions; name the dimensions it is made of"
        raise ConversionError(text)
    if 0 not in target and named <= kept:  # ONNX's 0 takes a dimension over
        numbers = [0 if place in named else -1 if dim is None else dim for place, dim in enumerate(target)]
        return emit.op("Reshape", value, emit.i64(numbers))  # type: ignore[arg-type]  # the names are gone
    if 0 not in target and len(named) == 1 and not unknown:
        return emit.op("Reshape", value, emit.i64([dim if isinstance(dim, int) else -1 for dim in target]))
    return emit.op("Reshape", value, emit.dims([-1 if dim is None else dim for dim in target]), allowzero=1)


def slice_axis(emit: Emitter, value: Any, axis: int, start: int, end: int | None, step: int = 1) -> Any:
    """Write `value[start:end:step]` along one axis; None as end is the end."""
    bounds = [emit.i64([start]), emit.i64([_END if end is None else end]), emit.i64([axis])]
    return emit.op("Slice", value, *bounds, *([emit.i64([step])] if step != 1 else []))


@lowers(Reshape)
def _reshape(emit: Emitter, op: Reshape, inputs: Sequence[Any]) -> Any:
    source = emit.input_type(0).shape
    return reshape(emit, inputs[0], source, reshaped(op, source, op.dims))


@lowers(Expand)
def _expand(emit: Emitter, op: Expand, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    # 1 keeps a dimension in ONNX's Expand, so dimensions that do not change need no run-time size.
    source = known_shape(op, kind, "x")
    offset = len(op.dims) - source.rank
    dims = [1 if place >= offset and dim in (-1, source[place - offset]) else dim for place, dim in enumerate(op.dims)]
    return op_in(emit, "Expand", kind.dtype, inputs[0], others=[emit.dims(dims)])


@lowers(Slice, ops.Reverse)
def _slice(emit: Emitter, op: Slice | ops.Reverse, inputs: Sequence[Any]) -> Any:
    if not op.axes:
        return emit.op("Identity", inputs[0])
    source, x = known_shape(op, emit.input_type(0), "x"), inputs[0]
    steps = [-1] * len(op.axes) if isinstance(op, ops.Reverse) else op.steps
    bounds = [(None, None)] * len(steps) if isinstance(op, ops.Reverse) else zip(op.starts, op.ends, strict=True)
    starts, ends = [], []
    for axis, (start, end), step in zip(op.axes, bounds, steps, strict=True):
        size = source[axis]
        if step < 0 and start is not None and start < -1 and not (isinstance(size, int) and size >= -start):
            # Walking backwards, ONNX begins a start before the first element at that element; here nothing is taken.
            if isinstance(size, int) or (end is not None and start <= end < 0):
                start = end = 0
            else:
                x = slice_axis(emit, x, axis, 0, start + 1)
                end = end - start - 1 if end is not None and end < 0 else end
                start = None
        starts.append((0 if step > 0 else _END) if start is None else start)
        ends.append((_END if step > 0 else -_END) if end is None else end)
    return emit.op("Slice", x, *(emit.i64(numbers) for numbers in (starts, ends, op.axes, steps)))


@lowers(Pad)
def _pad(emit: Emitter, op: Pad, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    amounts = emit.i64([*op.before, *op.after])
    extra = [emit.constant(op.value, compute_dtype("Pad", dtype))] if op.mode == "constant" and op.value else []
    return op_in(emit, "Pad", dtype, inputs[0], others=[amounts, *extra], mode=op.mode)


lowers(Transpose)(lambda emit, op, inputs: emit.op("Transpose", inputs[0], perm=[i % len(op.perm) for i in op.perm]))


@lowers(Narrow)
def _narrow(emit: Emitter, op: Narrow, inputs: Sequence[Any]) -> Any:
    shape = known_shape(op, emit.input_type(0), "x")
    axis = op.axis % shape.rank
    part = slice_axis(emit, inputs[0], axis, op.start, op.start + op.length)
    if isinstance(shape[axis], int) or not op.length:
        return part
    # A slice beyond the end has fewer elements; a reshape to the declared length then fails, and costs nothing.
    return emit.op("Reshape", part, emit.i64([op.length if place == axis else 0 for place in range(shape.rank)]))


@lowers(Tile)
def _tile(emit: Emitter, op: Tile, inputs: Sequence[Any]) -> Any:
    return op_in(emit, "Tile", emit.input_dtype(0), inputs[0], others=[emit.i64(op.repeats)])


@lowers(Concat)
def _concat(emit: Emitter, op: Concat, inputs: Sequence[Any]) -> Any:
    return emit.op("Concat", *inputs, axis=op.axis) if len(inputs) > 1 else emit.op("Identity", inputs[0])


@lowers(ops.Sort, ops.ArgSort, asks=lambda _, kind, __: kind.dtype in FILLED_TOPK)
def _sort(emit: Emitter, op: ops.Sort | ops.ArgSort, inputs: Sequence[Any]) -> Any:
    """Write a TopK of all elements, whose equal elements keep their order."""
    kind = emit.input_type(0)
    size = known_shape(op, kind, "x")[op.axis]
    count = emit.dims([size])
    x = filled_rows(emit, to_compute(emit, "TopK", inputs[0], kind.dtype), kind.dtype, size, op.axis, op.descending)
    values, places = emit.op("TopK", x, count, outputs=2, axis=op.axis, largest=int(op.descending), sorted=1)
    return places if isinstance(op, ops.ArgSort) else from_compute(emit, "TopK", values, kind.dtype)


def _orders_i64(op: ops.CumProd | ops.CumMax, kind: TensorType, _: Any) -> bool:
    return isinstance(op, ops.CumMax) and compute_dtype("Max", kind.dtype) is DType.I64


@lowers(ops.CumProd, ops.CumMax, asks=_orders_i64)
def _running(emit: Emitter, op: ops.CumProd | ops.CumMax, inputs: Sequence[Any]) -> Any:
    """Combine each element with the one 1, then 2, 4, 8, ... places before it."""
    kind, x = emit.input_type(0), inputs[0]
    shape = known_shape(op, kind, "x")
    axis, size = op.axis % shape.rank, shape[op.axis]
    function = "Max" if isinstance(op, ops.CumMax) else "Mul"
    compute = compute_dtype(function, kind.dtype)
    value = x if compute is kind.dtype else emit.cast(x, compute)
    reach = 1
    while isinstance(size, int) and reach < size:
        first = slice_axis(emit, value, axis, 0, reach)
        later, earlier = slice_axis(emit, value, axis, reach, None), slice_axis(emit, value, axis, 0, size - reach)
        value = emit.op("Concat", first, op_in(emit, function, compute, later, earlier), axis=axis)
        reach *= 2
    if value is x:
        return emit.op("Identity", x)
    return value if compute is kind.dtype else emit.cast(value, kind.dtype)


@lowers(ops.Trilu)
def _trilu(emit: Emitter, op: ops.Trilu, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    wide = dtype if dtype in _TRILU else DType.I64 if dtype is DType.U32 else DType.I32
    x = inputs[0] if wide is dtype else emit.cast(inputs[0], wide)
    diagonal = emit.constant(op.diagonal, DType.I64)
    result = emit.op("Trilu", x, diagonal, upper=int(op.upper))
    return result if wide is dtype else emit.op("Cast", result, to=dtype)


@lowers(Gather, ops.GatherElements, ops.GatherNd)
def _gather(emit: Emitter, op: Gather | ops.GatherElements | ops.GatherNd, inputs: Sequence[Any]) -> Any:
    if isinstance(op, ops.GatherNd):
        return emit.op("GatherND", inputs[0], emit.cast(inputs[1], DType.I64), batch_dims=op.batch_dims)
    op_type = "Gather" if isinstance(op, Gather) else "GatherElements"
    return emit.op(op_type, inputs[0], _places(emit, inputs[1]), axis=op.axis)


@lowers(ops.ScatterElements, ops.ScatterNd)
def _scatter(emit: Emitter, op: ops.ScatterElements | ops.ScatterNd, inputs: Sequence[Any]) -> Any:
    dtype, (x, places, updates) = emit.input_dtype(0), inputs
    wide = DType.F32 if dtype in _NARROW and op.mode != "set" else dtype
    how: dict[str, Any] = {"reduction": None if op.mode == "set" else op.mode}
    if isinstance(op, ops.ScatterElements):
        op_type, places, how["axis"] = "ScatterElements", _places(emit, places), op.axis
    else:
        op_type, places = "ScatterND", emit.cast(places, DType.I64)
    result = emit.op(op_type, emit.cast(x, wide), places, emit.cast(updates, wide), **how)
    return result if wide is dtype else emit.op("Cast", result, to=dtype)


def _places(emit: Emitter, indices: Any) -> Any:
    return indices if emit.input_dtype(1) in {DType.I32, DType.I64} else emit.cast(indices, DType.I64)
