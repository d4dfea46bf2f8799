"""Capability: whether a device takes a graph, which of its nodes it does not take, and the graph in legal ops.

A provider that works here is asked about each distinct node, and its answers are kept on disk. Kernel lists are used
for other providers. The placement of the user's session is checked again when it is opened.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlx_ort.converters.to_onnx.emitter import lowering_of
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.converters.to_onnx.exporter import Draft, drafted
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, DeviceUnavailableError, LegalizeError, cpu_help
from rlx_ort.execution.placement import COMMON, KernelDispatchReport, common_kinds, format_dispatch_report, summarize
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.graph import Graph, live_nodes
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.onnx import OnnxNode, Refused
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy, UnsupportedOp
from rlx_ort.providers import registry
from rlx_ort.providers.asking import DEVICE, HELPED
from rlx_ort.providers.base import Provider
from rlx_ort.providers.claims import kernel_set
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.recipe import unknown_option
from rlx_ort.providers.kernel_limits import limited_nodes
from rlx_ort.providers.registry import availability, is_available, provider_of
from rlx_ort.selection.graph_cache import cache_of
from rlx_ort.selection.node_claims import cpu_takes_node, is_function, signature, takes_node
from rlx_ort.selection.questions import answers_for, groups_of


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a device takes a graph, and which nodes are in the way.

    `unsupported` has the user's nodes that the device does not take, in graph order, and `cpu_nodes` the ids of those
    that the CPU would take over, none under the strict rule. `claim_count` counts the kernels that the provider lists;
    None for one that compiles and lists none. `reason` is why the whole graph is refused when no single node is to
    blame. `judged_by` is the shipped kernel list that was used, empty if the provider itself was asked.
    """

    unsupported: tuple[UnsupportedOp, ...] = ()
    cpu_nodes: frozenset[int] = frozenset()
    claim_count: int | None = None
    reason: str = ""
    judged_by: str = ""

    @property
    def supported(self) -> bool:
        """Whether the device takes the graph."""
        return not self.unsupported and not self.reason

    @property
    def blocker(self) -> str | None:
        """The reason why the device does not take the graph, or None."""
        if self.unsupported:
            return f"first unsupported op: {self.unsupported[0]}"
        return self.reason or None


def supports(device: Device | str, op: Op | str) -> bool:
    """Return whether the device may take the op, whatever its types: a quick answer, where `supports_graph` is exact.

    An op is taken when it can be written as ONNX nodes and the device works here. For a raw `OnnxNode`, or the name of
    an ONNX operator such as `MatMul`, the provider's kernels are searched.
    """
    device = Device(device)
    op = OnnxNode(op) if isinstance(op, str) else op
    provider = provider_of(device)
    if provider is None or not is_available(device):
        return False
    if not isinstance(op, OnnxNode):
        return _has_lowering(op)
    claims = provider.claims()
    if claims is None or is_function(op.domain, op.op_type, op.version):
        return True
    return any(claim.op_type == op.op_type and claim.domain == op.domain for claim in claims)


def supports_graph(device: Device | str, graph: Graph, options: CompileOptions | None = None) -> bool:
    """Return whether the device works here and takes the graph under the options' placement rule, else strictly.

    Of a graph without outputs, every node counts; compiling it is refused.
    """
    device = Device(device)
    return is_available(device) and support_of(device, graph, options).supported


def first_unsupported_op(
    device: Device | str, graph: Graph, options: CompileOptions | None = None
) -> UnsupportedOp | None:
    """Return the first node that the device does not take under the options; on an absent device, the first of all.

    None means that no single node is to blame.
    """
    device = Device(device)
    found = availability(device)
    if not found.available:
        first = next(iter(graph.nodes), None)
        reason = f"{device.display} is not available: {found.reason}"
        return None if first is None else _unsupported(first, reason)
    return next(iter(support_of(device, graph, options).unsupported), None)


