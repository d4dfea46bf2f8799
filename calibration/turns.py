"""Lets devices that are calibrated together measure in turn, so that a disturbance of the machine meets all alike.

What else runs on a machine slows it down for seconds at a time, which is as long as one device is calibrated. On the
host of an H200 all rows of the CPU came out a sixth too long that way, those of CUDA right, and a graph that took 1.4
times as long on CUDA was given to it. Which device is the faster one is a matter of their ratio, so what slows down one
should slow down the other; and the longer the time over which a device is measured, the better it shows what is usual.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType

from rlx_ort.calibration.pace import Pace
from rlx_ort.calibration.timing import Clock
from rlx_ort.errors import CalibrationError

__all__ = ["Turn", "Turns"]

_QUICKER = 0.05  # of the times of the host's loop are quicker than undisturbed: a calibration may meet few such moments


class Turns:
    """Hands the machine to one calibration after the other, in the order in which they ask.

    Args:
        clock: tells the time.

    Attributes:
        pace: how fast the host was, as all of them saw it.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.pace = Pace(clock, _QUICKER)
        self._clock = clock
        self._lock = threading.Lock()
        self._taken = self._stopped = False
        self._waiting: deque[threading.Event] = deque()

    def join(self) -> Turn:
        """Return the turn of one more calibration, which belongs to one thread."""
        return Turn(self, self._clock)

    def take(self) -> None:
        """Wait until nobody else measures.

        Raises:
            CalibrationError: it was stopped.
        """
        with self._lock:
            mine = threading.Event()
            if self._taken:
                self._waiting.append(mine)
            else:
                self._taken = True
                mine.set()
        mine.wait()
        if self._stopped:
            raise CalibrationError("the calibration was stopped")

    def leave(self) -> None:
        """Let the one that has waited longest measure."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False

    def stop(self) -> None:
        """End every calibration that takes part when its next turn begins."""
        self._stopped = True


class Turn:
    """One calibration among others, which may measure while it is entered.

    Args:
        turns: what it takes part in.
        clock: tells the time.
    """

    def __init__(self, turns: Turns, clock: Clock) -> None:
        self._turns, self._time = turns, clock
        self._waited_ns = 0

    @property
    def pace(self) -> Pace:
        """How fast the host is, for all that take part."""
        return self._turns.pace

    def clock(self) -> int:
        """Return the time in ns, which stands still while others measure."""
        return self._time() - self._waited_ns

    def rest(self) -> None:
        """Let each of the others measure something; returns at once where there is none."""
        before = self._time()  # as soon as this one leaves, another one's time passes
        self._turns.leave()
        self._wait(before)

    def __enter__(self) -> Turn:
        self._wait(self._time())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.leave()

    def _wait(self, since: int) -> None:
        self._turns.take()
        self._waited_ns += max(self._time() - since, 0)
