"""`CompiledGraph`: a graph that is ready to run on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort import epoch
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.device import Device
from rlx_ort.errors import InputError, RunError
from rlx_ort.execution.background import BackgroundRuns, copied_arrays, run_all, run_in_background
from rlx_ort.execution.engine import Engine, EngineSlot, closed_error
from rlx_ort.execution.handles import Handles
from rlx_ort.execution.inputs import (
    InputPlan,
    Kind,
    ResidentFeeds,
    TypedBytes,
    arrays_from_typed,
    at_extent,
    typed_from_arrays,
)
from rlx_ort.execution.interface import Inputs, Outputs, ParamSetter, ValueInfo, described, inputs_by_name
from rlx_ort.execution.moe import MaskLike, MoeControls, MoeResidencyStats
from rlx_ort.execution.placement import Placement
from rlx_ort.execution.slots import PooledRuns, SlotRunner
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.options.variant import Variant
from rlx_ort.providers.base import DeviceGraphReport, Provider
from rlx_ort.providers.engine.binding import DeviceTensor
from rlx_ort.providers.engine.values import is_tensor_like


class TokenLoop(Protocol):
    """A decode loop, whose tokens are state of the graph that it runs."""

    @property
    def length(self) -> int:
        """The number of tokens in its cache."""

    def close(self) -> None:
        """Free the cache and let go of the session."""

    def close_idle(self) -> bool:
        """Close unless it has tokens or a call is running; return whether it was closed."""


class _State:
    """The session of a compiled graph and the state that calls leave there; graphs of other placement rules share it.

    Attributes:
        slot: the slot whose session runs, which the settings of `moe` decide.
        slots: the buffers of `run_slots`.
        pooled: the buffers of runs of many inputs.
        plain: whether there are neither handles nor an extent.
        last: the outputs of the last run, with their indices; None for all.
    """

    def __init__(self, slot: EngineSlot, inputs: InputPlan, owns_slot: bool) -> None:
        self.slot = slot
        self.closed = False
        self.inputs = inputs
        types = (slot.input_types, slot.output_types)
        self.handles = Handles(*types, inputs)
        self.slots = SlotRunner(*types, inputs)
        self.pooled = PooledRuns(*types)
        self.background = BackgroundRuns()
        self.moe = MoeControls(slot)
        self.loops: weakref.WeakSet[TokenLoop] = weakref.WeakSet()
        self.extent: tuple[int, int] | None = None
        self.plain = True
        self.last: tuple[list[int] | None, Sequence[Any]] = (None, ())
        slot.users.add(self)
        if owns_slot:
            slot.owners.add(self)

    def use(self, slot: EngineSlot) -> None:
        """Run in the session of a slot from now on."""
        before = self.slot
        if slot is before:
            return
        self.unbind()
        self.slot = slot
        slot.users.add(self)
        before.users.discard(self)
        if not before.users:
            before.release()  # that of the base holds all experts on the device

    def unbind(self) -> None:
        """Release the buffers that are bound to an engine, and so the engine; the next run binds new ones."""
        self.slots.clear()
        self.pooled.clear()
        self.handles.unbind()

    def unbind_idle(self) -> bool:
        """Release the buffers that no run uses now, and return whether no handle needs the device's session."""
        if not all(loop.close_idle() for loop in list(self.loops)):
            return False
        if self.handles.on_device or not (self.slots.clear(wait=False) and self.handles.unbind(wait=False)):
            return False
        self.pooled.clear()
        return True

    def give_up(self) -> None:
        """Leave the session and its locks to a thread that does not return from it."""
        self.slot.let_go()
        types = (self.slot.input_types, self.slot.output_types)
        self.slots, self.pooled = SlotRunner(*types, self.inputs), PooledRuns(*types)
        self.handles = self.handles.given_up()
        self.background = BackgroundRuns()
        self.last = (None, ())

    def copied(self, rule: PlacementRule) -> _State:
        """Return a copy on the same session, which is closed separately."""
        if self.moe.base.closed:
            raise closed_error(self.slot.device)
        twin = _State(self.moe.base, self.inputs, owns_slot=True)
        self.moe.copy_to(twin.moe, rule)
        twin.use(twin.moe.slot)
        with self.slots.lock:
            indices, outputs = self.last
            if outputs is self.slots.buffers:  # later runs overwrite them
                outputs = [array.copy() if isinstance(array, np.ndarray) else array for array in outputs]
            twin.last = (indices, outputs)
        twin.handles = self.handles.copy()
        twin.extent, twin.plain = self.extent, self.extent is None and not twin.handles
        return twin

    def end(self) -> None:
        """Let no other run begin, and let go of the session."""
        self.closed, self.plain = True, False
        if self.slot is not self.moe.base:
            self.slot.close()
        self.moe.base.close(self)

    def close(self) -> None:
        """Let go of the session and of all that is kept; runs in other threads finish first."""
        self.background.close()
        self.end()
        self.last = (None, ())
        for loop in list(self.loops):
            loop.close()
        self.unbind()
        self.handles.clear()


