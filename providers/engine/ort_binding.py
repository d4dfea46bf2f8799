"""`OrtBinder`: tensors on a device, and fixed buffers of an ONNX Runtime session, by its IOBinding.

An IOBinding belongs to one thread, so each run has its own; slots keep theirs and leave the locking to the caller.
ONNX Runtime's private attributes are used for speed only, each in one function with the public call as its fallback.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import Arrays, Binder, DeviceTensor, Loop, Slots
from rlx_ort.providers.engine.ort_slots import (
    COPY_AT_MOST_BYTES,
    DeviceSlots,
    GraphSlots,
    HostSlots,
    RunSlots,
    binding_call,
)
from rlx_ort.providers.engine.ort_tensor import DLPACK_DEVICE, OrtTensor
from rlx_ort.providers.engine.recipe import HOST_MEMORY, nothing_to_hold
from rlx_ort.providers.engine.runtime import running_error
from rlx_ort.providers.engine.values import from_ort_value, has_foreign_dtype, is_tensor_like, to_ort_value

if TYPE_CHECKING:
    from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore

__all__ = ["GraphRuns", "OrtBinder", "OrtLoop", "Place", "bind_input", "bind_output", "run_binding"]


class OrtBinder(Binder):
    """The memory side of an ONNX Runtime session. Every call but those of `Slots` may come from any thread."""

    def __init__(self, session: OrtEngineSession) -> None:
        self._session = session
        self._memory, self._index = session.recipe.memory
        self._keeps_on_host = session.recipe.memory == HOST_MEMORY
        self._places = (Place(session.engine, self._memory, self._index), Place(session.engine, "cpu", 0))

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
                return session.graph_runs(core).run_values(core, feeds, names, resident)
            given = {name: feeds[name] for name in sorted(feeds) if feeds[name] is not None}
            return session.run_values(
                core, names, given, resident, lambda: self._run_bound(core, given, names, resident)
            )

    def _run_bound(
        self, core: SessionCore, feeds: Mapping[str, Any], names: Sequence[str], resident: Collection[str]
    ) -> list[Any]:
        session, io = self._session, core.session.io_binding()
        kept = [bind_input(session, core, io, name, value) for name, value in feeds.items()]
        here, host = self._places
        for name in names:
            bind_output(io, name, here if name in resident else host)
        run_binding(core.session, io, core.options)
        del kept
        values = io.get_outputs()
        return [
            OrtTensor(session, value, core) if name in resident else from_ort_value(value, name)
            for name, value in zip(names, values, strict=True)
        ]

    def loop(self, inputs: Sequence[str], outputs: Sequence[str], resident: Collection[str]) -> Loop:
        """Return a run to be repeated over one binding; see `Binder.loop`."""
        session = self._session
        if not OrtLoop.possible(session, self._places, inputs, outputs):
            return super().loop(inputs, outputs, resident)
        with session.guarded():
            return OrtLoop(session, self._places, inputs, outputs, resident)

    def slots(self, inputs: Arrays, outputs: Arrays, fixed: Collection[str]) -> Slots | None:
        """Return fixed buffers bound to the session; see `Binder.slots`."""
        session = self._session
        types = {spec.name: spec.type for spec in (*session.inputs, *session.outputs)}
        for name in (*inputs, *outputs):
            kind = types[name]
            if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or kind.dtype.is_packed:
                return None
            if not self._keeps_on_host and has_foreign_dtype(kind):
                return None
        if session.runs_slots:
            known = session.recipe.pinned is not None and set(outputs) <= set(fixed) and not session.refuses
            return RunSlots(session, list(inputs), outputs, self._places[1].inner if known else None)
        with session.guarded():
            if session.recipe.device_graph:
                return GraphSlots(session, list(inputs), list(outputs))
            if self._keeps_on_host:
                return HostSlots(session, types, inputs, outputs, fixed)
            return DeviceSlots(session, types, inputs, outputs)


class GraphRuns:
    """The one binding of a session that records its launches once and replays them: fixed addresses, static shapes.

    Values are copied to its fixed inputs and from its fixed outputs, since a replay has no others. The caller holds the
    session's lock.
    """

    def __init__(self, session: OrtEngineSession, core: SessionCore) -> None:
        self._session = session
        self._io = core.session.io_binding()
        self._inputs = {spec.name: self._fixed(spec.name, spec.type) for spec in session.inputs}
        self._outputs = {spec.name: self._fixed(spec.name, spec.type) for spec in session.outputs}
        for name, value in self._inputs.items():
            self._io.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._io.bind_ortvalue_output(name, value)

    def run(self, core: SessionCore, names: Sequence[str], feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Run on arrays and return the named outputs as arrays."""
        return self.run_values(core, feeds, names, ())

    def run_values(
        self, core: SessionCore, feeds: Mapping[str, Any], names: Sequence[str], resident: Collection[str]
    ) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        kept = []
        for name, value in feeds.items():
            given, before = value.value_for(core) if isinstance(value, OrtTensor) else (value, None)
            self._inputs[name].update_inplace(given)
            kept.append(before)
        run_binding(core.session, self._io, core.options)
        found: list[Any] = []
        for name in names:
            value = self._outputs[name]
            if name in resident:
                copy = self._fixed(name, self._session.output_type(name))
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


