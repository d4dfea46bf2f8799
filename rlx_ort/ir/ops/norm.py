"""Normalisations, and the blocks that are fused around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.infer import broadcast, expect_dim, expect_float, expect_rank, same_dtype
from rlx_ort.ir.op import Op, OpTypes, known_shape, normal_axis, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType

__all__ = [
    "BatchNormInference",
    "FusedResidualLN",
    "FusedResidualRmsNorm",
    "FusedSwiGLU",
    "GroupNorm",
    "LayerNorm",
    "LayerNorm2d",
    "NormBuilders",
    "RmsNorm",
]


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """Base of the normalisations: about eight operations an element."""


@dataclass(frozen=True, slots=True)
class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * gamma + beta along one axis, with the biased variance."""

    axis: int = -1
    eps: float = 1e-5

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        return (_along_axis(self, inputs, self.axis, ("x", "gamma", "beta")),)


@dataclass(frozen=True, slots=True)
class RmsNorm(Norm):
    """x / sqrt(mean(x * x) + eps) * gamma + beta along one axis."""

    axis: int = -1
    eps: float = 1e-5

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        return (_along_axis(self, inputs, self.axis, ("x", "gamma", "beta")),)


@dataclass(frozen=True, slots=True)
class LayerNorm2d(Norm):
    """Layer normalisation over the channels of each pixel of an `(N, C, H, W)` image."""

    eps: float = 1e-5

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        expect_rank(self, tensor_input(self, inputs, 0, "x"), (4,), "x")
        return (_along_axis(self, inputs, 1, ("x", "gamma", "beta")),)


@dataclass(frozen=True, slots=True)
class GroupNorm(Norm):
    """Normalisation over groups of channels of an `(N, C, ...)` tensor, then gamma and beta a channel."""

    num_groups: int
    eps: float = 1e-5

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        x = tensor_input(self, inputs, 0, "x")
        channels = expect_rank(self, x, range(3, 9), "x")[1]
        if not isinstance(channels, int) or self.num_groups < 1 or channels % self.num_groups:
            raise GraphVerifyError(f"GroupNorm cannot divide {channels} channels into {self.num_groups} groups")
        return (_along_axis(self, inputs, 1, ("x", "gamma", "beta")),)


@dataclass(frozen=True, slots=True)
class BatchNormInference(Norm):
    """(x - mean) / sqrt(variance + eps) * scale + bias a channel, with given statistics, of `(N, C, ...)`."""

    eps: float = 1e-5

    arity = (5, 5)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        return (_along_axis(self, inputs, 1, ("x", "scale", "bias", "mean", "variance")),)


@dataclass(frozen=True, slots=True)
class FusedResidualLN(Norm):
    """LayerNorm(x + residual [+ bias]) along the last axis; the sum itself is no result."""

    has_bias: bool = False
    eps: float = 1e-5

    arity = (4, 5)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the sum."""
        return (_residual(self, inputs, self.has_bias),)


@dataclass(frozen=True, slots=True)
class FusedResidualRmsNorm(Norm):
    """RmsNorm(x + residual [+ bias]) along the last axis; the sum itself is no result."""

    has_bias: bool = False
    eps: float = 1e-5

    arity = (4, 5)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the sum."""
        return (_residual(self, inputs, self.has_bias),)


