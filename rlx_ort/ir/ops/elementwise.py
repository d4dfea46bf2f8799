"""Elementwise ops: activations, binary ops, comparisons, selection and casts, with numpy's broadcasting."""

from __future__ import annotations

from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, named
from rlx_ort.ir.ops.leaf import LeafBuilders, NodeArgs, Operand, preset
from rlx_ort.ir.types import TensorType

ACTIVATIONS = (
    "gelu", "gelu_approx", "silu", "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "sin",
    "cos", "tan", "atan", "round", "recip", "floor", "ceil", "sign", "softplus", "elu", "erf", "hard_swish",
    "hard_sigmoid", "mish", "softsign", "log_sigmoid",
)  # fmt: skip
"""Names of the activations."""
_INTEGER_ACTIVATIONS = {"relu", "neg", "abs", "sign"}

_SYMBOLS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "%": "mod", "&": "bit_and", "|": "bit_or",
    "^": "bit_xor", "<<": "shl", ">>": "shr", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
}  # fmt: skip
BINARIES = (
    "add", "sub", "mul", "div", "max", "min", "pow", "mod", "bit_and", "bit_or", "bit_xor", "shl", "shr", "atan2",
)  # fmt: skip
"""Names of the binary ops; `+ - * / ** % & | ^ << >>` are accepted as well."""
_BITWISE = {"bit_and", "bit_or", "bit_xor"}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
"""Names of the comparisons; `== != < <= > >=` are accepted as well."""


class Activation(Op, operands="x"):
    """A function of each element.

    `gelu` is the exact form with erf, `gelu_approx` the tanh form, `round` rounds half to even, `hard_sigmoid` is
    relu6(x + 3) / 6 and `hard_swish` x times that, `elu` has alpha 1.
    """

    function: str = named("activation", ACTIVATIONS)

    def _result(self, x: TensorType) -> None:
        unsigned_neg = self.function == "neg" and x.dtype.value.startswith("u")
        if self.function not in _INTEGER_ACTIVATIONS or not x.dtype.is_integer or unsigned_neg:
            self.expect_float(x, "x")


class Binary(Op, operands="lhs rhs"):
    """A function of two elements of one dtype.

    Integer `div` drops the fraction, `mod` has the sign of the dividend, `shr` of a signed integer keeps its sign.
    """

    function: str = named("binary op", BINARIES, aliases=_SYMBOLS)

    def _result(self, lhs: TensorType, rhs: TensorType) -> TensorType:
        result = _broadcast_type(self, lhs, rhs)
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
        return result


class Compare(Op, operands="lhs rhs"):
    """A comparison of two elements of one dtype; the result is bool."""

    function: str = named("comparison", COMPARISONS, aliases=_SYMBOLS)

    def _result(self, lhs: TensorType, rhs: TensorType) -> TensorType:
        return TensorType(DType.BOOL, _broadcast_type(self, lhs, rhs).shape)


class Where(Op, operands="condition then else"):
    """Element of the second input where the first (bool) is true, of the third elsewhere."""

    def _result(self, condition: TensorType, then: TensorType, otherwise: TensorType) -> TensorType:
        if condition.dtype is not DType.BOOL:
            raise GraphVerifyError(f"Where needs a bool condition, got {condition.dtype.value}; cast it first")
        dtype = self.same_dtype(then, otherwise, names=("then", "else"))
        return TensorType(dtype, self.broadcast((condition.shape, then.shape, otherwise.shape)))


class Cast(Op, operands="x"):
    """Conversion to another dtype: float to integer drops the fraction, to bool is `!= 0`."""

    to: DType

    def _result(self, x: TensorType) -> TensorType:
        return TensorType(self.to, x.shape)


class Clamp(Op, operands="x:number"):
    """Each element clamped to bounds; None for no bound."""

    low: float | None = None
    high: float | None = None


class Fma(Op, operands="a b c"):
    """a * b + c, broadcast."""

    def _result(self, a: TensorType, b: TensorType, c: TensorType) -> TensorType:
        return _broadcast_type(self, a, b, c)


