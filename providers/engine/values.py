"""Types and values of ONNX Runtime: its type strings as types of the IR, and elements that numpy does not know.

bf16, 8-bit floats and 4-bit types go in and come out as OrtValues; everything else stays numpy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import dtype_of, elem_type, type_proto_text
from rlx_ort.errors import EngineError, InputError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType, ValueType

__all__ = [
    "element_dtypes",
    "elements",
    "from_ort_value",
    "has_foreign_dtype",
    "is_tensor_like",
    "refined",
    "to_ort_value",
    "value_type",
]

_FOREIGN = frozenset(
    {
        DType.BF16, DType.F8E4M3, DType.F8E4M3FNUZ, DType.F8E5M2, DType.F8E5M2FNUZ, DType.F8E8M0, DType.F4E2M1,
        DType.I4, DType.U4, DType.I2, DType.U2,
    }
)  # fmt: skip
_TENSORS = {type_proto_text(TensorType(dtype)): dtype for dtype in DType}


def value_type(text: str, dims: Sequence[object] | None = None) -> ValueType:
    """Return the type of a type string; `dims` is the shape of the innermost tensor, if known.

    Types that have no counterpart here, such as sparse tensors, are `UnknownType`.
    """
    text = text.strip()
    head, _, rest = text.partition("(")
    inner = rest[:-1] if rest.endswith(")") else ""
    match head:
        case "tensor" if text in _TENSORS:
            # Where shape inference divides by a size of 0, ONNX Runtime shows a negative one.
            known = [dim if isinstance(dim, str) or (isinstance(dim, int) and dim >= 0) else None for dim in dims or ()]
            return TensorType(_TENSORS[text], None if dims is None else Shape(known))
        case "seq":
            return SequenceType(value_type(inner))
        case "optional":
            return OptionalType(value_type(inner, dims))
        case "map":
            key, _, value = inner.partition(",")
            if (key := f"tensor({key.strip()})") in _TENSORS:
                return MapType(_TENSORS[key], value_type(value))
    return UnknownType()


def refined(found: ValueType, declared: ValueType | None) -> ValueType:
    """Return a session's type of a value, with the declared shape where the session has none.

    ONNX Runtime shows a tensor of unknown rank as a scalar; only the model itself distinguishes the two.
    """
    if isinstance(found, TensorType) and isinstance(declared, TensorType) and not found.shape:
        return TensorType(found.dtype, declared.shape)
    if declared is not None and type(found) is type(declared) and not isinstance(found, TensorType):
        return declared
    return found


def element_dtypes(texts: Iterable[Any]) -> frozenset[DType]:
    """Return the element types that type strings mention, at any depth."""
    return frozenset[DType]().union(*(elements(value_type(str(text))) for text in texts))


def elements(kind: ValueType | None) -> frozenset[DType]:
    """Return the element types of a value, at any depth; none for an unknown or absent type."""
    match kind:
        case TensorType(dtype=dtype):
            return frozenset((dtype,))
        case SequenceType(element=element) | OptionalType(element=element):
            return elements(element)
        case MapType(key=key, value=value):
            return frozenset((key,)) | elements(value)
    return frozenset()


def has_foreign_dtype(kind: ValueType) -> bool:
    """Return whether a value of the type has elements that numpy alone cannot hold."""
    return kind.dtype in _FOREIGN if isinstance(kind, TensorType) else not _FOREIGN.isdisjoint(elements(kind))


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
    return make(memory, elem_type(inner.dtype)), memory


def from_ort_value(value: Any, name: str) -> Any:
    """Return a result as an array with its own memory, or None for an absent optional.

    Raises:
        EngineError: the result is a sequence or map of elements that numpy does not know.
    """
    if not value.has_value():
        return None
    if not value.is_tensor():
        raise EngineError(f"output {name!r} is a {value.data_type()}, which cannot be read; cast its elements to f32")
    dtype = dtype_of(value.element_type())
    if dtype not in _FOREIGN:
        return value.numpy()
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    nbytes = dtype.nbytes(count)
    raw = np.empty(nbytes, np.uint8)
    if nbytes:
        ctypes.memmove(raw.ctypes.data, value.data_ptr(), nbytes)
    return TensorData(dtype, shape, raw).numpy().copy()
