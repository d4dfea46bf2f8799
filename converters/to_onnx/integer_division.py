"""Guards for the one integer quotient that ends the process: the least value divided by -1 traps on x86 CPUs.

Dividing by 1 and multiplying by -1 gives the same for every other value, and wraps around for that one, as integer
arithmetic does everywhere else. A remainder by -1 is 0, as by 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlx_ort.ir.dtype import DType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.emitter import Emitter
    from rlx_ort.converters.to_onnx.model import ModelValue

__all__ = ["divisor_and_sign", "may_trap"]

_TRAPPING = frozenset({DType.I32, DType.I64})  # narrower ones are divided as i32, where their least value fits


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
