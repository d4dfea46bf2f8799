"""The loop that measures kernels on devices, and single nodes on demand.

A row is the time of one copy of a kernel: (a run with K copies - a run of the base) / K. K is chosen so that the copies
stand out of the round trip. Kernels and devices are interleaved in random order, so that whatever else the machine
does meets all of them alike, and everything is visited twice, of which the quicker time counts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from rlx_ort.calibration.kernels import KERNELS, QUICK_PRIORITY, Kernel, KernelGraph, Point, RandomData
from rlx_ort.calibration.profile import REQUIRED, Row
from rlx_ort.device import Device
from rlx_ort.errors import DeviceError, EngineError, GraphError, GraphVerifyError, RunError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session, working_provider
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel, PlacementRule
from rlx_ort.providers.hardware import device_threads

Clock: TypeAlias = Callable[[], int]
"""Gives the time in ns from some fixed point."""

Progress = Callable[[Device, str, float], None]
"""Called with a device, the name of the measurement, and the share of its time budget that is gone, 0 to 1."""

FAILURES = (DeviceError, GraphError, RunError)
"""Errors that a device may raise at a graph it cannot run: the kernel is skipped, with the message."""

_TRIPS = 4  # round trips that the copies of a kernel should take
_LEAST_COPIES = 4
_LEAST_RUNS = 6  # of a graph, those that warm it up included
_WARM_SHARE, _LEAST_WARM, _RECORDING_RUNS = 0.3, 3, 5  # a session's first two runs fault in its memory
_PATIENCE = 2  # times a point's time is the limit of one copy
_LONG_TRIPS = 25  # a copy that takes as many round trips stands out alone
_ENOUGH_RUNS = 500
_NEEDED_POINTS = 5
_NODE_SHARE = 0.02  # of the limit is for timing one node
_log = logging.getLogger(__name__)


class _Timed(NamedTuple):
    ns: float
    spread: float
    repeats: int


class Bench:
    """Measures kernels on one device and collects the rows.

    All measuring takes at most `limit_s`, and one size is timed for `point_s`; `clock` returns ns. `rows` maps (kernel,
    size, dtype) to its row, `skipped` a kernel to the reason why rows are missing. `bases` holds times subtracted
    from kernels, by dtype and whether launches are recorded; it is measured once a visit. `spent_ns` is the time taken
    on the device so far.

    `records` is true if the device records the launches of usual runs, `compiles` if it compiles whole graphs and so
    has no single kernels.
    """

    def __init__(self, device: Device, limit_s: float, point_s: float, clock: Clock = time.perf_counter_ns) -> None:
        self.device = device
        self.limit_ns, self.point_ns = limit_s * 1e9, point_s * 1e9
        self.rows: dict[tuple[str, Point, str], Row] = {}
        self.skipped: dict[str, str] = {}
        self.spent_ns = 0.0
        self.records = False
        self.compiles = working_provider(device).compiles
        self.data = RandomData()
        self._clock = clock
        self._anchor: CompiledGraph | None = None
        self.bases: dict[tuple[str, bool], _Timed] = {}
        self._works: dict[tuple[str, str], dict[float, float]] = {}  # kernel, dtype -> work -> ns of a copy
        self._failed: set[str] = set()
        self._unrecordable: set[str] = set()
        self._extra_ns: list[float] = []

    def begin(self, *, keep_open: bool) -> None:
        """Find out whether the device records launches; with `keep_open`, keep a session until `close`.

        Some providers give up the device with their last session, and the next one prepares it anew.

        Raises:
            RlxError: the device fails at the smallest graph.
        """
        start = self._clock()
        graph = self._graph(KERNELS[0], (), 1)
        compiled = self._compiled(graph, KERNELS[0], False)
        compiled.run(graph.feeds)
        with contextlib.suppress(EngineError), contextlib.closing(self._compiled(graph, KERNELS[0], True)) as recording:
            for _ in range(_RECORDING_RUNS):
                recording.run(graph.feeds)
            self.records = bool(recording.device_graph_report().recorded)
        if keep_open:
            self._anchor = compiled
        else:
            compiled.close()
        self.spent_ns += max(self._clock() - start, 0)

    def close(self) -> None:
        """Close the session that was kept open."""
        if self._anchor is not None:
            self._anchor.close()

    def ns(self, kernel: str) -> float:
        """Return the time of a kernel without a size, or 0 where it has no row."""
        row = self.rows.get((kernel, (), "f32"))
        return 0.0 if row is None else row.ns

    def visit(
        self,
        kernel: Kernel,
        points: Sequence[Point],
        guess_ns: float = 0.0,
        *,
        needed: bool = False,
        patience: float = 1.0,
    ) -> None:
        """Measure a kernel at some points, least work first; where a point has a row, the quicker one counts.

        `guess_ns` estimates the time of a copy, where nothing is known of the kernel; one that is `needed` is measured
        whatever the time, and so is the first point of a kernel that every model needs. A point is timed for `patience`
        times the usual.
        """
        label = kernel.name if kernel.dtype == "f32" else f"{kernel.name} {kernel.dtype}"
        if label in self._failed or (kernel.runs == "recorded" and not self.records):
            return
        begun, usual_ns = self._clock(), self.point_ns
        self.point_ns *= patience
        for point in sorted(points, key=kernel.work):
            expected_ns = guess_ns or self._expected_ns(kernel, point)
            run_ns = expected_ns * (kernel.copies or self._copies(kernel, expected_ns))
            takes_ns = self.point_ns + (statistics.median(self._extra_ns) if self._extra_ns else 0.0)
            ends_ns = self.spent_ns + max(self._clock() - begun, 0) + max(takes_ns, _LEAST_RUNS * run_ns)
            must = needed or (label in REQUIRED and not any(key[0] == kernel.name for key in self.rows))
            reason = "no time"
            if must or (run_ns <= _PATIENCE * self.point_ns and ends_ns <= self.limit_ns):
                reason = "nothing above the noise"
                try:
                    self._measure(kernel, point, expected_ns)
                except FAILURES as err:
                    self.skipped[label] = str(err).splitlines()[0]
                    self._failed.add(label)
                    break
            if self._key(kernel, point) not in self.rows:
                self.skipped.setdefault(label, f"{reason} for size {kernel.size(point)}")
        self.point_ns = usual_ns
        self.spent_ns += max(self._clock() - begun, 0)

    # --- one point

    def _measure(self, kernel: Kernel, point: Point, expected_ns: float) -> None:
        copies = kernel.copies or self._copies(kernel, expected_ns)
        try:
            timed = self._timed(self._graph(kernel, point, copies), kernel)
        except EngineError:
            if kernel.runs == "recorded" or not self._recorded(kernel):
                raise
            self._unrecordable.add(kernel.name)
            timed = self._timed(self._graph(kernel, point, copies), kernel)
        base = self._base(kernel, point, copies)
        if base is None or timed is None:
            return
        better = self._copies(kernel, max(timed.ns - base.ns, 0.0) / copies)
        if not kernel.copies and better >= 2 * copies and timed.ns < 2 * base.ns:
            copies, timed = better, self._timed(self._graph(kernel, point, better), kernel) or timed
        copy_ns = max(timed.ns - base.ns, 0.0) / copies
        if copy_ns == 0 and kernel.size(point):  # below the noise: nothing to keep, or to hold against a later visit
            return
        whole_ns = timed.ns / copies if kernel.base else copy_ns  # of a link, where only its last nodes count
        works, work = self._works.setdefault((kernel.name, kernel.dtype), {}), kernel.work(point)
        works[work] = min(whole_ns, works.get(work, math.inf))
        row = Row(kernel.name, kernel.size(point), round(copy_ns, 1), kernel.dtype, timed.spread, timed.repeats)
        key = self._key(kernel, point)
        self.rows[key] = self._better(row, self.rows.get(key))

    def _recorded(self, kernel: Kernel) -> bool:
        """Return whether a kernel is measured with recorded launches."""
        usual = self.records and kernel.name not in self._unrecordable
        return kernel.runs == "recorded" or (kernel.runs == "as executed" and usual)

    def _better(self, row: Row, before: Row | None) -> Row:
        """Return the quicker of two rows, whose spread is at least their difference in units of a launch or more."""
        if before is None:
            return row
        most = max(row.ns, before.ns, self.ns("launch"), 1.0)
        better = min(row, before, key=lambda row: row.ns)
        return replace(better, spread=max(better.spread, round(abs(row.ns - before.ns) / most, 3)))

    def _key(self, kernel: Kernel, point: Point) -> tuple[str, Point, str]:
        return kernel.name, kernel.size(point), kernel.dtype

    def _copies(self, kernel: Kernel, expected_ns: float) -> int:
        """Return how many copies stand out of a round trip and leave time for several runs."""
        trip_ns = self.ns("run:recorded" if self.records else "run")
        least = _LEAST_COPIES if expected_ns < _LONG_TRIPS * trip_ns else 1
        copies = min(max(math.ceil(_TRIPS * trip_ns / max(expected_ns, 1.0)), least), kernel.most)
        while copies > 1 and copies * expected_ns > self.point_ns / 2:
            copies //= 2
        return copies

    def _expected_ns(self, kernel: Kernel, point: Point) -> float:
        """Return an upper estimate of the time of a copy: by the nearest point of the kernel, else by the best rate."""
        work, seen = kernel.work(point), self._works.get((kernel.name, kernel.dtype))
        if seen:
            near, ns = min(seen.items(), key=lambda known: abs(math.log(known[0] / work)))
            more = min(ns * (work / near - 1.0), work) if kernel.unit == "bytes" else ns * (work / near - 1.0)
            return ns + max(more, 0.0)  # transfers of few bytes are latency: a byte takes 1 ns at most
        alike = {other.name for other in KERNELS if other.unit == kernel.unit}
        rates = [ns / done for (name, _), known in self._works.items() if name in alike for done, ns in known.items()]
        return max(self.ns("launch"), work * min(rates, default=0.0))

    def _base(self, kernel: Kernel, point: Point, copies: int) -> _Timed | None:
        if kernel.whole:
            return _Timed(0.0, 0.0, 0)
        graph = self._graph(kernel, point, copies if kernel.base else 0, kernel.base)
        if not graph.bare:
            return self._timed(graph, kernel)
        key = kernel.dtype, self._recorded(kernel)
        known = self.bases.get(key) or self._timed(graph, kernel)
        if known is not None:
            self.bases[key] = known
        return known

    def _graph(self, kernel: Kernel, point: Point, copies: int, build: Any = None) -> KernelGraph:
        graph = KernelGraph(self.data, DType(kernel.dtype), chained=kernel.chained or self.compiles)
        (build or kernel.build)(graph, point, copies)
        return graph

    def _timed(self, graph: KernelGraph, kernel: Kernel) -> _Timed | None:
        """Return the lower quartile of the runs of a graph; None when the clock makes no sense."""
        recorded = self._recorded(kernel)
        clock, feeds = self._clock, graph.feeds
        least_warm = _RECORDING_RUNS if recorded else _LEAST_WARM
        opening = clock()
        compiled = self._compiled(graph, kernel, recorded)
        try:
            start = clock()
            for done in range(1, _ENOUGH_RUNS):
                compiled.run(feeds)
                gone = clock() - start
                slow = done > 1 and gone > 2 * self.point_ns and not recorded
                if slow or (done >= least_warm and not 0 <= gone < _WARM_SHARE * self.point_ns):
                    break
            times: list[int] = []
            start = clock()
            self._extra_ns.append(max(start - opening, 0))
            for _ in range(_ENOUGH_RUNS):
                before = clock()
                compiled.run(feeds)
                after = clock()
                if after > before:  # a clock that stands still or goes back says nothing about this run
                    times.append(after - before)
                if after - start > self.point_ns and (len(times) >= 3 or after - start > 2 * self.point_ns):
                    break
        finally:
            compiled.close()
        if not times:
            return None
        times.sort()  # quartiles by rank: of three runs on a busy host the least is the best guess
        low, middle, high = (times[len(times) * at // 4] for at in (1, 2, 3))
        if len(times) < _LEAST_RUNS:
            low = times[0]
        return _Timed(float(low), round((high - low) / middle, 3), len(times))

    def _compiled(self, graph: KernelGraph, kernel: Kernel, device_graph: Any) -> CompiledGraph:
        options = CompileOptions(
            placement=PlacementRule.STRICT,
            optimization=OptimizationLevel.ALL if graph.chained else OptimizationLevel.OFF,
            device_graph=device_graph,
            intra_op_threads=device_threads(self.device),  # whatever sessions of the application hold
        )
        return Session(self.device, options).compile(graph.graph)


Group: TypeAlias = tuple[Kernel, int, tuple[Point, ...]]
"""A kernel with points of one priority."""


def measure_kernels(benches: Sequence[Bench], *, quick: bool = False, progress: Progress | None = None) -> None:
    """Measure the table's kernels on devices by priority, and then everything once more while there is time."""
    order = random.Random(0)  # noqa: S311  # not for secrets
    groups = [(kernel, priority, points) for kernel in KERNELS for priority, points in kernel.groups if points]
    if quick:
        groups = [group for group in groups if group[1] <= QUICK_PRIORITY]
    order.shuffle(groups)
    groups = _least_first(groups)
    for again in (False, True):
        _log.debug("visit %s: %s", 1 + again, [(bench.device.label, bench.spent_ns / 1e9) for bench in benches])
        groups.sort(key=lambda group: group[1] > 0 if again else group[1])
        for kernel, priority, points in groups:
            for bench in order.sample(benches, len(benches)):
                if progress is not None:
                    progress(bench.device, kernel.name, min(bench.spent_ns / bench.limit_ns, 1.0))
                # The common rows are a small part of the time. It takes longer on a device that has just
                # woken up, and is measured at two moments: the core may share its hardware for a second or more.
                needed = priority == 0
                bench.visit(kernel, points, needed=needed, patience=_NEEDED_POINTS if needed and not again else 1.0)
        order.shuffle(groups)
        for bench in benches:
            bench.bases.clear()


