"""Data of tensors that stays in files: external data files, and model files whose raw data is not read.

A model from elsewhere must not make this process read a file outside its folder, hang on a pipe, or read beyond the
end of a file, so each reference to external data is refused unless it is a plain range of a plain file inside the
folder, or inside one that the caller trusts with links that leave it, as a download cache has them.

A model file is mapped. A protobuf message is a list of fields, each a key, a length and that many bytes: the reader
walks the fields of the model and of its main graph, leaves out the raw data of initializers, notes where it is, and
parses the rest. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import refer
from rlx_ort.converters.protos import field_key, varint
from rlx_ort.errors import ConversionError, advice
from rlx_ort.ir.tensor import FileRange
from rlx_ort.storage import open_regular

if TYPE_CHECKING:
    import onnx

Folders: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""One folder or several."""

_Span: TypeAlias = tuple[int, int]
_LEFT_BEHIND_BYTES = 128  # a reference takes as much as smaller data


def trusted_folders(folders: Folders) -> tuple[Path, ...]:
    """Return folders that links may lead into, without links in their own paths.

    Raises:
        ConversionError: one of them is no folder.
    """
    given = [folders] if isinstance(folders, str | os.PathLike) else folders
    trusted = []
    for folder in given:
        try:
            path = Path(folder).resolve(strict=True)
        except (OSError, RuntimeError) as err:  # RuntimeError: a loop of symbolic links, before Python 3.13
            raise ConversionError(f"links into {str(folder)!r} cannot be trusted: {err}") from err
        if not path.is_dir():
            raise ConversionError(f"links into {str(folder)!r} cannot be trusted: it is not a folder")
        trusted.append(path)
    return tuple(trusted)


def mapped_file(path: Path) -> tuple[npt.NDArray[np.uint8], FileRange]:
    """Return the bytes of a regular file, mapped, and where they are; raises `OSError` if it cannot be read."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())  # of the file that was opened, whatever the name points to by now
        data = np.memmap(file, np.uint8, "r") if status.st_size else np.empty(0, np.uint8)
        return data, FileRange(str(path.resolve()), 0, FileRange.stamp_of(status))


def file_inside(folder: Path, location: str, what: str, trusted: Sequence[Path] = ()) -> Path:
    """Return the regular file that a model names relative to its folder, with every link followed.

    Args:
        folder: the folder of the model.
        location: the name, as the model gives it.
        what: what is in the file, and how the model refers to it, for messages: `the config names`.
        trusted: folders that a link may lead into; see `trusted_folders`.

    Raises:
        ConversionError: it is no relative path, leads out of these folders, cannot be read, or has further hard links.
    """
    parts = PurePosixPath(location.replace("\\", "/")).parts
    rooted = PureWindowsPath(location).drive or PureWindowsPath(location).root or PurePosixPath(location).root
    if not parts or rooted or ".." in parts or "\0" in location:
        raise ConversionError(f"{what} {location!r}; external data must be a relative path inside the folder")
    try:
        folder = folder.resolve(strict=True)
        path = folder.joinpath(*parts).resolve(strict=True)
        status = path.stat()
    except (OSError, RuntimeError, ValueError) as err:  # loops of links before Python 3.13; no text of the file system
        raise ConversionError(f"{what} {location!r}, which cannot be read: {err}") from err
    if not any(path.is_relative_to(root) for root in (folder, *trusted)):
        raise ConversionError(
            f"{what} {location!r}, a link that leaves {folder} for {path}; put the file itself there, or name a folder "
            f"that you trust the linked files of: {advice('trusted_links=FOLDER', '--trust-links FOLDER')}"
        )
    if not stat.S_ISREG(status.st_mode):
        raise ConversionError(f"{what} {location!r}, which is not a regular file")
    if status.st_nlink > 1:
        raise ConversionError(
            f"{what} {location!r}, which has {status.st_nlink} hard links, so it may be someone else's "
            "file under another name; copy it instead of linking it"
        )
    return path


class TensorFiles(Protocol):
    """Gives the data of external tensors."""

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[Any], FileRange | None]:
        """Return the bytes of a tensor, and where in a file they are if they are mapped.

        Raises:
            ConversionError: there are no such bytes.
        """


class ExternalFiles:
    """The data files beside one model; each is mapped once. Links may lead into `trusted` folders."""

    def __init__(self, folder: Path | None, trusted: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._trusted = trusted
        self._maps: dict[Path, tuple[npt.NDArray[np.uint8], FileRange]] = {}

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[Any], FileRange]:
        """Return a view of the mapped file, which must be a file in the folder and long enough; see `TensorFiles`."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        what = f"tensor {tensor.name!r}"
        location = entries.get("location", "")
        offset = _number(entries.get("offset", "0"), "offset", what)
        length = _number(entries.get("length", "0"), "length", what) or nbytes
        if length != nbytes:
            raise ConversionError(f"{what} needs {nbytes} bytes, its external data says {length}")
        path = self._checked(location, what)
        if path not in self._maps:
            try:
                self._maps[path] = mapped_file(path)
            except OSError as err:
                raise ConversionError(f"{what} is in {path}, which cannot be read: {err}") from err
        data, place = self._maps[path]
        if offset + length > data.size:
            raise ConversionError(
                f"{what} is bytes {offset} to {offset + length} of {path.name}, which has {data.size}; "
                "the file is truncated or belongs to another model"
            )
        return data[offset : offset + length], FileRange(place.path, offset, place.stamp)

    def _checked(self, location: str, what: str) -> Path:
        if self._folder is None:
            raise ConversionError(f"{what} is in the file {location!r}; pass base_dir to say in which folder that is")
        return file_inside(self._folder, location, f"{what} is in", self._trusted)


