"""The devices a graph can run on, and the report that says for each device why or why not."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlx_ort.calibration import store
from rlx_ort.converters.collector import paused_collector
from rlx_ort.device import Device, priority_rank
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType
from rlx_ort.providers import registry
from rlx_ort.selection.availability import availability, is_selectable, provider_of, supports_run_slots
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.predict import cost_model, predicted_ns
from rlx_ort.selection.support import Support, support_of

__all__ = [
    "CLOSE",
    "DeviceCandidate",
    "device_report",
    "devices_for",
    "fastest_device_for",
]

CLOSE = 1.05
"""Predictions within this factor of the best are equal, as far as a preference is concerned."""

_CHOICES_A_GRAPH = 8
_Choice: TypeAlias = tuple[object, DevicePolicy, CompileOptions, Sequence[Device]]
_choices: weakref.WeakKeyDictionary[Graph, deque[_Choice]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class DeviceCandidate:
    """One row of `device_report`.

    Attributes:
        device: the device.
        label: its label.
        available: whether it works here.
        registered: whether a provider serves it.
        supports_graph: whether it works here and takes the graph, with the CPU's help where that is allowed.
        recommended: whether it is the automatic choice.
        blocker: why it cannot be chosen, or None.
        hardware: the device's name as its driver tells it, empty when unknown.
        driver: the driver's version, empty when unknown.
        capabilities: names of the run-time features it has.
        predicted_ns: the predicted time of one run in ns, or None when it cannot be chosen or has no profile.
        profile_source: where the figures of the prediction come from; `default` are shipped and not measured here.
        cpu_nodes: how many of the graph's nodes the CPU would take over.
        assumed_dims: the inputs' dims without a size, for which the prediction takes a stand-in, `DEFAULT_DIM`; one
            without a name is told by its place, as `x[0]`.
    """

    device: Device
    label: str
    available: bool
    registered: bool
    supports_graph: bool
    recommended: bool
    blocker: str | None = None
    hardware: str = ""
    driver: str = ""
    capabilities: tuple[str, ...] = ()
    predicted_ns: float | None = None
    profile_source: str | None = None
    cpu_nodes: int = 0
    assumed_dims: tuple[str, ...] = ()


def device_report(
    graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> list[DeviceCandidate]:
    """Return one row for each device of the policy's probe set, in that order.

    The first call of a process probes the devices and exports the graph; later ones remember both.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    ranked = _ranked(graph, policy, options)
    chosen = ranked[0] if ranked else None
    predictions = {device: predicted_ns(graph, device, options) for device in ranked}
    return [_row(graph, device, policy, options, chosen, predictions) for device in policy.probe_set()]


