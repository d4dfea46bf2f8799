"""Limits of recording: why the launches of a session, or the nodes of a model, cannot be replayed as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import NodeAssignment
from rlx_ort.providers.engine.values import has_foreign_dtype

_CONTROL_FLOW = "is control flow, which the host decides"
_UNRECORDABLE: dict[str, str] = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _CONTROL_FLOW),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), "draws random numbers"),
    **dict.fromkeys(("Multinomial", "Bernoulli", "Sampling"), "draws random numbers"),
    **dict.fromkeys(
        ("NonZero", "Compress", "Unique", "NonMaxSuppression", "BeamSearch", "GreedySearch", "WhisperBeamSearch"),
        "has outputs whose shapes depend on values",
    ),
}
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft", "com.ms.internal.nhwc"})
_SHAPE_ARITHMETIC = {"Shape", "Size", "Constant", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Cast"}
_SHAPE_ARITHMETIC |= {"Add", "Sub", "Mul", "Div"}


def without_shape_arithmetic(
    assignments: Iterable[NodeAssignment], node_of: Callable[[str], ExportedNode | None], *, guess: bool = False
) -> list[NodeAssignment]:
    """Return the nodes but those on the CPU that are there for the sizes of tensors.

    `node_of` returns the exported node behind a name. Of a node that ONNX Runtime added the operator alone is known,
    and with `guess` it decides for all nodes. If one depends on values after all, those are copied from the device in
    the middle of the run, which cannot be recorded.
    """

    def for_sizes(assigned: NodeAssignment) -> bool:
        node = node_of(assigned.name)
        if node is not None and node.shape_only:
            return True
        return assigned.op_type in _SHAPE_ARITHMETIC and (guess or node is None or node.name != assigned.name)

    return [node for node in assignments if node.provider != "CPUExecutionProvider" or not for_sizes(node)]


def host_work(ep_name: str, memory: str, assignments: Iterable[NodeAssignment], session: Any) -> str:
    """Return why the host takes part in a session's runs beyond launching kernels, or an empty string.

    All nodes must be on the provider, and all inputs and outputs in its memory.
    """
    for node in assignments:
        if node.provider != ep_name:
            return f"node {node.name or node.op_type!r} ({node.op_type}) runs on {node.provider}"
        if is_control_flow(node):
            return f"node {node.name or node.op_type!r} ({node.op_type}) {_CONTROL_FLOW}"
    if memory == "cpu":
        return ""
    sides = {
        "input": (session.get_inputs(), session.get_input_memory_infos()),
        "output": (session.get_outputs(), session.get_output_memory_infos()),
    }
    for side, (values, infos) in sides.items():
        for value, info in zip(values, infos, strict=True):
            # The device's own memory has no name, or the provider's, and the default type.
            if info.name.lower() == "cpu" or int(info.device_mem_type) != 0:
                return f"{side} {value.name!r} is in host memory"
    return ""


def is_control_flow(node: NodeAssignment | ExportedNode | ModelNode) -> bool:
    """Return whether a node is a loop or a branch."""
    return _UNRECORDABLE.get(node.op_type) == _CONTROL_FLOW


def unrecordable(nodes: Iterable[NodeAssignment | ExportedNode | ModelNode], types: Mapping[str, ValueType]) -> str:
    """Return why no run of a model can be recorded, judged by its nodes and inputs and outputs, or an empty string."""
    for node in nodes:
        what = _UNRECORDABLE.get(node.op_type, "")
        if not what and node.domain not in _KNOWN_DOMAINS:
            what = f"is of the domain {node.domain}"
        if what:
            return f"node {node.name or node.op_type!r} ({node.op_type}) {what}"
    for name, kind in types.items():
        if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or has_foreign_dtype(kind):
            return f"{name!r} is {kind}, and only tensors of types that numpy has can be recorded"
    return ""
