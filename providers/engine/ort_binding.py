"""`OrtBinder`: tensors on a device, and fixed buffers of an ONNX Runtime session, by its IOBinding.

An IOBinding belongs to one thread, so each run has its own; slots keep theirs and leave the locking to the caller.
ONNX Runtime's private attributes are used for speed only, each in one function with the public call as its fallback.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import dtype_of
from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import Arrays, Binder, BoundRun, DeviceTensor, Loop, RunSlots, Slots
from rlx_ort.providers.engine.recipe import HOST_MEMORY, nothing_to_hold
from rlx_ort.providers.engine.recordings import PLAIN_RUNS, TIMED_PAIRS, NotRecordedError, check_replay, check_worth
from rlx_ort.providers.engine.runtime import running_error
from rlx_ort.providers.engine.values import (
    DLPACK_DEVICE,
    OrtTensor,
    from_ort_value,
    has_foreign_dtype,
    is_tensor_like,
    to_ort_value,
)

if TYPE_CHECKING:
    from rlx_ort.providers.engine.recordings import Recordings
    from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore

_COPY_AT_MOST_BYTES = 64 * 1024  # binding another buffer costs as much as copying about this many
_CHECKED_RUNS = PLAIN_RUNS + TIMED_PAIRS  # of a bound run: its replays then take the place of runs
_MOST_PINNED_BYTES = 256 << 20  # of one set of slots; pinned memory is taken from all processes

_log = logging.getLogger(__name__)


class OrtBinder(Binder):
    """The memory side of an ONNX Runtime session. Every call but those of `Slots` may come from any thread."""

    def __init__(self, session: OrtEngineSession) -> None:
        self._session = session
        self._memory, self._index = session.recipe.memory
        self._keeps_on_host = session.recipe.memory == HOST_MEMORY
        self._places = (_Place(session.engine, self._memory, self._index), _Place(session.engine, "cpu", 0))

    @property
    def on_host(self) -> bool:
        """Whether runs read their inputs in host memory; see `Binder.on_host`."""
        session = self._session
        return self._keeps_on_host and all(session.bound_memory(spec.name) == HOST_MEMORY for spec in session.inputs)

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device with a copy of the array; see `Binder.upload`."""
        session = self._session
        with session.guarded():
            session.open_core()
            dtype = DType.from_numpy(array.dtype)
            kind = TensorType(dtype)
            if self._keeps_on_host or has_foreign_dtype(kind):
                # ONNX Runtime makes values of types numpy does not know in host memory only, and copies them in a run.
                value, memory = to_ort_value(session.engine, "device tensor", array.copy(), kind)
                return OrtTensor(session, value, None, memory)
            value = session.engine.OrtValue.ortvalue_from_numpy(
                np.ascontiguousarray(array).reshape(array.shape), self._memory, self._index
            )
            return OrtTensor(session, value, None)

    def adopt(self, source: Any) -> DeviceTensor | None:
        """Return the tensor behind an object with `__dlpack__` without a copy, or None if it is on another device."""
        session = self._session
        kind, index = source.__dlpack_device__()
        wanted = (DLPACK_DEVICE.get(self._memory), self._index)
        if self._keeps_on_host or (int(kind), int(index)) != wanted:
            return None
        with session.guarded():
            _finish_work_on(source, int(index))
            value = session.engine.OrtValue.from_dlpack(source)
            return OrtTensor(session, value, None, source)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        session = self._session
        names = list(outputs)
        with session.guarded():
            core = session.open_core()
            if session.recipe.device_graph:
                return session.graph_runs(core).run(core, feeds, names, resident)
            given = {name: feeds[name] for name in sorted(feeds) if feeds[name] is not None}
            return session.run_values(
                core, names, given, resident, lambda: self._run_bound(core, given, names, resident)
            )

    def _run_bound(
        self, core: SessionCore, feeds: Mapping[str, Any], names: Sequence[str], resident: Collection[str]
    ) -> list[Any]:
        session, io = self._session, core.session.io_binding()
        kept = [_bind_input(session, core, io, name, value) for name, value in feeds.items()]
        here, host = self._places
        for name in names:
            place = here if name in resident else host
            inner = getattr(io, "_iobinding", None)
            if inner is None or place.inner is None:
                io.bind_output(name, *place.names)
            else:  # the public call would make a new device object each time
                inner.bind_output(name, place.inner)
        _run_binding(core.session, io, core.options)
        del kept
        found = []
        for name, value in zip(names, io.get_outputs(), strict=True):
            own = _copied(session, value, session.output_types[name]) if name in session.handed_on else value
            found.append(OrtTensor(session, own, core) if name in resident else from_ort_value(own, name))
        return found

    def loop(self, inputs: Sequence[str], outputs: Sequence[str], resident: Collection[str]) -> Loop:
        """Return a run to be repeated over one binding; see `Binder.loop`."""
        session = self._session
        if not _OrtLoop.possible(session, self._places, inputs, outputs):
            return super().loop(inputs, outputs, resident)
        with session.guarded():
            return _OrtLoop(session, self._places, inputs, outputs, resident).run

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any] | str]) -> BoundRun | None:
        """Return a run over one binding; see `Binder.bound`."""
        session = self._session
        if session.recipe.device_graph or any(not is_tensor_like(session.input_types[name]) for name in inputs):
            return None
        if any(name in session.handed_on or not is_tensor_like(session.output_types[name]) for name in outputs):
            return None
        with session.guarded():
            return _OrtBoundRun(session, inputs, outputs)

    def slots(self, inputs: Arrays, outputs: Arrays, fixed: Collection[str]) -> Slots | None:
        """Return fixed buffers bound to the session; see `Binder.slots`."""
        session = self._session
        if not session.handed_on.isdisjoint(outputs):
            return RunSlots(session, list(inputs), outputs, fixed)
        types = {**session.input_types, **session.output_types}
        for name in (*inputs, *outputs):
            kind = types[name]
            if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or kind.dtype.is_packed:
                return None
            if not self._keeps_on_host and has_foreign_dtype(kind):
                return None
        if session.runs_slots:
            known = session.recipe.pinned is not None and set(outputs) <= set(fixed) and not session.refuses
            return _PlainSlots(session, list(inputs), outputs, self._places[1].inner if known else None)
        if session.recipe.device_graph:
            return RunSlots(session, list(inputs), outputs, ())
        if not self._keeps_on_host:
            return _LoopSlots(self.loop(list(inputs), list(outputs), ()))
        with session.guarded():
            return _HostSlots(session, types, inputs, outputs, fixed)


