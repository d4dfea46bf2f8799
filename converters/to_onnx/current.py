"""`Frame`: an IR graph while it is lowered. `CurrentNode`: what a lowering may ask about the node being lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import known_shape
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["CurrentNode", "Frame"]


@dataclass(slots=True)
class Frame:
    """One IR graph while it is being lowered; an inlined body has the frame around it as `outer`."""

    graph: Graph
    outer: Frame | None = None
    values: dict[int, Sequence[ModelValue]] = field(default_factory=dict)  # node -> its results
    current: Sequence[ModelValue | None] = ()
    named: bool = False
    outputs: set[ModelValue] = field(default_factory=set)
    symbols: dict[str, ModelValue] = field(default_factory=dict)

    def typed(self, node: int) -> Iterator[tuple[ValueType, ModelValue]]:
        """Return the results of a node with their types."""
        return zip(self.graph.nodes[node].types, self.values[node], strict=False)


class CurrentNode:
    """The node that is being lowered, in the graph around it; inputs that are asked for by type must be tensors.

    A lowering that reads only element types, ranks and names is not repeated for nodes of other sizes.
    """

    def __init__(self) -> None:
        self._frame: Frame
        self._node: Node
        self._asks_around = False  # whether its lowering depends on more than the node itself
        self._asks_sizes = False  # whether it may depend on more of the node's types than element types and ranks

    @property
    def node(self) -> Node:
        """The IR node that is being lowered; `node.types` are the types its results must have."""
        self._asks_sizes = True
        return self._node

    def input_type(self, index: int) -> TensorType:
        """Return the IR type of input `index`."""
        self._asks_sizes = True
        return self._tensor(index)

    def input_dtype(self, index: int) -> DType:
        """Return the element type of input `index`."""
        return self._tensor(index).dtype

    def input_rank(self, index: int, name: str) -> int:
        """Return the rank of input `index`, which must be known; messages call the input `name`."""
        return known_shape(self._node.op, self._tensor(index), name).rank

    def known_dtype(self, index: int) -> DType | None:
        """Return the element type of input `index`, None for one that is absent or no tensor."""
        kind = self._type(index)
        return kind.dtype if isinstance(kind, TensorType) else None

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the results."""
        return self._node.output_names

    def _ref(self, index: int) -> Ref | None:
        return self._node.inputs[index] if index < len(self._node.inputs) else None

    def _type(self, index: int) -> ValueType | None:
        ref = self._ref(index)
        return None if ref is None else self._frame.graph.nodes[ref.node].types[ref.output]

    def _tensor(self, index: int) -> TensorType:
        kind = self._type(index)
        if not isinstance(kind, TensorType):
            raise GraphVerifyError(f"{self._node} needs a tensor as input {index}, got {kind or 'nothing'}")
        return kind

    def input_data(self, index: int) -> TensorData | None:
        """Return the data of input `index` if it is a constant, else None."""
        ref = self._ref(index)
        op = None if ref is None else self._frame.graph.nodes[ref.node].op
        if not isinstance(op, Constant):
            return None
        self._asks_around = True
        return op.data
