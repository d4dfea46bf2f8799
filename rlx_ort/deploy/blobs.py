"""Tensors laid out in a data file: where each goes, and its bytes in a stream, without a copy of all of them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rlx_ort.deploy.index import FileEntry, StoredTensor
from rlx_ort.deploy.write import Content
from rlx_ort.deploy.zip_layout import LARGE_ALIGNMENT, LARGE_BYTES
from rlx_ort.errors import PackageError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData

__all__ = ["Blob", "Digested"]

_SMALL_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class _Piece:
    name: str
    offset: int
    size: int
    dtype: DType
    shape: tuple[int, ...]
    make: Callable[[], TensorData]


@dataclass(frozen=True)
class Digested:
    """A data file whose digests are known: the file's entry, those of its tensors by name, and its bytes."""

    entry: FileEntry
    tensors: dict[str, StoredTensor]
    content: Content


class Blob:
    """A data file under construction. Tensors of 1 MiB and more begin at a multiple of 64 KiB, others of 64 bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[_Piece] = []

    def add(self, name: str, data: TensorData, dtype: DType | None = None) -> int:
        """Append a tensor, rounded to `dtype` where one is given, and return its offset; nothing is computed yet.

        Raises:
            PackageError: it is of strings, which have no bytes here.
        """
        from rlx_ort.ir.narrow import narrowed

        kept = data.dtype if dtype is None else dtype
        if kept is DType.STRING:
            raise PackageError(f"tensor {name!r} holds strings, which a data file of a package cannot")
        size = kept.nbytes(data.num_elements)
        step = LARGE_ALIGNMENT if size >= LARGE_BYTES else _SMALL_ALIGNMENT
        offset = -(-self.size // step) * step
        make = (lambda: data) if kept is data.dtype else (lambda: narrowed(data, kept))
        self._pieces.append(_Piece(name, offset, size, kept, data.shape, make))
        self.size = offset + size
        return offset

    def digest(self, path_of: Callable[[str], str]) -> Digested:
        """Read every tensor once and return the digests; `path_of` gives the file's name for its SHA-256."""
        whole, crc = hashlib.sha256(), 0
        digests = []
        end = 0
        for piece in self._pieces:
            gap = bytes(piece.offset - end)
            own = hashlib.sha256()
            whole.update(gap)
            crc = zlib.crc32(gap, crc)
            for chunk in _chunks(piece):
                own.update(chunk)
                whole.update(chunk)
                crc = zlib.crc32(chunk, crc)
            digests.append(own.hexdigest())
            end = piece.offset + piece.size
        path = path_of(whole.hexdigest())
        tensors = {
            piece.name: StoredTensor(path, piece.offset, piece.size, piece.dtype, piece.shape, digest)
            for piece, digest in zip(self._pieces, digests, strict=True)
        }
        return Digested(FileEntry(self.size, whole.hexdigest(), crc), tensors, Content(self.size, crc, self._stream))

    def _stream(self) -> Iterator[bytes | memoryview]:
        end = 0
        for piece in self._pieces:
            if piece.offset > end:
                yield bytes(piece.offset - end)
            yield from _chunks(piece)
            end = piece.offset + piece.size


def _chunks(piece: _Piece) -> Iterator[memoryview]:
    data = np.ascontiguousarray(piece.make().buffer).data
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
