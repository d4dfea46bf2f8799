"""Reads a model from a path, bytes or a `ModelProto`, and makes the light copy that shape inference works on."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import onnx

__all__ = ["Source", "is_fully_typed", "read_model", "skeleton"]

Source: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"

_SMALL_BYTES = 1024


def read_model(source: Source, base_dir: str | os.PathLike[str] | None) -> tuple[onnx.ModelProto, Path | None]:
    """Return the model and the folder of its external data, None when that is unknown.

    Raises:
        ConversionError: there is no such file, or it is no ONNX model.
    """
    import onnx

    folder = None if base_dir is None else Path(base_dir)
    if isinstance(source, onnx.ModelProto):
        return _checked(source, "the model"), folder
    if isinstance(source, bytes | bytearray | memoryview):
        return _checked(_parsed(bytes(source), "the bytes"), "the bytes"), folder
    path = Path(source)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConversionError(f"{path} is no regular file; give the path of an .onnx file")
        data = path.read_bytes()
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    return _checked(_parsed(data, str(path)), str(path)), folder or path.parent


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the data of large weights, which become inputs: shapes are inferred from it."""
    import onnx

    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    inputs = {value.name for value in source.input}
    for tensor in source.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < _SMALL_BYTES:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in source.sparse_initializer:
        if sparse.values.name not in inputs:
            values = sparse.values
            graph.input.append(onnx.helper.make_tensor_value_info(values.name, values.data_type, sparse.dims))
    return light


def is_fully_typed(model: onnx.ModelProto) -> bool:
    """Return whether a model says itself what type each of its values has, so that nothing needs to be inferred.

    Torch writes such models; inference costs as much time and memory as the rest of an import.
    """
    return not model.functions and _declares_all(model.graph)


def _declares_all(graph: onnx.GraphProto) -> bool:
    declared = {info.name for info in (*graph.value_info, *graph.output) if _is_ranked(info.type)}
    if any(name and name not in declared for node in graph.node for name in node.output):
        return False
    bodies = [attribute for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return not any(attribute.graphs for node in graph.node for attribute in node.attribute) and all(
        _declares_all(attribute.g) for attribute in bodies
    )


def _is_ranked(kind: onnx.TypeProto) -> bool:
    tensor = kind.tensor_type
    return bool(tensor.elem_type) and tensor.HasField("shape")


def _parsed(data: bytes, what: str) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no types

    if not data:
        raise ConversionError(f"{what}: empty, so no ONNX model")
    try:
        model = onnx.ModelProto()
        model.ParseFromString(data)
        return model
    except (DecodeError, RecursionError) as err:
        raise ConversionError(f"{what}: no ONNX model, or damaged or above 2 GB: {err}") from err


def _checked(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    if not model.HasField("graph") or model.ir_version < 1:
        raise ConversionError(f"{what}: no ONNX model; it has no {'graph' if model.ir_version else 'IR version'}")
    return model
