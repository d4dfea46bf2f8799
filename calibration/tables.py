"""Measured times between the sizes they were measured at: logarithms of times over logarithms of sizes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

__all__ = ["Curve", "Grid"]

Size = TypeVar("Size", bound=tuple[float, ...])
_FLOOR_NS = 20.0  # a time below this is noise of a subtraction
_STEADY = 0.05  # a smaller spread does not make a time more trustworthy


class Curve:
    """Time over one size.

    Between points the time is a power of the size. Above them it grows with the size, below them it falls as
    between the two smallest, but never faster than the size. A larger size never takes less time: points that say so
    are replaced by their mean, in which each counts as much as its spread lets it.

    Args:
        points: size and ns.
        spreads: size -> the spread of its time, as a share; points without one count as steady.
    """

    __slots__ = ("_low_slope", "_x", "_y")

    def __init__(
        self, points: Iterable[tuple[float, float]], spreads: Mapping[float, float] = MappingProxyType({})
    ) -> None:
        merged: dict[float, list[tuple[float, float]]] = {}
        for size, ns in points:
            trust = 1.0 / (spreads.get(size, 0.0) ** 2 + _STEADY**2)
            merged.setdefault(math.log(max(size, 1.0)), []).append((math.log(max(ns, _FLOOR_NS)), trust))
        self._x = sorted(merged)
        self._y = _rising([_pooled(merged[x]) for x in self._x])
        slope = (self._y[1] - self._y[0]) / (self._x[1] - self._x[0]) if len(self._x) > 1 else 0.0
        self._low_slope = min(max(slope, 0.0), 1.0)

    def __call__(self, size: float) -> float:
        """Return the time at a size, in ns."""
        xs, ys, x = self._x, self._y, math.log(max(size, 1.0))
        at = bisect.bisect_right(xs, x)
        if at == 0:
            return math.exp(ys[0] + self._low_slope * (x - xs[0]))
        low_x, low_y = xs[at - 1], ys[at - 1]
        if at == len(xs):
            return math.exp(low_y + (x - low_x))
        return math.exp(low_y + (x - low_x) / (xs[at] - low_x) * (ys[at] - low_y))


class Grid:
    """Time over several sizes, measured at some points of a grid.

    The work is the product of the sizes, each to its power. Inside, logarithms are interpolated linearly along each
    axis. Above the grid the time grows half as between the two largest, half with the work: what was held up by
    launches so far may be by its work there. Below, it falls as between the two smallest, but never faster than the
    work. Along an axis with one point, it grows with the work, and falls half as fast. Points of the grid that were
    not measured are filled from those beside them along an axis, and at its edges from the nearest measured one: less
    work takes as long, more work at least as long and at most as much longer, at the best rate that was measured.

    Args:
        points: sizes -> ns.
        powers: how the work grows with each size; in proportion where nothing is said.
    """

    __slots__ = ("_axes", "_powers", "_values")

    def __init__(self, points: Mapping[Size, float], powers: Sequence[float] = ()) -> None:
        known = {
            tuple(math.log(max(side, 1)) for side in size): math.log(max(ns, _FLOOR_NS)) for size, ns in points.items()
        }
        rank = len(next(iter(known)))
        self._powers = tuple(powers) or (1.0,) * rank
        self._axes = [sorted({point[axis] for point in known}) for axis in range(rank)]
        self._values = {
            point: known[point] if point in known else _filled(point, known, self._powers)
            for point in itertools.product(*self._axes)
        }

    def __call__(self, *size: float) -> float:
        """Return the time at a size, in ns."""
        return math.exp(self._at((), [math.log(max(side, 1.0)) for side in size]))

    def _at(self, fixed: tuple[float, ...], left: list[float]) -> float:
        """Interpolate along the axes that are left, the others being fixed at points of the grid."""
        if not left:
            return self._values[fixed]
        axis, x, rest = self._axes[len(fixed)], left[0], left[1:]
        power = self._powers[len(fixed)]
        if len(axis) == 1:
            return self._at((*fixed, axis[0]), rest) + (power if x > axis[0] else power / 2) * (x - axis[0])
        at = min(max(bisect.bisect_right(axis, x), 1), len(axis) - 1)
        low = self._at((*fixed, axis[at - 1]), rest)
        if x == axis[at - 1]:
            return low
        high = self._at((*fixed, axis[at]), rest)
        slope = (high - low) / (axis[at] - axis[at - 1])
        if x > axis[-1]:
            return high + (min(max(slope, 0.0), power) + power) / 2 * (x - axis[-1])
        if x < axis[0]:
            slope = min(max(slope, 0.0), power)
        return low + slope * (x - axis[at - 1])


def _filled(point: tuple[float, ...], known: Mapping[tuple[float, ...], float], powers: Sequence[float]) -> float:
    between = [pair for axis in range(len(point)) if (pair := _between(point, known, axis)) is not None]
    if between:  # on the axis where the two are closest
        return min(between)[1]

    def distance(other: tuple[float, ...]) -> float:
        return sum(abs(mine - its) for mine, its in zip(point, other, strict=True))

    def work(of: tuple[float, ...]) -> float:
        return sum(power * side for power, side in zip(powers, of, strict=True))

    nearest = min(known, key=lambda other: (distance(other), -work(other)))
    best = min(ns - work(other) for other, ns in known.items())
    return max(known[nearest], min(work(point) + best, known[nearest] + work(point) - work(nearest)))


def _between(
    point: tuple[float, ...], known: Mapping[tuple[float, ...], float], axis: int
) -> tuple[float, float] | None:
    """Return how far apart a point's measured neighbours on both sides of it along an axis are, and what lies there.

    None where there are none on one of the sides.
    """
    x = point[axis]
    line = [other for other in known if other[:axis] == point[:axis] and other[axis + 1 :] == point[axis + 1 :]]
    low = max((other for other in line if other[axis] < x), default=None)
    high = min((other for other in line if other[axis] > x), default=None)
    if low is None or high is None:
        return None
    apart = high[axis] - low[axis]
    return apart, known[low] + (known[high] - known[low]) * (x - low[axis]) / apart


def _rising(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return the closest sequence that never falls, of values with their weights: neighbours that do are pooled."""
    blocks: list[tuple[tuple[float, float], int]] = []
    for point in points:
        block, count = point, 1
        while blocks and blocks[-1][0][0] > block[0]:
            before, size = blocks.pop()
            block, count = _pooled([before, block]), count + size
        blocks.append((block, count))
    return [value for (value, _), count in blocks for _ in range(count)]


def _pooled(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of values with their weights, and the sum of the weights."""
    total = sum(weight for _, weight in points)
    return sum(value * weight for value, weight in points) / total, total
