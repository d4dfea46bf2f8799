"""Element types: names, sizes, numpy types, and the promotion of mixed operations."""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np


class DType(enum.Enum):
    """An element type; the value is its canonical short name.

    The first group may be used by every op. Sub-byte and 8-bit float types are weight formats; `string` and the
    rest of the last group exist so that any ONNX model can be imported.
    """

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F64 = "f64"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    BOOL = "bool"
    C64 = "c64"
    I4 = "i4"
    U4 = "u4"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"
    C128 = "c128"
    STRING = "string"
    I2 = "i2"
    U2 = "u2"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2FNUZ = "f8e5m2fnuz"
    F8E8M0 = "f8e8m0"
    F4E2M1 = "f4e2m1"

    __hash__ = object.__hash__  # that of Enum is a Python function, and dtypes are keys everywhere

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy (or ml_dtypes) type of one unpacked element; strings are `object`."""
        return _NUMPY[self]

    @property
    def bits(self) -> int:
        """Bits of one element as ONNX stores it: 4 for `i4`, 0 for strings, which have no fixed size."""
        return _SUB_BYTE.get(self, 0 if self is DType.STRING else self.numpy.itemsize * 8)

    @property
    def is_float(self) -> bool:
        """Whether this is a real floating-point type of any width."""
        return self.value.startswith(("f", "bf"))

    @property
    def is_integer(self) -> bool:
        """Whether this is a signed or unsigned integer type; bool is not."""
        return self.value[0] in "iu"

    @property
    def is_complex(self) -> bool:
        """Whether this is a complex type."""
        return self.value[0] == "c"

    @property
    def is_packed(self) -> bool:
        """Whether several elements share a byte in ONNX's storage."""
        return self in _SUB_BYTE

    def nbytes(self, elements: int) -> int:
        """Return the bytes that `elements` values take in ONNX's storage, packed types rounded up to a byte."""
        return (elements * self.bits + 7) // 8

    @classmethod
    def parse(cls, name: str | DType | np.dtype[Any] | type) -> DType:
        """Return the type for a short name, long name, numpy type or DType.

        Raises:
            ValueError: no dtype has that name.
        """
        if isinstance(name, DType):
            return name
        if isinstance(name, str) and name.strip().lower() in _NAMES:
            return _NAMES[name.strip().lower()]
        try:
            return cls.from_numpy(np.dtype(name))
        except TypeError:
            raise ValueError(f"unknown dtype {name!r}; known: {', '.join(d.value for d in cls)}") from None

    @classmethod
    def from_numpy(cls, dtype: np.dtype[Any] | type) -> DType:
        """Return the type of a numpy array's elements, whatever its byte order; `object` and `str` are strings.

        Raises:
            ValueError: no element type stores such elements.
        """
        dtype = np.dtype(dtype)
        if dtype.kind in "OUT":
            return cls.STRING
        known = _FROM_NUMPY.get(dtype.newbyteorder("=") if dtype.kind != "V" else dtype)
        if known is None:
            raise ValueError(f"no dtype stores numpy {dtype}")
        return known

    def __repr__(self) -> str:
        return f"DType.{self.name}"


_NUMPY: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(kind)
    for dtype, kind in {
        DType.F32: np.float32, DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16, DType.F64: np.float64,
        DType.I8: np.int8, DType.I16: np.int16, DType.I32: np.int32, DType.I64: np.int64,
        DType.U8: np.uint8, DType.U16: np.uint16, DType.U32: np.uint32, DType.U64: np.uint64,
        DType.BOOL: np.bool_, DType.C64: np.complex64, DType.C128: np.complex128, DType.STRING: object,
        DType.I4: ml_dtypes.int4, DType.U4: ml_dtypes.uint4, DType.I2: ml_dtypes.int2, DType.U2: ml_dtypes.uint2,
        DType.F8E4M3: ml_dtypes.float8_e4m3fn, DType.F8E5M2: ml_dtypes.float8_e5m2,
        DType.F8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz, DType.F8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
        DType.F8E8M0: ml_dtypes.float8_e8m0fnu, DType.F4E2M1: ml_dtypes.float4_e2m1fn,
    }.items()
}  # fmt: skip
_FROM_NUMPY = {dtype: name for name, dtype in _NUMPY.items()}
_SUB_BYTE = {DType.I4: 4, DType.U4: 4, DType.F4E2M1: 4, DType.I2: 2, DType.U2: 2}
_NAMES = {dtype.value: dtype for dtype in DType} | {kind.name: dtype for dtype, kind in _NUMPY.items()} | {
    "float": DType.F32, "half": DType.F16, "double": DType.F64, "boolean": DType.BOOL, "str": DType.STRING,
    "fp16": DType.F16, "fp32": DType.F32, "fp64": DType.F64,
}  # fmt: skip

# contract.md 3.1: bool lowest, then by width class; a tie keeps the left type.
_RANK = {
    DType.BOOL: 0, DType.U8: 1, DType.I8: 1, DType.I16: 2, DType.U16: 2, DType.BF16: 2, DType.F16: 3,
    DType.U32: 4, DType.I32: 4, DType.I64: 5, DType.U64: 5, DType.F32: 6, DType.F64: 7, DType.C64: 8,
}  # fmt: skip


def promote(lhs: DType, rhs: DType) -> DType:
    """Return the type a binary op on two types computes in.

    Equal types stay. f16 with bf16 is f32. An integer with a float is f64 if either is f64, i64 or u64,
    else f32. Otherwise the wider class wins and a tie keeps the left type.

    Raises:
        ValueError: one of the types takes no part in arithmetic.
    """
    if lhs is rhs:
        return lhs
    for side in (lhs, rhs):
        if side not in _RANK:
            raise ValueError(f"{side.value} takes no part in arithmetic; cast it first")
    if {lhs, rhs} == {DType.F16, DType.BF16}:
        return DType.F32
    if lhs.is_integer != rhs.is_integer and (lhs.is_float or rhs.is_float) and DType.BOOL not in (lhs, rhs):
        wide = {DType.F64, DType.I64, DType.U64}
        return DType.F64 if lhs in wide or rhs in wide else DType.F32
    return lhs if _RANK[lhs] >= _RANK[rhs] else rhs
