"""Reads a model file as a graph, and writes ONNX files: those of a model appear together, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import onnx

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, external_tensors, graph_from_bundle, location_of
from rlx_ort.converters.from_onnx import Source, from_onnx
from rlx_ort.converters.from_onnx.tensor_files import Folders
from rlx_ort.converters.onnx_types import refer, tensor_proto
from rlx_ort.converters.protos import copied, field_key, set_items, varint
from rlx_ort.converters.to_onnx import PROTOBUF_LIMIT
from rlx_ort.errors import ConversionError, WriteError, advice
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.serde import load_json
from rlx_ort.ir.tensor import TensorData
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.storage import (
    clear_unfinished,
    open_regular,
    partial_path,
    put_in_place,
    remove,
    replacing,
    unfinished,
)

EXTERNAL_ABOVE_BYTES = 1 << 30
"""Weights above this total go to a data file by default: 1 GiB, half of the limit of one protobuf file."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of further bytes of weights written."""

_LARGE_BYTES = 1 << 20
_LARGE_ALIGNMENT = 1 << 16  # Windows needs this to map a tensor; Linux and macOS are content with 4 or 16 KiB
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
        options: dims, opset, precision and kernel dispatch of the model; see `to_onnx`.

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
    the model that refers to it. A file that a weight of the bundle comes from may be replaced, except on Windows. If
    `external_data` is None, `EXTERNAL_ABOVE_BYTES` decides. `progress` is called with the number of further bytes of
    weights written.

    Raises:
        ConversionError: a file exists, cannot be written or would be above 2 GB, or a weight's file has changed.
    """
    files = written_files(bundle, path, external_data=external_data)
    refuse_existing(files, overwrite=overwrite)
    model, inside = copied(bundle.proto), bundle.weights
    try:
        with staging(files[0]) as stage:
            made = [stage.path.with_name(file.name) for file in files]
            for file in made[1:]:
                with replacing(file) as stream:
                    _write_data(stream, model, inside, file.name, progress)
                inside = {}
            with replacing(stage.path) as stream:
                _write_model(stream, model, inside, progress)
            stage.publish(made, overwrite=True)
    except OSError as err:
        raise WriteError(f"{files[0]} cannot be written: {err}") from err


def written_files(
    bundle: ModelBundle, path: str | os.PathLike[str], *, external_data: bool | None = None
) -> tuple[Path, ...]:
    """Return the files that `save_bundle` writes: the model, and its data file if it gets one."""
    target = Path(path)
    if external_data is None:
        external_data = sum(data.nbytes for data in bundle.weights.values()) > EXTERNAL_ABOVE_BYTES
    return (target, target.with_name(f"{target.name}.data")) if external_data and bundle.weights else (target,)


def _write_data(
    stream: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, TensorData], name: str, progress: Progress | None
) -> None:
    """Write the weights one after another and point the model's initializers at them."""
    offset = 0
    for tensor in external_tensors(model):
        data = weights[location_of(tensor)]
        alignment = _LARGE_ALIGNMENT if data.nbytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
        offset += stream.write(bytes(-offset % alignment))
        _copy(data, stream, progress)
        refer(tensor, name, offset, data.nbytes)
        offset += data.nbytes


def _write_model(
    stream: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, TensorData], progress: Progress | None
) -> None:
    """Write the model with its weights inside, without ever holding a second copy of those of the main graph.

    A message is its fields one after another, so the weights are written as fields of the graph by hand.
    """
    raw, field = onnx.TensorProto.RAW_DATA_FIELD_NUMBER, onnx.GraphProto.INITIALIZER_FIELD_NUMBER
    fields: list[tuple[bytes, TensorData]] = []
    inside = []
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL or location_of(tensor) not in weights:
            inside.append(tensor)
            continue
        data = weights[location_of(tensor)]
        head = copied(tensor)
        head.ClearField("external_data")
        head.ClearField("data_location")
        header = head.SerializeToString(deterministic=True) + field_key(raw) + varint(data.nbytes)
        fields.append((field_key(field) + varint(len(header) + data.nbytes) + header, data))
    if fields:
        set_items(model.graph.initializer, inside)
    for tensor in external_tensors(model):
        if location_of(tensor) in weights:  # one of a body
            tensor.CopyFrom(tensor_proto(weights[location_of(tensor)], tensor.name))
    body = model.graph.SerializeToString(deterministic=True)
    total = len(body) + sum(len(header) + data.nbytes for header, data in fields)
    model.ClearField("graph")
    head_bytes = model.SerializeToString(deterministic=True)
    if total + len(head_bytes) + 16 > PROTOBUF_LIMIT:
        external = advice("external_data=True", "--external-data")
        raise ConversionError(f"the model is {total} bytes, above the 2 GB of one file; pass {external}")
    stream.write(head_bytes + field_key(onnx.ModelProto.GRAPH_FIELD_NUMBER) + varint(total) + body)
    for header, data in fields:
        stream.write(header)
        _copy(data, stream, progress)


