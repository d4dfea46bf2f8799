"""Tensors rounded to a narrower float type, at once or when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData

__all__ = ["NarrowedTensor", "narrowed", "narrowed_later", "values_of"]

_LARGEST = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38}
_SMALL_BYTES = 1 << 20  # smaller tensors are rounded at once


def narrowed(data: TensorData, dtype: DType) -> TensorData:
    """Return the tensor in another float type; a copy, unless it already is of that type.

    Finite numbers out of range are clamped: -1e9 in a mask becomes -65504 in f16, because minus infinity would turn a
    fully masked row into NaN. Infinities stay.
    """
    return data if data.dtype is dtype else TensorData.from_array(_rounded(data.numpy(), dtype), dtype)


def narrowed_later(data: TensorData, dtype: DType) -> TensorData:
    """Return the result of `narrowed`; a large tensor is rounded when it is read."""
    if data.dtype is dtype or dtype.nbytes(data.num_elements) < _SMALL_BYTES:
        return narrowed(data, dtype)
    return NarrowedTensor(data, dtype)


class NarrowedTensor(TensorData):
    """A tensor that is rounded each time it is read, so that neither form of a large model is in memory as a whole.

    `pieces` holds one piece in memory; `buffer` and `numpy` compute the whole tensor each time. The original stays
    alive, with its map of a file. A copy or pickle is a plain tensor.
    """

    __slots__ = ("_wide",)

    _wide: TensorData

    def __init__(self, wide: TensorData, dtype: DType) -> None:
        for name, value in (("dtype", dtype), ("shape", wide.shape), ("source", None), ("_wide", wide)):
            object.__setattr__(self, name, value)

    @property
    def buffer(self) -> npt.NDArray[Any]:
        """The bytes of all elements. Reads the original and rounds it."""
        whole = np.empty(self.nbytes, np.uint8)
        end = 0
        for piece in self.pieces():
            whole[end : end + len(piece)] = piece
            end += len(piece)
        return whole

    @property
    def nbytes(self) -> int:
        """The bytes the elements take in ONNX's storage."""
        return self.dtype.nbytes(self.num_elements)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order, one rounded piece of the original at a time; see `TensorData.pieces`."""
        for values in values_of(self._wide):
            yield TensorData.from_array(_rounded(values, self.dtype), self.dtype).buffer.data

    def __reduce__(self) -> tuple[type[TensorData], tuple[object, ...]]:
        return TensorData, (self.dtype, self.shape, self.buffer)


def values_of(data: TensorData) -> Iterator[npt.NDArray[Any]]:
    """Yield the elements of a tensor that is not packed, in flat pieces of at most 8 MiB; use each at once."""
    size = data.dtype.numpy.itemsize
    rest = b""
    for piece in data.pieces():
        whole = rest + piece if rest else piece  # a read may return fewer bytes than requested
        count = len(whole) // size
        rest = bytes(whole[count * size :])
        yield TensorData(data.dtype, (count,), np.frombuffer(whole[: count * size], np.uint8)).numpy()


def _rounded(wide: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    limit = _LARGEST[dtype]
    if not wide.size or -limit <= wide.min() <= wide.max() <= limit:  # false for NaN as well
        return wide.astype(dtype.numpy)
    with np.errstate(over="ignore"):
        values = wide.astype(dtype.numpy)
    overflown = np.isinf(values.astype(np.float32)) & np.isfinite(wide)
    return np.where(overflown, np.copysign(limit, wide), wide).astype(dtype.numpy) if overflown.any() else values