class GraphRuns:
    """The one binding of a session that records its launches once and replays them: fixed addresses, static shapes.

    Values are copied to its fixed inputs and from its fixed outputs, since a replay has no others. The caller holds the
    session's lock.
    """

    def __init__(self, session: OrtEngineSession, core: SessionCore) -> None:
        if session.handed_on:
            name = min(session.handed_on)
            raise EngineError(f"output {name!r} is an input or a weight itself, which no device graph writes")
        self._session = session
        self._io = core.session.io_binding()
        self._inputs = {spec.name: self._fixed(spec.name, spec.type) for spec in session.inputs}
        self._outputs = {spec.name: self._fixed(spec.name, spec.type) for spec in session.outputs}
        for name, value in self._inputs.items():
            self._io.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._io.bind_ortvalue_output(name, value)

    def run(
        self, core: SessionCore, feeds: Mapping[str, Any], names: Sequence[str], resident: Collection[str] = ()
    ) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        kept = []
        for name, value in feeds.items():
            given, before = value.value_for(core) if isinstance(value, OrtTensor) else (value, None)
            self._inputs[name].update_inplace(given)
            kept.append(before)
        _run_binding(core.session, self._io, core.options)
        found: list[Any] = []
        for name in names:
            value = self._outputs[name]
            if name in resident:
                copy = self._fixed(name, self._session.output_types[name])
                copy.update_inplace(value)
                found.append(OrtTensor(self._session, copy, core))
            else:
                found.append(value.numpy())
        return found

    def _fixed(self, name: str, kind: ValueType) -> Any:
        static = isinstance(kind, TensorType) and kind.shape is not None and kind.shape.is_static
        if not isinstance(kind, TensorType) or kind.shape is None or not static or has_foreign_dtype(kind):
            raise EngineError(
                f"a device graph needs tensors of numbers with static shapes, and {name!r} is {kind}; bind its dims "
                "with CompileOptions(dims=...), or compile without device_graph"
            )
        make = self._session.engine.OrtValue.ortvalue_from_shape_and_type
        return make(list(kind.shape.static()), kind.dtype.numpy, *self._session.recipe.memory)


