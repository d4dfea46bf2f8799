"""`OrtBinder`: tensors on a device, fixed buffers and stoppable runs of an ONNX Runtime session, by its IOBinding.

An IOBinding belongs to one thread, so each run has its own; slots keep theirs and leave the locking to the caller.
ONNX Runtime's private attributes are used for speed only, each in a function of its own with a public way beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.execution.device_tensor import DeviceTensor
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.binding import Binder, Slots, StoppableRun
from rlx_ort.providers.ort_slots import DeviceSlots, GraphSlots, HostSlots, binding_call
from rlx_ort.providers.shutdown import watch
from rlx_ort.providers.values import dtype_of, from_ort_value, has_foreign_dtype, is_tensor_like, to_ort_value

if TYPE_CHECKING:
    from rlx_ort.providers.session import OrtEngineSession, SessionCore

__all__ = ["GraphRuns", "OrtBinder", "OrtTensor"]

_DLPACK_CPU = 1
_DLPACK_DEVICE = {"cpu": 1, "cuda": 2}


class OrtTensor(DeviceTensor):
    """An OrtValue with the host memory and the session it needs.

    Args:
        session: the session it was made for.
        value: the OrtValue.
        core: the open session whose allocator owns the memory, None for memory that belongs to no session.
        memory: host memory that the value borrows.
    """

    def __init__(self, session: OrtEngineSession, value: Any, core: SessionCore | None, memory: Any = None) -> None:
        self.value = value
        self._session = session
        self._core = core
        self._memory = memory
        # Asked for when needed: a loop makes many tensors that nobody looks at.
        self._shape: tuple[int, ...] | None = None
        self._known_type: DType | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        if self._shape is None:
            self._shape = tuple(self.value.shape())
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type as numpy, or ml_dtypes, names it."""
        return self._element_type.numpy

    @property
    def _element_type(self) -> DType:
        if self._known_type is None:
            self._known_type = dtype_of(self.value)
        return self._known_type

    def value_for(self, core: SessionCore) -> tuple[Any, Any]:
        """Return the OrtValue for a run of a session, and what must live until it ends; the device's lock is held.

        WebGPU crashes when memory of one session is freed that another session has read. So it is copied, once and on
        the device, to memory that belongs to none; that also lets the other session go.
        """
        before = (self.value, self._core)
        if self._core is not None and self._core is not core and self.value.device_name() != "cpu":
            dtype = self.value.element_type() if has_foreign_dtype(TensorType(self._element_type)) else self.dtype
            make = self._session.engine.OrtValue.ortvalue_from_shape_and_type
            copy = make(list(self.shape), dtype, *self._session.recipe.memory)
            copy.update_inplace(self.value)
            self.value, self._core = copy, None
        return self.value, before

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements on the host, as a copy; see `DeviceTensor.numpy`."""
        with self._session.guarded():
            return _read(self._session.engine, self.value, self._element_type)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Return a DLPack capsule over the memory where it is; see `DeviceTensor.__dlpack__`."""
        kind, _ = self.__dlpack_device__()
        if kind == _DLPACK_CPU:
            return from_ort_value(self.value, "device tensor").__dlpack__(**kwargs)
        with self._session.guarded():
            return self.value.__dlpack__(stream=kwargs.get("stream"))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the device type, and the device's index; see `DeviceTensor.__dlpack_device__`."""
        name = self.value.device_name()
        if name not in _DLPACK_DEVICE:
            raise BufferError(f"memory of {self._session.device.display} cannot be shared through DLPack; use numpy()")
        if has_foreign_dtype(TensorType(self._element_type)):
            name = self._element_type.value
            raise BufferError(f"{name} cannot be shared through DLPack by ONNX Runtime; use numpy()")
        return _DLPACK_DEVICE[name], 0 if name == "cpu" else self._session.device.index


