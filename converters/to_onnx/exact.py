"""`exact_op`: by what ops are told to be the very same, where equal is not enough: 0.0 is -0.0, and 1 is True."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Hashable
from dataclasses import fields
from types import NoneType
from typing import Any, TypeAlias

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = ["exact_op"]

_OWN_OPS = "rlx_ort.ir.ops."
_PLAIN = frozenset({str, int, bool, NoneType, DType, bytes})
"""Types whose values are the same where they are equal and of one type; 0.0 and -0.0 are not."""
_PLAIN_FIELDS = frozenset({"str", "int", "bool", "DType", "str | None", "int | None", "DType | None"})
"""Declarations of fields whose values are the same where they are equal."""


def exact_op(op: Op) -> Hashable | None:
    """Return what only ops of the same class with the very same attributes have, None where there is no such thing."""
    kind = type(op)
    reading = _readings.get(kind)
    if reading is None:
        reading = _readings[kind] = _reading(kind)
    getter, is_plain = reading
    values = getter(op)
    if is_plain:
        return (kind, values)
    try:
        return (kind, _exact(values))
    except TypeError:
        return None


_Reading: TypeAlias = "tuple[Callable[[Any], Any], bool]"
"""What reads the attributes of an op, and whether they are the very same where they are equal."""

_readings: dict[type[Op], _Reading] = {}


def _reading(kind: type[Op]) -> _Reading:
    if not kind.__module__.startswith(_OWN_OPS):
        return _unreadable, False
    names = [item.name for item in fields(kind)]
    if not names:
        return lambda op: None, True
    return operator.attrgetter(*names), all(str(item.type) in _PLAIN_FIELDS for item in fields(kind))


def _unreadable(op: Op) -> Any:
    """Stand for what nothing is known of: an op from outside may depend on more than it shows."""
    return NotImplemented


def _exact(value: Any) -> Hashable:
    """Return what only the very same value has.

    Raises:
        TypeError: nothing is known to tell such values apart.
    """
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, enum.Enum):
        return (kind, value)
    if kind is float:
        return (kind, float.hex(value))
    if kind is tuple or kind is Shape:
        return (kind, *map(_exact, value))
    if kind is TensorType:
        return (kind, value)
    if kind is TensorData:
        return (kind, id(value))  # the graph keeps it alive
    if kind is dict:
        return (kind, *((name, _exact(item)) for name, item in value.items()))
    raise TypeError(f"{kind.__name__} {value!r}")
