"""Checks the indices that a run is fed, for devices whose kernels do not.

Kernels of accelerators read 0, a clamped row or other memory for an index out of range, where the CPU's raise an error.
An index operand is followed back to inputs of the graph through operators that move elements and change none. Indices
that the graph computes, and those in bodies, which may not run, are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.errors import EngineError
from rlx_ort.faults import OUT_OF_RANGE
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, TensorType, ValueType
from rlx_ort.providers.engine.binding import Arrays, Binder, BoundRun, Loop, Slots, WrappedBinder
from rlx_ort.providers.kernel_limits import element, input_dims

IndexCheck: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Raises an EngineError if an array among the inputs of a run has an index out of range."""

_ALONG_AXIS = frozenset({"Gather", "GatherElements", "ScatterElements"})
_COORDINATES = frozenset({"GatherND", "ScatterND"})
_KEEPING = frozenset({"Identity", "Cast", "Slice"})
_MOVING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Concat"})


@dataclass(frozen=True, slots=True)
class _Source:
    """The elements of a graph input that `slices` leave, one after another; `moved` if they are in other places."""

    name: str
    slices: tuple[tuple[slice, ...], ...] = ()
    moved: bool = False


@dataclass(frozen=True, slots=True)
class _Range:
    """What a node takes: up to `size - span`, from 0 on or from `-size` on.

    `column` is the place along the last axis of the indices that it applies to, None for all.
    """

    node: str
    size: Dim
    span: Dim = 1
    signed: bool = True
    column: int | None = None

    @property
    def dims(self) -> tuple[Dim, Dim]:
        return self.size, self.span


def index_check(
    nodes: Sequence[ExportedNode], inputs: Mapping[str, ValueType], constants: Mapping[str, object]
) -> IndexCheck | None:
    """Return a check of the inputs of a graph with these nodes; None if none of them is known to be an index."""
    tensors = {name: kind for name, kind in inputs.items() if isinstance(kind, TensorType)}
    traced: dict[str, list[_Source]] = {
        name: [_Source(name)] for name, kind in tensors.items() if kind.dtype.is_integer
    }
    places = {
        dim: (name, axis)
        for name, kind in reversed(tensors.items())
        for axis, dim in enumerate(kind.shape or ())
        if isinstance(dim, str)
    }
    checks: list[tuple[_Source, list[_Range]]] = []
    for node in nodes:
        if node.pattern.depth:
            continue
        place, ranges = _indexed(node)
        ranges = [
            each for each in ranges if all(isinstance(dim, int) or dim in places for dim in (each.size, each.span))
        ]
        for source in traced.get(node.input_names[place], ()) if ranges else ():
            if not source.moved or ranges[0].column is None:
                known = next((known for each, known in checks if each == source), None)
                if known is None:
                    checks.append((source, known := []))
                known.extend(each for each in ranges if each not in known)
        passed = _passed(node, traced, constants)
        if passed:
            traced[node.output_names[0]] = passed
    if not checks:
        return None

    def size(dim: Dim, feeds: Mapping[str, Any]) -> int:
        if isinstance(dim, str):
            name, axis = places[dim]
            return int(feeds[name].shape[axis])
        return dim or 0

    def check(feeds: Mapping[str, Any]) -> None:
        for source, ranges in checks:
            value = feeds.get(source.name)
            if value.__class__ is not np.ndarray:  # it is on the device
                continue
            for part in source.slices:
                value = value[part]
            known: dict[int | None, tuple[int, int]] = {}
            for each in ranges if value.size else ():
                if each.column not in known:
                    column = value if each.column is None else value[..., each.column]
                    known[each.column] = int(column.min()), int(column.max())
                least, greatest = known[each.column]
                rows = size(each.size, feeds)
                first, last = -rows if each.signed else 0, rows - size(each.span, feeds)
                if least < first or greatest > last:
                    raise EngineError(
                        f"index {least if least < first else greatest} of input {source.name!r} {OUT_OF_RANGE} "
                        f"{each.node!r}, which takes {first} to {last}; feed indices within it"
                    )

    return check


def _indexed(node: ExportedNode) -> tuple[int, list[_Range]]:
    """Return the place of the index operand of a node and its range; no ranges where nothing is known."""
    pattern, table = node.pattern, input_dims(node, 0)
    attributes = {name: each.value for name, each in pattern.attributes.items()}
    indices = input_dims(node, 1)
    if pattern.op_type == "RotaryEmbedding":
        return _rotated(node)
    if pattern.domain or not table or indices is None:
        return 0, []
    if pattern.op_type in _ALONG_AXIS:
        return 1, [_Range(node.name, table[attributes.get("axis", 0)])]
    if pattern.op_type in _COORDINATES and indices and isinstance(indices[-1], int):
        first = attributes.get("batch_dims", 0)
        sizes = table[first : first + indices[-1]]
        columns = range(len(sizes)) if len(sizes) > 1 else [None]
        return 1, [_Range(node.name, size, column=column) for column, size in zip(columns, sizes, strict=True)]
    return 0, []


