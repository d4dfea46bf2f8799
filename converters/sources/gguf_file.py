"""GGUF weight files, read with the `gguf` package once their header is checked.

The reader of the package trusts the header: a count that is too large keeps it busy for years, and an offset beyond the
end gives an empty tensor. Here every count and range is compared with the size of the file.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#file-structure
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.from_onnx.tensor_files import mapped_file
from rlx_ort.converters.onnx_ir_bridge import foreign_errors, optional_module
from rlx_ort.converters.sources.weights import GgufAs, WeightEntry, WeightFile
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS
from rlx_ort.ir.tensor import FileRange, TensorData

_PLAIN = {
    "F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16, "F64": DType.F64,
    "I8": DType.I8, "I16": DType.I16, "I32": DType.I32, "I64": DType.I64,
}  # fmt: skip
_CHUNK_WEIGHTS = 1 << 22  # dequantised at a time, so that the float32 intermediates of gguf stay at some 16 MiB each
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # gguf_metadata_value_type
_MAX_DIMS = 4  # GGML_MAX_DIMS
_ALIGNMENT = 32  # the default of `general.alignment`
_MAX_NAME_BYTES = 1 << 16


def read_gguf(path: Path, quantised_as: GgufAs = "f32") -> WeightFile:
    """Return the tensors of a GGUF file, shapes in numpy's order: the matrix of a layer is `(outputs, inputs)`.

    Plain tensors are mapped. Quantised ones are dequantised when asked for, or mapped as packed blocks, u8
    `(..., row bytes)`, as the product of packed weights in the IR takes them. `quantised_as` is `f32` or `f16` for
    dequantised weights, `packed` for the blocks.

    Raises:
        ConversionError: `gguf` is not installed, the file is damaged or of the other byte order, or `packed` is asked
            for and the IR lacks the format.
    """
    if quantised_as not in ("f32", "f16", "packed"):
        raise ConversionError(f"quantised weights are read as f32, f16 or packed, not {quantised_as!r}")
    gguf = optional_module("gguf", "gguf", "reading GGUF files")
    place = _checked(path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
    with foreign_errors(f"{path} is not a GGUF file, or a damaged one"):
        reader = gguf.GGUFReader(path)
        entries = {tensor.name: _entry(gguf, reader, tensor, place, quantised_as) for tensor in reader.tensors}
    return WeightFile(str(path), entries)


def _entry(gguf: Any, reader: Any, tensor: Any, place: FileRange, quantised_as: GgufAs) -> WeightEntry:
    kind: str = tensor.tensor_type.name
    shape = tuple(int(size) for size in reversed(tensor.shape))
    raw = reader.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
    source = FileRange(place.path, int(tensor.data_offset), place.stamp)
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return WeightEntry(dtype, shape, lambda: TensorData(dtype, shape, raw, source), kind)
    known = GGUF_FORMATS.get(kind.lower())
    blocks = None if known is None else TensorData(DType.U8, (*shape[:-1], known.row_bytes(shape[-1])), raw, source)
    if quantised_as == "packed":
        if blocks is None:
            packed = ", ".join(name.upper() for name in GGUF_FORMATS)
            what = f"{place.path}: tensor {tensor.name!r} is {kind}"
            raise ConversionError(f"{what}, which cannot stay packed; {packed} can")
        return WeightEntry(DType.U8, blocks.shape, lambda: blocks, kind, blocks)
    dtype = DType.F32 if quantised_as == "f32" else DType.F16
    load = partial(_dequantised, gguf, tensor.name, tensor.tensor_type, shape, raw, dtype)
    return WeightEntry(dtype, shape, load, kind, blocks)


def _dequantised(
    gguf: Any, name: str, kind: Any, shape: tuple[int, ...], raw: npt.NDArray[np.uint8], dtype: DType
) -> TensorData:
    rows = raw.reshape(-1, raw.size // max(1, int(np.prod(shape[:-1], dtype=np.int64))))
    out = np.empty((len(rows), shape[-1]), dtype.numpy)
    step = max(1, _CHUNK_WEIGHTS // max(1, shape[-1]))
    try:
        for start in range(0, len(rows), step):
            with np.errstate(over="ignore", invalid="ignore"):  # a scale may be infinite or NaN, and f16 too small
                out[start : start + step] = gguf.quants.dequantize(rows[start : start + step], kind)
    except (NotImplementedError, ValueError) as err:
        raise ConversionError(f"tensor {name!r} of type {kind.name} cannot be unpacked: {err}") from err
    return TensorData.from_array(out.reshape(shape), dtype)


def _checked(path: Path, blocks: Mapping[int, tuple[int, int]]) -> FileRange:
    """Return where a file is; raise unless its header is whole and every tensor it names lies inside the file.

    `blocks` has the weights and bytes of a block by the number of a tensor type.
    """
    try:
        data, place = mapped_file(path)
        _Walk(data.data, blocks).check()
        return place
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    except (ValueError, struct.error) as err:
        raise ConversionError(f"{path} is not a GGUF file, or a damaged one: {err}") from err


class _Walk:
    """Parses a header from front to back and checks each field."""

    def __init__(self, data: memoryview, blocks: Mapping[int, tuple[int, int]]) -> None:
        self._data = data
        self._blocks = blocks
        self._at = 0
        self._alignment = _ALIGNMENT

    def check(self) -> None:
        """Raise `ValueError` at the first invalid field."""
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
        key = self._name()
        kind, count = self._number("<I"), 1
        if key == "general.alignment":
            if kind != 4:
                raise ValueError("general.alignment is not a 32-bit number")
            self._alignment = self._number("<I")
            if self._alignment not in (1 << bit for bit in range(3, 24)):
                raise ValueError(f"general.alignment is {self._alignment}, no power of two from 8 to 8 MiB")
            return
        if kind == _ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            for _ in range(self._count(count, 8)):
                self._text(len(self._data))
        elif kind in _SCALAR_BYTES:
            self._take(count * _SCALAR_BYTES[kind])
        else:
            raise ValueError(f"an entry has type {kind}, which is not known or nested")

    def _tensor(self) -> tuple[str, int, int]:
        name = self._name()
        rank = self._number("<I")
        if not rank <= _MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {rank} dimensions, at most {_MAX_DIMS} are known")
        dims = [self._number("<Q") for _ in range(rank)]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in self._blocks:
            raise ValueError(f"tensor {name!r} has type {kind}, which is not known")
        weights, nbytes = self._blocks[kind]
        if not dims or dims[0] % weights or not all(dims):
            raise ValueError(
                f"tensor {name!r} of shape {dims[::-1]} has rows whose length is not a multiple of {weights}"
            )
        return name, offset, math.prod(dims) // weights * nbytes

    def _name(self) -> str:
        """Return the name of an entry or a tensor; texts, such as the tokens of a vocabulary, need not be UTF-8."""
        name = bytes(self._text(_MAX_NAME_BYTES))
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as err:
            raise ValueError(f"the name before byte {self._at}, {name[:80]!r}, is not UTF-8") from err

    def _text(self, limit: int) -> memoryview:
        length = self._number("<Q")
        if length > limit:
            raise ValueError(f"the text before byte {self._at} has {length} bytes, at most {limit} are known")
        return self._take(length)

    def _count(self, count: int, least_bytes: int) -> int:
        """Return a count of entries of at least so many bytes each, checked against the rest of the file."""
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
