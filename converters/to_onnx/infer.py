"""ONNX's own shape inference, for the values whose type the IR does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import type_of
from rlx_ort.converters.protos import bodies_of
from rlx_ort.errors import ConversionError
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

__all__ = ["infer_proto", "inferred_types", "with_types"]


def inferred_types(model: onnx.ModelProto, known: Mapping[str, ValueType]) -> dict[str, ValueType]:
    """Return the types ONNX infers for the values of a model, bodies included; `known` ones where it fails."""
    return {**known, **infer_proto(model)}


def infer_proto(proto: onnx.ModelProto) -> dict[str, ValueType]:
    """Return the type of every value that ONNX can infer, bodies included, whose names must not clash."""
    found: dict[str, ValueType] = {}
    graphs = [with_types(proto).graph]
    while graphs:
        graph = graphs.pop()
        for info in (*graph.value_info, *graph.input, *graph.output):
            try:
                kind = type_of(info.type)
            except ConversionError:
                continue  # an element type this library has no name for
            if not isinstance(kind, UnknownType):
                found[info.name] = kind
        for node in graph.node:
            graphs += bodies_of(node)
    return found


def with_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model with the types that ONNX infers, in each graph's `value_info`.

    Inference never fails: a model it cannot judge comes back as it is.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no types

    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, DecodeError):
        # Raised for models it finds inconsistent and for more than 2 GB; ONNX Runtime may still take them.
        return proto
