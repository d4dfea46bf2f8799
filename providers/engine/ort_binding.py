"""`OrtBinder`: tensors on a device, and fixed buffers of an ONNX Runtime session, by its IOBinding.

An IOBinding belongs to one thread, so each run has its own; loops (`ort_loops.py`) and slots keep theirs, and slots
leave the locking to the caller. ONNX Runtime's private attributes are used for speed only, each in one function with
the public call as its fallback.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import dtype_of
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import EngineSession
from rlx_ort.providers.engine import stopping
from rlx_ort.providers.engine.binding import Arrays, Binder, BoundRun, DeviceTensor, Loop, Slots
from rlx_ort.providers.engine.lent_outputs import HostVectors
from rlx_ort.providers.engine.ort_loops import Binding, OrtBoundRun, bind_input
from rlx_ort.providers.engine.recipe import HOST_MEMORY
from rlx_ort.providers.engine.replays import NotRecordedError
from rlx_ort.providers.engine.runtime import running_error
from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore, run_binding
from rlx_ort.providers.engine.values import (
    DLPACK_DEVICE,
    OrtTensor,
    Place,
    from_ort_value,
    has_foreign_dtype,
    is_tensor_like,
    to_ort_value,
)

_MOST_PINNED_BYTES = 256 << 20  # of one set of slots; pinned memory is taken from all processes
_owners = itertools.count(1)

_Pinned: TypeAlias = tuple[HostVectors, list[npt.NDArray[Any]], Any]
"""What runs a session into pinned buffers, the buffers, and a vector of them."""


def binder_of(session: EngineSession) -> Binder:
    """Return the memory side of a session; one over host memory if its engine has no other."""
    if isinstance(session, OrtEngineSession):
        return OrtBinder(session)
    own: Binder | None = getattr(session, "binder", None)
    return Binder(session.run) if own is None else own


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
        return self._keeps_on_host and all(session.bound_memory(name) == HOST_MEMORY for name in session.input_types)

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device with a copy of the array; see `Binder.upload`."""
        with self._session.guarded():
            self._session.open_core()
            return self._uploaded(array)

    def _uploaded(self, array: npt.NDArray[Any]) -> DeviceTensor:
        session, kind = self._session, TensorType(DType.from_numpy(array.dtype))
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
        kept = [bind_input(session, core, io, name, value) for name, value in feeds.items()]
        here, host = self._places
        on_device = resident if not session.host_outputs else set(resident).difference(session.host_outputs)
        for name in names:
            place = here if name in on_device else host
            inner = getattr(io, "_iobinding", None)
            if inner is None or place.inner is None:
                io.bind_output(name, *place.names)
            else:  # the public call would make a new device object each time
                inner.bind_output(name, place.inner)
        run_binding(core.session, io, core.options)
        del kept
        outputs: list[Any] = []
        for name, value in zip(names, io.get_outputs(), strict=True):
            own = _copied(session, value, session.output_types[name]) if name in session.handed_on else value
            if name in on_device:
                outputs.append(OrtTensor(session, own, core))
            else:
                array = from_ort_value(own, name)
                outputs.append(self._uploaded(array) if name in resident else array)
        return outputs

    def loop(self, inputs: Sequence[str], outputs: Sequence[str], resident: Collection[str]) -> Loop:
        """Return a run to be repeated over one binding; see `Binder.loop`."""
        session = self._session
        if not Binding.possible(session, self._places, inputs, outputs):
            return super().loop(inputs, outputs, resident)
        with session.guarded():
            return Binding(session, self._places, inputs, outputs, resident).run

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any] | str]) -> BoundRun | None:
        """Return a run over one binding; see `Binder.bound`."""
        session = self._session
        if session.recipe.device_graph or any(not is_tensor_like(session.input_types[name]) for name in inputs):
            return None
        if session.copies_back and any(
            isinstance(place, np.ndarray) or name in session.host_outputs for name, place in outputs.items()
        ):
            return None
        if any(name in session.handed_on or not is_tensor_like(session.output_types[name]) for name in outputs):
            return None
        with session.guarded():
            return OrtBoundRun(session, inputs, outputs)

    def slots(self, inputs: Arrays, outputs: Arrays, fixed: Collection[str]) -> Slots | None:
        """Return fixed buffers bound to the session; see `Binder.slots`."""
        session = self._session
        if not session.handed_on.isdisjoint(outputs):
            return Slots(session.run, list(inputs), outputs, fixed)
        types = {**session.input_types, **session.output_types}
        for name in (*inputs, *outputs):
            kind = types[name]
            if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or kind.dtype.is_packed:
                return None
            if not self._keeps_on_host and has_foreign_dtype(kind):
                return None
        if session.runs_slots:
            known = session.recipe.pinned is not None and set(outputs) <= set(fixed)
            known = known and not session.refuses and not session.copies_back
            if known:  # declared sizes may not be kept, and ONNX Runtime compares the number of elements alone here
                inferred = session.infer_outputs({name: array.shape for name, array in inputs.items()})
                known = all(inferred.get(name) == array.shape for name, array in outputs.items())
            return PlainSlots(session, list(inputs), outputs, pinned=known)
        fixed = fixed if self._keeps_on_host else ()
        if not Binding.possible(session, self._places, inputs, outputs):
            return Slots(session.run, list(inputs), outputs, fixed)
        kept = {name: np.array(like, order="C") for name, like in outputs.items() if name in fixed}
        with session.guarded():
            binding = Binding(session, self._places, list(inputs), list(outputs), (), kept)
            return BoundSlots(session, binding, list(inputs.values()), kept)


