"""What each device needs for a case, predicted and measured, and which device each way of choosing would take.

The devices of a case are measured in turn, block by block, so that a disturbance of the machine meets all of them. A
block that began or ended while the host was throttled is measured again later: throttling lasts longer than a case, and
would count against the device that depends on the host most.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.execution.benchmark import Pace
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.predict import explain, kernels_of

__all__ = ["Block", "Limits", "Outcome", "kept_awake", "measure_case", "time_runs", "undisturbed"]

_AGAIN, _PAUSE_S = 16, 0.1  # times that a disturbed block is measured again, and the time before each
_SESSIONS = 2
"""Sessions that a device's blocks come from, one half each: on 16 cores beside an H200 two rows by a weight of 9 MB
took 26 us in one session of the CPU and 42 us in another of the same minute, each from its first second to its last."""

_SETTLING_S = 0.1
"""Time that a new session runs before it is measured: on those 16 cores a row by a weight of 21 MB once took 84 us at
first and 32 us after half a second. Mostly nothing changes after the first 2 ms (15 graphs, a second each)."""


@dataclass(frozen=True)
class Limits:
    """How long one graph may take on one device: a run as predicted, a block of runs, and the number of blocks."""

    run_s: float
    block_s: float
    blocks: int


Block = tuple[float, float, int]
"""Median and least time of a run in a block, in ns, and the number of runs."""


def undisturbed(blocks: Sequence[Block]) -> float:
    """Return what a device takes when nobody else uses the machine much: the lower quartile of its blocks' medians.

    The pace of one core does not tell what others do to the rest of them. Plain ONNX Runtime took 86 us for a row by a
    weight of 21 MB on 16 cores, and 32 us a moment later, in one session, with its threads pinned or not.
    """
    return sorted(block[0] for block in blocks)[len(blocks) // 4]


@dataclass
class Outcome:
    """What came out for one case.

    `predicted`, `error` and `measured` are by device label, times in ns; `blocks` has [median, least, runs] of each
    block, `first_ns` the times of compiling and of the first run, `terms` the prediction by kind of work,
    `works` the pieces of work that it was made of, each with its count behind it; `disturbed` is how many blocks were
    measured again.
    """

    family: str
    name: str
    predicted: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    first_ns: dict[str, tuple[int, int]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    terms: dict[str, list[tuple[str, float, int]]] = field(default_factory=dict)
    works: dict[str, list[Any]] = field(default_factory=dict)
    chosen: str = ""
    adaptive: str = ""
    adaptive_how: str = ""
    adaptive_measured: dict[str, float] = field(default_factory=dict)
    adaptive_ns: int = 0
    disturbed: int = 0
    choose_ns: int = 0
    choose_again_ns: int = 0

    @property
    def best(self) -> str:
        """The device that was measured the fastest."""
        return min(self.measured, key=lambda label: self.measured[label])

    def regret(self, label: str) -> float:
        """Return the time of a device over that of the best one; the worst measured one for a device without."""
        return self.measured.get(label, max(self.measured.values())) / self.measured[self.best]

    def usual_regret(self, label: str) -> float:
        """Return the same by the medians of the blocks, the disturbed ones included."""
        usual = {label: statistics.median(row[0] for row in rows) for label, rows in self.blocks.items()}
        return usual.get(label, max(usual.values())) / min(usual.values())

    @property
    def noise(self) -> float:
        """The regret of the best device of one half of the blocks by the times of the other half: what noise makes."""
        halves = [
            {label: undisturbed(rows[at::2]) for label, rows in self.blocks.items() if rows[at::2]} for at in (0, 1)
        ]
        if not all(halves) or halves[0].keys() != halves[1].keys():
            return 1.0
        found = []
        for here, there in (halves, halves[::-1]):
            pick = min(here, key=lambda label: here[label])
            found.append(there[pick] / min(there.values()))
        return max(found)


def measure_case(
    family: str, name: str, graph: Graph, inputs: dict[str, Any], devices: list[Device], limits: Limits, pace: Pace
) -> Outcome:
    """Return predictions, measurements and choices for one graph; `pace` measures how fast the host is."""
    outcome = Outcome(family, name)
    policy = DevicePolicy.only(devices)
    options = CompileOptions(placement=PlacementRule.ASSISTED)
    with GraphDevices(graph, policy, options) as runner:
        start = time.perf_counter_ns()
        outcome.chosen = runner.fastest().label
        outcome.choose_ns = time.perf_counter_ns() - start
        start = time.perf_counter_ns()
        runner.fastest()
        outcome.choose_again_ns = time.perf_counter_ns() - start
        shown = [device for device in devices if _predict(outcome, graph, device, options, limits)]
        with GraphDevices(graph, policy, options) as other:
            for at, sessions in enumerate((runner, other)):
                ready = _opened(outcome, sessions, shown, inputs)
                _measure(outcome, ready, inputs, limits, pace, len(range(at, limits.blocks, _SESSIONS)))
        outcome.measured.update({label: undisturbed(rows) for label, rows in outcome.blocks.items()})
        if not outcome.skipped:
            runner.set_policy(policy.with_adaptive_pick())
            _wait_for_calm(pace)  # as for the blocks that it is compared with
            start = time.perf_counter_ns()
            outcome.adaptive = runner.resolve_with_inputs(inputs).label
            outcome.adaptive_ns = time.perf_counter_ns() - start
            if runner.last_choice is not None:
                outcome.adaptive_how = runner.last_choice.how
                outcome.adaptive_measured = dict(runner.last_choice.measured)
    return outcome


def time_runs(run: Callable[[], object], budget_s: float, least: int = 3, most: int = 2000) -> list[int]:
    """Return the times of a call in ns, after one that is not counted."""
    run()
    times: list[int] = []
    begun = time.perf_counter_ns()
    while len(times) < most and (len(times) < least or time.perf_counter_ns() - begun < budget_s * 1e9):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
        if time.perf_counter_ns() - begun > 8 * budget_s * 1e9:
            break
    return times


@contextmanager
def kept_awake(devices: list[Device]) -> Iterator[None]:
    """Keep a tiny graph open on each accelerator: some providers give up the device with their last session."""
    graph = Graph("awake")
    graph.outputs = [graph.input("x", [4]) * 2.0]
    accelerators = [device for device in devices if device.kind != Device.CPU.kind]
    with GraphDevices(graph, DevicePolicy.only(accelerators)) as runner:
        for device in accelerators:
            runner.run(device, {"x": np.ones(4, np.float32)})
        yield


def _predict(outcome: Outcome, graph: Graph, device: Device, options: CompileOptions, limits: Limits) -> bool:
    """Note what is predicted; return whether it is worth a measurement."""
    estimate = explain(graph, device, options)
    if estimate is None:
        return True
    outcome.predicted[device.label] = estimate.total_ns
    outcome.error[device.label] = estimate.error
    outcome.terms[device.label] = [(term.name, term.ns, term.count) for term in estimate.explain(20)]
    outcome.works[device.label] = [(*kernel, count) for kernel, count in kernels_of(graph, device).items()]
    if estimate.total_ns > limits.run_s * 1e9:
        outcome.skipped[device.label] = f"predicted {estimate.total_ns / 1e9:.1f} s a run"
        return False
    return True


def _wait_for_calm(pace: Pace) -> None:
    """Wait a while for the host's core to be as fast as usual, but not for ever."""
    for _ in range(_AGAIN):
        if pace.now() <= pace.limit_ns:
            return
        time.sleep(_PAUSE_S)


