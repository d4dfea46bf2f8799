"""`MeasuredRows`: the rows of a calibration while it goes on, and which of them a disturbed host has spoilt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rlx_ort.calibration.pace import Pace
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Timed

__all__ = ["MeasuredRows"]

_Key = tuple[str, tuple[int, ...], str]
"""Probe, size and dtype of a row."""


class _Pace(NamedTuple):
    """How fast the host was for a row: at worst, its base included, and at the quicker look at its own runs."""

    worst_ns: float
    quicker_ns: float


_UNKNOWN = _Pace(0.0, 0.0)


class MeasuredRows:
    """Collects rows, and keeps the better ones of what is measured twice.

    Args:
        pace: how fast the host is.

    Attributes:
        rows: what was measured so far.
        skipped: probe -> why it has no row, or not all of them.
        pace: how fast the host was and is.
    """

    def __init__(self, pace: Pace) -> None:
        self.rows: list[Sample] = []
        self.skipped: dict[str, str] = {}
        self.pace = pace
        self._paces: dict[_Key, _Pace] = {}

    def add(
        self,
        probe: str,
        size: tuple[int, ...],
        found: Timed | None,
        dtype: str = "f32",
        *,
        base_ns: float = 0.0,
        base_pace_ns: float = 0.0,
        share: int = 1,
        minus_ns: float = 0.0,
    ) -> None:
        """Keep a row: what is left above the base, divided among the links, less what else a link does.

        `base_pace_ns` is how fast the host was when the base was measured.
        """
        if found is None:
            self.skipped[probe] = "the clock stood still"
            return
        ns = max((found.ns - base_ns) / share - minus_ns, 0.0)
        # The spread of the whole run, carried over to the part that is left.
        spread = found.spread * found.ns / max(found.ns - base_ns, found.ns * 0.01)
        self.rows.append(Sample(probe, size, ns, dtype, round(spread, 4), found.repeats))
        self._paces[probe, size, dtype] = _Pace(max(found.pace_ns, base_pace_ns), found.quicker_pace_ns)

    def of(self, probe: str, size: tuple[int, ...] = ()) -> float:
        """Return what a probe measured at a size, or at any; 0 when it has no such row."""
        rows = [row for row in self.rows if row.probe == probe and row.size in (size, ())]
        return rows[0].ns if rows else 0.0

    def disturbed(self, probe: str, size: tuple[int, ...], label: str = "f32") -> bool:
        """Return whether a row's runs were far apart, or the host was slower meanwhile than it usually is."""
        return self._paces.get((probe, size, label), _UNKNOWN).worst_ns > self.pace.limit_ns

    def slower(self, row: Sample) -> float:
        """Return how many times as long as usual the host took while a row's own runs were timed; 1 if undisturbed."""
        pace_ns, usual_ns = self._paces.get(_key(row), _UNKNOWN).quicker_ns, self.pace.usual_ns
        return pace_ns / usual_ns if usual_ns > 0 and pace_ns > self.pace.limit_ns else 1.0

    def worst(self, probe: str, sizes: Iterable[tuple[int, ...]], label: str) -> float:
        """Return how far the worst of some rows was disturbed, as a share of its time; 0 where none was."""
        limit_ns, wanted = self.pace.limit_ns, {(probe, size, label) for size in sizes}
        worst = 0.0
        for row in self.rows:
            key = _key(row)
            if key in wanted and self.disturbed(*key):
                slower = self._paces[key].worst_ns / limit_ns - 1.0  # infinite where only the spread tells
                worst = max(worst, row.spread, slower if math.isfinite(slower) else 0.0)
        return worst

    def once_more(self, measure: Callable[[], object], *, quickest: bool = False, mean: bool = False) -> None:
        """Measure what has rows already, and keep the better of the two rows of each size.

        A row from an undisturbed host is better than one from a disturbed host, whose base may have been too slow, and
        else the quicker one is: what else runs on a machine only ever makes a device slower. With `quickest`, for rows
        of which the base is a small part, the quicker one is better in any case. With `mean` neither is better, since
        what differs is the session that they come from: their geometric mean is kept.
        """
        count, skipped, paces = len(self.rows), dict(self.skipped), dict(self._paces)
        worse = set() if quickest else {key for key in paces if self.disturbed(*key)}
        try:
            measure()
        finally:
            found = {_key(row): row for row in self.rows[count:]}
            del self.rows[count:]
            self.skipped = skipped  # nothing is missing that has a row already
        for at, row in enumerate(self.rows):
            key = _key(row)
            other = found.get(key)
            if other is None:
                continue
            if mean and min(row.ns, other.ns) > 0:
                self.rows[at] = dataclasses.replace(row, ns=math.sqrt(row.ns * other.ns))
                continue
            steadier = key in worse and not self.disturbed(*key)
            if 0 < other.ns < row.ns or (steadier and other.ns > 0):
                self.rows[at] = other
            else:
                self._paces[key] = paces.get(key, _UNKNOWN)


def _key(row: Sample) -> _Key:
    return row.probe, row.size, row.dtype
