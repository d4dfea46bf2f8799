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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from rlx_ort.providers.ort_provider import save_optimized
from rlx_ort.storage import temporary_folder

_MOST_WRITTEN_BYTES = 1 << 30  # of weights, for the names of fused nodes
_BLOCKED = re.compile(r"_nchwc(?:_token_\d+)?$")  # ONNX Runtime names a node in blocked layout after its result
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
    model's, both empty for a node that ONNX Runtime added. A fused node counts as the one of its operator. Times
    are in ns, from the beginning of the trace; ONNX Runtime counts whole microseconds and adds some to each node.
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

    def read_profile(self, graph: Graph, path: Path, reading_ns: int) -> None:
        """Take over the events of a profile of ONNX Runtime, which began at this reading of one of `_CLOCKS`."""
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
        known = {name: self.exported.node_of(name) or writers.get(_BLOCKED.sub("", name)) for name in operators}
        if None in known.values():
            unknown = {name: operators[name] for name in operators if known[name] is None}
            known |= self._fused(graph, path.parent, unknown, writers)
        ends = {node.name for node in known.values() if node is not None}
        cores = {name: node and _core(node, operators[name], writers, ends) for name, node in known.items()}
        for name, start_ns, ns, args in kernels:
            name = name.removesuffix(_KERNEL)
            node = cores[name]
            names = (name, "", "") if node is None else (name, self.exported.origin_names[node.origin], node.name)
            self.nodes.append(NodeRun(*names, args["op_name"], args["provider"], start_ns, ns))

    def _fused(
        self, graph: Graph, folder: Path, unknown: Mapping[str, str], writers: Mapping[str, ExportedNode]
    ) -> dict[str, ExportedNode]:
        """Return the exported node that each fused node ends in.

        `unknown` has the operators of session nodes, `writers` the exported nodes by the values that they write. A
        fused node keeps the name of its result only, so ONNX Runtime optimises the graph once more, into a file.
        """
        import onnx

        assert self.exported is not None  # noqa: S101  # as above
        weights = graph.weights
        if sum(weights[name].nbytes for name in self.exported.params if name in weights) > _MOST_WRITTEN_BYTES:
            return {}
        path = folder / "optimized.onnx"
        try:
            form = {"ort_format": False, "external_data": True, "portable": False}
            save_optimized(graph, path, self.device, **form, exported=self.exported)
        except RlxError:  # a provider that compiles the graph writes none
            return {}
        nodes = {node.name: node for node in onnx.load(path, load_external_data=False).graph.node}
        if any(name in nodes and nodes[name].op_type != op for name, op in unknown.items()):
            return {}  # the options of the session led to other fusions
        ends = {name: [writers.get(output) for output in nodes[name].output] for name in unknown if name in nodes}
        return {name: node for name, made in ends.items() for node in made[:1] if node is not None}


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
                trace.read_profile(graph, Path(raw.end_profiling()), began_ns)
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
