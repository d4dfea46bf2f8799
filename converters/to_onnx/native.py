"""Native forms: ops that ONNX Runtime has one fused kernel for. Each checks what the kernel cannot do before it writes.

The fused operators are ONNX Runtime's own:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.dispatch import NoNativeForm, lowers_native
from rlx_ort.converters.to_onnx.elementwise import activate, add_unless_zeros, gated
from rlx_ort.converters.to_onnx.emitter import Emitter
from rlx_ort.converters.to_onnx.shape import reshape, slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.attention import Attention, Rope
from rlx_ort.ir.ops.elementwise import Activation
from rlx_ort.ir.ops.linalg import FusedMatMulBiasAct
from rlx_ort.ir.ops.norm import FusedResidualLN, FusedResidualRmsNorm, FusedSwiGLU, RmsNorm
from rlx_ort.ir.types import Shape, TensorType

_CONTRIB = "com.microsoft"
_FUSED_GELU = {"gelu": "BiasGelu", "gelu_approx": "FastGelu"}


@lowers_native(Activation, when=lambda op: op.function in {"silu", "hard_swish"})
def _activation(emit: Emitter, op: Activation, inputs: Sequence[Any]) -> Any:
    kind = emit.input_type(0)
    if op.function == "silu":
        emit.require_kernel("QuickGelu", kind, domain=_CONTRIB)
        return emit.op("QuickGelu", inputs[0], domain=_CONTRIB, alpha=1.0)
    emit.require_kernel("HardSwish", kind)
    return emit.op("HardSwish", inputs[0])


@lowers_native(FusedSwiGLU)
def _swiglu(emit: Emitter, op: FusedSwiGLU, inputs: Sequence[Any]) -> Any:
    emit.require_kernel("QuickGelu", emit.input_type(0), domain=_CONTRIB)
    return gated(emit, op, inputs[0], lambda gate: emit.op("QuickGelu", gate, domain=_CONTRIB, alpha=1.0))


@lowers_native(RmsNorm)
def _rms_norm(emit: Emitter, op: RmsNorm, inputs: Sequence[Any]) -> Any:
    x, gamma, beta = inputs
    kind = emit.input_type(0)
    rank = known_shape(op, kind, "x").rank
    if op.axis % rank != rank - 1:
        raise NoNativeForm(f"the kernel normalises the last axis, not axis {op.axis}")
    # Of ai.onnx's first opset by ONNX Runtime's own reckoning; ONNX has RMSNormalization from opset 23 on.
    emit.require_kernel("SimplifiedLayerNormalization", kind, emit.input_type(1))
    result = emit.op("SimplifiedLayerNormalization", x, gamma, types=[kind], axis=-1, epsilon=op.eps, stash_type=1)
    return add_unless_zeros(emit, result, beta, 2)


@lowers_native(FusedResidualLN)
@lowers_native(FusedResidualRmsNorm)
def _residual(emit: Emitter, op: FusedResidualLN | FusedResidualRmsNorm, inputs: Sequence[Any]) -> Any:
    x, residual, *bias, gamma, beta = inputs
    kind, *others = emit.input_types
    shape = known_shape(op, kind, "x")
    if kind.dtype is DType.F64:
        raise NoNativeForm("ONNX Runtime has a kernel for f64, but its checker does not let f64 through to it")
    if shape.rank not in {2, 3}:
        raise NoNativeForm(f"the kernel takes rank 2 or 3, x is {kind}")
    if others[0].shape != shape or None in shape:
        raise NoNativeForm(f"the kernel takes no broadcast, x is {kind} and the residual {others[0]}")
    if op.has_bias and known_shape(op, others[1], "bias") != Shape(shape[-1:]):
        raise NoNativeForm(f"the kernel takes a bias along the last axis, it is {others[1]}")
    full = isinstance(op, FusedResidualLN)
    op_type = "SkipLayerNormalization" if full else "SkipSimplifiedLayerNormalization"
    emit.require_kernel(op_type, kind, *others, domain=_CONTRIB)
    affine = (gamma, beta) if full else (gamma,)
    result = emit.op(op_type, x, residual, *affine, *bias, domain=_CONTRIB, types=[kind], epsilon=op.eps)
    return result if full else add_unless_zeros(emit, result, beta, len(inputs) - 1)


@lowers_native(FusedMatMulBiasAct)
def _fused_matmul(emit: Emitter, op: FusedMatMulBiasAct, inputs: Sequence[Any]) -> Any:
    """Gemm and the activation for matrices; for a gelu of any rank, MatMul and a gelu that adds the bias."""
    kinds = emit.input_types
    dtype = kinds[0].dtype
    gelu = _FUSED_GELU.get(op.activation or "")
    if gelu is not None:
        emit.require_kernel(gelu, kinds[0], kinds[2], domain=_CONTRIB)
        return emit.op(gelu, emit.op("MatMul", *inputs[:2]), inputs[2], domain=_CONTRIB)
    if any(known_shape(op, kind, name).rank != 2 for kind, name in zip(kinds[:2], ("x", "weight"), strict=True)):
        raise NoNativeForm(f"Gemm takes matrices, x is {kinds[0]} and the weight {kinds[1]}")
    emit.require_kernel("Gemm", *kinds)
    result = emit.op("Gemm", *inputs)
    return result if op.activation is None else activate(emit, op.activation, result, dtype)


@lowers_native(Rope)
def _rope(emit: Emitter, op: Rope, inputs: Sequence[Any]) -> Any:
    kinds = emit.input_types
    shape = known_shape(op, kinds[0], "x")
    tables = [known_shape(op, kind, "table") for kind in kinds[1:]]
    if any(table.rank != 2 for table in tables):
        raise NoNativeForm("the kernel takes one table for all sequences")
    if any(not isinstance(dim, int) for table in tables for dim in table) or tables[0] != tables[1]:
        raise NoNativeForm("the kernel takes tables of one known size")
    place = TensorType(DType.I64, Shape([1]))
    emit.require_kernel("RotaryEmbedding", kinds[0], place, *kinds[1:], domain=_CONTRIB)
    cos, sin = inputs[1:]
    if op.rotated < op.head_dim:
        cos, sin = (slice_axis(emit, table, -1, 0, op.rotated // 2) for table in (cos, sin))
    x = emit.op("Unsqueeze", inputs[0], emit.i64([0])) if shape.rank == 2 else inputs[0]
    width = shape[-1]
    result = emit.op(
        "RotaryEmbedding",
        *(x, emit.i64([0]), cos, sin),  # one position: that of the first place, 0
        domain=_CONTRIB,
        interleaved=int(op.interleaved),
        num_heads=width // op.head_dim if isinstance(width, int) else 0,
        rotary_embedding_dim=op.rotated if op.rotated < op.head_dim else 0,
    )
    return emit.op("Squeeze", result, emit.i64([0])) if shape.rank == 2 else result


@lowers_native(Attention)
def _attention(emit: Emitter, op: Attention, inputs: Sequence[Any]) -> Any:
    """MultiHeadAttention, in the cases in which it is known to agree with the common form."""
    kinds = [emit.input_type(index) for index in range(3)]
    layouts = op.layouts(kinds)
    queries, keys = layouts[0].length, layouts[1].length
    if op.mask_kind not in {"none", "causal"}:
        raise NoNativeForm(f"the kernel's masks differ from mask kind {op.mask_kind!r}")
    # With more keys than queries the kernel aligns its mask neither at the top left nor at the bottom right.
    if op.mask_kind == "causal" and (not isinstance(queries, int) or queries != keys):
        raise NoNativeForm(f"a causal mask needs as many queries as keys, known beforehand; got {queries} and {keys}")
    if op.softcap is not None:
        raise NoNativeForm("the kernel has no softcap")
    if any(layout.heads_first for layout in layouts):
        raise NoNativeForm("the kernel takes heads last, as (B, S, H * D)")
    shapes = [known_shape(op, kind, name) for kind, name in zip(kinds, "qkv", strict=True)]
    flat = [Shape((layout.batch, layout.length, op.num_heads * op.head_dim)) for layout in layouts]
    types = [TensorType(kinds[0].dtype, shape) for shape in flat]
    emit.require_kernel("MultiHeadAttention", *types, domain=_CONTRIB)
    result = emit.op(
        "MultiHeadAttention",
        *(_as_shape(emit, *ends) for ends in zip(inputs, shapes, flat, strict=True)),
        domain=_CONTRIB,
        types=types[:1],
        num_heads=op.num_heads,
        unidirectional=int(op.mask_kind == "causal"),
        scale=1 / math.sqrt(op.head_dim) if op.scale is None else op.scale,
    )
    return _as_shape(emit, result, flat[0], shapes[0])


def _as_shape(emit: Emitter, value: Any, source: Shape, target: Shape) -> Any:
    return value if source == target else reshape(emit, value, source, target)
