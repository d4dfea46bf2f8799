"""Reductions along axes, normalisations and the blocks fused around them, and the drawing of tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder, preset
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, known_shape, named, tensor_input
from rlx_ort.ir.types import Shape, TensorType, ValueType

REDUCTIONS = ("sum", "mean", "max", "min", "prod")
"""Names of the reductions."""
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
"""Multipliers of Philox4x32: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011."""
PHILOX_ROUNDS = 10
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_DEFAULT_SEED = 0xDEADBEEF
_RESULT_DTYPES = (DType.I32, DType.I64, DType.U32, DType.F32)


class Reduce(Op, operands="x:number"):
    """A reduction over axes, which become 1 or are removed; without axes the input is unchanged."""

    function: str = named("reduction", REDUCTIONS)
    axes: tuple[int, ...]
    keep_dim: bool = False

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(x.dtype, _reduced(self, x, self.axes, self.keep_dim))


class Softmax(Op, operands="x:float", builder="softmax input axis"):
    """exp(x) along an axis, scaled to the sum 1."""

    axis: int = -1

    def _result(self, x: TensorType) -> None:
        if x.shape is not None:
            self.normal_axis(self.axis, x.shape.rank)


class Cumsum(Op, operands="x:number", builder="cumsum input axis exclusive reverse"):
    """The running sum along an axis; `exclusive` leaves the element itself out, `reverse` runs from the end."""

    axis: int
    exclusive: bool = False
    reverse: bool = False

    def _result(self, x: TensorType) -> None:
        if x.shape is not None:
            self.normal_axis(self.axis, x.shape.rank)


class TopK(Op, operands="x:number", builder="topk"):
    """Indices of the k largest elements along the last axis, largest first; equal elements in order of index."""

    k: int
    dtype: DType = DType.I64

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        size = shape[self.normal_axis(-1, shape.rank)]
        if self.k < 0 or (isinstance(size, int) and self.k > size):
            raise GraphVerifyError(f"TopK of {self.k} along a dimension of {size}")
        return TensorType(self.dtype, Shape((*shape[:-1], self.k)))


class _Extremum(Op, operands="x:number"):
    """Base of the ops that return the index (i64) of an element along an axis, the first one of equals."""

    axis: int = -1
    keep_dim: bool = False

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(DType.I64, _reduced(self, x, (self.axis,), self.keep_dim))


class ArgMax(_Extremum, builder="argmax"):
    """The index (i64) of the largest element along an axis, the first one of equals."""


class ArgMin(_Extremum, builder="argmin"):
    """The index (i64) of the smallest element along an axis, the first one of equals."""


def _reduced(op: Op, x: TensorType, axes: Sequence[int], keep_dim: bool) -> Shape:
    shape = known_shape(op, x, "x")
    gone = op.axis_tuple(axes, shape.rank)
    if keep_dim:
        return Shape(1 if axis in gone else dim for axis, dim in enumerate(shape))
    return Shape(dim for axis, dim in enumerate(shape) if axis not in gone)


class _Norm(Op, operands="x gamma beta"):
    """Base of the normalisations along one axis: the channels, unless the axis is an attribute."""

    axis = 1

    def _result(self, x: TensorType, *vectors: TensorType) -> None:
        _along_axis(self, x, vectors, self.axis)


class LayerNorm(_Norm, builder="layer_norm input gamma beta axis eps"):
    """(x - mean) / sqrt(variance + eps) * gamma + beta along one axis, with the biased variance."""

    axis: int = -1
    eps: float = 1e-5


class RmsNorm(_Norm, builder="rms_norm input gamma beta:zeros eps axis"):
    """x / sqrt(mean(x * x) + eps) * gamma + beta along one axis."""

    axis: int = -1
    eps: float = 1e-5


class LayerNorm2d(_Norm, builder="layer_norm2d input gamma beta eps"):
    """Layer normalisation over the channels of each pixel of an `(N, C, H, W)` image."""

    eps: float = 1e-5

    def _result(self, x: TensorType, *vectors: TensorType) -> None:
        self.expect_rank(x, (4,), "x")
        _along_axis(self, x, vectors, 1)


class GroupNorm(_Norm, builder="group_norm input gamma beta num_groups eps"):
    """Normalisation over groups of channels of an `(N, C, ...)` tensor, then gamma and beta a channel."""

    num_groups: int
    eps: float = 1e-5

    def _result(self, x: TensorType, *vectors: TensorType) -> None:
        channels = self.expect_rank(x, range(3, 9), "x")[1]
        if not isinstance(channels, int) or self.num_groups < 1 or channels % self.num_groups:
            raise GraphVerifyError(f"GroupNorm cannot divide {channels} channels into {self.num_groups} groups")
        _along_axis(self, x, vectors, 1)


class BatchNormInference(
    _Norm, operands="x scale bias mean variance", builder="batch_norm_inference input scale bias mean variance eps"
):
    """(x - mean) / sqrt(variance + eps) * scale + bias a channel, with given statistics, of `(N, C, ...)`."""

    eps: float = 1e-5


class _ResidualNorm(Op):
    """Base of the normalisations of x + residual [+ bias] along the last axis; the sum itself is no result."""

    has_bias: bool = False
    eps: float = 1e-5

    arity = (4, 5)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the sum."""
        names = ("x", "residual", "bias", "gamma", "beta") if self.has_bias else ("x", "residual", "gamma", "beta")
        if len(inputs) != len(names):
            raise GraphVerifyError(f"{self.describe()} takes {', '.join(names)}; got {len(inputs)} inputs")
        tensors = [tensor_input(self, inputs, place, name) for place, name in enumerate(names)]
        dtype = self.same_dtype(*tensors, names=names)
        total = TensorType(dtype, self.broadcast([value.shape for value in tensors[:-2]]))
        _along_axis(self, total, tensors[-2:], -1, names[-2:])
        return (total,)


