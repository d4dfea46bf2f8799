"""ONNX forms of control flow, and of the ops that expand to a graph: blocks, and ops of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import where_in
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import tensor_input
from rlx_ort.ir.ops import blocks
from rlx_ort.ir.ops.control import Custom, CustomFn, If, Scan, While
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType

__all__ = ["Step", "UNROLLED_STEPS", "repeat_steps", "zeros"]

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
    given = [value for value, _ in state]
    if isinstance(length, int) and length <= UNROLLED_STEPS:
        current: Sequence[ModelValue] = given
        kept: list[list[ModelValue]] = [[] for _ in saved]
        axis = emit.i64([0])
        for place in range(length):
            index = emit.constant(place, DType.I64) if sequences else None
            rows = [emit.op("Gather", value, index, axis=0, types=[kind]) for value, kind in sequences]
            current, results = step(emit, current, rows)
            for found, result in zip(kept, results, strict=True):
                found.append(emit.op("Unsqueeze", result, axis))
        if not length:
            return list(current), [zeros(emit, Shape([0, *(kind.shape or ())]), kind.dtype) for kind in saved]
        return list(current), [emit.op("Concat", *found, axis=0) if length > 1 else found[0] for found in kept]

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


def zeros(emit: Emitter, shape: Shape, dtype: DType) -> Any:
    """Write zeros of a shape, whose dims may only be known at run time."""
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
    count = len(emit.node.types)
    test = _scalar(emit, predicate, tensor_input(op, types, 0, "predicate"))
    return emit.op("If", test, then_branch=yes_graph, else_branch=no_graph, outputs=count)


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
    count = len(op.types)
    node = OnnxNode(op.name, op.domain, op.version, "", op.attributes, {}, len(inputs), count)
    return emit.imported(node, inputs)
