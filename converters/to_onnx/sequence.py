"""ONNX forms of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.control import UNROLLED_STEPS, repeat_steps, zeros
from rlx_ort.converters.to_onnx.dispatch import lowers_native
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.sequence import GatedDeltaNet, SelectiveScan
from rlx_ort.ir.types import Dim, Shape, TensorType

_PARALLEL_ELEMENTS = 1 << 22
"""Up to this many states over all tokens, a selective scan may be written without a loop, which holds all of them."""


@lowers_native(SelectiveScan)
def _selective_scan_as_loop(emit: Emitter, op: SelectiveScan, inputs: Sequence[Any]) -> Any:
    """Write a loop, which a provider with a kernel for it runs faster than passes over the whole sequence."""
    batch, length, channels = op.expect_rank(emit.input_type(0), (3,), "x")
    if not isinstance(length, int) or length > UNROLLED_STEPS:
        state = TensorType(DType.F32, Shape((batch, channels, op.n)))
        emit.require_kernel("Loop", TensorType(DType.I64, Shape()), TensorType(DType.BOOL, Shape()), state)
    return _selective_scan(emit, op, inputs, elements=0)


@lowers(SelectiveScan)
def _selective_scan(emit: Emitter, op: SelectiveScan, inputs: Sequence[Any], elements: int = _PARALLEL_ELEMENTS) -> Any:
    """Write passes over the whole sequence if it has at most so many states, else step by step."""
    kind = emit.input_type(0)
    batch, length, channels = op.expect_rank(kind, (3,), "x")
    dtype = DType.F64 if kind.dtype is DType.F64 else DType.F32
    x, delta, a, b, c = (emit.cast(value, dtype) for value in inputs)
    known = math.prod(dim for dim in (batch, length, channels, op.n) if isinstance(dim, int))
    if isinstance(length, int) and length > UNROLLED_STEPS and known <= elements:
        result = _doubling_scan(emit, length, x, delta, a, b, c)
    else:
        state = TensorType(dtype, Shape((batch, channels, op.n)))
        result = _stepwise_scan(emit, length, state, x, delta, a, b, c)
    return result if dtype is kind.dtype else emit.op("Cast", result, to=kind.dtype)


def _doubling_scan(emit: Emitter, length: int, x: Any, delta: Any, a: Any, b: Any, c: Any) -> Any:
    """Write the recurrence h_t = f_t h_{t-1} + u_t as log2(length) passes over the whole sequence.

    After the pass of distance d, f and u of each token stand for the last 2d tokens together.
    """
    last, second_last = emit.i64([-1]), emit.i64([-2])
    factor = emit.op("Exp", emit.op("Mul", emit.op("Unsqueeze", delta, last), a))
    scaled = emit.op("Unsqueeze", emit.op("Mul", delta, x), last)
    state = emit.op("Mul", scaled, emit.op("Unsqueeze", b, second_last))
    distance = 1
    while distance < length:
        later = slice_axis(emit, factor, 1, distance, None)
        moved = emit.op("Mul", later, slice_axis(emit, state, 1, 0, length - distance))
        updated = emit.op("Add", slice_axis(emit, state, 1, distance, None), moved)
        state = emit.op("Concat", slice_axis(emit, state, 1, 0, distance), updated, axis=1)
        if 2 * distance < length:
            grown = emit.op("Mul", later, slice_axis(emit, factor, 1, 0, length - distance))
            factor = emit.op("Concat", slice_axis(emit, factor, 1, 0, distance), grown, axis=1)
        distance *= 2
    return emit.op("ReduceSum", emit.op("Mul", state, emit.op("Unsqueeze", c, second_last)), last, keepdims=0)


def _stepwise_scan(emit: Emitter, length: Dim, state: TensorType, x: Any, delta: Any, a: Any, b: Any, c: Any) -> Any:
    batch, channels, n = state.shape or Shape((None, None, None))
    last, middle = emit.i64([-1]), emit.i64([1])

    def step(at: Emitter, carried: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        x_t, delta_t, b_t, c_t = rows
        factor = at.op("Exp", at.op("Mul", at.op("Unsqueeze", delta_t, last), a))
        added = at.op("Mul", at.op("Unsqueeze", at.op("Mul", delta_t, x_t), last), at.op("Unsqueeze", b_t, middle))
        following = at.op("Add", at.op("Mul", factor, carried[0]), added)
        seen = at.op("Mul", following, at.op("Unsqueeze", c_t, middle))
        return [following], [at.op("ReduceSum", seen, last, keepdims=0)]

    wide, narrow = TensorType(state.dtype, Shape((batch, channels))), TensorType(state.dtype, Shape((batch, n)))
    rows = [
        (_steps_first(emit, value, 3), kind) for value, kind in ((x, wide), (delta, wide), (b, narrow), (c, narrow))
    ]
    _, (result,) = repeat_steps(emit, step, length, [(_zeros(emit, state), state)], rows, [wide])
    return emit.op("Transpose", result, perm=[1, 0, 2])


@lowers(GatedDeltaNet)
def _gated_delta_net(emit: Emitter, op: GatedDeltaNet, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(2)
    batch, length, heads, _ = op.expect_rank(kind, (4,), "v")
    dtype = DType.F64 if kind.dtype is DType.F64 else DType.F32
    q, k, v, g, beta, *given = (emit.cast(value, dtype) for value in inputs)
    state = TensorType(dtype, Shape((batch, heads, op.n, op.n)))
    scale = emit.constant(np.asarray(1 / math.sqrt(op.n)), dtype)

    # Each head is a row vector (1, n), so that S^T k and S^T q are the products k S and q S.
    row, one = TensorType(dtype, Shape((batch, heads, 1, op.n))), TensorType(dtype, Shape((batch, heads, 1, 1)))

    def rows_of(value: Any) -> Any:
        """Return `(B, S, H, m)` as `(S, B, H, 1, m)`."""
        return emit.op("Unsqueeze", _steps_first(emit, value, 4), emit.i64([3]))

    vectors = [(rows_of(value), row) for value in (emit.op("Mul", q, scale), k, v)]
    numbers = [(rows_of(emit.op("Unsqueeze", value, emit.i64([-1]))), one) for value in (emit.op("Exp", g), beta)]

    def step(at: Emitter, carried: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        q_t, k_t, v_t, decay, rate = rows
        faded = at.op("Mul", carried[0], decay)
        change = at.op("Mul", at.op("Sub", v_t, at.op("MatMul", k_t, faded)), rate)
        column = at.op("Transpose", k_t, perm=[0, 1, 3, 2])
        following = at.op("Add", faded, at.op("Mul", column, change))
        return [following], [at.op("MatMul", q_t, following)]

    first = given[0] if given else _zeros(emit, state)
    (final,), (stacked,) = repeat_steps(emit, step, length, [(first, state)], [*vectors, *numbers], [row])
    result = emit.op("Transpose", emit.op("Squeeze", stacked, emit.i64([3])), perm=[1, 0, 2, 3])
    results = (result, final) if op.carry_state else (result,)
    return results if dtype is kind.dtype else tuple(emit.op("Cast", value, to=kind.dtype) for value in results)


def _steps_first(emit: Emitter, value: Any, rank: int) -> Any:
    return emit.op("Transpose", value, perm=[1, 0, *range(2, rank)])


def _zeros(emit: Emitter, kind: TensorType) -> Any:
    shape = kind.shape or Shape()
    return emit.constant(np.zeros(shape.static()), kind.dtype) if shape.is_static else zeros(emit, shape, kind.dtype)
