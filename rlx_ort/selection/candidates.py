"""The devices a graph can run on, their ranking, and the report with the reason for each device."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx_ort.calibration import store
from rlx_ort.converters.protos import paused_collector
from rlx_ort.device import Device, priority_rank
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.options.dispatch import UnsupportedOp
from rlx_ort.providers.registry import (
    availability,
    is_selectable,
    known_devices,
    provider_of,
    same_hardware,
    supports_run_slots,
)
from rlx_ort.selection.graph_cache import Rankings, Sizes, cache_of, open_dims, refusals, remember
from rlx_ort.selection.memory import memory_need, memory_shortage
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.predict import cost_model, curve_of, dims_of, predicted_ns
from rlx_ort.selection.support import Support, support_of

_log = logging.getLogger(__name__)
CLOSE = 1.05
"""Predictions within this factor of the best are equal, as far as a preference is concerned."""

_CURVES_A_CHOICE = 8
_BY_NAME_ONLY = "runs only when it is named"


@dataclass(frozen=True, slots=True, repr=False)
class DeviceCandidate:
    """One row of `device_report` and `rank`.

    Attributes:
        available: whether it works here.
        registered: whether a provider serves it.
        supports_graph: whether it works here and takes the graph, with the CPU's help where that is allowed.
        recommended: whether it is the automatic choice.
        blocker: why it cannot be chosen, or None.
        hardware: the device's name as its driver reports it, empty when unknown.
        driver: the driver's version, empty when unknown.
        capabilities: names of the run-time features it has.
        predicted_ns: the predicted time of one run in ns, or None when it cannot be chosen or has no profile.
        profile_source: the source of the figures of the prediction; `default` are shipped and not measured here.
        cpu_nodes: how many of the graph's nodes the CPU would take over.
        judged_by: the shipped kernel list that a device which is not here was judged by, empty for the others.
        first_unsupported: the first node that the device does not take, by the strict rule if it is not here, or None.
        memory_bytes: the most memory that a session and its runs are counted to take, with that of the device's
            libraries; None where it does not take the graph. `memory_need` has the parts.
        assumed_dims: the inputs' dims without a size, for which the prediction assumes `DEFAULT_DIM`; one without a
            name is given by its place, as `x[0]`.
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
    memory_bytes: int | None = None
    assumed_dims: tuple[str, ...] = ()
    judged_by: str = ""
    first_unsupported: UnsupportedOp | None = None

    def __repr__(self) -> str:
        state = "recommended" if self.recommended else "may be chosen"
        if self.blocker is not None:
            state = f"blocked: {self.blocker.splitlines()[0][:80]}"
        time = "" if self.predicted_ns is None else f", predicted {self.predicted_ns / 1e3:.4g} us"
        return f"<DeviceCandidate {self.label}, {state}{time}>"


class DeviceRows(list[DeviceCandidate]):
    """The rows of a report or a ranking: a list that notebooks show as a table."""

    def _repr_html_(self) -> str:
        from rlx_ort.ir.notebook import html_table

        rows = [
            (
                row.label,
                "" if row.predicted_ns is None else f"{row.predicted_ns / 1e3:.4g} us",
                "recommended" if row.recommended else row.blocker or "",
            )
            for row in self
        ]
        return html_table("devices", ("device", "predicted", "why"), rows)