class FusedResidualLN(_ResidualNorm, builder="fused_residual_ln x residual bias? gamma beta! eps"):
    """LayerNorm(x + residual [+ bias]) along the last axis; the sum itself is no result."""


class FusedResidualRmsNorm(_ResidualNorm, builder="fused_residual_rms_norm x residual bias? gamma beta:zeros eps"):
    """RmsNorm(x + residual [+ bias]) along the last axis; the sum itself is no result."""


class FusedSwiGLU(Op, operands="x:float", builder="fused_swiglu"):
    """up * silu(gate), where the last dimension holds up then gate, or gate then up.

    `cast_to` is the dtype of the result, None for that of the input.
    """

    gate_first: bool = False
    cast_to: DType | None = None

    def _result(self, x: TensorType) -> TensorType:
        shape = known_shape(self, x, "x")
        size = shape[self.normal_axis(-1, shape.rank)]
        if not isinstance(size, int) or size % 2:
            raise GraphVerifyError(f"FusedSwiGLU needs an even size as last dimension, got {size}")
        return TensorType(self.cast_to or x.dtype, Shape((*shape[:-1], size // 2)))


def _along_axis(
    op: Op, x: TensorType, vectors: Sequence[TensorType], axis: int, names: Sequence[str] | None = None
) -> None:
    """Check that the vectors are as long as x is along the axis."""
    names = op.operands[1:] if names is None else names
    op.same_dtype(x, *vectors, names=("x", *names))
    op.expect_float(x, "x")
    shape = known_shape(op, x, "x")
    size = shape[op.normal_axis(axis, shape.rank)]
    for vector, name in zip(vectors, names, strict=True):
        (length,) = op.expect_rank(vector, (1,), name)
        op.expect_dim(length, size, f"the size of {name}")


class Sample(Op, operands="logits:float", builder="sample logits top_k top_p temperature seed output_shape dtype"):
    """One token of each row of logits `(B, V)` or `(V,)`, drawn by the seed: the same seed gives the same tokens.

    The logits are divided by the temperature (1e-6 at least). Those below the k-th largest are dropped; ties with it
    stay. Then the most likely tokens are kept until their probabilities add up to `top_p`. Row i uses the i-th number
    of the generator Philox4x32-10 with the seed as key (0 stands for 0xDEADBEEF). Its token is the first one, in index
    order, at which the running sum of the remaining probabilities exceeds that number.

    The sums are taken over probabilities rounded to units of 2^-30, so they do not depend on the order in which a
    provider adds; probabilities may differ in their last bit between providers, which can change a token only if
    the number falls within about 1e-5 of a boundary. A temperature of 0 takes the most likely token.
    """

    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    seed: int = 0
    dtype: DType = DType.I32

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0 <= self.top_p <= 1 or not self.temperature >= 0 or not 0 <= self.seed < 1 << 64:
            raise GraphVerifyError(
                f"{self.describe()} needs top_k of 0 or more, top_p from 0 to 1, a temperature of 0 or more and a seed "
                "of 64 bits"
            )
        if self.dtype not in _RESULT_DTYPES:
            known = ", ".join(dtype.value for dtype in _RESULT_DTYPES)
            raise GraphVerifyError(f"Sample cannot give token ids as {self.dtype.value}; known: {known}")

    def _result(self, logits: TensorType) -> TensorType:
        shape = self.expect_rank(logits, (1, 2), "logits")
        if not isinstance(shape[-1], int) or not 0 < shape[-1] < 1 << 24:
            raise GraphVerifyError(f"Sample needs logits of 1 to 2^24 - 1 tokens, their number known, got {shape}")
        return TensorType(self.dtype, Shape(shape[:-1]))


def round_keys(seed: int) -> list[tuple[int, int]]:
    """Return the two key words of each round; the low word of the seed is the first one."""
    seed = seed or _DEFAULT_SEED
    low, high = seed & _WORD, seed >> 32
    return [((low + turn * _WEYL[0]) & _WORD, (high + turn * _WEYL[1]) & _WORD) for turn in range(PHILOX_ROUNDS)]


def uniforms(seed: int, count: int) -> npt.NDArray[np.float32]:
    """Return the first numbers of a seed's stream, in [0, 1): the upper 24 bits of each word, exact in f32."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    word = np.uint64(_WORD)
    a, b = blocks & word, blocks >> np.uint64(32)
    c, d = np.zeros_like(a), np.zeros_like(a)
    for first, second in round_keys(seed):
        left, right = np.uint64(PHILOX_FACTORS[0]) * a, np.uint64(PHILOX_FACTORS[1]) * c
        a, b, c, d = (
            (right >> np.uint64(32)) ^ b ^ np.uint64(first),
            right & word,
            (left >> np.uint64(32)) ^ d ^ np.uint64(second),
            left & word,
        )
    words = np.stack([a, b, c, d], axis=1).reshape(-1)[:count]
    return ((words >> np.uint64(8)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _reduction(
    graph: Graph,
    function: str,
    x: Operand,
    axes: int | Sequence[int] | None = None,
    keep_dim: bool = False,
    **node: Unpack[NodeArgs],
) -> Value:
    return graph.reduce(x, function, axes, keep_dim, **node)


@builder
def reduce(
    graph: Graph,
    input: Operand,
    op: str,
    axes: int | Sequence[int] | None,
    keep_dim: bool = False,
    **node: Unpack[NodeArgs],
) -> Value:
    """Reduce over axes by name (`REDUCTIONS`); None means all axes, an empty list none."""
    x = graph._as_value(input)
    chosen = range(x.rank) if axes is None else (axes,) if isinstance(axes, int) else axes
    return graph._add(Reduce(op, tuple(chosen), keep_dim), x, **node)


for _name, _doc in {
    "sum": "Return the sum over axes.",
    "mean": "Return the mean over axes; integers drop the fraction.",
    "max": "Return the largest element over axes.",
    "min": "Return the smallest element over axes.",
    "prod": "Return the product over axes.",
}.items():
    preset(_reduction, _name, **{_name: _doc})
