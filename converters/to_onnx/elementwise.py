"""ONNX forms of the elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from rlx_ort.converters.to_onnx.dispatch import lowers_native
from rlx_ort.converters.to_onnx.emitter import Emitter, lowers
from rlx_ort.converters.to_onnx.kernel_dtypes import divisor_and_sign, may_trap, op_in, where_in
from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.converters.to_onnx.shape import slice_axis
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.elementwise import Activation, Binary, Cast, Clamp, Compare, Fma, StopGradient, Where
from rlx_ort.ir.ops.norm import FusedSwiGLU
from rlx_ort.ir.types import TensorType

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
    if dtype is DType.F64 and function in _F64 and not (function == "sigmoid" and emit.has_kernel("Sigmoid", _DOUBLES)):
        return _F64[function](emit, x)
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


_GELUS = {"gelu", "gelu_approx"}
_DOUBTFUL = {
    DType.I64: {"max", "min", "relu", "sign"},
    DType.F64: {"sigmoid", "silu"},
    DType.BOOL: {"bit_and"},
    **dict.fromkeys((DType.F16, DType.F32), _GELUS),
}


def _asks(op: Activation | Binary, kind: TensorType, _: Any) -> bool:
    return op.function in _DOUBTFUL.get(kind.dtype, ()) or (op.function == "pow" and kind.dtype.is_float)


lowers(Activation, asks=_asks)(lambda emit, op, inputs: activate(emit, op.function, inputs[0], emit.input_dtype(0)))
lowers(Cast)(lambda emit, op, inputs: emit.op("Cast", inputs[0], to=op.to))
lowers(Fma)(lambda emit, op, inputs: emit.op("Add", emit.op("Mul", *inputs[:2]), inputs[2]))
lowers(StopGradient)(lambda emit, op, inputs: emit.op("Identity", inputs[0]))
lowers(Where)(lambda emit, op, inputs: where_in(emit, inputs[0], emit.input_dtype(1), *inputs[1:]))


def _relu(emit: Emitter, x: Any, dtype: DType) -> Any:
    return op_in(emit, "Max", dtype, x, emit.constant(0, dtype)) if dtype.is_integer else emit.op("Relu", x)


def _softplus(emit: Emitter, x: Any, dtype: DType) -> Any:
    return _F64["softplus"](emit, x) if dtype is DType.F64 else emit.op("Softplus", x)


def _hard_sigmoid(emit: Emitter, x: Any, dtype: DType) -> Any:
    if dtype is not DType.F64:
        return emit.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    line = emit.op("Add", emit.op("Div", x, emit.constant(6, dtype)), emit.constant(0.5, dtype))
    return emit.op("Clip", line, emit.constant(0, dtype), emit.constant(1, dtype))


def other_gelu(emit: Emitter, x: Any, dtype: DType, approximate: str) -> Any:
    """Return a gelu for a provider without ONNX's Gelu, None if it has that.

    DirectML 1.24 has the Gelu of ONNX Runtime, and its FastGelu computes the exact function too: 5e-4 from tanh's.
    """
    if emit.has_kernel("Gelu", TensorType(DType.F32)):
        return None
    if approximate == "none":
        has_own = emit.has_kernel("Gelu", TensorType(dtype), domain="com.microsoft")
        return emit.op("Gelu", x, domain="com.microsoft") if has_own else None
    cube = emit.op("Mul", emit.op("Mul", x, x), x)
    inner = emit.op("Add", x, emit.op("Mul", cube, emit.constant(0.044715, dtype)))
    tanh = emit.op("Tanh", emit.op("Mul", inner, emit.constant(math.sqrt(2 / math.pi), dtype)))
    return emit.op("Mul", emit.op("Mul", x, emit.constant(0.5, dtype)), emit.op("Add", tanh, emit.constant(1, dtype)))


def _gelu(emit: Emitter, x: Any, dtype: DType, approximate: str = "none") -> Any:
    other = other_gelu(emit, x, dtype, approximate) if dtype in (DType.F16, DType.F32) else None
    return op_in(emit, "Gelu", dtype, x, approximate=approximate) if other is None else other


_COMPOSED: dict[str, Callable[[Emitter, Any, DType], Any]] = {
    "gelu": lambda emit, x, dtype: _gelu(emit, x, dtype),
    "gelu_approx": lambda emit, x, dtype: _gelu(emit, x, dtype, approximate="tanh"),
    "silu": lambda emit, x, dtype: emit.op("Mul", x, activate(emit, "sigmoid", x, dtype)),
    "relu": _relu,
    "rsqrt": lambda emit, x, dtype: emit.op("Reciprocal", emit.op("Sqrt", x)),
    "tan": lambda emit, x, dtype: emit.op("Tan", x),
    "softplus": _softplus,
    "log_sigmoid": lambda emit, x, dtype: emit.op("Neg", _softplus(emit, emit.op("Neg", x), dtype)),
    "elu": lambda emit, x, dtype: emit.op("Elu", x),
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda emit, x, dtype: emit.op("Mul", x, _hard_sigmoid(emit, x, dtype)),
    "mish": lambda emit, x, dtype: emit.op("Mul", x, emit.op("Tanh", _softplus(emit, x, dtype))),
    "softsign": lambda emit, x, dtype: emit.op("Div", x, emit.op("Add", emit.op("Abs", x), emit.constant(1, dtype))),
}


@lowers(Binary, asks=_asks)
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
        product = conjunction(emit, lhs, rhs) if op.function == "bit_and" else None
        return emit.op(_LOGICAL[op.function], lhs, rhs) if product is None else emit.op("Cast", product, to=dtype)
    if op.function == "pow" and dtype.is_float:
        return power(emit, lhs, rhs, dtype)
    if op.function == "div" and may_trap(emit):
        divisor, sign = divisor_and_sign(emit, rhs)
        return emit.op("Mul", emit.op("Div", lhs, divisor), sign)
    return op_in(emit, _BINARY[op.function], dtype, lhs, rhs)


def conjunction(emit: Emitter, lhs: Any, rhs: Any) -> Any:
    """And of the first two inputs as a product of numbers, where the kernel is wrong on two shapes; None elsewhere.

    Within a process, WebGPU runs an And with the program of another one, if both broadcast and have the same ranks, but
    other dims that 4 divides (plugin 0.4.0). Operands of one shape, or of one element, are right.
    """
    shapes = [getattr(emit.known_type(index), "shape", None) for index in range(2)]
    alike = shapes[0] is not None and shapes[0] == shapes[1] and None not in shapes[0]
    single = any(shape is not None and shape.num_elements == 1 for shape in shapes)
    if alike or single or emit.has_kernel("And", TensorType(DType.BOOL)):
        return None
    return emit.op("Mul", emit.cast(lhs, DType.I32), emit.cast(rhs, DType.I32))


def power(emit: Emitter, base: Any, exponent: Any, dtype: DType) -> Any:
    """Pow, NaN for negative numbers to broken exponents, which WebGPU takes for positive ones (plugin 0.4.0)."""
    power = op_in(emit, "Pow", dtype, base, exponent)
    if emit.has_kernel("Pow", TensorType(dtype)):
        return power
    data = emit.input_data(1)
    broken = None if data is None else data.numpy() != np.rint(data.numpy())
    if broken is not None and not broken.any():
        return power
    outside = emit.op("Less", base, emit.constant(0, dtype))
    if broken is None or not broken.all():
        whole = emit.op("Equal", exponent, emit.op("Floor", exponent))
        outside = emit.op("And", outside, emit.op("Not", whole))
    return emit.op("Where", outside, emit.constant(np.nan, dtype), power)


class Doubles:
    """Arithmetic on values of f64, for the functions that the CPU's kernels compute in f32, coarsely or not at all."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit

    def __call__(self, op_type: str, *operands: Any) -> Any:
        """Append an op on values and numbers."""
        numbers = (float, int)
        given = [self.emit.constant(each, DType.F64) if isinstance(each, numbers) else each for each in operands]
        return self.emit.op(op_type, *given)

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        """Return a polynomial by Horner's rule, the highest power first."""
        value: Any = coefficients[0]
        for each in coefficients[1:]:
            value = self("Add", self("Mul", value, x), each)
        return value

    def log1p(self, x: Any) -> Any:
        """Return log(1 + x): the rounding of the sum is made up for by x / ((1 + x) - 1)."""
        total = self("Add", x, 1)
        kept = self("Sub", total, 1)
        lost = self("Equal", kept, 0)
        ratio = self("Div", x, self("Where", lost, 1, kept))
        return self("Where", lost, x, self("Mul", self("Log", total), ratio))

    def expm1(self, x: Any) -> Any:
        """Return exp(x) - 1 of numbers up to 0, by the same correction."""
        power = self("Exp", x)
        kept, exponent = self("Sub", power, 1), self("Log", power)
        plain = self("Or", self("Equal", kept, 0), self("Less", x, -30.0))
        ratio = self("Div", x, self("Where", plain, 1, exponent))
        corrected = self("Mul", kept, ratio)
        return self("Where", self("Equal", kept, 0), x, self("Where", plain, kept, corrected))

    def error_function(self, x: Any, *, complement: bool = False) -> Any:
        """Return erf(x), or 1 - erf(x), by Cody's rational approximations (Math. Comp. 23, 1969).

        The one for 0.47 to 4 is good to 1e-14 up to 4 and to 1e-11 up to 7; the complement is below 1e-22 beyond.
        """
        size = self("Abs", x)
        square = self("Mul", x, x)
        inner = [self.polynomial(square, part) for part in _ERF_NEAR]
        near = self("Mul", x, self("Div", *inner))
        outer = [self.polynomial(self("Min", size, 30), part) for part in _ERF_FAR]  # no ratio of infinities
        tail = self("Mul", self("Exp", self("Neg", square)), self("Div", *outer))
        is_near, left = self("Less", size, 0.46875), self("Less", x, 0)
        if complement:
            return self("Where", is_near, self("Sub", 1, near), self("Where", left, self("Sub", 2, tail), tail))
        far = self("Sub", 1, tail)
        return self("Where", is_near, near, self("Where", left, self("Neg", far), far))


