"""`Failover`: runs a graph on the best device that works, and gets failed devices back.

A runner has one. It keeps the device and the session of the last choice, so that a run for which nothing fails costs
little more than `CompiledGraph.run`. The choice is renewed once a second, and when something fails.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import (
    CancelledRunError,
    DeviceFallbackError,
    DeviceUnavailableError,
    StateLossError,
    TimeLimitError,
    let_go,
)
from rlx_ort.execution.interface import Outputs
from rlx_ort.faults import Fault, fault_of
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine.binding import DeviceTensor
from rlx_ort.resilience.limits import CancelToken, run_limited
from rlx_ort.resilience.memory import device_memory, freed_after
from rlx_ort.resilience.options import Resilience, check_timeout
from rlx_ort.resilience.quarantine import DeviceHealth, Quarantine
from rlx_ort.resilience.trial import Answer, Choose, Trials, in_cache

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.inputs import Kind
    from rlx_ort.graph_devices import GraphDevices

_log = logging.getLogger(__name__)
_RENEW_NS = 1_000_000_000

_Run: TypeAlias = "Callable[[Mapping[str, Any]], Outputs]"
_Route: TypeAlias = "tuple[Device, _Run, Graph, int, CompiledGraph | None]"
"""A device, a run of the compiled graph there, the graph, its revision when it was chosen, and the compiled graph."""
_Latest: TypeAlias = "tuple[str, Kind, Device, _Run, Graph, int, CompiledGraph | None]"
"""The key of a run, the kind of its inputs, and its route."""
_NOWHERE: _Route = (Device.CPU, lambda _: Outputs(), Graph(), -1, None)  # never taken: the graph is not at -1


class _Routes(dict[Any, _Route]):
    """Choices that were made, by `_place`.

    Attributes:
        latest: inputs of that kind take that route without another check.
        place: the last that was looked up.
    """

    place: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.latest: _Latest = ("", lambda _: False, *_NOWHERE)


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


class _Call(NamedTuple):
    """A run that is asked for.

    Attributes:
        runner: the runner.
        inputs: the inputs.
        timeout_s: the time limit of each attempt in seconds.
        cancel: cancels the run.
        impatient: whether the limit is the caller's own and shorter than that of the options, so that exceeding it says
            nothing about the device.
    """

    runner: GraphDevices
    inputs: Mapping[str, Any]
    timeout_s: float | None = None
    cancel: CancelToken | None = None
    impatient: bool = False


class Failover:
    """The resilience of one runner. May be used from several threads.

    Args:
        options: how to react to failures.
        clock: returns monotonic nanoseconds.
    """

    def __init__(self, options: Resilience, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.options = options
        if options.device_memory:
            environment.set_override("DEVICE_MEMORY", options.device_memory)
        self.quarantine = Quarantine(options, clock)
        self._clock = clock
        self._routes = _Routes()
        self._rankings: dict[Any, list[Device]] = {}
        self._renew_ns: float = 0
        self._revision = -1
        self._sized: str | tuple[str, ...] = ()  # the input or inputs with named dims, whose sizes decide the choice
        self._thread = threading.local()
        self._trials = Trials(options, self.quarantine, self._limited, self.forget_choices, clock)

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

    def health(self, runner: GraphDevices) -> list[DeviceHealth]:
        """Return the health of each device that may be chosen or has failed, the best choice first."""
        devices = dict.fromkeys([*_ranking(runner, {}), *self.quarantine.devices()])
        return [replace(self.quarantine.health(device), memory=device_memory(device)) for device in devices]

    def forget_choices(self) -> None:
        """Choose anew for the next run."""
        self._routes, self._rankings = _Routes(), {}

    def forget_sessions(self) -> None:
        """Give up what belongs to sessions that are closed."""
        self.forget_choices()
        self._trials.give_up()

    def run(
        self,
        runner: GraphDevices,
        inputs: Mapping[str, Any],
        choose: Choose,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
        key: str = "",
    ) -> Outputs:
        """Run on the chosen device, or on the next one that answers, and return the outputs; see `last_run`.

        Args:
            runner: the runner.
            inputs: the inputs.
            choose: makes the automatic choice.
            timeout_s: time limit of each attempt in seconds, in place of that of the options.
            cancel: cancels the run.
            key: names the choice, so that it is kept for inputs of the same shapes; empty to make it for each run.

        Raises:
            InputError: the inputs do not fit the graph.
            StateLossError: the device failed, and holds state that cannot move.
            CancelledRunError: the run was cancelled.
            DeviceFallbackError: several devices were tried and failed.
            RlxError: the only device that was tried failed; this is its error.
        """
        clock = self._clock
        began = clock()
        if began < self._renew_ns and timeout_s is None and cancel is None:
            quarantine = self.quarantine
            outages = quarantine.outages
            last, is_like, device, run, graph, revision, compiled = self._routes.latest
            if last != key or not is_like(inputs):
                device, run, graph, revision, compiled = self._looked_up(key, inputs)
            if graph.revision == revision:
                try:
                    outputs = run(inputs)
                except Exception as err:  # judged by the table
                    let_go(err)
                    call = _Call(runner, inputs)
                    # By its caller, or by another thread that closed the runner.
                    closed = compiled is None or compiled.closed
                    del run, compiled  # which keep the session
                    if closed or freed_after(err, runner, device):
                        return self._answer(call, choose, key, began)
                    return self._answer(call, choose, key, began, (device, err))
                if quarantine.outages == outages or not self._in_doubt(runner, device):
                    self._thread.last = device, began, clock()
                    return outputs
        return self._answer(self._call(runner, inputs, timeout_s, cancel), choose, key, began)

    def run_named(
        self,
        runner: GraphDevices,
        inputs: Mapping[str, Any],
        device: Device,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
    ) -> list[Any]:
        """Run on a device that the caller named: within the limits, and on no other device.

        Quarantine does not keep the caller from it, unless the engine has not come back from an earlier run.

        Raises:
            DeviceUnavailableError: the engine of the device is stuck.
            RlxError: the run failed.
        """
        call = self._call(runner, inputs, timeout_s, cancel)
        began = self._clock()
        if self.quarantine.is_out(device) and not self.quarantine.is_last_resort(device):
            raise DeviceUnavailableError(device, self.quarantine.reason(device), "wait until `health` shows it ready")
        try:
            outputs = self._attempt(call, device, named=True)[1]
        except Exception as err:  # recorded and raised again
            fault, what = fault_of(err)
            attempt = Attempt(device, _reason(what, err), (self._clock() - began) / 1e9)
            self._thread.last = (None, began, self._clock(), began, (attempt,))
            if fault is Fault.DEVICE:
                self._put_out(runner, device, attempt.reason, began)
            raise
        self._thread.last = (device, began, self._clock())
        return outputs

    def _call(
        self, runner: GraphDevices, inputs: Mapping[str, Any], timeout_s: float | None, cancel: CancelToken | None
    ) -> _Call:
        """Return a run within the caller's limit, else within that of the options."""
        usual_s = self.options.timeout_s
        if timeout_s is None:
            return _Call(runner, inputs, usual_s, cancel)
        check_timeout(timeout_s)
        return _Call(runner, inputs, timeout_s, cancel, usual_s is None or timeout_s < usual_s)

    def _answer(
        self, call: _Call, choose: Choose, key: str, began: int, failed: tuple[Device, Exception] | None = None
    ) -> Outputs:
        """Try one device after the other, beginning after the one that has just failed, if any."""
        runner = call.runner
        runner._follow_graph()
        revision, version = runner.graph.revision, runner.weights.version
        attempts: list[Attempt] = []
        doubted: list[tuple[Device, str]] = []
        errors: list[Exception] = []
        self._thread.last = (None, began, began, began, attempts)
        if failed is not None:
            self._failed(call, failed[0], failed[1], began, attempts, doubted)
            errors.append(failed[1])
        routes = self._routes  # a device that goes out or comes in from here on replaces it
        behind: list[tuple[Device, bool] | None] = []
        in_doubt: tuple[Device, list[Any]] | None = None
        for device, named in self._order(call, choose, key, {failed[0]} if failed else set(), behind):
            start = self._clock()
            was_out = self.quarantine.is_out(device)
            try:
                compiled, outputs = self._attempt(call, device, named=named)
            except Exception as err:  # raised again unless another device may do better
                let_go(err)
                self._failed(call, device, err, start, attempts, doubted)
                errors.append(err)
                continue
            end = self._clock()
            if not was_out and self._in_doubt(runner, device):
                reason = f"failed in another run meanwhile: {self.quarantine.reason(device)}"
                attempts.append(Attempt(device, reason, (end - start) / 1e9))
                in_doubt = device, outputs
                continue
            self._thread.last = (device, began, end, start, attempts)
            for other, reason in doubted:
                if reason:
                    self._put_out(runner, other, reason, began)
            if was_out and self.quarantine.is_last_resort(device):
                self.quarantine.readmit(device)  # it answered as the last resort
            answer = Answer(device, call.inputs, outputs, version)
            for chosen in behind:  # at most one; unless it has answered itself
                if chosen is None or chosen[0] != device:
                    self._trials.open_behind(runner, choose, chosen, answer)
            self._keep(call, key, device, compiled, revision, routes)
            self._trials.note(runner, answer)
            return runner._named(outputs)
        if in_doubt is not None:  # and nothing better was had
            self._thread.last = (in_doubt[0], began, self._clock(), began, attempts)
            return runner._named(in_doubt[1])
        self._thread.last = (None, began, self._clock(), began, attempts)
        if len(errors) == 1 or (errors and len(doubted) == len(errors)):
            raise errors[0]  # the only device, or a failure that all share, which may be the model's
        rows = [(attempt.device, attempt.reason) for attempt in attempts]
        rows += [(found, f"out: {self.quarantine.reason(found)}") for found in self.quarantine.devices()
                 if self.quarantine.is_out(found) and found not in dict(rows)]  # fmt: skip
        raise DeviceFallbackError(rows) from (errors[-1] if errors else None)

    def _in_doubt(self, runner: GraphDevices, device: Device) -> bool:
        """Return whether another device is to repeat a run, because this one has failed another run meanwhile."""
        return self.options.failover and self.quarantine.has_failed(device) and not runner._sessions.has_state(device)

    def _looked_up(self, key: str, inputs: Mapping[str, Any]) -> _Route:
        """Return the route of inputs of such sizes; if it is the last one again, it is `latest` from now on."""
        routes = self._routes
        place = self._place(key, inputs)
        route = routes.get(place, _NOWHERE)
        if routes.place != place:
            routes.place = place
            return route
        device, _, graph, revision, compiled = route
        kind = None if compiled is None else compiled.kind_of(inputs)
        if kind is None or compiled is None:
            return route
        known = device, compiled.run_checked, graph, revision, compiled
        routes.latest = key, kind, *known
        return known

    def _place(self, key: str, inputs: Mapping[str, Any]) -> Any:
        """Return a key of a choice for inputs of such sizes."""
        names = self._sized
        try:
            if isinstance(names, str):
                value = inputs[names]
                return key, value.shape if value.__class__ is np.ndarray else np.shape(value)
            return (key, *[np.shape(inputs.get(name, ())) for name in names]) if names else key
        except (AttributeError, KeyError, TypeError, ValueError):  # wrong inputs, which the run refuses
            return key

    def _order(
        self, call: _Call, choose: Choose, key: str, tried: set[Device], behind: list[tuple[Device, bool] | None]
    ) -> Iterator[tuple[Device, bool]]:
        """Yield the devices to try: the choice, the ranking, and at last those in quarantine that may yet work.

        Where a device would first be chosen or opened and another can answer at once, that one comes first, and
        `behind` gets the one to open after the answer, None if it is still to be chosen.
        """
        runner, quarantine, fresh = call.runner, self.quarantine, not tried
        if _on_device(call.inputs):  # no other device can read them
            device, named = choose(runner, call.inputs)
            if quarantine.is_out(device) and not quarantine.is_opening(device):
                raise StateLossError(_INPUTS.format(device.display, quarantine.reason(device)))
            if fresh:
                yield device, named
            return
        if fresh and self.options.bridge and self._chooses_behind(call, key):
            behind.append(None)
            tried.add(Device.CPU)
            yield Device.CPU, False
            behind.clear()
        first: list[tuple[Device, bool]] = []
        if fresh:
            device, named = choose(runner, call.inputs)
            if quarantine.is_out(device) and runner._sessions.has_state(device):
                if not quarantine.is_opening(device):
                    raise StateLossError(_STATE.format(device.display, quarantine.reason(device)))
                quarantine.readmit(device)
            first = [(device, named)]
            ready = not self.options.bridge or self._is_ready(runner, device)
            if ready and device not in tried and not quarantine.is_out(device):
                tried.add(device)
                yield device, named
        place = self._place("", call.inputs)
        rankings = self._rankings
        if place not in rankings:
            rankings[place] = _ranking(runner, call.inputs)
        devices = [entry for entry in [*first, *((found, False) for found in rankings[place])] if entry[0] not in tried]
        if self.options.bridge:
            devices = self._bridged(runner, devices, behind)
        for last_resort in (False, True):
            for device, named in devices:
                out = quarantine.is_out(device)
                if device in tried or (out and not (last_resort and quarantine.is_last_resort(device))):
                    continue
                tried.add(device)
                yield device, named

    def _chooses_behind(self, call: _Call, key: str) -> bool:
        """Return whether the choice would probe or measure devices, and the CPU can answer meanwhile."""
        from rlx_ort.selection.graph_cache import cache_of

        runner, cpu = call.runner, Device.CPU
        if not self._trials.is_choosing(runner):
            known = key or runner._has_winner(call.inputs)
            if known and (runner._sessions.devices or cache_of(runner.graph).rankings):
                return False
        policy = runner.policy
        alone = policy.allow == (cpu,)
        usable = policy.allows(cpu) and not self.quarantine.is_out(cpu) and not runner._sessions.has_state(cpu)
        return usable and not alone

    def _bridged(
        self, runner: GraphDevices, devices: list[tuple[Device, bool]], behind: list[tuple[Device, bool] | None]
    ) -> list[tuple[Device, bool]]:
        """Put a device that can answer at once before the best one, which is to be opened behind it, if it is not."""
        able = [entry for entry in devices if not self.quarantine.is_out(entry[0])]
        if not able or self._is_ready(runner, able[0][0]):
            return devices
        sessions = runner._sessions
        ready = [entry for entry in able[1:] if self._is_ready(runner, entry[0]) and not sessions.has_state(entry[0])]
        if not ready or in_cache(runner, able[0][0]):
            return devices
        if not self._trials.is_opening(runner):
            behind.append(able[0])
        return [min(ready, key=lambda entry: not sessions.is_open(entry[0])), *devices]

    def _is_ready(self, runner: GraphDevices, device: Device) -> bool:
        """Return whether a device answers at once; no other device opens as quickly as the CPU."""
        return device == Device.CPU or runner._sessions.is_open(device)

    def _attempt(self, call: _Call, device: Device, *, named: bool) -> tuple[CompiledGraph | None, list[Any]]:
        """Run on a device, and once more if it ran out of memory and some could be freed; see `_attempt_once`."""
        try:
            return call.runner._again_if_closed(lambda: self._attempt_once(call, device, named=named))
        except Exception as err:  # raised again unless memory was freed
            let_go(err)
            if not freed_after(err, call.runner, device):
                raise
        return self._attempt_once(call, device, named=named)

    def _attempt_once(self, call: _Call, device: Device, *, named: bool) -> tuple[CompiledGraph | None, list[Any]]:
        """Return the outputs, and the graph that gave them where nothing limited the run."""
        runner, inputs = call.runner, call.inputs
        if call.timeout_s is None and call.cancel is None:
            compiled = runner._opened(device, named)
            return compiled, compiled.run(inputs)

        def run() -> list[Any]:
            return runner._opened(device, named).run(inputs)

        return None, self._limited(runner, device, run, call.timeout_s, call.cancel, call.impatient)

    def _limited(
        self,
        runner: GraphDevices,
        device: Device,
        run: Callable[[], list[Any]],
        timeout_s: float | None,
        cancel: CancelToken | None = None,
        impatient: bool = False,
    ) -> list[Any]:
        """Run within limits; a device whose engine does not return is out with its session, until it does.

        Where the caller ended the run, it is no failure of the device, and the CPU has room for a session beside it.
        """

        def stuck(future: Future[Any]) -> None:
            reason = f"the engine did not return within {self.options.grace_s:g} s of being asked to stop"
            failed = not (impatient or (cancel is not None and cancel.cancelled))
            if failed or device != Device.CPU:
                self.quarantine.enter_stuck(device, reason, failed=failed)
                future.add_done_callback(lambda _: self.quarantine.leave_stuck(device))
            self.forget_choices()
            runner._sessions.drop(device)
            _log.warning("the session of %s is given up: %s", device.display, reason)

        return run_limited(run, timeout_s, self.options.grace_s, cancel, stuck)

    def _failed(
        self,
        call: _Call,
        device: Device,
        err: Exception,
        start: int,
        attempts: list[Attempt],
        doubted: list[tuple[Device, str]],
    ) -> None:
        """Note a failure, or raise the error when no other device is to answer.

        `doubted` gets a device whose fault is unknown, with the reason if an answer of another one convicts it.
        """
        runner = call.runner
        fault, what = fault_of(err)
        if fault is Fault.CALLER:
            raise err
        reason = _reason(what, err)
        attempts.append(Attempt(device, reason, (self._clock() - start) / 1e9))
        if fault is Fault.DEVICE:
            self._put_out(runner, device, reason, start)
        elif fault is Fault.UNKNOWN:
            doubted.append((device, "" if call.impatient and isinstance(err, TimeLimitError) else reason))
        if runner._sessions.has_state(device):
            raise StateLossError(_STATE.format(device.display, reason)) from err
        if fault is Fault.DEVICE and _on_device(call.inputs):
            raise StateLossError(_INPUTS.format(device.display, reason)) from err
        if not self.options.failover:
            raise err
        if call.cancel is not None and call.cancel.cancelled:
            raise CancelledRunError("the run was cancelled") from err
        _log.info("%s failed, trying the next device: %s", device.display, reason)

    def _put_out(self, runner: GraphDevices, device: Device, reason: str, began: int) -> None:
        if self.quarantine.fail(device, reason, began):
            _log.warning("%s is quarantined: %s", device.display, reason)
            runner._sessions.drop(device)
        self.forget_choices()

    def _keep(
        self, call: _Call, key: str, device: Device, compiled: CompiledGraph | None, revision: int, routes: _Routes
    ) -> None:
        """Let the next runs with such inputs go straight to the device, unless the graph has grown since.

        `routes` are those from before the run.
        """
        now = self._clock()
        graph = call.runner.graph
        if now >= self._renew_ns or revision != self._revision:
            if routes is self._routes:
                self.forget_choices()
                routes = self._routes
            kinds = {value.name: value.type for value in graph.inputs}
            names = tuple(name for name, kind in kinds.items() if isinstance(kind, TensorType) and _has_names(kind))
            self._revision, self._sized = revision, names[0] if len(names) == 1 else names
        self._renew_ns = min(now + _RENEW_NS, self.quarantine.next_due_ns())
        if key and compiled is not None and graph.revision == revision and not self.quarantine.is_out(device):
            run = functools.partial(_run_named, call.runner._named, compiled)  # no closure: see `let_go`
            routes[self._place(key, call.inputs)] = device, run, graph, revision, compiled


_STATE = (
    "{} is out ({}), and holds handles or committed runs of this graph, which cannot move to another device; unbind "
    "the handles or close the compiled graph, and run again"
)

_INPUTS = (
    "{} is out ({}), and inputs of the run are tensors in its memory, which cannot move to another device; pass arrays "
    "on the host, and run again"
)


def _has_names(kind: TensorType) -> bool:
    return kind.shape is not None and any(isinstance(dim, str) for dim in kind.shape)


def _on_device(inputs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, DeviceTensor) and not getattr(value, "on_host", True) for value in inputs.values())


def _ranking(runner: GraphDevices, inputs: Mapping[str, Any]) -> list[Device]:
    return list(runner._candidates(inputs).ranked())


def _run_named(named: type[Outputs], compiled: CompiledGraph, inputs: Mapping[str, Any]) -> Outputs:
    return named(compiled.run(inputs))


def _reason(what: str, err: Exception) -> str:
    return f"{what}: {err}"
