"""Attributes of exported nodes, and `OnnxNode`s written back in the form of the model they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.converters.onnx_types import elem_type, text_of
from rlx_ort.converters.to_onnx.kernel_dtypes import divisor_and_sign, may_trap
from rlx_ort.converters.to_onnx.model import ModelAttribute, ModelGraph, ModelNode, ModelValue
from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import GraphCore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, TensorType, UnknownType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.emitter import Emitter

__all__ = ["attribute", "attribute_kind", "imported_node", "trimmed"]

_TYPES = (TensorType, SequenceType, OptionalType, MapType, UnknownType)


def attribute_kind(name: str, value: Any) -> str:
    """Return ONNX's name for the kind of an attribute value.

    An empty list counts as `INTS`; for empty lists of another kind, pass the kind to `attribute`.

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
            return value if isinstance(value, str) else text_of(value)
        case "TENSOR":
            return value if isinstance(value, TensorData) else TensorData.from_array(value)
        case "GRAPH" if isinstance(value, GraphCore):
            if lower is None:
                raise ConversionError(f"attribute {name!r} is a graph, which cannot stand here")
            return lower(value)
        case _:
            return value


def imported_node(emitter: Emitter, op: OnnxNode, inputs: Sequence[ModelValue | None]) -> tuple[ModelValue, ...]:
    """Append the node and return its results; an absent result is a value without a name."""
    attributes = [
        attribute(name, value, op.attribute_kinds.get(name, ""), lambda body: emitter.subgraph(body, inputs))
        for name, value in op.attributes.items()
    ]
    names = emitter.output_names
    results = tuple(ModelValue(name=None if name else "") for name in names)
    present = max((index + 1 for index, name in enumerate(names) if name), default=0)
    formal = trimmed(inputs[: op.formal_inputs])
    if op.domain == "" and op.op_type in {"Div", "Mod"} and formal[1] is not None and may_trap(emitter):
        divisor, sign = divisor_and_sign(emitter, formal[1])
        if op.op_type == "Div":
            quotient = emitter.op("Div", formal[0], divisor)
            emitter.append(ModelNode("", "Mul", [quotient, sign], writes=results), op.version, imported=True)
            return results
        formal[1] = divisor
    if op.domain == "" and op.op_type == "CastLike" and (dtype := emitter.known_dtype(1)) is not None:
        # No provider has a CastLike, and ONNX Runtime expands it too late to fold the Cast that comes out of it.
        to = ModelAttribute("to", "INT", elem_type(dtype))
        node = ModelNode("", "Cast", formal[:1], [*attributes, to], writes=results)
        emitter.append(node, op.version, imported=True)
        return results
    node = ModelNode(op.domain, op.op_type, formal, attributes, overload=op.overload, writes=results[:present])
    emitter.append(node, op.version, imported=True)
    return results


def trimmed(inputs: Sequence[ModelValue | None]) -> list[ModelValue | None]:
    """Return the inputs without the absent ones at the end, which crash some of ONNX Runtime's fusions."""
    end = len(inputs)
    while end and inputs[end - 1] is None:
        end -= 1
    return list(inputs[:end])
