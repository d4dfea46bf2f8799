"""Kernel limits: forms of operators that a provider takes and whose kernels fail, are wrong or end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.onnx import convolution_problem, window_rooms
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, TensorType, ValueType

_HEADS_RANK = 4  # of an `Attention` whose heads are a dim of their own


@dataclass(frozen=True, slots=True)
class KernelLimit:
    """A form of an operator that a provider accepts when a session is opened and whose kernel fails or is wrong.

    `applies` decides by a node's types and a mapping of its attributes, as Python values, and of its constant inputs,
    as `TensorData` by their place. `reason` is the limit of the kernel; `empty` says that it is one of tensors without
    elements, and `small` that it is one of small sizes: where some fit, larger ones do.
    """

    op_type: str
    applies: Callable[[ExportedNode, Mapping[Any, Any]], bool]
    reason: str
    domain: str = ""
    empty: bool = False
    small: bool = False


def limits_of(
    op_types: str,
    applies: Callable[[ExportedNode, Mapping[Any, Any]], bool],
    reason: str,
    domain: str = "",
    *,
    empty: bool = False,
    small: bool = False,
) -> Iterator[KernelLimit]:
    """Yield one limit for each of several operators, whose names are words of a text."""
    return (KernelLimit(op_type, applies, reason, domain, empty, small) for op_type in op_types.split())


def reads_i64(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an imported node, for which no other form is written, reads i64."""
    return node.pattern.imported and element(node.inputs) is DType.I64


REDUCED_IN_F64 = "its results stop at the limits of integers and are inexact above 2^53"


