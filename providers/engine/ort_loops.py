"""Runs that are repeated: `Binding` with values that change, `OrtBoundRun` over fixed memory."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine import stopping
from rlx_ort.providers.engine.binding import Arrays, BoundRun, DeviceTensor
from rlx_ort.providers.engine.recipe import HOST_MEMORY, nothing_to_hold
from rlx_ort.providers.engine.recordings import PLAIN_RUNS, TIMED_PAIRS, Recordings
from rlx_ort.providers.engine.replays import LaterError, NotRecordedError, check_replay, check_worth
from rlx_ort.providers.engine.runtime import running_error
from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore, binding_call
from rlx_ort.providers.engine.values import OrtTensor, Place, has_foreign_dtype, is_tensor_like, to_ort_value

COPY_AT_MOST_BYTES = 64 * 1024  # binding another buffer costs as much as copying about this many
_CHECKED_RUNS = PLAIN_RUNS + TIMED_PAIRS  # of a bound run: its replays then take the place of runs

_log = logging.getLogger(__name__)


class Binding:
    """Runs over one binding, by the engine's inner objects: their public wrappers take half the time of a binding.

    Unchanged values stay bound: small arrays are copied into bound memory, and unchanged tensors are left as they are.
    Outputs are written to the arrays of `fixed`. The others are bound anew each time, or a run would overwrite those of
    the last; those in `resident` stay on the device. The session's guard is held while it is made; `places` are the
    device's memory and the host's. For one thread at a time.
    """

    def __init__(
        self,
        session: OrtEngineSession,
        places: tuple[Place, Place],
        inputs: Sequence[str],
        outputs: Sequence[str],
        resident: Collection[str] = (),
        fixed: Arrays = MappingProxyType({}),
    ) -> None:
        core = session.open_core()
        here, host = places
        self._session = session
        self._io = core.session.io_binding()
        self.call, self.inner = binding_call(core.session, self._io)
        self.core = core
        self._unguarded = needs_no_guard(session)
        self._keeps_on_host = session.recipe.memory == HOST_MEMORY
        self._inputs = list(inputs)
        self._bound: list[Any] = [None] * len(inputs)  # a tensor, or (array, value) of fixed memory
        self._kept = [to_ort_value(session.engine, name, fixed[name], session.output_types[name]) for name in fixed]
        self._fixed = list(fixed.values())
        for name, (value, _) in zip(fixed, self._kept, strict=True):
            self._io.bind_ortvalue_output(name, value)
        varying = [name for name in outputs if name not in fixed]
        self._outputs = [(name, (here if name in resident else host).inner) for name in varying]
        order = [*fixed, *varying]  # that of the results
        self._results = [(order.index(name), fixed.get(name), name in resident) for name in outputs]
        self._order = sorted(range(len(inputs)), key=inputs.__getitem__)  # as in `OrtBinder.run`
        self._names = list(outputs)
        self._resident = frozenset(resident)

    @staticmethod
    def possible(
        session: OrtEngineSession, places: tuple[Place, Place], inputs: Iterable[str], outputs: Collection[str]
    ) -> bool:
        """Return whether the engine has the inner objects, and all values are tensors that numpy can hold."""
        kinds = [session.input_types[name] for name in inputs] + [session.output_types[name] for name in outputs]
        return (
            not session.recipe.device_graph
            and session.handed_on.isdisjoint(outputs)
            and not session.host_outputs
            and all(place.inner is not None for place in places)
            and hasattr(session.open_core().session, "_sess")
            and hasattr(session.engine.OrtValue.ortvalue_from_numpy(np.zeros(1)), "_ortvalue")
            and all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in kinds)
            and not any(has_foreign_dtype(session.output_types[name]) for name in outputs)
        )

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.loop`."""
        session = self._session
        if not self._unguarded:
            with session.guarded():
                feeds = {self._inputs[place]: values[place] for place in self._order}
                return session.run_values(self.core, self._names, feeds, self._resident, lambda: self._run(values))
        try:
            return self._run(values)
        except session.errors as err:
            raise running_error(err, session.device) from err

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Bind inputs, and return the values that must live until the run has ended."""
        core, bound = self.core, self._bound
        bind = self.inner.bind_ortvalue_input
        kept = []
        for index, value in enumerate(values):
            last = bound[index]
            if value is last:
                continue
            if value.__class__ is OrtTensor:
                if value.core is not core and value.core is not None:
                    kept.append(value.value_for(core))
                bind(self._inputs[index], value.inner)
                bound[index] = value
            elif last.__class__ is not tuple or not self._written(last, value):
                bound[index] = self._in_memory(self._inputs[index], value)
        return kept

    def buffers(self) -> list[npt.NDArray[Any]] | None:
        """Return the host memory that all inputs are copied to before `launch`; None where some have no such memory."""
        plain = self._unguarded and all(bound.__class__ is tuple and bound[2] for bound in self._bound)
        return [bound[0] for bound in self._bound] if plain else None

    def _run(self, values: Sequence[Any]) -> list[Any]:
        self._session.open_core()
        kept = self.bind(values)
        results = self.launch()
        del kept
        return results

    def launch(self) -> list[Any]:
        """Run on the inputs that are bound."""
        session, core, inner = self._session, self.core, self.inner
        bind = inner.bind_output
        for name, place in self._outputs:
            bind(name, place)
        self.call(inner, stopping.run_options(core.shared) if stopping.in_use else core.shared)
        vector = inner.get_outputs()
        on_host = self._keeps_on_host
        return [
            (OrtTensor(session, vector[index], core, None, on_host) if stays else vector[index].numpy())
            if place is None
            else place
            for index, place, stays in self._results
        ]

    def _in_memory(self, name: str, value: Any) -> Any:
        """Bind an array, in memory that later arrays of its shape can be copied into where that is cheaper."""
        kind = self._session.input_types[name]
        plain = value.__class__ is np.ndarray and not has_foreign_dtype(kind)
        memory = self._session.bound_memory(name)
        if not plain or memory is None or (memory == HOST_MEMORY and value.nbytes > COPY_AT_MOST_BYTES):
            if any(np.may_share_memory(value, place) for place in self._fixed):
                value = value.copy()  # the result of the last run, which this one overwrites
            # Kept until the next run, which binds again: the owner may reallocate the array meanwhile.
            return [bind_input(self._session, self.core, self._io, name, value)]
        own = np.array(value, order="C")
        held = self._session.engine.OrtValue.ortvalue_from_numpy(own, *memory)
        self._io.bind_ortvalue_input(name, held)
        return own, held, memory == HOST_MEMORY

    def _written(self, fixed: tuple[npt.NDArray[Any], Any, bool], value: Any) -> bool:
        """Copy an array into bound memory, if it is one of the same shape and dtype."""
        own, bound, on_host = fixed
        if value.__class__ is not np.ndarray or value.shape != own.shape or value.dtype != own.dtype:
            return False
        if on_host:
            own[...] = value
        else:
            bound.update_inplace(np.ascontiguousarray(value).reshape(value.shape))
        return True


class OrtBoundRun(BoundRun):
    """One binding over fixed memory; the session's guard is held while it is made.

    Where the session records launches, the third run is recorded. The next ones are run plainly and replayed: only if
    all these replays give the same, over other inputs than those that were recorded, do replays take the place of runs.
    """

    def __init__(
        self, session: OrtEngineSession, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any] | str]
    ) -> None:
        self._session = session
        self._core = core = session.open_core()
        self._io = core.session.io_binding()
        self._call, self._binding = binding_call(core.session, self._io)
        self._sent: dict[str, tuple[npt.NDArray[Any], Any]] = {}  # inputs that are copied to the device
        self._kept: dict[str, Any] = {}
        for name, value in inputs.items():
            self._bind(name, value)
        for name, place in outputs.items():
            if isinstance(place, str):
                self._io.bind_ortvalue_output(name, self._kept[place][0])
            else:
                self._kept[name] = value = to_ort_value(session.engine, name, place, session.output_types[name])
                self._io.bind_ortvalue_output(name, value[0])
        self._unguarded = needs_no_guard(session) and not self._sent
        self._memory = inputs, outputs
        self._given = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
        self._results = {name: place for name, place in outputs.items() if isinstance(place, np.ndarray)}
        if core.recordings is not None and session.recipe.replans:
            core.recordings.give_up("steps over fixed memory plan convolutions anew")
        self._recordings = core.recordings
        self._replay: Any = None
        self._end_replay: weakref.finalize[Any, Any] | None = None
        self._runs = 0
        self._least_ns = [1 << 62, 1 << 62]  # of runs and of replays

    def run(self) -> None:
        """Run, by a replay once that has been checked; see `BoundRun.run`."""
        session = self._session
        if self._unguarded:
            try:
                shared = self._core.shared
                self._call(self._binding, stopping.run_options(shared) if stopping.in_use else shared)
            except session.errors as err:
                raise running_error(err, session.device) from err
            return
        with session.guarded():
            recordings, options = self._recordings, self._core.options
            if recordings is not None and self._runs == _CHECKED_RUNS and options is recordings.shared:
                for place, result in zip(self._results.values(), self._replay.run(self._given), strict=True):
                    place[...] = result
                return
            begun_ns = time.perf_counter_ns()
            for name, (array, value) in self._sent.items():
                if value is None:
                    self._bind(name, array)
                else:
                    value.update_inplace(array)
            self._call(self._binding, options)
            if recordings is not None and self._runs < _CHECKED_RUNS:
                self._check_replay(recordings, time.perf_counter_ns() - begun_ns)

    def replace(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind another array in place of one; see `BoundRun.replace`."""
        with self._session.guarded():
            self._refuse(f"{name!r} changes from run to run")
            self._bind(name, array)

    def _check_replay(self, recordings: Recordings, took_ns: int) -> None:
        """Record the run that has just ended, or replay it and compare."""
        self._runs += 1
        try:
            if self._runs == PLAIN_RUNS:
                self._replay = recordings.record_bound(*self._memory)
                self._end_replay = end = weakref.finalize(self, self._replay.close)
                end.atexit = False
            elif self._replay is not None:
                begun_ns = time.perf_counter_ns()
                replayed = self._replay.run(self._given)
                now = took_ns, time.perf_counter_ns() - begun_ns
                self._least_ns = [min(pair) for pair in zip(self._least_ns, now, strict=True)]
                check_replay(list(self._results), list(self._results.values()), replayed)
                if self._runs == _CHECKED_RUNS:
                    check_worth(*self._least_ns)
        except self._session.errors as err:
            self._refuse(str(err))
        except LaterError:
            self._runs -= 1  # the next step may be recorded
        except NotRecordedError as err:
            self._refuse(str(err))

    def _refuse(self, reason: str) -> None:
        if self._recordings is not None:
            _log.info("steps are not replayed: %s", reason)
        if self._end_replay is not None:
            self._end_replay()
        self._recordings = self._replay = None

    def _bind(self, name: str, value: Any) -> None:
        session, kind = self._session, self._session.input_types[name]
        if isinstance(value, OrtTensor):
            bound = value.value_for(self._core)
        elif (memory := session.bound_memory(name)) is None or memory == HOST_MEMORY or has_foreign_dtype(kind):
            bound = to_ort_value(session.engine, name, value, kind)
            if memory != HOST_MEMORY:
                self._sent[name] = value, None  # the engine copies bound arrays
        else:
            bound = session.engine.OrtValue.ortvalue_from_numpy(value, *memory), None
            self._sent[name] = value, bound[0]
        self._kept[name] = bound
        self._io.bind_ortvalue_input(name, bound[0])


def bind_input(session: OrtEngineSession, core: SessionCore, io: Any, name: str, value: Any) -> Any:
    """Bind one input and return the objects that must live until the run has ended; the session's guard is held."""
    if isinstance(value, OrtTensor):
        bound, before = value.value_for(core)
        io.bind_ortvalue_input(name, bound)
        return bound, before
    kind = session.input_types[name]
    if isinstance(value, DeviceTensor):
        value = value.numpy()
    if not isinstance(value, np.ndarray) or not is_tensor_like(kind):
        raise EngineError(f"input {name!r} is {kind}, which cannot be bound; only tensors of numbers go with handles")
    bound, memory = to_ort_value(session.engine, name, value, kind)
    io.bind_ortvalue_input(name, bound)
    return bound, memory


def needs_no_guard(session: OrtEngineSession) -> bool:
    """Return whether runs hold no lock and need no preparation."""
    return session.recipe.run_lock is nothing_to_hold and session.recipe.before_run is None and not session.takes_turns
