"""Times a graph on several devices, one after the other or in interleaved blocks, and detects a disturbed host.

`NOTES.md` has the measurements behind the constants.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlx_ort import timing
from rlx_ort.device import Device
from rlx_ort.faults import is_device_failure

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph

Clock: TypeAlias = Callable[[], int]
"""Returns nanoseconds from some fixed point, like `time.perf_counter_ns`."""
InputSignature: TypeAlias = frozenset[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each input."""

_log = logging.getLogger(__name__)

_BLOCK_NS = 3_000_000  # long enough to hide a clock tick or the wake-up of a thread
_WARM_NS = 2_000_000  # uncounted runs before a block: threads went to sleep during another device's block
_MOST_RUNS = 200
_DROPPED = 1.4  # a device is dropped when its best block is this much slower than the leader's median
_BUDGET_S = 0.4
_PAUSE_S = 0.02
_PATIENCE_S = 1.0  # for waiting and repeated rounds

_LOOP = 400  # about 12 us, much longer than reading the clock
_TRIES = 3  # the least counts, since an interrupt does not make a core slow
_QUICKER = 0.3
_SLOW = 1.2  # beyond the variation of clock frequencies, below the effect of a busy neighbour
_LEAST_KNOWN = 8
_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class DeviceBenchResult:
    """The times of one device.

    Attributes:
        device: the device.
        label: its label.
        compile_ns: time to compile, in nanoseconds; close to 0 if it was compiled before.
        median_exec_ns: median time of a run in nanoseconds, the upper one of an even number; None if it failed.
        failure: why it failed, empty if it did not.
    """

    device: Device
    label: str
    compile_ns: int
    median_exec_ns: int | None
    failure: str = ""


def benchmark_devices(
    devices: Iterable[Device], compile_on: Callable[[Device], CompiledGraph], inputs: Mapping[str, Any], runs: int
) -> list[DeviceBenchResult]:
    """Time a graph on one device after the other: one warm-up, then the median of `runs` runs on each.

    Returns a row for each device, fastest first; devices that fail come last, with the reason.

    Raises:
        InputError: the inputs do not fit the graph, which would fail on every device.
        ParamError: a parameter is not set.
    """
    lanes = [_Lane(device) for device in devices]
    for lane in lanes:
        with lane.noting_failures():
            # The first run of a device, which does not count, compiles kernels and fills caches.
            times = timed_block(lane.compile(compile_on), inputs, max(runs, 1))
            lane.blocks.append(statistics.median_high(times))
    return _ranked(lanes)


def input_signature(inputs: Mapping[str, Any]) -> InputSignature:
    """Return the name, shape and dtype of each input; values that are no arrays count by their type."""
    return frozenset((name, *_described(value)) for name, value in inputs.items())


def _described(value: object) -> tuple[tuple[int, ...], str]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # ragged lists, which a sequence input takes
        return (), type(value).__name__
    return array.shape, str(array.dtype)


def _ranked(lanes: Iterable[_Lane]) -> list[DeviceBenchResult]:
    rows = [lane.row() for lane in lanes]
    return sorted(rows, key=lambda row: (row.median_exec_ns is None, row.median_exec_ns or 0))


class Pace:
    """Detects a throttled or shared core by the time of a fixed loop of plain Python.

    Kernel launches slow down by the same factor as the loop, so timings taken meanwhile are not those of the device.
    `quicker` is the quantile of the loop's times that counts as usual.
    """

    def __init__(self, clock: Clock, quicker: float = _QUICKER) -> None:
        self._clock = clock
        self._quicker = quicker
        self._known: list[float] = []

    def now(self) -> float:
        """Return the time of the loop in ns, and record it; costs about 40 us."""
        least = math.inf
        for _ in range(_TRIES):
            before = self._clock()
            total = 0
            for turn in range(_LOOP):
                total += turn * turn
            taken = self._clock() - before
            if taken > 0:  # a clock may stand still or go back
                least = min(least, taken)
        if not math.isfinite(least):
            return 0.0
        bisect.insort(self._known, least)
        if len(self._known) > _MOST_KNOWN:
            self._known = self._known[::2]  # sorted, so the quantiles stay
        return float(least)

    @property
    def usual_ns(self) -> float:
        """The usual time of the loop, or 0 while it was timed too few times."""
        known = self._known
        return known[int(self._quicker * len(known))] if len(known) >= _LEAST_KNOWN else 0.0

    @property
    def limit_ns(self) -> float:
        """The longest time of the loop on an undisturbed core; a host that is always as busy counts as undisturbed."""
        return _SLOW * (self.usual_ns or math.inf)


