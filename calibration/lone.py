"""`LoneProducts`: what the first product of a run takes, told from its time within a chain."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["LoneProducts"]

_NEAR = 0.05  # squared logarithms: a size this close to a measured one is taken to be that one
_LAUNCH = 1.25  # times as long alone is a launch that is waited for; less is a share, which noise alone may be


class LoneProducts:
    """Time alone over time within a chain.

    On an accelerator a product alone takes longer, since it waits for its launch, which is as long for a large one. On
    a CPU it takes less, since no core has to fetch its rows, or another slice of the weight, from other cores: a share
    of its time. Both are taken from the products that were measured alone, the nearest in size counting most.

    Args:
        alone: (m, k, n) -> ns of a run's only product.
        chained: (m, k, n) -> ns of a product within a chain.
        launched: whether one that takes far longer waits for its launch; if not, all that it takes longer is a share.
        shares: the least and the most of its time within a chain that it may take; what is beyond is noise.
    """

    __slots__ = ("_known", "_launch", "_least", "_most")

    def __init__(
        self,
        alone: Mapping[tuple[int, ...], float],
        chained: Mapping[tuple[int, ...], float],
        *,
        launched: bool = True,
        shares: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        self._launch = _LAUNCH if launched else math.inf
        self._least, self._most = shares
        pairs = [(size, chained.get(size, 0.0), ns) for size, ns in alone.items()]
        self._known = [(_place(*size), before, ns) for size, before, ns in pairs if before > 0 and ns > 0]

    def __call__(self, m: float, k: float, n: float, ns: float) -> float:
        """Return the time alone of a product that takes so many ns within a chain; the same where none was measured."""
        rows, side = _place(m, k, n)
        total = weights = 0.0
        for (its_rows, its_side), before, after in self._known:
            weight = 1.0 / ((rows - its_rows) ** 2 + (side - its_side) ** 2 + _NEAR)
            launched = after > self._launch * before
            share = min(max(after / before, self._least), self._most)
            total += weight * (after - before if launched else ns * (share - 1.0))
            weights += weight
        return ns + total / weights if weights else ns


def _place(m: float, k: float, n: float) -> tuple[float, float]:
    return math.log(max(m, 1.0)), math.log(max(k * n, 1.0)) / 2
