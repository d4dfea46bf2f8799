"""GGUF blocks -> f32 in basic ONNX ops, so that packed weights can be set, and set again, in the bytes of the file.

ONNX Runtime computes all of this once, when it opens the session, if the bytes are weights: runs then cost nothing
more, and the weights take four bytes each. ONNX has no op that reads two bytes as one f16, so scales come from tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.emitter import Emitter
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.gguf_blocks import BlockFormat

__all__ = ["Bytes", "decode_blocks", "scales_and_mins"]


@dataclass(frozen=True, slots=True)
class Bytes:
    """A u8 value whose parts are taken out with the bit operations that ONNX has."""

    emit: Emitter
    value: ModelValue

    def columns(self, start: int, end: int) -> Bytes:
        """Return places `start` to `end` of the last axis."""
        return self._of(slice_axis(self.emit, self.value, -1, start, end))

    def reshape(self, *dims: int) -> Bytes:
        """Return the bytes under other dimensions."""
        return self._of(self.emit.op("Reshape", self.value, self.emit.i64(dims)))

    def low(self, mask: int) -> Bytes:
        """Return the bits of a mask."""
        return self._of(self.emit.op("BitwiseAnd", self.value, _u8(self.emit, mask)))

    def right(self, bits: int | Sequence[int], *shape: int) -> Bytes:
        """Shift right; several amounts broadcast under a shape."""
        return self._of(self.emit.op("BitShift", self.value, _u8(self.emit, bits, shape), direction="RIGHT"))

    def left(self, bits: int) -> Bytes:
        """Shift left."""
        return self._of(self.emit.op("BitShift", self.value, _u8(self.emit, bits), direction="LEFT"))

    def union(self, other: Bytes) -> Bytes:
        """Return the bits of both."""
        return self._of(self.emit.op("BitwiseOr", self.value, other.value))

    def join(self, other: Bytes, axis: int) -> Bytes:
        """Return both, one after the other along an axis."""
        return self._of(self.emit.op("Concat", self.value, other.value, axis=axis))

    def nibbles(self) -> Bytes:
        """Return the low halves, then the high ones, along a new axis before the last."""
        low, high = (
            half.emit.op("Unsqueeze", half.value, self.emit.i64([-2])) for half in (self.low(15), self.right(4))
        )
        return self._of(self.emit.op("Concat", low, high, axis=-2))

    def pairs(self) -> Bytes:
        """Return the low half and the high half of each byte, neighbours, along a new last axis."""
        low, high = (
            half.emit.op("Unsqueeze", half.value, self.emit.i64([-1])) for half in (self.low(15), self.right(4))
        )
        return self._of(self.emit.op("Concat", low, high, axis=-1))

    def flipped(self) -> Bytes:
        """Return signed bytes with 128 added, so that they count up from 0."""
        return self._of(self.emit.op("BitwiseXor", self.value, _u8(self.emit, 128)))

    def floats(self) -> Any:
        """Return the bytes as f32."""
        return self.emit.op("Cast", self.value, to=DType.F32)

    def signed(self) -> Any:
        """Return the bytes, read as i8, as f32."""
        return self.emit.op("Sub", self.flipped().floats(), self.emit.constant(128.0))

    def halves(self) -> Any:
        """Return two bytes, read as f16, as f32 `(blocks, 1)`; infinities and NaN become infinities."""
        high = self.emit.op("Cast", self.columns(1, 2).value, to=DType.I32)
        power, start = (self.emit.op("Gather", self.emit.constant(table), high) for table in _HALF_TABLES)
        mantissa = self.emit.op("Add", start, self.columns(0, 1).floats())
        return self.emit.op("Mul", power, mantissa)

    def singles(self) -> Any:
        """Return four bytes, read as f32, `(blocks, 1)`; numbers below 2^-125 become 0."""
        emit = self.emit
        top, second = (emit.op("Cast", self.columns(place, place + 1).value, to=DType.I32) for place in (3, 2))
        power, start, unit = (
            emit.op("Gather", emit.constant(table), index)
            for table, index in zip(_SINGLE_TABLES, (top, second, second), strict=True)
        )
        weights = emit.constant(np.array([2.0**-23, 2.0**-15], np.float32))
        low = emit.op("ReduceSum", emit.op("Mul", self.columns(0, 2).floats(), weights), emit.i64([-1]), keepdims=1)
        return emit.op("Mul", power, emit.op("Add", start, emit.op("Mul", unit, low)))

    def _of(self, value: Any) -> Bytes:
        return Bytes(self.emit, value)


def decode_blocks(emit: Emitter, kind: BlockFormat, raw: ModelValue) -> Any:
    """Write the weights of packed blocks, u8 of any shape, as f32 `(blocks, elements)`."""
    blocks = Bytes(emit, raw).reshape(-1, kind.bytes)
    return _DECODERS[kind.name](emit, blocks)


def _u8(emit: Emitter, numbers: int | Sequence[int], shape: Sequence[int] = ()) -> ModelValue:
    return emit.constant(np.asarray(numbers, np.uint8).reshape(shape))


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
    spread = [emit.op("Reshape", codes, emit.i64([-1, groups, 256 // groups])), scales, mins]
    spread[1:] = [None if item is None else emit.op("Unsqueeze", item, emit.i64([-1])) for item in spread[1:]]
    values = emit.op("Mul", spread[0], spread[1])
    if mins is not None:
        values = emit.op("Sub", values, spread[2])
    return emit.op("Reshape", values, emit.i64([-1, 256]))


def _q4_0(emit: Emitter, blocks: Bytes) -> Any:
    codes = blocks.columns(2, 18).nibbles().reshape(-1, 32).floats()
    return emit.op("Mul", emit.op("Sub", codes, emit.constant(8.0)), blocks.columns(0, 2).halves())


def _q8_0(emit: Emitter, blocks: Bytes) -> Any:
    return emit.op("Mul", blocks.columns(2, 34).signed(), blocks.columns(0, 2).halves())


def _two_bits(codes: Bytes) -> Bytes:
    """Return 256 numbers of 2 bits: each half of 32 bytes holds four runs of 32, lowest bits first."""
    return codes.reshape(-1, 2, 1, 32).right([0, 2, 4, 6], 1, 1, 4, 1).low(3).reshape(-1, 256)


def _one_bits(codes: Bytes) -> Bytes:
    """Return 256 single bits: 32 bytes hold eight runs of 32, lowest bit first."""
    return codes.reshape(-1, 1, 32).right(range(8), 1, 8, 1).low(1).reshape(-1, 256)


def _q2_k(emit: Emitter, blocks: Bytes) -> Any:
    packed = blocks.columns(0, 16)
    scales = emit.op("Mul", packed.low(15).floats(), blocks.columns(80, 82).halves())
    mins = emit.op("Mul", packed.right(4).floats(), blocks.columns(82, 84).halves())
    return _scaled(emit, _two_bits(blocks.columns(16, 80)).floats(), scales, 16, mins)


def _q3_k(emit: Emitter, blocks: Bytes) -> Any:
    codes = _two_bits(blocks.columns(32, 96)).union(_one_bits(blocks.columns(0, 32)).left(2)).floats()
    low = blocks.columns(96, 104).nibbles().reshape(-1, 16)
    top = blocks.columns(104, 108).reshape(-1, 1, 4).right([0, 2, 4, 6], 1, 4, 1).low(3).reshape(-1, 16)
    steps = emit.op("Sub", low.union(top.left(4)).floats(), emit.constant(32.0))
    scales = emit.op("Mul", steps, blocks.columns(108, 110).halves())
    return _scaled(emit, emit.op("Sub", codes, emit.constant(4.0)), scales, 16)


def scales_and_mins(emit: Emitter, blocks: Bytes) -> tuple[Any, Any]:
    """Write the eight scales and eight minima of each block of `q4_k` and `q5_k`: 6 bits each, in 12 bytes."""
    first, second, third = (blocks.columns(start, start + 4) for start in (4, 8, 12))
    scales = first.low(63).join(third.low(15).union(first.right(6).left(4)), -1)
    mins = second.low(63).join(third.right(4).union(second.right(6).left(4)), -1)
    return (
        emit.op("Mul", scales.floats(), blocks.columns(0, 2).halves()),
        emit.op("Mul", mins.floats(), blocks.columns(2, 4).halves()),
    )


def _q4_k(emit: Emitter, blocks: Bytes) -> Any:
    scales, mins = scales_and_mins(emit, blocks)
    codes = blocks.columns(16, 144).reshape(-1, 4, 32).nibbles().reshape(-1, 256)
    return _scaled(emit, codes.floats(), scales, 8, mins)


def _q5_k(emit: Emitter, blocks: Bytes) -> Any:
    scales, mins = scales_and_mins(emit, blocks)
    low = blocks.columns(48, 176).reshape(-1, 4, 32).nibbles().reshape(-1, 256)
    codes = low.union(_one_bits(blocks.columns(16, 48)).left(4))
    return _scaled(emit, codes.floats(), scales, 8, mins)


def _q6_k(emit: Emitter, blocks: Bytes) -> Any:
    low = blocks.columns(0, 128).reshape(-1, 2, 64).nibbles().reshape(-1, 256)
    codes = low.union(_two_bits(blocks.columns(128, 192)).left(4)).floats()
    scales = emit.op("Mul", blocks.columns(192, 208).signed(), blocks.columns(208, 210).halves())
    return _scaled(emit, emit.op("Sub", codes, emit.constant(32.0)), scales, 16)


def _q8_k(emit: Emitter, blocks: Bytes) -> Any:
    return emit.op("Mul", blocks.columns(4, 260).signed(), blocks.columns(0, 4).singles())


_DECODERS: dict[str, Callable[[Emitter, Bytes], Any]] = {
    "q4_0": _q4_0,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q8_k": _q8_k,
}
