"""ONNX forms of the normalisations and the reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.elementwise import add_unless_zeros, gated
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import compute_dtype, op_in
from rlx_ort.converters.to_onnx.shape import reshape
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.norm import (
    ArgMax,
    ArgMin,
    BatchNormInference,
    Cumsum,
    FusedResidualLN,
    FusedResidualRmsNorm,
    FusedSwiGLU,
    GroupNorm,
    LayerNorm,
    LayerNorm2d,
    Reduce,
    RmsNorm,
    Softmax,
    TopK,
)
from rlx_ort.ir.shape import Shape

_REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}


@lowers(LayerNorm)
def _layer_norm(emit: Emitter, op: LayerNorm, inputs: Sequence[Any]) -> Any:
    x, gamma, beta = inputs
    rank = emit.input_rank(0, "x")
    return _along_last(emit, x, rank, op.axis, lambda moved: _layer(emit, moved, gamma, beta, op.eps))


@lowers(RmsNorm)
def _rms_norm(emit: Emitter, op: RmsNorm, inputs: Sequence[Any]) -> Any:
    x, gamma, beta = inputs
    rank = emit.input_rank(0, "x")
    return _along_last(emit, x, rank, op.axis, lambda moved: _rms(emit, moved, gamma, beta, op.eps))


@lowers(LayerNorm2d)
def _layer_norm2d(emit: Emitter, op: LayerNorm2d, inputs: Sequence[Any]) -> Any:
    x, gamma, beta = inputs
    return _along_last(emit, x, 4, 1, lambda moved: _layer(emit, moved, gamma, beta, op.eps))


def _along_last(emit: Emitter, x: Any, rank: int, axis: int, normalise: Callable[[Any], Any]) -> Any:
    """Apply a normalisation of the last axis along another one."""
    axis %= rank
    if axis == rank - 1:
        return normalise(x)
    perm = [*(place for place in range(rank) if place != axis), axis]
    moved = normalise(emit.op("Transpose", x, perm=perm))
    return emit.op("Transpose", moved, perm=[perm.index(place) for place in range(rank)])


def _layer(emit: Emitter, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
    return emit.op("LayerNormalization", x, gamma, beta, axis=-1, epsilon=eps)


def _rms(emit: Emitter, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
    """The basic ops that ONNX Runtime fuses into one kernel; the fused op itself is no standard op at opset 21.

    That fusion reads eps as f32 and takes 1e-5 for any other dtype, so halves are normalised in f32, which their mean
    of squares needs anyway, and f64 is squared in a way that the fusion does not know.
    """
    dtype = emit.input_dtype(0)
    compute = DType.F64 if dtype is DType.F64 else DType.F32
    wide = emit.cast(x, compute) if compute is not dtype else x
    square = emit.op("Mul", wide, wide) if compute is DType.F64 else emit.op("Pow", wide, emit.constant(2, compute))
    mean = emit.op("ReduceMean", square, emit.i64([-1]), keepdims=1)
    root = emit.op("Sqrt", emit.op("Add", mean, emit.constant(eps, compute)))
    normal = emit.op("Div", wide, root)
    if compute is not dtype:
        normal = emit.cast(normal, dtype)
    scaled = emit.op("Mul", normal, gamma)
    return add_unless_zeros(emit, scaled, beta, len(emit.node.inputs) - 1)  # beta is the last input of all these ops


@lowers(GroupNorm)
def _group_norm(emit: Emitter, op: GroupNorm, inputs: Sequence[Any]) -> Any:
    """InstanceNormalization with a group as channel, then gamma and beta a channel."""
    x, gamma, beta = inputs
    kind = emit.input_type(0)
    shape = known_shape(op, kind, "x")
    grouped = reshape(emit, x, shape, (shape[0], op.num_groups, None))
    ones, zeros = (emit.constant(np.full(op.num_groups, fill), kind.dtype) for fill in (1.0, 0.0))
    normal = op_in(emit, "InstanceNormalization", kind.dtype, grouped, ones, zeros, epsilon=op.eps)
    restored = reshape(emit, normal, Shape((shape[0], op.num_groups, None)), shape)
    spread = [1] * (shape.rank - 2)
    scale, shift = (emit.op("Reshape", vector, emit.i64([-1, *spread])) for vector in (gamma, beta))
    return emit.op("Add", emit.op("Mul", restored, scale), shift)


@lowers(BatchNormInference)
def _batch_norm(emit: Emitter, op: BatchNormInference, inputs: Sequence[Any]) -> Any:
    return emit.op("BatchNormalization", *inputs, epsilon=op.eps)


@lowers(FusedResidualLN)
def _residual_ln(emit: Emitter, op: FusedResidualLN, inputs: Sequence[Any]) -> Any:
    *terms, gamma, beta = inputs
    return _layer(emit, _sum(emit, terms), gamma, beta, op.eps)


@lowers(FusedResidualRmsNorm)
def _residual_rms(emit: Emitter, op: FusedResidualRmsNorm, inputs: Sequence[Any]) -> Any:
    *terms, gamma, beta = inputs
    return _rms(emit, _sum(emit, terms), gamma, beta, op.eps)


def _sum(emit: Emitter, terms: Sequence[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = emit.op("Add", total, term)
    return total


@lowers(FusedSwiGLU)
def _swiglu(emit: Emitter, op: FusedSwiGLU, inputs: Sequence[Any]) -> Any:
    return gated(emit, op, inputs[0], lambda gate: emit.op("Mul", gate, emit.op("Sigmoid", gate)))


@lowers(Reduce)
def _reduce(emit: Emitter, op: Reduce, inputs: Sequence[Any]) -> Any:
    if not op.axes:
        return emit.op("Identity", inputs[0])
    dtype, axes = emit.input_dtype(0), emit.i64(op.axes)
    return op_in(emit, _REDUCE[op.function], dtype, inputs[0], others=[axes], keepdims=int(op.keep_dim))


@lowers(Softmax)
def _softmax(emit: Emitter, op: Softmax, inputs: Sequence[Any]) -> Any:
    return emit.op("Softmax", inputs[0], axis=op.axis)


@lowers(Cumsum)
def _cumsum(emit: Emitter, op: Cumsum, inputs: Sequence[Any]) -> Any:
    axis = emit.constant(op.axis, DType.I64)
    flags: dict[str, Any] = {"exclusive": int(op.exclusive), "reverse": int(op.reverse)}
    return op_in(emit, "CumSum", emit.input_dtype(0), inputs[0], others=[axis], **flags)


@lowers(TopK)
def _topk(emit: Emitter, op: TopK, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    x = emit.cast(inputs[0], compute) if (compute := compute_dtype("TopK", dtype)) is not dtype else inputs[0]
    _, places = emit.op("TopK", x, emit.i64([op.k]), outputs=2, axis=-1, largest=1, sorted=1)
    return places if op.dtype is DType.I64 else emit.op("Cast", places, to=op.dtype)


@lowers(ArgMax)
def _argmax(emit: Emitter, op: ArgMax, inputs: Sequence[Any]) -> Any:
    return _places(emit, "ArgMax", op, inputs[0])


@lowers(ArgMin)
def _argmin(emit: Emitter, op: ArgMin, inputs: Sequence[Any]) -> Any:
    return _places(emit, "ArgMin", op, inputs[0])


def _places(emit: Emitter, op_type: str, op: ArgMax | ArgMin, x: Any) -> Any:
    dtype = emit.input_dtype(0)
    return op_in(emit, op_type, dtype, x, result=DType.I64, axis=op.axis, keepdims=int(op.keep_dim))
