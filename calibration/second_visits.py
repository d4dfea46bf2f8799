"""Measures a second time, seconds later, what may have met a disturbance, and keeps the better of both.

What else runs on the machine slows a device down for a second or so at a time (an H200 that was shared: by 1.5 for
launches, by 1.2 to 1.8 for the CPU), which is all of the time that a series takes. A disturbance of the core that
launches shows in the pace, one of other cores in the spread at best. What shows in neither is that a CPU's products
take 1.6 times as long in one session as in the next (26 and 42 us for 2 rows by a weight of 9 MB, on 16 cores): those
are measured in another session in any case, and the quicker one counts, or the mean of both where most sessions are the
slower ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from rlx_ort.calibration import first_products, probe_given, probe_overheads
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.series import Series
from rlx_ort.device import Device

__all__ = ["visit", "visit_disturbed"]

_FEW_ROWS = 128
_SPILT_SIDE = 2560
"""The side from which on a weight lies beyond the cores' own caches, where it is a matter of luck and of who else uses
the host what a session takes: 16 cores took 36 to 97 us by 2304 x 2304, 48 in one session of five and 89 in the others,
and 52 to 136 by 2560 x 2560. By 2048 x 2048 it was 24 to 67."""


def visit(prober: Prober, every: Sequence[Series], deadline_ns: float) -> None:
    """Measure once more the products of a CPU, then what was measured on a disturbed host, then everything."""
    rest = [series for series in every if not series.once]
    if prober.device.kind == Device.CPU.kind:
        prober.frames.forget(prober.pace.limit_ns)
        prober.once_more(lambda: first_products.measure(prober, deadline_ns, again=True))
        for series in rest:
            if _is_product(series):
                spilt = _side(series) >= _SPILT_SIDE
                prober.revisit(_small(series), deadline_ns, quickest=not spilt, mean=spilt)
        rest = [series for series in rest if not _is_product(series)]
    else:
        prober.once_more(lambda: first_products.measure(prober, deadline_ns, again=True))
    if any(prober.disturbed(row.probe, row.size) for row in prober.rows if row.probe in ("upload", "readback")):
        prober.once_more(lambda: probe_overheads.transfers(prober, deadline_ns))
    if any(prober.disturbed(row.probe, row.size) for row in prober.rows if row.probe in probe_given.PROBES):
        prober.once_more(lambda: probe_given.measure(prober, deadline_ns))
    visit_disturbed(prober, every, deadline_ns)
    for series in rest:
        prober.revisit(series, deadline_ns)


def visit_disturbed(prober: Prober, every: Sequence[Series], deadline_ns: float) -> None:
    """Measure once more what was measured on a disturbed host, the worst first."""
    prober.frames.forget(prober.pace.limit_ns)
    for series in sorted(every, key=prober.severity, reverse=True):
        prober.revisit(series, deadline_ns, disturbed=True)


def _small(series: Series) -> Series:
    """Return the products whose time depends on where the weight lies; with more rows, computing takes it."""
    return dataclasses.replace(series, points=tuple(point for point in series.points if point.size[0] <= _FEW_ROWS))


def _side(series: Series) -> int:
    return max(math.isqrt(point.size[1] * point.size[2]) for point in series.points)


def _is_product(series: Series) -> bool:
    return series.probe == "gemm" and series.label == "f32"
