"""`ModelBundle`: a model on its way through a conversion, with its weights beside it and not in it.

Sources make bundles, transforms turn one into another, targets write them. The protobuf part stays small whatever the
size of the model, so it can be copied and edited freely; a weight that comes from a file is mapped, and its bytes are
read when they are written or computed with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import FileRange, TensorData

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx
    import onnx_ir

    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.types import ValueType
    from rlx_ort.options.compile_options import CompileOptions

__all__ = [
    "INLINE_BYTES",
    "ModelBundle",
    "bundle_from_graph",
    "bundle_from_ir",
    "bundle_of",
    "bundle_to_ir",
    "external_tensors",
    "graph_from_bundle",
    "graphs_of",
    "location_of",
    "reference",
]

INLINE_BYTES = 128
"""Tensors below this size are inside the model, as in the normal form of exported models."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelBundle:
    """An ONNX model and its weights, apart from each other.

    Attributes:
        proto: the model. Every initializer of `INLINE_BYTES` and more, in the main graph and in bodies, is an external
            reference whose location is a key of `weights`; smaller ones, strings and tensors that are attributes of
            nodes are inside. Treat it as read-only: copy it, change the copy, and call `with_proto`.
        weights: location -> data; memory maps where they come from a file. Freed, and their files closed, with the
            last reference.
        origin: what the model was made from, for messages.
    """

    proto: onnx.ModelProto
    weights: Mapping[str, TensorData]
    origin: str

    def with_proto(self, proto: onnx.ModelProto) -> ModelBundle:
        """Return a bundle of another model over these weights; those it has no reference to are dropped.

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
        from rlx_ort.converters.onnx_types import dtype_of

        for tensor in external_tensors(self.proto):
            data = weights.get(location_of(tensor))
            wanted = f"{dtype_of(tensor.data_type).value}{list(tensor.dims)}"
            found = "nothing" if data is None else f"{data.dtype.value}{list(data.shape)}"
            if found != wanted:
                raise ConversionError(f"{self.origin}: weight {tensor.name!r} is {wanted}, given is {found}")
        return replace(self, weights=dict(weights))

    @property
    def nbytes(self) -> int:
        """The bytes of the weights and of the model without them. Serializes the model's sizes, not its data."""
        return sum(data.nbytes for data in self.weights.values()) + int(self.proto.ByteSize())

    @property
    def opset(self) -> int:
        """The ai.onnx opset the model imports; 0 if it imports none, 1 before ONNX could say it."""
        versions = [entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")]
        return int(max(versions, default=1 if self.proto.ir_version < 3 else 0))

    @property
    def node_count(self) -> int:
        """The number of nodes, those of bodies included and those of functions left out."""
        return sum(len(graph.node) for graph in graphs_of(self.proto, functions=False))

    def input_types(self) -> dict[str, ValueType]:
        """Return name -> type of what a run is fed, in order; inputs that have a default are left out."""
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

    The given message is left as it is. Constants of `INLINE_BYTES` and more become initializers of their graph, where
    the IR version lets those be no inputs.

    Args:
        proto: the model.
        folder: folder of the external data; nothing outside is read.
        origin: what the model comes from, for messages.

    Raises:
        ConversionError: a tensor is damaged, nameless or there twice, or its data is not where it says or may be.
    """
    from rlx_ort.converters.from_onnx.external import ExternalFiles
    from rlx_ort.converters.take_out import take_out

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
    import onnx

    from rlx_ort.converters.onnx_types import tensor_proto
    from rlx_ort.converters.to_onnx import all_weights
    from rlx_ort.converters.to_onnx.exporter import export_model

    exported = export_model(graph, options)
    weights = all_weights(graph, exported)
    proto = onnx.ModelProto()
    proto.CopyFrom(exported.model)
    for tensor in proto.graph.initializer:
        data = weights.get(tensor.name)
        if data is None:
            continue
        if data.nbytes < INLINE_BYTES:
            tensor.CopyFrom(tensor_proto(data, tensor.name))
            del weights[tensor.name]
        else:
            tensor.CopyFrom(reference(tensor.name, data))
    return ModelBundle(proto, weights, origin or f"graph {graph.name!r}")


def graph_from_bundle(bundle: ModelBundle) -> Graph:
    """Return a bundle as a graph; the weights stay what they are, mapped or in memory.

    Raises:
        ConversionError: the model breaks a rule of ONNX that its meaning depends on.
    """
    from rlx_ort.converters.from_onnx import graph_of

    try:
        return graph_of(bundle.proto, _BundleWeights(bundle.weights))
    except ConversionError as err:
        raise ConversionError(f"{bundle.origin}: {err}") from err


def bundle_to_ir(bundle: ModelBundle) -> onnx_ir.Model:
    """Return a bundle as a model of onnx-ir whose tensors are over our weights, without a copy.

    Raises:
        ConversionError: onnx-ir is not installed, or it does not take the model.
    """
    from rlx_ort.converters.onnx_ir_bridge import model_of_bundle

    return model_of_bundle(bundle)


def bundle_from_ir(model: onnx_ir.Model, origin: str = "the model") -> ModelBundle:
    """Return a model of onnx-ir as a bundle; shares the memory of its tensors. The model is left as it is.

    Raises:
        ConversionError: a tensor has no element type here, or onnx-ir cannot serialize the model.
    """
    from rlx_ort.converters.onnx_ir_bridge import bundle_of_model

    return bundle_of_model(model, origin)


def graphs_of(model: onnx.ModelProto, *, functions: bool = True) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and every body below it, outer ones first; on request also the bodies in functions."""
    owners: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *(model.functions if functions else ())]
    while owners:
        owner = owners.pop(0)
        if hasattr(owner, "initializer"):
            yield owner
        for node in owner.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    owners.append(attribute.g)
                owners.extend(attribute.graphs)


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of the main graph and of bodies whose data is outside, as they stand in the model."""
    import onnx

    for graph in graphs_of(model):
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield tensor


def location_of(tensor: onnx.TensorProto) -> str:
    """Return the location an external tensor names, its key in `ModelBundle.weights`; empty if it names none."""
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def reference(name: str, data: TensorData, location: str = "") -> onnx.TensorProto:
    """Return an initializer that refers to `data` under a location, by default its own name."""
    import onnx

    from rlx_ort.converters.onnx_types import elem_type

    tensor = onnx.TensorProto(name=name, data_type=elem_type(data.dtype), dims=data.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location or name)
    return tensor


class _BundleWeights:
    """Reads the references of a bundle's model, as `ExternalFiles` reads those of a file."""

    def __init__(self, weights: Mapping[str, TensorData]) -> None:
        self._weights = weights

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[np.uint8], FileRange | None]:
        data = self._weights.get(location_of(tensor))
        if data is None or data.nbytes != nbytes:
            found = "which is not there" if data is None else f"which has {data.nbytes} bytes"
            raise ConversionError(f"tensor {tensor.name!r} needs {nbytes} bytes of {location_of(tensor)!r}, {found}")
        return data.buffer, data.source


def _types(values: object) -> dict[str, ValueType]:
    from rlx_ort.converters.onnx_types import type_of

    return {value.name: type_of(value.type) for value in values}  # type: ignore[attr-defined]  # protobuf's containers have no common type
