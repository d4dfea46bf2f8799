"""`Engine`: an open session with the weights it was opened with. `EngineSlot`: the engine of a graph on a device.

A slot opens its engine lazily and replaces it when the weights are stale. A run takes the current engine and keeps it
until it ends, so a replaced engine lives exactly as long as the last run in it. No run sees weights of two versions.
All who run a graph with the same options share one slot, which closes when the last of its owners has closed it.

Some engines feed mutable parameters with every run, those of one version, and some read outputs that the user's graph
does not have. Every way to run such an engine goes through `_Fed`; the others run their session directly.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.device import Device
from rlx_ort.errors import CancelledRunError, EngineError, PlacementError, RlxError
from rlx_ort.execution import tunings
from rlx_ort.execution.added_nodes import AddedNode, added_nodes
from rlx_ort.execution.indices import CheckedBinder, IndexCheck, index_check
from rlx_ort.execution.inputs import sizes_of
from rlx_ort.execution.interface import outputs_class
from rlx_ort.execution.placement import Placement, build_placement, enforce, log_dispatch_report
from rlx_ort.execution.residency import accounted, residency
from rlx_ort.execution.resident import Resident
from rlx_ort.execution.size_checks import SizeChecks, another, open_dims
from rlx_ort.execution.sized import SizedSessions
from rlx_ort.execution.weights import ExpertWeights, WeightStore
from rlx_ort.ir.core import Node
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
from rlx_ort.options.variant import TOLERANCES, Variant
from rlx_ort.providers.base import EngineSession, Provider, SessionRequest
from rlx_ort.providers.engine.binding import Binder, DeviceTensor, Run, WrappedBinder
from rlx_ort.providers.engine.ort_binding import binder_of
from rlx_ort.providers.engine.session import OrtEngineSession, SpoiledRunError
from rlx_ort.providers.engine.stopping import Turns
from rlx_ort.providers.registry import availability

_log = logging.getLogger(__name__)
Observer: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Receives the hidden outputs of a run, by name."""
WeightSource: TypeAlias = WeightStore | ExpertWeights

_ASSISTED = PlacementRule.ASSISTED
_OVERLAPPING = 2
_RETIRED = -1  # the version of an engine; stores count from 0
_SIZED_SHARE, _USUAL_BYTES = 16, 8 << 30  # sessions with fixed sizes may take a 16th of the device's memory
_LAYERS = "session.name_based_layer_assignment"


class User(Protocol):
    """A compiled graph that runs in an engine."""

    def unbind_idle(self) -> bool:
        """Release the buffers that no run uses now, and return whether no state needs the session."""


