"""The adaptive choice: predict, and measure only devices whose predictions are too close.

Measurements are kept on disk for the graph, the inputs' shapes and dtypes, the devices and all their versions, so the
next process does not repeat them. Later runs are timed, and the choice changes while a device is slower than usual.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort import kept
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError, DeviceFallbackError, RlxError
from rlx_ort.execution.benchmark import DeviceBenchResult, Pace, input_signature, race
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.candidates import CLOSE, Candidates
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.predict import dims_of, explain, measure_unknown, predicted_ns
from rlx_ort.selection.support import model_for
from rlx_ort.storage import cache_root

if TYPE_CHECKING:
    from rlx_ort.calibration.learned import Learned, Sizes

_log = logging.getLogger(__name__)
_SCHEMA = 2
_DOUBT = 1.5
"""A prediction may be off by its stated error to this power: the stated error is typical, not the worst case."""

_SAME = 1.03  # measured times within this factor are equal within noise, and the prediction decides
_QUICKER = 0.1
"""The quantile of the host's times that counts as undisturbed; a host can be slow for more than half of a race."""

_WAKING = 3.0
"""A device's first run after a switch may take so many times the usual: 1.9 times on 32 idle cores, 2026-11-23."""

_SWITCH = 1.1
"""A device takes the place of the chosen one, or of one that took its place, if it is faster by this factor."""


@dataclass(frozen=True)
class Choice:
    """A device, and why it was chosen.

    Attributes:
        device: the device.
        how: `predicted` when one prediction stood out, `measured` when devices were timed just now, `remembered` when
            they were timed earlier, by this process or another.
        predicted: device label -> predicted time of a run in ns.
        measured: device label -> measured time of a run in ns.
        failed: device label -> why its measurement failed.
    """

    device: Device
    how: str
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


class Follower:
    """Follows a choice from run to run: returns the device chosen, unless another one is clearly faster now.

    The times are those measured for the choice, or else predicted, corrected by recent runs. The device chosen is used
    again as soon as it is no slower than the one that replaced it.

    Args:
        graph: the graph.
        choice: where to begin.
        sizes: of the graph's named dims, in order.
        learned: remembers the times of runs; that of the process if it is not given.
    """

    def __init__(self, graph: Graph, choice: Choice, sizes: Sizes, learned: Learned | None = None) -> None:
        from rlx_ort.calibration.learned import LEARNED

        self._graph, self._sizes, self._learned = graph, sizes, learned or LEARNED
        self.home = self._current = choice.device
        times = {**choice.predicted, **choice.measured}
        self._usual_ns = {Device(label): ns for label, ns in times.items() if ns > 0 and label not in choice.failed}
        self._begun: set[Device] = set()
        self._cold: Device | None = None  # the device that was switched to last, until a run on it has ended
        self._fresh: Device | None = None  # the same, until a run on it has counted

    def device(self, refused: Container[Device] = ()) -> Device:
        """Return the device for the next run; among those that refused, only the one chosen is possible."""
        usual = self._usual_ns  # `drop` replaces it
        if self.home not in usual or len(usual) == 1:
            return self.home

        def place(device: Device) -> tuple[float, bool]:
            ns = self._learned.corrected(self._graph, device, self._sizes, usual[device])
            return ns * (1.0 if device in (self.home, self._current) else _SWITCH), device != self.home

        best = min((device for device in usual if device not in refused), key=place, default=self.home)
        if best != self._current:
            self._current = self._cold = best
        return best

    def note(self, device: Device, ns: int) -> None:
        """Learn from a run.

        The first one on a device compiles kernels and does not count. The first one after a switch fills caches and
        wakes threads; it counts if that cannot be all that it took longer for.
        """
        usual_ns = self._usual_ns.get(device, 0.0)
        first, cold = device not in self._begun, device == self._cold
        if cold:
            self._cold, self._fresh = None, device
        if first or (cold and ns < _WAKING * usual_ns):
            self._begun.add(device)
        elif usual_ns:
            self._learned.note(self._graph, device, self._sizes, ns, usual_ns, fresh=device == self._fresh)
            self._fresh = None

    def drop(self, device: Device) -> None:
        """Stop using a device, because a run on it failed."""
        self._usual_ns = {known: ns for known, ns in self._usual_ns.items() if known != device}


