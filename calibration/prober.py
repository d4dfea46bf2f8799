"""`Prober`: times chains of one op on a device and collects what a link takes. What it times is listed in `probes`."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx_ort.calibration import graphs
from rlx_ort.calibration.frames import Frames
from rlx_ort.calibration.measured_rows import MeasuredRows
from rlx_ort.calibration.pace import Pace
from rlx_ort.calibration.series import Point, Series
from rlx_ort.calibration.timing import Budget, Timed, timed
from rlx_ort.calibration.turns import Turn
from rlx_ort.device import Device
from rlx_ort.errors import DeviceError, GraphError, RunError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph

__all__ = ["FAILURES", "Prober", "Progress"]

Progress = Callable[[str, float], None]
"""Called with what is being measured and the share of the time budget that is gone, 0 to 1."""

FAILURES = (DeviceError, GraphError, RunError)
"""What a device may raise at a graph it cannot run: the probe is skipped, with the message."""

_LEAST_CHAIN, _LONGEST_STRETCH = 8, 8
_MANY_BYTES = 1 << 18  # weights whose size tells how long sessions take to open
_MOST_RUNS = 200
_FRESH_SHARE, _WARM_SHARE = 0.4, 0.1  # of a point's time for warming up: after opening a session, after another size
_TIMED_SHARE, _HURRIED_SHARE = 0.35, 0.1  # of a point's time for runs that count, if they are short
_LONG_CHAIN = 1 / 12  # of what a chain may take at most: a longer one is cut where the session allows it
_SLOW_DISPATCH_NS = 20_000.0  # a device in software: its nodes stand out of any round trip
_CALM_TRIES, _CALM_PAUSE_S = 20, 0.005
_UNSTEADY = 0.15  # of a median: quartiles that are further apart say that other cores than this one were disturbed
_log = logging.getLogger(__name__)


class Prober(MeasuredRows):
    """Measures one device and collects the rows.

    Args:
        device: the device.
        budget: the time it may take.
        quick: measure fewer points.
        progress: told what is going on.
        turn: its turn among devices that are calibrated together.

    Attributes:
        spent: probe -> seconds it took, sessions and warm-up included.
        frames: the times of graphs without their chains.
        hurried: whether points get less time than they should, since not everything would be reached otherwise.
    """

    def __init__(
        self,
        device: Device,
        budget: Budget,
        *,
        quick: bool = False,
        progress: Progress | None = None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(Pace(budget.clock) if turn is None else turn.pace)
        self.device = device
        self.budget = budget
        self.quick = quick
        self.spent: dict[str, float] = {}
        self.most = _MOST_RUNS
        self.hurried = False
        self.dispatch_ns = 0.0
        self._progress = progress
        self._turn = turn
        self.frames = Frames(
            budget,
            lambda graph: self.compile(self._handed_out(graph)),
            lambda compiled, feeds, most, fresh: self.time(compiled, feeds, most=most, fresh=fresh),
        )
        self._links: dict[str, list[tuple[float, float]]] = {}
        self._point_limit_ns = 4 * budget.point_ns
        self._trip_chains = 0.0  # short chains of the least work that take as long as a round trip
        self._extra_ns: dict[str, list[float]] = {}
        self._opening: list[float] = []  # ns a byte of weights, of each session so far

    # --- what probes are made of

    def compile(self, graph: Graph, options: CompileOptions | None = None) -> CompiledGraph:
        """Return the graph ready to run, wholly on the device."""
        # Recorded launches would hide what a launch costs, which the cost model charges for each node.
        options = (options or CompileOptions()).with_(placement=PlacementRule.STRICT, device_graph=False)
        return Session(self.device, options).compile(graph)

    def time(
        self,
        compiled: CompiledGraph,
        feeds: Mapping[str, Any],
        *,
        most: int = 0,
        least: int = 3,
        fresh: bool = False,
        thorough: bool = False,
    ) -> Timed | None:
        """Return the usual time of a run after a warm-up; None when the clock makes no sense.

        Args:
            compiled: what runs.
            feeds: its inputs.
            most: runs at most.
            least: runs at least.
            fresh: its session has just been opened. Its threads are not spread over the cores yet: an H200's host
                of 16 cores took 1.3 to 1.8 times as long for small products in the first millisecond.
            thorough: use the whole time of a point.
        """
        point_ns = self.budget.point_ns
        before = self.pace.now()
        found = timed(
            lambda: compiled.run(feeds),
            self.budget,
            most or self.most,
            2,
            least,
            warm_ns=point_ns * (_FRESH_SHARE if fresh and not self.hurried else _WARM_SHARE),
            enough_ns=point_ns * (1.0 if thorough else _HURRIED_SHARE if self.hurried else _TIMED_SHARE),
        )
        if found is None:
            return None
        after = self.pace.now()
        pace_ns = math.inf if found.spread > _UNSTEADY else max(before, after)
        return dataclasses.replace(found, pace_ns=pace_ns, quicker_pace_ns=min(before, after))

    def launches(self, roundtrip_ns: float, dispatch_ns: float) -> None:
        """Tell what a round trip and a node take, which decides how long chains must be."""
        self.frames.roundtrip_ns, self.dispatch_ns = roundtrip_ns, dispatch_ns
        if dispatch_ns < _SLOW_DISPATCH_NS:
            self._trip_chains = roundtrip_ns / (_LEAST_CHAIN * dispatch_ns + 1)

    @property
    def launched(self) -> bool:
        """Whether nodes are launched to an accelerator: not so on a CPU, nor on a GPU in software, which is one."""
        return self.device.kind != Device.CPU.kind and self.dispatch_ns < _SLOW_DISPATCH_NS

    def await_calm(self) -> None:
        """Wait a tenth of a second at most until the host is undisturbed, for what is worth it and timed next.

        Short whiles end in that time: beside an H200 a core was slow for 10 to 70 ms at a time, now and then for 0.2 s.
        """
        for _ in range(_CALM_TRIES if not self.quick else 0):
            if self.pace.now() <= self.pace.limit_ns:
                return
            time.sleep(_CALM_PAUSE_S)

    def step(self, what: str) -> None:
        """Tell the progress; the first step is at 0."""
        self._tell(what, self.budget.elapsed_ns / self.budget.limit_ns if self.rows else 0.0)

    def rest(self) -> None:
        """Let other devices measure something; nothing of this one runs meanwhile, nor counts as its time."""
        if self._turn is not None:
            self._turn.rest()

    def done(self) -> None:
        """Close what is open, and tell the progress that it is over."""
        self.frames.close()
        self._tell("done", 1.0)

    def account(self, probe: str, since_ns: float) -> None:
        """Note what a probe took since a time of the budget."""
        self.spent[probe] = round(self.spent.get(probe, 0.0) + (self.budget.elapsed_ns - since_ns) / 1e9, 4)

    # --- chains

    def run(self, series: Series, deadline_ns: float, patience_ns: float = 0.0) -> None:
        """Time a chain at each size, least work first, and stop where a run would take too long.

        `patience_ns` is what loading kernels may take beyond the deadline, which no run of a chain shows.

        Short work is measured in long chains where a round trip is long, so that it stands out of the round trip's
        noise. Only one chain is open at a time: idle threads of another would take the cores.
        """
        self.rest()
        begun = self.budget.elapsed_ns
        if not self.budget.fits(deadline_ns):
            self.skipped.setdefault(series.probe, f"no time for {series.label}")
            return
        try:
            self._run(series, deadline_ns, patience_ns)
        except FAILURES as err:
            self.skipped[series.probe] = f"{series.label}: {str(err).splitlines()[0]}"
        self.account(series.probe, begun)

    def severity(self, series: Series) -> float:
        """Return how far the worst row of a series was disturbed, as a share of its time."""
        return self.worst(series.probe, [point.size for point in series.points], series.label)

    def revisit(
        self,
        series: Series,
        deadline_ns: float,
        *,
        disturbed: bool = False,
        quickest: bool = False,
        mean: bool = False,
    ) -> None:
        """Time a chain once more, seconds after the first time, and keep the better row of each size.

        Args:
            series: the chain.
            deadline_ns: when it should be through, counted from the budget's start.
            disturbed: only sizes that were measured on a disturbed host.
            quickest: the quicker row is the better one in any case.
            mean: neither is better, and the mean counts.
        """
        points = series.points
        if disturbed:
            points = tuple(point for point in points if self.disturbed(series.probe, point.size, series.label))
        # Where a device prepares itself for each shape, as by searching for the best convolution, it does so again.
        extras = self._extra_ns.get(series.probe, [])
        preparing_ns = len(points) * statistics.median(extras) if extras else 0.0
        if points and self.budget.fits(deadline_ns, preparing_ns):
            again = dataclasses.replace(series, points=points)
            self.once_more(lambda: self.run(again, deadline_ns), quickest=quickest, mean=mean)

    def _run(self, series: Series, deadline_ns: float, patience_ns: float) -> None:
        count = series.links * self._stretch(series)
        compiled: CompiledGraph | None = None
        seen = self._links.setdefault(series.probe, [])
        # Half of the time: each size is timed twice, as a frame and as a chain.
        self.frames.prepare((point.shape for point in series.points), (self.budget.elapsed_ns + deadline_ns) / 2)
        last: tuple[float, float] | None = None
        try:
            for point in sorted(series.points, key=lambda point: point.work):
                link_ns = self._foreseen(point, last, seen)
                fitting = series.fitting(count, link_ns, self._point_limit_ns * _LONG_CHAIN)
                if fitting < count and compiled is not None:
                    compiled.close()
                    compiled = None
                count, fresh = fitting, compiled is None
                fits = self._has_time(series, point, link_ns * count, deadline_ns, patience_ns)
                if compiled is None and fits:
                    compiled = self._opened(series, count, deadline_ns)
                    fits = self._has_time(series, point, link_ns * count, deadline_ns, patience_ns)
                if compiled is None or not fits:
                    self.skipped[series.probe] = f"no time for {series.label} of size {point.size} and above"
                    break
                base, begun = self.frames.of(point.shape), self.budget.elapsed_ns
                found = self.time(compiled, self._feeds(series, point), fresh=fresh)
                minus = self._beside(series, point)
                share, frame_ns = count * series.nodes, self.frames.pace_ns(point.shape)
                self.add(
                    series.probe,
                    point.size,
                    found,
                    series.label,
                    base_ns=base,
                    base_pace_ns=frame_ns,
                    share=share,
                    minus_ns=minus,
                )
                if found is not None:
                    last = point.work, max(found.ns - base, 0.0) / count
                    seen.append(last)
                    extra_ns = self.budget.elapsed_ns - begun - (found.repeats + 2) * found.ns
                    self._extra_ns.setdefault(series.probe, []).append(extra_ns)
                    granted_ns = min(max(extra_ns, 0.0), patience_ns)
                    deadline_ns, patience_ns = deadline_ns + granted_ns, patience_ns - granted_ns
        finally:
            if compiled is not None:
                compiled.close()

    def _beside(self, series: Series, point: Point) -> float:
        """Return what else a link does takes, at the same size, or for as many elements in rows of any length."""
        if not series.companion:
            return 0.0
        return self.of(series.companion, point.size) or self.of(series.companion, point.size[:1])

    def _stretch(self, series: Series) -> int:
        """Return how many times as long a chain is made as it has to be."""
        if not series.stretched:
            return 1
        trips = 1 if self.device.kind == Device.CPU.kind else series.trips
        return min(max(round(trips * self._trip_chains), 1), _LONGEST_STRETCH)

    def _foreseen(self, point: Point, last: tuple[float, float] | None, seen: list[tuple[float, float]]) -> float:
        """Return the time to expect of a link in ns: from the size before, another series of the probe, or rates.

        Before a probe has any row, a link takes at least as long as making its tensor, and as its operations at the
        best rate that products were seen to have.
        """
        if last is None and seen:
            last = min(seen, key=lambda known: abs(math.log(known[0] / point.work)))
        if last is not None:
            return last[1] * point.work / last[0]
        rates = [link_ns / work for work, link_ns in self._links.get("gemm", ()) if work > 0]
        return max(self.frames.making(point.shape), point.flops * min(rates, default=0.0))

    def _has_time(self, series: Series, point: Point, chain_ns: float, deadline_ns: float, patience_ns: float) -> bool:
        """Return whether a size can be measured before the deadline.

        It also takes what no run of its chain shows, where a device prepares itself anew for each shape: the least
        that a size of the probe took so far. The first one loads kernels for all others, so it counts against the
        whole budget only.
        """
        if chain_ns > self._point_limit_ns or not self.frames.has(point.shape):
            return False
        extras = self._extra_ns.get(series.probe, [])
        if not self.budget.fits(self.budget.limit_ns, 3 * chain_ns + max(extras, default=0.0)):
            return False
        extra_ns = min(extras[1:], default=0.0)
        return self.budget.fits(deadline_ns, 3 * chain_ns + max(extra_ns - patience_ns, 0.0))

    @staticmethod
    def _feeds(series: Series, point: Point) -> dict[str, Any]:
        feeds = {"seed": np.full(1, 0.5, series.dtype.numpy), "shape": np.array(point.shape, np.int64)}
        return feeds if series.feeds is None else feeds | dict(series.feeds(point.shape))

    def _opened(self, series: Series, count: int, deadline_ns: float) -> CompiledGraph | None:
        """Return a chain's session; None where opening one with so many bytes of weights would take too long.

        The first session with weights loads the device's libraries, which says nothing about the next one.
        """
        graph = series.build(count)
        nbytes = sum(tensor.nbytes for tensor in graph.weights.values())
        if not self.budget.fits(deadline_ns, nbytes * min(self._opening[1:], default=0.0)):
            return None
        start = self.budget.elapsed_ns
        compiled = self.compile(self._handed_out(graph), series.options)
        if nbytes >= _MANY_BYTES:
            self._opening.append((self.budget.elapsed_ns - start) / nbytes)
        return compiled

    def _handed_out(self, chain: Graph) -> Graph:
        """Return a chain's graph as it is measured: on a CPU, where one core makes the tensor, all of them have it."""
        return graphs.spread(chain) if self.device.kind == Device.CPU.kind else chain

    def _tell(self, what: str, gone: float) -> None:
        _log.debug("calibrating %s: %s", self.device.label, what)
        if self._progress is not None:
            self._progress(what, min(gone, 1.0))
