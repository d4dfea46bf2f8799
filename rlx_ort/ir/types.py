"""The types a value can have: tensors for IR ops; sequences, optionals and maps for imported ONNX nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape

__all__ = ["MapType", "OptionalType", "SequenceType", "TensorType", "UnknownType", "ValueType"]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor of a dtype; `shape` is None when not even the rank is known, which only imported nodes produce."""

    dtype: DType
    shape: Shape | None = field(default=None)

    def __str__(self) -> str:
        return f"{self.dtype.value}{'(...)' if self.shape is None else self.shape}"


@dataclass(frozen=True, slots=True)
class SequenceType:
    """A list of values of one type (ONNX `seq`)."""

    element: ValueType

    def __str__(self) -> str:
        return f"seq[{self.element}]"


@dataclass(frozen=True, slots=True)
class OptionalType:
    """A value that may be absent (ONNX `optional`)."""

    element: ValueType

    def __str__(self) -> str:
        return f"optional[{self.element}]"


@dataclass(frozen=True, slots=True)
class MapType:
    """A map from scalars to values (ONNX `map`, produced by classic machine-learning nodes)."""

    key: DType
    value: ValueType

    def __str__(self) -> str:
        return f"map[{self.key.value}, {self.value}]"


@dataclass(frozen=True, slots=True)
class UnknownType:
    """A value whose type cannot be inferred, such as the result of a node of an unknown domain."""

    def __str__(self) -> str:
        return "?"


ValueType: TypeAlias = TensorType | SequenceType | OptionalType | MapType | UnknownType
