"""Writes a node like an earlier one as that one was written: models repeat their layers, and lowering is slow.

What comes of a node depends on its op, on the types it reads and makes, and on nothing else, unless its lowering asks
for something that is not its own: the data of a constant, the size of a named dimension, a body. Such a node, and one
whose op holds what cannot be compared exactly, is lowered each time.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, TypeAlias

from rlx_ort.converters.to_onnx.model import ModelValue, names_of
from rlx_ort.converters.to_onnx.records import NodeRecord, Pattern
from rlx_ort.converters.to_onnx.writer import ModelWriter
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, UnknownType, ValueType

__all__ = ["Repeats"]

_OWN_OPS = "rlx_ort.ir.ops."
_PLAIN = frozenset({str, int, bool, NoneType, DType, bytes})
"""Types whose values are the same where they are equal and of one type; 0.0 and -0.0 are not."""
_PLAIN_FIELDS = frozenset({"str", "int", "bool", "DType", "str | None", "int | None", "DType | None"})
"""Declarations of fields whose values are the same where they are equal."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One node of a `_Form`: what it shares with others like it, and where in the pool its values are."""

    pattern: Pattern
    suffix: str
    inputs: tuple[int, ...]
    outputs: slice


@dataclass(frozen=True, slots=True)
class _Form:
    """What was written for a node.

    Places are those of a pool: the inputs of the node, then `fixed`, then the results of each line.

    Attributes:
        lines: the nodes, in order.
        fixed: constants, which the whole model shares, and None for an absent input.
        results: places of the results.
        inner: places of the values that are no results, with their types as far as they are known.
        marks: the marks of the results.
        decision: the form that was chosen for an op that has two, as `Dispatcher.latest`.
        only: for the plainest form, one node that reads inputs and whose one output is the result: its pattern, and
            the order in which it reads, None for all as they are, none absent.
    """

    lines: tuple[_Line, ...]
    fixed: tuple[ModelValue | None, ...]
    results: tuple[int, ...]
    inner: tuple[tuple[int, ValueType | None], ...]
    marks: tuple[int, ...]
    decision: str | None
    only: tuple[Pattern, tuple[int, ...] | None] | None


