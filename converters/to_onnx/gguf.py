"""GGUF blocks -> f32 in basic ONNX ops, so that packed weights can be set, and set again, in the bytes of the file.

ONNX Runtime computes all of this once, when it opens the session, if the bytes are weights: runs then cost nothing
more, and the weights take four bytes each. ONNX has no op that reads two bytes as one f16, so scales come from tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.emitter import Emitter
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.gguf_blocks import BlockFormat


@dataclass(frozen=True, slots=True)
class Packed:
    """A value of the graph with the operations in which `rlx_ort.ir.gguf_blocks` defines the layouts; u8, or f32."""

    emit: Emitter
    value: ModelValue

    def __getitem__(self, at: tuple[Any, slice | None]) -> Packed:
        axis = at[-1]
        if axis is None:  # a new last axis
            return Packed(self.emit, self.emit.op("Unsqueeze", self.value, self.emit.i64([-1])))
        return Packed(self.emit, slice_axis(self.emit, self.value, -1, axis.start, axis.stop))

    def __and__(self, mask: int) -> Packed:
        return self._bits("BitwiseAnd", mask)

    def __or__(self, other: Packed) -> Packed:
        return self._bits("BitwiseOr", other)

    def __lshift__(self, places: int) -> Packed:
        return self._bits("BitShift", places, direction="LEFT")

    def __rshift__(self, places: npt.ArrayLike) -> Packed:
        return self._bits("BitShift", places, direction="RIGHT")

    def _bits(self, op_type: str, other: Packed | npt.ArrayLike, **attributes: Any) -> Packed:
        right = other.value if isinstance(other, Packed) else self.emit.constant(np.asarray(other, np.uint8))
        return Packed(self.emit, self.emit.op(op_type, self.value, right, **attributes))

    def __mul__(self, other: Packed) -> Packed:
        return Packed(self.emit, self.emit.op("Mul", self.value, other.value))

    def __sub__(self, other: Packed | float) -> Packed:
        right = other.value if isinstance(other, Packed) else self.emit.constant(other)
        return Packed(self.emit, self.emit.op("Sub", self.value, right))

    def reshape(self, *dims: int) -> Packed:
        """Return the elements under other dimensions."""
        return Packed(self.emit, self.emit.op("Reshape", self.value, self.emit.i64(dims)))

    def join(self, other: Packed, axis: int = -1) -> Packed:
        """Return both, one after the other along an axis."""
        return Packed(self.emit, self.emit.op("Concat", self.value, other.value, axis=axis))

    def nibbles(self, axis: int = -2) -> Packed:
        """Return the low halves, then the high ones, along a new axis; -1 makes the halves of a byte neighbours."""
        emit = self.emit
        low, high = (emit.op("Unsqueeze", half.value, emit.i64([axis])) for half in (self & 15, self >> 4))
        return Packed(emit, emit.op("Concat", low, high, axis=axis))

    def floats(self) -> Packed:
        """Return the bytes as f32."""
        return Packed(self.emit, self.emit.op("Cast", self.value, to=DType.F32))

    def signed(self) -> Packed:
        """Return the bytes, read as i8, as f32: with 128 added they count up from 0."""
        return self._bits("BitwiseXor", 128).floats() - 128.0

    def halves(self) -> Packed:
        """Return two bytes, read as f16, as f32 `(blocks, 1)`; infinities and NaN become infinities."""
        emit = self.emit
        high = emit.op("Cast", self[:, 1:2].value, to=DType.I32)
        power, start = (emit.op("Gather", emit.constant(table), high) for table in _HALF_TABLES)
        mantissa = emit.op("Add", start, self[:, 0:1].floats().value)
        return Packed(emit, emit.op("Mul", power, mantissa))

    def singles(self) -> Packed:
        """Return four bytes, read as f32, `(blocks, 1)`; numbers below 2^-125 become 0."""
        emit = self.emit
        top, second = (emit.op("Cast", self[:, place : place + 1].value, to=DType.I32) for place in (3, 2))
        power, start, unit = (
            emit.op("Gather", emit.constant(table), index)
            for table, index in zip(_SINGLE_TABLES, (top, second, second), strict=True)
        )
        weights = emit.constant(np.array([2.0**-23, 2.0**-15], np.float32))
        products = emit.op("Mul", self[:, 0:2].floats().value, weights)
        low = emit.op("ReduceSum", products, emit.i64([-1]), keepdims=1)
        return Packed(emit, emit.op("Mul", power, emit.op("Add", start, emit.op("Mul", unit, low))))


def decode_blocks(emit: Emitter, kind: BlockFormat, raw: ModelValue) -> Any:
    """Write the weights of packed blocks, u8 of any shape, as f32 `(blocks, elements)`."""
    return kind.decode(Packed(emit, raw).reshape(-1, kind.bytes)).value


def _tables() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the part of the number in the top byte of an f16, and in the two top bytes of an f32."""
    byte = np.arange(256)
    exponent, sign = (byte >> 2) & 31, np.where(byte & 128, -1.0, 1.0)
    power = sign * 2.0 ** (np.maximum(exponent, 1) - 25.0)
    power[exponent == 31] *= np.inf
    start = np.where(exponent > 0, 1024.0, 0.0) + (byte & 3) * 256.0
    coarse = sign * 2.0 ** (2.0 * (byte & 127) - 127.0)
    coarse[(byte & 127) == 0] = 0.0
    unit = 1.0 + (byte >> 7)
    single = (coarse, (1.0 + (byte & 127) / 128.0) * unit, unit)
    return (power.astype(np.float32), start.astype(np.float32)), tuple(table.astype(np.float32) for table in single)


_HALF_TABLES, _SINGLE_TABLES = _tables()
