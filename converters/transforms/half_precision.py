"""Converts a model's f32 weights and arithmetic to f16 or bf16, by the precision pass of the IR."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, graph_from_bundle
from rlx_ort.converters.precision_pass import apply_precision
from rlx_ort.converters.protos import nodes_of
from rlx_ort.converters.transforms.scope import selected
from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.narrow import narrowed_later, values_of
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.tensor import TensorData
from rlx_ort.options.precision import PrecisionPolicy

__all__ = ["KeptNode", "PrecisionKind", "PrecisionReport", "to_precision"]

PrecisionKind: TypeAlias = Literal["f16", "bf16", "mixed"]
"""What a model can be narrowed to."""

_F16_LARGEST = 65504.0
_F16_ROUNDS_TO_ZERO = 2.0**-25  # half of the smallest number above zero; a tie goes to the even one, zero
_SCALAR_ELEMENTS = 1  # a lone number is a mask or an epsilon, not a weight

# Operators whose results leave the range of f16 for arguments well inside it, or lose it near zero.
_RANGE_SENSITIVE = frozenset({"Div", "Exp", "Log", "Pow", "Reciprocal", "Softplus", "Sqrt"})


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node that goes on computing in f32.

    Attributes:
        name: its name.
        op_type: its operator.
        reason: why, as part of a sentence.
    """

    name: str
    op_type: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """What `to_precision` did.

    Attributes:
        kind: what was asked for.
        narrowed: names of the weights that are stored in 16 bits now.
        kept: the nodes that stay f32.
        overflowing: weights with finite numbers above 65504, which stay f32 -> the largest of these.
        clamped: lone numbers beyond what the dtype holds, such as masks of -3.4e38, which are the largest it holds now.
        bytes_before: bytes of the weights before.
        bytes_after: bytes of the weights after.
    """

    kind: PrecisionKind
    narrowed: tuple[str, ...]
    kept: tuple[KeptNode, ...]
    overflowing: Mapping[str, float]
    clamped: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def kept_ops(self) -> dict[str, int]:
        """Return operator -> how many of its nodes stay f32, most first."""
        return dict(Counter(node.op_type for node in self.kept).most_common())


def to_precision(
    bundle: ModelBundle, kind: PrecisionKind, keep: Sequence[str] = (), *, boundary: bool = False
) -> tuple[ModelBundle, PrecisionReport]:
    """Return the model computing in 16 bits where it computed in f32; the result is in normal form, opset 21 at best.

    `f16` and `bf16` narrow every operator that takes the dtype; casts stand where others need f32. `mixed` is f16 for
    products, data movement and plain arithmetic, and f32 for softmax, norms, pooling and other reductions, for
    operators that leave the range of f16 (`Div Exp Log Pow Reciprocal Softplus Sqrt`) and for whatever reads a number
    that f16 does not hold. Integers and f64 are never touched, nor what computes sizes, nor ops with bodies.

    For f16, weights are read here to look for numbers above 65504. Large ones are rounded when the result is written,
    piece by piece as they are read again, so the result needs what the given model maps.

    Args:
        bundle: the model.
        kind: `f16`, `bf16` or `mixed`.
        keep: nodes that stay f32 in any case: names, patterns of names as `head*`, or operators.
        boundary: whether f32 inputs and outputs of the model change their dtype as well.

    Raises:
        ConversionError: `keep` names nothing of the model, or the model cannot be imported or written again.
    """
    policy = _policy(kind, boundary)
    graph = graph_from_bundle(bundle)
    op_types = _op_types(bundle)
    kept = _keep_list(graph, op_types, keep)
    overflowing = {} if kind == "bf16" else _overflowing(graph)
    lone = {} if kind == "bf16" else _unheld_numbers(graph)
    for node in graph.nodes:
        if node.op.is_leaf or node.id in kept:
            continue
        reads = {graph.nodes[ref.node].name for ref in node.inputs if ref is not None}
        for name in sorted(reads & overflowing.keys()):
            kept[node.id] = f"its weight {name!r} has numbers up to {overflowing[name]:.3g}"
        if kind != "mixed" or node.id in kept:
            continue
        for name in sorted(reads & lone.keys()):
            kept[node.id] = f"it reads {lone[name]:.3g}, which f16 does not hold"
        if node.id not in kept and _op_type(node, op_types) in _RANGE_SENSITIVE:
            kept[node.id] = "its results leave the range of f16 easily"

    narrow = apply_precision(graph, policy, kept)
    for name, data in graph.weights.items():
        narrow.graph.weights[name] = narrowed_later(data, narrow.stored_as.get(name, data.dtype))
    made = bundle_from_graph(narrow.graph, origin=bundle.origin)
    report = PrecisionReport(
        kind=kind,
        narrowed=tuple(narrow.stored_as),
        kept=tuple(
            KeptNode(node.name, _op_type(node, op_types), narrow.kept[node.id])
            for node in graph.nodes
            if node.id in narrow.kept and _op_type(node, op_types) != "Cast"
        ),
        overflowing=overflowing,
        clamped=_clamped(graph, lone, narrow.stored_as, narrow.kept),
        bytes_before=sum(data.nbytes for data in bundle.weights.values()),
        bytes_after=sum(data.nbytes for data in made.weights.values()),
    )
    return made, report


