"""What the length of a row tells on the time of as many elements."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.row_lengths import USUAL, RowLengths

COUNTS = (1 << 10, 1 << 14, 1 << 18)


def by_the_row(length: int) -> dict[tuple[int, int], float]:
    """Return times of a kernel that takes 70 ns a row, however long."""
    return {(count, length): 70.0 * count / length for count in COUNTS}


def lengths() -> RowLengths:
    """Return what was measured of such a kernel."""
    usual = {count: ns for (count, _), ns in by_the_row(USUAL).items()}
    return RowLengths(by_the_row(64) | by_the_row(1024), usual)


@pytest.mark.parametrize("row", [64, 100, 256, 384, 1024])
def test_a_kernel_that_costs_by_the_row_is_told_between_the_lengths(row: int) -> None:
    """Rows of 384 take 256 / 384 of the time for as many elements."""
    assert lengths()(1 << 16, row) == pytest.approx(USUAL / row)


def test_the_usual_length_changes_nothing() -> None:
    """Its rows are those the factor is of."""
    assert lengths()(12_345, USUAL) == pytest.approx(1.0)


def test_beyond_the_lengths_the_factor_stays() -> None:
    """Nobody has seen shorter or longer rows."""
    assert lengths()(1 << 16, 1) == pytest.approx(USUAL / 64)
    assert lengths()(1 << 16, 1 << 20) == pytest.approx(USUAL / 1024)


def test_beyond_the_sizes_the_factor_stays() -> None:
    """A factor at the most elements holds for more."""
    found = RowLengths({(1 << 10, 64): 2000.0, (1 << 18, 64): 30_000.0}, {1 << 10: 1000.0, 1 << 18: 10_000.0})
    assert found(1 << 25, 64) == pytest.approx(3.0)
    assert found(1, 64) == pytest.approx(2.0)


def test_lengths_are_compared_for_as_many_rows() -> None:
    """Rows of any length cost by the row, and less of it the more there are: 500 rows cost what 500 usual ones do."""
    by_rows = {rows: 1000.0 * rows**0.5 for rows in (1, 16, 256, 4096)}
    usual = {rows * USUAL: ns for rows, ns in by_rows.items()}
    found = RowLengths({(rows * 1024, 1024): ns for rows, ns in by_rows.items() if rows < 4096}, usual)
    ns = found(500 * 512, 512) * 1000.0 * (500 * 512 / USUAL) ** 0.5
    assert ns == pytest.approx(1000.0 * 500**0.5)


def test_more_rows_than_were_measured_take_no_longer_each() -> None:
    """Rows of the usual length were measured while they outgrew the caches; longer ones had outgrown them before."""
    usual = {1 << 18: 1_000.0, 1 << 20: 16_000.0}  # sixteen times as long for four times as many
    found = RowLengths({(1 << 22, 1024): 40_000.0}, usual)
    assert found(1 << 24, 1024) * usual[1 << 20] * 16 == pytest.approx(4 * 40_000.0)


def test_without_other_lengths_there_is_no_factor() -> None:
    """A quick calibration has none."""
    assert RowLengths({}, {1024: 500.0})(1024, 8) == pytest.approx(1.0)
