"""GGUF blocks -> f32 in basic ONNX ops, so that packed weights can be set, and set again, in the bytes of the file.

ONNX Runtime computes all of this once, when it opens the session, if the bytes are weights: runs then cost nothing
more, and the weights take four bytes each. ONNX has no op that reads two bytes as one f16, so scales come from tables.
"""

from __future__ import annotations

from collections.abc import Callable
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
class Bytes:
    """A u8 value whose parts are taken out with the bit operations that ONNX has; a slice is of the last axis."""

    emit: Emitter
    value: ModelValue

    def __getitem__(self, columns: slice) -> Bytes:
        return Bytes(self.emit, slice_axis(self.emit, self.value, -1, columns.start, columns.stop))

    def __and__(self, mask: int) -> Bytes:
        return self._bits("BitwiseAnd", mask)

    def __or__(self, other: Bytes) -> Bytes:
        return self._bits("BitwiseOr", other)

    def __lshift__(self, places: int) -> Bytes:
        return self._bits("BitShift", places, direction="LEFT")

    def __rshift__(self, places: npt.ArrayLike) -> Bytes:
        return self._bits("BitShift", places, direction="RIGHT")

    def _bits(self, op_type: str, other: Bytes | npt.ArrayLike, **attributes: Any) -> Bytes:
        right = other.value if isinstance(other, Bytes) else self.emit.constant(np.asarray(other, np.uint8))
        return Bytes(self.emit, self.emit.op(op_type, self.value, right, **attributes))

    def reshape(self, *dims: int) -> Bytes:
        """Return the bytes under other dimensions."""
        return Bytes(self.emit, self.emit.op("Reshape", self.value, self.emit.i64(dims)))

    def join(self, other: Bytes, axis: int) -> Bytes:
        """Return both, one after the other along an axis."""
        return Bytes(self.emit, self.emit.op("Concat", self.value, other.value, axis=axis))

    def nibbles(self, axis: int = -2) -> Bytes:
        """Return the low halves, then the high ones, along a new axis; -1 makes the halves of a byte neighbours."""
        emit = self.emit
        low, high = (emit.op("Unsqueeze", half.value, emit.i64([axis])) for half in (self & 15, self >> 4))
        return Bytes(emit, emit.op("Concat", low, high, axis=axis))

    def floats(self) -> Any:
        """Return the bytes as f32."""
        return self.emit.op("Cast", self.value, to=DType.F32)

    def signed(self) -> Any:
        """Return the bytes, read as i8, as f32: with 128 added they count up from 0."""
        return self.emit.op("Sub", self._bits("BitwiseXor", 128).floats(), self.emit.constant(128.0))

    def halves(self) -> Any:
        """Return two bytes, read as f16, as f32 `(blocks, 1)`; infinities and NaN become infinities."""
        high = self.emit.op("Cast", self[1:2].value, to=DType.I32)
        power, start = (self.emit.op("Gather", self.emit.constant(table), high) for table in _HALF_TABLES)
        mantissa = self.emit.op("Add", start, self[0:1].floats())
        return self.emit.op("Mul", power, mantissa)

    def singles(self) -> Any:
        """Return four bytes, read as f32, `(blocks, 1)`; numbers below 2^-125 become 0."""
        emit = self.emit
        top, second = (emit.op("Cast", self[place : place + 1].value, to=DType.I32) for place in (3, 2))
        power, start, unit = (
            emit.op("Gather", emit.constant(table), index)
            for table, index in zip(_SINGLE_TABLES, (top, second, second), strict=True)
        )
        weights = emit.constant(np.array([2.0**-23, 2.0**-15], np.float32))
        low = emit.op("ReduceSum", emit.op("Mul", self[0:2].floats(), weights), emit.i64([-1]), keepdims=1)
        return emit.op("Mul", power, emit.op("Add", start, emit.op("Mul", unit, low)))


def decode_blocks(emit: Emitter, kind: BlockFormat, raw: ModelValue) -> Any:
    """Write the weights of packed blocks, u8 of any shape, as f32 `(blocks, elements)`."""
    blocks = Bytes(emit, raw).reshape(-1, kind.bytes)
    return _DECODERS[kind.name](emit, blocks)


