"""Interpolation: exact at the points, powers between them, and never less time for more work."""

from __future__ import annotations

import math

import pytest

from rlx_ort.calibration.tables import Curve, Grid


def test_a_curve_goes_through_its_points() -> None:
    """At a measured size the time is the measured one."""
    curve = Curve([(10, 100.0), (1000, 900.0)])
    assert [curve(10), curve(1000)] == pytest.approx([100.0, 900.0])


def test_between_two_points_the_time_is_a_power_of_the_size() -> None:
    """Half way in the logarithm of the size is half way in that of the time."""
    assert Curve([(10, 100.0), (1000, 900.0)])(100) == pytest.approx(300.0)


def test_above_the_largest_point_the_time_grows_with_the_size() -> None:
    """Ten times the size, ten times the time."""
    assert Curve([(10, 100.0), (1000, 900.0)])(10_000) == pytest.approx(9000.0)


def test_below_the_smallest_point_a_flat_curve_stays_flat() -> None:
    """A launch does not get cheaper with less work."""
    assert Curve([(100, 50.0), (1000, 50.0), (10_000, 500.0)])(1) == pytest.approx(50.0)


def test_a_point_that_falls_is_smoothed() -> None:
    """More work never takes less time; two points the wrong way round become their mean."""
    curve = Curve([(10, 400.0), (100, 100.0), (1000, 1000.0)])
    assert curve(10) == pytest.approx(200.0)
    assert curve(100) == pytest.approx(200.0)


def test_an_unsteady_point_gives_way_to_a_steady_one() -> None:
    """Of two times that fall, the one that jumped about by as much as itself hardly counts."""
    points = [(10, 100.0), (100, 1000.0), (1000, 100.0)]
    assert Curve(points, {1000: 1.0})(100) == pytest.approx(1000.0, rel=0.02)
    assert Curve(points)(100) == pytest.approx(1000.0**0.5 * 100.0**0.5)


def test_a_grid_goes_through_its_points() -> None:
    """At a measured size the time is the measured one."""
    points = {(m, k): float(m * k + 50) for m in (1, 10, 100) for k in (16, 64)}
    grid = Grid(points)
    assert [grid(*size) for size in points] == pytest.approx(list(points.values()))


def test_a_grid_interpolates_each_axis_in_logarithms() -> None:
    """Where the time is a product of powers, it is met exactly between the points."""
    points = {(m, k): 100.0 * math.sqrt(m) * k for m in (1, 100) for k in (10, 1000)}
    assert Grid(points)(10, 100) == pytest.approx(100.0 * math.sqrt(10) * 100)


def test_above_a_grid_the_time_grows_with_each_size() -> None:
    """Twice the rows and three times the columns beyond the grid take six times the time."""
    points = {(m, k): float(m * k * 100) for m in (1, 10) for k in (1, 10)}
    assert Grid(points)(20, 30) == pytest.approx(10 * 10 * 100 * 6)


def test_above_a_grid_that_does_not_grow_the_time_grows_half_as_the_work() -> None:
    """What launches held up so far may be held up by its work there: four times the batch takes twice as long."""
    points = {(t, b): 100.0 * t for t in (1, 10) for b in (1, 10)}
    assert Grid(points)(10, 40) == pytest.approx(2 * 1000.0)


def test_along_an_axis_with_one_point_the_time_falls_half_as_fast_as_it_grows() -> None:
    """A fourth of the channels are a sixteenth of the work: a fourth of the time, between none less and all of it."""
    grid = Grid({(m, 64.0): 100.0 * m for m in (1.0, 100.0)}, (1, 2))
    assert (grid(10, 128), grid(10, 16)) == pytest.approx((4 * 1000.0, 1000.0 / 4))


def test_a_point_that_was_not_measured_is_filled_at_the_best_measured_rate() -> None:
    """The missing corner has ten times the work of (1, 10), but (10, 1) shows that 70 ns a unit are possible."""
    grid = Grid({(1, 1): 100.0, (1, 10): 1000.0, (10, 1): 700.0})
    assert grid(10, 10) == pytest.approx(7000.0)


def test_less_work_than_the_nearest_point_is_filled_with_its_time() -> None:
    """A launch does not get cheaper: (10, 1) takes what (10, 10) does."""
    assert Grid({(1, 10): 400.0, (10, 10): 500.0, (1, 1): 390.0})(10, 1) == pytest.approx(500.0)


def test_the_work_grows_with_a_power_of_a_size() -> None:
    """Twice the channels beyond the grid are four times the work."""
    points = {(m, c): float(m * c * c) for m in (10, 100) for c in (10, 100)}
    assert Grid(points, (1, 2))(200, 200) == pytest.approx(200 * 200 * 200)


def test_a_hole_in_a_grid_is_filled_from_both_sides() -> None:
    """A column of which only the least size was measured does not grow by its work from there."""
    grid = Grid({(1, 256): 4.0, (1, 512): 8.0, (1, 1024): 16.0, (128, 256): 100.0, (128, 1024): 400.0}, (1, 2))
    assert grid(128, 512) == pytest.approx(200.0)
