"""Fourier transforms and functions built on them. Complex numbers are real tensors, `[re | im]` side by side.

A complex tensor of N elements along the last axis is a real one of 2 N: first the N real parts, then the N imaginary
ones. ONNX Runtime has no complex dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, known_shape, named, tensor_input
from rlx_ort.ir.ops.elementwise import ElementwiseBuilders
from rlx_ort.ir.ops.leaf import NodeArgs, Operand
from rlx_ort.ir.ops.shape import ShapeBuilders
from rlx_ort.ir.types import Shape, TensorType

FFT_NORMS = ("backward", "forward", "ortho")
"""Names of the scalings of a transform of N elements: `backward` none, `forward` 1/N on the inverse, `ortho` 1/sqrt(N)
both ways. Unlike in numpy, `backward` does not scale the inverse either."""


class Fft(Op, operands="x"):
    """The discrete Fourier transform along the last axis, which holds `[re | im]`; any N, not only powers of two.

    The exponent of the inverse is positive.
    """

    inverse: bool = False
    norm: str = named("FFT norm", FFT_NORMS, default="backward")

    def size(self, inputs: OpTypes) -> int:
        """Return N."""
        x = tensor_input(self, inputs, 0, "x")
        shape = known_shape(self, x, "x")
        last = shape[-1] if shape.rank else None
        if not isinstance(last, int) or last < 2 or last % 2:
            raise GraphVerifyError(f"Fft needs an even last dimension, the real parts and then the others, got {x}")
        return last // 2

    def scale(self, size: int) -> float:
        """Return the factor of the result of a transform of `size` elements."""
        if self.norm == "ortho":
            return 1 / math.sqrt(size)
        return 1 / size if self.norm == "forward" and self.inverse else 1.0

    def _result(self, x: TensorType) -> None:
        _expect_real(self, x)
        self.size((x,))


class ComplexNormSq(Op, operands="x"):
    """re^2 + im^2 of complex numbers whose parts are the two elements of the last axis."""

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(x.dtype, Shape(_pairs(self, x)[:-1]))


class Conjugate(Op, operands="x"):
    """The conjugate of complex numbers whose parts are the two elements of the last axis."""

    def _result(self, x: TensorType) -> None:
        _pairs(self, x)


def _expect_real(op: Op, x: TensorType) -> None:
    if x.dtype not in (DType.F32, DType.F64):
        remedy = "store the parts of complex numbers as f32" if x.dtype.is_complex else "cast it"
        raise GraphVerifyError(f"{op.kind} computes in f32 or f64, got {x.dtype.value}; {remedy}")


def _pairs(op: Op, x: TensorType) -> Shape:
    """Return the shape of complex numbers `(..., 2)`."""
    _expect_real(op, x)
    shape = known_shape(op, x, "x")
    if not shape.rank or shape[-1] != 2:
        raise GraphVerifyError(f"{op.kind} needs a last dimension of 2, the real and the imaginary part, got {x}")
    return shape


class SignalBuilders(ElementwiseBuilders, ShapeBuilders):
    """Builders of Fourier transforms. A pair `(re, im)` is two tensors of one shape."""

    __slots__ = ()

    def fft(self, x: Operand, inverse: bool = False, **node: Unpack[NodeArgs]) -> Value:
        """Transform the last axis, which holds `[re | im]`, without any scaling."""
        return self.fft_norm(x, inverse, **node)

    def fft_norm(self, x: Operand, inverse: bool = False, norm: str = "backward", **node: Unpack[NodeArgs]) -> Value:
        """Transform the last axis, which holds `[re | im]`, scaled by a norm of `FFT_NORMS`."""
        return self._add(Fft(inverse, norm), x, **node)

    def fft_axis(self, x: Operand, axis: int, inverse: bool = False, norm: str = "backward") -> Value:
        """Transform one axis of a complex tensor, whose last axis holds `[re | im]` whichever axis is transformed.

        Raises:
            GraphVerifyError: there is no such axis, or a dimension that must be known is not.
        """
        value = self._as_value(x)
        op = Fft(inverse, norm)
        rank = value.rank
        axis = op.normal_axis(axis, rank)
        if axis == rank - 1:
            return self.append(op, value)
        half, size = op.size([value.type]), value.shape[axis]
        if not isinstance(size, int) or not size:
            raise GraphVerifyError(f"Fft needs the size of axis {axis} of {value.shape}; bind the dimension first")
        split = self.reshape(value, (*value.shape[:-1], 2, half))
        others = [place for place in range(rank + 1) if place not in (axis, rank - 1)]
        perm = [*others, rank - 1, axis]
        moved = self.transpose(split, perm)
        done = self.append(op, self.reshape(moved, (*moved.shape[:-2], 2 * size)))
        back = self.transpose(self.reshape(done, moved.shape), [perm.index(place) for place in range(rank + 1)])
        return self.reshape(back, value.shape)

    def fftn(
        self, x: Operand, axes: Sequence[int] | None = None, inverse: bool = False, norm: str = "backward"
    ) -> Value:
        """Transform several axes of a complex tensor, all when none are named; see `fft_axis`."""
        value = self._as_value(x)
        for axis in range(value.rank) if axes is None else axes:
            value = self.fft_axis(value, axis, inverse, norm)
        return value

    def ifftn(self, x: Operand, axes: Sequence[int] | None = None, norm: str = "backward") -> Value:
        """Apply the inverse transform to several axes of a complex tensor; see `fftn`."""
        return self.fftn(x, axes, inverse=True, norm=norm)

    def fft_real(self, x: Operand, norm: str = "backward") -> tuple[Value, Value]:
        """Return the transform (re, im) of real numbers along the last axis, zeros added up to a power of two."""
        value = self._as_value(x)
        size = _last(value)
        return self._spectrum(self._grown(value, 1 << max(size - 1, 0).bit_length()), norm)

    def rfft(self, x: Operand, norm: str = "backward") -> tuple[Value, Value]:
        """Return the first N // 2 + 1 elements (re, im) of the transform of N real numbers along the last axis."""
        value = self._as_value(x)
        bins = _last(value) // 2 + 1
        re, im = self._spectrum(value, norm)
        return self.narrow(re, -1, 0, bins), self.narrow(im, -1, 0, bins)

    def irfft(self, re: Operand, im: Operand, n: int, norm: str = "backward") -> Value:
        """Return the n real numbers whose transform starts with (re, im), n // 2 + 1 elements; `backward` is n-fold.

        Raises:
            GraphVerifyError: re or im has another number of elements.
        """
        left = self._as_value(re)
        right = self._as_value(im, left)
        for part, label in ((left, "re"), (right, "im")):
            if n < 1 or _last(part) != n // 2 + 1:
                raise GraphVerifyError(f"irfft of {n} numbers needs {n // 2 + 1} elements of {label}, got {part.shape}")
        mirrored = (n - 1) // 2  # elements that the transform of real numbers repeats, conjugated and reversed
        if mirrored:
            left = self.concat([left, self._backwards(left, mirrored)], -1)
            right = self.concat([right, self.neg(self._backwards(right, mirrored))], -1)
        done = self.fft_norm(self.concat([left, right], -1), inverse=True, norm=norm)
        return self.narrow(done, -1, 0, n)

    def stft(
        self, x: Operand, n_fft: int, hop: int, window: Operand | None = None, norm: str = "backward"
    ) -> tuple[Value, Value]:
        """Return `rfft` (re, im) of every `hop`-th frame of `n_fft` numbers: `(..., frames, n_fft // 2 + 1)`.

        Frames lie wholly inside the signal; pad it first for others. A window `(n_fft,)` multiplies each frame.

        Raises:
            GraphVerifyError: the signal is shorter than a frame.
        """
        value = self._as_value(x)
        length = _last(value)
        if hop < 1 or not 1 <= n_fft <= length:
            raise GraphVerifyError(f"stft cannot take frames of {n_fft} every {hop} from {length} numbers")
        starts = np.arange((length - n_fft) // hop + 1) * hop
        frames = self.gather(value, self.constant(starts[:, None] + np.arange(n_fft), DType.I64), axis=value.rank - 1)
        if window is not None:
            frames = self.mul(frames, window)
        return self.rfft(frames, norm)

    def fft_conv1d(self, x: Operand, kernel: Operand) -> Value:
        """Return the whole convolution along the last axis, T + K - 1 numbers, computed by transforms."""
        value = self._as_value(x)
        other = self._as_value(kernel, value)
        length = _last(value) + _last(other) - 1
        size = 1 << max(length - 1, 0).bit_length()
        a, b = self._spectrum(self._grown(value, size), "backward")
        c, d = self._spectrum(self._grown(other, size), "backward")
        product = self.concat([a * c - b * d, a * d + b * c], -1)
        return self.narrow(self.fft_norm(product, inverse=True, norm="forward"), -1, 0, length)

    def psd(self, re: Operand, im: Operand) -> Value:
        """Return the power re^2 + im^2 of each element of a transform."""
        left = self._as_value(re)
        right = self._as_value(im, left)
        return left * left + right * right

    def psd_real(self, x: Operand, norm: str = "backward") -> Value:
        """Return the power of each element of `fft_real`."""
        return self.psd(*self.fft_real(x, norm))

    def fftfreq(self, n: int) -> Value:
        """Return the frequencies of a transform of n elements, in cycles a sample; the middle of an even n is +0.5."""
        places = np.arange(_positive(n))
        return self.constant(np.where(places <= n // 2, places, places - n) / n, DType.F32, name="fftfreq")

    def rfftfreq(self, n: int) -> Value:
        """Return the frequencies of `rfft` of n numbers, in cycles a sample."""
        return self.constant(np.arange(_positive(n) // 2 + 1) / n, DType.F32, name="rfftfreq")

    def complex_norm_sq(self, x: Operand) -> Value:
        """Return re^2 + im^2 of complex numbers `(..., 2)`."""
        return self.append(ComplexNormSq(), self._as_value(x))

    def conjugate(self, x: Operand) -> Value:
        """Return the conjugates of complex numbers `(..., 2)`."""
        return self.append(Conjugate(), self._as_value(x))

    def _spectrum(self, value: Value, norm: str) -> tuple[Value, Value]:
        """Return the transform (re, im) of real numbers along the last axis."""
        size = _last(value)
        done = self.fft_norm(self.concat([value, value * 0], -1), norm=norm)
        return self.narrow(done, -1, 0, size), self.narrow(done, -1, size, size)

    def _grown(self, value: Value, size: int) -> Value:
        """Return the value with zeros after it along the last axis."""
        missing = size - _last(value)
        others = [0] * (value.rank - 1)
        return self.pad(value, [*others, 0], [*others, missing]) if missing else value

    def _backwards(self, value: Value, count: int) -> Value:
        """Return elements count ... 1 of the last axis, in that order."""
        return self.slice(value, [-1], [count], [0], [-1])


def _last(value: Value) -> int:
    size = value.shape[-1] if value.rank else None
    if not isinstance(size, int) or not size:
        raise GraphVerifyError(f"{value.name!r} {value.shape} needs a last dimension of known size, 1 or more")
    return size


def _positive(n: int) -> int:
    if n < 1:
        raise GraphVerifyError(f"a transform has at least 1 element, not {n}")
    return n
