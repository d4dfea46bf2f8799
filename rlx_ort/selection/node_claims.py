"""One exported node against one list of kernels, with the two things a kernel list does not say.

ONNX Runtime expands a node whose operator is a function when no kernel takes it, the CPU's included, and on the CPU
it casts f16 to f32 around a node that has no f16 kernel. Neither is a reason to refuse a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.claims import takes

__all__ = ["cpu_takes_node", "is_function", "signature", "takes_node"]


def takes_node(
    claims: Sequence[KernelClaim], cpu_claims: Sequence[KernelClaim] | None, node: ExportedNode, model: ExportedModel
) -> bool:
    """Return whether a kernel takes the node, or ONNX Runtime expands it because the CPU has no kernel either."""
    if _has_kernel(claims, node):
        return True
    return _is_expanded(node, model) and not _has_kernel(cpu_claims or (), node)


def cpu_takes_node(cpu_claims: Sequence[KernelClaim], node: ExportedNode, model: ExportedModel) -> bool:
    """Return whether the CPU takes the node, if need be expanded or with its f16 values cast to f32."""
    wide = replace(node, inputs=_widened(node.inputs), outputs=_widened(node.outputs))
    return _has_kernel(cpu_claims, node) or _has_kernel(cpu_claims, wide) or _is_expanded(node, model)


@functools.cache
def is_function(domain: str, op_type: str, version: int) -> bool:
    """Return whether ONNX defines the operator by a function of other operators."""
    import onnx

    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return False  # an operator of ONNX Runtime or of somebody else
    return bool(schema.has_function or schema.has_context_dependent_function)


def signature(node: ExportedNode) -> str:
    """Return the operator with its version and the element types it was asked for."""
    kinds = dict.fromkeys(_element(kind) for kind in (*node.inputs, *node.outputs) if kind is not None)
    return f"{node.domain or 'ai.onnx'}::{node.op_type}-{node.version} ({', '.join(kinds)})"


def _has_kernel(claims: Sequence[KernelClaim], node: ExportedNode) -> bool:
    return takes(claims, node.domain, node.op_type, node.version, node.inputs, node.outputs)


def _is_expanded(node: ExportedNode, model: ExportedModel) -> bool:
    if is_function(node.domain, node.op_type, node.version):
        return True
    return any((domain, name) == (node.domain, node.op_type) for domain, name, _ in model.model.functions)


def _widened(kinds: Sequence[ValueType | None]) -> tuple[ValueType | None, ...]:
    return tuple(
        TensorType(DType.F32, kind.shape) if isinstance(kind, TensorType) and kind.dtype is DType.F16 else kind
        for kind in kinds
    )


def _element(kind: ValueType) -> str:
    return kind.dtype.value if isinstance(kind, TensorType) else str(kind)
