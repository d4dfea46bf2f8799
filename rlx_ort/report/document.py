"""The document that the page shows: a graph on the devices of this machine, as values of JSON.

Nothing is judged, predicted or placed here: the document joins predictions, the reports of sessions and the
measurements of a traced run, node by node.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

import rlx_ort
from rlx_ort.calibration.features import Kernel, Workload
from rlx_ort.calibration.kernels import KERNELS
from rlx_ort.calibration.measure import Bench
from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.execution.benchmark import timed_block
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy
from rlx_ort.providers.hardware import cpu_name, device_threads
from rlx_ort.providers.registry import availability, is_available, provider_of
from rlx_ort.report.trace import TracedRun, traced_run
from rlx_ort.selection.cost import BackendCostModel, Estimate
from rlx_ort.selection.predict import cost_model, explain, kernels_of, workload_on
from rlx_ort.selection.support import support_of

SCHEMA = 2
"""The version of the document; it grows when a key changes its meaning or goes."""

OTHERS = "all others"
"""The kind of a roofline that stands for the less expensive ones."""

_PROFILED_RUNS = 5
_TIMED_S = 0.5  # of plain runs, which give the measured time
_MOST_RUNS = 30
_SMALLEST_GROUP, _MOST_GROUPS, _LOOSE = 8, 100, 40
_SMALL = 100  # so many nodes are shown without groups
_LEAST_TIMED = 0.3  # of a run's time
_LIMITS_S, _LIMIT_POINT_S = 2.0, 0.05
_LIMIT_KERNELS = {"MatMul": ((512, 64), (512, 512), (512, 2048)), "Add": ((1 << 18, 256), (1 << 22, 256))}
_KINDS_SHOWN = 5


# --- one device


def view_of(
    graph: Graph,
    choose: Callable[[], Device],
    options: CompileOptions,
    feeds: Mapping[str, Any],
    dims: Mapping[str, int],
    *,
    measured_ns: float | None = None,
) -> tuple[dict[str, Any], TracedRun]:
    """Run a graph on a device and return its part of the page, and the trace of the runs.

    Opens a session with a profile, and runs it five times. Without `measured_ns` another one without a profile is timed
    for half a second.

    Args:
        graph: the graph.
        choose: returns the device; its time is the first phase of the trace.
        options: how to compile; the CPU may help unless they say otherwise.
        feeds: the inputs of the runs.
        dims: sizes of the graph's named dims.
        measured_ns: the time of a run where it was measured before.

    Raises:
        RlxError: the device does not run the graph.
    """
    options = options.with_(placement=options.placement or PlacementRule.ASSISTED)
    traced = traced_run(graph, feeds, choose, options, runs=_PROFILED_RUNS)
    device, exported = traced.device, traced.exported
    assert exported is not None  # noqa: S101  # the run has ended
    if measured_ns is None:
        last_ns = next(phase.ns for phase in reversed(traced.phases) if phase.name == "run")
        count = int(min(max(_TIMED_S * 1e9 / max(last_ns, 1), 1), _MOST_RUNS))
        with Session(device, options).compile(graph) as compiled:
            measured_ns = statistics.median(timed_block(compiled, feeds, count))
    estimate = explain(graph, device, options, dims)
    model = cost_model(device)
    measured = _measured(traced)
    predicted = {} if estimate is None else {term.name: term.ns for term in estimate.terms}
    sites = traced.placement.sites
    kept = [node for node in exported.nodes if node.name in sites]  # the others were folded away
    origins = [exported.origin_names.get(node.origin) or node.name for node in kept]
    paths = [_path(graph.scopes.get(name, ""), name) for name in origins]
    groups, group_of = grouped(paths, _codes(kept))
    workload = workload_on(graph, device, options, dims)
    crossings, crossing_at = _crossings(traced, model, {} if workload is None else workload.nbytes)
    producers = {name: at for at, node in enumerate(kept) for name in node.output_names if name}
    nodes = [
        {
            "name": origins[at],
            "module": ".".join(paths[at]),
            "op": node.op_type,
            "out": ", ".join(map(str, node.outputs)),
            "ep": sites[node.name],
            "predicted_ns": predicted.get(node.name),
            "measured_ns": measured.get(node.name),
            "group": group_of[at],
        }
        for at, node in enumerate(kept)
    ]
    edges = dict.fromkeys(
        (producers[name], at, crossing_at.get((name, sites[node.name]), -1))
        for at, node in enumerate(kept)
        for name in node.input_names
        if name in producers
    )
    roof = None if model is None or workload is None else _run_roofline(workload, model, measured, measured_ns)
    view = {
        "device": device.label,
        "hardware": availability(device).hardware,
        "ep": traced.placement.requested,
        "predicted_ns": None if estimate is None else estimate.total_ns,
        "error": None if estimate is None else estimate.error,
        "source": None if estimate is None else estimate.source,
        "measured_ns": measured_ns,
        "placement_share": traced.placement.requested_share,
        "nodes": nodes,
        "folded": len(exported.nodes) - len(kept),
        "edges": list(edges),
        "groups": [asdict(group) for group in groups],
        "crossings": crossings,
        "added": _added(traced),
        "parts": [] if estimate is None else _parts(estimate, traced, measured),
        "roofline": roof,
        "timeline": [asdict(phase) for phase in traced.phases[:6]],
    }
    return view, traced


def _measured(traced: TracedRun) -> dict[str, float]:
    """Return the exported nodes' times in a run in ns: the median over all runs but the first."""
    runs = sum(phase.name == "run" for phase in traced.phases)
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for node in traced.nodes:
        times[node.exported, node.name].append(node.ns)
    spent: dict[str, float] = defaultdict(float)
    for (exported, _), each in times.items():
        if exported:
            turns = max(len(each) // runs, 1)  # more than one in a loop
            sums = [sum(each[at : at + turns]) for at in range(0, len(each), turns)]
            spent[exported] += statistics.median(sums[1:] or sums)
    return dict(spent)


def _added(traced: TracedRun) -> list[dict[str, Any]]:
    """Return the nodes that ONNX Runtime added, which are copies between devices, by operator and provider."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    runs = sum(phase.name == "run" for phase in traced.phases)
    for node in traced.nodes:
        if not node.exported:
            times[node.op_type, node.provider].append(node.ns)
    return [
        {"op": op, "ep": ep, "count": len(each) // runs, "measured_ns": sum(each) / runs}
        for (op, ep), each in times.items()
    ]


def _crossings(
    traced: TracedRun, model: BackendCostModel | None, nbytes: Mapping[str, int]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], int]]:
    """Return the values that cross between devices with their price, and the place of each in that list.

    `nbytes` has the size of each value that a node writes.
    """
    placement = traced.placement
    rows: list[dict[str, Any]] = []
    at: dict[tuple[str, str], int] = {}
    for value, ep in placement.crossings:
        size, to_device = nbytes.get(value, 0), ep == placement.requested
        at[value, ep] = len(rows)
        price = model and (model.upload_ns if to_device else model.readback_ns)(size)
        rows.append({"value": value, "to_device": to_device, "to": ep, "nbytes": size, "predicted_ns": price})
    return rows, at


def _parts(estimate: Estimate, traced: TracedRun, measured: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the parts of a prediction by kind of work, each with its measured time."""
    spent: dict[str, list[int]] = defaultdict(list)
    for phase in traced.phases:
        spent[phase.name].append(phase.ns)
    moved = {"inputs": "copy in", "outputs": "copy out"}
    rows: dict[str, dict[str, Any]] = {}
    for term in estimate.terms:
        is_node = term.kind not in ("overhead", "transfer")
        part = term.kind if is_node else term.name
        time_ns = measured.get(term.name) if is_node else None
        if term.name in moved:
            time_ns = statistics.median(spent[moved[term.name]])
        row = rows.setdefault(part, {"part": part, "count": 0, "predicted_ns": 0.0, "how": [], "measured_ns": None})
        row["count"] += term.count
        row["predicted_ns"] += term.ns
        row["how"] = sorted({*row["how"], term.how})
        if time_ns is not None:
            row["measured_ns"] = (row["measured_ns"] or 0.0) + time_ns
    return sorted(rows.values(), key=lambda row: -row["predicted_ns"])


# --- repeated layers


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive nodes that the page shows as one, and the place of the group around it."""

    label: str
    first: int
    count: int
    parent: int | None = None


def _path(scope: str, name: str) -> tuple[str, ...]:
    """Return modules around a node: by its scope, else by its name, as `/layer1/layer1.0/conv/Conv` or `a.b.add`."""
    if scope:
        return tuple(scope.split("."))
    *modules, last = name.split("/") if "/" in name else [name]
    path: list[str] = []
    before = ""
    for module in filter(None, modules):
        path += module.removeprefix(f"{before}.").split(".")
        before = module
    return tuple(path or last.split(".")[:-1])


def grouped(paths: Sequence[tuple[str, ...]], codes: np.ndarray[Any, Any]) -> tuple[list[Group], list[int | None]]:
    """Return groups of nodes, and the innermost group of each node, by their modules and then by repetition.

    A group is a stretch of nodes, which are in topological order, so that groups depend on each other in no circle. A
    node without a module belongs to that of the nodes around it. `codes` are equal for nodes that look alike.
    """
    groups: list[Group] = []
    group_of: list[int | None] = [None] * len(paths)
    paths = _filled(paths)

    def add(label: str, start: int, end: int, parent: int | None) -> int:
        groups.append(Group(label, start, end - start, parent))
        group_of[start:end] = [len(groups) - 1] * (end - start)
        return len(groups) - 1

    def split(start: int, end: int, depth: int, parent: int | None) -> None:
        runs: list[tuple[int, int]] = []
        for at in range(start, end):
            if runs and paths[at][: depth + 1] == paths[runs[-1][0]][: depth + 1] and len(paths[at]) > depth:
                runs[-1] = (runs[-1][0], at + 1)
            else:
                runs.append((at, at + 1))
        many = len(runs) > _MOST_GROUPS  # as the layers of a deep model without a stack around them
        if many or len(runs) == end - start:
            for found in groups_of(codes[start:end]) if parent is None or end - start > _LOOSE else ():
                first, last = start + found.first, start + found.first + found.count
                inside = add(found.label, first, last, parent)
                if many:
                    split(first, last, depth, inside)
            return
        for first, last in runs:
            if (first, last) == (start, end):
                split(first, last, depth + 1, parent)
            elif last - first > 1:
                split(first, last, depth + 1, add(".".join(paths[first][: depth + 1]), first, last, parent))

    split(0, len(paths), 0, None)
    return groups, group_of


def _filled(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the paths, with that which both neighbours share for a node without one."""
    filled = list(paths)
    known = [at for at, path in enumerate(paths) if path]
    for before, after in itertools.pairwise(known):
        shared = zip(paths[before], paths[after], strict=False)
        filled[before + 1 : after] = [
            tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], shared))
        ] * (after - before - 1)
    return filled


