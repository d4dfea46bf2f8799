"""GGUF weight files, read with the `gguf` package; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.converters.extras import optional_module
from rlx_ort.converters.sources.gguf_check import check_gguf
from rlx_ort.converters.sources.weight_file import WeightEntry, WeightFile
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS
from rlx_ort.ir.tensor import FileRange, TensorData

if TYPE_CHECKING:
    import numpy.typing as npt

    from rlx_ort.converters.sources.weights import GgufAs

__all__ = ["read_gguf"]

_PLAIN = {
    "F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16, "F64": DType.F64,
    "I8": DType.I8, "I16": DType.I16, "I32": DType.I32, "I64": DType.I64,
}  # fmt: skip
_CHUNK_WEIGHTS = 1 << 22  # dequantised at a time, so that the float32 intermediates of gguf stay at some 16 MiB each


def read_gguf(path: Path, quantised_as: GgufAs = "f32") -> WeightFile:
    """Return the tensors of a GGUF file, shapes in numpy's order: the matrix of a layer is `(outputs, inputs)`.

    Plain tensors are mapped. Quantised ones are dequantised when asked for, or mapped as packed blocks,
    u8 `(..., row bytes)`, as the product of packed weights in the IR takes them.

    Args:
        path: the file.
        quantised_as: `f32` or `f16` for dequantised weights, `packed` for the blocks.

    Raises:
        ConversionError: `gguf` is not installed, the file is damaged or of the other byte order, or `packed` is asked
            for and the IR lacks the format.
    """
    if quantised_as not in ("f32", "f16", "packed"):
        raise ConversionError(f"quantised weights are read as f32, f16 or packed, not {quantised_as!r}")
    gguf = optional_module("gguf", "gguf", "reading GGUF files")
    check_gguf(path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
    try:
        status = path.stat()
        reader = gguf.GGUFReader(path)
        place = FileRange(str(path.resolve()), 0, FileRange.stamp_of(status))
        entries = {tensor.name: _entry(gguf, reader, tensor, place, quantised_as) for tensor in reader.tensors}
    except ConversionError as err:
        raise ConversionError(f"{path}: {err}") from err
    except Exception as err:  # the reader checks little, so a damaged file may raise anything
        raise ConversionError(f"{path} is no GGUF file, or a damaged one: {type(err).__name__}: {err}") from err
    return WeightFile(str(path), entries)


def _entry(gguf: Any, reader: Any, tensor: Any, place: FileRange, quantised_as: GgufAs) -> WeightEntry:
    kind: str = tensor.tensor_type.name
    shape = tuple(int(size) for size in reversed(tensor.shape))
    raw = reader.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
    source = FileRange(place.path, int(tensor.data_offset), place.stamp)
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return WeightEntry(dtype, shape, lambda: TensorData(dtype, shape, raw, source), kind)
    blocks = _blocks(kind, shape, raw, source)
    if quantised_as == "packed":
        if blocks is None:
            known = ", ".join(name.upper() for name in GGUF_FORMATS)
            raise ConversionError(f"tensor {tensor.name!r} is {kind}, which cannot stay packed; {known} can")
        return WeightEntry(DType.U8, blocks.shape, lambda: blocks, kind, blocks)
    dtype = DType.F32 if quantised_as == "f32" else DType.F16
    load = _Dequantised(gguf, tensor.name, tensor.tensor_type, shape, raw, dtype)
    return WeightEntry(dtype, shape, load, kind, blocks)


def _blocks(kind: str, shape: tuple[int, ...], raw: npt.NDArray[np.uint8], source: FileRange) -> TensorData | None:
    """Return a quantised tensor as it is in the file, None for a format that the IR lacks."""
    known = GGUF_FORMATS.get(kind.lower())
    if known is None:
        return None
    return TensorData(DType.U8, (*shape[:-1], known.row_bytes(shape[-1])), raw, source)


class _Dequantised:
    """Makes the floats of a quantised tensor."""

    def __init__(
        self,
        gguf: Any,
        name: str,
        kind: Any,
        shape: tuple[int, ...],
        raw: npt.NDArray[np.uint8],
        dtype: DType,
    ) -> None:
        self._dequantize: Callable[[Any, Any], npt.NDArray[np.float32]] = gguf.quants.dequantize
        self._name = name
        self._kind = kind
        self._shape = shape
        self._raw = raw
        self._dtype = dtype

    def __call__(self) -> TensorData:
        rows = self._raw.reshape(-1, self._raw.size // max(1, int(np.prod(self._shape[:-1], dtype=np.int64))))
        out = np.empty((len(rows), self._shape[-1]), self._dtype.numpy)
        step = max(1, _CHUNK_WEIGHTS // max(1, self._shape[-1]))
        try:
            for start in range(0, len(rows), step):
                with np.errstate(over="ignore", invalid="ignore"):  # a scale may be infinite or NaN, and f16 too small
                    out[start : start + step] = self._dequantize(rows[start : start + step], self._kind)
        except (NotImplementedError, ValueError) as err:
            raise ConversionError(f"tensor {self._name!r} of type {self._kind.name} cannot be unpacked: {err}") from err
        return TensorData.from_array(out.reshape(self._shape), self._dtype)
