"""`Placement`: where each node of a compiled graph really is, and the rule that judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["PlacedNode", "Placement"]


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One node of the model that ONNX Runtime runs.

    Attributes:
        name: the node's name in the session, after ONNX Runtime's own rewrites.
        op_type: its operator, domain first unless it is ai.onnx.
        provider: the execution provider that runs it.
        origin: the name of the user's node it comes from, or an empty string for a node ONNX Runtime added.
        pinned: whether ONNX Runtime keeps such a node on the CPU by design (shape computation).
    """

    name: str
    op_type: str
    provider: str
    origin: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the nodes of a session are.

    Attributes:
        requested: the execution provider that was asked for.
        nodes_by_ep: execution provider -> its nodes, in execution order.
        boundary_copies: values that cross between the requested device and another one in each run.
    """

    requested: str
    nodes_by_ep: Mapping[str, tuple[PlacedNode, ...]] = field(default_factory=lambda: MappingProxyType({}))
    boundary_copies: int = 0

    @property
    def requested_share(self) -> float:
        """The share of nodes on the requested provider, from 0 to 1; pinned nodes do not count.

        A graph in which nothing counts is wholly where it was asked to be: 1.
        """
        counted = [node for nodes in self.nodes_by_ep.values() for node in nodes if not node.pinned]
        on_requested = sum(node.provider == self.requested for node in counted)
        return on_requested / len(counted) if counted else 1.0

    @property
    def strays(self) -> tuple[PlacedNode, ...]:
        """The nodes that are not on the requested provider and not pinned to the CPU."""
        return tuple(
            node
            for provider, nodes in self.nodes_by_ep.items()
            for node in nodes
            if provider != self.requested and not node.pinned
        )
