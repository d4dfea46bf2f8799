"""ONNX forms of the matrix products, convolution, pooling and resizing, and of the solvers.

The solvers are Gauss-Jordan elimination with partial pivoting. Small systems are written step by step, which any
provider with basic ops can take; larger ones as a Loop.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.converters.to_onnx.dispatch import NoNativeForm, lowers_native
from rlx_ort.converters.to_onnx.elementwise import Doubles, activate
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import channels_apart, op_in, reads_threes
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import reshape, slice_axis
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import join_dims, known_shape
from rlx_ort.ir.ops.control import as_body
from rlx_ort.ir.ops.conv import Conv2d, Conv3d, ConvTranspose2d, Im2Col, Interpolate, Pool, ResizeNearest2x
from rlx_ort.ir.ops.linalg import BatchedDenseSolve, DenseSolve, DotGeneral, FusedMatMulBiasAct, LoraMatMul, MatMul
from rlx_ort.ir.types import Dim, Shape, TensorType

_END = 2**63 - 1
_FUSED_GELU = {"gelu": "BiasGelu", "gelu_approx": "FastGelu"}
_UNROLLED = 8
"""Largest system that is written without a Loop: a step is about fifteen nodes."""


lowers(MatMul)(lambda emit, op, inputs: op_in(emit, "MatMul", emit.input_dtype(0), *inputs))


@lowers(FusedMatMulBiasAct)
def _fused_matmul(emit: Emitter, op: FusedMatMulBiasAct, inputs: Sequence[Any]) -> Any:
    x, weight, bias = inputs
    dtype = emit.input_dtype(0)
    result = emit.op("Add", op_in(emit, "MatMul", dtype, x, weight), bias)
    return result if op.activation is None else activate(emit, op.activation, result, dtype)


@lowers_native(FusedMatMulBiasAct)
def _native_matmul(emit: Emitter, op: FusedMatMulBiasAct, inputs: Sequence[Any]) -> Any:
    """Gemm and the activation for matrices; for a gelu of any rank, MatMul and a gelu that adds the bias."""
    kinds = emit.input_types
    dtype = kinds[0].dtype
    gelu = _FUSED_GELU.get(op.activation or "")
    if gelu is not None:
        emit.require_kernel(gelu, kinds[0], kinds[2], domain="com.microsoft")
        return emit.op(gelu, emit.op("MatMul", *inputs[:2]), inputs[2], domain="com.microsoft")
    if any(known_shape(op, kind, name).rank != 2 for kind, name in zip(kinds[:2], ("x", "weight"), strict=True)):
        raise NoNativeForm(f"Gemm takes matrices, x is {kinds[0]} and the weight {kinds[1]}")
    emit.require_kernel("Gemm", *kinds)
    result = emit.op("Gemm", *inputs)
    return result if op.activation is None else activate(emit, op.activation, result, dtype)


@lowers(LoraMatMul)
def _lora_matmul(emit: Emitter, op: LoraMatMul, inputs: Sequence[Any]) -> Any:
    x, weight, a, b = inputs
    dtype = emit.input_dtype(0)
    correction = op_in(emit, "MatMul", dtype, op_in(emit, "MatMul", dtype, x, a), b)
    scaled = emit.op("Mul", correction, emit.constant(op.scale, dtype))
    return emit.op("Add", op_in(emit, "MatMul", dtype, x, weight), scaled)


@lowers(DotGeneral)
def _dot_general(emit: Emitter, op: DotGeneral, inputs: Sequence[Any]) -> Any:
    """Fold both sides to (batch, rows, inner) and (batch, inner, columns), multiply, and unfold the result."""
    left, right = emit.input_type(0), emit.input_type(1)
    lhs_shape, rhs_shape = known_shape(op, left, "lhs"), known_shape(op, right, "rhs")
    (lhs_batch, lhs_free, lhs_inner), (rhs_batch, rhs_free, rhs_inner) = op.axes(lhs_shape, rhs_shape)
    lhs = _folded(emit, inputs[0], lhs_shape, (lhs_batch, lhs_free, lhs_inner))
    rhs = _folded(emit, inputs[1], rhs_shape, (rhs_batch, rhs_inner, rhs_free))
    product = op_in(emit, "MatMul", left.dtype, lhs, rhs)
    batch = [join_dims((lhs_shape[i], rhs_shape[j])) for i, j in zip(lhs_batch, rhs_batch, strict=True)]
    rows, columns = [lhs_shape[axis] for axis in lhs_free], [rhs_shape[axis] for axis in rhs_free]
    if len(rows) == len(columns) == 1:
        return product
    folded = Shape((*batch, _product(rows), _product(columns)))
    return reshape(emit, product, folded, (*batch, *rows, *columns))


def _folded(emit: Emitter, value: Any, shape: Shape, groups: Sequence[tuple[int, ...]]) -> Any:
    """Write the axes in the order of the groups, the last two groups as one axis each."""
    perm = [axis for group in groups for axis in group]
    if perm != sorted(perm):
        value = emit.op("Transpose", value, perm=perm)
    if all(len(group) == 1 for group in groups[1:]):
        return value
    batch = [shape[axis] for axis in groups[0]]
    target = (*batch, *(_product([shape[axis] for axis in group]) for group in groups[1:]))
    return reshape(emit, value, Shape(shape[axis] for axis in perm), target)


def _product(dims: Sequence[Dim]) -> Dim:
    """Return the size of an axis folded from `dims`; a name survives where nothing is multiplied with it."""
    others = [dim for dim in dims if dim != 1]
    return others[0] if len(others) == 1 else Shape(others).num_elements


@lowers(Conv2d, Conv3d, ConvTranspose2d, asks=lambda op, x, _: isinstance(op, Conv2d) and reads_threes(x, op.groups))
def _conv(emit: Emitter, op: Conv2d | Conv3d | ConvTranspose2d, inputs: Sequence[Any]) -> Any:
    if emit.input_dtype(0) is DType.F64:
        weight = known_shape(op, emit.input_type(1), "w")
        if weight.is_static and 0 not in weight:
            taps = [int(dim) for dim in weight if isinstance(dim, int)]
            if isinstance(op, ConvTranspose2d):
                return _conv_transpose_f64(emit, op, inputs, taps)
            return _conv_f64(emit, op, inputs, taps)
    grown = op.output_padding if isinstance(op, ConvTranspose2d) else None
    convolved = functools.partial(
        op_in,
        emit,
        "Conv" if grown is None else "ConvTranspose",
        emit.input_dtype(0),
        strides=op.stride,
        pads=op.padding * 2,
        output_padding=grown,
        dilations=op.dilation,
        group=op.groups,
    )
    parts = channels_apart(emit, inputs, op.groups) if isinstance(op, Conv2d) else ()
    return emit.op("Add", *(convolved(*part) for part in parts)) if parts else convolved(*inputs)


def _windows(
    emit: Emitter,
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] | None = None,
) -> list[Any]:
    """Return, for each tap of a kernel, its elements in an `(N, C, ...)` tensor of f64 with zeros around it."""
    spaces = len(kernel)
    dilation = dilation or [1] * spaces
    if any(padding):
        pads = [0, 0, *padding, 0, 0, *padding]
        x = emit.op("Pad", x, emit.i64(pads), emit.constant(0, DType.F64))
    axes, steps = emit.i64(range(2, 2 + spaces)), emit.i64(stride)
    parts = []
    for tap in itertools.product(*map(range, kernel)):
        starts = [place * step for place, step in zip(tap, dilation, strict=True)]
        left = [(size - 1 - place) * step for size, place, step in zip(kernel, tap, dilation, strict=True)]
        ends = [-rest if rest else _END for rest in left]
        parts.append(emit.op("Slice", x, emit.i64(starts), emit.i64(ends), axes, steps))
    return parts


def _conv_f64(emit: Emitter, op: Conv2d | Conv3d, inputs: Sequence[Any], weight: Sequence[int]) -> Any:
    """A product of the weight with all windows: the kernels of most providers, the CPU's too, take no f64."""
    x, w, *bias = inputs
    out, channels, *kernel = weight
    parts = _windows(emit, x, kernel, op.stride, op.padding, op.dilation)
    inner, place = channels * len(parts), emit.i64([2])
    stacked = emit.op("Concat", *(emit.op("Unsqueeze", part, place) for part in parts), axis=2)
    columns = emit.op("Reshape", stacked, emit.i64([0, op.groups, inner, -1]))
    rows = emit.op("Reshape", w, emit.i64([op.groups, out // op.groups, inner]))
    flat = emit.op("MatMul", rows, columns)
    sizes = emit.op("Shape", x, end=1), emit.i64([out]), emit.op("Shape", parts[0], start=2)
    result = emit.op("Reshape", flat, emit.op("Concat", *sizes, axis=0))
    return (
        result if not bias else emit.op("Add", result, emit.op("Reshape", bias[0], emit.i64([-1, *[1] * len(kernel)])))
    )


@lowers(Pool)
def _pool(emit: Emitter, op: Pool, inputs: Sequence[Any]) -> Any:
    dtype, x = emit.input_dtype(0), inputs[0]
    window: dict[str, Any] = {"kernel_shape": op.kernel, "strides": op.stride, "pads": op.padding * 2}
    if op.function == "max":
        return op_in(emit, "MaxPool", dtype, x, **window)
    if op.function == "min":
        return emit.op("Neg", op_in(emit, "MaxPool", dtype, emit.op("Neg", x), **window))
    if dtype is DType.F64:
        parts = _windows(emit, x, op.kernel, op.stride, op.padding)
        total = functools.reduce(lambda left, right: emit.op("Add", left, right), parts)
        area = emit.constant(math.prod(op.kernel), dtype)
        return emit.op("Div", total, area) if op.function == "mean" else total
    mean = op_in(emit, "AveragePool", dtype, x, count_include_pad=1, **window)
    return mean if op.function == "mean" else emit.op("Mul", mean, emit.constant(math.prod(op.kernel), dtype))


def _conv_transpose_f64(emit: Emitter, op: ConvTranspose2d, inputs: Sequence[Any], weight: Sequence[int]) -> Any:
    """A convolution with the mirrored weight of the image with zeros between its elements, a stride apart."""
    x, w, *bias = inputs
    into, out, *kernel = weight
    (height, width), (rows, columns) = op.stride, kernel
    apart = emit.op("Unsqueeze", x, emit.i64([3, 5]))
    apart = emit.op("Pad", apart, emit.i64([0] * 9 + [height - 1, 0, width - 1]), emit.constant(0, DType.F64))
    sizes = emit.op("Mul", emit.op("Shape", x), emit.i64([1, 1, height, width]))
    spans = [step * (size - 1) for step, size in zip(op.dilation, kernel, strict=True)]
    before = [span - cut for span, cut in zip(spans, op.padding, strict=True)]
    after = [first + more + 1 - step for first, more, step in zip(before, op.output_padding, op.stride, strict=True)]
    spread = emit.op("Reshape", apart, sizes)
    spread = emit.op("Pad", spread, emit.i64([0, 0, *before, 0, 0, *after]), emit.constant(0, DType.F64))
    mirrored = emit.op("Slice", w, *(emit.i64(each) for each in ([-1, -1], [-_END, -_END], [2, 3], [-1, -1])))
    grouped = emit.op("Reshape", mirrored, emit.i64([op.groups, into // op.groups, out, rows, columns]))
    swapped = emit.op("Transpose", grouped, perm=[0, 2, 1, 3, 4])
    taps = [out * op.groups, into // op.groups, rows, columns]
    plain = Conv2d(dilation=op.dilation, groups=op.groups)
    return _conv_f64(emit, plain, [spread, emit.op("Reshape", swapped, emit.i64(taps)), *bias], taps)


@lowers(ResizeNearest2x, Interpolate)
def _resize(emit: Emitter, op: ResizeNearest2x | Interpolate, inputs: Sequence[Any]) -> Any:
    if emit.input_dtype(0) is DType.F64:
        return _resize_f64(emit, op, inputs[0])
    mode = "nearest"
    how: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if isinstance(op, ResizeNearest2x):
        size: list[ModelValue | None] = [emit.constant(np.array([1, 1, 2, 2], np.float32))]
    else:
        mode, size = op.mode, [None, emit.dims((*known_shape(op, emit.input_type(0), "x")[:2], *op.sizes))]
        if mode != "nearest":
            how = {"coordinate_transformation_mode": "align_corners" if op.align_corners else "half_pixel"}
    return op_in(emit, "Resize", emit.input_dtype(0), inputs[0], others=[None, *size], mode=mode, **how)


def _resize_f64(emit: Emitter, op: ResizeNearest2x | Interpolate, x: Any) -> Any:
    """Elements are picked, and mixed by their distance from a place, along one axis after another."""
    rank, mode = emit.input_rank(0, "x"), "nearest" if isinstance(op, ResizeNearest2x) else op.mode
    compute = Doubles(emit)
    for axis in range(2, rank):
        old = emit.op("Reshape", emit.op("Shape", x, start=axis, end=axis + 1), emit.i64([]))
        if isinstance(op, ResizeNearest2x):
            new = emit.op("Mul", old, emit.constant(2, DType.I64))
        else:
            new = emit.constant(op.sizes[axis - 2], DType.I64)
        steps = emit.op("Range", emit.constant(0, DType.I64), new, emit.constant(1, DType.I64))
        if mode == "nearest":
            x = emit.op("Gather", x, emit.op("Div", emit.op("Mul", steps, old), new), axis=axis)
            continue
        place, before, after = (emit.cast(each, DType.F64) for each in (steps, old, new))
        if isinstance(op, Interpolate) and op.align_corners:
            gaps = compute("Sub", before, 1), compute("Max", compute("Sub", after, 1), 1)
            place = compute("Div", compute("Mul", place, gaps[0]), gaps[1])
        else:
            centre = compute("Mul", compute("Add", place, 0.5), before)
            place = compute("Sub", compute("Div", centre, after), 0.5)
        first = compute("Floor", place)
        part = compute("Sub", place, first)
        rest = compute("Sub", 1, part)
        shares = {0: rest, 1: part}
        if mode == "cubic":
            near = [compute.polynomial(each, [1.25, -2.25, 0, 1]) for each in (part, rest)]
            far = [compute.polynomial(compute("Add", each, 1), [-0.75, 3.75, -6, 3]) for each in (part, rest)]
            shares = {-1: far[0], 0: near[0], 1: near[1], 2: far[1]}
        terms = []
        for shift, share in shares.items():
            inside = compute("Min", compute("Max", compute("Add", first, shift), 0), compute("Sub", before, 1))
            picked = emit.op("Gather", x, emit.cast(inside, DType.I64), axis=axis)
            terms.append(emit.op("Mul", picked, emit.op("Reshape", share, emit.i64([-1, *[1] * (rank - 1 - axis)]))))
        x = functools.reduce(lambda left, right: emit.op("Add", left, right), terms)
    return x


@lowers(Im2Col)
def _im2col(emit: Emitter, op: Im2Col, inputs: Sequence[Any]) -> Any:
    """Slice the padded image once for each tap of the window, and stack the slices behind the channels."""
    kind = emit.input_type(0)
    shape = known_shape(op, kind, "x")
    rows, columns = op.windows(shape)
    x = inputs[0]
    if any(op.padding):
        x = op_in(emit, "Pad", kind.dtype, x, others=[emit.i64([0, 0, *op.padding, 0, 0, *op.padding])])
    parts = []
    for place in range(op.kernel[0] * op.kernel[1]):
        start = [tap * step for tap, step in zip(divmod(place, op.kernel[1]), op.dilation, strict=True)]
        last = zip(start, op.stride, (rows, columns), strict=True)
        end = [first + step * (count - 1) + 1 for first, step, count in last]
        part = emit.op("Slice", x, *(emit.i64(numbers) for numbers in (start, end, [2, 3], op.stride)))
        parts.append(emit.op("Unsqueeze", part, emit.i64([2])))
    stacked = emit.op("Concat", *parts, axis=2) if len(parts) > 1 else parts[0]
    source = Shape((*shape[:2], len(parts), rows, columns))
    channels = shape[1] if isinstance(shape[1], int) else 0
    return reshape(emit, stacked, source, (shape[0], channels * len(parts), rows * columns))


@lowers(DenseSolve, BatchedDenseSolve)
def _solve(emit: Emitter, op: DenseSolve | BatchedDenseSolve, inputs: Sequence[Any]) -> Any:
    matrix, right = (known_shape(op, emit.input_type(place), "ab"[place]) for place in (0, 1))
    dtype = emit.input_dtype(0)
    size = matrix[-1]
    n = size if isinstance(size, int) else 0
    if n == 0 or 0 in right:
        return emit.op("Identity", inputs[1])
    wide = DType.F64 if dtype is DType.F64 else DType.F32
    a, b = (emit.cast(value, wide) for value in inputs)
    if right.rank < matrix.rank:
        b = emit.op("Unsqueeze", b, emit.i64([-1]))
    columns = 1 if right.rank < matrix.rank else right[-1]
    width = n + columns if isinstance(columns, int) else None
    joined = TensorType(wide, Shape((None, n, width)))
    both = emit.op("Concat", a, b, axis=-1)
    if width is not None:
        flat = emit.op("Reshape", both, emit.i64([-1, n, width]))
    else:
        columns = emit.op("Shape", both, start=matrix.rank - 1)
        flat = emit.op("Reshape", both, emit.op("Concat", emit.i64([-1, n]), columns, axis=0))
    solved = slice_axis(emit, _eliminated(emit, flat, n, joined), 2, n, None)
    result = emit.op("Reshape", solved, emit.dims(right), allowzero=1)
    return result if wide is dtype else emit.op("Cast", result, to=dtype)


def _eliminated(emit: Emitter, flat: Any, n: int, joined: TensorType) -> Any:
    """Write N steps, after which the left N columns are the unit matrix and the others the solution."""
    place, rows = ("step", TensorType(DType.I64, Shape())), ("rows", joined)
    if n <= _UNROLLED:
        body = as_body(lambda graph, place, rows: _step(graph, place, rows, n), [place, rows], "step")
        for row in range(n):
            (flat,) = emit.inline(body, [emit.constant(row, DType.I64), flat])
        return flat
    going = ("going", TensorType(DType.BOOL, Shape()))
    body = as_body(lambda graph, place, go, rows: (go, _step(graph, place, rows, n)), [place, going, rows], "step")
    trips = emit.constant(n, DType.I64)
    return emit.op("Loop", trips, emit.constant(True, DType.BOOL), flat, body=emit.subgraph(body, ()))


def _step(graph: Graph, place: Value, rows: Value, n: int) -> Value:
    """Bring the row with the largest element of column `place` up, scale it to 1 there, and clear the column."""
    places = graph.constant(np.arange(n, dtype=np.int64).reshape(1, n, 1))
    here = graph.eq_(places, place)
    column = graph.reshape(graph.gather(rows, place, axis=2), (-1, n, 1))
    done = graph.lt_(places, place)
    sizes = graph.where_(done, graph.constant(-1.0, rows.dtype), graph.abs(column))
    pivot = graph.eq_(places, graph.argmax(sizes, axis=1, keep_dim=True))
    zero = graph.constant(0.0, rows.dtype)
    # Rows are picked by a sum over a mask: an element times 1, without the NaN of an infinity times 0.
    chosen = graph.sum(graph.where_(pivot, rows, zero), axes=1, keep_dim=True)
    current = graph.sum(graph.where_(here, rows, zero), axes=1, keep_dim=True)
    scaled = graph.div(chosen, graph.gather(chosen, graph.reshape(place, (1,)), axis=2))
    swapped = graph.where_(here, scaled, graph.where_(pivot, current, rows))
    factors = graph.where_(here, zero, graph.gather(swapped, graph.reshape(place, (1,)), axis=2))
    return graph.sub(swapped, graph.mul(factors, scaled))
