"""Takes the host's slowness out of what an accelerator took, where launches are what takes the time.

A while in which the host's core is slow may last as long as a calibration. What an accelerator computes is then as
quick as ever, what is launched to it is not. Beside an H200, in some 90 such moments of 22 s, the loop of `Pace` took
1.64 times its usual time, a chain of 64 small additions on CUDA 1.51 times and one of small products 1.54 times, but
additions of 16 MB 1.14 times, whose launches are hidden behind the ones before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from rlx_ort.calibration.profile import Sample

__all__ = ["launched_undisturbed"]

_LAUNCHES = 0.8  # the power of the loop's time that launches follow: 0.77 for additions, 0.83 for products
_FLAT = 1.15  # times as long at most for twice the work or more: what takes the time is the launch
_MORE = 2.0
_WHOLE_RUNS = frozenset({"roundtrip", "tensor_in", "tensor_out", "upload", "readback", "alone", "after"})
"""Not of chains: launches are only a part of them, and they are the quickest of several visits as it is."""


def launched_undisturbed(rows: Sequence[Sample], slower: Callable[[Sample], float]) -> list[Sample]:
    """Return rows of an accelerator as they would be, had the host been undisturbed.

    A row is taken to wait for launches where one of the same probe with at least twice the work takes about as long,
    or one with at most half the work does not take less; so does the slope of launches. The others stay: what is
    computed takes the time there.

    Args:
        rows: what was measured in chains on one device.
        slower: how many times as long as undisturbed the host took while a row was measured, 1 at least.
    """
    quickest = [dataclasses.replace(row, ns=row.ns / max(slower(row), 1.0) ** _LAUNCHES) for row in rows]
    alike: dict[tuple[str, str], list[Sample]] = {}
    for row in quickest:
        alike.setdefault((row.probe, row.dtype), []).append(row)
    return [
        quick if quick.ns < row.ns and _waits(quick, alike[row.probe, row.dtype]) else row
        for row, quick in zip(rows, quickest, strict=True)
    ]


def _waits(row: Sample, others: Sequence[Sample]) -> bool:
    """Return whether a row takes as long as one of others that has far more work, or far less."""
    if row.probe == "dispatch":
        return True
    return row.probe not in _WHOLE_RUNS and any(
        (_more(other.size, row.size) and other.ns <= _FLAT * row.ns)
        or (_more(row.size, other.size) and row.ns <= _FLAT * other.ns)
        for other in others
    )


def _more(size: tuple[int, ...], than: tuple[int, ...]) -> bool:
    """Return whether a size is far more work: none of its sides is smaller, and they make twice as much together."""
    sides = all(one >= other for one, other in zip(size, than, strict=True))
    return sides and math.prod(size) >= _MORE * math.prod(than)
