"""Grouped-query attention, blocks of whole layers, and combinations of ops that compilers fuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, known_shape, named, tensor_input
from rlx_ort.ir.ops.attention import Attention, head_layout
from rlx_ort.ir.ops.control import as_body, tensor_types
from rlx_ort.ir.ops.conv import Conv2d
from rlx_ort.ir.ops.elementwise import ACTIVATIONS, Activation, Binary
from rlx_ort.ir.ops.linalg import FusedMatMulBiasAct, MatMul
from rlx_ort.ir.ops.norm import FusedSwiGLU
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType


class Composite(Op):
    """Base of the ops that stand for a graph of other ops.

    Such an op keeps its name in reports and JSON; its type, its cost and its ONNX form are those of the graph that
    `expand` builds.
    """

    kind = ""  # a base, no op

    def _build(self, graph: Graph, *values: Value) -> Value:
        """Write the ops this one stands for into a graph and return the result."""
        raise NotImplementedError(f"{type(self).__name__} defines no `_build`")

    def _check(self, *types: TensorType) -> None:
        """Check mistakes that `_build` would report unclearly."""

    def expand(self, inputs: OpTypes) -> Graph:
        """Return the graph this op stands for, with an input for each of its inputs."""
        types = self._tensors(inputs) if self.operands else tensor_types(self, inputs, "a tensor")
        self._check(*types)
        try:
            return as_body(self._build, [(f"in{place}", kind) for place, kind in enumerate(types)], self.kind)
        except GraphVerifyError as err:
            raise GraphVerifyError(f"{self.describe()}: {err}") from err

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the graph's result."""
        return tuple(value.type for value in self.expand(inputs).outputs)


