"""Writes a node like an earlier one as that one was written: models repeat their layers, and lowering is slow.

What is written for a node depends on its op and on the types it reads and makes, unless its lowering reads something
else: the data of a constant, the size of a named dimension, a body. Such a node, and one whose op cannot be compared
exactly, is lowered each time. If a lowering reads only element types and ranks and writes one node, its result is
reused for nodes of all sizes.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode, ModelValue, names_of, types_of
from rlx_ort.converters.to_onnx.writer import ModelWriter
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, UnknownType, ValueType

__all__ = ["Repeats", "exact_op"]

_Key: TypeAlias = tuple[Any, ...]
_Look: TypeAlias = tuple[bool, Hashable, Hashable, bool]
_OWN_OPS = "rlx_ort.ir.ops."
_PLAIN = frozenset({str, int, bool, NoneType, DType, bytes})
"""Types of which equal values are identical; 0.0 and -0.0 are not."""
_PLAIN_FIELDS = frozenset({"str", "int", "bool", "DType", "str | None", "int | None", "DType | None"})
"""Declarations of fields of which equal values are identical."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One node of a `_Form`, with the places of its values in the pool."""

    pattern: ModelNode
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
        inner: places of the values that are no results, with their types where known.
        marks: the marks of the results, see `Repeats.mark`.
        decision: the form that was chosen for an op that has two, as `Dispatcher.latest`.
    """

    lines: tuple[_Line, ...]
    fixed: tuple[ModelValue | None, ...]
    results: tuple[int, ...]
    inner: tuple[tuple[int, ValueType | None], ...]
    marks: tuple[int, ...]
    decision: str | None


class _Single(NamedTuple):
    """The simplest form: one node, which reads inputs of the node it is written for, and whose output is the result.

    `order` has the places of what it reads among the inputs; None if it reads all of them in order and none is absent.
    """

    pattern: ModelNode
    order: tuple[int, ...] | None
    marks: tuple[int, ...]
    decision: str | None


class Repeats:
    """What was written so far for the nodes of one graph.

    Args:
        writer: what the graphs of the model share.
        nodes: the nodes of the graph; `repeat` adds to them.

    Attributes:
        forms: `key_of` a node -> what was written for such nodes, None if it cannot be reused.
    """

    def __init__(self, writer: ModelWriter, nodes: list[ExportedNode]) -> None:
        self._writer = writer
        self._nodes = nodes
        self._value_name, self._node_name = writer.value_names.unique, writer.node_names.unique
        self._seen: set[Hashable] = set()
        self.forms: dict[_Key | None, _Form | _Single | None] = {}
        self._sizeless: dict[_Key | None, _Single] = {}  # what was written for nodes of any size
        self._marks: dict[int, tuple[int, ...]] = {}  # node -> what lowerings may read of each result
        self._numbers: dict[Hashable, int] = {None: 0}  # None: an absent input
        self._ranks: list[int] = [0]  # number -> number of the same without sizes
        self._rank_numbers: dict[Hashable, int] = {None: 0}

    def key_of(self, node: Node, inputs: Sequence[ModelValue | None]) -> _Key | None:
        """Return what a node's lowering depends on, None if it cannot be compared."""
        exact = exact_op(node.op)
        if exact is None or "" in node.output_names:
            return None
        marks = self._marks
        read = tuple([0 if ref is None else marks[ref.node][ref.output] for ref in node.inputs])
        kind = node.types[0] if len(node.types) == 1 else None
        made = ((id(kind.dtype), kind.shape),) if type(kind) is TensorType else tuple(map(_look, node.types))
        if len(inputs) > 1 and (inputs[0] is inputs[1] or (len(inputs) > 2 and len(set(inputs)) < len(inputs))):
            return (exact, read, made, tuple(map(inputs.index, inputs)))
        return (exact, read, made)

    def mark(self, node: Node, results: Sequence[ModelValue]) -> None:
        """Record what lowerings may read of a node's results, for the keys of nodes that read them."""
        types = self._writer.types
        if len(results) == 1 and node.types[0] is types.get(results[0]) and type(node.types[0]) is TensorType:
            kind = node.types[0]  # a parameter or an input, as a rule
            look = (id(kind.dtype), kind.shape)
            self._marks[node.id] = (self._number((type(node.op) is Constant, look, look, results[0].name == "")),)
            return
        constant = type(node.op) is Constant
        looks = [
            (constant, _look(kind), _look(types.get(value)), value.name == "")
            for kind, value in zip(node.types, results, strict=False)
        ]
        self._marks[node.id] = tuple(map(self._number, looks))

    def learn(
        self,
        key: _Key,
        node: Node,
        inputs: Sequence[ModelValue | None],
        results: Sequence[ModelValue],
        records: Sequence[ExportedNode],
        constants: Sequence[ModelValue],
        decision: str | None,
        *,
        any_size: bool = False,
    ) -> None:
        """Cache what was written for a node on its second occurrence, if it reads only the node's inputs and constants.

        `any_size`: whether the lowering read no sizes.
        """
        sizeless = self._sizeless_key(key) if any_size else None
        seen = sizeless or key
        if seen not in self._seen:
            self._seen.add(seen)
        elif key not in self.forms:
            form = self.forms[key] = self._form(node, inputs, results, records, constants, decision)
            if sizeless is not None and isinstance(form, _Single):
                self._sizeless[sizeless] = form

    def resized(self, key: _Key, node: Node, inputs: Sequence[ModelValue | None]) -> _Single | None:
        """Return the form of a node that differs only by sizes from one with a cached form, None without any."""
        known = self._sizeless.get(self._sizeless_key(key))
        if known is None:
            return None
        like, order, (mark,), decision = known
        reads = types_of(inputs if order is None else [inputs[at] for at in order], self._writer.types)
        pattern = like.alike(reads, node.types)
        look = key[2][0]
        number = self._numbers.setdefault((False, look, look, False), len(self._numbers))
        if number == len(self._ranks):
            self._ranks.append(self._ranks[mark])
        form = self.forms[key] = _Single(pattern, order, (number,), decision)
        return form

    def _sizeless_key(self, key: _Key) -> _Key | None:
        """Return a key without sizes, None unless the node has one result of known type and rank."""
        read, made, ranks = key[1], key[2], self._ranks
        if len(made) != 1 or type(made[0]) is not tuple or made[0][1] is None:
            return None
        dtype, shape = made[0]
        return (key[0], tuple([ranks[number] for number in read]), dtype, len(shape), *key[3:])

    def repeat(
        self, form: _Form | _Single, node: Node, inputs: Sequence[Any], names: Mapping[int, str]
    ) -> tuple[ModelValue, ...]:
        """Write a node in the form of one like it and return the results; `names` as in `Emitter.lower`."""
        writer, unique = self._writer, self._value_name
        if isinstance(form, _Single):
            pattern, order, self._marks[node.id], decision = form
            if decision is not None:
                writer.dispatcher.decide(writer.origin, decision)
            name = names[0] if names else unique(node.output_names[0])
            value = ModelValue(name, pattern)
            kind = node.types[0]
            if type(kind) is not UnknownType:
                writer.types[value] = kind
            reads = tuple([known.name for known in inputs]) if order is None else names_of([inputs[at] for at in order])
            called = self._node_name(node.name)
            record = ExportedNode(pattern, writer.origin, writer.source, called, reads, (name,))
            writer.records.append(record)
            self._nodes.append(record)
            return (value,)
        self._marks[node.id] = form.marks
        types = writer.types
        if form.decision is not None:
            writer.dispatcher.decide(writer.origin, form.decision)
        pool: list[Any] = [*inputs, *form.fixed]
        for line in form.lines:
            pool += [ModelValue(None, line.pattern) for _ in line.pattern.writes]
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
        called_values = names_of(pool)
        for line in form.lines:
            called = self._node_name(node.name + line.suffix)
            read, made = tuple([called_values[at] for at in line.inputs]), called_values[line.outputs]
            record = ExportedNode(line.pattern, writer.origin, writer.source, called, read, made)
            writer.records.append(record)
            self._nodes.append(record)
        return results

    def _form(
        self,
        node: Node,
        inputs: Sequence[ModelValue | None],
        results: Sequence[ModelValue],
        records: Sequence[ExportedNode],
        constants: Sequence[ModelValue],
        decision: str | None,
    ) -> _Form | _Single | None:
        if not set(constants).isdisjoint(inputs):
            return None  # equal constants are one value, and another node may read another one there
        made = [value for record in records for value in record.pattern.writes]
        fixed = tuple(dict.fromkeys([*constants, None]))
        places: dict[ModelValue | None, int] = {}
        for at, value in enumerate([*inputs, *fixed, *made]):
            places.setdefault(value, at)
        if any(value not in places for record in records for value in record.pattern.reads):
            return None
        if any(value not in places for value in results):
            return None
        types = self._writer.types
        inner = [value for value in made if value not in results]
        lines: list[_Line] = []
        start = len(inputs) + len(fixed)
        for record in records:
            written = record.pattern
            suffix = f"/{written.op_type}" if lines else ""
            read, end = tuple([places[value] for value in written.reads]), start + len(written.writes)
            lines.append(_Line(written, suffix, read, slice(start, end)))
            start = end
        plain = len(made) == len(lines) == 1 and list(results) == made and max(lines[0].inputs, default=0) < len(inputs)
        if plain:
            order = lines[0].inputs
            as_they_are = None not in inputs and order == tuple(range(len(inputs)))
            return _Single(lines[0].pattern, None if as_they_are else order, self._marks[node.id], decision)
        return _Form(
            tuple(lines),
            fixed,
            tuple([places[value] for value in results]),
            tuple([(places[value], types.get(value)) for value in inner]),
            self._marks[node.id],
            decision,
        )

    def _number(self, look: _Look) -> int:
        """Return the number of what a lowering may read of a value."""
        number = self._numbers.setdefault(look, len(self._numbers))
        if number == len(self._ranks):
            constant, declared, known, nameless = look
            rough = (constant, _rank(declared), _rank(known), nameless)
            self._ranks.append(self._rank_numbers.setdefault(rough, len(self._rank_numbers)))
        return number


