"""Measures operators of a CPU over tensors that are given to a run, where chains make theirs.

A lookup finds the rows of a table where they have always been. In a chain it finds them in the caches of the cores that
have just written them: 49 us for 2,400 rows of 384 on 16 cores, and 27 us out of a table. So does a reduction of all
rows to one: 1.4 ms for 4 million elements in a chain, in rows of 2000, and 0.48 ms for an input. A large tensor takes
one thread so long to make that what ten links take drowns in the noise of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from rlx_ort.calibration import probe_operators as operators
from rlx_ort.calibration import run_graphs
from rlx_ort.calibration.prober import FAILURES, Prober
from rlx_ort.calibration.row_lengths import USUAL
from rlx_ort.device import Device

__all__ = ["PROBES", "measure"]

PROBES = ("op:Lookup", "op:MaxOfGiven", "op:SumOfGiven")
"""What is measured here alone."""

_ADDED, _LINKS, _RUNS = (1 << 23, 1 << 24), 4, 3
_LOOKED_UP = {
    USUAL: (1 << 10, 1 << 14, 1 << 18, 1 << 20),
    64: (1 << 10, 1 << 14, 1 << 18),
    1024: (1 << 14, 1 << 18),
    16: (1 << 10, 1 << 14),  # each row takes about as long as one of 64
}
_REDUCED = {
    operators.COLUMNS_NARROW: (1 << 14, 1 << 18, 1 << 20),
    operators.COLUMNS_WIDE: (1 << 18, 1 << 22),
    operators.COLUMNS_ALIGNED: (1 << 18, 1 << 22),
}
_REDUCTIONS = {"MaxOfGiven": "ReduceMax", "SumOfGiven": "ReduceSum"}
_TABLE = 1 << 22  # elements, of which each row is looked up once at most


def measure(prober: Prober, deadline_ns: float) -> None:
    """Measure large additions, lookups and reductions; nothing on an accelerator, which would be sent the tensors."""
    if prober.device.kind != Device.CPU.kind:
        return
    probes: dict[str, Callable[[Prober, float], None]] = {
        "op:Add": _additions,
        "op:Lookup": _lookups,
        **{f"op:{name}": functools.partial(_reductions, name) for name in _REDUCTIONS},
    }
    for probe, series in probes.items():
        prober.rest()
        begun = prober.budget.elapsed_ns
        try:
            series(prober, deadline_ns)
        except FAILURES as err:
            prober.skipped[probe] = str(err).splitlines()[0]
        prober.account(probe, begun)


def _additions(prober: Prober, deadline_ns: float) -> None:
    """Measure additions of tensors larger than caches."""
    last_ns = 0.0
    compiled = prober.compile(run_graphs.additions(_LINKS))
    try:
        for count in _ADDED:
            if last_ns > prober.budget.point_ns or not prober.budget.fits(deadline_ns, 2 * _RUNS * last_ns):
                prober.skipped["op:Add"] = f"no time for f32 of size {(count,)} and above"
                break
            found = prober.time(compiled, {"x": np.full(count, 0.5, np.float32)}, least=_RUNS, fresh=not last_ns)
            last_ns = 0.0 if found is None else found.ns
            prober.add("op:Add", (count,), found, base_ns=prober.of("roundtrip"), share=_LINKS)
    finally:
        compiled.close()


def _lookups(prober: Prober, deadline_ns: float) -> None:
    """Measure looking up rows of several lengths, beyond looking up one row."""
    compiled = prober.compile(run_graphs.lookup())
    random = np.random.default_rng(0)
    values = np.resize(random.standard_normal(1 << 16).astype(np.float32), _TABLE)
    fresh = True
    try:
        for width, counts in _LOOKED_UP.items():
            table = values.reshape(-1, width)
            order = random.permutation(len(table))
            base = prober.time(compiled, {"table": table, "rows": order[:1]}, fresh=fresh)
            fresh = False
            for count in counts:
                if base is None or not prober.budget.fits(deadline_ns, prober.budget.point_ns):
                    prober.skipped["op:Lookup"] = f"no time for f32 of size {(count, width)} and above"
                    return
                found = prober.time(compiled, {"table": table, "rows": order[: count // width]})
                size = (count,) if width == USUAL else (count, width)
                prober.add("op:Lookup" if width == USUAL else "rows:Lookup", size, found, base_ns=base.ns)
    finally:
        compiled.close()


def _reductions(name: str, prober: Prober, deadline_ns: float) -> None:
    """Measure reducing all rows to one, in rows of several lengths, beyond doing so with one row."""
    compiled = prober.compile(run_graphs.reduced(_REDUCTIONS[name]))
    values = np.full(_TABLE, 0.5, np.float32)
    last_ns, fresh = 0.0, True
    try:
        for width, counts in _REDUCED.items():
            base = prober.time(compiled, {"x": values[:width].reshape(1, width)}, fresh=fresh)
            fresh = False
            for count in counts:
                if base is None or not prober.budget.fits(deadline_ns, prober.budget.point_ns + last_ns):
                    prober.skipped[f"op:{name}"] = f"no time for f32 of size {(count, width)} and above"
                    return
                found = prober.time(compiled, {"x": values[: count - count % width].reshape(-1, width)})
                last_ns = last_ns if found is None else found.ns
                usual = width == operators.COLUMNS_NARROW
                size = (count,) if usual else (count, width)
                prober.add(f"op:{name}" if usual else f"rows:{name}", size, found, base_ns=base.ns)
    finally:
        compiled.close()
