"""Runs a graph once with a clock around each phase and ONNX Runtime's profile inside, and writes both as a trace.

The trace is JSON in Chrome's trace event format, which Perfetto and chrome://tracing read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.to_onnx import all_weights
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.engine import open_slot
from rlx_ort.execution.placement import Placement
from rlx_ort.execution.session import working_provider
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.base import SessionRequest
from rlx_ort.storage import temporary_folder

if TYPE_CHECKING:
    import onnx

_MOST_WRITTEN_BYTES = 1 << 30  # of weights, for the names of fused nodes
_MADE = re.compile(r"^InsertedPrecisionFreeCast_|_nchwc(?:_token_\d+)?$")
"""What ONNX Runtime adds to the name of a value: for one that it casts, and for one in blocked layout. A node that it
makes for the value has the same name."""
_COPY = "Memcpy"  # operators that copy between devices, which the report lists by themselves
_KERNEL = "_kernel_time"  # the suffix that ONNX Runtime gives the name of a node
_CLOCKS: tuple[Callable[[], int], ...] = (time.perf_counter_ns, time.time_ns, time.monotonic_ns)
"""Clocks that may time ONNX Runtime's profile: the high-resolution clock of its C++ library, which is the system clock
on Linux and a steady one on Windows and macOS."""
if sys.platform == "darwin":
    _CLOCKS += (functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC_RAW),)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the work: its name and when it began, in ns from the beginning of the trace, and its time in ns."""

    name: str
    start_ns: int
    ns: int


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One node in one run, as ONNX Runtime's profile has it.

    `name` is the node's name in the session, `origin` that of the user's node and `exported` that of the exported
    model's, both empty for a copy between devices and where they are not known. A fused node counts as the one of its
    operator, and a cast or a node of an expanded function as the one that needs it. Times are in ns, from the beginning
    of the trace; ONNX Runtime counts whole microseconds and adds some to each node.
    """

    name: str
    origin: str
    exported: str
    op_type: str
    provider: str
    start_ns: int
    ns: int


@dataclass
class TracedRun:
    """A graph opened for a device and run, phase by phase.

    Attributes:
        device: the device that was chosen.
        phases: the phases in order, none of which overlap: choose, export, open; copy in, run and copy out of each run.
        wall_ns: the time from the beginning of the first phase to the end of the last, in ns.
        outputs: the outputs of the last run.
        nodes: the nodes of all runs in the order of their execution; empty for an engine that has no profile.
        session: other events of ONNX Runtime's profile, as (name, start in ns, time in ns).
    """

    device: Device = Device.CPU
    phases: list[Phase] = field(default_factory=list)
    wall_ns: int = 0
    outputs: list[Any] = field(default_factory=list)
    nodes: list[NodeRun] = field(default_factory=list)
    session: list[tuple[str, int, int]] = field(default_factory=list)
    placement: Placement = field(default_factory=lambda: Placement(""))
    exported: ExportedModel | None = None
    _begun_ns: int = field(default_factory=time.perf_counter_ns)
    _readings_ns: tuple[int, ...] = field(default_factory=lambda: tuple(clock() for clock in _CLOCKS))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase, which ends with the block."""
        start_ns = time.perf_counter_ns() - self._begun_ns
        try:
            yield
        finally:
            self.wall_ns = time.perf_counter_ns() - self._begun_ns
            self.phases.append(Phase(name, start_ns, self.wall_ns - start_ns))

    def _profile_start_ns(self, reading_ns: int) -> int:
        """Return when a profile began, in ns from the beginning of the trace, by a reading of one of `_CLOCKS`.

        A profile begins while its session is opened, which shows the clock; the beginning of that phase if none fits.
        """
        opened = next(phase for phase in self.phases if phase.name == "open")
        starts_ns = (reading_ns - begun_ns for begun_ns in self._readings_ns)
        return next((at for at in starts_ns if 0 <= at - opened.start_ns <= opened.ns), opened.start_ns)

    def read_profile(self, graph: Graph, options: CompileOptions, path: Path, reading_ns: int) -> None:
        """Take over the events of a profile of ONNX Runtime, which began at this reading of one of `_CLOCKS`.

        `options` are those of the session.
        """
        offset_ns = self._profile_start_ns(reading_ns)
        assert self.exported is not None  # noqa: S101  # its session has run
        kernels = []
        for event in json.loads(path.read_text(encoding="utf-8")):
            if event.get("ph") == "X":
                timed = (event["name"], offset_ns + event["ts"] * 1000, event["dur"] * 1000)
                if event["cat"] != "Node":
                    self.session.append(timed)
                elif event["name"].endswith(_KERNEL):
                    kernels.append((*timed, event["args"]))
        operators = {name.removesuffix(_KERNEL): args["op_name"] for name, _, _, args in kernels}
        writers = {value: node for node in self.exported.nodes for value in node.output_names}
        moved = {name for name, op_type in operators.items() if op_type.startswith(_COPY)}
        known = {name: self._by_name(name, writers) for name in operators if name not in moved}
        if None in known.values():
            made_by = self._by_dataflow(graph, options, operators, writers)
            known = {name: node or made_by.get(name) for name, node in known.items()}
        ends = {node.name for node in known.values() if node is not None}
        cores = {
            name: node if node is None or operators[name] == "Cast" else _core(node, operators[name], writers, ends)
            for name, node in known.items()
        }
        for name, start_ns, ns, args in kernels:
            name = name.removesuffix(_KERNEL)
            node = cores.get(name)
            names = (name, "", "") if node is None else (name, self.exported.origin_names[node.origin], node.name)
            self.nodes.append(NodeRun(*names, args["op_name"], args["provider"], start_ns, ns))

    def _by_name(self, name: str, writers: Mapping[str, ExportedNode]) -> ExportedNode | None:
        """Return the exported node that a session's node, or a value, is named after; `writers` has them by results."""
        assert self.exported is not None  # noqa: S101  # as above
        return self.exported.node_of(name) or writers.get(_MADE.sub("", name))

    def _by_dataflow(
        self, graph: Graph, options: CompileOptions, operators: Mapping[str, str], writers: Mapping[str, ExportedNode]
    ) -> dict[str, ExportedNode]:
        """Return the exported node for which the session has each of its nodes; `operators` has these as they run.

        A fused node keeps the name of its result only, and the nodes of an expanded function or a cast of a weight have
        new names: those of the exported node that is named after their result, or the first one behind or before them.
        ONNX Runtime optimises the graph once more for that.
        """
        assert self.exported is not None  # noqa: S101  # as above
        weights = graph.weights
        if sum(weights[name].nbytes for name in self.exported.params if name in weights) > _MOST_WRITTEN_BYTES:
            return {}
        request = SessionRequest(self.device, self.exported, all_weights(graph, self.exported), options)
        try:
            model = working_provider(self.device).optimized(request, whole=True)
        except RlxError:  # a provider that compiles the graph writes none
            return {}
        nodes = [] if model is None else list(model.graph.node)
        _name(nodes, operators)
        made_by: dict[str, ExportedNode] = {}
        for node in nodes:
            found = (self._by_name(name, writers) for name in (node.name, *node.output))
            if (first := next(filter(None, found), None)) is not None:
                made_by[node.name] = first
        for ordered, near in ((reversed(nodes), _readers(nodes)), (nodes, _makers(nodes))):
            for node in ordered:
                if node.name not in made_by and (beside := [made_by[at] for at in near[node.name] if at in made_by]):
                    made_by[node.name] = beside[0]
        return made_by


