"""`Placement`: where ONNX Runtime put each node of a compiled graph, and the rule that judges it.

`KernelDispatchReport` has the form in which a device runs each kind of op of a graph, and the provider that runs it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import PlacementError, cpu_help
from rlx_ort.ir.graph import live_nodes
from rlx_ort.options.compile_options import PlacementRule
from rlx_ort.options.dispatch import UnsupportedOp

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.execution.added_nodes import AddedNode
    from rlx_ort.ir.core import Node
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import NodeAssignment

NATIVE, COMMON, REWRITTEN, UNSUPPORTED = "native", "common-ir", "rewritten", "unsupported"
CPU, COMPILED, UNKNOWN = "cpu", "compiled", "unknown"
MERGED = "merged"
"""In place of a provider, for a node that was folded or fused into another node."""

_PLUMBING = frozenset({"Cast", "Identity"})
_logger = logging.getLogger("rlx_ort.dispatch")
_NAMED = 10


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One node of the model that ONNX Runtime runs.

    Attributes:
        name: the node's name in the session, after ONNX Runtime's own rewrites.
        op_type: its operator, domain first unless it is ai.onnx.
        provider: the execution provider that runs it.
        origin: the name of the user's node it comes from, or reads from; an empty string if there is none.
        pinned: whether the node is on the CPU by design: shape computation, or a request of the user.
        added: whether ONNX Runtime added the node, judged only for nodes away from the requested provider.
    """

    name: str
    op_type: str
    provider: str
    origin: str = ""
    pinned: bool = False
    added: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the nodes of a session are.

    Attributes:
        requested: the execution provider that was asked for.
        nodes_by_ep: execution provider -> its nodes, in execution order.
        sites: node of the exported model -> the execution provider that computes it. A node that was fused into
            another stands where its first producer is, a folded one nowhere.
        crossings: (value, reader's provider) for each value that is copied between the requested device and another
            one in each run.
    """

    requested: str
    nodes_by_ep: Mapping[str, tuple[PlacedNode, ...]] = field(default_factory=lambda: MappingProxyType({}))
    sites: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    crossings: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def boundary_copies(self) -> int:
        """Values that cross between the requested device and another one in each run."""
        return len(self.crossings)

    def __repr__(self) -> str:
        nodes = ", ".join(f"{len(nodes)} nodes on {provider}" for provider, nodes in self.nodes_by_ep.items())
        return f"<Placement for {self.requested}: {nodes or 'no nodes'}, {self.boundary_copies} copies>"

    @property
    def requested_share(self) -> float:
        """The share of the nodes that are not pinned on the requested provider, from 0 to 1; 1 without such nodes."""
        counted = sum(not node.pinned for nodes in self.nodes_by_ep.values() for node in nodes)
        return (counted - len(self.strays)) / counted if counted else 1.0

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
    requested: str,
    assignments: Sequence[NodeAssignment],
    exported: ExportedModel,
    *,
    host_marker: str = "",
    added: Callable[[], Mapping[str, AddedNode]] = dict,
) -> Placement:
    """Return the placement of a session that was opened with an exported model.

    `host_marker` is part of the names of nodes that the user keeps on the CPU; empty for none. `added` returns the
    nodes of the rewritten model; it is called only if a node that the export does not have is not on the requested
    provider.
    """
    by_ep: dict[str, list[PlacedNode]] = {}
    ep_of: dict[str, str] = {}
    for assigned in assignments:
        node = exported.node_of(assigned.name)
        sizes, is_added = node is not None and node.shape_only, False
        if assigned.provider != requested and not sizes and (node is None or node.name != assigned.name):
            rewritten = added().get(assigned.name)
            if rewritten is not None:
                is_added = rewritten.source is not node
                node, sizes = rewritten.source, rewritten.sizes
        elif node is not None:
            ep_of.setdefault(node.name, assigned.provider)
        placed = PlacedNode(
            name=assigned.name,
            op_type=f"{assigned.domain}.{assigned.op_type}" if assigned.domain else assigned.op_type,
            provider=assigned.provider,
            origin="" if node is None else exported.origin_names.get(node.origin, ""),
            pinned=assigned.provider != requested and (sizes or bool(host_marker and host_marker in assigned.name)),
            added=is_added,
        )
        by_ep.setdefault(assigned.provider, []).append(placed)
    nodes_by_ep = MappingProxyType({ep: tuple(nodes) for ep, nodes in by_ep.items()})
    return Placement(requested, nodes_by_ep, *_sites(requested, exported, ep_of))


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
        share = f"{int(100 * placement.requested_share)}%"  # not 100% where a node strays
        raise PlacementError(
            f"{len(strays)} node(s) would not run on {device.display} ({placement.requested}), which takes {share} of "
            f"the graph:\n{_listed(strays)}\n  {cpu_help()}, or choose another device",
            placement,
        )


def _listed(strays: Sequence[PlacedNode]) -> str:
    lines = []
    for node in strays[:_NAMED]:
        name = repr(node.origin)
        if node.added or not node.origin:
            name = f"{node.name!r}, which ONNX Runtime added{f' behind {node.origin!r}' if node.origin else ''},"
        lines.append(f"  {name} ({node.op_type}) is on {node.provider}")
    if len(strays) > _NAMED:
        lines.append(f"  and {len(strays) - _NAMED} more")
    return "\n".join(lines)


def _sites(
    requested: str, exported: ExportedModel, ep_of: Mapping[str, str]
) -> tuple[Mapping[str, str], tuple[tuple[str, str], ...]]:
    """Return `Placement.sites` and `Placement.crossings`."""
    sites: dict[str, str] = {}
    produced_on: dict[str, str] = {}
    crossings: dict[tuple[str, str], None] = {}
    for node in exported.nodes:
        sources = [(name, produced_on[name]) for name in node.input_names if name in produced_on]
        ep = ep_of.get(node.name) or (sources[0][1] if sources else "")
        if not ep:
            continue
        sites[node.name] = ep
        crossings.update(((name, ep), None) for name, source in sources if (source == requested) != (ep == requested))
        produced_on.update((name, ep) for name in node.output_names if name)
    return MappingProxyType(sites), tuple(crossings)


@dataclass(frozen=True, slots=True)
class DispatchSummary:
    """The nodes of one kind that reach the device in one form.

    Attributes:
        kind: the kind of op.
        node_count: the number of nodes.
        path: `native`, one ONNX node with a kernel, or the fused form of an op that has two; `common-ir`, the basic
            form of an op that has two; `rewritten`, several basic nodes, the only form; `unsupported`; `cpu`, run by
            the CPU instead; `compiled`, by a provider that compiles whole graphs, so that support is only known from a
            session; `unknown`, if the graph cannot be exported because of other nodes.
        logical_name: the ONNX operator of an imported node, with its domain and version; None for other kinds.
        nodes: the names of the nodes.
        placed: execution provider -> the number of the nodes that it runs, at least in part; `merged` for nodes that
            ONNX Runtime folded or fused into others. Empty before a session was open.
    """

    kind: str
    node_count: int
    path: str
    logical_name: str | None = None
    nodes: tuple[str, ...] = field(default=(), compare=False)
    placed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), compare=False)


@dataclass(frozen=True, slots=True, repr=False)
class KernelDispatchReport:
    """How a device runs a graph, kind by kind.

    Attributes:
        device: the device.
        backend_name: its display name.
        policy: the kernel dispatch policy.
        supported_claim_count: the number of kernels that the provider lists; 0 for one that compiles whole graphs.
        summaries: one row for each kind of op and path, sorted by kind, without leaves and dead nodes.
        common_lowered_kinds: kinds of which a node got its common form though it has a native one.
        still_unsupported: the user's nodes that the device does not support, in graph order.
        reason: why the graph is refused if no single node is the cause.
    """

    device: Device
    backend_name: str
    policy: str
    supported_claim_count: int
    summaries: tuple[DispatchSummary, ...]
    common_lowered_kinds: tuple[str, ...] = ()
    still_unsupported: tuple[UnsupportedOp, ...] = ()
    reason: str = ""

    def __repr__(self) -> str:
        counts = f"{len(self.summaries)} rows, {len(self.still_unsupported)} unsupported nodes"
        return f"<KernelDispatchReport on {self.device.label}, {self.policy}: {counts}>"

    @property
    def compile_ready(self) -> bool:
        """Whether the device supports the graph."""
        return not self.still_unsupported and not self.reason


def summarize(
    graph: Graph,
    model: ExportedModel | None,
    *,
    refused: Collection[int] = (),
    cpu_nodes: Collection[int] = (),
    compiled: bool = False,
) -> tuple[DispatchSummary, ...]:
    """Return the rows of a report on the user's graph; the exported model is None if the graph cannot be exported.

    `refused` are the ids of unsupported nodes, `cpu_nodes` of those that the CPU runs instead. With `compiled` the
    provider compiles whole graphs and lists no kernels.
    """
    pieces = Counter(
        node.origin for node in (model.nodes if model else ()) if not node.shape_only and node.op_type not in _PLUMBING
    )
    live = live_nodes(graph)
    rows: dict[tuple[str, str, str], list[Node]] = {}
    for node in graph.nodes:
        if node.op.is_leaf or node.id not in live:
            continue
        if node.id in refused:
            path = UNSUPPORTED
        elif node.id in cpu_nodes:
            path = CPU
        elif model is None:
            path = UNKNOWN
        elif COMMON in model.forms.get(node.id, ()):
            path = COMMON
        elif NATIVE not in model.forms.get(node.id, ()) and pieces[node.id] > 1:
            path = REWRITTEN
        else:
            path = COMPILED if compiled else NATIVE
        name = node.op.describe() if hasattr(node.op, "op_type") else ""
        rows.setdefault((node.op.kind, name, path), []).append(node)
    return tuple(
        DispatchSummary(kind, len(nodes), path, name or None, tuple(node.name for node in nodes))
        for (kind, name, path), nodes in sorted(rows.items(), key=lambda row: row[0])
    )


def common_kinds(model: ExportedModel | None, graph: Graph) -> tuple[str, ...]:
    """Return the kinds with a node in its common form, sorted."""
    forms = {} if model is None else model.forms
    return tuple(sorted({graph.nodes[index].op.kind for index, chosen in forms.items() if COMMON in chosen}))


def merge_placement(report: KernelDispatchReport, placement: Placement) -> KernelDispatchReport:
    """Return the report with the placement of each row's nodes in an open session."""
    where: dict[str, set[str]] = {}
    for provider, nodes in placement.nodes_by_ep.items():
        for node in nodes:
            where.setdefault(node.origin, set()).add(provider)
    rows = []
    for row in report.summaries:
        counts = Counter(provider for name in row.nodes for provider in sorted(where.get(name, {MERGED})))
        rows.append(replace(row, placed=MappingProxyType(dict(counts))))
    return replace(report, summaries=tuple(rows))


def format_dispatch_report(report: KernelDispatchReport) -> str:
    """Return the report as text: a header, one line for each row, then the unsupported nodes."""
    ready = "ready to compile" if report.compile_ready else "not ready to compile"
    lines = [
        f"dispatch report: {report.backend_name}, policy {report.policy}, "
        f"{report.supported_claim_count} kernels listed, {ready}"
    ]
    for row in report.summaries:
        name = f" [{row.logical_name}]" if row.logical_name else ""
        placed = ", ".join(f"{count} on {provider}" for provider, count in row.placed.items())
        lines.append(f"  {row.kind}: {row.node_count} x {row.path}{name}{f', {placed}' if placed else ''}")
    lines += [f"  unsupported: {node}" for node in report.still_unsupported]
    if report.reason:
        lines.append(f"  {report.reason}")
    return "\n".join(lines).replace(f"on {MERGED}", "merged into other nodes")


def report_as_dict(report: KernelDispatchReport) -> dict[str, Any]:
    """Return the report as values of JSON."""
    return {
        "device": report.device.label,
        "policy": report.policy,
        "supported_claim_count": report.supported_claim_count,
        "compile_ready": report.compile_ready,
        "reason": report.reason,
        "ops": [
            {
                "kind": row.kind,
                "onnx": row.logical_name,
                "path": row.path,
                "count": row.node_count,
                "nodes": list(row.nodes),
                "placed": dict(row.placed),
            }
            for row in report.summaries
        ],
        "common_lowered_kinds": list(report.common_lowered_kinds),
        "unsupported": [
            {"index": node.index, "node": node.name, "kind": node.kind, "reason": node.reason}
            for node in report.still_unsupported
        ],
    }


def log_dispatch_report(
    graph: Graph, model: ExportedModel, device: Device, policy: str, claim_count: int | None, placement: Placement
) -> None:
    """Log the dispatch report of a session that was just opened, if `RLX_DISPATCH_REPORT` or `RLX_VERBOSE` is set.

    The level is WARNING, so that the report appears on stderr without configured logging.
    """
    if not (environment.flag("DISPATCH_REPORT") or environment.flag("VERBOSE")):
        return
    names = {node.origin for node in placement.strays}
    strays = {node.id for node in graph.nodes if node.name in names}
    report = KernelDispatchReport(
        device=device,
        backend_name=device.display,
        policy=policy,
        supported_claim_count=claim_count or 0,
        summaries=summarize(graph, model, cpu_nodes=strays, compiled=claim_count is None),
        common_lowered_kinds=common_kinds(model, graph),
    )
    _logger.warning("%s", format_dispatch_report(merge_placement(report, placement)))
