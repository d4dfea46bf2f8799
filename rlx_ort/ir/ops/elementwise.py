"""Elementwise ops: activations, binary ops, comparisons, selection and casts, with numpy's broadcasting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.infer import broadcast, expect_float, known_name, same_dtype
from rlx_ort.ir.op import Op, OpTypes, tensor_input
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.shape import Dim
from rlx_ort.ir.types import TensorType, ValueType

__all__ = [
    "ACTIVATIONS",
    "BINARIES",
    "COMPARISONS",
    "Activation",
    "Binary",
    "Cast",
    "Clamp",
    "Compare",
    "ElementwiseBuilders",
    "Fma",
    "StopGradient",
    "Where",
]

# Name -> floating-point operations an element, roughly; those of 1 that also take integers are listed below.
_FLOPS = {
    "gelu": 12, "gelu_approx": 14, "silu": 6, "relu": 1, "sigmoid": 5, "tanh": 6, "exp": 4, "log": 4, "sqrt": 1,
    "rsqrt": 2, "neg": 1, "abs": 1, "sin": 4, "cos": 4, "tan": 6, "atan": 6, "round": 1, "recip": 1, "floor": 1,
    "ceil": 1, "sign": 1, "softplus": 8, "elu": 5, "erf": 8, "hard_swish": 4, "hard_sigmoid": 3, "mish": 14,
    "softsign": 3, "log_sigmoid": 9,
}  # fmt: skip
ACTIVATIONS = tuple(_FLOPS)
"""Names of the activations."""
_INTEGER_ACTIVATIONS = {"relu", "neg", "abs", "sign"}

_SYMBOLS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "%": "mod", "&": "bit_and", "|": "bit_or",
    "^": "bit_xor", "<<": "shl", ">>": "shr", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
}  # fmt: skip
BINARIES = (
    "add", "sub", "mul", "div", "max", "min", "pow", "mod", "bit_and", "bit_or", "bit_xor", "shl", "shr", "atan2",
)  # fmt: skip
"""Names of the binary ops; `+ - * / ** % & | ^ << >>` are understood as well."""
_BITWISE = {"bit_and", "bit_or", "bit_xor"}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
"""Names of the comparisons; `== != < <= > >=` are understood as well."""


@dataclass(frozen=True, slots=True)
class Activation(Op):
    """A function of each element.

    `gelu` is the exact form with erf, `gelu_approx` the tanh form, `round` goes half to even, `hard_sigmoid` is
    relu6(x + 3) / 6 and `hard_swish` x times that, `elu` has alpha 1.
    """

    function: str

    arity = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", known_name("activation", self.function, ACTIVATIONS))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        x = tensor_input(self, inputs, 0, "x")
        unsigned_neg = self.function == "neg" and x.dtype.value.startswith("u")
        if self.function not in _INTEGER_ACTIVATIONS or not x.dtype.is_integer or unsigned_neg:
            expect_float(self, x, "x")
        return (x,)


@dataclass(frozen=True, slots=True)
class Binary(Op):
    """A function of two elements of one dtype.

    Integer `div` drops the fraction, `mod` has the sign of the dividend, `shr` of a signed integer keeps its sign.
    """

    function: str

    arity = (2, 2)

    def __post_init__(self) -> None:
        name = _SYMBOLS.get(self.function, self.function)
        object.__setattr__(self, "function", known_name("binary op", name, BINARIES))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the broadcast type."""
        result = _broadcast_type(self, inputs, ("lhs", "rhs"))
        dtype = result.dtype
        if self.function in _BITWISE:
            fits, wanted = dtype.is_integer or dtype is DType.BOOL, "integers or bool"
        elif self.function in {"shl", "shr"}:
            fits, wanted = dtype.is_integer, "integers"
        elif self.function == "atan2":
            fits, wanted = dtype.is_float, "floating-point numbers"
        else:
            fits, wanted = dtype is not DType.BOOL, "numbers"
        if not fits:
            raise GraphVerifyError(f"{self.function} takes {wanted}, not {dtype.value}; cast the operands first")
        return (result,)


