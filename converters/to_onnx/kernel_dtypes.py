"""Gaps in the CPU provider's kernels, and how a lowering works around them.

The dtypes are those of ONNX Runtime's kernel registry for opset 21. f16 and bf16 are always passed on: accelerators
have them, and the CPU provider puts f32 casts around f16 nodes by itself.

One integer quotient ends the process: the least value divided by -1 traps on x86 CPUs. Dividing by 1 and multiplying by
-1 gives the same for every other value, and wraps around for that one, as integer arithmetic does everywhere else. A
remainder by -1 is 0, as by 1.

Its kernels that compare vectors of i64 take the lower 32 bits for signed numbers where the upper 32 bits are equal
(ONNX Runtime 1.31.1 on x86 with AVX2): the greater of 3e9 and 5 is 5. `Greater` and `Less` are right, so what they can
express is written with them, and reductions with TopK.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Dim, Shape, TensorType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.emitter import Emitter
    from rlx_ort.converters.to_onnx.model import ModelValue

# The substitutes of a dtype, best first. u64 travels as i64: both keep all 64 bits, so moving and adding stay exact.
# Operators that compare get it with the highest bit flipped, which keeps the order (`to_compute`).
_STAND_INS = {
    DType.BOOL: (DType.U8, DType.I32),
    **dict.fromkeys((DType.I8, DType.I16, DType.U8, DType.U16), (DType.I32, DType.F32)),
    **dict.fromkeys((DType.I32, DType.U32, DType.U64), (DType.I64, DType.F64)),
    DType.I64: (DType.F64, DType.F32),
    DType.F64: (DType.F32,),
}
_COMPARING = frozenset({"ArgMax", "ArgMin", "TopK"})
_TRAPPING = frozenset({DType.I32, DType.I64})  # narrower ones are divided as i32, where their least value fits
_NUMBERS = "f32 f64 i8 i16 i32 i64 u8 u16 u32 u64"
_OPERATORS = {
    "f32": "Atan AveragePool Conv ConvTranspose Erf Gelu InstanceNormalization",
    "f32 f64": "MaxPool",
    "f32 i8 i32 u8": "Resize",
    "f32 f64 i32 i64": "CumSum Pow ReduceMean ReduceProd ReduceSum",
    "f32 f64 i32 i64 u32 u64": "MatMul",
    "f32 f64 i8 i16 i32 i64": "Neg",
    "f32 f64 i8 i32 i64 u8": "ArgMax ArgMin",
    "f32 f64 i8 i32 i64 u8 bool": "ReduceMax ReduceMin",
    "f32 f64 i8 i32 i64 u8 u32 string": "Where",
    "f32 f64 i8 i16 i32 i64 u8": "TopK",
    "f32 f64 i8 i32 i64 u8 u32 u64": "Clip Max Min",
    "f32 f64 i8 i32 i64 u8 u32 u64 bool": "Pad",
    _NUMBERS: "Abs Greater GreaterOrEqual Less LessOrEqual",
    f"{_NUMBERS} bool": "Equal",
    f"{_NUMBERS} bool string": "Expand Tile",
}
"""Dtypes -> the operators whose kernels take them and no others."""
_KERNELS = {
    op_type: frozenset(map(DType.parse, dtypes.split()))
    for dtypes, op_types in _OPERATORS.items()
    for op_type in op_types.split()
}


def compute_dtype(op_type: str, dtype: DType) -> DType:
    """Return the dtype in which to run an ONNX op on values of `dtype`: itself where the CPU kernel takes it."""
    kernels = _KERNELS.get(op_type)
    if kernels is None or dtype in kernels:
        return dtype
    return next((other for other in _STAND_INS.get(dtype, ()) if other in kernels), dtype)


def to_compute(emit: Emitter, op_type: str, value: ModelValue, dtype: DType) -> ModelValue:
    """Cast a value of `dtype` to the dtype in which the op runs, so that the op orders it as before."""
    compute = compute_dtype(op_type, dtype)
    if compute is dtype:
        return value
    return _flipped(emit, emit.cast(value, compute)) if _flips(op_type, dtype) else emit.cast(value, compute)


def from_compute(emit: Emitter, op_type: str, value: ModelValue, dtype: DType) -> ModelValue:
    """Cast a result in the dtype in which the op runs back to `dtype`: the inverse of `to_compute`."""
    if compute_dtype(op_type, dtype) is dtype:
        return value
    return emit.cast(_flipped(emit, value) if _flips(op_type, dtype) else value, dtype)


def _flips(op_type: str, dtype: DType) -> bool:
    return dtype is DType.U64 and op_type in _COMPARING and compute_dtype(op_type, dtype) is DType.I64


def _flipped(emit: Emitter, value: ModelValue) -> Any:
    """Flip the highest bit of an i64: adding the least value wraps around."""
    return emit.op("Add", value, emit.constant(-(2**63), DType.I64))


def op_in(
    emit: Emitter,
    op_type: str,
    dtype: DType,
    *inputs: ModelValue | None,
    others: Sequence[ModelValue | None] = (),
    result: DType | None = None,
    **attributes: Any,
) -> Any:
    """Append an op on `inputs` of `dtype`, with casts round it where the CPU kernel lacks the dtype.

    `others` follow the inputs and are not cast; `result` is the dtype of the result where it is not that of the
    inputs, as after a comparison.
    """
    values = [value if value is None else to_compute(emit, op_type, value, dtype) for value in inputs]
    if op_type in MISORDERING and compute_dtype(op_type, dtype) is DType.I64 and misorders(emit, op_type):
        op_type, values = compared(emit, op_type, values)
    produced = emit.op(op_type, *values, *others, **attributes)
    return produced if result is not None else from_compute(emit, op_type, produced, dtype)


FILLED_TOPK = frozenset({DType.F16, DType.F32, DType.F64})
"""The dtypes whose TopK may be written with rows that are filled."""


def filled_rows(emit: Emitter, x: Any, dtype: DType | None, size: Dim, axis: int, largest: bool) -> Any:
    """Return x for TopK to sort, as it is or with infinities that come last, up to a power of two along the axis.

    The kernels of WebGPU (plugin 0.4.0) and CUDA (ONNX Runtime 1.31.1) fill rows with the largest finite number, which
    comes before an infinity. Equal elements are in order of place, so an infinity of x comes before those that fill its
    row.
    """
    if dtype not in FILLED_TOPK or emit.has_kernel("TopK", TensorType(dtype)):
        return x
    if isinstance(size, int):
        more = (1 << max(size - 1, 0).bit_length()) - size
        if not more:
            return x
        pads = emit.i64([0, more])
    else:
        count, powers = emit.op("Shape", x, start=axis, end=axis + 1 or None), emit.i64([1 << bit for bit in range(31)])
        enough = emit.op("Where", emit.op("Less", powers, count), emit.i64([1 << 30]), powers)
        more = emit.op("Sub", emit.op("ReduceMin", enough, keepdims=1), count)
        pads = emit.op("Concat", emit.i64([0]), more, axis=0)
    return emit.op("Pad", x, pads, emit.constant(-math.inf if largest else math.inf, dtype), emit.i64([axis]))


def extreme_place(
    emit: Emitter, op_type: str, x: ModelValue, dtype: DType, axis: int, keep: bool, last: bool = False
) -> Any:
    """Append an ArgMax or ArgMin along an axis, in another form where the kernel of the provider is missing or wrong.

    CUDA's kernels take no integers, which TopK does, and give 2^31 - 1, a size that no axis has, for a row of nothing
    but the infinity that they start from (ONNX Runtime 1.31.1). `last` asks for the last one of equals.
    """
    has_kernel, flags = emit.has_kernel(op_type, TensorType(dtype)), dict[str, Any](select_last_index=1) if last else {}
    if has_kernel or last or dtype.is_float:
        place = emit.op(op_type, x, axis=axis, keepdims=int(keep), **flags)
        return place if has_kernel else emit.op("Mod", place, emit.constant(2**31 - 1, DType.I64))
    _, place = emit.op("TopK", x, emit.i64([1]), outputs=2, axis=axis, largest=int(op_type == "ArgMax"), sorted=1)
    return place if keep else emit.op("Squeeze", place, emit.i64([axis]))


def reads_threes(x: TensorType, groups: int) -> bool:
    """Return whether a convolution may read a multiple of 3 channels that is none of 4."""
    channels = None if x.shape is None or len(x.shape) < 2 else x.shape[1]
    return groups == 1 and not (isinstance(channels, int) and (channels <= 3 or channels % 3 or channels % 4 == 0))


def channels_apart(emit: Emitter, inputs: Sequence[Any], groups: int) -> Sequence[Sequence[Any]]:
    """Return the inputs of two convolutions whose sum is the one of `inputs`; none where that one is right.

    WebGPU reads a multiple of 3 channels in threes and sums some of them wrongly (plugin 0.4.0), so a multiple of 4 is
    taken apart. Zeros up to the next one would do, but ONNX Runtime's layout rewrite does not survive the Pad (1.31.1).
    """
    kinds = emit.input_types
    if not reads_threes(kinds[0], groups) or emit.has_kernel("Conv", *kinds):
        return ()
    weights = kinds[1].shape
    _, channels, *kernel = (None, None) if weights is None or len(weights) < 2 else weights
    if not isinstance(channels, int) or channels <= 3 or channels % 3 or channels % 4 == 0 or set(kernel) == {1}:
        return ()  # the limits of the provider refuse unknown ones
    x, w, *bias = inputs
    counts = channels - channels % 4, channels % 4

    def halves(value: ModelValue, kind: TensorType) -> Any:
        types = [kind] * 2
        if kind.shape is not None:
            types = [replace(kind, shape=Shape([kind.shape[0], count, *kind.shape[2:]])) for count in counts]
        return emit.op("Split", value, emit.i64(counts), outputs=2, axis=1, types=types)

    fours, rest = zip(halves(x, kinds[0]), halves(w, kinds[1]), strict=True)
    return [*fours, *bias], rest


def with_epsilon(emit: Emitter, x: ModelValue, dtype: DType, eps: float, wanted: float) -> tuple[ModelValue, float]:
    """Return the value whose norm with `wanted` is that of x with `eps`: x times k is the same with k * k * eps."""
    if eps == wanted or not eps:
        return x, eps
    return emit.op("Mul", x, emit.constant(math.sqrt(wanted / eps), dtype)), wanted


MISORDERING = frozenset({"Clip", "Max", "Min", "Sign"})
"""Operators that `compared` can write without the kernels that order some i64 wrongly."""


def misorders(emit: Emitter, op_type: str) -> bool:
    """Return whether the kernel of the provider that the model is for may order i64 wrongly."""
    return not emit.has_kernel(op_type, TensorType(DType.I64))


def compared(emit: Emitter, op_type: str, inputs: Sequence[ModelValue | None]) -> tuple[str, list[ModelValue | None]]:
    """Return the last node, as operator and inputs, of one of `MISORDERING` on i64 by comparisons; write the others.

    On the CPU it takes 1.2 to 4 times as long (16 elements, a million).
    """
    first, *others = inputs
    if op_type == "Sign":
        zero = emit.constant(0, DType.I64)
        signs = (emit.op("Cast", emit.op(order, first, zero), to=DType.I64) for order in ("Greater", "Less"))
        return "Sub", list(signs)
    keeps = ("Greater", "Less") if op_type == "Clip" else ("Greater" if op_type == "Max" else "Less",) * len(others)
    pairs = [(keep, other) for keep, other in zip(keeps, others, strict=False) if other is not None]
    last: tuple[str, list[ModelValue | None]] = ("Identity", [first])
    for place, (keep, other) in enumerate(pairs):
        value = emit.op(last[0], *last[1]) if place else first
        last = ("Where", [emit.op(keep, value, other), value, other])
    return last


def where_in(emit: Emitter, condition: ModelValue, dtype: DType, then: ModelValue, otherwise: ModelValue) -> Any:
    """Append a Where between values of `dtype`, with casts around it where the CPU kernel lacks the dtype."""
    compute = compute_dtype("Where", dtype)
    if compute is dtype:
        return emit.op("Where", condition, then, otherwise)
    return emit.cast(emit.op("Where", condition, emit.cast(then, compute), emit.cast(otherwise, compute)), dtype)


def may_trap(emit: Emitter) -> bool:
    """Return whether the node being lowered, a division or remainder, may divide an i32 or i64 by -1."""
    if emit.known_dtype(1) not in _TRAPPING:
        return False
    data = emit.input_data(1)
    return data is None or bool(np.any(data.numpy() == -1))


def divisor_and_sign(emit: Emitter, divisor: ModelValue) -> tuple[ModelValue, ModelValue]:
    """Return the divisor with 1 in place of -1, and -1 in those places and 1 in all others."""
    dtype = emit.input_dtype(1)
    one, minus = emit.constant(1, dtype), emit.constant(-1, dtype)
    negative = emit.op("Equal", divisor, minus)
    return emit.op("Where", negative, one, divisor), emit.op("Where", negative, minus, one)
