"""ONNX forms of the elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlx_ort.converters.to_onnx.dispatch import asks_kernels, lowers_native
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import divisor_and_sign, may_trap, op_in, where_in
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.elementwise import Activation, Binary, Cast, Clamp, Compare, Fma, StopGradient, Where
from rlx_ort.ir.ops.norm import FusedSwiGLU

_DIRECT = {
    "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "neg": "Neg", "abs": "Abs",
    "sin": "Sin", "cos": "Cos", "atan": "Atan", "round": "Round", "recip": "Reciprocal", "floor": "Floor",
    "ceil": "Ceil", "sign": "Sign", "erf": "Erf",
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min", "pow": "Pow",
    "bit_and": "BitwiseAnd", "bit_or": "BitwiseOr", "bit_xor": "BitwiseXor",
}  # fmt: skip
_LOGICAL = {"bit_and": "And", "bit_or": "Or", "bit_xor": "Xor"}
_COMPARE = {"eq": "Equal", "ne": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}


def activate(emit: Emitter, function: str, x: ModelValue, dtype: DType) -> Any:
    """Write an activation by its IR name and return its result."""
    if function == "atan":
        return _atan(emit, x, dtype)
    return op_in(emit, _DIRECT[function], dtype, x) if function in _DIRECT else _COMPOSED[function](emit, x, dtype)


def gated(emit: Emitter, op: FusedSwiGLU, x: ModelValue, silu: Callable[[Any], Any]) -> Any:
    """Write `silu(gate) * up` of the two halves of the last axis."""
    kind = emit.input_type(0)
    size = known_shape(op, kind, "x")[-1]
    half = size // 2 if isinstance(size, int) else 0
    low, high = slice_axis(emit, x, -1, 0, half), slice_axis(emit, x, -1, half, None)
    gate, up = (low, high) if op.gate_first else (high, low)
    result = emit.op("Mul", up, silu(gate))
    return result if op.cast_to in {None, kind.dtype} else emit.op("Cast", result, to=op.cast_to)


def add_unless_zeros(emit: Emitter, value: Any, addend: Any, index: int) -> Any:
    """Add input `index` of the node being lowered unless it is known to be zeros."""
    data = emit.input_data(index)
    return value if data is not None and not data.numpy().any() else emit.op("Add", value, addend)


@lowers_native(Activation, when=lambda op: op.function in {"silu", "hard_swish"})
def _native_activation(emit: Emitter, op: Activation, inputs: Sequence[Any]) -> Any:
    silu = op.function == "silu"
    op_type, domain = ("QuickGelu", "com.microsoft") if silu else ("HardSwish", "")
    emit.require_kernel(op_type, emit.input_type(0), domain=domain)
    return emit.op(op_type, inputs[0], domain=domain, alpha=1.0 if silu else None)


asks_kernels(Activation, lambda op, kind: kind.dtype is DType.I64 and op.function in {"relu", "sign"})
asks_kernels(Binary, lambda op, kind: kind.dtype is DType.I64 and op.function in {"max", "min"})
asks_kernels(Clamp, lambda op, kind: kind.dtype is DType.I64)
lowers(Activation)(lambda emit, op, inputs: activate(emit, op.function, inputs[0], emit.input_dtype(0)))
lowers(Cast)(lambda emit, op, inputs: emit.op("Cast", inputs[0], to=op.to))
lowers(Fma)(lambda emit, op, inputs: emit.op("Add", emit.op("Mul", *inputs[:2]), inputs[2]))
lowers(StopGradient)(lambda emit, op, inputs: emit.op("Identity", inputs[0]))
lowers(Where)(lambda emit, op, inputs: where_in(emit, inputs[0], emit.input_dtype(1), *inputs[1:]))


def _relu(emit: Emitter, x: Any, dtype: DType) -> Any:
    return op_in(emit, "Max", dtype, x, emit.constant(0, dtype)) if dtype.is_integer else emit.op("Relu", x)


def _tan(emit: Emitter, x: Any, dtype: DType) -> Any:
    return emit.op("Div", emit.op("Sin", x), emit.op("Cos", x)) if dtype is DType.F64 else emit.op("Tan", x)


def _softplus(emit: Emitter, x: Any, dtype: DType) -> Any:
    if dtype is not DType.F64:
        return emit.op("Softplus", x)
    # max(x, 0) + log(1 + exp(-|x|)) never overflows.
    tail = emit.op("Exp", emit.op("Neg", emit.op("Abs", x)))
    return emit.op("Add", emit.op("Relu", x), emit.op("Log", emit.op("Add", tail, emit.constant(1, dtype))))


def _elu(emit: Emitter, x: Any, dtype: DType) -> Any:
    if dtype is not DType.F64:
        return emit.op("Elu", x)
    zero, one = emit.constant(0, dtype), emit.constant(1, dtype)
    below = emit.op("Sub", emit.op("Exp", emit.op("Min", x, zero)), one)
    return emit.op("Add", emit.op("Relu", x), below)


def _hard_sigmoid(emit: Emitter, x: Any, dtype: DType) -> Any:
    if dtype is not DType.F64:
        return emit.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    line = emit.op("Add", emit.op("Div", x, emit.constant(6, dtype)), emit.constant(0.5, dtype))
    return emit.op("Clip", line, emit.constant(0, dtype), emit.constant(1, dtype))


_COMPOSED: dict[str, Callable[[Emitter, Any, DType], Any]] = {
    "gelu": lambda emit, x, dtype: op_in(emit, "Gelu", dtype, x, approximate="none"),
    "gelu_approx": lambda emit, x, dtype: op_in(emit, "Gelu", dtype, x, approximate="tanh"),
    "silu": lambda emit, x, dtype: emit.op("Mul", x, emit.op("Sigmoid", x)),
    "relu": _relu,
    "rsqrt": lambda emit, x, dtype: emit.op("Reciprocal", emit.op("Sqrt", x)),
    "tan": _tan,
    "softplus": _softplus,
    "log_sigmoid": lambda emit, x, dtype: emit.op("Neg", _softplus(emit, emit.op("Neg", x), dtype)),
    "elu": _elu,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda emit, x, dtype: emit.op("Mul", x, _hard_sigmoid(emit, x, dtype)),
    "mish": lambda emit, x, dtype: emit.op("Mul", x, emit.op("Tanh", _softplus(emit, x, dtype))),
    "softsign": lambda emit, x, dtype: emit.op("Div", x, emit.op("Add", emit.op("Abs", x), emit.constant(1, dtype))),
}


@lowers(Binary)
def _binary(emit: Emitter, op: Binary, inputs: Sequence[Any]) -> Any:
    lhs, rhs = inputs
    dtype = emit.input_dtype(0)
    if op.function == "mod":
        return op_in(emit, "Mod", dtype, lhs, rhs, fmod=1)
    if op.function == "atan2":
        return _atan2(emit, lhs, rhs, dtype)
    if op.function in {"shl", "shr"}:
        return _shift(emit, op.function, lhs, rhs, dtype)
    if dtype is DType.BOOL:
        return emit.op(_LOGICAL[op.function], lhs, rhs)
    if op.function == "div" and may_trap(emit):
        divisor, sign = divisor_and_sign(emit, rhs)
        return emit.op("Mul", emit.op("Div", lhs, divisor), sign)
    return op_in(emit, _BINARY[op.function], dtype, lhs, rhs)


def _atan(emit: Emitter, x: Any, dtype: DType) -> Any:
    """Atan; that of f64 is corrected once with sine and cosine, since the CPU kernel takes f32 only.

    For an angle near atan(x), x cos - sin over cos + x sin is the tangent of what is missing, which equals the missing
    angle itself to 1e-20. Beyond 1e30 the angle is a quarter turn, so greater numbers, infinities too, are cut there.
    """
    if dtype is not DType.F64:
        return op_in(emit, "Atan", dtype, x)
    far, near = emit.constant(1e30, dtype), emit.constant(-1e30, dtype)
    x = emit.op("Where", emit.op("Greater", x, far), far, x)
    x = emit.op("Where", emit.op("Less", x, near), near, x)  # NaN stays
    angle = op_in(emit, "Atan", dtype, x)
    sin, cos = emit.op("Sin", angle), emit.op("Cos", angle)
    missing = emit.op("Sub", emit.op("Mul", x, cos), sin)
    return emit.op("Add", angle, emit.op("Div", missing, emit.op("Add", cos, emit.op("Mul", x, sin))))


def _atan2(emit: Emitter, y: Any, x: Any, dtype: DType) -> Any:
    """Atan(y / x), moved by half a turn left of the y axis and replaced on it."""
    zero, pi = emit.constant(0, dtype), emit.constant(math.pi, dtype)
    angle = _atan(emit, emit.op("Div", y, x), dtype)
    half_turn = emit.op("Where", emit.op("Less", y, zero), emit.op("Neg", pi), pi)
    turned = emit.op("Add", angle, emit.op("Where", emit.op("Less", x, zero), half_turn, zero))
    quarter = emit.constant(math.pi / 2, dtype)
    upright = emit.op("Where", emit.op("Greater", y, zero), quarter, y)  # y itself where it is 0 or NaN
    upright = emit.op("Where", emit.op("Less", y, zero), emit.op("Neg", quarter), upright)
    return emit.op("Where", emit.op("Equal", x, zero), upright, turned)


def _shift(emit: Emitter, function: str, x: Any, places: Any, dtype: DType) -> Any:
    """BitShift takes unsigned integers only; a cast between widths keeps the bits of negative numbers."""
    wide = dtype in {DType.I64, DType.U64}
    signed, unsigned = (DType.I64, DType.U64) if wide else (DType.I32, DType.U32)
    by = emit.op("Cast", places, to=unsigned)
    if function == "shl" or not dtype.value.startswith("i"):
        direction = "LEFT" if function == "shl" else "RIGHT"
        return emit.op("Cast", emit.op("BitShift", emit.op("Cast", x, to=unsigned), by, direction=direction), to=dtype)
    # An arithmetic shift of a negative number is the complement of the shift of its complement.
    value = emit.op("Cast", x, to=signed)
    negative = emit.op("Less", value, emit.constant(0, signed))
    magnitude = emit.op("Where", negative, emit.op("BitwiseNot", value), value)
    moved = emit.op("BitShift", emit.op("Cast", magnitude, to=unsigned), by, direction="RIGHT")
    moved = emit.op("Cast", moved, to=signed)
    return emit.op("Cast", emit.op("Where", negative, emit.op("BitwiseNot", moved), moved), to=dtype)


@lowers(Compare)
def _compare(emit: Emitter, op: Compare, inputs: Sequence[Any]) -> Any:
    result = op_in(emit, _COMPARE[op.function], emit.input_dtype(0), *inputs, result=DType.BOOL)
    return emit.op("Not", result) if op.function == "ne" else result


@lowers(Clamp)
def _clamp(emit: Emitter, op: Clamp, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    bounds = [None if bound is None else emit.constant(bound, dtype) for bound in (op.low, op.high)]
    return op_in(emit, "Clip", dtype, inputs[0], *bounds)
