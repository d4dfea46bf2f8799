"""Writes a bundle or a graph to an ONNX file, with its weights inside or in one data file beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, external_tensors, location_of
from rlx_ort.converters.to_onnx import PROTOBUF_LIMIT
from rlx_ort.converters.wire import field_key, varint
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData
from rlx_ort.storage import replacing

if TYPE_CHECKING:
    import onnx

    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions

__all__ = ["EXTERNAL_ABOVE_BYTES", "Progress", "save_bundle", "save_onnx", "written_files"]

EXTERNAL_ABOVE_BYTES = 1 << 30
"""Weights above this total go to a data file unless the caller says otherwise: 1 GiB, half of what a file may hold."""

Progress: TypeAlias = Callable[[int], None]
"""Told how many further bytes of weights were written."""

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
    save_bundle(bundle_from_graph(graph, options), path, external_data=external_data, overwrite=overwrite)


def save_bundle(
    bundle: ModelBundle,
    path: str | os.PathLike[str],
    *,
    external_data: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a bundle as an ONNX file; nothing is left behind when that fails.

    Weights are streamed: those of files go from file to file in pieces of 8 MiB, so that the memory it takes does not
    grow with the model. With external data they go to `<file name>.data` in the same folder, which is in place before
    the model that refers to it. A file that a weight of the bundle comes from may be replaced, except on Windows.

    Args:
        bundle: the model.
        path: the file to write.
        external_data: whether weights go to a data file; None decides by `EXTERNAL_ABOVE_BYTES`.
        overwrite: whether existing files may be replaced.
        progress: told how many further bytes of weights were written.

    Raises:
        ConversionError: a file exists, cannot be written or would be above 2 GB, or a weight's file has changed.
    """
    import onnx

    files = written_files(bundle, path, external_data=external_data)
    for file in files:
        if file.exists() and not overwrite:
            raise ConversionError(f"{file} exists; pass overwrite=True to replace it")
    model = onnx.ModelProto()
    model.CopyFrom(bundle.proto)
    target = files[0]
    with _as_conversion_error(target), contextlib.ExitStack() as undo:
        with _replacing(target, undo) as stream:
            if len(files) > 1:  # the data takes its place before the model that refers to it; both are whole by then
                with _replacing(files[1], undo) as data_stream:
                    _write_data(data_stream, model, bundle.weights, files[1].name, progress)
                    _write_model(stream, model, {}, progress)
            else:
                _write_model(stream, model, bundle.weights, progress)
        undo.pop_all()  # all is well: keep what was written


def written_files(
    bundle: ModelBundle, path: str | os.PathLike[str], *, external_data: bool | None = None
) -> tuple[Path, ...]:
    """Return the files that `save_bundle` writes: the model, and its data file if it gets one."""
    target = Path(path)
    if external_data is None:
        external_data = sum(data.nbytes for data in bundle.weights.values()) > EXTERNAL_ABOVE_BYTES
    return (target, target.with_name(f"{target.name}.data")) if external_data and bundle.weights else (target,)


@contextlib.contextmanager
def _replacing(path: Path, undo: contextlib.ExitStack) -> Iterator[BinaryIO]:
    """Open a stream that replaces `path`; a file that was not there before is removed when `undo` is unwound."""
    existed = path.exists()
    with replacing(path) as stream:
        yield stream
    if not existed:
        undo.callback(path.unlink, missing_ok=True)


@contextlib.contextmanager
def _as_conversion_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ConversionError(f"{path} cannot be written: {err}") from err


def _write_data(
    stream: BinaryIO,
    model: onnx.ModelProto,
    weights: Mapping[str, TensorData],
    location: str,
    progress: Progress | None,
) -> None:
    """Write the weights one after another and point the model's initializers at them."""
    offset = 0
    for tensor in external_tensors(model):
        data = weights[location_of(tensor)]
        alignment = _LARGE_ALIGNMENT if data.nbytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
        padding = -offset % alignment
        stream.write(bytes(padding))
        offset += padding
        _copy(data, stream, progress)
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", offset), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        offset += data.nbytes


def _write_model(
    stream: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, TensorData], progress: Progress | None
) -> None:
    """Write the model with its weights inside, without ever holding a second copy of those of the main graph.

    A message is its fields one after another, so the weights are written as fields of the graph by hand.
    """
    import onnx

    from rlx_ort.converters.onnx_types import tensor_proto

    external = onnx.TensorProto.EXTERNAL
    outside = [t for t in model.graph.initializer if t.data_location == external and location_of(t) in weights]
    fields: list[tuple[bytes, TensorData]] = []
    for tensor in outside:
        data = weights[location_of(tensor)]
        head = onnx.TensorProto()
        head.CopyFrom(tensor)
        head.ClearField("external_data")
        head.ClearField("data_location")
        header = (
            head.SerializeToString(deterministic=True)
            + field_key(onnx.TensorProto.RAW_DATA_FIELD_NUMBER)
            + varint(data.nbytes)
        )
        length = varint(len(header) + data.nbytes)
        fields.append((field_key(onnx.GraphProto.INITIALIZER_FIELD_NUMBER) + length + header, data))
    if fields:
        names = {tensor.name for tensor in outside}
        kept = onnx.GraphProto(initializer=[t for t in model.graph.initializer if t.name not in names])
        del model.graph.initializer[:]
        model.graph.MergeFrom(kept)
    for tensor in external_tensors(model):
        if location_of(tensor) in weights:  # one of a body
            tensor.CopyFrom(tensor_proto(weights[location_of(tensor)], tensor.name))
    body = model.graph.SerializeToString(deterministic=True)
    total = len(body) + sum(len(header) + data.nbytes for header, data in fields)
    model.ClearField("graph")
    head_bytes = model.SerializeToString(deterministic=True)
    if total + len(head_bytes) + 16 > PROTOBUF_LIMIT:
        raise ConversionError(f"the model is {total} bytes, above the 2 GB of one file; pass external_data=True")
    stream.write(head_bytes + field_key(onnx.ModelProto.GRAPH_FIELD_NUMBER) + varint(total) + body)
    for header, data in fields:
        stream.write(header)
        _copy(data, stream, progress)


def _copy(data: TensorData, stream: BinaryIO, progress: Progress | None) -> None:
    """Write the bytes of a tensor; those of a file are read from it, since reading a map would fill the memory."""
    for piece in data.pieces():
        stream.write(piece)
        if progress is not None:
            progress(len(piece))