def _finish_work_on(source: Any, index: int) -> None:
    """Wait for the library of a CUDA tensor to finish its queue, since ONNX Runtime uses another stream."""
    library = sys.modules.get(type(source).__module__.partition(".")[0])
    if library is not None and library.__name__ == "torch":
        library.cuda.current_stream(index).synchronize()
    elif library is not None and library.__name__ == "cupy":
        library.cuda.get_current_stream().synchronize()


class _Place:
    """A memory that outputs may be left in."""

    def __init__(self, engine: Any, memory: str, index: int) -> None:
        self.names = (memory, index)
        make = getattr(getattr(engine, "OrtDevice", None), "make", None)
        inner = None if make is None else getattr(make(memory, index), "_get_c_device", None)
        self.inner = None if inner is None else inner()


class _OrtLoop:
    """A loop over one binding, by the engine's inner objects: their public wrappers take half the time of a binding.

    What does not change from step to step stays bound: small arrays are copied into bound memory, and unchanged tensors
    are left as they are. Outputs are bound anew each time, or a run would overwrite those of the last. The session's
    guard is held while the loop is made; `places` are the device's memory and the host's.
    """

    def __init__(
        self,
        session: OrtEngineSession,
        places: tuple[_Place, _Place],
        inputs: Sequence[str],
        outputs: Sequence[str],
        resident: Collection[str],
    ) -> None:
        core = session.open_core()
        recipe = session.recipe
        here, host = places
        self._session = session
        self._io = core.session.io_binding()
        self._call, self._binding = _binding_call(core.session, self._io)
        self._core = core
        self._unguarded = _needs_no_guard(session)
        self._keeps_on_host = recipe.memory == HOST_MEMORY
        self._inputs = list(inputs)
        self._bound: list[Any] = [None] * len(inputs)  # a tensor, or (array, value) of fixed memory
        self._outputs = [(name, (here if name in resident else host).inner) for name in outputs]
        self._stays = [name in resident for name in outputs]
        self._order = sorted(range(len(inputs)), key=inputs.__getitem__)  # as in `OrtBinder.run`
        self._names = list(outputs)
        self._resident = frozenset(resident)

    @staticmethod
    def possible(
        session: OrtEngineSession, places: tuple[_Place, _Place], inputs: Sequence[str], outputs: Sequence[str]
    ) -> bool:
        """Return whether the engine has the inner objects, and all values are tensors that numpy can hold."""
        kinds = [session.input_types[name] for name in inputs] + [session.output_types[name] for name in outputs]
        return (
            not session.recipe.device_graph
            and session.handed_on.isdisjoint(outputs)
            and all(place.inner is not None for place in places)
            and hasattr(session.open_core().session, "_sess")
            and hasattr(session.engine.OrtValue.ortvalue_from_numpy(np.zeros(1)), "_ortvalue")
            and all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in kinds)
            and not any(has_foreign_dtype(session.output_types[name]) for name in outputs)
        )

    def run(self, values: Sequence[Any]) -> list[Any]:
        session = self._session
        if not self._unguarded:
            with session.guarded():
                feeds = {self._inputs[place]: values[place] for place in self._order}
                return session.run_values(self._core, self._names, feeds, self._resident, lambda: self._run(values))
        try:
            return self._run(values)
        except session.errors as err:
            raise running_error(err, session.device) from err

    def _run(self, values: Sequence[Any]) -> list[Any]:
        session, core, inner, bound = self._session, self._core, self._binding, self._bound
        session.open_core()
        bind = inner.bind_ortvalue_input
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
                bound[index] = self._fixed(self._inputs[index], value)
        bind = inner.bind_output
        for name, place in self._outputs:
            bind(name, place)
        self._call(inner, core.options)
        del kept
        vector = inner.get_outputs()
        on_host = self._keeps_on_host
        return [
            OrtTensor(session, vector[index], core, None, on_host) if stays else vector[index].numpy()
            for index, stays in enumerate(self._stays)
        ]

    def _fixed(self, name: str, value: Any) -> Any:
        """Bind an array, in memory that later arrays of its shape can be copied into where that is cheaper."""
        kind = self._session.input_types[name]
        plain = value.__class__ is np.ndarray and not has_foreign_dtype(kind)
        memory = self._session.bound_memory(name)
        if not plain or memory is None or (memory == HOST_MEMORY and value.nbytes > _COPY_AT_MOST_BYTES):
            # Kept until the next run, which binds again: the owner may reallocate the array meanwhile.
            return [_bind_input(self._session, self._core, self._io, name, value)]
        own = np.array(value, order="C")
        found = self._session.engine.OrtValue.ortvalue_from_numpy(own, *memory)
        self._io.bind_ortvalue_input(name, found)
        return own, found, memory == HOST_MEMORY

    def _written(self, fixed: tuple[npt.NDArray[Any], Any, bool], value: Any) -> bool:
        """Copy an array into bound memory, if it is one of the same shape and dtype."""
        own, found, on_host = fixed
        if value.__class__ is not np.ndarray or value.shape != own.shape or value.dtype != own.dtype:
            return False
        if on_host:
            own[...] = value
        else:
            found.update_inplace(np.ascontiguousarray(value).reshape(value.shape))
        return True


