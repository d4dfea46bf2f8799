"""A reference interpreter of the IR: each op in numpy float64, written from its definition and from nothing else.

It shares no code with the exporter: no lowering, no ONNX, no decomposition of the library is used. Floats are
computed in f64 whatever their dtype; integers and bool keep theirs, so they wrap as the engine's do.

    evaluate(graph, {"x": array}) -> the outputs, in order
"""

from __future__ import annotations

from interpreter import control, elementwise, layers, packed, sequence, tensors
from interpreter.core import RULES, Array, evaluate, wide

__all__ = ["FAMILIES", "RULES", "Array", "evaluate", "wide"]

FAMILIES = (control, elementwise, layers, packed, sequence, tensors)
"""The modules whose import registers a rule for every op."""
