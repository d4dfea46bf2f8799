"""Writes a graph to an ONNX file, with its weights inside or in one data file beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rlx_ort.converters.to_onnx import PROTOBUF_LIMIT, all_weights
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    import onnx

    from rlx_ort.execution.options import CompileOptions
    from rlx_ort.ir.graph import Graph

__all__ = ["EXTERNAL_ABOVE_BYTES", "save_onnx"]

EXTERNAL_ABOVE_BYTES = 1 << 30
"""Weights above this total go to a data file unless the caller says otherwise: 1 GiB, half of what a file may hold."""

_LARGE_BYTES = 1 << 20
_LARGE_ALIGNMENT = 1 << 16  # what Windows needs to map a tensor; Linux and macOS are content with 4 or 16 KiB
_SMALL_ALIGNMENT = 64


def save_onnx(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    external_data: bool | None = None,
    overwrite: bool = False,
    options: CompileOptions | None = None,
) -> None:
    """Write the graph as an ONNX file in normal form; nothing is left behind when that fails.

    Weights are streamed from where they are. With external data they go to `<file name>.data` in the same folder,
    which is in place before the model that refers to it.

    Args:
        graph: the graph; every parameter needs data.
        path: the file to write.
        external_data: whether weights go to a data file; None decides by `EXTERNAL_ABOVE_BYTES`.
        overwrite: whether existing files may be replaced.
        options: what the model is to be like: dims, opset, precision and kernel dispatch; see `to_onnx`.

    Raises:
        GraphVerifyError: the graph breaks a rule of the IR.
        ConversionError: a file exists, cannot be written or would be above 2 GB, or a parameter has no data.
    """
    import onnx

    from rlx_ort.converters.to_onnx.exporter import export_model

    exported = export_model(graph, options)
    weights = all_weights(graph, exported)
    if external_data is None:
        external_data = sum(data.nbytes for data in weights.values()) > EXTERNAL_ABOVE_BYTES
    target = Path(path)
    data_file = target.with_name(f"{target.name}.data")
    written = [target, data_file] if external_data and weights else [target]
    for file in written:
        if file.exists() and not overwrite:
            raise ConversionError(f"{file} exists; pass overwrite=True to replace it")
    model = onnx.ModelProto.FromString(exported.skeleton)
    with _as_conversion_error(target), contextlib.ExitStack() as stack:
        if data_file in written:
            with _replacing(data_file, stack) as stream:
                _write_data(stream, model, weights, data_file.name)
            weights = {}
        with _replacing(target, stack) as stream:
            _write_model(stream, model, weights)
        stack.pop_all()  # all is well: keep what was written


@contextlib.contextmanager
def _replacing(path: Path, undo: contextlib.ExitStack) -> Iterator[BinaryIO]:
    """Give a stream to a temporary file that takes the place of `path` at the end, or vanishes on an error.

    A file that was not there before is removed again when `undo` is unwound.
    """
    existed = path.exists()
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not existed:
        undo.callback(path.unlink, missing_ok=True)


@contextlib.contextmanager
def _as_conversion_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ConversionError(f"{path} cannot be written: {err}") from err


def _write_data(stream: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, TensorData], location: str) -> None:
    """Write the weights one after another and point the model's initializers at them."""
    from rlx_ort.converters.onnx_types import tensor_proto

    offset = 0
    for tensor in model.graph.initializer:
        data = weights.get(tensor.name)
        if data is None:
            continue
        if not data.nbytes:
            tensor.CopyFrom(tensor_proto(data, tensor.name))
            continue
        alignment = _LARGE_ALIGNMENT if data.nbytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
        padding = -offset % alignment
        stream.write(bytes(padding))
        offset += padding
        stream.write(data.buffer.data)
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", offset), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        offset += data.nbytes


def _write_model(stream: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, TensorData]) -> None:
    """Write the model with `weights` inside, without ever holding a second copy of them.

    A message is its fields one after another, so the weights are written as fields of the graph by hand.
    """
    import onnx

    from rlx_ort.converters.onnx_types import tensor_proto

    outside = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in weights}
    fields: list[tuple[bytes, TensorData]] = []
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    del graph.initializer[:]
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in outside)
    for name in outside:
        data = weights[name]
        if not data.nbytes:
            graph.initializer.append(tensor_proto(data, name))
            continue
        header = onnx.TensorProto(name=name, data_type=outside[name].data_type, dims=data.shape).SerializeToString()
        header += _tag(onnx.TensorProto, "raw_data") + _varint(data.nbytes)
        length = _varint(len(header) + data.nbytes)
        fields.append((_tag(onnx.GraphProto, "initializer") + length + header, data))
    body = graph.SerializeToString(deterministic=True)
    total = len(body) + sum(len(header) + data.nbytes for header, data in fields)
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    head = rest.SerializeToString(deterministic=True)
    if total + len(head) + 16 > PROTOBUF_LIMIT:
        raise ConversionError(f"the model is {total} bytes, above the 2 GB of one file; pass external_data=True")
    stream.write(head + _tag(onnx.ModelProto, "graph") + _varint(total) + body)
    for header, data in fields:
        stream.write(header)
        stream.write(data.buffer.data)


def _tag(message: type, field: str) -> bytes:
    """Return the key of a length-delimited field."""
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2)  # type: ignore[attr-defined]  # protobuf messages have it


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
