"""Matrix products, their fused forms, and systems of linear equations.

ONNX has no operator for linear equations. They are lowered to Gauss-Jordan elimination with partial pivoting in basic
ops: about 2 N^2 (N + K) operations in N dependent steps, far slower than LAPACK. A singular matrix gives infinities or
NaN, because ONNX cannot raise an error.
"""

from __future__ import annotations

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, join_dims, known_shape, named
from rlx_ort.ir.ops.elementwise import ACTIVATIONS, Activation
from rlx_ort.ir.types import Shape, TensorType


class MatMul(Op, operands="lhs rhs", builder="matmul; matmul_with_shape lhs rhs out_shape! dtype!"):
    """`[..., M, K] @ [..., K, N]`, leading dimensions broadcast."""

    promotes = True

    def _result(self, lhs: TensorType, rhs: TensorType) -> TensorType:
        return _product(self, lhs, rhs, ("lhs", "rhs"))


class DotGeneral(Op, operands="lhs rhs", builder="dot_general"):
    """A contraction over any axes: the result has the batch axes, the other axes of lhs, then those of rhs.

    Contracting axes are summed over, batch axes are kept side by side; those of lhs and rhs are paired in order.
    """

    promotes = True

    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    def axes(self, lhs: Shape, rhs: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """Return (batch, free, contracting) axes of lhs and of rhs, counted from the front."""
        groups = []
        for shape, batch, contracting in (
            (lhs, self.lhs_batch, self.lhs_contracting),
            (rhs, self.rhs_batch, self.rhs_contracting),
        ):
            used = self.axis_tuple((*batch, *contracting), shape.rank)
            free = tuple(axis for axis in range(shape.rank) if axis not in used)
            groups.append((used[: len(batch)], free, used[len(batch) :]))
        if len(self.lhs_batch) != len(self.rhs_batch) or len(self.lhs_contracting) != len(self.rhs_contracting):
            raise GraphVerifyError("DotGeneral needs as many batch and contracting axes on the left as on the right")
        return tuple(groups)

    def _result(self, lhs: TensorType, rhs: TensorType) -> TensorType:
        dtype = self.same_dtype(lhs, rhs)
        if dtype is DType.BOOL:
            raise GraphVerifyError("DotGeneral takes numbers, not bool; cast the operands first")
        left, right = known_shape(self, lhs, "lhs"), known_shape(self, rhs, "rhs")
        (left_batch, left_free, left_inner), (right_batch, right_free, right_inner) = self.axes(left, right)
        for i, j in zip((*left_batch, *left_inner), (*right_batch, *right_inner), strict=True):
            self.expect_dim(right[j], left[i], f"axis {j} of rhs")
        batch = [join_dims((left[i], right[j])) for i, j in zip(left_batch, right_batch, strict=True)]
        return TensorType(dtype, Shape([*batch, *(left[i] for i in left_free), *(right[j] for j in right_free)]))


class FusedMatMulBiasAct(
    Op,
    operands="x weight bias",
    builder="linear_fused; linear_bias x weight bias; linear_bias_act x weight bias activation!; "
    "fused_matmul_bias_act input weight bias out_shape dtype activation",
):
    """act(x @ w + bias); the bias runs along the last dimension."""

    activation: str | None = named("activation", ACTIVATIONS, default=None)

    def _result(self, x: TensorType, weight: TensorType, bias: TensorType) -> TensorType:
        result = _product(self, x, weight, ("x", "weight"))
        self.same_dtype(x, weight, bias)
        if self.activation is not None:
            Activation(self.activation)._result(result)
        if result.shape is not None:
            (size,) = self.expect_rank(bias, (1,), "bias")
            self.expect_dim(size, result.shape[-1], "the size of the bias")
        return result


class LoraMatMul(Op, operands="x:float w a b", builder="lora_matmul x w a b scale out_shape dtype"):
    """x @ w + scale * ((x @ a) @ b): a weight with a low-rank correction."""

    scale: float = 1.0

    def _result(self, x: TensorType, w: TensorType, a: TensorType, b: TensorType) -> TensorType:
        self.same_dtype(x, w, a, b)
        product = _product(self, x, w, ("x", "w"))
        correction = _product(self, _product(self, x, a, ("x", "a")), b, ("x @ a", "b"))
        return TensorType(product.dtype, self.broadcast((product.shape, correction.shape)))


def _product(op: Op, lhs: TensorType, rhs: TensorType, names: tuple[str, str]) -> TensorType:
    dtype = op.same_dtype(lhs, rhs, names=names)
    if dtype is DType.BOOL:
        raise GraphVerifyError(f"{op.kind} takes numbers, not bool; cast the operands first")
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
    batch = op.broadcast((Shape(lhs.shape[:-2]), Shape(rhs.shape[:-2])))
    return TensorType(dtype, Shape((*(batch or ()), lhs.shape[-2], rhs.shape[-1])))


class _Solve(Op, operands="a:float b"):
    """Base of the solvers of A x = b; x has the type of b."""

    promotes = True

    batched = False

    def _result(self, a: TensorType, b: TensorType) -> TensorType:
        self.same_dtype(a, b)
        matrix, right = known_shape(self, a, "a"), known_shape(self, b, "b")
        if matrix.rank < 3 if self.batched else matrix.rank != 2:
            wanted = "(..., N, N)" if self.batched else "(N, N)"
            raise GraphVerifyError(f"{self.kind} needs a as {wanted}, got {matrix}")
        if not isinstance(matrix[-1], int) or not isinstance(matrix[-2], int):
            raise GraphVerifyError(f"{self.kind} needs a size N of its matrix, got {matrix}; bind the dimensions first")
        self.expect_dim(matrix[-2], matrix[-1], f"the rows of a {matrix}, as many as columns,")
        if right.rank not in (matrix.rank - 1, matrix.rank):
            wanted = f"{matrix.rank - 1} or {matrix.rank}"
            raise GraphVerifyError(f"{self.kind} of a {matrix} needs b with rank {wanted}, got {right}")
        lead = matrix.rank - 2
        self.expect_dim(right[lead], matrix[-1], f"dimension {lead} of b {right}")
        batch = self.broadcast((Shape(matrix[:lead]), Shape(right[:lead]))) or ()
        self.expect_dims(matrix[:lead], batch, "a")
        self.expect_dims(right[:lead], batch, "b")
        return b


class DenseSolve(_Solve, builder="dense_solve a b out_shape dtype"):
    """The x of A x = b, for A `(N, N)` and b `(N,)` or `(N, K)`."""


class BatchedDenseSolve(_Solve, builder="batched_dense_solve a b out_shape dtype"):
    """The x of A x = b for each of a batch, for A `(..., N, N)` and b `(..., N)` or `(..., N, K)`.

    b of the rank of A is `(..., N, K)`, b of one rank less is `(..., N)`; the batch is the same on both sides.
    """

    batched = True