class CompiledGraph(ParamSetter):
    """A graph on one device, with the weights of a store; made by `Session.compile`.

    Runs may be started from several threads at once. A parameter that is set after a run makes the session stale; it
    is opened again before the next run, and no run sees old and new values together.

    Some calls keep state: handles (`bind_handle`, `bind_gpu_handle`), committed runs (`commit_no_wait`), and the fixed
    buffers of `run_slots` and `run_raw`. Runs of a graph with handles, and those through the fixed buffers, are
    serialized by a lock; runs of a graph with handles also wait for the committed ones, so the state is that of the
    order of the calls. Handles survive a change of parameters.
    """

    def __init__(
        self, slot: EngineSlot, rule: PlacementRule, state: _State | None = None, *, owns_slot: bool = True
    ) -> None:
        self._state = state = state or _State(slot, InputPlan(slot.input_types, slot.size_checks.check), owns_slot)
        self._rule = rule
        self._strict = rule is PlacementRule.STRICT
        self._weights = slot.weights
        self._inputs = state.inputs
        self._output_names = list(slot.output_types)
        self._many = state.pooled.wanted
        slot.open_if_ready(rule)

    @property
    def _slot(self) -> EngineSlot:
        return self._state.slot

    @property
    def _open_slot(self) -> EngineSlot:
        if self._state.closed:
            raise closed_error(self.device)
        return self._state.slot

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
        return self._state.closed or self._state.slot.closed

    @property
    def has_handles(self) -> bool:
        """Whether a handle is bound, so that a run may change the results of later runs."""
        return bool(self._state.handles)

    @property
    def has_state(self) -> bool:
        """Whether handles, tokens of decode loops, or runs not waited for tie it to its device."""
        return (
            bool(self._state.handles)
            or self._state.background.busy
            or any(loop.length for loop in list(self._state.loops))
        )

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
    def inputs(self) -> list[ValueInfo]:
        """The name, dtype and dims of each input."""
        return described(self.input_specs)

    @property
    def outputs(self) -> list[ValueInfo]:
        """The name, dtype and dims of each output."""
        return described(self.output_specs)

    @property
    def placement(self) -> Placement:
        """Where each node is; opens the session if it is not open yet; see `open` for the errors."""
        if self._slot.placement is None:
            self._open_slot.engine(self._rule)
        assert self._slot.placement is not None  # noqa: S101  # opening a session fills it in
        return self._slot.placement

    @property
    def variant(self) -> Variant | None:
        """The variant of the options that `tune` found to be the fastest, and that is in use; None if there is none."""
        return self._slot.variant

    @property
    def is_open(self) -> bool:
        """Whether its session is open now; else the next run opens it."""
        return self._slot.is_open

    def open(self, *, required: bool = True) -> None:
        """Open the session now instead of at the first run; unless `required`, only if every parameter is set.

        Raises:
            ParamError: a parameter is not set, and the session is required.
            PlacementError: the nodes are not where the rule wants them.
            DeviceUnavailableError: the device does not work here.
            LegalizeError: a node has no kernel.
            EngineError: the engine refused the model.
        """
        if required:
            self._open_slot.engine(self._rule)
        else:
            self._open_slot.open_if_ready(self._rule)

    @property
    def provider(self) -> Provider:
        """The provider of its device."""
        return self._slot.provider

    def engine(self, loop: TokenLoop | None = None) -> Engine:
        """Return an open engine with the newest weights; while the loop has tokens, memory budgets do not close it.

        Raises:
            RunError: the graph is closed; see `open` for the others.
        """
        if loop is not None:
            self._state.loops.add(loop)
        if self._state.closed:
            raise closed_error(self.device)
        return self._state.slot.ready(self._rule)

    def device_graph_report(self) -> DeviceGraphReport:
        """Return which runs replay recorded launches, at what cost of memory, and why others do not; opens the session.

        A change of parameters opens a new session, which records again.

        Raises:
            ParamError: a parameter is not set.
        """
        engine = self.engine()
        report = _report(engine)
        if engine.sized is None:
            return report
        others = [_report(child) for slot in engine.sized.slots() if (child := slot.current) is not None]
        recorded = (*report.recorded, *(run for other in others for run in other.recorded))
        return dataclasses.replace(report, recorded=recorded, sized=engine.sized.report())

    @property
    def replans(self) -> bool:
        """Whether a run of other sizes than the last one plans kernels anew; opens the session."""
        sized = self.engine().sized
        return sized is not None and sized.replans

    def open_sized(self, inputs: Inputs) -> bool:
        """Open the session for the sizes of inputs now, not after some runs; return whether such runs have one.

        There are such sessions on CUDA, see `CompileOptions.sized_sessions`. Takes the time to open one and of some
        runs, and its memory.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype than declared.
            ParamError: a parameter is not set.
            EngineError: a run failed.
        """
        engine = self.engine()
        feeds = self._inputs.checked(inputs, engine)
        return engine.sized is not None and engine.sized.open_now(self._output_names, feeds)

    def run(self, inputs: Inputs | None = None) -> list[Any]:
        """Run once and return the outputs as numpy arrays, in the order of the graph's outputs.

        Arrays of the declared dtype are not copied. Outputs that are sequences or maps come as lists or dicts.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype than declared.
            ParamError: a parameter is not set.
            PlacementError: the nodes are not where the rule wants them.
            EngineError: the run failed.
        """
        state = self._state
        engine = state.slot.current
        if engine is None or engine.version != self._weights.version or (self._strict and not engine.strict_ok):
            engine = state.slot.engine(self._rule)
        given = _NO_INPUTS if inputs is None else inputs
        if not state.plain or engine.files:
            return self._run_with_state(given, range(len(self._output_names)))
        kind = self._inputs.kind_of(given)
        if kind is None:
            feeds = self._inputs.checked(given, engine)
            resident = feeds.__class__ is ResidentFeeds
            names = self._output_names
            outputs = engine.binder.run(feeds, names, ()) if resident else engine.run(names, feeds)
        elif self._many:
            outputs = state.pooled.run(engine, kind, given)
        else:
            outputs = engine.run(self._output_names, given)
        state.last = (None, outputs)
        return outputs.copy()

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Refuse to be copied or pickled: a copy would share the session, and closing it would close this one.

        Raises:
            RunError: always.
        """
        raise RunError("a compiled graph is neither copied nor pickled; clone() it, or compile the graph again")

    def __call__(self, *given: Any, **named: Any) -> Outputs:
        """Run on inputs by name, `compiled(x=array)`, in order, or on a dict of them; see `run_named`."""
        return self.run_named(inputs_by_name(self.input_specs, given, named, "compiled") if given else named)

    def run_named(self, inputs: Inputs, *, on_device: bool = False) -> Outputs:
        """Run as `run`, or as `run_dlpack`, and return outputs with names, device and placement, which cost 0.1 us."""
        outputs = self.run_dlpack(inputs) if on_device else self.run(inputs)
        return self._state.slot.named(outputs)

    def kind_of(self, inputs: Inputs) -> Kind | None:
        """Return the argument of `run_checked`: inputs of the kind of these; None if it would not take these."""
        return None if self._many else self._inputs.kind_of(inputs)

    def run_checked(self, inputs: Inputs) -> Outputs:
        """Run on inputs of a kind that `kind_of` has returned, which are not checked again; return named outputs."""
        state = self._state
        engine = state.slot.current
        if (
            engine is None
            or engine.version != self._weights.version
            or engine.files
            or not (state.plain and (engine.strict_ok or not self._strict))
        ):
            return self.run_named(inputs)
        outputs = engine.run(self._output_names, inputs)
        state.last = (None, outputs)
        return state.slot.named(outputs)

    def run_read_outputs(self, inputs: Inputs, indices: Sequence[int] | None = None) -> list[Any]:
        """Run once and return only the listed outputs, in the listed order, duplicates kept; None means all.

        Outputs that are not listed are not read back from the device; handles they feed change all the same.

        Raises:
            InputError: an index names no output, or an input is wrong.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        if indices is None:
            return self.run(inputs)
        return self._run_with_state(inputs, indices)

    def read_output_row(self, out: int, row: int, row_inner: int) -> npt.NDArray[Any] | None:
        """Return row `row` of output `out` of the last run, in rows of `row_inner` elements.

        None when there is no such row, or the last run did not read that output: `run_dlpack` reads none, since its
        outputs stay on the device. The array shares the output's memory; after `run_slots` and `run_raw` that is the
        buffer that the next such call overwrites. With several threads the last run is the one that ended last.
        """
        indices, outputs = self._state.last
        if indices is not None:
            if out not in indices:
                return None
            out = indices.index(out)
        if not 0 <= out < len(outputs) or not isinstance(outputs[out], np.ndarray) or row < 0 or row_inner < 1:
            return None
        flat = outputs[out].reshape(-1)
        if (row + 1) * row_inner > flat.size:
            return None
        row_data: npt.NDArray[Any] = flat[row * row_inner : (row + 1) * row_inner]
        return row_data

    def run_typed(
        self, inputs: Mapping[str, TypedBytes], output_dtypes: Sequence[DType | str] | None = None
    ) -> list[tuple[bytes, DType]]:
        """Run once on raw bytes: input name -> (bytes, dtype); return (bytes, dtype) for each output.

        An input of another dtype than declared is converted where that loses nothing. Outputs come in their declared
        dtypes, or in `output_dtypes`: floats then become integers by truncation towards zero, saturating at the
        limits, with NaN as 0, and everything but 0 is True as a bool.

        Raises:
            InputError: an input or dtype is wrong, the bytes do not fill the declared shape, or an output is no
                tensor of numbers.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        if output_dtypes is None:
            kinds = self.output_specs.values()
            dtypes = [kind.dtype if isinstance(kind, TensorType) else DType.STRING for kind in kinds]
        else:
            try:
                dtypes = [DType.parse(dtype) for dtype in output_dtypes]
            except ValueError as err:
                raise InputError(f"output dtypes: {err}") from err
        if len(dtypes) != len(self._output_names):
            raise InputError(f"the graph has {len(self._output_names)} outputs, got {len(dtypes)} output dtypes")
        return typed_from_arrays(self.run(arrays_from_typed(self.input_specs, inputs)), dtypes)

    def clone(self) -> CompiledGraph:
        """Return a graph that shares the session and the weights, has a copy of the state, and is closed separately."""
        self._state.background.settle()
        state = self._state.copied(self._rule)
        return CompiledGraph(state.slot, self._rule, state)

    def held_to(self, rule: PlacementRule) -> CompiledGraph:
        """Return this graph with its session and all its state, held to another placement rule.

        Changes of handles, the extent or the capture take effect in both, and both are closed together.

        Raises:
            PlacementError: the nodes are not where the rule wants them.
        """
        return CompiledGraph(self._slot, rule, self._state)

    # Fixed buffers

    @property
    def supports_run_slots(self) -> bool:
        """Whether `run_slots` binds buffers: all inputs and outputs are tensors of numbers of a byte or more."""
        return self._state.slots.supported

    def run_slots(self, arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Run on arrays in the order of the inputs, through buffers that are bound once; the fastest way to run.

        The outputs are the buffers themselves: the next call of `run_slots` or `run_raw` overwrites them. An array's
        `.ctypes.data` is its address. Handles are ignored, and calls from several threads are serialized.

        Raises:
            InputError: an array is missing, one too many, or of another type than declared.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        state = self._state
        engine = state.slot.current
        if (
            engine is None
            or engine.version != self._weights.version
            or engine.files
            or not engine.strict_ok
            or state.closed
        ):
            engine = self.engine()
        if state.extent is not None:
            arrays = [*at_extent(self.input_specs, self._inputs.ordered(arrays), state.extent).values()]
        slots = state.slots
        with slots.lock:
            outputs = slots.run(engine, arrays)
            state.last = (None, slots.buffers)
            return outputs

    def run_raw(self, inputs: Inputs) -> list[npt.NDArray[Any]]:
        """Run like `run_slots` on inputs by name, with the same errors; outputs are valid until the next such call."""
        feeds = self._inputs.feeds(inputs)
        if feeds.__class__ is ResidentFeeds:
            feeds = {name: value.numpy() if isinstance(value, DeviceTensor) else value for name, value in feeds.items()}
        return self.run_slots([feeds.get(name) for name in self.input_specs])

    def slot_views(self) -> list[npt.NDArray[Any]]:
        """Return the output buffers as the last `run_slots` or `run_raw` left them; empty before the first."""
        return self._state.slots.views

    def arena_ptr(self) -> list[tuple[int, int]]:
        """Return the address and the size in bytes of each output buffer that `slot_views` shows.

        There is not one arena. An address is valid until the next such call, or until the graph is closed; on the CPU
        it stays the same for inputs of the same shapes. The arrays of `run_slots` and `slot_views` keep their memory
        alive, an address does not.

        Raises:
            InputError: an output is a sequence, a map or text, which has no such buffer.
        """
        views = self.slot_views()
        if views:
            self._require_arrays("has no buffer")
        return [(view.ctypes.data, view.nbytes) for view in views]

    def _require_arrays(self, why_not: str) -> None:
        """Return if every output is one array of numbers."""
        for name, kind in self._slot.output_types.items():
            if not is_tensor_like(kind):
                raise InputError(f"output {name!r} is {kind} and {why_not}; use run or run_read_outputs")

    def run_dlpack(self, inputs: Inputs) -> list[DeviceTensor]:
        """Run and return the outputs in device memory: objects with `__dlpack__`, without a host copy.

        Handles are used and fed as in `run`. Inputs may be objects with `__dlpack__` as in `run`. Work that torch and
        cupy have queued on theirs is waited for; work queued by other libraries must be complete.

        Raises:
            InputError: an input is wrong, or an output is a sequence, a map or text, which DLPack cannot hold.
            EngineError: the run failed.
        """
        self._require_arrays("cannot be exported by DLPack")
        return self._run_with_state(inputs, range(len(self._output_names)), on_device=True)

    def set_active_extent(self, extent: tuple[int, int] | None) -> None:
        """Declare that of `upper` rows only the first `actual` matter in later runs; None takes that back.

        This is a hint. A graph that takes any number of rows runs on `actual` of them, and its outputs have as many.
        Others run in full, with undefined output rows beyond `actual`, and so do graphs with inputs on a device.

        Raises:
            InputError: it is not `(actual, upper)` with 0 < actual <= upper.
        """
        if extent is not None and not 0 < extent[0] <= extent[1]:
            raise InputError(f"an active extent is (actual, upper) with 0 < actual <= upper, got {extent}")
        self._state.background.settle()
        self._state.extent = extent
        self._state.plain = extent is None and not self._state.handles and not self._state.closed

    # Handles

    @property
    def _settled(self) -> Handles:
        """The handles as the committed runs leave them."""
        self._state.background.settle()
        return self._state.handles

    def bind_handle(self, name: str, array: npt.ArrayLike) -> bool:
        """Keep a copy of an array in host memory, as the value of the input of that name in runs that do not supply it.

        A handle named `out0` is overwritten with output 0 after every run, and so on; see also `set_handle_feed`.
        Returns True: every device supports it.

        Raises:
            InputError: no input, and no output by number, has the name, or the array is not of its type.
        """
        self._settled.bind(name, array)
        self._tie()
        return True

    def read_handle(self, name: str) -> npt.NDArray[Any] | None:
        """Return a copy of a handle in host memory, or None when there is none; waits for committed runs."""
        return self._settled.read(name, on_device=False)

    def set_handle_feed(self, handle: str, out_idx: int) -> bool:
        """Overwrite a handle in host memory with an output after every later run; returns True.

        Raises:
            InputError: there is no such handle or output, or their dtypes differ.
        """
        self._settled.feed(handle, out_idx, on_device=False)
        return True

    def bind_gpu_handle(self, name: str, array: Any) -> bool:
        """Upload an array as the value of an input that stays on the device from run to run; on the CPU, in its memory.

        A `DeviceTensor` of another graph on the same device is taken without a copy, and so is any object with
        `__dlpack__` in a device's own memory; host memory is copied. Returns True: every device supports it.

        Raises:
            InputError: no input has the name, or the array is not of its type.
            EngineError: the device did not take it.
        """
        self._settled.bind(name, array, self.engine())
        self._tie()
        return True

    def has_gpu_handle(self, name: str) -> bool:
        """Return whether a handle on the device has the name."""
        return self._state.handles.has(name, on_device=True)

    def set_gpu_handle_feed(self, handle: str, out_idx: int) -> bool:
        """Move an output into a handle on the device after every later run, without a copy to the host.

        Its shape may differ from the last, where the graph takes that. No run writes to memory that it reads. Returns
        True: every device supports it. See `set_handle_feed` for the errors.
        """
        self._settled.feed(handle, out_idx, on_device=True)
        return True

    def read_gpu_handle(self, name: str) -> npt.NDArray[Any] | None:
        """Return a handle on the device as a copy on the host, or None when there is none; waits for the device."""
        return self._settled.read(name, on_device=True)

    def run_feed_gpu_handle(self, inputs: Inputs, handle: str, out_idx: int) -> npt.NDArray[Any]:
        """Set a feed that stays, run, and return that output. See `set_handle_feed` and `run` for the errors."""
        self.set_gpu_handle_feed(handle, out_idx)
        output: npt.NDArray[Any] = self.run_read_outputs(inputs, [out_idx])[0]
        return output

    # Background runs

    def commit_no_wait(self, inputs: Inputs, outputs: Sequence[int] | None = (), *, on_device: bool = False) -> None:
        """Run in the background, after the runs committed before; handles are fed.

        Arrays are copied, so they may be overwritten at once. Errors of the run are raised by `sync_pending`, which
        also returns the listed outputs.

        Args:
            inputs: as in `run`.
            outputs: the indices of the outputs to keep for `sync_pending`; None for all, none by default.
            on_device: whether these stay on the device, as `DeviceTensor`, instead of being copied to the host.

        Raises:
            InputError: an index names no output.
        """
        copied, wanted = copied_arrays(inputs), range(len(self._output_names)) if outputs is None else outputs
        self._state.handles.check_outputs(wanted)
        self._weights.settle_before_changes(self._state.background)
        self._state.background.commit(lambda: self._run_with_state(copied, wanted, on_device, settle=False))

    def sync_pending(self) -> list[list[Any]]:
        """Wait for the committed runs and return the outputs of those that keep some, in order.

        If a run failed, the first error is raised, and the outputs of the others are dropped.
        """
        return self._state.background.sync()

    def run_pipelined(self, inputs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Run once for each set of inputs and return the outputs of each, equal to those of runs one by one.

        Long runs overlap, unless the graph has handles or the device runs one session at a time.

        Raises:
            InputError: an input is wrong.
            EngineError: a run failed.
        """
        results = run_all(self.run, inputs, self._slot.overlapping if self._state.plain else 1)
        if results:
            self._state.last = (None, results[-1].copy())  # overlapping runs may end in another order
        return results

    async def run_async(self, inputs: Inputs) -> list[Any]:
        """Run in a thread and return the outputs as `run` does; cancelling the task stops the run at its next node.

        Arrays are not copied: do not change them before the run has ended. A run that is stopped changes no handle.

        Raises:
            InputError: an input is wrong.
            EngineError: the run failed.
        """
        return await run_in_background(lambda: self.run(inputs))

    def give_up_session(self) -> None:
        """Leave the session and its locks to a thread that does not return from it; the next run opens another."""
        self._state.give_up()

    # Mixtures of experts

    def set_moe_resident_experts(self, mask: MaskLike) -> None:
        """Choose the experts that stay on the device, the same in all layers; replaces masks for each layer.

        Experts beyond the end of the mask stay on the device. On other devices than the CPU the weights and products of
        the excluded ones move to the host, and the session is opened again. On the CPU only the counts of
        `take_moe_residency_stats` change. Results are the same either way. Do not call this while another thread is in
        a run of this graph; use clones.

        Raises:
            InputError: the mask is no row of booleans.
            GraphVerifyError: the weights of experts that are to move are computed in the graph.
            PlacementError: the rest does not keep the placement rule.
        """
        self._state.moe.keep([mask], self._rule, every_layer=True)
        self._state.use(self._state.moe.slot)

    def set_moe_resident_experts_per_layer(self, masks: Sequence[MaskLike]) -> None:
        """Choose the experts that stay on the device layer by layer, in forward order; replaces one mask for all.

        A layer is three products by experts: gate, up and down. See `set_moe_resident_experts`.
        """
        self._state.moe.keep(masks, self._rule)
        self._state.use(self._state.moe.slot)

    def take_moe_residency_stats(self) -> MoeResidencyStats | None:
        """Return the work of the experts in the last forward, once; None before one, or without masks."""
        return self._state.moe.take_stats()

    def enable_moe_topk_capture(self, num_experts: int) -> bool:
        """Record the picks of each TopK over exactly `num_experts` elements from now on; opens the session again.

        A second call drops the record. Clones record into the same place. TopKs inside bodies are ignored.

        Returns:
            Whether there is such a TopK; if not, nothing changes.
        """
        capture = self._state.moe.capture(num_experts, self._rule)
        self._state.use(self._state.moe.slot)
        return capture

    def take_moe_topk_capture(self) -> list[npt.NDArray[np.uint32]] | None:
        """Return the picks of each router since the last call, the forwards one after another; None for nothing."""
        return self._state.moe.take_picks()

    def capabilities(self) -> frozenset[str]:
        """Return the names of the optional features that this graph has on its device."""
        capabilities = {
            "clone", "persistent_handles", "gpu_handles", "kv_resident", "typed_io", "async_pipeline", "active_extent",
            "moe",
        }  # fmt: skip
        return frozenset(capabilities | ({"run_slots"} if self.supports_run_slots else set()))

    def close(self) -> None:
        """Let go of the session and the state; runs in other threads finish first. Closing twice is harmless.

        Closing a graph lent by a `GraphDevices` drops its state only; the session stays open for the next one lent.
        """
        self._state.close()

    def end(self) -> None:
        """Let no other run begin, since the owner of the session closes it; does not wait for runs in progress."""
        self._state.end()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self._slot.is_open else "not open yet"
        shape = f"{len(self.input_specs)} inputs, {len(self._output_names)} outputs"
        return f"<CompiledGraph on {self.device.label}, {shape}, {self._rule.value}, {state}>"

    def _tie(self) -> None:
        """Note that a handle ties the graph to its device; a choice that could move it is made anew."""
        if self._state.plain:
            self._state.plain = False
            epoch.advance()

    def _run_with_state(
        self, inputs: Inputs, indices: Sequence[int], on_device: bool = False, settle: bool = True
    ) -> list[Any]:
        """Run with handles and the extent as they are, and return the listed outputs; waits for committed runs."""
        state = self._state
        handles = state.handles
        if settle and state.background.busy and handles:
            state.background.settle()
        with handles.lock if handles else contextlib.nullcontext():
            engine = self.engine()
            if state.extent is not None:
                inputs = at_extent(self.input_specs, handles.behind(inputs), state.extent)
            read, outputs = handles.run(engine, inputs, indices, on_device)
            state.last = ([], []) if on_device else (read, outputs)
        return outputs.copy() if len(read) == len(indices) else [outputs[read.index(index)] for index in indices]


_NO_INPUTS: Mapping[str, Any] = {}


def _report(engine: Engine) -> DeviceGraphReport:
    ask = getattr(engine.session, "device_graph_report", None)
    report: DeviceGraphReport = DeviceGraphReport(reason="its engine records nothing") if ask is None else ask()
    return report
