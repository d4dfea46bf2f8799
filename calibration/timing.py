"""Timing with a budget: medians after a warm-up, the spread beside them, and no run that takes too long."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Budget", "Clock", "Timed", "quartile_spread", "timed"]

Clock = Callable[[], int]
"""Returns nanoseconds from some fixed point; `time.perf_counter_ns` but in tests."""

_LEAST = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """A median time in nanoseconds, the distance of the quartiles as a share of it, and the number of runs."""

    ns: float
    spread: float
    repeats: int


class Budget:
    """The time a calibration may take.

    Args:
        limit_s: the whole of it, in seconds.
        point_s: what one point may take, in seconds, its warm-up left out.
        clock: tells the time.
    """

    def __init__(self, limit_s: float, point_s: float, clock: Clock = time.perf_counter_ns) -> None:
        self.limit_ns = limit_s * 1e9
        self.point_ns = point_s * 1e9
        self.clock = clock
        self._start = clock()

    @property
    def elapsed_ns(self) -> float:
        """The time that is gone, in nanoseconds."""
        return max(self.clock() - self._start, 0)

    def fits(self, deadline_ns: float, expected_ns: float = 0.0) -> bool:
        """Return whether something that takes this long ends before a deadline, counted from the start."""
        return self.elapsed_ns + expected_ns < min(deadline_ns, self.limit_ns)


def timed(
    run: Callable[[], object], budget: Budget, most: int = 15, warm: int = 1, least: int = _LEAST
) -> Timed | None:
    """Return the median time of a call after `warm` calls that do not count; None when the clock makes no sense.

    It is the median of `least` calls even when those take longer than a point may, unless they take far longer.
    """
    clock = budget.clock
    for _ in range(warm):
        before = clock()
        run()
        warm_ns = clock() - before
        if warm_ns > budget.point_ns:
            break  # so slow that a second warm-up is worth less than it costs
    times: list[int] = []
    start = clock()
    for _ in range(most):
        before = clock()
        run()
        after = clock()
        if after > before:  # a clock that stands still or goes back says nothing about this run
            times.append(after - before)
        spent = after - start
        if spent > budget.point_ns and len(times) >= min(least, most):
            break
        if spent > least * budget.point_ns:
            break
    if not times:
        return None
    median = float(statistics.median(times))
    return Timed(median, quartile_spread(times), len(times))


def quartile_spread(times: list[int]) -> float:
    """Return the distance of the quartiles as a share of the median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0
