"""ONNX forms of convolution in three dimensions, columns and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import op_in
from rlx_ort.converters.to_onnx.shape import reshape
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.conv import Conv3d, Im2Col, Interpolate
from rlx_ort.ir.shape import Shape

__all__: list[str] = []


@lowers(Conv3d)
def _conv3d(emit: Emitter, op: Conv3d, inputs: Sequence[Any]) -> Any:
    return op_in(
        emit,
        "Conv",
        emit.input_dtype(0),
        *inputs,
        strides=op.stride,
        pads=[*op.padding, *op.padding],
        dilations=op.dilation,
        group=op.groups,
    )


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
