"""Blocks of whole layers, and builders of the usual combinations of products and activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.infer import expect_dim, expect_float, expect_rank, known_name
from rlx_ort.ir.op import Op, OpTypes, tensor_input
from rlx_ort.ir.ops.composite import Composite
from rlx_ort.ir.ops.elementwise import ACTIVATIONS, Activation, Binary
from rlx_ort.ir.ops.gqa import GroupedQueryAttention
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.ops.linalg import FusedMatMulBiasAct, MatMul
from rlx_ort.ir.ops.norm import FusedSwiGLU

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = [
    "AxialRope2d",
    "BlockBuilders",
    "FusedAttentionBlock",
    "FusedTransformerLayer",
]


@dataclass(frozen=True, slots=True)
class FusedAttentionBlock(Composite):
    """Projection to q, k and v, rotary embedding, attention with a key mask, projection back.

    Inputs: hidden `(B, S, W)`, qkv weight `(W, 3 H D)`, output weight `(H D, W)`, mask `(B, S)`; with `has_bias`, qkv
    bias and output bias; with `has_rope`, cos and sin `(S, D / 2)`, which turn q and k.

    Attributes:
        num_heads: number of heads.
        head_dim: size of a head.
        has_bias: whether the two biases are given.
        has_rope: whether the two tables are given.
    """

    num_heads: int
    head_dim: int
    has_bias: bool = False
    has_rope: bool = False

    arity = (4, 8)

    def check(self, inputs: OpTypes) -> None:
        """Check the number of inputs and the widths."""
        _check_count(self, inputs, 4 + 2 * self.has_bias + 2 * self.has_rope)
        width = self.num_heads * self.head_dim
        expect_rank(self, tensor_input(self, inputs, 0, "hidden"), (2, 3), "hidden")
        qkv = expect_rank(self, tensor_input(self, inputs, 1, "qkv weight"), (2,), "qkv weight")
        expect_dim(self, qkv[1], 3 * width, "the columns of the qkv weight, 3 times the heads,")

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write the projections, the embedding and the attention."""
        hidden, qkv_weight, out_weight, mask, *rest = values
        biases, tables = (rest[:2], rest[2:]) if self.has_bias else ((None, None), rest)
        width = self.num_heads * self.head_dim
        qkv = _linear(graph, hidden, qkv_weight, biases[0])
        q, k, v = (graph.narrow(qkv, -1, part * width, width) for part in range(3))
        if self.has_rope:
            q, k = (graph.rope(item, tables[0], tables[1], self.head_dim) for item in (q, k))
        mixed = graph.attention(q, k, v, mask, self.num_heads, self.head_dim)
        return _linear(graph, mixed, out_weight, biases[1])


