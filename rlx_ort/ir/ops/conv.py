"""Convolution, pooling, windows as columns and resizing of images `(N, C, H, W)` and volumes `(N, C, D, H, W)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.op import Op, named
from rlx_ort.ir.types import Dim, Shape, TensorType

POOLS = ("max", "mean", "sum", "min")
"""Names of the pools."""
RESIZE_MODES = ("nearest", "linear", "cubic")
"""How `Interpolate` computes elements between the given ones."""


class _Conv(Op, operands="x:float weight bias?"):
    def _result(self, x: TensorType, weight: TensorType, *bias: TensorType) -> TensorType:
        shape = conv_shape(self, x, weight)
        expect_bias(self, bias, shape[1])
        return TensorType(self.same_dtype(x, weight, *bias), shape)


class Conv2d(_Conv, builder="conv2d x weight bias stride padding dilation groups * kernel"):
    """A cross-correlation with a weight `(C_out, C_in / groups, kH, kW)` and perhaps a bias `(C_out,)`.

    `stride`, `padding` and `dilation` are for height and width; the padding is zeros on both sides, and the dilation is
    the distance between taps. The channels fall into `groups` parts.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class Conv3d(_Conv, builder="conv3d"):
    """A cross-correlation of a volume with a weight `(C_out, C_in / groups, kD, kH, kW)` and perhaps a bias.

    The attributes are those of `Conv2d`, with one number each for depth, height and width.
    """

    stride: tuple[int, int, int] = (1, 1, 1)
    padding: tuple[int, int, int] = (0, 0, 0)
    dilation: tuple[int, int, int] = (1, 1, 1)
    groups: int = 1


class ConvTranspose2d(
    Op,
    operands="x:float weight bias?",
    builder="conv_transpose2d x weight bias stride padding output_padding dilation groups * kernel",
):
    """The transpose of a convolution, with a weight `(C_in, C_out / groups, kH, kW)` and perhaps a bias.

    The attributes are those of the convolution, whose padding is cut off here; `output_padding` is how many rows and
    columns are added at the end.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    output_padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def _result(self, x: TensorType, weight: TensorType, *bias: TensorType) -> TensorType:
        image, taps = self.expect_rank(x, (4,), "x"), self.expect_rank(weight, (4,), "weight")
        self.expect_dim(image[1], taps[0], "the number of input channels")
        _check_groups(self, taps[0], self.groups)
        if any(more >= max(pair) for more, *pair in zip(self.output_padding, self.stride, self.dilation, strict=True)):
            raise GraphVerifyError(
                f"ConvTranspose2d needs an output_padding below its stride {self.stride} or dilation {self.dilation}, "
                f"got {self.output_padding}"
            )
        channels = taps[1] * self.groups if isinstance(taps[1], int) else None
        expect_bias(self, bias, channels)
        dtype = self.same_dtype(x, weight, *bias)
        sizes: list[Dim] = []
        for i, (size, kernel) in enumerate(zip(image[2:], taps[2:], strict=True)):
            if not isinstance(size, int) or not isinstance(kernel, int):
                sizes.append(None)
                continue
            grown = (size - 1) * self.stride[i] + self.dilation[i] * (kernel - 1) + 1
            sizes.append(_positive(self, grown + self.output_padding[i] - 2 * self.padding[i]))
        return TensorType(dtype, Shape((image[0], channels, *sizes)))


class Pool(Op, operands="x:float", builder="pool kind:function x kernel stride padding"):
    """The largest, mean, sum or smallest element of each window.

    `max` and `min` ignore padding; `mean` counts it as zeros and divides by the whole window.
    """

    function: str = named("pool", POOLS)
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def _result(self, x: TensorType) -> TensorType:
        shape = self.expect_rank(x, (4,), "x")
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel, strict=True)):
            raise GraphVerifyError(f"Pool needs padding of at most half its kernel {self.kernel}, got {self.padding}")
        sizes = _window_counts(self, shape[2:], self.kernel, self.stride, self.padding, (1, 1))
        return TensorType(x.dtype, Shape((*shape[:2], *sizes)))


class ResizeNearest2x(Op, operands="x", builder="resize_nearest_2x"):
    """Each pixel doubled in height and width."""

    def _result(self, x: TensorType) -> TensorType:
        shape = self.expect_rank(x, (4,), "x")
        doubled = (dim * 2 if isinstance(dim, int) else None for dim in shape[2:])
        return TensorType(x.dtype, Shape((*shape[:2], *doubled)))


class Im2Col(Op, operands="x:float", builder="im2col"):
    """The windows of an `(N, C, H, W)` image as columns, `(N, C * kH * kW, windows)`, zeros in the padding.

    `kernel` is the height and width of a window; the other attributes are those of `Conv2d`.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def windows(self, shape: Shape) -> tuple[int, int]:
        """Return how many windows there are in height and in width."""
        rows, columns = _window_counts(self, shape[2:], self.kernel, self.stride, self.padding, self.dilation)
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise GraphVerifyError(f"Im2Col needs the height and width of x {shape}; bind the dimensions first")
        return rows, columns

    def _result(self, x: TensorType) -> TensorType:
        shape = self.expect_rank(x, (4,), "x")
        rows, columns = self.windows(shape)
        channels = shape[1]
        if not isinstance(channels, int):
            raise GraphVerifyError(f"Im2Col needs the number of channels of x {shape}; bind the dimension first")
        return TensorType(x.dtype, Shape((shape[0], channels * math.prod(self.kernel), rows * columns)))


