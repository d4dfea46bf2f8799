"""The safetensors format: written as a stream and read as memory maps, so weights never pass through a copy.

https://github.com/huggingface/safetensors#format: eight bytes with the length of a JSON header, the header, the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.storage import replacing

__all__ = ["read_tensors", "write_tensors"]

_NAMES = {
    DType.F32: "F32", DType.F16: "F16", DType.BF16: "BF16", DType.F64: "F64", DType.I8: "I8", DType.I16: "I16",
    DType.I32: "I32", DType.I64: "I64", DType.U8: "U8", DType.U16: "U16", DType.U32: "U32", DType.U64: "U64",
    DType.BOOL: "BOOL", DType.C64: "C64", DType.F8E4M3: "F8_E4M3", DType.F8E5M2: "F8_E5M2", DType.F8E8M0: "F8_E8M0",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PREFIX = "rlx_ort.raw:"  # metadata of tensors whose dtype the format lacks; their bytes are stored as U8
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
        known = _NAMES.get(data.dtype)
        if known is None:
            marks[_PREFIX + name] = json.dumps([data.dtype.value, list(data.shape)])
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
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 <= length <= _HEADER_LIMIT:
                raise ValueError("the length of its header is wrong")
            header = json.loads(file.read(length).decode("utf-8"))
        status = path.stat()
        size = status.st_size - 8 - length
        place = FileRange(str(path.resolve()), 8 + length, FileRange.stamp_of(status))
        data = np.memmap(path, np.uint8, "r", 8 + length) if size > 0 else np.empty(0, np.uint8)
        metadata = {str(name): str(text) for name, text in header.pop("__metadata__", {}).items()}
        return {
            name: _tensor(entry, data, metadata.get(_PREFIX + name), place) for name, entry in header.items()
        }, metadata
    except OSError as err:
        raise ConversionError(f"tensor file {path} cannot be read: {err}") from err
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConversionError(f"tensor file {path} is no safetensors file: {err}") from err


def _tensor(
    entry: Mapping[str, Any], data: np.ndarray[Any, np.dtype[np.uint8]], mark: str | None, place: FileRange
) -> TensorData:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if mark is not None:
        name, shape = json.loads(mark)
        dtype = DType(name)
    begin, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"a tensor has shape {shape} and bytes {begin} to {end}")
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"a tensor reaches from byte {begin} to {end} of {data.size}")
    source = FileRange(place.path, place.offset + begin, place.stamp)
    return TensorData(dtype, tuple(shape), data[begin:end], source)
