"""`EngineSlot`: the one open session of a graph on a device, opened late and replaced when its weights are stale.

A run takes the current engine and keeps it until it ends, so a replaced engine lives exactly as long as the last run
in it, and no run sees weights of two versions. Mutable parameters are fed: a run takes the values of one version.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlx_ort.device import Device
from rlx_ort.errors import PlacementError, RunError
from rlx_ort.execution.dispatch_report import log_dispatch_report
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.execution.placement import Placement
from rlx_ort.execution.placement_check import build_placement, enforce
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import ValueType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.execution.runnable import Runnable
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import CostProfile, EngineSession, Provider

__all__ = ["Engine", "EngineSlot", "Observer", "WeightSource"]

_LAYERS = "session.name_based_layer_assignment"
Observer = Callable[[Mapping[str, Any]], None]
"""Takes the hidden outputs of a run, by name."""


class WeightSource(Protocol):
    """Where sessions get weights from: a `WeightStore`, or a view of one."""

    @property
    def version(self) -> int:
        """Grows with each change."""

    def snapshot(
        self, names: Sequence[str], stored_as: Mapping[str, DType] = ...
    ) -> tuple[int, Mapping[str, TensorData]]:
        """Return the version and the data of some parameters, all of that one version."""

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that are not set."""

    def pin(self, names: Sequence[str]) -> None:
        """Note that a session uses these parameters."""

    def unpin(self, names: Sequence[str]) -> None:
        """Undo one `pin` of the same names."""


class Engine:
    """An open session with the weights it was opened with; closes itself when nobody refers to it any more.

    Attributes:
        session: the open session.
        run: runs it on the inputs of the user's graph, and feeds it the mutable parameters.
        weights: the data it was opened with.
        version: the newest version of the store whose values it has.
        strict_ok: whether no node strays from the device.
        plain: whether `run` is the session's own; if not, bound runs must take `feeds`, or go through `run`.
        observed: whether each run must go through `run`, because somebody reads outputs the user's graph does not have.
    """

    __slots__ = (
        "__weakref__", "_finalizer", "_fed", "_lock", "observed", "plain", "run", "session", "strict_ok", "version",
        "weights",
    )  # fmt: skip

    def __init__(
        self,
        session: EngineSession,
        weights: Mapping[str, TensorData],
        version: int,
        source: WeightSource,
        feeds: Mapping[str, Any] | None = None,
        observed: tuple[tuple[str, ...], Observer] | None = None,
    ) -> None:
        self.session = session
        self.weights = weights
        self.version = version
        self.strict_ok = False
        self.plain = not feeds and observed is None
        self.observed = observed is not None
        self._fed = _Fed(session.run, dict(feeds or {}), observed)
        self.run = session.run if self.plain else self._fed
        self._lock = threading.Lock()
        names = (*weights, *(feeds or {}))
        source.pin(names)
        self._finalizer = weakref.finalize(self, _close, session, source, names)

    @property
    def feeds(self) -> Mapping[str, Any]:
        """The mutable parameters as the session is fed them, of one version; take it once for a run."""
        return self._fed.values

    def renew(self, version: int, feeds: Mapping[str, Any]) -> None:
        """Take over a newer version, which differs in mutable parameters at most."""
        with self._lock:
            if version > self.version:
                self._fed.values = dict(feeds)  # replaced and never changed: a run has taken one or the other
                self.version = version

    def close(self) -> None:
        """Close the session now."""
        self._finalizer()


