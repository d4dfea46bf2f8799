"""Times a graph on a few devices in turn, so that a disturbance of the machine meets all of them alike.

Each round gives every device a short block of runs, of which the first ones are not counted. A device that is clearly
slower is dropped early. What counts is the median over a device's blocks of the median of a block.

A slow core that launches does not meet all alike. Beside an H200, a race that fell into such a while found an encoder
at 543 us on the CPU and 620 us on CUDA, which take 426 and 372 us otherwise. So rounds from such a while are measured
again, where the caller can tell how fast the host is.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlx_ort.device import Device
from rlx_ort.errors import is_device_failure
from rlx_ort.execution.benchmark import DeviceBenchResult
from rlx_ort.execution.compiled import CompiledGraph

__all__ = ["HostPace", "Lane", "race", "timed_block"]

_log = logging.getLogger(__name__)
_BLOCK_NS = 3_000_000  # a block of short runs is as long as this, so that a clock tick or a woken thread is lost in it
_WARM_NS = 2_000_000
"""Short runs before a block that do not count: threads sleep through another device's block, and products of 32 us took
47 us in the first 2 ms after it (16 cores beside an H200)."""

_MOST_RUNS = 200
_DROPPED = 1.4  # a device whose best block is so much slower than the leader's usual one is out of the race
_BUDGET_S = 0.4
_PAUSE_S = 0.02
_PATIENCE_S = 1.0  # for waiting and repeated rounds: beside an H200 a core was slow for 0.2 to 1.5 s at a time


class HostPace(Protocol):
    """Tells whether the host is as fast as usual."""

    def now(self) -> float:
        """Return what some work that is always the same takes now, in ns."""

    @property
    def limit_ns(self) -> float:
        """What it may take on a host that is not disturbed."""


@dataclass
class Lane:
    """One device in the race: what a run takes, about, and its block medians so far, in ns."""

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

    def row(self) -> DeviceBenchResult:
        """Return what the race found."""
        median = None if self.failure or not self.blocks else round(self.median_ns)
        return DeviceBenchResult(self.device, self.device.label, self.compile_ns, median, self.failure)


def race(
    devices: Iterable[Device],
    compile_on: Callable[[Device], CompiledGraph],
    inputs: Mapping[str, Any],
    rounds: int,
    budget_s: float = _BUDGET_S,
    *,
    pace: HostPace | None = None,
) -> list[DeviceBenchResult]:
    """Return a row for each device, fastest first; devices that fail come last, with the reason.

    Takes about `budget_s` seconds beside compiling, more where one run of every device takes longer. There are
    `rounds` rounds at least, unless the budget is spent first, and more while the leaders are close.

    With a `pace`, rounds begin when the host is as fast as usual, and one during which it was not is measured again.
    That takes a second at most, beside the budget; from then on every round counts.

    Raises:
        InputError: the inputs do not fit the graph, which would fail on every device.
        ParamError: a parameter is not set.
    """
    lanes = [_opened(device, compile_on, inputs) for device in devices]
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
    rows = [lane.row() for lane in lanes]
    return sorted(rows, key=lambda row: (row.median_exec_ns is None, row.median_exec_ns or 0))


def timed_block(compiled: CompiledGraph, inputs: Mapping[str, Any], count: int, warm: int = 1) -> list[int]:
    """Return the times of some runs in ns, after `warm` that are not counted."""
    for _ in range(warm):
        compiled.run(inputs)
    times = []
    for _ in range(count):
        before = time.perf_counter_ns()
        compiled.run(inputs)
        times.append(time.perf_counter_ns() - before)
    return times


def _opened(device: Device, compile_on: Callable[[Device], CompiledGraph], inputs: Mapping[str, Any]) -> Lane:
    lane = Lane(device)
    start = time.perf_counter_ns()
    try:
        lane.compiled = compile_on(device)
        lane.compile_ns = time.perf_counter_ns() - start
        lane.compiled.run(inputs)  # the first run of a device compiles kernels and fills caches
        start = time.perf_counter_ns()
        lane.compiled.run(inputs)
        lane.run_ns = max(float(time.perf_counter_ns() - start), 1.0)
    except Exception as err:  # raised again unless the device is at fault
        if not is_device_failure(err):
            raise
        _fail(lane, err)
    return lane


class _Host:
    """What the devices are launched from: whether it is disturbed, and the time that was lost to that, in s."""

    def __init__(self, pace: HostPace | None) -> None:
        self._pace = pace
        self.lost_s = 0.0

    def disturbed(self) -> bool:
        """Return whether it is slower than usual; when patience is at its end, nobody asks any more."""
        return self._pace is not None and self.lost_s < _PATIENCE_S and self._pace.now() > self._pace.limit_ns

    def wait(self) -> None:
        """Wait until it is as fast as usual, as long as there is patience."""
        while self.disturbed():
            begun = time.perf_counter()
            time.sleep(min(_PAUSE_S, _PATIENCE_S - self.lost_s))
            self.lost_s += time.perf_counter() - begun

    def lose(self, taken_s: float) -> bool:
        """Return whether there is patience to do again what took so long, and count that time as lost if so."""
        patient = self.lost_s + taken_s <= _PATIENCE_S
        self.lost_s += taken_s if patient else 0.0
        return patient


def _run_round(lanes: list[Lane], inputs: Mapping[str, Any], done: int, host: _Host) -> int:
    """Give each device a block more than it has; return 1, or 0 where a disturbance of the host ended the round."""
    begun = time.perf_counter()
    for lane in lanes:
        _run_block(lane, inputs)
        if host.disturbed() and host.lose(time.perf_counter() - begun):
            for disturbed in lanes:
                del disturbed.blocks[done:]
            return 0
    return 1


def _run_block(lane: Lane, inputs: Mapping[str, Any]) -> None:
    if lane.compiled is None:
        return
    count, warm = _runs_in(_BLOCK_NS, lane.run_ns), _runs_in(_WARM_NS, lane.run_ns)
    try:
        lane.run_ns = max(float(statistics.median(timed_block(lane.compiled, inputs, count, warm))), 1.0)
        lane.blocks.append(lane.run_ns)
    except Exception as err:  # raised again unless the device is at fault
        if not is_device_failure(err):
            raise
        _fail(lane, err)


def _runs_in(time_ns: float, run_ns: float) -> int:
    return min(max(round(time_ns / run_ns), 1), _MOST_RUNS)


def _fail(lane: Lane, err: Exception) -> None:
    _log.warning("%s is left out of the race: %s", lane.device.display, err)
    lane.failure = str(err) or type(err).__name__


def _still_in(lanes: list[Lane], done: int) -> list[Lane]:
    """Return the devices that may still win; none is dropped on a single block."""
    if done < 2 or len(lanes) < 2:
        return lanes
    leader_ns = min(lane.median_ns for lane in lanes)
    return [lane for lane in lanes if min(lane.blocks) <= leader_ns * _DROPPED]


def _decided(lanes: list[Lane]) -> bool:
    """Return whether the leader's slowest quarter is still faster than the rest's fastest."""
    if len(lanes) < 2:
        return True
    ordered = sorted(lanes, key=lambda lane: lane.median_ns)
    leader = sorted(ordered[0].blocks)
    upper_ns = leader[(3 * len(leader)) // 4]
    return all(upper_ns < sorted(lane.blocks)[len(lane.blocks) // 4] for lane in ordered[1:])
