"""ONNX forms of the normalisations, the reductions and `Sample`.

`Sample` has its random numbers as integer arithmetic where the number of rows is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.dispatch import NoNativeForm, lowers_native
from rlx_ort.converters.to_onnx.elementwise import activate, add_unless_zeros, gated
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import (
    FILLED_TOPK,
    compute_dtype,
    extreme_place,
    filled_rows,
    from_compute,
    misorders,
    op_in,
    to_compute,
    with_epsilon,
)
from rlx_ort.converters.to_onnx.shape import reshape, slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops import norm
from rlx_ort.ir.ops.norm import ArgMax, ArgMin, Cumsum, Reduce, Sample, Softmax, TopK, round_keys, uniforms
from rlx_ort.ir.types import Dim, Shape, TensorType

_UNIT = float(1 << 30)
_LEAST_TEMPERATURE = 1e-6
_HALF_WORD = 1 << 16
_WORD = 1 << 32
REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}
_BELOW_2_64 = np.nextafter(2.0**64, 0)
_INTEGER_SUMS = frozenset({"sum", "prod"})


@lowers(norm.LayerNorm, norm.RmsNorm, norm.LayerNorm2d)
def _norm(emit: Emitter, op: norm.LayerNorm | norm.RmsNorm | norm.LayerNorm2d, inputs: Sequence[Any]) -> Any:
    """Write a normalisation of the last axis, with transposes around it for another axis."""
    x, gamma, beta = inputs
    write = _rms if isinstance(op, norm.RmsNorm) else _layer
    rank = emit.input_rank(0, "x")
    axis = (1 if isinstance(op, norm.LayerNorm2d) else op.axis) % rank
    if axis == rank - 1:
        return write(emit, x, gamma, beta, op.eps)
    perm = [*(place for place in range(rank) if place != axis), axis]
    moved = write(emit, emit.op("Transpose", x, perm=perm), gamma, beta, op.eps)
    return emit.op("Transpose", moved, perm=[perm.index(place) for place in range(rank)])


def _layer(emit: Emitter, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
    dtype = emit.input_dtype(0)
    x, eps = with_epsilon(emit, x, dtype, eps, float(np.float32(eps)) if dtype is DType.F64 else eps)
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


@lowers_native(norm.RmsNorm)
def _native_rms_norm(emit: Emitter, op: norm.RmsNorm, inputs: Sequence[Any]) -> Any:
    x, gamma, beta = inputs
    kind = emit.input_type(0)
    rank = known_shape(op, kind, "x").rank
    if kind.dtype is DType.F64:
        raise NoNativeForm("the kernel reads eps as f32")
    if op.axis % rank != rank - 1:
        raise NoNativeForm(f"the kernel normalises the last axis, not axis {op.axis}")
    # Of ai.onnx's first opset by ONNX Runtime's own reckoning; ONNX has RMSNormalization from opset 23 on.
    emit.require_kernel("SimplifiedLayerNormalization", kind, emit.input_type(1))
    result = emit.op("SimplifiedLayerNormalization", x, gamma, types=[kind], axis=-1, epsilon=op.eps, stash_type=1)
    return add_unless_zeros(emit, result, beta, 2)


@lowers(norm.GroupNorm, asks=lambda *_: True)
def _group_norm(emit: Emitter, op: norm.GroupNorm, inputs: Sequence[Any]) -> Any:
    """InstanceNormalization with a group as channel, then gamma and beta a channel.

    Basic ops stand for the kernel in f64, which it computes in f32, and where it is wrong: WebGPU's computes with the
    epsilon of an earlier node, and loses the digits that mean and variance share (1.8e-4 for a mean of 50 deviations,
    the basic ops 2e-6; plugin 0.4.0).
    """
    x, gamma, beta = inputs
    kind = emit.input_type(0)
    shape = known_shape(op, kind, "x")
    grouped = reshape(emit, x, shape, (shape[0], op.num_groups, None))
    if kind.dtype is DType.F64 or not emit.has_kernel("InstanceNormalization", kind):
        axis, eps = emit.i64([-1]), emit.constant(op.eps, kind.dtype)
        off = emit.op("Sub", grouped, emit.op("ReduceMean", grouped, axis, keepdims=1))
        variance = emit.op("ReduceMean", emit.op("Mul", off, off), axis, keepdims=1)
        normal = emit.op("Div", off, emit.op("Sqrt", emit.op("Add", variance, eps)))
        return _by_channel(emit, op, normal, gamma, beta)
    ones, zeros = (emit.constant(np.full(op.num_groups, fill), kind.dtype) for fill in (1.0, 0.0))
    normal = op_in(emit, "InstanceNormalization", kind.dtype, grouped, ones, zeros, epsilon=op.eps)
    return _by_channel(emit, op, normal, gamma, beta)


def _by_channel(emit: Emitter, op: norm.GroupNorm, normal: Any, gamma: Any, beta: Any) -> Any:
    """Return the normalised groups in the shape of x, times gamma plus beta of each channel."""
    shape = known_shape(op, emit.input_type(0), "x")
    restored = reshape(emit, normal, Shape((shape[0], op.num_groups, None)), shape)
    spread = [1] * (shape.rank - 2)
    scale, shift = (emit.op("Reshape", vector, emit.i64([-1, *spread])) for vector in (gamma, beta))
    return emit.op("Add", emit.op("Mul", restored, scale), shift)


@lowers(norm.FusedResidualLN, norm.FusedResidualRmsNorm)
def _residual(emit: Emitter, op: norm.FusedResidualLN | norm.FusedResidualRmsNorm, inputs: Sequence[Any]) -> Any:
    *terms, gamma, beta = inputs
    total = functools.reduce(lambda left, right: emit.op("Add", left, right), terms)
    return (_layer if isinstance(op, norm.FusedResidualLN) else _rms)(emit, total, gamma, beta, op.eps)


@lowers_native(norm.FusedResidualLN)
@lowers_native(norm.FusedResidualRmsNorm)
def _native_residual(emit: Emitter, op: norm.FusedResidualLN | norm.FusedResidualRmsNorm, inputs: Sequence[Any]) -> Any:
    x, residual, *bias, gamma, beta = inputs
    kind, *others = emit.input_types
    shape = known_shape(op, kind, "x")
    if kind.dtype is DType.F64:
        raise NoNativeForm("ONNX Runtime has a kernel for f64, but its checker does not let f64 through to it")
    if shape.rank not in {2, 3}:
        raise NoNativeForm(f"the kernel takes rank 2 or 3, x is {kind}")
    if others[0].shape != shape or None in shape:
        raise NoNativeForm(f"the kernel takes no broadcast, x is {kind} and the residual {others[0]}")
    if op.has_bias and known_shape(op, others[1], "bias") != Shape(shape[-1:]):
        raise NoNativeForm(f"the kernel takes a bias along the last axis, it is {others[1]}")
    full = isinstance(op, norm.FusedResidualLN)
    op_type = "SkipLayerNormalization" if full else "SkipSimplifiedLayerNormalization"
    emit.require_kernel(op_type, kind, *others, domain="com.microsoft")
    affine = (gamma, beta) if full else (gamma,)
    result = emit.op(op_type, x, residual, *affine, *bias, domain="com.microsoft", types=[kind], epsilon=op.eps)
    return result if full else add_unless_zeros(emit, result, beta, len(inputs) - 1)


@lowers(norm.FusedSwiGLU)
def _swiglu(emit: Emitter, op: norm.FusedSwiGLU, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    return gated(emit, op, inputs[0], lambda gate: activate(emit, "silu", gate, dtype))


@lowers_native(norm.FusedSwiGLU)
def _native_swiglu(emit: Emitter, op: norm.FusedSwiGLU, inputs: Sequence[Any]) -> Any:
    emit.require_kernel("QuickGelu", emit.input_type(0), domain="com.microsoft")
    return gated(emit, op, inputs[0], lambda gate: emit.op("QuickGelu", gate, domain="com.microsoft", alpha=1.0))


@lowers(norm.BatchNormInference)
def _batch_norm(emit: Emitter, op: norm.BatchNormInference, inputs: Sequence[Any]) -> Any:
    *others, variance = inputs
    rest = op.eps - float(np.float32(op.eps))
    if emit.input_dtype(0) is DType.F64 and rest:  # the attribute is an f32
        variance = emit.op("Add", variance, emit.constant(rest, DType.F64))
    return emit.op("BatchNormalization", *others, variance, epsilon=op.eps)


lowers(Softmax)(lambda emit, op, inputs: emit.op("Softmax", inputs[0], axis=op.axis))


_LARGEST = {"max": 1, "min": 0}


def is_doubtful(op: Reduce, kind: TensorType) -> bool:
    """Return whether some kernels compute another result than the op: see `reduced`."""
    if op.function in _LARGEST:
        return compute_dtype(REDUCE[op.function], kind.dtype) is DType.I64
    if op.function != "mean":
        return kind.dtype.is_integer
    return kind.dtype.is_float and not all(map(known_size, _reduced_dims(op, kind)))


def known_size(dim: Dim) -> bool:
    """Return whether a dim is known to have elements."""
    return isinstance(dim, int) and dim > 0


def _reduced_dims(op: Reduce, kind: TensorType) -> list[Dim]:
    shape = known_shape(op, kind, "x")
    return [shape[axis] for axis in op.axes]


@lowers(Reduce, asks=lambda op, kind, _: is_doubtful(op, kind))
def reduced(emit: Emitter, op: Reduce, inputs: Sequence[Any]) -> Any:
    """One ONNX reduction, or another form where the kernel of the provider is wrong.

    The CPU's ReduceSum and ReduceProd compute integers in f64: they stop at the dtype's limits, where numpy, PyTorch
    and ONNX's reference wrap around, and are inexact above 2^53. Its ReduceMean over no elements is 0 instead of NaN.
    Its ReduceMax and ReduceMin misorder i64 (see `kernel_dtypes`). CUDA's kernels compute integers in f64 as well, and
    i32 stop at their limits. All of ONNX Runtime 1.31.1.
    """
    if not op.axes:
        return emit.op("Identity", inputs[0])
    dtype, op_type = emit.input_dtype(0), REDUCE[op.function]
    compute = compute_dtype(op_type, dtype)
    if op.function in _LARGEST and (dtype is DType.U64 or (compute is DType.I64 and misorders(emit, op_type))):
        return _extreme(emit, op, inputs[0])
    if op.function == "mean" and dtype.is_float:
        return _mean(emit, op, inputs[0])
    if op.function == "mean" and dtype is DType.U64:  # by way of i64 the upper half would be negative
        wide = emit.cast(inputs[0], DType.F64)
        mean = emit.op("ReduceMean", wide, emit.i64(op.axes), keepdims=int(op.keep_dim))
        return emit.cast(emit.op("Min", mean, emit.constant(_BELOW_2_64, DType.F64)), DType.U64)
    if op.function in _INTEGER_SUMS and dtype.is_integer and not emit.has_kernel(op_type, kind := TensorType(compute)):
        i64 = TensorType(DType.I64)
        if op.function == "prod" or emit.has_kernel("MatMul", kind, kind) or not emit.has_kernel("Mod", i64, i64):
            return _wrapping(emit, op, inputs[0])
        total = _sum_of_parts(emit, op, emit.cast(inputs[0], DType.I64), dtype.bits)
        return total if dtype is DType.I64 else emit.cast(total, dtype)
    return op_in(emit, op_type, dtype, inputs[0], others=[emit.i64(op.axes)], keepdims=int(op.keep_dim))


def _mean(emit: Emitter, op: Reduce, x: Any) -> Any:
    """The mean plus 0 / size, which is NaN for no elements, unless the size is known or the kernel is right."""
    kind, axes, keep = emit.input_type(0), emit.i64(op.axes), int(op.keep_dim)
    dims = _reduced_dims(op, kind)
    if 0 in dims:
        # CUDA's kernel refuses to drop an axis of no elements (ONNX Runtime 1.31.1).
        nothing = op_in(emit, "ReduceSum", kind.dtype, x, others=[axes], keepdims=1)
        missing = emit.op("Add", nothing, emit.constant(np.nan, kind.dtype))
        return missing if keep else emit.op("Squeeze", missing, axes)
    mean = op_in(emit, "ReduceMean", kind.dtype, x, others=[axes], keepdims=keep)
    if all(map(known_size, dims)) or emit.has_kernel("ReduceMean", kind):
        return mean
    sizes = [_size(emit, x, axis) for axis, dim in zip(op.axes, dims, strict=True) if not known_size(dim)]
    size = functools.reduce(lambda left, right: emit.op("Mul", left, right), sizes)
    missing = emit.op("Div", emit.constant(0, kind.dtype), emit.op("Cast", size, to=kind.dtype))
    if len(op.axes) == emit.input_rank(0, "x") and not op.keep_dim:
        missing = emit.op("Squeeze", missing, emit.i64([0]))
    return emit.op("Add", mean, missing)


def _size(emit: Emitter, x: Any, axis: int) -> Any:
    """Return the size of an axis at run time, as a vector of one element."""
    axis %= emit.input_rank(0, "x")
    return emit.op("Shape", x, start=axis, end=axis + 1, types=[TensorType(DType.I64, Shape([1]))])


def _wrapping(emit: Emitter, op: Reduce, x: Any) -> Any:
    """Return the sum or product of integers along each axis, modulo 2^32 or 2^64 as integer arithmetic is.

    A sum is a product with ones, a product a tree of halves. On the CPU the first takes 0.15 to 1.15 of the time of
    ReduceSum for a million elements or 64, the second 0.5 to 2 (i32 and i64, ONNX Runtime 1.31.1, one core).
    """
    kind = emit.input_type(0)
    shape = known_shape(op, kind, "x")
    compute = DType.I64 if kind.dtype.bits == 64 else DType.I32
    value = emit.cast(x, compute)
    for axis in sorted((axis % shape.rank for axis in op.axes), reverse=True):
        value = (_sum_along if op.function == "sum" else _product_along)(emit, value, axis, shape, compute)
        shape = Shape(1 if place == axis else dim for place, dim in enumerate(shape))
    if not op.keep_dim:
        value = emit.op("Squeeze", value, emit.i64(op.axes))
    return emit.cast(value, kind.dtype)


def _sum_of_parts(emit: Emitter, op: Reduce, value: Any, bits: int) -> Any:
    """Return the sum of i64 by a kernel that computes in f64: each part has 22 bits, and 2^31 of them are exact.

    The values are of integers of so many bits.
    """
    axes, part = emit.i64(op.axes), emit.constant(1 << 22, DType.I64)
    sums = []
    for more in reversed(range(-(-bits // 22))):
        low = emit.op("Mod", value, part) if more else value
        sums.append(emit.op("ReduceSum", low, axes, keepdims=int(op.keep_dim)))
        if more:
            value = emit.op("Div", emit.op("Sub", value, low), part)
    return functools.reduce(lambda high, low: emit.op("Add", emit.op("Mul", high, part), low), reversed(sums))


def _sum_along(emit: Emitter, value: Any, axis: int, shape: Shape, dtype: DType) -> Any:
    """Return the sums along an axis, which stays with size 1."""
    last, size = shape.rank - 1, shape[axis]
    # With the ones on the left, the kernel refuses a batch of no matrices.
    left = axis == last - 1 and all(map(known_size, shape[:axis]))
    perm = list(range(shape.rank))
    perm[axis], perm[last] = last, axis
    if not left and axis != last:
        value = emit.op("Transpose", value, perm=perm)
    if isinstance(size, int):
        ones = emit.constant(np.ones((1, size) if left else (size, 1)), dtype)
    else:
        length = emit.op("Shape", value, start=axis if left else last, end=(axis if left else last) + 1)
        ones = emit.op("ConstantOfShape", length, value=np.ones(1, dtype.numpy))
        ones = emit.op("Unsqueeze", ones, emit.i64([0 if left else 1]))
    total = emit.op("MatMul", ones, value) if left else emit.op("MatMul", value, ones)
    return total if left or axis == last else emit.op("Transpose", total, perm=perm)


def _product_along(emit: Emitter, value: Any, axis: int, shape: Shape, dtype: DType) -> Any:
    """Return the products along an axis, which stays with size 1: the halves are multiplied until one is left."""
    size, one, along = shape[axis], emit.constant(1, dtype), emit.i64([axis])
    if isinstance(size, int):
        width = 1 << max(size - 1, 0).bit_length()
        if width != size:
            value = emit.op("Pad", value, emit.i64([0, width - size]), one, along)
        while width > 1:
            width //= 2
            halves = slice_axis(emit, value, axis, 0, width), slice_axis(emit, value, axis, width, None)
            value = emit.op("Mul", *halves)
        return value
    kind = TensorType(dtype, Shape(None if place == axis else dim for place, dim in enumerate(shape)))

    def write(inner: Emitter, given: Sequence[Any]) -> Sequence[Any]:
        zero, single, two = inner.i64([0]), inner.i64([1]), inner.i64([2])
        length = inner.op("Shape", given[2], start=axis, end=axis + 1)
        half = inner.op("Div", inner.op("Add", length, single), two)
        low = inner.op("Slice", given[2], zero, half, along)
        high = inner.op("Slice", given[2], half, length, along)
        missing = inner.op("Sub", inner.op("Mul", half, two), length)
        high = inner.op("Pad", high, inner.op("Concat", zero, missing, axis=0), one, along)
        go_on = inner.op("Squeeze", inner.op("Greater", half, single), zero)
        return go_on, inner.op("Mul", low, high)

    flag = TensorType(DType.BOOL, Shape())
    body = emit.block("halve", [("step", TensorType(DType.I64, Shape())), ("go_on", flag), ("rows", kind)], write)
    value = emit.op("Pad", value, emit.i64([1, 0]), one, along)  # a product of nothing is 1
    return emit.op("Loop", None, emit.constant(True, DType.BOOL), value, body=body, types=[kind])


def _extreme(emit: Emitter, op: Reduce, value: Any) -> Any:
    """Return the largest or least integer along each axis by TopK, which takes 1 to 5 times as long on the CPU."""
    dtype = emit.input_dtype(0)
    kept = to_compute(emit, "TopK", value, dtype)
    for axis in op.axes:
        kept, _ = emit.op("TopK", kept, emit.i64([1]), outputs=2, axis=axis, largest=_LARGEST[op.function], sorted=1)
    picked = from_compute(emit, "TopK", kept, dtype)
    return picked if op.keep_dim else emit.op("Squeeze", picked, emit.i64(op.axes))


@lowers(Cumsum)
def _cumsum(emit: Emitter, op: Cumsum, inputs: Sequence[Any]) -> Any:
    axis = emit.constant(op.axis, DType.I64)
    flags: dict[str, Any] = {"exclusive": int(op.exclusive), "reverse": int(op.reverse)}
    return op_in(emit, "CumSum", emit.input_dtype(0), inputs[0], others=[axis], **flags)


@lowers(TopK, asks=lambda _, kind, __: kind.dtype in FILLED_TOPK)
def _topk(emit: Emitter, op: TopK, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    size = known_shape(op, emit.input_type(0), "x")[-1]
    x = filled_rows(emit, to_compute(emit, "TopK", inputs[0], dtype), dtype, size, -1, largest=True)
    _, places = emit.op("TopK", x, emit.i64([op.k]), outputs=2, axis=-1, largest=1, sorted=1)
    return places if op.dtype is DType.I64 else emit.op("Cast", places, to=op.dtype)


@lowers(ArgMax, ArgMin, asks=lambda *_: True)
def _places(emit: Emitter, op: ArgMax | ArgMin, inputs: Sequence[Any]) -> Any:
    op_type, dtype = "ArgMax" if isinstance(op, ArgMax) else "ArgMin", emit.input_dtype(0)
    x = to_compute(emit, op_type, inputs[0], dtype)
    return extreme_place(emit, op_type, x, compute_dtype(op_type, dtype), op.axis, op.keep_dim)


@lowers(Sample)
def _sample(emit: Emitter, op: Sample, inputs: Sequence[Any]) -> Any:
    shape = op.expect_rank(emit.input_type(0), (1, 2), "logits")
    size = shape[-1]
    assert isinstance(size, int)  # noqa: S101  # infer made sure of it
    logits = emit.cast(inputs[0], DType.F32)
    scaled = emit.op("Mul", logits, emit.constant(1 / max(op.temperature, _LEAST_TEMPERATURE), DType.F32))
    if 0 < op.top_k < size:
        best, _ = emit.op("TopK", scaled, emit.i64([op.top_k]), outputs=2, axis=-1, largest=1, sorted=1)
        enough = emit.op("GreaterOrEqual", scaled, slice_axis(emit, best, -1, op.top_k - 1, op.top_k))
        # A finite number, since shaders may not know infinities.
        scaled = emit.op("Where", enough, scaled, emit.constant(np.finfo(np.float32).min, DType.F32))
    chances = emit.op("Softmax", scaled, axis=-1)
    weights = _whole(emit, chances)
    if op.top_p < 1:
        weights = emit.op("Mul", weights, _likely(emit, chances, size, op.top_p))
    numbers, total = _numbers(emit, op.seed, shape), _total(emit, weights)
    share = emit.op("Cast", emit.op("Mul", emit.op("Cast", total, to=DType.F32), numbers), to=DType.I32)
    # The total as f32 may be rounded up, so the share is kept below the total itself.
    share = emit.op("Min", share, emit.op("Sub", total, emit.constant(1, DType.I32)))
    # The token is the first place at which the running sum of the weights passes the share.
    running = emit.op("CumSum", weights, emit.constant(-1, DType.I64))
    token = emit.op("ReduceSum", _flags(emit, "LessOrEqual", running, share), emit.i64([-1]), keepdims=0)
    return token if op.dtype is DType.I32 else emit.op("Cast", token, to=op.dtype)


def _likely(emit: Emitter, chances: Any, size: int, part: float) -> Any:
    """Return 1 for the tokens of the smallest most likely set that has `part` of the probability, else 0.

    The set is found on the sorted chances and identified by its least chance, because places would be int64, which
    some providers cannot process. Of the tokens with exactly that chance, the first ones are in the set.
    """
    ranked, _ = emit.op("TopK", chances, emit.i64([size]), outputs=2, axis=-1, largest=1, sorted=1)
    weights = _whole(emit, ranked)
    exact = emit.op("Mul", emit.op("Cast", _total(emit, weights), to=DType.F32), emit.constant(part, DType.F32))
    limit = emit.op("Max", emit.op("Cast", emit.op("Ceil", exact), to=DType.I32), emit.constant(1, DType.I32))
    before = emit.op("CumSum", weights, emit.constant(-1, DType.I64), exclusive=1)
    inside = emit.op("Less", before, limit)
    least = emit.op("Where", inside, ranked, emit.constant(2.0))
    least = emit.op("ReduceMin", least, emit.i64([-1]), keepdims=1)
    above, equal = _flags(emit, "Greater", chances, least), _flags(emit, "Equal", chances, least)
    inside_count = _total(emit, emit.op("Cast", inside, to=DType.I32))
    free = emit.op("Sub", inside_count, _total(emit, above))
    early = _flags(emit, "LessOrEqual", emit.op("CumSum", equal, emit.constant(-1, DType.I64)), free)
    return emit.op("Add", above, emit.op("Mul", equal, early))


def _flags(emit: Emitter, comparison: str, left: Any, right: Any) -> Any:
    return emit.op("Cast", emit.op(comparison, left, right), to=DType.I32)


def _whole(emit: Emitter, chances: Any) -> Any:
    """Return probabilities as integers in units of 2^-30, so that sums over them are exact in any order."""
    return emit.op("Cast", emit.op("Mul", chances, emit.constant(_UNIT, DType.F32)), to=DType.I32)


def _total(emit: Emitter, weights: Any) -> Any:
    return emit.op("ReduceSum", weights, emit.i64([-1]), keepdims=1)


def _numbers(emit: Emitter, seed: int, shape: Shape) -> Any:
    """Return the random number of each row, with a last axis of size 1."""
    rows: Dim = shape[0] if shape.rank == 2 else 1
    if isinstance(rows, int):
        return emit.constant(uniforms(seed, rows).reshape((rows, 1) if shape.rank == 2 else (1,)))
    return emit.op("Unsqueeze", _stream(emit, seed, emit.dims([rows])), emit.i64([-1]))


def _stream(emit: Emitter, seed: int, count: Any) -> Any:
    """Return as many numbers of the stream as are asked for at run time.

    The words are int64 vectors derived from nothing but a shape, which every provider leaves to the CPU: the numbers
    are the same everywhere, to the bit.
    """
    vector = TensorType(DType.I64, Shape((None,)))

    def calc(op_type: str, left: Any, right: int | Any) -> Any:
        other = emit.constant(right, DType.I64) if isinstance(right, int) else right
        return emit.op(op_type, left, other, types=[vector])

    def multiplied(word: Any, factor: int) -> tuple[Any, Any]:
        """Return the upper and lower 32 bits of a product, by way of half words since 64 bits have a sign."""
        low = calc("Mul", word, factor % _HALF_WORD)
        high = calc("Add", calc("Mul", word, factor // _HALF_WORD), calc("Div", low, _HALF_WORD))
        lower = calc("Add", calc("Mul", calc("Mod", high, _HALF_WORD), _HALF_WORD), calc("Mod", low, _HALF_WORD))
        return calc("Div", high, _HALF_WORD), lower

    scalar = TensorType(DType.I64, Shape())
    blocks = emit.op("Squeeze", calc("Div", calc("Add", count, 3), 4), emit.i64([0]), types=[scalar])
    start, one = emit.constant(0, DType.I64), emit.constant(1, DType.I64)
    a = emit.op("Range", start, blocks, one, types=[vector])
    b = calc("Div", a, _WORD)
    a = calc("Mod", a, _WORD)
    c = d = calc("Mul", a, 0)
    for first, second in round_keys(seed):
        left_high, left_low = multiplied(a, norm.PHILOX_FACTORS[0])
        right_high, right_low = multiplied(c, norm.PHILOX_FACTORS[1])
        a = calc("BitwiseXor", calc("BitwiseXor", right_high, b), first)
        c = calc("BitwiseXor", calc("BitwiseXor", left_high, d), second)
        b, d = right_low, left_low
    # Word w of block i stands at w * blocks + i here and is number 4 i + w of the stream.
    words = emit.op("Concat", a, b, c, d, axis=0, types=[vector])
    places = emit.op("Range", start, emit.op("Squeeze", count, emit.i64([0]), types=[scalar]), one, types=[vector])
    places = calc("Add", calc("Mul", calc("Mod", places, 4), blocks), calc("Div", places, 4))
    words = emit.op("Gather", words, places, axis=0, types=[vector])
    # By way of int32, from which every provider can cast.
    upper = emit.op("Cast", calc("Div", words, 1 << 8), to=DType.I32, types=[TensorType(DType.I32, Shape((None,)))])
    return emit.op("Mul", emit.op("Cast", upper, to=DType.F32), emit.constant(2.0**-24, DType.F32))