def device_report(
    graph: Graph,
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> list[DeviceCandidate]:
    """Return one row for each device of the policy's probe set, in that order; `inputs` size the named dims.

    The first call of a process probes the devices and exports the graph; later ones remember both.
    """
    return Candidates(graph, policy, options, inputs).report()


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
        policy: which devices may be chosen; everything by default. The environment is not read.
        options: how to compile; the CPU may help unless they say otherwise.
    """
    return Candidates(graph, policy, options, inputs).rank()


def devices_for(
    graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> list[Device]:
    """Return the devices that may be chosen for the graph, by preference, then by platform priority.

    Every index that hardware discovery sees counts. Devices that no automatic choice may take are in it only when the
    policy's allow list names them; devices that refused the graph when a session was opened are not.
    """
    return Candidates(graph, policy, options).devices()


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
        NoViableDeviceError: no device may be chosen; the message has the reason for each.
    """
    return Candidates(graph, policy, options, inputs).fastest()


def automatic(options: CompileOptions | None) -> CompileOptions:
    """Return the options of an automatic choice: the CPU may help unless they say otherwise."""
    options = options or CompileOptions()
    return options if options.placement is not None else options.with_(placement=PlacementRule.ASSISTED)


def blocker_of(graph: Graph, device: Device, policy: DevicePolicy, options: CompileOptions) -> str | None:
    """Return why a device cannot be chosen for a graph, or None: not here, then the graph, then the policy."""
    state = availability(device)
    if not state.available:
        return f"{state.reason}; {state.remedy}" if state.remedy else state.reason
    return support_of(device, graph, options).blocker or policy.refusal(device)


class Candidates:
    """The devices for an automatic choice, as of now: a graph with the policy, options and inputs of the choice.

    Without a policy every device may be chosen. The CPU may help unless `options` say otherwise. `inputs` size the
    graph's named dims.
    """

    def __init__(
        self,
        graph: Graph,
        policy: DevicePolicy | None = None,
        options: CompileOptions | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.policy = policy or DevicePolicy()
        self.options = automatic(options)
        self.dims = dims_of(graph, inputs) if inputs else {}
        self.refused = refusals(graph, self.options)

    def devices(self) -> list[Device]:
        """Return the devices that may be chosen, by preference, then by platform priority."""
        return self.policy.apply(device for device in self.allowed() if self.blocker(device) is None)

    def fastest(self) -> Device:
        """Return the automatic choice.

        Raises:
            NoViableDeviceError: no device may be chosen.
        """
        ranked = self.ranked()
        if not ranked:
            raise self.none_viable()
        return ranked[0]

    def none_viable(self) -> NoViableDeviceError:
        """Return the error for a graph that no device may run, with the blocker of each device of the probe set."""
        probed = dict.fromkeys(self.policy.probe_set())
        rows = [(device, self.blocker(device) or _BY_NAME_ONLY) for device in probed]
        remedy = "widen the policy, or install another execution provider"
        return NoViableDeviceError(f"no allowed device can run graph {self.graph.name!r}: {remedy}.", rows)

    def allowed(self) -> list[Device]:
        """Return the devices the policy allows, each once; devices that it refuses are not probed."""
        if self.policy.allow is None:
            return known_devices(self.policy.allows)
        return [device for device in dict.fromkeys(self.policy.allow) if self.policy.allows(device)]

    def blocker(self, device: Device) -> str | None:
        """Return why an automatic choice cannot take a device, or None: `blocker_of`, its memory, or a refusal."""
        blocker = blocker_of(self.graph, device, self.policy, self.options)
        blocker = blocker or memory_shortage(self.graph, device, self.options, self.dims)
        if blocker is None and device in self.refused:
            blocker = f"refused the graph when its session was opened: {self.refused[device].splitlines()[0]}"
        named = self.policy.allow is not None and device in self.policy.allow
        if blocker or named:
            return blocker
        others = [other for other in same_hardware(device) if other not in self.refused]
        first = min(others, key=self.policy.prefer_rank, default=device)
        if first != device:
            return f"is the same device as {first.label}; name it to use it"
        return None if is_selectable(device) else _BY_NAME_ONLY

    def ranked(self) -> Sequence[Device]:
        """Return the devices that may be chosen, the automatic choice first.

        The ranking is remembered until the graph, a provider, a refusal or a calibration of this process changes. Where
        a single dim differs from the sizes before, the times are read from curves.
        """
        sizes = tuple(sorted(self.dims.items()))
        rankings = self._rankings()
        ranking = rankings.by_sizes.get(sizes)
        if ranking is None:
            ranking = self._by_curves(rankings, sizes)
        if ranking is None:
            with paused_collector():  # judging creates an object per node, and the collector would walk them repeatedly
                devices = self.devices()
                predictions = [(device, self._predicted_ns(device)) for device in devices]
                ranking = self._in_order(predictions)
            if _log.isEnabledFor(logging.DEBUG):
                self._log_devices(dict(predictions))
            _log.info("graph %r: %s", self.graph.name, _shown(ranking, dict(predictions)))
            self._rankings().keep(sizes, ranking)  # of the state now: ranking may have probed devices or measured them
        return ranking

    def _log_devices(self, predictions: Mapping[Device, float | None]) -> None:
        for device, ns in predictions.items():
            time = "without a prediction" if ns is None else f"predicted {ns / 1e3:.4g} us"
            _log.debug("graph %r: %s: %s", self.graph.name, device.label, time)
        for device in self.allowed():
            if device not in predictions:
                _log.debug("graph %r: %s: %s", self.graph.name, device.label, self.blocker(device))

    def _rankings(self) -> Rankings:
        known, state = cache_of(self.graph).rankings, (store.generation(), frozenset(self.refused))
        for entry in list(known):
            if entry.policy == self.policy and entry.options == self.options and entry.state == state:
                return entry
        made = Rankings(self.policy, self.options, state)
        known.append(made)
        return made

    def _predicted_ns(self, device: Device) -> float | None:
        return predicted_ns(self.graph, device, self.options, self.dims)

    def _by_curves(self, known: Rankings, sizes: Sizes) -> Sequence[Device] | None:
        """Return and keep the ranking for sizes that differ from the last ones in one dim, or None for others."""
        last, devices = known.last
        changed = set(sizes).difference(last)
        if len(changed) != 1 or dict(last).keys() != dict(sizes).keys():
            return None
        (dim, size), others = changed.pop(), tuple(entry for entry in sizes if entry in last)
        curves = known.curves.get((dim, others))
        if curves is None:
            graph = weakref.ref(self.graph)  # the cache must not keep the graph alive
            curves = [(device, curve_of(graph, device, dim, self.options, dict(others)).ns) for device in devices]
            remember(known.curves, (dim, others), curves, _CURVES_A_CHOICE)
        return known.keep(sizes, self._in_order([(device, ns(size)) for device, ns in curves]))

    def _in_order(self, predictions: Sequence[tuple[Device, float | None]]) -> list[Device]:
        """Return the devices by their predicted times, in ns, and the policy's preference, best first."""
        limit = min((time for _, time in predictions if time is not None), default=math.inf) * CLOSE

        def place(row: tuple[Device, float | None]) -> tuple[float, ...]:
            device, time = row
            if time is None:
                return (2, self.policy.prefer_rank(device), priority_rank(device))
            if time <= limit:
                return (0, self.policy.prefer_rank(device), time, priority_rank(device))
            return (1, time, priority_rank(device))

        return [device for device, _ in sorted(predictions, key=place)]

    def report(self) -> list[DeviceCandidate]:
        """Return a row for each device of the policy's probe set, in that order."""
        ranked = self.ranked()
        return DeviceRows(self._row(device, ranked) for device in self.policy.probe_set())

    def rank(self) -> list[DeviceCandidate]:
        """Return a row for every device the policy allows, the best choice first, blocked ones last."""
        ranked = self.ranked()
        blocked = self.policy.apply(device for device in self.allowed() if device not in ranked)
        return DeviceRows(self._row(device, ranked) for device in (*ranked, *blocked))

    def _row(self, device: Device, ranked: Sequence[Device]) -> DeviceCandidate:
        predicted = self._predicted_ns(device) if device in ranked else None
        blocker = self.blocker(device)
        state = availability(device)
        support = support_of(device, self.graph, self.options) if state.available else Support(reason="not here")
        provider, judged, judged_by = provider_of(device), support, ""
        if not state.available and provider is not None and provider.judged_by():
            strict = support_of(device, self.graph, self.options.with_(placement=PlacementRule.STRICT))
            if strict.judged_by:
                judged, judged_by = strict, strict.judged_by
        if judged_by and blocker is not None:
            verdict = judged.blocker or "takes every node of the graph"
            blocker = f"{blocker}. Not here; judged by {judged_by}: {verdict}"
        model = cost_model(device) if predicted is not None else None
        need = memory_need(self.graph, device, self.options, self.dims) if support.supported else None
        return DeviceCandidate(
            device=device,
            label=device.label,
            available=state.available,
            registered=provider is not None,
            supports_graph=support.supported,
            recommended=device in ranked[:1],
            blocker=blocker,
            hardware=state.hardware,
            driver=state.driver,
            capabilities=("run_slots", "typed_io") if supports_run_slots(device) else (),
            predicted_ns=predicted,
            profile_source=None if model is None else model.source,
            cpu_nodes=len(support.cpu_nodes),
            memory_bytes=None if need is None else need.total,
            assumed_dims=() if model is None else open_dims(self.graph, {**self.options.dims, **self.dims}),
            judged_by=judged_by,
            first_unsupported=next(iter(judged.unsupported), None),
        )


def _shown(ranking: Sequence[Device], predictions: Mapping[Device, float | None]) -> str:
    """Return a ranking with its predicted times for the log."""
    times = [(device.label, predictions[device]) for device in ranking]
    shown = [label if ns is None else f"{label} ({ns / 1e3:.4g} us)" for label, ns in times]
    return f"the choice is {', then '.join(shown)}" if shown else "no device may be chosen"
