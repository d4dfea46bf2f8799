"""Passes over an imported graph: missing types are inferred, and nodes become IR ops."""

from __future__ import annotations

from typing import Any

from rlx_ort.converters.from_onnx.mapping import MappedNode, NodeView, mapped
from rlx_ort.converters.from_onnx.operands import all_nodes
from rlx_ort.converters.protos import trimmed
from rlx_ort.converters.to_onnx.emitter import DEFAULT_OPSET
from rlx_ort.converters.to_onnx.opset import NodeForm, obstacle
from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import TensorType, UnknownType, ValueType, fits


def fill_types(graph: Graph) -> None:
    """Infer the types that ONNX leaves out inside functions; those it cannot infer stay unknown."""
    from rlx_ort.converters.to_onnx.exporter import export_model

    missing = [node for node in graph.nodes if any(_is_missing(*pair) for pair in _results(node))]
    if not missing:
        return
    try:
        model = export_model(graph)
    except (ConversionError, GraphVerifyError):
        return  # exporting the graph raises the error
    known = {
        name: kind
        for node in model.nodes
        for name, kind in zip(node.output_names, node.outputs, strict=False)
        if kind is not None and not node.body
    }
    for node in missing:
        node.types = tuple(known.get(name, kind) if _is_missing(kind, name) else kind for kind, name in _results(node))


def with_ir_ops(graph: Graph) -> Graph:
    """Return the graph with IR ops in place of the nodes that mean exactly the same.

    That is done for a whole model or not at all: IR ops are written for opset 21, so every other node must be able
    to go there.
    """
    changes: list[tuple[Node, MappedNode, tuple[ValueType, ...]]] = []
    read: dict[int, set[Ref]] = {}
    for owner, node in all_nodes(graph):
        op = node.op
        if not isinstance(op, OnnxNode) or op.domain != "":
            continue
        blocked = obstacle(_form(owner, node, op), op.version, DEFAULT_OPSET)
        refs = read[id(owner)] if id(owner) in read else read.setdefault(id(owner), _read(owner))
        found = _mapping(owner, node, op, refs)
        if found is not None and (found[0].moves or not blocked):
            changes.append((node, *found))
        elif blocked:
            return graph
    for node, change, types in changes:
        node.op, node.types, node.inputs = change.op, types, node.inputs[: change.inputs]
        node.output_names = node.output_names[:1]
    graph.revision += 1
    return graph


def _read(graph: Graph) -> set[Ref]:
    """Return the values that a node or an output of the graph reads."""
    refs = {ref for node in graph.nodes for ref in node.inputs if ref is not None}
    return refs | {value.ref for value in graph.outputs}


def _mapping(graph: Graph, node: Node, op: OnnxNode, read: set[Ref]) -> tuple[MappedNode, tuple[ValueType, ...]] | None:
    inputs = [None if ref is None else graph.nodes[ref.node].types[ref.output] for ref in node.inputs]
    tensors = [kind for kind in inputs if isinstance(kind, TensorType) and kind.shape is not None]
    extra = any(Ref(node.id, index) in read for index in range(1, len(node.types)))
    if len(tensors) != len(inputs) or not tensors or extra or op.bodies():
        return None
    declared = node.types[0]
    if not isinstance(declared, TensorType):
        return None
    view = NodeView(
        op.op_type, op.version, op.attributes, tensors, [_data(graph, ref) for ref in node.inputs], declared
    )
    change = mapped(view)
    if change is None:
        return None
    try:
        inferred = change.op.infer(tensors[: change.inputs])[0]
    except GraphVerifyError:
        return None  # the op is stricter than the node; the node stays
    if not isinstance(inferred, TensorType) or inferred.dtype is not declared.dtype or inferred.shape is None:
        return None
    if declared.shape is None:
        return change, (inferred,)
    return (change, (declared,)) if fits(inferred.shape, declared.shape) else None


def _form(graph: Graph, node: Node, op: OnnxNode) -> NodeForm:
    refs = trimmed(node.inputs[: op.formal_inputs])
    inputs = [None if ref is None else graph.nodes[ref.node].types[ref.output] for ref in refs]
    outputs = [kind if name else None for kind, name in _results(node)]
    return NodeForm(op.op_type, op.attributes, inputs, outputs)


def _results(node: Node) -> list[tuple[ValueType, str]]:
    return list(zip(node.types, node.output_names, strict=True))


def _is_missing(kind: ValueType, name: str) -> bool:
    return bool(name) and isinstance(kind, UnknownType)


def _data(graph: Graph, ref: Any) -> Any:
    op = graph.nodes[ref.node].op
    return op.data if isinstance(op, Constant) else None
