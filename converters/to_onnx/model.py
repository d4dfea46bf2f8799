"""The ONNX model while it is being written: values, nodes, graphs, their shared parts, and how they become a protobuf.

onnx_ir has the same classes; ARCHITECTURE.md says under "Dependencies" why they are not used. Weights are never inside
this model, so protobuf's limit of 2 GB is no concern.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx_ort.converters.onnx_types import elem_type, refer, tensor_proto, text_of, type_proto
from rlx_ort.converters.to_onnx.dispatch import Dispatcher
from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import Graph, Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.leaf import Param
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

INLINE_BYTES = 128
"""Tensors below this size are kept inside the model: ONNX Runtime copies them anyway."""
_UNKNOWN = UnknownType()
ATTRIBUTE_FIELDS = {"INT": "i", "FLOAT": "f", "STRING": "s", "TENSOR": "t", "GRAPH": "g", "TYPE_PROTO": "tp"}
"""Kind of attribute -> the field of the protobuf that holds its value; that of lists has the name of the kind."""


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


def attribute(
    name: str, value: Any, kind: str = "", lower: Callable[[Any], ModelGraph] | None = None
) -> ModelAttribute:
    """Return an attribute; `lower` turns the IR graphs in it into ONNX graphs.

    An empty list counts as `INTS` unless `kind` is given.

    Raises:
        ConversionError: no ONNX attribute holds such a value.
    """
    kind = kind or _kind_of(name, value)
    if kind.endswith("S"):
        return ModelAttribute(name, kind, tuple([_item(name, kind[:-1], item, lower) for item in value]))
    return ModelAttribute(name, kind, _item(name, kind, value, lower))


def _kind_of(name: str, value: Any) -> str:
    """Return ONNX's name for the kind of an attribute value."""
    if isinstance(value, tuple | list):
        kinds = {_kind_of(name, item) for item in value} or {"INT"}
        if kinds == {"INT", "FLOAT"}:
            kinds = {"FLOAT"}
        if len(kinds) > 1 or next(iter(kinds)).endswith("S"):
            raise ConversionError(f"attribute {name!r} mixes {' and '.join(sorted(kinds))}; a list has one kind")
        return f"{kinds.pop()}S"
    for kind, classes in (
        ("INT", (bool, int, np.integer, np.bool_, DType)),
        ("FLOAT", (float, np.floating)),
        ("STRING", (str, bytes)),
        ("TENSOR", (np.ndarray, TensorData)),
        ("GRAPH", (Graph, ModelGraph)),
        ("TYPE_PROTO", (TensorType, SequenceType, OptionalType, MapType, UnknownType)),
    ):
        if isinstance(value, classes):
            return kind
    raise ConversionError(f"attribute {name!r} cannot hold {type(value).__name__} {value!r}")


def _item(name: str, kind: str, value: Any, lower: Callable[[Any], ModelGraph] | None) -> Any:
    match kind:
        case "INT":
            return elem_type(value) if isinstance(value, DType) else int(value)
        case "FLOAT":
            return float(value)
        case "STRING":
            return value if isinstance(value, str) else text_of(value)
        case "TENSOR":
            return value if isinstance(value, TensorData) else TensorData.from_array(value)
        case "GRAPH" if isinstance(value, Graph):
            if lower is None:
                raise ConversionError(f"attribute {name!r} is a graph, which cannot stand here")
            return lower(value)
        case _:
            return value


@dataclass(slots=True, eq=False, repr=False)
class ModelNode:
    """A node as a lowering wrote it, and the data that all nodes of the same form share with it.

    Models repeat their layers, so nodes are few and `ExportedNode`s, which add names, are many. Compared by identity.

    `reads` and `writes` are the values of the first such node, None for absent inputs. Its form belongs to opset
    version `written`, and to exactly that one if it was `imported` from a model. `depth` counts the bodies around it,
    `loops` those among them that may run several times.
    An `Outline` sets `version`, the opset version of the domain in the model, `shape_only`, whether the node only
    computes shapes, and the types `inputs` and `outputs`, None for absent ones.
    """

    domain: str
    op_type: str
    reads: Sequence[ModelValue | None] = ()
    attributes: dict[str, ModelAttribute] = field(default_factory=dict)
    writes: Sequence[ModelValue] = ()
    overload: str = ""
    name: str = ""
    written: int = 0
    version: int = 0
    depth: int = 0
    loops: int = 0
    imported: bool = False
    shape_only: bool = False
    inputs: tuple[ValueType | None, ...] = ()
    outputs: tuple[ValueType | None, ...] = ()

    def __post_init__(self) -> None:
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
        node = object.__new__(ModelNode)  # `copy.copy` takes ten times as long
        node.domain, node.op_type, node.overload, node.name = self.domain, self.op_type, self.overload, self.name
        node.attributes, node.reads, node.writes = self.attributes, self.reads, self.writes
        node.written, node.version, node.imported = self.written, self.version, self.imported
        node.depth, node.loops = self.depth, self.loops
        node.inputs, node.outputs, node.shape_only = inputs, outputs, shape_only
        return node

    def __repr__(self) -> str:
        return f"<ModelNode {self.name!r} {self.domain or 'ai.onnx'}::{self.op_type}>"


