"""`EngineSlot`: the open session of a graph on a device, opened lazily and replaced when its weights are stale.

A run takes the current engine and keeps it until it ends, so a replaced engine lives exactly as long as the last run
in it, and no run sees weights of two versions. Mutable parameters are fed: a run takes the values of one version.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlx_ort.device import Device
from rlx_ort.errors import PlacementError, RunError
from rlx_ort.execution.dispatch_report import log_dispatch_report
from rlx_ort.execution.engine import Engine, Observer, WeightSource
from rlx_ort.execution.placement import Placement, build_placement, enforce
from rlx_ort.execution.residency import Resident, residency
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.core import Node
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.engine.binding import binder_of

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import EngineSession, Provider

__all__ = ["EngineSlot", "Runnable", "runnable"]

_LAYERS = "session.name_based_layer_assignment"


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
        found = _runnables.get(graph)
        if found is None or found[0] != graph.revision:
            names = tuple(node.output_names[0] for node in mutable)
            _runnables[graph] = found = (graph.revision, Runnable(_with_inputs(graph), names))
        return found[1]


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


class EngineSlot:
    """Holds the engine of a graph on a device. `current` may be read without a lock.

    Attributes:
        current: the open engine, or None. Always None under a memory budget: each run then asks for the engine.
        resident: what its session takes; shared with its twins.
        users: the compiled graphs that run in it.
        lock: held while an engine is opened, replaced or closed.
        placement: the placement of the session opened last, even if the placement rule refused it.
        input_types: name -> type of the inputs of the user's graph, in order.
        output_types: name -> type of its outputs, in order.
    """

    def __init__(
        self,
        provider: Provider,
        device: Device,
        exported: ExportedModel,
        weights: WeightStore,
        options: CompileOptions,
        graph: Graph,
        runs: Runnable,
        source: WeightSource | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.provider = provider
        self.device = device
        self.exported = exported
        self.weights = weights
        self.options = options
        self.graph = graph
        self.current: Engine | None = None
        self.resident = Resident(provider, device, graph.name)
        self.resident.slots.add(self)
        self.users: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
        self._governed: Engine | None = None  # in place of `current`, under a memory budget
        self.placement: Placement | None = None
        self._runs = replace(runs, graph=graph)  # frees the rewritten graph, whose constants may be large
        self._source: WeightSource = weights if source is None else source
        self._observer = observer
        self.input_types = _without(exported.input_types, self._runs.mutable)
        self.output_types = _without(exported.output_types, self._runs.hidden)
        self._children: weakref.WeakSet[EngineSlot] = weakref.WeakSet()
        self._closed = False
        self.lock = threading.RLock()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters the model needs, mutable ones included."""
        return (*self.exported.params, *self._runs.mutable)

    def engine(self, rule: PlacementRule) -> Engine:
        """Return an open engine with the newest weights whose placement keeps the rule; opens one if needed.

        Raises:
            ParamError: a parameter is not set.
            PlacementError: the nodes are not where the rule wants them.
            DeviceUnavailableError: the device does not work here.
            LegalizeError: a node has no kernel.
            EngineError: the engine refused the model.
            RunError: the slot is closed.
        """
        with self.lock:
            if self._closed:
                raise RunError(f"the compiled graph on {self.device.display} is closed; compile the graph again")
            if self.placement is not None:
                enforce(self.placement, rule, self.device)
            engine = self.current or self._governed
            if engine is None and self.resident.governed:
                engine = self.resident.engine()  # a twin opened it
            if engine is not None and (engine.version == self.weights.version or self._still_fresh(engine)):
                self.resident.touch()
            else:
                self._governed = engine = None  # lets go of stale weights before new ones are loaded
                engine = self._open(rule)
                self.resident.hold(engine)
            self.keep(engine)
            return engine

    def open_if_ready(self, rule: PlacementRule) -> None:
        """Open the engine unless a parameter is still to be set; see `engine` for what is raised."""
        if not self._source.missing(self.names):
            self.engine(rule)

    def twin(self) -> EngineSlot:
        """Return another slot with the same engine, which is closed separately."""
        user = (self.provider, self.device, self.exported, self.weights, self.options, self.graph)
        twin = EngineSlot(*user, self._runs, self._source, self._observer)
        twin.resident = self.resident
        twin.resident.slots.add(twin)
        with self.lock:
            twin.current, twin._governed, twin.placement = self.current, self._governed, self.placement
        return twin

    def adopt(self, child: EngineSlot) -> None:
        """Close a slot together with this one."""
        with self.lock:
            self._children.add(child)
            if self._closed:
                child.close()

    def release(self) -> None:
        """Let go of the engine; the next run opens another."""
        with self.lock:
            self.let_go()

    def close(self) -> None:
        """Let go of the engine for good; it closes when the runs in it have ended."""
        with self.lock:
            self._closed = True
            self.let_go()
            children = list(self._children)
        for child in children:
            child.close()

    @property
    def is_open(self) -> bool:
        """Whether its engine is open."""
        return self.current is not None or self._governed is not None

    def let_go(self) -> bool:
        """Refer to the engine no more, and return whether there was one; the lock is held."""
        had, self.current, self._governed = self.is_open, None, None
        return had

    def keep(self, engine: Engine) -> None:
        """Refer to an engine; the lock is held."""
        if self.resident.governed:
            self._governed = engine
        else:
            self.current = engine

    def unbind_idle(self) -> bool:
        """Release buffers that are bound to the engine, and return whether no state depends on it."""
        return all(user.unbind_idle() for user in list(self.users))

    def _still_fresh(self, engine: Engine) -> bool:
        """Return whether the newer version changed no frozen weight of this model; the engine then takes it over."""
        version, weights, changing = self._snapshot()
        if any(weights[name] is not engine.weights[name] for name in weights):
            return False
        engine.renew(version, self._feeds(engine.session, changing))
        return True

    def _snapshot(self) -> tuple[int, Mapping[str, TensorData], Mapping[str, TensorData]]:
        """Return a version, the frozen weights and the mutable ones, all of that version."""
        version, found = self._source.snapshot(self.names, self.exported.stored_as)
        mutable = {name: found[name] for name in self._runs.mutable}
        return version, {name: found[name] for name in self.exported.params}, mutable

    def _feeds(
        self, session: EngineSession, changing: Mapping[str, TensorData], replaces: bool = False
    ) -> dict[str, Any]:
        """Return mutable parameters as the session takes them: host arrays, or tensors that its device has once."""
        binder = binder_of(session) if changing else None
        if binder is None or binder.on_host:
            return {name: data.numpy() for name, data in changing.items()}
        place = self.weights.placed.renew if replaces else self.weights.placed.get
        return {
            name: place(self.device.label, name, data, functools.partial(binder.upload, data.numpy()))
            for name, data in changing.items()
        }

    def _open(self, rule: PlacementRule) -> Engine:
        from rlx_ort.providers.base import SessionRequest

        version, weights, changing = self._snapshot()
        options = self.options
        if self._runs.host_marker:
            entries = {_LAYERS: f"cpu({self._runs.host_marker})", **options.session_config}
            options = options.with_(session_config=entries)
        replaces = self.is_open
        session = residency().open(self, SessionRequest(self.device, self.exported, weights, options))
        feeds = self._feeds(session, changing, replaces=replaces)
        hidden = self._runs.hidden
        observed = (hidden, self._observer) if hidden and self._observer is not None else None
        engine = Engine(session, weights, version, self._source, feeds, observed)
        requested = self.provider.ep_name or self.provider.name
        self.placement = build_placement(
            requested, session.assignments, self.exported, host_marker=self._runs.host_marker
        )
        claims = self.provider.claims()
        policy, count = options.kernel_dispatch.policy.value, None if claims is None else len(claims)
        log_dispatch_report(self.graph, self.exported, self.device, policy, count, self.placement)
        try:
            enforce(self.placement, rule, self.device)
        except PlacementError:
            engine.close()
            raise
        engine.strict_ok = not self.placement.strays
        return engine


def _without(types: Mapping[str, ValueType], names: Sequence[str]) -> Mapping[str, ValueType]:
    return {name: kind for name, kind in types.items() if name not in names} if names else types
