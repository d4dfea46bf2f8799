"""ONNX forms of the matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.elementwise import activate
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import op_in
from rlx_ort.converters.to_onnx.shape import reshape
from rlx_ort.ir.op import join_dims, known_shape
from rlx_ort.ir.ops.linalg import DotGeneral, FusedMatMulBiasAct, LoraMatMul, MatMul
from rlx_ort.ir.shape import Dim, Shape

__all__: list[str] = []


@lowers(MatMul)
def _matmul(emit: Emitter, op: MatMul, inputs: Sequence[Any]) -> Any:
    return op_in(emit, "MatMul", emit.input_dtype(0), *inputs)


@lowers(FusedMatMulBiasAct)
def _fused_matmul(emit: Emitter, op: FusedMatMulBiasAct, inputs: Sequence[Any]) -> Any:
    x, weight, bias = inputs
    dtype = emit.input_dtype(0)
    result = emit.op("Add", op_in(emit, "MatMul", dtype, x, weight), bias)
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
    if len(others) == 1:
        return others[0]
    size = 1
    for dim in others:
        if not isinstance(dim, int):
            return None
        size *= dim
    return size
