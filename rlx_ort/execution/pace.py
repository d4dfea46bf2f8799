"""How fast the host runs now, against how fast it usually does.

Kernel launches slow down with the core that makes them, so timings that are taken while the core is throttled or
shared say little about the device. A loop of plain Python shows it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Clock", "Pace"]

Clock: TypeAlias = Callable[[], int]
"""Returns nanoseconds from some fixed point; `time.perf_counter_ns` but in tests."""

_TURNS = 400  # about 12 us, far longer than reading the clock
_TRIES = 3  # the least counts: an interrupt is no slow core
_QUICKER = 0.3
_SLOW = 1.2  # clock frequencies moved the loop by a tenth, a busy neighbour by half
_LEAST_KNOWN = 8
_MOST_KNOWN = 4096


class Pace:
    """The times of a loop that always does the same.

    Args:
        clock: tells the time.
        quicker: the share of the loop's times that are quicker than on a host as usual.
    """

    def __init__(self, clock: Clock, quicker: float = _QUICKER) -> None:
        self._clock = clock
        self._quicker = quicker
        self._known: list[float] = []

    def now(self) -> float:
        """Return what the loop takes now in ns, and remember it; about 40 us."""
        found = math.inf
        for _ in range(_TRIES):
            before = self._clock()
            total = 0
            for turn in range(_TURNS):
                total += turn * turn
            taken = self._clock() - before
            if taken > 0:  # a clock that stands still or goes back says nothing
                found = min(found, taken)
        if not math.isfinite(found):
            return 0.0
        bisect.insort(self._known, found)
        if len(self._known) > _MOST_KNOWN:
            self._known = self._known[::2]  # in order, so what is usual stays
        return float(found)

    @property
    def usual_ns(self) -> float:
        """What the loop usually takes here, or 0 where it was timed too few times."""
        known = self._known
        return known[int(self._quicker * len(known))] if len(known) >= _LEAST_KNOWN else 0.0

    @property
    def limit_ns(self) -> float:
        """What the loop may take on a core that is not disturbed, as far as is known by now.

        A host that is always as busy counts as undisturbed.
        """
        return _SLOW * (self.usual_ns or math.inf)
