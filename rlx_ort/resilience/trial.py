"""The check that a quarantined device must pass: a session of one node, then the parity of the user's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

_EPSILONS = 8


def disagreement(wanted: Sequence[Any], got: Sequence[Any], tolerance: float) -> str:
    """Return how the outputs of a device differ from those of a healthy one, empty if they agree.

    Floats may differ by `tolerance` relative to the largest finite value of the output, or by eight epsilons of their
    dtype if that is more; NaN agrees with NaN. All else must be equal.
    """
    if len(wanted) != len(got):
        return f"{len(got)} outputs in place of {len(wanted)}"
    for index, (left, right) in enumerate(zip(wanted, got, strict=True)):
        found = _difference(left, right, tolerance)
        if found:
            return f"output {index}: {found}"
    return ""


def _difference(wanted: Any, got: Any, tolerance: float) -> str:
    if isinstance(wanted, list) and isinstance(got, list):
        return disagreement(wanted, got, tolerance)
    if not (isinstance(wanted, np.ndarray) and isinstance(got, np.ndarray)):
        return "" if wanted == got else "the values differ"
    if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
        return f"{got.dtype}{list(got.shape)} in place of {wanted.dtype}{list(wanted.shape)}"
    try:
        epsilon = float(ml_dtypes.finfo(wanted.dtype).eps)  # type: ignore[no-untyped-call]
    except ValueError:  # no float
        return "" if np.array_equal(wanted, got) else "the values differ"
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    left, right = wanted.astype(wide), got.astype(wide)
    finite = np.abs(left[np.isfinite(left)])
    allowed = max(tolerance, _EPSILONS * epsilon) * (float(finite.max()) if finite.size else 0.0)
    if np.isclose(right, left, rtol=0.0, atol=allowed, equal_nan=True).all():
        return ""
    with np.errstate(invalid="ignore"):
        largest = float(np.nanmax(np.abs(right - left), initial=0.0))
    strange = int(np.count_nonzero(np.isnan(left) != np.isnan(right)))
    return f"differs by up to {largest:.3g}, {allowed:.3g} allowed" + (f"; {strange} values are NaN" if strange else "")
