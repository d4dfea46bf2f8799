"""The comparison of two arrays within a tolerance, for every part of the package that judges a result."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt


def is_exact(dtype: np.dtype[Any]) -> bool:
    """Return whether elements of a dtype have no rounding: integers, of 4 bits too, bools and text."""
    return dtype.kind in "biuOUS" or "int" in dtype.name


def epsilon_of(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next float of a dtype; 0 where values are exact."""
    return 0.0 if is_exact(dtype) else float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]  # of ml_dtypes


def relative_error(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return how far an array is from the expected one; infinity if its shape or dtype differs.

    Floats: the largest absolute difference over the largest absolute finite value expected, which is how errors of sums
    grow, computed in float64. NaN must be in the same places, and infinities too, with the same sign; neither counts
    for the scale. Exact values: the share of elements that differ.
    """
    got, want = np.asarray(actual), np.asarray(expected)
    text = got.dtype.kind in "OUS" and want.dtype.kind in "OUS"  # the width of a text's dtype says nothing
    if got.shape != want.shape or not (text or got.dtype == want.dtype):
        return math.inf
    if not want.size:
        return 0.0
    if is_exact(want.dtype):
        return float(np.mean(got != want))
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    usual = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), usual) or not np.array_equal(got[~usual], want[~usual], equal_nan=True):
        return math.inf
    if not usual.any():
        return 0.0
    with np.errstate(over="ignore"):  # an infinite difference is one
        scale = float(np.max(np.abs(want[usual])))
        difference = float(np.max(np.abs(got[usual] - want[usual])))
    if not difference:
        return 0.0
    return difference / scale if scale else math.inf


def agree(actual: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = 0.0, *, epsilons: int = 0) -> bool:
    """Return whether the `relative_error` of an array is within a tolerance.

    `epsilons` roundings of the dtype are allowed where that is more. Exact values must be equal.
    """
    error = relative_error(actual, expected)
    dtype = np.asarray(expected).dtype
    return error == 0 if is_exact(dtype) else error <= max(tolerance, epsilons * epsilon_of(dtype))
