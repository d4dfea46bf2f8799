"""`EngineSlot`: the one open session of a graph on a device, opened late and replaced when its weights are stale.

A run takes the current engine and keeps it until it ends, so a replaced engine lives exactly as long as the last run
in it, and no run sees weights of two versions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx_ort.device import Device
from rlx_ort.errors import PlacementError, RunError
from rlx_ort.execution.dispatch_report import log_dispatch_report
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.execution.placement import Placement
from rlx_ort.execution.placement_check import build_placement, enforce
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import CostProfile, EngineSession, Provider

__all__ = ["Engine", "EngineSlot"]


class Engine:
    """An open session with the weights it was opened with; closes itself when nobody refers to it any more."""

    __slots__ = ("__weakref__", "_finalizer", "run", "session", "strict_ok", "version", "weights")

    def __init__(
        self, session: EngineSession, weights: Mapping[str, TensorData], version: int, store: WeightStore
    ) -> None:
        self.session = session
        self.run = session.run
        self.weights = weights
        self.version = version
        self.strict_ok = False
        store.pin(weights)
        self._finalizer = weakref.finalize(self, _close, session, store, tuple(weights))

    def close(self) -> None:
        """Close the session now."""
        self._finalizer()


class EngineSlot:
    """Holds the engine of a graph on a device. `current` may be read without a lock; all else takes one.

    Attributes:
        current: the open engine, or None.
        placement: where the nodes were when a session was last opened, whether it was kept or not.
    """

    def __init__(
        self,
        provider: Provider,
        device: Device,
        exported: ExportedModel,
        weights: WeightStore,
        options: CompileOptions,
        graph: Graph,
    ) -> None:
        self.provider = provider
        self.device = device
        self.exported = exported
        self.weights = weights
        self.options = options
        self.current: Engine | None = None
        self.placement: Placement | None = None
        self._graph = graph
        self._closed = False
        self._lock = threading.RLock()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

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
        if not self.weights.missing(self.exported.params):
            self.engine(rule)

    def close(self) -> None:
        """Give the engine up; runs that are in it finish, and the last one closes it."""
        with self._lock:
            self._closed = True
            self.current = None

    def _still_fresh(self, engine: Engine) -> bool:
        """Return whether the newer version changed none of this model's weights, and remember that if so."""
        version, weights = self.weights.snapshot(self.exported.params, self.exported.stored_as)
        if any(weights[name] is not engine.weights[name] for name in weights):
            return False
        engine.version = version
        return True

    def _open(self, rule: PlacementRule) -> Engine:
        from rlx_ort.providers.base import SessionRequest

        version, weights = self.weights.snapshot(self.exported.params, self.exported.stored_as)
        session = self.provider.open(SessionRequest(self.device, self.exported, weights, self.options))
        engine = Engine(session, weights, version, self.weights)
        requested = self.provider.ep_name or self.provider.name
        self.placement = build_placement(
            requested, session.assignments, self.exported, profiles=self._profiles(requested), graph=self._graph
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
        log_dispatch_report(self._graph, self.exported, self.device, policy, count, self.placement)

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


def _close(session: EngineSession, store: WeightStore, names: tuple[str, ...]) -> None:
    session.close()
    store.unpin(names)
