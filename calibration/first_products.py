"""Measures the first product of a run, which takes other times than one that comes after another product.

One that multiplies an input waits for its launch on an accelerator, and on a CPU it is quicker: no core has to fetch
its rows from others that have just written them. One that multiplies what another node has written comes after that
node has waited for every core that read the rows of the last run: on 16 cores beside an H200 an activation of 200 x 256
took 38 us before a product and 6 us without one, a concatenation 52 and 15 us. A product by 256 x 256 and its
activation added 43 us to a run when the rows were an input, 82 us after a concatenation of inputs, and 86 to 125 us
after one of lookups, which are what such a model begins with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.calibration import run_graphs
from rlx_ort.calibration.prober import FAILURES, Prober
from rlx_ort.calibration.timing import Timed
from rlx_ort.device import Device

__all__ = ["PROBES", "measure"]

PROBES = ("alone", "after")

_ALONE = ((1, 256, 256), (1, 1024, 1024))
_ALONE_ON_CPU = ((1, 2048, 2048), (32, 256, 256), (32, 1024, 1024), (128, 512, 512), (128, 256, 1024), (512, 512, 512))
"""Further ones; an accelerator would have to be sent the rows, which takes longer than the product.

A skewed weight takes more time in a chain, where each core fetches rows that others have written, than alone: 100 x 300
by 300 x 1200 came out at 1.2 of its time on 16 cores, with the skew of a chain.
"""
_ALONE_QUICK = ((1, 512, 512), (32, 512, 512))
_AFTER = ((256, (1, 8, 32, 128, 512)), (64, (128,)), (1024, (8, 128)))
"""Sides of weights and the rows that they are multiplied by; engines share a product out by its longer side."""


_LOOKUPS, _TABLE_ROWS = 4, 2048


def measure(prober: Prober, deadline_ns: float, *, again: bool = False) -> None:
    """Measure products of an input and, on a CPU, products of what was looked up and put together.

    Once more, those alone are all measured on a CPU, since what they take depends on the session that they run in, and
    of others those that were measured on a disturbed host.
    """
    begun, hurried = prober.budget.elapsed_ns, prober.hurried
    prober.hurried = False  # a few runs of a session that has just been opened would be the slow ones
    on_cpu = prober.device.kind == Device.CPU.kind
    full = (*_ALONE, *_ALONE_ON_CPU) if on_cpu else _ALONE
    for size in _ALONE_QUICK if prober.quick else full:
        if on_cpu or not again or prober.disturbed("alone", size):
            if again and prober.launched:
                prober.await_calm()
            _alone(prober, size, deadline_ns)
    prober.account("alone", begun)
    if on_cpu and not prober.quick:
        begun = prober.budget.elapsed_ns
        for side, rows in _AFTER:
            wanted = [m for m in rows if not again or prober.disturbed("after", (m, side, side))]
            _after(prober, side, wanted, deadline_ns)
        prober.account("after", begun)
    prober.hurried = hurried


def _alone(prober: Prober, size: tuple[int, int, int], deadline_ns: float) -> None:
    """Measure what a run of one product takes beyond the round trip."""
    prober.rest()
    m, k, n = size
    side = math.isqrt(k * n)
    if prober.of("gemm", (m, side, side)) <= 0 or not _has_time(prober, 1, deadline_ns):
        return
    try:
        compiled = prober.compile(run_graphs.lone_product(m, k, n))
    except FAILURES as err:
        prober.skipped["alone"] = str(err).splitlines()[0]
        return
    try:
        found = prober.time(compiled, {"x": np.full((m, k), 0.5, np.float32)}, fresh=True, thorough=True)
    finally:
        compiled.close()
    prober.add("alone", size, found, base_ns=prober.of("roundtrip") - prober.dispatch_ns)


def _after(prober: Prober, side: int, rows: Sequence[int], deadline_ns: float) -> None:
    """Measure what a product adds to a run of the copies that make its rows."""
    prober.rest()
    rows = [m for m in rows if prober.of("gemm", (m, side, side)) > 0]
    if not rows or not _has_time(prober, 2 * len(rows), deadline_ns):
        return
    try:
        bare, whole = (_copies(prober, side, rows, multiplied=multiplied) for multiplied in (False, True))
    except FAILURES as err:
        prober.skipped["after"] = str(err).splitlines()[0]
        return
    for m in rows:
        base, found = bare[m], whole[m]
        if base is not None and found is not None:
            found = dataclasses.replace(found, pace_ns=max(base.pace_ns, found.pace_ns))
            prober.add("after", (m, side, side), found, base_ns=base.ns)


def _copies(prober: Prober, side: int, rows: Sequence[int], *, multiplied: bool) -> dict[int, Timed | None]:
    """Return the times of looking up so many rows in parts and putting them together, with or without the product."""
    compiled = prober.compile(run_graphs.copied(side, _LOOKUPS, multiplied=multiplied))
    table = np.full((_TABLE_ROWS, side // _LOOKUPS), 0.5, np.float32)
    order = np.random.default_rng(0).permutation(_TABLE_ROWS)
    found: dict[int, Timed | None] = {}
    try:
        for m in rows:
            feeds: dict[str, Any] = {"table": table, **{f"rows{at}": order[at : at + m] for at in range(_LOOKUPS)}}
            found[m] = prober.time(compiled, feeds, fresh=not found)
    finally:
        compiled.close()
    return found


def _has_time(prober: Prober, points: int, deadline_ns: float) -> bool:
    return prober.budget.fits(deadline_ns, points * prober.budget.point_ns)
