"""Feeds and results of element types that numpy, and so ONNX Runtime's plain `run`, does not know.

bf16, 8-bit floats and 4-bit types go in and come out as OrtValues; everything else stays numpy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError, InputError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, ValueType
from rlx_ort.providers.engine.ort_types import ONNX_ELEMENT_TYPE

__all__ = ["dtype_of", "from_ort_value", "has_foreign_dtype", "is_tensor_like", "to_ort_value"]

_FOREIGN = frozenset(
    {
        DType.BF16, DType.F8E4M3, DType.F8E4M3FNUZ, DType.F8E5M2, DType.F8E5M2FNUZ, DType.F8E8M0, DType.F4E2M1,
        DType.I4, DType.U4, DType.I2, DType.U2,
    }
)  # fmt: skip
_BY_ELEMENT_TYPE = {number: dtype for dtype, number in ONNX_ELEMENT_TYPE.items()}


def dtype_of(value: Any) -> DType:
    """Return the element type of an OrtValue that is a tensor."""
    return _BY_ELEMENT_TYPE[value.element_type()]


def has_foreign_dtype(kind: ValueType) -> bool:
    """Return whether a value of the type has elements that numpy alone cannot hold."""
    match kind:
        case TensorType(dtype=dtype):
            return dtype in _FOREIGN
        case SequenceType(element=element) | OptionalType(element=element):
            return has_foreign_dtype(element)
        case MapType(value=value):
            return has_foreign_dtype(value)
    return False


def is_tensor_like(kind: ValueType) -> bool:
    """Return whether an OrtValue of the type can be made from, or read into, one array that is no string."""
    inner = kind.element if isinstance(kind, OptionalType) else kind
    return isinstance(inner, TensorType) and inner.dtype is not DType.STRING


def to_ort_value(engine: Any, name: str, array: npt.NDArray[Any], kind: ValueType) -> tuple[Any, Any]:
    """Return an OrtValue over an array, and the memory it borrows, which must live as long as the value.

    Raises:
        InputError: the value is not an array of the input's element type.
    """
    inner = kind.element if isinstance(kind, OptionalType) else kind
    if not isinstance(inner, TensorType) or not isinstance(array, np.ndarray):
        raise InputError(f"input {name!r} takes {kind}, got {type(array).__name__}")
    if inner.dtype not in _FOREIGN:
        array = np.ascontiguousarray(array).reshape(array.shape)
        return engine.OrtValue.ortvalue_from_numpy(array), array
    if array.dtype != inner.dtype.numpy:
        raise InputError(f"input {name!r} takes {inner.dtype.value}, got {array.dtype}")
    data = TensorData.from_array(array, inner.dtype)
    memory = np.zeros(array.shape, inner.dtype.numpy)
    if inner.dtype.is_packed:
        # ONNX Runtime reads packed elements from the start of a buffer of the unpacked shape.
        raw = memory.view(np.uint8).reshape(-1)
        raw[: data.nbytes] = data.buffer
        memory = raw.reshape(array.shape)
    else:
        memory = array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)
    make = engine.OrtValue.ortvalue_from_numpy_with_onnx_type
    return make(memory, ONNX_ELEMENT_TYPE[inner.dtype]), memory


def from_ort_value(value: Any, name: str) -> Any:
    """Return a result as an array of its own, or None for an absent optional.

    Raises:
        EngineError: the result is a sequence or map of elements that numpy does not know.
    """
    if not value.has_value():
        return None
    if not value.is_tensor():
        raise EngineError(f"output {name!r} is a {value.data_type()}, which cannot be read; cast its elements to f32")
    dtype = dtype_of(value)
    if dtype not in _FOREIGN:
        return value.numpy()
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    nbytes = dtype.nbytes(count)
    raw = np.empty(nbytes, np.uint8)
    if nbytes:
        ctypes.memmove(raw.ctypes.data, value.data_ptr(), nbytes)
    return TensorData(dtype, shape, raw).numpy().copy()
