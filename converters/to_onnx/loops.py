"""Steps repeated over a carried state: unrolled when they are few, else an ONNX Loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlx_ort.converters.to_onnx.emitter import Emitter
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.model import ModelValue

__all__ = ["UNROLLED_STEPS", "Step", "repeat_steps"]

UNROLLED_STEPS = 8
"""Up to this many steps are written out: every provider runs them, while only CPU and CUDA have kernels for loops."""

Step: TypeAlias = "Callable[[Emitter, Sequence[ModelValue], Sequence[ModelValue]], tuple[Sequence[Any], Sequence[Any]]]"
"""(emitter, state, rows) -> (next state, what to save of this step)."""

_COUNTER = TensorType(DType.I64, Shape())
_FLAG = TensorType(DType.BOOL, Shape())


def repeat_steps(
    emit: Emitter,
    step: Step,
    length: Dim,
    state: Sequence[tuple[ModelValue, TensorType]],
    sequences: Sequence[tuple[ModelValue, TensorType]] = (),
    saved: Sequence[TensorType] = (),
) -> tuple[list[ModelValue], list[ModelValue]]:
    """Write `length` steps and return the last state and, stacked along a new first axis, what each step saved.

    `state` are the first values with their types; `sequences` have the steps as first axis, and the type that goes
    with one is that of a row; `saved` are the types of what a step saves.
    """
    if isinstance(length, int) and length <= UNROLLED_STEPS:
        return _unrolled(emit, step, length, state, sequences, saved)
    # Not ONNX's Scan: ONNX Runtime fails where a sequence turns out to be empty at run time.
    return _loop(emit, step, length, state, sequences, saved)


def _unrolled(
    emit: Emitter,
    step: Step,
    length: int,
    state: Sequence[tuple[ModelValue, TensorType]],
    sequences: Sequence[tuple[ModelValue, TensorType]],
    saved: Sequence[TensorType],
) -> tuple[list[ModelValue], list[ModelValue]]:
    current: Sequence[ModelValue] = [value for value, _ in state]
    kept: list[list[ModelValue]] = [[] for _ in saved]
    axis = emit.i64([0])
    for place in range(length):
        rows = [
            emit.op("Gather", value, emit.constant(place, DType.I64), axis=0, types=[kind]) for value, kind in sequences
        ]
        current, results = step(emit, current, rows)
        for found, result in zip(kept, results, strict=True):
            found.append(emit.op("Unsqueeze", result, axis))
    if not length:
        return list(current), [_no_rows(emit, kind) for kind in saved]
    return list(current), [emit.op("Concat", *found, axis=0) if length > 1 else found[0] for found in kept]


def _no_rows(emit: Emitter, kind: TensorType) -> Any:
    shape = emit.dims([0, *(kind.shape or Shape())])
    return emit.op("ConstantOfShape", shape, value=np.zeros(1, kind.dtype.numpy))


def _loop(
    emit: Emitter,
    step: Step,
    length: Dim,
    state: Sequence[tuple[ModelValue, TensorType]],
    sequences: Sequence[tuple[ModelValue, TensorType]],
    saved: Sequence[TensorType],
) -> tuple[list[ModelValue], list[ModelValue]]:
    def write(inner: Emitter, formal: Sequence[ModelValue]) -> list[ModelValue]:
        counter, go_on, *current = formal
        rows = [inner.op("Gather", value, counter, axis=0, types=[kind]) for value, kind in sequences]
        following, results = step(inner, current, rows)
        return [inner.op("Identity", go_on, types=[_FLAG]), *following, *results]

    inputs: list[tuple[str, ValueType]] = [("counter", _COUNTER), ("go_on", _FLAG)]
    body = emit.block("step", [*inputs, *(("state", kind) for _, kind in state)], write)
    trips = emit.constant(length, DType.I64) if isinstance(length, int) else emit.dims([length])
    given = [value for value, _ in state]
    results = emit.op("Loop", trips, None, *given, body=body, outputs=len(state) + len(saved))
    found = list(results) if isinstance(results, tuple) else [results]
    last, stacked = found[: len(state)], found[len(state) :]
    if not isinstance(length, int):
        # Without a single step, ONNX Runtime takes 0 for every dimension that it does not know beforehand.
        stacked = [_shaped(emit, value, length, kind) for value, kind in zip(stacked, saved, strict=True)]
    return last, stacked


def _shaped(emit: Emitter, value: ModelValue, length: Dim, kind: TensorType) -> Any:
    dims = kind.shape or Shape()
    return value if dims.is_static else emit.op("Reshape", value, emit.dims([length, *dims]), allowzero=1)
