"""The block formats of GGUF weight files, and their dequantisation in numpy.

A row of k weights is k / elements blocks, one after the other. The layouts are those of GGML's `block_*` structures:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.op import known_name

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How many weights a block holds, in how many bytes, and the function from blocks `(N, bytes)` to the weights."""

    name: str
    elements: int
    bytes: int
    decode: Callable[[_Bytes], _Floats] = field(repr=False)

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of k weights."""
        if k % self.elements:
            raise GraphVerifyError(
                f"{self.name} packs {self.elements} weights a block, so k must be a multiple; got {k}"
            )
        return k // self.elements * self.bytes


def block_format(name: str) -> BlockFormat:
    """Return a format by name, with or without the underscore: `Q4_K`, `q4k`."""
    return GGUF_FORMATS[known_name("GGUF format", name, tuple(GGUF_FORMATS))]


def dequantize_blocks(name: str, raw: npt.ArrayLike) -> _Floats:
    """Return the weights of packed rows as f32: uint8 `(..., row bytes)` -> `(..., k)`.

    Raises:
        GraphVerifyError: there is no such format, or a row is no whole number of blocks.
    """
    kind = block_format(name)
    data = np.ascontiguousarray(raw, np.uint8)
    if data.ndim == 0 or data.shape[-1] % kind.bytes:
        raise GraphVerifyError(f"{kind.name} rows are multiples of {kind.bytes} bytes, got shape {data.shape}")
    blocks = data.reshape(-1, kind.bytes)
    values = kind.decode(blocks).astype(np.float32)
    return values.reshape(*data.shape[:-1], data.shape[-1] // kind.bytes * kind.elements)


def _half(columns: _Bytes) -> _Floats:
    """Return f16 numbers of two bytes each as f32, `(blocks, 1)`."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(codes: _Bytes) -> _Bytes:
    """Return the low halves of bytes, then the high ones, along a new axis before the last."""
    return np.stack([codes & 15, codes >> 4], axis=-2)


def _spread(scales: npt.NDArray[np.float32], elements: int) -> _Floats:
    """Repeat each scale for the elements it applies to."""
    return np.repeat(scales, elements // scales.shape[1], axis=1)


def _q4_0(blocks: _Bytes) -> _Floats:
    codes = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.float32)
    return (codes - np.float32(8)) * _half(blocks[:, :2])


def _q8_0(blocks: _Bytes) -> _Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks[:, :2])


def _q2_k(blocks: _Bytes) -> _Floats:
    codes = _two_bits(blocks[:, 16:80]).astype(np.float32)
    scales, mins = blocks[:, :16] & 15, blocks[:, :16] >> 4
    low = _spread(_half(blocks[:, 82:84]) * mins.astype(np.float32), 256)
    return _spread(_half(blocks[:, 80:82]) * scales.astype(np.float32), 256) * codes - low


def _two_bits(codes: _Bytes) -> _Bytes:
    """Return 256 numbers of 2 bits: each half of 32 bytes holds four runs of 32, lowest bits first."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    pairs: _Bytes = (codes.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    return pairs.reshape(-1, 256)


def _q3_k(blocks: _Bytes) -> _Floats:
    codes = _two_bits(blocks[:, 32:96]).astype(np.float32)
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, :32] >> bits) & 1).reshape(-1, 256).astype(np.float32)
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8]).reshape(-1, 16)
    pairs = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    top = ((packed[:, None, 8:] >> pairs) & 3).reshape(-1, 16)
    scales = (low | (top << 4)).astype(np.float32) - np.float32(32)
    scaled = (_half(blocks[:, 108:110]) * scales).astype(np.float32, copy=False)
    return _spread(scaled, 256) * (codes + 4 * high - np.float32(4))


def _with_minima(blocks: _Bytes, codes: npt.NDArray[np.integer[Any]]) -> _Floats:
    """Return Q4_K or Q5_K weights: eight scales and eight minima of 6 bits are in 12 bytes after the two factors."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1).astype(np.float32)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1).astype(np.float32)
    low = _spread(_half(blocks[:, 2:4]) * mins, 256)
    return _spread(_half(blocks[:, :2]) * scales, 256) * codes.astype(np.float32) - low


def _q4_k(blocks: _Bytes) -> _Floats:
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256))


def _q5_k(blocks: _Bytes) -> _Floats:
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> bits) & 1).reshape(-1, 256)
    return _with_minima(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | (high << 4))


def _q6_k(blocks: _Bytes) -> _Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = (low | (_two_bits(blocks[:, 128:192]) << 4)).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _spread(_half(blocks[:, 208:210]) * scales, 256) * codes


def _q8_k(blocks: _Bytes) -> _Floats:
    scale = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    return scale * blocks[:, 4:260].view(np.int8).astype(np.float32)


GGUF_FORMATS = {
    kind.name: kind
    for kind in (
        BlockFormat("q4_0", 32, 18, _q4_0),
        BlockFormat("q8_0", 32, 34, _q8_0),
        BlockFormat("q2_k", 256, 84, _q2_k),
        BlockFormat("q3_k", 256, 110, _q3_k),
        BlockFormat("q4_k", 256, 144, _q4_k),
        BlockFormat("q5_k", 256, 176, _q5_k),
        BlockFormat("q6_k", 256, 210, _q6_k),
        BlockFormat("q8_k", 256, 292, _q8_k),
    )
}
"""Name -> format."""
