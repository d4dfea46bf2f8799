"""`ProductTable`: the time of a matrix product of any shape, from squares, a few skewed shapes and cold weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlx_ort.calibration.tables import Curve, Grid

__all__ = ["ProductTable"]

_F32 = 4
_NEAR = 0.05  # squared logarithms: a size this close to a measured one is taken to be that one


class ProductTable:
    """Time over (m, k, n).

    A product with a (k, n) weight is priced as one with a square weight of as many elements, which does the same
    work and reads as much. What a skewed weight takes more or less was measured at some sizes, of which the nearest
    count most, and grows with the logarithm of the skew, up to the most that was measured.

    Args:
        rows: (m, k, n) -> ns, with a weight that stays in the caches.
        cold: bytes of all weights -> ns of (1, 1024) by (1024, 1024), when as many bytes of weights take turns.
    """

    __slots__ = ("_cold", "_coldest", "_most_skewed", "_skews", "_squares", "_warmest")

    def __init__(self, rows: Mapping[tuple[int, int, int], float], cold: Mapping[int, float] | None = None) -> None:
        squares = {(float(m), float(k)): ns for (m, k, n), ns in rows.items() if k == n}
        skewed = {size: ns for size, ns in rows.items() if size[1] != size[2]}
        if not squares:
            squares = {(float(m), math.sqrt(k * n)): ns for (m, k, n), ns in skewed.items()}
            skewed = {}
        self._squares = Grid(squares, (1, 2))
        self._cold = Curve(cold.items()) if cold and len(cold) > 1 else None
        self._warmest, self._coldest = (min(cold), max(cold)) if cold else (0, 0)
        self._most_skewed = max((abs(math.log(n / k)) for _, k, n in skewed), default=0.0)
        self._skews: list[tuple[float, float, float]] = []  # logarithms of rows, side, and the factor an e-fold of skew
        for (m, k, n), ns in skewed.items():
            side = math.sqrt(k * n)
            slope = math.log(max(ns, 20.0) / self._squares(m, side)) / abs(math.log(n / k))
            self._skews.append((math.log(m), math.log(side), slope))

    def __call__(self, m: float, k: float, n: float, resident: int = 0) -> float:
        """Return the time of a product, in ns; `resident` is what all weights of the graph take, in bytes."""
        skew, side = min(abs(math.log(n / k)), self._most_skewed), math.sqrt(k * n)
        ns = self._squares(m, side) * (math.exp(self._skew(m, side) * skew) if skew > 0.0 else 1.0)
        nbytes = k * n * _F32
        if self._cold is None or resident <= max(nbytes, self._warmest):
            return ns
        # All of it where the weight is what takes the time, a share where computing hides it.
        warm_ns = self._squares(1, math.sqrt(k * n))
        # Beyond the most that was measured it stays: a weight that comes from memory does not get colder. Nor does one
        # get warmer below the least.
        warm = self._cold(max(nbytes, self._warmest))
        more = max(self._cold(min(resident, self._coldest)) / max(warm, 1.0) - 1.0, 0.0)
        return ns + more * warm_ns * min(1.0, warm_ns / max(ns, 1.0))

    def _skew(self, m: float, side: float) -> float:
        """Return the logarithm of the factor for each e-fold of skew; the sizes nearest to this one count most."""
        rows, breadth = math.log(max(m, 1.0)), math.log(max(side, 1.0))
        total = weights = 0.0
        for its_rows, its_breadth, slope in self._skews:
            weight = 1.0 / ((rows - its_rows) ** 2 + (breadth - its_breadth) ** 2 + _NEAR)
            total += weight * slope
            weights += weight
        return total / weights if weights else 0.0
