"""Whether a kernel list covers an exported node, with two rules that the list itself does not contain.

ONNX Runtime expands a node whose operator is a function when no kernel takes it, the CPU's included, and on the CPU
it casts f16 to f32 around a node that has no f16 kernel. Neither is a reason to refuse a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.claims import takes
from rlx_ort.selection.function_body import function_body, is_function

__all__ = ["cpu_takes_node", "signature", "takes_node"]


def takes_node(
    claims: Sequence[KernelClaim],
    cpu_claims: Sequence[KernelClaim] | None,
    node: ExportedNode,
    functions: Collection[tuple[str, str]],
) -> bool:
    """Return whether a kernel takes the node, or ONNX Runtime expands it because the CPU has no kernel either.

    `functions` are the domain and name of those that the model brings.
    """
    if _has_kernel(claims, node):
        return True
    return not _has_kernel(cpu_claims or (), node) and _takes_expanded(claims, cpu_claims, node, functions)


def cpu_takes_node(
    cpu_claims: Sequence[KernelClaim], node: ExportedNode, functions: Collection[tuple[str, str]]
) -> bool:
    """Return whether the CPU takes the node, if need be expanded or with its f16 values cast to f32."""
    if _has_kernel(cpu_claims, node):
        return True
    wide = node._replace(pattern=node.pattern.alike(_widened(node.inputs), _widened(node.outputs)))
    if _has_kernel(cpu_claims, wide):
        return True
    return _takes_expanded(cpu_claims, None, wide, functions)


def signature(node: ExportedNode) -> str:
    """Return the operator with its version and the element types it was asked for."""
    kinds = dict.fromkeys(_element(kind) for kind in (*node.inputs, *node.outputs) if kind is not None)
    return f"{node.domain or 'ai.onnx'}::{node.op_type}-{node.version} ({', '.join(kinds)})"


def _has_kernel(claims: Sequence[KernelClaim], node: ExportedNode) -> bool:
    return takes(claims, node.domain, node.op_type, node.version, node.inputs, node.outputs)


def _takes_expanded(
    claims: Sequence[KernelClaim],
    cpu_claims: Sequence[KernelClaim] | None,
    node: ExportedNode,
    functions: Collection[tuple[str, str]],
) -> bool:
    """Return whether the nodes of a function's body are taken; a body that cannot be expanded here counts as taken."""
    if (node.domain, node.op_type) in functions:
        return True
    if not is_function(node.domain, node.op_type, node.version):
        return False
    body = function_body(node)
    return body is None or all(
        inner.op_type == "Constant" or _is_shape(inner) or takes_node(claims, cpu_claims, inner, functions)
        for inner in body
    )


def _is_shape(node: ExportedNode) -> bool:
    return all(
        isinstance(kind, TensorType) and kind.dtype is DType.I64 and kind.shape is not None and kind.shape.rank < 2
        for kind in node.outputs
    )


def _widened(kinds: Sequence[ValueType | None]) -> tuple[ValueType | None, ...]:
    return tuple(
        TensorType(DType.F32, kind.shape) if isinstance(kind, TensorType) and kind.dtype is DType.F16 else kind
        for kind in kinds
    )


def _element(kind: ValueType) -> str:
    return kind.dtype.value if isinstance(kind, TensorType) else str(kind)
