"""Proof that the rows of a batch do not influence each other: dataflow along the batch axis, operator by operator.

Each value either is the same for every batch, or has the rows on one axis, of size batch * n, row i depending on row i
of the inputs only. Sizes are followed as products of symbols through `Shape`, arithmetic and `Reshape`. An operator
without a rule here is refused, as is one whose rule does not hold; nothing is run.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exporter import drafted
from rlx_ort.errors import RlxError
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    import onnx

    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData
    from rlx_ort.options.compile_options import CompileOptions

UNNAMED = "?"
"""A dim without a name, as it is written in shapes."""

_BATCH = "\0batch"  # no named dim is called so
_ANYHOW = (-2,)
_SMALL = 64  # elements of constants that are read: axes, sizes, scales
_END = 1 << 31  # ends of slices from here on mean the last element


@dataclass(frozen=True)
class RowIndependence:
    """Whether rows are proved independent; else `node` is where the proof ends and `reason` says why.

    `axes` has the axis of the rows in each output, None for an output that is the same for every batch.
    """

    proven: bool
    node: str = ""
    reason: str = ""
    axes: tuple[int | None, ...] = ()

    def __bool__(self) -> bool:
        return self.proven

    def __str__(self) -> str:
        if self.proven:
            return "rows are independent"
        return f"{self.node}: {self.reason}" if self.node else self.reason


def row_independence(graph: Graph, dim: str, options: CompileOptions | None = None) -> RowIndependence:
    """Return whether rows along a named dim, the first of every input and output, are proved independent.

    `UNNAMED` stands for the first dim of the only input where that is open and has no name.
    The model is exported, as every provider gets it, but not run. Data of small parameters counts as constant.
    """
    return _of_graph(graph, _Batch(dim), options, graph.weights)


def padding_independence(
    graph: Graph, axes: Mapping[str, int], rows: int, options: CompileOptions | None = None
) -> RowIndependence:
    """Return whether padding on an axis of some inputs is proved to change no row of the outputs that is not padding.

    Args:
        graph: exported, as every provider gets it, but not run.
        axes: name of each padded input -> axis of its rows. Other inputs count as the same for every batch.
        rows: number of rows with the padding; where the graph has a size on that axis, it is a multiple of this.
        options: how the graph is compiled.

    Data of parameters does not count as constant: it may be changed between runs.
    """
    return _of_graph(graph, _Batch(None, axes, rows), options, {})


def _of_graph(
    graph: Graph, batch: _Batch, options: CompileOptions | None, weights: Mapping[str, TensorData]
) -> RowIndependence:
    try:
        model = drafted(graph, options)
        exported, types = model.finished(), model.outline.types
    except RlxError as err:
        return RowIndependence(False, reason=f"the model cannot be exported: {err}")
    data = {name: tensor for name in exported.params if (tensor := weights.get(name)) is not None}
    return _proved(exported.model, batch, {**types}, {**data, **exported.constants})


def model_row_independence(model: onnx.ModelProto, dim: str) -> RowIndependence:
    """Return the same for a model; the types of its values are inferred."""
    return _proved(model, _Batch(dim), None, {})


def _proved(
    model: onnx.ModelProto, batch: _Batch, types: Mapping[str, ValueType] | None, data: Mapping[str, TensorData]
) -> RowIndependence:
    from onnx import inliner

    from rlx_ort.converters.protos import infer_proto

    if model.functions:
        model, types = inliner.inline_local_functions(model), None
    if types is None:
        types = infer_proto(model)
    try:
        proof = _Proof(types, batch, {entry.domain: entry.version for entry in model.opset_import}, data)
        axes = proof.of_model(model)
    except _RefusedError as err:
        return RowIndependence(False, err.node, str(err))
    return RowIndependence(True, axes=axes)


@dataclass(frozen=True)
class _Batch:
    """The rows: the named dim `dim` on the first axis of everything, or `axes` of the named inputs."""

    dim: str | None
    axes: Mapping[str, int] = field(default_factory=dict)
    rows: int = 0


class _RefusedError(Exception):
    """The proof ends."""

    node = ""


def _refuse_if(fails: object, reason: str) -> None:
    """End the proof at the node that is followed, if a condition of its rule fails."""
    if fails:
        raise _RefusedError(reason)


@dataclass(frozen=True)
class _Size:
    """A product of a whole number and symbols, such as 12 * batch * tokens."""

    number: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: _Size) -> _Size:
        return _Size(self.number * other.number, tuple(sorted(self.symbols + other.symbols)))

    def __str__(self) -> str:
        return "*".join([str(self.number), *self.symbols])

    @property
    def batched(self) -> bool:
        return any(_BATCH in symbol for symbol in self.symbols)

    @property
    def whole(self) -> int | None:
        return None if self.symbols else self.number

    def over(self, other: _Size) -> _Size | None:
        """Return the quotient, with a symbol of its own where it is not a product.

        None if rows are in the dividend of that: 3 rows of 1 element are divisible by 3 though no row is.
        """
        if other.number and not self.number % other.number:
            number, below = self.number // other.number, 1
        else:
            number, below = self.number, other.number
        mine, theirs = Counter(self.symbols), Counter(other.symbols)
        above, rest = mine - theirs, theirs - mine
        if below == 1 and not rest:
            return _Size(number, tuple(sorted(above.elements())))
        top, bottom = _Size(number, tuple(sorted(above.elements()))), _Size(below, tuple(sorted(rest.elements())))
        if top.batched or bottom.batched:
            return None
        return _Size(1, (_Quotient(top, bottom),))


class _Quotient(str):
    """The symbol of a division, rounded down unless `exact` of the proof has it."""

    top: _Size
    bottom: _Size

    def __new__(cls, top: _Size, bottom: _Size) -> _Quotient:
        """Return the symbol, which is that of each division of these two."""
        made = super().__new__(cls, f"({top}/{bottom})")
        made.top, made.bottom = top, bottom
        return made


class _AtMost(str):
    """The symbol of a size that is another one, or less, as of a slice up to it."""

    bound: _Size

    def __new__(cls, bound: _Size, number: int) -> _AtMost:
        """Return a symbol of its own."""
        made = super().__new__(cls, f"\0{number}<={bound}")
        made.bound = bound
        return made


_ONE = _Size(1)


def _product(sizes: Sequence[_Size]) -> _Size:
    return math.prod(sizes, start=_ONE)


@dataclass(frozen=True)
class _Value:
    """The proven facts of a value.

    Attributes:
        shape: its sizes, None if even the rank is open.
        axis: where the rows lie; None if the value is the same for every batch, but for sizes in `content`.
        content: the elements of small whole numbers of rank 0 or 1.
        cells: the same of a higher rank, in order, for a value without rows and independent of their number.
        data: the elements of a small constant.
        places: which columns, along the last axis, hold the row's number in the batch; (-1,) if all elements are
            that number times `stride`, plus an offset from 0 to less than `below` that is the same for all rows;
            `_ANYHOW` if they are computed from it in any other way.
        stride: how far the elements of neighbouring rows are apart, with `places`.
        below: an upper bound of elements without rows, or offsets, none of them negative; None if not known.
    """

    shape: tuple[_Size, ...] | None
    axis: int | None = None
    content: tuple[_Size | None, ...] | None = None
    data: npt.NDArray[Any] | None = None
    places: tuple[int, ...] = ()
    stride: _Size = _ONE
    below: _Size | None = None
    cells: tuple[_Size | None, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def dims(self) -> tuple[_Size, ...]:
        if self.shape is None:
            raise _RefusedError("reads a value of open rank")
        return self.shape

    @property
    def sized(self) -> bool:
        """Whether elements depend on the number of rows."""
        return any(size is not None and size.batched for size in self.content or ())

    @property
    def differs(self) -> bool:
        """Whether the value has rows, or elements that depend on their number."""
        return self.axis is not None or self.sized

    @property
    def asked(self) -> tuple[_Size, ...] | None:
        """The elements where all of them are known, as those of a shape that is asked for."""
        if self.content is None or None in self.content:
            return None
        return tuple([size for size in self.content if size is not None])

    @property
    def row_number(self) -> bool:
        """Whether all elements are the row's number itself."""
        return self.places == (-1,) and self.stride == _ONE and self.below == _ONE

    @property
    def rows(self) -> _Size:
        if self.axis is None:
            raise _RefusedError("reads a value without rows beside one with rows")
        return self.dims[self.axis]


@dataclass
class _Node:
    """A node with the proven facts of its inputs."""

    proto: Any
    version: int
    inputs: list[_Value | None]
    attributes: dict[str, Any] = field(default_factory=dict)

    def get(self, place: int) -> _Value | None:
        return self.inputs[place] if place < len(self.inputs) else None

    def need(self, place: int) -> _Value:
        value = self.get(place)
        if value is None:
            raise _RefusedError(f"has no input {place}")
        return value

    def numbers(self, place: int, attribute: str) -> list[int] | None:
        """Return whole numbers from an input or else an attribute; None if there is neither."""
        given = self.get(place)
        if given is not None:
            wholes = [None if size is None else size.whole for size in given.content or (None,)]
            if given.axis is not None or (given.content is None) or None in wholes:
                raise _RefusedError(f"its {attribute} are not constant")
            return [number for number in wholes if number is not None]
        value = self.attributes.get(attribute)
        return None if value is None else [int(each) for each in (value if isinstance(value, list) else [value])]

    def same_for_all(self, *places: int) -> None:
        """Refuse inputs that have rows or depend on their number."""
        for place in places:
            given = self.get(place)
            _refuse_if(given is not None and given.differs, f"input {place} differs between batches")


_Rule = Callable[["_Proof", _Node], "list[_Value]"]


