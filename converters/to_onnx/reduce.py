"""ONNX forms of the reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import compute_dtype, op_in
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.reduce import ArgMax, ArgMin, Cumsum, Reduce, Softmax, TopK

__all__: list[str] = []

_REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}


@lowers(Reduce)
def _reduce(emit: Emitter, op: Reduce, inputs: Sequence[Any]) -> Any:
    if not op.axes:
        return emit.op("Identity", inputs[0])
    dtype, axes = emit.input_dtype(0), emit.i64(op.axes)
    return op_in(emit, _REDUCE[op.function], dtype, inputs[0], others=[axes], keepdims=int(op.keep_dim))


@lowers(Softmax)
def _softmax(emit: Emitter, op: Softmax, inputs: Sequence[Any]) -> Any:
    return emit.op("Softmax", inputs[0], axis=op.axis)


@lowers(Cumsum)
def _cumsum(emit: Emitter, op: Cumsum, inputs: Sequence[Any]) -> Any:
    axis = emit.constant(op.axis, DType.I64)
    flags: dict[str, Any] = {"exclusive": int(op.exclusive), "reverse": int(op.reverse)}
    return op_in(emit, "CumSum", emit.input_dtype(0), inputs[0], others=[axis], **flags)


@lowers(TopK)
def _topk(emit: Emitter, op: TopK, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    x = emit.cast(inputs[0], compute) if (compute := compute_dtype("TopK", dtype)) is not dtype else inputs[0]
    _, places = emit.op("TopK", x, emit.i64([op.k]), outputs=2, axis=-1, largest=1, sorted=1)
    return places if op.dtype is DType.I64 else emit.op("Cast", places, to=op.dtype)


@lowers(ArgMax)
def _argmax(emit: Emitter, op: ArgMax, inputs: Sequence[Any]) -> Any:
    return _places(emit, "ArgMax", op, inputs[0])


@lowers(ArgMin)
def _argmin(emit: Emitter, op: ArgMin, inputs: Sequence[Any]) -> Any:
    return _places(emit, "ArgMin", op, inputs[0])


def _places(emit: Emitter, op_type: str, op: ArgMax | ArgMin, x: Any) -> Any:
    dtype = emit.input_dtype(0)
    return op_in(emit, op_type, dtype, x, result=DType.I64, axis=op.axis, keepdims=int(op.keep_dim))