class Place:
    """A memory that outputs may be left in."""

    def __init__(self, engine: Any, memory: str, index: int) -> None:
        self.names = (memory, index)
        make = getattr(getattr(engine, "OrtDevice", None), "make", None)
        inner = None if make is None else getattr(make(memory, index), "_get_c_device", None)
        self.inner = None if inner is None else inner()


class OrtLoop(Loop):
    """A loop over one binding, by the engine's inner objects: their public wrappers take half the time of a binding.

    What does not change from step to step stays bound: small arrays are copied into bound memory, and unchanged tensors
    are left as they are. Outputs are bound anew each time, or a run would overwrite those of the last.

    Args:
        session: the session to run; its guard is held while the loop is made.
        places: the device's memory, and the host's.
        inputs: the names of the inputs, in the order in which values come.
        outputs: the names of the outputs.
        resident: the outputs that stay on the device.
    """

    def __init__(
        self,
        session: OrtEngineSession,
        places: tuple[Place, Place],
        inputs: Sequence[str],
        outputs: Sequence[str],
        resident: Collection[str],
    ) -> None:
        core = session.open_core()
        recipe = session.recipe
        here, host = places
        self._session = session
        self._io = core.session.io_binding()
        self._call, self._binding = binding_call(core.session, self._io)
        self._core = core
        self._unguarded = recipe.run_lock is nothing_to_hold and recipe.before_run is None and not session.takes_turns
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
        session: OrtEngineSession, places: tuple[Place, Place], inputs: Sequence[str], outputs: Sequence[str]
    ) -> bool:
        """Return whether the engine has the inner objects, and all values are tensors that numpy can hold."""
        kinds = [session.input_type(name) for name in inputs] + [session.output_type(name) for name in outputs]
        return (
            not session.recipe.device_graph
            and all(place.inner is not None for place in places)
            and hasattr(session.open_core().session, "_sess")
            and hasattr(session.engine.OrtValue.ortvalue_from_numpy(np.zeros(1)), "_ortvalue")
            and all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in kinds)
            and not any(has_foreign_dtype(session.output_type(name)) for name in outputs)
        )

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Bind what changed, run, and return the outputs; see `Loop.run`."""
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
        kind = self._session.input_type(name)
        plain = value.__class__ is np.ndarray and not has_foreign_dtype(kind)
        memory = self._session.bound_memory(name)
        if not plain or memory is None or (memory == HOST_MEMORY and value.nbytes > COPY_AT_MOST_BYTES):
            # Kept until the next run, which binds again: the owner may reallocate the array meanwhile.
            return [bind_input(self._session, self._core, self._io, name, value)]
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


def bind_input(session: OrtEngineSession, core: SessionCore, io: Any, name: str, value: Any) -> Any:
    """Bind one input and return what must live until the run has ended; the session's guard is held.

    Raises:
        EngineError: the value is a list, a map or of strings.
    """
    if isinstance(value, OrtTensor):
        bound, before = value.value_for(core)
        io.bind_ortvalue_input(name, bound)
        return bound, before
    kind = session.input_type(name)
    if isinstance(value, DeviceTensor):
        value = value.numpy()
    if not isinstance(value, np.ndarray) or not is_tensor_like(kind):
        raise EngineError(f"input {name!r} is {kind}, which cannot be bound; only tensors of numbers go with handles")
    bound, memory = to_ort_value(session.engine, name, value, kind)
    io.bind_ortvalue_input(name, bound)
    return bound, memory


def bind_output(io: Any, name: str, place: Place) -> None:
    """Bind an output to a place; the public call would make a new device object each time."""
    inner = getattr(io, "_iobinding", None)
    if inner is None or place.inner is None:
        io.bind_output(name, *place.names)
    else:
        inner.bind_output(name, place.inner)


def run_binding(session: Any, io: Any, options: Any) -> None:
    """Run a binding once."""
    call, binding = binding_call(session, io)
    call(binding, options)
