"""Graphs as JSON with a schema version; weights and constants above 1 KB go to a safetensors file beside it.

The encoding walks the fields of the op dataclasses, so a new op needs nothing here. Values that JSON lacks are
written as objects with one key that begins with `$`.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.decode import Reader
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.tensor_file import read_tensors, write_tensors
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType
from rlx_ort.storage import write_atomic

__all__ = ["FORMAT", "SCHEMA", "from_json", "load_json", "save_json", "to_json"]

FORMAT = "rlx_ort graph"
"""Value of the `format` entry of a graph file."""
SCHEMA = 1
"""Version of the encoding; its own and older versions can be read."""

_INLINE_BYTES = 1024


def to_json(graph: Graph) -> tuple[str, dict[str, TensorData]]:
    """Return a graph as JSON text, and the large tensors, which the text refers to by name.

    Raises:
        ConversionError: an op holds a value that has no encoding.
    """
    tensors: dict[str, TensorData] = {}
    document = {"format": FORMAT, "schema": SCHEMA, "graph": _Writer(tensors).graph(graph)}
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n", tensors


def from_json(text: str, tensors: Mapping[str, TensorData] | None = None) -> Graph:
    """Return the graph that a JSON text holds; `tensors` are those that `to_json` returned with it.

    Raises:
        ConversionError: the text is no graph, is of a newer schema, or names a tensor that is not there; the message
            says where in the text.
    """
    return Reader(tensors or {}).graph(_document(text, "the text")["graph"], "graph")


def save_json(graph: Graph, path: str | Path) -> None:
    """Write a graph to a JSON file, and its large tensors to a file of the same name ending in `.safetensors`.

    Both files are written under another name first and then renamed, so a crash leaves no half file.

    Raises:
        ConversionError: the graph has no encoding, or a file cannot be written.
    """
    path = Path(path)
    text, tensors = to_json(graph)
    document = json.loads(text)
    try:
        if tensors:
            side = path.with_suffix(".safetensors")
            identity = os.urandom(32).hex()
            document["tensors"] = {"file": side.name, "identity": identity}
            write_tensors(side, tensors, {"identity": identity})
        content = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
        write_atomic(path, content.encode())
    except OSError as err:
        hint = "check the folder and its rights; on Windows no process may have the old file open"
        raise ConversionError(f"graph {graph.name!r} cannot be written to {path}: {err}; {hint}") from err


def load_json(path: str | Path) -> Graph:
    """Read a graph that `save_json` wrote; its large tensors are memory maps of the file beside it.

    Raises:
        ConversionError: a file cannot be read, is no graph, or the two files do not belong together.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConversionError(f"graph file {path} cannot be read: {err}") from err
    document = _document(text, str(path))
    tensors: Mapping[str, TensorData] = {}
    if "tensors" in document:
        side = document["tensors"]
        name = side.get("file") if isinstance(side, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise ConversionError(f"graph file {path}: the entry 'tensors' names no file beside it")
        tensors, metadata = read_tensors(path.parent / name)
        if metadata.get("identity") != side.get("identity"):
            raise ConversionError(f"graph file {path}: {name} belongs to another save; save the graph again")
    try:
        return Reader(tensors).graph(document["graph"], "graph")
    except ConversionError as err:
        raise ConversionError(f"graph file {path}: {err}") from err


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as err:
        message = f"{source} is no JSON: {err.msg} in line {err.lineno}, column {err.colno}"
        raise ConversionError(message) from err
    except RecursionError as err:
        raise ConversionError(f"{source} is nested too deeply for a graph") from err
    except ValueError as err:  # an integer with more digits than Python parses
        raise ConversionError(f"{source} is no graph: {err}") from err
    if not isinstance(document, dict) or document.get("format") != FORMAT or "graph" not in document:
        raise ConversionError(f'{source} is no graph: it does not say "format": {FORMAT!r}')
    schema = document.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ConversionError(f"{source} has schema {schema!r}, which is no version number")
    if schema > SCHEMA:
        raise ConversionError(f"{source} has schema {schema}, this version reads up to {SCHEMA}; update rlx_ort")
    return document


class _Writer:
    """Encodes graphs, moving large tensors to `tensors`."""

    def __init__(self, tensors: dict[str, TensorData]) -> None:
        self._tensors = tensors
        self._encoders: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (np.generic, lambda value: self.value(value.item())),
            (float, _number),
            (int, lambda value: value),
            (str, lambda value: value),
            (bytes, lambda value: {"$bytes": _base64(value)}),
            (DType, lambda value: {"$dtype": value.value}),
            (TensorData, lambda value: {"$tensor": self.tensor(value)}),
            (Graph, lambda value: {"$graph": self.graph(value)}),
            (TensorType, lambda value: {"$tensor_type": [value.dtype.value, _dims(value)]}),
            (SequenceType, lambda value: {"$sequence": self.value(value.element)}),
            (OptionalType, lambda value: {"$optional": self.value(value.element)}),
            (MapType, lambda value: {"$map_type": [value.key.value, self.value(value.value)]}),
            (UnknownType, lambda value: {"$unknown": True}),
            (Mapping, lambda value: {"$map": {str(key): self.value(item) for key, item in value.items()}}),
            (tuple, lambda value: [self.value(item) for item in value]),
            (list, lambda value: [self.value(item) for item in value]),
        )

    def graph(self, graph: Graph) -> dict[str, Any]:
        return {
            "name": graph.name,
            "doc": graph.doc,
            "metadata": dict(graph.metadata),
            "nodes": [self.node(node) for node in graph.nodes],
            "outputs": [{"name": name, "value": _ref(ref)} for name, ref in graph._outputs],
            "weights": {name: self.tensor(data, large=True) for name, data in graph.weights.items()},
        }

    def node(self, node: Node) -> dict[str, Any]:
        return {
            "name": node.name,
            "op": node.op.kind,
            "attributes": {item.name: self.value(getattr(node.op, item.name)) for item in fields(node.op)},
            "inputs": [None if ref is None else _ref(ref) for ref in node.inputs],
            "types": [self.value(kind) for kind in node.types],
            "output_names": list(node.output_names),
        }

    def value(self, value: Any) -> Any:
        if value is None:
            return None
        for kind, encode in self._encoders:
            if isinstance(value, kind):
                return encode(value)
        raise ConversionError(f"a graph file cannot hold a {type(value).__name__}: {value!r}")

    def tensor(self, data: TensorData, *, large: bool = False) -> dict[str, Any]:
        head: dict[str, Any] = {"dtype": data.dtype.value, "shape": list(data.shape)}
        if data.dtype is DType.STRING:
            return head | {"strings": [str(item) for item in data.buffer]}
        if not large and data.nbytes <= _INLINE_BYTES:
            return head | {"data": _base64(data.buffer.tobytes())}
        name = f"tensor{len(self._tensors)}"
        self._tensors[name] = data
        return head | {"stored": name}


def _ref(ref: Ref) -> list[int]:
    return [ref.node, ref.output]


def _dims(value: TensorType) -> list[Any] | None:
    return None if value.shape is None else list(value.shape)


def _number(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