def _name(nodes: Sequence[onnx.NodeProto], operators: Mapping[str, str]) -> None:
    """Give nodes without a name, those of expanded functions, the names that the profile has for them.

    These end in a number of the session. Nodes of one operator are written in the order in which they run.
    """
    nameless: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    named: dict[str, list[str]] = defaultdict(list)
    names = {node.name for node in nodes}
    for node in nodes:
        if not node.name:
            node.name = f"nameless {node.op_type} {len(nameless[node.op_type])}"
            nameless[node.op_type].append(node)
    for name, op_type in operators.items():
        if name not in names:
            named[op_type].append(name)
    for op_type, found in nameless.items():
        if len(found) == len(named[op_type]):
            for node, name in zip(found, named[op_type], strict=True):
                node.name = name


def _makers(nodes: Sequence[onnx.NodeProto]) -> dict[str, list[str]]:
    """Return the names of the nodes whose results each node reads."""
    writers = {value: node.name for node in nodes for value in node.output}
    return {node.name: [writers[value] for value in node.input if value in writers] for node in nodes}


def _readers(nodes: Sequence[onnx.NodeProto]) -> dict[str, list[str]]:
    """Return the names of the nodes that read the results of each node."""
    readers: dict[str, list[str]] = {node.name: [] for node in nodes}
    for name, read in _makers(nodes).items():
        for other in read:
            readers[other].append(name)
    return readers


