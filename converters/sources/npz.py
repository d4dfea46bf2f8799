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
from rlx_ort.storage import open_regular

LIMIT_BYTES = 64 << 30
"""The most an archive may unpack to."""
LIMIT_RATIO = 200
"""How many times its own size an archive may unpack to, above `_SMALL_BYTES`. Weights compress 1.1 to 4 times."""

_SMALL_BYTES = 64 << 20
_MAX_MEMBERS = 1 << 20
_PIECE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, KeyError)


def read_npz(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> WeightFile:
    """Return the arrays of an archive. Reads the header of each, and the data of none.

    It may unpack to at most `limit_bytes`, and to at most 64 MiB or 200 times its own size, whichever is more.

    Raises:
        ConversionError: the file is no archive, is damaged, holds pickled objects, or unpacks to more than it may.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            status = os.fstat(file.fileno())
            _check_sizes(path, archive, status.st_size, limit_bytes)
            place = FileRange(str(path.resolve()), 0, FileRange.stamp_of(status))
            entries: dict[str, WeightEntry] = {}
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name in entries:
                    raise ConversionError(f"{path} has two arrays {name!r}")
                entries[name] = _entry(path, info, archive, file, place)
            return WeightFile(str(path), entries)
    except _BROKEN as err:
        raise ConversionError(f"{path} is not an npz archive, or a damaged one: {err}") from err


def _check_sizes(path: Path, archive: zipfile.ZipFile, size: int, limit: int) -> None:
    members = archive.infolist()
    unpacked = sum(info.file_size for info in members)
    if len(members) > _MAX_MEMBERS:
        raise ConversionError(f"{path} has {len(members)} members, above {_MAX_MEMBERS}")
    if sum(info.compress_size for info in members) > size:
        raise ConversionError(f"{path} has members that overlap, or that say they are larger than the file")
    if unpacked > limit or (unpacked > _SMALL_BYTES and unpacked > LIMIT_RATIO * size):
        raise ConversionError(
            f"{path} has {size} bytes and would unpack to {unpacked}; at most {LIMIT_RATIO} times its size and {limit} "
            "bytes are read, since an archive may be made to fill the memory. If you trust it, save it with "
            "numpy.savez, uncompressed"
        )


def _entry(
    path: Path, info: zipfile.ZipInfo, archive: zipfile.ZipFile, file: IO[bytes], place: FileRange
) -> WeightEntry:
    """Return an array without its data; reads its header."""
    what = f"{path}: array {info.filename.removesuffix('.npy')!r}"
    if info.flag_bits & 1:
        raise ConversionError(f"{what} is encrypted")
    with archive.open(info) as stream:
        shape, fortran, stored, dtype = _header(stream, what)
        header_bytes = stream.tell()
    declared, available = math.prod(shape) * stored.itemsize, info.file_size - header_bytes
    if available != declared:
        raise ConversionError(f"{what} needs {declared} bytes, it has {available}; the archive is damaged")
    as_it_is = not fortran and stored == dtype.numpy.newbyteorder("<")
    offset = 0
    if info.compress_type == zipfile.ZIP_STORED and as_it_is and declared:
        offset = _data_offset(file, info, what) + header_bytes
        if offset + declared > place.stamp[2]:
            raise ConversionError(f"{what} reaches beyond the end of the file, which is truncated")

    def load() -> TensorData:
        """Map the array, or take its bytes once, and twice where the order of axes or bytes differs."""
        try:
            if offset:
                data = np.memmap(path, np.uint8, "r", offset, (declared,))
                return TensorData(dtype, shape, data, FileRange(place.path, offset, place.stamp))
            with zipfile.ZipFile(path) as archive, archive.open(info) as stream:
                stream.read(header_bytes)
                values: npt.NDArray[Any] = _filled(stream, declared).view(stored)
        except _BROKEN as err:
            raise ConversionError(f"{what} cannot be read: {err}") from err
        return TensorData.from_array(values.reshape(shape, order="F" if fortran else "C"), dtype)

    return WeightEntry(dtype, shape, load)


def _header(stream: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], DType]:
    """Return the shape of an array, whether its first axis runs fastest, and its dtype as stored and as ours."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ConversionError(f"{what} has version {version} of numpy's format, known are 1 to 3")
    # Both readers parse a Python literal, at most 10,000 characters of it; they execute nothing.
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, stored = read(stream)
    if stored.hasobject:
        raise ConversionError(
            f"{what} holds pickled Python objects. Reading them runs code that is in the file, so that is never done; "
            "save plain arrays"
        )
    if any(isinstance(size, bool) or size < 0 for size in shape):
        raise ConversionError(f"{what} has shape {shape}")
    try:
        dtype = DType.from_numpy(stored)
    except ValueError as err:
        raise ConversionError(
            f"{what}: {err}; numpy's files lack bfloat16 and 8-bit floats, safetensors has them"
        ) from err
    if dtype is DType.STRING or dtype.is_packed:
        raise ConversionError(f"{what} holds {stored}, which is not a weight")
    return shape, fortran, stored, dtype


def _data_offset(file: IO[bytes], info: zipfile.ZipInfo, what: str) -> int:
    """Return where a member's data begins; its name and extra field may differ from those of the directory."""
    file.seek(info.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise ConversionError(f"{what} is not where the archive says")
    return int(info.header_offset + _LOCAL_HEADER.size + name + extra)


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
