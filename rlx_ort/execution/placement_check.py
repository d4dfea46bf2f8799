"""Where the nodes of an open session are, in the user's terms, and whether that is what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlx_ort.device import Device
from rlx_ort.errors import PlacementError
from rlx_ort.execution.placement import PlacedNode, Placement
from rlx_ort.options.compile_options import PlacementRule

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.providers.base import NodeAssignment

__all__ = ["build_placement", "enforce"]

_NAMED = 10


def build_placement(
    requested: str,
    assignments: Sequence[NodeAssignment],
    exported: ExportedModel,
    *,
    host_marker: str = "",
) -> Placement:
    """Return where the nodes of a session are.

    Args:
        requested: the execution provider that was asked for.
        assignments: where the engine says its nodes are.
        exported: the model the session was opened with.
        host_marker: part of the names of nodes that are on the CPU because the user wants them there.
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
    return Placement(
        requested=requested,
        nodes_by_ep=MappingProxyType({ep: tuple(nodes) for ep, nodes in by_ep.items()}),
        boundary_copies=_count_crossings(requested, exported, ep_of),
    )


def enforce(placement: Placement, rule: PlacementRule, device: Device) -> None:
    """Return if the placement keeps the rule.

    Raises:
        PlacementError: a node strays under the strict rule, or nothing at all is on the requested provider.
    """
    strays = placement.strays
    if not strays:
        return
    if not _any_on_requested(placement):
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


def _any_on_requested(placement: Placement) -> bool:
    return any(not node.pinned for node in placement.nodes_by_ep.get(placement.requested, ()))


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