def _least_first(groups: Sequence[Group]) -> list[Group]:
    """Return groups in this order of their kernels, each kernel's by priority and least work.

    After a point of much work on a slow device, all others of the kernel would seem to take too long.
    """
    mine: dict[int, list[Group]] = {}
    for group in groups:
        mine.setdefault(id(group[0]), []).append(group)
    for own in mine.values():
        own.sort(key=lambda group: (group[1], min(map(group[0].work, group[2]))), reverse=True)
    return [mine[id(kernel)].pop() for kernel, _, _ in groups]


# --- single nodes


@dataclass(frozen=True, slots=True)
class Node:
    """A node to be measured on demand; its row is called `?` and `name`.

    `inputs` has the type of each input, its data where that is known, and None for an absent one. `version` is the
    opset version of the domain.
    """

    name: str
    op_type: str
    inputs: tuple[TensorType | TensorData | None, ...]
    outputs: tuple[TensorType, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    version: int = 21


def measure_nodes(
    device: Device, nodes: Iterable[Node], limit_s: float = 0.3, *, clock: Clock = time.perf_counter_ns
) -> tuple[list[Row], dict[str, str]]:
    """Measure single nodes on a device, the first ones first, and return their rows and why others have none.

    Each is measured twice if there is time, and the quicker time counts.

    Raises:
        RlxError: the device does not work, or fails at the smallest graph.
    """
    bench = Bench(device, 0.7 * limit_s, _NODE_SHARE * limit_s, clock)  # the rest is for the last one, and for closing
    reasons: dict[str, str] = {}
    bench.begin(keep_open=device_threads(device) == 1)  # idle worker threads of an open session would take the cores
    kernels = [(Kernel(f"?{node.name}", partial(_copies_of, node), ()), node) for node in nodes]
    try:
        for name in ("run:recorded", "run") if bench.records else ("run",):
            bench.visit(next(kernel for kernel in KERNELS if kernel.name == name), ((),))
        for kernel, node in kernels:
            bench.visit(kernel, ((),), bench.point_ns / 2)  # one copy, and more where it is short
            if kernel.name in bench.skipped:
                reasons[node.name] = bench.skipped[kernel.name]
        for kernel, _ in kernels:
            row = bench.rows.get((kernel.name, (), "f32"))
            if row is not None:
                bench.visit(kernel, ((),), row.ns)
    finally:
        bench.close()
    return [row for row in bench.rows.values() if row.kernel.startswith("?")], reasons


def _copies_of(node: Node, graph: KernelGraph, point: Point, copies: int) -> None:
    """Add copies of a node that read the same random or known tensors.

    Raises:
        GraphVerifyError: the size of an input is not known, or the device has no single nodes.
    """
    if graph.chained:
        raise GraphVerifyError("devices that compile whole graphs have no single nodes")
    inputs: list[Value | None] = []
    for given in node.inputs if copies else ():
        if given is None:
            inputs.append(None)
        elif isinstance(given, TensorData):
            inputs.append(graph.weight(*given.shape, dtype=given.dtype, given=given))
        elif given.shape is None or not given.shape.is_static or given.dtype is DType.STRING:
            raise GraphVerifyError(f"{node.name} has an input {given}, of which no data can be made")
        else:
            sizes: list[Any] = [*given.shape]
            inputs.append(graph.weight(*sizes, dtype=given.dtype))
    also: list[Value] = []
    for _ in range(copies):
        also += graph.graph.onnx_node(
            node.op_type, inputs, node.attributes, types=node.outputs, domain=node.domain, version=node.version
        )[:1]
    graph.end(also=also)
