"""`Frame`: what is known of an IR graph while it is being lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlx_ort.converters.to_onnx.model import ModelValue
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import ValueType

__all__ = ["Frame"]


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
