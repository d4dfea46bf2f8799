"""Which class of a precision policy each op belongs to; what is not listed has none and always stays f32.

Left out on purpose: sorting and sampling (near values would change places), Fourier transforms, linear solvers,
recurrences and loops (errors grow with each step), quantised products (they choose their own types), and casts.
"""

from __future__ import annotations

from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.options.precision import OpClass

__all__ = ["KIND_CLASSES", "ONNX_CLASSES", "class_of"]


def _table(rows: dict[OpClass, str]) -> dict[str, OpClass]:
    return {name: op_class for op_class, names in rows.items() for name in names.split()}


KIND_CLASSES = _table(
    {
        OpClass.COMPUTE: """
            Attention Conv2d Conv3d ConvTranspose2d DotGeneral FusedMatMulBiasAct GroupedMatMul
            GroupedQueryAttention LoraMatMul MatMul
        """,
        OpClass.REDUCTION: """
            BatchNormInference Cumsum FusedResidualLN FusedResidualRmsNorm GroupNorm LayerNorm LayerNorm2d Pool
            Reduce RmsNorm Softmax
        """,
        OpClass.ELEMENTWISE: """
            Activation AxialRope2d Binary Clamp Compare Fma FusedSwiGLU Rope StopGradient Where
        """,
        OpClass.DATA_MOVEMENT: """
            Concat Expand Gather GatherElements GatherNd Im2Col Narrow Pad Reshape ResizeNearest2x Reverse Slice Tile
            Transpose Trilu
        """,
    }
)
"""Kind of op -> its class."""

ONNX_CLASSES = _table(
    {
        OpClass.COMPUTE: "Conv ConvTranspose Einsum Gemm MatMul",
        OpClass.REDUCTION: """
            AveragePool BatchNormalization CumSum GlobalAveragePool GlobalMaxPool GroupNormalization
            InstanceNormalization LayerNormalization LogSoftmax LpNormalization MaxPool Mean ReduceL1 ReduceL2
            ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
            RMSNormalization Softmax Sum
        """,
        OpClass.ELEMENTWISE: """
            Abs Add Ceil Celu Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish
            LeakyRelu Less LessOrEqual Log Max Min Mish Mul Neg Pow PRelu Reciprocal Relu Round Selu Sigmoid Sign Sin
            Softplus Softsign Sqrt Sub Swish Tan Tanh ThresholdedRelu Where
        """,
        OpClass.DATA_MOVEMENT: """
            Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Resize
            ScatterElements ScatterND Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze
        """,
    }
)
"""Operator of ai.onnx -> its class."""


def class_of(op: Op) -> OpClass | None:
    """Return the class of an op, or None for one that stays f32; ops with bodies and foreign operators do."""
    if op.bodies():
        return None
    if isinstance(op, OnnxNode):
        return ONNX_CLASSES.get(op.op_type) if op.domain == "" and not op.overload else None
    return KIND_CLASSES.get(op.kind)