def _rotated(node: ExportedNode) -> tuple[int, list[_Range]]:
    """Return the range of the places of a rotation; one place stands for itself and as many as are rotated after it."""
    own = not node.pattern.domain
    place, table = (3, 1) if own else (1, 2)
    x, places, rows = (input_dims(node, each) for each in (0, place, table))
    if x is None or places is None or not rows:
        return 0, []
    return place, [_Range(node.name, rows[0], 1 if own or len(places) == 2 else x[-2], signed=False)]


def _passed(node: ExportedNode, traced: Mapping[str, list[_Source]], constants: Mapping[str, object]) -> list[_Source]:
    """Return the sources of the output of a node that changes no element."""
    pattern = node.pattern
    if pattern.domain or pattern.op_type not in _KEEPING | _MOVING:
        return []
    read = node.input_names if pattern.op_type == "Concat" else node.input_names[:1]
    sources = [source for name in read for source in traced.get(name, ())]
    if pattern.op_type in _MOVING:
        return [replace(source, moved=True) for source in sources]
    if pattern.op_type == "Cast":
        kept = element(node.outputs)
        return sources if kept is not None and kept.is_integer else []
    if pattern.op_type == "Slice" and sources:
        part = _slices(node, constants)
        kept_places = [source for source in sources if not source.moved]
        return [] if part is None else [replace(each, slices=(*each.slices, part)) for each in kept_places]
    return sources


def _slices(node: ExportedNode, constants: Mapping[str, object]) -> tuple[slice, ...] | None:
    """Return the part that a Slice forwards with constant bounds takes, for numpy; None for another one."""
    rank = len(input_dims(node, 0) or ())
    given = [constants.get(name) for name in node.input_names[1:]]
    if not rank or len(given) < 2 or not all(isinstance(each, TensorData) for each in given):
        return None
    starts, ends, *others = [each.numpy().tolist() for each in given if isinstance(each, TensorData)]
    axes = others[0] if others else range(len(starts))
    steps = others[1] if len(others) > 1 else [1] * len(starts)
    if min(steps, default=1) < 1:
        return None
    parts = [slice(None)] * rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        parts[axis] = slice(start, end, step)
    return tuple(parts)


class CheckedBinder(WrappedBinder):
    """A binder whose runs check their inputs first."""

    def __init__(self, binder: Binder, check: IndexCheck) -> None:
        super().__init__(binder)
        self._check = check

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        self._check(feeds)
        return self._binder.run(feeds, outputs, resident)

    def loop(self, inputs: Sequence[str], outputs: Sequence[str], resident: Collection[str]) -> Loop:
        """Return a run to be repeated; see `Binder.loop`."""
        names, loop = tuple(inputs), self._binder.loop(inputs, outputs, resident)

        def run(values: Sequence[Any]) -> list[Any]:
            self._check(dict(zip(names, values, strict=True)))
            return loop(values)

        return run

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any] | str]) -> BoundRun | None:
        """Return a run over memory that is bound once; see `Binder.bound`."""
        bound = self._binder.bound(inputs, outputs)
        return None if bound is None else _CheckedBound(bound, dict(inputs), self._check)

    def slots(self, inputs: Arrays, outputs: Arrays, fixed: Collection[str]) -> Slots | None:
        """Return buffers like these arrays; see `Binder.slots`."""
        slots = self._binder.slots(inputs, outputs, fixed)
        return None if slots is None else _CheckedSlots(slots, tuple(inputs), self._check)


class _CheckedSlots(Slots):
    def __init__(self, slots: Slots, names: Sequence[str], check: IndexCheck) -> None:
        self._slots = slots
        self._names = names
        self._check = check

    @property
    def bound(self) -> Mapping[str, npt.NDArray[Any]]:
        return self._slots.bound

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        self._check(dict(zip(self._names, arrays, strict=True)))
        return self._slots.run(arrays)


class _CheckedBound(BoundRun):
    def __init__(self, bound: BoundRun, inputs: dict[str, Any], check: IndexCheck) -> None:
        self._bound = bound
        self._inputs = inputs
        self._check = check

    def run(self) -> None:
        self._check(self._inputs)
        self._bound.run()

    def replace(self, name: str, array: npt.NDArray[Any]) -> None:
        self._bound.replace(name, array)
        self._inputs[name] = array