def support_of(device: Device, graph: Graph, options: CompileOptions | None = None, *, ask: bool = True) -> Support:
    """Return whether a device takes a graph, whether it works here or not; remembered per exported model.

    A device that works here is asked about the nodes, unless `ask` is false; kernel lists are used otherwise.

    Raises:
        GraphVerifyError: the graph itself is wrong.
    """
    provider = provider_of(device)
    if provider is None:
        return Support(reason="no ONNX Runtime execution provider runs this kind of device")
    if not graph.nodes:
        return Support()
    options = (options or CompileOptions()).on(device)
    refused = _refused(graph)
    if refused:
        return Support(refused)
    if options.provider_options and provider.option_keys is not None:
        wrong = unknown_option(f"{device.label} has no", options.provider_options, provider.option_keys)
        if wrong:
            return Support(reason=f"{wrong}; options of one device: provider_options={{'cuda': {{...}}}}")

    try:
        draft = _drafted(provider, graph, options)
    except ConversionError as err:
        return Support(reason=str(err))
    state = (runtime.runtime_version(), registry.default_registry().generation)
    judging = (ask, options.placement or PlacementRule.STRICT, state, options.optimization, options.precision)
    key = (provider.name, device, judging)
    whole = (provider.name, judging)
    with _lock:
        supports = _supports.setdefault(draft, {})
    # Devices that share a provider differ only in the text of a refusal.
    known = supports.get(key) or supports.get(whole)
    if known is None:
        known = _judge(draft, graph, device, provider, options, ask)
        shared = known.supported and known.claim_count is not None
        supports[whole if shared else key] = known
    return known


def draft_for(provider: Provider, graph: Graph, options: CompileOptions) -> Draft | None:
    """Return the draft of the model that the provider would get, or None when the graph cannot be written."""
    if _refused(graph):
        return None
    try:
        return _drafted(provider, graph, options)
    except ConversionError:
        return None  # `support_of` has the reason


def draft_on(device: Device, graph: Graph, options: CompileOptions) -> Draft | None:
    """Return the draft of the model that a device would get, or None where it gets none."""
    provider = provider_of(device)
    return None if provider is None else draft_for(provider, graph, options.on(device))


def model_for(provider: Provider, graph: Graph, options: CompileOptions) -> ExportedModel | None:
    """Return the model that the provider would get, or None when the graph cannot be written."""
    draft = draft_for(provider, graph, options)
    return None if draft is None else draft.finished()


def _drafted(provider: Provider, graph: Graph, options: CompileOptions) -> Draft:
    """Return the draft for a provider; remembered, since to find that nothing changed takes milliseconds."""
    known = cache_of(graph).drafts
    for drafted_for, under, draft in list(known):
        if drafted_for == provider and under == options:
            return draft
    judged = graph if graph.outputs or not graph.nodes else _with_outputs(graph)
    draft = drafted(judged, options, kernel_set(provider, graph, options))
    known.append((provider, options, draft))
    return draft


def _with_outputs(graph: Graph) -> Graph:
    """Return a copy that returns each value that no node uses, so that every node of a graph without outputs counts."""
    used = {ref for node in graph.nodes for ref in node.inputs}
    result = graph.bind({})
    refs = (Ref(node.id, place) for node in graph.nodes for place in range(len(node.types)))
    result.outputs = [result.value(ref) for ref in refs if ref not in used]
    return result


def _refused(graph: Graph) -> tuple[UnsupportedOp, ...]:
    """Return the nodes without an ONNX form that some output needs, remembered until the graph changes."""
    cache = cache_of(graph)
    if cache.unwritable is None:
        # Fast path: the class of an op decides whether it has a lowering.
        kinds = {type(node.op): node.op for node in graph.nodes}
        written = all(kind.bodies is Op.bodies and _has_lowering(op) for kind, op in kinds.items())
        cache.unwritable = () if written else tuple(_without_lowering(graph))
    return cache.unwritable