def _copy(data: TensorData, stream: BinaryIO, progress: Progress | None) -> None:
    for piece in data.pieces():  # those of a file are read from it, since reading a map would fill the memory
        stream.write(piece)
        if progress is not None:
            progress(len(piece))


class Staging:
    """A folder to write in: the main file to `path`, under its final name, other files beside it."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.path = folder / target.name
        self._folder = folder
        self._target = target

    def publish(self, files: Sequence[Path], *, overwrite: bool) -> list[Path]:
        """Move files to the target's folder, the main one last; the old files are restored when a move fails.

        A reader sees the old or the new main file, whole in both cases; the files it refers to are in place first.

        Raises:
            ConversionError: a file is there already and may not be replaced, or cannot be moved.
        """
        order = sorted(files, key=lambda file: file == self.path)
        places = [self._target.parent / file.relative_to(self._folder) for file in order]
        refuse_existing(places, overwrite=overwrite)
        saved = self._folder / ".replaced"
        saved.mkdir()
        with contextlib.ExitStack() as undo:
            try:
                for file, place in zip(order, places, strict=True):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    if file != self.path and place.exists():
                        put_in_place(place, saved / place.name)
                        undo.callback(put_in_place, saved / place.name, place)
                    elif file != self.path:  # the last one needs no way back
                        undo.callback(place.unlink, missing_ok=True)
                    put_in_place(file, place)
            except OSError as err:
                hint = "on Windows no process may have the old file open" if os.name == "nt" else "check its rights"
                raise WriteError(f"{self._target} cannot be put in place: {err}; {hint}") from err
            undo.pop_all()
        return [self._target, *(place for place in places if place != self._target)]


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Staging]:
    """Give a hidden folder beside a target, on the same file system; it is always removed afterwards.

    Files that killed processes left beside the target are removed.

    Raises:
        ConversionError: the folder cannot be made.
    """
    clear_unfinished(target.parent)
    folder = partial_path(target, "converting")
    try:
        folder.mkdir()
    except OSError as err:
        raise WriteError(f"{target} cannot be written: {err}; give a target in a folder that exists") from err
    unfinished.add(folder)
    try:
        yield Staging(folder, target)
    finally:
        unfinished.discard(folder)
        remove(folder)


def refuse_existing(places: Sequence[Path], *, overwrite: bool) -> None:
    """Raise `ConversionError` if a place is a folder, or a file that may not be replaced."""
    for place in places:
        if place.is_dir():
            raise ConversionError(f"{place} is a folder; give the name of a file")
        if place.exists() and not overwrite:
            remedy = advice("overwrite=True", "--force")
            raise ConversionError(f"{place} exists and was left as it is; give {remedy} to replace it")


def load_graph(source: Source, *, trusted_links: Folders = ()) -> Graph:
    """Return the graph in a model file, as `from_onnx` or by the format of the file; the content decides, not the name.

    Args:
        source: the path of an ONNX file, an IR JSON file or an exported program of PyTorch (`.pt2`); or the bytes of an
            ONNX model, or a `ModelProto`.
        trusted_links: folders that links of an ONNX file's external data may lead into; see `from_onnx`.

    Raises:
        ConversionError: there is no such file, or it is none of these; known formats are named.
    """
    if not isinstance(source, str | os.PathLike):
        return from_onnx(source, trusted_links=trusted_links)
    file = Path(source)
    if not file.is_file():
        raise ConversionError(f"{file} is not a file; give the path of a model, such as an .onnx file")
    try:
        with open_regular(file) as stream:
            head = stream.read(64)
    except OSError as err:
        raise ConversionError(f"{file} cannot be read: {err}") from err
    as_json = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    failure = None
    if as_json or _may_be_onnx(head):
        try:
            return load_json(file) if as_json else from_onnx(file, trusted_links=trusted_links)
        except ConversionError as err:
            failure = err
    # Imported late: this takes 0.1 s.
    from rlx_ort.converters.sources.open import Format, format_of, open_source

    try:
        if failure is not None and format_of(file)[0] in (Format.ONNX, Format.IR_JSON):
            raise failure
    finally:
        del failure  # which has this frame, and would keep the file mapped until garbage is collected
    return graph_from_bundle(open_source(file))


def _may_be_onnx(head: bytes) -> bool:
    """Return whether a file may be a `ModelProto` by its first byte, and is no zip archive and no safetensors file."""
    return bool(head) and head[0] & 7 in (0, 2) and not head.startswith(b"PK") and head[8:9] != b"{"
