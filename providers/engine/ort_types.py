"""ONNX Runtime's type strings, such as `seq(tensor(float))`, as the types of the IR."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType, ValueType

__all__ = ["ONNX_ELEMENT_TYPE", "element_dtypes", "refined", "value_type"]

# https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3 (TensorProto.DataType)
ONNX_ELEMENT_TYPE = {
    DType.F32: 1, DType.U8: 2, DType.I8: 3, DType.U16: 4, DType.I16: 5, DType.I32: 6, DType.I64: 7, DType.STRING: 8,
    DType.BOOL: 9, DType.F16: 10, DType.F64: 11, DType.U32: 12, DType.U64: 13, DType.C64: 14, DType.C128: 15,
    DType.BF16: 16, DType.F8E4M3: 17, DType.F8E4M3FNUZ: 18, DType.F8E5M2: 19, DType.F8E5M2FNUZ: 20, DType.U4: 21,
    DType.I4: 22, DType.F4E2M1: 23, DType.F8E8M0: 24, DType.U2: 25, DType.I2: 26,
}  # fmt: skip

_NAMES = {
    "float": DType.F32, "double": DType.F64, "float16": DType.F16, "bfloat16": DType.BF16, "bool": DType.BOOL,
    "string": DType.STRING, "complex64": DType.C64, "complex128": DType.C128,
    "float8e4m3fn": DType.F8E4M3, "float8e4m3fnuz": DType.F8E4M3FNUZ, "float8e5m2": DType.F8E5M2,
    "float8e5m2fnuz": DType.F8E5M2FNUZ, "float8e8m0": DType.F8E8M0, "float4e2m1": DType.F4E2M1,
    **{f"{sign}int{bits}": DType(f"{sign or 'i'}{bits}") for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
}  # fmt: skip


def value_type(text: str, dims: Sequence[object] | None = None) -> ValueType:
    """Return the type a type string stands for; `dims` is the shape of the innermost tensor, if it is known.

    Types that have no counterpart here, such as sparse tensors, are `UnknownType`.
    """
    head, _, rest = text.strip().partition("(")
    inner = rest[:-1] if rest.endswith(")") else ""
    match head:
        case "tensor" if inner in _NAMES:
            # Where shape inference divides by a size of 0, ONNX Runtime shows a negative one.
            known = [dim if isinstance(dim, str) or (isinstance(dim, int) and dim >= 0) else None for dim in dims or ()]
            shape = None if dims is None else Shape(known)
            return TensorType(_NAMES[inner], shape)
        case "seq":
            return SequenceType(value_type(inner))
        case "optional":
            return OptionalType(value_type(inner, dims))
        case "map":
            key, _, value = inner.partition(",")
            if key.strip() in _NAMES:
                return MapType(_NAMES[key.strip()], value_type(value))
    return UnknownType()


def refined(found: ValueType, declared: ValueType | None) -> ValueType:
    """Return what a session says of a value, with the declared shape where the session has none to tell.

    ONNX Runtime shows a tensor of unknown rank as a scalar; only the model itself can tell the two apart.
    """
    if isinstance(found, TensorType) and isinstance(declared, TensorType) and not found.shape:
        return TensorType(found.dtype, declared.shape)
    if type(found) is type(declared) and not isinstance(found, TensorType):
        return declared if declared is not None else found
    return found


def element_dtypes(texts: Iterable[Any]) -> frozenset[DType]:
    """Return the element types that type strings mention, whatever stands around them."""
    return frozenset(dtype for text in texts for dtype in _elements(value_type(str(text))))


def _elements(kind: ValueType) -> tuple[DType, ...]:
    match kind:
        case TensorType():
            return (kind.dtype,)
        case SequenceType() | OptionalType():
            return _elements(kind.element)
        case MapType():
            return (kind.key, *_elements(kind.value))
    return ()
