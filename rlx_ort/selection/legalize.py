"""Whether a graph can be compiled for a device, and the report that says so op by op.

Every op is written in one way today, so a node is either native (the provider lists kernels for all it becomes) or
unsupported. The labels for decomposed and rewritten ops exist because reports are read by programs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, LegalizeError
from rlx_ort.execution.options import CompileOptions
from rlx_ort.ir.core import Node
from rlx_ort.ir.graph import Graph
from rlx_ort.selection.availability import availability, provider_of
from rlx_ort.selection.support import Support, UnsupportedOp, support_of

__all__ = [
    "DispatchSummary",
    "KernelDispatchReport",
    "dispatch_report_for_device",
    "dispatch_report_for_device_with_options",
    "format_dispatch_report",
    "legalize_graph_for_device",
    "legalize_graph_for_device_with_options",
    "legalize_graph_for_device_with_report",
]

NATIVE, COMMON, REWRITTEN, UNSUPPORTED = "native", "common-ir", "rewritten", "unsupported"
CPU, COMPILED = "cpu", "compiled"


@dataclass(frozen=True, slots=True)
class DispatchSummary:
    """How the nodes of one kind get to the device.

    Attributes:
        kind: the kind of op.
        node_count: how many nodes of the graph have it.
        path: `native`, `common-ir`, `rewritten` or `unsupported`; `cpu` when the CPU takes over some of them, and
            `compiled` when the provider compiles whole graphs and lists no kernels, so that only a session can tell.
        logical_name: the ONNX operator of an imported node, with its domain and version; None for other kinds.
    """

    kind: str
    node_count: int
    path: str
    logical_name: str | None = None


@dataclass(frozen=True, slots=True)
class KernelDispatchReport:
    """What a device makes of a graph, kind by kind, from the provider's kernel list.

    Attributes:
        device: the device.
        backend_name: the name people read.
        policy: the kernel dispatch policy; `prefer-native` is the only one.
        supported_claim_count: kernels the provider lists; 0 for one that compiles and lists none.
        summaries: one row for each kind of op, sorted by kind; leaves are left out.
        common_lowered_kinds: kinds that are decomposed into basic ops.
        still_unsupported: the user's nodes that stand in the way, in graph order.
        reason: why the graph is refused when no single node is to blame.
    """

    device: Device
    backend_name: str
    policy: str
    supported_claim_count: int
    summaries: tuple[DispatchSummary, ...]
    common_lowered_kinds: tuple[str, ...] = ()
    still_unsupported: tuple[UnsupportedOp, ...] = ()
    reason: str = ""

    @property
    def compile_ready(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.still_unsupported and not self.reason


def legalize_graph_for_device(graph: Graph, device: Device | str) -> Graph:
    """Return the graph if the device can compile it.

    Raises:
        LegalizeError: it cannot; the message names the nodes, `report` has every kind.
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    return legalize_graph_for_device_with_options(graph, device)[0]


def legalize_graph_for_device_with_report(graph: Graph, device: Device | str) -> tuple[Graph, KernelDispatchReport]:
    """Return the graph and the dispatch report if the device can compile it.

    Raises:
        LegalizeError: it cannot; the message names the nodes, `report` has every kind.
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    return legalize_graph_for_device_with_options(graph, device)


def legalize_graph_for_device_with_options(
    graph: Graph, device: Device | str, options: CompileOptions | None = None
) -> tuple[Graph, KernelDispatchReport]:
    """Return the graph and the dispatch report if the device can compile it under the options.

    The device need not work here, as long as its provider can list its kernels.

    Raises:
        LegalizeError: it cannot; the message names the nodes, `report` has every kind.
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    report = dispatch_report_for_device_with_options(graph, device, options)
    if not report.compile_ready:
        raise legalize_error(graph, report)
    return graph, report


def dispatch_report_for_device(graph: Graph, device: Device | str) -> KernelDispatchReport:
    """Return how each kind of op in the graph gets to the device; unsupported ones are listed, not raised.

    Raises:
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    return dispatch_report_for_device_with_options(graph, device)


def dispatch_report_for_device_with_options(
    graph: Graph, device: Device | str, options: CompileOptions | None = None
) -> KernelDispatchReport:
    """Return how each kind of op in the graph gets to the device under the options.

    Raises:
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    device = Device(device)
    provider = provider_of(device)
    if provider is None or (provider.claims() is None and not availability(device).available):
        found = availability(device)
        raise DeviceUnavailableError(device, found.reason, found.remedy)
    support = support_of(device, graph, options)
    return KernelDispatchReport(
        device=device,
        backend_name=device.display,
        policy="prefer-native",
        supported_claim_count=support.claim_count or 0,
        summaries=_summaries(graph, support, compiled=provider.claims() is None),
        still_unsupported=support.unsupported,
        reason=support.reason,
    )


def legalize_error(graph: Graph, report: KernelDispatchReport) -> LegalizeError:
    """Return the error for a report that is not ready: the device, each node in the way, what to do, the report."""
    count = len(report.still_unsupported)
    headline = f"{report.backend_name} cannot take graph {graph.name!r}: "
    headline += f"{count} unsupported {'node' if count == 1 else 'nodes'}" if count else report.reason
    lines = [headline, *(f"  {node}" for node in report.still_unsupported)]
    lines.append("Choose another device, or let the CPU help with CompileOptions(placement=PlacementRule.ASSISTED).")
    lines.append(format_dispatch_report(report))
    return LegalizeError("\n".join(lines), report)


def format_dispatch_report(report: KernelDispatchReport) -> str:
    """Return the report as text: a header, one line for each kind, then the nodes in the way."""
    ready = "ready to compile" if report.compile_ready else "not ready to compile"
    lines = [
        f"dispatch report: {report.backend_name}, policy {report.policy}, "
        f"{report.supported_claim_count} kernels listed, {ready}"
    ]
    for row in report.summaries:
        name = f" [{row.logical_name}]" if row.logical_name else ""
        lines.append(f"  {row.kind}: {row.node_count} x {row.path}{name}")
    lines += [f"  unsupported: {node}" for node in report.still_unsupported]
    if report.reason:
        lines.append(f"  {report.reason}")
    return "\n".join(lines)


def _summaries(graph: Graph, support: Support, *, compiled: bool) -> tuple[DispatchSummary, ...]:
    nodes = [node for node in graph.nodes if not node.op.is_leaf]
    counts = Counter(_row(node) for node in nodes)
    refused = {node.index for node in support.unsupported}
    paths: dict[tuple[str, str | None], str] = dict.fromkeys(counts, COMPILED if compiled else NATIVE)
    for node in nodes:
        if node.id in refused:
            paths[_row(node)] = UNSUPPORTED
        elif node.id in support.cpu_nodes and paths[_row(node)] != UNSUPPORTED:
            paths[_row(node)] = CPU
    rows = sorted(counts, key=lambda row: (row[0], row[1] or ""))
    return tuple(DispatchSummary(kind, counts[kind, name], paths[kind, name], name) for kind, name in rows)


def _row(node: Node) -> tuple[str, str | None]:
    is_onnx = hasattr(node.op, "op_type")
    return node.op.kind, node.op.describe() if is_onnx else None
