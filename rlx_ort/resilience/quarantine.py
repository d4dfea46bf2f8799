"""`Quarantine`: which devices are out after failures, until when, and the health of each."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort import epoch
from rlx_ort.device import Device
from rlx_ort.resilience.options import Resilience

if TYPE_CHECKING:
    from rlx_ort.resilience.memory import DeviceMemory

_PROVEN = 10
"""A device that stayed well for so many times its last back-off starts from the first back-off again."""


class HealthState(enum.Enum):
    """What a device is used for."""

    READY = "ready"
    OPENING = "opening"
    QUARANTINED = "quarantined"
    ON_TRIAL = "on trial"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """The health of one device for one runner.

    Attributes:
        device: the device.
        state: ready; opening, while another device answers; quarantined; on trial, while it is checked for
            re-admission; or stuck, while a run that was asked to stop is still inside the engine.
        since_s: seconds in this state, 0 for a device that never failed.
        failures: failures since the device was last well for long.
        reason: the last failure, empty if there was none.
        next_try_s: seconds until its next check, 0 when it is due; None unless it is quarantined.
        memory: the process's share of its memory, by model, and the budget.
    """

    device: Device
    state: HealthState = HealthState.READY
    since_s: float = 0.0
    failures: int = 0
    reason: str = ""
    next_try_s: float | None = None
    memory: DeviceMemory | None = None


@dataclass(slots=True)
class _Record:
    since_ns: int
    state: HealthState = HealthState.READY
    failures: int = 0
    reason: str = ""
    backoff_ns: int = 0
    next_try_ns: int = 0
    stuck: int = 0
    wrong: bool = False
    owner: object = None  # of the check in progress, or of the opening
    spared: bool = False  # a device that is stuck has not failed, and is ready as soon as it returns


class Quarantine:
    """Devices that failed, with exponential back-off. A check is due when a back-off is over; the caller makes it.

    Args:
        options: the back-off.
        clock: returns monotonic nanoseconds.
    """

    def __init__(self, options: Resilience, clock: Callable[[], int]) -> None:
        self._options = options
        self._clock = clock
        self._records: dict[Device, _Record] = {}
        self._lock = threading.Lock()

    def is_out(self, device: Device) -> bool:
        """Return whether runs pass the device over."""
        record = self._records.get(device)
        return record is not None and record.state is not HealthState.READY

    def has_failed(self, device: Device) -> bool:
        """Return whether a device is out because it failed."""
        record = self._records.get(device)
        out = (HealthState.QUARANTINED, HealthState.ON_TRIAL, HealthState.STUCK)
        return record is not None and record.state in out and not record.spared

    def is_last_resort(self, device: Device) -> bool:
        """Return whether a device that is out may still be tried when no other answers.

        One whose engine did not come back, or whose results were wrong, may not. The CPU may while a run does not come
        back, since only the session of that run is lost.
        """
        record = self._records.get(device)
        return record is None or not (record.wrong or (record.stuck and device != Device.CPU))

    def reason(self, device: Device) -> str:
        """Return the last failure of a device, empty if there was none."""
        record = self._records.get(device)
        return "" if record is None else record.reason

    def fail(self, device: Device, reason: str, begun_ns: int) -> bool:
        """Put a device out for a run that began at `begun_ns`; return whether it was ready before.

        Failures of other runs of the same outage do not lengthen it, and neither do those of runs that began before
        the device was last re-admitted.
        """
        with self._changing(device) as record:
            ready = record.state is HealthState.READY or record.spared
            if not ready or (record.failures and begun_ns < record.since_ns):
                return False
            if self._clock() - record.since_ns > _PROVEN * record.backoff_ns:
                record.failures = 0
            self._count(record, reason)
            return True

    def fail_again(self, device: Device, reason: str, *, wrong: bool = False) -> None:
        """Count a failed check, or a failed run of the last resort, and double the back-off."""
        with self._changing(device) as record:
            record.wrong = wrong or record.wrong
            self._count(record, reason)

    def postpone(self, device: Device) -> None:
        """Check a device again after the same back-off, since the check had no result."""
        with self._changing(device) as record:
            self._postpone(record)

    def set_opening(self, device: Device, owner: object = None) -> bool:
        """Put a device that is ready out until it is opened and checked; return False if it is out already."""
        with self._changing(device) as record:
            if record.state is not HealthState.READY:
                return False
            record.state, record.since_ns, record.owner = HealthState.OPENING, self._clock(), owner
            return True

    def give_up(self, device: Device, owner: object) -> None:
        """End an opening or a check that has come to no result, unless another one has begun since."""
        with self._changing(device) as record:
            if record.owner is owner and record.state is HealthState.OPENING:
                record.state = HealthState.READY
            elif record.owner is owner and record.state is HealthState.ON_TRIAL:
                self._postpone(record)

    def is_opening(self, device: Device) -> bool:
        """Return whether a device is opened in the background."""
        record = self._records.get(device)
        return record is not None and record.state is HealthState.OPENING

    def abandon_openings(self) -> None:
        """Let the devices in whose opening is given up; they are opened when they are next chosen."""
        with self._lock:
            for record in self._records.values():
                if record.state is HealthState.OPENING:
                    record.state = HealthState.READY
            epoch.advance()

    def enter_stuck(self, device: Device, reason: str, *, failed: bool = True) -> None:
        """Note that a run does not come back from the device's engine; the device is out.

        Unless that is a failure, it is in again as soon as the run has come back.
        """
        with self._changing(device) as record:
            record.stuck += 1
            if failed and (record.state is HealthState.READY or record.spared):
                self._count(record, reason)
            elif record.state is HealthState.READY:
                record.spared, record.since_ns = True, self._clock()
            record.state, record.reason = HealthState.STUCK, reason

    def leave_stuck(self, device: Device) -> None:
        """Note that such a run has come back after all; a device that failed is checked when its back-off is over."""
        with self._changing(device) as record:
            record.stuck -= 1
            if not record.stuck and record.state is HealthState.STUCK:
                record.state = HealthState.READY if record.spared else HealthState.QUARANTINED
                record.spared = False

    def readmit(self, device: Device) -> None:
        """Let a device in again."""
        with self._changing(device) as record:
            if not record.stuck:
                record.state, record.since_ns, record.wrong = HealthState.READY, self._clock(), False

    def claim(self, owner: object = None) -> Device | None:
        """Return a device whose check is due, which is then on trial; None if there is none."""
        with self._lock:
            now = self._clock()
            for device, record in self._records.items():
                if record.state is HealthState.QUARANTINED and record.next_try_ns <= now:
                    record.state, record.owner = HealthState.ON_TRIAL, owner
                    epoch.advance()
                    return device
        return None

    def next_due_ns(self) -> float:
        """Return when the next check is due, in the clock's nanoseconds; infinity if none will be."""
        with self._lock:
            waiting = [found for found in self._records.values() if found.state is HealthState.QUARANTINED]
        return min((record.next_try_ns for record in waiting), default=math.inf)

    def health(self, device: Device) -> DeviceHealth:
        """Return the health of a device."""
        with self._lock:
            record = self._records.get(device)
            if record is None:
                return DeviceHealth(device)
            now = self._clock()
            due = max(0, record.next_try_ns - now) / 1e9 if record.state is HealthState.QUARANTINED else None
            since = (now - record.since_ns) / 1e9
            return DeviceHealth(device, record.state, since, record.failures, record.reason, due)

    def devices(self) -> list[Device]:
        """Return the devices that have failed at some time."""
        with self._lock:
            return list(self._records)

    @contextlib.contextmanager
    def _changing(self, device: Device) -> Iterator[_Record]:
        """Give the record of a device under the lock, and end the epoch: routes chosen before do not hold after it."""
        with self._lock:
            yield self._records.setdefault(device, _Record(self._clock()))
            epoch.advance()

    def _postpone(self, record: _Record) -> None:
        record.state = HealthState.STUCK if record.stuck else HealthState.QUARANTINED
        record.next_try_ns = self._clock() + record.backoff_ns

    def _count(self, record: _Record, reason: str) -> None:
        options = self._options
        epoch.advance()  # before anybody can see that the device is out
        if record.state is HealthState.READY:
            record.since_ns = self._clock()
        record.failures += 1
        record.reason, record.spared = reason, False
        doubled = options.backoff_s * 2 ** min(record.failures - 1, 60)
        record.backoff_ns = int(min(doubled, options.backoff_max_s) * 1e9)
        record.next_try_ns = self._clock() + record.backoff_ns
        record.state = HealthState.STUCK if record.stuck else HealthState.QUARANTINED