class Interpolate(Op, operands="x:float", builder="interpolate"):
    """An `(N, C, ...)` tensor resized to other spatial sizes.

    `nearest` takes element floor(i * old / new). `linear` and `cubic` (coefficient -0.75) treat elements as areas
    whose centres are at i + 0.5, unless `align_corners` maps the first and last element to the first and last one.
    There is a size for each dimension after the channels.
    """

    sizes: tuple[int, ...]
    mode: str = named("resize mode", RESIZE_MODES, default="nearest")
    align_corners: bool = False

    def __post_init__(self) -> None:
        Op.__post_init__(self)
        if self.align_corners and self.mode == "nearest":
            raise GraphVerifyError("Interpolate with align_corners takes mode linear or cubic, not nearest")
        if min(self.sizes, default=0) < 1:
            raise GraphVerifyError(f"Interpolate needs sizes of at least 1, got {self.sizes}")

    def _result(self, x: TensorType) -> TensorType:
        shape = self.expect_rank(x, (2 + len(self.sizes),), "x")
        if self.mode == "cubic" and len(self.sizes) != 2:
            raise GraphVerifyError(f"Interpolate with mode cubic resizes images, not {len(self.sizes)} dimensions")
        return TensorType(x.dtype, Shape((*shape[:2], *self.sizes)))


def conv_shape(op: Any, x: TensorType, weight: TensorType) -> Shape:
    """Return the shape of a convolution, an op with the attributes of `Conv2d`, over as many axes as its stride has."""
    rank = (2 + len(op.stride),)
    image, taps = op.expect_rank(x, rank, "x"), op.expect_rank(weight, rank, "weight")
    if op.groups >= 1 and isinstance(taps[1], int):
        op.expect_dim(image[1], taps[1] * op.groups, "the number of input channels")
    _check_groups(op, taps[0], op.groups)
    counted = _window_counts(op, image[2:], taps[2:], op.stride, op.padding, op.dilation)
    return Shape((image[0], taps[0], *counted))


def expect_bias(op: Op, bias: Sequence[TensorType], channels: Dim) -> None:
    """Check that a bias, if there is one, has a number for each channel."""
    for value in bias:
        (size,) = op.expect_rank(value, (1,), "bias")
        op.expect_dim(size, channels, "the size of the bias")


def _check_groups(op: Op, channels: Dim, groups: int) -> None:
    if groups < 1 or (isinstance(channels, int) and channels % groups):
        raise GraphVerifyError(f"{op.kind} cannot divide {channels} channels into {groups} groups")


def _window_counts(
    op: Op,
    sizes: Sequence[Dim],
    kernel: Sequence[Dim],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Dim]:
    """Return how many positions a window has along each axis, None where that is unknown."""
    counts: list[Dim] = []
    if min(*stride, *dilation, 1) < 1:
        raise GraphVerifyError(f"{op.kind} has stride {[*stride]} and dilation {[*dilation]}; use 1 or more")
    for size, taps, step, pad, gap in zip(sizes, kernel, stride, padding, dilation, strict=True):
        if isinstance(size, int) and isinstance(taps, int):
            counts.append(_positive(op, (size + 2 * pad - gap * (taps - 1) - 1) // step + 1))
        else:
            # A window of 1, or one with matching padding, keeps a dimension whatever its size is.
            keeps = isinstance(taps, int) and step == 1 and 2 * pad == gap * (taps - 1)
            counts.append(size if keeps else None)
    return counts


def _positive(op: Op, size: int) -> int:
    if size < 1:
        raise GraphVerifyError(f"{op.describe()} leaves nothing of its input: the result would have size {size}")
    return size
