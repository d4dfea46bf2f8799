"""The ONNX model while it is being written: values, nodes, graphs, and how they become a protobuf.

onnx_ir has the same classes and many more. It is not used here because importing it loads a computer-algebra package
(36 MB of memory, onnx_ir 1.1), which every process that opens a model would pay for, and because its bookkeeping was
half of the time of an export. Weights never stand in this model, so protobuf's limit of 2 GB is far away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlx_ort.converters.onnx_types import elem_type, tensor_proto, type_proto
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

__all__ = [
    "INLINE_BYTES",
    "ExternalWeight",
    "ModelAttribute",
    "ModelGraph",
    "ModelNode",
    "ModelValue",
    "Repeated",
    "WholeModel",
    "model_proto",
    "names_of",
    "types_of",
]


INLINE_BYTES = 128
"""Tensors below this size are kept inside the model: ONNX Runtime copies them anyway."""
_UNKNOWN = UnknownType()


class ModelValue:
    """A value of an ONNX graph; its name may be given later. An empty name stands for an absent result."""

    __slots__ = ("name", "node")

    def __init__(self, name: str | None = None, node: ModelNode | None = None) -> None:
        self.name = name
        self.node = node

    def producer(self) -> ModelNode | None:
        """Return the node that computes the value, or the one it repeats; None for inputs and initializers."""
        return self.node

    def __repr__(self) -> str:
        return f"<ModelValue {self.name!r}>"


@dataclass(slots=True)
class ModelAttribute:
    """An attribute: `kind` is ONNX's name (`INT`, `FLOATS`, `GRAPH`...), lists are tuples."""

    name: str
    kind: str
    value: Any


class ModelNode:
    """A node; its results are made with it unless given."""

    __slots__ = ("attributes", "domain", "inputs", "name", "op_type", "outputs", "overload")

    def __init__(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ModelValue | None],
        attributes: Sequence[ModelAttribute] = (),
        *,
        outputs: int | Sequence[ModelValue] = 1,
        overload: str = "",
        name: str = "",
    ) -> None:
        self.domain = domain
        self.op_type = op_type
        self.inputs = tuple(inputs)
        self.attributes = {attribute.name: attribute for attribute in attributes}
        self.outputs = tuple(ModelValue() for _ in range(outputs)) if isinstance(outputs, int) else tuple(outputs)
        self.overload = overload
        self.name = name
        for value in self.outputs:
            value.node = self

    def __repr__(self) -> str:
        return f"<ModelNode {self.name!r} {self.domain or 'ai.onnx'}::{self.op_type}>"


class Repeated(Protocol):
    """A node that differs from another by names and sizes alone; names of absent inputs and outputs are empty."""

    @property
    def like(self) -> ModelNode:
        """The other node."""

    @property
    def name(self) -> str:
        """The node's name."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the values it reads."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the values it writes."""

    @property
    def output_types(self) -> tuple[ValueType | None, ...]:
        """Types of the values it writes; empty where they are those of the other node."""


@dataclass(slots=True, eq=False)
class ExternalWeight:
    """An initializer whose data is found under its own name, wherever the session gets its weights."""

    type: TensorType


@dataclass(slots=True, eq=False)
class ModelGraph:
    """A graph or a body. Initializers, which only the main graph has, hold small data or point outside."""

    inputs: Sequence[ModelValue]
    outputs: Sequence[ModelValue]
    nodes: Sequence[ModelNode | Repeated]
    name: str
    initializers: Mapping[str, TensorData | ExternalWeight] = field(default_factory=dict)
    doc: str = ""


@dataclass(slots=True, eq=False)
class WholeModel:
    """A model and the types of its values, as far as they are known."""

    graph: ModelGraph
    types: Mapping[ModelValue, ValueType]
    opset_imports: Mapping[str, int]
    ir_version: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def model_proto(model: WholeModel) -> onnx.ModelProto:
    """Return the model as a protobuf; the data of external weights stays outside."""
    import onnx

    proto = onnx.ModelProto(ir_version=model.ir_version, producer_name="rlx_ort")
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    for key, value in model.metadata.items():
        proto.metadata_props.add(key=key, value=value)
    _write_graph(proto.graph, model.graph, model.types)
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
        if isinstance(node, ModelNode):
            like, inputs, outputs, kinds = node, names_of(node.inputs), names_of(node.outputs), None
        else:
            like, inputs, outputs, kinds = node.like, node.input_names, node.output_names, node.output_types
        _write_node(proto.node.add(), node.name, like, inputs, outputs, types)
        for name, kind in zip(outputs, kinds or map(types.get, like.outputs), strict=True):
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


def _write_node(
    proto: onnx.NodeProto,
    name: str,
    node: ModelNode,
    inputs: Sequence[str],
    outputs: Sequence[str],
    types: Mapping[ModelValue, ValueType],
) -> None:
    proto.name = name
    proto.op_type = node.op_type
    if node.domain:
        proto.domain = node.domain
    if node.overload:
        proto.overload = node.overload
    proto.input.extend(inputs)
    proto.output.extend(outputs)
    for attribute in node.attributes.values():
        _write_attribute(proto.attribute.add(), attribute, types)


def _write_attribute(
    proto: onnx.AttributeProto, attribute: ModelAttribute, types: Mapping[ModelValue, ValueType]
) -> None:
    import onnx

    kind, value = attribute.kind, attribute.value
    proto.name = attribute.name
    proto.type = onnx.AttributeProto.AttributeType.Value(kind)
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
