"""Quantisation to 8 bits and back, simulated quantisation, and integer products.

Rounding is half to even everywhere, as in ONNX. Scales and zero points of `Quantize` and `Dequantize` are attributes,
because they are constant in a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, known_shape, named
from rlx_ort.ir.ops.conv import conv_shape, expect_bias
from rlx_ort.ir.types import Dim, Shape, TensorType

QMAX = {8: 127, 4: 7, 2: 1}
"""Bits -> the largest quantised number of symmetric quantisation."""
SCALE_MODES = ("per_batch", "fixed", "ema")
"""Sources of the scale of `FakeQuantize`."""


class _Scaled(Op):
    """Base of quantising and its inverse, with one scale and zero point, or one for each index along the axis."""

    scales: tuple[float, ...]
    zero_points: tuple[int, ...] = (0,)
    axis: int | None = None

    to = DType.F32

    def __post_init__(self) -> None:
        if len(self.scales) != len(self.zero_points) or (self.axis is None and len(self.scales) != 1):
            wanted = "one scale and one zero point" if self.axis is None else "as many zero points as scales"
            raise GraphVerifyError(f"{self.kind} needs {wanted}, got {len(self.scales)} and {len(self.zero_points)}")
        if not all(math.isfinite(scale) and scale > 0 for scale in self.scales):
            raise GraphVerifyError(f"{self.kind} needs finite scales above 0, got {_some(self.scales)}")
        _check_zero_points(self, self.zero_points)

    def describe(self) -> str:
        """Return the op with its first scales; there may be thousands."""
        return f"{self.kind}(scales={_some(self.scales)}, axis={self.axis})"

    def _result(self, x: TensorType) -> TensorType:
        if self.axis is not None:
            shape = known_shape(self, x, "x")
            size = shape[self.normal_axis(self.axis, shape.rank)]
            self.expect_dim(size, len(self.scales), f"axis {self.axis} of {shape}, which has that many scales,")
        return TensorType(self.to, x.shape)


class Quantize(
    _Scaled,
    operands="x:float",
    builder="quantize x scale:scales zero_point:zero_points; quantize_per_channel x axis! scales zero_points!",
):
    """clamp(round(x / scale) + zero_point, -128, 127) as i8."""

    to = DType.I8


class Dequantize(
    _Scaled,
    operands="q:i8",
    builder="dequantize q scale:scales zero_point:zero_points; dequantize_per_channel q axis! scales zero_points!",
):
    """(q - zero_point) * scale of i8 as f32."""


class _Simulated(Op, operands="x:float scale:float"):
    """Base of the ops that quantise and dequantise in one step, with one scale or one for each index along an axis."""

    bits: int = 8
    axis: int | None = None

    def __post_init__(self) -> None:
        Op.__post_init__(self)
        if self.bits not in QMAX:
            raise GraphVerifyError(f"{self.kind} knows 8, 4 and 2 bits, not {self.bits}")

    def _result(self, x: TensorType, *scale: TensorType) -> None:
        shape = known_shape(self, x, "x")
        size: Dim = 1 if self.axis is None else shape[self.normal_axis(self.axis, shape.rank)]
        for value in scale:
            scale_shape = self.expect_rank(value, (0, 1) if self.axis is None else (1,), "scale")
            self.expect_dim(scale_shape[0] if scale_shape else 1, size, "the number of scales")


class FakeQuantize(_Simulated, operands="x:float scale:float?"):
    """x quantised symmetrically and dequantised: clamp(round(x / scale), -qmax, qmax) * scale.

    Under `per_batch` the scale is max(max|x| / qmax, 1e-12) of this input. Under `fixed` it is a second input
    of shape `()`, `(1,)` or, with an axis, as long as the axis. `ema`, the moving average of training,
    reads its state like `fixed` here and does not change it. The decay of the average, and `ste`, whether gradients
    pass straight through, are kept for training frameworks.
    """

    scale_mode: str = named("scale mode", SCALE_MODES, default="per_batch")
    decay: float | None = None
    ste: bool = True

    def _result(self, x: TensorType, *scale: TensorType) -> None:
        if bool(scale) == (self.scale_mode == "per_batch"):
            state = "no state" if scale else "a state, the scale"
            raise GraphVerifyError(f"FakeQuantize with scale mode {self.scale_mode!r} takes x and {state}")
        _Simulated._result(self, x, *scale)


class FakeQuantizeLSQ(_Simulated, builder="fake_quantize_lsq"):
    """clamp(round(x / scale), -qmax, qmax) * scale, with a learned scale as second input."""


class _Requantized(Op, operands="x:i8 w:i8 bias:i32?"):
    """Base of the products of i8 with an i8 result."""

    x_zp: int
    w_zp: int
    out_zp: int
    mult: float

    def __post_init__(self) -> None:
        _check_zero_points(self, (self.x_zp, self.w_zp, self.out_zp))


class QMatMul(_Requantized, builder="q_matmul"):
    """A product of i8 with an i8 result: clamp(round(acc * mult) + out_zp, -128, 127).

    acc is the i32 sum of (x - x_zp) * (w - w_zp) over K, plus an i32 bias; it wraps around if it leaves 32 bits,
    which needs K above 33 000. acc * mult is computed in f64, since f32 cannot hold every i32. `mult` is the scale
    of x times the scale of w divided by the scale of the result.
    """

    def _result(self, x: TensorType, w: TensorType, *bias: TensorType) -> TensorType:
        lhs, rhs = known_shape(self, x, "x"), known_shape(self, w, "w")
        if lhs.rank < 2 or rhs.rank < 2:
            raise GraphVerifyError(f"QMatMul needs matrices, got {lhs} and {rhs}; reshape them to rank 2 or more")
        self.expect_dim(rhs[-2], lhs[-1], "the second last dimension of w")
        expect_bias(self, bias, rhs[-1])
        batch = self.broadcast((Shape(lhs[:-2]), Shape(rhs[:-2])))
        return TensorType(DType.I8, Shape((*(batch or ()), lhs[-2], rhs[-1])))


class QConv2d(_Requantized, builder="q_conv2d"):
    """A convolution of i8 with an i8 result, scaled like `QMatMul`; taps in the padding contribute nothing.

    The other attributes are those of `Conv2d`.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def _result(self, x: TensorType, w: TensorType, *bias: TensorType) -> TensorType:
        shape = conv_shape(self, x, w)
        expect_bias(self, bias, shape[1])
        return TensorType(DType.I8, shape)


def _some(scales: Sequence[float]) -> str:
    shown = ", ".join(f"{scale:g}" for scale in scales[:4])
    return f"({shown}, ... {len(scales)} in all)" if len(scales) > 4 else f"({shown})"


def _check_zero_points(op: Op, numbers: Sequence[int]) -> None:
    if not all(-128 <= number <= 127 for number in numbers):
        raise GraphVerifyError(f"{op.kind} needs every zero point between -128 and 127")


@builder
def fake_quantize(
    graph: Graph,
    x: Operand,
    bits: int = 8,
    axis: int | None = None,
    state: Operand | None = None,
    scale_mode: str | None = None,
    **node: Unpack[NodeArgs],
) -> Value:
    """Quantise and dequantise by the scale `state`; without one, the scale is computed from x."""
    mode = scale_mode or ("per_batch" if state is None else "fixed")
    return graph._add(FakeQuantize(bits, axis, mode), *graph._like(x, state), **node)
