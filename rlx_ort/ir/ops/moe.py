"""Products in which each row picks its own matrix, and adding rows up where they belong: mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.infer import expect_dim, expect_rank, same_dtype
from rlx_ort.ir.op import Op, OpTypes, known_shape, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["GroupedMatMul", "MoeBuilders", "ScatterAdd"]


@dataclass(frozen=True, slots=True)
class GroupedMatMul(Op):
    """Row i of x `(M, K)` times matrix `experts[i]` of w `(E, K, N)`; experts `(M,)` are 0 to E - 1.

    With up to E rows, known beforehand, each row gets a copy of its matrix: M * K * N elements of memory. Otherwise a
    loop goes through the experts that have rows, with one copied matrix at a time.
    """

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return `(M, N)`."""
        dtype = same_dtype(self, inputs, ("x", "w"))
        rows, inner = expect_rank(self, tensor_input(self, inputs, 0, "x"), (2,), "x")
        _, k, n = expect_rank(self, tensor_input(self, inputs, 1, "w"), (3,), "w")
        expect_dim(self, k, inner, "the rows of each matrix of w")
        _expect_places(self, inputs, 2, "experts", rows)
        return (TensorType(dtype, Shape((rows, n))),)


@dataclass(frozen=True, slots=True)
class ScatterAdd(Op):
    """Zeros with `rows` rows, to row `indices[i]` of which `updates[i]` is added: updates `(U, ...)`, indices `(U,)`.

    Attributes:
        rows: how many rows the result has.
    """

    rows: Dim

    arity = (2, 2)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape of the updates with `rows` in front."""
        updates = tensor_input(self, inputs, 0, "updates")
        if not (updates.dtype.is_float or updates.dtype.is_integer):
            raise GraphVerifyError(f"ScatterAdd adds numbers, not {updates.dtype.value}; cast the updates first")
        shape = known_shape(self, updates, "updates")
        if shape.rank < 1:
            raise GraphVerifyError("ScatterAdd needs updates of rank 1 or more, got a scalar")
        _expect_places(self, inputs, 1, "indices", shape[0])
        return (TensorType(updates.dtype, Shape((self.rows, *shape[1:]))),)


def _expect_places(op: Op, inputs: OpTypes, index: int, name: str, count: Dim) -> None:
    places = tensor_input(op, inputs, index, name)
    if not (places.dtype.is_integer or places.dtype.is_float):
        raise GraphVerifyError(f"{op.kind} needs integers as {name}, got {places.dtype.value}")
    (found,) = expect_rank(op, places, (1,), name)
    expect_dim(op, found, count, f"the number of {name}, one for each row,")


class MoeBuilders(LeafBuilders):
    """Builders of the ops of mixtures of experts."""

    __slots__ = ()

    def grouped_matmul(
        self,
        x: Operand,
        w: Operand,
        experts: Operand,
        *,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Multiply each row of x by the matrix of its expert; float experts drop their fraction.

        Raises:
            GraphVerifyError: the shapes do not fit.
        """
        value = self._as_value(x)
        op = GroupedMatMul()
        return self._add(op, value, self._as_value(w, value), self._as_value(experts), shape=shape, name=name)

    def scatter_add(self, updates: Operand, indices: Operand, rows: Dim, *, name: str | None = None) -> Value:
        """Add rows up where their indices say, on zeros; float indices drop their fraction."""
        return self._add(ScatterAdd(rows), self._as_value(updates), self._as_value(indices), name=name)