def _finish_work_on(source: Any, index: int) -> None:
    """Wait for the library of a CUDA tensor to finish its queue, since ONNX Runtime uses another stream."""
    library = sys.modules.get(type(source).__module__.partition(".")[0])
    if library is not None and library.__name__ == "torch":
        library.cuda.current_stream(index).synchronize()
    elif library is not None and library.__name__ == "cupy":
        library.cuda.get_current_stream().synchronize()


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


class BoundSlots(Slots):
    """Slots over a binding: outputs in host memory are written in place, those in other memory are new arrays."""

    def __init__(
        self, session: OrtEngineSession, binding: Binding, like: Sequence[npt.NDArray[Any]], fixed: Arrays
    ) -> None:
        self._device = session.device
        self._errors = session.errors
        self._binding = binding
        self._call, self._inner, self._core = binding.call, binding.inner, binding.core
        self._buffers = fixed
        self._results = list(fixed.values())
        self._varies = fixed.keys() != session.output_types.keys()
        buffers = None
        if session.recipe.memory == HOST_MEMORY:
            binding.bind(like)
            buffers = binding.buffers()
        self._copy = None if buffers is None else _copier(buffers)

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Run on one array per input; see `Slots.run`."""
        copy = self._copy
        if copy is None:
            return self._binding.run(arrays)
        try:
            copy(arrays)
            if self._varies:
                return self._binding.launch()
            shared = self._core.shared
            self._call(self._inner, stopping.run_options(shared) if stopping.in_use else shared)
            return self._results
        except self._errors as err:
            raise running_error(err, self._device) from err


class PlainSlots(Slots):
    """Slots of a session whose plain runs are cheaper than bound device buffers, and whose launches may be recorded.

    Outputs of known shapes are pinned buffers; copies to other memory take twice as long, and a new array each time.
    Inputs are read in place: copying them to pinned memory costs as much as it saves. Unless `pinned`, the outputs of
    plain runs are new arrays.
    """

    def __init__(self, session: OrtEngineSession, inputs: list[str], outputs: Arrays, pinned: bool) -> None:
        self._session = session
        self._before = session.recipe.before_run
        self._errors = session.errors
        self._owner = next(_owners)
        self._inputs = inputs
        self._outputs = list(outputs)
        self._pinned: _Pinned | None = None
        make = session.recipe.pinned if pinned else None
        if make is not None and sum(like.nbytes for like in outputs.values()) <= _MOST_PINNED_BYTES:
            with contextlib.suppress(NotRecordedError):
                vectors = HostVectors(session.engine)
                places = [make(like) for like in outputs.values()]
                self._pinned = vectors, places, vectors.of(places)

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Run on one array per input; see `Slots.run`."""
        core, pinned = self._session.open_core(), self._pinned
        try:
            if self._before is not None:
                self._before()
            recordings = core.recordings
            if recordings is None and pinned is not None:
                return self._run_pinned(pinned, core, arrays)
            feeds = dict(zip(self._inputs, arrays, strict=True))
            if recordings is None or (pinned is None and not recordings.active):
                outputs: list[npt.NDArray[Any]] = core.call(self._outputs, feeds, core.options)
                return outputs
            plain = None if pinned is None else partial(self._run_pinned, pinned, core, arrays)
            return recordings.run_slots(self._owner, self._outputs, feeds, plain)
        except self._errors as err:
            raise running_error(err, self._session.device) from err

    def _run_pinned(
        self, pinned: _Pinned, core: SessionCore, arrays: Sequence[npt.NDArray[Any]]
    ) -> list[npt.NDArray[Any]]:
        vectors, places, fetches = pinned
        feeds = dict(zip(self._inputs, arrays, strict=True))
        vectors.run(core.session, core.options, feeds, self._outputs, fetches)
        return places


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