@dataclass(frozen=True, slots=True)
class FusedTransformerLayer(Composite):
    """A transformer layer: attention block and feed-forward block, each with a residual and a layer normalisation.

    Inputs: hidden `(B, S, W)`, mask `(B, S)`, qkv weight, output weight, gamma and beta of the first normalisation,
    up weight `(W, F)`, down weight `(F, W)`, gamma and beta of the second; with `has_bias`, the biases of qkv,
    output, up and down.

    Attributes:
        num_heads: number of heads.
        head_dim: size of a head.
        has_bias: whether the four biases are given.
        pre_norm: whether a block normalises its input, instead of the sum after it.
        activation: of the feed-forward block.
        eps: of the normalisations.
    """

    num_heads: int
    head_dim: int
    has_bias: bool = False
    pre_norm: bool = False
    activation: str = "gelu"
    eps: float = 1e-5

    arity = (10, 14)

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", known_name("activation", self.activation, ACTIVATIONS))

    def check(self, inputs: OpTypes) -> None:
        """Check the number of inputs."""
        _check_count(self, inputs, 14 if self.has_bias else 10)

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write both blocks."""
        hidden, mask, qkv_weight, out_weight, gamma1, beta1, up, down, gamma2, beta2, *biases = values
        qkv_bias, out_bias, up_bias, down_bias = biases or (None,) * 4
        block = FusedAttentionBlock(self.num_heads, self.head_dim, self.has_bias)
        extra = (qkv_bias, out_bias) if self.has_bias else ()

        def attend(x: Value) -> Value:
            return graph.append(block, x, qkv_weight, out_weight, mask, *extra)

        def feed_forward(x: Value) -> Value:
            return _linear(graph, _linear(graph, x, up, up_bias, self.activation), down, down_bias)

        for step, gamma, beta in ((attend, gamma1, beta1), (feed_forward, gamma2, beta2)):
            hidden = self._residual(graph, hidden, step, gamma, beta)
        return hidden

    def _residual(
        self, graph: Graph, hidden: Value, step: Callable[[Value], Value], gamma: Value, beta: Value
    ) -> Value:
        if self.pre_norm:
            return graph.add(hidden, step(graph.layer_norm(hidden, gamma, beta, eps=self.eps)))
        return graph.fused_residual_ln(step(hidden), hidden, None, gamma, beta, self.eps)


@dataclass(frozen=True, slots=True)
class AxialRope2d(Composite):
    """Rotary embedding of a grid of tokens: the first half of each head by the column, the second by the row.

    Token t stands at place p = t // repeat_factor, in column p % end_x and row p // end_x. Neighbours (2c, 2c + 1)
    are turned by place * theta^(-4c / head_dim). x is `(S, H * D)` or `(B, S, H * D)`.

    Attributes:
        end_x: columns of the grid.
        end_y: rows of the grid.
        head_dim: size of a head, a multiple of 4.
        num_heads: number of heads.
        theta: base of the frequencies.
        repeat_factor: how many tokens stand at each place.
    """

    end_x: int
    end_y: int
    head_dim: int
    num_heads: int
    theta: float = 10000.0
    repeat_factor: int = 1

    arity = (1, 1)

    def __post_init__(self) -> None:
        if (
            self.head_dim < 4
            or self.head_dim % 4
            or min(self.end_x, self.end_y, self.num_heads, self.repeat_factor) < 1
        ):
            raise GraphVerifyError(f"{self!r} needs a head_dim that is a multiple of 4, and numbers of at least 1")

    def check(self, inputs: OpTypes) -> None:
        """Check the heads, and that there are no more tokens than places."""
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        shape = expect_rank(self, x, (2, 3), "x")
        expect_dim(self, shape[-1], self.num_heads * self.head_dim, f"the last dimension of x {shape}")
        places = self.end_x * self.end_y * self.repeat_factor
        if isinstance(shape[-2], int) and shape[-2] > places:
            raise GraphVerifyError(f"AxialRope2d has {places} places on its grid, x {shape} has {shape[-2]} tokens")

    def tables(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return cos and sin, `(places, D / 2)`, in f64."""
        token = np.arange(self.end_x * self.end_y * self.repeat_factor)
        place = token // self.repeat_factor
        frequencies = self.theta ** (-4.0 * np.arange(self.head_dim // 4) / self.head_dim)
        angles = np.concatenate(
            [np.outer(place % self.end_x, frequencies), np.outer(place // self.end_x, frequencies)], 1
        )
        return np.cos(angles), np.sin(angles)

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write one interleaved rotary embedding with constant tables."""
        (x,) = values
        cos, sin = (graph.constant(table, x.dtype) for table in self.tables())
        return graph.rope(x, cos, sin, self.head_dim, interleaved=True)


def _check_count(op: Op, inputs: OpTypes, wanted: int) -> None:
    if len(inputs) != wanted:
        raise GraphVerifyError(f"{op.describe()} takes {wanted} inputs, got {len(inputs)}")


def _linear(graph: Graph, x: Value, weight: Value, bias: Value | None, activation: str | None = None) -> Value:
    if bias is not None:
        return graph.append(FusedMatMulBiasAct(activation), x, weight, bias)
    product = graph.append(MatMul(), x, weight)
    return product if activation is None else graph.activation(activation, product)


class BlockBuilders(LeafBuilders):
    """Builders of the blocks."""

    __slots__ = ()

    def gqa(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask_kind: str = "none",
        mask: Operand | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        name: str | None = None,
    ) -> Value:
        """Attend with query heads that share heads of k and v; `mask` is for the kinds `custom` and `bias`.

        Raises:
            GraphVerifyError: the heads cannot be shared out, or q, k, v or the mask do not fit.
        """
        kind, colon, text = mask_kind.strip().partition(":")
        window = int(text) if text.strip().isdecimal() else None
        if bool(colon) != (kind.strip().lower() == "sliding") or (colon and window is None):
            raise GraphVerifyError(f"mask kind {mask_kind!r} is not none, causal, sliding:N, custom or bias")
        op = GroupedQueryAttention(num_heads, num_kv_heads, head_dim, kind, window, scale, softcap)
        query = self._as_value(q)
        extra = () if mask is None else (self._as_value(mask, query),)
        return self._add(op, query, self._as_value(k, query), self._as_value(v, query), *extra, name=name)

    def fused_attention_block(
        self,
        hidden: Operand,
        qkv_weight: Operand,
        out_weight: Operand,
        mask: Operand,
        num_heads: int,
        head_dim: int,
        qkv_bias: Operand | None = None,
        out_bias: Operand | None = None,
        cos: Operand | None = None,
        sin: Operand | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Project, rotate where tables are given, attend, and project back.

        Raises:
            GraphVerifyError: one of two biases or tables is missing, or the shapes do not fit.
        """
        pairs = ((qkv_bias, out_bias), (cos, sin))
        if any((first is None) != (second is None) for first, second in pairs):
            raise GraphVerifyError("fused_attention_block takes both biases or none, and both tables or none")
        x = self._as_value(hidden)
        given = (qkv_weight, out_weight, mask, *(item for pair in pairs for item in pair if item is not None))
        op = FusedAttentionBlock(num_heads, head_dim, qkv_bias is not None, cos is not None)
        return self._add(op, x, *(self._as_value(item, x) for item in given), name=name)

    def axial_rope2d(
        self,
        x: Operand,
        end_x: int,
        end_y: int,
        head_dim: int,
        num_heads: int,
        theta: float = 10000.0,
        repeat_factor: int = 1,
        *,
        name: str | None = None,
    ) -> Value:
        """Rotate the heads of a grid of tokens, half of each by the column and half by the row."""
        op = AxialRope2d(end_x, end_y, head_dim, num_heads, float(theta), repeat_factor)
        return self._add(op, self._as_value(x), name=name)

    def linear_bias(self, x: Operand, weight: Operand, bias: Operand, *, name: str | None = None) -> Value:
        """Return x @ weight + bias."""
        return self.linear_fused(x, weight, bias, name=name)

    def linear_bias_act(
        self, x: Operand, weight: Operand, bias: Operand, activation: str, *, name: str | None = None
    ) -> Value:
        """Return activation(x @ weight + bias)."""
        return self.linear_fused(x, weight, bias, activation, name=name)

    def linear_fused(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand,
        activation: str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return activation(x @ weight + bias) as one op."""
        value = self._as_value(x)
        others = (self._as_value(item, value) for item in (weight, bias))
        return self._add(FusedMatMulBiasAct(activation), value, *others, name=name)

    def shared_matmul_pair(self, x: Operand, first: Operand, second: Operand) -> tuple[Value, Value]:
        """Return x @ first and x @ second.

        They stay two products: one product with joined weights would keep a second copy of both.
        """
        value = self._as_value(x)
        left, right = (self._add(MatMul(), *self._pair(value, weight)) for weight in (first, second))
        return left, right

    def swiglu_ffn(self, x: Operand, up: Operand, gate: Operand, down: Operand) -> Value:
        """Return ((x @ up) * silu(x @ gate)) @ down."""
        raised, gated = self.shared_matmul_pair(x, up, gate)
        mixed = self._add(Binary("mul"), raised, self._add(Activation("silu"), gated))
        return self._add(MatMul(), *self._pair(mixed, down))

    def fused_swiglu_ffn(self, x: Operand, up_gate: Operand, down: Operand, gate_first: bool = False) -> Value:
        """Return (up * silu(gate)) @ down, where up and gate are the halves of x @ up_gate."""
        both = self._add(MatMul(), *self._pair(self._as_value(x), up_gate))
        return self._add(MatMul(), *self._pair(self._add(FusedSwiGLU(gate_first), both), down))
