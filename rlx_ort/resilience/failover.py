"""`Failover`: runs a graph on the best device that works, and gets failed devices back.

A runner has one. It keeps the device and the session of the last choice, so that a run for which nothing fails costs
little more than `CompiledGraph.run`. The choice is renewed once a second, and when something fails.
"""

from __future__ import annotations

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
from rlx_ort.errors import CancelledRunError, DeviceFallbackError, DeviceUnavailableError, RunError, StateLossError
from rlx_ort.resilience.faults import Fault, fault_of
from rlx_ort.resilience.limits import CancelToken, Stoppable, in_background, run_limited
from rlx_ort.resilience.memory import device_memory, freed_after
from rlx_ort.resilience.options import Resilience, check_timeout
from rlx_ort.resilience.quarantine import DeviceHealth, Quarantine

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.ir.graph import Graph

_log = logging.getLogger(__name__)
_RENEW_NS = 1_000_000_000

Choose: TypeAlias = "Callable[[GraphDevices, Mapping[str, Any]], tuple[Device, bool]]"
"""Returns the device of an automatic choice of a runner for some inputs, and whether a variable named it."""


_Route: TypeAlias = "tuple[Device, Callable[[Mapping[str, Any]], list[Any]], Graph, CompiledGraph]"
"""A device, the run of the compiled graph there, the graph, and the compiled graph."""


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
    """A run that is asked for."""

    runner: GraphDevices
    inputs: Mapping[str, Any]
    timeout_s: float | None
    cancel: CancelToken | None


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
        self._routes: dict[Any, _Route] = {}
        self._rankings: dict[Any, list[Device]] = {}
        self._renew_ns: float = 0
        self._revision = -1
        self._sized = True  # whether the graph has named dims, whose sizes decide the choice
        self._thread = threading.local()

    @property
    def last_run(self) -> RunRecord | None:
        """How the last run of the calling thread was answered; None before the first."""
        last = getattr(self._thread, "last", None)
        if last is None:
            return None
        device, began, answering, ended, attempts = last
        seconds = 0.0 if device is None else (ended - answering) / 1e9
        return RunRecord(device, seconds, (ended - began) / 1e9, tuple(attempts))

    def health(self, runner: GraphDevices) -> list[DeviceHealth]:
        """Return the health of each device that may be chosen or has failed, the best choice first."""
        devices = dict.fromkeys([*_ranking(runner, {}), *self.quarantine.devices()])
        return [replace(self.quarantine.health(device), memory=device_memory(device)) for device in devices]

    def forget_sessions(self) -> None:
        """Choose anew for the next run."""
        self._routes, self._rankings = {}, {}

    def run(
        self,
        runner: GraphDevices,
        inputs: Mapping[str, Any],
        choose: Choose,
        timeout_s: float | None = None,
        cancel: CancelToken | None = None,
        key: str = "",
    ) -> tuple[Device, list[Any]]:
        """Run on the chosen device, or on the next one that answers, and return it with the outputs.

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
        began = self._clock()
        if began < self._renew_ns and timeout_s is None and cancel is None:
            route = self._routes.get((key, _shapes(inputs)) if self._sized else key)
            if route is not None and route[2].revision == self._revision:
                try:
                    outputs = route[1](inputs)
                except Exception as err:  # judged by the table
                    call = _Call(runner, inputs, None, None)
                    # Closed by its caller, or by another thread that closed the runner.
                    if route[3].closed or freed_after(err, runner, route[0]):
                        return self._answer(call, choose, key, began)
                    return self._answer(call, choose, key, began, (route[0], err))
                self._thread.last = (route[0], began, began, self._clock(), ())
                return route[0], outputs
        if timeout_s is not None:
            check_timeout(timeout_s)
        limit = self.options.timeout_s if timeout_s is None else timeout_s
        return self._answer(_Call(runner, inputs, limit, cancel), choose, key, began)

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
        if timeout_s is not None:
            check_timeout(timeout_s)
        limit = self.options.timeout_s if timeout_s is None else timeout_s
        began = self._clock()
        if self.quarantine.is_out(device) and not self.quarantine.is_last_resort(device):
            raise DeviceUnavailableError(device, self.quarantine.reason(device), "wait until `health` shows it ready")
        call = _Call(runner, inputs, limit, cancel)
        try:
            outputs = self._attempt(call, device, named=True)[1]
        except Exception as err:  # recorded and raised again
            fault, what = fault_of(err)
            attempt = Attempt(device, _reason(what, err), (self._clock() - began) / 1e9)
            self._thread.last = (None, began, began, self._clock(), (attempt,))
            if fault is Fault.DEVICE:
                self._put_out(runner, device, attempt.reason, began)
            raise
        self._thread.last = (device, began, began, self._clock(), ())
        return outputs

    def _answer(
        self,
        call: _Call,
        choose: Choose,
        key: str,
        began: int,
        failed: tuple[Device, Exception] | None = None,
    ) -> tuple[Device, list[Any]]:
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
        for device, named in self._order(call, choose, {failed[0]} if failed else set()):
            start = self._clock()
            try:
                compiled, outputs = self._attempt(call, device, named=named)
            except Exception as err:  # raised again unless another device may do better
                self._failed(call, device, err, start, attempts, doubted)
                errors.append(err)
                continue
            end = self._clock()
            self._thread.last = (device, began, start, end, attempts)
            for other, reason in doubted:
                self._put_out(runner, other, reason, began)
            if self.quarantine.is_out(device) and self.quarantine.is_last_resort(device):
                self.quarantine.readmit(device)  # it answered as the last resort
            self._keep(call, key, device, compiled, revision)
            self._check_due(call, device, outputs, version)
            return device, outputs
        self._thread.last = (None, began, began, self._clock(), attempts)
        if len(errors) == 1 or (errors and len(doubted) == len(errors)):
            raise errors[0]  # the only device, or a failure that all share, which may be the model's
        rows = [(attempt.device, attempt.reason) for attempt in attempts]
        rows += [(found, f"out: {self.quarantine.reason(found)}") for found in self.quarantine.devices()
                 if self.quarantine.is_out(found) and found not in dict(rows)]  # fmt: skip
        raise DeviceFallbackError(rows) from (errors[-1] if errors else None)

    def _order(self, call: _Call, choose: Choose, tried: set[Device]) -> Iterator[tuple[Device, bool]]:
        """Yield the devices to try: the choice, the ranking, and at last those in quarantine that may yet work."""
        runner = call.runner
        first: list[Device] = []
        if not tried:
            device, named = choose(runner, call.inputs)
            if self.quarantine.is_out(device) and runner._sessions.has_state(device):
                raise StateLossError(_STATE.format(device.display, self.quarantine.reason(device)))
            first = [device]
            if not self.quarantine.is_out(device):
                tried.add(device)
                yield device, named
        place = _shapes(call.inputs)
        rankings = self._rankings
        if place not in rankings:
            rankings[place] = _ranking(runner, call.inputs)
        devices = [*first, *rankings[place]]
        for last_resort in (False, True):
            for device in devices:
                out = self.quarantine.is_out(device)
                if device in tried or (out and not (last_resort and self.quarantine.is_last_resort(device))):
                    continue
                tried.add(device)
                yield device, False

    def _attempt(self, call: _Call, device: Device, *, named: bool) -> tuple[CompiledGraph | None, list[Any]]:
        """Run on a device, and once more if it ran out of memory and some could be freed; see `_attempt_once`."""
        try:
            return self._attempt_once(call, device, named=named)
        except Exception as err:  # raised again unless memory was freed
            if not freed_after(err, call.runner, device):
                raise
        return self._attempt_once(call, device, named=named)

    def _attempt_once(self, call: _Call, device: Device, *, named: bool) -> tuple[CompiledGraph | None, list[Any]]:
        """Return the outputs, and the graph that gave them where nothing limited the run."""
        runner, inputs = call.runner, call.inputs
        if call.timeout_s is None and call.cancel is None:
            compiled = runner._opened(device, named)
            return compiled, compiled.run(inputs)

        def start() -> Stoppable:
            return runner._opened(device, named).stoppable(inputs)

        return None, self._limited(runner, device, start, call.timeout_s, call.cancel)

    def _limited(
        self,
        runner: GraphDevices,
        device: Device,
        start: Callable[[], Stoppable],
        timeout_s: float | None,
        cancel: CancelToken | None = None,
    ) -> list[Any]:
        """Run within limits; a device whose engine does not return is out with its session."""

        def stuck(future: Future[Any]) -> None:
            reason = f"the engine did not return within {self.options.grace_s:g} s of being asked to stop"
            self.quarantine.enter_stuck(device, reason)
            future.add_done_callback(lambda _: self.quarantine.leave_stuck(device))
            self.forget_sessions()
            runner._sessions.drop(device)
            _log.warning("%s is out with its session: %s", device.display, reason)

        return run_limited(start, timeout_s, self.options.grace_s, cancel, stuck)

    def _failed(
        self,
        call: _Call,
        device: Device,
        err: Exception,
        start: int,
        attempts: list[Attempt],
        doubted: list[tuple[Device, str]],
    ) -> None:
        """Note a failure, or raise the error when no other device is to answer."""
        runner = call.runner
        fault, what = fault_of(err)
        if fault is Fault.CALLER:
            raise err
        reason = _reason(what, err)
        attempts.append(Attempt(device, reason, (self._clock() - start) / 1e9))
        if fault is Fault.DEVICE:
            self._put_out(runner, device, reason, start)
        elif fault is Fault.UNKNOWN:
            doubted.append((device, reason))
        if runner._sessions.has_state(device):
            raise StateLossError(_STATE.format(device.display, reason)) from err
        if not self.options.failover:
            raise err
        if call.cancel is not None and call.cancel.cancelled:
            raise CancelledRunError("the run was cancelled") from err
        _log.info("%s failed, trying the next device: %s", device.display, reason)

    def _put_out(self, runner: GraphDevices, device: Device, reason: str, began: int) -> None:
        if self.quarantine.fail(device, reason, began):
            _log.warning("%s is quarantined: %s", device.display, reason)
            runner._sessions.drop(device)
        self.forget_sessions()

    def _keep(self, call: _Call, key: str, device: Device, compiled: CompiledGraph | None, revision: int) -> None:
        """Let the next runs with such inputs go straight to the device, unless the graph has grown since."""
        from rlx_ort.selection.predict import named_dims

        now = self._clock()
        if now >= self._renew_ns:
            self.forget_sessions()
        self._renew_ns = min(now + _RENEW_NS, self.quarantine.next_due_ns())
        graph = call.runner.graph
        if revision != self._revision:
            self.forget_sessions()
            self._revision, self._sized = revision, bool(named_dims(graph))
        routes = self._routes  # a device that goes out from here on replaces it
        if key and compiled is not None and graph.revision == revision and not self.quarantine.is_out(device):
            routes[(key, _shapes(call.inputs)) if self._sized else key] = device, compiled.run, graph, compiled

    def _check_due(self, call: _Call, healthy: Device, outputs: list[Any], version: int) -> None:
        """Begin the check of a device whose back-off is over, on this run's inputs, in the background."""
        if self.quarantine.next_due_ns() > self._clock():
            return
        device = self.quarantine.claim()
        if device is None:
            return
        inputs = {name: _copied(value) for name, value in call.inputs.items()} if self.options.parity else {}
        wanted = [_copied(value) for value in outputs] if self.options.parity else []
        in_background(lambda: self._check(call.runner, device, healthy, inputs, wanted, version))

    def _check(
        self,
        runner: GraphDevices,
        device: Device,
        healthy: Device,
        inputs: Mapping[str, Any],
        wanted: list[Any],
        version: int,
    ) -> None:
        """Re-admit a device if a session of one node and the user's graph are right on it."""
        from rlx_ort.providers.registry import provider_of
        from rlx_ort.resilience.trial import disagreement

        wrong = ""
        try:
            provider = provider_of(device)
            found = None if provider is None else provider.probe(device)
            if found is None or not found.available:
                raise DeviceUnavailableError(device, found.reason if found else "no provider serves it any more")
            graph = runner._to_time(device)
            if self.options.parity:
                got = self._limited(runner, device, lambda: graph.stoppable(inputs), self.options.timeout_s)
                if runner.weights.version != version:
                    self.quarantine.postpone(device)  # the results are of other weights
                    return
                wrong = disagreement(wanted, got, self.options.tolerance)
                if wrong:
                    raise RunError(f"its results differ from those of {healthy.display}: {wrong}")
        except Exception as err:  # whatever it is, the device stays out
            self.quarantine.fail_again(device, f"check failed: {err}", wrong=bool(wrong))
            runner._sessions.drop(device)
            _log.warning("%s stays in quarantine: %s", device.display, err)
        else:
            self.quarantine.readmit(device)
            _log.info("%s is used again", device.display)
        self.forget_sessions()


_STATE = (
    "{} is out ({}), and holds handles or committed runs of this graph, which cannot move to another device; unbind "
    "the handles or close the compiled graph, and run again"
)


def _ranking(runner: GraphDevices, inputs: Mapping[str, Any]) -> list[Device]:
    return [row.device for row in runner.rank(inputs) if row.blocker is None]


def _shapes(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([(name, getattr(value, "shape", None) or np.shape(value)) for name, value in inputs.items()])


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _reason(what: str, err: Exception) -> str:
    return f"{what}: {err}"
