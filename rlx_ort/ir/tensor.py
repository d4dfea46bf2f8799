"""Tensor data as ONNX stores it, the same rounded to a narrower float type, and safetensors files.

Weights and constants are little-endian, C-contiguous, with packed sub-byte types, everywhere in `rlx_ort`, because ONNX
Runtime can borrow that form without a copy.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.storage import open_regular, parse_json, replacing, stamp_of

PIECE_BYTES = 8 << 20
"""Size of the pieces in which a tensor is copied from file to file."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where in a file, by its absolute path, the bytes of a mapped tensor begin.

    `stamp` identifies the file as it was mapped; see `stamp_of`. The path of a `pinned` range must not be opened again,
    because the mapped bytes were verified.
    """

    path: str
    offset: int
    stamp: tuple[int, ...]
    pinned: bool = False

    stamp_of = staticmethod(stamp_of)

    @property
    def unchanged(self) -> bool:
        """Whether the path still names the file that was mapped. Reads the file's status."""
        return self._now() == self.stamp

    @property
    def replaced(self) -> bool:
        """Whether the path names another file or none; a map of the old file still has its bytes."""
        return self._now()[:2] != self.stamp[:2]

    def _now(self) -> tuple[int, ...]:
        """Return the stamp of the file that the path names, nothing if there is none."""
        try:
            return self.stamp_of(os.stat(self.path))  # noqa: PTH116  # a plain path, asked often
        except OSError:
            return ()


_USUAL_RANK = 32  # which every numpy has


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return f"<TensorData {self.dtype.value}{list(self.shape)}>"

    def __post_init__(self) -> None:
        if self.dtype is DType.STRING:
            size, wanted = self.buffer.size, self.num_elements
        else:
            size, wanted = self.buffer.nbytes, self.dtype.nbytes(self.num_elements)
        if size != wanted:
            raise ValueError(f"a {self.dtype.value}{list(self.shape)} tensor needs {wanted} bytes, got {size}")
        if not size or len(self.shape) > _USUAL_RANK:  # whose sizes the number of bytes does not bound
            np.broadcast_to(np.empty((), self.dtype.numpy), self.shape)  # ValueError where numpy has no such array

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
            texts = [item.decode() if isinstance(item, bytes) else str(item) for item in values.reshape(-1)]
            return cls(target, values.shape, np.array(texts, dtype=object))
        values = np.ascontiguousarray(values, dtype=target.numpy).reshape(values.shape)
        raw = values.reshape(-1).view(np.uint8) if values.size else np.empty(0, np.uint8)
        if target.is_packed:
            raw = _pack(raw, target.bits)
        elif sys.byteorder == "big" and values.itemsize > 1:
            raw = values.reshape(-1).byteswap().view(np.uint8)
        return cls(target, values.shape, raw)

    @classmethod
    def owned(cls, array: npt.ArrayLike, dtype: DType | None = None) -> TensorData:
        """Return the tensor of `from_array`, in memory that its owner cannot change later: writeable arrays are copied.

        Read-only arrays, memory maps among them, are shared unless they are views of writeable memory.

        Raises:
            ValueError: the elements have no dtype here.
        """
        values = np.asarray(array)
        data = cls.from_array(values, dtype)
        if isinstance(array, (list, tuple)) or data.dtype is DType.STRING:
            return data  # new memory already
        if np.may_share_memory(values, data.buffer) and _may_change(values):
            return cls(data.dtype, data.shape, data.buffer.copy())
        return data

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


def _may_change(array: npt.NDArray[Any]) -> bool:
    """Return whether the array's memory is writeable, through it or through an object that it is a view of."""
    link: object = array
    while isinstance(link, np.ndarray):
        if link.flags.writeable:
            return True
        link = link.base
    if link is None or isinstance(link, bytes):
        return False
    try:
        return not memoryview(link).readonly  # type: ignore[arg-type]  # a base without a buffer raises TypeError
    except TypeError:
        return True


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


_LARGEST = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38}
_SMALL_BYTES = 1 << 20  # smaller tensors are rounded at once


def narrowed(data: TensorData, dtype: DType) -> TensorData:
    """Return the tensor in another float type; a copy, unless it already is of that type.

    Finite numbers out of range are clamped: -1e9 in a mask becomes -65504 in f16, because minus infinity would turn a
    fully masked row into NaN. Infinities stay.
    """
    return data if data.dtype is dtype else TensorData.from_array(_rounded(data.numpy(), dtype), dtype)


def overflows(data: TensorData, dtype: DType) -> bool:
    """Return whether a tensor of floats has finite numbers that `narrowed` would clamp; reads it."""
    wide = np.abs(data.numpy())
    return bool(((wide > _LARGEST[dtype]) & (wide < np.inf)).any())


def narrowed_later(data: TensorData, dtype: DType) -> TensorData:
    """Return the result of `narrowed`; a large tensor is rounded when it is read."""
    if data.dtype is dtype or dtype.nbytes(data.num_elements) < _SMALL_BYTES:
        return narrowed(data, dtype)
    return NarrowedTensor(data, dtype)


