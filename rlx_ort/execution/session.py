"""`Session`: compiles graphs for one device. `CompileCache`: keeps the compiled graphs that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from rlx_ort.device import Device, DeviceLike, with_options
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.engine import open_slot
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
from rlx_ort.providers import registry
from rlx_ort.providers.base import Provider, SessionRequest
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.compiled.store import CacheKey, default_store


class Session:
    """Compiles graphs for one device. The first session of a process on a device opens a one-node probe.

    Args:
        device: a device or its name, or a pair of a name and provider options.
        options: how to compile; the placement rule is strict by default.

    Raises:
        DeviceParseError: the name is no device.
        InputError: the provider of a device has no such option.
        DeviceUnavailableError: the device does not work here; the message has the reason and the remedy.
    """

    def __init__(self, device: DeviceLike = "cpu", options: CompileOptions | None = None) -> None:
        self._device, given = with_options(device)
        self._options = (options or CompileOptions()).with_provider_options(self._device, given)
        if self._options.provider_options:
            registry.check_provider_options(self._options)
        self._provider = working_provider(self._device)

    @property
    def device(self) -> Device:
        """The device."""
        return self._device

    @property
    def options(self) -> CompileOptions:
        """The options every graph is compiled with."""
        return self._options

    @property
    def precision(self) -> Precision:
        """The arithmetic asked for."""
        return self._options.precision

    def compile(self, graph: Graph, weights: WeightStore | None = None) -> CompiledGraph:
        """Return the graph ready to run on the device; later changes of the graph do not reach it.

        The engine's session is opened here if every parameter has its data, else at the first run. Pass the store of
        another compiled graph to share its weights.

        Raises:
            GraphVerifyError: the graph is wrong.
            PlacementError: the device does not take every node it must take under the placement rule.
            LegalizeError: a node has no kernel.
            EngineError: the engine refused the model.
        """
        store = WeightStore.for_graph(graph) if weights is None else weights
        slot = open_slot(self._provider, self._device, graph, store, self._options)
        return CompiledGraph(slot, self._options.placement or PlacementRule.STRICT)

    def __repr__(self) -> str:
        return f"<Session on {self._device.label}, {self.precision.value}>"


class CompileCache:
    """A least-recently-used cache of compiled graphs on one device.

    An evicted graph is closed with the last reference to it. Methods may be called from several threads; a key is
    compiled once.

    Args:
        device: where the graphs run.
        capacity: the number of graphs to keep, at least 1.
        options: how they are compiled by default; options are part of the key.

    Raises:
        DeviceUnavailableError: the device does not work here.
    """

    def __init__(self, device: DeviceLike = "cpu", capacity: int = 8, options: CompileOptions | None = None) -> None:
        self._session = Session(device, options)
        self._capacity = max(capacity, 1)
        self._known: OrderedDict[Hashable, CompiledGraph] = OrderedDict()
        self._pending: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def device(self) -> Device:
        """The device."""
        return self._session.device

    def __repr__(self) -> str:
        return f"<CompileCache on {self.device.label}, {len(self)} of {self.capacity} graphs>"

    @property
    def capacity(self) -> int:
        """The number of graphs to keep."""
        return self._capacity

    def get_or_compile(
        self,
        key: Hashable,
        build: Callable[[], Graph],
        *,
        options: CompileOptions | None = None,
        weights: WeightStore | None = None,
    ) -> CompiledGraph:
        """Return the graph of a key; builds and compiles it if it is not cached. Cached graphs keep their parameters.

        `build` and the compilation run outside the cache's lock, so other keys do not wait for them.

        Raises:
            GraphVerifyError: the graph is wrong.
            PlacementError: the device does not take every node it must take.
            EngineError: the engine refused the model.
        """
        full = (key, (options or self._session.options).key)
        with self._lock:
            pending = self._pending.setdefault(full, threading.Lock())
        with pending:
            try:
                with self._lock:
                    compiled = self._known.get(full)
                    if compiled is not None:
                        self._known.move_to_end(full)
                        if not compiled.closed:
                            return compiled
                        weights = compiled.weights if weights is None else weights
                session = self._session if options is None else Session(self.device, options)
                made = session.compile(build(), weights)
                with self._lock:
                    self._known[full] = made
                    while len(self._known) > self._capacity:
                        # Not closed here: it may be in use, and the last reference closes its session.
                        self._known.popitem(last=False)
                return made
            finally:
                with self._lock:
                    self._pending.pop(full, None)

    def clear(self) -> None:
        """Drop every graph."""
        with self._lock:
            self._known.clear()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        """Return whether a graph of the key is cached, compiled with the options of the cache."""
        return (key, self._session.options.key) in self._known


def working_provider(device: Device) -> Provider:
    """Return the provider of a device, after a probe that the device works here.

    Raises:
        DeviceUnavailableError: it has no provider, or it does not work here.
    """
    registry.require_available(device)
    provider = registry.default_registry().for_device(device)
    assert provider is not None  # noqa: S101  # a device without a provider is not available
    return provider


def key_of_graph(graph: Graph, device: Device, options: CompileOptions, weights: WeightStore | None = None) -> CacheKey:
    """Return a graph's key in the compile cache on disk. Exports the graph and reads its weights; opens no session.

    The weights are those of the graph unless a store is given.

    Raises:
        DeviceUnavailableError: the device does not work here, or its models are not cached.
    """
    from rlx_ort.providers.engine.compiled.models import session_key
    from rlx_ort.providers.ort_provider import OrtProvider

    provider = working_provider(device)
    if not isinstance(provider, OrtProvider):
        raise DeviceUnavailableError(device, "it is not run by ONNX Runtime, and its models are not cached")
    weights = weights or WeightStore.for_graph(graph)
    slot = open_slot(provider, device, graph, weights, options)
    _, tensors = weights.snapshot(slot.exported.params, slot.exported.stored_as)
    request = SessionRequest(device, slot.exported, tensors, slot.options)
    recipe = provider.recipe(device, slot.options)
    return session_key(recipe, request, runtime.describe_runtime(), default_store().root)
