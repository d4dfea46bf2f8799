"""The ONNX model while it is being written: values, nodes, graphs, and how they become a protobuf.

onnx_ir has the same classes and many more. It is not used here because importing it loads a computer-algebra package
(36 MB of memory, onnx_ir 1.1) in every process that opens a model, and because its bookkeeping was half of the time of
an export. Weights are never inside this model, so protobuf's limit of 2 GB is no concern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.onnx_types import elem_type, tensor_proto, type_proto
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.to_onnx.exported import ExportedNode

__all__ = [
    "INLINE_BYTES",
    "ExternalWeight",
    "ModelAttribute",
    "ModelGraph",
    "ModelNode",
    "ModelValue",
    "model_proto",
    "names_of",
    "types_of",
]


INLINE_BYTES = 128
"""Tensors below this size are kept inside the model: ONNX Runtime copies them anyway."""
_UNKNOWN = UnknownType()


class ModelValue:
    """A value of an ONNX graph; its name may be given later. An absent result has an empty name.

    `node` computes it, or is the one like the node that does; None for inputs and initializers.
    """

    __slots__ = ("name", "node")

    def __init__(self, name: str | None = None, node: ModelNode | None = None) -> None:
        self.name = name
        self.node = node

    def __repr__(self) -> str:
        return f"<ModelValue {self.name!r}>"


@dataclass(slots=True)
class ModelAttribute:
    """An attribute: `kind` is ONNX's name (`INT`, `FLOATS`, `GRAPH`...), lists are tuples."""

    name: str
    kind: str
    value: Any


class ModelNode:
    """A node as a lowering wrote it, and what all nodes that were written alike share with it.

    Models repeat their layers, so nodes are few and `ExportedNode`s, which add names, are many. Compared by identity.

    Attributes:
        reads: the values that the first such node reads, None for absent ones.
        writes: the values that it writes.
        name: its name.
        written: the opset version that its form belongs to.
        imported: whether it came from a model, so that its form belongs to exactly that version.
        depth: in how many bodies it is, 0 in the main graph.
        inputs: types of the inputs, None for absent ones; empty until an `Outline` is made.
        outputs: types of the outputs, likewise.
        version: opset version of the domain in the model; 0 until an `Outline` is made.
        shape_only: whether it only computes shapes; set by an `Outline`.
    """

    __slots__ = (
        *("attributes", "depth", "domain", "imported", "inputs", "name", "op_type", "outputs", "overload", "reads"),
        *("shape_only", "version", "writes", "written"),
    )

    inputs: tuple[ValueType | None, ...]
    outputs: tuple[ValueType | None, ...]

    def __init__(
        self,
        domain: str,
        op_type: str,
        reads: Sequence[ModelValue | None] = (),
        attributes: Sequence[ModelAttribute] = (),
        *,
        writes: int | Sequence[ModelValue] = 0,
        overload: str = "",
    ) -> None:
        self.domain = domain
        self.op_type = op_type
        self.reads = tuple(reads)
        self.attributes = {attribute.name: attribute for attribute in attributes}
        self.writes = tuple(ModelValue() for _ in range(writes)) if isinstance(writes, int) else tuple(writes)
        self.overload = overload
        self.name = ""
        self.written = self.version = self.depth = 0
        self.imported = self.shape_only = False
        self.inputs = self.outputs = ()
        for value in self.writes:
            value.node = self

    @property
    def body(self) -> bool:
        """Whether it is in a subgraph."""
        return self.depth > 0

    def alike(
        self, inputs: tuple[ValueType | None, ...], outputs: tuple[ValueType | None, ...], *, shape_only: bool = False
    ) -> ModelNode:
        """Return the same node on values of other types; it shares the attributes."""
        node = object.__new__(ModelNode)
        node.domain, node.op_type, node.overload, node.name = self.domain, self.op_type, self.overload, self.name
        node.attributes, node.reads, node.writes = self.attributes, self.reads, self.writes
        node.written, node.version, node.imported, node.depth = self.written, self.version, self.imported, self.depth
        node.inputs, node.outputs, node.shape_only = inputs, outputs, shape_only
        return node

    def __repr__(self) -> str:
        return f"<ModelNode {self.name!r} {self.domain or 'ai.onnx'}::{self.op_type}>"


@dataclass(slots=True, eq=False)
class ExternalWeight:
    """An initializer whose data is found under its own name, wherever the session gets its weights."""

    type: TensorType


@dataclass(slots=True, eq=False)
class ModelGraph:
    """A graph or a body. Initializers, which only the main graph has, hold small data or point outside."""

    inputs: Sequence[ModelValue]
    outputs: Sequence[ModelValue]
    nodes: Sequence[ExportedNode]
    name: str
    initializers: Mapping[str, TensorData | ExternalWeight] = field(default_factory=dict)
    doc: str = ""


