"""`calibrate` measures a device and keeps what was found; `calibrate_together` measures several, interleaved."""

from __future__ import annotations

import contextlib
import datetime
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from rlx_ort.calibration import measure, store
from rlx_ort.calibration.measure import Bench, Clock, Progress
from rlx_ort.calibration.profile import REQUIRED, CalibrationProfile
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError, RlxError
from rlx_ort.ir.graph import Graph

__all__ = ["calibrate", "calibrate_together"]

_FULL_S, _QUICK_S, _SOFTWARE_S, _GRAPH_S = 8.0, 2.0, 30.0, 2.0
_RESERVE = 0.93  # of the limit is for measuring, the rest for what the last point takes too long
_POINT_S, _SOFTWARE_POINT_S = 0.004, 0.025


def calibrate(
    device: Device | str,
    *,
    graph: Graph | None = None,
    dims: Mapping[str, int] | None = None,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    clock: Clock = time.perf_counter_ns,
) -> CalibrationProfile:
    """Measure a device through its own sessions, keep the profile on disk, and return it.

    Takes up to 8 seconds, 2 when `quick`, 30 on a GPU in software. From then on predictions for the device come from
    the profile. While another process calibrates the same device, this one waits and takes over its profile.

    Args:
        device: the device.
        graph: measure only what this graph needs and a stored profile lacks, in 2 s at most; without a stored profile,
            both.
        dims: sizes of the graph's named dims.
        quick: measure fewer sizes.
        progress: called with what is being measured and the share of the time that is gone, 0 to 1.
        clock: gives the time in ns.

    Raises:
        CalibrationError: the device does not work here, or no product could be measured.
        RlxError: the device fails at the smallest graph.
    """
    device = Device(device)
    shown = None if progress is None else lambda device, what, share: progress(what, share)
    if graph is not None:
        from rlx_ort.selection.predict import measure_unknown

        if store.find(device).profile is None:
            calibrate(device, quick=quick, progress=progress, clock=clock)
        measure_unknown(graph, device, dims=dims, limit_s=_GRAPH_S)
        profile = store.find(device).profile
        assert profile is not None  # noqa: S101  # kept in this process at least
        return profile
    found = calibrate_together([device], quick=quick, progress=shown, clock=clock)[device]
    if isinstance(found, RlxError):
        raise found
    return found


def calibrate_together(
    devices: Iterable[Device | str],
    *,
    quick: bool = False,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter_ns,
) -> dict[Device, CalibrationProfile | RlxError]:
    """Measure several devices, keep their profiles, and return each one's profile or why there is none.

    Takes as long as calibrating one after the other, but what else runs on the machine meanwhile meets all of them
    alike.
    """
    found: dict[Device, CalibrationProfile | RlxError] = {}
    benches: list[Bench] = []
    asked = list(dict.fromkeys(Device(device) for device in devices))
    with contextlib.ExitStack() as stack:
        for device in asked:
            try:
                known = stack.enter_context(store.locked(device)) and store.find(device).profile
                if known and (quick or not known.quick):
                    found[device] = known
                    continue
                if progress is not None:
                    progress(device, "opening", 0.0)
                benches.append(stack.enter_context(_bench(device, clock, quick=quick)))
            except RlxError as err:
                found[device] = err
        measure.measure_kernels(benches, quick=quick, progress=progress)
        for bench in benches:
            found[bench.device] = _kept(bench, quick=quick)
            if progress is not None:
                progress(bench.device, "done", 1.0)
    return {device: found[device] for device in asked}


@contextlib.contextmanager
def _bench(device: Device, clock: Clock, *, quick: bool) -> Iterator[Bench]:
    """Give what measures a device; the first use of a device in a process loads its libraries, which counts."""
    begun = clock()
    key = store.key_of(device)
    limit_s, point_s = _QUICK_S if quick else _FULL_S, _POINT_S
    if "software" in key.hardware:
        limit_s, point_s = _SOFTWARE_S, _SOFTWARE_POINT_S
    bench = Bench(device, _RESERVE * limit_s, point_s, clock)
    bench.spent_ns = min(max(clock() - begun, 0), bench.limit_ns / 2)
    try:
        bench.begin(keep_open=key.threads == 1)  # idle worker threads of an open session would take a CPU's cores
        yield bench
    finally:
        bench.close()


def _kept(bench: Bench, *, quick: bool) -> CalibrationProfile | CalibrationError:
    """Keep what was measured on a device and return it, or why nothing follows from it."""
    rows = tuple(bench.rows.values())
    missing = sorted(set(REQUIRED) - {row.kernel for row in rows if row.ns > 0 or row.kernel == "launch"})
    if missing:
        why = "".join(f"\n  {kernel}: {reason}" for kernel, reason in bench.skipped.items() if kernel in missing)
        return CalibrationError(f"{bench.device.display} has no row of {', '.join(missing)}; nothing is kept{why}")
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
