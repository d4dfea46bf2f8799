"""`Composite`: an op that stands for a graph of other ops.

It keeps its name in reports and JSON; its shapes, its cost and its ONNX form are those of the graph it stands for,
which `Composite.expand` builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.bodies import as_body, tensor_types
from rlx_ort.ir.core import Value
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.types import ValueType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["Composite"]


@dataclass(frozen=True, slots=True)
class Composite(Op):
    """Base of the ops that stand for a graph of other ops."""

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write the ops this one stands for into a graph and return the result."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it stands for")

    def check(self, inputs: OpTypes) -> None:
        """Check what `build` would not report well.

        Raises:
            GraphVerifyError: the inputs do not fit the op.
        """

    def expand(self, inputs: OpTypes) -> Graph:
        """Return the graph this op stands for, with an input for each of its inputs.

        Raises:
            GraphVerifyError: the inputs do not fit the op.
        """
        self.check(inputs)
        types = tensor_types(self, inputs, "a tensor")
        try:
            return as_body(self.build, [(f"in{place}", kind) for place, kind in enumerate(types)], self.kind)
        except GraphVerifyError as err:
            raise GraphVerifyError(f"{self.describe()}: {err}") from err

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the graph's result."""
        return tuple(value.type for value in self.expand(inputs).outputs)
