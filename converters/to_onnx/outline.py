"""`Outline`: the nodes of a model as choosing a device looks at them, told before there is a protobuf.

A model has few kinds of nodes and many nodes of each: what is asked of a node by its operator and its types is asked
once a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode, ModelValue, names_of
from rlx_ort.converters.to_onnx.records import NodeRecord, Pattern
from rlx_ort.converters.to_onnx.shape_only import is_shape_type, shape_only_places, starts_shapes
from rlx_ort.converters.to_onnx.writer import ModelWriter
from rlx_ort.ir.types import UnknownType, ValueType

__all__ = ["Outline"]


@dataclass(frozen=True, slots=True)
class Outline:
    """The nodes of a model and its interface.

    Attributes:
        nodes: every node, bodies included, in topological order; all have names, and patterns that have their kind.
        input_types: name -> type, in order.
        output_types: name -> type, in order.
        functions: domain and name of each function that the model brings.
    """

    nodes: Sequence[NodeRecord]
    input_types: Mapping[str, ValueType]
    output_types: Mapping[str, ValueType]
    functions: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    @classmethod
    def of_model(cls, model: ExportedModel) -> Outline:
        """Return the outline of a model."""
        patterns: dict[object, Pattern] = {}
        nodes = []
        for node in model.nodes:
            pattern = _pattern_of(node, patterns)
            nodes.append(NodeRecord(pattern, node.origin, None, node.name, node.input_names, node.output_names))
        functions = frozenset((function.domain, function.name) for function in model.model.functions)
        return cls(nodes, model.input_types, model.output_types, functions)

    @classmethod
    def of_writer(
        cls,
        writer: ModelWriter,
        imports: Mapping[str, int],
        inputs: Sequence[ModelValue],
        outputs: Sequence[ModelValue],
        inferred: Mapping[str, ValueType] | None = None,
    ) -> Outline:
        """Return the outline of what was written for these opsets.

        `inferred` has the types by name where the writer lacks some; it may tell nodes apart that were written alike.
        """
        nodes = [record if record.name else record.named() for record in writer.records]
        if inferred is None:
            for pattern in {record.pattern for record in nodes}:
                like = pattern.like
                reads, writes = _types_of(like.inputs, writer.types), _types_of(like.outputs, writer.types)
                pattern.kind = _kind(pattern, imports[like.domain], reads, writes)
        else:
            patterns: dict[object, Pattern] = {}
            for at, record in enumerate(nodes):
                reads, writes = _types_named(record.input_names, inferred), _types_named(record.output_names, inferred)
                kind = _kind(record.pattern, imports[record.like.domain], reads, writes)
                nodes[at] = record._replace(pattern=_pattern_of(kind, patterns))
        if any(starts_shapes(pattern.kind) for pattern in {record.pattern for record in nodes} if pattern.kind):
            small = {name for name, value in writer.initializers.items() if is_shape_type(writer.types[value])}
            _mark_shapes(nodes, small)
        return cls(nodes, _interface(writer, inputs, inferred), _interface(writer, outputs, inferred))


def _pattern_of(node: ExportedNode, patterns: dict[object, Pattern]) -> Pattern:
    """Return the pattern of nodes like this, which is made for the first of them."""
    look = (node.domain, node.op_type, node.version, node.inputs, node.outputs, node.shape_only, node.body)
    known = patterns.get(look)
    if known is None:
        kind = replace(node, name="", origin=0, input_names=(), output_names=())
        like = ModelNode(node.domain, node.op_type, ())
        known = patterns[look] = Pattern(like, node.version, False, node.body, kind)
    return known


def _kind(
    pattern: Pattern, version: int, reads: tuple[ValueType | None, ...], writes: tuple[ValueType | None, ...]
) -> ExportedNode:
    like = pattern.like
    return ExportedNode("", like.domain, like.op_type, version, 0, reads, writes, (), (), body=pattern.body)


def _types_of(
    values: Sequence[ModelValue | None], types: Mapping[ModelValue, ValueType]
) -> tuple[ValueType | None, ...]:
    unknown = UnknownType()
    return tuple([types.get(value, unknown) if value is not None and value.name else None for value in values])


def _types_named(names: Sequence[str], types: Mapping[str, ValueType]) -> tuple[ValueType | None, ...]:
    unknown = UnknownType()
    return tuple([types.get(name, unknown) if name else None for name in names])


def _interface(
    writer: ModelWriter, values: Sequence[ModelValue], inferred: Mapping[str, ValueType] | None
) -> dict[str, ValueType]:
    names, unknown = names_of(values), UnknownType()
    types = [writer.types.get(value, unknown) for value in values]
    return {
        name: kind if inferred is None else inferred.get(name, kind) for name, kind in zip(names, types, strict=True)
    }


def _mark_shapes(nodes: list[NodeRecord], small_constants: set[str]) -> None:
    """Give the nodes that only compute shapes a pattern that says so."""
    marked: dict[Pattern, Pattern] = {}
    for at in shape_only_places(nodes, small_constants):
        pattern = nodes[at].pattern
        if pattern not in marked:
            marked[pattern] = replace(pattern, kind=replace(nodes[at].kind, shape_only=True))
        nodes[at] = nodes[at]._replace(pattern=marked[pattern])
