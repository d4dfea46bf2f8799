"""`calibrate` measures a device and keeps what was found; `calibrate_together` does so with several in turn."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rlx_ort.calibration import probes, store
from rlx_ort.calibration.checks import check
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.prober import Prober, Progress
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.calibration.timing import Budget, Clock
from rlx_ort.calibration.turns import Turn, Turns
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError, RlxError

__all__ = ["Told", "calibrate", "calibrate_together", "limit_s"]

Told = Callable[[Device, str, float], None]
"""Called with a device, what is being measured on it, and the share of its time budget that is gone, 0 to 1."""

_FULL_S, _QUICK_S, _SOFTWARE_S = 8.0, 2.0, 30.0
_QUICK_RESERVE = 0.75  # of a short limit: opening the last session takes as long there
_RESERVE = 0.95  # of the limit is for measuring, the rest for what the last probe takes too long


def calibrate(
    device: Device | str,
    *,
    quick: bool = False,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter_ns,
) -> CalibrationProfile:
    """Measure a device through its own sessions, keep the profile on disk, and return it.

    Takes up to 8 seconds, 2 when `quick`, 30 on a GPU in software. From then on predictions for the device come from
    the profile. While another process calibrates the same device, this one waits and takes over its profile.

    Raises:
        CalibrationError: the device does not work here, or so little could be measured that nothing follows from it.
        RlxError: the device fails at the smallest graph.
    """
    return _calibrated(Device(device), Turns(clock).join(), quick=quick, progress=progress)


def calibrate_together(
    devices: Iterable[Device | str], *, quick: bool = False, progress: Told | None = None
) -> dict[Device, CalibrationProfile | RlxError]:
    """Measure several devices in turn, keep their profiles, and return each one's profile or why there is none.

    Takes as long as calibrating one after the other, but what else runs on the machine meanwhile meets all of them
    alike. Each device is measured from a thread of its own, and one at a time.
    """
    turns, asked = Turns(), list(dict.fromkeys(Device(device) for device in devices))

    def measured(device: Device, turn: Turn) -> CalibrationProfile | RlxError:
        try:
            tell = None if progress is None else partial(progress, device)
            return _calibrated(device, turn, quick=quick, progress=tell)
        except RlxError as err:
            return err

    with ThreadPoolExecutor(max(len(asked), 1), thread_name_prefix="calibrate") as threads:
        try:
            return dict(zip(asked, threads.map(measured, asked, [turns.join() for _ in asked]), strict=True))
        except BaseException:  # also an interrupt: what is going on ends with its next turn
            turns.stop()
            raise


def _calibrated(device: Device, turn: Turn, *, quick: bool, progress: Progress | None) -> CalibrationProfile:
    with turn:
        begun = turn.clock()
        key = store.key_of(device)
        found_s = max(turn.clock() - begun, 0) / 1e9  # the first use of a device in a process loads its libraries
    with store.locked(device) as waited, turn:
        if waited:
            others = store.find(device).profile
            if others is not None and (quick or not others.quick):
                return others
        limit = max(limit_s(device, quick=quick) - found_s, limit_s(device, quick=quick) / 2)
        software = _is_software(device)
        budget = Budget(
            limit * (_QUICK_RESERVE if quick else _RESERVE), 0.05 if software else 0.006 if quick else 0.015, turn.clock
        )
        prober = Prober(device, budget, quick=quick, progress=progress, turn=turn)
        probes.measure(prober)
        profile = CalibrationProfile(
            key=key,
            rows=tuple(prober.rows),
            machine=f"{platform.platform()}, {platform.machine()}",
            measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            quick=quick,
            elapsed_s=round(budget.elapsed_ns / 1e9, 2),
            skipped=dict(prober.skipped),
            spent=dict(prober.spent),
            pace_ns=prober.pace.usual_ns,
        )
        if not quick:
            profile = check(profile, prober)
        prober.done()
        try:
            MeasuredCostModel(device, profile)
        except CalibrationError as err:
            skipped = profile.skipped.items()
            why = "".join(f"\n  {probe}: {reason}" for probe, reason in skipped if probe in str(err))
            raise CalibrationError(f"{err}; nothing is kept of it{why}") from err
        store.keep(device, profile)
    return profile


def limit_s(device: Device, *, quick: bool) -> float:
    """Return how long a calibration of the device may take, in seconds."""
    if _is_software(device):
        return _SOFTWARE_S
    return _QUICK_S if quick else _FULL_S


def _is_software(device: Device) -> bool:
    return "software" in store.key_of(device).hardware
