"""`Outline`: the nodes and types of a model that choosing a device needs, available before there is a protobuf.

A model has few patterns and many nodes of each: what depends on the operator and the types is looked up once a pattern.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.converters.to_onnx.model import ExternalWeight, ModelNode, ModelValue, ModelWriter, names_of, types_of
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, UnknownType, ValueType

__all__ = ["Outline", "is_shape_type", "shape_only_nodes"]

_SHAPE_READERS = frozenset({"Shape", "Size"})


@dataclass(frozen=True, slots=True)
class Outline:
    """The nodes of a model and its interface.

    Attributes:
        nodes: every node, bodies included, in topological order; all have names, and their patterns have types.
        input_types: name -> type, in order.
        output_types: name -> type, in order.
        functions: domain and name of each function in the model.
        constants: name -> data of each initializer, or a reference.
        types: name -> type of the values whose type is known.
    """

    nodes: Sequence[ExportedNode]
    input_types: Mapping[str, ValueType]
    output_types: Mapping[str, ValueType]
    functions: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    constants: Mapping[str, TensorData | ExternalWeight] = field(default_factory=dict)
    types: Mapping[str, ValueType] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: ExportedModel) -> Outline:
        """Return the outline of a model."""
        functions = frozenset((function.domain, function.name) for function in model.model.functions)
        return cls(model.nodes, model.input_types, model.output_types, functions)

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

        `inferred` has the types by name where the writer lacks some; nodes that it gives other types get patterns of
        their own.
        """
        nodes = [node if node.name else node.named() for node in writer.records]
        patterns = {node.pattern for node in nodes}
        for pattern in patterns:
            pattern.version = imports[pattern.domain]
            if not pattern.outputs:
                pattern.inputs = types_of(pattern.reads, writer.types)
                pattern.outputs = types_of(pattern.writes, writer.types)
        if inferred is not None:
            nodes = _retyped(nodes, inferred)
            patterns = {node.pattern for node in nodes}
        if any(map(_reads_shape, patterns)):
            small = {name for name, value in writer.initializers.items() if is_shape_type(writer.types[value])}
            small |= {value.name for value in inputs if value.name and is_shape_type(writer.types.get(value))}
            nodes = shape_only_nodes(nodes, small)
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
        return replace(self, nodes=_retyped(self.nodes, merged), types=merged)


def _retyped(nodes: Sequence[ExportedNode], types: Mapping[str, ValueType]) -> list[ExportedNode]:
    """Return the nodes with a pattern for each combination of types, which are those of the values by name."""
    patterns: dict[object, ModelNode] = {}
    found = []
    for node in nodes:
        reads, writes = _types_named(node.input_names, types), _types_named(node.output_names, types)
        look = (node.pattern, reads, writes)
        if look not in patterns:
            patterns[look] = node.pattern.alike(reads, writes, shape_only=node.pattern.shape_only)
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


def shape_only_nodes(nodes: Sequence[ExportedNode], small_constants: Collection[str]) -> list[ExportedNode]:
    """Return the nodes with `shape_only` set on those that only compute shapes.

    A node only computes shapes when it reads a shape, or nothing but results of such nodes and `small_constants`, which
    are integer constants and graph inputs of rank 0 or 1, and its results are integer or bool tensors of rank 0 or 1.
    ONNX Runtime pins by the same rule:
    https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/framework/fallback_cpu_capability.cc
    """
    from_shapes: set[str] = set()
    marked: dict[ModelNode, ModelNode] = {}
    found = []
    for node in nodes:
        pattern = node.pattern
        read = [name for name in node.input_names if name]
        follows = not from_shapes.isdisjoint(read) and all(
            name in from_shapes or name in small_constants for name in read
        )
        if (follows or _reads_shape(pattern)) and all(is_shape_type(kind) for kind in pattern.outputs if kind):
            from_shapes.update(name for name in node.output_names if name)
            if pattern not in marked:
                marked[pattern] = pattern.alike(pattern.inputs, pattern.outputs, shape_only=True)
            node = node._replace(pattern=marked[pattern])
        found.append(node)
    return found


def is_shape_type(kind: ValueType | None) -> bool:
    """Return whether a value may hold sizes, axes or indices: an integer or bool tensor of rank 0 or 1."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return False
    return kind.shape.rank <= 1 and (kind.dtype.is_integer or kind.dtype.value == "bool")


def _reads_shape(pattern: ModelNode) -> bool:
    return pattern.domain == "" and pattern.op_type in _SHAPE_READERS
