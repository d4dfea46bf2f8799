"""Timing: medians, a budget that is kept, and clocks that make no sense."""

from __future__ import annotations

import itertools

import pytest

from rlx_ort.calibration.timing import Budget, quartile_spread, timed


class Clock:
    """A clock that a run moves by a given step each time."""

    def __init__(self, *steps: int) -> None:
        self.now = 0
        self.steps = itertools.cycle(steps)
        self.runs = 0

    def __call__(self) -> int:
        return self.now

    def run(self) -> None:
        """Take the next step's time."""
        self.runs += 1
        self.now += next(self.steps)


def test_the_time_is_the_lower_quartile_of_the_runs() -> None:
    """Half of the runs were disturbed, and the others say what the device takes."""
    clock = Clock(9000, 100, 500, 110, 500, 100, 500, 500, 110, 500)
    found = timed(clock.run, Budget(1.0, 1.0, clock), most=9, warm=1)
    assert found is not None
    assert (found.ns, found.repeats) == (110.0, 9)


def test_the_warm_up_does_not_count() -> None:
    """Neither does one outlier."""
    clock = Clock(9000, 100, 100, 5000, 100, 100)
    found = timed(clock.run, Budget(1.0, 1.0, clock), most=5, warm=1)
    assert found is not None
    assert (found.ns, found.repeats) == (100.0, 5)


def test_a_slow_run_is_not_repeated_beyond_its_share() -> None:
    """A point of ten milliseconds stops after the first run that takes longer than three times that."""
    clock = Clock(40_000_000)
    found = timed(clock.run, Budget(1.0, 0.010, clock), most=15, warm=2)
    assert found is not None
    assert found.repeats == 1
    assert clock.runs == 2


def test_a_clock_that_stands_still_gives_no_time() -> None:
    """Nothing is divided by nothing, and nothing waits for ever."""
    clock = Clock(0)
    assert timed(clock.run, Budget(1.0, 0.010, clock)) is None


def test_a_run_during_which_the_clock_went_back_does_not_count() -> None:
    """The other runs are the time."""
    clock = Clock(100, 100, -5000, 100)
    found = timed(clock.run, Budget(1.0, 1.0, clock), most=7, warm=1)
    assert found is not None
    assert found.ns == 100.0


def test_a_budget_ends_at_the_earlier_of_deadline_and_limit() -> None:
    """What would end later does not fit."""
    clock = Clock(100)
    budget = Budget(1e-6, 1.0, clock)
    assert budget.fits(900.0, 899.0)
    assert not budget.fits(900.0, 901.0)
    assert not budget.fits(5000.0, 1000.0)


@pytest.mark.parametrize(("times", "spread"), [([100], 0.0), ([100, 100, 100], 0.0), ([50, 100, 150], 0.5)])
def test_the_spread_is_the_distance_of_the_quartiles_over_the_median(times: list[int], spread: float) -> None:
    """A single run has none."""
    assert quartile_spread(times) == pytest.approx(spread)
