"""Matrix products and what is fused with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.infer import (
    axis_tuple,
    broadcast,
    expect_dim,
    expect_float,
    expect_rank,
    join_dims,
    known_name,
    same_dtype,
)
from rlx_ort.ir.op import Op, OpTypes, known_shape, tensor_input
from rlx_ort.ir.ops.elementwise import ACTIVATIONS, Activation
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["DotGeneral", "FusedMatMulBiasAct", "LinalgBuilders", "LoraMatMul", "MatMul"]


@dataclass(frozen=True, slots=True)
class MatMul(Op):
    """`[..., M, K] @ [..., K, N]`, leading dimensions broadcast."""

    arity = (2, 2)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `[..., M, N]`."""
        return (_product(self, inputs, ("lhs", "rhs")),)


@dataclass(frozen=True, slots=True)
class DotGeneral(Op):
    """A contraction over any axes: the result has the batch axes, the other axes of lhs, then those of rhs.

    Attributes:
        lhs_contracting: axes of lhs that are summed over, paired in order with `rhs_contracting`.
        rhs_contracting: axes of rhs that are summed over.
        lhs_batch: axes of lhs that are kept side by side, paired in order with `rhs_batch`.
        rhs_batch: axes of rhs that are kept side by side.
    """

    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    arity = (2, 2)

    def axes(self, lhs: Shape, rhs: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """Return (batch, free, contracting) axes of lhs and of rhs, counted from the front.

        Raises:
            GraphVerifyError: an axis does not exist, is named twice, or has no partner.
        """
        groups = []
        for shape, batch, contracting in (
            (lhs, self.lhs_batch, self.lhs_contracting),
            (rhs, self.rhs_batch, self.rhs_contracting),
        ):
            used = axis_tuple(self, (*batch, *contracting), shape.rank)
            free = tuple(axis for axis in range(shape.rank) if axis not in used)
            groups.append((used[: len(batch)], free, used[len(batch) :]))
        if len(self.lhs_batch) != len(self.rhs_batch) or len(self.lhs_contracting) != len(self.rhs_contracting):
            raise GraphVerifyError("DotGeneral needs as many batch and contracting axes on the left as on the right")
        return tuple(groups)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return batch, free axes of lhs, free axes of rhs."""
        dtype = same_dtype(self, inputs, ("lhs", "rhs"))
        if dtype is DType.BOOL:
            raise GraphVerifyError("DotGeneral takes numbers, not bool; cast the operands first")
        lhs = known_shape(self, tensor_input(self, inputs, 0, "lhs"), "lhs")
        rhs = known_shape(self, tensor_input(self, inputs, 1, "rhs"), "rhs")
        (left_batch, left_free, left_inner), (right_batch, right_free, right_inner) = self.axes(lhs, rhs)
        for left, right in zip((*left_batch, *left_inner), (*right_batch, *right_inner), strict=True):
            expect_dim(self, rhs[right], lhs[left], f"axis {right} of rhs")
        batch = [join_dims((lhs[left], rhs[right])) for left, right in zip(left_batch, right_batch, strict=True)]
        dims = [*batch, *(lhs[axis] for axis in left_free), *(rhs[axis] for axis in right_free)]
        return (TensorType(dtype, Shape(dims)),)


@dataclass(frozen=True, slots=True)
class FusedMatMulBiasAct(Op):
    """act(x @ w + bias); the bias runs along the last dimension."""

    activation: str | None = None

    arity = (3, 3)

    def __post_init__(self) -> None:
        if self.activation is not None:
            object.__setattr__(self, "activation", known_name("activation", self.activation, ACTIVATIONS))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the product."""
        result = _product(self, inputs, ("x", "weight"))
        bias = tensor_input(self, inputs, 2, "bias")
        same_dtype(self, inputs, ("x", "weight", "bias"))
        if self.activation is not None:
            Activation(self.activation).infer((result,))
        if result.shape is not None:
            (size,) = expect_rank(self, bias, (1,), "bias")
            expect_dim(self, size, result.shape[-1], "the size of the bias")
        return (result,)


@dataclass(frozen=True, slots=True)
class LoraMatMul(Op):
    """x @ w + scale * ((x @ a) @ b): a weight with a low-rank correction."""

    scale: float = 1.0

    arity = (4, 4)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of x @ w."""
        same_dtype(self, inputs, ("x", "w", "a", "b"))
        expect_float(self, tensor_input(self, inputs, 0, "x"), "x")
        result = _product(self, inputs, ("x", "w"))
        low = _product(self, (inputs[0], inputs[2]), ("x", "a"))
        correction = _product(self, (low, inputs[3]), ("x @ a", "b"))
        return (TensorType(result.dtype, broadcast(self, (result.shape, correction.shape))),)


def _product(op: Op, inputs: OpTypes, names: tuple[str, str]) -> TensorType:
    dtype = same_dtype(op, inputs, names)
    if dtype is DType.BOOL:
        raise GraphVerifyError(f"{op.kind} takes numbers, not bool; cast the operands first")
    lhs, rhs = (tensor_input(op, inputs, index, name) for index, name in enumerate(names))
    if lhs.shape is None or rhs.shape is None:
        return TensorType(dtype)
    for value, name in ((lhs, names[0]), (rhs, names[1])):
        if value.shape is not None and value.shape.rank < 2:
            raise GraphVerifyError(f"{op.kind} needs matrices, {name} is {value}; reshape it to rank 2 or more")
    inner, other = lhs.shape[-1], rhs.shape[-2]
    if isinstance(inner, int) and isinstance(other, int) and inner != other:
        raise GraphVerifyError(
            f"{op.kind} cannot multiply {lhs.shape} by {rhs.shape}: the last dimension of {names[0]} is {inner}, "
            f"the second last of {names[1]} is {other}"
        )
    batch = broadcast(op, (Shape(lhs.shape[:-2]), Shape(rhs.shape[:-2])))
    return TensorType(dtype, Shape((*(batch or ()), lhs.shape[-2], rhs.shape[-1])))


def _inner(inputs: OpTypes) -> int:
    lhs = inputs[0]
    size = lhs.shape[-1] if isinstance(lhs, TensorType) and lhs.shape else 1
    return size if isinstance(size, int) else 1


class LinalgBuilders(LeafBuilders):
    """Builders of the matrix products."""

    __slots__ = ()

    def matmul(
        self, lhs: Operand, rhs: Operand, *, shape: Iterable[Dim] | None = None, name: str | None = None
    ) -> Value:
        """Multiply matrices, `[..., M, K] @ [..., K, N]`.

        Raises:
            GraphVerifyError: a rank is below 2, or the shapes do not fit.
        """
        return self._add(MatMul(), *self._pair(lhs, rhs), shape=shape, name=name)

    def matmul_with_shape(self, lhs: Operand, rhs: Operand, out_shape: Iterable[Dim], dtype: DType | str) -> Value:
        """Multiply matrices and check the result against a declared shape and dtype."""
        return self._add(MatMul(), *self._pair(lhs, rhs), shape=out_shape, dtype=dtype)

    def dot_general(
        self,
        lhs: Operand,
        rhs: Operand,
        lhs_contracting: Sequence[int],
        rhs_contracting: Sequence[int],
        lhs_batch: Sequence[int] = (),
        rhs_batch: Sequence[int] = (),
        *,
        name: str | None = None,
    ) -> Value:
        """Contract any axes; see `DotGeneral` for the order of the result's."""
        op = DotGeneral(tuple(lhs_contracting), tuple(rhs_contracting), tuple(lhs_batch), tuple(rhs_batch))
        return self._add(op, *self._pair(lhs, rhs), name=name)

    def fused_matmul_bias_act(
        self,
        input: Operand,
        weight: Operand,
        bias: Operand,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        activation: str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return activation(input @ weight + bias)."""
        op = FusedMatMulBiasAct(activation)
        x = self._as_value(input)
        values = (x, self._as_value(weight, x), self._as_value(bias, x))
        return self._add(op, *values, shape=out_shape, dtype=dtype, name=name)

    def lora_matmul(
        self,
        x: Operand,
        w: Operand,
        a: Operand,
        b: Operand,
        scale: float = 1.0,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return x @ w + scale * ((x @ a) @ b)."""
        value = self._as_value(x)
        others = (self._as_value(item, value) for item in (w, a, b))
        return self._add(LoraMatMul(scale), value, *others, shape=out_shape, dtype=dtype, name=name)