def reads_integers(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an imported node, for which no other form is written, reads integers."""
    dtype = element(node.inputs)
    return node.pattern.imported and dtype is not None and dtype.is_integer


def limited_nodes(
    nodes: Sequence[ExportedNode], limits: Sequence[KernelLimit], constants: Mapping[str, object]
) -> list[tuple[ExportedNode, str]]:
    """Return the nodes on which kernels with these limits fail or are wrong, and why."""
    operators = {(limit.domain, limit.op_type) for limit in limits}
    limited = []
    for node in nodes:
        pattern = node.pattern
        if (pattern.domain, pattern.op_type) not in operators:
            continue
        given: dict[Any, Any] = attributes_of(node)
        read = [(place, constants.get(name)) for place, name in enumerate(node.input_names)]
        given.update((place, data) for place, data in read if isinstance(data, TensorData))
        known = [each for each in limits if (each.domain, each.op_type) == (pattern.domain, pattern.op_type)]
        why = next((limit.reason for limit in known if limit.applies(node, given)), "")
        if why:
            limited.append((node, why))
    return limited


def attributes_of(node: ExportedNode) -> dict[str, object]:
    """Return the attributes of a node by name, as Python values."""
    return {
        name: each.value.decode(errors="replace") if isinstance(each.value, bytes) else each.value
        for name, each in node.pattern.attributes.items()
    }


def element(kinds: Sequence[ValueType | None]) -> DType | None:
    """Return the element type of a node's first input or output, or None where it is absent or no tensor."""
    kind = kinds[0] if kinds else None
    return kind.dtype if isinstance(kind, TensorType) else None


def is_float_remainder(node: ExportedNode, given: Mapping[str, Any]) -> bool:
    """Return whether a `Mod` is of floats without `fmod=1`, which the kernels before opset 28 take and cannot run."""
    dtype = element(node.inputs)
    return node.version < 28 and not given.get("fmod") and dtype is not None and dtype.is_float


def rank(node: ExportedNode) -> int | None:
    """Return the rank of a node's first input, or None where it is unknown, absent or no tensor."""
    dims = input_dims(node, 0)
    return None if dims is None else len(dims)


def input_dims(node: ExportedNode, place: int) -> tuple[Dim, ...] | None:
    """Return the dims of a node's input, or None where they are unknown or the input is absent or no tensor."""
    kind = node.inputs[place] if place < len(node.inputs) else None
    return tuple(kind.shape) if isinstance(kind, TensorType) and kind.shape is not None else None


def is_empty(node: ExportedNode, given: Mapping[Any, Any], places: Sequence[int] | None = None) -> bool:
    """Return whether an input at one of these places, by default at any, is known to have a dim of 0."""
    places = range(len(node.inputs)) if places is None else places
    return any(0 in (input_dims(node, place) or ()) for place in places)


def is_empty_beside(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an input after the first has no elements."""
    return is_empty(node, given, range(1, len(node.inputs)))


is_empty_first = partial(is_empty, places=(0,))
"""Returns whether the first input has no elements."""

has_no_axes = partial(is_empty, places=(1,))
"""Returns whether the second input is known to have no elements."""

has_no_number = partial(is_empty, places=(2, 3, 4))
"""Returns whether a number of a `NonMaxSuppression` is not there: how many boxes, or a threshold."""


def has_other_operands(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether the operands of a convolution are known not to fit each other, its window and input included."""
    return bool(convolution_problem(node.pattern.op_type, given, node.inputs))


def is_below_window(node: ExportedNode, given: Mapping[Any, Any], named: Mapping[str, int] | None = None) -> bool:
    """Return whether a window is known to be longer than its input with its padding, given sizes of named dims."""
    return any(room < 0 for room, _ in _rooms(node, given, named or {}))


def is_below_pool(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether the window of a pool is known to be longer than its input, which it may read once all the same."""
    return not given.get("ceil_mode") and any(room < 0 and stride > 1 for room, stride in _rooms(node, given, {}))


def _rooms(node: ExportedNode, given: Mapping[Any, Any], named: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    dims = input_dims(node, 0) or ()
    sizes = dims[1:-1] if given.get("channels_last") or node.pattern.op_type == "NhwcMaxPool" else dims[2:]
    window = given.get("kernel_shape") or (input_dims(node, 1) or ())[2:]
    return window_rooms(given, [named.get(dim) if isinstance(dim, str) else dim for dim in sizes], window)


def has_no_heads(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether an `Attention` by heads has none."""
    return rank(node) == _HEADS_RANK and any(0 in (input_dims(node, place) or ())[1:2] for place in range(3))


def reduces_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a reduction may have results of no elements; one without results has none."""
    dims, axes = input_dims(node, 0), given.get("axes", constant(given, 1))
    if dims is None or 0 not in dims:
        return False
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        return True  # the axes come with the run
    if axes is None or not len(axes):
        axes = () if given.get("noop_with_empty_axes") else range(len(dims))
    reduced = {int(axis) % len(dims) for axis in axes}
    return all(place in reduced for place, dim in enumerate(dims) if dim == 0)


def sums_no_codes(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a product of integers has an inner dim of 0."""
    return (input_dims(node, 0) or (1,))[-1] == 0


def sums_nothing(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether a product is known to have an inner dim of 0."""
    left, right = input_dims(node, 0), input_dims(node, 1)
    return bool((left and left[-1] == 0) or (right and right[-2:][0] == 0))


def constant(given: Mapping[Any, Any], place: int) -> npt.NDArray[Any] | None:
    """Return a constant input of a node that a limit is asked about, None for any other."""
    data = given.get(place)
    return data.numpy() if isinstance(data, TensorData) else None


def _is_out_of_range(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether constant indices along an axis lie outside the data."""
    dims, indices = input_dims(node, 0), constant(given, 1)
    if not dims or indices is None or not indices.size:
        return False
    size = dims[int(given.get("axis", 0)) % len(dims)]
    return isinstance(size, int) and bool(indices.min() < -size or indices.max() >= size)


def _has_coordinates_out_of_range(node: ExportedNode, given: Mapping[Any, Any]) -> bool:
    """Return whether constant coordinates, of `GatherND` and `ScatterND`, lie outside the data."""
    dims, indices = input_dims(node, 0), constant(given, 1)
    if not dims or indices is None or not indices.size:
        return False
    sizes = dims[int(given.get("batch_dims", 0)) :]
    pairs = zip(np.moveaxis(indices, -1, 0), sizes, strict=False)
    return any(isinstance(size, int) and bool(at.min() < -size or at.max() >= size) for at, size in pairs)


INDEX_LIMITS = (
    *limits_of("Gather GatherElements ScatterElements", _is_out_of_range, "constant indices are out of range"),
    *limits_of("GatherND ScatterND", _has_coordinates_out_of_range, "constant indices are out of range"),
)
"""What kernels that do not check their indices compute wrongly, as far as it is known before a run."""

# Pools divide the room for their windows by the stride towards 0 and not down, so that -1 gives a result (1.31.1):
# https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cpu/nn/pool_attributes.h
_SHORTER = "it has a result for an input shorter than its window"
POOL_LIMITS = (
    *limits_of("AveragePool DeformConv LpPool MaxPool", is_below_pool, _SHORTER, small=True),
    *limits_of("NhwcMaxPool QLinearAveragePool", is_below_pool, _SHORTER, "com.microsoft", small=True),
)
