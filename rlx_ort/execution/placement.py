"""`Placement`: where ONNX Runtime put each node of a compiled graph, and the rule that judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlx_ort.device import Device
from rlx_ort.errors import PlacementError
from rlx_ort.options.compile_options import PlacementRule

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.providers.base import NodeAssignment

__all__ = ["PlacedNode", "Placement", "build_placement", "enforce"]

_NAMED = 10


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One node of the model that ONNX Runtime runs.

    Attributes:
        name: the node's name in the session, after ONNX Runtime's own rewrites.
        op_type: its operator, domain first unless it is ai.onnx.
        provider: the execution provider that runs it.
        origin: the name of the user's node it comes from, or an empty string for a node ONNX Runtime added.
        pinned: whether the node is on the CPU by design: shape computation, or a request of the user.
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
        """The share of the nodes that are not pinned on the requested provider, from 0 to 1; 1 without such nodes."""
        counted = [node for nodes in self.nodes_by_ep.values() for node in nodes if not node.pinned]
        return sum(node.provider == self.requested for node in counted) / len(counted) if counted else 1.0

    @property
    def strays(self) -> tuple[PlacedNode, ...]:
        """The nodes that are not on the requested provider and not pinned to the CPU."""
        return tuple(
            node
            for provider, nodes in self.nodes_by_ep.items()
            for node in nodes
            if provider != self.requested and not node.pinned
        )


def build_placement(
    requested: str, assignments: Sequence[NodeAssignment], exported: ExportedModel, *, host_marker: str = ""
) -> Placement:
    """Return the placement of a session that was opened with an exported model.

    `host_marker` is part of the names of nodes that the user keeps on the CPU; empty for none.
    """
    by_ep: dict[str, list[PlacedNode]] = {}
    ep_of: dict[str, str] = {}
    for assigned in assignments:
        node = exported.node_of(assigned.name)
        if node is not None:
            ep_of.setdefault(node.name, assigned.provider)
        placed = PlacedNode(
            name=assigned.name,
            op_type=f"{assigned.domain}.{assigned.op_type}" if assigned.domain else assigned.op_type,
            provider=assigned.provider,
            origin="" if node is None else exported.origin_names.get(node.origin, ""),
            pinned=assigned.provider != requested
            and ((node is not None and node.shape_only) or bool(host_marker and host_marker in assigned.name)),
        )
        by_ep.setdefault(assigned.provider, []).append(placed)
    nodes_by_ep = MappingProxyType({ep: tuple(nodes) for ep, nodes in by_ep.items()})
    return Placement(requested, nodes_by_ep, _count_crossings(requested, exported, ep_of))


def enforce(placement: Placement, rule: PlacementRule, device: Device) -> None:
    """Check that a placement keeps the rule.

    Raises:
        PlacementError: a node strays under the strict rule, or nothing at all is on the requested provider.
    """
    strays = placement.strays
    if not strays:
        return
    if all(node.pinned for node in placement.nodes_by_ep.get(placement.requested, ())):
        raise PlacementError(
            f"nothing of the graph runs on {device.display} ({placement.requested}); choose another device:\n"
            f"{_listed(strays)}",
            placement,
        )
    if rule is PlacementRule.STRICT:
        share = f"{placement.requested_share:.0%}"
        raise PlacementError(
            f"{len(strays)} node(s) would not run on {device.display} ({placement.requested}), which takes {share} of "
            f"the graph:\n{_listed(strays)}\n  allow the help with CompileOptions(placement=PlacementRule.ASSISTED), "
            "or choose another device",
            placement,
        )


def _listed(strays: Sequence[PlacedNode]) -> str:
    lines = []
    for node in strays[:_NAMED]:
        name = repr(node.origin) if node.origin else f"{node.name!r}, which ONNX Runtime added,"
        lines.append(f"  {name} ({node.op_type}) is on {node.provider}")
    if len(strays) > _NAMED:
        lines.append(f"  and {len(strays) - _NAMED} more")
    return "\n".join(lines)


def _count_crossings(requested: str, exported: ExportedModel, ep_of: Mapping[str, str]) -> int:
    """Return how many values have their producer on one side of the requested provider and a reader on the other.

    A node that ONNX Runtime fused away stands where its first placed producer is; a folded one stands nowhere.
    """
    produced_on: dict[str, str] = {}
    crossings: set[tuple[str, str]] = set()
    for node in exported.nodes:
        sources = [(name, produced_on[name]) for name in node.input_names if name in produced_on]
        ep = ep_of.get(node.name) or (sources[0][1] if sources else "")
        if not ep:
            continue
        crossings.update((name, ep) for name, source in sources if (source == requested) != (ep == requested))
        produced_on.update((name, ep) for name in node.output_names if name)
    return len(crossings)
