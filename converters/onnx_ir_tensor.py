"""`WeightTensor`: a tensor of onnx-ir over `TensorData`. A module of its own, since it cannot exist without onnx-ir."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir

from rlx_ort.converters.onnx_types import elem_type
from rlx_ort.ir.tensor import TensorData

__all__ = ["WeightTensor"]


class _Array:
    """Makes an array of the data when one is asked for: an unaligned or packed tensor costs a copy."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values = self.data.numpy()
        wanted = values if dtype is None else values.astype(dtype, copy=False)
        return wanted.copy() if copy else wanted


class WeightTensor(onnx_ir.Tensor[_Array]):
    """A tensor whose bytes are those of a weight, not read before they are needed; `data` is the weight."""

    def __init__(self, data: TensorData, name: str | None, doc_string: str | None = None) -> None:
        kind = onnx_ir.DataType(elem_type(data.dtype))
        super().__init__(_Array(data), kind, shape=onnx_ir.Shape(data.shape), name=name, doc_string=doc_string)
        self.data = data

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements as a read-only array; shares memory where alignment and packing allow it."""
        return self.data.numpy()

    def tobytes(self) -> bytes:
        """Return the bytes as ONNX stores them. Copies."""
        copied: bytes = self.data.buffer.tobytes()
        return copied

    def tofile(self, file: Any) -> None:
        """Write the bytes as ONNX stores them, without a copy."""
        file.write(np.ascontiguousarray(self.data.buffer).data)
