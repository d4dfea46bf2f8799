"""How fast the host runs now, against how fast it usually does.

A core that shares its hardware with something busy runs a while at two thirds of its speed, and whatever is launched
from it takes as much longer. On the host of an H200 such a while lasted 0.2 to 1.5 s: a loop of plain Python took 20.8
us instead of 12.9, and so did numpy, while launches of CUDA took 1.35 times as long. A measurement made then says
nothing about the device, and the loop tells so.
"""

from __future__ import annotations

import bisect
import math

from rlx_ort.calibration.timing import Clock

__all__ = ["Pace"]

_TURNS = 400  # about 12 us, far longer than reading the clock
_TRIES = 3  # the least counts: an interrupt is no slow core
_QUICKER = 0.3
_SLOW = 1.2  # clock frequencies moved the loop by a tenth, a busy neighbour by half
_LEAST_KNOWN = 8
_ENOUGH_KNOWN = 256  # from so many times on a process knows its host and interpreter better than it can be told
_MOST_KNOWN = 4096


class Pace:
    """The times of a loop that always does the same.

    Args:
        clock: tells the time.
        quicker: the share of its times that are quicker than on a host as usual. Of the times that a calibration meets
            few are: in three runs beside an H200 more than 70 % of them were of a slow core.
    """

    def __init__(self, clock: Clock, quicker: float = _QUICKER) -> None:
        self._clock = clock
        self._quicker = quicker
        self._known: list[float] = []
        self._told_ns = math.inf

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

    def remember(self, usual_ns: float) -> None:
        """Take over what the loop usually took at another time, as a calibration noted it; 0 says nothing."""
        if usual_ns > 0:
            self._told_ns = min(self._told_ns, usual_ns)

    @property
    def usual_ns(self) -> float:
        """What the loop has usually taken here, or 0 where it was timed too few times to say."""
        known = self._known
        return known[int(self._quicker * len(known))] if len(known) >= _LEAST_KNOWN else 0.0

    @property
    def limit_ns(self) -> float:
        """What the loop may take on a core that is not disturbed, as far as is known by now.

        It goes by what is usual, not by the best: where the host is always as busy, that is what it can do. Of what is
        usual here and what was remembered the lesser counts at first, since a process may begin in a busy while.
        """
        told_ns = self._told_ns if len(self._known) < _ENOUGH_KNOWN else math.inf
        return _SLOW * min(self.usual_ns or math.inf, told_ns)
