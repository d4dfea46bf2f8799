"""Recurrences over a sequence that models use as layers: the selective scan and the gated delta rule."""

from __future__ import annotations

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder, last_size
from rlx_ort.ir.core import Graph, Operand, Value
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType


class SelectiveScan(Op, operands="x:float delta a b c", builder="selective_scan x delta a b c n@a"):
    """The selective scan y_t = sum of c_t h_t over the n states, with h_t = exp(delta_t a) h_{t-1} + delta_t b_t x_t.

    Inputs: x and delta `(B, S, H)`, a `(H, n)`, b and c `(B, S, n)`; the result is `(B, S, H)`. h is 0 at first. Narrow
    floats are computed in f32. The builder takes n from the columns of a when it is left out.
    """

    n: int

    def _result(self, x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType) -> None:
        self.same_dtype(x, delta, a, b, c)
        batch, length, channels = self.expect_rank(x, (3,), "x")
        _expect_shape(self, delta, "delta", (batch, length, channels))
        _expect_shape(self, a, "a", (channels, self.n))
        _expect_shape(self, b, "b", (batch, length, self.n))
        _expect_shape(self, c, "c", (batch, length, self.n))


class GatedDeltaNet(Op, operands="q k v g beta state?", builder="gated_delta_net q k v g beta n@q"):
    """The gated delta rule over a sequence, a matrix S as state of each head, from 0 or from a given state.

    For each token: S is scaled by exp(g); then k's entry, S^T k, moves to v by beta, S += k (beta (v - S^T k))^T;
    and the result is S^T q / sqrt(n). Inputs: q, k, v `(B, S, H, n)`, g and beta `(B, S, H)` and, with
    `carry_state`, the first state `(B, H, n, n)`. Narrow floats are computed in f32. n is the size of a head,
    which the builder takes from q when it is left out. The last state is a second result if the first one is an input.
    """

    n: int
    carry_state: bool = False

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of v, and that of the state if it is carried."""
        if (len(inputs) == 6) != self.carry_state:
            wanted = "q, k, v, g, beta and a state" if self.carry_state else "q, k, v, g and beta"
            raise GraphVerifyError(f"{self.describe()} takes {wanted}; got {len(inputs)} inputs")
        tensors = self._tensors(inputs)
        self.same_dtype(*tensors)
        v = tensors[2]
        self.expect_float(v, "v")
        batch, length, heads, size = self.expect_rank(v, (4,), "v")
        self.expect_dim(size, self.n, "the last dimension of v")
        vector, matrix = Shape((batch, length, heads, self.n)), Shape((batch, heads, self.n, self.n))
        dims = {"g": vector[:3], "beta": vector[:3], "state": matrix}
        for value, name in zip(tensors, self.operands, strict=False):
            _expect_shape(self, value, name, dims.get(name, vector))
        results = TensorType(v.dtype, vector), TensorType(v.dtype, matrix)
        return results if self.carry_state else results[:1]


def _expect_shape(op: Op, value: TensorType, name: str, wanted: tuple[Dim, ...]) -> None:
    shape = op.expect_rank(value, (len(wanted),), name)
    op.expect_dims(shape, wanted, f"{name} {shape}")


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
    op = GatedDeltaNet(last_size(values[0], "n") if n is None else n, carry_state=True)
    result, last = graph.add_node(op, values, name=name)
    return result, last