class _Proof:
    def __init__(
        self, types: Mapping[str, ValueType], batch: _Batch, versions: Mapping[str, int], data: Mapping[str, Any]
    ) -> None:
        self.types, self.batch, self.versions, self.given = types, batch, versions, data
        self.one_batch = _Size(1, (_BATCH,))  # or the number of rows, if the model takes one number only
        self._symbols = 0
        self._exact: dict[str, _Size] = {}  # symbol -> the same as a multiple of its quotient

    @property
    def is_fixed(self) -> bool:
        """Whether the number of rows is fixed, so that sizes and values without rows may be made for it."""
        return not self.one_batch.batched

    def number(self) -> int:
        self._symbols += 1
        return self._symbols

    def unknown(self) -> _Size:
        return _Size(1, (f"\0{self.number()}",))

    def of_model(self, model: onnx.ModelProto) -> tuple[int | None, ...]:
        """Return the axis of the rows in each output.

        Raises:
            _RefusedError: the proof ends.
        """
        known: dict[str, _Value] = {}
        self._add_constants(model.graph, known)
        inputs = [value.name for value in model.graph.input if value.name not in known]
        axes = dict.fromkeys(inputs, 0) if self.batch.dim is not None else self.batch.axes
        sizes = self._row_sizes(inputs, axes)
        for name in inputs:
            kind = self.types.get(name)
            dims = kind.shape if isinstance(kind, TensorType) else None
            axis = axes.get(name)
            if dims is None:
                known[name] = _Value(None)
                continue
            shape = [
                _Size(each) if isinstance(each, int) else _Size(1, (str(each),)) if each else self.unknown()
                for each in dims
            ]
            if axis is not None and not self.is_fixed:
                shape[axis] = self.one_batch
            elif any(size in sizes for size in dims if isinstance(size, str)):
                raise _RefusedError(f"input {name!r} has the size of the rows, but no rows")
            known[name] = _Value(tuple(shape), axis)
        self._body(model.graph, known)
        outputs = [known[value.name] for value in model.graph.output]
        if self.batch.dim is not None:
            for value, result in zip(model.graph.output, outputs, strict=True):
                if result.axis != 0 or result.rows != self.one_batch or result.places:
                    raise _RefusedError(f"output {value.name!r} does not have one row for each of the inputs")
        elif numbered := next((v.name for v, r in zip(model.graph.output, outputs, strict=True) if r.sized), None):
            raise _RefusedError(f"output {numbered!r} is computed with the number of rows")
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
                raise _RefusedError(f"input {name!r} has no rows along {self.batch.dim!r} on its first axis alone")
            _refuse_if(not alone and not isinstance(size, int), f"input {name!r} has no rows on axis {axis} alone")
            sizes.add(size)
        fixed = {size for size in sizes if isinstance(size, int)}
        if fixed and (len(fixed) < len(sizes) or any(size % self.batch.rows for size in fixed)):
            raise _RefusedError("the padded inputs have other numbers of rows")
        if fixed:
            self.one_batch = _Size(self.batch.rows)
        if self.one_batch == _ONE:  # axes of size 1 may be broadcast, so one row is no batch
            raise _RefusedError("the model takes one row only")
        return sizes

    def note_exact(self, before: Sequence[_Size], after: Sequence[_Size]) -> None:
        """Note which quotients have no remainder because a reshape gives as many elements as it gets.

        A quotient rounded down times the divisor is never more than the dividend, so that all are exact if the products
        are equal.
        """
        total, exact = _product(after), dict[str, _Size]()
        for symbol in total.symbols:
            if (
                isinstance(symbol, _Quotient)
                and symbol.bottom.whole
                and symbol.top.number == len(symbol.top.symbols) == 1
            ):
                exact[symbol.top.symbols[0]] = symbol.bottom * _Size(1, (symbol,))
        if exact and self._canonical(_product(before), exact) == self._canonical(total, exact):
            self._exact.update(exact)

    def canonical(self, size: _Size) -> _Size:
        """Return a size by quotients that are known to be exact."""
        return self._canonical(size, self._exact) if self._exact else size

    @staticmethod
    def _canonical(size: _Size, exact: Mapping[str, _Size]) -> _Size:
        return math.prod([exact.get(each, _Size(1, (each,))) for each in size.symbols], start=_Size(size.number))

    def sizes(self, value: _Value) -> tuple[_Size, ...]:
        """Return the sizes of a value as elements, which name the number of rows even if it is fixed."""
        dims = list(value.dims)
        if value.axis is not None and self.is_fixed:
            dims[value.axis] = _Size(dims[value.axis].number // self.one_batch.number, (_BATCH,))
        return tuple(dims)

    def numbered(self, sizes: Sequence[_Size]) -> tuple[_Size, ...]:
        """Return sizes that a shape is made of, with the number of rows put in if it is fixed."""
        if not self.is_fixed:
            return tuple(sizes)
        return tuple([self._numbered(size) for size in sizes])

    def _numbered(self, size: _Size) -> _Size:
        rest = tuple([symbol for symbol in size.symbols if symbol != _BATCH])
        return _Size(size.number * self.one_batch.number ** (len(size.symbols) - len(rest)), rest)

    def is_rows(self, size: _Size) -> bool:
        """Return whether an axis of this size may hold a whole number of elements for each row."""
        if not self.is_fixed:
            return size.batched
        return size.whole is not None and size.whole > 0 and size.whole % self.one_batch.number == 0

    def has_rows(self, value: _Value, axis: int, rows: _Size) -> bool:
        """Return whether a value has one element along an axis for each of so many rows."""
        if value.axis is None and self.is_fixed:
            return value.shape is not None and value.rank > axis and value.dims[axis] == rows
        return value.axis == axis and value.rows == rows

    def _add_constants(self, graph: onnx.GraphProto, known: dict[str, _Value]) -> None:
        from onnx import TensorProto, numpy_helper

        for tensor in graph.initializer:
            array: Any = None
            if math.prod(tensor.dims) <= _SMALL and tensor.data_type != TensorProto.STRING:
                if tensor.name in self.given:
                    array = self.given[tensor.name].numpy()
                elif tensor.data_location != TensorProto.EXTERNAL:
                    array = numpy_helper.to_array(tensor)
            known[tensor.name] = _constant(array) if array is not None else _Value(tuple(map(_Size, tensor.dims)))
        for tensor in graph.sparse_initializer:
            known[tensor.values.name] = _Value(tuple(map(_Size, tensor.dims)))

    def _body(self, graph: onnx.GraphProto, known: dict[str, _Value]) -> None:
        for node in graph.node:
            label = f"{node.op_type} {node.name!r}" if node.name else node.op_type
            try:
                results = self._results(node, known)
            except _RefusedError as err:
                err.node = err.node or label
                raise
            except (LookupError, ValueError, TypeError, AttributeError, OverflowError, ZeroDivisionError) as err:
                refused = _RefusedError(f"does not follow its operator's rules ({type(err).__name__}: {err})")
                refused.node = label
                raise refused from err
            known.update((name, value) for name, value in zip(node.output, results, strict=False) if name)
            if missing := [name for name in node.output if name and name not in known]:
                refused = _RefusedError(f"gives {missing[0]!r}, which has no rule")
                refused.node = label
                raise refused

    def _inner_body(self, graph: onnx.GraphProto, known: dict[str, _Value]) -> None:
        """Follow a body that may not run; its conclusions about sizes hold in it only."""
        exact = dict(self._exact)
        self._add_constants(graph, known)
        self._body(graph, known)
        self._exact = exact

    def _results(self, node: Any, known: dict[str, _Value]) -> list[_Value]:
        from onnx import AttributeProto, helper

        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        inputs = [known[name] if name else None for name in node.input]
        view = _Node(node, self.versions.get(domain, 1), inputs, attributes)
        if (domain, node.op_type) in _BODIES:
            return _BODIES[domain, node.op_type](self, view, known)
        graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
        _refuse_if(any(each.type in graphs for each in node.attribute), "its body has no rule")
        rule = _RULES.get((domain, node.op_type))
        if rule is None:
            standard = domain in ("", "ai.onnx.ml") and node.op_type not in _RANDOM
            if inputs and standard and not any(each is not None and each.differs for each in inputs):
                return [self.typed(name) for name in node.output]
            raise _RefusedError("the operator has no rule")
        if view.inputs or node.op_type == "Constant":
            sized = any(each is not None and each.differs for each in inputs)
            if not sized and node.op_type not in _OF_SIZES:
                if node.op_type == "GatherElements":
                    return [_Value(view.need(1).shape)]
                shaped = all(each is None or each.shape is not None for each in inputs)
                with contextlib.suppress(_RefusedError):
                    if (domain, node.op_type) in _SHAPED and shaped:
                        return rule(self, view)
                return [self.typed(name) for name in node.output]
        if node.op_type not in _MOVES_PLACES and any(each is not None and each.places for each in inputs):
            _refuse_if(rule is not _elementwise, "computes with the row's number")
            return [replace(value, places=_ANYHOW) for value in rule(self, view)]  # its sizes may still be asked for
        if node.op_type not in _OF_SIZES and any(each is not None and each.sized for each in inputs):
            raise _RefusedError("computes with the number of rows")
        return [_flat(value) for value in rule(self, view)]

    def typed(self, name: str) -> _Value:
        """Return a value that is the same for every batch, with the declared sizes."""
        kind = self.types.get(name)
        if not isinstance(kind, TensorType) or kind.shape is None:
            return _Value(None)
        return _Value(tuple([_Size(each) if isinstance(each, int) else self.unknown() for each in kind.shape]))

    def need_rows(self, node: _Node, places: Sequence[int], axis: int, rows: _Size) -> None:
        """Refuse inputs, of those that are there, without one element along an axis for each of so many rows."""
        for place in places:
            value = node.get(place)
            if value is not None and not self.has_rows(value, axis, rows):
                raise _RefusedError(f"input {place} does not have its rows on axis {axis}")

    def rows(self, node: _Node, place: int, axis: int, rows: _Size, rank: int | None = None) -> _Value:
        """Return an output with its declared sizes and rows on an axis."""
        shape = self.typed(node.proto.output[place]).shape if place < len(node.proto.output) else None
        if rank is not None and (shape is None or len(shape) != rank):
            shape = tuple([self.unknown() for _ in range(rank)])
        if shape is None or not 0 <= axis < len(shape):
            raise _RefusedError("gives a value of open rank")
        return _Value((*shape[:axis], rows, *shape[axis + 1 :]), axis)

    def broadcast(self, values: Sequence[_Value]) -> _Value:
        """Return the result of an elementwise operator.

        Raises:
            _RefusedError: rows do not meet rows, or meet an axis of another size than 1.
        """
        rank = max(value.rank for value in values)
        axes = {value.axis + rank - value.rank for value in values if value.axis is not None}
        _refuse_if(len(axes) > 1, "rows lie on different axes")
        axis = axes.pop() if axes else None
        shape = []
        for place in range(rank):
            sizes = [value.dims[at] for value in values if (at := place - rank + value.rank) >= 0]
            wide = [size for size in dict.fromkeys(sizes) if size != _ONE]
            wide = [size for size in wide if _bound(size) not in wide]  # where they meet, it is equal or 1
            _refuse_if(place == axis and len(wide) != 1, "rows meet an axis of another size")
            numbers = [size for size in wide if size.whole is not None]
            shape.append(_ONE if not wide else wide[0] if len(wide) == 1 else (numbers or [self.unknown()])[0])
        if axis is not None and not self.is_fixed:
            for value in values:
                at = axis - rank + value.rank
                if value.axis is None and at >= 0 and value.dims[at] != _ONE:
                    raise _RefusedError("rows meet an axis of another size")
        return _Value(tuple(shape), axis)


def _bound(size: _Size) -> _Size | None:
    symbol = size.symbols[0] if size.number == len(size.symbols) == 1 else None
    return symbol.bound if isinstance(symbol, _AtMost) else None


def _flat(value: _Value) -> _Value:
    """Return a value whose content, if any, has rank 0 or 1, so that it is read in order; else it is in `cells`."""
    if value.content is None or (value.shape is not None and len(value.shape) < 2):
        return value
    _no_sizes(value)
    return replace(value, content=None, cells=value.content if value.axis is None else None)


def _grid(value: _Value) -> npt.NDArray[Any] | None:
    """Return the cells in the value's shape; None if either is not known."""
    sizes = [size.whole for size in value.shape or ()]
    known = [size for size in sizes if size is not None]
    if value.cells is None or len(known) < len(sizes) or math.prod(known) != len(value.cells):
        return None
    grid = np.empty(len(value.cells), object)
    grid[:] = value.cells
    return grid.reshape(known)


def _constant(array: npt.NDArray[Any]) -> _Value:
    content = None
    if array.dtype in (np.int32, np.int64) and array.ndim <= 1:
        content = tuple([_Size(int(each)) for each in array.reshape(-1)])
    return _Value(tuple(map(_Size, array.shape)), content=content, data=array)


def _at(axis: int, rank: int) -> int:
    _refuse_if(not -rank <= axis < rank, f"axis {axis} is none of {rank}")
    return axis % rank


def _elementwise(proof: _Proof, node: _Node) -> list[_Value]:
    result = proof.broadcast([value for value in node.inputs if value is not None])
    return [result] * len(node.proto.output)


def _first_only(proof: _Proof, node: _Node) -> list[_Value]:
    """An elementwise operator whose other inputs are settings, the same for all rows."""
    node.same_for_all(*range(1, len(node.inputs)))
    return [_Value(node.need(0).shape, node.need(0).axis)] * len(node.proto.output)


def _kept(proof: _Proof, node: _Node) -> list[_Value]:
    return [node.need(0)]


def _cast(proof: _Proof, node: _Node) -> list[_Value]:
    from onnx import TensorProto

    given = node.need(0)
    if node.attributes["to"] in (TensorProto.INT32, TensorProto.INT64):
        return [replace(given, data=None)]
    _no_sizes(given, places=True)
    return [replace(given, content=None, data=None, below=None, cells=None)]


def _equal(proof: _Proof, node: _Node) -> list[_Value]:
    """A comparison of sizes, whose result is known, or of elements."""
    one, other = node.need(0), node.need(1)
    result = _elementwise(proof, node)[0]
    if not one.sized and not other.sized and (one.content is None or other.content is None):
        return [result]
    pairs = _pairs(one, other)
    content: list[_Size | None] = []
    for left, right in pairs:
        if left is not None and left == right:
            content.append(_Size(1))
        elif left is not None and right is not None and (
            (left.whole is not None and right.whole is not None) or _is_no_size(left, right) or _is_no_size(right, left)
        ):  # fmt: skip
            content.append(_Size(0))
        elif any(size is not None and size.batched for size in (left, right)):
            raise _RefusedError("compares the number of rows")
        else:
            content.append(None)
    return [replace(result, content=tuple(content))]


def _is_no_size(left: _Size, right: _Size) -> bool:
    """Return whether one is negative and the other a product of sizes, which is not."""
    differences = any(symbol.startswith("(") and "-" in symbol for symbol in right.symbols)
    return left.whole is not None and left.whole < 0 and right.number >= 0 and not differences


def _pairs(*values: _Value) -> list[tuple[_Size | None, ...]]:
    contents = [value.content for value in values]
    if any(content is None for content in contents) or any(value.axis is not None for value in values):
        raise _RefusedError("computes with the number of rows")
    count = max(len(content or ()) for content in contents)
    return list(zip(*((c or ()) * (count if len(c or ()) == 1 else 1) for c in contents), strict=True))


def _where(proof: _Proof, node: _Node) -> list[_Value]:
    """A choice between sizes, or an elementwise operator."""
    which, one, other = node.need(0), node.need(1), node.need(2)
    result = _elementwise(proof, node)[0]
    if not any(value.sized for value in (which, one, other)) and (
        which.content is None or one.content is None or other.content is None
    ):
        return [result]
    content = []
    for choice, left, right in _pairs(which, one, other):
        if choice is None and not any(value.sized for value in (which, one, other)):
            return [result]
        if choice is None or choice.whole is None:
            raise _RefusedError("chooses between sizes by a value that is not known")
        content.append(left if choice.whole else right)
    return [replace(result, content=tuple(content))]


def _dropout(proof: _Proof, node: _Node) -> list[_Value]:
    training = node.get(2)
    if training is not None and (training.data is None or bool(training.data.any())):
        raise _RefusedError("may drop elements at random")
    return [replace(node.need(0), content=None, data=None)] * 2


def _arithmetic(proof: _Proof, node: _Node) -> list[_Value]:
    """Arithmetic on sizes, or an elementwise operator."""
    one, other = node.need(0), node.need(1)
    if one.places or other.places:
        return [_counted(proof, node.proto.op_type, one, other)]
    if one.axis is not None or other.axis is not None:
        _no_sizes(one, other)
        return _elementwise(proof, node)
    result = replace(proof.typed(node.proto.output[0]))
    if one.shape is not None and other.shape is not None:
        result = proof.broadcast([one, other])
    if one.content is None or other.content is None:
        _no_sizes(one, other)
        return [result]
    content = tuple([_computed(node.proto.op_type, left, right) for left, right in _pairs(one, other)])
    return [replace(result, content=content)]


def _counted(proof: _Proof, name: str, one: _Value, other: _Value) -> _Value:
    """Return the row's number times a size, or with an offset that is the same for all rows added."""
    number, free = (one, other) if one.places else (other, one)
    if number.places != (-1,) or number.below is None or free.axis is not None or free.sized:
        raise _RefusedError("computes with the row's number")
    result = replace(proof.broadcast([number, free]), places=number.places)
    if name == "Mul" and number.below == _ONE and free.content is not None and len(free.content) == 1:
        factor = free.content[0]
        if factor is not None and factor.number > 0:
            return replace(result, stride=number.stride * factor, below=_ONE)
    if name == "Add" and (below := _below(free)) is not None:
        if _ONE in (number.below, below):
            return replace(result, stride=number.stride, below=below if number.below == _ONE else number.below)
        if number.below.whole is not None and below.whole is not None:
            return replace(result, stride=number.stride, below=_Size(number.below.whole + below.whole - 1))
    raise _RefusedError("computes with the row's number")


def _below(value: _Value) -> _Size | None:
    """Return an upper bound of the elements of a value without rows; None if not known or some may be negative."""
    if value.data is not None and value.data.size and value.data.dtype.kind in "iu":
        return _Size(int(value.data.max()) + 1) if value.data.min() >= 0 else None
    return value.below


def _at_least(proof: _Proof, node: _Node) -> list[_Value]:
    """A comparison of the row's number with its least value, or an elementwise operator."""
    one, other = node.need(0), node.need(1)
    if (one.places or other.places) and not (
        one.row_number and other.axis is None and other.data is not None and other.data.size and other.data.max() <= 0
    ):
        raise _RefusedError("computes with the row's number")
    return _elementwise(proof, node)


def _computed(name: str, left: _Size | None, right: _Size | None) -> _Size | None:
    if left is None or right is None:
        _refuse_if(any(size is not None and size.batched for size in (left, right)), "computes with the number of rows")
        return None
    if name == "Mul":
        return left * right
    if name == "Div":
        if right == _ONE:
            return left
        exact = left.over(right) if left.number >= 0 and right.number > 0 else None
        if left.whole is not None and right.whole is not None:
            return _Size(int(left.whole / right.whole)) if right.whole else None
        _refuse_if(exact is None and (left.batched or right.batched), "divides the number of rows")
        return exact
    if left.whole is not None and right.whole is not None:
        return _Size(left.whole + right.whole if name == "Add" else left.whole - right.whole)
    if right.whole == 0:
        return left
    if left.whole == 0 and name == "Add":
        return right
    _refuse_if(left.batched or right.batched, "adds to the number of rows")
    return _Size(1, (f"({left}{'+' if name == 'Add' else '-'}{right})",))


def _shape(proof: _Proof, node: _Node) -> list[_Value]:
    sizes = proof.sizes(node.need(0))[node.attributes.get("start", 0) : node.attributes.get("end")]
    return [_Value((_Size(len(sizes)),), content=sizes)]


def _size(proof: _Proof, node: _Node) -> list[_Value]:
    return [_Value((), content=(_product(proof.sizes(node.need(0))),))]


def _constant_node(proof: _Proof, node: _Node) -> list[_Value]:
    from onnx import numpy_helper

    value = node.attributes.get("value")
    if value is not None and math.prod(value.dims) <= _SMALL and not value.external_data:
        return [_constant(numpy_helper.to_array(value))]
    for name in ("value_int", "value_ints"):
        if name in node.attributes:
            return [_constant(np.array(node.attributes[name], np.int64))]
    return [proof.typed(node.proto.output[0])]


def _reshape(proof: _Proof, node: _Node) -> list[_Value]:
    given, target = node.need(0), node.need(1)
    _refuse_if(target.axis is not None, "the new shape differs between rows")
    if given.axis is None and not target.sized:
        result = proof.typed(node.proto.output[0])
        if target.content is not None and all(s is not None and s.whole not in (0, -1) for s in target.content):
            result = replace(result, shape=tuple([size for size in target.content if size is not None]))
        return [_moved(given, replace(result, content=given.cells if given.content is None else given.content))]
    asked = target.asked
    if asked is None:
        raise _RefusedError("the new shape is not known")
    sizes = list(proof.numbered(asked))
    if not node.attributes.get("allowzero", 0):
        sizes = [given.dims[place] if size.whole == 0 else size for place, size in enumerate(sizes)]
    if (open_at := next((at for at, size in enumerate(sizes) if size.whole == -1), None)) is not None:
        rest = _product([size for at, size in enumerate(sizes) if at != open_at])
        count = proof.canonical(_product(given.dims)).over(proof.canonical(rest))
        if count is None:
            raise _RefusedError("the rows do not follow from the new shape")
        sizes[open_at] = count
    else:
        proof.note_exact(given.dims, sizes)
    result = _reshaped(proof, given, sizes)
    if any(size.batched and at != result.axis for at, size in enumerate(asked)):
        raise _RefusedError("gives another axis as many elements as there are rows")
    return [result]


def _reshaped(proof: _Proof, given: _Value, sizes: Sequence[_Size]) -> _Value:
    """Return the value with new sizes, on whose axis of rows the rows come first."""
    _refuse_if(given.axis is None, "a value without rows is given as many as there are")
    before = _product(given.dims[: given.axis])
    axes = [at for at, size in enumerate(sizes) if proof.is_rows(size)]
    if proof.is_fixed:  # other sizes may be multiples of the number of rows by chance
        axes = [at for at in axes if _product(sizes[:at]) == before][:1]
    _refuse_if(len(axes) != 1 or _product(sizes[: axes[0]]) != before, "rows are mixed with another axis")
    return _moved(given, _Value(tuple(sizes), axes[0]))


def _no_sizes(*values: _Value, places: bool = False) -> None:
    _refuse_if(any(value.sized or (places and value.places) for value in values), "computes with the number of rows")


def _no_places(value: _Value) -> None:
    _refuse_if(value.places, "computes with the row's number")


def _moved(given: _Value, result: _Value) -> _Value:
    """Return the result of an operator that moves or repeats elements, with their proven facts."""
    if given.places != (-1,):
        _no_places(given)
    if not given.places and result.axis is not None:
        return result
    return replace(result, places=given.places, stride=given.stride, below=given.below)


def _flatten(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    axis = node.attributes.get("axis", 1)
    axis = axis + given.rank if axis < 0 else axis
    return [_reshaped(proof, given, [_product(given.dims[:axis]), _product(given.dims[axis:])])]


def _transpose(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    if given.axis is None:
        _no_sizes(given)
        result, grid = proof.typed(node.proto.output[0]), _grid(given)
        if grid is None:
            return [result]
        turned = grid.transpose(node.attributes.get("perm"))
        return [_Value(tuple(map(_Size, turned.shape)), content=tuple(turned.reshape(-1)))]
    order = node.attributes.get("perm") or list(range(given.rank))[::-1]
    axis = None if given.axis is None else order.index(given.axis)
    return [_moved(given, _Value(tuple([given.dims[at] for at in order]), axis))]


def _unsqueeze(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    axes = node.numbers(1, "axes") or []
    rank = given.rank + len(axes)
    new = {_at(axis, rank) for axis in axes}
    sizes = iter(enumerate(given.dims))
    shape, at_axis = list[_Size](), None
    for place in range(rank):
        if place in new:
            shape.append(_ONE)
            continue
        at, size = next(sizes)
        at_axis = place if at == given.axis else at_axis
        shape.append(size)
    return [_moved(given, _Value(tuple(shape), at_axis, given.content, given.data))]


def _squeeze(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    axes = node.numbers(1, "axes")
    if axes is None:
        _refuse_if(given.axis is not None, "drops an axis of rows if there is one row")
        return [replace(proof.typed(node.proto.output[0]), content=given.content)]
    gone = {_at(axis, given.rank) for axis in axes}
    _refuse_if(given.axis in gone, "drops the axis of rows")
    shape = [size for at, size in enumerate(given.dims) if at not in gone]
    axis = None if given.axis is None else given.axis - sum(at < given.axis for at in gone)
    return [_moved(given, _Value(tuple(shape), axis, given.content, given.data))]


def _expand(proof: _Proof, node: _Node) -> list[_Value]:
    given, target = node.need(0), node.need(1)
    _no_sizes(given)
    sizes = target.asked
    _refuse_if(target.axis is not None or (given.axis is not None and sizes is None), "the new shape is not known")
    if sizes is None:
        return [proof.typed(node.proto.output[0])]
    axes = [at for at, size in enumerate(sizes) if size.batched]
    _refuse_if(len(axes) > 1, "repeats values along two axes, as often as there are rows")
    return [_moved(given, proof.broadcast([given, _Value(proof.numbered(sizes), axes[0] if axes else None)]))]


def _constant_of_shape(proof: _Proof, node: _Node) -> list[_Value]:
    target = node.need(0)
    _refuse_if(target.axis is not None, "the new shape differs between rows")
    sizes = target.asked
    if sizes is None:
        return [proof.typed(node.proto.output[0])]
    axes = [at for at, size in enumerate(sizes) if size.batched]
    _refuse_if(len(axes) > 1, "makes two axes of rows")
    value = node.attributes.get("value")
    content = None
    if not axes and len(sizes) == 1 and sizes[0].whole is not None and sizes[0].whole <= _SMALL and value is not None:
        from onnx import numpy_helper

        array = numpy_helper.to_array(value).reshape(-1)
        content = (_Size(int(array[0])),) * sizes[0].whole if array.dtype.kind in "iu" else None
    return [_Value(proof.numbered(sizes), axes[0] if axes else None, content)]


def _range(proof: _Proof, node: _Node) -> list[_Value]:
    contents = [value.content or (None,) for value in (node.need(0), node.need(1), node.need(2))]
    start, end, step = (content[0] for content in contents)
    if end is not None and end.batched:
        _refuse_if(start != _Size(0) or step != _ONE or end != _Size(1, (_BATCH,)), "counts over the number of rows")
        return [_Value(proof.numbered([end]), 0, places=(-1,), below=_ONE)]
    if any(node.need(place).sized or node.need(place).axis is not None for place in range(3)):
        raise _RefusedError("counts over the number of rows")
    size = end if start == _Size(0) and step == _ONE and end is not None else proof.unknown()
    whole = (None if start is None else start.whole, None if step is None else step.whole)
    rises = whole[0] is not None and whole[1] is not None and whole[0] >= 0 and whole[1] > 0
    return [_Value((size,), below=end if rises else None)]


def _tile(proof: _Proof, node: _Node) -> list[_Value]:
    given, times = node.need(0), node.need(1)
    _no_sizes(given)
    _refuse_if(times.axis is not None, "the repeats differ between rows")
    repeats = times.asked
    if repeats is None:
        _refuse_if(given.axis is not None, "the repeats are not known")
        return [proof.typed(node.proto.output[0])]
    axes = [at for at, size in enumerate(repeats) if size.batched]
    _refuse_if(given.axis is not None and (axes or repeats[given.axis] != _ONE), "repeats the rows")
    _refuse_if(len(axes) > 1, "makes two axes of rows")
    shape = tuple([size * count for size, count in zip(given.dims, proof.numbered(repeats), strict=True)])
    return [_Value(shape, axes[0] if axes else given.axis)]


def _concat(proof: _Proof, node: _Node) -> list[_Value]:
    values = [value for value in node.inputs if value is not None]
    axes = {value.axis for value in values}
    if axes == {None}:
        result = proof.typed(node.proto.output[0])
        if all(value.content is not None for value in values):
            content = tuple([size for value in values for size in value.content or ()])
            return [_Value((_Size(len(content)),), content=content)]
        _refuse_if(any(value.sized for value in values), "joins the number of rows with values that are not known")
        parts = [_elements(value) for value in values]
        if all(part is not None for part in parts):
            return [replace(result, content=tuple([size for part in parts for size in part or ()]))]
        return [result]
    first = next(value for value in values if value.axis is not None)
    if any(not proof.has_rows(value, first.axis or 0, first.rows) for value in values):
        raise _RefusedError("joins values with rows and values without, or with rows on other axes")
    axis = _at(node.attributes["axis"], first.rank)
    _refuse_if(axis == first.axis, "joins along the axis of rows")
    total = [value.dims[axis].whole for value in values]
    size = proof.unknown() if None in total else _Size(sum(each for each in total if each is not None))
    shape = (*first.dims[:axis], size, *first.dims[axis + 1 :])
    places: tuple[int, ...] = ()
    if any(value.places for value in values):
        if axis != first.rank - 1 or any(
            value.dims[axis] != _ONE or (value.places and not value.row_number) for value in values
        ):
            raise _RefusedError("computes with the row's number")
        places = tuple([at for at, value in enumerate(values) if value.places])
    return [_Value(shape, first.axis, places=places)]


def _elements(value: _Value) -> tuple[_Size | None, ...] | None:
    """Return the elements of a small value of rank 1, each None if not known; None if their number is not."""
    if value.content is not None:
        return value.content
    count = value.shape[0].whole if value.shape is not None and len(value.shape) == 1 else None
    return None if count is None or count > _SMALL else (None,) * count


def _split(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    node.same_for_all(1)
    if given.axis is None:
        _refuse_if(given.sized, "splits a shape")
        return [proof.typed(name) for name in node.proto.output]
    axis = _at(node.attributes.get("axis", 0), given.rank)
    _refuse_if(axis == given.axis, "splits the axis of rows")
    parts = [proof.rows(node, at, given.axis, given.rows, given.rank).dims for at in range(len(node.proto.output))]
    return [_Value((*given.dims[:axis], part[axis], *given.dims[axis + 1 :]), given.axis) for part in parts]


def _sliced(node: _Node, given: _Value) -> npt.NDArray[Any] | None:
    """Return the cells that a slice takes from a value without rows; None if they are not known."""
    grid = _grid(given)
    if grid is None:
        return None
    try:
        starts, ends = node.numbers(1, "starts") or [], node.numbers(2, "ends") or []
        axes, steps = node.numbers(3, "axes") or list(range(len(starts))), node.numbers(4, "steps") or [1] * len(starts)
    except _RefusedError:
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = _at(axis, grid.ndim)
        if step < 0 and start < -grid.shape[place]:  # ONNX starts at the first element, Python takes none
            return None
        grid = grid[(slice(None),) * place + (slice(start, end, step),)]
    return grid


def _slice(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    starts, ends = node.get(1), node.get(2)
    if given.content is not None and given.axis is None:
        try:
            start, end = node.numbers(1, "starts"), node.numbers(2, "ends")
            step = node.numbers(4, "steps") or [1]
        except _RefusedError:
            if given.sized:
                raise
            return [proof.typed(node.proto.output[0])]
        assert start is not None and end is not None  # noqa: S101, PT018  # the operator has both
        if step[0] < 0 and start[0] < -len(given.content):  # ONNX starts at the first element, Python takes none
            raise _RefusedError("starts before the first size")
        content = given.content[start[0] : end[0] : step[0]]
        return [_Value((_Size(len(content)),), content=content)]
    if given.axis is None:
        for value in (starts, ends):
            _refuse_if(value is not None and value.differs, "cuts a value without rows as many rows as there are")
        if (cells := _sliced(node, given)) is not None:
            return [_Value(tuple(map(_Size, cells.shape)), content=tuple(cells.reshape(-1)))]
        result = proof.typed(node.proto.output[0])
        cut = node.get(3)
        if given.shape is None or result.shape is None or cut is None or cut.content is None:
            return [result]
        axes = [_at(axis, given.rank) for axis in node.numbers(3, "axes") or []]
        dims = [result.dims[at] if at in axes else size for at, size in enumerate(given.dims)]
        by = node.get(4)
        if starts is not None and ends is not None and (by is None or by.content == (_ONE,) * len(axes)):
            for at, first, last in zip(axes, starts.content or (), ends.content or (), strict=False):
                if first == _Size(0) and last is not None and last.symbols and _is_no_size(_Size(-1), last):
                    dims[at] = _Size(1, (_AtMost(last, proof.number()),))
        return [_Value(tuple(dims))]
    named = node.numbers(3, "axes")
    count = len(starts.content or ()) if starts is not None else len(node.attributes["starts"])
    axes = [_at(axis, given.rank) for axis in (list(range(count)) if named is None else named)]
    steps = node.numbers(4, "steps") or [1] * len(axes)
    for at, axis in enumerate(axes):
        begin, end_size = (
            (value.content[at] if value is not None and value.content is not None and value.axis is None else None)
            if value is not None
            else _Size(node.attributes[name][at])
            for value, name in ((starts, "starts"), (ends, "ends"))
        )
        if axis == given.axis:
            whole = (
                end_size == proof.sizes(given)[axis]
                or end_size == given.rows
                or (end_size is not None and (end_size.whole or 0) >= _END - 1)
            )
            _refuse_if(begin != _Size(0) or not whole or steps[at] != 1, "takes some of the rows")
        elif any(size is not None and size.batched for size in (begin, end_size)):
            raise _RefusedError("computes with the number of rows")
    for value in (starts, ends):
        _refuse_if(value is not None and value.axis is not None, "takes other elements of each row")
    result = proof.rows(node, 0, given.axis, given.rows, given.rank)
    kept = [size if at not in axes else result.dims[at] for at, size in enumerate(given.dims)]
    kept[given.axis] = given.rows
    return [_Value(tuple(kept), given.axis)]


def _gather(proof: _Proof, node: _Node) -> list[_Value]:
    given, index = node.need(0), node.need(1)
    _no_places(given)
    _refuse_if(index.sized or (given.sized and index.axis is not None), "computes with the number of rows")
    if given.content is not None and index.axis is None and given.axis is None:
        if index.content is None or any(each is None or each.whole is None for each in index.content):
            _refuse_if(given.sized, "takes an unknown size")
            return [proof.typed(node.proto.output[0])]
        content = tuple([given.content[int(each.whole)] for each in index.content if each and each.whole is not None])
        return [_Value(index.shape, content=content)]
    if given.shape is None or index.shape is None:
        if given.axis is None and index.axis is None:
            return [proof.typed(node.proto.output[0])]
        raise _RefusedError("reads a value of open rank")
    axis = _at(node.attributes.get("axis", 0), given.rank)
    shape = (*given.dims[:axis], *index.dims, *given.dims[axis + 1 :])
    if index.places:
        assert index.axis is not None  # noqa: S101  # rows have numbers where there are rows
        _refuse_if(not _in_own_row(proof, given, axis, index), "takes rows by number")
        return [_Value(shape, axis + index.axis)]
    if given.axis is None:
        return [_Value(shape, None if index.axis is None else axis + index.axis)]
    _refuse_if(index.axis is not None or given.axis == axis, "takes rows by number")
    return [_Value(shape, given.axis if given.axis < axis else given.axis + index.rank - 1)]


def _in_own_row(proof: _Proof, given: _Value, axis: int, index: _Value) -> bool:
    """Return whether each row's index lies in its own part of the axis of rows, of as many elements as the stride."""
    stride, below = index.stride, index.below
    if given.axis != axis or index.places != (-1,) or given.rows != proof.one_batch * stride or below is None:
        return False
    if below in (_ONE, stride):
        return True
    return below.whole is not None and stride.whole is not None and below.whole <= stride.whole


def _gather_elements(proof: _Proof, node: _Node) -> list[_Value]:
    values = [value for value in node.inputs if value is not None]
    first = values[0]
    axis = _at(node.attributes.get("axis", 0), first.rank)
    rows = next(value for value in values if value.axis is not None)
    _refuse_if(rows.axis == axis, "takes elements along the axis of rows")
    if any(not proof.has_rows(value, rows.axis or 0, rows.rows) for value in values):
        raise _RefusedError("rows lie on different axes")
    shaped = first if node.proto.op_type == "ScatterElements" else values[1]
    return [_Value(shaped.shape, rows.axis)]


def _gather_nd(proof: _Proof, node: _Node) -> list[_Value]:
    given, index, batch = node.need(0), node.need(1), node.attributes.get("batch_dims", 0)
    depth = index.dims[-1].whole
    _no_places(given)
    if index.axis is None or index.axis == index.rank - 1 or depth is None:
        raise _RefusedError("takes elements by number, the same for all rows")
    shape = (*index.dims[:-1], *given.dims[batch + depth :])
    if given.axis is None:
        _refuse_if(batch or index.places, "takes elements of a value without rows by the row's number")
    elif batch:
        if index.places or given.axis != index.axis or given.axis >= batch or given.rows != index.rows:
            raise _RefusedError("takes elements of other rows")
    elif index.places != (given.axis,) or given.rows != proof.one_batch or index.rows != given.rows:
        raise _RefusedError("takes elements of other rows")
    return [_Value(shape, index.axis)]


def _pad(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    node.same_for_all(1, 2, 3)
    assert given.axis is not None  # noqa: S101  # nothing else has rows
    amounts = node.get(1)
    pads = amounts.content if amounts is not None else tuple(map(_Size, node.attributes["pads"]))
    if pads is None:
        raise _RefusedError("its pads are not known")
    axes = node.numbers(3, "axes")
    places = [_at(axis, given.rank) for axis in (range(given.rank) if axes is None else axes)]
    if given.axis in places:
        at = places.index(given.axis)
        _refuse_if(pads[at] != _Size(0) or pads[at + len(places)] != _Size(0), "may add rows")
    result = proof.rows(node, 0, given.axis, given.rows, given.rank)
    same = {axis for axis in range(given.rank) if axis not in places}
    same |= {axis for at, axis in enumerate(places) if pads[at] == _Size(0) == pads[at + len(places)]}
    kept = [given.dims[axis] if axis in same else size for axis, size in enumerate(result.dims)]
    return [_Value(tuple(kept), given.axis)]


def _reduced(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    if node.proto.op_type in ("ArgMax", "ArgMin"):
        axes: list[int] | None = [node.attributes.get("axis", 0)]
    else:
        node.same_for_all(1)
        axes = node.numbers(1, "axes")
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        return [_Value(given.shape, given.axis)]
    gone = {_at(axis, given.rank) for axis in axes} if axes else set(range(given.rank))
    _refuse_if(given.axis in gone, "reduces over the rows")
    keeps = node.attributes.get("keepdims", 1)
    shape = [_ONE if at in gone else size for at, size in enumerate(given.dims) if keeps or at not in gone]
    if given.axis is None or keeps:
        return [_Value(tuple(shape), given.axis)]
    return [_Value(tuple(shape), given.axis - sum(at < given.axis for at in gone))]


def _along(default: int, *, after: bool = False, place: int | None = None) -> _Rule:
    """Return the rule of an operator that mixes elements along an axis, or from it on."""

    def rule(proof: _Proof, node: _Node) -> list[_Value]:
        given = node.need(0)
        node.same_for_all(*range(1, len(node.inputs)))
        if given.axis is None:
            return [_Value(given.shape) if at == 0 else proof.typed(name) for at, name in enumerate(node.proto.output)]
        first = default
        flat = node.proto.op_type in ("Softmax", "LogSoftmax", "Hardmax") and node.version < 13
        if flat:
            first = 1
        number = node.attributes.get("axis", first)
        if place is not None:
            numbers = node.numbers(place, "axis")
            number = numbers[0] if numbers else first
        axis = _at(number, given.rank)
        _refuse_if(given.axis == axis or ((after or flat) and given.axis > axis), "mixes the rows along their axis")
        if node.proto.op_type == "TopK":
            return [proof.rows(node, at, given.axis, given.rows, given.rank) for at in range(2)]
        outputs = [replace(given, content=None)]
        for _ in range(1, len(node.proto.output)):
            outputs.append(_Value((*given.dims[:axis], *[_ONE] * (given.rank - axis)), given.axis))
        return outputs

    return rule


def _by_row(*with_rows: int, rank: int = 1) -> _Rule:
    """Return the rule of an operator that takes rows on the first axis of some inputs, and gives them there."""

    def rule(proof: _Proof, node: _Node) -> list[_Value]:
        first, places = node.need(0), (0, *with_rows)
        node.same_for_all(*(at for at in range(len(node.inputs)) if at not in places))
        if any(value is not None and value.rank < rank for value in map(node.get, places)):
            raise _RefusedError(f"its inputs have less than {rank} axes")
        proof.need_rows(node, places, 0, first.rows)
        ranks = [first.rank] + [None] * (len(node.proto.output) - 1)
        return [proof.rows(node, at, 0, first.rows, each) for at, each in enumerate(ranks)]

    return rule


def _scored(*names: str) -> _Rule:
    """Return the rule of a model of ai.onnx.ml that gives each row scores, as many as an attribute says, or has.

    A classifier gives a label before; its number of scores is not followed.
    """

    def rule(proof: _Proof, node: _Node) -> list[_Value]:
        given = node.need(0)
        node.same_for_all(*range(1, len(node.inputs)))
        _refuse_if(given.axis != 0 or given.rank != 2, "input 0 does not have its rows on axis 0")
        counts = [node.attributes[name] for name in names if name in node.attributes]
        count = _Size(int(counts[0])) if counts else proof.unknown()
        scores = _Value((given.rows, count), 0)
        return [scores] if len(node.proto.output) == 1 and names else [_Value((given.rows,), 0), scores]

    return rule


def _features(proof: _Proof, node: _Node) -> list[_Value]:
    """An operator of ai.onnx.ml that gives each row as many elements as it gets."""
    given = node.need(0)
    _refuse_if(given.axis != 0 or given.rank != 2, "input 0 does not have its rows on axis 0")
    return [_Value(given.shape, 0)]


def _compress(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    node.same_for_all(1)
    axis = node.attributes.get("axis")
    if given.axis is None or axis is None or _at(axis, given.rank) == given.axis:
        raise _RefusedError("takes some of the rows")
    place = _at(axis, given.rank)
    return [_Value((*given.dims[:place], proof.unknown(), *given.dims[place + 1 :]), given.axis)]


def _max_pool(proof: _Proof, node: _Node) -> list[_Value]:
    _refuse_if(len([name for name in node.proto.output if name]) > 1, "its indices count over all rows")
    return _by_row(rank=2)(proof, node)


def _one_hot_encoded(proof: _Proof, node: _Node) -> list[_Value]:
    """OneHotEncoder of ai.onnx.ml, which adds an axis of categories."""
    given = node.need(0)
    _refuse_if(given.axis is None, "computes with the number of rows")
    return [_Value((*given.dims, proof.unknown()), given.axis)]


def _normalised_mean(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    if given.axis in [_at(axis, given.rank) for axis in node.attributes.get("axes", (0, 2, 3))]:
        raise _RefusedError("takes mean and variance over the rows")
    return [_Value(given.shape, given.axis)]


def _vectors(proof: _Proof, node: _Node) -> list[_Value]:
    """An operator of one vector for each row, made from one or several inputs of a vector for each row."""
    first = node.need(0)
    for value in node.inputs:
        if value is None or value.axis != 0 or value.rank != 2 or value.rows != first.rows:
            raise _RefusedError("an input does not have its rows on axis 0")
    return [_Value((first.rows, proof.unknown()), 0)]


def _quantised_pair(proof: _Proof, node: _Node) -> list[_Value]:
    """QLinearAdd and QLinearMul: each operand with scale and zero point, then those of the result."""
    node.same_for_all(1, 2, 4, 5, 6, 7)
    return [proof.broadcast([node.need(0), node.need(3)])]


def _rotary_by_offset(proof: _Proof, node: _Node) -> list[_Value]:
    """RotaryEmbedding of com.microsoft: data, the first position or those of each row, cosines and sines."""
    first, positions = node.need(0), node.need(1)
    node.same_for_all(2, 3)
    _refuse_if(node.attributes.get("is_packed_batching", 0), "packs the rows")
    if first.axis != 0 or (positions.axis is not None and not proof.has_rows(positions, 0, first.rows)):
        raise _RefusedError("data or positions do not have their rows on axis 0")
    return [_Value(first.shape, 0)]


def _extracted(proof: _Proof, node: _Node) -> list[_Value]:
    """ArrayFeatureExtractor, which takes elements along the last axis."""
    given, index = node.need(0), node.need(1)
    if given.axis is None and index.axis is not None and _product(index.dims[: index.axis]) == _ONE:
        shape = (*(given.dims[:-1] or (_ONE,)), _product(index.dims))
        return [_Value(shape, len(shape) - 1)]
    if given.axis is None or index.axis is not None or given.axis == given.rank - 1:
        raise _RefusedError("takes elements along the axis of rows")
    return [_Value((*given.dims[:-1], proof.unknown()), given.axis)]


def _batch_norm(proof: _Proof, node: _Node) -> list[_Value]:
    if node.attributes.get("training_mode", 0) or len([name for name in node.proto.output if name]) > 1:
        raise _RefusedError("takes mean and variance over the rows")
    return _by_row()(proof, node)


def _resize(proof: _Proof, node: _Node) -> list[_Value]:
    given, scales, sizes = node.need(0), node.get(2 if node.version > 10 else 1), node.get(3)
    if given.axis is None:
        node.same_for_all(*range(len(node.inputs)))
        return [proof.typed(node.proto.output[0])]
    node.same_for_all(1, 2)
    _refuse_if(sizes is not None and sizes.axis is not None, "gives rows other sizes")
    axes = node.attributes.get("axes")
    places = [_at(axis, given.rank) for axis in (range(given.rank) if axes is None else axes)]
    if sizes is not None and sizes.sized:
        counts = [size is not None and size.batched for size in sizes.content or ()]
        if any(count for count, place in zip(counts, places, strict=True) if place != given.axis):
            raise _RefusedError("gives another axis as many elements as there are rows")
    if given.axis in places:
        at = places.index(given.axis)
        same = (given.rows, proof.sizes(given)[given.axis])
        kept = sizes is not None and sizes.content is not None and sizes.content[at] in same
        if kept and node.attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            raise _RefusedError("keeps the ratio of the sizes")
        kept = kept or (
            scales is not None and scales.data is not None and scales.data.size > at and scales.data[at] == 1
        )
        _refuse_if(not kept, "may change the number of rows")
    if node.attributes.get("mode", b"nearest") != b"nearest" and (given.axis != 0 or given.rank < 4):
        raise _RefusedError("interpolates along the rows, where a weight of 0 lets NaN through")
    _refuse_if(node.attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize", "crops along all axes")
    return [proof.rows(node, 0, given.axis, given.rows, given.rank)]


def _matmul(proof: _Proof, node: _Node) -> list[_Value]:
    name = node.proto.op_type
    left, right = 0, 1
    if name == "QLinearMatMul":
        left, right = 0, 3
    node.same_for_all(*(at for at in range(len(node.inputs)) if at not in (left, right)))
    one, other = node.need(left), node.need(right)
    if name == "FusedMatMul" and any(node.attributes.get(each) for each in ("transA", "transBatchA", "transBatchB")):
        raise _RefusedError("transposes in a product")
    if name == "FusedMatMul" and node.attributes.get("transB"):
        swapped = {None: None, other.rank - 1: other.rank - 2, other.rank - 2: other.rank - 1}
        other = replace(
            other,
            shape=(*other.dims[:-2], other.dims[-1], other.dims[-2]),
            axis=swapped.get(other.axis, other.axis),
        )
    return [_product_of(proof, one, other)]


def _product_of(proof: _Proof, one: _Value, other: _Value) -> _Value:
    if one.axis == one.rank - 1 or (other.axis is not None and other.axis == max(other.rank - 2, 0)):
        raise _RefusedError("sums over the rows")
    if one.rank == 1 or other.rank == 1:
        if one.axis is not None and other.axis is None:
            return _Value(one.dims[:-1], one.axis)
        if one.rank == 1 and other.axis is not None:
            axis = other.axis if other.axis < other.rank - 2 else other.axis - 1
            return _Value((*other.dims[:-2], other.dims[-1]), axis)
        raise _RefusedError("multiplies vectors")
    inside = (one.axis == one.rank - 2, other.axis == other.rank - 1)
    _refuse_if(any(inside) and one.axis is not None and other.axis is not None, "multiplies rows with rows")
    stacks = [
        _Value(value.dims[:-2], None if within else value.axis)
        for value, within in zip((one, other), inside, strict=True)
    ]
    stack = proof.broadcast(stacks)
    shape = (*stack.dims, one.dims[-2], other.dims[-1])
    return _Value(shape, len(shape) - 2 if inside[0] else len(shape) - 1 if inside[1] else stack.axis)


def _gemm(proof: _Proof, node: _Node) -> list[_Value]:
    one, other, bias = node.need(0), node.need(1), node.get(2)
    if other.axis is not None or one.axis != (1 if node.attributes.get("transA") else 0):
        raise _RefusedError("does not have its rows on the rows of A")
    width = other.dims[0 if node.attributes.get("transB") else 1]
    product = _Value((one.rows, width), 0)
    return [product if bias is None else replace(proof.broadcast([product, bias]), axis=0)]


def _recurrent(proof: _Proof, node: _Node) -> list[_Value]:
    first, layout = node.need(0), node.attributes.get("layout", 0)
    axis = 0 if layout else 1
    node.same_for_all(1, 2, 3, 7)
    proof.need_rows(node, (4,), 0, first.rows)
    proof.need_rows(node, (0, 5, 6), axis, first.rows)
    return [proof.rows(node, 0, 0 if layout else 2, first.rows, 4)] + [
        proof.rows(node, at, axis, first.rows, 3) for at in (1, 2)
    ]


def _quantised(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    node.same_for_all(1, 2)
    if given.axis is None:
        return [_Value(given.shape)]
    _refuse_if(node.need(1).rank > 1, "has scales in blocks")
    per_axis = node.need(1).rank == 1 and node.need(1).dims != (_ONE,)
    _refuse_if(per_axis and _at(node.attributes.get("axis", 1), given.rank) == given.axis, "has a scale for each row")
    return [replace(given, content=None)]


def _dynamic_scale(proof: _Proof, node: _Node) -> list[_Value]:
    raise _RefusedError("takes one scale for all rows")


def _one_hot(proof: _Proof, node: _Node) -> list[_Value]:
    index = node.need(0)
    node.same_for_all(1, 2)
    if index.axis is None:
        raise _RefusedError("computes with the number of rows")
    place = _at(node.attributes.get("axis", -1), index.rank + 1)
    shape = (*index.dims[:place], proof.unknown(), *index.dims[place:])
    return [_Value(shape, index.axis + (place <= index.axis))]


def _trilu(proof: _Proof, node: _Node) -> list[_Value]:
    given = node.need(0)
    node.same_for_all(1)
    _refuse_if(given.axis is None or given.axis >= given.rank - 2, "the rows are on an axis of the triangle")
    return [given]


def _einsum(proof: _Proof, node: _Node) -> list[_Value]:
    reads, arrow, writes = node.attributes["equation"].decode().replace(" ", "").partition("->")
    values = [value for value in node.inputs if value is not None]
    operands = [
        _subscripts(letters, value.rank) for letters, value in zip(reads.split(","), values, strict=True)
    ]  # fmt: skip
    if not arrow:
        count = Counter(label for labels in operands for label in labels)
        named = sorted(label for label, times in count.items() if times == 1 and label.isalpha())
        result = [*sorted((label for label in count if not label.isalpha()), key=int), *named]
    else:
        pairs = zip(operands, reads.split(","), strict=True)
        dots = max((len(labels) - len(text) + 3 for labels, text in pairs if "..." in text), default=0)
        result = _subscripts(writes, len(writes) - 3 + dots if "..." in writes else len(writes))
    rows_on = {labels[value.axis] for labels, value in zip(operands, values, strict=True) if value.axis is not None}
    rows = {value.rows for value in values if value.axis is not None}
    if len(rows_on) != 1 or result.count(label := rows_on.pop()) != 1:
        raise _RefusedError("sums over the rows")
    for labels, value in zip(operands, values, strict=True):
        alone = value.axis is None and all(value.dims[at] == _ONE for at, each in enumerate(labels) if each == label)
        if len(rows) > 1 or (value.axis is None and not alone) or (value.axis is not None and labels.count(label) > 1):
            raise _RefusedError("rows meet an axis of another size")
    sizes: dict[str, _Size] = {}
    for labels, value in zip(operands, values, strict=True):
        sizes.update(
            (each, size) for each, size in zip(labels, value.dims, strict=True) if size != _ONE or each not in sizes
        )
    sizes[label] = rows.pop()
    return [_Value(tuple([sizes[each] for each in result]), result.index(label))]


def _subscripts(text: str, rank: int) -> list[str]:
    """Return a label for each axis; those of an ellipsis are numbers, -1 the last of them."""
    before, dots, after = text.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    labels = [*before, *map(str, range(-hidden, 0)), *after]
    _refuse_if(len(labels) != rank, "its equation has other axes than its inputs")
    return labels


def _attending(
    *with_rows: int, bias: int, rank: int | None = None, refused: Callable[[_Node], str] = lambda _: ""
) -> _Rule:
    """Return the rule of an attention, which has its rows first in some inputs and in all outputs.

    The input `bias`, or a mask, is added to the scores. `rank` is that of the first output, if not that of input 0;
    the others are keys and values, of rank 4. `refused` returns why a form of the node is not proved.
    """

    def rule(proof: _Proof, node: _Node) -> list[_Value]:
        first = node.need(0)
        node.same_for_all(*(at for at in range(len(node.inputs)) if at not in (0, bias, *with_rows)))
        proof.need_rows(node, (0, *with_rows), 0, first.rows)
        if reason := refused(node):
            raise _RefusedError(reason)
        if (added := node.get(bias)) is not None:
            proof.broadcast([_Value((first.rows, proof.unknown(), proof.unknown(), proof.unknown()), 0), added])
        ranks = [rank or first.rank] + [4] * (len(node.proto.output) - 1)
        return [proof.rows(node, at, 0, first.rows, each) for at, each in enumerate(ranks)]

    return rule


def _packs_states(node: _Node) -> str:
    with_states = node.get(4) is not None or len([name for name in node.proto.output if name]) > 1
    return "keeps keys and values in one tensor, with the rows inside" if with_states else ""


def _rotary(proof: _Proof, node: _Node) -> list[_Value]:
    """RotaryEmbedding of ONNX: data, cosines, sines and positions; with positions the tables are the same for all."""
    first = node.need(0)
    _refuse_if(first.axis != 0, "input 0 does not have its rows on axis 0")
    with_rows = (3,) if node.get(3) is not None else (1, 2)
    node.same_for_all(*(at for at in (1, 2, 3) if at not in with_rows))
    proof.need_rows(node, with_rows, 0, first.rows)
    return [replace(first, content=None)]


def _skip_norm(proof: _Proof, node: _Node) -> list[_Value]:
    node.same_for_all(*range(2, len(node.inputs)))
    total = proof.broadcast([node.need(0), node.need(1)])
    _refuse_if(total.axis is None or total.axis == total.rank - 1, "mixes the rows along their axis")
    few = _Value((*total.dims[:-1], _ONE), total.axis)
    return [total, few, few, total]


def _if(proof: _Proof, node: _Node, known: dict[str, _Value]) -> list[_Value]:
    """Both branches are proved, or the one that is taken; the condition is the same for all rows."""
    node.same_for_all(0)
    branches, condition = [], node.need(0)
    known_to_be = condition.data.any() if condition.data is not None else (condition.content or (None,))[0]
    whole = known_to_be.whole if isinstance(known_to_be, _Size) else known_to_be
    names = ("then_branch", "else_branch") if whole is None else ("then_branch",) if whole else ("else_branch",)
    for name in names:
        graph, inner = node.attributes[name], dict(known)
        proof._inner_body(graph, inner)
        branches.append([inner[value.name] for value in graph.output])
    results = []
    for one, other in zip(branches[0], branches[-1], strict=True):
        if one is other or (one == other and one.data is None):
            results.append(one)
            continue
        if one.sized or other.sized or one.places or other.places or one.axis != other.axis:
            raise _RefusedError("its branches give rows on different axes")
        if one.axis is None:
            results.append(_Value(_common(proof, one, other)))
        elif one.rank != other.rank or one.rows != other.rows:
            raise _RefusedError("its branches give rows on different axes")
        else:
            results.append(_Value(_common(proof, one, other), one.axis))
    return results


def _common(proof: _Proof, one: _Value, other: _Value) -> tuple[_Size, ...] | None:
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return None
    return tuple([a if a == b else proof.unknown() for a, b in zip(one.shape, other.shape, strict=True)])


def _loop(proof: _Proof, node: _Node, known: dict[str, _Value]) -> list[_Value]:
    """A body that keeps the rows of each state on their axis, run as often for each batch."""
    node.same_for_all(0, 1)
    graph, inner = node.attributes["body"], dict(known)
    states = [_state(proof, node.need(place)) for place in range(2, len(node.inputs))]
    given = [_Value(()), _Value(()), *states]
    inner.update((value.name, source) for value, source in zip(graph.input, given, strict=True))
    proof._inner_body(graph, inner)
    going_on, *results = [inner[value.name] for value in graph.output]
    _refuse_if(going_on.axis is not None or going_on.sized, "goes on as long as a row says")
    _keeps_states(states, results)
    return [*states, *(_stacked(proof, value) for value in results[len(states) :])]


def _scan(proof: _Proof, node: _Node, known: dict[str, _Value]) -> list[_Value]:
    """A body that keeps the rows of each state on their axis, over values along another axis."""
    graph, inner, count = node.attributes["body"], dict(known), node.attributes["num_scan_inputs"]
    values = [node.need(place) for place in range(len(node.inputs))]
    _refuse_if(node.version < 9, "scans a batch")
    _no_sizes(*values, places=True)
    states = [_state(proof, value) for value in values[:-count]]
    scanned = values[-count:]
    axes = node.attributes.get("scan_input_axes") or [0] * count
    for value, number in zip(scanned, axes, strict=True):
        axis = _at(number, value.rank)
        _refuse_if(axis == value.axis, "goes along the rows")
        rows = None if value.axis is None else value.axis - (axis < value.axis)
        states.append(_Value((*value.dims[:axis], *value.dims[axis + 1 :]), rows))
    inner.update((value.name, state) for value, state in zip(graph.input, states, strict=True))
    proof._inner_body(graph, inner)
    results = [inner[value.name] for value in graph.output]
    kept = states[:-count]
    _keeps_states(kept, results)
    parts = results[len(kept) :]
    places = node.attributes.get("scan_output_axes") or [0] * len(parts)
    return [*kept, *(_stacked(proof, part, place) for part, place in zip(parts, places, strict=True))]


def _state(proof: _Proof, value: _Value) -> _Value:
    """Return a state at any turn: other sizes than that of the rows may change."""
    _no_sizes(value, places=True)
    shape = value.shape and tuple([s if at == value.axis else proof.unknown() for at, s in enumerate(value.shape)])
    return _Value(shape, value.axis)


def _keeps_states(states: Sequence[_Value], results: Sequence[_Value]) -> None:
    for before, after in zip(states, results, strict=False):
        if after.axis != before.axis or after.sized or after.places or (after.axis is not None and (
            after.rank != before.rank or after.rows != before.rows
        )):  # fmt: skip
            raise _RefusedError("a state does not keep its rows on their axis")
        if after.axis is None and after.shape is not None and before.shape is not None and after.rank != before.rank:
            raise _RefusedError("a state changes its rank")


def _stacked(proof: _Proof, value: _Value, place: int = 0) -> _Value:
    """Return the values of all turns along a new axis."""
    _no_sizes(value, places=True)
    if value.shape is None:
        return _Value(None)
    place = _at(place, value.rank + 1)
    axis = None if value.axis is None else value.axis + (place <= value.axis)
    return _Value((*value.dims[:place], proof.unknown(), *value.dims[place:]), axis)


_ELEMENTWISE = """\
Abs Acos Acosh And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu
Cos Cosh Elu Erf Exp Floor Gelu Greater HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
LessOrEqual Log Max Mean Min Mish Mod Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
Softplus Softsign Sqrt Sum Swish Tan Tanh ThresholdedRelu Xor"""
_REDUCING = "ArgMax ArgMin " + " ".join(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
_SPATIAL = """AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool
GroupNormalization InstanceNormalization LRN LpPool QLinearConv SpaceToDepth"""
_RULES: dict[tuple[str, str], _Rule] = {
    **{("", name): _elementwise for name in _ELEMENTWISE.split()},
    **{("", name): _arithmetic for name in ("Add", "Sub", "Mul", "Div")},
    **{("", name): _reduced for name in _REDUCING.split()},
    **{("", name): _by_row(rank=2) for name in _SPATIAL.split()},
    **{("", name): _along(-1) for name in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK")},
    **{("", name): _along(-1, after=True) for name in ("LayerNormalization", "RMSNormalization")},
    **{("", name): _along(0, place=1) for name in ("CumSum", "CumProd")},
    **{("", name): _matmul for name in ("MatMul", "MatMulInteger", "QLinearMatMul")},
    **{("", name): _recurrent for name in ("RNN", "LSTM", "GRU")},
    ("", "DynamicQuantizeLinear"): _dynamic_scale,
    **{("", name): _quantised for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("", name): _first_only for name in ("CastLike", "Clip", "StringConcat", "RegexFullMatch")},
    **{("", name): _kept for name in ("Identity",)},
    ("", "Cast"): _cast,
    ("", "Equal"): _equal,
    ("", "GreaterOrEqual"): _at_least,
    ("", "Where"): _where,
    ("", "MaxPool"): _max_pool,
    **{("", name): _gather_elements for name in ("GatherElements", "ScatterElements")},
    ("", "Attention"): _attending(1, 2, 4, 5, 6, bias=3),
    ("", "BatchNormalization"): _batch_norm,
    ("", "Compress"): _compress,
    ("", "Concat"): _concat,
    ("", "Constant"): _constant_node,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "Dropout"): _dropout,
    ("", "Einsum"): _einsum,
    ("", "Expand"): _expand,
    ("", "Flatten"): _flatten,
    ("", "Gather"): _gather,
    ("", "GatherND"): _gather_nd,
    ("", "Gemm"): _gemm,
    ("", "GridSample"): _by_row(1, rank=4),
    ("", "OneHot"): _one_hot,
    ("", "Pad"): _pad,
    ("", "Range"): _range,
    ("", "Reshape"): _reshape,
    ("", "Resize"): _resize,
    ("", "RotaryEmbedding"): _rotary,
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Tile"): _tile,
    ("", "Transpose"): _transpose,
    ("", "Trilu"): _trilu,
    ("", "Unsqueeze"): _unsqueeze,
    **{("ai.onnx.ml", name): _features for name in ("Imputer", "Normalizer", "Scaler")},
    **{("ai.onnx.ml", f"{name}Classifier"): _scored() for name in ("Linear", "SVM", "TreeEnsemble")},
    **{("ai.onnx.ml", f"{name}Regressor"): _scored("targets", "n_targets") for name in ("Linear", "TreeEnsemble")},
    ("ai.onnx.ml", "SVMRegressor"): _scored("n_targets"),
    ("ai.onnx.ml", "TreeEnsemble"): _scored("n_targets"),
    ("ai.onnx.ml", "OneHotEncoder"): _one_hot_encoded,
    **{("ai.onnx.ml", name): _first_only for name in ("Binarizer", "CategoryMapper", "LabelEncoder")},
    **{("com.microsoft", name): _elementwise for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")},
    **{("com.microsoft", name): _quantised for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("com.microsoft", name): _skip_norm for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")},
    ("ai.onnx.ml", "ArrayFeatureExtractor"): _extracted,
    ("ai.onnx.ml", "FeatureVectorizer"): _vectors,
    ("", "MeanVarianceNormalization"): _normalised_mean,
    ("", "TfIdfVectorizer"): _vectors,
    **{("com.microsoft", f"QLinear{name}"): _quantised_pair for name in ("Add", "Mul")},
    **{("com.microsoft", f"QLinear{name}"): _first_only for name in ("LeakyRelu", "Sigmoid")},
    **{("com.microsoft", f"QLinear{name}"): _by_row(rank=2) for name in ("AveragePool", "GlobalAveragePool")},
    **{("com.microsoft", f"DynamicQuantize{name}"): _dynamic_scale for name in ("LSTM", "MatMul")},
    ("com.microsoft", "FusedConv"): _by_row(3, rank=2),
    ("com.microsoft", "RotaryEmbedding"): _rotary_by_offset,
    ("com.microsoft", "Attention"): _attending(3, bias=5, rank=3, refused=_packs_states),
    ("com.microsoft", "FusedMatMul"): _matmul,
    ("com.microsoft", "MatMulNBits"): _by_row(rank=2),
    ("com.microsoft", "MultiHeadAttention"): _attending(1, 2, 4, 6, 7, bias=5, rank=3),
    ("", "SimplifiedLayerNormalization"): _along(-1, after=True),
}
_BODIES: dict[tuple[str, str], Callable[[_Proof, _Node, dict[str, _Value]], list[_Value]]] = {
    ("", "If"): _if,
    ("", "Loop"): _loop,
    ("", "Scan"): _scan,
}
_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
_SHAPED_TOO = """Clip CumSum DequantizeLinear Dropout GreaterOrEqual Hardmax LayerNormalization LogSoftmax
LpNormalization MatMul MatMulInteger QuantizeLinear RMSNormalization Softmax"""
_SHAPED = frozenset(("", name) for name in (*_ELEMENTWISE.split(), *_REDUCING.split(), *_SHAPED_TOO.split()))
"""Operators whose rules give the shape of values without rows."""
_SIZED = """Add Cast Concat Constant ConstantOfShape Div Equal Expand Gather Identity Mul Range Reshape Resize Shape
Size Slice Split Squeeze Sub Tile Transpose Unsqueeze Where"""
_OF_SIZES = frozenset(_SIZED.split())  # these read or carry sizes, which depend on the number of rows
_PLACED = """Add Cast Concat Expand Gather GatherND GreaterOrEqual Identity Mul Reshape Shape Squeeze Transpose
Unsqueeze"""
_MOVES_PLACES = frozenset(_PLACED.split())
