"""`Frames`: the time of a probe's graph without its chain, which is subtracted from the graph with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rlx_ort.calibration import graphs
from rlx_ort.calibration.timing import Budget, Timed
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.ir.graph import Graph

__all__ = ["Frames"]

_SLOW_ROUND_TRIP_NS = 100_000.0  # beyond this, a round trip's drift is larger than the nodes that are measured
_AGAIN = 5  # runs of a frame that was timed before


class Frames:
    """Times graphs that make a large tensor and do nothing with it.

    Where a round trip is long a frame is timed anew just before each chain, since it drifts by more than a chain
    takes; its session stays open for that. Elsewhere a size is timed once, in a session that closes before the
    chain's is opened: idle threads would take the cores.

    Args:
        budget: the time there is.
        compile_: opens a graph's session.
        time: times a compiled graph with inputs; at most so many runs, 0 for as many as usual; whether its session
            is new.

    Attributes:
        roundtrip_ns: the time of a run that computes nothing; 0 before it is known.
    """

    def __init__(
        self,
        budget: Budget,
        compile_: Callable[[Graph], CompiledGraph],
        time: Callable[[CompiledGraph, Mapping[str, Any], int, bool], Timed | None],
    ) -> None:
        self.roundtrip_ns = 0.0
        self._budget = budget
        self._compile = compile_
        self._time = time
        self._longest_ns = 4 * budget.point_ns
        self._known: dict[tuple[int, int], float] = {}
        self._paces: dict[tuple[int, int], float] = {}
        self._open: dict[int, CompiledGraph] = {}

    @property
    def slow(self) -> bool:
        """Whether a round trip is so long that each chain needs a frame of its own."""
        return self.roundtrip_ns > _SLOW_ROUND_TRIP_NS

    def has(self, shape: tuple[int, ...]) -> bool:
        """Return whether a size was timed, or can be while a chain is open."""
        return _key(shape) in self._known or self.slow

    def of(self, shape: tuple[int, ...]) -> float:
        """Return the time of a size's frame in ns, which is measured now where it has to be."""
        key = _key(shape)
        if self.slow:
            compiled = self._open.get(len(shape))
            if compiled is None:
                compiled = self._open[len(shape)] = self._compile(graphs.frame(len(shape)))
            self._measure(compiled, shape, _AGAIN if key in self._known else 0)
        elif key not in self._known:
            self.prepare([shape])
        return self._known[key]

    def making(self, shape: tuple[int, ...]) -> float:
        """Return what the tensor alone takes in ns, as far as it is known: a part of what any op does with it."""
        return max(self._known.get(_key(shape), 0.0) - self.roundtrip_ns, 0.0)

    def pace_ns(self, shape: tuple[int, ...]) -> float:
        """Return how fast the host was when a size's frame was timed; 0 when it was not."""
        return self._paces.get(_key(shape), 0.0)

    def forget(self, limit_ns: float) -> None:
        """Forget the frames that were timed on a host slower than a limit, so that they are timed anew."""
        for key in [key for key, pace_ns in self._paces.items() if pace_ns > limit_ns]:
            del self._paces[key], self._known[key]

    def prepare(self, shapes: Iterable[tuple[int, ...]], deadline_ns: float = math.inf) -> None:
        """Time the frames of sizes that were not timed yet, smallest first, where a chain could not be open beside."""
        missing = {_key(shape): shape for shape in shapes if _key(shape) not in self._known}
        if not missing or self.slow:
            return
        compiled = self._compile(graphs.frame(len(next(iter(missing.values())))))
        try:
            last_ns, last_count = 0.0, 1
            for key, shape in sorted(missing.items()):
                expected = last_ns * key[1] / last_count
                if expected > self._longest_ns or not self._budget.fits(deadline_ns, 6 * expected):
                    break  # a chain of such tensors would take too long as well
                self._measure(compiled, shape, 0)
                last_ns, last_count = self._known[key], key[1]
        finally:
            compiled.close()

    def close(self) -> None:
        """Close the sessions that are still open."""
        for compiled in self._open.values():
            compiled.close()
        self._open.clear()

    def _measure(self, compiled: CompiledGraph, shape: tuple[int, ...], most: int) -> None:
        feeds = {"seed": np.full(1, 0.5, np.float32), "shape": np.array(shape, np.int64)}
        found = self._time(compiled, feeds, most, not self._known)
        self._known[_key(shape)] = 0.0 if found is None else found.ns
        self._paces[_key(shape)] = 0.0 if found is None else found.pace_ns


def _key(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return what a frame's time depends on."""
    return len(shape), math.prod(shape)
