"""Mixtures of experts: products in which each row selects its matrix, and the sum of rows by index."""

from __future__ import annotations

from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.op import Op, known_shape
from rlx_ort.ir.ops.leaf import LeafBuilders, NodeArgs, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType

__all__ = ["GroupedMatMul", "MoeBuilders", "ScatterAdd"]


class GroupedMatMul(Op, operands="x w experts"):
    """Row i of x `(M, K)` times matrix `experts[i]` of w `(E, K, N)`; experts `(M,)` are 0 to E - 1.

    If M is known and at most E, each row gets a copy of its matrix: M * K * N elements of memory. Otherwise a loop
    goes through the experts that have rows, with one copied matrix at a time.
    """

    def _result(self, x: TensorType, w: TensorType, experts: TensorType) -> TensorType:
        dtype = self.same_dtype(x, w)
        rows, inner = self.expect_rank(x, (2,), "x")
        _, k, n = self.expect_rank(w, (3,), "w")
        self.expect_dim(k, inner, "the rows of each matrix of w")
        _expect_places(self, experts, "experts", rows)
        return TensorType(dtype, Shape((rows, n)))


class ScatterAdd(Op, operands="updates indices"):
    """Zeros with `rows` rows, with `updates[i]` added to row `indices[i]`: updates `(U, ...)`, indices `(U,)`."""

    rows: Dim

    def _result(self, updates: TensorType, indices: TensorType) -> TensorType:
        self.expect_number(updates, "the updates")
        shape = known_shape(self, updates, "updates")
        if shape.rank < 1:
            raise GraphVerifyError("ScatterAdd needs updates of rank 1 or more, got a scalar")
        _expect_places(self, indices, "indices", shape[0])
        return TensorType(updates.dtype, Shape((self.rows, *shape[1:])))


def _expect_places(op: Op, places: TensorType, name: str, count: Dim) -> None:
    op.expect_indices(places, name)
    (found,) = op.expect_rank(places, (1,), name)
    op.expect_dim(found, count, f"the number of {name}, one for each row,")


class MoeBuilders(LeafBuilders):
    """Builders of the ops of mixtures of experts."""

    __slots__ = ()

    def grouped_matmul(self, x: Operand, w: Operand, experts: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Multiply each row of x by the matrix of its expert; float experts drop their fraction."""
        return self._add(GroupedMatMul(), *self._like(x, w), experts, **node)

    def scatter_add(self, updates: Operand, indices: Operand, rows: Dim, **node: Unpack[NodeArgs]) -> Value:
        """Return zeros with each row added at its index; float indices drop their fraction."""
        return self._add(ScatterAdd(rows), updates, indices, **node)
