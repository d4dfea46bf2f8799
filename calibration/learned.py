"""Recent measured times of a graph, and the correction of its predictions that follows.

A device that became slow, from heat or from other work, loses its place within a few runs. It then runs no more, so
its measurements age: after a few seconds its prediction is believed again, the device is tried, and keeps its
place or loses it at the cost of that run.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph

Sizes = tuple[tuple[str, int], ...]
"""Named dims of a graph and their sizes in a run, in order."""

_HALF_LIFE_S = 3.0
_SHARE = 20
"""A slow run counts for at least so many times its time, so that trying its device again costs a few per cent."""

_FORGOTTEN = 3  # half-lives after which a record no longer counts
_RUNS = 8  # the median of so many counts; of two the faster one, as a disturbance makes a run longer
_OTHER_SIZE = 0.5  # weight of a run of other sizes: a slow device is slow at all sizes, but not equally
_RECORDS_A_GRAPH = 128


@dataclass(slots=True)
class _Record:
    """The last runs of one size on one device, as (time in s, ns), and their prediction."""

    predicted_ns: float
    runs: list[tuple[float, float]] = field(default_factory=list)
    measured_ns: float = 0.0

    def add(self, now_s: float, ns: float, predicted_ns: float, fresh: bool) -> None:
        recent = [] if fresh else [run for run in self.runs if now_s - run[0] < _HALF_LIFE_S]
        self.runs = [*recent[1 - _RUNS :], (now_s, ns)]
        self.measured_ns = sorted(ns for _, ns in self.runs)[(len(self.runs) - 1) // 2]
        self.predicted_ns = predicted_ns

    def weight(self, now_s: float) -> float:
        """Return how much it counts: 1 when new, half after a half-life, 0 when it is forgotten."""
        lives = (now_s - self.runs[-1][0]) / max(_HALF_LIFE_S, _SHARE * self.measured_ns / 1e9)
        return 0.0 if lives >= _FORGOTTEN else 0.5 ** max(lives, 0.0)


class Learned:
    """Recent run times by graph, device and sizes; `clock` returns seconds. May be used from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._graphs: weakref.WeakKeyDictionary[Graph, OrderedDict[Hashable, _Record]] = weakref.WeakKeyDictionary()

    def note(
        self, graph: Graph, device: Device, sizes: Sizes, ns: float, predicted_ns: float, *, fresh: bool = False
    ) -> None:
        """Remember that a run took `ns`, where `predicted_ns` were predicted without correction.

        A `fresh` run is the first after others on another device: how the device was before does not count any more.
        """
        if ns <= 0 or predicted_ns <= 0:  # a clock that stands still or goes back, a device that costs nothing
            return
        key = (device, graph.revision)
        with self._lock:
            records = self._graphs.setdefault(graph, OrderedDict())
            record = records.setdefault((key, sizes), _Record(predicted_ns))
            record.add(self._clock(), ns, predicted_ns, fresh)
            records[key] = record  # the newest of any sizes
            records.move_to_end((key, sizes))
            records.move_to_end(key)
            while len(records) > _RECORDS_A_GRAPH:
                records.popitem(last=False)

    def corrected(self, graph: Graph, device: Device, sizes: Sizes, predicted_ns: float) -> float:
        """Return a prediction moved towards the recent times of such runs; unchanged where nothing recent is known."""
        key = (device, graph.revision)
        with self._lock:
            records = self._graphs.get(graph)
            latest = None if records is None else records.get(key)
            if records is None or latest is None:
                return predicted_ns
            now_s = self._clock()
            own = records.get((key, sizes))
            other_weight = 0.0 if latest is own else _OTHER_SIZE * latest.weight(now_s)
            if own is not None:
                own_weight = own.weight(now_s)
                if own_weight >= other_weight:
                    return predicted_ns * math.pow(own.measured_ns / predicted_ns, own_weight)
            return predicted_ns * math.pow(latest.measured_ns / latest.predicted_ns, other_weight)


LEARNED = Learned()
"""The corrections that this process has learned."""
