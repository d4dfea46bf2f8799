"""The devices a graph can run on, and the report that says for each device why or why not."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx_ort.calibration import store
from rlx_ort.converters.collector import paused_collector
from rlx_ort.device import Device, priority_rank
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers import registry
from rlx_ort.providers.availability import availability, is_selectable, known_devices, provider_of, supports_run_slots
from rlx_ort.selection.curves import BatchCurve, batch_curve
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.predict import cost_model, dims_of, predicted_ns
from rlx_ort.selection.refusals import refusals
from rlx_ort.selection.support import Support, UnsupportedOp, support_of

__all__ = [
    "CLOSE",
    "DeviceCandidate",
    "device_report",
    "devices_for",
    "fastest_device_for",
    "rank",
]

CLOSE = 1.05
"""Predictions within this factor of the best are equal, as far as a preference is concerned."""

_CHOICES_A_GRAPH = 8
_SIZES_A_CHOICE = 64
_CURVES_A_CHOICE = 8
_BY_NAME_ONLY = "only runs when it is asked for by name"
_Sizes = tuple[tuple[str, int], ...]


@dataclass
class _Known:
    """The rankings that hold in a state, by the sizes of the named dims.

    `last` is the newest, and `curves` has those of the ranked devices, by the dim that varies and the others' sizes.
    """

    state: object = None
    rankings: dict[_Sizes, Sequence[Device]] = field(default_factory=dict)
    last: tuple[_Sizes, Sequence[Device]] = ((), ())
    curves: dict[tuple[str, _Sizes], list[tuple[Device, BatchCurve]]] = field(default_factory=dict)

    def keep(self, sizes: _Sizes, ranking: Sequence[Device]) -> None:
        """Remember a ranking; when there are too many, the others are forgotten."""
        if len(self.rankings) >= _SIZES_A_CHOICE:
            self.rankings = {}
        self.rankings[sizes] = ranking
        self.last = (sizes, ranking)


@dataclass
class _Choice:
    """What is known under a policy and options."""

    policy: DevicePolicy
    options: CompileOptions
    known: _Known = field(default_factory=_Known)


_choices: weakref.WeakKeyDictionary[Graph, deque[_Choice]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class DeviceCandidate:
    """One row of `device_report` and `rank`.

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
        judged_by: the shipped kernel list that a device which is not here was judged by, empty for the others.
        first_unsupported: the first node that stands in the way, strictly judged where the device is not here, or None.
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
    judged_by: str = ""
    first_unsupported: UnsupportedOp | None = None


