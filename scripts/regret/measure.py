"""What each device needs for a case, predicted and measured, and which device each way of choosing would take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.predict import explain

__all__ = ["Limits", "Outcome", "measure_case", "time_runs"]


@dataclass(frozen=True)
class Limits:
    """How long one graph may take on one device, in seconds: one run as predicted, and all runs as measured."""

    run_s: float
    runs_s: float


@dataclass
class Outcome:
    """What came out for one case.

    `predicted` and `measured` are ns by device label, `spread` the quartile distance as a share of the median.
    """

    family: str
    name: str
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    terms: dict[str, list[tuple[str, float, int]]] = field(default_factory=dict)
    chosen: str = ""
    adaptive: str = ""
    adaptive_how: str = ""
    choose_ns: int = 0
    choose_again_ns: int = 0

    @property
    def best(self) -> str:
        """The device that was measured the fastest."""
        return min(self.measured, key=lambda label: self.measured[label])

    def regret(self, label: str) -> float:
        """Return the time of a device over that of the best one; the worst measured one for a device without."""
        return self.measured.get(label, max(self.measured.values())) / self.measured[self.best]


def measure_case(
    family: str, name: str, graph: Graph, inputs: dict[str, Any], devices: list[Device], limits: Limits
) -> Outcome:
    """Return predictions, measurements and choices for one graph."""
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
        for device in devices:
            estimate = explain(graph, device, options)
            if estimate is not None:
                outcome.predicted[device.label] = estimate.total_ns
                outcome.terms[device.label] = [(term.name, term.ns, term.count) for term in estimate.explain(6)]
            if estimate is not None and estimate.total_ns > limits.run_s * 1e9:
                outcome.skipped[device.label] = f"predicted {estimate.total_ns / 1e9:.1f} s a run"
                continue
            try:
                compiled = runner.compile(device)
                median_ns, spread = time_runs(lambda run=compiled.run: run(inputs), limits.runs_s)
            except RlxError as err:
                outcome.skipped[device.label] = str(err).splitlines()[0]
                continue
            outcome.measured[device.label], outcome.spread[device.label] = median_ns, spread
        if not outcome.skipped:
            runner.set_policy(policy.with_adaptive_pick())
            outcome.adaptive = runner.resolve_with_inputs(inputs).label
            outcome.adaptive_how = "" if runner.last_choice is None else runner.last_choice.how
    return outcome


def time_runs(run: Any, budget_s: float, least: int = 3, most: int = 60) -> tuple[float, float]:
    """Return the median time of a call in ns and its quartile distance as a share, after warm-up."""
    for _ in range(3):
        start = time.perf_counter_ns()
        run()
        if time.perf_counter_ns() - start > budget_s * 1e9 / 4:
            break
    times: list[int] = []
    begun = time.perf_counter()
    while len(times) < most and (len(times) < least or time.perf_counter() - begun < budget_s):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
        if time.perf_counter() - begun > 4 * budget_s:
            break
    median = float(statistics.median(times))
    if len(times) < 2:
        return median, 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, (high - low) / median
