"""ONNX forms of convolution, pooling and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import op_in
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.conv import Conv2d, ConvTranspose2d, Pool, ResizeNearest2x

__all__: list[str] = []


@lowers(Conv2d)
def _conv(emit: Emitter, op: Conv2d, inputs: Sequence[Any]) -> Any:
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