def _number(text: str, key: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ConversionError(f"the external data of {what} has {key} {text!r}, which is not a size in bytes")
    return int(text)


@dataclass(frozen=True, slots=True)
class MappedFiles:
    """Data of a mapped model file, found by a location that no other tensor can name, and data files beside it."""

    mark: str
    data: npt.NDArray[np.uint8]
    place: FileRange
    beside: ExternalFiles

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[Any], FileRange | None]:
        """Return a view of the mapped model file, or of a data file beside it; see `TensorFiles`."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries.get("location") != self.mark:
            return self.beside.read(tensor, nbytes)
        offset, length = int(entries["offset"]), int(entries["length"])
        if length != nbytes:
            raise ConversionError(f"tensor {tensor.name!r} needs {nbytes} bytes, it has {length}")
        return self.data[offset : offset + length], FileRange(self.place.path, offset, self.place.stamp)


def parsed_model(source: bytes | onnx.ModelProto, what: str) -> onnx.ModelProto:
    """Return a model from its bytes, or the one given, checked to be one; `what` names it in messages.

    Raises:
        ConversionError: it is no ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no types

    model = onnx.ModelProto() if isinstance(source, bytes) else source
    if isinstance(source, bytes):
        if not source:
            raise ConversionError(f"{what}: empty, so not an ONNX model")
        try:
            model.ParseFromString(source)
        except (DecodeError, RecursionError) as err:
            raise ConversionError(f"{what}: not an ONNX model, or damaged, or above 2 GB: {err}") from err
    if not model.HasField("graph") or model.ir_version < 1:
        raise ConversionError(f"{what}: not an ONNX model; it has no {'graph' if model.ir_version else 'IR version'}")
    return model


def read_mapped(path: Path, trusted: Sequence[Path] = ()) -> tuple[onnx.ModelProto, MappedFiles]:
    """Return a model file without the raw data of its main graph's initializers, and where that is.

    Links of its data files may lead into `trusted` folders.

    Raises:
        ConversionError: there is no such file, or it is no ONNX model.
    """
    try:
        data, place = mapped_file(path)
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    if not data.size:
        raise ConversionError(f"{path} is empty")
    mark = f"\0{os.urandom(16).hex()}"
    try:
        light = _Reader(data.data, mark).model()
    except (ValueError, IndexError) as err:
        raise ConversionError(f"{path}: not an ONNX model, or a damaged one: {err}") from err
    model = parsed_model(light, str(path))
    return model, MappedFiles(mark, data, place, ExternalFiles(path.parent, trusted))


class _Reader:
    """Copies all of a serialized model but the raw data of initializers."""

    def __init__(self, data: memoryview, mark: str) -> None:
        import onnx

        self._data = data
        self._mark = mark
        self._graph = onnx.ModelProto.GRAPH_FIELD_NUMBER
        self._initializer = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
        self._raw_data = onnx.TensorProto.RAW_DATA_FIELD_NUMBER

    def model(self) -> bytes:
        """Return the model; several graph fields, which protobuf merges, become one."""
        rest: list[bytes] = []
        graph: list[bytes] = []
        external = False
        for number, whole, content in self._fields((0, len(self._data))):
            if number == self._graph and content is not None:
                external = True
                graph.extend(self._graph_parts(content))
            else:
                rest.append(self._bytes(whole))
        return b"".join(rest) + (_field(self._graph, b"".join(graph)) if external else b"")

    def _graph_parts(self, span: _Span) -> Iterator[bytes]:
        for number, whole, content in self._fields(span):
            if number == self._initializer and content is not None:
                yield _field(number, self._tensor(content))
            else:
                yield self._bytes(whole)

    def _tensor(self, span: _Span) -> bytes:
        if span[1] - span[0] < _LEFT_BEHIND_BYTES:
            return self._bytes(span)
        parts: list[bytes] = []
        raw: _Span | None = None
        for number, whole, content in self._fields(span):
            if number == self._raw_data and content is not None:
                raw = content  # of several, the last one counts
            else:
                parts.append(self._bytes(whole))
        if raw is None or raw[1] - raw[0] < _LEFT_BEHIND_BYTES:
            return self._bytes(span)
        import onnx

        where = onnx.TensorProto()
        refer(where, self._mark, raw[0], raw[1] - raw[0])
        reference: bytes = where.SerializeToString()
        return b"".join(parts) + reference

    def _bytes(self, span: _Span) -> bytes:
        return bytes(self._data[span[0] : span[1]])

    def _fields(self, span: _Span) -> Iterator[tuple[int, _Span, _Span | None]]:
        """Yield (number, the whole field, the content where that has a length) of every field in a range."""
        at, end = span
        while at < end:
            start = at
            key, at = self._varint(at, end)
            content: _Span | None = None
            match key & 7:
                case 0:
                    _, at = self._varint(at, end)
                case 1:
                    at += 8
                case 2:
                    length, at = self._varint(at, end)
                    content = (at, at + length)
                    at += length
                case 5:
                    at += 4
                case other:
                    raise ValueError(f"byte {start} begins a field of wire type {other}")
            if at > end or not key >> 3:
                raise ValueError(f"the field at byte {start} reaches beyond its message, which ends at byte {end}")
            yield key >> 3, (start, at), content

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise ValueError(f"the number before byte {at} has no end")


def _field(number: int, content: bytes) -> bytes:
    """Return a field with a length."""
    return field_key(number) + varint(len(content)) + content
