"""`Graph` with the builders of all op families, its named dims, and changes to whole graphs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rlx_ort.errors import GraphVerifyError, near_names
from rlx_ort.ir.building import add_builders, builder
from rlx_ort.ir.core import Graph, Node, Ref, Value
from rlx_ort.ir.op import Op, op_class, op_kinds
from rlx_ort.ir.ops import (  # noqa: F401  # each brings its ops and builders
    attention,
    blocks,
    control,
    conv,
    dequant,
    elementwise,
    linalg,
    norm,
    quant,
    sequence,
    signal,
)
from rlx_ort.ir.ops.leaf import Constant, Input, Param
from rlx_ort.ir.ops.shape import Expand, Reshape
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, ValueType, refined

__all__ = [
    "BATCH", "PAST_SEQ", "ROWS", "SEQ", "DimBinding", "Graph", "Node", "Ref", "Value", "bind_dims",
    "dynamic_symbols", "eliminate_dead_code", "empty_like", "has_dynamic_dims", "infer_bindings_from_inputs",
    "live_nodes", "name_open_dims", "op_kinds", "section",
]  # fmt: skip


add_builders(*map(op_class, op_kinds()))


@builder
def bind(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Return a copy in which the named dims that are keys of `sizes` have those sizes; node ids stay.

    Raises:
        GraphVerifyError: the graph has no such dim, or the sizes do not fit it.
    """
    if sizes:
        check_dims(graph, sizes)
    return bind_dims(graph, sizes)


