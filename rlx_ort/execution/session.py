"""`Session`: compiles graphs for one device, which was proven to work when the session was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.engine_slot import EngineSlot
from rlx_ort.execution.runnable import runnable
from rlx_ort.execution.weights import WeightStore
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import Provider
    from rlx_ort.providers.engine.compiled.key import CacheKey

__all__ = ["Session", "key_of_graph", "open_slot", "working_provider"]


class Session:
    """The front door to one device. The first session of a process on a device opens a one-node probe.

    Args:
        device: a device or its name.
        options: how to compile; the placement rule is strict unless they say otherwise.

    Raises:
        DeviceParseError: the name is no device.
        DeviceUnavailableError: the device does not work here; the message says why and what to do.
    """

    def __init__(self, device: Device | str = "cpu", options: CompileOptions | None = None) -> None:
        self._device = Device(device)
        self._options = options or CompileOptions()
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

        The engine's session is opened here when every parameter has its data, else at the first run. Pass the store
        of another compiled graph to share its weights.

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


def working_provider(device: Device) -> Provider:
    """Return the provider that serves a device, which was proven to work here.

    Raises:
        DeviceUnavailableError: nobody serves it, or it does not work here.
    """
    from rlx_ort.providers import registry

    known = registry.default_registry()
    provider = known.for_device(device)
    if provider is None:
        raise DeviceUnavailableError(
            device,
            "no ONNX Runtime execution provider runs this kind of device",
            "choose another device, or add a provider with rlx_ort.register_provider",
        )
    found = known.availability(device)
    if not found.available:
        raise DeviceUnavailableError(device, found.reason, found.remedy)
    return provider


def open_slot(
    provider: Provider, device: Device, graph: Graph, weights: WeightStore, options: CompileOptions
) -> EngineSlot:
    """Return a slot for the graph on a device, exported but not opened.

    Raises:
        GraphVerifyError: the graph is wrong.
        ConversionError: a node cannot be written as ONNX.
    """
    from rlx_ort.converters.to_onnx.exporter import exported
    from rlx_ort.providers.claims import kernel_set

    options = options.on(device)
    what = runnable(graph)
    model = exported(what.graph, options, kernel_set(provider, graph))
    return EngineSlot(provider, device, model, weights, options, graph, what)


def key_of_graph(graph: Graph, device: Device, options: CompileOptions) -> CacheKey:
    """Return the key that a graph has on a device. Exports the graph and reads its weights; opens no session.

    Raises:
        DeviceUnavailableError: the device does not work here, or nothing of it is kept.
    """
    from rlx_ort.providers.base import SessionRequest
    from rlx_ort.providers.engine.compiled.models import session_key
    from rlx_ort.providers.engine.compiled.store import default_store
    from rlx_ort.providers.engine.runtime import describe_runtime
    from rlx_ort.providers.ort_provider import OrtProvider

    provider = working_provider(device)
    if not isinstance(provider, OrtProvider):
        raise DeviceUnavailableError(device, "it is not of ONNX Runtime, and nothing of it is kept")
    weights = WeightStore.for_graph(graph)
    slot = open_slot(provider, device, graph, weights, options)
    _, found = weights.snapshot(slot.exported.params, slot.exported.stored_as)
    request = SessionRequest(device, slot.exported, found, slot.options)
    recipe = provider.recipe(device, slot.options)
    return session_key(recipe, request, describe_runtime(), default_store().root)
