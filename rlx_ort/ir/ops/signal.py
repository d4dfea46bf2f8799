"""Fourier transforms and functions built on them. Complex numbers are real tensors, `[re | im]` side by side.

A complex tensor of N elements along the last axis is a real one of 2 N: first the N real parts, then the N imaginary
ones. ONNX Runtime has no complex dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, known_shape, named, tensor_input
from rlx_ort.ir.types import Shape, TensorType

FFT_NORMS = ("backward", "forward", "ortho")
"""Names of the scalings of a transform of N elements: `backward` none, `forward` 1/N on the inverse, `ortho` 1/sqrt(N)
both ways. Unlike in numpy, `backward` does not scale the inverse either."""


class Fft(Op, operands="x", builder="fft_norm; fft x inverse"):
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


class ComplexNormSq(Op, operands="x", builder="complex_norm_sq"):
    """re^2 + im^2 of complex numbers whose parts are the two elements of the last axis."""

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(x.dtype, Shape(_pairs(self, x)[:-1]))


class Conjugate(Op, operands="x", builder="conjugate"):
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


@builder
def fft_axis(graph: Graph, x: Operand, axis: int, inverse: bool = False, norm: str = "backward") -> Value:
    """Transform one axis of a complex tensor, whose last axis holds `[re | im]` whichever axis is transformed.

    Raises:
        GraphVerifyError: there is no such axis, or a dimension that must be known is not.
    """
    value = graph._as_value(x)
    op = Fft(inverse, norm)
    rank = value.rank
    axis = op.normal_axis(axis, rank)
    if axis == rank - 1:
        return graph.append(op, value)
    half, size = op.size([value.type]), value.shape[axis]
    if not isinstance(size, int) or not size:
        raise GraphVerifyError(f"Fft needs the size of axis {axis} of {value.shape}; bind the dimension first")
    split = graph.reshape(value, (*value.shape[:-1], 2, half))
    others = [place for place in range(rank + 1) if place not in (axis, rank - 1)]
    perm = [*others, rank - 1, axis]
    moved = graph.transpose(split, perm)
    done = graph.append(op, graph.reshape(moved, (*moved.shape[:-2], 2 * size)))
    back = graph.transpose(graph.reshape(done, moved.shape), [perm.index(place) for place in range(rank + 1)])
    return graph.reshape(back, value.shape)


@builder
def fftn(
    graph: Graph, x: Operand, axes: Sequence[int] | None = None, inverse: bool = False, norm: str = "backward"
) -> Value:
    """Transform several axes of a complex tensor, all when none are named; see `fft_axis`."""
    value = graph._as_value(x)
    for axis in range(value.rank) if axes is None else axes:
        value = graph.fft_axis(value, axis, inverse, norm)
    return value


@builder
def ifftn(graph: Graph, x: Operand, axes: Sequence[int] | None = None, norm: str = "backward") -> Value:
    """Apply the inverse transform to several axes of a complex tensor; see `fftn`."""
    return graph.fftn(x, axes, inverse=True, norm=norm)


@builder
def fft_real(graph: Graph, x: Operand, norm: str = "backward") -> tuple[Value, Value]:
    """Return the transform (re, im) of real numbers along the last axis, zeros added up to a power of two."""
    value = graph._as_value(x)
    size = _last(value)
    return _spectrum(graph, _grown(graph, value, 1 << max(size - 1, 0).bit_length()), norm)


@builder
def rfft(graph: Graph, x: Operand, norm: str = "backward") -> tuple[Value, Value]:
    """Return the first N // 2 + 1 elements (re, im) of the transform of N real numbers along the last axis."""
    value = graph._as_value(x)
    bins = _last(value) // 2 + 1
    re, im = _spectrum(graph, value, norm)
    return graph.narrow(re, -1, 0, bins), graph.narrow(im, -1, 0, bins)


@builder
def irfft(graph: Graph, re: Operand, im: Operand, n: int, norm: str = "backward") -> Value:
    """Return the n real numbers whose transform starts with (re, im), n // 2 + 1 elements; `backward` is n-fold.

    Raises:
        GraphVerifyError: re or im has another number of elements.
    """
    left = graph._as_value(re)
    right = graph._as_value(im, left)
    for part, label in ((left, "re"), (right, "im")):
        if n < 1 or _last(part) != n // 2 + 1:
            raise GraphVerifyError(f"irfft of {n} numbers needs {n // 2 + 1} elements of {label}, got {part.shape}")
    mirrored = (n - 1) // 2  # elements that the transform of real numbers repeats, conjugated and reversed
    if mirrored:
        left = graph.concat([left, _backwards(graph, left, mirrored)], -1)
        right = graph.concat([right, graph.neg(_backwards(graph, right, mirrored))], -1)
    done = graph.fft_norm(graph.concat([left, right], -1), inverse=True, norm=norm)
    return graph.narrow(done, -1, 0, n)