@dataclass(frozen=True, slots=True)
class Compare(Op):
    """A comparison of two elements of one dtype; the result is bool."""

    function: str

    arity = (2, 2)

    def __post_init__(self) -> None:
        name = _SYMBOLS.get(self.function, self.function)
        object.__setattr__(self, "function", known_name("comparison", name, COMPARISONS))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the broadcast shape as bool."""
        return (TensorType(DType.BOOL, _broadcast_type(self, inputs, ("lhs", "rhs")).shape),)


@dataclass(frozen=True, slots=True)
class Where(Op):
    """Element of the second input where the first (bool) is true, of the third elsewhere."""

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the broadcast type of the branches and the condition."""
        condition = tensor_input(self, inputs, 0, "condition")
        if condition.dtype is not DType.BOOL:
            raise GraphVerifyError(f"Where needs a bool condition, got {condition.dtype.value}; cast it first")
        branches = _broadcast_type(self, inputs[1:], ("then", "else"))
        return (TensorType(branches.dtype, broadcast(self, (condition.shape, branches.shape))),)


@dataclass(frozen=True, slots=True)
class Cast(Op):
    """Conversion to another dtype: float to integer drops the fraction, to bool is `!= 0`."""

    to: DType

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the shape of the input with the new dtype."""
        return (TensorType(self.to, tensor_input(self, inputs, 0, "x").shape),)


@dataclass(frozen=True, slots=True)
class Clamp(Op):
    """Each element held between two bounds, either of which may be None."""

    low: float | None = None
    high: float | None = None

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        x = tensor_input(self, inputs, 0, "x")
        if not (x.dtype.is_float or x.dtype.is_integer):
            raise GraphVerifyError(f"Clamp takes numbers, not {x.dtype.value}; cast the input first")
        return (x,)


@dataclass(frozen=True, slots=True)
class Fma(Op):
    """a * b + c, broadcast."""

    arity = (3, 3)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the broadcast type."""
        return (_broadcast_type(self, inputs, ("a", "b", "c")),)


