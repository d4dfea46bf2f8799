"""ONNX forms of imported nodes: the node that was imported, or another one where kernels compute something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from rlx_ort.converters.protos import trimmed
from rlx_ort.converters.to_onnx import kernel_dtypes as kernels
from rlx_ort.converters.to_onnx.elementwise import activate, conjunction, other_gelu, power
from rlx_ort.converters.to_onnx.emitter import DEFAULT_OPSET, Emitter, lowers
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.norm import REDUCE, is_doubtful, known_size, reduced
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.norm import Reduce
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, ValueType

_Reads: TypeAlias = "list[ModelValue | None]"
_Form: TypeAlias = Callable[[Emitter, OnnxNode, _Reads], Any]
"""(emitter, op, values of the formal inputs) -> the results, or None to write the node as it is."""
_Substitute: TypeAlias = Callable[[Emitter, OnnxNode, _Reads, Any, DType], Any]
"""The same, of a form for providers without a kernel: the last two are input 0 and its dtype."""

_REDUCTIONS = {op_type: function for function, op_type in REDUCE.items()}
_REDUCING = ("ArgMax", "ArgMin", "Reduce")
_SAFE_EPSILON = 1e-5
"""WebGPU's InstanceNormalization computes with the epsilon of an earlier node (plugin 0.4.0): all have to have one."""
_FAR = 2**31 - 1  # a bound of a Slice from here on means the end of its axis
_BOOL_MOVES = frozenset({"GatherElements", "GatherND"})
"""Operators that move bools as they move numbers; WebGPU has kernels for numbers alone."""
_ASKING: Mapping[DType, Collection[str]] = {
    DType.BOOL: _BOOL_MOVES | {"And"},
    DType.F16: {"Gelu", "IsNaN", "LogSoftmax"},
    DType.F32: {"Gelu", "InstanceNormalization", "IsNaN", "LogSoftmax"},
    DType.F64: {"Sigmoid"},
    DType.I64: kernels.MISORDERING | {"ConstantOfShape"},
}


def _asks(op: OnnxNode, kind: TensorType, constants: Sequence[TensorData | None]) -> bool:
    if op.domain:
        return False
    if op.op_type == "Conv":
        return kernels.reads_threes(kind, op.integer("group", 1))
    if op.op_type == "TopK":
        return kind.dtype in kernels.FILLED_TOPK
    if op.op_type in ("ArgMax", "ArgMin"):
        return True
    if op.op_type == "Pow":
        return kind.dtype.is_float
    if op.op_type == "PRelu":
        return kind.dtype.is_float and (constants[1] is None or constants[1].num_elements > 1)
    if op.op_type == "Slice":
        return len(constants) > 4 and constants[4] is not None and bool((constants[4].numpy() < 0).any())
    if op.op_type == "Reshape":
        return op.integer("allowzero", 0) == 1 and constants[1] is None
    if op.op_type.startswith(_REDUCING) and constants[1:] == [None]:
        return True
    if op.op_type in _REDUCTIONS:
        reduction = _reduction(op, kind, constants[1] if len(constants) > 1 else None)
        return reduction is not None and is_doubtful(reduction, kind)
    return op.op_type in _ASKING.get(kind.dtype, ())


@lowers(OnnxNode, asks=_asks)
def _imported(emit: Emitter, op: OnnxNode, inputs: Sequence[Any]) -> Any:
    form = None if op.domain else _FORMS.get(op.op_type)
    if op.op_type == "Scan" and not op.domain:
        return _scanned_from_first(emit, op, inputs)
    reads = trimmed(inputs[: op.formal_inputs])
    results = None if form is None else form(emit, op, reads)
    if results is None and not op.domain and op.op_type.startswith(_REDUCING):
        results = _counted_from_first(emit, op, reads)
    return emit.imported(op, inputs) if results is None else results


