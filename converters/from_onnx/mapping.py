"""Which ONNX nodes become IR ops: only those that an IR op expresses exactly, and that it exports as the same node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlx_ort.converters.to_onnx.kernel_dtypes import compute_dtype
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.conv import Conv2d, ConvTranspose2d, Pool
from rlx_ort.ir.ops.elementwise import Activation, Binary, Cast, Clamp, Compare, StopGradient, Where
from rlx_ort.ir.ops.linalg import MatMul
from rlx_ort.ir.ops.norm import BatchNormInference, LayerNorm, Reduce, Softmax
from rlx_ort.ir.ops.shape import Concat, Gather, Reshape, Slice, Transpose
from rlx_ort.ir.types import Dim, Shape, TensorType, fits


@dataclass(frozen=True, slots=True)
class NodeView:
    """An ONNX node of ai.onnx whose inputs and outputs are all tensors of known rank; no input is absent.

    `version` is the opset version the node was written for. `constants` has the data of constant inputs, None for the
    others. `output` is the type of the first result; no other one is read.
    """

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: Sequence[TensorType]
    constants: Sequence[Any]
    output: TensorType

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or its default."""
        return self.attributes.get(name, default)

    def numbers(self, place: int) -> tuple[Any, ...] | None:
        """Return the elements of an input, None unless it is there and constant."""
        data = self.constants[place] if place < len(self.constants) else None
        return None if data is None else tuple(data.numpy().reshape(-1).tolist())

    @property
    def rank(self) -> int:
        """The rank of the first input."""
        shape = self.inputs[0].shape
        return 0 if shape is None else shape.rank


@dataclass(frozen=True, slots=True)
class MappedNode:
    """What a node becomes: an op on its first `inputs` inputs. `moves`: whether it replaces an older form."""

    op: Op
    inputs: int
    moves: bool = False


_Rule: TypeAlias = Callable[[NodeView], "MappedNode | None"]

_UNARY = {
    "Abs": "abs", "Atan": "atan", "Ceil": "ceil", "Cos": "cos", "Erf": "erf", "Exp": "exp", "Floor": "floor",
    "Log": "log", "Neg": "neg", "Reciprocal": "recip", "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid",
    "Sign": "sign", "Sin": "sin", "Softplus": "softplus", "Sqrt": "sqrt", "Tan": "tan", "Tanh": "tanh",
}  # fmt: skip
_BINARY = {"Add": "add", "Div": "div", "Max": "max", "Min": "min", "Mul": "mul", "Pow": "pow", "Sub": "sub"}
_COMPARE = {"Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le"}
_REDUCE = {"ReduceMax": "max", "ReduceMean": "mean", "ReduceMin": "min", "ReduceProd": "prod", "ReduceSum": "sum"}
# Lowerings of these compose f64 from other operators, where ONNX Runtime has no f64 kernel.
_NOT_F64 = {"Softplus", "Tan", "Elu"}
_PLAIN = {
    DType.F32, DType.F16, DType.BF16, DType.F64, DType.I8, DType.I16, DType.I32, DType.I64, DType.U8, DType.U16,
    DType.U32, DType.U64, DType.BOOL,
}  # fmt: skip


def mapped(node: NodeView) -> MappedNode | None:
    """Return the IR op that means the same as the node, or None when there is none."""
    rule = _RULES.get(node.op_type)
    if rule is None or any(kind.dtype not in _PLAIN for kind in node.inputs):
        return None
    # If the op's lowering would work around a missing kernel, the node stays an `OnnxNode`.
    if any(compute_dtype(node.op_type, kind.dtype) is not kind.dtype for kind in node.inputs[-1:]):
        return None
    return rule(node)


def _unary(node: NodeView) -> MappedNode | None:
    dtype = node.inputs[0].dtype
    if node.attributes or (dtype is DType.F64 and node.op_type in _NOT_F64):
        return None
    if not dtype.is_float and node.op_type in {"Relu", "Sign"}:
        return None
    return MappedNode(Activation(_UNARY[node.op_type]), 1)


def _gelu(node: NodeView) -> MappedNode | None:
    functions = {"none": "gelu", "tanh": "gelu_approx"}
    function = functions.get(node.get("approximate", "none"))
    return None if function is None else MappedNode(Activation(function), 1)


