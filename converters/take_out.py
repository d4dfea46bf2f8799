"""Takes the weights out of a model: what is left is small, and refers to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlx_ort.converters.bundle import INLINE_BYTES, graphs_of, reference
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.onnx_types import tensor_proto
from rlx_ort.converters.to_onnx.writer import UniqueNames
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.from_onnx.external import TensorFiles

__all__ = ["take_out"]

_FREE_INITIALIZERS = 4  # the IR version from which an initializer need not be an input too


def take_out(proto: onnx.ModelProto, files: TensorFiles) -> tuple[onnx.ModelProto, dict[str, TensorData]]:
    """Return a copy of a model whose large initializers are references, and their data by location.

    Raises:
        ConversionError: an initializer is damaged, nameless or there twice, or its data cannot be had.
    """
    import onnx

    light = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            _assign(light, field, value)
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":  # copying the weights first would double the peak
            _assign(light.graph, field, value)
    light.graph.SetInParent()
    taker = _Taker(files, light.ir_version >= _FREE_INITIALIZERS, UniqueNames())
    for tensor in proto.graph.initializer:
        light.graph.initializer.append(taker.initializer(tensor))
    for index, graph in enumerate(graphs_of(light)):
        taker.graph(graph, main=not index)
    for function in light.functions:
        taker.attributes(function.node)
    return light, taker.weights


def _assign(message: onnx.ModelProto | onnx.GraphProto, field: object, value: object) -> None:
    name = field.name  # type: ignore[attr-defined]  # protobuf's descriptors have no types
    if hasattr(value, "MergeFrom"):  # a message or a repeated field
        getattr(message, name).MergeFrom(value)
    else:
        setattr(message, name, value)


class _Taker:
    """Collects the data of one model."""

    def __init__(self, files: TensorFiles, free: bool, names: UniqueNames) -> None:
        self.weights: dict[str, TensorData] = {}
        self._files = files
        self._free = free
        self._names = names

    def graph(self, graph: onnx.GraphProto, *, main: bool) -> None:
        """Take out what one graph holds; of the main graph, the initializers are done."""
        if not main:
            for tensor in graph.initializer:
                tensor.CopyFrom(self.initializer(tensor))
        for sparse in graph.sparse_initializer:
            self._bring_in(sparse.values)
            self._bring_in(sparse.indices)
        names = [tensor.name for tensor in graph.initializer]
        if len({*names}) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConversionError(f"graph {graph.name!r} has initializers twice: {', '.join(twice)}")
        if self._free:
            self._constants(graph)
        self.attributes(graph.node)

    def initializer(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return the tensor as it stands in the light model."""
        if not tensor.name:
            raise ConversionError("the model has an initializer without a name")
        data = tensor_data(tensor, self._files)
        if data.dtype is DType.STRING or data.nbytes < INLINE_BYTES:
            return self._inside(tensor, data)
        location = self._names.unique(tensor.name)
        self.weights[location] = data
        light = reference(tensor.name, data, location)
        if tensor.doc_string:
            light.doc_string = tensor.doc_string
        light.metadata_props.extend(tensor.metadata_props)
        return light

    def attributes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Bring the data of tensors that are attributes inside."""
        for node in nodes:
            for attribute in node.attribute:
                sparse = [*attribute.sparse_tensors]
                sparse += [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
                tensors = [*attribute.tensors, *([attribute.t] if attribute.HasField("t") else [])]
                for tensor in (*tensors, *(part for item in sparse for part in (item.values, item.indices))):
                    self._bring_in(tensor)

    def _bring_in(self, tensor: onnx.TensorProto) -> None:
        import onnx

        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(self._inside(tensor, tensor_data(tensor, self._files)))

    def _inside(self, tensor: onnx.TensorProto, data: TensorData) -> onnx.TensorProto:
        import onnx

        return tensor if tensor.data_location != onnx.TensorProto.EXTERNAL else tensor_proto(data, tensor.name)

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
            nodes = [type(node).FromString(node.SerializeToString()) for node in kept]
            del graph.node[:]
            graph.node.extend(nodes)
