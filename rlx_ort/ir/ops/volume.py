"""Volumes `(N, C, D, H, W)`, windows as columns, and resizing by any factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.infer import expect_dim, expect_float, expect_rank, known_name, pair, same_dtype
from rlx_ort.ir.op import Op, OpTypes, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.ir.windows import counts, window_count

__all__ = ["RESIZE_MODES", "Conv3d", "Im2Col", "Interpolate", "VolumeBuilders"]

RESIZE_MODES = ("nearest", "linear", "cubic")
"""How `Interpolate` finds the elements in between."""


@dataclass(frozen=True, slots=True)
class Conv3d(Op):
    """A cross-correlation of a volume with a weight `(C_out, C_in / groups, kD, kH, kW)` and perhaps a bias.

    Attributes:
        stride: step in depth, height and width.
        padding: zeros on both sides of depth, height and width.
        dilation: distance between the taps in depth, height and width.
        groups: how many parts the channels fall into.
    """

    stride: tuple[int, ...] = (1, 1, 1)
    padding: tuple[int, ...] = (0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
    groups: int = 1

    arity = (2, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(N, C_out, D_out, H_out, W_out)`."""
        dtype = same_dtype(self, inputs, ("x", "weight", "bias")[: len(inputs)])
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        volume = expect_rank(self, x, (5,), "x")
        weight = expect_rank(self, tensor_input(self, inputs, 1, "weight"), (5,), "weight")
        channels = weight[0]
        if self.groups < 1 or (isinstance(channels, int) and channels % self.groups):
            raise GraphVerifyError(f"Conv3d cannot divide {channels} channels into {self.groups} groups")
        if isinstance(weight[1], int):
            expect_dim(self, volume[1], weight[1] * self.groups, "the number of input channels")
        if len(inputs) > 2:
            (size,) = expect_rank(self, tensor_input(self, inputs, 2, "bias"), (1,), "bias")
            expect_dim(self, size, channels, "the size of the bias")
        windows = zip(volume[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = [window_count(self, *window) for window in windows]
        return (TensorType(dtype, Shape((volume[0], channels, *sizes))),)


@dataclass(frozen=True, slots=True)
class Im2Col(Op):
    """The windows of an `(N, C, H, W)` image as columns, `(N, C * kH * kW, windows)`, zeros in the padding.

    Attributes:
        kernel: height and width of a window.
        stride: step in height and width.
        padding: zeros on both sides of height and width.
        dilation: distance between the taps.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    arity = (1, 1)

    def windows(self, shape: Shape) -> tuple[int, int]:
        """Return how many windows there are in height and in width.

        Raises:
            GraphVerifyError: the height or width has no size, or no window fits.
        """
        found = [
            window_count(self, *window)
            for window in zip(shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        ]
        rows, columns = found
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise GraphVerifyError(f"Im2Col needs the height and width of x {shape}; bind the dimensions first")
        return rows, columns

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(N, C * kH * kW, windows)`."""
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        shape = expect_rank(self, x, (4,), "x")
        rows, columns = self.windows(shape)
        channels = shape[1]
        if not isinstance(channels, int):
            raise GraphVerifyError(f"Im2Col needs the number of channels of x {shape}; bind the dimension first")
        return (TensorType(x.dtype, Shape((shape[0], channels * math.prod(self.kernel), rows * columns))),)


@dataclass(frozen=True, slots=True)
class Interpolate(Op):
    """An `(N, C, ...)` tensor resized to other spatial sizes.

    `nearest` takes element floor(i * old / new). `linear` and `cubic` (coefficient -0.75) see elements as areas, whose
    centres are at i + 0.5, unless `align_corners` puts the first and last element on the first and last one.

    Attributes:
        sizes: the new sizes, one for each dimension after the channels.
        mode: one of `RESIZE_MODES`.
        align_corners: see above; not for `nearest`.
    """

    sizes: tuple[int, ...]
    mode: str = "nearest"
    align_corners: bool = False

    arity = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", known_name("resize mode", self.mode, RESIZE_MODES))
        if self.align_corners and self.mode == "nearest":
            raise GraphVerifyError("Interpolate with align_corners takes mode linear or cubic, not nearest")
        if min(self.sizes, default=0) < 1:
            raise GraphVerifyError(f"Interpolate needs sizes of at least 1, got {self.sizes}")

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape with the new sizes."""
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        shape = expect_rank(self, x, (2 + len(self.sizes),), "x")
        if self.mode == "cubic" and len(self.sizes) != 2:
            raise GraphVerifyError(f"Interpolate with mode cubic resizes images, not {len(self.sizes)} dimensions")
        return (TensorType(x.dtype, Shape((*shape[:2], *self.sizes))),)


class VolumeBuilders(LeafBuilders):
    """Builders of convolution in three dimensions, columns and resizing."""

    __slots__ = ()

    def conv3d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        name: str | None = None,
    ) -> Value:
        """Convolve `(N, C, D, H, W)` with a weight `(C_out, C / groups, kD, kH, kW)`.

        Raises:
            GraphVerifyError: the channels, groups or window do not fit.
        """
        op = Conv3d(
            counts("stride", stride, 3, 1), counts("padding", padding, 3), counts("dilation", dilation, 3, 1), groups
        )
        volume = self._as_value(x)
        extra = () if bias is None else (self._as_value(bias, volume),)
        return self._add(op, volume, self._as_value(weight, volume), *extra, name=name)

    def im2col(
        self,
        x: Operand,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        *,
        name: str | None = None,
    ) -> Value:
        """Return the windows of an image as columns."""
        op = Im2Col(
            pair("kernel", kernel, 1),
            pair("stride", stride, 1),
            pair("padding", padding),
            pair("dilation", dilation, 1),
        )
        return self._add(op, self._as_value(x), name=name)

    def interpolate(
        self,
        x: Operand,
        sizes: Sequence[int],
        mode: str = "nearest",
        align_corners: bool = False,
        *,
        name: str | None = None,
    ) -> Value:
        """Resize the dimensions after the channels (`RESIZE_MODES`)."""
        return self._add(Interpolate(tuple(sizes), mode, align_corners), self._as_value(x), name=name)
