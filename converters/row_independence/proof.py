"""The proof itself: it follows the facts of values node by node, by rules that it is given."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx_ort.converters.row_independence.facts import (
    ANYHOW,
    BATCH,
    ONE,
    SMALL,
    Quotient,
    RefusedError,
    Size,
    Value,
    bound_of,
    constant_value,
    flattened,
    moved,
    product,
    refuse_if,
)
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    import onnx

UNNAMED = "?"
"""A dim without a name, as it is written in shapes."""

_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
_PLACED = """Add Cast Concat Expand Gather GatherND GreaterOrEqual Identity Mul Reshape Shape Squeeze Transpose
Unsqueeze"""
_MOVES_PLACES = frozenset(_PLACED.split())  # by rules that follow the row's number


@dataclass(frozen=True)
class Batch:
    """The rows: the named dim `dim` on the first axis of everything, or `axes` of the named inputs."""

    dim: str | None
    axes: Mapping[str, int] = field(default_factory=dict)
    rows: int = 0


@dataclass
class Node:
    """A node with the proven facts of its inputs."""

    proto: Any
    version: int
    inputs: list[Value | None]
    attributes: dict[str, Any] = field(default_factory=dict)

    def get(self, place: int) -> Value | None:
        """Return an input, None where there is none."""
        return self.inputs[place] if place < len(self.inputs) else None

    def need(self, place: int) -> Value:
        """Return an input that must be there."""
        value = self.get(place)
        if value is None:
            raise RefusedError(f"has no input {place}")
        return value

    def numbers(self, place: int, attribute: str) -> list[int] | None:
        """Return whole numbers from an input or else an attribute; None if there is neither."""
        given = self.get(place)
        if given is not None:
            wholes = [None if size is None else size.whole for size in given.content or (None,)]
            if given.axis is not None or (given.content is None) or None in wholes:
                raise RefusedError(f"its {attribute} are not constant")
            return [number for number in wholes if number is not None]
        value = self.attributes.get(attribute)
        return None if value is None else [int(each) for each in (value if isinstance(value, list) else [value])]

    def same_for_all(self, *places: int) -> None:
        """Refuse inputs that have rows or depend on their number."""
        for place in places:
            given = self.get(place)
            refuse_if(given is not None and given.differs, f"input {place} differs between batches")


Rule: TypeAlias = Callable[["Proof", Node], list[Value]]
BodyRule: TypeAlias = Callable[["Proof", Node, dict[str, Value]], list[Value]]
Name: TypeAlias = tuple[str, str]
"""Domain and operator."""


@dataclass(frozen=True)
class Rules:
    """The rules of operators that read, carry or compute sizes, of all others, and of those with bodies.

    `shaped` has operators whose rules give the shape of values without rows.
    """

    sizes: Mapping[Name, Rule]
    others: Mapping[Name, Rule]
    bodies: Mapping[Name, BodyRule]
    shaped: Collection[Name]


class Proof:
    """One proof: the facts of all values, followed through a model by its rules."""

    def __init__(
        self,
        rules: Rules,
        types: Mapping[str, ValueType],
        batch: Batch,
        versions: Mapping[str, int],
        data: Mapping[str, Any],
    ) -> None:
        self.rules, self.types, self.batch, self.versions, self.given = rules, types, batch, versions, data
        self.one_batch = Size(1, (BATCH,))  # or the number of rows, if the model takes one number only
        self._symbols = 0
        self._exact: dict[str, Size] = {}  # symbol -> the same as a multiple of its quotient

    @property
    def is_fixed(self) -> bool:
        """Whether the number of rows is fixed, so that sizes and values without rows may be made for it."""
        return not self.one_batch.batched

    def number(self) -> int:
        """Return another number each time."""
        self._symbols += 1
        return self._symbols

    def unknown(self) -> Size:
        """Return a size of which nothing is known."""
        return Size(1, (f"\0{self.number()}",))

    def of_model(self, model: onnx.ModelProto) -> tuple[int | None, ...]:
        """Return the axis of the rows in each output.

        Raises:
            RefusedError: the proof ends.
        """
        known: dict[str, Value] = {}
        self._add_constants(model.graph, known)
        inputs = [value.name for value in model.graph.input if value.name not in known]
        axes = dict.fromkeys(inputs, 0) if self.batch.dim is not None else self.batch.axes
        sizes = self._row_sizes(inputs, axes)
        for name in inputs:
            kind = self.types.get(name)
            dims = kind.shape if isinstance(kind, TensorType) else None
            axis = axes.get(name)
            if dims is None:
                known[name] = Value(None)
                continue
            shape = [
                Size(each) if isinstance(each, int) else Size(1, (str(each),)) if each else self.unknown()
                for each in dims
            ]
            if axis is not None and not self.is_fixed:
                shape[axis] = self.one_batch
            elif any(size in sizes for size in dims if isinstance(size, str)):
                raise RefusedError(f"input {name!r} has the size of the rows, but no rows")
            known[name] = Value(tuple(shape), axis)
        self._body(model.graph, known)
        outputs = [known[value.name] for value in model.graph.output]
        if self.batch.dim is not None:
            for value, result in zip(model.graph.output, outputs, strict=True):
                if result.axis != 0 or result.rows != self.one_batch or result.places:
                    raise RefusedError(f"output {value.name!r} does not have one row for each of the inputs")
        elif numbered := next((v.name for v, r in zip(model.graph.output, outputs, strict=True) if r.sized), None):
            raise RefusedError(f"output {numbered!r} is computed with the number of rows")
        return tuple([result.axis for result in outputs])

    def _row_sizes(self, inputs: Sequence[str], axes: Mapping[str, int]) -> set[int | str | None]:
        """Return the declared sizes of the axes of rows, and note whether they are fixed."""
        sizes = set[int | str | None]()
        for name in inputs:
            kind = self.types.get(name)
            dims = list(kind.shape) if isinstance(kind, TensorType) and kind.shape is not None else None
            if (axis := axes.get(name)) is None:
                continue
            size = dims[axis] if dims is not None and axis < len(dims) else None
            alone = dims is not None and axis < len(dims) and (size is None or dims.count(size) == 1)
            named = self.batch.dim if self.batch.dim != UNNAMED or len(inputs) > 1 else None
            if self.batch.dim is not None and (not alone or size != named):
                raise RefusedError(f"input {name!r} has no rows along {self.batch.dim!r} on its first axis alone")
            refuse_if(not alone and not isinstance(size, int), f"input {name!r} has no rows on axis {axis} alone")
            sizes.add(size)
        fixed = {size for size in sizes if isinstance(size, int)}
        if fixed and (len(fixed) < len(sizes) or any(size % self.batch.rows for size in fixed)):
            raise RefusedError("the padded inputs have other numbers of rows")
        if fixed:
            self.one_batch = Size(self.batch.rows)
        if self.one_batch == ONE:  # axes of size 1 may be broadcast, so one row is no batch
            raise RefusedError("the model takes one row only")
        return sizes

    def note_exact(self, before: Sequence[Size], after: Sequence[Size]) -> None:
        """Note which quotients have no remainder because a reshape gives as many elements as it gets.

        A quotient rounded down times the divisor is never more than the dividend, so that all are exact if the products
        are equal.
        """
        total, exact = product(after), dict[str, Size]()
        for symbol in total.symbols:
            if (
                isinstance(symbol, Quotient)
                and symbol.bottom.whole
                and symbol.top.number == len(symbol.top.symbols) == 1
            ):
                exact[symbol.top.symbols[0]] = symbol.bottom * Size(1, (symbol,))
        if exact and self._canonical(product(before), exact) == self._canonical(total, exact):
            self._exact.update(exact)

    def canonical(self, size: Size) -> Size:
        """Return a size by quotients that are known to be exact."""
        return self._canonical(size, self._exact) if self._exact else size

    @staticmethod
    def _canonical(size: Size, exact: Mapping[str, Size]) -> Size:
        return math.prod([exact.get(each, Size(1, (each,))) for each in size.symbols], start=Size(size.number))

    def sizes(self, value: Value) -> tuple[Size, ...]:
        """Return the sizes of a value as elements, which name the number of rows even if it is fixed."""
        dims = list(value.dims)
        if value.axis is not None and self.is_fixed:
            dims[value.axis] = Size(dims[value.axis].number // self.one_batch.number, (BATCH,))
        return tuple(dims)

    def numbered(self, sizes: Sequence[Size]) -> tuple[Size, ...]:
        """Return sizes that a shape is made of, with the number of rows put in if it is fixed."""
        if not self.is_fixed:
            return tuple(sizes)
        return tuple([self._numbered(size) for size in sizes])

    def _numbered(self, size: Size) -> Size:
        rest = tuple([symbol for symbol in size.symbols if symbol != BATCH])
        return Size(size.number * self.one_batch.number ** (len(size.symbols) - len(rest)), rest)

    def is_rows(self, size: Size) -> bool:
        """Return whether an axis of this size may hold a whole number of elements for each row."""
        if not self.is_fixed:
            return size.batched
        return size.whole is not None and size.whole > 0 and size.whole % self.one_batch.number == 0

    def has_rows(self, value: Value, axis: int, rows: Size) -> bool:
        """Return whether a value has one element along an axis for each of so many rows."""
        if value.axis is None and self.is_fixed:
            return value.shape is not None and value.rank > axis and value.dims[axis] == rows
        return value.axis == axis and value.rows == rows

    def _add_constants(self, graph: onnx.GraphProto, known: dict[str, Value]) -> None:
        from onnx import TensorProto, numpy_helper

        for tensor in graph.initializer:
            array: Any = None
            if math.prod(tensor.dims) <= SMALL and tensor.data_type != TensorProto.STRING:
                if tensor.name in self.given:
                    array = self.given[tensor.name].numpy()
                elif tensor.data_location != TensorProto.EXTERNAL:
                    array = numpy_helper.to_array(tensor)
            known[tensor.name] = constant_value(array) if array is not None else Value(tuple(map(Size, tensor.dims)))
        for tensor in graph.sparse_initializer:
            known[tensor.values.name] = Value(tuple(map(Size, tensor.dims)))

    def _body(self, graph: onnx.GraphProto, known: dict[str, Value]) -> None:
        for node in graph.node:
            label = f"{node.op_type} {node.name!r}" if node.name else node.op_type
            try:
                results = self._results(node, known)
                known.update((name, value) for name, value in zip(node.output, results, strict=False) if name)
                if missing := [name for name in node.output if name and name not in known]:
                    raise RefusedError(f"gives {missing[0]!r}, which has no rule")
            except RefusedError as err:
                err.node = err.node or label
                raise
            except (LookupError, ValueError, TypeError, AttributeError, OverflowError, ZeroDivisionError) as err:
                refused = RefusedError(f"does not follow its operator's rules ({type(err).__name__}: {err})")
                refused.node = label
                raise refused from err

    def inner_body(self, graph: onnx.GraphProto, known: dict[str, Value]) -> None:
        """Follow a body that may not run; its conclusions about sizes hold in it only."""
        exact = dict(self._exact)
        self._add_constants(graph, known)
        self._body(graph, known)
        self._exact = exact

    def _results(self, node: Any, known: dict[str, Value]) -> list[Value]:
        from onnx import AttributeProto, helper

        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        inputs = [known[name] if name else None for name in node.input]
        view = Node(node, self.versions.get(domain, 1), inputs, attributes)
        operator = domain, node.op_type
        if operator in self.rules.bodies:
            return self.rules.bodies[operator](self, view, known)
        graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
        refuse_if(any(each.type in graphs for each in node.attribute), "its body has no rule")
        of_sizes = self.rules.sizes.get(operator)
        rule = of_sizes or self.rules.others.get(operator)
        differ = any(each is not None and each.differs for each in inputs)
        if rule is None:
            standard = domain in ("", "ai.onnx.ml") and node.op_type not in _RANDOM
            if inputs and standard and not differ:
                return [self.typed(name) for name in node.output]
            raise RefusedError("the operator has no rule")
        if (view.inputs or node.op_type == "Constant") and not (differ or of_sizes):
            if node.op_type == "GatherElements":
                return [Value(view.need(1).shape)]
            if operator in self.rules.shaped and all(each is None or each.shape is not None for each in inputs):
                with contextlib.suppress(RefusedError):
                    return rule(self, view)
            return [self.typed(name) for name in node.output]
        if node.op_type not in _MOVES_PLACES and any(each is not None and each.places for each in inputs):
            refuse_if(rule is not elementwise, "computes with the row's number")
            return [replace(value, places=ANYHOW) for value in rule(self, view)]  # its sizes may still be asked for
        if not of_sizes and any(each is not None and each.sized for each in inputs):
            raise RefusedError("computes with the number of rows")
        return [flattened(value) for value in rule(self, view)]

    def typed(self, name: str) -> Value:
        """Return a value that is the same for every batch, with the declared sizes."""
        kind = self.types.get(name)
        if not isinstance(kind, TensorType) or kind.shape is None:
            return Value(None)
        return Value(tuple([Size(each) if isinstance(each, int) else self.unknown() for each in kind.shape]))

    def need_rows(self, node: Node, places: Sequence[int], axis: int, rows: Size) -> None:
        """Refuse inputs, of those that are there, without one element along an axis for each of so many rows."""
        for place in places:
            value = node.get(place)
            if value is not None and not self.has_rows(value, axis, rows):
                raise RefusedError(f"input {place} does not have its rows on axis {axis}")

    def rows(self, node: Node, place: int, axis: int, rows: Size, rank: int | None = None) -> Value:
        """Return an output with its declared sizes and rows on an axis."""
        shape = self.typed(node.proto.output[place]).shape if place < len(node.proto.output) else None
        if rank is not None and (shape is None or len(shape) != rank):
            shape = tuple([self.unknown() for _ in range(rank)])
        if shape is None or not 0 <= axis < len(shape):
            raise RefusedError("gives a value of open rank")
        return Value((*shape[:axis], rows, *shape[axis + 1 :]), axis)

    def broadcast(self, values: Sequence[Value]) -> Value:
        """Return the result of an elementwise operator.

        Raises:
            RefusedError: rows do not meet rows, or meet an axis of another size than 1.
        """
        rank = max(value.rank for value in values)
        axes = {value.axis + rank - value.rank for value in values if value.axis is not None}
        refuse_if(len(axes) > 1, "rows lie on different axes")
        axis = axes.pop() if axes else None
        shape = []
        for place in range(rank):
            sizes = [value.dims[at] for value in values if (at := place - rank + value.rank) >= 0]
            wide = [size for size in dict.fromkeys(sizes) if size != ONE]
            wide = [size for size in wide if bound_of(size) not in wide]  # where they meet, it is equal or 1
            refuse_if(place == axis and len(wide) != 1, "rows meet an axis of another size")
            numbers = [size for size in wide if size.whole is not None]
            shape.append(ONE if not wide else wide[0] if len(wide) == 1 else (numbers or [self.unknown()])[0])
        if axis is not None and not self.is_fixed:
            for value in values:
                at = axis - rank + value.rank
                if value.axis is None and at >= 0 and value.dims[at] != ONE:
                    raise RefusedError("rows meet an axis of another size")
        return Value(tuple(shape), axis)


def elementwise(proof: Proof, node: Node) -> list[Value]:
    """The rule of an operator on elements that meet by broadcasting."""
    result = proof.broadcast([value for value in node.inputs if value is not None])
    return [result] * len(node.proto.output)


def reshaped(proof: Proof, given: Value, sizes: Sequence[Size]) -> Value:
    """Return the value with new sizes, on whose axis of rows the rows come first."""
    refuse_if(given.axis is None, "a value without rows is given as many as there are")
    before = product(given.dims[: given.axis])
    axes = [at for at, size in enumerate(sizes) if proof.is_rows(size)]
    if proof.is_fixed:  # other sizes may be multiples of the number of rows by chance
        axes = [at for at in axes if product(sizes[:at]) == before][:1]
    refuse_if(len(axes) != 1 or product(sizes[: axes[0]]) != before, "rows are mixed with another axis")
    return moved(given, Value(tuple(sizes), axes[0]))
