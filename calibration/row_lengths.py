"""`RowLengths`: what an operator over rows takes more or less when its rows are shorter or longer than usual."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

from rlx_ort.calibration.tables import Curve

__all__ = ["USUAL", "RowLengths"]

USUAL = 256
"""The elements of a row in the rows of `op:NAME`."""


class RowLengths:
    """The factor between rows of a length and rows of the usual length, for as many elements.

    A kernel that costs by the row takes less for as many elements in longer rows, as layer norm does on WebGPU in
    software. Between the measured lengths the factor is a power of the length, beyond them it stays; the same goes
    for the number of elements.

    Args:
        rows: (elements, row) -> ns.
        usual: elements -> ns, of rows of the usual length.
    """

    __slots__ = ("_factors", "_lengths", "_ranges", "_usual")

    def __init__(self, rows: Mapping[tuple[int, int], float], usual: Mapping[int, float]) -> None:
        self._usual = Curve(usual.items())
        self._factors: dict[float, Curve] = {}
        self._ranges: dict[float, tuple[int, int]] = {}
        for length in {row for _, row in rows}:
            points = {elements: ns for (elements, row), ns in rows.items() if row == length}
            self._factors[math.log(length)] = Curve(points.items())
            self._ranges[math.log(length)] = min(points), max(points)
        self._lengths = sorted({*self._factors, math.log(USUAL)})

    def __call__(self, elements: float, row: float) -> float:
        """Return the factor."""
        x = math.log(max(row, 1.0))
        if x <= self._lengths[0]:
            return math.exp(self._at(self._lengths[0], elements))
        if x >= self._lengths[-1]:
            return math.exp(self._at(self._lengths[-1], elements))
        at = bisect.bisect_right(self._lengths, x)
        low, high = self._lengths[at - 1], self._lengths[at]
        share = (x - low) / (high - low)
        return math.exp((1 - share) * self._at(low, elements) + share * self._at(high, elements))

    def _at(self, length: float, elements: float) -> float:
        """Return the logarithm of the factor at a measured length."""
        if length not in self._factors:
            return 0.0
        least, most = self._ranges[length]
        elements = min(max(elements, least), most)
        return math.log(self._factors[length](elements) / self._usual(elements))
