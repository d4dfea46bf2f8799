"""`Graph` -> ONNX. `to_onnx` gives one self-contained `ModelProto`; sessions use `exporter.export_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx_ort.errors import ConversionError, advice

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData
    from rlx_ort.options.compile_options import CompileOptions

__all__ = ["PROTOBUF_LIMIT", "all_weights", "to_onnx"]

PROTOBUF_LIMIT = (1 << 31) - 1
"""The most bytes one protobuf message may have."""


def to_onnx(graph: Graph, options: CompileOptions | None = None) -> onnx.ModelProto:
    """Return the graph as an ONNX model in normal form with its weights inside.

    The dims, opset, precision and kernel dispatch of the options count. By default ops get the form that every provider
    takes; `KernelDispatchPolicy.FORCE_NATIVE` writes fused ones. Copies every weight; `save_onnx` writes larger models
    to a file.

    Raises:
        GraphVerifyError: the graph breaks a rule of the IR.
        ConversionError: a node has no ONNX form, a parameter has no data, or the model would be above 2 GB.
    """
    import onnx

    from rlx_ort.converters.onnx_types import tensor_proto
    from rlx_ort.converters.to_onnx.exporter import export_model

    exported = export_model(graph, options)
    weights = all_weights(graph, exported)
    total = sum(data.nbytes for data in weights.values())
    if total + len(exported.skeleton) > PROTOBUF_LIMIT:
        raise ConversionError(
            f"graph {graph.name!r} has {total} bytes of weights, above the 2 GB of one message; "
            + advice("write it with save_onnx(graph, path, external_data=True)", "write it with --external-data")
        )
    model = onnx.ModelProto()
    model.ParseFromString(exported.skeleton)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(tensor_proto(weights[tensor.name], tensor.name))
    return model


def all_weights(graph: Graph, exported: ExportedModel) -> dict[str, TensorData]:
    """Return the data of every tensor that the exported model has outside, parameters and constants.

    Raises:
        ConversionError: a parameter has no data.
    """
    from rlx_ort.ir.tensor import narrowed

    unset = [name for name in exported.params if name not in graph.weights]
    if unset:
        raise ConversionError(f"graph {graph.name!r} has parameters without data: {', '.join(unset)}; set them first")
    params = {
        name: narrowed(graph.weights[name], exported.stored_as.get(name, graph.weights[name].dtype))
        for name in exported.params
    }
    return {**params, **exported.constants}