class GroupedQueryAttention(
    Composite, builder="gqa q k v num_heads num_kv_heads head_dim mask_kind mask * scale softcap"
):
    """Attention in which `num_heads / num_kv_heads` query heads share a head of k and v.

    Layouts and the other attributes are those of `Attention`, with `num_kv_heads` heads in k and v. Without a mask,
    with a `custom` one, and for one query under `causal`, query heads that share keys are folded into the query
    length, so k and v are not copied; otherwise k and v are repeated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask_kind: str = "none"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    arity = (3, 4)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise GraphVerifyError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} heads of k and v")
        attention = self._attention(self.num_heads)
        object.__setattr__(self, "mask_kind", attention.mask_kind)
        object.__setattr__(self, "window", attention.window)

    def _attention(self, heads: int, mask_kind: str | None = None) -> Attention:
        kind = self.mask_kind if mask_kind is None else mask_kind
        return Attention(heads, self.head_dim, kind, self.window, self.scale, self.softcap)

    def _build(self, graph: Graph, *values: Value) -> Value:
        q, k, v, *mask = values
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        layouts = []
        for value, count, name in zip((q, k, v), heads, "qkv", strict=True):
            shape = self.expect_rank(tensor_input(self, (value.type,), 0, value.name), (2, 3, 4), name)
            layouts.append(head_layout(self, shape, count, self.head_dim, name))
        if self.num_heads == self.num_kv_heads:
            return graph.append(self._attention(self.num_heads), q, k, v, *mask)
        split = [
            value if layout.heads_first else self._heads_first(graph, value)
            for value, layout in zip((q, k, v), layouts, strict=True)
        ]
        length = layouts[0].length
        single = length == 1 and self.mask_kind == "causal"
        if single or self.mask_kind in {"none", "custom"}:
            result = self._folded(graph, split, mask, length, "none" if single else self.mask_kind)
        else:
            keys, vals = (self._repeated(graph, value) for value in split[1:])
            # (B, H, S, D) has the heads first whatever S is, since its second dimension is the number of heads.
            result = graph.append(self._attention(self.num_heads), split[0], keys, vals, *mask)
        if layouts[0].heads_first:
            return result
        result = graph.transpose(result, (0, 2, 1, 3))
        return result if q.rank == 4 else graph.reshape(result, q.shape)

    def _heads_first(self, graph: Graph, value: Value) -> Value:
        """Return `(B, H, S, D)` of a value that has the heads elsewhere, with batch 1 for rank 2."""
        shape = value.shape
        if shape.rank < 4:
            width = shape[-1]
            heads = width // self.head_dim if isinstance(width, int) else -1
            lead: tuple[Dim, ...] = (shape[0],) if shape.rank == 3 else (1,)
            value = graph.reshape(value, (*lead, shape[-2], heads, self.head_dim))
        return graph.transpose(value, (0, 2, 1, 3))

    def _folded(self, graph: Graph, split: Sequence[Value], mask: Sequence[Value], length: Dim, kind: str) -> Value:
        q, k, v = split
        share = self.num_heads // self.num_kv_heads
        rows = share * length if isinstance(length, int) else -1
        batch = q.shape[0]
        folded = graph.reshape(q, (batch, self.num_kv_heads, rows, self.head_dim))
        mixed = graph.append(self._attention(self.num_kv_heads, kind), folded, k, v, *mask)
        return graph.reshape(mixed, (batch, self.num_heads, length if isinstance(length, int) else -1, self.head_dim))

    def _repeated(self, graph: Graph, value: Value) -> Value:
        share = self.num_heads // self.num_kv_heads
        batch, heads, length, size = value.shape
        apart = graph.reshape(value, (batch, heads, 1, length, size))
        return graph.reshape(graph.expand(apart, (-1, -1, share, -1, -1)), (batch, self.num_heads, length, size))


class FusedAttentionBlock(Composite):
    """Projection to q, k and v, rotary embedding, attention with a key mask, projection back.

    Inputs: hidden `(B, S, W)`, qkv weight `(W, 3 H D)`, output weight `(H D, W)`, mask `(B, S)`; with `has_bias`, qkv
    bias and output bias; with `has_rope`, cos and sin `(S, D / 2)`, which rotate q and k.
    """

    num_heads: int
    head_dim: int
    has_bias: bool = False
    has_rope: bool = False

    arity = (4, 8)

    def _check(self, *types: TensorType) -> None:
        _check_count(self, types, 4 + 2 * self.has_bias + 2 * self.has_rope)
        self.expect_rank(types[0], (2, 3), "hidden")
        qkv = self.expect_rank(types[1], (2,), "qkv weight")
        self.expect_dim(qkv[1], 3 * self.num_heads * self.head_dim, "the columns of the qkv weight, 3 times the heads,")

    def _build(self, graph: Graph, *values: Value) -> Value:
        hidden, qkv_weight, out_weight, mask, *rest = values
        biases, tables = (rest[:2], rest[2:]) if self.has_bias else ((None, None), rest)
        width = self.num_heads * self.head_dim
        qkv = _linear(graph, hidden, qkv_weight, biases[0])
        q, k, v = (graph.narrow(qkv, -1, part * width, width) for part in range(3))
        if self.has_rope:
            q, k = (graph.rope(item, tables[0], tables[1], self.head_dim) for item in (q, k))
        mixed = graph.attention(q, k, v, mask, self.num_heads, self.head_dim)
        return _linear(graph, mixed, out_weight, biases[1])


class FusedTransformerLayer(Composite):
    """A transformer layer: attention block and feed-forward block, each with a residual and a layer normalisation.

    Inputs: hidden `(B, S, W)`, mask `(B, S)`, qkv weight, output weight, gamma and beta of the first normalisation,
    up weight `(W, F)`, down weight `(F, W)`, gamma and beta of the second; with `has_bias`, the biases of qkv,
    output, up and down. With `pre_norm`, a block normalises its input instead of the sum after it.
    """

    num_heads: int
    head_dim: int
    has_bias: bool = False
    pre_norm: bool = False
    activation: str = named("activation", ACTIVATIONS, default="gelu")
    eps: float = 1e-5

    arity = (10, 14)

    def _check(self, *types: TensorType) -> None:
        _check_count(self, types, 14 if self.has_bias else 10)

    def _build(self, graph: Graph, *values: Value) -> Value:
        hidden, mask, qkv_weight, out_weight, gamma1, beta1, up, down, gamma2, beta2, *biases = values
        up_bias, down_bias = biases[2:] or (None, None)
        block = FusedAttentionBlock(self.num_heads, self.head_dim, self.has_bias)

        def attend(x: Value) -> Value:
            return graph.append(block, x, qkv_weight, out_weight, mask, *biases[:2])

        def feed_forward(x: Value) -> Value:
            return _linear(graph, _linear(graph, x, up, up_bias, self.activation), down, down_bias)

        for step, gamma, beta in ((attend, gamma1, beta1), (feed_forward, gamma2, beta2)):
            if self.pre_norm:
                hidden = graph.add(hidden, step(graph.layer_norm(hidden, gamma, beta, eps=self.eps)))
            else:
                hidden = graph.fused_residual_ln(step(hidden), hidden, None, gamma, beta, self.eps)
        return hidden


class AxialRope2d(Composite, operands="x:float", builder="axial_rope2d"):
    """Rotary embedding of a grid of tokens: the first half of each head by the column, the second by the row.

    Token t has position p = t // repeat_factor, in column p % end_x and row p // end_x. Neighbours (2c, 2c + 1) are
    rotated by (column or row) * theta^(-4c / head_dim). x is `(S, H * D)` or `(B, S, H * D)`. head_dim is a
    multiple of 4.
    """

    end_x: int
    end_y: int
    head_dim: int
    num_heads: int
    theta: float = 10000.0
    repeat_factor: int = 1

    def __post_init__(self) -> None:
        least = min(self.end_x, self.end_y, self.num_heads, self.repeat_factor)
        if self.head_dim < 4 or self.head_dim % 4 or least < 1:
            raise GraphVerifyError(f"{self!r} needs a head_dim that is a multiple of 4, and numbers of at least 1")

    def _check(self, *types: TensorType) -> None:
        shape = self.expect_rank(types[0], (2, 3), "x")
        self.expect_dim(shape[-1], self.num_heads * self.head_dim, f"the last dimension of x {shape}")
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

    def _build(self, graph: Graph, *values: Value) -> Value:
        (x,) = values
        cos, sin = (graph.constant(table, x.dtype) for table in self.tables())
        return graph.rope(x, cos, sin, self.head_dim, interleaved=True)


class FusedConvBiasAct(Composite, operands="x weight bias", builder="fused_conv_bias_act"):
    """activation(conv2d(x, weight) + bias): x `(N, C, H, W)`, weight `(C_out, C / groups, kH, kW)`, bias `(C_out,)`.

    The attributes are those of `Conv2d`, and the name of the activation, None for none.
    """

    activation: str | None = named("activation", ACTIVATIONS, default=None)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def _build(self, graph: Graph, *values: Value) -> Value:
        result = graph.append(Conv2d(self.stride, self.padding, self.dilation, self.groups), *values)
        return result if self.activation is None else graph.activation(self.activation, result)


class AdaLayerNorm(Composite, operands="x:float scale shift", builder="ada_layer_norm"):
    """Layer normalisation along the last axis, then `* (1 + scale) + shift`; inputs x, scale and shift.

    Scale and shift are computed from a condition, such as a time step; they broadcast to x.
    """

    eps: float = 1e-5

    def _check(self, *types: TensorType) -> None:
        shape = known_shape(self, types[0], "x")
        if not shape.rank or not isinstance(shape[-1], int):
            raise GraphVerifyError(f"AdaLayerNorm needs a size in the last dimension of x, got {shape}")

    def _build(self, graph: Graph, *values: Value) -> Value:
        x, scale, shift = values
        width = Shape(x.shape[-1:]).static()
        ones, zeros = (graph.constant(np.full(width, fill), x.dtype) for fill in (1.0, 0.0))
        return graph.fma(graph.layer_norm(x, ones, zeros, eps=self.eps), scale + 1.0, shift)


class GatedResidual(Composite, operands="x gate y", builder="gated_residual"):
    """x + gate * y, broadcast."""

    def _build(self, graph: Graph, *values: Value) -> Value:
        x, gate, y = values
        return x + gate * y


class SoftmaxCrossEntropyWithLogits(
    Composite, operands="logits:float labels:own", builder="softmax_cross_entropy_with_logits"
):
    """The loss of each row of logits `(N, C)` for a label `(N,)`: log(sum(exp(row))) - row[label].

    Float labels drop their fraction. Good for scoring; rlx_ort computes no gradients.
    """

    def _check(self, *types: TensorType) -> None:
        self.expect_rank(types[0], (2,), "logits")
        self.expect_rank(types[1], (1,), "labels")

    def _build(self, graph: Graph, *values: Value) -> Value:
        # The largest logit is subtracted first, so that nothing overflows.
        logits, labels = values
        shifted = logits - graph.max(logits, 1, keep_dim=True)
        total = graph.log(graph.sum(graph.exp(shifted), 1))
        column = graph.reshape(graph.cast(labels, DType.I64), (labels.shape[0], 1))
        chosen = graph.gather_elements(shifted, column, 1)
        return total - graph.reshape(chosen, (labels.shape[0],))


def _check_count(op: Op, inputs: Sequence[TensorType], wanted: int) -> None:
    if len(inputs) != wanted:
        raise GraphVerifyError(f"{op.describe()} takes {wanted} inputs, got {len(inputs)}")


def _linear(graph: Graph, x: Value, weight: Value, bias: Value | None, activation: str | None = None) -> Value:
    if bias is not None:
        return graph.append(FusedMatMulBiasAct(activation), x, weight, bias)
    product = graph.append(MatMul(), x, weight)
    return product if activation is None else graph.activation(activation, product)


@builder
def fused_attention_block(
    graph: Graph,
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
    **node: Unpack[NodeArgs],
) -> Value:
    """Project, rotate if tables are given, attend, and project back; biases and tables come in pairs."""
    pairs = ((qkv_bias, out_bias), (cos, sin))
    if any((first is None) != (second is None) for first, second in pairs):
        raise GraphVerifyError("fused_attention_block takes both biases or none, and both tables or none")
    op = FusedAttentionBlock(num_heads, head_dim, qkv_bias is not None, cos is not None)
    return graph._add(op, *graph._like(hidden, qkv_weight, out_weight, mask, qkv_bias, out_bias, cos, sin), **node)


@builder
def shared_matmul_pair(graph: Graph, x: Operand, first: Operand, second: Operand) -> tuple[Value, Value]:
    """Return x @ first and x @ second.

    They stay two products, because one product with joined weights would keep a second copy of both.
    """
    value = graph._as_value(x)
    left, right = (graph._add(MatMul(), *graph._pair(value, weight)) for weight in (first, second))
    return left, right


@builder
def swiglu_ffn(graph: Graph, x: Operand, up: Operand, gate: Operand, down: Operand) -> Value:
    """Return ((x @ up) * silu(x @ gate)) @ down."""
    raised, gated = graph.shared_matmul_pair(x, up, gate)
    mixed = graph._add(Binary("mul"), raised, graph._add(Activation("silu"), gated))
    return graph._add(MatMul(), *graph._pair(mixed, down))


@builder
def fused_swiglu_ffn(graph: Graph, x: Operand, up_gate: Operand, down: Operand, gate_first: bool = False) -> Value:
    """Return (up * silu(gate)) @ down, where up and gate are the halves of x @ up_gate."""
    both = graph._add(MatMul(), *graph._pair(graph._as_value(x), up_gate))
    return graph._add(MatMul(), *graph._pair(graph._add(FusedSwiGLU(gate_first), both), down))
