"""Which measured operator each ONNX operator is priced like, and how many times as much it does an element.

Operators that are not listed are priced as twice an addition. A factor is a rough count of passes over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["CLASSES", "COPIES", "VIEWS", "OpClass"]


class OpClass(NamedTuple):
    """How an operator is priced.

    `kind` is a formula (`gemm`, `conv`, `attention`, `rnn`) or `op` for a price by elements; `like` is the measured
    operator; `factor` multiplies the elements.
    """

    kind: str
    like: str
    factor: float = 1.0


_TABLE = (
    ("gemm", "MatMul", 1, "MatMul Gemm FusedMatMul FusedGemm MatMulInteger QLinearMatMul QGemm MatMulNBits MatMulBnb4"),
    ("gemm", "MatMul", 1, "DynamicQuantizeMatMul MatMulIntegerToFloat GemmFloat8 MatMulFpQ4 GemmFastGelu Einsum"),
    ("gemm", "MatMul", 1, "TransposeMatMul QMoE MoE"),
    ("conv", "Conv", 1, "Conv ConvTranspose FusedConv ConvInteger QLinearConv DeformConv NhwcConv NhwcFusedConv"),
    ("attention", "Attention", 1, "Attention MultiHeadAttention GroupQueryAttention PackedAttention"),
    ("attention", "Attention", 1, "DecoderMaskedMultiHeadAttention PackedMultiHeadAttention SparseAttention"),
    ("rnn", "LSTM", 1, "LSTM GRU RNN DynamicQuantizeLSTM AttnLSTM"),
    ("op", "Add", 1, "Add Sub Max Min Sum Mean And Or Xor Not Neg Abs Ceil Floor Round Sign Less Greater Equal"),
    ("op", "Add", 1, "LessOrEqual GreaterOrEqual BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift Mod IsNaN IsInf"),
    ("op", "Mul", 1, "Mul"),
    ("op", "Div", 1, "Div Reciprocal"),
    ("op", "Relu", 1, "Relu LeakyRelu PRelu Clip ThresholdedRelu HardSigmoid HardSwish Shrink"),
    ("op", "Sigmoid", 1, "Sigmoid Selu Elu Celu Softplus Softsign QuickGelu Swish SwiGLU Bernoulli"),
    ("op", "Tanh", 1, "Tanh FastGelu"),
    ("op", "Exp", 1, "Exp Log"),
    ("op", "Sqrt", 1, "Sqrt"),
    ("op", "Erf", 1, "Erf"),
    ("op", "Gelu", 1, "Gelu BiasGelu Mish"),
    ("op", "Sin", 1, "Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh"),
    ("op", "Pow", 1, "Pow"),
    ("op", "Where", 1, "Where"),
    ("op", "Cast", 1, "Cast CastLike QuantizeLinear DequantizeLinear DynamicQuantizeLinear"),
    ("op", "Softmax", 1, "Softmax LogSoftmax Hardmax BiasSoftmax"),
    ("op", "LayerNormalization", 1, "LayerNormalization SkipLayerNormalization SimplifiedLayerNormalization"),
    ("op", "LayerNormalization", 1, "RMSNormalization SkipSimplifiedLayerNormalization EmbedLayerNormalization"),
    ("op", "LayerNormalization", 1.5, "InstanceNormalization GroupNormalization GroupNorm SkipGroupNorm"),
    ("op", "LayerNormalization", 1, "MeanVarianceNormalization LpNormalization"),
    ("op", "Mul", 1, "BatchNormalization RotaryEmbedding"),
    ("op", "Mul", 4, "LRN"),
    ("op", "ReduceMean", 1, "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum"),
    ("op", "ReduceMean", 1, "ReduceLogSumExp ReduceSumSquare ArgMax ArgMin GlobalAveragePool GlobalMaxPool"),
    (
        "op",
        "ReduceMean",
        2,
        "CumSum CumProd AveragePool MaxPool LpPool GlobalLpPool NonZero Compress QLinearAveragePool",
    ),
    ("op", "ReduceMean", 8, "TopK Unique NonMaxSuppression Multinomial Sampling"),
    ("op", "Transpose", 1, "Transpose DepthToSpace SpaceToDepth Col2Im"),
    ("op", "Transpose", 2, "Resize Upsample GridSample RoiAlign AffineGrid CenterCropPad ImageDecoder"),
    ("op", "Gather", 1, "Gather GatherElements GatherND OneHot EmbedLayer ReverseSequence GatherBlockQuantized"),
    ("op", "Gather", 1.5, "ScatterElements ScatterND Scatter TensorScatter"),
    ("op", "Concat", 1, "Concat Split Slice Pad Tile Expand ConcatFromSequence SplitToSequence Trilu EyeLike"),
    ("op", "Concat", 1, "ConstantOfShape Range RandomNormal RandomUniform RandomNormalLike RandomUniformLike"),
    ("op", "Sin", 6, "DFT STFT MelWeightMatrix Det Inverse HannWindow HammingWindow BlackmanWindow"),
)


def _entries() -> Iterator[tuple[str, OpClass]]:
    for kind, like, factor, names in _TABLE:
        for name in names.split():
            yield name, OpClass(kind, like, factor)


CLASSES: Mapping[str, OpClass] = MappingProxyType(dict(_entries()))
"""ONNX operator -> how it is priced."""

VIEWS = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Optional", "OptionalGetElement", "Shape", "Size"}
)
"""Operators that only rename memory or read a shape."""

COPIES = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split", "OneHot", "GatherBlockQuantized"})
"""Operators that read only what they write, however large their input is."""
