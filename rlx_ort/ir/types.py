"""Shapes, and the types a value can have: tensors for IR ops; sequences, optionals and maps for imported ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlx_ort.ir.dtype import DType

Dim: TypeAlias = "int | str | None"
"""A size, a named symbol such as `"batch"`, or None for an unknown size."""


class Shape(tuple[Dim, ...]):
    """A tensor's dimensions, outermost first: `Shape(["batch", 128, 768])`. An empty shape is a scalar.

    Raises:
        ValueError: a size is negative or does not fit 64 bits, or a symbol is empty.
    """

    __slots__ = ()

    def __new__(cls, dims: Iterable[Dim] = ()) -> Shape:
        """Check and normalise the dimensions; numpy integers are accepted."""
        return super().__new__(cls, (_checked(dim) for dim in dims))

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self)

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a size."""
        return all(isinstance(dim, int) for dim in self)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The named symbols, in order of first appearance."""
        return tuple(dict.fromkeys(dim for dim in self if isinstance(dim, str)))

    @property
    def num_elements(self) -> int | None:
        """The number of elements, or None when a dimension is not a size."""
        sizes = [dim for dim in self if isinstance(dim, int)]
        return math.prod(sizes) if len(sizes) == len(self) else None

    def static(self) -> tuple[int, ...]:
        """Return the sizes.

        Raises:
            ValueError: a dimension is not a size.
        """
        if not self.is_static:
            raise ValueError(f"shape {self} has dimensions without a size; bind them first")
        return tuple(dim for dim in self if isinstance(dim, int))

    def bind(self, sizes: Mapping[str, int]) -> Shape:
        """Return the shape with each symbol that is a key of `sizes` replaced by its size."""
        return Shape(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in self)

    def __str__(self) -> str:
        return "(" + ", ".join("?" if dim is None else str(dim) for dim in self) + ("," if len(self) == 1 else "") + ")"

    def __repr__(self) -> str:
        return f"Shape{self}"


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """Return the shape that numpy's broadcasting gives; a symbol fits any size.

    Raises:
        ValueError: two sizes differ and neither is 1.
    """
    rank = max((shape.rank for shape in shapes), default=0)
    padded = [(1,) * (rank - shape.rank) + tuple(shape) for shape in shapes]
    try:
        return Shape(_broadcast_dims(dims) for dims in zip(*padded, strict=True))
    except ValueError:
        raise ValueError(f"shapes {' and '.join(map(str, shapes))} do not broadcast") from None


def fits(inferred: Shape, declared: Shape) -> bool:
    """Return whether a declared shape can be the inferred one: equal sizes, symbols and unknown sizes fit anything."""
    return inferred.rank == declared.rank and all(
        not (isinstance(old, int) and isinstance(new, int)) or old == new
        for old, new in zip(inferred, declared, strict=True)
    )


def refined(declared: Shape, inferred: Shape) -> Shape:
    """Return the inferred shape with the declared sizes, and with declared names where inference has none."""
    pairs = zip(declared, inferred, strict=True)
    return Shape(stated if isinstance(stated, int) or given is None else given for stated, given in pairs)


def _broadcast_dims(dims: tuple[Dim, ...]) -> Dim:
    sizes = {dim for dim in dims if isinstance(dim, int) and dim != 1}
    if len(sizes) > 1:
        raise ValueError
    if sizes:
        return sizes.pop()
    open_dims = list(dict.fromkeys(dim for dim in dims if not isinstance(dim, int)))
    if not open_dims:
        return 1
    # One symbol against ones keeps its name; different symbols may each be 1, so the result has no name.
    return open_dims[0] if len(open_dims) == 1 else None


def _checked(dim: Dim) -> Dim:
    if dim is None or (isinstance(dim, str) and dim):
        return dim
    if isinstance(dim, (str, bool)):
        raise ValueError(f"a dimension is a size, a symbol or None, not {dim!r}")
    size = int(dim)
    if size < 0:
        raise ValueError(f"a dimension cannot be negative: {size}")
    if size >= 1 << 63:
        raise ValueError("a dimension of 2**63 or more cannot be stored")
    return size


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor of a dtype; `shape` is None when not even the rank is known, which only imported nodes produce."""

    dtype: DType
    shape: Shape | None = None

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
