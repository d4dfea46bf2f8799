"""ONNX forms of the ops that move data, and the reshape that other families use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import compute_dtype, op_in
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape, reshaped
from rlx_ort.ir.ops.shape import Concat, Expand, Gather, Narrow, Pad, Reshape, Slice, Tile, Transpose
from rlx_ort.ir.shape import Dim, Shape

__all__ = ["reshape", "slice_axis"]

_END = 2**63 - 1


def reshape(emit: Emitter, value: ModelValue, source: Shape | None, target: Sequence[Dim]) -> Any:
    """Write a reshape of a value of shape `source`; at most one dimension of `target` may be None (left over).

    The target is a constant wherever ONNX can express it, because a shape computed at run time costs nodes and keeps
    providers from knowing the result.

    Raises:
        ConversionError: more than one dimension is unknown.
    """
    kept = {place for place, dim in enumerate(target) if source is not None and _is_kept(source, place, dim)}
    named = {place for place, dim in enumerate(target) if isinstance(dim, str)}
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


def _is_kept(source: Shape, place: int, dim: Dim) -> bool:
    return place < source.rank and isinstance(dim, str) and source[place] == dim


@lowers(Reshape)
def _reshape(emit: Emitter, op: Reshape, inputs: Sequence[Any]) -> Any:
    source = emit.input_type(0).shape
    return reshape(emit, inputs[0], source, reshaped(op, source, op.dims))


@lowers(Transpose)
def _transpose(emit: Emitter, op: Transpose, inputs: Sequence[Any]) -> Any:
    rank = len(op.perm)
    return emit.op("Transpose", inputs[0], perm=[axis % rank for axis in op.perm])


@lowers(Expand)
def _expand(emit: Emitter, op: Expand, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    # 1 keeps a dimension in ONNX's Expand, so dimensions that do not change need no run-time size.
    source = known_shape(op, kind, "x")
    offset = len(op.dims) - source.rank
    dims = [1 if place >= offset and dim in (-1, source[place - offset]) else dim for place, dim in enumerate(op.dims)]
    return op_in(emit, "Expand", kind.dtype, inputs[0], others=[emit.dims(dims)])


@lowers(Concat)
def _concat(emit: Emitter, op: Concat, inputs: Sequence[Any]) -> Any:
    if len(inputs) == 1:
        return emit.op("Identity", inputs[0])
    return emit.op("Concat", *inputs, axis=op.axis)


@lowers(Narrow)
def _narrow(emit: Emitter, op: Narrow, inputs: Sequence[Any]) -> Any:
    return slice_axis(emit, inputs[0], op.axis, op.start, op.start + op.length)


@lowers(Slice)
def _slice(emit: Emitter, op: Slice, inputs: Sequence[Any]) -> Any:
    if not op.axes:
        return emit.op("Identity", inputs[0])
    starts = [
        (0 if step > 0 else _END) if start is None else start for start, step in zip(op.starts, op.steps, strict=True)
    ]
    ends = [(_END if step > 0 else -_END) if end is None else end for end, step in zip(op.ends, op.steps, strict=True)]
    return emit.op("Slice", inputs[0], *(emit.i64(numbers) for numbers in (starts, ends, op.axes, op.steps)))


@lowers(Gather)
def _gather(emit: Emitter, op: Gather, inputs: Sequence[Any]) -> Any:
    table, indices = inputs
    if emit.input_dtype(1) not in {DType.I32, DType.I64}:
        indices = emit.cast(indices, DType.I64)
    return emit.op("Gather", table, indices, axis=op.axis)


@lowers(Pad)
def _pad(emit: Emitter, op: Pad, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    amounts = emit.i64([*op.before, *op.after])
    extra = [emit.constant(op.value, compute_dtype("Pad", dtype))] if op.mode == "constant" and op.value else []
    return op_in(emit, "Pad", dtype, inputs[0], others=[amounts, *extra], mode=op.mode)


@lowers(Tile)
def _tile(emit: Emitter, op: Tile, inputs: Sequence[Any]) -> Any:
    return op_in(emit, "Tile", emit.input_dtype(0), inputs[0], others=[emit.i64(op.repeats)])