def choose(
    candidates: Candidates, inputs: Mapping[str, Any], compile_on: Callable[[Device], CompiledGraph], runs: int
) -> Choice:
    """Return the device to run such inputs on.

    Kernels that the graph needs and a device's profile lacks are measured first, in at most 0.3 s a device.

    Every device whose prediction may be the best, by the stated error of its cost model, is timed on the real inputs,
    interleaved with the others: a warm-up and `runs` rounds, repeated where the host was disturbed, for at most a
    second. A device that fails is skipped.

    Raises:
        NoViableDeviceError: no device may be chosen.
        DeviceFallbackError: every device that could be timed failed.
    """
    graph, options, dims = candidates.graph, candidates.options, candidates.dims
    devices = candidates.devices()
    if not devices:
        raise candidates.none_viable()
    for device in devices if len(devices) > 1 else ():
        try:
            measure_unknown(graph, device, options, dims)
        except RlxError as err:  # prices stay assumed, and their wide error leads to a race
            _log.info("the kernels of %s on %s are not measured: %s", graph.name, device.display, err)
    ranges: dict[Device, tuple[float, float]] = {}  # the shortest and longest time that is likely, in ns
    predicted: dict[str, float] = {}
    for device in devices:
        estimate = explain(graph, device, options, dims)
        if estimate is not None and math.isfinite(estimate.total_ns):
            predicted[device.label] = estimate.total_ns
            doubt = (1 + estimate.error) ** _DOUBT
            ranges[device] = (estimate.total_ns / doubt, estimate.total_ns * doubt)
    ranked = sorted(devices, key=lambda device: predicted.get(device.label, math.inf))
    limit = min((high for _, high in ranges.values()), default=math.inf)  # the longest time of the best
    rivals = [device for device in ranked if ranges.get(device, (0.0, 0.0))[0] <= limit]
    if len(rivals) == 1:
        return Choice(rivals[0], "predicted", predicted)
    path = _path(candidates, inputs, rivals)
    known = _read(path, rivals, predicted)
    if known is not None:
        return known
    pace = _pace()
    rows = race(rivals, compile_on, inputs, runs, pace=pace)
    if all(row.median_exec_ns is None for row in rows):
        rows += race([device for device in ranked if device not in rivals], compile_on, inputs, runs, pace=pace)
    choice = _from_rows(rows, candidates.policy, predicted)
    if path is not None and not choice.failed:  # a device that failed once may work the next time
        times = {"predicted": dict(predicted), "measured": dict(choice.measured)}
        kept.write(path, _SCHEMA, {"unit": "ns", "device": choice.device.label, **times, "failed": {}})
    return choice


def learn_from(
    rows: Iterable[DeviceBenchResult], graph: Graph, options: CompileOptions, inputs: Mapping[str, Any]
) -> None:
    """Correct later choices by the times of a benchmark, for the seconds that they are recent."""
    from rlx_ort.calibration.learned import LEARNED

    dims = dims_of(graph, inputs)
    for row in rows:
        predicted = predicted_ns(graph, row.device, options, dims)
        if row.median_exec_ns is not None and predicted is not None:
            LEARNED.note(graph, row.device, tuple(sorted(dims.items())), row.median_exec_ns, predicted, fresh=True)


@functools.cache
def _pace() -> Pace:
    """Return the host noise model of this process, which every race updates."""
    return Pace(time.perf_counter_ns, _QUICKER)


def _from_rows(rows: Sequence[DeviceBenchResult], policy: DevicePolicy, predicted: Mapping[str, float]) -> Choice:
    times = {row.device: float(row.median_exec_ns) for row in rows if row.median_exec_ns is not None}
    failed = {row.label: row.failure for row in rows if row.median_exec_ns is None}
    if not times:
        raise DeviceFallbackError((row.device, row.failure) for row in rows)
    best_ns = min(times.values())
    close = [device for device, time in times.items() if time <= best_ns * CLOSE]

    def rank(device: Device) -> tuple[int, float, float]:
        return policy.prefer_rank(device), max(times[device], best_ns * _SAME), predicted.get(device.label, math.inf)

    winner = min(close, key=rank)
    return Choice(winner, "measured", predicted, {device.label: time for device, time in times.items()}, failed)


def _path(candidates: Candidates, inputs: Mapping[str, Any], devices: Sequence[Device]) -> Path | None:
    """Return the file of a choice among devices, or None when one of them has no identity that lasts."""
    from rlx_ort.calibration import store

    options = candidates.options
    parts: list[object] = [_SCHEMA, sorted(input_signature(inputs)), candidates.policy.prefer]
    precisions = sorted((label, precision.value) for label, precision in options.precisions.items())
    provider_options = sorted(options.provider_options.items())
    parts.append((options.precision.value, precisions, options.intra_op_threads, provider_options))
    try:
        for device in sorted(devices, key=lambda device: device.label):
            provider = provider_of(device)
            model = None if provider is None else model_for(provider, candidates.graph, options.on(device))
            if model is None:
                return None
            parts.append((store.key_of(device), model.sha256))
    except CalibrationError as err:
        _log.debug("the choice is not kept: %s", err)
        return None
    return cache_root() / "choices" / f"{kept.digest_of(parts)}.json"


def _read(path: Path | None, devices: Sequence[Device], predicted: Mapping[str, float]) -> Choice | None:
    def choice_of(document: Mapping[str, Any]) -> Choice | None:
        measured = {str(label): float(time) for label, time in document["measured"].items()}
        failed = {str(label): str(reason) for label, reason in document["failed"].items()}
        found = [device for device in devices if device.label == document["device"]]
        return Choice(found[0], "remembered", predicted, measured, failed) if found else None

    return None if path is None else kept.read(path, _SCHEMA, choice_of)