def _policy(kind: str, boundary: bool) -> PrecisionPolicy:
    policies = {
        "f16": PrecisionPolicy.auto_mixed(),
        "bf16": PrecisionPolicy.auto_mixed_bf16(),
        "mixed": PrecisionPolicy.auto_mixed_conservative(),
    }
    if kind not in policies:
        raise ConversionError(f"precision {kind!r} is not known; give one of {', '.join(policies)}")
    policy = policies[kind]
    return replace(policy, boundary=policy.compute) if boundary else policy


def _op_types(bundle: ModelBundle) -> dict[str, str]:
    """Return name of a node, as the graph has it -> operator; a node without a name goes by its first output."""
    return {node.name or next(filter(None, node.output), ""): node.op_type for node in nodes_of(bundle.proto)}


def _op_type(node: Node, op_types: Mapping[str, str]) -> str:
    return op_types.get(node.name, str(getattr(node.op, "op_type", node.op.kind)))


def _keep_list(graph: Graph, op_types: Mapping[str, str], keep: Sequence[str]) -> dict[int, str]:
    """Return id -> reason of the nodes that the caller keeps."""
    nodes = [node for node in graph.nodes if not node.op.is_leaf]
    kept = selected(keep, {node.name: _op_type(node, op_types) for node in nodes}, "the keep-list")
    return {node.id: "it is on the keep-list" for node in nodes if node.name in kept}


def _overflowing(graph: Graph) -> dict[str, float]:
    """Return name -> largest magnitude of the f32 weights that have finite numbers f16 cannot hold."""
    found = {}
    for name, data in graph.weights.items():
        if data.dtype is DType.F32 and data.num_elements > _SCALAR_ELEMENTS:
            largest = max((_largest(values) for values in values_of(data)), default=0.0)
            if largest > _F16_LARGEST:
                found[name] = largest
    return found


def _largest(values: npt.NDArray[Any]) -> float:
    """Return the largest finite magnitude."""
    low, high = float(values.min()), float(values.max())
    largest = max(-low, high)
    if np.isfinite(largest):
        return largest
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _unheld_numbers(graph: Graph) -> dict[str, float]:
    """Return name -> value of the lone f32 numbers that f16 has no finite number above zero for."""
    found = {}
    for node in graph.nodes:
        data = _leaf_data(graph, node)
        if data is None or data.dtype is not DType.F32 or data.num_elements != _SCALAR_ELEMENTS:
            continue
        value = float(data.numpy().reshape(()))
        if np.isfinite(value) and value and not _F16_ROUNDS_TO_ZERO < abs(value) <= _F16_LARGEST:
            found[node.name] = value
    return found


def _leaf_data(graph: Graph, node: Node) -> TensorData | None:
    if isinstance(node.op, Constant):
        return node.op.data
    return graph.weights.get(node.op.name) if isinstance(node.op, Param) else None


def _clamped(
    graph: Graph, lone: Mapping[str, float], stored_as: Mapping[str, DType], kept: Mapping[int, str]
) -> tuple[str, ...]:
    """Return the names of lone numbers above the range that a narrowed node reads."""
    large = {name for name, value in lone.items() if abs(value) > _F16_LARGEST}
    readers = [node for node in graph.nodes if not node.op.is_leaf and node.id not in kept]
    read = {graph.nodes[ref.node].name for node in readers for ref in node.inputs if ref is not None}
    return tuple(sorted(large & (read | stored_as.keys())))