class NarrowedTensor(TensorData):
    """A tensor that is rounded each time it is read, so that neither form of a large model is in memory as a whole.

    `pieces` holds one piece in memory; `buffer` and `numpy` compute the whole tensor each time. The original stays
    alive, with its map of a file. A copy or pickle is a plain tensor.
    """

    __slots__ = ("_wide",)

    _wide: TensorData

    def __init__(self, wide: TensorData, dtype: DType) -> None:
        for name, value in (("dtype", dtype), ("shape", wide.shape), ("source", None), ("_wide", wide)):
            object.__setattr__(self, name, value)

    @property
    def buffer(self) -> npt.NDArray[Any]:
        """The bytes of all elements. Reads the original and rounds it."""
        whole = np.empty(self.nbytes, np.uint8)
        end = 0
        for piece in self.pieces():
            whole[end : end + len(piece)] = piece
            end += len(piece)
        return whole

    @property
    def nbytes(self) -> int:
        """The bytes the elements take in ONNX's storage."""
        return self.dtype.nbytes(self.num_elements)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order, one rounded piece of the original at a time; see `TensorData.pieces`."""
        for values in values_of(self._wide):
            yield TensorData.from_array(_rounded(values, self.dtype), self.dtype).buffer.data

    def __reduce__(self) -> tuple[type[TensorData], tuple[object, ...]]:
        return TensorData, (self.dtype, self.shape, self.buffer)


def values_of(data: TensorData) -> Iterator[npt.NDArray[Any]]:
    """Yield the elements of a tensor that is not packed, in flat pieces of at most 8 MiB; use each at once."""
    size = data.dtype.numpy.itemsize
    rest = b""
    for piece in data.pieces():
        whole = rest + piece if rest else piece  # a read may return fewer bytes than requested
        count = len(whole) // size
        rest = bytes(whole[count * size :])
        yield TensorData(data.dtype, (count,), np.frombuffer(whole[: count * size], np.uint8)).numpy()


def _rounded(wide: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    limit = _LARGEST[dtype]
    if not wide.size or -limit <= wide.min() <= wide.max() <= limit:  # false for NaN as well
        return wide.astype(dtype.numpy)
    with np.errstate(over="ignore"):
        values = wide.astype(dtype.numpy)
    overflown = np.isinf(values.astype(np.float32)) & np.isfinite(wide)
    return np.where(overflown, np.copysign(limit, wide), wide).astype(dtype.numpy) if overflown.any() else values


_SAFETENSORS_NAMES = {
    DType.F32: "F32", DType.F16: "F16", DType.BF16: "BF16", DType.F64: "F64", DType.I8: "I8", DType.I16: "I16",
    DType.I32: "I32", DType.I64: "I64", DType.U8: "U8", DType.U16: "U16", DType.U32: "U32", DType.U64: "U64",
    DType.BOOL: "BOOL", DType.C64: "C64", DType.F8E4M3: "F8_E4M3", DType.F8E5M2: "F8_E5M2", DType.F8E8M0: "F8_E8M0",
}  # fmt: skip
_SAFETENSORS_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}
_RAW_PREFIX = "rlx_ort.raw:"  # metadata of tensors whose dtype the format lacks; their bytes are stored as U8
_HEADER_LIMIT = 100_000_000  # as in the reference implementation


def write_tensors(path: Path, tensors: Mapping[str, TensorData], metadata: Mapping[str, str]) -> None:
    """Write tensors to a file; dtypes that the format lacks are stored as bytes and marked in the metadata.

    Raises:
        ConversionError: the file that a tensor is mapped from was written to.
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {}
    marks = dict(metadata)
    offset = 0
    for name, data in tensors.items():
        known = _SAFETENSORS_NAMES.get(data.dtype)
        if known is None:
            marks[_RAW_PREFIX + name] = json.dumps([data.dtype.value, list(data.shape)])
        shape = [data.nbytes] if known is None else list(data.shape)
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps({"__metadata__": marks, **header}, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in tensors.values():
            for piece in data.pieces():
                file.write(piece)


def read_tensors(path: Path) -> tuple[dict[str, TensorData], dict[str, str]]:
    """Return the tensors of a file as memory maps, and its metadata.

    Raises:
        ConversionError: the file cannot be read, or is no safetensors file.
    """
    try:
        with open_regular(path) as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 <= length <= _HEADER_LIMIT:
                raise ValueError("the length of its header is wrong")
            header = parse_json(file.read(length))
            status = os.fstat(file.fileno())
            size = status.st_size - 8 - length
            place = FileRange(str(path.resolve()), 8 + length, FileRange.stamp_of(status))
            data = np.memmap(file, np.uint8, "r", 8 + length) if size > 0 else np.empty(0, np.uint8)
        metadata = {str(name): str(text) for name, text in header.pop("__metadata__", {}).items()}
        return {
            name: _mapped_tensor(entry, data, metadata.get(_RAW_PREFIX + name), place) for name, entry in header.items()
        }, metadata
    except OSError as err:
        raise ConversionError(f"tensor file {path} cannot be read: {err}") from err
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConversionError(f"tensor file {path} is not a safetensors file: {err}") from err


def key_of_value(value: object) -> str:
    """Return a text that equal attribute values share; a tensor stands in it with the digest of its bytes."""
    if isinstance(value, TensorData):
        import hashlib  # not needed by most graphs

        raw = repr(value.numpy().tolist()).encode() if value.dtype is DType.STRING else value.numpy().tobytes()
        return f"{value.dtype.value}{list(value.shape)}:{hashlib.sha256(raw).hexdigest()[:12]}"
    if isinstance(value, tuple) and any(isinstance(item, TensorData) for item in value):
        return f"({', '.join(map(key_of_value, value))})"
    return repr(value)


def _mapped_tensor(
    entry: Mapping[str, Any], data: np.ndarray[Any, np.dtype[np.uint8]], mark: str | None, place: FileRange
) -> TensorData:
    dtype, shape = _SAFETENSORS_DTYPES[entry["dtype"]], entry["shape"]
    if mark is not None:
        name, shape = parse_json(mark)
        dtype = DType(name)
    begin, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"a tensor has shape {shape} and bytes {begin} to {end}")
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"a tensor reaches from byte {begin} to {end} of {data.size}")
    source = FileRange(place.path, place.offset + begin, place.stamp)
    return TensorData(dtype, tuple(shape), data[begin:end], source)