class OrtBinder(Binder):
    """The memory side of an ONNX Runtime session. Every call but those of `Slots` may come from any thread."""

    def __init__(self, session: OrtEngineSession) -> None:
        self._session = session
        self._memory, self._index = session.recipe.memory
        self._places = (_Place(session.engine, self._memory, self._index), _Place(session.engine, "cpu", 0))

    @property
    def on_host(self) -> bool:
        """Whether the device's memory is host memory."""
        return self._memory == "cpu"

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device with a copy of the array; see `Binder.upload`."""
        session = self._session
        with session.guarded():
            session.open_core()
            dtype = DType.from_numpy(array.dtype)
            kind = TensorType(dtype)
            if self.on_host or has_foreign_dtype(kind):
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
        wanted = (_DLPACK_DEVICE.get(self._memory), 0 if self.on_host else self._index)
        if self.on_host or (int(kind), int(index)) != wanted:
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
            io = core.session.io_binding()
            kept = [self._bind(core, io, name, value) for name, value in feeds.items() if value is not None]
            here, host = self._places
            for name in names:
                _bind_output(io, name, here if name in resident else host)
            _run_binding(core.session, io, core.options)
            del kept
            values = io.get_outputs()
            return [
                OrtTensor(session, value, core) if name in resident else from_ort_value(value, name)
                for name, value in zip(names, values, strict=True)
            ]

    def slots(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Mapping[str, npt.NDArray[Any]],
        fixed: Collection[str],
    ) -> Slots | None:
        """Return fixed buffers bound to the session; see `Binder.slots`."""
        session = self._session
        types = {spec.name: spec.type for spec in (*session.inputs, *session.outputs)}
        for name in (*inputs, *outputs):
            kind = types[name]
            if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or kind.dtype.is_packed:
                return None
            if not self.on_host and has_foreign_dtype(kind):
                return None
        with session.guarded():
            if session.recipe.device_graph:
                return GraphSlots(session, list(inputs), list(outputs))
            made = HostSlots if self.on_host else DeviceSlots
            return made(session, types, inputs, outputs, fixed)

    def stoppable(self) -> StoppableRun:
        """Return a run that can be stopped."""
        return _Stoppable(self._session)

    def _bind(self, core: SessionCore, io: Any, name: str, value: Any) -> Any:
        """Bind one input and return what must live until the run has ended."""
        if isinstance(value, OrtTensor):
            bound, memory = value.value_for(core)
            io.bind_ortvalue_input(name, bound)
            return bound, memory
        kind = self._session.input_type(name)
        if isinstance(value, DeviceTensor):
            value = value.numpy()
        if not isinstance(value, np.ndarray) or not is_tensor_like(kind):
            raise EngineError(
                f"input {name!r} is {kind}, which cannot be bound; only tensors of numbers go with handles"
            )
        bound, memory = to_ort_value(self._session.engine, name, value, kind)
        io.bind_ortvalue_input(name, bound)
        return bound, memory


class GraphRuns:
    """The one binding of a session that records its launches once and replays them: fixed addresses, static shapes.

    What goes in is copied to the fixed inputs and what comes out is copied from the fixed outputs, because a replay
    knows no others. The caller holds the session's lock.
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
        _run_binding(core.session, self._io, core.options)
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


class _Stoppable(StoppableRun):
    def __init__(self, session: OrtEngineSession) -> None:
        self._session = session
        self._options = session.engine.RunOptions()
        watch(self)

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run once; see `StoppableRun.run`."""
        return self._session.run(output_names, feeds, self._options)

    def stop(self) -> None:
        """Make the run end at its next node; one that has not begun ends at its first."""
        self._options.terminate = True

    def stop_runs(self) -> None:
        """End the run, for the end of the process."""
        self.stop()


class _Place:
    """A memory that outputs may be left in."""

    def __init__(self, engine: Any, memory: str, index: int) -> None:
        self.names = (memory, index)
        make = getattr(getattr(engine, "OrtDevice", None), "make", None)
        inner = None if make is None else getattr(make(memory, index), "_get_c_device", None)
        self.inner = None if inner is None else inner()


def _bind_output(io: Any, name: str, place: _Place) -> None:
    """Have an output left somewhere; the public call makes the same object for the place each time."""
    inner = getattr(io, "_iobinding", None)
    if inner is None or place.inner is None:
        io.bind_output(name, *place.names)
    else:
        inner.bind_output(name, place.inner)


def _finish_work_on(source: Any, index: int) -> None:
    """Wait for what the library of a CUDA tensor has queued, since ONNX Runtime works on a stream of its own."""
    library = sys.modules.get(type(source).__module__.partition(".")[0])
    if library is not None and library.__name__ == "torch":
        library.cuda.current_stream(index).synchronize()
    elif library is not None and library.__name__ == "cupy":
        library.cuda.get_current_stream().synchronize()


def _run_binding(session: Any, io: Any, options: Any) -> None:
    call, binding = binding_call(session, io)
    call(binding, options)


def _read(engine: Any, value: Any, dtype: DType) -> npt.NDArray[Any]:
    """Return the elements of a value, wherever it is, as an array of its own."""
    if value.device_name() == "cpu":
        found: npt.NDArray[Any] = from_ort_value(value, "device tensor")
        return found if found.flags.owndata else found.copy()
    if not has_foreign_dtype(TensorType(dtype)):
        own: npt.NDArray[Any] = value.numpy()
        return own
    copy = getattr(engine, "copy_tensors", None)
    if copy is None:
        raise EngineError(f"this ONNX Runtime cannot read {dtype.value} from a device; cast the output to f32")
    host = engine.OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type(), "cpu", 0)
    copy([value], [host])
    return _read(engine, host, dtype)
