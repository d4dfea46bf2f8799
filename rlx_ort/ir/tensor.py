"""Tensor data as ONNX stores it: little-endian, C-contiguous, sub-byte types packed.

Weights and constants have this form everywhere in `rlx_ort`, because ONNX Runtime can borrow it without a copy.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType

__all__ = ["PIECE_BYTES", "FileRange", "TensorData"]

PIECE_BYTES = 8 << 20
"""Size of the pieces in which a tensor is copied from file to file."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where in a file the bytes of a mapped tensor are.

    Attributes:
        path: the file, absolute.
        offset: first byte.
        stamp: identity of the file when it was mapped; see `stamp_of`.
        pinned: whether only the mapped bytes may be used, because they were verified; the path must not be opened
            again.
    """

    path: str
    offset: int
    stamp: tuple[int, ...]
    pinned: bool = False

    @staticmethod
    def stamp_of(status: os.stat_result) -> tuple[int, ...]:
        """Return device, file id, size and time of change, which differ once a file is replaced or written."""
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def unchanged(self) -> bool:
        """Whether the path still names the file that was mapped. Reads the file's status."""
        try:
            return self.stamp_of(os.stat(self.path)) == self.stamp  # noqa: PTH116  # a plain path, asked often
        except OSError:
            return False

    @property
    def replaced(self) -> bool:
        """Whether the path names another file or none; a map of the old file still has its bytes."""
        try:
            return self.stamp_of(os.stat(self.path))[:2] != self.stamp[:2]  # noqa: PTH116  # as above
        except OSError:
            return True


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A dtype, a static shape and the bytes of the elements.

    `buffer` is one-dimensional uint8 of exactly `nbytes` bytes and may be a memory map; for strings it is an object
    array. It must not be changed while anything uses it. `source` is where a memory map comes from, for engines that
    map the file themselves.
    """

    dtype: DType
    shape: tuple[int, ...]
    buffer: npt.NDArray[Any]
    source: FileRange | None = None

    def __post_init__(self) -> None:
        if self.dtype is DType.STRING:
            found, wanted = self.buffer.size, self.num_elements
        else:
            found, wanted = self.buffer.nbytes, self.dtype.nbytes(self.num_elements)
        if found != wanted:
            raise ValueError(f"a {self.dtype.value}{list(self.shape)} tensor needs {wanted} bytes, got {found}")

    @classmethod
    def from_array(cls, array: npt.ArrayLike, dtype: DType | None = None) -> TensorData:
        """Return the tensor of an array, converted to `dtype` if one is given.

        Shares memory when the array is already native-endian, contiguous and not packed; copies otherwise.

        Raises:
            ValueError: the elements have no dtype here.
        """
        values = np.asarray(array)
        target = DType.from_numpy(values.dtype) if dtype is None else dtype
        if target is DType.STRING:
            flat = np.array([_as_text(item) for item in values.reshape(-1)], dtype=object)
            return cls(target, values.shape, flat)
        values = np.ascontiguousarray(values, dtype=target.numpy).reshape(values.shape)
        raw = values.reshape(-1).view(np.uint8) if values.size else np.empty(0, np.uint8)
        if target.is_packed:
            raw = _pack(raw, target.bits)
        elif sys.byteorder == "big" and values.itemsize > 1:
            raw = values.reshape(-1).byteswap().view(np.uint8)
        return cls(target, values.shape, raw)

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes the elements take in ONNX's storage; 0 for strings."""
        return 0 if self.dtype is DType.STRING else self.buffer.nbytes

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements as a read-only array of the logical shape; packed types are unpacked into a copy."""
        if self.dtype is DType.STRING:
            return self.buffer.reshape(self.shape)
        raw = _unpack(self.buffer, self.dtype.bits, self.num_elements) if self.dtype.is_packed else self.buffer
        wanted = self.dtype.numpy
        if raw.ctypes.data % max(wanted.alignment, 1):
            raw = raw.copy()
        values = raw.view(wanted).reshape(self.shape)
        if sys.byteorder == "big" and wanted.itemsize > 1:
            values = values.byteswap()
        values.flags.writeable = False
        return values

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order, at most 8 MiB at a time; use each before asking for the next.

        The bytes of a mapped file are read from the file, since reading the map would keep all its pages in memory.

        Raises:
            ConversionError: the file was written to since it was mapped.
            OSError: it cannot be read.
        """
        source = self.source
        if source is None or source.pinned or source.replaced:
            view = np.ascontiguousarray(self.buffer).data
            yield from (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
            return
        if not source.unchanged:  # reading the map behind the new end of the file would end the process
            raise ConversionError(f"{source.path} was written to since it was opened; convert again from the start")
        piece = memoryview(bytearray(min(PIECE_BYTES, self.nbytes)))
        left = self.nbytes
        with Path(source.path).open("rb", buffering=0) as file:
            file.seek(source.offset)
            while left:
                count = file.readinto(piece[:left])
                if not count:
                    reason = "became shorter while it was read; write it again and convert again"
                    raise ConversionError(f"{source.path} {reason}")
                yield piece[:count]
                left -= count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        same_type = (self.dtype, self.shape) == (other.dtype, other.shape)
        return same_type and bool(np.array_equal(self.buffer, other.buffer))

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))


def _pack(unpacked: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Pack one element a byte into ONNX's order: first element in the lowest bits."""
    per_byte = 8 // bits
    padded = np.zeros(-(-unpacked.size // per_byte) * per_byte, np.uint8)
    padded[: unpacked.size] = unpacked & ((1 << bits) - 1)
    columns = padded.reshape(-1, per_byte)
    packed = np.zeros(len(columns), np.uint8)
    for column in range(per_byte):
        packed |= columns[:, column] << (bits * column)
    return packed


def _unpack(packed: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Undo `_pack` for `count` elements."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count].astype(np.uint8)


def _as_text(item: object) -> str:
    return item.decode("utf-8") if isinstance(item, bytes) else str(item)
