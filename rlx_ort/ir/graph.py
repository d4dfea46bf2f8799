"""`Graph`: what a user builds. Each op family brings its builders as a base class."""

from __future__ import annotations

from collections.abc import Mapping

from rlx_ort.ir.core import GraphCore, Node, Ref, Value
from rlx_ort.ir.op import op_kinds
from rlx_ort.ir.ops.attention import AttentionBuilders
from rlx_ort.ir.ops.blocks import BlockBuilders
from rlx_ort.ir.ops.control import ControlBuilders
from rlx_ort.ir.ops.conv import ConvBuilders
from rlx_ort.ir.ops.dequant import DequantBuilders
from rlx_ort.ir.ops.elementwise import ElementwiseBuilders
from rlx_ort.ir.ops.indexing import IndexingBuilders
from rlx_ort.ir.ops.linalg import LinalgBuilders
from rlx_ort.ir.ops.moe import MoeBuilders
from rlx_ort.ir.ops.norm import NormBuilders
from rlx_ort.ir.ops.onnx import OnnxBuilders
from rlx_ort.ir.ops.quant import QuantBuilders
from rlx_ort.ir.ops.reduce import ReduceBuilders
from rlx_ort.ir.ops.sample import SampleBuilders
from rlx_ort.ir.ops.sequence import SequenceBuilders
from rlx_ort.ir.ops.shape import ShapeBuilders
from rlx_ort.ir.ops.signal import SignalBuilders
from rlx_ort.ir.rewrite import bind_dims

__all__ = ["Graph", "Node", "Ref", "Value", "op_kinds"]


class Graph(
    SignalBuilders,
    ElementwiseBuilders,
    LinalgBuilders,
    ReduceBuilders,
    ShapeBuilders,
    NormBuilders,
    ConvBuilders,
    AttentionBuilders,
    ControlBuilders,
    SequenceBuilders,
    SampleBuilders,
    QuantBuilders,
    DequantBuilders,
    MoeBuilders,
    IndexingBuilders,
    BlockBuilders,
    OnnxBuilders,
):
    """A computation: inputs and weights, ops in topological order, and outputs.

    Each op has a builder, a method that adds a node and returns its value. Builders take values, and numbers and
    arrays, which become constants. The node's `name` and a declared `shape` are keywords of every builder of one value.
    A builder raises `GraphVerifyError` if its arguments do not fit the op or each other.

    Example:
        >>> g = Graph("mlp")
        >>> x = g.input("x", ["batch", 4])
        >>> w = g.param("w", [4, 2])
        >>> g.outputs = [g.relu(x @ w)]
    """

    __slots__ = ("__weakref__",)

    def bind(self, sizes: Mapping[str, int]) -> Graph:
        """Return a copy in which the named dims that are keys of `sizes` have those sizes; node ids stay."""
        return bind_dims(self, sizes)


GraphCore.graph_class = Graph