@builder
def stft(
    graph: Graph, x: Operand, n_fft: int, hop: int, window: Operand | None = None, norm: str = "backward"
) -> tuple[Value, Value]:
    """Return `rfft` (re, im) of every `hop`-th frame of `n_fft` numbers: `(..., frames, n_fft // 2 + 1)`.

    Frames lie wholly inside the signal; pad it first for others. A window `(n_fft,)` multiplies each frame.

    Raises:
        GraphVerifyError: the signal is shorter than a frame.
    """
    value = graph._as_value(x)
    length = _last(value)
    if hop < 1 or not 1 <= n_fft <= length:
        raise GraphVerifyError(f"stft cannot take frames of {n_fft} every {hop} from {length} numbers")
    starts = np.arange((length - n_fft) // hop + 1) * hop
    frames = graph.gather(value, graph.constant(starts[:, None] + np.arange(n_fft), DType.I64), axis=value.rank - 1)
    if window is not None:
        frames = graph.mul(frames, window)
    return graph.rfft(frames, norm)


@builder
def fft_conv1d(graph: Graph, x: Operand, kernel: Operand) -> Value:
    """Return the whole convolution along the last axis, T + K - 1 numbers, computed by transforms."""
    value = graph._as_value(x)
    other = graph._as_value(kernel, value)
    length = _last(value) + _last(other) - 1
    size = 1 << max(length - 1, 0).bit_length()
    a, b = _spectrum(graph, _grown(graph, value, size), "backward")
    c, d = _spectrum(graph, _grown(graph, other, size), "backward")
    product = graph.concat([a * c - b * d, a * d + b * c], -1)
    return graph.narrow(graph.fft_norm(product, inverse=True, norm="forward"), -1, 0, length)


@builder
def psd(graph: Graph, re: Operand, im: Operand) -> Value:
    """Return the power re^2 + im^2 of each element of a transform."""
    left = graph._as_value(re)
    right = graph._as_value(im, left)
    return left * left + right * right


@builder
def psd_real(graph: Graph, x: Operand, norm: str = "backward") -> Value:
    """Return the power of each element of `fft_real`."""
    return graph.psd(*graph.fft_real(x, norm))


@builder
def fftfreq(graph: Graph, n: int) -> Value:
    """Return the frequencies of a transform of n elements, in cycles a sample; the middle of an even n is +0.5."""
    places = np.arange(_positive(n))
    return graph.constant(np.where(places <= n // 2, places, places - n) / n, DType.F32, name="fftfreq")


@builder
def rfftfreq(graph: Graph, n: int) -> Value:
    """Return the frequencies of `rfft` of n numbers, in cycles a sample."""
    return graph.constant(np.arange(_positive(n) // 2 + 1) / n, DType.F32, name="rfftfreq")


def _spectrum(graph: Graph, value: Value, norm: str) -> tuple[Value, Value]:
    """Return the transform (re, im) of real numbers along the last axis."""
    size = _last(value)
    done = graph.fft_norm(graph.concat([value, value * 0], -1), norm=norm)
    return graph.narrow(done, -1, 0, size), graph.narrow(done, -1, size, size)


def _grown(graph: Graph, value: Value, size: int) -> Value:
    """Return the value with zeros after it along the last axis."""
    missing = size - _last(value)
    others = [0] * (value.rank - 1)
    return graph.pad(value, [*others, 0], [*others, missing]) if missing else value


def _backwards(graph: Graph, value: Value, count: int) -> Value:
    """Return elements count ... 1 of the last axis, in that order."""
    return graph.slice(value, [-1], [count], [0], [-1])


def _last(value: Value) -> int:
    size = value.shape[-1] if value.rank else None
    if not isinstance(size, int) or not size:
        raise GraphVerifyError(f"{value.name!r} {value.shape} needs a last dimension of known size, 1 or more")
    return size


def _positive(n: int) -> int:
    if n < 1:
        raise GraphVerifyError(f"a transform has at least 1 element, not {n}")
    return n
