"""What an accelerator would have taken, had its host been undisturbed."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.host_speed import launched_undisturbed
from rlx_ort.calibration.profile import Sample

LAUNCHES = 1.5**0.8
"""What launches take when the host takes half as long again."""


def launched(*rows: Sample, slower: float = 1.5) -> list[float]:
    """Return the times of rows that were all measured while the host took so many times as long."""
    return [row.ns for row in launched_undisturbed(rows, lambda row: slower)]


def additions(*times: float) -> list[Sample]:
    """Return additions of 1,024 elements, and of four times as many each."""
    return [Sample("op:Add", (1024 * 4**at,), ns) for at, ns in enumerate(times)]


def test_rows_that_wait_for_launches_are_as_on_an_undisturbed_host() -> None:
    """They take the same however many elements there are."""
    assert launched(*additions(6000.0, 6100.0, 6200.0)) == pytest.approx(
        [6000 / LAUNCHES, 6100 / LAUNCHES, 6200 / LAUNCHES]
    )


def test_what_is_computed_takes_what_it_takes() -> None:
    """Each takes four times as long as the one before."""
    assert launched(*additions(6000.0, 24_000.0, 96_000.0)) == [6000.0, 24_000.0, 96_000.0]


def test_a_slow_launch_is_told_by_a_quick_one_of_more_work() -> None:
    """Only one of them was disturbed: the larger addition took no longer."""
    slow, quick = additions(6000.0, 4200.0)
    found = launched_undisturbed([slow, quick], lambda row: 1.5 if row is slow else 1.0)
    assert [row.ns for row in found] == pytest.approx([6000 / LAUNCHES, 4200.0])


def test_an_undisturbed_host_changes_nothing() -> None:
    """The rows are those that were given."""
    rows = additions(6000.0, 6000.0)
    assert launched_undisturbed(rows, lambda row: 1.0) == rows


def test_sizes_with_more_of_one_side_and_less_of_another_tell_nothing() -> None:
    """A quarter of the pixels with four times the channels is four times the work of a convolution, not the same."""
    rows = [Sample("conv3x3", (12_544, 64), 52_000.0), Sample("conv3x3", (3136, 512), 52_000.0)]
    assert launched(*rows) == [52_000.0, 52_000.0]


def test_other_probes_and_types_tell_nothing() -> None:
    """A product in f16 that takes as long as a larger one in f32 may be computing."""
    rows = [
        Sample("gemm", (8, 64, 64), 6000.0),
        Sample("gemm", (8, 512, 512), 6000.0, "f16"),
        Sample("bmm", (8, 64, 64), 6000.0),
    ]
    assert launched(*rows) == [6000.0, 6000.0, 6000.0]


def test_the_slope_of_launches_is_one_of_launches() -> None:
    """There is one row of it."""
    assert launched(Sample("dispatch", (), 5000.0)) == pytest.approx([5000 / LAUNCHES])


def test_whole_runs_stay() -> None:
    """A small transfer takes about as long as another, but hardly for the sake of its launch."""
    rows = [Sample("upload", (1024,), 2000.0), Sample("upload", (4096,), 2000.0)]
    assert launched(*rows) == [2000.0, 2000.0]
