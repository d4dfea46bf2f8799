"""Systems of linear equations.

ONNX has no such op; they are lowered to Gauss-Jordan elimination with partial pivoting in basic ops, which takes
about 2 N^2 (N + K) operations one after the other in N steps. Good to have in a graph, no match for LAPACK.
A singular matrix gives infinities or NaN, as ONNX cannot raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.infer import broadcast, expect_dim, expect_float, same_dtype
from rlx_ort.ir.op import Op, OpTypes, known_shape, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["BatchedDenseSolve", "DenseSolve", "SolveBuilders"]


@dataclass(frozen=True, slots=True)
class DenseSolve(Op):
    """The x of A x = b, for A `(N, N)` and b `(N,)` or `(N, K)`."""

    arity = (2, 2)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of b."""
        return (_solution(self, inputs, batched=False),)


@dataclass(frozen=True, slots=True)
class BatchedDenseSolve(Op):
    """The x of A x = b for each of a batch, for A `(..., N, N)` and b `(..., N)` or `(..., N, K)`.

    b of the rank of A is `(..., N, K)`, b of one rank less is `(..., N)`; the batch is the same on both sides.
    """

    arity = (2, 2)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of b."""
        return (_solution(self, inputs, batched=True),)


def _solution(op: Op, inputs: OpTypes, batched: bool) -> TensorType:
    same_dtype(op, inputs, ("a", "b"))
    a, b = tensor_input(op, inputs, 0, "a"), tensor_input(op, inputs, 1, "b")
    expect_float(op, a, "a")
    matrix, right = known_shape(op, a, "a"), known_shape(op, b, "b")
    if matrix.rank < 3 if batched else matrix.rank != 2:
        raise GraphVerifyError(f"{op.kind} needs a as {'(..., N, N)' if batched else '(N, N)'}, got {matrix}")
    if not isinstance(matrix[-1], int) or not isinstance(matrix[-2], int):
        raise GraphVerifyError(f"{op.kind} needs a size N of its matrix, got {matrix}; bind the dimensions first")
    expect_dim(op, matrix[-2], matrix[-1], f"the rows of a {matrix}, as many as columns,")
    if right.rank not in (matrix.rank - 1, matrix.rank):
        raise GraphVerifyError(
            f"{op.kind} of a {matrix} needs b with rank {matrix.rank - 1} or {matrix.rank}, got {right}"
        )
    lead = matrix.rank - 2
    expect_dim(op, right[lead], matrix[-1], f"dimension {lead} of b {right}")
    batch = broadcast(op, (Shape(matrix[:lead]), Shape(right[:lead])))
    for place, dim in enumerate(batch or ()):
        expect_dim(op, matrix[place], dim, f"dimension {place} of a")
        expect_dim(op, right[place], dim, f"dimension {place} of b")
    return b


class SolveBuilders(LeafBuilders):
    """Builders of the solvers."""

    __slots__ = ()

    def dense_solve(
        self,
        a: Operand,
        b: Operand,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Solve a x = b for one matrix.

        Raises:
            GraphVerifyError: a is not square, or b does not fit it.
        """
        return self._add(DenseSolve(), *self._pair(a, b), shape=out_shape, dtype=dtype, name=name)

    def batched_dense_solve(
        self,
        a: Operand,
        b: Operand,
        out_shape: Iterable[Dim] | None = None,
        dtype: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Solve a x = b for each matrix of a batch.

        Raises:
            GraphVerifyError: a is not square, or b does not fit it.
        """
        return self._add(BatchedDenseSolve(), *self._pair(a, b), shape=out_shape, dtype=dtype, name=name)
