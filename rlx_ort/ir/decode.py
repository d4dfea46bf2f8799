"""Reads graphs from their JSON form; errors name the place in the text."""

from __future__ import annotations

import base64
import binascii
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np

from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op, op_class
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType, ValueType

__all__ = ["Reader"]


class Reader:
    """Decodes graphs; `tensors` are those stored outside the text."""

    def __init__(self, tensors: Mapping[str, TensorData]) -> None:
        self._tensors = tensors

    def graph(self, item: Any, where: str) -> Graph:
        """Return the graph encoded by `item`, which stands at `where`.

        Raises:
            ConversionError: `item` encodes no graph.
        """
        graph = Graph(_get(item, "name", str, where))
        graph.doc = _get(item, "doc", str, where, "")
        metadata = _get(item, "metadata", dict, where, {})
        graph.metadata = {name: _typed(text, str, f"{where}.metadata.{name}") for name, text in metadata.items()}
        for place, entry in enumerate(_get(item, "nodes", list, where)):
            self._add_node(graph, entry, f"{where}.nodes[{place}]")
        for place, entry in enumerate(_get(item, "outputs", list, where)):
            spot = f"{where}.outputs[{place}]"
            graph._outputs.append((_get(entry, "name", str, spot), _ref(graph, _get(entry, "value", list, spot), spot)))
        for name, entry in _get(item, "weights", dict, where, {}).items():
            graph.weights[name] = self._tensor(entry, f"{where}.weights.{name}")
        graph.revision = 1
        return graph

    def _add_node(self, graph: Graph, item: Any, where: str) -> None:
        op = self._op(item, where)
        inputs = tuple(
            None if entry is None else _ref(graph, entry, f"{where}.inputs[{place}]")
            for place, entry in enumerate(_get(item, "inputs", list, where))
        )
        kinds = [
            self._type(entry, f"{where}.types[{place}]") for place, entry in enumerate(_get(item, "types", list, where))
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
                _fail(spot, f"{entry!r} is no value for {name!r} of {kind}")
        try:
            return made(**attributes)
        except (TypeError, ValueError, GraphVerifyError) as err:
            raise ConversionError(f"{where}.attributes: {err}") from err

    def value(self, item: Any, where: str) -> Any:
        """Return the value encoded by `item`.

        Raises:
            ConversionError: `item` encodes nothing.
        """
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, list):
            return tuple(self.value(entry, f"{where}[{place}]") for place, entry in enumerate(item))
        if not isinstance(item, dict) or len(item) != 1:
            _fail(where, "an object with one key that begins with $ was expected")
        ((tag, content),) = item.items()
        spot = f"{where}.{tag}"
        if tag == "$map":
            return {name: self.value(entry, f"{spot}.{name}") for name, entry in _typed(content, dict, spot).items()}
        if tag == "$bytes":
            return _bytes(content, spot)
        if tag == "$float":
            return float(_one_of(content, ("inf", "-inf", "nan"), spot))
        if tag == "$dtype":
            return _dtype(content, spot)
        if tag == "$tensor":
            return self._tensor(content, spot)
        if tag == "$graph":
            return self.graph(content, spot)
        return self._type(item, where)

    def _type(self, item: Any, where: str) -> ValueType:
        if not isinstance(item, dict) or len(item) != 1:
            _fail(where, "a type was expected")
        ((tag, content),) = item.items()
        spot = f"{where}.{tag}"
        if tag == "$tensor_type":
            name, dims = _two(content, spot)
            try:
                return TensorType(_dtype(name, spot), None if dims is None else Shape(_typed(dims, list, spot)))
            except (ValueError, TypeError) as err:
                raise ConversionError(f"{spot}: {err}") from err
        if tag == "$sequence":
            return SequenceType(self._type(content, spot))
        if tag == "$optional":
            return OptionalType(self._type(content, spot))
        if tag == "$map_type":
            key, value = _two(content, spot)
            return MapType(_dtype(key, spot), self._type(value, spot))
        if tag == "$unknown":
            return UnknownType()
        raise ConversionError(f"{where}: unknown key {tag!r}; the file may need a newer rlx_ort")

    def _tensor(self, item: Any, where: str) -> TensorData:
        dtype = _dtype(_get(item, "dtype", str, where), where)
        shape = tuple(_typed(size, int, f"{where}.shape") for size in _get(item, "shape", list, where))
        if "stored" in item:
            found = self._tensors.get(_get(item, "stored", str, where))
            if found is None or (found.dtype, found.shape) != (dtype, shape):
                _fail(where, f"the tensor file has no {dtype.value}{list(shape)} named {item['stored']!r}")
            return found
        try:
            if dtype is DType.STRING:
                texts = [_typed(text, str, f"{where}.strings") for text in _get(item, "strings", list, where)]
                return TensorData(dtype, shape, np.array(texts, dtype=object))
            return TensorData(dtype, shape, np.frombuffer(_bytes(_get(item, "data", str, where), where), np.uint8))
        except ValueError as err:
            raise ConversionError(f"{where}: {err}") from err


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


def _ref(graph: Graph, item: Any, where: str) -> Ref:
    node, output = (_typed(number, int, where) for number in _two(item, where))
    if not 0 <= node < len(graph.nodes) or not 0 <= output < len(graph.nodes[node].types):
        _fail(where, f"{[node, output]} is no result of an earlier node")
    return Ref(node, output)


def _two(item: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        _fail(where, "a list of two was expected")
    return item[0], item[1]


def _dtype(item: Any, where: str) -> DType:
    return DType(_one_of(item, [dtype.value for dtype in DType], where))


def _one_of(item: Any, known: Any, where: str) -> str:
    if not isinstance(item, str) or item not in known:
        _fail(where, f"{item!r} is none of {', '.join(known)}")
    return item


def _bytes(item: Any, where: str) -> bytes:
    try:
        return base64.b64decode(_typed(item, str, where), validate=True)
    except binascii.Error as err:
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
