"""ONNX forms of control flow, of recurrent layers, and of the ops that expand to a graph: blocks, and ops of users."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlx_ort.converters.to_onnx.dispatch import lowers_native
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import where_in
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import tensor_input
from rlx_ort.ir.ops import blocks
from rlx_ort.ir.ops.control import Custom, CustomFn, If, Scan, While
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.sequence import GatedDeltaNet, SelectiveScan
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType

UNROLLED_STEPS = 8
"""Up to this many steps are written out: every provider runs them, while only CPU and CUDA have kernels for loops."""
_PARALLEL_ELEMENTS = 1 << 22
"""Up to this many states over all tokens, a selective scan may be written without a loop, which holds all of them."""
Step: TypeAlias = "Callable[[Emitter, Sequence[ModelValue], Sequence[ModelValue]], tuple[Sequence[Any], Sequence[Any]]]"
"""(emitter, state, rows) -> (next state, the values to save of this step)."""

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
    """Write `length` steps and return the last state and, stacked along a new first axis, the saved values.

    `state` are the first values with their types; `sequences` have the steps as first axis, and the type that goes
    with one is that of a row; `saved` are the types of a step's saved values.
    """
    given = [value for value, _ in state]
    if isinstance(length, int) and length <= UNROLLED_STEPS:
        current: Sequence[ModelValue] = given
        kept: list[list[ModelValue]] = [[] for _ in saved]
        axis = emit.i64([0])
        for place in range(length):
            index = emit.constant(place, DType.I64) if sequences else None
            rows = [emit.op("Gather", value, index, axis=0, types=[kind]) for value, kind in sequences]
            current, results = step(emit, current, rows)
            for steps, result in zip(kept, results, strict=True):
                steps.append(emit.op("Unsqueeze", result, axis))
        if not length:
            return list(current), [_zeros(emit, Shape([0, *(kind.shape or ())]), kind.dtype) for kind in saved]
        return list(current), [emit.op("Concat", *steps, axis=0) if length > 1 else steps[0] for steps in kept]

    def write(inner: Emitter, formal: Sequence[ModelValue]) -> list[ModelValue]:
        counter, go_on, *current = formal
        rows = [inner.op("Gather", value, counter, axis=0, types=[kind]) for value, kind in sequences]
        following, results = step(inner, current, rows)
        return [inner.op("Identity", go_on, types=[_FLAG]), *following, *results]

    # Not ONNX's Scan: ONNX Runtime fails where a sequence turns out to be empty at run time.
    inputs: list[tuple[str, ValueType]] = [("counter", _COUNTER), ("go_on", _FLAG)]
    body = emit.block("step", [*inputs, *(("state", kind) for _, kind in state)], write)
    trips = emit.constant(length, DType.I64) if isinstance(length, int) else emit.dims([length])
    looped = emit.op("Loop", trips, None, *given, body=body, outputs=len(state) + len(saved))
    last = list(looped) if isinstance(looped, tuple) else [looped]
    stacked = last[len(state) :]
    if not isinstance(length, int):
        # Without a single step, ONNX Runtime takes 0 for every dimension that it does not know beforehand.
        for place, kind in enumerate(saved):
            if kind.shape is not None and not kind.shape.is_static:
                shape = emit.dims([length, *kind.shape])
                stacked[place] = emit.op("Reshape", stacked[place], shape, allowzero=1)
    return last[: len(state)], stacked


def _zeros(emit: Emitter, shape: Shape, dtype: DType) -> Any:
    kind, value = TensorType(dtype, shape), np.zeros(1, dtype.numpy)
    return emit.op("ConstantOfShape", emit.dims(shape), value=value, types=[kind])


@lowers(If)
def _if(emit: Emitter, op: If, inputs: Sequence[Any]) -> Any:
    predicate, captures = inputs[0], inputs[1:]
    types = emit.input_types
    if op.elementwise(types):
        yes, no = emit.inline(op.then_body, captures), emit.inline(op.else_body, captures)
        dtypes = [tensor_input(op, emit.node.types, index, "result").dtype for index in range(len(yes))]
        chosen = zip(dtypes, yes, no, strict=True)
        return tuple(where_in(emit, predicate, dtype, left, right) for dtype, left, right in chosen)
    # ONNX gives the branches of an If no inputs of their own: they use the values around them.
    yes_graph = emit.block("then", (), lambda inner, _: inner.inline(op.then_body, captures))
    no_graph = emit.block("else", (), lambda inner, _: inner.inline(op.else_body, captures))
    test = _scalar(emit, predicate, tensor_input(op, types, 0, "predicate"))
    return emit.op("If", test, then_branch=yes_graph, else_branch=no_graph, outputs=len(emit.node.types))


@lowers(While)
def _while(emit: Emitter, op: While, inputs: Sequence[Any]) -> Any:
    carries, captures = inputs[: op.carries], inputs[op.carries :]
    kind = op.cond.outputs[0].type
    assert isinstance(kind, TensorType)  # noqa: S101  # infer made sure of it

    def test(at: Emitter, values: Sequence[Any]) -> Any:
        return _scalar(at, at.inline(op.cond, [*values, *captures])[0], kind)

    def write(inner: Emitter, formal: Sequence[Any]) -> list[Any]:
        following = inner.inline(op.body, [*formal[2:], *captures])
        return [test(inner, following), *following]

    carried: list[tuple[str, ValueType]] = [("carry", value) for value in emit.node.types]
    body = emit.block("pass", [("counter", _COUNTER), ("go_on", _FLAG), *carried], write)
    limit = None if op.max_iterations is None else emit.constant(op.max_iterations, DType.I64)
    return emit.op("Loop", limit, test(emit, carries), *carries, body=body, outputs=op.carries)


@lowers(Scan)
def _scan(emit: Emitter, op: Scan, inputs: Sequence[Any]) -> Any:
    carry, bcasts, sequences = inputs[0], inputs[1 : 1 + op.num_bcast], inputs[1 + op.num_bcast :]
    kinds = op.body_inputs(emit.input_types)
    saves = op.save_trajectory or op.num_checkpoints > 0

    def step(at: Emitter, state: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        following = at.inline(op.body, [*state, *bcasts, *rows])
        return following, following if saves else ()

    steps = list(zip(sequences, kinds[1 + op.num_bcast :], strict=True))
    last, stacked = repeat_steps(emit, step, op.length, [(carry, kinds[0])], steps, kinds[:1] if saves else ())
    if op.num_checkpoints:
        return emit.op("Gather", stacked[0], emit.i64(op.checkpoint_rows), axis=0)
    return stacked[0] if saves else last[0]


def _scalar(emit: Emitter, value: Any, kind: TensorType) -> Any:
    """Return a value of one element without dimensions, as the conditions of If and Loop should be."""
    return value if kind.shape is not None and not kind.shape.rank else emit.op("Reshape", value, emit.i64([]))


@lowers(
    *(blocks.AdaLayerNorm, blocks.AxialRope2d, blocks.FusedAttentionBlock, blocks.FusedConvBiasAct),
    *(blocks.FusedTransformerLayer, blocks.GatedResidual, blocks.GroupedQueryAttention),
    blocks.SoftmaxCrossEntropyWithLogits,
)
def _composite(emit: Emitter, op: blocks.Composite, inputs: Sequence[Any]) -> Any:
    return emit.inline(op.expand(emit.input_types), inputs)


lowers(CustomFn)(lambda emit, op, inputs: emit.inline(op.fwd, inputs))


@lowers(Custom)
def _custom(emit: Emitter, op: Custom, inputs: Sequence[Any]) -> Any:
    node = OnnxNode(op.name, op.domain, op.version, "", op.attributes, {}, len(inputs), len(op.types))
    return emit.imported(node, inputs)


@lowers_native(SelectiveScan)
def _selective_scan_as_loop(emit: Emitter, op: SelectiveScan, inputs: Sequence[Any]) -> Any:
    """Write a loop, which a provider with a kernel for it runs faster than passes over the whole sequence."""
    batch, length, channels = op.expect_rank(emit.input_type(0), (3,), "x")
    if not isinstance(length, int) or length > UNROLLED_STEPS:
        state = TensorType(DType.F32, Shape((batch, channels, op.n)))
        emit.require_kernel("Loop", TensorType(DType.I64, Shape()), TensorType(DType.BOOL, Shape()), state)
    return _selective_scan(emit, op, inputs, elements=0)


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


lowers(SelectiveScan)(_selective_scan)


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
    given = ((x, wide), (delta, wide), (b, narrow), (c, narrow))
    rows = [(emit.op("Transpose", value, perm=[1, 0, 2]), kind) for value, kind in given]
    _, (result,) = repeat_steps(emit, step, length, [(_start(emit, state), state)], rows, [wide])
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
        return emit.op("Unsqueeze", emit.op("Transpose", value, perm=[1, 0, 2, 3]), emit.i64([3]))

    vectors = [(rows_of(value), row) for value in (emit.op("Mul", q, scale), k, v)]
    numbers = [(rows_of(emit.op("Unsqueeze", value, emit.i64([-1]))), one) for value in (emit.op("Exp", g), beta)]

    def step(at: Emitter, carried: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        q_t, k_t, v_t, decay, rate = rows
        faded = at.op("Mul", carried[0], decay)
        change = at.op("Mul", at.op("Sub", v_t, at.op("MatMul", k_t, faded)), rate)
        column = at.op("Transpose", k_t, perm=[0, 1, 3, 2])
        following = at.op("Add", faded, at.op("Mul", column, change))
        return [following], [at.op("MatMul", q_t, following)]

    first = given[0] if given else _start(emit, state)
    (final,), (stacked,) = repeat_steps(emit, step, length, [(first, state)], [*vectors, *numbers], [row])
    result = emit.op("Transpose", emit.op("Squeeze", stacked, emit.i64([3])), perm=[1, 0, 2, 3])
    results = (result, final) if op.carry_state else (result,)
    return results if dtype is kind.dtype else tuple(emit.op("Cast", value, to=kind.dtype) for value in results)


def _start(emit: Emitter, kind: TensorType) -> Any:
    """Write zeros, as a constant if the shape is known."""
    shape = kind.shape or Shape()
    return emit.constant(np.zeros(shape.static()), kind.dtype) if shape.is_static else _zeros(emit, shape, kind.dtype)