def _look(kind: ValueType | None) -> Hashable:
    """Return a key of a type that is quicker to compare than the type."""
    return (id(kind.dtype), kind.shape) if type(kind) is TensorType else kind


def _rank(look: Hashable) -> Hashable:
    """Return the key that `_look` gives, with the rank instead of the sizes."""
    if type(look) is not tuple:
        return look
    dtype, shape = look
    return (dtype, None if shape is None else len(shape))


def exact_op(op: Op) -> Hashable | None:
    """Return a key that only ops of the same class with identical attributes have, None where there is no such key."""
    reading = _reading(type(op))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    if reading is None:
        return None
    getter, is_plain = reading
    values = getter(op)
    try:
        return (type(op), values if is_plain else _exact(values))
    except TypeError:
        return None


@functools.cache
def _reading(kind: type[Op]) -> tuple[Callable[[Any], Any], bool] | None:
    """Return what reads the attributes of an op, and whether equal ones are identical; None for ops from outside.

    An op that a user brings may depend on more than its fields.
    """
    if not kind.__module__.startswith(_OWN_OPS):
        return None
    names = [item.name for item in fields(kind)]
    if not names:
        return lambda op: None, True
    return operator.attrgetter(*names), all(str(item.type) in _PLAIN_FIELDS for item in fields(kind))


def _exact(value: Any) -> Hashable:
    """Return a key that only identical values have; raises `TypeError` for values of other types than these."""
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
