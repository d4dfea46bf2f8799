"""ONNX forms of sorting, lookups, updates and running products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import compute_dtype
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.shape import (
    ArgSort,
    CumMax,
    CumProd,
    GatherElements,
    GatherNd,
    Ordered,
    Reverse,
    ScatterElements,
    ScatterNd,
    Sort,
    Trilu,
)

_END = 2**63 - 1
_TRILU = frozenset({DType.F32, DType.F64, DType.F16, DType.BF16, DType.I32, DType.I64, DType.U64, DType.BOOL})
# The CPU kernels of the scatter ops combine no f16 or bf16; sums are better in f32 anyway.
_NARROW = frozenset({DType.F16, DType.BF16})


@lowers(Sort)
def _sort(emit: Emitter, op: Sort, inputs: Sequence[Any]) -> Any:
    values = _ordered(emit, op, inputs[0], op.descending)[0]
    return emit.cast(values, emit.input_dtype(0))


@lowers(ArgSort)
def _argsort(emit: Emitter, op: ArgSort, inputs: Sequence[Any]) -> Any:
    return _ordered(emit, op, inputs[0], op.descending)[1]


def _ordered(emit: Emitter, op: Ordered, x: Any, descending: bool) -> Any:
    """Write a TopK of all elements, whose equal elements keep their order."""
    kind = emit.input_type(0)
    count = emit.dims([known_shape(op, kind, "x")[op.axis]])
    compute = compute_dtype("TopK", kind.dtype)
    values = x if compute is kind.dtype else emit.cast(x, compute)
    return emit.op("TopK", values, count, outputs=2, axis=op.axis, largest=int(descending), sorted=1)


@lowers(CumProd)
def _cumprod(emit: Emitter, op: CumProd, inputs: Sequence[Any]) -> Any:
    return _running(emit, op, "Mul", inputs[0])


@lowers(CumMax)
def _cummax(emit: Emitter, op: CumMax, inputs: Sequence[Any]) -> Any:
    return _running(emit, op, "Max", inputs[0])


def _running(emit: Emitter, op: Ordered, function: str, x: Any) -> Any:
    """Combine each element with the one 1, then 2, 4, 8, ... places before it."""
    kind = emit.input_type(0)
    shape = known_shape(op, kind, "x")
    axis, size = op.axis % shape.rank, shape[op.axis]
    compute = compute_dtype(function, kind.dtype)
    value = x if compute is kind.dtype else emit.cast(x, compute)
    reach = 1
    while isinstance(size, int) and reach < size:
        first = slice_axis(emit, value, axis, 0, reach)
        later, earlier = slice_axis(emit, value, axis, reach, None), slice_axis(emit, value, axis, 0, size - reach)
        value = emit.op("Concat", first, emit.op(function, later, earlier), axis=axis)
        reach *= 2
    if value is x:
        return emit.op("Identity", x)
    return value if compute is kind.dtype else emit.cast(value, kind.dtype)


@lowers(Reverse)
def _reverse(emit: Emitter, op: Reverse, inputs: Sequence[Any]) -> Any:
    if not op.axes:
        return emit.op("Identity", inputs[0])
    count = len(op.axes)
    bounds = ([_END] * count, [-_END] * count, op.axes, [-1] * count)
    return emit.op("Slice", inputs[0], *(emit.i64(numbers) for numbers in bounds))


@lowers(Trilu)
def _trilu(emit: Emitter, op: Trilu, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    wide = dtype if dtype in _TRILU else DType.I64 if dtype is DType.U32 else DType.I32
    x = inputs[0] if wide is dtype else emit.cast(inputs[0], wide)
    diagonal = emit.constant(op.diagonal, DType.I64)
    result = emit.op("Trilu", x, diagonal, upper=int(op.upper))
    return result if wide is dtype else emit.op("Cast", result, to=dtype)


@lowers(GatherElements)
def _gather_elements(emit: Emitter, op: GatherElements, inputs: Sequence[Any]) -> Any:
    return emit.op("GatherElements", inputs[0], _places(emit, inputs[1]), axis=op.axis)


@lowers(GatherNd)
def _gather_nd(emit: Emitter, op: GatherNd, inputs: Sequence[Any]) -> Any:
    places = emit.cast(inputs[1], DType.I64)
    return emit.op("GatherND", inputs[0], places, batch_dims=op.batch_dims)


@lowers(ScatterElements)
def _scatter_elements(emit: Emitter, op: ScatterElements, inputs: Sequence[Any]) -> Any:
    return _scattered(emit, "ScatterElements", op.mode, (inputs[0], _places(emit, inputs[1]), inputs[2]), axis=op.axis)


@lowers(ScatterNd)
def _scatter_nd(emit: Emitter, op: ScatterNd, inputs: Sequence[Any]) -> Any:
    return _scattered(emit, "ScatterND", op.mode, (inputs[0], emit.cast(inputs[1], DType.I64), inputs[2]))


def _scattered(emit: Emitter, op_type: str, mode: str, inputs: Sequence[Any], **attributes: Any) -> Any:
    dtype = emit.input_dtype(0)
    wide = DType.F32 if dtype in _NARROW and mode != "set" else dtype
    x, places, updates = inputs
    reduction = None if mode == "set" else mode
    result = emit.op(op_type, emit.cast(x, wide), places, emit.cast(updates, wide), reduction=reduction, **attributes)
    return result if wide is dtype else emit.op("Cast", result, to=dtype)


def _places(emit: Emitter, indices: Any) -> Any:
    return indices if emit.input_dtype(1) in {DType.I32, DType.I64} else emit.cast(indices, DType.I64)