def _scanned_from_first(emit: Emitter, op: OnnxNode, inputs: Sequence[Any]) -> Any:
    """Along first axes alone: a Scan that transposes ends the process without elements (ONNX Runtime 1.32.0)."""
    begin = op.formal_inputs - op.integer("num_scan_inputs", 0)  # as many states are read as are written
    attributes, given, types = dict(op.attributes), [*inputs], emit.node.types
    reads = _first_axes(attributes, "scan_input_axes", [emit.known_type(at) for at in range(begin, op.formal_inputs)])
    writes = _first_axes(attributes, "scan_output_axes", types[begin:])
    for place, (order, kind) in reads.items():
        given[begin + place] = emit.op("Transpose", given[begin + place], perm=order, types=[kind])
    kinds = {begin + place: kind for place, (_, kind) in writes.items()}
    results = [*emit.imported(op, given, attributes=attributes, types=kinds)]
    for place, (order, _) in writes.items():
        at, back = begin + place, [order.index(axis) for axis in range(len(order))]
        results[at] = emit.op("Transpose", results[at], perm=back, types=[types[at]])
    return tuple(results)


def _first_axes(
    attributes: dict[str, Any], name: str, kinds: Sequence[ValueType | None]
) -> dict[int, tuple[list[int], TensorType]]:
    """Make the axes of an attribute the first, and return the order that puts each there, and the type in that order.

    An axis of a value of open rank, or that it does not have, stays.
    """
    axes, orders = [*attributes.get(name, ())], {}
    for place, (axis, kind) in enumerate(zip(axes, kinds, strict=False)):
        if not axis or not isinstance(kind, TensorType) or kind.shape is None:
            continue
        order = [*range(len(kind.shape))]
        if -len(order) <= axis < len(order):
            order.insert(0, order.pop(axis))
            orders[place] = order, replace(kind, shape=Shape([kind.shape[each] for each in order]))
            axes[place] = 0
    if orders:
        attributes[name] = tuple(axes)
    return orders


