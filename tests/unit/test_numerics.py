"""How far an array is from what it must be."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from rlx_ort.numerics import agree, relative_error

WANT = np.array([1.0, -4.0, 0.0], np.float32)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (WANT, 0.0),
        (WANT + np.float32(1), 0.25),
        (WANT[:2], math.inf),
        (WANT.astype(np.float64), math.inf),
        (np.array([1.0, -4.0, np.nan], np.float32), math.inf),
    ],
    ids=["equal", "a quarter of the largest", "shape", "dtype", "nan"],
)
def test_floats_are_measured_against_the_largest(found: np.ndarray, error: float) -> None:
    """The largest difference over the largest expected value; another shape, dtype or NaN is infinitely far."""
    assert relative_error(found, WANT) == error


def test_infinities_must_be_in_the_same_places() -> None:
    """The same infinities and NaN are right, and the finite values between are compared."""
    want = np.array([np.inf, np.nan, 2.0], np.float32)
    assert relative_error(want.copy(), want) == 0
    assert relative_error(np.array([np.inf, np.nan, 1.0], np.float32), want) == 0.5
    assert relative_error(np.array([-np.inf, np.nan, 2.0], np.float32), want) == math.inf


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, ml_dtypes.int4])
def test_whole_numbers_count_by_their_share(dtype: type) -> None:
    """One of four that differs is a quarter."""
    want = np.array([0, 1, 1, 0]).astype(dtype)
    assert relative_error(np.array([0, 1, 1, 1]).astype(dtype), want) == 0.25


def test_narrow_floats_are_compared_as_numbers() -> None:
    """bfloat16 counts as the numbers it holds."""
    want = np.array([2.0, 4.0]).astype(ml_dtypes.bfloat16)
    assert relative_error(np.array([2.0, 3.0]).astype(ml_dtypes.bfloat16), want) == 0.25


def test_zero_against_zero_is_right_and_against_anything_wrong() -> None:
    """Without a scale only equality is right; an empty output is equal to itself."""
    zero = np.zeros(2, np.float32)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + np.float32(1e-9), zero) == math.inf
    assert relative_error(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)) == 0


def test_an_infinity_hides_no_other_value() -> None:
    """The tolerance is a share of the largest finite value."""
    want = np.array([np.inf, 1.0, 2.0], np.float32)
    assert not agree(np.array([np.inf, 500.0, 2.0], np.float32), want, 1e-3)
    assert agree(np.array([np.inf, 1.001, 2.0], np.float32), want, 1e-3)


def test_roundings_are_counted_in_the_dtype() -> None:
    """Eight roundings of bfloat16 are 2**-4, and an exact value has none."""
    want = np.array([1.0]).astype(ml_dtypes.bfloat16)
    assert agree(np.array([1.0625]).astype(ml_dtypes.bfloat16), want, epsilons=8)
    assert not agree(np.array([1.125]).astype(ml_dtypes.bfloat16), want, epsilons=8)
    assert not agree(np.array([1, 2]), np.array([1, 3]), 0.9, epsilons=8)


def test_text_is_compared_by_its_characters() -> None:
    """Text of another width, in an array of objects or not, is equal if its characters are."""
    assert agree(np.array(["a", "b"], object), np.array(["a", "b"]))
    assert not agree(np.array(["a", "bc"]), np.array(["a", "b"]))
    assert agree(np.str_("abc"), "abc")
