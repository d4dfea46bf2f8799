"""Convolution, pooling and resizing of `(N, C, H, W)` images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.infer import expect_dim, expect_float, expect_rank, known_name, pair, same_dtype
from rlx_ort.ir.op import Op, OpTypes, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["POOLS", "Conv2d", "ConvBuilders", "ConvTranspose2d", "Pool", "ResizeNearest2x"]

POOLS = ("max", "mean", "sum", "min")
"""Names of the pools."""


@dataclass(frozen=True, slots=True)
class Conv2d(Op):
    """A cross-correlation with a weight `(C_out, C_in / groups, kH, kW)` and perhaps a bias `(C_out,)`.

    Attributes:
        stride: step in height and width.
        padding: zeros on both sides of the height and of the width.
        dilation: distance between the taps in height and width.
        groups: how many parts the channels fall into.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    arity = (2, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(N, C_out, H_out, W_out)`."""
        x, weight = _image_and_weight(self, inputs, self.groups)
        channels = x[1]
        if isinstance(channels, int) and isinstance(weight[1], int):
            expect_dim(self, channels, weight[1] * self.groups, "the number of input channels")
        _check_groups(self, weight[0], self.groups)
        _check_bias(self, inputs, weight[0])
        dtype = same_dtype(self, inputs, ("x", "weight", "bias")[: len(inputs)])
        windows = zip(x[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = [_window_count(self, *window) for window in windows]
        return (TensorType(dtype, Shape((x[0], weight[0], *sizes))),)


@dataclass(frozen=True, slots=True)
class ConvTranspose2d(Op):
    """The transpose of a convolution, with a weight `(C_in, C_out / groups, kH, kW)` and perhaps a bias.

    Attributes:
        stride: distance between the input's elements in the result.
        padding: rows and columns cut off on both sides.
        output_padding: rows and columns added at the end.
        dilation: distance between the taps.
        groups: how many parts the channels fall into.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    output_padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    arity = (2, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(N, C_out, H_out, W_out)`."""
        x, weight = _image_and_weight(self, inputs, self.groups)
        expect_dim(self, x[1], weight[0], "the number of input channels")
        _check_groups(self, weight[0], self.groups)
        channels = weight[1] * self.groups if isinstance(weight[1], int) else None
        _check_bias(self, inputs, channels)
        dtype = same_dtype(self, inputs, ("x", "weight", "bias")[: len(inputs)])
        sizes: list[Dim] = []
        for i, (size, taps) in enumerate(zip(x[2:], weight[2:], strict=True)):
            if not isinstance(size, int) or not isinstance(taps, int):
                sizes.append(None)
                continue
            grown = (size - 1) * self.stride[i] + self.dilation[i] * (taps - 1) + 1
            sizes.append(_positive(self, grown + self.output_padding[i] - 2 * self.padding[i]))
        return (TensorType(dtype, Shape((x[0], channels, *sizes))),)


@dataclass(frozen=True, slots=True)
class Pool(Op):
    """The largest, mean, sum or smallest element of each window.

    Padding never wins in `max` and `min`; `mean` divides by the whole window, padding counted as zeros.
    """

    function: str
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    arity = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", known_name("pool", self.function, POOLS))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(N, C, H_out, W_out)`."""
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        shape = expect_rank(self, x, (4,), "x")
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel, strict=True)):
            raise GraphVerifyError(f"Pool needs padding of at most half its kernel {self.kernel}, got {self.padding}")
        windows = zip(shape[2:], self.kernel, self.stride, self.padding, (1, 1), strict=True)
        return (TensorType(x.dtype, Shape((*shape[:2], *(_window_count(self, *window) for window in windows)))),)