class Repeats:
    """What was written so far for the nodes of one graph.

    Attributes:
        forms: `key_of` a node -> what was written for such nodes, None where that says nothing of others.
    """

    def __init__(self, writer: ModelWriter) -> None:
        self._writer = writer
        self._seen: set[Hashable] = set()
        self.forms: dict[Hashable | None, _Form | None] = {}
        self._marks: dict[int, tuple[int, ...]] = {}  # node -> what a lowering may learn of each result, as numbers
        self._numbers: dict[Hashable, int] = {}

    def key_of(self, node: Node, inputs: Sequence[ModelValue | None]) -> Hashable | None:
        """Return what a node's lowering depends on, None where that cannot be said."""
        exact = _exact_op(node.op)
        if exact is None or "" in node.output_names:
            return None
        marks = self._marks
        read = tuple([-1 if ref is None else marks[ref.node][ref.output] for ref in node.inputs])
        made = tuple([(id(kind.dtype), kind.shape) if type(kind) is TensorType else kind for kind in node.types])
        if len(inputs) > 1 and (inputs[0] is inputs[1] or (len(inputs) > 2 and len(set(inputs)) < len(inputs))):
            return (exact, read, made, tuple(map(inputs.index, inputs)))
        return (exact, read, made)

    def mark(self, node: Node, results: Sequence[ModelValue]) -> None:
        """Remember the results of a node that was lowered, for the keys of those that read them."""
        types, marks = self._writer.types, self._numbers
        if len(results) == 1 and node.types[0] is types.get(results[0]) and type(node.types[0]) is TensorType:
            kind = node.types[0]  # a parameter or an input, as a rule
            look = (id(kind.dtype), kind.shape)
            whole = (type(node.op) is Constant, look, look, results[0].name == "")
            self._marks[node.id] = (marks.setdefault(whole, len(marks)),)
            return
        constant = type(node.op) is Constant
        looks = [
            (constant, _look(kind), _look(types.get(value)), value.name == "")
            for kind, value in zip(node.types, results, strict=False)
        ]
        self._marks[node.id] = tuple([marks.setdefault(look, len(marks)) for look in looks])

    def learn(
        self,
        key: Hashable,
        node: Node,
        inputs: Sequence[ModelValue | None],
        results: Sequence[ModelValue],
        records: Sequence[NodeRecord],
        constants: Sequence[ModelValue],
        decision: str | None,
    ) -> None:
        """Remember what was written for a node, if it is made of nothing but its inputs, constants and itself.

        The first of its kind may be the only one, so the second is learned from.
        """
        if key not in self._seen:
            self._seen.add(key)
        elif key not in self.forms:
            self.forms[key] = self._form(node, inputs, results, records, constants, decision)

    def repeat(
        self, form: _Form, node: Node, inputs: Sequence[Any], names: Mapping[int, str]
    ) -> tuple[ModelValue, ...]:
        """Write a node by the form of one like it, as records only, and return the results; `names` as `lower`."""
        self._marks[node.id] = form.marks
        writer = self._writer
        types, unique = writer.types, writer.value_names.unique
        if form.decision is not None:
            writer.dispatcher.decide(writer.origin, form.decision)
        if form.only is not None and not names:
            pattern, order = form.only
            name = unique(node.output_names[0])
            value = ModelValue(name, pattern.like)
            if type(node.types[0]) is not UnknownType:
                types[value] = node.types[0]
            reads = tuple([known.name for known in inputs]) if order is None else names_of([inputs[at] for at in order])
            called = writer.node_names.unique(node.name)
            writer.records.append(NodeRecord(pattern, writer.origin, writer.source, called, reads, (name,)))
            return (value,)
        pool: list[Any] = [*inputs, *form.fixed]
        for line in form.lines:
            like = line.pattern.like
            pool += [ModelValue(None, like) for _ in like.outputs]
        results = tuple([pool[at] for at in form.results])
        for index, value in enumerate(results):
            if value.name is None:
                value.name = names[index] if index in names else unique(node.output_names[index])
                kind = node.types[index]
                if type(kind) is not UnknownType:
                    types[value] = kind
        for at, known in form.inner:
            value = pool[at]
            value.name = unique(f"{node.name}/{value.node.op_type}")
            if known is not None:
                types[value] = known
        told = names_of(pool)
        for line in form.lines:
            called = writer.node_names.unique(node.name + line.suffix)
            read, made = tuple([told[at] for at in line.inputs]), told[line.outputs]
            writer.records.append(NodeRecord(line.pattern, writer.origin, writer.source, called, read, made))
        return results

    def _form(
        self,
        node: Node,
        inputs: Sequence[ModelValue | None],
        results: Sequence[ModelValue],
        records: Sequence[NodeRecord],
        constants: Sequence[ModelValue],
        decision: str | None,
    ) -> _Form | None:
        if not set(constants).isdisjoint(inputs):
            return None  # equal constants are one value, and another node may read another one there
        made = [value for record in records for value in record.like.outputs]
        fixed = tuple(dict.fromkeys([*constants, None]))
        places: dict[ModelValue | None, int] = {}
        for at, value in enumerate([*inputs, *fixed, *made]):
            places.setdefault(value, at)
        if any(value not in places for record in records for value in record.like.inputs):
            return None
        if any(value not in places for value in results):
            return None
        types = self._writer.types
        inner = [value for value in made if value not in results]
        lines: list[_Line] = []
        start = len(inputs) + len(fixed)
        for record in records:
            written = record.like
            suffix = f"/{written.op_type}" if lines else ""
            read, end = tuple([places[value] for value in written.inputs]), start + len(written.outputs)
            lines.append(_Line(record.pattern, suffix, read, slice(start, end)))
            start = end
        plain = len(made) == len(lines) == 1 and list(results) == made and max(lines[0].inputs, default=0) < len(inputs)
        order = lines[0].inputs if plain else ()
        as_they_are = None not in inputs and order == tuple(range(len(inputs)))
        only = (lines[0].pattern, None if as_they_are else order) if plain else None
        return _Form(
            tuple(lines),
            fixed,
            tuple([places[value] for value in results]),
            tuple([(places[value], types.get(value)) for value in inner]),
            self._marks[node.id],
            decision,
            only,
        )


def _look(kind: ValueType | None) -> Hashable:
    """Return what equal types have in common; quicker to compare than they are."""
    return (id(kind.dtype), kind.shape) if type(kind) is TensorType else kind


def _exact_op(op: Op) -> Hashable | None:
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
