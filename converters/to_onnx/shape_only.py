"""Finds the nodes that only compute shapes, which ONNX Runtime keeps on the CPU whatever device is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["is_shape_type", "shape_only_nodes"]

_SOURCES = {"Shape", "Size"}


def shape_only_nodes(nodes: Sequence[ExportedNode], small_constants: Collection[str]) -> tuple[ExportedNode, ...]:
    """Return the nodes with `shape_only` set where it holds.

    A node only computes shapes when it reads a shape, or nothing but results of such nodes and small integer
    constants, and its results are integer or bool tensors of rank 0 or 1. ONNX Runtime pins by the same rule:
    https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/framework/fallback_cpu_capability.cc
    """
    from_shapes: set[str] = set()
    result = []
    for node in nodes:
        read = [name for name in node.input_names if name]
        starts = node.domain == "" and node.op_type in _SOURCES
        follows = any(name in from_shapes for name in read) and all(
            name in from_shapes or name in small_constants for name in read
        )
        if (starts or follows) and all(is_shape_type(kind) for kind in node.outputs if kind is not None):
            from_shapes.update(name for name in node.output_names if name)
            node = replace(node, shape_only=True)
        result.append(node)
    return tuple(result)


def is_shape_type(kind: ValueType | None) -> bool:
    """Return whether a value may hold sizes, axes or indices: an integer or bool tensor of rank 0 or 1."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return False
    return kind.shape.rank <= 1 and (kind.dtype.is_integer or kind.dtype.value == "bool")
