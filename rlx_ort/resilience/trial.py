"""`Trials`: lets devices in that were opened in the background, or whose quarantine is over, if they are right.

After quarantine a session of one node comes first. Then the user's graph must reproduce the last result of a healthy
device.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rlx_ort import epoch
from rlx_ort.device import Device
from rlx_ort.device_sessions import DeviceSessions, SessionSet
from rlx_ort.errors import DeviceUnavailableError, RlxError, RunError
from rlx_ort.execution.background import copied_arrays
from rlx_ort.faults import Fault, fault_of
from rlx_ort.numerics import agree, epsilon_of, is_exact, relative_error
from rlx_ort.options.compile_options import CacheUse, CompileOptions
from rlx_ort.options.precision import OpClass
from rlx_ort.providers import registry
from rlx_ort.providers.engine.process import watch
from rlx_ort.providers.engine.stopping import Stop, Stopped
from rlx_ort.providers.registry import provider_of
from rlx_ort.resilience.limits import in_background
from rlx_ort.resilience.options import Resilience
from rlx_ort.resilience.quarantine import Quarantine
from rlx_ort.routes import Key, Pick

_log = logging.getLogger(__name__)
_EPSILONS = 8
_AFTER_S = 0.1
"""The thread that opens a device begins so much after the answer, because loading a provider holds Python's lock."""

_KEEP_NS = 1_000_000_000
"""While a device opens, a run is kept for its trial at most once in this time, because that copies its arrays."""

Limited: TypeAlias = Callable[[Device, Callable[[], list[Any]], float], list[Any]]
"""Makes a run on a device within a time limit in seconds."""


class Answer(NamedTuple):
    """A run: the device that answered, and the version of the weights."""

    device: Device
    inputs: Mapping[str, Any]
    outputs: Sequence[Any]
    version: int

    def copied(self) -> Answer:
        """Return the same with copies of the arrays, which their owner may overwrite."""
        outputs = [value.copy() if isinstance(value, np.ndarray) else value for value in self.outputs]
        return self._replace(inputs=copied_arrays(self.inputs), outputs=outputs)


class Trials:
    """The trials of one runner's devices.

    Args:
        devices: the devices and their sessions.
        options: tolerance, and whether results are compared.
        quarantine: has the state of the devices.
        limited: makes a run that has a limit.
        clock: returns monotonic nanoseconds.
    """

    def __init__(
        self,
        devices: DeviceSessions,
        options: Resilience,
        quarantine: Quarantine,
        limited: Limited,
        clock: Callable[[], int],
    ) -> None:
        self._devices = devices
        self._options = options
        self._quarantine = quarantine
        self._limited = limited
        self._clock = clock
        self._lock = threading.Lock()
        self._opening: dict[Stop, SessionSet] = {}  # of each thread that opens a device
        self._choosing: SessionSet | None = None  # a thread makes the first choice for these
        self._last: tuple[int, Answer] | None = None  # the last run and its time, while a device opens

    @property
    def is_opening(self) -> bool:
        """Whether a thread opens a device."""
        return self._devices.current in self._opening.values()

    @property
    def is_choosing(self) -> bool:
        """Whether a thread makes the first choice."""
        return self._choosing is self._devices.current

    def due_ns(self) -> float:
        """Return when an answer is next asked for by `note`, in the clock's nanoseconds; infinity if none is."""
        last = self._last
        keeps_ns = math.inf if not self._opening else self._clock() if last is None else last[0] + _KEEP_NS
        return min(keeps_ns, self._quarantine.next_due_ns())

    def give_up(self) -> None:
        """End the opening of devices, for sessions that are closed; does not wait for it."""
        for stop in list(self._opening):
            stop.stop()
        self._quarantine.abandon_openings()

    def note(self, answer: Answer) -> None:
        """Begin the trial of a device whose quarantine is over, on a run that another one answered."""
        now = self._clock()
        last = self._last
        if self._opening and (last is None or now - last[0] >= _KEEP_NS):
            self._last = now, answer.copied()
        if self._quarantine.next_due_ns() > now:
            return
        owner = Stop()  # the check does not end with the limits of the run that found it due
        if (device := self._quarantine.claim(owner)) is not None:
            kept = answer.copied() if self._options.parity else answer

            def check() -> None:
                with owner.held():
                    self._judge(self._devices.current, device, lambda: _probe(device), lambda: kept)

            in_background(check).add_done_callback(lambda _: self._quarantine.give_up(device, owner))

    def open_behind(self, goal: Key, chosen: Pick | None, answer: Answer) -> None:
        """Open a device in a thread after a run that another one answered, and let it in if its results are right.

        Without `chosen` the thread makes the choice, too.
        """
        sessions, stop, first = self._devices.current, Stop(), answer.copied()
        with self._lock:
            if chosen is None:
                if self._choosing is sessions:
                    return
                self._choosing = sessions
            elif not self._quarantine.set_opening(chosen.device, stop):
                return
            watch(stop)
            self._opening[stop] = sessions
            self._last = self._clock(), first
        work = (sessions, goal, chosen, first, stop)
        threading.Thread(target=self._open, args=work, name="rlx_ort-bridge", daemon=True).start()

    def _open(self, sessions: SessionSet, goal: Key, chosen: Pick | None, first: Answer, stop: Stop) -> None:
        chooses = chosen is None
        time.sleep(_AFTER_S)
        try:
            with stop.held(), contextlib.suppress(Stopped):
                if chosen is None:
                    chosen = self._devices.pick(goal, first.inputs)
                    if chosen.device == first.device or not self._quarantine.set_opening(chosen.device, stop):
                        return
                    self._choosing = None
                device, named = chosen.device, chosen.named
                self._judge(
                    sessions,
                    device,
                    lambda: self._devices.open(device, named, sessions),
                    lambda: first if self._last is None else self._last[1],
                    opens=True,
                )
        except RlxError as err:  # the next run makes the choice again, and raises it
            _log.info("no device could be chosen in the background: %s", str(err))
        finally:
            if chosen is not None:
                self._quarantine.give_up(chosen.device, stop)
            with self._lock:
                del self._opening[stop]
                if not self._opening:
                    self._last = None
                if chooses and self._choosing is sessions:
                    self._choosing = None
            epoch.advance()  # another device may be the best now

    def _judge(
        self,
        sessions: SessionSet,
        device: Device,
        prepare: Callable[[], object],
        last: Callable[[], Answer],
        *,
        opens: bool = False,
    ) -> None:
        """Let a device in if, after `prepare`, it agrees with the last answer of a healthy one; else put it out."""
        from rlx_ort.calibration.features import RANDOM_OPS  # not before the first answer

        devices, quarantine, options, wrong = self._devices, self._quarantine, self._options, ""
        try:
            prepare()
            answer = last()
            graph = devices.to_time(device)
            if options.parity and RANDOM_OPS.isdisjoint(node.pattern.op_type for node in graph.exported.nodes):
                if opens or options.timeout_s is None:
                    got = graph.run(answer.inputs)
                else:
                    got = self._limited(device, lambda: graph.run(answer.inputs), options.timeout_s)
                if devices.weights.version != answer.version:
                    quarantine.postpone(device)  # the results are of other weights
                    return
                rounding = max(_rounding(devices.options.on(each)) for each in (device, answer.device))
                wrong = disagreement(answer.outputs, got, max(options.tolerance, rounding))
                if wrong:
                    raise RunError(f"its results differ from those of {answer.device.display}: {wrong}")
        except Exception as err:  # whatever it is, the device stays out
            if devices.current is not sessions and not wrong:  # closed meanwhile
                if not opens:
                    quarantine.postpone(device)
            elif fault_of(err)[0] is Fault.REFUSAL:
                quarantine.readmit(device)  # and the ranking has it no more
            else:
                quarantine.fail_again(device, f"check failed: {err}", wrong=bool(wrong))
                devices.drop(device) if devices.current is sessions else sessions.drop(device)
                _log.warning("%s stays out: %s", device.display, str(err))  # an error would keep the session alive
        else:
            if devices.current is sessions or not opens:
                quarantine.readmit(device)
                _log.info("%s is used from now on", device.display)


