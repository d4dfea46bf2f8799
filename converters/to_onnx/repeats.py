"""Writes a node like an earlier one as that one was written: models repeat their layers, and lowering is slow.

The nodes written for an op depend on its op and on the types it reads and makes, unless its lowering reads something
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

from rlx_ort.converters.to_onnx.model import ExportedNode, ModelNode, ModelValue, ModelWriter, names_of, types_of
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType

_Key: TypeAlias = tuple[Any, ...]
_OWN_OPS = "rlx_ort.ir.ops."
_PLAIN = frozenset({str, int, bool, NoneType, DType, bytes, TensorType})
"""Types of which equal values are identical; 0.0 and -0.0 are not."""
_PLAIN_FIELDS = frozenset({"str", "int", "bool", "DType", "str | None", "int | None", "DType | None"})
"""Declarations of fields of which equal values are identical."""


@dataclass(slots=True, eq=False)
class _Mark:
    """Stands for the facts of a value that a lowering may read; `rough` for the same with ranks in place of sizes."""

    rough: object


_Line: TypeAlias = tuple[ModelNode, str, tuple[int, ...], slice]
"""One node of a `_Form`: its pattern, the suffix of its name, the places of its operands and of its results."""


class _Form(NamedTuple):
    """The nodes written for an op.

    Places are those of a pool: the inputs of the node, then `fixed`, then the results of each line. `fixed` has
    constants, which the whole model shares, and None for an absent input. `inner` has the places of the values that are
    no results, with their types where known, and `marks` those of the results. `decision` is the chosen form of an op
    that has two, as `Dispatcher.latest`. `single` means one node that reads inputs of the node alone and whose output
    is the result.
    """

    lines: tuple[_Line, ...]
    fixed: tuple[ModelValue | None, ...]
    results: tuple[int, ...]
    inner: tuple[tuple[int, ValueType | None], ...]
    marks: tuple[_Mark, ...]
    decision: str | None
    single: bool


class Repeats:
    """The forms written so far for the nodes of one graph; `repeat` adds to `nodes`."""

    def __init__(self, writer: ModelWriter, nodes: list[ExportedNode]) -> None:
        self._writer = writer
        self._nodes = nodes
        self._value_name, self._node_name = writer.value_names.unique, writer.node_names.unique
        self._seen: set[Hashable] = set()
        self._forms: dict[_Key, _Form | None] = {}  # None: its nodes cannot be reused
        self._sizeless: dict[_Key | None, _Form] = {}  # forms for nodes of any size
        self._marks: dict[int, tuple[_Mark, ...]] = {}  # node -> those of its results
        self._known: dict[Hashable, _Mark] = {}
        self._rough: dict[Hashable, object] = {}

    def find(self, node: Node, inputs: Sequence[ModelValue | None]) -> tuple[_Key | None, _Form | None]:
        """Return the key of a node, see `key_of`, and the form of nodes like it, None without one."""
        key = self.key_of(node, inputs)
        if key is None:
            return None, None
        try:
            return key, self._forms.get(key) or self._resized(key, node, inputs)
        except TypeError:  # an op was made with an attribute that its class does not declare
            return None, None

    def key_of(self, node: Node, inputs: Sequence[ModelValue | None]) -> _Key | None:
        """Return the key of a node's lowering, None if it cannot be compared."""
        exact = exact_op(node.op)
        if exact is None or "" in node.output_names:
            return None
        marks = self._marks
        read = tuple([None if ref is None else marks[ref.node][ref.output] for ref in node.inputs])
        kind = node.types[0] if len(node.types) == 1 else None
        made = ((id(kind.dtype), kind.shape),) if type(kind) is TensorType else tuple(map(_look, node.types))
        if len(inputs) > 1 and (inputs[0] is inputs[1] or (len(inputs) > 2 and len(set(inputs)) < len(inputs))):
            return (exact, read, made, tuple(map(inputs.index, inputs)))
        return (exact, read, made)

    def mark(self, node: Node, results: Sequence[ModelValue]) -> None:
        """Record the facts of a node's results that lowerings may read, for the keys of nodes that read them."""
        constant, types, marks = type(node.op) is Constant, self._writer.types, []
        for kind, value in zip(node.types, results, strict=False):
            declared, known = _look(kind), types.get(value)
            look = (constant, declared, declared if known is kind else _look(known), value.name == "")
            mark = self._known.get(look)
            if mark is None:
                rough = (constant, _rank(declared), _rank(look[2]), look[3])
                mark = self._known[look] = _Mark(self._rough.setdefault(rough, object()))
            marks.append(mark)
        self._marks[node.id] = tuple(marks)

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
        """Cache the form of a node on its second occurrence, if it reads only the node's inputs and constants.

        `any_size`: whether the lowering read no sizes.
        """
        sizeless = self._sizeless_key(key) if any_size else None
        seen = sizeless or key
        if seen not in self._seen or key in self._forms:
            self._seen.add(seen)
            return
        self._forms[key] = None
        if not set(constants).isdisjoint(inputs):
            return  # equal constants are one value, and another node may read another one there
        made = [value for record in records for value in record.pattern.writes]
        fixed = tuple(dict.fromkeys([*constants, None]))
        places: dict[ModelValue | None, int] = {}
        for at, value in enumerate([*inputs, *fixed, *made]):
            places.setdefault(value, at)
        if not places.keys() >= {*results, *(value for record in records for value in record.pattern.reads)}:
            return
        lines: list[_Line] = []
        start = len(inputs) + len(fixed)
        for record in records:
            written = record.pattern
            end = start + len(written.writes)
            reads = tuple([places[value] for value in written.reads])
            lines.append((written, f"/{written.op_type}" if lines else "", reads, slice(start, end)))
            start = end
        form = self._forms[key] = _Form(
            tuple(lines),
            fixed,
            tuple([places[value] for value in results]),
            tuple([(places[value], self._writer.types.get(value)) for value in made if value not in results]),
            self._marks[node.id],
            decision,
            len(made) == len(lines) == 1 and list(results) == made and max(lines[0][2], default=0) < len(inputs),
        )
        if sizeless is not None and form.single:
            self._sizeless[sizeless] = form

    def _resized(self, key: _Key, node: Node, inputs: Sequence[ModelValue | None]) -> _Form | None:
        """Return the form of a node that differs only by sizes from one with a cached form, None without any."""
        known = self._sizeless.get(self._sizeless_key(key))
        if known is None:
            return None
        ((like, suffix, order, outputs),), fixed, results, inner, (mark,), decision, single = known
        pattern = like.alike(types_of([inputs[at] for at in order], self._writer.types), node.types)
        look = key[2][0]
        mark = self._known.setdefault((False, look, look, False), _Mark(mark.rough))
        lines = ((pattern, suffix, order, outputs),)
        form = self._forms[key] = _Form(lines, fixed, results, inner, (mark,), decision, single)
        return form

    def _sizeless_key(self, key: _Key) -> _Key | None:
        """Return a key without sizes, None unless the node has one result of known type and rank."""
        made = key[2]
        if len(made) != 1 or type(made[0]) is not tuple or made[0][1] is None:
            return None
        return (key[0], tuple([mark and mark.rough for mark in key[1]]), _rank(made[0]), *key[3:])

    def repeat(
        self, form: _Form, node: Node, inputs: Sequence[Any], names: Mapping[int, str]
    ) -> tuple[ModelValue, ...]:
        """Write a node in the form of one like it and return the results; `names` as in `Emitter.lower`."""
        writer, unique = self._writer, self._value_name
        types, origin, source = writer.types, writer.origin, writer.source
        lines, fixed, places, inner, self._marks[node.id], decision, single = form
        if decision is not None:
            writer.dispatcher.decide(origin, decision)
        if single:  # most nodes, so without a pool
            pattern, _, order, _ = lines[0]
            name = names[0] if names else unique(node.output_names[0])
            value = ModelValue(name, pattern)
            if type(node.types[0]) is not UnknownType:
                types[value] = node.types[0]
            reads = tuple(["" if (read := inputs[at]) is None else read.name for at in order])
            record = ExportedNode(pattern, origin, source, self._node_name(node.name), reads, (name,))
            writer.records.append(record)
            self._nodes.append(record)
            return (value,)
        pool: list[Any] = [*inputs, *fixed]
        for pattern, *_ in lines:
            pool += [ModelValue(None, pattern) for _ in pattern.writes]
        results = tuple([pool[at] for at in places])
        for index, value in enumerate(results):
            if value.name is None:
                value.name = names[index] if index in names else unique(node.output_names[index])
                if type(node.types[index]) is not UnknownType:
                    types[value] = node.types[index]
        for at, known in inner:
            value = pool[at]
            value.name = unique(f"{node.name}/{value.node.op_type}")
            if known is not None:
                types[value] = known
        called = names_of(pool)
        for pattern, suffix, order, outputs in lines:
            reads = tuple([called[at] for at in order])
            name = self._node_name(node.name + suffix)
            record = ExportedNode(pattern, origin, source, name, reads, called[outputs])
            writer.records.append(record)
            self._nodes.append(record)
        return results


