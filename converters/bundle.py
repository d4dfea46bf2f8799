"""`ModelBundle`: a model on its way through a conversion, with its weights beside the protobuf and not inside.

Sources make bundles, transforms turn one into another, targets write them. The protobuf stays small, so it can be
copied and edited freely. A weight of a file is mapped: its bytes are read when they are written or computed with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from rlx_ort.converters.from_onnx import graph_of
from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles, TensorFiles
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.onnx_types import dtype_of, elem_type, tensor_proto, type_of
from rlx_ort.converters.protos import copied, graphs_of, nodes_of, set_items
from rlx_ort.converters.to_onnx import all_weights
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.converters.to_onnx.model import INLINE_BYTES, UniqueNames
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.ir.types import ValueType
from rlx_ort.options.compile_options import CompileOptions

FREE_INITIALIZERS = 4
"""The IR version from which an initializer need not be an input too."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelBundle:
    """An ONNX model and its weights, apart from each other.

    Attributes:
        proto: the model. Every initializer of `INLINE_BYTES` and more, in the main graph and in bodies, is an external
            reference whose location is a key of `weights`; smaller ones, strings and tensors that are attributes of
            nodes are inside. Treat it as read-only: copy it, change the copy, and call `with_proto`.
        weights: location -> data; memory maps where they come from a file. Freed, and their files closed, with the
            last reference.
        origin: the model's name in messages: the file or object it was made from.
    """

    proto: onnx.ModelProto
    weights: Mapping[str, TensorData]
    origin: str

    def __repr__(self) -> str:
        return f"<ModelBundle of {self.origin}, {self.node_count} nodes, {len(self.weights)} weights>"

    def with_proto(self, proto: onnx.ModelProto) -> ModelBundle:
        """Return a bundle of another model over these weights, without those that it does not refer to.

        Raises:
            ConversionError: the model refers to a weight that is not here.
        """
        used = {location_of(tensor) for tensor in external_tensors(proto)}
        lacking = sorted(used - self.weights.keys())
        if lacking:
            raise ConversionError(f"{self.origin}: the model refers to weights it does not have: {', '.join(lacking)}")
        return ModelBundle(proto, {name: data for name, data in self.weights.items() if name in used}, self.origin)

    def with_weights(self, weights: Mapping[str, TensorData]) -> ModelBundle:
        """Return a bundle of the same model with all its weights replaced by these.

        Raises:
            ConversionError: a reference of the model has no weight of its dtype and shape among them.
        """
        for tensor in external_tensors(self.proto):
            data = weights.get(location_of(tensor))
            wanted = f"{dtype_of(tensor.data_type).value}{list(tensor.dims)}"
            given = "nothing" if data is None else f"{data.dtype.value}{list(data.shape)}"
            if given != wanted:
                raise ConversionError(f"{self.origin}: weight {tensor.name!r} is {wanted}, given is {given}")
        return replace(self, weights=dict(weights))

    @property
    def nbytes(self) -> int:
        """The bytes of the weights and of the model without them. Serializes the model's sizes, not its data."""
        return sum(data.nbytes for data in self.weights.values()) + int(self.proto.ByteSize())

    @property
    def opset(self) -> int:
        """The ai.onnx opset the model imports; 0 if it imports none, 1 for models older than opset imports."""
        versions = [entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")]
        return int(max(versions, default=1 if self.proto.ir_version < 3 else 0))

    @property
    def node_count(self) -> int:
        """The number of nodes, those of bodies included and those of functions left out."""
        return sum(1 for _ in nodes_of(self.proto, functions=False))

    def input_types(self) -> dict[str, ValueType]:
        """Return name -> type of the inputs of a run, in order; inputs that have a default are left out."""
        graph = self.proto.graph
        defaults = {tensor.name for tensor in graph.initializer}
        defaults |= {tensor.values.name for tensor in graph.sparse_initializer}
        return _types(value for value in graph.input if value.name not in defaults)

    def output_types(self) -> dict[str, ValueType]:
        """Return name -> type of the outputs, in order."""
        return _types(self.proto.graph.output)


def bundle_of(
    proto: onnx.ModelProto, folder: str | os.PathLike[str] | None = None, origin: str = "the model"
) -> ModelBundle:
    """Return a model as a bundle; external data is mapped, data inside is copied out.

    The given message is not changed. Constants of `INLINE_BYTES` and more become initializers of their graph, where the
    IR version lets those be no inputs. External data outside `folder` is not read. `origin` is the model's name in
    messages.

    Raises:
        ConversionError: a tensor is damaged, nameless or there twice, or its external data is missing or not allowed.
    """
    try:
        light, weights = take_out(proto, ExternalFiles(None if folder is None else Path(folder)))
    except ConversionError as err:
        raise ConversionError(f"{origin}: {err}") from err
    return ModelBundle(light, weights, origin)


def bundle_from_graph(graph: Graph, options: CompileOptions | None = None, origin: str = "") -> ModelBundle:
    """Return a graph as a bundle, exported in normal form; shares the memory of its weights.

    Raises:
        GraphVerifyError: the graph breaks a rule of the IR.
        ConversionError: a node has no ONNX form, or a parameter has no data.
    """
    exported = export_model(graph, options)
    given = all_weights(graph, exported)
    weights: dict[str, TensorData] = {}
    proto = copied(exported.model)
    for tensor in proto.graph.initializer:
        if tensor.name in given:
            tensor.CopyFrom(placed(tensor.name, given[tensor.name], weights))
    return ModelBundle(proto, weights, origin or f"graph {graph.name!r}")


def graph_from_bundle(bundle: ModelBundle) -> Graph:
    """Return a bundle as a graph; the weights stay as they are, mapped or in memory.

    Raises:
        ConversionError: the model breaks a rule of ONNX that its meaning depends on.
    """
    try:
        return graph_of(bundle.proto, BundleWeights(bundle.weights))
    except ConversionError as err:
        raise ConversionError(f"{bundle.origin}: {err}") from err


def take_out(proto: onnx.ModelProto, files: TensorFiles) -> tuple[onnx.ModelProto, dict[str, TensorData]]:
    """Return a copy of a model whose large initializers are references, and their data by location.

    Raises:
        ConversionError: an initializer is damaged, nameless or there twice, or its data cannot be had.
    """
    light = onnx.ModelProto()
    _copy_fields(proto, light, "graph")
    _copy_fields(proto.graph, light.graph, "initializer")  # copying the weights first would double the peak
    light.graph.SetInParent()
    taker = _Taker(files)
    light.graph.initializer.extend(map(taker.initializer, proto.graph.initializer))
    for index, graph in enumerate(graphs_of(light)):
        taker.graph(graph, main=not index, constants=light.ir_version >= FREE_INITIALIZERS)
    for function in light.functions:
        taker.attributes(function.node)
    return light, taker.weights


def _copy_fields(source: Any, target: Any, without: str) -> None:
    """Copy the fields of a message but one to another that is empty."""
    for field, value in source.ListFields():
        if field.name == without:
            continue
        if hasattr(value, "MergeFrom"):  # a message or a repeated field
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers, in the main graph and in bodies, whose data is outside; they are those of the model."""
    for graph in graphs_of(model):
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield tensor


def location_of(tensor: onnx.TensorProto) -> str:
    """Return the location an external tensor names, its key in `ModelBundle.weights`; empty if it names none."""
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def placed(name: str, data: TensorData, weights: dict[str, TensorData], location: str = "") -> onnx.TensorProto:
    """Return an initializer: a small one with its data inside, else a reference to the data, which joins `weights`."""
    if data.nbytes < INLINE_BYTES:
        return tensor_proto(data, name)
    weights[location or name] = data
    tensor = onnx.TensorProto(name=name, data_type=elem_type(data.dtype), dims=data.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location or name)
    return tensor


class _Taker:
    """Takes the weights out of one model."""

    def __init__(self, files: TensorFiles) -> None:
        self.weights: dict[str, TensorData] = {}
        self._files = files
        self._names = UniqueNames()

    def graph(self, graph: onnx.GraphProto, *, main: bool, constants: bool) -> None:
        """Take out the weights of one graph; those of initializers of the main graph are out already."""
        if not main:
            for tensor in graph.initializer:
                tensor.CopyFrom(self.initializer(tensor))
        for sparse in graph.sparse_initializer:
            self._bring_in(sparse.values)
            self._bring_in(sparse.indices)
        names = [tensor.name for tensor in graph.initializer]
        if len({*names}) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConversionError(f"graph {graph.name!r} has duplicate initializers: {', '.join(twice)}")
        if constants:
            self._constants(graph)
        self.attributes(graph.node)

    def initializer(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return the tensor of the light model: the given one or a reference."""
        if not tensor.name:
            raise ConversionError("the model has an initializer without a name")
        data = tensor_data(tensor, self._files)
        if data.dtype is DType.STRING or data.nbytes < INLINE_BYTES:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            return tensor_proto(data, tensor.name) if external else tensor
        light = placed(tensor.name, data, self.weights, self._names.unique(tensor.name))
        if tensor.doc_string:
            light.doc_string = tensor.doc_string
        light.metadata_props.extend(tensor.metadata_props)
        return light

    def attributes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Bring the data of tensors that are attributes inside."""
        for node in nodes:
            for attribute in node.attribute:
                sparse = (attribute.sparse_tensor, *attribute.sparse_tensors)
                parts = (part for item in sparse for part in (item.values, item.indices))
                for tensor in (attribute.t, *attribute.tensors, *parts):  # empty ones where there are none
                    self._bring_in(tensor)

    def _bring_in(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(tensor_proto(tensor_data(tensor, self._files), tensor.name))

    def _constants(self, graph: onnx.GraphProto) -> None:
        """Make initializers of the large Constant nodes of a graph."""
        kept = []
        for node in graph.node:
            value = next((item.t for item in node.attribute if item.name == "value" and item.HasField("t")), None)
            constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1
            if constant and value is not None and tensor_data(value, self._files).nbytes >= INLINE_BYTES:
                value.name = node.output[0]
                graph.initializer.append(self.initializer(value))
            else:
                kept.append(node)
        if len(kept) != len(graph.node):
            set_items(graph.node, kept)


@dataclass(frozen=True)
class BundleWeights:
    """Looks up the weights that a bundle's model refers to; a `TensorFiles`."""

    weights: Mapping[str, TensorData]

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[np.uint8], FileRange | None]:
        """Return the bytes of a weight; see `TensorFiles.read`."""
        data = self.weights.get(location_of(tensor))
        if data is None or data.nbytes != nbytes:
            stored = "which is not there" if data is None else f"which has {data.nbytes} bytes"
            raise ConversionError(f"tensor {tensor.name!r} needs {nbytes} bytes of {location_of(tensor)!r}, {stored}")
        return data.buffer, data.source


def _types(values: Iterable[onnx.ValueInfoProto]) -> dict[str, ValueType]:
    return {value.name: type_of(value.type) for value in values}
