"""numpy's archives: stored members are mapped, compressed ones read in pieces when asked for.

Nothing is unpickled, and declared sizes are compared with the file before memory is allocated.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.sources.weights import WeightEntry, WeightFile
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData

__all__ = ["LIMIT_BYTES", "LIMIT_RATIO", "read_npz"]

LIMIT_BYTES = 64 << 30
"""The most an archive may unpack to."""
LIMIT_RATIO = 200
"""How many times its own size an archive may unpack to, above `_SMALL_BYTES`. Weights compress 1.1 to 4 times."""

_SMALL_BYTES = 64 << 20
_MAX_MEMBERS = 1 << 20
_PIECE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, KeyError)


def read_npz(path: Path, *, limit_bytes: int = LIMIT_BYTES, limit_ratio: int = LIMIT_RATIO) -> WeightFile:
    """Return the arrays of an archive. Reads the header of each, and the data of none.

    Args:
        path: the archive.
        limit_bytes: the most it may unpack to.
        limit_ratio: how many times its own size it may unpack to, if that is above 64 MiB.

    Raises:
        ConversionError: the file is no archive, is damaged, holds pickled objects, or unpacks to more than it may.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            status = os.fstat(file.fileno())
            _check_sizes(path, archive, status.st_size, limit_bytes, limit_ratio)
            place = FileRange(str(path.resolve()), 0, FileRange.stamp_of(status))
            entries: dict[str, WeightEntry] = {}
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name in entries:
                    raise ConversionError(f"{path} has two arrays {name!r}")
                entries[name] = _Member(path, info, place).entry(archive, file)
            return WeightFile(str(path), entries)
    except _BROKEN as err:
        raise ConversionError(f"{path} is no npz archive, or a damaged one: {err}") from err


def _check_sizes(path: Path, archive: zipfile.ZipFile, size: int, limit: int, ratio: int) -> None:
    members = archive.infolist()
    unpacked = sum(info.file_size for info in members)
    if len(members) > _MAX_MEMBERS:
        raise ConversionError(f"{path} has {len(members)} members, above {_MAX_MEMBERS}")
    if sum(info.compress_size for info in members) > size:
        raise ConversionError(f"{path} has members that overlap, or that say they are larger than the file")
    if unpacked > limit or (unpacked > _SMALL_BYTES and unpacked > ratio * size):
        raise ConversionError(
            f"{path} has {size} bytes and would unpack to {unpacked}; at most {ratio} times its size and {limit} bytes "
            "are read, since an archive may be made to fill the memory. If you trust it, save it with numpy.savez, "
            "uncompressed"
        )


class _Member:
    """One array of an archive."""

    def __init__(self, path: Path, info: zipfile.ZipInfo, place: FileRange) -> None:
        self._path = path
        self._info = info
        self._place = place
        self._dtype = DType.F32
        self._stored = np.dtype(np.float32)
        self._shape: tuple[int, ...] = ()
        self._fortran = False
        self._header_bytes = 0

    def entry(self, archive: zipfile.ZipFile, file: IO[bytes]) -> WeightEntry:
        """Return the array without its data; reads its header."""
        if self._info.flag_bits & 1:
            raise ConversionError(f"{self._path}: {self._info.filename} is encrypted")
        with archive.open(self._info) as stream:
            self._read_header(stream)
            self._header_bytes = stream.tell()
        declared = math.prod(self._shape) * self._stored.itemsize
        if self._info.file_size - self._header_bytes != declared:
            found = self._info.file_size - self._header_bytes
            raise ConversionError(f"{self._what()} needs {declared} bytes, it has {found}; the archive is damaged")
        as_it_is = not self._fortran and self._stored == self._dtype.numpy.newbyteorder("<")
        if self._info.compress_type == zipfile.ZIP_STORED and as_it_is and declared:
            offset = self._data_offset(file) + self._header_bytes
            if offset + declared > self._place.stamp[2]:
                raise ConversionError(f"{self._what()} reaches beyond the end of the file, which is truncated")
            return WeightEntry(self._dtype, self._shape, lambda: self._map(offset, declared))
        return WeightEntry(self._dtype, self._shape, self._read)

    def _read_header(self, stream: IO[bytes]) -> None:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ConversionError(f"{self._what()} has version {version} of numpy's format, known are 1 to 3")
        # Both readers parse a Python literal, at most 10,000 characters of it; they execute nothing.
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self._shape, self._fortran, self._stored = read(stream)
        if self._stored.hasobject:
            raise ConversionError(
                f"{self._what()} holds pickled Python objects. Reading them runs code that is in the file, so that is "
                "never done; save plain arrays"
            )
        if any(isinstance(size, bool) or size < 0 for size in self._shape):
            raise ConversionError(f"{self._what()} has shape {self._shape}")
        try:
            self._dtype = DType.from_numpy(self._stored)
        except ValueError as err:
            raise ConversionError(
                f"{self._what()}: {err}; numpy's files lack bfloat16 and 8-bit floats, safetensors has them"
            ) from err
        if self._dtype is DType.STRING or self._dtype.is_packed:
            raise ConversionError(f"{self._what()} holds {self._stored}, which is no weight")

    def _data_offset(self, file: IO[bytes]) -> int:
        """Return where a member's data begins; its name and extra field may differ from those of the directory."""
        file.seek(self._info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        if signature != b"PK\x03\x04":
            raise ConversionError(f"{self._what()} is not where the archive says")
        return int(self._info.header_offset + _LOCAL_HEADER.size + name + extra)

    def _map(self, offset: int, nbytes: int) -> TensorData:
        try:
            data = np.memmap(self._path, np.uint8, "r", offset, (nbytes,))
        except (OSError, ValueError) as err:
            raise ConversionError(f"{self._what()} cannot be read: {err}") from err
        return TensorData(self._dtype, self._shape, data, FileRange(self._place.path, offset, self._place.stamp))

    def _read(self) -> TensorData:
        """Return the array in memory; takes its bytes once, and twice where the order of axes or bytes differs."""
        nbytes = math.prod(self._shape) * self._stored.itemsize
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(self._info) as stream:
                stream.read(self._header_bytes)
                data = _filled(stream, nbytes)
        except _BROKEN as err:
            raise ConversionError(f"{self._what()} cannot be read: {err}") from err
        values: npt.NDArray[Any] = data.view(self._stored)
        values = values.reshape(self._shape[::-1]).T if self._fortran else values.reshape(self._shape)
        return TensorData.from_array(values, self._dtype)

    def _what(self) -> str:
        return f"{self._path}: array {self._info.filename.removesuffix('.npy')!r}"


def _filled(stream: IO[bytes], nbytes: int) -> npt.NDArray[np.uint8]:
    """Return all `nbytes` bytes of a stream, which must end there: the zip reader verifies the checksum at the end."""
    data = np.empty(nbytes, np.uint8)
    at = 0
    while piece := stream.read(_PIECE_BYTES):
        if at + len(piece) > nbytes:
            raise ValueError(f"it unpacks to more than the {nbytes} bytes it declares")
        data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    if at != nbytes:
        raise ValueError(f"it unpacks to {at} bytes and declares {nbytes}")
    return data