def _binary(node: NodeView) -> MappedNode | None:
    if node.attributes or len(node.inputs) != 2 or node.inputs[0].dtype is not node.inputs[1].dtype:
        return None
    return MappedNode(Binary(_BINARY[node.op_type]), 2)


def _matmul(node: NodeView) -> MappedNode | None:
    ranks = [kind.shape.rank for kind in node.inputs if kind.shape is not None]
    return MappedNode(MatMul(), 2) if min(ranks) >= 2 else None


def _transpose(node: NodeView) -> MappedNode | None:
    perm = tuple(node.get("perm", range(node.rank)[::-1]))
    return MappedNode(Transpose(perm), 1) if perm else None


def _softmax(node: NodeView) -> MappedNode | None:
    """Before 13 the input was flattened at the axis, which is the same where the axis is the last."""
    if node.version >= 13:
        return MappedNode(Softmax(node.get("axis", -1)), 1)
    is_last = node.rank > 0 and node.get("axis", 1) % node.rank == node.rank - 1
    return MappedNode(Softmax(-1), 1, moves=True) if is_last else None


def _dropout(node: NodeView) -> MappedNode | None:
    """Only the forms before 12, which opset 21 lacks; at inference nothing is dropped."""
    if node.version < 7 and not node.get("is_test", 0):
        return None
    return MappedNode(StopGradient(), 1, moves=True) if node.version < 12 else None


def _reshape(node: NodeView) -> MappedNode | None:
    shape = node.inputs[0].shape
    wanted = node.numbers(1)
    if wanted is None or shape is None or node.get("allowzero", 0):
        return None
    dims: list[Dim] = []
    for place, number in enumerate(wanted):
        if number == 0 and (place >= shape.rank or shape[place] is None):
            return None
        dims.append(shape[place] if number == 0 else number)
    return None if 0 in dims else MappedNode(Reshape(tuple(dims)), 1)


def _unsqueeze(node: NodeView) -> MappedNode | None:
    """Only the form with the axes as an attribute, which opset 21 lacks."""
    shape = node.output.shape
    if "axes" not in node.attributes or shape is None or not shape.is_static or 0 in shape:
        return None
    return MappedNode(Reshape(tuple(shape)), 1, moves=True)


def _slice(node: NodeView) -> MappedNode | None:
    """Starts and ends follow Python's rules in both, far numbers for an open end included.

    But walking backwards, ONNX begins a start before the first element at that element, where Python takes nothing.
    """
    starts, ends, axes, steps = (node.numbers(place) for place in (1, 2, 3, 4))
    if starts is None or ends is None or None in node.constants[1:]:
        return None
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    shape, begins = node.inputs[0].shape, list(starts)
    for place, (axis, start, step) in enumerate(zip(axes, starts, steps, strict=True)):
        if step < 0 and start < -1:
            size = None if shape is None else shape[axis]
            if not isinstance(size, int):
                return None
            begins[place] = start if size >= -start else 0
    return MappedNode(Slice(axes, tuple(begins), ends, steps), 1)


def _clip(node: NodeView) -> MappedNode | None:
    """Bounds were attributes before 11 and are inputs since."""
    if not node.inputs[0].dtype.is_float:
        return None
    if node.version < 11:
        return MappedNode(Clamp(node.attributes.get("min"), node.attributes.get("max")), 1, moves=True)
    low, high = node.numbers(1), node.numbers(2)
    if low is None or high is None or (len(low), len(high)) != (1, 1):
        return None
    return MappedNode(Clamp(float(low[0]), float(high[0])), 1)


def _layer_norm(node: NodeView) -> MappedNode | None:
    is_last = node.get("axis", -1) in (-1, node.rank - 1)
    if len(node.inputs) != 3 or not is_last or node.get("stash_type", 1) != 1:
        return None
    return MappedNode(LayerNorm(-1, node.get("epsilon", 1e-5)), 3)