class ExportedNode(NamedTuple):
    """One node of an exported model, as support checks, placement and cost models read it.

    `pattern` is shared with the nodes that were written alike. `origin` is the id of the user's node, at the top level
    of the user's graph; `source` is the top-level node of the graph that was exported, None if there was no graph.
    `name` is unique in the model, bodies included. While a model is written, it is empty for the first node of a
    pattern, which has the names. Names of absent values are empty.
    """

    pattern: ModelNode
    origin: int
    source: Node | None = None
    name: str = ""
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        domain: str,
        op_type: str,
        version: int,
        origin: int,
        inputs: tuple[ValueType | None, ...],
        outputs: tuple[ValueType | None, ...],
        input_names: tuple[str, ...] = (),
        output_names: tuple[str, ...] = (),
        *,
        shape_only: bool = False,
        body: bool = False,
    ) -> ExportedNode:
        """Return a node that no lowering wrote, with a pattern of its own."""
        pattern = ModelNode(domain, op_type, version=version, depth=int(body), shape_only=shape_only)
        pattern.inputs, pattern.outputs = inputs, outputs
        return cls(pattern, origin, None, name, input_names, output_names)

    def named(self) -> ExportedNode:
        """Return the first node of a pattern with the names that the pattern has."""
        pattern, origin, source = self[:3]
        return ExportedNode(pattern, origin, source, pattern.name, names_of(pattern.reads), names_of(pattern.writes))

    @property
    def domain(self) -> str:
        """Operator domain, empty for ai.onnx."""
        return self.pattern.domain

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.pattern.op_type

    @property
    def version(self) -> int:
        """Opset version of the domain in the model."""
        return self.pattern.version

    @property
    def inputs(self) -> tuple[ValueType | None, ...]:
        """Types of the inputs, None for absent ones."""
        return self.pattern.inputs

    @property
    def outputs(self) -> tuple[ValueType | None, ...]:
        """Types of the outputs, None for absent ones."""
        return self.pattern.outputs

    @property
    def shape_only(self) -> bool:
        """Whether it only computes shapes: few integers that derive from shapes and small constants alone.

        ONNX Runtime keeps such nodes on the CPU by design.
        """
        return self.pattern.shape_only

    @property
    def body(self) -> bool:
        """Whether it is in a subgraph."""
        return self.pattern.depth > 0


@dataclass(slots=True, eq=False)
class ExternalWeight:
    """An initializer whose data is found under its own name, wherever the session gets its weights."""

    type: TensorType


@dataclass(slots=True, eq=False)
class ModelGraph:
    """A graph or a body. Initializers hold small data; only those of the main graph may point outside."""

    inputs: Sequence[ModelValue]
    outputs: Sequence[ModelValue]
    nodes: Sequence[ExportedNode]
    name: str
    initializers: Mapping[str, TensorData | ExternalWeight] = field(default_factory=dict)
    doc: str = ""


