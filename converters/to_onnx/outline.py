"""`Outline`: the nodes of a model as choosing a device looks at them, told before there is a protobuf.

A model has few kinds of nodes and many nodes of each: what is asked of a node by its operator and its types is asked
once a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.converters.to_onnx.model import ExternalWeight, ModelNode, ModelValue, names_of, types_of
from rlx_ort.converters.to_onnx.records import NodeRecord, Pattern
from rlx_ort.converters.to_onnx.shape_only import is_shape_type, shape_only_places, starts_shapes
from rlx_ort.converters.to_onnx.writer import ModelWriter
from rlx_ort.ir.tensor import TensorData
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
        constants: name -> data of each initializer, or where it comes from.
        types: name -> type of the values whose type is known.
    """

    nodes: Sequence[NodeRecord]
    input_types: Mapping[str, ValueType]
    output_types: Mapping[str, ValueType]
    functions: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    constants: Mapping[str, TensorData | ExternalWeight] = field(default_factory=dict)
    types: Mapping[str, ValueType] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: ExportedModel) -> Outline:
        """Return the outline of a model."""
        patterns: dict[object, Pattern] = {}
        nodes = []
        for node in model.nodes:
            operator, types = (node.domain, node.op_type, node.version), (node.inputs, node.outputs)
            pattern = patterns.get((operator, types, node.shape_only, node.body))
            if pattern is None:
                like = ModelNode(node.domain, node.op_type, ())
                pattern = Pattern(like, node.version, False, node.body, *types, node.version, node.shape_only)
                patterns[operator, types, node.shape_only, node.body] = pattern
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
        patterns = {record.pattern for record in nodes}
        for pattern in patterns:
            like = pattern.like
            pattern.version = imports[like.domain]
            if not pattern.outputs:
                pattern.inputs = types_of(like.inputs, writer.types)
                pattern.outputs = types_of(like.outputs, writer.types)
        if inferred is not None:
            nodes = _told_apart(nodes, inferred)
            patterns = {record.pattern for record in nodes}
        if any(map(starts_shapes, patterns)):
            small = {name for name, value in writer.initializers.items() if is_shape_type(writer.types[value])}
            small |= {value.name for value in inputs if value.name and is_shape_type(writer.types.get(value))}
            _mark_shapes(nodes, small)
        interface = (_interface(writer, inputs, inferred), _interface(writer, outputs, inferred))
        types = {value.name: kind for value, kind in writer.types.items() if value.name} | dict(inferred or {})
        return cls(nodes, *interface, constants=writer.tensors, types=types)

    def with_types(self, types: Mapping[str, ValueType]) -> Outline:
        """Return the outline with better types for some values; nodes of other sizes have patterns of their own."""
        named = {
            name: kind
            for node in self.nodes
            for names, kinds in (
                (node.input_names, node.pattern.inputs),
                (node.output_names, node.pattern.outputs),
            )
            for name, kind in zip(names, kinds, strict=False)
            if name and kind is not None
        }
        merged = {**named, **self.types, **types}
        return replace(self, nodes=_told_apart(self.nodes, merged), types=merged)


def _told_apart(nodes: Sequence[NodeRecord], types: Mapping[str, ValueType]) -> list[NodeRecord]:
    """Return the nodes with a pattern for each kind of them, going by the types of values by name."""
    patterns: dict[object, Pattern] = {}
    found = []
    for node in nodes:
        written, like = node.pattern, node.like
        reads, writes = _types_named(node.input_names, types), _types_named(node.output_names, types)
        look = (written, reads, writes)
        if look not in patterns:
            like = ModelNode(like.domain, like.op_type, (), tuple(like.attributes.values()))
            patterns[look] = replace(written, like=like, inputs=reads, outputs=writes)
        found.append(node._replace(pattern=patterns[look]))
    return found


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
            marked[pattern] = replace(pattern, shape_only=True)
        nodes[at] = nodes[at]._replace(pattern=marked[pattern])
