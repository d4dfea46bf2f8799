"""ONNX forms of Fourier transforms: products with constant matrices, which every provider has.

A transform of N = a * b elements is done as b transforms of a, a multiplication by constant factors, and a
transforms of b (Cooley and Tukey), down to sizes that are one matrix product. Sizes with a large prime factor become
a convolution of a power of two (Bluestein). ONNX's DFT is not used: only CPU and WebGPU have a kernel for it, and for
sizes that are no power of two that of ONNX Runtime 1.31 was measured at 6e-5 relative error and many times slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.shape import reshape, slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.signal import ComplexNormSq, Conjugate, Fft

_ONE_PRODUCT = 64
"""Up to this size a transform is one product; its cost grows with the square."""
_LARGEST_PRIME = 128
"""A prime factor up to this size is one product as well."""


@lowers(Fft)
def _fft(emit: Emitter, op: Fft, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    shape, size = known_shape(op, kind, "x"), op.size([kind])
    rows = math.prod(shape[:-1]) if shape.is_static else -1  # type: ignore[arg-type]  # all are sizes then
    if not rows:
        return emit.op("Identity", inputs[0])
    flat = emit.op("Reshape", inputs[0], emit.i64([rows, 2 * size]), allowzero=1)
    write = _transform if _largest_prime(size) <= _LARGEST_PRIME else _convolution
    result = write(emit, flat, size, rows, 1 if op.inverse else -1, kind.dtype)
    scale = op.scale(size)
    if scale != 1:
        result = emit.op("Mul", result, emit.constant(scale, kind.dtype))
    return reshape(emit, result, None, shape)


def _transform(emit: Emitter, rows_of: Any, size: int, rows: int, sign: int, dtype: DType) -> Any:
    """Return the transform of each row `[re | im]` of a matrix of `rows` rows, -1 when their number is not known."""
    first = _divisor(size)
    if first == size:
        return emit.op("MatMul", rows_of, emit.constant(_matrix(size, sign), dtype))
    second = size // first
    # Element n = second * i + j: transform over i for each j, as a product from the left.
    columns = emit.op("Reshape", rows_of, emit.i64([rows, 2 * first, second]), allowzero=1)
    columns = emit.op("MatMul", emit.constant(_matrix(first, sign).T, dtype), columns)
    parts = emit.op("Reshape", columns, emit.i64([rows, 2, first, second]), allowzero=1)
    turn = _unit(np.outer(np.arange(first), np.arange(second)), size, sign)
    # Row k of each block, `[re | im]` over j again: transform over j gives elements k + first * m.
    blocks = _turned(emit, parts, turn, dtype, axis=3)
    inner_rows = rows if rows < 0 else rows * first
    flat = emit.op("Reshape", blocks, emit.i64([inner_rows, 2 * second]), allowzero=1)
    done = _transform(emit, flat, second, inner_rows, sign, dtype)
    apart = emit.op("Reshape", done, emit.i64([rows, first, 2, second]), allowzero=1)
    ordered = emit.op("Transpose", apart, perm=[0, 2, 3, 1])
    return emit.op("Reshape", ordered, emit.i64([rows, 2 * size]), allowzero=1)


def _convolution(emit: Emitter, rows_of: Any, size: int, rows: int, sign: int, dtype: DType) -> Any:
    """Return the result of `_transform` for any size: n k = (n^2 + k^2 - (k - n)^2) / 2 makes it a convolution."""
    long = 1 << (2 * size - 2).bit_length()
    places = np.arange(size)
    cos, sin = _unit(places * places, 2 * size, sign)
    kernel = np.zeros(long, np.complex128)
    kernel[:size] = cos - 1j * sin
    kernel[long - size + 1 :] = kernel[size - 1 : 0 : -1]
    spectrum = np.fft.fft(kernel) / long

    split = emit.op("Reshape", rows_of, emit.i64([rows, 2, size]), allowzero=1)
    turned = _turned(emit, split, (cos, sin), dtype)
    padding = emit.i64([0, 0, 0, 0, 0, long - size])
    padded = emit.op("Reshape", emit.op("Pad", turned, padding), emit.i64([rows, 2 * long]), allowzero=1)
    there = _transform(emit, padded, long, rows, -1, dtype)
    parts = emit.op("Reshape", there, emit.i64([rows, 2, long]), allowzero=1)
    product = _turned(emit, parts, (spectrum.real, spectrum.imag), dtype)
    flat = emit.op("Reshape", product, emit.i64([rows, 2 * long]), allowzero=1)
    back = emit.op("Reshape", _transform(emit, flat, long, rows, 1, dtype), emit.i64([rows, 2, long]), allowzero=1)
    result = _turned(emit, slice_axis(emit, back, 2, 0, size), (cos, sin), dtype)
    return emit.op("Reshape", result, emit.i64([rows, 2 * size]), allowzero=1)


def _turned(emit: Emitter, parts: Any, factors: Any, dtype: DType, axis: int = 1) -> Any:
    """Multiply complex numbers, whose parts axis 1 holds, by constants; the parts of the result are along `axis`."""
    re, im = emit.op("Split", parts, emit.i64([1, 1]), outputs=2, axis=1)
    cos, sin = (emit.constant(part, dtype) for part in factors)
    turned_re = emit.op("Sub", emit.op("Mul", re, cos), emit.op("Mul", im, sin))
    turned_im = emit.op("Add", emit.op("Mul", re, sin), emit.op("Mul", im, cos))
    return emit.op("Concat", turned_re, turned_im, axis=axis)


def _divisor(size: int) -> int:
    """Return the size of the first transforms: the largest divisor up to `_ONE_PRODUCT`, `size` for one product."""
    if size <= _ONE_PRODUCT:
        return size
    return next((part for part in range(_ONE_PRODUCT, 1, -1) if size % part == 0), _smallest_prime(size))


def _smallest_prime(size: int) -> int:
    return next((part for part in range(2, math.isqrt(size) + 1) if size % part == 0), size)


def _largest_prime(size: int) -> int:
    while (smallest := _smallest_prime(size)) != size:
        size //= smallest
    return size


def _unit(
    turns: npt.NDArray[np.int64], size: int, sign: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return cos and sin of `turns / size` full turns, the angle reduced first so that it stays exact."""
    angle = sign * 2 * np.pi * (turns % size) / size
    return np.cos(angle), np.sin(angle)


def _matrix(size: int, sign: int) -> npt.NDArray[np.float64]:
    """Return the matrix that takes a row `[re | im]` to its transform."""
    cos, sin = _unit(np.outer(np.arange(size), np.arange(size)), size, sign)
    return np.block([[cos, sin], [-sin, cos]])


@lowers(ComplexNormSq)
def _complex_norm_sq(emit: Emitter, op: ComplexNormSq, inputs: Sequence[Any]) -> Any:
    return emit.op("ReduceSum", emit.op("Mul", inputs[0], inputs[0]), emit.i64([-1]), keepdims=0)


@lowers(Conjugate)
def _conjugate(emit: Emitter, op: Conjugate, inputs: Sequence[Any]) -> Any:
    return emit.op("Mul", inputs[0], emit.constant([1.0, -1.0], emit.input_dtype(0)))