def _counted_from_first(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    """Axes that are not negative: the CPU's kernels ignore negative ones without elements (ONNX Runtime 1.32.0)."""
    shape = None if emit.known_dtype(0) is None else emit.input_type(0).shape
    if shape is None:
        return None
    if len(reads) > 1 and reads[1] is not None and emit.input_data(1) is None:
        return None if all(map(known_size, shape)) else _computed_axes(emit, op, reads, shape.rank)
    name = "axis" if "axis" in op.attributes else "axes"
    data = emit.input_data(1) if len(reads) > 1 else None
    axes = np.asarray(op.attributes.get(name, ()) if data is None else data.numpy(), np.int64)
    if axes.size == 0 or not -shape.rank <= axes.min() < 0:
        return None
    counted = np.where(axes < 0, axes + shape.rank, axes)
    if data is None:
        return emit.imported(op, reads, attributes={**op.attributes, name: counted.tolist()})
    return emit.imported(op, [reads[0], emit.constant(counted)])


def _computed_axes(emit: Emitter, op: OnnxNode, reads: _Reads, rank: int) -> Any:
    """The same for axes that are fed or computed; those beyond the rank stay as they are, for the kernel to refuse."""
    if not all(emit.has_kernel(each, TensorType(DType.I64)) for each in ("Add", "Less", "Where")):
        return None
    axes = reads[1]
    beyond = emit.op("Less", axes, emit.i64([-rank]))
    negative = emit.op("Less", axes, emit.i64([0]))
    counted = emit.op("Where", negative, emit.op("Add", axes, emit.i64([rank])), axes)
    return emit.imported(op, [reads[0], emit.op("Where", beyond, axes, counted)])


def _division(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    if reads[1] is None or not kernels.may_trap(emit):
        return None
    divisor, sign = kernels.divisor_and_sign(emit, reads[1])
    if op.op_type == "Mod":
        return emit.imported(op, [reads[0], divisor])
    return emit.imported(op, [emit.op("Div", reads[0], divisor), sign], "Mul", {})


def _lacking(form: _Substitute, *dtypes: DType) -> _Form:
    """Return a form where the provider has no kernel for the dtype of input 0, one of `dtypes` if there are any."""

    def checked(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
        dtype = emit.known_dtype(0)
        if dtype is None or (dtypes and dtype not in dtypes) or emit.has_kernel(op.op_type, TensorType(dtype)):
            return None
        return form(emit, op, reads, reads[0], dtype)

    return checked


def _ordering(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    op_type, last = kernels.compared(emit, op.op_type, reads)
    return emit.imported(op, last, op_type, {})


def _instance_norm(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    """The same epsilon for every node, where the kernel of the provider normalises f32 with one only."""
    eps = float(op.attributes.get("epsilon", _SAFE_EPSILON))  # type: ignore[arg-type]  # by ONNX's schema
    if math.isclose(eps, _SAFE_EPSILON, rel_tol=1e-6):
        return None
    x, eps = kernels.with_epsilon(emit, x, dtype, eps, _SAFE_EPSILON)
    return emit.imported(op, [x, *reads[1:]], attributes={**op.attributes, "epsilon": eps})


def _cast_like(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    """No provider has a CastLike, and ONNX Runtime expands it too late to fold the Cast that comes out of it."""
    dtype = emit.known_dtype(1)
    return None if dtype is None else emit.imported(op, reads[:1], "Cast", {**op.attributes, "to": dtype})


def _range(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    """Bounds in a form whose element type ONNX Runtime reads from the model.

    It takes known sizes for i64 where a Cast and then a Squeeze or Gather made them, and refuses a Range of another
    type for that. It does not follow sizes through a Reshape.
    """
    for index, value in enumerate(reads):
        maker = None if value is None else emit.maker(value)
        if maker in {"Squeeze", "Gather"} and emit.known_dtype(index) not in {None, DType.I64}:
            kind = TensorType(emit.input_dtype(index), Shape())
            reads[index] = emit.op("Reshape", value, emit.i64([]), types=[kind])
    return emit.imported(op, reads)


def _reduction(op: OnnxNode, kind: TensorType, axes: TensorData | None) -> Reduce | None:
    """Return the op of the IR that is the same as a reduction of opset 21, None where its axes are not known."""
    op_type, rank = op.op_type, None if kind.shape is None else kind.shape.rank
    if op.version < DEFAULT_OPSET or rank is None or kernels.compute_dtype(op_type, kind.dtype) is not kind.dtype:
        return None
    if axes is not None:
        places = tuple(axes.numpy().reshape(-1).tolist())
        if not all(-rank <= place < rank for place in places):
            return None  # the engine names the fault
        places = tuple(place % rank for place in places)
    elif op.formal_inputs > 1 or op.integer("noop_with_empty_axes", 0):
        return None
    else:
        places = tuple(range(rank))
    return Reduce(_REDUCTIONS[op_type], places, op.integer("keepdims", 1) == 1) if places else None


def _reduced(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    """See `norm`: some kernels stop at the limits of integers, misorder them, or have no mean of nothing."""
    if reads[0] is None or emit.known_dtype(0) is None:
        return None
    kind = emit.input_type(0)
    reduction = _reduction(op, kind, emit.input_data(1) if len(reads) > 1 else None)
    return reduced(emit, reduction, reads) if reduction is not None and is_doubtful(reduction, kind) else None


def _convolved(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    if op.version < 13 or any(emit.known_dtype(place) is None for place in range(len(reads))):
        return None  # before 13 a Split had its sizes as an attribute
    parts = kernels.channels_apart(emit, reads, op.integer("group", 1))
    attributes: dict[str, Any] = dict(op.attributes)
    return emit.op("Add", *(emit.op("Conv", *part, **attributes) for part in parts)) if parts else None


def _backwards(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    """From the last element, after another Slice has left none behind the start; WebGPU begins right nowhere else."""
    given = [emit.input_data(place) for place in range(1, len(reads))]
    if len(given) < 4:
        return None
    starts, ends, axes, steps = (None if each is None else each.numpy().tolist() for each in given)
    if starts is None or ends is None or steps is None or (axes is None and reads[3] is not None):
        return None
    inside = [
        place
        for place, (start, end, step) in enumerate(zip(starts, ends, steps, strict=True))
        if step < 0 and 0 <= start < _FAR and (end >= 0 or end <= -_FAR)
    ]
    if not inside:
        return None
    along = [place if axes is None else axes[place] for place in inside]
    cuts = [starts[place] + 1 for place in inside]
    cut = emit.op("Slice", x, emit.i64([0] * len(cuts)), emit.i64(cuts), emit.i64(along))
    begins = [_FAR if place in inside else start for place, start in enumerate(starts)]
    return emit.imported(op, [cut, emit.constant(np.asarray(begins), emit.known_dtype(1)), *reads[2:]])


def _top(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    shape, axis = emit.input_type(0).shape, op.integer("axis", -1)
    size = None if shape is None else shape[axis]
    filled = kernels.filled_rows(emit, x, dtype, size, axis, op.integer("largest", 1) == 1)
    return emit.imported(op, [filled, *reads[1:]])


def _place(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    axis, keep, last = op.integer("axis", 0), op.integer("keepdims", 1) == 1, op.integer("select_last_index", 0) == 1
    return kernels.extreme_place(emit, op.op_type, x, dtype, axis, keep, last)


def _power(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    return power(emit, x, reads[1], dtype) if dtype.is_float and emit.known_dtype(1) is dtype else None


def _sigmoid(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    """Other operators for f64 where the kernel of the provider is coarse, if it has them."""
    has_all = all(emit.has_kernel(each, TensorType(dtype)) for each in ("Add", "Exp", "Neg", "Reciprocal"))
    return activate(emit, "sigmoid", x, dtype) if has_all else None


def _gelu(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    dtype = emit.known_dtype(0)
    if reads[0] is None or dtype not in (DType.F16, DType.F32):
        return None
    approximate = op.attributes.get("approximate", "none")
    return other_gelu(emit, reads[0], dtype, str(approximate))


def _is_nan(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    """A test of the row that a Softmax read, where the provider has no `IsNaN`.

    Exporters write zeros for attention over a row that is masked out, where Softmax gives NaN: its largest value is
    infinite. WebGPU has no `IsNaN`, WGSL lets an implementation assume that nothing is NaN, and its Softmax gives 0 in
    such a row (plugin 0.4.0). https://www.w3.org/TR/WGSL/#floating-point-evaluation
    """
    if (softmax := emit.softmax_before(0)) is None:
        return None
    scores, kind, axis = softmax
    largest = emit.op("ReduceMax", scores, emit.i64([axis]), types=[TensorType(kind.dtype)], keepdims=1)
    most = float(ml_dtypes.finfo(kind.dtype.numpy).max)  # type: ignore[no-untyped-call]  # of ml_dtypes
    size = emit.op("Abs", largest, types=[TensorType(kind.dtype)])
    finite = emit.op("LessOrEqual", size, emit.constant(most, kind.dtype), types=[TensorType(DType.BOOL)])
    masked = emit.op("Not", finite, types=[TensorType(DType.BOOL)])
    return emit.imported(op, [masked, emit.op("Shape", x)], "Expand")


def _leaking(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    """A product where x is negative; WebGPU's kernel (plugin 0.4.0) does not repeat slopes along the last axis."""
    if None in reads:
        return None
    negative = emit.op("Less", x, emit.constant(0, dtype), types=[TensorType(DType.BOOL)])
    return emit.imported(op, [negative, emit.op("Mul", *reads), x], "Where", {})


def _log_softmax(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    """Differences from the largest value and the logarithm of their sum, where the provider has no `LogSoftmax`."""
    needed = ("Exp", "Log", "ReduceMax", "ReduceSum", "Sub")
    if op.version < 13 or not all(emit.has_kernel(each, TensorType(dtype)) for each in needed):
        return None
    axes = emit.i64([op.integer("axis", -1)])
    below = emit.op("Sub", x, emit.op("ReduceMax", x, axes, keepdims=1))
    total = emit.op("ReduceSum", emit.op("Exp", below), axes, keepdims=1)
    return emit.imported(op, [below, emit.op("Log", total)], "Sub", {})


def _moved_bools(emit: Emitter, op: OnnxNode, reads: _Reads, x: Any, dtype: DType) -> Any:
    stand_ins = (each for each in (DType.U8, DType.I32, DType.F32) if emit.has_kernel(op.op_type, TensorType(each)))
    if (stand_in := next(stand_ins, None)) is None:
        return None
    attributes: dict[str, Any] = dict(op.attributes)
    moved = emit.op(op.op_type, emit.cast(x, stand_in), *reads[1:], **attributes)
    return emit.imported(op, [moved], "Cast", {"to": dtype})


def _and(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    product = conjunction(emit, *reads)
    return None if product is None else emit.imported(op, [product], "Cast", {"to": DType.BOOL})


def _reshaped(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    """Without `allowzero` where the shape has no zero; beside it DirectML 1.24 takes -1 for a size, and all memory.

    Exporters join shapes of sizes and -1, beside which ONNX forbids a zero.
    """
    if not op.integer("allowzero", 0):
        return None
    shape, dtype = emit.input_data(1), emit.known_dtype(0)
    says_nothing = shape is not None and bool(shape.numpy().all())
    if shape is None and dtype is not None and not emit.has_kernel("Reshape", TensorType(dtype)):
        says_nothing = any(bool((part.numpy() == -1).any()) for part in emit.joined_data(1))
    if not says_nothing:
        return None
    return emit.imported(
        op, reads, attributes={name: op.attributes[name] for name in op.attributes if name != "allowzero"}
    )


def _filled(emit: Emitter, op: OnnxNode, reads: _Reads) -> Any:
    """A number that is repeated, where the provider has no `ConstantOfShape`."""
    value = op.attributes.get("value", TensorData.from_array(np.zeros(1, np.float32)))
    if not isinstance(value, TensorData) or value.num_elements != 1:
        return None
    kind, shape = TensorType(value.dtype), TensorType(DType.I64)
    if emit.has_kernel(op.op_type, shape, outputs=[kind]) or not emit.has_kernel("Expand", kind, shape):
        return None
    return emit.imported(op, [emit.constant(value.numpy().reshape(()), value.dtype), *reads], "Expand", {})


_FORMS: dict[str, _Form] = {
    "And": _and,
    **dict.fromkeys(("ArgMax", "ArgMin"), _lacking(_place)),
    "CastLike": _cast_like,
    "ConstantOfShape": _filled,
    "Conv": _convolved,
    **dict.fromkeys(("Div", "Mod"), _division),
    "Gelu": _gelu,
    "InstanceNormalization": _lacking(_instance_norm, DType.F32),
    "IsNaN": _lacking(_is_nan),
    "LogSoftmax": _lacking(_log_softmax),
    "PRelu": _lacking(_leaking),
    "Pow": _lacking(_power),
    "Range": _range,
    "Reshape": _reshaped,
    "Sigmoid": _lacking(_sigmoid, DType.F64),
    "Slice": _lacking(_backwards),
    "TopK": _lacking(_top, *kernels.FILLED_TOPK),
    **dict.fromkeys(_BOOL_MOVES, _lacking(_moved_bools, DType.BOOL)),
    **dict.fromkeys(kernels.MISORDERING, _lacking(_ordering, DType.I64)),
    **dict.fromkeys(_REDUCTIONS, _reduced),
}