class _Fed:
    """Runs a session with values of its own beside the feeds, and hands hidden outputs to whoever wants them."""

    __slots__ = ("_observed", "_run", "values")

    def __init__(
        self, run: Callable[..., list[Any]], values: dict[str, Any], observed: tuple[tuple[str, ...], Observer] | None
    ) -> None:
        self._run = run
        self._observed = observed
        self.values = values

    def __call__(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        values = self.values
        if values:
            feeds = {**feeds, **values}
        if self._observed is None:
            return self._run(output_names, feeds)
        hidden, observer = self._observed
        outputs = self._run([*output_names, *hidden], feeds)
        count = len(output_names)
        observer(dict(zip(hidden, outputs[count:], strict=True)))
        return outputs[:count]


class EngineSlot:
    """Holds the engine of a graph on a device. `current` may be read without a lock; all else takes one.

    Attributes:
        current: the open engine, or None.
        placement: where the nodes were when a session was last opened, whether it was kept or not.
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
        runnable: Runnable | None = None,
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
        self.placement: Placement | None = None
        self._mutable = () if runnable is None else runnable.mutable
        hidden = () if runnable is None else runnable.hidden
        self._host_marker = "" if runnable is None else runnable.host_marker
        self._observed = None if observer is None or not hidden else (hidden, observer)
        self.input_types = _without(exported.input_types, self._mutable)
        self.output_types = _without(exported.output_types, hidden)
        self._source: WeightSource = weights if source is None else source
        self._children: weakref.WeakSet[EngineSlot] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.RLock()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters the model needs, mutable ones included."""
        return (*self.exported.params, *self._mutable)

    def engine(self, rule: PlacementRule) -> Engine:
        """Return an open engine with the newest weights whose placement keeps the rule, opening one if needed.

        Raises:
            ParamError: a parameter is not set.
            PlacementError: the nodes are not where the rule wants them.
            DeviceUnavailableError: the device does not work here.
            LegalizeError: a node has no kernel.
            EngineError: the engine refused the model.
            RunError: the slot is closed.
        """
        with self._lock:
            if self._closed:
                raise RunError(f"the compiled graph on {self.device.display} is closed; compile the graph again")
            if self.placement is not None:
                enforce(self.placement, rule, self.device)
            engine = self.current
            if engine is not None and (engine.version == self.weights.version or self._still_fresh(engine)):
                return engine
            engine = self._open(rule)
            self.current = engine
            return engine

    def open_if_ready(self, rule: PlacementRule) -> None:
        """Open the engine unless a parameter is still to be set; see `engine` for what is raised."""
        if not self._source.missing(self.names):
            self.engine(rule)

    def twin(self) -> EngineSlot:
        """Return another slot with the same engine, which may be closed by itself."""
        twin = self.adopt(
            EngineSlot(self.provider, self.device, self.exported, self.weights, self.options, self.graph)
        )
        twin.input_types, twin.output_types = self.input_types, self.output_types
        twin._mutable, twin._host_marker = self._mutable, self._host_marker
        twin._observed, twin._source = self._observed, self._source
        with self._lock:
            twin.current, twin.placement = self.current, self.placement
        return twin

    def adopt(self, child: EngineSlot) -> EngineSlot:
        """Close a slot together with this one, and return it."""
        with self._lock:
            self._children.add(child)
            if self._closed:
                child.close()
        return child

    def release(self) -> None:
        """Give the engine up for now; it is opened again when somebody runs it."""
        with self._lock:
            self.current = None

    def close(self) -> None:
        """Give the engine up; runs that are in it finish, and the last one closes it."""
        with self._lock:
            self._closed = True
            self.current = None
            children = list(self._children)
        for child in children:
            child.close()

    def _still_fresh(self, engine: Engine) -> bool:
        """Return whether the newer version changed no frozen weight of this model, and take it over if so."""
        version, weights, changing = self._snapshot()
        if any(weights[name] is not engine.weights[name] for name in weights):
            return False
        engine.renew(version, self._fed(engine.session, changing))
        return True

    def _snapshot(self) -> tuple[int, Mapping[str, TensorData], Mapping[str, TensorData]]:
        """Return a version, the frozen weights and the mutable ones, all of that version."""
        version, found = self._source.snapshot(self.names, self.exported.stored_as)
        mutable = {name: found[name] for name in self._mutable}
        return version, {name: found[name] for name in self.exported.params}, mutable

    def _fed(self, session: EngineSession, changing: Mapping[str, TensorData]) -> dict[str, Any]:
        """Return mutable parameters as the session takes them; each is brought to a device once for all sessions."""
        return {
            name: self.weights.placed(name, data, self.device.label, lambda data=data: session.resident(data.numpy()))
            for name, data in changing.items()
        }

    def _open(self, rule: PlacementRule) -> Engine:
        from rlx_ort.providers.base import SessionRequest

        version, weights, changing = self._snapshot()
        options = self.options
        if self._host_marker:
            entries = {_LAYERS: f"cpu({self._host_marker})", **options.session_config}
            options = options.with_(session_config=entries)
        session = self.provider.open(SessionRequest(self.device, self.exported, weights, options))
        engine = Engine(session, weights, version, self._source, self._fed(session, changing), self._observed)
        requested = self.provider.ep_name or self.provider.name
        self.placement = build_placement(
            requested,
            session.assignments,
            self.exported,
            profiles=self._profiles(requested),
            graph=self.graph,
            host_marker=self._host_marker,
        )
        self._log()
        try:
            enforce(self.placement, rule, self.device)
        except PlacementError:
            engine.close()
            raise
        engine.strict_ok = not self.placement.strays
        return engine

    def _log(self) -> None:
        claims = self.provider.claims()
        policy = self.options.kernel_dispatch.policy.value
        count = None if claims is None else len(claims)
        assert self.placement is not None  # noqa: S101  # the caller has just set it
        log_dispatch_report(self.graph, self.exported, self.device, policy, count, self.placement)

    def _profiles(self, requested: str) -> dict[str, CostProfile]:
        from rlx_ort.providers import registry

        profiles = {}
        cpu = registry.default_registry().for_device(Device.CPU)
        for name, provider, device in (
            ("" if cpu is None else cpu.ep_name, cpu, Device.CPU),
            (requested, self.provider, self.device),
        ):
            profile = None if provider is None else provider.default_profile(device)
            if profile is not None:
                profiles[name] = profile
        return profiles


def _close(session: EngineSession, source: WeightSource, names: tuple[str, ...]) -> None:
    session.close()
    source.unpin(names)


def _without(types: Mapping[str, ValueType], names: Sequence[str]) -> Mapping[str, ValueType]:
    return {name: kind for name, kind in types.items() if name not in names} if names else types
