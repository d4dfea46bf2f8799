"""`Pace`: a disturbed host is detected by the time of a fixed loop, compared with its usual time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rlx_ort.execution.benchmark import Pace


class Clock:
    """A clock between whose readings so many ns go by, in turn."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = list(steps)
        self._time = 0

    def __call__(self) -> int:
        """Return the time in ns, and go on."""
        now = self._time
        self._time += self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        return now


def _loops(*times: int) -> list[int]:
    """Return steps of a clock by which each loop, three of them to a pace, takes a time."""
    return [step for time in times for step in (time, 1)]


def test_the_quickest_of_three_loops_counts() -> None:
    """A loop that was interrupted does not make the host slow."""
    assert Pace(Clock(_loops(90, 13, 14))).now() == 13


def test_nothing_is_slow_before_the_usual_pace_is_known() -> None:
    """With few loops timed, no limit is known."""
    pace = Pace(Clock(_loops(*[13] * 21)))
    for _ in range(7):
        pace.now()
    assert pace.limit_ns == math.inf


def test_a_disturbed_core_is_beyond_the_limit_and_a_slower_clock_is_not() -> None:
    """Loops of 13 are usual; 21 is beyond the limit, 14 is not, and neither moves it."""
    pace = Pace(Clock(_loops(*[13] * 60, *[21] * 6, *[14] * 6)))
    for _ in range(20):
        pace.now()
    disturbed = [pace.now(), pace.now()]
    slower = [pace.now(), pace.now()]
    assert all(found > pace.limit_ns for found in disturbed)
    assert all(found <= pace.limit_ns for found in slower)


def test_a_host_that_is_always_busy_is_as_usual() -> None:
    """Two quick loops among many slow ones do not make the slow ones a disturbance."""
    pace = Pace(Clock(_loops(*[13] * 6, *[26] * 60)))
    found = [pace.now() for _ in range(22)]
    assert found[-1] <= pace.limit_ns


def test_a_calibration_takes_few_quick_loops_for_the_usual_ones() -> None:
    """Eight of a hundred: the host is slow nearly all the time that it takes."""
    pace = Pace(Clock(_loops(*[13] * 24, *[26] * 276)), 0.05)
    found = [pace.now() for _ in range(100)]
    assert pace.usual_ns == 13
    assert found[-1] > pace.limit_ns


def test_what_is_usual_stays_known_and_does_not_grow_for_ever() -> None:
    """Ten thousand times, spread over 1000 to 1999, leave some thousand, whose quantile of 0.3 is 1300 as before."""
    times = [1000 + 7 * at % 1000 for at in range(10_000)]
    pace = Pace(Clock(_loops(*[time for time in times for _ in range(3)])))
    for _ in times:
        pace.now()
    assert 1000 < len(pace._known) < 5000
    assert pace.usual_ns == pytest.approx(1300, abs=5)


@pytest.mark.parametrize("step", [0, -5])
def test_a_clock_that_makes_no_sense_tells_nothing(step: int) -> None:
    """A clock that stands still or goes back leaves no pace behind."""
    pace = Pace(Clock([step]))
    assert [pace.now() for _ in range(9)] == [0.0] * 9
    assert pace.limit_ns == math.inf