def _codes(nodes: Sequence[ExportedNode]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number for each node, equal for nodes of the same operator and types."""
    looks: dict[object, int] = {}
    return np.array(
        [looks.setdefault((node.op_type, node.body, *map(_look, node.outputs)), len(looks)) for node in nodes], np.int64
    )


def _look(kind: ValueType | None) -> object:
    """Return the type pattern shared by repeated layers: named dims may have other names in each."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return kind
    return kind.dtype, tuple(dim if isinstance(dim, int) else None for dim in kind.shape)


def groups_of(codes: np.ndarray[Any, np.dtype[np.int64]]) -> list[Group]:
    """Return the groups of nodes that are alike where their codes are equal, in order.

    The longest stretch that repeats itself becomes groups of one repetition, or several where that is short; then the
    nodes before and behind it. Long stretches without a repetition are cut into pieces.
    """
    groups: list[Group] = []
    least = max(_SMALLEST_GROUP, len(codes) // _MOST_GROUPS)

    def split(start: int, end: int) -> None:
        first, period, times = _repetition(codes[start:end])
        each = period * max(1, -(-least // max(period, 1)))  # several repetitions where one is small
        count = times * period // each if period else 0
        if count < 2:
            cuts = range(start, end, max(_LOOSE, least)) if end - start > _LOOSE and len(codes) > _SMALL else ()
            for at in cuts:
                stop = min(at + max(_LOOSE, least), end)
                groups.append(Group(f"nodes {at + 1} to {stop}", at, stop - at))
            return
        split(start, start + first)
        begin = start + first
        for turn in range(count):
            groups.append(Group(f"repeat {turn + 1} of {count}", begin + turn * each, each))
        split(begin + count * each, end)

    split(0, len(codes))
    return groups


def _repetition(codes: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[int, int, int]:
    """Return start, period and number of the repetitions that cover most; the period is 0 if there are none."""
    best = (0, 0, 0)
    for period in range(1, min(len(codes) // 2, 2000) + 1):
        breaks = np.flatnonzero(codes[period:] != codes[:-period])
        ends = np.concatenate([[-1], breaks, [len(codes) - period]])
        longest = int(np.argmax(np.diff(ends)))
        times = (int(ends[longest + 1] - ends[longest]) - 1) // period + 1
        if times > 1 and times * period > best[1] * best[2]:
            best = (int(ends[longest]) + 1, period, times)
    return best


# --- rooflines


class Point(NamedTuple):
    """Nodes of one kernel: operations per byte, GFLOP/s, and the ns that all of them are predicted to take."""

    intensity: float
    rate: float
    ns: float


class Roofline(NamedTuple):
    """A device's rates, and the nodes by operator, the most expensive first and the rest as one.

    `peak` is in GFLOP/s, `bandwidth` in bytes per ns, `total_ns` the predicted time of all nodes.
    """

    peak: float
    bandwidth: float
    total_ns: float
    kinds: dict[str, list[Point]]


def roofline(graph: Graph, model: BackendCostModel, dims: Mapping[str, int]) -> Roofline:
    """Return the predicted roofline of a graph on the device of a cost model; views are left out."""
    work = [(kernel, count, model.price(kernel).ns) for kernel, count in kernels_of(graph, model.device, dims).items()]
    peak = max(model.sgemm_gflops(m, 1024, 1024) for m in (64, 1024, 4096))
    return _roofline(work, peak, model.memory_bw())


def _roofline(work: Iterable[tuple[Kernel, int, float]], peak: float, bandwidth: float) -> Roofline:
    """Return a roofline from kernels, the number of nodes of each, and the time of one node in ns."""
    by_unit: dict[str, list[Point]] = {}
    total_ns = 0.0
    for kernel, count, ns in work:
        total_ns += count * ns
        if kernel.flops and kernel.nbytes and ns > 0:
            point = Point(kernel.flops / kernel.nbytes, kernel.flops * kernel.times / ns, count * ns)
            by_unit.setdefault(kernel.op_type, []).append(point)
    ordered = sorted(by_unit.items(), key=lambda item: -sum(point.ns for point in item[1]))
    kinds = dict(ordered[:_KINDS_SHOWN])
    rest = [point for _, points in ordered[_KINDS_SHOWN:] for point in points]
    if rest:
        kinds[OTHERS] = rest
    return Roofline(
        max(peak, *(point.rate for points in kinds.values() for point in points), 0.0), bandwidth, total_ns, kinds
    )


def _run_roofline(
    workload: Workload, model: BackendCostModel, measured: Mapping[str, float], run_ns: float
) -> dict[str, Any]:
    """Return the roofline of a run: the rates of its nodes by their measured times, below measured limits.

    Rates are predicted where the nodes' times do not add up to that of a run, since a profile may count launches only.
    """
    peak, bandwidth, source = _limits(model)
    if sum(measured.values()) < _LEAST_TIMED * run_ns:
        predicted = ((kernel, count, model.price(kernel).ns) for kernel, count in workload.counts.items())
        return {**_roofline(predicted, peak, bandwidth)._asdict(), "limits": source, "rates": "predicted"}
    spent: dict[Kernel, list[float]] = defaultdict(list)
    for node, kernel in zip(workload.nodes, workload.kernels, strict=True):
        if kernel is not None and measured.get(node.name):
            spent[kernel].append(measured[node.name])
    work = ((kernel, len(each), statistics.fmean(each)) for kernel, each in spent.items())
    return {**_roofline(work, peak, bandwidth)._asdict(), "limits": source, "rates": "measured"}


def _limits(model: BackendCostModel) -> tuple[float, float, str]:
    """Return the best rate of products in GFLOP/s, the bytes per ns of additions, and where both are from.

    Where the device has no calibration, they are measured now, in about a second.
    """
    peak, bandwidth = max(model.sgemm_gflops(m, 1024, 1024) for m in (64, 1024, 4096)), model.memory_bw()
    if not model.source.startswith("default"):
        return peak, bandwidth, "calibration"
    bench = Bench(model.device, _LIMITS_S, _LIMIT_POINT_S)
    try:
        bench.begin(keep_open=False)
        for kernel in KERNELS:
            if kernel.name in _LIMIT_KERNELS and kernel.dtype == "f32":
                bench.visit(kernel, _LIMIT_KERNELS[kernel.name])
    except RlxError:  # the device does not run kernels alone
        return peak, bandwidth, model.source
    rows = bench.rows.values()
    products = [2.0 * row.size[0] * row.size[1] / row.ns for row in rows if row.kernel == "MatMul" and row.ns]
    moved = [12.0 * row.size[0] / row.ns for row in rows if row.kernel == "Add" and row.ns and row.size[0] > 1 << 20]
    if not products or not moved:
        return peak, bandwidth, model.source
    return max(products), max(moved), "measured for this page"


# --- splits


def splits_of(
    graph: Graph, devices: Iterable[Device], options: CompileOptions, dims: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the nodes that devices do not take, by reason, and the options under which they take them.

    Each option is tried: the graph is judged again, which asks the device about its nodes. There are none for a device
    that is not here, unless the kernels of its provider are listed, and a device with several names counts once.
    """
    seen: dict[tuple[str, int], Device] = {}
    for device in devices:
        provider = provider_of(device)
        if provider is not None and (is_available(device) or provider.judged_by()):
            seen.setdefault((provider.name, device.index), device)
    return [split for device in seen.values() for split in _splits(graph, device, options, dims)]


def _splits(graph: Graph, device: Device, options: CompileOptions, dims: Mapping[str, int]) -> list[dict[str, Any]]:
    strict = options.with_(placement=PlacementRule.STRICT)
    refused = support_of(device, graph, strict).unsupported
    if not refused:
        return []
    remedies: dict[str, dict[str, Any]] = {
        f"fix the sizes: {' '.join(f'--dim {name}={size}' for name, size in dims.items())}": {"dims": dims},
        "write ops in their basic form: RLX_KERNEL_DISPATCH=common": {
            "kernel_dispatch": KernelDispatch(KernelDispatchPolicy.FORCE_COMMON)
        },
        "compute in f16: CompileOptions(precision=Precision.F16)": {"precision": Precision.F16},
        **{f"write opset {opset}: CompileOptions(opset={opset})": {"opset": opset} for opset in (17, 20)},
    }
    left: dict[str, set[int]] = {}
    for remedy, changes in remedies.items():
        changed = strict.with_(**changes)
        try:
            support = support_of(device, graph, changed)
        except RlxError:  # the graph has no such form
            continue
        if changed != strict and not support.reason:
            left[remedy] = {node.index for node in support.unsupported}
    by_reason: dict[str, list[Any]] = defaultdict(list)
    for node in refused:
        by_reason[node.reason].append(node)
    return [
        {
            "device": device.label,
            "reason": reason,
            "nodes": [f"{node.name} ({node.kind})" for node in nodes],
            "repairs": [remedy for remedy, still in left.items() if not still & {node.index for node in nodes}],
        }
        for reason, nodes in by_reason.items()
    ]


# --- the document


def document(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    views: Iterable[Mapping[str, Any]],
    splits: Iterable[Mapping[str, Any]] = (),
    *,
    dims: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return one report: the devices as `rlx-ort report --json` lists them, and a view for each that ran."""
    from rlx_ort.providers.engine.runtime import describe_runtime

    return {
        "schema": SCHEMA,
        "model": title,
        "runtime": describe_runtime(),
        "version": rlx_ort.__version__,
        "machine": f"{cpu_name()}, {device_threads(Device.CPU)} threads; {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "dims": dict(dims or {}),
        "notes": [],
        "devices": list(rows),
        "views": list(views),
        "splits": list(splits),
    }