class Engine:
    """An open session; it closes with the last reference to it.

    Attributes:
        run: runs the session on the inputs of the user's graph: `(output_names, feeds) -> arrays`.
        weights: the data it was opened with.
        version: the newest version of the store whose values it has; -1 once it is retired.
        strict_ok: whether no node strays from the device.
        sized: the sessions with fixed sizes that take its runs; None where they gain nothing.
        files: the files that its weights are mapped from.
    """

    def __init__(
        self,
        session: EngineSession,
        weights: Mapping[str, TensorData],
        version: int,
        source: WeightSource,
        feeds: Mapping[str, Any] | None = None,
        observed: tuple[tuple[str, ...], Observer] | None = None,
        check: IndexCheck | None = None,
    ) -> None:
        self.session = session
        self.weights = weights
        self.version = version
        self.strict_ok = False
        self.sized: SizedSessions | None = None
        places = (data.source for data in weights.values())
        self.files = tuple({place.path: place for place in places if place is not None}.values())
        self._fed = _Fed(session, dict(feeds or {}), observed) if feeds or observed is not None else None
        self._check = check
        run = session.run if self._fed is None else self._fed.run_arrays
        self.run: Run = run if check is None else _checked(run, check)
        self._binder: Binder | None = None
        self._lock = threading.Lock()
        names = (*weights, *(feeds or {}))
        source.pin(names)
        self._finalizer = weakref.finalize(self, _close, session, source, names)

    @property
    def retired(self) -> bool:
        """Whether a failed run may have spoiled the next one, for which another session is opened."""
        return self.version == _RETIRED

    def retire(self) -> None:
        """Let no later run begin in it; runs that are in progress end in it."""
        with self._lock:
            self.version = _RETIRED

    def renew(self, version: int, feeds: Mapping[str, Any]) -> bool:
        """Take over a newer version, which differs in mutable parameters at most; return False if it is retired."""
        with self._lock:
            if _RETIRED < self.version < version:
                if self._fed is not None:
                    self._fed.values = dict(feeds)  # a new dict: a run in progress keeps the old one
                self.version = version
            return not self.retired

    @property
    def binder(self) -> Binder:
        """The memory side of the session, which feeds it in the same way as `run`."""
        if self._binder is None:
            binder = binder_of(self.session) if self._fed is None else self._fed
            self._binder = binder if self._check is None else CheckedBinder(binder, self._check)
        return self._binder

    def check_files(self) -> None:
        """Refuse to run on a mapped weights file that was written to: reading a truncated mapping ends the process.

        A file that was replaced or deleted is harmless, since the mapping keeps the old one.

        Raises:
            EngineError: a file was changed in place.
        """
        for source in self.files:
            try:
                now = FileRange.stamp_of(os.stat(source.path))  # noqa: PTH116  # called in every run
            except OSError:
                continue
            if now != source.stamp and now[:2] == source.stamp[:2]:
                raise EngineError(
                    f"the weights file {source.path} was changed in place while it is mapped; write a new file, rename "
                    "it over the old one, and load the graph again"
                )

    def close(self) -> None:
        """Close the session now."""
        self._finalizer()


