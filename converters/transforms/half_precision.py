"""Converts a model's f32 weights and arithmetic to f16 or bf16, by the precision pass of the IR."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, graph_from_bundle
from rlx_ort.converters.precision_pass import apply_precision
from rlx_ort.converters.protos import nodes_of
from rlx_ort.converters.transforms.scope import selected
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.tensor import narrowed_later, values_of
from rlx_ort.options.precision import PrecisionPolicy

PrecisionKind: TypeAlias = Literal["f16", "bf16", "mixed"]
"""The dtypes that a model can be narrowed to."""

_F16_LARGEST = 65504.0
_F16_ROUNDS_TO_ZERO = 2.0**-25  # half of the smallest number above zero; a tie goes to the even one, zero
_SCALAR_ELEMENTS = 1  # a lone number is a mask or an epsilon, not a weight

_POLICIES: dict[str, Callable[[], PrecisionPolicy]] = {
    "f16": PrecisionPolicy.auto_mixed,
    "bf16": PrecisionPolicy.auto_mixed_bf16,
    "mixed": PrecisionPolicy.auto_mixed_conservative,
}
# Operators whose results leave the range of f16 for arguments well inside it, or lose it near zero.
_RANGE_SENSITIVE = frozenset({"Div", "Exp", "Log", "Pow", "Reciprocal", "Softplus", "Sqrt"})


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node that goes on computing in f32, and the reason as part of a sentence."""

    name: str
    op_type: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """The result of `to_precision`; bytes are those of the weights.

    Attributes:
        narrowed: names of the weights that are stored in 16 bits now.
        kept: the nodes that stay f32.
        overflowing: weights with finite numbers above 65504, which stay f32 -> the largest of these.
        clamped: lone numbers out of the dtype's range, such as masks of -3.4e38, which are the largest it holds now.
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
    that f16 does not hold. Integers and f64 are never touched, nor nodes that compute sizes, nor ops with bodies.

    For f16, weights are read here to look for numbers above 65504. Large ones are rounded when the result is written,
    piece by piece as they are read again, so the result needs the files that the given model maps.

    Args:
        bundle: the model.
        kind: `f16`, `bf16` or `mixed`.
        keep: nodes that stay f32 in any case: names, patterns of names as `head*`, or operators.
        boundary: whether f32 inputs and outputs of the model change their dtype as well.

    Raises:
        ConversionError: `keep` names nothing of the model, or the model cannot be imported or written again.
    """
    if kind not in _POLICIES:
        raise ConversionError(f"precision {kind!r} is not known; give one of {', '.join(_POLICIES)}")
    policy = _POLICIES[kind]()
    graph = graph_from_bundle(bundle)
    operators = _operators(bundle, graph)
    named = selected(keep, {graph.nodes[at].name: op_type for at, op_type in operators.items()}, "the keep-list")
    kept = {at: "it is on the keep-list" for at in operators if graph.nodes[at].name in named}
    overflowing = {} if kind == "bf16" else _overflowing(graph)
    lone = {} if kind == "bf16" else _unheld_numbers(graph)
    for at in operators.keys() - kept.keys():
        reads = {graph.nodes[ref.node].name for ref in graph.nodes[at].inputs if ref is not None}
        for name in sorted(reads & overflowing.keys()):
            kept[at] = f"its weight {name!r} has numbers up to {overflowing[name]:.3g}"
        if kind != "mixed" or at in kept:
            continue
        for name in sorted(reads & lone.keys()):
            kept[at] = f"it reads {lone[name]:.3g}, which f16 does not hold"
        if at not in kept and operators[at] in _RANGE_SENSITIVE:
            kept[at] = "its results leave the range of f16 easily"

    narrow = apply_precision(graph, replace(policy, boundary=policy.compute) if boundary else policy, kept)
    for name, data in graph.weights.items():
        narrow.graph.weights[name] = narrowed_later(data, narrow.stored_as.get(name, data.dtype))
    made = bundle_from_graph(narrow.graph, origin=bundle.origin)
    readers = [graph.nodes[at] for at in operators if at not in narrow.kept]
    read = {graph.nodes[ref.node].name for node in readers for ref in node.inputs if ref is not None}
    large = {name for name, value in lone.items() if abs(value) > _F16_LARGEST}
    report = PrecisionReport(
        kind=kind,
        narrowed=tuple(narrow.stored_as),
        kept=tuple(
            KeptNode(graph.nodes[at].name, op_type, narrow.kept[at])
            for at, op_type in operators.items()
            if at in narrow.kept and op_type != "Cast"
        ),
        overflowing=overflowing,
        clamped=tuple(sorted(large & (read | narrow.stored_as.keys()))),
        bytes_before=sum(data.nbytes for data in bundle.weights.values()),
        bytes_after=sum(data.nbytes for data in made.weights.values()),
    )
    return made, report


def _operators(bundle: ModelBundle, graph: Graph) -> dict[int, str]:
    """Return id -> operator, as the model calls it, of the nodes of a graph but inputs, parameters and constants."""
    # In the graph a node without a name goes by its first output.
    known = {node.name or next(filter(None, node.output), ""): node.op_type for node in nodes_of(bundle.proto)}
    nodes = (node for node in graph.nodes if not node.op.is_leaf)
    return {node.id: known.get(node.name, str(getattr(node.op, "op_type", node.op.kind))) for node in nodes}


def _overflowing(graph: Graph) -> dict[str, float]:
    """Return name -> largest magnitude of the f32 weights that have finite numbers f16 cannot hold."""
    sizes = {}
    for name, data in graph.weights.items():
        if data.dtype is DType.F32 and data.num_elements > _SCALAR_ELEMENTS:
            largest = max((_largest(values) for values in values_of(data)), default=0.0)
            if largest > _F16_LARGEST:
                sizes[name] = largest
    return sizes


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
    numbers = {}
    for node in graph.nodes:
        data = node.op.data if isinstance(node.op, Constant) else None
        if isinstance(node.op, Param):
            data = graph.weights.get(node.op.name)
        if data is None or data.dtype is not DType.F32 or data.num_elements != _SCALAR_ELEMENTS:
            continue
        value = float(data.numpy().reshape(()))
        if np.isfinite(value) and value and not _F16_ROUNDS_TO_ZERO < abs(value) <= _F16_LARGEST:
            numbers[node.name] = value
    return numbers