_supports: weakref.WeakKeyDictionary[Draft, dict[object, Support]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _judge(
    draft: Draft, graph: Graph, device: Device, provider: Provider, options: CompileOptions, ask: bool
) -> Support:
    claims = provider.claims()
    found = availability(device)
    if claims is None and not found.available:
        return Support(reason=found.reason)
    is_cpu = device.kind == Device.CPU.kind
    groups = groups_of(draft, options, whole=provider.compiles, shapes=is_cpu, weights=graph.weights)
    answers = answers_for(provider, device, groups, draft, options) if ask and found.available else {}
    cpu = provider_of(Device.CPU)
    cpu_claims = None if cpu is None else cpu.claims()
    helped = options.placement is PlacementRule.ASSISTED and not is_cpu and cpu_claims is not None
    name, functions = device.family.display, draft.outline.functions
    unsupported: dict[int, UnsupportedOp] = {}
    cpu_nodes: set[int] = set()

    def listed(node: ExportedNode) -> str:
        """Return the answer that the kernel lists give."""
        if claims is None:
            return DEVICE
        if cpu_takes_node(claims, node, functions) if is_cpu else takes_node(claims, cpu_claims, node, functions):
            return DEVICE
        helps = helped and cpu_takes_node(cpu_claims or (), node, functions)
        return HELPED if helps else f"{name} has no kernel for {signature(node)}"

    def refuse(nodes: Iterable[ExportedNode], why: str) -> None:
        for node in nodes:
            unsupported.setdefault(node.origin, _unsupported(graph.nodes[node.origin], why))

    on_device = not groups
    for group in groups:
        limited = limited_nodes(group.nodes, provider.limits, draft.outline.constants)
        for node, why in limited:
            refuse([node], f"{name} has no kernel for {signature(node)}: {why}")
        names = {node.name for node, _ in limited}
        nodes = [node for node in group.nodes if node.name not in names]
        if not nodes:
            continue
        first = group.nodes[0]
        answer = answers.get(group.key) or listed(first)
        if answer == DEVICE:
            on_device = True
        elif answer == HELPED and helped:
            cpu_nodes.update(node.origin for node in nodes)
        elif (why := listed(first)) not in (DEVICE, HELPED):
            refuse(nodes, why)  # shorter than the message of ONNX Runtime about a missing kernel
        elif answer == HELPED:
            refuse(nodes, f"{name} leaves {signature(first)} to the CPU")
        else:
            refuse(nodes, f"{name} has no kernel for {signature(first)}: {answer}")
    reason = ""
    if not on_device and not unsupported:
        reason = f"{name} takes none of the graph's nodes; the CPU would run all of them"
    ordered = tuple(unsupported[index] for index in sorted(unsupported))
    count = None if claims is None else len(claims)
    return Support(ordered, frozenset(cpu_nodes), count, reason, "" if answers else provider.judged_by())


def _without_lowering(graph: Graph) -> Iterator[UnsupportedOp]:
    for index in sorted(live_nodes(graph) if graph.outputs else range(len(graph.nodes))):
        node = graph.nodes[index]
        missing = next((op for op in _ops_within(node) if not _has_lowering(op)), None)
        if missing is not None:
            where = "" if missing is node.op else f" (in its body: {missing.kind})"
            why = f"{missing.reason}; {missing.remedy}" if isinstance(missing, Refused) else "it has no ONNX form"
            yield _unsupported(node, f"{why}{where}")


def _ops_within(node: Node) -> Iterator[Op]:
    yield node.op
    for body in node.op.bodies():
        for inner in body.nodes:
            yield from _ops_within(inner)


def _has_lowering(op: Op) -> bool:
    return op.is_leaf or lowering_of(op) is not None


def _unsupported(node: Node, reason: str) -> UnsupportedOp:
    return UnsupportedOp(node.id, node.name, getattr(node.op, "op_type", node.op.kind), reason)


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
    if report.compile_ready:
        return report
    count = len(report.still_unsupported)
    headline = f"{report.backend_name} cannot take graph {graph.name!r}: "
    headline += f"{count} unsupported {'node' if count == 1 else 'nodes'}" if count else report.reason
    lines = [headline, *(f"  {node}" for node in report.still_unsupported)]
    lines.append(f"Choose another device, or {cpu_help()}.")
    lines.append(format_dispatch_report(report))
    raise LegalizeError("\n".join(lines), report)


def dispatch_report_for_device(
    graph: Graph, device: Device | str, options: CompileOptions | None = None
) -> KernelDispatchReport:
    """Return in which form each kind of op runs on the device; unsupported ones are listed, not raised.

    Raises:
        DeviceUnavailableError: nothing is known about the device's kernels here.
    """
    device = Device(device)
    provider = provider_of(device)
    found = availability(device)
    if provider is None or (provider.claims() is None and not found.available):
        raise DeviceUnavailableError(device, found.reason, found.remedy)
    options = (options or CompileOptions()).on(device)
    support = support_of(device, graph, options)
    model = model_for(provider, graph, options)
    refused, compiled = {node.index for node in support.unsupported}, provider.claims() is None
    return KernelDispatchReport(
        device=device,
        backend_name=device.display,
        policy=options.kernel_dispatch.policy.value,
        supported_claim_count=support.claim_count or 0,
        summaries=summarize(graph, model, refused=refused, cpu_nodes=support.cpu_nodes, compiled=compiled),
        common_lowered_kinds=common_kinds(model, graph),
        still_unsupported=support.unsupported,
        reason=support.reason,
    )
