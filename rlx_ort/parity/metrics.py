"""The distance between two outputs, in float64 and block by block, so that a large output costs little memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Difference", "Tolerance", "difference"]

Array: TypeAlias = npt.NDArray[Any]

_BLOCK = 1 << 18  # elements; 2 MiB a float64 temporary


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a value is from a reference. A perfect match has 0, 0, 1, 0 and 0.

    Attributes:
        max_abs: largest |reference - value| among the positions where both are finite.
        relative_l2: L2 norm of the difference over the larger of the two norms; 0 to 2, where 0 is equality.
        cosine: cosine of the angle between the two, as vectors; 1 when both are zero.
        nonfinite: positions where one is NaN or infinite and the other is not the same.
        differing: integers, bools and text only: elements that are not equal; None for floats.
        elements: the number of elements of the reference.
        shapes: both shapes if they differ, in which case nothing else was computed.
    """

    max_abs: float
    relative_l2: float
    cosine: float
    nonfinite: int
    differing: int | None
    elements: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def size(self) -> float:
        """One number to rank by: 0 for equal values, infinity where shapes or non-finite values disagree."""
        if self.shapes is not None or self.nonfinite:
            return math.inf
        if self.differing is not None:
            return self.differing / max(self.elements, 1)
        return self.relative_l2


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What counts as equal. Shapes and non-finite values have to agree under every tolerance.

    Attributes:
        relative_l2: the most `Difference.relative_l2` may be for floats; None leaves it open.
        cosine: the least `Difference.cosine` may be for floats, and the least share of equal elements for integers
            where the arithmetic before them is quantised; None leaves it open, and integers have to be equal.
    """

    relative_l2: float | None = 1e-5
    cosine: float | None = None

    def accepts(self, found: Difference) -> bool:
        """Return whether a difference is within the tolerance."""
        if found.shapes is not None or found.nonfinite:
            return False
        if found.differing is not None:
            least = 1.0 if self.cosine is None else self.cosine
            return found.differing <= (1.0 - least) * found.elements
        within = self.relative_l2 is None or found.relative_l2 <= self.relative_l2
        return within and (self.cosine is None or found.cosine >= self.cosine)

    def __str__(self) -> str:
        parts = [] if self.relative_l2 is None else [f"relative L2 <= {self.relative_l2:g}"]
        parts += [] if self.cosine is None else [f"cosine >= {self.cosine:g}"]
        return ", ".join(parts) or "any difference"


def difference(reference: Array, value: Array) -> Difference:
    """Return how far an array is from a reference of any dtype; dtypes may differ.

    Reads both once (float64: twice, as its squares may overflow) and copies a block at a time.
    """
    if reference.shape != value.shape:
        return Difference(math.inf, math.inf, 0.0, 0, None, reference.size, (reference.shape, value.shape))
    if reference.dtype.kind in "OUS" or value.dtype.kind in "OUS":
        differing = int(np.count_nonzero(reference.astype(np.str_) != value.astype(np.str_)))
        return Difference(float(differing > 0), float(differing > 0), float(not differing), 0, differing, value.size)
    left, right = _flat(reference), _flat(value)
    exact = _is_exact(left) and _is_exact(right)
    scale = _largest(left, right) if np.float64 in (left.dtype, right.dtype) else 1.0
    differing = nonfinite = 0
    max_abs = delta = dot = norm_left = norm_right = 0.0
    for a, b in _blocks(left, right):
        if exact:
            differing += int(np.count_nonzero(a != b))
        x, y = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            nonfinite += int(np.count_nonzero(~finite & ~same))
            x, y = x[finite], y[finite]
        gap = x - y
        if gap.size:
            max_abs = max(max_abs, float(np.abs(gap).max()))
        x, y, gap = x / scale, y / scale, gap / scale
        delta += float(gap @ gap)
        dot += float(x @ y)
        norm_left += float(x @ x)
        norm_right += float(y @ y)
    largest = math.sqrt(max(norm_left, norm_right))
    relative = math.sqrt(delta) / largest if largest else 0.0
    norms = math.sqrt(norm_left) * math.sqrt(norm_right)
    cosine = 1.0 if not delta else min(1.0, dot / norms) if norms else 0.0
    return Difference(max_abs, relative, cosine, nonfinite, differing if exact else None, reference.size)


def _flat(array: Array) -> Array:
    """Return the elements in one row; complex numbers count as two."""
    flat: Array = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _is_exact(array: Array) -> bool:
    return array.dtype.kind in "biu" or "int" in array.dtype.name


def _largest(left: Array, right: Array) -> float:
    """Return the largest finite magnitude of both, 1 if there is none."""
    found = 0.0
    for a, b in _blocks(left, right):
        for block in (np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))):
            found = max(found, float(block[np.isfinite(block)].max(initial=0.0)))
    return found or 1.0


def _blocks(left: Array, right: Array) -> Iterator[tuple[Array, Array]]:
    for start in range(0, left.size, _BLOCK):
        yield left[start : start + _BLOCK], right[start : start + _BLOCK]