def devices_for(
    graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> list[Device]:
    """Return the devices that may be chosen for the graph, by preference, then by platform priority.

    Devices that no automatic choice may take are in it only when the policy's allow list names them.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    named = policy.allow or ()
    known = dict.fromkeys([*Device.all(), *named])
    found = [device for device in known if policy.allows(device) and (device in named or is_selectable(device))]
    return policy.apply(device for device in found if blocker_of(graph, device, policy, options) is None)


def fastest_device_for(
    graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> Device:
    """Return the device with the smallest predicted time among those that may be chosen for the graph.

    A preferred device wins when its prediction is within 5 % of the best. Devices without a prediction come after
    those with one, by preference and then by platform priority.

    Raises:
        NoViableDeviceError: no device may be chosen; the message says why for each.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    ranked = _ranked(graph, policy, options)
    if not ranked:
        raise no_viable_device(graph, policy, options)
    return ranked[0]


def automatic(options: CompileOptions | None) -> CompileOptions:
    """Return the options of a choice that nobody made by name: the CPU may help unless they say otherwise."""
    options = options or CompileOptions()
    return options if options.placement is not None else options.with_(placement=PlacementRule.ASSISTED)


def blocker_of(graph: Graph, device: Device, policy: DevicePolicy, options: CompileOptions) -> str | None:
    """Return why a device cannot be chosen for a graph, or None: not here, then the graph, then the policy."""
    found = availability(device)
    if not found.available:
        return f"{found.reason}; {found.remedy}" if found.remedy else found.reason
    return support_of(device, graph, options).blocker or policy.refusal(device)


def no_viable_device(graph: Graph, policy: DevicePolicy, options: CompileOptions) -> NoViableDeviceError:
    """Return the error for a graph that no device may run, with the blocker of each device of the probe set."""
    rows = []
    for device in dict.fromkeys(policy.probe_set()):
        blocker = blocker_of(graph, device, policy, options)
        rows.append((device, blocker or "only runs when it is asked for by name"))
    remedy = "widen the policy, or bring in another execution provider"
    return NoViableDeviceError(f"no device may run graph {graph.name!r}: {remedy}.", rows)


def _ranked(graph: Graph, policy: DevicePolicy, options: CompileOptions) -> Sequence[Device]:
    """Return the devices that may be chosen, the automatic choice first.

    The answer is remembered until the graph, a provider or a calibration of this process changes.
    """
    providers = registry.default_registry()
    state = (providers, providers.generation, store.generation(), graph.revision)
    known = _choices.get(graph)
    for entry_state, entry_policy, entry_options, ranking in known or ():
        if entry_state == state and entry_policy == policy and entry_options == options:
            return ranking
    with paused_collector():  # judging makes an object a node, over which it would walk several times
        ranking = _rank(graph, policy, options)
    if known is None:
        known = _choices.setdefault(graph, deque(maxlen=_CHOICES_A_GRAPH))
    # Ranking may have probed devices or measured them; what it found is as of now.
    known.append(((providers, providers.generation, store.generation(), graph.revision), policy, options, ranking))
    return ranking


def _rank(graph: Graph, policy: DevicePolicy, options: CompileOptions) -> list[Device]:
    devices = devices_for(graph, policy, options)
    predictions = {device: predicted_ns(graph, device, options) for device in devices}
    known = [time for time in predictions.values() if time is not None]
    limit = min(known, default=math.inf) * CLOSE

    def place(device: Device) -> tuple[float, ...]:
        time = predictions[device]
        if time is None:
            return (2, policy.prefer_rank(device), priority_rank(device))
        if time <= limit:
            return (0, policy.prefer_rank(device), time, priority_rank(device))
        return (1, time, priority_rank(device))

    return sorted(devices, key=place)


def _row(
    graph: Graph,
    device: Device,
    policy: DevicePolicy,
    options: CompileOptions,
    chosen: Device | None,
    predictions: Mapping[Device, float | None],
) -> DeviceCandidate:
    found = availability(device)
    support = support_of(device, graph, options) if found.available else Support(reason="not here")
    model = cost_model(device) if predictions.get(device) is not None else None
    return DeviceCandidate(
        device=device,
        label=device.label,
        available=found.available,
        registered=provider_of(device) is not None,
        supports_graph=support.supported,
        recommended=device == chosen,
        blocker=blocker_of(graph, device, policy, options),
        hardware=found.hardware,
        driver=found.driver,
        capabilities=_capabilities(device),
        predicted_ns=predictions.get(device),
        profile_source=None if model is None else model.source,
        cpu_nodes=len(support.cpu_nodes),
        assumed_dims=() if model is None else _without_size(graph, options),
    )


def _without_size(graph: Graph, options: CompileOptions) -> tuple[str, ...]:
    """Return the dims of the graph's inputs that have no size, named or by their place."""
    found: dict[str, None] = {}
    for value in graph.inputs:
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        for axis, dim in enumerate(shape or ()):
            if dim is None:
                found[f"{value.name}[{axis}]"] = None
            elif isinstance(dim, str) and dim not in options.dims:
                found[dim] = None
    return tuple(found)


def _capabilities(device: Device) -> tuple[str, ...]:
    return ("run_slots", "typed_io") if supports_run_slots(device) else ()