@dataclass(frozen=True, slots=True)
class StopGradient(Op):
    """The input unchanged; a marker for training frameworks."""

    arity = (1, 1)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the input."""
        return (tensor_input(self, inputs, 0, "x"),)


def _broadcast_type(op: Op, inputs: OpTypes, names: tuple[str, ...]) -> TensorType:
    dtype = same_dtype(op, inputs, names)
    shapes = [tensor_input(op, inputs, index, name).shape for index, name in enumerate(names)]
    return TensorType(dtype, broadcast(op, shapes))


class ElementwiseBuilders(LeafBuilders):
    """Builders of the elementwise ops. Operands of two dtypes are cast to the one `promote` names."""

    __slots__ = ()

    def activation(
        self, kind: str, x: Operand, *, shape: Iterable[Dim] | None = None, name: str | None = None
    ) -> Value:
        """Apply an activation by name (`ACTIVATIONS`).

        Raises:
            GraphVerifyError: there is no such activation, or it does not take the dtype.
        """
        return self._add(Activation(kind), self._as_value(x), shape=shape, name=name)

    def binary(
        self, op: str, lhs: Operand, rhs: Operand, *, shape: Iterable[Dim] | None = None, name: str | None = None
    ) -> Value:
        """Apply a binary op by name or symbol (`BINARIES`).

        Raises:
            GraphVerifyError: there is no such op, it does not take the dtype, or the shapes do not broadcast.
        """
        return self._add(Binary(op), *self._pair(lhs, rhs), shape=shape, name=name)

    def compare(
        self, op: str, lhs: Operand, rhs: Operand, *, shape: Iterable[Dim] | None = None, name: str | None = None
    ) -> Value:
        """Compare by name or symbol (`COMPARISONS`); the result is bool.

        Raises:
            GraphVerifyError: there is no such comparison, or the shapes do not broadcast.
        """
        return self._add(Compare(op), *self._pair(lhs, rhs), shape=shape, name=name)

    def where_(self, condition: Operand, then: Operand, otherwise: Operand, *, name: str | None = None) -> Value:
        """Return `then` where the condition is not zero, `otherwise` elsewhere."""
        chosen = self._as_value(condition).cast(DType.BOOL)
        return self._add(Where(), chosen, *self._pair(then, otherwise), name=name)

    def cast(self, x: Operand, to: DType | str, *, name: str | None = None) -> Value:
        """Convert to a dtype; a value that already has it is returned as it is."""
        value, dtype = self._as_value(x), DType.parse(to)
        return value if value.dtype is dtype else self._add(Cast(dtype), value, name=name)

    def clamp(
        self, x: Operand, low: float | None = None, high: float | None = None, *, name: str | None = None
    ) -> Value:
        """Hold each element between bounds."""
        return self._add(Clamp(low, high), self._as_value(x), name=name)

    def fma(self, a: Operand, b: Operand, c: Operand, *, name: str | None = None) -> Value:
        """Return a * b + c."""
        left, right = self._pair(a, b)
        left, addend = self._pair(left, c)
        return self._add(Fma(), left, right.cast(left.dtype), addend, name=name)

    def stop_gradient(self, x: Operand, *, name: str | None = None) -> Value:
        """Return the value unchanged, marked for training frameworks."""
        return self._add(StopGradient(), self._as_value(x), name=name)

    def add(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs + rhs."""
        return self.binary("add", lhs, rhs)

    def sub(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs - rhs."""
        return self.binary("sub", lhs, rhs)

    def mul(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs * rhs."""
        return self.binary("mul", lhs, rhs)

    def div(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs / rhs; integers drop the fraction."""
        return self.binary("div", lhs, rhs)

    def maximum(self, lhs: Operand, rhs: Operand) -> Value:
        """Return the larger element."""
        return self.binary("max", lhs, rhs)

    def minimum(self, lhs: Operand, rhs: Operand) -> Value:
        """Return the smaller element."""
        return self.binary("min", lhs, rhs)

    def pow(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs to the power of rhs."""
        return self.binary("pow", lhs, rhs)

    def eq_(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs == rhs."""
        return self.compare("eq", lhs, rhs)

    def ne_(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs != rhs."""
        return self.compare("ne", lhs, rhs)

    def lt_(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs < rhs."""
        return self.compare("lt", lhs, rhs)

    def le_(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs <= rhs."""
        return self.compare("le", lhs, rhs)

    def gt_(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs > rhs."""
        return self.compare("gt", lhs, rhs)

    def ge_(self, lhs: Operand, rhs: Operand) -> Value:
        """Return lhs >= rhs."""
        return self.compare("ge", lhs, rhs)

    def gelu(self, x: Operand) -> Value:
        """Apply GELU, exact form."""
        return self.activation("gelu", x)

    def gelu_approx(self, x: Operand) -> Value:
        """Apply GELU, tanh form."""
        return self.activation("gelu_approx", x)

    def silu(self, x: Operand) -> Value:
        """Return x * sigmoid(x)."""
        return self.activation("silu", x)

    def relu(self, x: Operand) -> Value:
        """Return max(x, 0)."""
        return self.activation("relu", x)

    def sigmoid(self, x: Operand) -> Value:
        """Return 1 / (1 + exp(-x))."""
        return self.activation("sigmoid", x)

    def tanh(self, x: Operand) -> Value:
        """Return the hyperbolic tangent."""
        return self.activation("tanh", x)

    def exp(self, x: Operand) -> Value:
        """Return e to the power of x."""
        return self.activation("exp", x)

    def log(self, x: Operand) -> Value:
        """Return the natural logarithm."""
        return self.activation("log", x)

    def sqrt(self, x: Operand) -> Value:
        """Return the square root."""
        return self.activation("sqrt", x)

    def rsqrt(self, x: Operand) -> Value:
        """Return 1 / sqrt(x)."""
        return self.activation("rsqrt", x)

    def neg(self, x: Operand) -> Value:
        """Return -x."""
        return self.activation("neg", x)

    def abs(self, x: Operand) -> Value:
        """Return the absolute value."""
        return self.activation("abs", x)
