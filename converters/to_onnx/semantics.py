"""Operators whose meaning changed between opset versions in a way that their schemas do not show.

Everything the schemas do show (inputs, attributes, defaults, types) is compared by `rlx_ort.converters.to_onnx.opset`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["BREAKS", "RENAMED", "Break", "NodeForm", "is_redundant"]


@dataclass(frozen=True, slots=True)
class NodeForm:
    """What moving a node of ai.onnx between opset versions depends on.

    Attributes:
        op_type: the operator.
        attributes: name -> value.
        inputs: types of the inputs, None for absent ones.
        outputs: types of the outputs, None for absent ones.
    """

    op_type: str
    attributes: Mapping[str, Any]
    inputs: Sequence[ValueType | None]
    outputs: Sequence[ValueType | None]


@dataclass(frozen=True, slots=True)
class Break:
    """A node of the operator must not move across the version at which its meaning changed.

    Attributes:
        version: the first version with the new meaning.
        reason: what changed, from the operator's changelog: https://onnx.ai/onnx/operators/
        attributes: the change matters only for nodes that set one of these; empty means for all nodes.
        values: the change matters only when such an attribute has one of these values; empty means any value.
        fewer_inputs: the change matters only for nodes with fewer inputs than this; 0 means for all nodes.
        unless: an attribute and the value with which the meaning is the same on both sides.
    """

    version: int
    reason: str
    attributes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    fewer_inputs: int = 0
    unless: tuple[str, int] | None = None


_FLATTENS = Break(13, "before 13 the input was flattened to two dimensions at the axis")
_RECURRENT = Break(7, "activations and the direction of the output sequence were defined differently before 7")

BREAKS: dict[str, tuple[Break, ...]] = {
    "Attention": (Break(24, "the order of masking and soft capping in the intermediate output changed"),),
    "AveragePool": (Break(7, "padding was counted differently before 7", ("pads", "auto_pad")),),
    "BatchNormalization": (
        Break(7, "is_test was off by default before 7: the node trained", unless=("is_test", 1)),
        Break(9, "statistics were not per channel when spatial was 0", ("spatial",)),
    ),
    "Cast": (Break(6, "the target type was a string before 6"),),
    "ConvTranspose": (
        Break(11, "output_shape and SAME padding split the padding differently", ("auto_pad", "output_shape")),
    ),
    "DFT": (Break(20, "the axis is an input from 20 on and its default moved from 1 to -2"),),
    "Dropout": (Break(7, "is_test was off by default before 7: the node trained", unless=("is_test", 1)),),
    "GRU": (_RECURRENT,),
    "GridSample": (Break(20, "the modes were renamed: bilinear to linear, bicubic to cubic"),),
    "GroupNormalization": (Break(21, "scale and bias are per channel from 21 on, per group before"),),
    "Hardmax": (_FLATTENS,),
    "LSTM": (_RECURRENT,),
    "LogSoftmax": (_FLATTENS,),
    "Loop": (Break(11, "the condition may be absent from 11 on, with another meaning of the first iteration"),),
    "PRelu": (Break(7, "a slope vector was per channel before 7 and broadcasts from the right since"),),
    "RNN": (_RECURRENT,),
    "Resize": (
        Break(11, "the default coordinate transformation moved from asymmetric to half_pixel"),
        Break(13, "tf_half_pixel_for_nn is gone", ("coordinate_transformation_mode",), ("tf_half_pixel_for_nn",)),
    ),
    "RoiAlign": (Break(16, "the default coordinate transformation became half_pixel"),),
    "Scan": (Break(9, "the batch dimension went away"),),
    "Softmax": (_FLATTENS,),
    "Split": (Break(18, "without split sizes, num_outputs must be given", (), (), 2),),
    "Upsample": (Break(9, "scales became an input; deprecated from 10 on"),),
}
"""Operator of ai.onnx -> where its meaning changed."""

RENAMED = frozenset({("BatchNormalization", "mean", "input_mean"), ("BatchNormalization", "var", "input_var")})
"""(operator, old, new): inputs that only got another name."""

_BROADCASTING = {"Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor"}


def is_redundant(node: NodeForm, name: str) -> bool:
    """Return whether an attribute that later versions lack says what they do anyway.

    `consumed_inputs` was a hint about memory; `is_test=1` is what nodes without it do; broadcasting by attribute is
    numpy's broadcasting when the second input lines up with the last axes of the first.
    """
    if name == "consumed_inputs":
        return True
    if name == "is_test":
        return bool(node.attributes[name] == 1)
    if node.op_type == "Gemm" and name == "broadcast":
        return True
    if node.op_type not in _BROADCASTING or name not in ("axis", "broadcast"):
        return False
    if node.attributes.get("broadcast", 0) == 0 or "axis" not in node.attributes:
        return True
    ranks = [kind.shape.rank for kind in node.inputs if isinstance(kind, TensorType) and kind.shape is not None]
    return len(ranks) == 2 and bool(node.attributes["axis"] % max(ranks[0], 1) + ranks[1] == ranks[0])
