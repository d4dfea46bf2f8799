"""Elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from interpreter.core import RULES, Array, result_dtype, rule, sized
from rlx_ort.ir.core import Node
from rlx_ort.ir.ops.elementwise import Activation, Binary, Cast, Clamp, Compare, Fma, StopGradient, Where

__all__ = ["ACTIVATION", "activation"]

_erf = np.vectorize(math.erf, otypes=[float])

ACTIVATION: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_approx": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": np.negative,
    "abs": np.abs,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "atan": np.arctan,
    "round": np.rint,
    "recip": lambda x: 1 / x,
    "floor": np.floor,
    "ceil": np.ceil,
    "sign": np.sign,
    "softplus": lambda x: np.logaddexp(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "erf": _erf,
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "log_sigmoid": lambda x: -np.logaddexp(-x, 0),
}
"""Activation -> its formula."""

_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "mod": np.fmod,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "atan2": np.arctan2,
}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def activation(name: str | None, x: Array) -> Array:
    """Return an activation by name, the input itself for None."""
    return x if name is None else ACTIVATION[name](x)


@rule(Binary)
def _binary(node: Node, op: Binary, a: Array, b: Array) -> Array:
    if op.function != "div":
        return sized(node, _BINARY[op.function](a, b))
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    # Toward zero: the magnitude of the quotient, then its sign.
    return sized(node, np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))


@rule(Cast)
def _cast(node: Node, op: Cast, x: Array) -> Array:
    dtype = result_dtype(node)
    if dtype.is_integer and x.dtype.kind == "f":
        x = np.trunc(x)
    return sized(node, x != 0 if dtype.value == "bool" else x)


@rule(Clamp)
def _clamp(node: Node, op: Clamp, x: Array) -> Array:
    low = -np.inf if op.low is None else op.low
    high = np.inf if op.high is None else op.high
    return sized(node, np.clip(x.astype(np.float64), low, high))


RULES.update(
    {
        Activation: lambda node, op, x: sized(node, ACTIVATION[op.function](x)),
        Compare: lambda node, op, a, b: _COMPARE[op.function](a, b),
        Where: lambda node, op, condition, then, otherwise: np.where(condition, then, otherwise),
        Fma: lambda node, op, a, b, c: sized(node, a * b + c),
        StopGradient: lambda node, op, x: x,
    }
)