class _OrtBoundRun(BoundRun):
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
        self._call, self._binding = _binding_call(core.session, self._io)
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
        self._unguarded = _needs_no_guard(session) and not self._sent
        self._memory = inputs, outputs
        self._given = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
        self._results = {name: place for name, place in outputs.items() if isinstance(place, np.ndarray)}
        self._recordings = core.recordings
        self._replay: Any = None
        self._end_replay: Callable[[], object] = _nothing
        self._runs = 0
        self._least_ns = [1 << 62, 1 << 62]  # of runs and of replays

    def run(self) -> None:
        session = self._session
        if self._unguarded:
            try:
                self._call(self._binding, self._core.options)
            except session.errors as err:
                raise running_error(err, session.device) from err
            return
        with session.guarded():
            recordings, options = self._recordings, self._core.options
            if recordings is not None and self._runs == _CHECKED_RUNS and options is recordings.shared:
                for place, found in zip(self._results.values(), self._replay.run(self._given), strict=True):
                    place[...] = found
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
                found = self._replay.run(self._given)
                now = took_ns, time.perf_counter_ns() - begun_ns
                self._least_ns = [min(pair) for pair in zip(self._least_ns, now, strict=True)]
                check_replay(list(self._results), list(self._results.values()), found)
                if self._runs == _CHECKED_RUNS:
                    check_worth(*self._least_ns)
        except NotRecordedError as err:
            self._refuse(str(err))

    def _refuse(self, reason: str) -> None:
        if self._recordings is not None:
            _log.info("steps are not replayed: %s", reason)
        self._end_replay()
        self._recordings = self._replay = None

    def _bind(self, name: str, value: Any) -> None:
        session = self._session
        if isinstance(value, OrtTensor):
            self._kept[name] = kept = value.value_for(self._core)
            self._io.bind_ortvalue_input(name, kept[0])
            return
        kind, memory = session.input_types[name], session.bound_memory(name)
        if memory is None or memory == HOST_MEMORY or has_foreign_dtype(kind):
            found = to_ort_value(session.engine, name, value, kind)
            if memory != HOST_MEMORY:
                self._sent[name] = value, None  # the engine copies what is bound
        else:
            found = (session.engine.OrtValue.ortvalue_from_numpy(value, *memory), None)
            self._sent[name] = value, found[0]
        self._kept[name] = found
        self._io.bind_ortvalue_input(name, found[0])


def _nothing() -> None:
    """There is no replay to end."""


def _needs_no_guard(session: OrtEngineSession) -> bool:
    """Return whether runs hold no lock and need no preparation."""
    return session.recipe.run_lock is nothing_to_hold and session.recipe.before_run is None and not session.takes_turns