_ERF_NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_ERF_FAR = (
    (
        *(2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1),
        *(2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3),
        1.23033935479799725e3,
    ),
    (
        *(1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3),
        *(3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
    ),
)
"""Numerator and denominator of Cody's approximations: erf(x) / x in x * x, and exp(x * x) * (1 - erf(x)) in x."""


def _sigmoid_f64(emit: Emitter, x: Any) -> Any:
    return emit.op("Reciprocal", emit.op("Add", emit.op("Exp", emit.op("Neg", x)), emit.constant(1, DType.F64)))


def _softplus_f64(emit: Emitter, x: Any) -> Any:
    """Max(x, 0) + log(1 + exp(-|x|)), which never overflows."""
    return emit.op("Add", emit.op("Relu", x), Doubles(emit).log1p(emit.op("Exp", emit.op("Neg", emit.op("Abs", x)))))


def _elu_f64(emit: Emitter, x: Any) -> Any:
    doubles = Doubles(emit)
    return doubles("Add", doubles("Relu", x), doubles.expm1(doubles("Min", x, 0)))


def _gelu_f64(emit: Emitter, x: Any) -> Any:
    doubles = Doubles(emit)
    return doubles(
        "Mul", doubles("Mul", x, 0.5), doubles.error_function(doubles("Mul", x, -math.sqrt(0.5)), complement=True)
    )


def _gelu_approx_f64(emit: Emitter, x: Any) -> Any:
    """(1 + tanh(u)) / 2 is the sigmoid of 2 u."""
    doubles, scale = Doubles(emit), 2 * math.sqrt(2 / math.pi)
    cube = doubles("Add", doubles("Mul", doubles("Mul", x, x), 0.044715 * scale), scale)
    return doubles("Mul", x, _sigmoid_f64(emit, doubles("Mul", x, cube)))


def _atan_f64(emit: Emitter, x: Any) -> Any:
    """The angle in f32, corrected once with sine and cosine.

    For an angle near atan(x), x cos - sin over cos + x sin is the tangent of the missing part, which equals the missing
    angle itself to 1e-20. Beyond 1e30 the angle is a quarter turn, so greater numbers, infinities too, are cut there.
    """
    doubles = Doubles(emit)
    x = doubles("Where", doubles("Greater", x, 1e30), 1e30, x)
    x = doubles("Where", doubles("Less", x, -1e30), -1e30, x)  # NaN stays
    angle = op_in(emit, "Atan", DType.F64, x)
    sin, cos = emit.op("Sin", angle), emit.op("Cos", angle)
    missing = emit.op("Sub", emit.op("Mul", x, cos), sin)
    return emit.op("Add", angle, emit.op("Div", missing, emit.op("Add", cos, emit.op("Mul", x, sin))))


_F64: dict[str, Callable[[Emitter, Any], Any]] = {
    "atan": _atan_f64,
    "elu": _elu_f64,
    "erf": lambda emit, x: Doubles(emit).error_function(x),
    "gelu": _gelu_f64,
    "gelu_approx": _gelu_approx_f64,
    "sigmoid": _sigmoid_f64,
    "softplus": _softplus_f64,
    "tan": lambda emit, x: emit.op("Div", emit.op("Sin", x), emit.op("Cos", x)),
}
"""Activations whose kernel for f64 is missing, or coarse as the CPU's Sigmoid, which is 0 from -37 down."""
_DOUBLES = TensorType(DType.F64)


def _atan2(emit: Emitter, y: Any, x: Any, dtype: DType) -> Any:
    """Atan(y / x), moved by half a turn left of the y axis and replaced on it; zeros have signs, infinities a ratio."""
    zero, pi = emit.constant(0, dtype), emit.constant(math.pi, dtype)
    most = float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]  # of ml_dtypes
    largest = emit.constant(most, dtype)
    endless = emit.op("Greater", emit.op("Min", emit.op("Abs", y), emit.op("Abs", x)), largest)
    one, minus = emit.constant(1, dtype), emit.constant(-1, dtype)
    units = (emit.op("Where", emit.op("Less", each, zero), minus, one) for each in (y, x))
    over = (emit.op("Where", endless, unit, each) for unit, each in zip(units, (y, x), strict=True))
    angle = activate(emit, "atan", emit.op("Div", *over), dtype)
    signs = (emit.op("Where", emit.op("Equal", each, zero), emit.op("Reciprocal", each), each) for each in (y, x))
    below, left = (emit.op("Less", sign, zero) for sign in signs)
    half_turn = emit.op("Where", below, emit.op("Neg", pi), pi)
    turned = emit.op("Add", angle, emit.op("Where", left, half_turn, zero))
    quarter = emit.constant(math.pi / 2, dtype)
    upright = emit.op("Where", emit.op("Equal", y, zero), emit.op("Where", left, half_turn, y), y)  # y: 0 or NaN
    upright = emit.op("Where", emit.op("Greater", y, zero), quarter, upright)
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


@lowers(Clamp, asks=lambda _, kind, __: kind.dtype is DType.I64)
def _clamp(emit: Emitter, op: Clamp, inputs: Sequence[Any]) -> Any:
    dtype = emit.input_dtype(0)
    bounds = [None if bound is None else emit.constant(bound, dtype) for bound in (op.low, op.high)]
    return op_in(emit, "Clip", dtype, inputs[0], *bounds)