def _rounding(options: CompileOptions) -> float:
    """Return by how much results may differ because of the arithmetic that was asked for."""
    policy = options.effective_precision
    return max(_ROUNDING[name] for name in (options.precision.value, *(policy.of(each).value for each in OpClass)))


_ROUNDING = {"f32": 0.0, "tf32": 1e-2, "f16": 1e-2, "bf16": 4e-2}
"""Precision -> largest error relative to the largest value: ten times its epsilon, since every layer rounds again."""


def in_cache(devices: DeviceSessions, device: Device) -> bool:
    """Return whether the session of a device would be opened from the compile cache, and so quickly."""
    from rlx_ort.execution.session import key_of_graph
    from rlx_ort.providers.engine.compiled.models import use_for
    from rlx_ort.providers.engine.compiled.store import default_store

    recipe_of = getattr(provider_of(device), "recipe", None)
    options = devices.options.on(device)
    try:
        if recipe_of is None or use_for(recipe_of(device, options), options) is CacheUse.OFF:
            return False
        key = key_of_graph(devices.graph, device, devices.options, devices.weights)
    except RlxError:
        return False
    return default_store().find(key.digest) is not None


def _probe(device: Device) -> None:
    state = registry.default_registry().availability(device, again=True)
    if not state.available:
        raise DeviceUnavailableError(device, state.reason)


def disagreement(wanted: Sequence[Any], got: Sequence[Any], tolerance: float) -> str:
    """Return how the outputs of a device differ from those of a healthy one, empty if they agree.

    Floats may differ by `tolerance` relative to the largest finite value of the output, or by eight epsilons of their
    dtype if that is more; NaN agrees with NaN. All else must be equal.
    """
    if len(wanted) != len(got):
        return f"{len(got)} outputs in place of {len(wanted)}"
    for index, (left, right) in enumerate(zip(wanted, got, strict=True)):
        difference = _difference(left, right, tolerance)
        if difference:
            return f"output {index}: {difference}"
    return ""


def _difference(wanted: Any, got: Any, tolerance: float) -> str:
    if isinstance(wanted, list) and isinstance(got, list):
        return disagreement(wanted, got, tolerance)
    if not (isinstance(wanted, np.ndarray) and isinstance(got, np.ndarray)):
        return "" if wanted == got else "the values differ"
    if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
        return f"{got.dtype}{list(got.shape)} in place of {wanted.dtype}{list(wanted.shape)}"
    if agree(got, wanted, tolerance, epsilons=_EPSILONS):
        return ""
    if is_exact(wanted.dtype):
        return "the values differ"
    error = relative_error(got, wanted)
    if math.isinf(error):
        return "NaN or infinities are in other places, or all is 0 where the other is not"
    allowed = max(tolerance, _EPSILONS * epsilon_of(wanted.dtype))
    return f"differs by up to {error:.3g} of the largest value, {allowed:.3g} allowed"
