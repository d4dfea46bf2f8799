"""`Failover`: runs a graph on the best device that works, and gets failed devices back.

A runner has one. A run for which nothing fails goes straight to the session of the last choice (`rlx_ort.routes`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlx_ort import environment, epoch
from rlx_ort.device import Device
from rlx_ort.device_sessions import DeviceSessions
from rlx_ort.errors import (
    CancelledRunError,
    DeviceError,
    DeviceFallbackError,
    DeviceUnavailableError,
    MemoryBudgetError,
    RunError,
    StageError,
    StateLossError,
    TimeLimitError,
    let_go,
)
from rlx_ort.execution.interface import Outputs
from rlx_ort.faults import Fault, fault_of, first_that_works, is_device_failure
from rlx_ort.providers.engine.binding import DeviceTensor
from rlx_ort.resilience.limits import CancelToken, run_limited
from rlx_ort.resilience.memory import device_memory, freed_after
from rlx_ort.resilience.options import Resilience, check_timeout
from rlx_ort.resilience.quarantine import DeviceHealth, Quarantine
from rlx_ort.resilience.trial import Answer, Trials, in_cache
from rlx_ort.routes import CHOSEN, Key, Moment, Pick, is_automatic

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.options.split_plan import SplitPlan

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """A device that failed a run: why, and how long that took in seconds."""

    device: Device
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """How a run was answered.

    Attributes:
        device: the device that answered, None if none did.
        seconds: the time of the attempt that answered, opening the session included; 0 if none did.
        total_seconds: the time of the call.
        attempts: the devices that failed before, in order.
    """

    device: Device | None
    seconds: float
    total_seconds: float
    attempts: tuple[Attempt, ...] = ()


@dataclass(slots=True)
class _Call:
    """A run that is asked for, and its attempts so far.

    Attributes:
        goal: the caller's request.
        inputs: the inputs.
        began: when it began, in the clock's nanoseconds.
        timeout_s: the time limit of each attempt in seconds.
        cancel: cancels the run.
        impatient: whether the limit is the caller's own and shorter than that of the options, so that exceeding it says
            nothing about the device.
        attempts: the devices that failed.
        errors: their errors.
        doubted: devices whose fault is unknown, with the reason if an answer of another one convicts them.
        behind: the choice to open after the answer, if any; its device is None if it is still to be made.
    """

    goal: Key
    inputs: Mapping[str, Any]
    began: int
    timeout_s: float | None = None
    cancel: CancelToken | None = None
    impatient: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    doubted: list[tuple[Device, str]] = field(default_factory=list)
    behind: list[Pick | None] = field(default_factory=list)


class Failover:
    """The resilience of one runner. May be used from several threads.

    Args:
        devices: the runner's devices and sessions.
        options: how to react to failures.
        clock: returns monotonic nanoseconds.
    """

    def __init__(
        self, devices: DeviceSessions, options: Resilience, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.options = options
        if options.device_memory:
            environment.set_override("DEVICE_MEMORY", options.device_memory)
        self.quarantine = Quarantine(options, clock)
        self._devices = devices
        self._clock = clock
        self._due_ns = math.inf  # when a run is next to take the long way; see `Trials.due_ns`
        self._thread = threading.local()
        self._trials = Trials(devices, options, self.quarantine, self._limited, clock)
        devices.forgotten = self._trials.give_up

    @property
    def last_run(self) -> RunRecord | None:
        """How the last run of the calling thread was answered; None before the first."""
        last = getattr(self._thread, "last", None)
        if last is None:
            return None
        device, began, ended, *rest = last
        answering, attempts = rest or (began, ())
        seconds = 0.0 if device is None else (ended - answering) / 1e9
        return RunRecord(device, seconds, (ended - began) / 1e9, tuple(attempts))

    def health(self) -> list[DeviceHealth]:
        """Return the health of each device that may be chosen or has failed, the best choice first."""
        devices = dict.fromkeys([*self._devices.ranked({}), *self.quarantine.devices()])
        return [replace(self.quarantine.health(device), memory=device_memory(device)) for device in devices]

    def run(
        self, goal: Key, inputs: Mapping[str, Any], timeout_s: float | None = None, cancel: CancelToken | None = None
    ) -> tuple[Device, Outputs]:
        """Run on the chosen device, or on the next one that answers; return it with the outputs. See `last_run`.

        No other device answers for one that the caller named, and quarantine does not keep the caller from it, unless
        the engine has not come back from an earlier run.

        Args:
            goal: the caller's request.
            inputs: the inputs.
            timeout_s: time limit of each attempt in seconds, in place of that of the options.
            cancel: cancels the run.

        Raises:
            InputError: the inputs do not fit the graph.
            StateLossError: the device failed, and holds state that cannot move.
            CancelledRunError: the run was cancelled.
            DeviceUnavailableError: the engine of the named device is stuck.
            DeviceFallbackError: several devices were tried and failed.
            RlxError: the only device that was tried failed; this is its error.
        """
        clock = self._clock
        began = clock()
        if timeout_s is None and cancel is None and (began < self._due_ns or not is_automatic(goal)):
            route = self._devices.routes.find(goal, inputs)
            if route is not None:
                device = route.device
                try:
                    outputs = route.run(inputs)
                except Exception as err:  # judged by the table
                    let_go(err)
                    closed = route.compiled.closed  # by its caller, or by another thread that closed the runner
                    del route  # which keeps the session
                    if not (closed or freed_after(err, device, self._devices.current.resident(device))):
                        return self._answer(_Call(goal, inputs, began), (device, err))
                else:
                    if route.epoch == epoch.now or not (is_automatic(goal) and self._in_doubt(device)):
                        ended = clock()
                        if route.follower is not None:
                            route.follower.note(device, ended - began)
                        self._thread.last = device, began, ended
                        return device, outputs
                    del route
        usual_s = self.options.timeout_s
        if timeout_s is None:
            return self._answer(_Call(goal, inputs, began, usual_s, cancel))
        check_timeout(timeout_s)
        impatient = usual_s is None or timeout_s < usual_s
        return self._answer(_Call(goal, inputs, began, timeout_s, cancel, impatient))

    def _answer(self, call: _Call, failed: tuple[Device, Exception] | None = None) -> tuple[Device, Outputs]:
        """Answer a run, where `failed` has just failed, if anything."""
        self._thread.last = (None, call.began, call.began, call.began, call.attempts)
        since = self._devices.moment()
        return (self._by_any if is_automatic(call.goal) else self._by_named)(call, since, failed)

    def _by_named(self, call: _Call, since: Moment, failed: tuple[Device, Exception] | None) -> tuple[Device, Outputs]:
        """Run on the device that the caller named, and on no other."""
        if failed is None:
            pick = self._devices.pick(call.goal, call.inputs)
            device = pick.device
            out = self.quarantine.is_out(device)
            if out and not self.quarantine.is_last_resort(device):
                reason = self.quarantine.reason(device)
                raise DeviceUnavailableError(device, reason, "wait until `health` shows it ready")
            try:
                compiled, outputs = self._attempt(call, pick)
            except Exception as err:  # recorded and raised again
                failed = device, err
            else:
                self._thread.last = (device, call.began, self._clock())
                if compiled is not None and not out:
                    since.routes.put(call.goal, call.inputs, pick, compiled, since, None)
                return device, outputs
        device, error = failed
        fault, what = fault_of(error)
        attempt = Attempt(device, f"{what}: {error}", (self._clock() - call.began) / 1e9)
        self._thread.last = (None, call.began, self._clock(), call.began, (attempt,))
        if fault is Fault.DEVICE:
            self._put_out(device, attempt.reason, call.began)
        raise error

    def _by_any(self, call: _Call, since: Moment, failed: tuple[Device, Exception] | None) -> tuple[Device, Outputs]:
        """Try one device after the other, beginning after the one that has just failed, if any."""
        clock, version = self._clock, self._devices.weights.version
        if failed is not None:
            if not is_device_failure(failed[1]):
                raise failed[1]
            self._failed(call, failed[0], failed[1], call.began)
        start, was_out = 0, False
        in_doubt: tuple[Device, Outputs] | None = None

        def work(pick: Pick) -> tuple[CompiledGraph | None, Outputs]:
            nonlocal start, was_out, in_doubt
            start, was_out = clock(), self.quarantine.is_out(pick.device)
            compiled, outputs = self._attempt(call, pick)
            if not was_out and self._in_doubt(pick.device):
                in_doubt = pick.device, outputs
                raise _InDoubtError(f"failed in another run meanwhile: {self.quarantine.reason(pick.device)}")
            return compiled, outputs

        order = self._order(call, set() if failed is None else {failed[0]})
        found = first_that_works(order, work, lambda pick, error: self._failed(call, pick.device, error, start))
        ended = clock()
        if found is None:
            return self._unanswered(call, in_doubt, ended)
        pick, (compiled, outputs) = found
        device = pick.device
        self._thread.last = (device, call.began, ended, start, call.attempts)
        for other, reason in call.doubted:
            if reason:
                self._put_out(other, reason, call.began)
        if was_out and self.quarantine.is_last_resort(device):
            self.quarantine.readmit(device)  # it answered as the last resort
        answer = Answer(device, call.inputs, outputs, version)
        for chosen in call.behind:  # at most one; unless it has answered itself
            if chosen is None or chosen.device != device:
                self._trials.open_behind(call.goal, chosen, answer)
        follower = pick.follower
        if follower is not None:
            follower.note(device, ended - start)
        lasts = follower is not None or call.goal is not CHOSEN or not self._devices.measures
        if lasts and compiled is not None and not self.quarantine.is_out(device):
            since.routes.put(call.goal, call.inputs, pick, compiled, since, None)
        self._trials.note(answer)
        self._due_ns = self._trials.due_ns()
        return device, outputs

    def _unanswered(self, call: _Call, in_doubt: tuple[Device, Outputs] | None, ended: int) -> tuple[Device, Outputs]:
        """Return the answer in doubt where there was no better one, or raise the error."""
        if in_doubt is not None:
            self._thread.last = (in_doubt[0], call.began, ended, call.began, call.attempts)
            return in_doubt[0], in_doubt[1]
        self._thread.last = (None, call.began, ended, call.began, call.attempts)
        errors = call.errors
        if len(errors) == 1 or (errors and len(call.doubted) == len(errors)):
            raise errors[0]  # the only device, or a failure that all share, which may be the model's
        rows = [(attempt.device, attempt.reason) for attempt in call.attempts]
        rows += [(found, f"out: {self.quarantine.reason(found)}") for found in self.quarantine.devices()
                 if self.quarantine.is_out(found) and found not in dict(rows)]  # fmt: skip
        raise DeviceFallbackError(rows) from (errors[-1] if errors else None)

    def _in_doubt(self, device: Device) -> bool:
        """Return whether another device is to repeat a run, because this one has failed another run meanwhile."""
        return self.options.failover and self.quarantine.has_failed(device) and not self._devices.has_state(device)

    def _order(self, call: _Call, tried: set[Device]) -> Iterator[Pick]:
        """Yield the devices to try: the choice, the ranking, and at last those in quarantine that may yet work.

        Where a device would first be chosen or opened and another can answer at once, that one comes first, and
        `call.behind` gets the one to open after the answer, None if it is still to be chosen.
        """
        devices, quarantine, fresh = self._devices, self.quarantine, not tried
        plan = None if devices.options.split is None else devices.plan(call.inputs)
        if plan is not None:
            yield from self._plans(call, plan)
            return
        if _on_device(call.inputs):  # no other device can read them
            pick = devices.pick(call.goal, call.inputs)
            if quarantine.is_out(pick.device) and not quarantine.is_opening(pick.device):
                raise StateLossError(_INPUTS.format(pick.device.display, quarantine.reason(pick.device)))
            if fresh:
                yield pick
            return
        if fresh and self.options.bridge and self._chooses_behind(call):
            call.behind.append(None)
            tried.add(Device.CPU)
            yield Pick(Device.CPU, named=False)
            call.behind.clear()
        first: list[Pick] = []
        if fresh:
            pick = devices.pick(call.goal, call.inputs)
            device = pick.device
            if quarantine.is_out(device) and devices.has_state(device):
                if not quarantine.is_opening(device):
                    raise StateLossError(_STATE.format(device.display, quarantine.reason(device)))
                quarantine.readmit(device)
            first = [pick]
            ready = not self.options.bridge or self._is_ready(device)
            if ready and device not in tried and not quarantine.is_out(device):
                tried.add(device)
                yield pick
        ranked = [Pick(device, named=False) for device in devices.ranked(call.inputs)]
        picks = [pick for pick in first + ranked if pick.device not in tried]
        if self.options.bridge:
            picks = self._bridged(picks, call.behind)
        for last_resort in (False, True):
            for pick in picks:
                out = quarantine.is_out(pick.device)
                if pick.device in tried or (out and not (last_resort and quarantine.is_last_resort(pick.device))):
                    continue
                tried.add(pick.device)
                yield pick

    def _plans(self, call: _Call, plan: SplitPlan) -> Iterator[Pick]:
        """Yield the plan of a split graph, and after a failure plans for the devices that have not failed."""
        before: set[Device] | None = None
        while True:
            failed = {attempt.device for attempt in call.attempts}
            failed |= {device for device in self.quarantine.devices() if self.quarantine.is_out(device)}
            if failed == before:
                return
            if not failed.isdisjoint(plan.devices):
                try:
                    plan = self._devices.plan(call.inputs, failed) or plan
                except (DeviceError, MemoryBudgetError) as err:
                    _log.warning("there is no other plan for %s: %s", self._devices.graph.name, err)
                    return
            before = failed
            yield Pick(plan.device, named=False, plan=plan)

    def _chooses_behind(self, call: _Call) -> bool:
        """Return whether the choice would probe or measure devices, and the CPU can answer meanwhile."""
        devices, cpu = self._devices, Device.CPU
        if not self._trials.is_choosing and devices.is_decided(call.goal, call.inputs):
            return False
        policy = devices.policy
        alone = policy.allow == (cpu,)
        usable = policy.allows(cpu) and not self.quarantine.is_out(cpu) and not devices.has_state(cpu)
        return usable and not alone

    def _bridged(self, picks: list[Pick], behind: list[Pick | None]) -> list[Pick]:
        """Put a device that can answer at once before the best one, which is to be opened behind it, if it is not."""
        devices = self._devices
        able = [pick for pick in picks if not self.quarantine.is_out(pick.device)]
        if not able or self._is_ready(able[0].device):
            return picks
        ready = [pick for pick in able[1:] if self._is_ready(pick.device) and not devices.has_state(pick.device)]
        if not ready or in_cache(devices, able[0].device):
            return picks
        if not self._trials.is_opening:
            behind.append(able[0])
        return [min(ready, key=lambda pick: not devices.current.is_open(pick.device)), *picks]

    def _is_ready(self, device: Device) -> bool:
        """Return whether a device answers at once; no other device opens as quickly as the CPU."""
        return device == Device.CPU or self._devices.current.is_open(device)

    def _attempt(self, call: _Call, pick: Pick) -> tuple[CompiledGraph | None, Outputs]:
        """Run on a device, and once more if it ran out of memory and some could be freed; see `_attempt_once`."""
        try:
            return self._devices.again_if_closed(lambda: self._attempt_once(call, pick))
        except Exception as err:  # raised again unless memory was freed
            let_go(err)
            if not freed_after(err, pick.device, self._devices.current.resident(pick.device)):
                raise
        return self._attempt_once(call, pick)

    def _attempt_once(self, call: _Call, pick: Pick) -> tuple[CompiledGraph | None, Outputs]:
        """Return the outputs, and the graph that gave them where nothing limited the run."""
        devices, inputs = self._devices, call.inputs
        if call.timeout_s is None and call.cancel is None:
            compiled = devices.open(pick.place, pick.named)
            return compiled, compiled.run_named(inputs)

        def run() -> Outputs:
            return devices.open(pick.place, pick.named).run_named(inputs)

        return None, self._limited(pick.device, run, call.timeout_s, call.cancel, call.impatient)

    def _limited(
        self,
        device: Device,
        run: Callable[[], T],
        timeout_s: float | None,
        cancel: CancelToken | None = None,
        impatient: bool = False,
    ) -> T:
        """Run within limits; a device whose engine does not return is out with its session, until it does.

        Where the caller ended the run, it is no failure of the device, and the CPU has room for a session beside it.
        """

        def stuck(future: Future[Any]) -> None:
            reason = f"the engine did not return within {self.options.grace_s:g} s of being asked to stop"
            failed = not (impatient or (cancel is not None and cancel.cancelled))
            if failed or device != Device.CPU:
                self.quarantine.enter_stuck(device, reason, failed=failed)
                future.add_done_callback(lambda _: self.quarantine.leave_stuck(device))
            self._devices.drop(device)
            _log.warning("the session of %s is given up: %s", device.display, reason)

        result: T = run_limited(run, timeout_s, self.options.grace_s, cancel, stuck)
        return result

    def _failed(self, call: _Call, device: Device, err: Exception, start: int) -> None:
        """Note a failure, or raise the error when no other device is to answer."""
        if isinstance(err, _InDoubtError):
            call.attempts.append(Attempt(device, str(err), (self._clock() - start) / 1e9))
            return
        let_go(err)
        fault, what = fault_of(err)
        reason = f"{what}: {err}"
        if isinstance(err, StageError):
            device = Device(err.device.label)
        call.attempts.append(Attempt(device, reason, (self._clock() - start) / 1e9))
        if fault is Fault.DEVICE:
            self._put_out(device, reason, start)
        elif fault is Fault.UNKNOWN:
            call.doubted.append((device, "" if call.impatient and isinstance(err, TimeLimitError) else reason))
        if self._devices.has_state(device):
            raise StateLossError(_STATE.format(device.display, reason)) from err
        if fault is Fault.DEVICE and _on_device(call.inputs):
            raise StateLossError(_INPUTS.format(device.display, reason)) from err
        if not self.options.failover:
            raise err
        if call.cancel is not None and call.cancel.cancelled:
            raise CancelledRunError("the run was cancelled") from err
        call.errors.append(err)
        _log.info("%s failed, trying the next device: %s", device.display, reason)

    def _put_out(self, device: Device, reason: str, began: int) -> None:
        if self.quarantine.fail(device, reason, began):
            _log.warning("%s is quarantined: %s", device.display, reason)
            self._devices.drop(device)


class _InDoubtError(RunError):
    """A device answered that failed another run meanwhile."""


_STATE = (
    "{} is out ({}), and holds handles or committed runs of this graph, which cannot move to another device; unbind "
    "the handles or close the compiled graph, and run again"
)

_INPUTS = (
    "{} is out ({}), and inputs of the run are tensors in its memory, which cannot move to another device; pass arrays "
    "on the host, and run again"
)


def _on_device(inputs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, DeviceTensor) and not getattr(value, "on_host", True) for value in inputs.values())
