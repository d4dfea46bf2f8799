"""ONNX forms of the blocks: that of the graph each one stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.ir.bodies import Composite
from rlx_ort.ir.ops.blocks import (
    AdaLayerNorm,
    AxialRope2d,
    FusedAttentionBlock,
    FusedConvBiasAct,
    FusedTransformerLayer,
    GatedResidual,
    GroupedQueryAttention,
    SoftmaxCrossEntropyWithLogits,
)

__all__: list[str] = []


@lowers(AdaLayerNorm)
@lowers(AxialRope2d)
@lowers(FusedAttentionBlock)
@lowers(FusedConvBiasAct)
@lowers(FusedTransformerLayer)
@lowers(GatedResidual)
@lowers(GroupedQueryAttention)
@lowers(SoftmaxCrossEntropyWithLogits)
def _composite(emit: Emitter, op: Composite, inputs: Sequence[Any]) -> Any:
    body = op.expand([emit.input_type(index) for index in range(len(inputs))])
    return emit.inline(body, inputs)
