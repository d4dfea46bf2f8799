"""Graphs as JSON with a schema version; weights and constants above 1 KB go to a safetensors file beside it.

The encoding walks the fields of the op dataclasses, so a new op needs nothing here. Values that JSON lacks are
written as objects with one key that begins with `$`.
"""

from __future__ import annotations

import base64
import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlx_ort.errors import ConversionError, GraphVerifyError, WriteError
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op, op_class
from rlx_ort.ir.tensor import TensorData, read_tensors, write_tensors
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType, ValueType
from rlx_ort.storage import parse_json, read_regular, write_atomic

FORMAT = "rlx_ort graph"
"""Value of the `format` entry of a graph file."""
SCHEMA = 1
"""Version of the encoding; its own and older versions can be read."""

_INLINE_BYTES = 1024
_NO_NUMBERS = ("inf", "-inf", "nan")


def to_json(graph: Graph) -> tuple[str, dict[str, TensorData]]:
    """Return a graph as JSON text, and the large tensors, which the text refers to by name.

    Raises:
        ConversionError: an op holds a value that has no encoding.
    """
    document, tensors = _encoded(graph)
    return _text(document), tensors


def from_json(text: str, tensors: Mapping[str, TensorData] | None = None) -> Graph:
    """Return the graph that a JSON text holds; `tensors` are those that `to_json` returned with it.

    Raises:
        ConversionError: the text is no graph, is of a newer schema, or names a tensor that is not there; the message
            has the place in the text.
    """
    return _read(_document(text, "the text"), tensors or {})


def save_json(graph: Graph, path: str | Path) -> None:
    """Write a graph to a JSON file, and its large tensors to a file of the same name ending in `.safetensors`.

    Both files are written under another name first and then renamed, so a crash leaves no half file.

    Raises:
        ConversionError: the graph has no encoding, or a file cannot be written.
    """
    path = Path(path)
    document, tensors = _encoded(graph)
    try:
        if tensors:
            side = path.with_suffix(".safetensors")
            identity = os.urandom(32).hex()
            document["tensors"] = {"file": side.name, "identity": identity}
            write_tensors(side, tensors, {"identity": identity})
        write_atomic(path, _text(document).encode())
    except OSError as err:
        hint = "check the folder and its rights; on Windows no process may have the old file open"
        raise WriteError(f"graph {graph.name!r} cannot be written to {path}: {err}; {hint}") from err


