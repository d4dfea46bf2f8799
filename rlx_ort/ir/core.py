"""Nodes, values and graphs, the append-only lists that hold them. `rlx_ort.ir.graph` brings the builders.

A node refers only to earlier nodes, so insertion order is a topological order and a cycle cannot be written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.builders import Builders
from rlx_ort.ir.dtype import DType, promote
from rlx_ort.ir.op import Op
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType, fits, refined


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Which output of which node: the storable form of a `Value`."""

    node: int
    output: int = 0


@dataclass(slots=True)
class Node:
    """One op applied to earlier values.

    `inputs` has None where an optional input is absent. `name` is unique in the graph; `output_names` are the
    names of the results, unique too, and their names in an exported model.
    """

    id: int
    op: Op
    inputs: tuple[Ref | None, ...]
    types: tuple[ValueType, ...]
    name: str
    output_names: tuple[str, ...]

    def __str__(self) -> str:
        return f"node {self.id} {self.name!r} ({self.op.kind})"


def _operator(function: str, *, swapped: bool = False) -> Callable[[Value, Any], Value]:
    """Return an arithmetic operator of `Value`; `swapped` takes the value as its right operand."""

    def apply(self: Value, other: Any) -> Value:
        return self.graph.binary(function, *((other, self) if swapped else (self, other)))

    return apply


class Value:
    """A handle to one result of a node of a graph, with its type, the arithmetic operators and the common methods."""

    __slots__ = ("graph", "ref")
    __array_priority__ = 1000  # numpy then leaves `array + value` to `__radd__`
    __array_ufunc__ = None

    def __init__(self, graph: Graph, ref: Ref) -> None:
        self.graph = graph
        self.ref = ref

    @property
    def node(self) -> Node:
        """The node that computes the value."""
        return self.graph.nodes[self.ref.node]

    @property
    def type(self) -> ValueType:
        """The full type; imported nodes may give other types than tensors."""
        return self.node.types[self.ref.output]

    @property
    def name(self) -> str:
        """The name an exported model gives the value."""
        return self.node.output_names[self.ref.output]

    @property
    def dtype(self) -> DType:
        """The element type.

        Raises:
            GraphVerifyError: the value is no tensor.
        """
        return self._tensor.dtype

    @property
    def shape(self) -> Shape:
        """The dimensions.

        Raises:
            GraphVerifyError: the value is no tensor, or its rank is unknown.
        """
        shape = self._tensor.shape
        if shape is None:
            raise GraphVerifyError(f"the rank of {self.name!r} is unknown")
        return shape

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def _tensor(self) -> TensorType:
        if not isinstance(self.type, TensorType):
            raise GraphVerifyError(f"{self.name!r} is not a tensor but {self.type}")
        return self.type

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __pow__ = _operator("pow")

    def __matmul__(self, other: Any) -> Value:
        return self.graph.matmul(self, other)

    def __neg__(self) -> Value:
        return self.graph.neg(self)

    def reshape(self, *dims: Any) -> Value:
        """Return the value with new dimensions, given one by one or as one sequence; one may be -1."""
        shape = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) and not isinstance(dims[0], str) else dims
        return self.graph.reshape(self, shape)

    def transpose(self, *perm: int) -> Value:
        """Return the value with its axes in the given order; reversed when none is given."""
        return self.graph.transpose(self, perm or range(self.rank)[::-1])

    def cast(self, to: DType | str) -> Value:
        """Return the value converted to another dtype."""
        return self.graph.cast(self, to)

    def sum(self, axes: int | Sequence[int], keep_dim: bool = False) -> Value:
        """Return the sum over axes."""
        return self.graph.reduce(self, "sum", axes, keep_dim)

    def mean(self, axes: int | Sequence[int], keep_dim: bool = False) -> Value:
        """Return the mean over axes."""
        return self.graph.reduce(self, "mean", axes, keep_dim)

    def softmax(self, axis: int = -1) -> Value:
        """Return the softmax over an axis."""
        return self.graph.softmax(self, axis)

    def __repr__(self) -> str:
        return f"<Value {self.name!r} {self.type} of {self.graph.name!r}>"