@dataclass(frozen=True, slots=True)
class FusedSwiGLU(Op):
    """up * silu(gate), where the last dimension holds up then gate, or gate then up.

    Attributes:
        gate_first: whether the gate is the lower half.
        cast_to: dtype of the result, None for that of the input.
    """

    gate_first: bool = False
    cast_to: DType | None = None

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape with half the last dimension."""
        x = tensor_input(self, inputs, 0, "x")
        expect_float(self, x, "x")
        shape = known_shape(self, x, "x")
        size = shape[normal_axis(self, -1, shape.rank)]
        if not isinstance(size, int) or size % 2:
            raise GraphVerifyError(f"FusedSwiGLU needs an even size as last dimension, got {size}")
        return (TensorType(self.cast_to or x.dtype, Shape((*shape[:-1], size // 2))),)


def _along_axis(op: Op, inputs: OpTypes, axis: int, names: tuple[str, ...]) -> TensorType:
    """Check that the inputs after x are vectors as long as x is along the axis; return the type of x."""
    same_dtype(op, inputs, names)
    x = tensor_input(op, inputs, 0, names[0])
    expect_float(op, x, names[0])
    shape = known_shape(op, x, names[0])
    size = shape[normal_axis(op, axis, shape.rank)]
    for index, name in enumerate(names[1:], 1):
        (length,) = expect_rank(op, tensor_input(op, inputs, index, name), (1,), name)
        expect_dim(op, length, size, f"the size of {name}")
    return x


def _residual(op: Op, inputs: OpTypes, has_bias: bool) -> TensorType:
    names = ("x", "residual", "bias", "gamma", "beta") if has_bias else ("x", "residual", "gamma", "beta")
    if len(inputs) != len(names):
        raise GraphVerifyError(f"{op.describe()} takes {', '.join(names)}; got {len(inputs)} inputs")
    dtype = same_dtype(op, inputs, names)
    shapes = [tensor_input(op, inputs, index, names[index]).shape for index in range(len(names) - 2)]
    total = TensorType(dtype, broadcast(op, shapes))
    return _along_axis(op, (total, *inputs[-2:]), -1, ("x", "gamma", "beta"))


class NormBuilders(LeafBuilders):
    """Builders of the normalisations."""

    __slots__ = ()

    def layer_norm(
        self,
        input: Operand,
        gamma: Operand,
        beta: Operand,
        axis: int = -1,
        eps: float = 1e-5,
        *,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Normalise along one axis to mean 0 and variance 1, then scale and shift.

        Raises:
            GraphVerifyError: gamma or beta is not as long as the axis.
        """
        return self._norm(LayerNorm(axis, eps), input, gamma, beta, shape=shape, name=name)

    def rms_norm(
        self,
        input: Operand,
        gamma: Operand,
        beta: Operand | None = None,
        eps: float = 1e-5,
        axis: int = -1,
        *,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Divide by the root of the mean square along one axis, then scale and shift; no beta means zeros."""
        x = self._as_value(input)
        scale = self._as_value(gamma, x)
        shift = self._zeros_like(scale) if beta is None else beta
        return self._norm(RmsNorm(axis, eps), x, scale, shift, shape=shape, name=name)

    def layer_norm2d(
        self, input: Operand, gamma: Operand, beta: Operand, eps: float = 1e-5, *, name: str | None = None
    ) -> Value:
        """Normalise the channels of each pixel of an `(N, C, H, W)` image."""
        return self._norm(LayerNorm2d(eps), input, gamma, beta, name=name)

    def group_norm(
        self,
        input: Operand,
        gamma: Operand,
        beta: Operand,
        num_groups: int,
        eps: float = 1e-5,
        *,
        name: str | None = None,
    ) -> Value:
        """Normalise groups of channels of an `(N, C, ...)` tensor."""
        return self._norm(GroupNorm(num_groups, eps), input, gamma, beta, name=name)

    def batch_norm_inference(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand,
        mean: Operand,
        variance: Operand,
        eps: float = 1e-5,
        *,
        name: str | None = None,
    ) -> Value:
        """Normalise each channel of an `(N, C, ...)` tensor with given statistics."""
        return self._norm(BatchNormInference(eps), input, scale, bias, mean, variance, name=name)

    def fused_residual_ln(
        self,
        x: Operand,
        residual: Operand,
        bias: Operand | None,
        gamma: Operand,
        beta: Operand,
        eps: float = 1e-5,
        *,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Return the layer normalisation of x + residual [+ bias] along the last axis."""
        extra = () if bias is None else (bias,)
        op = FusedResidualLN(bias is not None, eps)
        return self._norm(op, x, residual, *extra, gamma, beta, shape=shape, name=name)

    def fused_residual_rms_norm(
        self,
        x: Operand,
        residual: Operand,
        bias: Operand | None,
        gamma: Operand,
        beta: Operand | None = None,
        eps: float = 1e-5,
        *,
        shape: Iterable[Dim] | None = None,
        name: str | None = None,
    ) -> Value:
        """Return the RMS normalisation of x + residual [+ bias] along the last axis; no beta means zeros."""
        extra = () if bias is None else (bias,)
        scale = self._as_value(gamma, x if isinstance(x, Value) else None)
        shift = self._zeros_like(scale) if beta is None else beta
        op = FusedResidualRmsNorm(bias is not None, eps)
        return self._norm(op, x, residual, *extra, scale, shift, shape=shape, name=name)

    def fused_swiglu(
        self,
        x: Operand,
        gate_first: bool = False,
        cast_to: DType | str | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """Return up * silu(gate) of the two halves of the last dimension."""
        op = FusedSwiGLU(gate_first, None if cast_to is None else DType.parse(cast_to))
        return self._add(op, self._as_value(x), name=name)

    def _norm(
        self, op: Op, input: Operand, *rest: Operand, shape: Iterable[Dim] | None = None, name: str | None = None
    ) -> Value:
        """Add a node whose arrays and numbers take the dtype of the input."""
        x = self._as_value(input)
        return self._add(op, x, *(self._as_value(item, x) for item in rest), shape=shape, name=name)

    def _zeros_like(self, vector: Value) -> Value:
        return self.constant(np.zeros(vector.shape.static()), vector.dtype)