@dataclass
class _Lane:
    """One device, with the estimated time of a run and the medians of its blocks so far, in ns."""

    device: Device
    compiled: CompiledGraph | None = None
    compile_ns: int = 0
    run_ns: float = 1.0
    blocks: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def median_ns(self) -> float:
        """The median over the blocks."""
        return statistics.median(self.blocks)

    @contextlib.contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Keep an error as the reason why the device is left out; it is raised unless the device is at fault."""
        try:
            yield
        except Exception as err:
            if not is_device_failure(err):
                raise
            _log.warning("%s is left out of the benchmark: %s", self.device.display, err)
            self.failure = str(err) or type(err).__name__

    def compile(self, compile_on: Callable[[Device], CompiledGraph]) -> CompiledGraph:
        """Return the graph, compiled for the device."""
        compiled, self.compile_ns = timing.timed(lambda: compile_on(self.device))
        self.compiled = compiled
        return compiled

    def row(self) -> DeviceBenchResult:
        """Return the result."""
        median = None if self.failure or not self.blocks else round(self.median_ns)
        return DeviceBenchResult(self.device, self.device.label, self.compile_ns, median, self.failure)


def race(
    devices: Iterable[Device],
    compile_on: Callable[[Device], CompiledGraph],
    inputs: Mapping[str, Any],
    rounds: int,
    budget_s: float = _BUDGET_S,
    *,
    pace: Pace | None = None,
) -> list[DeviceBenchResult]:
    """Time a graph on several devices in interleaved blocks of runs, so that a disturbance affects all of them alike.

    Each round gives every device a short block of runs, the first of which do not count. A device that is clearly
    slower is dropped early. The result is the median over a device's blocks of the median of a block.

    Takes about `budget_s` seconds beside compiling, more if one run of every device takes longer. There are at least
    `rounds` rounds, unless the budget is spent first, and more while the leaders are close. With a `pace`, rounds begin
    when the host is undisturbed, and a disturbed round is measured again; both cost at most 1 s beside the budget.

    Returns a row for each device, fastest first; devices that fail come last, with the reason.

    Raises:
        InputError: the inputs do not fit the graph, which would fail on every device.
        ParamError: a parameter is not set.
    """
    lanes = [_Lane(device) for device in devices]
    for lane in lanes:
        with lane.noting_failures():
            compiled = lane.compile(compile_on)
            compiled.run(inputs)  # the first run of a device compiles kernels and fills caches
            lane.run_ns = max(float(timing.timed(functools.partial(compiled.run, inputs))[1]), 1.0)
    running = [lane for lane in lanes if not lane.failure]
    host = _Host(pace)
    start = time.perf_counter()
    done = 0
    while running and done < 4 * rounds:
        host.wait()
        done += _run_round(running if done % 2 == 0 else running[::-1], inputs, done, host)
        running = _still_in([lane for lane in running if not lane.failure], done)
        if len(running) == 1 and done >= 2:
            break
        if time.perf_counter() - start - host.lost_s > budget_s or (done >= rounds and _decided(running)):
            break
    return _ranked(lanes)


def timed_block(compiled: CompiledGraph, inputs: Mapping[str, Any], count: int, warm: int = 1) -> list[int]:
    """Return the times of `count` runs in ns, after `warm` that do not count."""
    return timing.in_row(functools.partial(compiled.run, inputs), count, warm)


class _Host:
    """The host that launches to the devices, and the time lost by waiting for it or repeating rounds, in s."""

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self.lost_s = 0.0

    def disturbed(self) -> bool:
        """Return whether it is slower than usual; always False once the patience is used up."""
        return self._pace is not None and self.lost_s < _PATIENCE_S and self._pace.now() > self._pace.limit_ns

    def wait(self) -> None:
        """Wait until it is as fast as usual, or the patience is used up."""
        while self.disturbed():
            begun = time.perf_counter()
            time.sleep(min(_PAUSE_S, _PATIENCE_S - self.lost_s))
            self.lost_s += time.perf_counter() - begun

    def lose(self, taken_s: float) -> bool:
        """Return whether work of this length may be repeated; if so, its time counts as lost."""
        patient = self.lost_s + taken_s <= _PATIENCE_S
        self.lost_s += taken_s if patient else 0.0
        return patient


def _run_round(lanes: list[_Lane], inputs: Mapping[str, Any], done: int, host: _Host) -> int:
    """Measure one more block of each device; returns 1, or 0 if the round was disturbed and discarded."""
    begun = time.perf_counter()
    for lane in lanes:
        _run_block(lane, inputs)
        if host.disturbed() and host.lose(time.perf_counter() - begun):
            for disturbed in lanes:
                del disturbed.blocks[done:]
            return 0
    return 1


def _run_block(lane: _Lane, inputs: Mapping[str, Any]) -> None:
    assert lane.compiled is not None  # noqa: S101  # a device that was not compiled has failed
    count, warm = _runs_in(_BLOCK_NS, lane.run_ns), _runs_in(_WARM_NS, lane.run_ns)
    with lane.noting_failures():
        lane.run_ns = max(float(statistics.median(timed_block(lane.compiled, inputs, count, warm))), 1.0)
        lane.blocks.append(lane.run_ns)


def _runs_in(time_ns: float, run_ns: float) -> int:
    return min(max(round(time_ns / run_ns), 1), _MOST_RUNS)


def _still_in(lanes: list[_Lane], done: int) -> list[_Lane]:
    """Return the devices that may still win; none is dropped on a single block."""
    if done < 2 or len(lanes) < 2:
        return lanes
    leader_ns = min(lane.median_ns for lane in lanes)
    return [lane for lane in lanes if min(lane.blocks) <= leader_ns * _DROPPED]


def _decided(lanes: list[_Lane]) -> bool:
    """Return whether the leader's slowest quarter is still faster than the rest's fastest."""
    if len(lanes) < 2:
        return True
    ordered = sorted(lanes, key=lambda lane: lane.median_ns)
    leader = sorted(ordered[0].blocks)
    upper_ns = leader[(3 * len(leader)) // 4]
    return all(upper_ns < sorted(lane.blocks)[len(lane.blocks) // 4] for lane in ordered[1:])
