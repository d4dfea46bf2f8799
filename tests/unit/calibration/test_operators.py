"""The time of an operator by its elements, beside the addition that was measured at more sizes."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.operators import OperatorTable
from rlx_ort.calibration.tables import Curve

_ADDITIONS = {1000: 100.0, 2000: 200.0, 4000: 1600.0, 8000: 3200.0, 16_000: 9600.0}
_ADDITION = Curve(_ADDITIONS.items())


def table(rows: dict[int, float], kept: float = 1.0) -> OperatorTable:
    """Return the table of an operator that was measured at some sizes."""
    return OperatorTable(Curve(rows.items()), frozenset(rows), _ADDITIONS, _ADDITION, kept)


@pytest.mark.parametrize("elements", [1000, 8000])
def test_a_measured_size_takes_what_was_measured(elements: int) -> None:
    """The addition bends the line between the sizes, not its ends."""
    rows = {1000: 150.0, 8000: 4000.0}
    assert table(rows)(elements) == pytest.approx(rows[elements])


def test_where_the_addition_outgrows_a_cache_so_does_a_quick_operator() -> None:
    """At 2,000 elements the addition takes 200 ns, and 100 * 32 ** (1 / 3) on a straight line to 8,000."""
    straight, added = 150.0 * (4000.0 / 150.0) ** (1 / 3), 100.0 * 32.0 ** (1 / 3)
    assert table({1000: 150.0, 8000: 4000.0})(2000) == pytest.approx(straight * 200.0 / added)


def test_an_operator_that_computes_is_not_bent() -> None:
    """It takes five times what the addition does, and more where the addition is still in the caches."""
    rows = {1000: 16_000.0, 8000: 16_000.0 * 8}
    assert table(rows)(2000) == pytest.approx(32_000.0)


def test_a_quick_operator_grows_as_the_addition_beyond_its_largest_size() -> None:
    """The addition takes twice as long for twice the elements there, though its memory allows for three times."""
    assert table({1000: 150.0, 8000: 4000.0})(16_000) == pytest.approx(8000.0)
    assert table({1000: 150.0, 2000: 300.0})(1600 * 2) == pytest.approx(300.0 * 1.6)


def test_an_operator_of_one_tensor_grows_as_the_addition_of_half_as_many_elements() -> None:
    """4,000 elements of it fit where 2,000 of an addition do, which take twice as long as 1,000."""
    assert table({1000: 150.0, 2000: 300.0}, kept=0.5)(4000) == pytest.approx(600.0)
    assert table({1000: 150.0, 4000: 600.0}, kept=0.5)(8000) == pytest.approx(600.0 * 2)


@pytest.mark.parametrize("ns", [6400.0, 160_000.0])
def test_below_the_only_size_it_goes_as_the_addition(ns: float) -> None:
    """Whether it moves memory or computes: 1,000 elements take 100 ns to add, 8,000 take 3,200."""
    assert table({8000: ns})(1000) == pytest.approx(ns / 32)
    assert table({8000: ns})(8000) == pytest.approx(ns)


def test_sizes_that_the_addition_lacks_bend_nothing() -> None:
    """There is nothing to compare them with."""
    assert table({1000: 100.0, 3000: 300.0})(2000) == pytest.approx(200.0)


def test_the_addition_is_what_was_measured() -> None:
    """It is its own finer line."""
    addition = OperatorTable(_ADDITION, frozenset(_ADDITIONS), _ADDITIONS, _ADDITION)
    assert addition(4000) == pytest.approx(1600.0)
