"""`OrtEngineSession`: an open ONNX Runtime session with its weights, types and node assignments."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.errors import EngineError, as_cause
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import DeviceGraphReport, NodeAssignment, SessionRequest
from rlx_ort.providers.engine import stopping
from rlx_ort.providers.engine.lent_outputs import HostVectors, LentOutputs
from rlx_ort.providers.engine.process import watch
from rlx_ort.providers.engine.recipe import HOST_MEMORY, SessionRecipe, nothing_to_hold
from rlx_ort.providers.engine.recordable import host_work, unrecordable, without_shape_arithmetic
from rlx_ort.providers.engine.recordings import LEFT_ON_DEVICE, Recordings, not_recorded
from rlx_ort.providers.engine.replays import FixedRun, NotRecordedError, Recorder
from rlx_ort.providers.engine.runtime import engine_exceptions, onnxruntime, running_error
from rlx_ort.providers.engine.values import (
    OrtTensor,
    from_ort_value,
    has_foreign_dtype,
    is_tensor_like,
    refined,
    to_ort_value,
    value_type,
)

_REPLANS = "runs of other sizes would spoil them: convolutions are planned anew"
_FATAL = 4  # the shrinking run ends with an error, which is no news


class SessionCore:
    """The engine's session and the memory it borrows.

    ONNX Runtime keeps no reference to borrowed weights. A run holds the core, so the core is destroyed after the last
    run, and destroys the session before it releases the memory.
    """

    __slots__ = ("apart", "call", "graph", "memory", "recorder", "recordings", "session", "shared", "wait")

    def __init__(
        self, session: Any, memory: Sequence[Any], options: Any, recipe: SessionRecipe, recorder: Recorder | None
    ) -> None:
        self.session = session
        self.apart = recipe.apart
        # One for all runs, so that they can be stopped at exit; one per run would cost a microsecond each.
        self.shared = options
        self.graph: GraphRuns | None = None
        self.recordings: Recordings | None = None
        self.recorder = recorder
        self.wait = recipe.wait if recorder is None else recorder.wait
        self.call = _fast_run(session)
        self.memory = memory

    @property
    def options(self) -> Any:
        """The RunOptions for a run of this thread; the shortest runs look at `stopping.in_use` themselves."""
        return stopping.run_options(self.shared) if stopping.in_use else self.shared

    def __del__(self) -> None:
        self.graph = None
        self.call = None
        if self.recordings is not None:
            self.recordings.close()
            if self.recordings.broken:
                # Destroying a session that a capture broke may end the process, so it is leaked with its stream.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object((self.session, self.memory)))
                return
        self.recordings = None
        with self.apart():
            if self.wait is not None:
                self.wait()  # for the work that the last run has left on the device
            self.session = None
        if self.recorder is not None:
            self.recorder.close()  # the session launched on its stream
        self.memory = ()


class SpoiledRunError(EngineError):
    """A run was not made, since one before it in the session failed and may have spoiled it."""


class OrtEngineSession:
    """An open ONNX Runtime session. `run` may be called from several threads; `close` does not wait for them.

    `reason` is why launches are not recorded.

    `assignments` has the place of each node after ONNX Runtime's first rewrites; folded nodes are gone. `refuses` is
    true if runs raise, since they had to be recorded and cannot be. `handed_on` has the outputs that are inputs or
    weights themselves. `infer_outputs` returns the shapes of the outputs that follow from those of the inputs, as far
    as its owner knows. `retire` returns the function that has the next run made in another session, None once that is
    gone; a run calls it where it fails and may have spoiled the next.

    `copies_back` is true if nodes on the CPU may read values of the device. ONNX Runtime (1.31.1) copies such a value
    to the host for them, and where it is an output too, from there into an array of the caller without waiting for the
    first copy.
    """

    def __init__(
        self,
        session: Any,
        memory: Sequence[Any],
        recipe: SessionRecipe,
        request: SessionRequest,
        recorder: Recorder | None,
        reason: str,
    ) -> None:
        model = request.model
        self.device = request.device
        self.recipe = recipe
        self.engine = onnxruntime()
        self.errors = engine_exceptions()
        self._options = self.engine.RunOptions()
        self._reason = reason
        core = SessionCore(session, memory, self._options, recipe, recorder)
        self._core: SessionCore | None = core
        self.input_types = _types(session.get_inputs(), model.input_types)
        self.output_types = _types(session.get_outputs(), model.output_types)
        self.assignments = tuple(
            NodeAssignment(group.ep_name, node.name, node.domain, node.op_type)
            for group in session.get_provider_graph_assignment_info()
            for node in group.get_nodes()
        )
        # ONNX Runtime gives the memory of the input or weight for such an output, and leaves a bound buffer as it is.
        self.handed_on = self.output_types.keys() & {*self.input_types, *model.params}
        self.infer_outputs: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, tuple[int, ...]]] = lambda shapes: {}
        self.retire: Callable[[], Callable[[], object] | None] = lambda: None
        self._spoiled = False
        self._guard = self._unspoiled if recipe.spoiled_by_errors else recipe.run_lock
        self._owner = os.getpid()
        self._foreign_inputs = _foreign(self.input_types)
        self._foreign_outputs = _foreign(self.output_types)
        self._graph_lock = threading.RLock()
        alone = recipe.run_lock is nothing_to_hold and not recipe.device_graph
        self._before = recipe.before_run
        # Most sessions need none of the steps around a run; skipping them saves a quarter of a small run.
        self._plain = alone and not self._foreign_inputs and not self._foreign_outputs and not self.handed_on
        self._stopped: SessionCore | None = None
        self.refuses = False
        self.copies_back = False
        self._prepare_runs(core, model.node_of)
        watch(self, device=recipe.memory != HOST_MEMORY)

    @property
    def raw(self) -> Any:
        """ONNX Runtime's `InferenceSession`, if it is open; keep no reference beyond this object's life."""
        return self.open_core().session

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run once and return the named outputs as numpy arrays, lists of them, dicts, or None when absent.

        Raises:
            InputError: ONNX Runtime refused a feed or an output name.
            EngineError: the run failed, or the session is closed.
        """
        core = self._core or self.open_core()
        try:
            if self._plain:
                if self._before is not None:
                    self._before()
                options = stopping.run_options(core.shared) if stopping.in_use else core.shared
                results: list[Any] = core.call(output_names, feeds, options)
                return results
            with self._guard():
                return self._run_checked(core, list(output_names), feeds)
        except self.errors as err:
            raise running_error(err, self.device) from err

    def close(self) -> None:
        """Drop the session, then its weights; runs in other threads finish first. Closing twice is harmless.

        Where garbage is collected by work that is to end, which waits for nothing more, another thread waits for them.
        """
        held, self._core = [self._core], None
        # In a forked child the core is kept, see `process`, and a thread of the parent may hold the lock.
        if held[0] is not None and self._owner == os.getpid():
            try:
                self._drop(held)
            except stopping.Stopped:
                threading.Thread(target=self._drop, args=(held,), name="rlx_ort-close", daemon=True).start()

    def _drop(self, held: list[Any]) -> None:
        with self.recipe.run_lock():
            held.clear()

    @contextlib.contextmanager
    def _unspoiled(self) -> Iterator[None]:
        """Hold the lock of the device for a run, which is the last one if it fails."""
        with self.recipe.run_lock():
            if self._spoiled:
                raise SpoiledRunError(f"another run failed on {self.device.display} before this one; run it again")
            try:
                yield
            except self.errors:
                self._spoiled = True
                if (retire := self.retire()) is not None:
                    retire()
                raise

    def shrink_arena(self) -> bool:
        """Give unused memory of the arenas back to the device, and return whether that was possible.

        Takes a quarter of a millisecond: the arenas shrink at the end of a run, here one that ends before its first
        node. Not possible with recorded launches, which use arena memory that ONNX Runtime holds for free.
        """
        core = self._core
        if core is None or self.recipe.device_graph or (core.recordings is not None and core.recordings.uses_arena):
            return False
        options = self.engine.RunOptions()
        options.terminate, options.log_severity_level = True, _FATAL
        arenas = ["cpu:0"] if self.recipe.memory == HOST_MEMORY else [f"gpu:{self.recipe.memory[1]}", "cpu:0"]
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(arenas))
        if self._before is not None:
            self._before()
        with self._guard(), contextlib.suppress(*self.errors):
            _fast_run(core.session)(list(self.output_types)[:1], {}, options)
        return True

    @property
    def memory(self) -> tuple[str, int]:
        """ONNX Runtime's name and index of the memory in which tensors stay between runs."""
        return self.recipe.memory

    @functools.cached_property
    def host_outputs(self) -> Collection[str]:
        """The outputs that nodes on the CPU make, though the provider has its own memory.

        ONNX Runtime (1.31.1) copies such an output to the device without waiting for the copy, so it is bound in host
        memory and copied afterwards.
        """
        session = self.open_core().session
        if not self.copies_back:
            return ()
        pairs = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
        return frozenset(value.name for value, info in pairs if info.name.lower() == "cpu")

    def bound_memory(self, name: str) -> tuple[str, int] | None:
        """Return name and index of the memory in which each run reads an input, so that a bound value may change.

        None if no value can be made there: ONNX Runtime then copies the value when it is bound, so later writes have no
        effect, and the input is bound again for each run.
        """
        return self._bound_memory.get(name)

    @functools.cached_property
    def _bound_memory(self) -> Mapping[str, tuple[str, int]]:
        """The memory that each input is read in; inputs in memory of another kind are left out.

        An input may be read in host memory on a device that has its own, such as the shape that Reshape takes, and in
        the provider's memory on a device whose recipe has host memory.
        """
        own, places = self.recipe.memory, {}
        for name, info in zip(self.input_types, self.open_core().session.get_input_memory_infos(), strict=True):
            if info.name == "Cpu":
                places[name] = HOST_MEMORY
            elif own != HOST_MEMORY and info.device_mem_type.name == "DEFAULT":  # pinned memory is another kind
                places[name] = own
        return places

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Hold the locks of the device, refuse a use that would crash, and translate the engine's errors."""
        try:
            with self._guard(), self._graph_lock if self.takes_turns else contextlib.nullcontext():
                if self._before is not None:
                    self._before()
                yield
        except self.errors as err:
            raise running_error(err, self.device) from as_cause(err)

    def graph_runs(self, core: SessionCore) -> GraphRuns:
        """Return the recorded binding of a session with a device graph; the session's guard is held."""
        if core.graph is None:
            core.graph = GraphRuns(self, core)
        return core.graph

    def stop_runs(self) -> None:
        """End all runs that are in flight and let no other begin; for the end of the process."""
        self._options.terminate = True  # the session may be closed already, with runs still in it
        self._stopped, self._core = self._core, None  # kept: destroying it here would wait for its runs

    def open_core(self) -> SessionCore:
        """Return the open session, or raise `EngineError`; hold the reference for as long as it is used."""
        core = self._core
        if core is None:
            raise EngineError(f"the session on {self.device.display} is closed; compile the graph again")
        return core

    @property
    def takes_turns(self) -> bool:
        """Whether runs must be serialised, since they share recorded launches or the stream of a recorder."""
        core = self._core
        return self.recipe.device_graph or (core is not None and core.recorder is not None)

    @property
    def runs_slots(self) -> bool:
        """Whether plain runs and replays are cheaper than runs over bound device buffers."""
        return bool(self.recipe.run_config) or self.open_core().recordings is not None

    def run_values(
        self,
        core: SessionCore,
        names: Sequence[str],
        feeds: Mapping[str, Any],
        resident: Collection[str],
        plain: Callable[[], list[Any]],
    ) -> list[Any]:
        """Run on arrays and device tensors by a replay, or by `plain` where there is none; the guard is held."""
        recordings = core.recordings
        if recordings is None:
            return plain()
        if not recordings.active:
            return list(recordings.kept(plain()))
        here = self.recipe.memory == HOST_MEMORY
        for value in feeds.values():
            if not (isinstance(value, np.ndarray) or (isinstance(value, OrtTensor) and value.on_host == here)):
                if resident:
                    recordings.give_up(LEFT_ON_DEVICE)
                recordings.leave_size()
                return list(recordings.kept(plain()))
        return recordings.run_values(names, feeds, resident, plain)

    @property
    def records(self) -> bool:
        """Whether launches of usual runs may be recorded, unless something in the model is in the way."""
        recording = self.recipe.recording
        return recording is not None and not recording.required

    @property
    def replans(self) -> bool:
        """Whether a change of its inputs' sizes costs it the plans of kernels."""
        return self.recipe.replans

    def gains_from_fixed_sizes(self, names: Sequence[str], feeds: Mapping[str, Any], in_turns: bool = False) -> bool:
        """Return whether a session with the sizes of these inputs may be faster, as far as the runs so far show.

        For sizes that take turns with others, a recording here is as good, if it lasts.
        """
        core = self._core
        if core is None or not self.records:
            return False
        if core.recordings is None or core.recordings.refuses(names, feeds):
            return True
        return self.recipe.replans and not (in_turns and core.recordings.lasts(names, feeds))

    def device_graph_report(self) -> DeviceGraphReport:
        """Return which runs replay recorded launches, and why others do not."""
        core = self.open_core()
        if core.recordings is not None:
            return core.recordings.report()
        return DeviceGraphReport(reason=self._reason or f"{self.device.display} records nothing unless it is asked to")

    def _prepare_runs(self, core: SessionCore, node_of: Callable[[str], ExportedNode | None]) -> None:
        """Set up how host arrays are run."""
        recipe, shared = self.recipe, self._options
        if not (recipe.run_config or recipe.recording):
            return
        nodes = without_shape_arithmetic(self.assignments, node_of)
        reason = host_work(recipe.ep_name, recipe.memory[0], nodes, core.session)
        self.copies_back = recipe.memory != HOST_MEMORY and any(node.provider != recipe.ep_name for node in nodes)
        types = {**self.input_types, **self.output_types}
        unfit = self._reason or unrecordable(self.assignments, types)
        self._reason = self._reason or reason or unfit
        required = recipe.recording is not None and recipe.recording.required
        if core.recorder is not None:
            capturing = self.engine.RunOptions()
            for key, value in recipe.run_config.items():
                capturing.add_run_config_entry(key, value)
            options = (shared, capturing)
            bind = functools.partial(FixedRun, self.engine, core.session, recipe.memory, options, self.errors)
            link = weakref.ref(self)

            def fresh(like: npt.NDArray[Any]) -> OrtTensor:
                session = link()
                assert session is not None  # noqa: S101  # it is running
                return OrtTensor.empty(session, like)

            plain: Any = core.call
            if not self._reason:  # else sizes of outputs may depend on values
                with contextlib.suppress(NotRecordedError):
                    plain = LentOutputs(
                        core.session,
                        plain,
                        HostVectors(self.engine),
                        self.handed_on,
                        lambda shapes: {} if (session := link()) is None else session.infer_outputs(shapes),
                        core.recorder.lend,
                        shared,
                        self.errors,
                    ).run
            core.recordings = Recordings(
                core.recorder,
                plain,
                bind,
                fresh,
                self._graph_lock,
                shared,
                required=required,
                errors=self.errors,
                replans=recipe.replans,
            )
            core.call = core.recordings.run
            if self._reason:
                core.recordings.give_up(self._reason)
            nodes = without_shape_arithmetic(self.assignments, node_of, guess=True)
            unbound = _REPLANS if recipe.replans else host_work(recipe.ep_name, recipe.memory[0], nodes, core.session)
            core.recordings.bound_refusal = unfit or unbound
        if required and (why := self._reason):

            def refuse(*arguments: Any) -> Any:  # holds no session, or the core would keep it alive
                raise not_recorded(why)

            self.refuses = self._plain = True
            core.call = refuse

    def _run_checked(self, core: SessionCore, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
        if self._before is not None:
            self._before()
        if self.recipe.device_graph:
            with self._graph_lock:
                return self.graph_runs(core).run(core, feeds, names)
        if not self._foreign_outputs.isdisjoint(names):
            return self._run_values(core, names, feeds)
        ready, memory = dict(feeds), []
        for name in self._foreign_inputs.intersection(feeds):
            if feeds[name] is not None:
                ready[name], borrowed = to_ort_value(self.engine, name, feeds[name], self.input_types[name])
                memory.append(borrowed)
        results = list(core.call(names, ready, core.options))
        for at, name in enumerate(names):
            if name in self.handed_on and isinstance(results[at], np.ndarray):
                results[at] = results[at].copy()  # before ONNX Runtime 1.31 it borrows the memory
        return results

    def _run_values(self, core: SessionCore, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run with OrtValues on both sides, the only way to read element types numpy does not know."""
        given = {name: value for name, value in feeds.items() if value is not None}
        stuck = [name for name in given if not is_tensor_like(self.input_types.get(name, given[name]))]  # pyright: ignore[reportArgumentType]
        stuck += [name for name in names if name in self.output_types and not is_tensor_like(self.output_types[name])]
        if stuck:
            raise EngineError(
                f"strings, sequences and maps ({', '.join(stuck)}) cannot be combined with outputs of "
                f"{', '.join(sorted(self._foreign_outputs.intersection(names)))} in one run; cast those to f32"
            )
        values, memory = {}, []
        for name, value in given.items():
            values[name], borrowed = to_ort_value(self.engine, name, value, self.input_types[name])
            memory.append(borrowed)
        call = getattr(getattr(core.session, "_sess", None), "run_with_ort_values", None)
        if call is None or not all(hasattr(value, "_ortvalue") for value in values.values()):
            results = core.session.run_with_ort_values(names, values, core.options)
        else:  # the public call takes 10 times as long, because a C++ exception ends its loop
            vector = call({name: value._ortvalue for name, value in values.items()}, names, core.options)
            results = [vector[index] for index in range(len(vector))]
        return [from_ort_value(result, name) for name, result in zip(names, results, strict=True)]


def run_binding(session: Any, io: Any, options: Any) -> None:
    """Run a binding of a session."""
    call, binding = binding_call(session, io)
    call(binding, options)


def binding_call(session: Any, io: Any) -> tuple[Any, Any]:
    """Return the cheapest call that runs a binding, and its argument; the public call adds half a microsecond."""
    call = getattr(getattr(session, "_sess", None), "run_with_iobinding", None)
    inner = getattr(io, "_iobinding", None)
    if call is None or inner is None:
        return session.run_with_iobinding, io
    return call, inner


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
        self._inputs = {name: self._fixed(name, kind) for name, kind in session.input_types.items()}
        self._outputs = {name: self._fixed(name, kind) for name, kind in session.output_types.items()}
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
        run_binding(core.session, self._io, core.options)
        outputs: list[Any] = []
        for name in names:
            value = self._outputs[name]
            if name in resident:
                copy = self._fixed(name, self._session.output_types[name])
                copy.update_inplace(value)
                outputs.append(OrtTensor(self._session, copy, core))
            else:
                outputs.append(value.numpy())
        return outputs

    def _fixed(self, name: str, kind: ValueType) -> Any:
        static = isinstance(kind, TensorType) and kind.shape is not None and kind.shape.is_static
        if not isinstance(kind, TensorType) or kind.shape is None or not static or has_foreign_dtype(kind):
            raise EngineError(
                f"a device graph needs tensors of numbers with static shapes, and {name!r} is {kind}; bind its dims "
                "with CompileOptions(dims=...), or compile without device_graph"
            )
        make = self._session.engine.OrtValue.ortvalue_from_shape_and_type
        return make(list(kind.shape.static()), kind.dtype.numpy, *self._session.recipe.memory)


def _fast_run(session: Any) -> Any:
    """Return the private `run(names, feeds, options)`, or the public one, which checks names in quadratic time."""
    return getattr(getattr(session, "_sess", None), "run", session.run)


def _types(infos: Sequence[Any], declared: Mapping[str, ValueType]) -> dict[str, ValueType]:
    return {info.name: refined(value_type(info.type, info.shape), declared.get(info.name)) for info in infos}


def _foreign(types: Mapping[str, ValueType]) -> frozenset[str]:
    return frozenset(name for name, kind in types.items() if has_foreign_dtype(kind))
