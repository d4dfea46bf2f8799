"""Timing with a budget: lower quartiles after a warm-up, the spread beside them, and no run that takes too long."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Budget", "Clock", "Timed", "quartile_spread", "timed"]

Clock = Callable[[], int]
"""Returns nanoseconds from some fixed point; `time.perf_counter_ns` but in tests."""

_LEAST = 3
_MOST_WARM = 5000  # calls, where the clock stands still


@dataclass(frozen=True, slots=True)
class Timed:
    """A lower quartile in nanoseconds, the distance of the quartiles as a share of the median, and the number of runs.

    What else runs on the machine only makes runs longer: where half of them were disturbed, the median says nothing.

    `pace_ns` is how fast the host was meanwhile, see `Pace`, by the slower one of two looks, before and after; 0 where
    nobody looked, infinite where the runs were far apart. `quicker_pace_ns` is the other look: since the quartile goes
    by the quicker runs, it tells more about the time itself.
    """

    ns: float
    spread: float
    repeats: int
    pace_ns: float = 0.0
    quicker_pace_ns: float = 0.0


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
    run: Callable[[], object],
    budget: Budget,
    most: int = 15,
    warm: int = 1,
    least: int = _LEAST,
    *,
    warm_ns: float = 0.0,
    enough_ns: float = math.inf,
) -> Timed | None:
    """Return the usual time of a call after a warm-up that does not count; None when the clock makes no sense.

    The warm-up is `warm` calls, and more until `warm_ns` are gone: threads spread over the cores and clocks rise in
    milliseconds, however many calls those are. Calls are timed until `most` of them or `enough_ns`, whichever comes
    first. There are `least` calls even when those take longer than a point may, unless far longer.
    """
    clock = budget.clock
    start = clock()
    for done in range(1, _MOST_WARM + 1):
        before = clock()
        run()
        now = clock()
        if now - before > budget.point_ns:
            break  # so slow that a second warm-up is worth less than it costs
        if done >= warm and not 0 <= now - start < warm_ns:
            break
    times: list[int] = []
    start = clock()
    for _ in range(most):
        before = clock()
        run()
        after = clock()
        if after > before:  # a clock that stands still or goes back says nothing about this run
            times.append(after - before)
        spent = after - start
        if spent > min(budget.point_ns, enough_ns) and len(times) >= min(least, most):
            break
        if spent > least * budget.point_ns:
            break
    if not times:
        return None
    low = statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]
    return Timed(float(low), quartile_spread(times), len(times))


def quartile_spread(times: list[int]) -> float:
    """Return the distance of the quartiles as a share of the median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0
