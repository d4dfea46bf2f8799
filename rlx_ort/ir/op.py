"""What an op is: a frozen dataclass that knows its result types. Families live in `rlx_ort.ir.ops`.

To add an op: write its dataclass and its builder in a family file, and one lowering in `rlx_ort.converters.to_onnx`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["Op", "OpTypes", "op_class", "op_kinds"]

OpTypes: TypeAlias = Sequence["ValueType | None"]
"""Types of an op's inputs; None stands for an optional input that is absent."""

_classes: dict[str, type[Op]] = {}


@dataclass(frozen=True, slots=True)
class Op:
    """Base of every op. A subclass is a frozen dataclass whose fields are the op's attributes.

    `kind` is the op's name in reports, JSON and claim sets; it defaults to the class name. A subclass registers
    itself by being defined.
    """

    kind: ClassVar[str] = ""
    arity: ClassVar[tuple[int, int | None]] = (0, None)
    """Smallest and largest number of inputs; None for no limit."""

    def __init_subclass__(cls) -> None:
        """Make the op known by its kind; a second class for a kind replaces the first, as dataclass slots need."""
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__
        _classes[cls.kind] = cls

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the types of the results, one per output.

        Raises:
            GraphVerifyError: the inputs do not fit the op; the message says which and why.
        """
        raise NotImplementedError(f"{type(self).__name__} does not infer its result")

    @property
    def is_leaf(self) -> bool:
        """Whether the op only names data: inputs, parameters, constants and captures cost nothing."""
        return False

    def bodies(self) -> tuple[Graph, ...]:
        """Return the subgraphs the op carries, in the order of its fields."""
        return ()

    def describe(self) -> str:
        """Return the op with its attributes, as messages and reports print it."""
        return repr(self)


def op_class(kind: str) -> type[Op]:
    """Return the op class of a kind.

    Raises:
        KeyError: no op has that kind.
    """
    return _classes[kind]


def op_kinds() -> tuple[str, ...]:
    """Return every kind that has an op class, sorted."""
    return tuple(sorted(_classes))


def tensor_input(op: Op, inputs: OpTypes, index: int, name: str) -> TensorType:
    """Return input `index` as a tensor type.

    Raises:
        GraphVerifyError: it is absent or no tensor.
    """
    value = inputs[index] if index < len(inputs) else None
    if not isinstance(value, TensorType):
        raise GraphVerifyError(f"{op.kind} needs a tensor as input {index} ({name}), got {value or 'nothing'}")
    return value


def known_shape(op: Op, value: TensorType, name: str) -> Shape:
    """Return the shape of a tensor type.

    Raises:
        GraphVerifyError: its rank is unknown.
    """
    if value.shape is None:
        raise GraphVerifyError(f"{op.kind} needs the rank of its input {name}; give the value a shape first")
    return value.shape


def normal_axis(op: Op, axis: int, rank: int) -> int:
    """Return `axis` counted from the front.

    Raises:
        GraphVerifyError: the tensor has no such axis.
    """
    if not -rank <= axis < rank:
        raise GraphVerifyError(f"{op.kind} has axis {axis}, but its input has rank {rank}")
    return axis % rank
