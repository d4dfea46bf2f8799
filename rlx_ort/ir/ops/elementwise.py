"""Elementwise ops: activations, binary ops, comparisons, selection and casts, with numpy's broadcasting."""

from __future__ import annotations

from typing import Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import add_builders, builder, preset
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, named
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


class Activation(Op, operands="x", builder="activation kind:function x"):
    """A function of each element.

    `gelu` is the exact form with erf, `gelu_approx` the tanh form, `round` rounds half to even, `hard_sigmoid` is
    relu6(x + 3) / 6 and `hard_swish` x times that, `elu` has alpha 1.
    """

    function: str = named("activation", ACTIVATIONS)

    def _result(self, x: TensorType) -> None:
        unsigned_neg = self.function == "neg" and x.dtype.value.startswith("u")
        if self.function not in _INTEGER_ACTIVATIONS or not x.dtype.is_integer or unsigned_neg:
            self.expect_float(x, "x")


class Binary(Op, operands="lhs rhs", builder="binary op:function lhs rhs"):
    """A function of two elements of one dtype.

    Integer `div` drops the fraction, `mod` has the sign of the dividend, `shr` of a signed integer keeps its sign.
    """

    promotes = True

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


class Compare(Op, operands="lhs rhs", builder="compare op:function lhs rhs"):
    """A comparison of two elements of one dtype; the result is bool."""

    promotes = True

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


class Clamp(Op, operands="x:number", builder="clamp x low high"):
    """Each element clamped to bounds; None for no bound."""

    low: float | None = None
    high: float | None = None


class Fma(Op, operands="a b c"):
    """a * b + c, broadcast."""

    def _result(self, a: TensorType, b: TensorType, c: TensorType) -> TensorType:
        return _broadcast_type(self, a, b, c)


class StopGradient(Op, operands="x", builder="stop_gradient"):
    """The input unchanged; a marker for training frameworks."""


def _broadcast_type(op: Op, *operands: TensorType) -> TensorType:
    return TensorType(op.same_dtype(*operands), op.broadcast([value.shape for value in operands]))


@builder
def where_(graph: Graph, condition: Operand, then: Operand, otherwise: Operand, **node: Unpack[NodeArgs]) -> Value:
    """Return `then` where the condition is not zero, `otherwise` elsewhere."""
    chosen = graph._as_value(condition).cast(DType.BOOL)
    return graph._add(Where(), chosen, *graph._pair(then, otherwise), **node)


@builder
def cast(graph: Graph, x: Operand, to: DType | str, **node: Unpack[NodeArgs]) -> Value:
    """Convert to a dtype; a value that already has it is returned unchanged."""
    value, dtype = graph._as_value(x), DType.parse(to)
    return value if value.dtype is dtype else graph._add(Cast(dtype), value, **node)


@builder
def fma(graph: Graph, a: Operand, b: Operand, c: Operand, **node: Unpack[NodeArgs]) -> Value:
    """Return a * b + c."""
    left, right = graph._pair(a, b)
    left, addend = graph._pair(left, c)
    return graph._add(Fma(), left, right.cast(left.dtype), addend, **node)


add_builders(Activation, Binary, Compare)
preset(Graph.binary, "add", add="Return lhs + rhs.")
preset(Graph.binary, "sub", sub="Return lhs - rhs.")
preset(Graph.binary, "mul", mul="Return lhs * rhs.")
preset(Graph.binary, "div", div="Return lhs / rhs; integers drop the fraction.")
preset(Graph.binary, "max", maximum="Return the larger element.")
preset(Graph.binary, "min", minimum="Return the smaller element.")
preset(Graph.binary, "pow", pow="Return lhs to the power of rhs.")
for _name, _symbol in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    preset(Graph.compare, _name, **{f"{_name}_": f"Return lhs {_symbol} rhs."})
for _name, _doc in {
    "gelu": "Apply GELU, exact form.",
    "gelu_approx": "Apply GELU, tanh form.",
    "silu": "Return x * sigmoid(x).",
    "relu": "Return max(x, 0).",
    "sigmoid": "Return 1 / (1 + exp(-x)).",
    "tanh": "Return the hyperbolic tangent.",
    "exp": "Return e to the power of x.",
    "log": "Return the natural logarithm.",
    "sqrt": "Return the square root.",
    "rsqrt": "Return 1 / sqrt(x).",
    "neg": "Return -x.",
    "abs": "Return the absolute value.",
}.items():
    preset(Graph.activation, _name, **{_name: _doc})
