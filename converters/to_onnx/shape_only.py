"""Finds the nodes that only compute shapes, which ONNX Runtime keeps on the CPU whatever device is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["is_shape_type", "shape_only_nodes", "shape_only_places", "starts_shapes"]

_SOURCES = {"Shape", "Size"}


class _Kind(Protocol):
    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...
    @property
    def outputs(self) -> Sequence[ValueType | None]: ...


class _Node(Protocol):
    @property
    def pattern(self) -> _Kind: ...
    @property
    def input_names(self) -> Sequence[str]: ...
    @property
    def output_names(self) -> Sequence[str]: ...


def shape_only_nodes(nodes: Sequence[ExportedNode], small_constants: Collection[str]) -> tuple[ExportedNode, ...]:
    """Return the nodes with `shape_only` set where it holds."""
    places = set(
        shape_only_places([_Own(node, node.input_names, node.output_names) for node in nodes], small_constants)
    )
    return tuple(replace(node, shape_only=True) if at in places else node for at, node in enumerate(nodes))


def shape_only_places(nodes: Iterable[_Node], small_constants: Collection[str]) -> list[int]:
    """Return the places of the nodes that only compute shapes; `pattern` of a node tells its operator and its types.

    A node only computes shapes when it reads a shape, or nothing but results of such nodes and `small_constants`, which
    are integer constants and graph inputs of rank 0 or 1, and its results are integer or bool tensors of rank 0 or 1.
    ONNX Runtime pins by the same rule:
    https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/framework/fallback_cpu_capability.cc
    """
    from_shapes: set[str] = set()
    found = []
    for at, node in enumerate(nodes):
        read = [name for name in node.input_names if name]
        follows = any(name in from_shapes for name in read) and all(
            name in from_shapes or name in small_constants for name in read
        )
        types = node.pattern.outputs
        if (starts_shapes(node.pattern) or follows) and all(is_shape_type(kind) for kind in types if kind is not None):
            from_shapes.update(name for name in node.output_names if name)
            found.append(at)
    return found


def starts_shapes(node: _Kind) -> bool:
    """Return whether a node reads a shape, as those begin with that only compute shapes."""
    return node.domain == "" and node.op_type in _SOURCES


def is_shape_type(kind: ValueType | None) -> bool:
    """Return whether a value may hold sizes, axes or indices: an integer or bool tensor of rank 0 or 1."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return False
    return kind.shape.rank <= 1 and (kind.dtype.is_integer or kind.dtype.value == "bool")


class _Own(NamedTuple):
    """A node that is its own pattern."""

    pattern: ExportedNode
    input_names: Sequence[str]
    output_names: Sequence[str]
