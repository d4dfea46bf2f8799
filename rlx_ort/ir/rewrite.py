"""Changes to whole graphs; each returns a new graph and leaves the old one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import GraphCore, Node, Ref
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.ops.shape import Expand, Reshape
from rlx_ort.ir.shape import Dim, refined
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, ValueType

__all__ = ["bind_dims", "eliminate_dead_code", "empty_like", "live_nodes"]

GraphT = TypeVar("GraphT", bound=GraphCore)


def bind_dims(graph: GraphT, sizes: Mapping[str, int]) -> GraphT:
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


def live_nodes(graph: GraphCore) -> set[int]:
    """Return the ids of the nodes that an output needs."""
    live = {ref.node for _, ref in graph._outputs}
    for node in reversed(graph.nodes):
        if node.id in live:
            live.update(ref.node for ref in node.inputs if ref is not None)
    return live


def eliminate_dead_code(graph: GraphT) -> GraphT:
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


def empty_like(graph: GraphT) -> GraphT:
    """Return a graph with the weights, metadata and taken names of another, and no nodes."""
    result = type(graph)(graph.name)
    result.weights = dict(graph.weights)
    result.metadata = dict(graph.metadata)
    result.doc = graph.doc
    result.revision = 1
    result._names = dict(graph._names)
    return result


def _bind_op(op: Op, sizes: Mapping[str, int]) -> Op:
    """Return the op with its types, dimensions and bodies bound; the same op where nothing changes."""
    changes: dict[str, Any] = {}
    for item in fields(op):
        value = getattr(op, item.name)
        if isinstance(op, (Reshape, Expand)) and item.name == "dims":
            bound: Any = tuple(_bind_dim(dim, sizes) for dim in value)
        else:
            bound = _bind_field(value, sizes)
        if bound is not value and bound != value:
            changes[item.name] = bound
    return replace(op, **changes) if changes else op


def _bind_field(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, GraphCore):
        return bind_dims(value, sizes)
    if isinstance(value, tuple) and any(isinstance(item, GraphCore) for item in value):
        return tuple(_bind_field(item, sizes) for item in value)
    if isinstance(value, Mapping) and any(isinstance(item, (GraphCore, tuple)) for item in value.values()):
        return {name: _bind_field(item, sizes) for name, item in value.items()}
    return _bind_type(value, sizes) if isinstance(value, ValueType) else value


def _bind_dim(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    return sizes.get(dim, dim) if isinstance(dim, str) else dim


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
