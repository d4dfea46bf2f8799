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

    A kernel that hands out its rows one by one takes about as long for as many rows, however long they are, as layer
    norm does on a CPU of 16 cores (70 to 90 ns a row, from 64 to 1024 elements). So lengths are compared for as many
    rows: between the measured ones the time is a power of the length, beyond them the factor stays. Where there are
    more rows than were measured, it is to rows of the usual length as for the most that were, but never grows faster
    than their number: rows of the usual length are measured while they outgrow the caches, where time rises at once.

    Args:
        rows: (elements, row) -> ns.
        usual: elements -> ns, of rows of the usual length.
    """

    __slots__ = ("_curves", "_lengths", "_most", "_usual")

    def __init__(self, rows: Mapping[tuple[int, int], float], usual: Mapping[int, float]) -> None:
        self._usual = Curve(usual.items())
        self._curves: dict[float, Curve] = {math.log(USUAL): self._usual}
        self._most: dict[float, tuple[int, int]] = {math.log(USUAL): (min(usual), max(usual))}
        for length in {row for _, row in rows}:
            points = {elements: ns for (elements, row), ns in rows.items() if row == length}
            self._curves[math.log(length)] = Curve(points.items())
            self._most[math.log(length)] = min(points), max(points)
        self._lengths = sorted(self._curves)

    def __call__(self, elements: float, row: float) -> float:
        """Return the factor."""
        x = min(max(math.log(max(row, 1.0)), self._lengths[0]), self._lengths[-1])
        count = math.log(max(elements, 1.0)) - x  # the logarithm of the number of rows
        at = bisect.bisect_right(self._lengths, x)
        low, high = self._lengths[at - 1], self._lengths[min(at, len(self._lengths) - 1)]
        share = (x - low) / (high - low) if high > low else 0.0
        ns = (1 - share) * self._at(low, count) + share * self._at(high, count)
        return math.exp(ns) / self._usual(elements)

    def _at(self, length: float, count: float) -> float:
        """Return the logarithm of the time of so many rows of a measured length, both as logarithms.

        Where as many were not measured, it is to rows of the usual length as where they were last.
        """
        least, most = self._most[length]
        inside = min(max(count, math.log(least) - length), math.log(most) - length)
        usual = math.log(USUAL)
        ns = math.log(self._curves[length](math.exp(inside + length)))
        more = math.log(self._usual(math.exp(count + usual)) / self._usual(math.exp(inside + usual)))
        return ns + (min(more, count - inside) if count > inside else more)
