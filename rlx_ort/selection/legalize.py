"""Legalisation: whether a graph can be compiled for a device, op by op, and the graph rewritten in legal ops."""

from __future__ import annotations

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, LegalizeError
from rlx_ort.execution.placement import (
    COMMON,
    KernelDispatchReport,
    common_kinds,
    format_dispatch_report,
    summarize,
)
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy
from rlx_ort.providers.registry import availability, provider_of
from rlx_ort.selection.support import model_for, support_of

__all__ = ["dispatch_report_for_device", "legalize_graph_for_device", "require_legal"]


def legalize_graph_for_device(
    graph: Graph, device: Device | str, options: CompileOptions | None = None
) -> tuple[Graph, KernelDispatchReport]:
    """Return a graph of ops that the device takes natively, and the dispatch report of the original graph.

    A node whose native form the device refuses and whose common form it takes is replaced by the basic nodes of that
    form. The graph itself is returned where there is none. Both compile on the device with the same options and give
    the same results, as compiling chooses the same forms. Two things are left to compiling: nodes with bodies, and all
    nodes where the options change the precision, because a precision policy selects by the ops of the original graph.

    The device need not work here, as long as its provider can list its kernels.

    Raises:
        LegalizeError: the device does not take the graph; the message names the nodes, `report` has every kind.
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    report = require_legal(graph, device, options)
    options = (options or CompileOptions()).on(report.device)
    provider = provider_of(report.device)
    model = None if provider is None else model_for(provider, graph, options)
    if model is None or not options.effective_precision.is_f32:
        return graph, report
    common = {index for index, forms in model.forms.items() if forms == {COMMON} and not graph.nodes[index].op.bodies()}
    if not common:
        return graph, report
    from rlx_ort.converters.decompose import decomposed

    dispatch = KernelDispatch(KernelDispatchPolicy.FORCE_COMMON)
    return decomposed(graph, common, CompileOptions(kernel_dispatch=dispatch, opset=options.opset)), report


def require_legal(graph: Graph, device: Device | str, options: CompileOptions | None = None) -> KernelDispatchReport:
    """Return the dispatch report if the device takes the graph.

    Raises:
        LegalizeError: it does not; the message names the nodes, `report` has every kind.
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    report = dispatch_report_for_device(graph, device, options)
    if not report.compile_ready:
        raise legalize_error(graph, report)
    return report


def dispatch_report_for_device(
    graph: Graph, device: Device | str, options: CompileOptions | None = None
) -> KernelDispatchReport:
    """Return in which form each kind of op runs on the device; unsupported ones are listed, not raised.

    Raises:
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    device = Device(device)
    provider = provider_of(device)
    if provider is None or (provider.claims() is None and not availability(device).available):
        found = availability(device)
        raise DeviceUnavailableError(device, found.reason, found.remedy)
    options = (options or CompileOptions()).on(device)
    support = support_of(device, graph, options)
    model = model_for(provider, graph, options)
    return KernelDispatchReport(
        device=device,
        backend_name=device.display,
        policy=options.kernel_dispatch.policy.value,
        supported_claim_count=support.claim_count or 0,
        summaries=summarize(
            graph,
            model,
            refused={node.index for node in support.unsupported},
            cpu_nodes=support.cpu_nodes,
            compiled=provider.claims() is None,
        ),
        common_lowered_kinds=common_kinds(model, graph),
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
