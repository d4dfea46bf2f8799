"""ONNX forms of the ops a user brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.imported import imported_node
from rlx_ort.ir.ops.control import Custom, CustomFn
from rlx_ort.ir.ops.onnx import OnnxNode

__all__: list[str] = []


@lowers(Custom)
def _custom(emit: Emitter, op: Custom, inputs: Sequence[Any]) -> Any:
    count = len(op.types)
    node = OnnxNode(op.name, op.domain, op.version, "", op.attributes, {}, len(inputs), count)
    return imported_node(emit, node, inputs)


@lowers(CustomFn)
def _custom_fn(emit: Emitter, op: CustomFn, inputs: Sequence[Any]) -> Any:
    return emit.inline(op.fwd, inputs)
