"""Operators whose meaning changed between opset versions in a way that their schemas do not show.

Everything the schemas do show (inputs, attributes, defaults, types) is compared by `rlx_ort.converters.to_onnx.opset`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BREAKS", "RENAMED", "Break"]


@dataclass(frozen=True, slots=True)
class Break:
    """A node of the operator must not move across the version at which its meaning changed.

    Attributes:
        version: the first version with the new meaning.
        reason: what changed, from the operator's changelog: https://onnx.ai/onnx/operators/
        attributes: the change matters only for nodes that set one of these; empty means for all nodes.
        values: the change matters only when such an attribute has one of these values; empty means any value.
        fewer_inputs: the change matters only for nodes with fewer inputs than this; 0 means for all nodes.
    """

    version: int
    reason: str
    attributes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    fewer_inputs: int = 0


_FLATTENS = Break(13, "before 13 the input was flattened to two dimensions at the axis")
_RECURRENT = Break(7, "activations and the direction of the output sequence were defined differently before 7")

BREAKS: dict[str, tuple[Break, ...]] = {
    "Attention": (Break(24, "the order of masking and soft capping in the intermediate output changed"),),
    "AveragePool": (Break(7, "count_include_pad came in 7; padding was counted differently before"),),
    "BatchNormalization": (
        Break(7, "is_test was off by default before 7: the node trained"),
        Break(9, "statistics were not per channel when spatial was 0", ("spatial",)),
    ),
    "Cast": (Break(6, "the target type was a string before 6"),),
    "ConvTranspose": (Break(11, "output_shape and SAME padding split the padding differently", ("auto_pad", "output_shape")),),
    "DFT": (Break(20, "the axis is an input from 20 on and its default moved from 1 to -2"),),
    "Dropout": (Break(7, "is_test was off by default before 7: the node trained"),),
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