def bind_dims(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Return a copy in which the named dims that are keys of `sizes` have those sizes; node ids and names stay.

    Types are inferred again, so dimensions that follow from the bound ones get sizes too. Weights are shared.

    Raises:
        GraphVerifyError: the sizes do not fit the graph; the message names the node.
    """
    result = empty_like(graph)
    for node in graph.nodes:
        op = _bind_op(node.op, sizes)
        declared = tuple(_bind_type(value, sizes) for value in node.types)
        inputs = [None if ref is None else result.nodes[ref.node].types[ref.output] for ref in node.inputs]
        try:
            inferred: Sequence[ValueType] = op.infer(inputs)
        except GraphVerifyError as err:
            raise GraphVerifyError(f"{node} of graph {graph.name!r} does not take {dict(sizes)}: {err}") from err
        types = tuple(_finer(old, new) for old, new in zip(declared, inferred, strict=True))
        result.nodes.append(Node(node.id, op, node.inputs, types, node.name, node.output_names))
    result._outputs = list(graph._outputs)
    return result


def name_open_dims(graph: Graph) -> Graph:
    """Return a copy in which a dim of an input with neither a size nor a name is called by its place, as `x[0]`.

    Types are inferred again, so that types that follow from such a dim are known by it. A graph without one is returned
    itself.
    """
    named = {node.id: _named_places(node.op) for node in graph.nodes if isinstance(node.op, Input)}
    if all(op is graph.nodes[place].op for place, op in named.items()):
        return graph
    result = empty_like(graph)
    result.nodes = [replace(node, op=named.get(node.id, node.op)) for node in graph.nodes]
    result._outputs = list(graph._outputs)
    return bind_dims(result, {})


def _named_places(op: Input) -> Input:
    kind = op.type
    if not isinstance(kind, TensorType) or kind.shape is None or None not in kind.shape:
        return op
    dims = [f"{op.name}[{axis}]" if dim is None else dim for axis, dim in enumerate(kind.shape)]
    return replace(op, type=TensorType(kind.dtype, Shape(dims)))


def live_nodes(graph: Graph) -> set[int]:
    """Return the ids of the nodes that an output needs."""
    live = {ref.node for _, ref in graph._outputs}
    for node in reversed(graph.nodes):
        if node.id in live:
            live.update([ref.node for ref in node.inputs if ref is not None])
    return live


def eliminate_dead_code(graph: Graph) -> Graph:
    """Return a copy without the nodes that no output needs; inputs of the graph stay, nodes are renumbered."""
    live = live_nodes(graph)
    kept = [node for node in graph.nodes if node.id in live or isinstance(node.op, Input)]
    places = {node.id: place for place, node in enumerate(kept)}
    result = empty_like(graph)
    for node in kept:
        inputs = tuple(None if ref is None else Ref(places[ref.node], ref.output) for ref in node.inputs)
        result.nodes.append(Node(places[node.id], node.op, inputs, node.types, node.name, node.output_names))
    result._outputs = [(name, Ref(places[ref.node], ref.output)) for name, ref in graph._outputs]
    params = {node.op.name for node in kept if isinstance(node.op, Param)}
    result.weights = {name: data for name, data in graph.weights.items() if name in params}
    return result


def section(graph: Graph, begin: int, end: int, sizes: Collection[str] = ()) -> Graph:
    """Return the nodes from `begin` to before `end`, as far as an output of the graph needs them.

    Values of earlier nodes that it reads become its inputs, and values that later nodes or the graph's outputs need its
    outputs; both keep their names. Inputs, parameters and constants come along wherever they stand, those that are an
    output of the graph themselves with the last section. Weights are shared. `sizes` names the values that nodes
    compute from sizes alone, which providers leave to the host. A node that computes one of others and constants comes
    along too: only so is the -1 known in the shape that a Reshape of PyTorch's exporter reads.

    Raises:
        GraphVerifyError: nothing between the two is needed.
    """
    live = live_nodes(graph)
    inside = [node for node in graph.nodes[begin:end] if node.id in live and not node.op.is_leaf]
    own = {node.id for node in inside}
    inside = _made_again(graph, begin, inside, sizes) + inside
    made = {node.id for node in inside}
    read = {ref for node in inside for ref in node.inputs if ref is not None and ref.node not in made}
    after = [node for node in graph.nodes[end:] if node.id in live]
    after += _made_again(graph, end, after, sizes)
    later = {ref for node in after for ref in node.inputs if ref is not None}
    results = {ref for _, ref in graph._outputs}
    given = {ref for ref in results if end >= len(graph.nodes) and graph.nodes[ref.node].op.is_leaf}
    read |= given
    wanted = [ref for ref in sorted(later | results) if ref.node in own] + sorted(given)
    if not wanted:
        raise GraphVerifyError(f"nothing between nodes {begin} and {end} of graph {graph.name!r} is needed behind them")
    part = type(graph)(f"{graph.name}[{begin}:{end}]")
    part.metadata, part.scopes, part._names = dict(graph.metadata), dict(graph.scopes), dict(graph._names)
    places: dict[Ref, Ref] = {}
    for ref in sorted(read):
        node, kind = graph.nodes[ref.node], graph.nodes[ref.node].types[ref.output]
        name = node.output_names[ref.output]
        places[ref] = Ref(len(part.nodes))
        op = node.op if node.op.is_leaf else Input(name, kind)
        part.nodes.append(Node(len(part.nodes), op, (), (kind,), node.name if node.op.is_leaf else name, (name,)))
    for node in inside:
        inputs = tuple(None if ref is None else places[ref] for ref in node.inputs)
        places.update({Ref(node.id, at): Ref(len(part.nodes), at) for at in range(len(node.types))})
        part.nodes.append(Node(len(part.nodes), node.op, inputs, node.types, node.name, node.output_names))
    part._outputs = [(graph.nodes[ref.node].output_names[ref.output], places[ref]) for ref in wanted]
    params = {node.op.name for node in part.nodes if isinstance(node.op, Param)}
    part.weights = {name: data for name, data in graph.weights.items() if name in params}
    part.size_inputs = frozenset(value.name for value in part.inputs).intersection(sizes)
    part.revision = 1
    return part


def _made_again(graph: Graph, begin: int, readers: Sequence[Node], sizes: Collection[str]) -> list[Node]:
    """Return the nodes before `begin` that later ones read and that compute a size from constants and other sizes."""
    asked = sorted({ref.node for node in readers for ref in node.inputs if ref is not None and ref.node < begin})
    found = []
    for node in map(graph.nodes.__getitem__, asked):
        makers = [graph.nodes[ref.node] for ref in node.inputs if ref is not None]
        others = [maker for maker in makers if not isinstance(maker.op, Constant)]
        names = {name for each in (node, *others) for name in each.output_names}
        if len(others) < len(makers) and names.issubset(sizes):
            found.append(node)
    return found


def empty_like(graph: Graph) -> Graph:
    """Return a graph with the weights, metadata and taken names of another, and no nodes."""
    result = type(graph)(graph.name)
    result.weights = dict(graph.weights)
    result.metadata = dict(graph.metadata)
    result.doc = graph.doc
    result.scopes = dict(graph.scopes)
    result.size_inputs = graph.size_inputs
    result.revision = 1
    result._names = dict(graph._names)
    return result


def _bind_op(op: Op, sizes: Mapping[str, int]) -> Op:
    """Return the op with its types, dimensions and bodies bound; the same op where nothing changes."""
    changes: dict[str, Any] = {}
    for item in fields(op):
        value = getattr(op, item.name)
        if isinstance(op, (Reshape, Expand)) and item.name == "dims":
            bound: Any = tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in value)
        else:
            bound = _bind_field(value, sizes)
        if bound is not value and bound != value:
            changes[item.name] = bound
    return replace(op, **changes) if changes else op


def _bind_field(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, Graph):
        return bind_dims(value, sizes)
    if isinstance(value, tuple) and any(isinstance(item, Graph) for item in value):
        return tuple(_bind_field(item, sizes) for item in value)
    if isinstance(value, Mapping) and any(isinstance(item, (Graph, tuple)) for item in value.values()):
        return {name: _bind_field(item, sizes) for name, item in value.items()}
    return _bind_type(value, sizes) if isinstance(value, ValueType) else value


def _bind_type(value: ValueType, sizes: Mapping[str, int]) -> ValueType:
    if isinstance(value, TensorType):
        return value if value.shape is None else TensorType(value.dtype, value.shape.bind(sizes))
    if isinstance(value, (SequenceType, OptionalType)):
        return replace(value, element=_bind_type(value.element, sizes))
    if isinstance(value, MapType):
        return replace(value, value=_bind_type(value.value, sizes))
    return value


def _finer(declared: ValueType, inferred: ValueType) -> ValueType:
    """Return the declared type with the sizes that only inference has."""
    if not isinstance(declared, TensorType) or not isinstance(inferred, TensorType):
        return declared
    if declared.shape is None or inferred.shape is None or declared.shape.rank != inferred.shape.rank:
        return declared if inferred.shape is None else TensorType(declared.dtype, declared.shape or inferred.shape)
    return TensorType(declared.dtype, refined(declared.shape, inferred.shape))


BATCH, SEQ, ROWS, PAST_SEQ = "batch", "seq", "rows", "past_seq"
"""The symbols that `DimBinding.batch_seq` and `batch_past_seq` bind."""


class DimBinding(Mapping[str, int]):
    """Symbol -> size, as `Graph.bind` and `CompileOptions.dims` take it; equal bindings have one hash.

    Raises:
        ValueError: a size is negative.
    """

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Mapping[str, int] | None = None, **more: int) -> None:
        self._sizes = {name: int(size) for name, size in sorted({**(sizes or {}), **more}.items())}
        for name, size in self._sizes.items():
            if size < 0:
                raise ValueError(f"dim {name!r} cannot have the size {size}")

    @classmethod
    def batch_seq(cls, batch: int, seq: int) -> DimBinding:
        """Return a binding of `batch` and `seq`; with several sequences also of `rows`, all their tokens."""
        rows = {ROWS: batch * seq} if batch > 1 else {}
        return cls({BATCH: batch, SEQ: seq, **rows})

    @classmethod
    def batch_past_seq(cls, batch: int, past_seq: int) -> DimBinding:
        """Return a binding of `batch` and of `past_seq`, the tokens that a cache already holds."""
        return cls({BATCH: batch, PAST_SEQ: past_seq})

    def with_(self, sizes: Mapping[str, int]) -> DimBinding:
        """Return a binding with some sizes added or replaced."""
        return DimBinding({**self._sizes, **sizes})

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __repr__(self) -> str:
        return f"DimBinding({self._sizes})"


def dynamic_symbols(graph: Graph) -> list[str]:
    """Return the named dims of a graph's values, in order of first appearance."""
    shapes = [kind.shape for node in graph.nodes for kind in node.types if isinstance(kind, TensorType)]
    return list(dict.fromkeys(symbol for shape in shapes if shape is not None for symbol in shape.symbols))


def require_graph(value: object) -> None:
    """Refuse anything but a graph.

    Raises:
        GraphVerifyError: it is something else; the message says how to read a file.
    """
    if not isinstance(value, Graph):
        raise GraphVerifyError(
            f"a Graph is needed, and this is a {type(value).__name__}; rlx_ort.load(path) reads a model file or a "
            "package and returns a runner, whose .graph is one"
        )


def check_dims(graph: Graph, names: Iterable[str]) -> None:
    """Refuse names of dims that no value of the graph has, since a size for one would be ignored.

    Raises:
        GraphVerifyError: the graph has no such dim; the nearest names are suggested.
    """
    known = dynamic_symbols(graph)
    for name in names:
        if name not in known:
            raise GraphVerifyError(f"graph {graph.name!r} has no dim {name!r}; {near_names(name, known)}")


def has_dynamic_dims(graph: Graph) -> bool:
    """Return whether any value of a graph has a dim without a size, named or not."""
    kinds = [kind for node in graph.nodes for kind in node.types if isinstance(kind, TensorType)]
    return any(kind.shape is None or not kind.shape.is_static for kind in kinds)


def infer_bindings_from_inputs(graph: Graph, lengths: Mapping[str, int]) -> DimBinding:
    """Return the sizes of named dims that follow from the number of elements of each input.

    Inputs may be left out. An array's number of elements is `array.size`.

    Raises:
        GraphVerifyError: the graph has no such input, an input has several dims without a size, its length is no
            multiple of the others, or two inputs disagree about a dim; the message names the inputs.
    """
    kinds = graph.input_types
    sizes: dict[str, tuple[int, str]] = {}
    for name, length in lengths.items():
        kind = kinds.get(name)
        if not isinstance(kind, TensorType) or kind.shape is None:
            raise GraphVerifyError(f"graph {graph.name!r} has no tensor input {name!r} of known rank")
        open_dims = [dim for dim in kind.shape if not isinstance(dim, int)]
        known = math.prod(dim for dim in kind.shape if isinstance(dim, int))
        if len(open_dims) > 1:
            raise GraphVerifyError(f"input {name!r} is {kind}: a length alone does not determine {len(open_dims)} dims")
        if not open_dims:
            if length != known:
                raise GraphVerifyError(f"input {name!r} is {kind} of {known} elements, got {length}")
            continue
        if known == 0 or length % known:
            raise GraphVerifyError(f"input {name!r} is {kind}: {length} elements are not a multiple of {known}")
        symbol, size = open_dims[0], length // known
        if symbol is None:
            continue
        before, source = sizes.setdefault(symbol, (size, name))
        if before != size:
            raise GraphVerifyError(f"input {name!r} makes {symbol!r} {size}, but input {source!r} makes it {before}")
    return DimBinding({symbol: size for symbol, (size, _) in sizes.items()})