def _copied(session: OrtEngineSession, value: Any, kind: ValueType) -> Any:
    """Return a copy of an OrtValue in memory of its own, if it is a tensor in host memory, which is only borrowed."""
    if not is_tensor_like(kind) or not value.has_value() or value.device_name().lower() != "cpu":
        return value
    dtype = dtype_of(value.element_type())
    foreign = has_foreign_dtype(TensorType(dtype))
    element = value.element_type() if foreign else dtype.numpy
    copy = session.engine.OrtValue.ortvalue_from_shape_and_type(list(value.shape()), element)
    copy.update_inplace(value if foreign else value.numpy())
    return copy


def _bind_input(session: OrtEngineSession, core: SessionCore, io: Any, name: str, value: Any) -> Any:
    """Bind one input and return what must live until the run has ended; the session's guard is held."""
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


def _run_binding(session: Any, io: Any, options: Any) -> None:
    call, binding = _binding_call(session, io)
    call(binding, options)


class _LoopSlots(Slots):
    """Slots of a provider with its own memory: a loop writes to fixed tensors there, and its outputs are new arrays."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        return self._loop(arrays)


class _HostSlots(Slots):
    """Slots in host memory, read and written in place; inputs that the provider copies are bound in each run."""

    def __init__(
        self,
        session: OrtEngineSession,
        types: Mapping[str, ValueType],
        inputs: Arrays,
        outputs: Arrays,
        fixed: Collection[str],
    ) -> None:
        self._session = session
        self._core = session.open_core()
        self._types = types
        self._io = self._core.session.io_binding()
        self._kept: list[Any] = []
        self._copied: list[tuple[int, npt.NDArray[Any]]] = []
        self._bound: dict[str, tuple[int, Any]] = {}
        self._varying = [name for name in outputs if name not in fixed]
        for index, (name, like) in enumerate(inputs.items()):
            if like.nbytes > _COPY_AT_MOST_BYTES or session.bound_memory(name) is None:
                self._bound[name] = (index, None)
                continue
            buffer = np.empty_like(like, order="C")
            self._bind(self._io.bind_ortvalue_input, name, buffer)
            self._copied.append((index, buffer))
        self._places = {name: np.array(like, order="C") for name, like in outputs.items() if name in fixed}
        for name, place in self._places.items():
            self._bind(self._io.bind_ortvalue_output, name, place)
        self._results = list(self._places.values())
        self._names = list(outputs)
        self._simple = not self._bound and not self._varying
        self._call, self._binding = _binding_call(self._core.session, self._io)
        self._copy = _copier([buffer for _, buffer in self._copied])
        self._errors = session.errors

    @property
    def bound(self) -> Arrays:
        return self._places

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        try:
            if self._simple:
                self._copy(arrays)
                self._call(self._binding, self._core.options)
                return self._results
            return self._run_all(arrays)
        except self._errors as err:
            raise running_error(err, self._session.device) from err

    def _run_all(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        for index, buffer in self._copied:
            buffer[...] = arrays[index]
        for name, (index, _) in self._bound.items():
            value = to_ort_value(self._session.engine, name, arrays[index], self._types[name])
            self._io.bind_ortvalue_input(name, value[0])
            self._bound[name] = (index, value)  # borrowed until the next run
        for name in self._varying:
            self._io.bind_output(name, "cpu", 0)
        self._call(self._binding, self._core.options)
        if not self._varying:
            return self._results
        values = dict(zip(self._names, self._io.get_outputs(), strict=True))
        return [
            self._places[name] if name in self._places else from_ort_value(values[name], name) for name in self._names
        ]

    def _bind(self, bind: Any, name: str, buffer: npt.NDArray[Any]) -> None:
        value, memory = to_ort_value(self._session.engine, name, buffer, self._types[name])
        bind(name, value)
        self._kept.append((value, memory))


class _PlainSlots(Slots):
    """Slots of a session whose plain runs are cheaper than bound device buffers, and whose launches may be recorded.

    Outputs of known shapes are pinned buffers; copies to other memory take twice as long, and a new array each time.
    Inputs are read in place: copying them to pinned memory costs as much as it saves. `host` is the engine's device
    object of host memory, None where the outputs are new arrays in plain runs.
    """

    def __init__(self, session: OrtEngineSession, inputs: list[str], outputs: Arrays, host: Any) -> None:
        self._session = session
        self._before = session.recipe.before_run
        self._errors = session.errors
        self._owner = next(_owners)
        self._inputs = inputs
        self._outputs = list(outputs)
        self._pinned: _PinnedOutputs | None = None
        if host is not None:
            with contextlib.suppress(NotRecordedError):
                self._pinned = _PinnedOutputs(session, host, inputs, outputs)

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        core, pinned = self._session.open_core(), self._pinned
        try:
            if self._before is not None:
                self._before()
            recordings = core.recordings
            if recordings is None and pinned is not None:
                return pinned.run(core, arrays)
            feeds = dict(zip(self._inputs, arrays, strict=True))
            if recordings is None or (pinned is None and not recordings.active):
                found: list[npt.NDArray[Any]] = core.call(self._outputs, feeds, core.options)
                return found
            plain = None if pinned is None else partial(pinned.run, core, arrays)
            return recordings.run_slots(self._owner, self._outputs, feeds, plain)
        except self._errors as err:
            raise running_error(err, self._session.device) from err


class _PinnedOutputs:
    """Runs to pinned buffers, by ONNX Runtime's vectors of values.

    A binding would keep the session alive, and block other threads of Python while it copies inputs. Making it raises
    `NotRecordedError` where the outputs are too large, or the engine has no vectors.
    """

    def __init__(self, session: OrtEngineSession, host: Any, inputs: list[str], outputs: Arrays) -> None:
        make = session.recipe.pinned
        inner: Any = type(getattr(session.engine.OrtValue.ortvalue_from_numpy(np.zeros(1)), "_ortvalue", None))
        vector = getattr(sys.modules.get(inner.__module__), "OrtValueVector", None)
        if make is None or vector is None or sum(like.nbytes for like in outputs.values()) > _MOST_PINNED_BYTES:
            raise NotRecordedError("its outputs cannot be pinned")
        self._value, self._vector, self._host = inner.ortvalue_from_numpy, vector, host
        self._inputs, self._outputs = inputs, list(outputs)
        self._places = [make(like) for like in outputs.values()]
        self._hosts = [host] * len(self._places)
        self._fetches = vector()
        for place in self._places:
            self._fetches.push_back(self._value(place, host))

    def run(self, core: SessionCore, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        ready = [array if array.flags.c_contiguous else array.copy() for array in arrays]  # values borrow them
        feeds = self._vector()
        for array in ready:
            feeds.push_back(self._value(array, self._host))
        core.session.run_with_ortvaluevector(
            core.options, self._inputs, feeds, self._outputs, self._fetches, self._hosts
        )
        return self._places


_owners = itertools.count(1)


def _copier(buffers: Sequence[npt.NDArray[Any]]) -> Callable[[Sequence[npt.NDArray[Any]]], object]:
    """Return a function that copies arrays into buffers; without a loop, which costs as much again, for one and two."""
    if len(buffers) == 1:
        (only,) = buffers

        def copy_one(arrays: Sequence[npt.NDArray[Any]]) -> None:
            only[...] = arrays[0]

        return copy_one
    puts = [buffer.__setitem__ for buffer in buffers]
    if len(puts) == 2:
        first, second = puts
        return lambda arrays: (first(..., arrays[0]), second(..., arrays[1]))

    def copy_all(arrays: Sequence[npt.NDArray[Any]]) -> None:
        for put, array in zip(puts, arrays, strict=True):
            put(..., array)

    return copy_all


def _binding_call(session: Any, io: Any) -> tuple[Any, Any]:
    """Return the cheapest call that runs a binding, and its argument; the public call adds half a microsecond."""
    call = getattr(getattr(session, "_sess", None), "run_with_iobinding", None)
    inner = getattr(io, "_iobinding", None)
    if call is None or inner is None:
        return session.run_with_iobinding, io
    return call, inner
