"""The block formats of GGUF weight files, and their dequantisation.

A row of k weights is k / elements blocks, one after the other. The layouts are those of GGML's `block_*` structures:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

Each layout is written once, for bytes `(blocks, bytes)` with numpy's operators and the methods of `_Rows`: numpy arrays
here, values of an ONNX graph in `rlx_ort.converters.to_onnx.quant`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.op import known_name

_PAIRS = np.array([0, 2, 4, 6], np.uint8)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How many weights a block holds, in how many bytes, and the function that makes f32 of blocks `(N, bytes)`."""

    name: str
    elements: int
    bytes: int
    decode: Callable[[Any], Any] = field(repr=False)

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


def dequantize_blocks(name: str, raw: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return the weights of packed rows as f32: uint8 `(..., row bytes)` -> `(..., k)`.

    Raises:
        GraphVerifyError: there is no such format, or a row is no whole number of blocks.
    """
    kind = block_format(name)
    data = np.ascontiguousarray(raw, np.uint8)
    if data.ndim == 0 or data.shape[-1] % kind.bytes:
        raise GraphVerifyError(f"{kind.name} rows are multiples of {kind.bytes} bytes, got shape {data.shape}")
    values = np.asarray(kind.decode(data.reshape(-1, kind.bytes).view(_Rows)), np.float32)
    return values.reshape(*data.shape[:-1], data.shape[-1] // kind.bytes * kind.elements)


class _Rows(np.ndarray[Any, np.dtype[Any]]):
    """An array of bytes with the layouts' operations beside numpy's operators."""

    def join(self, other: Any) -> Any:
        """Return both, one after the other along the last axis."""
        return np.concatenate([self, other], axis=-1).view(_Rows)

    def nibbles(self) -> Any:
        """Return the low halves of bytes, then the high ones, along a new axis before the last."""
        return np.stack([self & 15, self >> 4], axis=-2).view(_Rows)

    def floats(self) -> Any:
        """Return the bytes as f32."""
        return self.astype(np.float32)

    def signed(self) -> Any:
        """Return the bytes, read as i8, as f32."""
        return np.asarray(self).view(np.int8).astype(np.float32)

    def halves(self) -> Any:
        """Return two bytes, read as f16, as f32 `(blocks, 1)`."""
        return np.ascontiguousarray(self).view("<f2").astype(np.float32)

    def singles(self) -> Any:
        """Return four bytes, read as f32, `(blocks, 1)`."""
        return np.ascontiguousarray(self).view("<f4")


def _scaled(codes: Any, scales: Any, groups: int, mins: Any = None) -> Any:
    """Return codes times scales, less the minima; `groups` scales of a block run over its 256 weights."""
    split = codes.reshape(-1, groups, 256 // groups)
    scales, mins = (None if item is None else item[..., None] for item in (scales, mins))
    values = split * scales
    return (values if mins is None else values - mins).reshape(-1, 256)


def _q4_0(blocks: Any) -> Any:
    codes = blocks[:, 2:18].nibbles().reshape(-1, 32).floats()
    return (codes - 8.0) * blocks[:, 0:2].halves()


def _q8_0(blocks: Any) -> Any:
    return blocks[:, 2:34].signed() * blocks[:, 0:2].halves()


def _four_bits(codes: Any, runs: int) -> Any:
    """Return 256 numbers of 4 bits: in each run of bytes the low halves come before the high ones."""
    return codes.reshape(-1, runs, 128 // runs).nibbles().reshape(-1, 256)


def _two_bits(codes: Any) -> Any:
    """Return 256 numbers of 2 bits: each half of 32 bytes holds four runs of 32, lowest bits first."""
    return (codes.reshape(-1, 2, 1, 32) >> _PAIRS.reshape(1, 1, 4, 1) & 3).reshape(-1, 256)


def _one_bits(codes: Any) -> Any:
    """Return 256 single bits: 32 bytes hold eight runs of 32, lowest bit first."""
    return (codes.reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1).reshape(-1, 256)


def _q2_k(blocks: Any) -> Any:
    packed = blocks[:, 0:16]
    scales = (packed & 15).floats() * blocks[:, 80:82].halves()
    mins = (packed >> 4).floats() * blocks[:, 82:84].halves()
    return _scaled(_two_bits(blocks[:, 16:80]).floats(), scales, 16, mins)


def _q3_k(blocks: Any) -> Any:
    codes = (_two_bits(blocks[:, 32:96]) | _one_bits(blocks[:, 0:32]) << 2).floats()
    low = blocks[:, 96:104].nibbles().reshape(-1, 16)
    top = (blocks[:, 104:108].reshape(-1, 1, 4) >> _PAIRS.reshape(1, 4, 1) & 3).reshape(-1, 16)
    scales = ((low | top << 4).floats() - 32.0) * blocks[:, 108:110].halves()
    return _scaled(codes - 4.0, scales, 16)


def scales_and_mins(blocks: Any) -> tuple[Any, Any]:
    """Return the eight scales and eight minima of each block of `q4_k` and `q5_k`: 6 bits each, in 12 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = (first & 63).join(third & 15 | first >> 6 << 4)
    mins = (second & 63).join(third >> 4 | second >> 6 << 4)
    return scales.floats() * blocks[:, 0:2].halves(), mins.floats() * blocks[:, 2:4].halves()


def _q4_k(blocks: Any) -> Any:
    scales, mins = scales_and_mins(blocks)
    return _scaled(_four_bits(blocks[:, 16:144], 4).floats(), scales, 8, mins)


def _q5_k(blocks: Any) -> Any:
    scales, mins = scales_and_mins(blocks)
    codes = _four_bits(blocks[:, 48:176], 4) | _one_bits(blocks[:, 16:48]) << 4
    return _scaled(codes.floats(), scales, 8, mins)


def _q6_k(blocks: Any) -> Any:
    codes = (_four_bits(blocks[:, 0:128], 2) | _two_bits(blocks[:, 128:192]) << 4).floats()
    scales = blocks[:, 192:208].signed() * blocks[:, 208:210].halves()
    return _scaled(codes - 32.0, scales, 16)


def _q8_k(blocks: Any) -> Any:
    return blocks[:, 4:260].signed() * blocks[:, 0:4].singles()


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
