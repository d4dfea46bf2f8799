"""`calibrate_together` measures devices, interleaved, and keeps their profiles."""

from __future__ import annotations

import contextlib
import datetime
import platform
import time
from collections.abc import Iterable, Iterator

from rlx_ort.calibration import measure, store
from rlx_ort.calibration.measure import Bench, Clock, Progress
from rlx_ort.calibration.profile import REQUIRED, CalibrationProfile
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError, RlxError

_FULL_S, _QUICK_S, _SOFTWARE_S = 8.0, 2.0, 30.0  # starting and ending a process takes another second
_RESERVE = 0.93  # of the limit is for measuring, the rest for a last point that overruns
_MOST_LOADING = 0.6  # of the time for measuring that loading libraries may take from it
_POINT_S, _SOFTWARE_POINT_S = 0.004, 0.025


def calibrate_together(
    devices: Iterable[Device | str],
    *,
    quick: bool = False,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter_ns,
) -> dict[Device, CalibrationProfile | RlxError]:
    """Measure several devices, keep their profiles, and return each one's profile or why there is none.

    Takes as long as calibrating one after the other, but other work on the machine meanwhile meets all of them
    alike.
    """
    profiles: dict[Device, CalibrationProfile | RlxError] = {}
    benches: list[Bench] = []
    asked = list(dict.fromkeys(Device(device) for device in devices))
    with contextlib.ExitStack() as stack:
        for device in asked:
            try:
                begun_ns = clock()
                known = stack.enter_context(store.locked(device)) and store.find(device).profile
                if known and (quick or not known.quick):
                    profiles[device] = known
                    continue
                if progress is not None:
                    progress(device, "opening", 0.0)
                benches.append(stack.enter_context(_bench(device, clock, begun_ns, quick=quick)))
            except RlxError as err:
                profiles[device] = err
        measure.measure_kernels(benches, quick=quick, progress=progress)
        for bench in benches:
            profiles[bench.device] = _kept(bench, quick=quick)
            if progress is not None:
                progress(bench.device, "done", 1.0)
    return {device: profiles[device] for device in asked}


@contextlib.contextmanager
def _bench(device: Device, clock: Clock, begun_ns: int, *, quick: bool) -> Iterator[Bench]:
    """Give the bench of a device; its first use in a process, begun at some time, loads libraries, which counts."""
    key = store.key_of(device)
    limit_s, point_s = _QUICK_S if quick else _FULL_S, _POINT_S
    if "software" in key.hardware:
        limit_s, point_s = _SOFTWARE_S, _SOFTWARE_POINT_S
    bench = Bench(device, _RESERVE * limit_s, point_s, clock)
    bench.spent_ns = min(max(clock() - begun_ns, 0), _MOST_LOADING * bench.limit_ns)
    try:
        bench.begin(keep_open=key.threads == 1)  # idle worker threads of an open session would take a CPU's cores
        yield bench
    finally:
        bench.close()


def _kept(bench: Bench, *, quick: bool) -> CalibrationProfile | CalibrationError:
    """Keep the measurements of a device and return them, or the reason why nothing follows from it."""
    rows = tuple(bench.rows.values())
    missing = sorted(set(REQUIRED) - {row.kernel for row in rows})
    if missing:
        why = "".join(f"\n  {kernel}: {reason}" for kernel, reason in bench.skipped.items() if kernel in missing)
        return CalibrationError(
            f"{bench.device.display}: {', '.join(missing)} could not be measured; nothing is stored{why}"
        )
    profile = CalibrationProfile(
        key=store.key_of(bench.device),
        rows=rows,
        machine=f"{platform.platform()}, {platform.machine()}",
        measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        quick=quick,
        elapsed_s=round(bench.spent_ns / 1e9, 2),
        skipped=dict(bench.skipped),
    )
    store.keep(bench.device, profile)
    return profile
