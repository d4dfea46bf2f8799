"""Attributes of exported nodes: from plain Python values, or from the exact kinds an imported node keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx_ort.converters.onnx_types import elem_type
from rlx_ort.converters.to_onnx.model import ModelAttribute, ModelGraph
from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import GraphCore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType

__all__ = ["attribute", "attribute_kind"]

_TYPES = (TensorType, SequenceType, OptionalType, MapType, UnknownType)


def attribute_kind(name: str, value: Any) -> str:
    """Return ONNX's name for the kind of an attribute value.

    An empty list counts as `INTS`; whoever has empty lists of another kind must say so.

    Raises:
        ConversionError: no ONNX attribute holds such a value.
    """
    if isinstance(value, tuple | list):
        kinds = {attribute_kind(name, item) for item in value} or {"INT"}
        if kinds == {"INT", "FLOAT"}:
            kinds = {"FLOAT"}
        if len(kinds) > 1 or next(iter(kinds)).endswith("S"):
            raise ConversionError(f"attribute {name!r} mixes {' and '.join(sorted(kinds))}; a list has one kind")
        return f"{kinds.pop()}S"
    for kind, classes in (
        ("INT", (bool, int, np.integer, np.bool_, DType)),
        ("FLOAT", (float, np.floating)),
        ("STRING", (str, bytes)),
        ("TENSOR", (np.ndarray, TensorData)),
        ("GRAPH", (GraphCore, ModelGraph)),
        ("TYPE_PROTO", _TYPES),
    ):
        if isinstance(value, classes):
            return kind
    raise ConversionError(f"attribute {name!r} cannot hold {type(value).__name__} {value!r}")


def attribute(
    name: str, value: Any, kind: str = "", lower: Callable[[Any], ModelGraph] | None = None
) -> ModelAttribute:
    """Return an attribute; `lower` turns the IR graphs in it into ONNX graphs.

    Raises:
        ConversionError: no ONNX attribute holds such a value.
    """
    kind = kind or attribute_kind(name, value)
    many = kind.endswith("S")
    single = kind.removesuffix("S")
    items = [_item(name, single, item, lower) for item in (value if many else [value])]
    return ModelAttribute(name, kind, tuple(items) if many else items[0])


def _item(name: str, kind: str, value: Any, lower: Callable[[Any], ModelGraph] | None) -> Any:
    match kind:
        case "INT":
            return elem_type(value) if isinstance(value, DType) else int(value)
        case "FLOAT":
            return float(value)
        case "STRING":
            return value if isinstance(value, str) else _text(value)
        case "TENSOR":
            return value if isinstance(value, TensorData) else TensorData.from_array(value)
        case "GRAPH" if isinstance(value, GraphCore):
            if lower is None:
                raise ConversionError(f"attribute {name!r} is a graph, which cannot stand here")
            return lower(value)
        case _:
            return value


def _text(data: bytes) -> str | bytes:
    """Return the text of bytes that are UTF-8, as ONNX wants; other bytes as they are."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data
