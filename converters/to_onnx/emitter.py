"""`Emitter`: what a lowering writes ONNX nodes with, and the table of lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy.typing as npt

from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op
from rlx_ort.ir.shape import Dim
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    import onnx_ir

    from rlx_ort.ir.graph import Graph

__all__ = ["Emitter", "Lowering", "lowering_of", "lowers"]

O = TypeVar("O", bound=Op)  # noqa: E741
Lowering: TypeAlias = Callable[["Emitter", Any, Sequence[Any]], Any]
"""(emitter, op, ONNX values of the inputs) -> one ONNX value, or a tuple with one per result."""

_lowerings: dict[type[Op], Lowering] = {}


def lowers(op: type[O]) -> Callable[[Lowering], Lowering]:
    """Declare the decorated function to be the lowering of an op class."""

    def declare(function: Lowering) -> Lowering:
        _lowerings[op] = function
        return function

    return declare


def lowering_of(op: Op) -> Lowering | None:
    """Return the lowering of an op, or None when it has none (leaves, `OnnxNode`, refused kinds)."""
    return _lowerings.get(type(op))


class Emitter:
    """Writes the ONNX nodes of one graph (or body). INTERFACE: bodies to be written by the exporter's author."""

    node: Node
    """The IR node that is being lowered; `node.types` are the types its results must have."""

    def op(
        self,
        op_type: str,
        *inputs: onnx_ir.Value | None,
        domain: str = "",
        version: int | None = None,
        outputs: int = 1,
        types: Sequence[ValueType | None] | None = None,
        **attributes: Any,
    ) -> Any:
        """Append a node and return its result, or a tuple when `outputs` is above 1.

        `version` is the opset version this form of the op needs, if above 21 for ai.onnx (1 for com.microsoft).
        `types` are the result types where known. Attributes: int, float, str, numpy array, lists of these, Graph.
        """
        raise NotImplementedError

    def constant(self, data: npt.ArrayLike, dtype: DType | None = None) -> onnx_ir.Value:
        """Return a constant (an initializer), one for equal data."""
        raise NotImplementedError

    def i64(self, values: Sequence[int]) -> onnx_ir.Value:
        """Return a constant int64 vector, as axes and static shapes are."""
        raise NotImplementedError

    def dims(self, dims: Sequence[Dim]) -> onnx_ir.Value:
        """Return an int64 vector of dimensions; named ones are read at run time from a value that has them."""
        raise NotImplementedError

    def cast(self, value: onnx_ir.Value, dtype: DType) -> onnx_ir.Value:
        """Return the value as another dtype; the same value when it already is."""
        raise NotImplementedError

    def input_type(self, index: int) -> TensorType:
        """Return the IR type of input `index` of the node being lowered."""
        raise NotImplementedError

    def inline(self, body: Graph, inputs: Sequence[onnx_ir.Value]) -> tuple[onnx_ir.Value, ...]:
        """Lower a body into this graph with its `Input` leaves replaced by `inputs`; captures resolve as well."""
        raise NotImplementedError

    def subgraph(self, body: Graph, node_inputs: Sequence[onnx_ir.Value | None]) -> onnx_ir.Graph:
        """Lower a body into an ONNX subgraph for If, Loop or Scan; captures refer to `node_inputs`."""
        raise NotImplementedError
