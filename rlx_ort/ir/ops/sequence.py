"""Recurrences over a sequence that models use as layers: the selective scan and the gated delta rule."""

from __future__ import annotations

from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.op import Op, OpTypes, tensor_input
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType


class SelectiveScan(Op, operands="x:float delta a b c"):
    """h_t = exp(delta_t a) h_{t-1} + delta_t b_t x_t from h = 0, and y_t = the sum of c_t h_t over the n states.

    Inputs: x and delta `(B, S, H)`, a `(H, n)`, b and c `(B, S, n)`; the result is `(B, S, H)`. Narrow floats are
    computed in f32.
    """

    n: int

    def _result(self, x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType) -> None:
        self.same_dtype(x, delta, a, b, c)
        batch, length, channels = self.expect_rank(x, (3,), "x")
        _expect_shape(self, delta, "delta", (batch, length, channels))
        _expect_shape(self, a, "a", (channels, self.n))
        _expect_shape(self, b, "b", (batch, length, self.n))
        _expect_shape(self, c, "c", (batch, length, self.n))


class GatedDeltaNet(Op):
    """The gated delta rule over a sequence, a matrix S as state of each head, from 0 or from a given state.

    For each token: S is scaled by exp(g); then k's entry, S^T k, moves to v by beta, S += k (beta (v - S^T k))^T;
    and the result is S^T q / sqrt(n). Inputs: q, k, v `(B, S, H, n)`, g and beta `(B, S, H)` and, with
    `carry_state`, the first state `(B, H, n, n)`. Narrow floats are computed in f32. n is the size of a head. The
    last state is a second result if the first one is an input.
    """

    n: int
    carry_state: bool = False

    arity = (5, 6)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of v, and that of the state if it is carried."""
        if (len(inputs) == 6) != self.carry_state:
            wanted = "q, k, v, g, beta and a state" if self.carry_state else "q, k, v, g and beta"
            raise GraphVerifyError(f"{self.describe()} takes {wanted}; got {len(inputs)} inputs")
        names = ("q", "k", "v", "g", "beta", "state")[: len(inputs)]
        tensors = [tensor_input(self, inputs, place, name) for place, name in enumerate(names)]
        self.same_dtype(*tensors, names=names)
        v = tensors[2]
        self.expect_float(v, "v")
        batch, length, heads, size = self.expect_rank(v, (4,), "v")
        self.expect_dim(size, self.n, "the last dimension of v")
        vector: tuple[Dim, ...] = (batch, length, heads, self.n)
        dims = {"g": vector[:3], "beta": vector[:3], "state": (batch, heads, self.n, self.n)}
        for value, name in zip(tensors, names, strict=True):
            _expect_shape(self, value, name, dims.get(name, vector))
        result = TensorType(v.dtype, Shape((batch, length, heads, self.n)))
        state = TensorType(v.dtype, Shape((batch, heads, self.n, self.n)))
        return (result, state) if self.carry_state else (result,)


def _expect_shape(op: Op, value: TensorType, name: str, wanted: tuple[Dim, ...]) -> None:
    shape = op.expect_rank(value, (len(wanted),), name)
    op.expect_dims(shape, wanted, f"{name} {shape}")


@builder
def selective_scan(
    graph: Graph,
    x: Operand,
    delta: Operand,
    a: Operand,
    b: Operand,
    c: Operand,
    n: int | None = None,
    **node: Unpack[NodeArgs],
) -> Value:
    """Return the selective scan of x `(B, S, H)`; n is the number of states, the columns of a when left out."""
    values = graph._like(x, delta, a, b, c)
    return graph._add(SelectiveScan(_size(values[2]) if n is None else n), *values, **node)


@builder
def gated_delta_net(
    graph: Graph,
    q: Operand,
    k: Operand,
    v: Operand,
    g: Operand,
    beta: Operand,
    n: int | None = None,
    **node: Unpack[NodeArgs],
) -> Value:
    """Return the gated delta rule's results `(B, S, H, n)` from an empty state."""
    values = graph._like(q, k, v, g, beta)
    return graph._add(GatedDeltaNet(_size(values[0]) if n is None else n), *values, **node)


@builder
def gated_delta_net_carry(
    graph: Graph,
    q: Operand,
    k: Operand,
    v: Operand,
    g: Operand,
    beta: Operand,
    state: Operand,
    n: int | None = None,
    *,
    name: str | None = None,
) -> tuple[Value, Value]:
    """Return the gated delta rule's results from a given state `(B, H, n, n)`, and the last state.

    The given state is not changed; feed the second result back to continue.
    """
    values = graph._like(q, k, v, g, beta, state)
    op = GatedDeltaNet(_size(values[0]) if n is None else n, carry_state=True)
    result, last = graph.add_node(op, values, name=name)
    return result, last


def _size(value: Value) -> int:
    size = value.shape[-1] if value.rank else None
    if not isinstance(size, int):
        raise GraphVerifyError(f"{value.name!r} {value.shape} has no size in its last dimension; give n")
    return size