def _look(kind: ValueType | None) -> Hashable:
    """Return a key of a type that is quicker to compare than the type."""
    return (id(kind.dtype), kind.shape) if type(kind) is TensorType else kind


def _rank(look: Hashable) -> Hashable:
    """Return the key that `_look` gives, with the rank instead of the sizes."""
    return (look[0], None if look[1] is None else len(look[1])) if type(look) is tuple else look


def exact_op(op: Op) -> Hashable | None:
    """Return a key that only ops of the same class with identical attributes have, None where there is no such key."""
    kind: Any = type(op)
    getter, is_plain = _reading(kind)
    if is_plain:
        return (kind, getter(op))
    try:
        return (kind, _exact(getter(op)))
    except TypeError:
        return None


@functools.cache
def _reading(kind: type[Op]) -> tuple[Callable[[Any], Any], bool]:
    """Return a reader of the attributes of an op, and whether equal ones are identical."""
    if not kind.__module__.startswith(_OWN_OPS):
        return lambda op: NotImplemented, False  # an op from outside may depend on more than its fields
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
    if kind is TensorData:
        return (kind, id(value))  # the graph keeps it alive
    if kind is dict:
        return (kind, *((name, _exact(item)) for name, item in value.items()))
    raise TypeError(f"{kind.__name__} {value!r}")