def model_proto(
    graph: ModelGraph,
    types: Mapping[ModelValue, ValueType],
    opset_imports: Mapping[str, int],
    ir_version: int,
    metadata: Mapping[str, str],
) -> onnx.ModelProto:
    """Return a model as a protobuf; `types` are those of its values, and the data of external weights stays outside."""
    import onnx

    proto = onnx.ModelProto(ir_version=ir_version, producer_name="rlx_ort")
    for domain, version in opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    for key, value in metadata.items():
        proto.metadata_props.add(key=key, value=value)
    _write_graph(proto.graph, graph, types)
    return proto


def _write_graph(proto: onnx.GraphProto, graph: ModelGraph, types: Mapping[ModelValue, ValueType]) -> None:
    proto.name = graph.name
    if graph.doc:
        proto.doc_string = graph.doc
    for name, data in graph.initializers.items():
        proto.initializer.append(tensor_proto(data, name) if isinstance(data, TensorData) else _reference(name, data))
    for infos, values in ((proto.input, graph.inputs), (proto.output, graph.outputs)):
        for value in values:
            _write_type(infos.add(name=value.name), types.get(value))
    declared = {value.name for value in graph.outputs}
    for node in graph.nodes:
        named = node if node.name else node.named()
        _write_node(proto.node.add(), named, types)
        pattern = node.pattern
        for name, kind in zip(named.output_names, pattern.outputs or map(types.get, pattern.writes), strict=True):
            if name and name not in declared and kind is not None and not isinstance(kind, UnknownType):
                _write_type(proto.value_info.add(name=name), kind)


def names_of(values: Sequence[ModelValue | None]) -> tuple[str, ...]:
    """Return the names of values, empty for absent ones."""
    return tuple(["" if value is None else value.name or "" for value in values])


def types_of(
    values: Sequence[ModelValue | None], types: Mapping[ModelValue, ValueType]
) -> tuple[ValueType | None, ...]:
    """Return the types of values, None for absent ones."""
    return tuple([types.get(value, _UNKNOWN) if value is not None and value.name else None for value in values])


def _write_type(info: onnx.ValueInfoProto, kind: ValueType | None) -> None:
    if kind is not None and not isinstance(kind, UnknownType):
        type_proto(kind, info.type)


def _write_node(proto: onnx.NodeProto, node: ExportedNode, types: Mapping[ModelValue, ValueType]) -> None:
    pattern = node.pattern
    proto.name = node.name
    proto.op_type = pattern.op_type
    if pattern.domain:
        proto.domain = pattern.domain
    if pattern.overload:
        proto.overload = pattern.overload
    proto.input.extend(node.input_names)
    proto.output.extend(node.output_names)
    for attribute in pattern.attributes.values():
        _write_attribute(proto.attribute.add(), attribute, types)


def _write_attribute(
    proto: onnx.AttributeProto, attribute: ModelAttribute, types: Mapping[ModelValue, ValueType]
) -> None:
    import onnx

    kind, value = attribute.kind, attribute.value
    proto.name = attribute.name
    proto.type = onnx.AttributeProto.AttributeType.Value(kind)  # pyright: ignore[reportAttributeAccessIssue]
    match kind:
        case "INT":
            proto.i = value
        case "INTS":
            proto.ints.extend(value)
        case "FLOAT":
            proto.f = value
        case "FLOATS":
            proto.floats.extend(value)
        case "STRING":
            proto.s = _bytes(value)
        case "STRINGS":
            proto.strings.extend(map(_bytes, value))
        case "TENSOR":
            proto.t.CopyFrom(tensor_proto(value))
        case "TENSORS":
            proto.tensors.extend(map(tensor_proto, value))
        case "GRAPH":
            _write_graph(proto.g, value, types)
        case "GRAPHS":
            for graph in value:
                _write_graph(proto.graphs.add(), graph, types)
        case "TYPE_PROTO":
            type_proto(value, proto.tp)
        case "TYPE_PROTOS":
            for item in value:
                type_proto(item, proto.type_protos.add())


def _reference(name: str, weight: ExternalWeight) -> onnx.TensorProto:
    import onnx

    kind = weight.type
    sizes = () if kind.shape is None else kind.shape.static()
    proto = onnx.TensorProto(
        name=name, data_type=elem_type(kind.dtype), dims=sizes, data_location=onnx.TensorProto.EXTERNAL
    )
    elements = 1
    for size in sizes:
        elements *= size
    for key, text in (("location", name), ("offset", "0"), ("length", str(kind.dtype.nbytes(elements)))):
        proto.external_data.add(key=key, value=text)
    return proto


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else value