def _tables() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what the top byte of an f16, and the two top bytes of an f32, contribute to the number."""
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


def _scaled(emit: Emitter, codes: Any, scales: Any, groups: int, mins: Any = None) -> Any:
    """Return codes times scales, less the minima; `groups` scales of a block run over its 256 weights."""
    split = emit.op("Reshape", codes, emit.i64([-1, groups, 256 // groups]))
    scales, mins = (None if item is None else emit.op("Unsqueeze", item, emit.i64([-1])) for item in (scales, mins))
    values = emit.op("Mul", split, scales)
    if mins is not None:
        values = emit.op("Sub", values, mins)
    return emit.op("Reshape", values, emit.i64([-1, 256]))


def _q4_0(emit: Emitter, blocks: Bytes) -> Any:
    codes = blocks[2:18].nibbles().reshape(-1, 32).floats()
    return emit.op("Mul", emit.op("Sub", codes, emit.constant(8.0)), blocks[0:2].halves())


def _q8_0(emit: Emitter, blocks: Bytes) -> Any:
    return emit.op("Mul", blocks[2:34].signed(), blocks[0:2].halves())


def _four_bits(codes: Bytes, runs: int) -> Bytes:
    """Return 256 numbers of 4 bits: in each run of bytes the low halves come before the high ones."""
    return codes.reshape(-1, runs, 128 // runs).nibbles().reshape(-1, 256)


def _two_bits(codes: Bytes) -> Bytes:
    """Return 256 numbers of 2 bits: each half of 32 bytes holds four runs of 32, lowest bits first."""
    places = np.array([0, 2, 4, 6]).reshape(1, 1, 4, 1)
    return (codes.reshape(-1, 2, 1, 32) >> places & 3).reshape(-1, 256)


def _one_bits(codes: Bytes) -> Bytes:
    """Return 256 single bits: 32 bytes hold eight runs of 32, lowest bit first."""
    return (codes.reshape(-1, 1, 32) >> np.arange(8).reshape(1, 8, 1) & 1).reshape(-1, 256)


def _q2_k(emit: Emitter, blocks: Bytes) -> Any:
    packed = blocks[0:16]
    scales = emit.op("Mul", (packed & 15).floats(), blocks[80:82].halves())
    mins = emit.op("Mul", (packed >> 4).floats(), blocks[82:84].halves())
    return _scaled(emit, _two_bits(blocks[16:80]).floats(), scales, 16, mins)


def _q3_k(emit: Emitter, blocks: Bytes) -> Any:
    codes = (_two_bits(blocks[32:96]) | _one_bits(blocks[0:32]) << 2).floats()
    low = blocks[96:104].nibbles().reshape(-1, 16)
    top = (blocks[104:108].reshape(-1, 1, 4) >> np.array([0, 2, 4, 6]).reshape(1, 4, 1) & 3).reshape(-1, 16)
    steps = emit.op("Sub", (low | top << 4).floats(), emit.constant(32.0))
    scales = emit.op("Mul", steps, blocks[108:110].halves())
    return _scaled(emit, emit.op("Sub", codes, emit.constant(4.0)), scales, 16)


def scales_and_mins(emit: Emitter, blocks: Bytes) -> tuple[Any, Any]:
    """Write the eight scales and eight minima of each block of `q4_k` and `q5_k`: 6 bits each, in 12 bytes."""
    first, second, third = blocks[4:8], blocks[8:12], blocks[12:16]
    scales = (first & 63).join(third & 15 | first >> 6 << 4, -1)
    mins = (second & 63).join(third >> 4 | second >> 6 << 4, -1)
    return (emit.op("Mul", scales.floats(), blocks[0:2].halves()), emit.op("Mul", mins.floats(), blocks[2:4].halves()))


def _q4_k(emit: Emitter, blocks: Bytes) -> Any:
    scales, mins = scales_and_mins(emit, blocks)
    return _scaled(emit, _four_bits(blocks[16:144], 4).floats(), scales, 8, mins)


def _q5_k(emit: Emitter, blocks: Bytes) -> Any:
    scales, mins = scales_and_mins(emit, blocks)
    codes = _four_bits(blocks[48:176], 4) | _one_bits(blocks[16:48]) << 4
    return _scaled(emit, codes.floats(), scales, 8, mins)


def _q6_k(emit: Emitter, blocks: Bytes) -> Any:
    codes = (_four_bits(blocks[0:128], 2) | _two_bits(blocks[128:192]) << 4).floats()
    scales = emit.op("Mul", blocks[192:208].signed(), blocks[208:210].halves())
    return _scaled(emit, emit.op("Sub", codes, emit.constant(32.0)), scales, 16)


def _q8_k(emit: Emitter, blocks: Bytes) -> Any:
    return emit.op("Mul", blocks[4:260].signed(), blocks[0:4].singles())


_DECODERS: dict[str, Callable[[Emitter, Bytes], Any]] = {
    "q4_0": _q4_0, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "q8_k": _q8_k,
}  # fmt: skip
