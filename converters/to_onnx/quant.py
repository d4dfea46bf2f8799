"""Lowerings of the quantised ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.quant import QMAX, Dequantize, FakeQuantize, FakeQuantizeLSQ, QConv2d, QMatMul, Quantize
from rlx_ort.ir.types import TensorType

_SMALLEST_SCALE = 1e-12


@lowers(Quantize)
def _quantize(emit: Emitter, op: Quantize, inputs: Sequence[Any]) -> Any:
    """QuantizeLinear, which divides and rounds half to even; f64, which it lacks, step by step."""
    kind = emit.input_type(0)
    if kind.dtype is DType.F64:
        return _quantize_f64(emit, op, inputs[0], kind)
    dtype = kind.dtype if kind.dtype is DType.F16 else DType.F32
    scale = emit.constant(np.asarray(_one_or_many(op.scales, op.axis), np.float64), dtype)
    zero = emit.constant(np.asarray(_one_or_many(op.zero_points, op.axis), np.int8))
    return emit.op("QuantizeLinear", emit.cast(inputs[0], dtype), scale, zero, axis=op.axis)


@lowers(Dequantize)
def _dequantize(emit: Emitter, op: Dequantize, inputs: Sequence[Any]) -> Any:
    scale = emit.constant(np.asarray(_one_or_many(op.scales, op.axis), np.float32))
    zero = emit.constant(np.asarray(_one_or_many(op.zero_points, op.axis), np.int8))
    return emit.op("DequantizeLinear", inputs[0], scale, zero, axis=op.axis)


@lowers(FakeQuantize)
def _fake_quantize(emit: Emitter, op: FakeQuantize, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    if kind.shape is not None and 0 in kind.shape:
        return emit.op("Identity", inputs[0])  # there is no largest element of nothing
    wide = _wide(kind.dtype)
    x = emit.cast(inputs[0], wide)
    if op.scale_mode == "per_batch":
        rank = 0 if kind.shape is None else kind.shape.rank
        kept = None if op.axis is None else op.axis % rank
        axes = emit.i64([axis for axis in range(rank) if axis != kept])
        size = emit.op("Abs", x)
        largest = emit.op("ReduceMax", size, axes, keepdims=1, noop_with_empty_axes=1)
        ratio = emit.op("Div", largest, emit.constant(float(QMAX[op.bits]), wide))
        scale = emit.op("Max", ratio, emit.constant(_SMALLEST_SCALE, wide))
    else:
        scale = _along(emit, emit.cast(inputs[1], wide), op.axis, kind)
    return _rounded(emit, x, scale, op.bits, kind.dtype)


@lowers(FakeQuantizeLSQ)
def _fake_quantize_lsq(emit: Emitter, op: FakeQuantizeLSQ, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    wide = _wide(kind.dtype)
    scale = _along(emit, emit.cast(inputs[1], wide), op.axis, kind)
    return _rounded(emit, emit.cast(inputs[0], wide), scale, op.bits, kind.dtype)


@lowers(QMatMul)
def _q_matmul(emit: Emitter, op: QMatMul, inputs: Sequence[Any]) -> Any:
    if known_shape(op, emit.input_type(0), "x")[-1] == 0:
        # MatMulInteger of ONNX Runtime 1.31 leaves its result unset when there is nothing to add up.
        result = emit.node.types[0]
        shape = known_shape(op, result, "result") if isinstance(result, TensorType) else ()
        acc = emit.op("Expand", emit.constant(0, DType.I32), emit.dims(shape))
    else:
        zeros = (emit.constant(np.asarray(zero, np.int8)) for zero in (op.x_zp, op.w_zp))
        acc = emit.op("MatMulInteger", inputs[0], inputs[1], *zeros)
    if len(inputs) > 2:
        acc = emit.op("Add", acc, inputs[2])
    return _requantized(emit, acc, op.mult, op.out_zp)


@lowers(QConv2d)
def _q_conv2d(emit: Emitter, op: QConv2d, inputs: Sequence[Any]) -> Any:
    """ConvInteger over an input that is padded with its zero point beforehand, so that padding adds nothing."""
    x_zero, w_zero = (emit.constant(np.asarray(zero, np.int8)) for zero in (op.x_zp, op.w_zp))
    x = inputs[0]
    if any(op.padding):
        x = emit.op("Pad", x, emit.i64([0, 0, *op.padding, 0, 0, *op.padding]), x_zero)
    acc = emit.op(
        "ConvInteger", x, inputs[1], x_zero, w_zero, strides=op.stride, dilations=op.dilation, group=op.groups
    )
    if len(inputs) > 2:
        acc = emit.op("Add", acc, emit.op("Unsqueeze", inputs[2], emit.i64([1, 2])))
    return _requantized(emit, acc, op.mult, op.out_zp)


def _quantize_f64(emit: Emitter, op: Quantize, x: Any, kind: TensorType) -> Any:
    shape = [1] * (0 if kind.shape is None else kind.shape.rank)
    if op.axis is not None:
        shape[op.axis] = len(op.scales)
    scale = emit.constant(np.reshape(np.asarray(op.scales, np.float64), shape))
    zero = emit.constant(np.reshape(np.asarray(op.zero_points, np.float64), shape))
    rounded = emit.op("Round", emit.op("Div", x, scale))
    return _clipped(emit, emit.op("Add", rounded, zero))


def _requantized(emit: Emitter, acc: Any, mult: float, zero_point: int) -> Any:
    # f64: f32 holds whole numbers exactly only up to 2^24.
    scaled = emit.op("Mul", emit.op("Cast", acc, to=DType.F64), emit.constant(mult, DType.F64))
    shifted = emit.op("Add", emit.op("Round", scaled), emit.constant(float(zero_point), DType.F64))
    return _clipped(emit, shifted)


def _clipped(emit: Emitter, value: Any) -> Any:
    bounds = (emit.constant(bound, DType.F64) for bound in (-128.0, 127.0))
    return emit.op("Cast", emit.op("Clip", value, *bounds), to=DType.I8)


def _rounded(emit: Emitter, x: Any, scale: Any, bits: int, dtype: DType) -> Any:
    bounds = (emit.constant(float(bound), _wide(dtype)) for bound in (-QMAX[bits], QMAX[bits]))
    steps = emit.op("Clip", emit.op("Round", emit.op("Div", x, scale)), *bounds)
    result = emit.op("Mul", steps, scale)
    return result if dtype is _wide(dtype) else emit.op("Cast", result, to=dtype)


def _along(emit: Emitter, scale: Any, axis: int | None, kind: TensorType) -> Any:
    """Return scales so that they broadcast along an axis of a tensor."""
    rank = 0 if kind.shape is None else kind.shape.rank
    if axis is None:
        return emit.op("Reshape", scale, emit.i64([]))
    return emit.op("Reshape", scale, emit.i64([-1] + [1] * (rank - 1 - axis % rank)))


def _wide(dtype: DType) -> DType:
    """Return the dtype to compute in: f16 cannot hold the smallest scale, and few kernels take bf16."""
    return DType.F64 if dtype is DType.F64 else DType.F32


def _one_or_many(numbers: Sequence[float], axis: int | None) -> float | Sequence[float]:
    return numbers[0] if axis is None else numbers