class UniqueNames:
    """Hands out names that differ from each other and from the reserved ones."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(reserved)
        self._counters: dict[str, int] = {}

    def unique(self, wanted: str) -> str:
        """Return `wanted`, or `wanted_2`, `wanted_3`... when it is taken."""
        taken = self._taken
        if wanted not in taken:
            taken.add(wanted)
            return wanted
        name, number = wanted, self._counters.get(wanted, 1)
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        self._counters[wanted] = number
        taken.add(name)
        return name


@dataclass(slots=True)
class ModelWriter:
    """The state that the emitters of a model and its bodies share.

    Names of values and nodes are unique over all graphs of the model. `initializers` are those of the main graph;
    `tensors` has the data of the small ones, or where the data of the others is; `params` names the parameters in use,
    and `constants` has the data that stays outside the model. `inside` has small constants of bodies, each of which has
    its own: WebGPU fails on one that a branch reads on the CPU and the other on the device (ONNX Runtime 1.31.1, plugin
    0.4.0). `records` has the nodes in the order they were finished.

    `source` is the node that is being lowered, `origin` the id of the user's top-level node. `origins` maps the id of a
    node of the graph that is written to that of the user's node, where they differ. `sizes` has the inputs that hold
    sizes which were computed before.
    """

    value_names: UniqueNames
    node_names: UniqueNames = field(default_factory=UniqueNames)
    initializers: dict[str, ModelValue] = field(default_factory=dict)
    tensors: dict[str, TensorData | ExternalWeight] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    constants: dict[str, TensorData] = field(default_factory=dict)
    inside: dict[str, TensorData] = field(default_factory=dict)
    records: list[ExportedNode] = field(default_factory=list)
    types: dict[ModelValue, ValueType] = field(default_factory=dict)
    origin: int = 0
    source: Node | None = None
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    origins: Mapping[int, int] = field(default_factory=dict)
    sizes: frozenset[str] = frozenset()
    _by_content: dict[tuple[int, DType, tuple[int, ...], int], list[tuple[TensorData, ModelValue]]] = field(
        default_factory=dict
    )
    _bodies: int = 0

    def value(self, name: str, kind: ValueType) -> ModelValue:
        """Return a new value of a known type."""
        value = ModelValue(self.value_names.unique(name))
        self.types[value] = kind
        return value

    def param(self, op: Param) -> ModelValue:
        """Return the initializer of a parameter, declared on first use; bodies share it with the main graph."""
        value = self.initializers.get(op.name)
        if value is None:
            self.params.append(op.name)
            value = self._declare(op.name, op.type, ExternalWeight(op.type))
        return value

    def body(self) -> int:
        """Return the number of a new body; that of the main graph is 0."""
        self._bodies += 1
        return self._bodies

    def constant(self, data: TensorData, name: str, body: int, own: dict[str, TensorData]) -> ModelValue:
        """Return the initializer of a constant, one for equal data; small ones of a body are added to its `own`."""
        content = "\0".join(map(str, data.buffer)).encode() if data.dtype is DType.STRING else data.buffer.data
        small = data.nbytes < INLINE_BYTES
        # A checksum finds the candidates; a hash that needs no comparison would load OpenSSL, 3.5 MB.
        key = (body if small else 0, data.dtype, data.shape, zlib.crc32(content))
        alike = self._by_content.setdefault(key, [])
        for known, value in alike:
            if known == data:
                return value
        kind = TensorType(data.dtype, Shape(data.shape))
        name = self.value_names.unique(name or "constant")
        if small and body:
            value = ModelValue(name)
            self.types[value] = kind
            self.inside[name] = own[name] = data
        else:
            if not small:
                self.constants[name] = data
            value = self._declare(name, kind, data if small else ExternalWeight(kind))
        alike.append((data, value))
        return value

    def small(self, value: ModelValue) -> TensorData | None:
        """Return the data of a small constant, None for any other value."""
        data = self.inside.get(value.name or "") or self.tensors.get(value.name or "")
        return data if isinstance(data, TensorData) and value.node is None else None

    def _declare(self, name: str, kind: TensorType, tensor: TensorData | ExternalWeight) -> ModelValue:
        value = ModelValue(name)
        self.types[value] = kind
        self.initializers[name] = value
        self.tensors[name] = tensor
        return value


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
        info.type.CopyFrom(type_proto(kind))


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
    many, field = kind.endswith("S"), ATTRIBUTE_FIELDS.get(kind) or kind.lower()
    if field in {"i", "ints", "f", "floats", "s", "strings"}:
        if kind.startswith("STRING"):
            value = list(map(_bytes, value)) if many else _bytes(value)
        getattr(proto, field).extend(value) if many else setattr(proto, field, value)
        return
    for item in value if many else (value,):
        target = getattr(proto, field).add() if many else getattr(proto, field)
        if isinstance(item, TensorData):
            target.CopyFrom(tensor_proto(item))
        elif isinstance(item, ModelGraph):
            _write_graph(target, item, types)
        else:
            target.CopyFrom(type_proto(item))


def _reference(name: str, weight: ExternalWeight) -> onnx.TensorProto:
    import onnx

    kind = weight.type
    sizes = () if kind.shape is None else kind.shape.static()
    proto = onnx.TensorProto(name=name, data_type=elem_type(kind.dtype), dims=sizes)
    refer(proto, name, 0, kind.dtype.nbytes(math.prod(sizes)))
    return proto


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else value