def device_report(
    graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> list[DeviceCandidate]:
    """Return one row for each device of the policy's probe set, in that order.

    The first call of a process probes the devices and exports the graph; later ones remember both.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    return _rows(graph, policy.probe_set(), policy, options, {})


def rank(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
) -> list[DeviceCandidate]:
    """Return a row for every device the policy allows: first those that may be chosen, best first, then the others.

    Automatic choices take the first row without a blocker. Every index is a row of its own. A device that refused the
    graph when its session was opened has that as its blocker. No session of the graph is opened here.

    Args:
        graph: the graph.
        inputs: the inputs of a run, which size the graph's named dims; without, they come from the options.
        policy: which devices may be chosen; everything by default, without a look at the environment.
        options: how to compile; the CPU may help unless they say otherwise.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    dims = dims_of(graph, inputs or {})
    ranked = _ranked(graph, policy, options, dims)
    blocked = policy.apply(device for device in _allowed(policy) if device not in ranked)
    return _rows(graph, [*ranked, *blocked], policy, options, dims)


def devices_for(
    graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> list[Device]:
    """Return the devices that may be chosen for the graph, by preference, then by platform priority.

    Every index that hardware discovery sees counts. Devices that no automatic choice may take are in it only when the
    policy's allow list names them; devices that refused the graph when a session was opened are not.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    refused = refusals(graph, options)
    allowed = _allowed(policy)
    return policy.apply(device for device in allowed if _blocker(graph, device, policy, options, refused) is None)


def fastest_device_for(
    graph: Graph,
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Device:
    """Return the device with the smallest predicted time among those that may be chosen for the graph; see `rank`.

    A preferred device wins when its prediction is within 5 % of the best. Devices without a prediction come after
    those with one, by preference and then by platform priority.

    Raises:
        NoViableDeviceError: no device may be chosen; the message says why for each.
    """
    policy = policy or DevicePolicy()
    options = automatic(options)
    ranked = _ranked(graph, policy, options, dims_of(graph, inputs or {}))
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
    refused = refusals(graph, options)
    probed = dict.fromkeys(policy.probe_set())
    rows = [(device, _blocker(graph, device, policy, options, refused) or _BY_NAME_ONLY) for device in probed]
    remedy = "widen the policy, or bring in another execution provider"
    return NoViableDeviceError(f"no device may run graph {graph.name!r}: {remedy}.", rows)


def _allowed(policy: DevicePolicy) -> list[Device]:
    """Return the devices the policy allows, each once; nothing that it refuses is looked at."""
    if policy.allow is None:
        return known_devices(policy.allows)
    return [device for device in dict.fromkeys(policy.allow) if policy.allows(device)]


def _blocker(
    graph: Graph, device: Device, policy: DevicePolicy, options: CompileOptions, refused: Mapping[Device, str]
) -> str | None:
    """Return why an automatic choice cannot take a device, or None: `blocker_of`, or what opening it showed."""
    blocker = blocker_of(graph, device, policy, options)
    if blocker is None and device in refused:
        blocker = f"refused the graph when its session was opened: {refused[device].splitlines()[0]}"
    named = policy.allow is not None and device in policy.allow
    return blocker if blocker or named or is_selectable(device) else _BY_NAME_ONLY


def _ranked(graph: Graph, policy: DevicePolicy, options: CompileOptions, dims: Mapping[str, int]) -> Sequence[Device]:
    """Return the devices that may be chosen, the automatic choice first.

    The answer is remembered until the graph, a provider, a refusal or a calibration of this process changes. Where one
    dim alone differs from the sizes before, the times are read from curves.
    """
    refused = frozenset(refusals(graph, options))
    sizes = tuple(sorted(dims.items()))
    choices = _choices.setdefault(graph, deque(maxlen=_CHOICES_A_GRAPH))
    choice = next((entry for entry in list(choices) if entry.policy == policy and entry.options == options), None)
    if choice is None:
        choice = _Choice(policy, options)
        choices.append(choice)
    known = choice.known
    if known.state == _state(graph, refused):
        ranking = known.rankings.get(sizes)
        if ranking is None:
            ranking = _by_curves(graph, choice, known, sizes)
        if ranking is not None:
            return ranking
    with paused_collector():  # judging makes an object a node, over which it would walk several times
        ranking = _rank(graph, policy, options, dims)
    # Ranking may have probed devices or measured them; what it found is as of now.
    state = _state(graph, refused)
    if choice.known.state != state:
        choice.known = _Known(state)
    choice.known.keep(sizes, ranking)
    return ranking


def _by_curves(graph: Graph, choice: _Choice, known: _Known, sizes: _Sizes) -> Sequence[Device] | None:
    """Return and keep the ranking for sizes that differ from the last ones in one dim, or None for others."""
    last, devices = known.last
    changed = [at for at, (old, new) in enumerate(zip(last, sizes, strict=False)) if old != new]
    if len(changed) != 1 or len(last) != len(sizes) or last[changed[0]][0] != sizes[changed[0]][0]:
        return None
    at = changed[0]
    (dim, size), others = sizes[at], sizes[:at] + sizes[at + 1 :]
    curves = known.curves.get((dim, others))
    if curves is None:
        curves = [(device, batch_curve(graph, device, dim, choice.options, dict(others))) for device in devices]
        if len(known.curves) >= _CURVES_A_CHOICE:
            known.curves = {}
        known.curves[dim, others] = curves
    ranking = _in_order([(device, curve.ns(size)) for device, curve in curves], choice.policy)
    known.keep(sizes, ranking)
    return ranking


def _state(graph: Graph, refused: frozenset[Device]) -> object:
    providers = registry.default_registry()
    return providers, providers.generation, store.generation(), graph.revision, refused


def _rank(graph: Graph, policy: DevicePolicy, options: CompileOptions, dims: Mapping[str, int]) -> list[Device]:
    devices = devices_for(graph, policy, options)
    return _in_order([(device, predicted_ns(graph, device, options, dims)) for device in devices], policy)


def _in_order(predictions: Sequence[tuple[Device, float | None]], policy: DevicePolicy) -> list[Device]:
    """Return the devices by their predicted times, in ns, and the policy's preference, best first."""
    limit = min((time for _, time in predictions if time is not None), default=math.inf) * CLOSE

    def place(row: tuple[Device, float | None]) -> tuple[float, ...]:
        device, time = row
        if time is None:
            return (2, policy.prefer_rank(device), priority_rank(device))
        if time <= limit:
            return (0, policy.prefer_rank(device), time, priority_rank(device))
        return (1, time, priority_rank(device))

    return [device for device, _ in sorted(predictions, key=place)]


def _rows(
    graph: Graph, devices: Sequence[Device], policy: DevicePolicy, options: CompileOptions, dims: Mapping[str, int]
) -> list[DeviceCandidate]:
    ranked = _ranked(graph, policy, options, dims)
    chosen = ranked[0] if ranked else None
    refused = refusals(graph, options)
    rows = []
    for device in devices:
        predicted = predicted_ns(graph, device, options, dims) if device in ranked else None
        blocker = _blocker(graph, device, policy, options, refused)
        rows.append(_row(graph, device, options, device == chosen, blocker, predicted, dims))
    return rows


def _row(
    graph: Graph,
    device: Device,
    options: CompileOptions,
    recommended: bool,
    blocker: str | None,
    predicted: float | None,
    dims: Mapping[str, int],
) -> DeviceCandidate:
    found = availability(device)
    support = support_of(device, graph, options) if found.available else Support(reason="not here")
    listed = None if found.available else _by_list(graph, device, options)
    if listed is not None and blocker is not None:
        verdict = listed.blocker or "takes every node of the graph"
        blocker = f"{blocker}. Not here; judged by {listed.judged_by}: {verdict}"
    model = cost_model(device) if predicted is not None else None
    return DeviceCandidate(
        device=device,
        label=device.label,
        available=found.available,
        registered=provider_of(device) is not None,
        supports_graph=support.supported,
        recommended=recommended,
        blocker=blocker,
        hardware=found.hardware,
        driver=found.driver,
        capabilities=_capabilities(device),
        predicted_ns=predicted,
        profile_source=None if model is None else model.source,
        cpu_nodes=len(support.cpu_nodes),
        assumed_dims=() if model is None else _without_size(graph, {**options.dims, **dims}),
        judged_by="" if listed is None else listed.judged_by,
        first_unsupported=next(iter((support if listed is None else listed).unsupported), None),
    )


def _by_list(graph: Graph, device: Device, options: CompileOptions) -> Support | None:
    """Return what a device that is not here makes of every node by a shipped kernel list, or None without a list."""
    provider = provider_of(device)
    if provider is None or not provider.judged_by():
        return None
    support = support_of(device, graph, options.with_(placement=PlacementRule.STRICT))
    return support if support.judged_by else None


def _without_size(graph: Graph, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the dims of the graph's inputs that have no size, named or by their place."""
    found: dict[str, None] = {}
    for value in graph.inputs:
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        for axis, dim in enumerate(shape or ()):
            if dim is None:
                found[f"{value.name}[{axis}]"] = None
            elif isinstance(dim, str) and dim not in sizes:
                found[dim] = None
    return tuple(found)


def _capabilities(device: Device) -> tuple[str, ...]:
    return ("run_slots", "typed_io") if supports_run_slots(device) else ()
