"""ONNX Runtime's allocator and its memory patterns, as far as the memory that a run takes depends on them.

The first run with new input sizes takes each tensor from the arena, later ones a block for all. The arena keeps both.
"""

from __future__ import annotations

import bisect

import numpy as np

_UNIT = 256
_FIRST_REGION = 1 << 20
_LARGEST_GROWTH = 1 << 30
_LARGEST_WASTE = 128 << 20
_PAGE = 1 << 16
_BINS = 21
_NOTHING = (0, 0, 0)


class Arena:
    """The arena of ONNX Runtime (core/framework/bfc_arena.cc): regions of doubling size, and the best fit within them.

    With `exact`, a region is as large as the request that needs it.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._next = _FIRST_REGION
        self._regions: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []  # the pages that were used
        self._free: list[tuple[int, int, int]] = []  # bytes, region, offset
        self.reserved = 0  # bytes of all regions

    @property
    def touched(self) -> int:
        """The bytes of pages that were ever used, which host memory has to hold."""
        return sum(int(np.count_nonzero(pages)) for pages in self._regions) * _PAGE

    def take(self, nbytes: int) -> tuple[int, int, int]:
        """Allocate memory, and return its place for `give_back`."""
        if not nbytes:
            return _NOTHING
        needed = -(-nbytes // _UNIT) * _UNIT
        fitting = [place for place in self._free if place[0] >= needed]
        if fitting:
            found = min(fitting, key=lambda place: (min((place[0] // _UNIT).bit_length(), _BINS), place))
            self._free.remove(found)
        else:
            found = (self._extended(needed), len(self._regions) - 1, 0)
        size, region, offset = found
        if size >= 2 * needed or size - needed >= _LARGEST_WASTE:
            self._free.append((size - needed, region, offset + needed))
            size = needed
        self._regions[region][offset // _PAGE : -(-(offset + nbytes) // _PAGE)] = True
        return size, region, offset

    def give_back(self, place: tuple[int, int, int]) -> None:
        """Free memory, and join it with the free parts beside it."""
        if place == _NOTHING:
            return
        size, region, offset = place
        for other in [each for each in self._free if each[1] == region]:
            if other[2] + other[0] == offset or other[2] == offset + size:
                self._free.remove(other)
                size, offset = size + other[0], min(offset, other[2])
        self._free.append((size, region, offset))

    def _extended(self, needed: int) -> int:
        """Add a region and return its size."""
        size, before = needed, self._next
        if not self._exact:
            while needed > self._next:
                self._next *= 2
            size = self._next
            if size == before < _LARGEST_GROWTH:
                self._next *= 2
        self._regions.append(np.zeros(-(-size // _PAGE) + 1, np.bool_))
        self.reserved += size
        return size


class Pattern:
    """The plan of one block for all tensors of a run (core/framework/mem_pattern_planner.h), of `peak` bytes."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # offset, bytes
        self.peak = 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """Find a place, the tightest gap that fits or the end, and return it for `give_back`."""
        end, best = 0, None
        for offset, size in self._taken:
            gap = offset - end
            if gap >= nbytes and (best is None or gap < best[0]):
                best = (gap, end)
            end = max(end, offset + size)
        place = (end if best is None else best[1], nbytes)
        bisect.insort(self._taken, place)
        self.peak = max(self.peak, sum(place))
        return place

    def give_back(self, place: tuple[int, int]) -> None:
        """Free a place."""
        self._taken.remove(place)