class StopGradient(Op, operands="x"):
    """The input unchanged; a marker for training frameworks."""


def _broadcast_type(op: Op, *operands: TensorType) -> TensorType:
    return TensorType(op.same_dtype(*operands), op.broadcast([value.shape for value in operands]))


class ElementwiseBuilders(LeafBuilders):
    """Builders of the elementwise ops. Operands of two dtypes are cast to the one `promote` names."""

    __slots__ = ()

    def activation(self, kind: str, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Apply an activation by name (`ACTIVATIONS`)."""
        return self._add(Activation(kind), x, **node)

    def binary(self, op: str, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Apply a binary op by name or symbol (`BINARIES`)."""
        return self._add(Binary(op), *self._pair(lhs, rhs), **node)

    def compare(self, op: str, lhs: Operand, rhs: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Compare by name or symbol (`COMPARISONS`); the result is bool."""
        return self._add(Compare(op), *self._pair(lhs, rhs), **node)

    def where_(self, condition: Operand, then: Operand, otherwise: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return `then` where the condition is not zero, `otherwise` elsewhere."""
        chosen = self._as_value(condition).cast(DType.BOOL)
        return self._add(Where(), chosen, *self._pair(then, otherwise), **node)

    def cast(self, x: Operand, to: DType | str, **node: Unpack[NodeArgs]) -> Value:
        """Convert to a dtype; a value that already has it is returned unchanged."""
        value, dtype = self._as_value(x), DType.parse(to)
        return value if value.dtype is dtype else self._add(Cast(dtype), value, **node)

    def clamp(self, x: Operand, low: float | None = None, high: float | None = None, **node: Unpack[NodeArgs]) -> Value:
        """Clamp each element to bounds."""
        return self._add(Clamp(low, high), x, **node)

    def fma(self, a: Operand, b: Operand, c: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return a * b + c."""
        left, right = self._pair(a, b)
        left, addend = self._pair(left, c)
        return self._add(Fma(), left, right.cast(left.dtype), addend, **node)

    def stop_gradient(self, x: Operand, **node: Unpack[NodeArgs]) -> Value:
        """Return the value unchanged, marked for training frameworks."""
        return self._add(StopGradient(), x, **node)

    add = preset(binary, "add", "Return lhs + rhs.")
    sub = preset(binary, "sub", "Return lhs - rhs.")
    mul = preset(binary, "mul", "Return lhs * rhs.")
    div = preset(binary, "div", "Return lhs / rhs; integers drop the fraction.")
    maximum = preset(binary, "max", "Return the larger element.")
    minimum = preset(binary, "min", "Return the smaller element.")
    pow = preset(binary, "pow", "Return lhs to the power of rhs.")
    eq_ = preset(compare, "eq", "Return lhs == rhs.")
    ne_ = preset(compare, "ne", "Return lhs != rhs.")
    lt_ = preset(compare, "lt", "Return lhs < rhs.")
    le_ = preset(compare, "le", "Return lhs <= rhs.")
    gt_ = preset(compare, "gt", "Return lhs > rhs.")
    ge_ = preset(compare, "ge", "Return lhs >= rhs.")
    gelu = preset(activation, "gelu", "Apply GELU, exact form.")
    gelu_approx = preset(activation, "gelu_approx", "Apply GELU, tanh form.")
    silu = preset(activation, "silu", "Return x * sigmoid(x).")
    relu = preset(activation, "relu", "Return max(x, 0).")
    sigmoid = preset(activation, "sigmoid", "Return 1 / (1 + exp(-x)).")
    tanh = preset(activation, "tanh", "Return the hyperbolic tangent.")
    exp = preset(activation, "exp", "Return e to the power of x.")
    log = preset(activation, "log", "Return the natural logarithm.")
    sqrt = preset(activation, "sqrt", "Return the square root.")
    rsqrt = preset(activation, "rsqrt", "Return 1 / sqrt(x).")
    neg = preset(activation, "neg", "Return -x.")
    abs = preset(activation, "abs", "Return the absolute value.")
