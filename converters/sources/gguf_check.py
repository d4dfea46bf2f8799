"""Checks the header of a GGUF file before a reader follows it.

The reader of the `gguf` package trusts what a header says: a count that is too large keeps it busy for years, and an
offset beyond the end gives an empty tensor. Here every count and range is compared with the size of the file.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#file-structure
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlx_ort.errors import ConversionError

__all__ = ["check_gguf"]

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # gguf_metadata_value_type
_MAX_DIMS = 4  # GGML_MAX_DIMS
_ALIGNMENT = 32  # unless `general.alignment` says otherwise
_MAX_NAME_BYTES = 1 << 16


def check_gguf(path: Path, blocks: Mapping[int, tuple[int, int]]) -> None:
    """Raise unless the header of a file is whole and every tensor it names lies inside the file.

    Args:
        path: the file.
        blocks: number of a tensor type -> weights and bytes of a block.

    Raises:
        ConversionError: it cannot be read, is of an unknown version or the other byte order, or is damaged.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)
        _Walk(data.data, blocks).check()
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    except (ValueError, struct.error) as err:
        raise ConversionError(f"{path} is no GGUF file, or a damaged one: {err}") from err


class _Walk:
    """Reads a header from front to back."""

    def __init__(self, data: memoryview, blocks: Mapping[int, tuple[int, int]]) -> None:
        self._data = data
        self._blocks = blocks
        self._at = 0
        self._alignment = _ALIGNMENT

    def check(self) -> None:
        """Raise `ValueError` at the first thing that cannot be."""
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise ValueError("its numbers are big-endian; convert it with gguf-convert-endian")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}, known are {_VERSIONS[0]} and {_VERSIONS[1]}")
        tensors, entries = self._number("<Q"), self._number("<Q")
        for _ in range(self._count(entries, 12)):
            self._entry()
        places = [self._tensor() for _ in range(self._count(tensors, 24))]
        start = self._at + -self._at % self._alignment
        for name, offset, nbytes in places:
            if start + offset + nbytes > len(self._data):
                raise ValueError(
                    f"tensor {name!r} is bytes {start + offset} to {start + offset + nbytes} of {len(self._data)}; "
                    "the file is truncated"
                )
            if offset % self._alignment:
                raise ValueError(f"tensor {name!r} begins at {offset}, no multiple of {self._alignment}")

    def _entry(self) -> None:
        key = self._text(_MAX_NAME_BYTES)
        kind = self._number("<I")
        before = self._at
        self._value(kind)
        if key == "general.alignment":
            if kind != 4:
                raise ValueError("general.alignment is no 32-bit number")
            self._at = before
            self._alignment = self._number("<I")
            if self._alignment not in (1 << bit for bit in range(3, 24)):
                raise ValueError(f"general.alignment is {self._alignment}, no power of two from 8 to 8 MiB")

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text(len(self._data))
        elif kind == _ARRAY:
            element, count = self._number("<I"), self._number("<Q")
            if element == _STRING:
                for _ in range(self._count(count, 8)):
                    self._text(len(self._data))
            else:
                self._take(count * self._scalar(element))
        else:
            self._take(self._scalar(kind))

    def _tensor(self) -> tuple[str, int, int]:
        name = self._text(_MAX_NAME_BYTES)
        rank = self._number("<I")
        if not rank <= _MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {rank} dimensions, at most {_MAX_DIMS} are known")
        dims = [self._number("<Q") for _ in range(rank)]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in self._blocks:
            raise ValueError(f"tensor {name!r} has type {kind}, which is not known")
        weights, nbytes = self._blocks[kind]
        if not dims or dims[0] % weights or not all(dims):
            raise ValueError(f"tensor {name!r} of shape {dims[::-1]} has rows that are no multiple of {weights}")
        return name, offset, math.prod(dims) // weights * nbytes

    def _scalar(self, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"an entry has type {kind}, which is not known or nested")
        return _SCALAR_BYTES[kind]

    def _text(self, limit: int) -> str:
        length = self._number("<Q")
        if length > limit:
            raise ValueError(f"the text before byte {self._at} has {length} bytes, at most {limit} are known")
        return bytes(self._take(length)).decode("utf-8", "replace")

    def _count(self, count: int, least_bytes: int) -> int:
        """Return a count of things of at least so many bytes each, checked against what is left."""
        if count * least_bytes > len(self._data) - self._at:
            raise ValueError(f"it says {count} entries at byte {self._at} of {len(self._data)}; the file is truncated")
        return count

    def _number(self, code: str) -> int:
        return int(struct.unpack(code, self._take(struct.calcsize(code)))[0])

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise ValueError(f"it ends at byte {len(self._data)}, {count} more are needed at {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]