def _checked(run: Run, check: IndexCheck) -> Run:
    def checked(output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        check(feeds)
        return run(output_names, feeds)

    return checked


class _Fed(WrappedBinder):
    """Runs a session with additional values, and passes hidden outputs to an observer; binds no buffers."""

    def __init__(
        self, session: EngineSession, values: dict[str, Any], observed: tuple[tuple[str, ...], Observer] | None
    ) -> None:
        super().__init__(binder_of(session))
        self._session = session
        self._observed = observed
        self.values = values

    def run_arrays(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        return self.run(feeds, output_names, ())

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        fed = {**feeds, **self.values}
        hidden: tuple[str, ...] = () if self._observed is None else self._observed[0]
        wanted = [*outputs, *hidden]
        if resident or any(isinstance(value, DeviceTensor) for value in fed.values()):
            results = self._binder.run(fed, wanted, resident)
        else:
            results = self._session.run(wanted, fed)
        if self._observed is not None:
            self._observed[1](dict(zip(hidden, results[len(outputs) :], strict=True)))
        return results[: len(outputs)]


def _close(session: EngineSession, source: WeightSource, names: tuple[str, ...]) -> None:
    session.close()
    source.unpin(names)


@dataclass(frozen=True)
class Runnable:
    """The graph that a session is opened for, which may differ from the user's.

    Attributes:
        graph: the graph to export.
        mutable: inputs of it that are parameters of the user's graph; sessions are fed them from the store.
        hidden: outputs that the user's graph does not have; see `rlx_ort.execution.moe`.
        host_marker: part of the names of the nodes that run on the CPU whatever the device is; empty for none.
    """

    graph: Graph
    mutable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    host_marker: str = ""


def runnable(graph: Graph) -> Runnable:
    """Return a graph with the parameters declared `mutable` as inputs; cached for as long as the graph lives.

    A mutable parameter declared inside a body stays a weight there, and a change of it opens the session again.
    """
    mutable = [node for node in graph.nodes if isinstance(node.op, Param) and node.op.mutable]
    if not mutable:
        return Runnable(graph)
    with _runnable_lock:
        entry = _runnables.get(graph)
        if entry is None or entry[0] != graph.revision:
            names = tuple(node.output_names[0] for node in mutable)
            _runnables[graph] = entry = (graph.revision, Runnable(_with_inputs(graph), names))
        return entry[1]


_runnables: weakref.WeakKeyDictionary[Graph, tuple[int, Runnable]] = weakref.WeakKeyDictionary()
_runnable_lock = threading.Lock()


def _with_inputs(graph: Graph) -> Graph:
    """Return a copy in which mutable parameters are inputs; ids and names stay."""
    result = graph.bind({})
    for place, node in enumerate(result.nodes):
        if isinstance(node.op, Param) and node.op.mutable:
            op = Input(node.op.name, node.op.type)
            result.nodes[place] = Node(node.id, op, (), node.types, node.name, node.output_names)
            result.weights.pop(node.op.name, None)
    return result


@dataclass(eq=False)
class EngineSlot:
    """Holds the engine of a graph on a device.

    Attributes:
        graph: the user's graph.
        variant: the tuned variant by which `options` differ from those of the caller, if there is one.
        owners: those that keep it, until they close it or are gone.
        current: the open engine, or None; may be read without a lock. Always None under a memory budget: each run then
            asks for the engine.
        named: makes outputs that have names, the device and the placement.
        closed: whether `close` was called.
        added: the nodes of the model as ONNX Runtime rewrote it; None until a placement needs them.
        governed: the open engine in place of `current`, under a memory budget.
        resident: the memory of its session.
        users: the compiled graphs that run in it.
        lock: held while an engine is opened, replaced or closed.
        size_checks: refuses runs by the sizes of their inputs.
        input_types: name -> type of the inputs of the user's graph, in order.
        output_types: name -> type of its outputs, in order.
    """

    provider: Provider
    device: Device
    exported: ExportedModel
    weights: WeightStore
    options: CompileOptions
    graph: Graph
    runs: Runnable
    source: WeightSource
    observer: Observer | None
    variant: Variant | None = None

    def __post_init__(self) -> None:
        self.input_types = _without(self.exported.input_types, self.runs.mutable)
        self.output_types = _without(self.exported.output_types, self.runs.hidden)
        self.current: Engine | None = None
        self.governed: Engine | None = None
        self.named = outputs_class(self.output_types, self.device)
        self.added: Mapping[str, AddedNode] | None = None
        self.size_checks = SizeChecks(self.provider, self.device, self.exported, self.input_types, self.named)
        self.closed = False
        self.owners: weakref.WeakSet[object] = weakref.WeakSet()
        self.users: weakref.WeakSet[User] = weakref.WeakSet()
        self._children: weakref.WeakSet[EngineSlot] = weakref.WeakSet()
        self.resident = Resident(self.provider, self.device, self.graph, weakref.WeakMethod(self.release_idle))
        self.lock = Turns()

    @property
    def placement(self) -> Placement | None:
        """The placement of the session opened last, even if the placement rule refused it."""
        return self.named.placement

    @property
    def overlapping(self) -> int:
        """How many runs `run_pipelined` makes at a time."""
        return 1 if self.provider.exclusive else _OVERLAPPING

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters the model needs, mutable ones included."""
        return (*self.exported.params, *self.runs.mutable)

    @functools.cached_property
    def _index_check(self) -> IndexCheck | None:
        """The check of fed indices, which kernels of the device leave out."""
        return index_check(self.exported.nodes, self.input_types, self.exported.known)

    def _refuse_limited(self, placement: Placement) -> None:
        """Refuse nodes whose kernel is known to fail or to be wrong on them, on the device or on the CPU beside it.

        Raises:
            PlacementError: there is one; nodes that ONNX Runtime computes beforehand do not count.
        """
        known, nodes = {*self.exported.known}, []
        for node in self.exported.nodes:
            if all(name in known for name in node.input_names if name) and node.input_names:
                known.update(node.output_names)
            elif not node.shape_only:
                nodes.append(node)
        limited = [*self.size_checks.limited(nodes)]
        if limited:
            lines = [
                f"  {self.exported.origin_names.get(node.origin, node.name)!r} ({node.pattern.op_type}): {why}"
                for _, node, why in limited
            ]
            raise PlacementError(
                f"{limited[0][0].display} takes {len(limited)} node(s) that its kernels do not compute right:\n"
                + "\n".join(lines)
                + f"\n  choose {another(self.device)}",
                placement,
            )

    def engine(self, rule: PlacementRule) -> Engine:
        """Return an open engine with the newest weights whose placement keeps the rule; opens one if needed.

        Raises:
            CancelledRunError: the slot is closed; see `CompiledGraph.open` for the others.
        """
        with self.lock:
            if self.closed:
                raise closed_error(self.device)
            if self.placement is not None:
                enforce(self.placement, rule, self.device)
            engine = self.current or self.governed
            if engine is None and self.resident.governed:
                engine = self.resident.engine()  # a run still needs it
            if engine is not None and (engine.version == self.weights.version or self._still_fresh(engine)):
                self.resident.touch()
            else:
                self.governed = engine = None  # lets go of stale weights before new ones are loaded
                engine = self._open(rule)
                self.resident.hold(engine)
            self.keep(engine)
            if self.closed:  # meanwhile; see `close`
                self.let_go()
                del engine  # the error must not keep it open
                raise CancelledRunError(f"the graph on {self.device.display} was closed while its session opened")
            return engine

    def ready(self, rule: PlacementRule) -> Engine:
        """Return what `engine` does, without a lock while an engine is up to date; refuses changed weights files.

        Raises:
            EngineError: a file was changed in place; see `engine` for the others.
        """
        engine = self.current
        if engine is None or engine.version != self.weights.version or not (engine.strict_ok or rule is _ASSISTED):
            engine = self.engine(rule)
        if engine.files:
            engine.check_files()
        return engine

    def open_if_ready(self, rule: PlacementRule) -> None:
        """Open the engine unless a parameter is still to be set; see `engine` for the errors."""
        if not self.source.missing(self.names):
            self.engine(rule)

    def adopt(self, child: EngineSlot) -> None:
        """Close a slot together with this one."""
        self._children.add(child)
        if self.closed:
            child.close()

    def release(self) -> None:
        """Let go of the engine; the next run opens another."""
        with self.lock:
            self.let_go()

    def release_idle(self) -> bool:
        """Let go of the engine if nothing needs it now, and return whether there was one."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if not all(user.unbind_idle() for user in list(self.users)) or not self.let_go():
                return False
            engine = self.resident.engine()
            if engine is not None:  # a run needs it
                self.keep(engine)
            return engine is None
        finally:
            self.lock.release()

    def close(self, owner: object = None) -> None:
        """Let an owner go, and with the last one the engine for good, which closes when the runs in it have ended.

        Does not wait for a thread that opens it, which holds the lock.
        """
        if owner is not None:
            self.owners.discard(owner)
        if self.owners:
            return
        self.closed = self.resident.closed = True
        self.let_go()
        for child in list(self._children):
            child.close()

    @property
    def is_open(self) -> bool:
        """Whether its engine is open."""
        return self.current is not None or self.governed is not None

    def let_go(self) -> bool:
        """Refer to the engine no more, and return whether there was one; the lock is held, or the slot is closed."""
        had, self.current, self.governed = self.is_open, None, None
        return had

    def keep(self, engine: Engine) -> None:
        """Refer to an engine; the lock is held."""
        if self.resident.governed:
            self.governed = engine
        else:
            self.current = engine

    def _still_fresh(self, engine: Engine) -> bool:
        """Return whether an engine may go on: a newer version, which it takes over, changed no frozen weight of it."""
        version, weights, changing = self._snapshot()
        if any(weights[name] is not engine.weights[name] for name in weights):
            return False
        return engine.renew(version, self._feeds(engine.session, changing))

    def _snapshot(self) -> tuple[int, Mapping[str, TensorData], Mapping[str, TensorData]]:
        """Return a version, the frozen weights and the mutable ones, all of that version."""
        version, tensors = self.source.snapshot(self.names, self.exported.stored_as)
        mutable = {name: tensors[name] for name in self.runs.mutable}
        return version, {name: tensors[name] for name in self.exported.params}, mutable

    def _feeds(
        self, session: EngineSession, changing: Mapping[str, TensorData], replaces: bool = False
    ) -> dict[str, Any]:
        """Return mutable parameters as the session takes them: host arrays, or tensors that its device has once."""
        binder = binder_of(session) if changing else None
        if binder is None or binder.on_host:
            return {name: data.numpy() for name, data in changing.items()}
        return {
            name: self.weights.on_device(
                self.device.label, name, data, functools.partial(binder.upload, data.numpy()), again=replaces
            )
            for name, data in changing.items()
        }

    def _added(self, request: SessionRequest) -> Mapping[str, AddedNode]:
        """Return the nodes of the model that ONNX Runtime rewrote, read back once: that opens another session."""
        if self.added is None:
            try:
                rewritten = self.provider.optimized(request)
            except RlxError as err:  # such as too little memory for a second session
                _log.warning("graph %r: its rewritten model cannot be read back: %s", self.graph.name, err)
                rewritten = None
            self.added = {} if rewritten is None else added_nodes(rewritten, self.exported)
        return self.added

    def _open(self, rule: PlacementRule) -> Engine:
        version, weights, changing = self._snapshot()
        options = self.options
        if self.runs.host_marker:
            entries = {_LAYERS: f"cpu({self.runs.host_marker})", **options.session_config}
            options = options.with_(session_config=entries)
        replaces = self.is_open
        begun = time.perf_counter()
        request = SessionRequest(self.device, self.exported, weights, options)
        session = residency().open(self.provider, self.resident, request)
        feeds = self._feeds(session, changing, replaces=replaces)
        observed = (self.runs.hidden, self.observer) if self.runs.hidden and self.observer is not None else None
        check = None if self.provider.checks_indices else self._index_check
        engine = Engine(session, weights, version, self.source, feeds, observed, check)
        self.named.placement = placement = build_placement(
            self.provider.ep_name or self.provider.name,
            session.assignments,
            self.exported,
            host_marker=self.runs.host_marker,
            added=functools.partial(self._added, request),
        )
        claims = self.provider.claims()
        policy, count = options.kernel_dispatch.policy.value, None if claims is None else len(claims)
        log_dispatch_report(self.graph, self.exported, self.device, policy, count, placement)
        try:
            enforce(placement, rule, self.device)
            self._refuse_limited(placement)
        except PlacementError:
            engine.close()
            raise
        engine.strict_ok = not placement.strays
        if isinstance(session, OrtEngineSession):
            session.infer_outputs = self.size_checks.output_shapes
            if session.recipe.spoiled_by_errors:
                session.retire = weakref.WeakMethod(engine.retire)
                engine.run = _unspoiled(engine.run, weakref.ref(self), rule)
        if self.resident.governed:
            engine.run = accounted(engine.run, self.resident)
        else:
            self._watch_sizes(engine, rule)
        took_s = time.perf_counter() - begun
        _log.info("graph %r: opened on %s in %.3g s, %r", self.graph.name, self.device.label, took_s, placement)
        return engine

    def _watch_sizes(self, engine: Engine, rule: PlacementRule) -> None:
        """Let sizes that come back have sessions of their own, where such may be faster and there is no budget.

        They may be where the session says so, or where `tune` found a faster variant for them.
        """
        session: Any = engine.session
        gains = getattr(session, "gains_from_fixed_sizes", None)
        plain = self.source is self.weights and not self.runs.hidden
        records = getattr(session, "records", False)
        if not (gains and plain and self.options.sized_sessions and records and open_dims(self.input_types)):
            return
        link, asked, types = weakref.ref(self), weakref.WeakMethod(gains), self.input_types
        tuned = tunings.sizes_of(self.graph, self.device) if self.options.tuned else []

        def may_gain(names: Sequence[str], feeds: Mapping[str, Any], in_turns: bool) -> bool:
            sizes = sizes_of(types, {name: array.shape for name, array in feeds.items()}) if tuned else {}
            return any(sizes.items() <= each.items() for each in tuned) or bool(
                (gains := asked()) and gains(names, feeds, in_turns)
            )

        engine.sized = SizedSessions(
            engine.run,
            may_gain,
            getattr(session, "replans", False),
            lambda key: _sized_slot(link(), key),
            rule,
            self.options.sized_sessions,
            (availability(self.device).memory_bytes or _USUAL_BYTES) // _SIZED_SHARE,
            functools.partial(bytes_in_use, self.provider, self.device),
            self.device.label,
            session.guarded,
            _tolerance(self.exported, self.options),
        )
        engine.run = engine.sized.run


def _unspoiled(run: Run, slot: Callable[[], EngineSlot | None], rule: PlacementRule) -> Run:
    """Return a run which is made in another session where one that failed has spoiled its own."""

    def unspoiled(output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        try:
            return run(output_names, feeds)
        except SpoiledRunError:
            if (there := slot()) is None:
                raise
            return there.engine(rule).run(output_names, feeds)

    return unspoiled


def _tolerance(model: ExportedModel, options: CompileOptions) -> float:
    """Return how far two sessions of a model may be apart, over the largest value, from the error of each."""
    kinds = {kind for node in model.nodes for kind in node.pattern.outputs}
    dtypes = {kind.dtype.value for kind in kinds if isinstance(kind, TensorType)}
    lower = [each for each in TOLERANCES if each.value in dtypes or each is options.precision]
    return max([TOLERANCES[each] * (1 if each is Precision.F32 else 2) for each in {Precision.F32, *lower}])


def bytes_in_use(provider: Provider, device: Device) -> int | None:
    """Return the bytes of a device's memory that this process uses, None where they cannot be read."""
    reading = provider.memory(device)
    return None if reading is None else reading.nbytes


def closed_error(device: Device) -> CancelledRunError:
    """Return the error of a run of a graph that is closed."""
    return CancelledRunError(f"the compiled graph on {device.display} is closed; compile the graph again")


def _sized_slot(slot: EngineSlot | None, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> EngineSlot:
    """Return the slot of a session like that of another one, for inputs of these shapes; it is closed with that one.

    Raises:
        CancelledRunError: the other one is closed.
    """
    if slot is None or slot.closed:
        raise CancelledRunError("the compiled graph is closed")
    dims = {**slot.options.dims, **sizes_of(slot.input_types, dict(shapes))}
    options = slot.options.with_(dims=dims, sized_sessions=0)
    sized = open_slot(slot.provider, slot.device, slot.graph, slot.weights, options)
    slot.adopt(sized)
    return sized


def open_slot(
    provider: Provider,
    device: Device,
    graph: Graph,
    weights: WeightStore,
    options: CompileOptions,
    runs: Runnable | None = None,
    source: WeightSource | None = None,
    observer: Observer | None = None,
) -> EngineSlot:
    """Export the graph for a device and return a slot for its session, which is not opened yet.

    `runs` is the graph to run in place of the user's, `source` gives its weights, and `observer` gets hidden outputs.

    Raises:
        GraphVerifyError: the graph is wrong.
        ConversionError: a node cannot be written as ONNX.
    """
    from rlx_ort.converters.to_onnx.exporter import exported
    from rlx_ort.providers.claims import kernel_set

    options, runs, source = options.on(device), runs or runnable(graph), source or weights
    model = exported(runs.graph, options, kernel_set(provider, runs.graph, options))
    variant = tunings.tuned(provider, device, model, options)
    if variant is not None:
        _log.info("graph %r: %s is tuned: %s", graph.name, device.label, variant)
        options = variant.of(options)
        model = exported(runs.graph, options, kernel_set(provider, runs.graph, options))
    runs = replace(runs, graph=graph)  # frees the rewritten graph, whose constants may be large
    return EngineSlot(provider, device, model, weights, options, graph, runs, source, observer, variant)


def _without(types: Mapping[str, ValueType], names: Sequence[str]) -> Mapping[str, ValueType]:
    return {name: kind for name, kind in types.items() if name not in names} if names else types
