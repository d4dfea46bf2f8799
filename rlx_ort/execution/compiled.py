"""`CompiledGraph`: a graph that is ready to run on one device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError
from rlx_ort.execution.background import BackgroundRuns
from rlx_ort.execution.engine_slot import Engine, EngineSlot
from rlx_ort.execution.extent import at_extent, check_extent
from rlx_ort.execution.handle_calls import HandleCalls
from rlx_ort.execution.handles import Handles
from rlx_ort.execution.inputs import InputPlan, ResidentFeeds
from rlx_ort.execution.moe_controls import MoeControls
from rlx_ort.execution.pipeline import Pipeline
from rlx_ort.execution.placement import Placement
from rlx_ort.execution.slots import PooledRuns, SlotRunner
from rlx_ort.execution.typed_io import TypedBytes, arrays_from_typed, typed_from_arrays
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.engine.device_tensor import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.device import Device
    from rlx_ort.providers.base import DeviceGraphReport

__all__ = ["CompiledGraph"]


class CompiledGraph(MoeControls, HandleCalls, BackgroundRuns):
    """A graph on one device, with the weights of a store; made by `Session.compile`.

    Runs may be started from several threads at once. A parameter that is set after a run makes the session stale; it
    is opened again before the next run, and no run sees old and new values together.

    Some calls keep state: handles (`bind_handle`, `bind_gpu_handle`), committed runs (`commit_no_wait`), and the fixed
    buffers of `run_slots` and `run_raw`. Runs of a graph with handles, and those through the fixed buffers, take turns
    by a lock; runs of a graph with handles also wait for the committed ones, so the state is that of the order of the
    calls. Handles survive a change of parameters.

    Args:
        slot: holds the session.
        rule: the placement rule.
        inputs: what checks the inputs of runs, where it was made already.
        owns_slot: whether closing the graph closes the slot as well.
    """

    # All else is in `__dict__`, which graphs of other rules on the same slot share; see `held_to`.
    __slots__ = ("_rule", "_strict")

    def __init__(
        self, slot: EngineSlot, rule: PlacementRule, inputs: InputPlan | None = None, *, owns_slot: bool = True
    ) -> None:
        self._slot = slot
        self._rule = rule
        self._strict = rule is PlacementRule.STRICT
        self._owns_slot = owns_slot
        self._weights = slot.weights
        self._inputs = inputs or InputPlan(slot.input_types)
        self._output_names = list(slot.output_types)
        self._last: tuple[list[int] | None, Sequence[Any]] = (None, ())
        types = (slot.input_types, slot.output_types)
        self._handles = Handles(*types, self._inputs)
        self._slots = SlotRunner(*types, self._inputs)
        self._slots_lock = threading.Lock()
        self._pooled = PooledRuns(*types)
        self._many = self._pooled.wanted
        self._pipeline = Pipeline()
        self._extent: tuple[int, int] | None = None
        self._plain = True
        slot.open_if_ready(rule)

    @property
    def device(self) -> Device:
        """The device the graph runs on."""
        return self._slot.device

    @property
    def options(self) -> CompileOptions:
        """The options it was compiled with."""
        return self._slot.options

    @property
    def rule(self) -> PlacementRule:
        """The placement rule it keeps."""
        return self._rule

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the runner that lent it has closed its session."""
        return self._slot.closed

    @property
    def has_handles(self) -> bool:
        """Whether a handle is bound, so that runs may change what later runs give."""
        return bool(self._handles)

    @property
    def has_state(self) -> bool:
        """Whether handles are bound or committed runs were not waited for, so that another device cannot take over."""
        return bool(self._handles) or self._pipeline.busy

    @property
    def exported(self) -> ExportedModel:
        """The ONNX model the engine runs."""
        return self._slot.exported

    @property
    def weights(self) -> WeightStore:
        """The parameters' data, which other compiled graphs may share."""
        return self._weights

    @property
    def input_specs(self) -> Mapping[str, ValueType]:
        """Input name -> declared type, in order."""
        return self._slot.input_types

    @property
    def output_specs(self) -> Mapping[str, ValueType]:
        """Output name -> declared type, in order."""
        return self._slot.output_types

    @property
    def placement(self) -> Placement:
        """Where each node is; opens the session if it is not open yet.

        Raises:
            ParamError: a parameter is not set, so there is no session to look at.
            PlacementError: the nodes are not where the rule wants them.
        """
        if self._slot.placement is None:
            self._slot.engine(self._rule)
        assert self._slot.placement is not None  # noqa: S101  # opening a session fills it in
        return self._slot.placement

    @property
    def is_open(self) -> bool:
        """Whether its session is open now; else the next run opens it."""
        return self._slot.current is not None

    def open(self, *, required: bool = True) -> None:
        """Open the session now and not at the first run; unless `required`, not while a parameter is still to be set.

        Raises:
            ParamError: a parameter is not set, and the session is required.
            PlacementError: the nodes are not where the rule wants them.
            DeviceUnavailableError: the device does not work here.
            LegalizeError: a node has no kernel.
            EngineError: the engine refused the model.
        """
        if required:
            self._slot.engine(self._rule)
        else:
            self._slot.open_if_ready(self._rule)

    def device_graph_report(self) -> DeviceGraphReport:
        """Return which runs replay recorded launches, the memory that takes, and why others do not; opens the session.

        A change of parameters opens a new session, which records anew.

        Raises:
            ParamError: a parameter is not set.
        """
        from rlx_ort.providers.base import DeviceGraphReport

        ask = getattr(self._engine().session, "device_graph_report", None)
        found: DeviceGraphReport = DeviceGraphReport(reason="its engine records nothing") if ask is None else ask()
        return found

    def set_param(self, name: str, array: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data; see `WeightStore.set`.

        Raises:
            ParamError: no such parameter, another shape, or another dtype than declared.
        """
        self._weights.set(name, array, cast=cast)

    def set_param_typed(
        self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str, *, cast: bool = False
    ) -> None:
        """Give a parameter the elements in raw little-endian bytes; see `WeightStore.set_typed`.

        Raises:
            ParamError: no such parameter, a wrong number of bytes, or another dtype than declared.
        """
        self._weights.set_typed(name, data, dtype, cast=cast)

    def update_params(self) -> contextlib.AbstractContextManager[None]:
        """Return a `with` block whose `set_param` calls take effect together, when it ends without an error."""
        return self._weights.update()

    def run(self, inputs: Mapping[str, Any] | None = None) -> list[Any]:
        """Run once and return the outputs as numpy arrays, in the order of the graph's outputs.

        Arrays of the declared dtype are not copied. Outputs that are sequences or maps come as lists or dicts.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype than declared.
            ParamError: a parameter is not set.
            PlacementError: the nodes are not where the rule wants them.
            EngineError: the run failed.
        """
        engine = self._slot.current
        if engine is None or engine.version != self._weights.version or (self._strict and not engine.strict_ok):
            engine = self._slot.engine(self._rule)
        if not self._plain or engine.files:
            return self._run_with_state(_NOTHING if inputs is None else inputs, range(len(self._output_names)))
        given = _NOTHING if inputs is None else inputs
        kind = self._inputs.kind_of(given)
        if kind is None:
            feeds = self._inputs.checked(given, engine)
            resident = feeds.__class__ is ResidentFeeds
            names = self._output_names
            outputs = engine.binder.run(feeds, names, ()) if resident else engine.run(names, feeds)
        elif self._many:
            outputs = self._pooled.run(engine, kind, given)
        else:
            outputs = engine.run(self._output_names, given)
        self._last = (None, outputs)
        return outputs.copy()

    def run_read_outputs(self, inputs: Mapping[str, Any], indices: Sequence[int] | None = None) -> list[Any]:
        """Run once and return only the listed outputs, in the listed order, duplicates kept; None means all.

        Outputs that are not listed are not read back from the device; handles they feed change all the same.

        Raises:
            InputError: an index names no output, or an input is wrong.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        if indices is None:
            return self.run(inputs)
        if self._handles.step is not None and self._extent is None:
            found = self._run_again(inputs, indices)
            if found is not None:
                return found
        return self._run_with_state(inputs, self._indices(indices))

    def read_output_row(self, out: int, row: int, row_inner: int) -> npt.NDArray[Any] | None:
        """Return row `row` of output `out` of the last run, whose elements are counted in rows of `row_inner`.

        None when there is no such row, or the last run did not read that output: `run_dlpack` reads none, since its
        outputs stay on the device. The array shares the output's memory, which after `run_slots` and `run_raw` is the
        buffer that the next such call overwrites. With several threads the last run is the one that ended last.
        """
        indices, outputs = self._last
        if indices is not None:
            if out not in indices:
                return None
            out = indices.index(out)
        if not 0 <= out < len(outputs) or not isinstance(outputs[out], np.ndarray) or row < 0 or row_inner < 1:
            return None
        flat = outputs[out].reshape(-1)
        if (row + 1) * row_inner > flat.size:
            return None
        found: npt.NDArray[Any] = flat[row * row_inner : (row + 1) * row_inner]
        return found

    def run_typed(
        self, inputs: Mapping[str, TypedBytes], output_dtypes: Sequence[DType | str] | None = None
    ) -> list[tuple[bytes, DType]]:
        """Run once on raw bytes: input name -> (bytes, dtype); return (bytes, dtype) for each output.

        An input of another dtype than declared is converted where that loses nothing. Outputs come in their
        declared dtypes, or in `output_dtypes`: then floats become integers by truncation towards zero, saturating at
        the limits, with NaN as 0, and anything but 0 is True as a bool.

        Raises:
            InputError: an input or dtype is wrong, the bytes do not fill the declared shape, or an output is no
                tensor of numbers.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        dtypes = self._declared_dtypes() if output_dtypes is None else _parsed(output_dtypes)
        if len(dtypes) != len(self._output_names):
            raise InputError(f"the graph has {len(self._output_names)} outputs, got {len(dtypes)} output dtypes")
        return typed_from_arrays(self.run(arrays_from_typed(self.input_specs, inputs)), dtypes)

    def clone(self) -> CompiledGraph:
        """Return a graph that shares the session and the weights, has a copy of the state, and is closed by itself."""
        twin = CompiledGraph((self._moe_base or self._slot).twin(), self._rule, self._inputs)
        self._copy_moe_to(twin)
        self._copy_state_to(twin)
        return twin

    def held_to(self, rule: PlacementRule) -> CompiledGraph:
        """Return this graph with its session and all its state, held to another placement rule.

        What either does to handles, the extent or the capture counts for both, and both are closed together.

        Raises:
            PlacementError: the nodes are not where the rule wants them.
        """
        self._slot.open_if_ready(rule)
        other = object.__new__(CompiledGraph)
        other.__dict__ = self.__dict__
        other._rule, other._strict = rule, rule is PlacementRule.STRICT
        return other

    def _copy_state_to(self, other: CompiledGraph) -> None:
        """Give a clone the state that runs have left."""
        other._last = self._last
        other._handles = self._handles.copy()
        other._extent, other._plain = self._extent, self._plain

    # Fixed buffers

    @property
    def supports_run_slots(self) -> bool:
        """Whether `run_slots` binds buffers: all inputs and outputs are tensors of numbers of a byte or more."""
        return self._slots.supported

    def run_slots(self, arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Run on arrays in the order of the inputs, through buffers that are bound once; the cheapest run there is.

        The outputs are the buffers themselves: the next call of `run_slots` or `run_raw` overwrites them. There is no
        arena to point into; an array's `.ctypes.data` is its address. Handles are not looked at, and calls take turns.

        Raises:
            InputError: an array is missing, one too many, or of another type than declared.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        engine = self._slot.current
        if engine is None or engine.version != self._weights.version or engine.files or not engine.strict_ok:
            engine = self._engine()
        if self._extent is not None:
            arrays = [*at_extent(self.input_specs, self._inputs.ordered(arrays), self._extent).values()]
        with self._slots_lock:
            outputs = self._slots.run(engine, arrays)
            self._last = (None, self._slots.buffers)
            return outputs

    def run_raw(self, inputs: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Run like `run_slots` on inputs by name; the outputs are valid until the next such call.

        Raises:
            InputError: an input is missing, unknown, or of another type than declared.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        feeds = self._inputs.feeds(inputs)
        if feeds.__class__ is ResidentFeeds:
            feeds = {name: value.numpy() if isinstance(value, DeviceTensor) else value for name, value in feeds.items()}
        return self.run_slots([feeds.get(name) for name in self.input_specs])

    def slot_views(self) -> list[npt.NDArray[Any]]:
        """Return the output buffers as the last `run_slots` or `run_raw` left them; empty before the first."""
        with self._slots_lock:
            return self._slots.views

    def arena_ptr(self) -> list[tuple[int, int]]:
        """Return the address and the size in bytes of each output buffer that `slot_views` shows.

        There is no one arena. An address is good until the graph is closed or runs on other shapes; the arrays of
        `run_slots` and `slot_views` keep their memory alive, an address does not.
        """
        return [(view.ctypes.data, view.nbytes) for view in self.slot_views()]

    def run_dlpack(self, inputs: Mapping[str, Any]) -> list[DeviceTensor]:
        """Run and return the outputs where the device made them: objects with `__dlpack__`, without a host copy.

        Handles are used and fed as in `run`. Inputs may be objects with `__dlpack__` as in `run`. What torch and cupy
        have queued on theirs is waited for; what other libraries have queued must be done before.

        Raises:
            InputError: an input is wrong.
            EngineError: the run failed.
        """
        return self._run_with_state(inputs, range(len(self._output_names)), on_device=True)

    def set_active_extent(self, extent: tuple[int, int] | None) -> None:
        """Say that of `upper` rows only the first `actual` matter in the runs to come, until None takes it back.

        A hint. A graph that takes any number of rows is run on `actual` of them, and its outputs have as many; others
        run in full, and what their outputs hold beyond `actual` means nothing. Rows on a device are not cut either.

        Raises:
            InputError: it is not `(actual, upper)` with 0 < actual <= upper.
        """
        self._extent = None if extent is None else check_extent(extent)
        self._plain = self._extent is None and not self._handles

    def capabilities(self) -> frozenset[str]:
        """Return what this graph can do on its device, by the names of the optional features."""
        found = {
            "clone", "persistent_handles", "gpu_handles", "kv_resident", "typed_io", "async_pipeline", "active_extent",
            "moe",
        }  # fmt: skip
        return frozenset(found | ({"run_slots"} if self.supports_run_slots else set()))

    def close(self) -> None:
        """Give the session and the state up; runs in other threads finish first. Closing twice is harmless.

        A graph that a `GraphDevices` has lent gives up its state alone; the session stays open for the next one lent.
        """
        self._pipeline.settle()
        self._pipeline.close()
        lent = None if self._owns_slot else self._moe_base or self._slot
        if self._slot is not lent:
            self._slot.close()
        if lent is not None:
            self._slot, self._moe_base = lent.twin(), None
            self._slot.close()
        self._last = (None, ())
        self._unbind()
        self._handles.clear()

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._slot.closed else "not open yet" if self._slot.current is None else "open"
        shape = f"{len(self.input_specs)} inputs, {len(self._output_names)} outputs"
        return f"<CompiledGraph on {self.device.label}, {shape}, {self._rule.value}, {state}>"

    def _engine(self) -> Engine:
        """Return an engine with the newest weights whose files are still what was mapped."""
        engine = self._slot.current
        if engine is None or engine.version != self._weights.version or (self._strict and not engine.strict_ok):
            engine = self._slot.engine(self._rule)
        if engine.files:
            engine.check_files()
        return engine

    def _unbind(self) -> None:
        """Let go of what is bound to an engine, and so of the engine; it is bound again by the next run."""
        with self._slots_lock:
            self._slots.clear()
            self._pooled.clear()
        self._handles.unbind()

    def _settled(self) -> None:
        """Wait for committed runs, unless this is one."""
        if self._pipeline.busy:
            self._pipeline.settle()

    def _run_again(self, inputs: Mapping[str, Any], indices: Sequence[int]) -> list[Any] | None:
        """Run a loop's next step, without the checks that its first step had; None when the call is another one."""
        if self._pipeline.busy:
            self._pipeline.settle()
        handles = self._handles
        with handles.lock:
            found = handles.run_again(self._engine(), inputs, indices)
            if found is None:
                return None
            self._last = found
        read, outputs = found
        return outputs.copy() if len(read) == len(indices) else [outputs[read.index(index)] for index in indices]

    def _indices(self, indices: Sequence[int] | None) -> Sequence[int]:
        """Return the indices of outputs that were asked for, None for all, if there are such outputs."""
        count = len(self._output_names)
        if indices is None:
            return range(count)
        for index in indices:
            if not 0 <= index < count:
                raise InputError(f"there is no output {index}; the graph has {count} outputs, from 0")
        return indices

    def _run_with_state(
        self, inputs: Mapping[str, Any], indices: Sequence[int], *, on_device: bool = False
    ) -> list[Any]:
        if self._handles:
            self._settled()
        return self._run_now(inputs, indices, on_device=on_device)

    def _run_now(self, inputs: Mapping[str, Any], indices: Sequence[int], *, on_device: bool = False) -> list[Any]:
        """Run with handles and the extent as they are, and return the listed outputs."""
        with self._handles.lock if self._handles else contextlib.nullcontext():
            engine = self._engine()
            if self._extent is not None:
                inputs = at_extent(self.input_specs, self._handles.behind(inputs), self._extent)
            read, outputs = self._handles.run(engine, inputs, indices, on_device=on_device)
            self._last = ([], []) if on_device else (read, outputs)
        return [outputs[read.index(index)] for index in indices]

    def _declared_dtypes(self) -> list[DType]:
        kinds = self.output_specs.values()
        return [kind.dtype if isinstance(kind, TensorType) else DType.STRING for kind in kinds]


_NOTHING: Mapping[str, Any] = {}


def _parsed(dtypes: Sequence[DType | str]) -> list[DType]:
    try:
        return [DType.parse(dtype) for dtype in dtypes]
    except ValueError as err:
        raise InputError(f"output dtypes: {err}") from err