def _core(end: ExportedNode, op_type: str, writers: Mapping[str, ExportedNode], ends: Collection[str]) -> ExportedNode:
    """Return the node that a fused node is named after by its operator, as the Conv before a Relu; else its end."""
    seen = {end.name}
    todo = [end]
    for node in todo:
        if node.op_type in op_type:
            return node
        before = [writers[name] for name in node.input_names if name in writers]
        todo += (new := [each for each in before if each.name not in seen and each.name not in ends])
        seen.update(each.name for each in new)
    return end


def traced_run(
    graph: Graph,
    feeds: Mapping[str, Any],
    choose: Callable[[], Device],
    options: CompileOptions | None = None,
    *,
    runs: int = 1,
) -> TracedRun:
    """Choose a device, open a session of its own there with a profile, and run it; nothing of it stays open.

    On a device with memory of its own the inputs are uploaded before a run and the outputs are read back after it, so
    that these copies have phases of their own. Where the device works on after a run has returned, waiting for it is
    part of copying out.

    Raises:
        PlacementError: the nodes are not where the options want them; the CPU may help unless they say otherwise.
        InputError: an input is wrong.
        EngineError: the engine refused the model, or a run failed.
    """
    options = options or CompileOptions()
    options = options.with_(placement=options.placement or PlacementRule.ASSISTED)
    trace = TracedRun()
    with temporary_folder() as folder:
        with trace.phase("choose"):
            trace.device = choose()
        with trace.phase("export"):
            profiled = options.with_(profile_prefix=str(folder / "nodes"))
            provider, weights = working_provider(trace.device), WeightStore.for_graph(graph)
            slot = open_slot(provider, trace.device, graph, weights, profiled)
        rule = options.placement or PlacementRule.ASSISTED
        with trace.phase("open"):
            compiled = CompiledGraph(slot, rule)
            engine = slot.engine(rule)
        with compiled:
            trace.placement, trace.exported = compiled.placement, compiled.exported
            moves = not engine.binder.on_host and compiled.supports_run_slots
            for _ in range(runs):
                with trace.phase("copy in"):
                    given = {name: engine.binder.upload(array) for name, array in feeds.items()} if moves else feeds
                with trace.phase("run"):
                    results = compiled.run_dlpack(given) if moves else compiled.run(given)
                with trace.phase("copy out"):
                    trace.outputs = [tensor.numpy() for tensor in results] if moves else results
            raw = getattr(engine.session, "raw", None)
            if raw is not None:
                began_ns = raw.get_profiling_start_time_ns()
                trace.read_profile(graph, options, Path(raw.end_profiling()), began_ns)
    return trace


def trace_document(traced: Iterable[TracedRun]) -> dict[str, Any]:
    """Return a trace in Chrome's trace event format, one process for each run; times are in microseconds.

    Its threads are our phases, ONNX Runtime's session, and the nodes of each execution provider by the user's names.
    """
    events: list[dict[str, Any]] = []
    for process, run in enumerate(traced, start=1):
        spans: list[tuple[str, str, int, int, dict[str, str]]] = [
            *(("phases", phase.name, phase.start_ns, phase.ns, {}) for phase in run.phases),
            *(("ONNX Runtime", *event, {}) for event in run.session),
        ]
        for node in run.nodes:
            args = {"session_node": node.name, "op": node.op_type}
            spans.append((node.provider, node.origin or node.name, node.start_ns, node.ns, args))
        threads = {thread: at for at, thread in enumerate(dict.fromkeys(span[0] for span in spans), start=1)}
        events += [
            {"ph": "X", "pid": process, "tid": threads[thread], "cat": thread, "name": name, "args": args}
            | {"ts": start_ns / 1000, "dur": ns / 1000}
            for thread, name, start_ns, ns, args in spans
        ]
        named = [("process_name", 0, f"rlx-ort on {run.device.label}")]
        named += [("thread_name", at, thread) for thread, at in threads.items()]
        events += [
            {"ph": "M", "pid": process, "tid": at, "name": kind, "args": {"name": text}} for kind, at, text in named
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
