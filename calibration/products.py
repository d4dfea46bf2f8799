"""`ProductTable`: the time of a matrix product of any shape, from squares, a few skewed shapes and cold weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlx_ort.calibration.tables import Curve, Grid

__all__ = ["ProductTable"]

_F32 = 4


class ProductTable:
    """Time over (m, k, n).

    A product with a (k, n) weight is priced as one with a square weight of as many elements, which does the same
    work and reads as much. What a skewed weight takes more or less was measured at some skews, and grows with the
    logarithm of the skew, up to the most that was measured.

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
        found: dict[float, list[float]] = {}
        for (m, k, n), ns in skewed.items():
            slope = math.log(max(ns, 20.0) / self._squares(m, math.sqrt(k * n))) / abs(math.log(n / k))
            found.setdefault(math.log(m), []).append(slope)
        self._skews = sorted((at, sum(slopes) / len(slopes)) for at, slopes in found.items())

    def __call__(self, m: float, k: float, n: float, resident: int = 0) -> float:
        """Return the time of a product, in ns; `resident` is what all weights of the graph take, in bytes."""
        skew = min(abs(math.log(n / k)), self._most_skewed)
        ns = self._squares(m, math.sqrt(k * n)) * math.exp(self._skew(m) * skew)
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

    def _skew(self, m: float) -> float:
        """Return the logarithm of the factor for each e-fold of skew, between the rows it was measured at."""
        if not self._skews:
            return 0.0
        x = math.log(max(m, 1.0))
        low = max((pair for pair in self._skews if pair[0] <= x), default=self._skews[0])
        high = min((pair for pair in self._skews if pair[0] >= x), default=self._skews[-1])
        if high[0] <= low[0]:
            return low[1]
        return low[1] + (high[1] - low[1]) * (x - low[0]) / (high[0] - low[0])
