"""Large copies by several threads."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.providers import workers
from rlx_ort.providers.workers import fill


@pytest.mark.parametrize("shape", [(3,), (5, 1_000_003), (2_500_000, 2), (0, 4)])
def test_a_copy_is_the_array_whatever_its_size(shape: tuple[int, ...]) -> None:
    """Sizes that four threads do not share evenly as well."""
    array = np.random.default_rng(0).random(shape, np.float32)
    place = np.zeros(shape, np.float32)
    fill(place, array)
    np.testing.assert_array_equal(place, array)


def test_an_array_that_is_not_contiguous_is_copied_in_its_order() -> None:
    """As a caller's transposed picture is."""
    array = np.random.default_rng(0).random((2000, 1500), np.float32).T
    place = np.zeros(array.shape, np.float32)
    fill(place, array)
    np.testing.assert_array_equal(place, array)


def test_copies_of_several_callers_do_not_mix() -> None:
    """They share the threads."""
    callers = workers.Workers(4, "test")
    arrays = [np.full(2_000_000, number, np.float32) for number in range(12)]
    places = [np.zeros_like(array) for array in arrays]
    copies = [
        callers.submit(lambda place=place, array=array: fill(place, array))  # type: ignore[misc]
        for place, array in zip(places, arrays, strict=True)
    ]
    for copy in copies:
        copy.result()
    assert [(place == number).all() for number, place in enumerate(places)] == [True] * 12