def load_json(path: str | Path) -> Graph:
    """Read a graph that `save_json` wrote; its large tensors are memory maps of the file beside it.

    Raises:
        ConversionError: a file cannot be read, is no graph, or the two files do not belong together.
    """
    path = Path(path)
    try:
        text = read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConversionError(f"graph file {path} cannot be read: {err}") from err
    document = _document(text, str(path))
    tensors: Mapping[str, TensorData] = {}
    if "tensors" in document:
        side = document["tensors"]
        name = side.get("file") if isinstance(side, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise ConversionError(f"graph file {path}: the entry 'tensors' names no file beside it")
        tensors, metadata = read_tensors(_beside(path, name))
        if metadata.get("identity") != side.get("identity"):
            raise ConversionError(f"graph file {path}: {name} belongs to another save; save the graph again")
    try:
        return _read(document, tensors)
    except ConversionError as err:
        raise ConversionError(f"graph file {path}: {err}") from err


def _beside(path: Path, name: str) -> Path:
    """Return the file beside a graph file; a link must not lead out of the folder, as the name is a stranger's."""
    try:
        file = (path.parent / name).resolve(strict=True)
        folder = path.parent.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as err:  # RuntimeError: a loop of links; ValueError: a null character
        raise ConversionError(f"graph file {path}: {name!r} beside it cannot be read: {err}") from err
    if folder not in file.parents:
        raise ConversionError(
            f"graph file {path}: {name!r} beside it is a link that leaves the folder for {file}; "
            "put the file itself there"
        )
    return file


def _encoded(graph: Graph) -> tuple[dict[str, Any], dict[str, TensorData]]:
    tensors: dict[str, TensorData] = {}
    return {"format": FORMAT, "schema": SCHEMA, "graph": _Writer(tensors).graph(graph)}, tensors


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        document = parse_json(text)
    except json.JSONDecodeError as err:
        message = f"{source} is not JSON: {err.msg} in line {err.lineno}, column {err.colno}"
        raise ConversionError(message) from err
    except ValueError as err:
        raise ConversionError(f"{source} is not a graph: {err}") from err
    if not isinstance(document, dict) or document.get("format") != FORMAT or "graph" not in document:
        raise ConversionError(f'{source} is not a graph: it does not say "format": {FORMAT!r}')
    schema = document.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ConversionError(f"{source} has schema {schema!r}, which is not a version number")
    if schema > SCHEMA:
        raise ConversionError(f"{source} has schema {schema}, this version reads up to {SCHEMA}; update rlx_ort")
    return document


def _read(document: Mapping[str, Any], tensors: Mapping[str, TensorData]) -> Graph:
    try:
        return _Reader(tensors).graph(document["graph"], "graph")
    except RecursionError as err:  # the caller is close to Python's limit already
        raise ConversionError("the graph is nested too deeply to be read from here") from err


class _Writer:
    """Encodes graphs, moving large tensors to `tensors`."""

    def __init__(self, tensors: dict[str, TensorData]) -> None:
        self._tensors = tensors

    def graph(self, graph: Graph) -> dict[str, Any]:
        return {
            "name": graph.name,
            "doc": graph.doc,
            "metadata": dict(graph.metadata),
            **({"scopes": dict(graph.scopes)} if graph.scopes else {}),
            "nodes": [self.node(node) for node in graph.nodes],
            "outputs": [{"name": name, "value": [ref.node, ref.output]} for name, ref in graph._outputs],
            "weights": {name: self.tensor(data, large=True) for name, data in graph.weights.items()},
        }

    def node(self, node: Node) -> dict[str, Any]:
        return {
            "name": node.name,
            "op": node.op.kind,
            "attributes": self.mapping({item.name: getattr(node.op, item.name) for item in fields(node.op)}),
            "inputs": [None if ref is None else [ref.node, ref.output] for ref in node.inputs],
            "types": [self.value(kind) for kind in node.types],
            "output_names": list(node.output_names),
        }

    def value(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, (tuple, list)):
            return [self.value(item) for item in value]
        for tag, (kind, encode, _) in _CODECS.items():
            if isinstance(value, kind):
                return {tag: encode(self, value)}
        raise ConversionError(f"a graph file cannot hold a {type(value).__name__}: {value!r}")

    def mapping(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {str(name): self.value(value) for name, value in values.items()}

    def element(self, kind: SequenceType | OptionalType) -> Any:
        return self.value(kind.element)

    def tensor(self, data: TensorData, *, large: bool = False) -> dict[str, Any]:
        head: dict[str, Any] = {"dtype": data.dtype.value, "shape": list(data.shape)}
        if data.dtype is DType.STRING:
            return head | {"strings": [str(item) for item in data.buffer]}
        if not large and data.nbytes <= _INLINE_BYTES:
            return head | {"data": _base64(data.buffer.tobytes())}
        name = f"tensor{len(self._tensors)}"
        self._tensors[name] = data
        return head | {"stored": name}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Reader:
    """Decodes graphs; `tensors` are those stored outside the text. Errors name the place in the text."""

    def __init__(self, tensors: Mapping[str, TensorData]) -> None:
        self._tensors = tensors

    def graph(self, item: Any, where: str) -> Graph:
        """Return the graph encoded by `item`, which stands at `where`."""
        graph = Graph(_get(item, "name", str, where))
        graph.doc = _get(item, "doc", str, where, "")
        for key, kept in (("metadata", graph.metadata), ("scopes", graph.scopes)):
            for name, text in _get(item, key, dict, where, {}).items():
                kept[name] = _typed(text, str, f"{where}.{key}.{name}")
        for place, entry in enumerate(_get(item, "nodes", list, where)):
            self._add_node(graph, entry, f"{where}.nodes[{place}]")
        for place, entry in enumerate(_get(item, "outputs", list, where)):
            spot = f"{where}.outputs[{place}]"
            graph._outputs.append(
                (_get(entry, "name", str, spot), _read_ref(graph, _get(entry, "value", list, spot), spot))
            )
        for name, entry in _get(item, "weights", dict, where, {}).items():
            graph.weights[name] = self.tensor(entry, f"{where}.weights.{name}")
        graph.revision = 1
        return graph

    def _add_node(self, graph: Graph, item: Any, where: str) -> None:
        op = self._op(item, where)
        inputs = tuple(
            None if entry is None else _read_ref(graph, entry, f"{where}.inputs[{place}]")
            for place, entry in enumerate(_get(item, "inputs", list, where))
        )
        kinds = [
            self.type(entry, f"{where}.types[{place}]") for place, entry in enumerate(_get(item, "types", list, where))
        ]
        names = [_typed(name, str, f"{where}.output_names") for name in _get(item, "output_names", list, where)]
        name = _get(item, "name", str, where)
        if len(kinds) != len(names):
            _fail(where, f"{len(kinds)} types and {len(names)} output names")
        graph.nodes.append(Node(len(graph.nodes), op, inputs, tuple(kinds), name, tuple(names)))
        graph._names.update(dict.fromkeys((name, *names), 1))

    def _op(self, item: Any, where: str) -> Op:
        kind = _get(item, "op", str, where)
        try:
            made = op_class(kind)
        except KeyError as err:
            raise ConversionError(f"{where}: unknown op {kind!r}; the file may need a newer rlx_ort") from err
        known, hints = {entry.name for entry in fields(made)}, _hints(made)
        attributes = {}
        for name, entry in _get(item, "attributes", dict, where, {}).items():
            spot = f"{where}.attributes.{name}"
            if name not in known:
                _fail(spot, f"{kind} has no attribute {name!r}; known: {', '.join(sorted(known))}")
            attributes[name] = self.value(entry, spot)
            hint = hints.get(name)
            if hint is not None and not _fits(attributes[name], hint):
                _fail(spot, f"{entry!r} is not a valid {name!r} of {kind}")
        try:
            return made(**attributes)
        except (TypeError, ValueError, GraphVerifyError) as err:
            raise ConversionError(f"{where}.attributes: {err}") from err

    def value(self, item: Any, where: str) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, list):
            return tuple(self.value(entry, f"{where}[{place}]") for place, entry in enumerate(item))
        if not isinstance(item, dict) or len(item) != 1:
            _fail(where, "an object with one key that begins with $ was expected")
        ((tag, content),) = item.items()
        if tag not in _CODECS:
            _fail(where, f"unknown key {tag!r}; the file may need a newer rlx_ort")
        return _CODECS[tag][2](self, content, f"{where}.{tag}")

    def mapping(self, content: Any, where: str) -> dict[str, Any]:
        return {name: self.value(entry, f"{where}.{name}") for name, entry in _typed(content, dict, where).items()}

    def type(self, item: Any, where: str) -> ValueType:
        value = self.value(item, where) if isinstance(item, dict) else None
        return value if isinstance(value, ValueType) else _fail(where, "a type was expected")

    def tensor_type(self, content: Any, where: str) -> TensorType:
        name, dims = _two(content, where)
        for dim in () if dims is None else _typed(dims, list, where):
            if not isinstance(dim, int | str | None):
                _fail(where, f"a dimension is a size, a symbol or null, not {dim!r}")
        try:
            return TensorType(_read_dtype(name, where), None if dims is None else Shape(_typed(dims, list, where)))
        except (ValueError, TypeError) as err:
            raise ConversionError(f"{where}: {err}") from err

    def map_type(self, content: Any, where: str) -> MapType:
        key, value = _two(content, where)
        return MapType(_read_dtype(key, where), self.type(value, where))

    def tensor(self, item: Any, where: str) -> TensorData:
        dtype = _read_dtype(_get(item, "dtype", str, where), where)
        shape = tuple(_typed(size, int, f"{where}.shape") for size in _get(item, "shape", list, where))
        if "stored" in item:
            tensor = self._tensors.get(_get(item, "stored", str, where))
            if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
                _fail(where, f"the tensor file has no {dtype.value}{list(shape)} named {item['stored']!r}")
            return tensor
        try:
            if dtype is DType.STRING:
                texts = [_typed(text, str, f"{where}.strings") for text in _get(item, "strings", list, where)]
                return TensorData(dtype, shape, np.array(texts, dtype=object))
            return TensorData(dtype, shape, np.frombuffer(_read_bytes(_get(item, "data", str, where), where), np.uint8))
        except (ValueError, OverflowError) as err:
            raise ConversionError(f"{where}: {err}") from err


_CODECS: dict[str, tuple[type, Callable[[_Writer, Any], Any], Callable[[_Reader, Any, str], Any]]] = {
    "$float": (float, lambda _, value: repr(value), lambda _, item, at: float(_one_of(item, _NO_NUMBERS, at))),
    "$bytes": (bytes, lambda _, value: _base64(value), lambda _, item, at: _read_bytes(item, at)),
    "$dtype": (DType, lambda _, value: value.value, lambda _, item, at: _read_dtype(item, at)),
    "$tensor": (TensorData, _Writer.tensor, _Reader.tensor),
    "$graph": (Graph, _Writer.graph, _Reader.graph),
    "$tensor_type": (
        TensorType,
        lambda _, kind: [kind.dtype.value, None if kind.shape is None else [*kind.shape]],
        _Reader.tensor_type,
    ),
    "$sequence": (SequenceType, _Writer.element, lambda reader, item, at: SequenceType(reader.type(item, at))),
    "$optional": (OptionalType, _Writer.element, lambda reader, item, at: OptionalType(reader.type(item, at))),
    "$map_type": (MapType, lambda writer, kind: [kind.key.value, writer.value(kind.value)], _Reader.map_type),
    "$unknown": (UnknownType, lambda *_: True, lambda *_: UnknownType()),
    "$map": (Mapping, _Writer.mapping, _Reader.mapping),
}
"""Key -> (type, how it is written, how it is read) of the values that JSON lacks."""


def _fail(where: str, message: str) -> NoReturn:
    raise ConversionError(f"{where}: {message}")


def _typed(item: Any, kind: type, where: str) -> Any:
    if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
        _fail(where, f"{kind.__name__} expected, got {type(item).__name__}")
    return item


_REQUIRED = object()


def _get(item: Any, key: str, kind: type, where: str, default: Any = _REQUIRED) -> Any:
    if key not in _typed(item, dict, where):
        return _fail(where, f"the entry {key!r} is missing") if default is _REQUIRED else default
    return _typed(item[key], kind, f"{where}.{key}")


def _read_ref(graph: Graph, item: Any, where: str) -> Ref:
    node, output = (_typed(number, int, where) for number in _two(item, where))
    if not 0 <= node < len(graph.nodes) or not 0 <= output < len(graph.nodes[node].types):
        _fail(where, f"{[node, output]} is not a result of an earlier node")
    return Ref(node, output)


def _two(item: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        _fail(where, "a list of two was expected")
    return item[0], item[1]


def _read_dtype(item: Any, where: str) -> DType:
    return DType(_one_of(item, [dtype.value for dtype in DType], where))


def _one_of(item: Any, known: Any, where: str) -> str:
    if not isinstance(item, str) or item not in known:
        _fail(where, f"{item!r} is none of {', '.join(known)}")
    return item


def _read_bytes(item: Any, where: str) -> bytes:
    try:
        return base64.b64decode(_typed(item, str, where), validate=True)
    except ValueError as err:  # binascii.Error, or characters that are not ASCII
        raise ConversionError(f"{where}: {err}") from err


def _hints(made: type[Op]) -> Mapping[str, Any]:
    """Return the types of an op's fields; empty if they name something that is imported for type checking only."""
    try:
        return typing.get_type_hints(made)
    except NameError:
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a decoded value can be of a field's type; types that are not plain are not checked."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {types.UnionType, typing.Union}:
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True
