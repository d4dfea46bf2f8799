"""Types of the values of a graph and data of its small constants, for transforms; names and labels for messages."""

from __future__ import annotations

import fnmatch
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field

import onnx

from rlx_ort.converters.bundle import ModelBundle, location_of
from rlx_ort.converters.from_onnx.structure import names_read
from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles
from rlx_ort.converters.from_onnx.tensors import constant_data
from rlx_ort.converters.onnx_types import known_type_of, tensor_proto, tensor_type
from rlx_ort.converters.protos import graphs_of, skeleton, with_types
from rlx_ort.errors import ConversionError, near_names
from rlx_ort.ir.types import Dim, UnknownType, ValueType

_SMALL_BYTES = 4096  # inputs whose values an adapter or a fold may need: axes, pads, scales


@dataclass(slots=True)
class Scope:
    """The values a graph sees, those of the graphs around it included; `constants` holds only small ones."""

    types: MutableMapping[str, ValueType] = field(default_factory=dict)
    constants: MutableMapping[str, onnx.TensorProto] = field(default_factory=dict)

    def inner(self, bundle: ModelBundle, *versions: onnx.GraphProto) -> Scope:
        """Return the scope of a graph in this one, whose names hide those around it; the last version counts."""
        scope = Scope(ChainMap({}, self.types), ChainMap({}, self.constants))
        for graph in versions:
            scope._read(graph, bundle)
        return scope

    def _read(self, graph: onnx.GraphProto, bundle: ModelBundle) -> None:
        """Take in the declarations of a graph: types, initializers and Constant nodes."""
        for info in (*graph.value_info, *graph.input, *graph.output):
            kind = known_type_of(info.type)
            if not isinstance(kind, UnknownType):
                self.types[info.name] = kind
        overridable = {value.name for value in graph.input}
        for tensor in graph.initializer:
            self.types[tensor.name] = tensor_type(tensor)
            if tensor.name not in overridable and (small := _small(tensor, bundle)) is not None:
                self.constants[tensor.name] = small
        for node in graph.node:
            if (made := _constant(node)) is not None:
                self.constants[node.output[0]] = made


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the small dense tensor of numbers that a Constant node gives, or None for other nodes and kinds."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    dense = ("value", "value_int", "value_ints", "value_float", "value_floats")
    if attribute.name not in dense or attribute.ref_attr_name or attribute.ByteSize() > _SMALL_BYTES:
        return None
    data = constant_data(attribute, ExternalFiles(None))
    return None if data is None else tensor_proto(data, node.output[0])


def typed_model(bundle: ModelBundle) -> onnx.ModelProto:
    """Return the model with the types that ONNX infers, large weights being inputs; the order of nodes is kept."""
    return with_types(skeleton(bundle.proto))


def model_scope(bundle: ModelBundle) -> Scope:
    """Return the scope of the main graph; infers its types."""
    return Scope().inner(bundle, typed_model(bundle).graph, bundle.proto.graph)


def all_value_names(proto: onnx.ModelProto) -> set[str]:
    """Return the name of every value of a model, bodies included."""
    names: set[str] = set()
    for graph in graphs_of(proto):
        names.update(value.name for value in graph.input)
        names.update(tensor.name for tensor in graph.initializer)
        names.update(tensor.values.name for tensor in graph.sparse_initializer)
        names.update(name for node in graph.node for name in (*node.input, *node.output) if name)
    return names


def read_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names that the nodes, the bodies and the outputs of a graph read."""
    return {value.name for value in graph.output}.union(*map(names_read, graph.node))


def label_of(node: onnx.NodeProto) -> str:
    """Return a node as messages name it."""
    return f"{node.op_type} {node.name or next(iter(node.output), '')!r}"


def dims_text(dims: Iterable[Dim]) -> str:
    """Return dims as messages show them, `[batch, ?, 3]`."""
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def selected(wanted: Iterable[str], nodes: Mapping[str, str], what: str) -> set[str]:
    """Return the names of the nodes that entries of a list mean: a name, an operator, or a pattern of names as `conv*`.

    `nodes` has the operators by name; `what` is the list in the message where an entry means no node.
    """
    chosen: set[str] = set()
    for entry in wanted:
        meant = {name for name, op_type in nodes.items() if entry in (name, op_type)}
        meant = meant or {name for name in nodes if fnmatch.fnmatchcase(name, entry)}
        if not meant:
            hint = near_names(entry, {*nodes, *nodes.values()})
            raise ConversionError(
                f"{entry!r} of {what} is not a node, operator or pattern of nodes in the model; {hint}"
            )
        chosen |= meant
    return chosen


def _small(tensor: onnx.TensorProto, bundle: ModelBundle) -> onnx.TensorProto | None:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor
    data = bundle.weights.get(location_of(tensor))
    return None if data is None or data.nbytes > _SMALL_BYTES else tensor_proto(data, tensor.name)
