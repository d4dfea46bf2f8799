"""ONNX forms of convolution in two and three dimensions, pooling, columns and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import op_in
from rlx_ort.converters.to_onnx.shape import reshape
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.conv import Conv2d, Conv3d, ConvTranspose2d, Im2Col, Interpolate, Pool, ResizeNearest2x
from rlx_ort.ir.shape import Shape


@lowers(Conv2d)
@lowers(Conv3d)
def _conv(emit: Emitter, op: Conv2d | Conv3d, inputs: Sequence[Any]) -> Any:
    return op_in(
        emit,
        "Conv",
        emit.input_dtype(0),
        *inputs,
        strides=list(op.stride),
        pads=[*op.padding, *op.padding],
        dilations=list(op.dilation),
        group=op.groups,
    )


@lowers(ConvTranspose2d)
def _conv_transpose(emit: Emitter, op: ConvTranspose2d, inputs: Sequence[Any]) -> Any:
    return op_in(
        emit,
        "ConvTranspose",
        emit.input_dtype(0),
        *inputs,
        strides=list(op.stride),
        pads=[*op.padding, *op.padding],
        output_padding=list(op.output_padding),
        dilations=list(op.dilation),
        group=op.groups,
    )


@lowers(Pool)
def _pool(emit: Emitter, op: Pool, inputs: Sequence[Any]) -> Any:
    dtype, x = emit.input_dtype(0), inputs[0]
    window: dict[str, Any] = {
        "kernel_shape": list(op.kernel),
        "strides": list(op.stride),
        "pads": [*op.padding, *op.padding],
    }
    if op.function == "max":
        return op_in(emit, "MaxPool", dtype, x, **window)
    if op.function == "min":
        return emit.op("Neg", op_in(emit, "MaxPool", dtype, emit.op("Neg", x), **window))
    mean = op_in(emit, "AveragePool", dtype, x, count_include_pad=1, **window)
    return mean if op.function == "mean" else emit.op("Mul", mean, emit.constant(math.prod(op.kernel), dtype))


@lowers(ResizeNearest2x)
def _resize(emit: Emitter, op: ResizeNearest2x, inputs: Sequence[Any]) -> Any:
    scales = emit.constant(np.array([1, 1, 2, 2], np.float32))
    how: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    dtype: DType = emit.input_dtype(0)
    return op_in(emit, "Resize", dtype, inputs[0], others=[None, scales], **how)


@lowers(Im2Col)
def _im2col(emit: Emitter, op: Im2Col, inputs: Sequence[Any]) -> Any:
    """Slice the padded image once for each tap of the window, and stack the slices behind the channels."""
    kind = emit.input_type(0)
    shape = known_shape(op, kind, "x")
    rows, columns = op.windows(shape)
    x = inputs[0]
    if any(op.padding):
        x = op_in(emit, "Pad", kind.dtype, x, others=[emit.i64([0, 0, *op.padding, 0, 0, *op.padding])])
    parts = []
    for place in range(op.kernel[0] * op.kernel[1]):
        start = [tap * step for tap, step in zip(divmod(place, op.kernel[1]), op.dilation, strict=True)]
        last = zip(start, op.stride, (rows, columns), strict=True)
        end = [first + step * (count - 1) + 1 for first, step, count in last]
        part = emit.op("Slice", x, *(emit.i64(numbers) for numbers in (start, end, [2, 3], op.stride)))
        parts.append(emit.op("Unsqueeze", part, emit.i64([2])))
    stacked = emit.op("Concat", *parts, axis=2) if len(parts) > 1 else parts[0]
    source = Shape((*shape[:2], len(parts), rows, columns))
    channels = shape[1] if isinstance(shape[1], int) else 0
    return reshape(emit, stacked, source, (shape[0], channels * len(parts), rows * columns))


@lowers(Interpolate)
def _interpolate(emit: Emitter, op: Interpolate, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    sizes = emit.dims((*known_shape(op, kind, "x")[:2], *op.sizes))
    centres = "align_corners" if op.align_corners else "half_pixel"
    way: dict[str, Any] = {"coordinate_transformation_mode": centres}
    if op.mode == "nearest":
        way = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    others = [None, None, sizes]
    return op_in(emit, "Resize", kind.dtype, inputs[0], others=others, mode=op.mode, **way)