@dataclass(frozen=True, slots=True)
class ResizeNearest2x(Op):
    """Each pixel doubled in height and width."""

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(N, C, 2H, 2W)`."""
        x = tensor_input(self, inputs, 0, "x")
        shape = expect_rank(self, x, (4,), "x")
        doubled = (dim * 2 if isinstance(dim, int) else None for dim in shape[2:])
        return (TensorType(x.dtype, Shape((*shape[:2], *doubled))),)


def _image_and_weight(op: Op, inputs: OpTypes, groups: int) -> tuple[Shape, Shape]:
    x = tensor_input(op, inputs, 0, "x")
    expect_float(op, x, "x")
    if groups < 1:
        raise GraphVerifyError(f"{op.kind} needs at least 1 group, got {groups}")
    return expect_rank(op, x, (4,), "x"), expect_rank(op, tensor_input(op, inputs, 1, "weight"), (4,), "weight")


def _check_groups(op: Op, channels: Dim, groups: int) -> None:
    if isinstance(channels, int) and channels % groups:
        raise GraphVerifyError(f"{op.kind} cannot divide {channels} channels into {groups} groups")


def _check_bias(op: Op, inputs: OpTypes, channels: Dim) -> None:
    if len(inputs) > 2:
        (size,) = expect_rank(op, tensor_input(op, inputs, 2, "bias"), (1,), "bias")
        expect_dim(op, size, channels, "the size of the bias")


def _taps(weight: ValueType | None) -> int:
    shape = weight.shape if isinstance(weight, TensorType) else None
    return math.prod(dim for dim in (shape or ())[1:] if isinstance(dim, int))


def _window_count(op: Op, size: Dim, kernel: Dim, stride: int, padding: int, dilation: int) -> Dim:
    if not isinstance(size, int) or not isinstance(kernel, int):
        # A 1x1 window, or one with matching padding, keeps a dimension whatever its size is.
        keeps = isinstance(kernel, int) and stride == 1 and 2 * padding == dilation * (kernel - 1)
        return size if keeps else None
    return _positive(op, (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)


def _positive(op: Op, size: int) -> int:
    if size < 1:
        raise GraphVerifyError(f"{op.describe()} leaves nothing of its input: the result would have size {size}")
    return size


class ConvBuilders(LeafBuilders):
    """Builders of the image ops. Window attributes take one number, or one for height and one for width."""

    __slots__ = ()

    def conv2d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        kernel: int | Sequence[int] | None = None,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Convolve `(N, C, H, W)` with a weight `(C_out, C / groups, kH, kW)`; `kernel`, if given, is checked.

        Raises:
            GraphVerifyError: the channels, groups or window do not fit.
        """
        op = Conv2d(pair("stride", stride, 1), pair("padding", padding), pair("dilation", dilation, 1), groups)
        return self._conv(op, x, weight, bias, kernel, shape, name)

    def conv_transpose2d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        kernel: int | Sequence[int] | None = None,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Apply the transpose of a convolution, with a weight `(C, C_out / groups, kH, kW)`."""
        op = ConvTranspose2d(
            pair("stride", stride, 1),
            pair("padding", padding),
            pair("output_padding", output_padding),
            pair("dilation", dilation, 1),
            groups,
        )
        return self._conv(op, x, weight, bias, kernel, shape, name)

    def pool(
        self,
        kind: str,
        x: Operand,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Pool windows by name (`POOLS`)."""
        op = Pool(kind, pair("kernel", kernel, 1), pair("stride", stride, 1), pair("padding", padding))
        return self._add(op, self._as_value(x), shape=shape, name=name)

    def resize_nearest_2x(self, x: Operand, *, name: str | None = None) -> Value:
        """Double each pixel in height and width."""
        return self._add(ResizeNearest2x(), self._as_value(x), name=name)

    def _conv(
        self,
        op: Op,
        x: Operand,
        weight: Operand,
        bias: Operand | None,
        kernel: int | Sequence[int] | None,
        shape: Iterable[Dim] | None,
        name: str | None,
    ) -> Value:
        image = self._as_value(x)
        filters = self._as_value(weight, image)
        if kernel is not None and tuple(filters.shape[2:]) != pair("kernel", kernel, 1):
            raise GraphVerifyError(f"{op.kind} is declared with kernel {kernel}, its weight has shape {filters.shape}")
        extra = () if bias is None else (self._as_value(bias, image),)
        return self._add(op, image, filters, *extra, shape=shape, name=name)
