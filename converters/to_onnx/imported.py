"""Writes an `OnnxNode` back as it stood in the model it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import elem_type
from rlx_ort.converters.to_onnx.attributes import attribute
from rlx_ort.converters.to_onnx.integer_division import divisor_and_sign, may_trap
from rlx_ort.converters.to_onnx.model import ModelAttribute, ModelNode, ModelValue
from rlx_ort.ir.ops.onnx import OnnxNode

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.emitter import Emitter

__all__ = ["imported_node", "trimmed"]


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