def _block(outcome: Outcome, run: Callable[[], object], block_s: float, pace: Pace) -> list[int]:
    """Return the times of a block that was not disturbed, or of the last one there is patience for."""
    for _ in range(_AGAIN):
        before = pace.now()
        times = time_runs(run, block_s)
        if max(before, pace.now()) <= pace.limit_ns:
            return times
        outcome.disturbed += 1
        time.sleep(_PAUSE_S)
    return time_runs(run, block_s)


def _opened(
    outcome: Outcome, runner: GraphDevices, devices: Sequence[Device], inputs: dict[str, Any]
) -> dict[str, CompiledGraph]:
    """Return device label -> a session that has run once; what fails is noted."""
    ready: dict[str, CompiledGraph] = {}
    for device in devices:
        if device.label in outcome.skipped:
            continue
        try:
            start = time.perf_counter_ns()
            compiled = runner.compile(device)
            compiled_at = time.perf_counter_ns()
            compiled.run(inputs)
            outcome.first_ns.setdefault(device.label, (compiled_at - start, time.perf_counter_ns() - compiled_at))
        except RlxError as err:
            _skip(outcome, device.label, err)
            continue
        ready[device.label] = compiled
    return ready


def _measure(
    outcome: Outcome,
    ready: dict[str, CompiledGraph],
    inputs: dict[str, Any],
    limits: Limits,
    pace: Pace,
    blocks: int,
) -> None:
    """Time the devices in turn, in both orders, once each of them has settled."""
    for label in list(ready):
        try:
            time_runs(partial(ready[label].run, inputs), _SETTLING_S)
        except RlxError as err:
            _skip(outcome, label, err)
            del ready[label]
    for at in range(blocks):
        for label in list(ready)[:: 1 if at % 2 == 0 else -1]:
            try:
                times = _block(outcome, partial(ready[label].run, inputs), limits.block_s, pace)
            except RlxError as err:
                _skip(outcome, label, err)
                del ready[label]
                continue
            row = (float(statistics.median(times)), float(min(times)), len(times))
            outcome.blocks.setdefault(label, []).append(row)


def _skip(outcome: Outcome, label: str, err: RlxError) -> None:
    """Note that a device failed; what was measured of it so far does not count."""
    outcome.skipped[label] = str(err).splitlines()[0]
    outcome.blocks.pop(label, None)
