"""Attributes of imported nodes, with references to a function's parameters replaced by the values of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rlx_ort.converters.from_onnx.external import TensorFiles
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.onnx_types import type_of
from rlx_ort.converters.protos import copied
from rlx_ort.errors import ConversionError
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.onnx import AttributeValue

if TYPE_CHECKING:
    import onnx

__all__ = ["attribute_value", "resolved"]


def resolved(
    attributes: Iterable[onnx.AttributeProto], call: Mapping[str, onnx.AttributeProto] | None
) -> list[onnx.AttributeProto]:
    """Return attributes without references; one that refers to what the call leaves out is left out too."""
    result = []
    for attribute in attributes:
        if attribute.ref_attr_name:
            given = (call or {}).get(attribute.ref_attr_name)
            if given is None:
                continue
            name, attribute = attribute.name, copied(given)
            attribute.name = name
        result.append(attribute)
    return result


def attribute_value(
    attribute: onnx.AttributeProto, files: TensorFiles, read_body: Callable[[onnx.GraphProto], Graph]
) -> tuple[str, AttributeValue]:
    """Return the kind and the value of an attribute; `read_body` reads the graphs in it.

    Raises:
        ConversionError: the kind is unknown, or a tensor in it is wrong.
    """
    import onnx

    known = onnx.AttributeProto.AttributeType.values()
    kind = onnx.AttributeProto.AttributeType.Name(attribute.type) if attribute.type in known else "UNDEFINED"
    match kind:
        case "INT":
            return kind, attribute.i
        case "FLOAT":
            return kind, attribute.f
        case "STRING":
            return kind, _text(attribute.s)
        case "TENSOR":
            return kind, tensor_data(attribute.t, files)
        case "GRAPH":
            return kind, read_body(attribute.g)
        case "TYPE_PROTO":
            return kind, type_of(attribute.tp)
        case "INTS":
            return kind, tuple(attribute.ints)
        case "FLOATS":
            return kind, tuple(attribute.floats)
        case "STRINGS":
            texts = [_text(item) for item in attribute.strings]
            if all(isinstance(item, str) for item in texts):
                return kind, tuple(item for item in texts if isinstance(item, str))
            return kind, tuple(attribute.strings)
        case "TENSORS":
            return kind, tuple(tensor_data(item, files) for item in attribute.tensors)
        case "GRAPHS":
            return kind, tuple(read_body(item) for item in attribute.graphs)
        case "TYPE_PROTOS":
            return kind, tuple(type_of(item) for item in attribute.type_protos)
        case _:
            raise ConversionError(f"attribute {attribute.name!r} is of kind {kind}, which this node cannot have")


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data
