"""`OperatorTable`: the time of an operator by its elements, from its own sizes and the finer ones of the addition."""

from __future__ import annotations

from collections.abc import Mapping

from rlx_ort.calibration.tables import Curve

__all__ = ["OperatorTable"]

_COMPUTING = 4  # times an addition: an operator that takes longer is not held up by memory


class OperatorTable:
    """Time over elements.

    Where tensors outgrow a cache, time rises at once; additions are measured at enough sizes to show it, and bend the
    straight line between an operator's sizes. An operator that is far slower than the addition computes, and is not
    bent. One that was measured at one size goes as the addition does below it. Beyond its largest size, what is about
    as quick as an addition there moves memory, and grows as the addition does, which was measured furthest; what
    computes grows in proportion. An operator of one tensor, which it changes in place, grows as the addition of half as
    many elements: that keeps as much in the caches.

    Args:
        curve: the operator's time over its elements.
        sizes: the elements it was measured at.
        additions: elements -> ns of the addition.
        addition: the addition's time over its elements.
        kept: what it keeps in the caches, as a share of what an addition of as many elements does.
    """

    __slots__ = ("_added_largest", "_addition", "_coarse", "_curve", "_kept", "_largest", "_moves", "_once")

    def __init__(
        self,
        curve: Curve,
        sizes: frozenset[int],
        additions: Mapping[int, float],
        addition: Curve,
        kept: float = 1.0,
    ) -> None:
        self._curve, self._addition, self._kept = curve, addition, kept
        self._largest = max(sizes)
        self._moves = _COMPUTING * addition(self._largest)
        self._added_largest = addition(kept * self._largest)
        # None for the addition itself, and where its sizes are not among the addition's.
        bends = curve is not addition and sizes <= additions.keys()
        self._coarse = Curve((size, ns) for size, ns in additions.items() if size in sizes) if bends else None
        self._once = curve is not addition and len(sizes) == 1

    def __call__(self, elements: float) -> float:
        """Return the time for so many elements, in ns."""
        largest = self._largest
        inside = min(elements, largest)
        ns = self._curve(inside)
        if self._once:
            ns *= self._addition(inside) / self._addition(largest)
        elif self._coarse is not None:
            added = self._addition(inside)
            if ns <= _COMPUTING * added:
                ns *= added / self._coarse(inside)
        if elements <= largest:
            return ns
        in_proportion = elements / largest
        if ns > self._moves:
            return ns * in_proportion
        return ns * min(self._addition(self._kept * elements) / self._added_largest, in_proportion)
