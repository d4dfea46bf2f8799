"""Attributes of exported nodes: from plain Python values, or from the exact kinds an imported node keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.converters.onnx_types import elem_type, onnx_ir_type, tensor_value
from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import GraphCore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType

if TYPE_CHECKING:
    import onnx_ir

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
    import onnx_ir

    for kind, classes in (
        ("INT", (bool, int, np.integer, np.bool_, DType)),
        ("FLOAT", (float, np.floating)),
        ("STRING", (str, bytes)),
        ("TENSOR", (np.ndarray, TensorData, onnx_ir.TensorProtocol)),
        ("GRAPH", (GraphCore, onnx_ir.Graph)),
        ("TYPE_PROTO", _TYPES),
    ):
        if isinstance(value, classes):
            return kind
    raise ConversionError(f"attribute {name!r} cannot hold {type(value).__name__} {value!r}")


def attribute(
    name: str, value: Any, kind: str = "", lower: Callable[[Any], onnx_ir.Graph] | None = None
) -> onnx_ir.Attr:
    """Return an attribute; `lower` turns the IR graphs in it into ONNX graphs.

    Raises:
        ConversionError: no ONNX attribute holds such a value.
    """
    import onnx_ir

    kind = kind or attribute_kind(name, value)
    many = kind.endswith("S")
    single = kind.removesuffix("S")
    items = [_item(name, single, item, lower) for item in (value if many else [value])]
    return onnx_ir.Attr(name, onnx_ir.AttributeType[kind], items if many else items[0])


def _item(name: str, kind: str, value: Any, lower: Callable[[Any], onnx_ir.Graph] | None) -> Any:
    import onnx_ir

    match kind:
        case "INT":
            return elem_type(value) if isinstance(value, DType) else int(value)
        case "FLOAT":
            return float(value)
        case "STRING":
            return value if isinstance(value, str) else _text(value)
        case "TENSOR" if not isinstance(value, onnx_ir.TensorProtocol):
            return tensor_value(value if isinstance(value, TensorData) else TensorData.from_array(value))
        case "GRAPH" if isinstance(value, GraphCore):
            if lower is None:
                raise ConversionError(f"attribute {name!r} is a graph, which cannot stand here")
            return lower(value)
        case "TYPE_PROTO":
            inner, shape = onnx_ir_type(value)
            if inner is None:
                raise ConversionError(f"attribute {name!r} holds the type {value}, which cannot be written yet")
            return onnx_ir.TypeAndShape(inner, shape)
        case _:
            return value


def _text(data: bytes) -> str | bytes:
    """Return the text of bytes that are UTF-8, as ONNX wants; other bytes as they are."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data
