"""Products between the measured ones: squares, skewed weights, and weights that do not stay in the caches."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.products import ProductTable

SQUARES = {(1, 64, 64): 1000.0, (64, 64, 64): 8000.0, (1, 1024, 1024): 16_000.0, (64, 1024, 1024): 128_000.0}


def test_a_measured_square_costs_what_was_measured() -> None:
    """At its point nothing is interpolated."""
    assert ProductTable(SQUARES)(64, 64, 64) == pytest.approx(8000.0)


def test_a_weight_of_another_shape_is_priced_by_its_elements() -> None:
    """(16, 256) has as many as (64, 64)."""
    assert ProductTable(SQUARES)(64, 16, 256) == pytest.approx(8000.0)


def test_what_a_skewed_weight_takes_more_is_measured_and_grows_with_the_skew() -> None:
    """Twice as long at a skew of 16; at a skew of 4, half of it in logarithms: 1.41 times."""
    table = ProductTable(SQUARES | {(64, 16, 256): 16_000.0})
    assert table(64, 16, 256) == pytest.approx(16_000.0)
    assert table(64, 256, 16) == pytest.approx(16_000.0)
    assert table(64, 32, 128) == pytest.approx(8000.0 * 2**0.5)
    assert table(64, 64, 64) == pytest.approx(8000.0)


def test_beyond_the_most_skewed_that_was_measured_it_takes_no_more() -> None:
    """Noise of one row would count twice at a skew of 256."""
    table = ProductTable(SQUARES | {(64, 16, 256): 16_000.0})
    assert table(64, 1024, 4) == pytest.approx(16_000.0)


def test_cold_weights_cost_what_streaming_them_takes_more() -> None:
    """A row of (1024, 1024) takes 16 us warm, three times that when 64 MB take turns."""
    cold = {4 << 20: 10_000.0, 64 << 20: 30_000.0}
    table = ProductTable(SQUARES, cold)
    assert table(1, 1024, 1024, 4 << 20) == pytest.approx(16_000.0)
    assert table(1, 1024, 1024, 64 << 20) == pytest.approx(48_000.0)
    assert table(1, 1024, 1024) == pytest.approx(16_000.0)


def test_computing_hides_what_cold_weights_cost() -> None:
    """With 64 rows a product takes eight times as long, and an eighth of the streaming shows."""
    cold = {4 << 20: 10_000.0, 64 << 20: 30_000.0}
    assert ProductTable(SQUARES, cold)(64, 1024, 1024, 64 << 20) == pytest.approx(128_000.0 + 32_000.0 / 8)


def test_without_squares_the_others_stand_for_them() -> None:
    """A profile of one skewed row still predicts."""
    assert ProductTable({(8, 16, 256): 500.0})(8, 64, 64) == pytest.approx(500.0)


def test_weights_below_the_least_that_took_turns_are_as_warm() -> None:
    """What 4 and 16 MB of weights in turn take says nothing about 1 and 2 MB."""
    rows = {(1, 256, 256): 4000.0, (1, 1024, 1024): 14_000.0}
    table = ProductTable(rows, {4 << 20: 14_000.0, 16 << 20: 24_000.0})
    assert table(1, 256, 256, 2 << 20) == pytest.approx(table(1, 256, 256))
    assert table(1, 256, 256, 16 << 20) > table(1, 256, 256)
