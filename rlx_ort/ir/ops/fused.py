"""Combinations that compilers fuse: each stands for a few basic ops and keeps its name in reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.infer import expect_float, expect_rank, known_name, pair
from rlx_ort.ir.op import OpTypes, known_shape, tensor_input
from rlx_ort.ir.ops.composite import Composite
from rlx_ort.ir.ops.conv import Conv2d
from rlx_ort.ir.ops.elementwise import ACTIVATIONS
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Shape

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["AdaLayerNorm", "FusedBuilders", "FusedConvBiasAct", "GatedResidual", "SoftmaxCrossEntropyWithLogits"]


@dataclass(frozen=True, slots=True)
class FusedConvBiasAct(Composite):
    """activation(conv2d(x, weight) + bias): x `(N, C, H, W)`, weight `(C_out, C / groups, kH, kW)`, bias `(C_out,)`.

    Attributes:
        activation: name of the activation, None for none.
        stride: as in `Conv2d`.
        padding: as in `Conv2d`.
        dilation: as in `Conv2d`.
        groups: as in `Conv2d`.
    """

    activation: str | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    arity = (3, 3)

    def __post_init__(self) -> None:
        if self.activation is not None:
            object.__setattr__(self, "activation", known_name("activation", self.activation, ACTIVATIONS))

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write the convolution and the activation."""
        result = graph.append(Conv2d(self.stride, self.padding, self.dilation, self.groups), *values)
        return result if self.activation is None else graph.activation(self.activation, result)


@dataclass(frozen=True, slots=True)
class AdaLayerNorm(Composite):
    """Layer normalisation along the last axis, then `* (1 + scale) + shift`; inputs x, scale and shift.

    Scale and shift are what a condition, such as a time step, was turned into; they broadcast to x.

    Attributes:
        eps: of the normalisation.
    """

    eps: float = 1e-5

    arity = (3, 3)

    def check(self, inputs: OpTypes) -> None:
        """Check that the last dimension of x has a size."""
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        shape = known_shape(self, x, "x")
        if not shape.rank or not isinstance(shape[-1], int):
            raise GraphVerifyError(f"AdaLayerNorm needs a size in the last dimension of x, got {shape}")

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write the normalisation without weights, and the modulation."""
        x, scale, shift = values
        width = Shape(x.shape[-1:]).static()
        ones, zeros = (graph.constant(np.full(width, fill), x.dtype) for fill in (1.0, 0.0))
        return graph.fma(graph.layer_norm(x, ones, zeros, eps=self.eps), scale + 1.0, shift)


@dataclass(frozen=True, slots=True)
class GatedResidual(Composite):
    """x + gate * y, broadcast."""

    arity = (3, 3)

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write the product and the sum."""
        x, gate, y = values
        return x + gate * y


@dataclass(frozen=True, slots=True)
class SoftmaxCrossEntropyWithLogits(Composite):
    """The loss of each row of logits `(N, C)` for a label `(N,)`: log(sum(exp(row))) - row[label].

    Float labels drop their fraction. Good for scoring; rlx_ort computes no gradients.
    """

    arity = (2, 2)

    def check(self, inputs: OpTypes) -> None:
        """Check the ranks."""
        logits = tensor_input(self, inputs, 0, "logits")
        expect_float(self, logits, "logits")
        expect_rank(self, logits, (2,), "logits")
        expect_rank(self, tensor_input(self, inputs, 1, "labels"), (1,), "labels")

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write it with the largest logit taken off first, so that nothing overflows."""
        logits, labels = values
        shifted = logits - graph.max(logits, 1, keep_dim=True)
        total = graph.log(graph.sum(graph.exp(shifted), 1))
        column = graph.reshape(graph.cast(labels, DType.I64), (labels.shape[0], 1))
        chosen = graph.gather_elements(shifted, column, 1)
        return total - graph.reshape(chosen, (labels.shape[0],))


class FusedBuilders(LeafBuilders):
    """Builders of the fused combinations."""

    __slots__ = ()

    def fused_conv_bias_act(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand,
        activation: str | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        name: str | None = None,
    ) -> Value:
        """Return activation(conv2d(x, weight) + bias) as one op.

        Raises:
            GraphVerifyError: the channels, groups or window do not fit.
        """
        windows = pair("stride", stride, 1), pair("padding", padding), pair("dilation", dilation, 1)
        return self._fused(FusedConvBiasAct(activation, *windows, groups), x, weight, bias, name=name)

    def ada_layer_norm(
        self, x: Operand, scale: Operand, shift: Operand, eps: float = 1e-5, *, name: str | None = None
    ) -> Value:
        """Normalise along the last axis, then multiply by 1 + scale and add shift."""
        return self._fused(AdaLayerNorm(eps), x, scale, shift, name=name)

    def gated_residual(self, x: Operand, gate: Operand, y: Operand, *, name: str | None = None) -> Value:
        """Return x + gate * y."""
        return self._fused(GatedResidual(), x, gate, y, name=name)

    def softmax_cross_entropy_with_logits(self, logits: Operand, labels: Operand, *, name: str | None = None) -> Value:
        """Return the loss of each row of logits for its label."""
        return self._add(SoftmaxCrossEntropyWithLogits(), self._as_value(logits), self._as_value(labels), name=name)

    def _fused(self, op: Composite, first: Operand, *rest: Operand, name: str | None) -> Value:
        x = self._as_value(first)
        return self._add(op, x, *(self._as_value(item, x) for item in rest), name=name)