def _batch_norm(node: NodeView) -> MappedNode | None:
    """Momentum means nothing where nothing is learned."""
    if len(node.inputs) != 5 or node.version < 9 or node.get("training_mode", 0):
        return None
    return MappedNode(BatchNormInference(node.get("epsilon", 1e-5)), 5)


def _pool(node: NodeView) -> MappedNode | None:
    known = {"kernel_shape", "strides", "pads", "count_include_pad"}
    neutral = {"auto_pad": "NOTSET", "ceil_mode": 0, "storage_order": 0, "dilations": (1, 1)}
    if any(name not in known and _plain(value) != neutral.get(name) for name, value in node.attributes.items()):
        return None
    kernel, stride, padding = _pair(node.get("kernel_shape", ())), _pair(node.get("strides", (1, 1))), _padding(node)
    if kernel is None or stride is None or padding is None:
        return None
    # Without padding it makes no difference whether padding counts.
    if node.op_type == "AveragePool" and any(padding) and not node.get("count_include_pad", 0):
        return None
    function = "max" if node.op_type == "MaxPool" else "mean"
    return MappedNode(Pool(function, kernel, stride, padding), 1)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _pair(values: Sequence[int]) -> tuple[int, int] | None:
    return (int(values[0]), int(values[1])) if len(values) == 2 else None


def _padding(node: NodeView) -> tuple[int, int] | None:
    """Return the padding of an image, None unless it is explicit and the same on both sides."""
    pads = tuple(node.get("pads", (0, 0, 0, 0)))
    explicit = node.rank == 4 and node.get("auto_pad", "NOTSET") == "NOTSET"
    return (pads[0], pads[1]) if explicit and len(pads) == 4 and pads[:2] == pads[2:] else None


def _conv_transpose(node: NodeView) -> MappedNode | None:
    padding = _padding(node)
    stride, dilation, extra = (
        _pair(node.get(name, default))
        for name, default in (("strides", (1, 1)), ("dilations", (1, 1)), ("output_padding", (0, 0)))
    )
    if "output_shape" in node.attributes or padding is None or stride is None or dilation is None or extra is None:
        return None
    op = ConvTranspose2d(stride, padding, extra, dilation, node.get("group", 1))
    return MappedNode(op, len(node.inputs))


def _cast(node: NodeView) -> MappedNode | None:
    known = set(node.attributes) <= {"to", "saturate"} and node.get("saturate", 1) == 1
    return MappedNode(Cast(node.output.dtype), 1) if known and node.output.dtype in _PLAIN else None


def _reduce(node: NodeView) -> MappedNode | None:
    """Axes were an attribute before 18, or 13 for ReduceSum, and are an input since; the op takes both."""
    axes = node.attributes.get("axes") if len(node.inputs) == 1 else node.numbers(1)
    if axes is None and len(node.inputs) == 2:
        return None
    if axes is None and node.get("noop_with_empty_axes", 0) == 0:
        axes = tuple(range(node.rank))
    if not axes:
        return None
    op = Reduce(_REDUCE[node.op_type], tuple(axes), node.get("keepdims", 1) == 1)
    return MappedNode(op, 1, moves="axes" in node.attributes)


def _conv(node: NodeView) -> MappedNode | None:
    padding, stride, dilation = _padding(node), _pair(node.get("strides", (1, 1))), _pair(node.get("dilations", (1, 1)))
    weight = node.inputs[1].shape
    kernel = node.attributes.get("kernel_shape")
    if padding is None or stride is None or dilation is None or weight is None:
        return None
    if kernel is not None and not fits(Shape(kernel), Shape(weight[2:])):
        return None
    return MappedNode(Conv2d(stride, padding, dilation, node.get("group", 1)), len(node.inputs))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_COMPARE, lambda node: None if node.attributes else MappedNode(Compare(_COMPARE[node.op_type]), 2)),
    **dict.fromkeys(_REDUCE, _reduce),
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda node: MappedNode(Concat(node.get("axis", 0)), len(node.inputs)) if len(node.inputs) > 1 else None,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "Gather": lambda node: MappedNode(Gather(node.get("axis", 0)), 2),
    "Gelu": _gelu,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Reshape": _reshape,
    "Slice": _slice,
    "Softmax": _softmax,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": lambda node: MappedNode(Where(), 3),
}