Operand: TypeAlias = Value | npt.ArrayLike
"""An operand for the builders: a value, or a number or array that becomes a constant."""


class NodeArgs(TypedDict, total=False):
    """Keywords of every builder that adds one value.

    `name` is the node's, by default the op's kind in lower case; a number is added if it is taken. `shape` is a
    declared shape, checked against the inferred one; names and sizes that it adds are kept.
    """

    name: str | None
    shape: Iterable[Dim] | None


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Graph(Builders):
    """A computation: inputs and weights, ops in topological order, and outputs.

    Each op has a builder, a method that adds a node and returns its value. Builders take values, and numbers and
    arrays, which become constants. The node's `name` and a declared `shape` are keywords of every builder of one value.
    A builder raises `GraphVerifyError` if its arguments do not fit the op or each other.

    `weights` maps parameter names to their initial data; a parameter without an entry must be set before a run.
    `metadata`, `doc` and `scopes` travel with an imported model; `scopes` maps the name of a node to the dotted path of
    the module that it was exported from. `revision` grows with each change, for caches. `size_inputs` names the inputs
    of a section that hold sizes which the nodes before it have computed; it is not stored.

    Example:
        >>> g = Graph("mlp")
        >>> x = g.input("x", ["batch", 4])
        >>> w = g.param("w", [4, 2])
        >>> g.outputs = [g.relu(x @ w)]
    """

    name: str = "graph"
    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, TensorData] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    doc: str = ""
    scopes: dict[str, str] = field(default_factory=dict)
    revision: int = 0
    size_inputs: frozenset[str] = frozenset()
    _outputs: list[tuple[str, Ref]] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)  # name -> the highest number tried after it
    _results: set[str] = field(default_factory=set)  # names of the results of the first nodes
    _named_up_to: int = 0  # how many nodes these are
    _added: list[tuple[Node, Op, tuple[Ref | None, ...], tuple[ValueType, ...], bool] | None] = field(
        default_factory=list, repr=False
    )
    """Nodes as `add_node` checked them, with whether their types were inferred; `verify` checks all others."""

    def add_node(
        self,
        op: Op,
        inputs: Sequence[Value | None],
        *,
        name: str | None = None,
        types: Sequence[ValueType] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> tuple[Value, ...]:
        """Append a node and return its results.

        `types` overrides the inferred types, for an importer with better ones. Names that are taken get a number.

        Raises:
            GraphVerifyError: an input belongs to another graph, or the op does not take these inputs.
        """
        refs = tuple(None if value is None else self._own(op, value) for value in inputs)
        known = [None if value is None else value.type for value in inputs]
        least, most = op.arity
        if len(refs) < least or (most is not None and len(refs) > most):
            raise GraphVerifyError(f"{op.kind} takes {op.arity_text()} inputs, got {len(refs)}")
        results = tuple(op.infer(known) if types is None else types)
        node_name = self._unique(name or op.kind.lower())
        if output_names is None:
            wanted = [node_name] if len(results) == 1 else [f"{node_name}.{i}" for i in range(len(results))]
            output_names = self._free_results(wanted)
        node = Node(len(self.nodes), op, refs, results, node_name, tuple(output_names))
        del self._added[node.id :]  # of nodes that were removed since; those put in by hand have no entry
        self._added += [None] * (node.id - len(self._added))
        self._added.append((node, op, refs, results, types is None))
        self.nodes.append(node)
        self.revision += 1
        return tuple(Value(self, Ref(node.id, index)) for index in range(len(results)))

    def append(self, op: Op, *inputs: Value | None, name: str | None = None) -> Value:
        """Append a node with one result and return it."""
        return self.add_node(op, inputs, name=name)[0]

    def value(self, ref: Ref | int) -> Value:
        """Return the handle of a stored reference, or of the first result of a node id."""
        return Value(self, ref if isinstance(ref, Ref) else Ref(ref))

    @property
    def outputs(self) -> list[Value]:
        """The graph's outputs, in order; assign a list of values to set them."""
        return [Value(self, ref) for _, ref in self._outputs]

    @outputs.setter
    def outputs(self, values: Iterable[Value]) -> None:
        self.set_outputs(list(values))

    @property
    def output_types(self) -> dict[str, ValueType]:
        """Output name -> type, in order."""
        return {name: value.type for name, value in zip(self.output_names, self.outputs, strict=True)}

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, in order."""
        return [name for name, _ in self._outputs]

    def set_outputs(self, values: Sequence[Value], names: Sequence[str] | None = None) -> None:
        """Set the outputs, replacing earlier ones; a value may appear more than once, under different names.

        Raises:
            GraphVerifyError: a value belongs to another graph, or two outputs have one name.
        """
        chosen = _numbered([value.name for value in values]) if names is None else list(names)
        if len(chosen) != len(values) or len(set(chosen)) != len(chosen):
            raise GraphVerifyError(f"{len(values)} outputs need as many different names, got {chosen}")
        for value in values:
            if value.graph is not self:
                raise GraphVerifyError(f"output {value.name!r} belongs to graph {value.graph.name!r}")
        self._outputs = [(name, value.ref) for name, value in zip(chosen, values, strict=True)]
        self.revision += 1

    @property
    def input_types(self) -> dict[str, ValueType]:
        """Input name -> type, in order."""
        return {value.name: value.type for value in self.inputs}

    @property
    def inputs(self) -> list[Value]:
        """The inputs, in the order they were added."""
        return self._leaves("Input")

    @property
    def params(self) -> list[Value]:
        """The parameters, in the order they were added."""
        return self._leaves("Param")

    def _leaves(self, kind: str) -> list[Value]:
        return [self.value(node.id) for node in self.nodes if node.op.kind == kind]

    def users(self, ref: Ref) -> list[Node]:
        """Return the nodes that read a value, in order; walks every node."""
        return [node for node in self.nodes if ref in node.inputs]

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        outputs = f"{len(self.inputs)} inputs, {len(self._outputs)} outputs"
        return f"<{type(self).__name__} {self.name!r}, {len(self.nodes)} nodes, {outputs}>"

    def _repr_html_(self) -> str:
        from rlx_ort.ir.notebook import html_listing

        return html_listing(repr(self), format_graph(self))

    def _add(
        self,
        op: Op,
        *operands: Operand | None,
        shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        name: str | None = None,
    ) -> Value:
        """Append a node with one result; operands that are None are left out.

        A declared shape or dtype is checked against the inferred one, and the shape may add names and sizes to it.
        """
        inputs = [self._as_value(item) for item in operands if item is not None]
        name = name or getattr(op, "function", None)  # an activation is named `gelu`, not `activation`
        if shape is None and dtype is None:
            return self.append(op, *inputs, name=name)
        (inferred,) = op.infer([value.type for value in inputs])
        return self.add_node(op, inputs, name=name, types=[_declared(op, inferred, shape, dtype)])[0]

    def _like(self, first: Operand, *rest: Operand | None) -> list[Value]:
        """Return operands as values: numbers and lists take the dtype of the first one, None is left out."""
        value = self._as_value(first)
        return [value, *(self._as_value(item, value) for item in rest if item is not None)]

    def _pair(self, lhs: Any, rhs: Any) -> tuple[Value, Value]:
        """Return two operands as values of one dtype; adds casts where needed."""
        left = self._as_value(lhs, rhs if isinstance(rhs, Value) else None)
        right = self._as_value(rhs, left)
        try:
            dtype = promote(left.dtype, right.dtype)
        except ValueError as err:
            raise GraphVerifyError(str(err)) from err
        return left.cast(dtype), right.cast(dtype)

    def _as_value(self, item: Any, like: Value | None = None) -> Value:
        """Return `item` as a value: numbers and arrays become constants.

        An array keeps its dtype. Plain numbers and lists of them take the dtype of `like`; fractions become f32 if
        there is no `like` or it is an integer.
        """
        if isinstance(item, Value):
            return item
        if isinstance(item, (np.ndarray, np.generic, TensorData)):
            return self.constant(item)
        array = np.asarray(item)
        if like is not None and (array.dtype.kind != "f" or like.dtype.is_float or like.dtype.is_complex):
            return self.constant(array, like.dtype)
        return self.constant(array, DType.F32 if array.dtype.kind == "f" else None)

    def _own(self, op: Op, value: Value) -> Ref:
        if not isinstance(value, Value):
            raise GraphVerifyError(f"{op.kind} takes values of the graph, got {type(value).__name__}")
        if value.graph is not self:
            raise GraphVerifyError(f"{op.kind} got {value.name!r} of graph {value.graph.name!r}, not of {self.name!r}")
        return value.ref

    def _free_results(self, wanted: Sequence[str]) -> list[str]:
        """Return names for results of a new node, with a number where an earlier result has the name."""
        if self._named_up_to > len(self.nodes):  # nodes were removed
            self._results, self._named_up_to = set(), 0
        for node in self.nodes[self._named_up_to :]:
            self._results.update(node.output_names)
        self._named_up_to = len(self.nodes)
        return _numbered([*self._results.intersection(wanted), *wanted])[-len(wanted) :] if wanted else []

    def _unique(self, wanted: str) -> str:
        name = wanted
        while name in self._names:
            self._names[wanted] += 1
            name = f"{wanted}_{self._names[wanted]}"
        self._names[name] = 1
        return name


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names, with a number from 2 on after one that stood before; no number makes it another one's name."""
    taken, seen = set(names), set[str]()
    result = []
    for name in names:
        free = (f"{name}_{number}" for number in itertools.count(2))
        chosen = name if name not in seen else next(each for each in free if each not in taken)
        seen.add(name)
        taken.add(chosen)
        result.append(chosen)
    return result


def format_graph(graph: Graph, indent: str = "") -> str:
    """Return a listing of a graph: each node with its result names, op, inputs and types, bodies indented below it.

    Data of weights and constants is left out.
    """
    lines = [f"{indent}graph {graph.name}"]
    for node in graph.nodes:
        results = ", ".join(f"{name or '_'}: {kind}" for name, kind in zip(node.output_names, node.types, strict=False))
        inputs = ", ".join("_" if ref is None else _value_name(graph, ref) for ref in node.inputs)
        lines.append(f"{indent}  {results} = {node.op.describe()}{f' ({inputs})' if inputs else ''}")
        lines += [format_graph(body, indent + "    ") for body in node.op.bodies()]
    outputs = ", ".join(
        name if name == _value_name(graph, ref) else f"{name} = {_value_name(graph, ref)}"
        for name, ref in graph._outputs
    )
    lines.append(f"{indent}  return {outputs}")
    return "\n".join(lines)


def _value_name(graph: Graph, ref: Ref) -> str:
    known = 0 <= ref.node < len(graph.nodes) and 0 <= ref.output < len(graph.nodes[ref.node].output_names)
    return (graph.nodes[ref.node].output_names[ref.output] if known else "") or f"%{ref.node}.{ref.output}"


def _declared(op: Op, inferred: ValueType, shape: Iterable[Dim] | None, dtype: DType | str | None) -> ValueType:
    """Return the inferred type with the declared sizes and names."""
    if not isinstance(inferred, TensorType):
        raise GraphVerifyError(f"{op.kind} gives no tensor, so it takes no declared shape")
    wanted = None if shape is None else Shape(shape)
    if dtype is not None and DType.parse(dtype) is not inferred.dtype:
        raise GraphVerifyError(f"{op.kind} is declared {DType.parse(dtype).value} and gives {inferred.dtype.value}")
    if wanted is None or inferred.shape is None:
        return TensorType(inferred.dtype, inferred.shape if wanted is None else wanted)
    if not fits(inferred.shape, wanted):
        raise GraphVerifyError(f"{op.kind} is declared with shape {wanted} and gives {inferred.shape}")
    return TensorType(inferred.dtype, refined(wanted, inferred.shape))
