"""`DeviceSessions`: the devices of one runner, the sessions that are open on them, and the routes to these.

`SessionSet` is one set of sessions, one a device; `invalidate_cache` and a graph that grows begin another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from rlx_ort.device import Device
from rlx_ort.errors import CancelledRunError, DeviceFallbackError, MemoryBudgetError, NoViableDeviceError
from rlx_ort.faults import first_that_works
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.engine.stopping import Turns
from rlx_ort.routes import CHOSEN, FASTEST, Key, Moment, Pick, RouteTable, is_automatic
from rlx_ort.selection.policy import Adaptive, Benchmark, DevicePolicy

if TYPE_CHECKING:
    from rlx_ort.adaptive import Choice, Follower
    from rlx_ort.execution.benchmark import DeviceBenchResult, InputSignature
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.engine import EngineSlot
    from rlx_ort.execution.interface import Inputs
    from rlx_ort.execution.resident import Resident
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.split_plan import SplitPlan
    from rlx_ort.selection.candidates import Candidates

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SMALL_SHARE = 32  # a graph whose weights and inputs are a smaller part of a device's memory is opened without counting


def _devices_of(place: Device | SplitPlan) -> tuple[Device, ...]:
    return (place,) if isinstance(place, Device) else place.devices


class SessionSet:
    """Opens one session a device and lends compiled graphs on it, one per placement rule; they share all state.

    A place is a device, or a plan whose stages have a session each.

    `rlx_ort.execution` is imported when a graph is first compiled.
    """

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._compiling: dict[Device | SplitPlan, Turns] = {}
        self._slots: dict[Device | SplitPlan, EngineSlot] = {}
        self._lent: dict[tuple[Device | SplitPlan, PlacementRule], CompiledGraph] = {}
        self._closed = False
        self.ended = False  # by `close` of the runner, so that runs that wait end, too

    @property
    def devices(self) -> list[Device]:
        """The devices that the graph was compiled for."""
        return list(dict.fromkeys(device for place in list(self._slots) for device in _devices_of(place)))

    def find(self, place: Device | SplitPlan, rule: PlacementRule) -> CompiledGraph | None:
        """Return the compiled graph of a place under a rule, or None if it was closed or never made."""
        lent = self._lent.get((place, rule))
        return None if lent is None or lent.closed else lent

    def compiled(
        self, graph: Graph, weights: WeightStore, place: Device | SplitPlan, rule: PlacementRule
    ) -> CompiledGraph:
        """Return the compiled graph of a place under a rule, compiling it if needed.

        Raises:
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node that the rule demands.
            CancelledRunError: the sessions were closed.
        """
        with self._lock:
            compiling = self._compiling.setdefault(place, Turns())
        with compiling:
            known = {lent.rule: lent for each in PlacementRule if (lent := self.find(place, each)) is not None}
            if rule in known:
                return known[rule]
            made = next((other.held_to(rule) for other in known.values()), None)
            if made is None:
                from rlx_ort.execution.compiled import CompiledGraph
                from rlx_ort.execution.engine import open_slot
                from rlx_ort.execution.session import working_provider

                slot = self._slots.get(place)
                if slot is None:
                    if isinstance(place, Device):
                        slot = open_slot(working_provider(place), place, graph, weights, self._options)
                    else:
                        from rlx_ort.execution.staged import open_staged

                        slot = open_staged(graph, place, weights, self._options)
                    with self._lock:
                        if self._closed:
                            raise CancelledRunError("the sessions of the runner were closed meanwhile; run again")
                        slot.owners.add(self)
                        self._slots[place] = slot
                made = CompiledGraph(slot, rule, owns_slot=False)
            self._lent[place, rule] = made
            if self._closed:  # meanwhile
                made.end()
            return made

    def is_open(self, device: Device) -> bool:
        """Return whether the device has an open session."""
        slot = self._slots.get(device)
        return slot is not None and slot.is_open

    def slot(self, device: Device) -> EngineSlot | None:
        """Return the slot of a device, or None if the graph was not compiled for it."""
        return self._slots.get(device)

    def resident(self, device: Device) -> Resident | None:
        """Return the memory of a device's session, or None if the graph was not compiled for it."""
        slot = self._slots.get(device)
        return None if slot is None else slot.resident

    def reopen_stale(self) -> None:
        """Open sessions with old weights again.

        Raises:
            ParamError: a parameter is not set.
        """
        for slot in list(self._slots.values()):
            if slot.is_open:
                slot.engine(PlacementRule.ASSISTED)

    def has_state(self, device: Device) -> bool:
        """Return whether a compiled graph of a device holds state that cannot move to another one."""
        lent = list(self._lent.items())
        return any(graph.has_state for (place, _), graph in lent if device in _devices_of(place))

    def drop(self, device: Device) -> None:
        """Forget the session of a device without waiting for it, unless it holds state; the next use opens another."""
        if self.has_state(device):
            return
        with self._lock:
            for place in [place for place in self._slots if device in _devices_of(place)]:
                self._slots.pop(place)
                self._compiling.pop(place, None)
                for rule in PlacementRule:
                    self._lent.pop((place, rule), None)

    def close(self) -> None:
        """Close every session for good; runs in other threads finish first, and a session that opens is closed then."""
        with self._lock:
            self._closed = True
            slots, lent = list(self._slots.values()), list(self._lent.values())
        for slot in slots:
            slot.close(self)
        for graph in lent:
            graph.end()


class DeviceSessions:
    """Chooses among the devices of a graph, and opens sessions on them. May be used from several threads.

    A supervisor (`rlx_ort.resilience`) works with this, never with the runner.

    Args:
        policy: which devices may be chosen.
        options: how to compile.
        load: reads the graph and its weights when they are first needed; not needed after `take`.

    Attributes:
        routes: the decisions that are kept; another object once sessions were closed.
        current: the present set of sessions; another one once they were closed.
        last_choice: the last choice of the adaptive strategy.
        forgotten: called when the sessions were closed.
    """

    def __init__(
        self, policy: DevicePolicy, options: CompileOptions, load: Callable[[], tuple[Graph, WeightStore]] | None = None
    ) -> None:
        self.policy = policy
        self._set_options(options)
        self.last_choice: Choice | None = None
        self.forgotten: Callable[[], object] = lambda: None
        self._load = load
        self._loaded: tuple[Graph, WeightStore] | None = None
        self._revision = 0
        self._lock = threading.RLock()
        self._begin()

    def _set_options(self, options: CompileOptions) -> None:
        if options.provider_options:
            from rlx_ort.providers.registry import check_provider_options

            check_provider_options(options)
        self.options, fixed = options, options.placement
        self.by_name, self.by_choice = (
            options.with_(placement=fixed or rule) for rule in (PlacementRule.STRICT, PlacementRule.ASSISTED)
        )

    def give_options(self, device: Device, given: Mapping[str, str]) -> bool:
        """Give a device further provider options, and return whether they differ from those that it had."""
        options = self.options.with_provider_options(device, given)
        if options is self.options:
            return False
        self._set_options(options)
        return True

    def _begin(self) -> None:
        self.current, self.routes = SessionSet(self.options), RouteTable()
        self._winners: dict[InputSignature, Follower] = {}
        self._plan: tuple[SplitPlan | None, dict[str, int]] | None = None
        self._strict: tuple[object, list[Device]] | None = None

    def take(self, graph: Graph, weights: WeightStore | None = None) -> None:
        """Run this graph.

        Raises:
            InputError: it is no graph, or has no such dims as the options name.
        """
        from rlx_ort.execution.weights import WeightStore
        from rlx_ort.ir.graph import check_dims, require_graph

        require_graph(graph)
        if self.options.dims:
            check_dims(graph, self.options.dims)
        weights = WeightStore.for_graph(graph) if weights is None else weights
        self._revision = graph.revision
        self._loaded, self._load = (graph, weights), None

    def _taken(self) -> tuple[Graph, WeightStore]:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None and self._load is not None:
                    self.take(*self._load())
        assert self._loaded is not None  # noqa: S101  # by `take`
        return self._loaded

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self._taken()[0]

    @property
    def weights(self) -> WeightStore:
        """The parameters' data."""
        return self._taken()[1]

    def follow_graph(self) -> Graph:
        """Return the graph; if it has grown, its sessions are closed, so that it is compiled again."""
        graph = self.graph
        if graph.revision != self._revision:
            with self._lock:
                self.forget()
                self._revision = graph.revision
                self.weights.declare_from(graph)
        return graph

    # Which device

    def candidates(self, inputs: Inputs | None = None, options: CompileOptions | None = None) -> Candidates:
        """Return the devices for an automatic choice as of now, or for other options."""
        from rlx_ort.selection.candidates import Candidates

        return Candidates(self.follow_graph(), self.policy, options or self.by_choice, inputs)

    def strict_devices(self) -> list[Device]:
        """Return the devices that take the whole graph, in the policy's order."""
        strict = self.candidates(options=self.by_name)
        with self._lock:
            if self._strict is None or self._strict[0] != strict.refused.keys():
                self._strict = strict.refused.keys(), strict.devices()
            return list(self._strict[1])

    def ranked(self, inputs: Inputs) -> list[Device]:
        """Return the devices that may be chosen for the inputs, the best one first."""
        return list(self.candidates(inputs).ranked())

    def refusals(self, options: CompileOptions | None = None) -> dict[Device, str]:
        """Return each device that refuses the graph, with the reason."""
        from rlx_ort.selection.graph_cache import refusals

        return refusals(self.graph, options or self.by_name)

    def resolve(self, device: Device | str | None) -> Device:
        """Return the device to use: the one given, else `RLX_DEVICE`, else the fastest; see `resolve_device`."""
        from rlx_ort.selection.resolve import resolve_device

        return resolve_device(self.graph, device, self.policy, self.options)

    def pick(self, goal: Key, inputs: Inputs | None) -> Pick:
        """Return the device that a run asks for."""
        if goal.__class__ is tuple:
            return Pick(self.resolve(goal[1]), named=True)
        if not is_automatic(goal):
            return Pick(Device(goal), named=True)  # type: ignore[arg-type]  # see `Key`
        plan = None if self.options.split is None else self.plan(inputs)
        if plan is not None:
            return Pick(plan.device, named=False, plan=plan)
        if goal is FASTEST:
            return Pick(self.candidates(inputs).fastest(), named=False)
        follower = self._follower(inputs or {}) if goal is CHOSEN else None
        if follower is not None:
            return Pick(self._followed(follower), False, follower)
        from rlx_ort.selection.resolve import choice

        return Pick(*choice(self.follow_graph(), None, self.policy, self.options, inputs))

    def plan(self, inputs: Inputs | None, without: Collection[Device] = ()) -> SplitPlan | None:
        """Return the plan for inputs that the options ask for, None where "auto" needs none.

        A plan of "auto" is kept for other sizes while it has room for them. Without some devices, it is another plan
        for the budgets of the others.

        Raises:
            InputError: the plan that was given is not one of the graph.
            MemoryBudgetError: no plan keeps the budgets.
        """
        from rlx_ort.selection.predict import dims_of
        from rlx_ort.selection.splitting import counted, memory_limits, plan_if_needed, plan_split

        graph, given, options = self.follow_graph(), self.options.split, self.options
        sizes = dims_of(graph, inputs or {})
        if without:
            known = dict(getattr(given, "budgets", ())) or memory_limits(self.usable_devices(), options)
            budgets = {device: nbytes for device, nbytes in known.items() if device not in without}
            return plan_split(graph, budgets, options, sizes)
        plan, planned_for = self._plan or (None, None)
        if planned_for is None or any(size > planned_for.get(dim, 0) for dim, size in sizes.items()):
            if not isinstance(given, str):
                plan = None if given is None else counted(graph, given, options, sizes)
            else:
                try:
                    plan = None if plan is None else counted(graph, plan, options, sizes)
                except MemoryBudgetError:
                    plan = None
                plan = plan or plan_if_needed(graph, self.usable_devices(), options, sizes)
            self._plan = plan, sizes
        return plan

    def usable_devices(self) -> list[Device]:
        """Return the devices that work here and that the policy allows, in its order; one of each hardware."""
        from rlx_ort.providers.registry import availability

        usable: list[Device] = []
        for device in (row.device for row in self.candidates().report()):
            same = (each for each in usable if each.index == device.index)
            known = any(device.kind in each.family.covers or each.kind in device.family.covers for each in same)
            if not known and self.policy.refusal(device) is None and availability(device).available:
                usable.append(device)
        return usable

    @property
    def measures(self) -> bool:
        """Whether the strategy of the policy measures devices."""
        return isinstance(self.policy.pick_strategy(), (Benchmark, Adaptive))

    def is_decided(self, goal: Key, inputs: Inputs) -> bool:
        """Return whether a choice needs neither probes nor measurements."""
        from rlx_ort.execution.benchmark import input_signature
        from rlx_ort.selection.graph_cache import cache_of

        if goal is CHOSEN and self.measures and input_signature(inputs) not in self._winners:
            return False
        return bool(self.current.devices or cache_of(self.graph).rankings)

    def _followed(self, follower: Follower) -> Device:
        """Return the current device of a follower, or its first one while that holds the caller's state."""
        first = self.current.find(follower.home, self.by_choice.placement or PlacementRule.ASSISTED)
        if first is not None and first.has_handles:
            return follower.home
        return follower.device(self.refusals(self.by_choice))

    def _follower(self, inputs: Inputs) -> Follower | None:
        """Return the follower of the winner under a strategy that measures, or None under another one."""
        pick = self.policy.pick_strategy()
        if not isinstance(pick, (Benchmark, Adaptive)):
            return None
        from rlx_ort.execution.benchmark import input_signature

        self.follow_graph()
        key, winners = input_signature(inputs), self._winners  # another thread may begin with an empty map meanwhile
        follower = winners.get(key)
        if follower is not None and follower.home not in self.refusals(self.by_choice):
            return follower
        from rlx_ort.adaptive import Choice, Follower, choose

        candidates = self.candidates(inputs)
        if isinstance(pick, Adaptive):
            choice = choose(candidates, inputs, self.to_time, pick.runs)
            self.last_choice = choice
        else:
            rows = self.benchmark(inputs, pick.runs)
            if not rows:
                return Follower(self.graph, Choice(candidates.fastest(), "predicted"), ())
            if rows[0].median_exec_ns is None:
                raise DeviceFallbackError((row.device, row.failure) for row in rows)
            choice = Choice(rows[0].device, "measured")
        sizes = tuple(sorted(candidates.dims.items()))
        winners[key] = follower = Follower(self.graph, choice, sizes)
        return follower

    def benchmark(self, inputs: Inputs, runs: int) -> list[DeviceBenchResult]:
        """Time the graph on every device that an automatic choice may take."""
        from rlx_ort.adaptive import learn_from
        from rlx_ort.execution.benchmark import benchmark_devices

        rows = benchmark_devices(self.candidates().devices(), self.to_time, inputs, runs)
        learn_from(rows, self.graph, self.by_choice, inputs)
        return rows

    # Sessions

    def compiled(
        self, place: Device | SplitPlan, named: bool, current: SessionSet | None = None, inputs: Inputs | None = None
    ) -> CompiledGraph:
        """Return the graph compiled for a place, in this set of sessions or the present one.

        `inputs` are those of the run that needs it, if there is one.

        Raises:
            NoViableDeviceError: the policy refuses the device; see `SessionSet.compiled` for the others.
            MemoryBudgetError: the device's memory, or the limit of the options, cannot hold the graph.
        """
        graph = self.follow_graph()
        rule = (self.by_name if named else self.by_choice).placement or PlacementRule.STRICT
        current = current or self.current
        known = current.find(place, rule)
        if known is not None:
            return known
        for device in _devices_of(place):
            refusal = self.policy.refusal(device)
            if refusal is not None:
                raise NoViableDeviceError(f"{device.display} may not run graph {graph.name!r}: it is {refusal}")
        with self._remembering(place, rule):
            if isinstance(place, Device):
                self._check_memory(graph, place, inputs)
            return current.compiled(graph, self.weights, place, rule)

    def _check_memory(self, graph: Graph, device: Device, inputs: Inputs | None) -> None:
        """Return unless the device cannot hold the graph; graphs that are small for it are not counted."""
        from rlx_ort.providers.registry import memory_limit

        limit, given = memory_limit(device, self.options), [*graph.weights.values(), *(inputs or {}).values()]
        if limit is None or sum(getattr(each, "nbytes", 0) for each in given) * _SMALL_SHARE < limit:
            return
        from rlx_ort.selection.memory import memory_shortage
        from rlx_ort.selection.predict import dims_of

        shortage = memory_shortage(graph, device, self.options, dims_of(graph, inputs or {}))
        if shortage is not None:
            raise MemoryBudgetError(f"{shortage}. Take smaller inputs, or another device")

    def open(self, place: Device | SplitPlan, named: bool, current: SessionSet | None = None) -> CompiledGraph:
        """Return the graph compiled for a place, with its session open unless a parameter is still to be set."""
        compiled = self.compiled(place, named, current)
        if not compiled.is_open:
            with self._remembering(place, compiled.rule):
                compiled.open(required=False)
        return compiled

    def open_first(self, goal: Key, inputs: Inputs | None) -> tuple[Pick, CompiledGraph]:
        """Return the first choice that takes the graph, and the graph compiled for it.

        A device that the call names is not replaced.

        Raises:
            NoViableDeviceError: no device is left; it lists each one with its reason.
        """
        if not is_automatic(goal):
            pick = self.pick(goal, inputs)
            return pick, self.compiled(pick.device, named=True, inputs=inputs)
        tried: set[tuple[Device, bool]] = set()

        def passed_over(pick: Pick, error: Exception) -> None:
            if pick[:2] in tried:  # the refusal is not remembered
                raise error
            tried.add(pick[:2])
            _log.warning("%s is passed over: %s", pick.device.display, str(error))  # an error would keep the graph

        picks = iter(lambda: self.pick(goal, inputs), None)  # the next one is another device, which has not refused
        opened = first_that_works(picks, lambda pick: self.open(pick.place, pick.named), passed_over)
        assert opened is not None  # noqa: S101  # there is always another pick
        return opened

    def to_time(self, device: Device) -> CompiledGraph:
        """Return a graph whose runs do not change the handles of the compiled graph that callers have."""
        opened = self.open(device, named=False)
        return opened.clone() if opened.has_handles else opened

    def _remembering(self, place: Device | SplitPlan, rule: PlacementRule) -> AbstractContextManager[None]:
        """Return a `with` block that remembers that a device refuses the graph."""
        from rlx_ort.selection.graph_cache import remembered

        if not isinstance(place, Device):  # a stage is not the graph
            return nullcontext()
        return remembered(self.graph, place, self.options.with_(placement=rule))

    def moment(self) -> Moment:
        """Return the state of things before a choice."""
        return self.routes.moment(self.follow_graph())

    def again_if_closed(self, run: Callable[[], T]) -> T:
        """Return the result of a run, made again where its session was closed before it began.

        `invalidate_cache` and `set_policy` of another thread close the sessions; `close` ends the runs that wait.
        """
        while True:
            current = self.current
            try:
                return run()
            except CancelledRunError:
                if self.current is current or current.ended:
                    raise

    def has_state(self, device: Device) -> bool:
        """Return whether a compiled graph of a device holds state that cannot move to another one."""
        return self.current.has_state(device)

    def drop(self, device: Device) -> None:
        """Forget the session of a device without waiting for it, unless it holds state; the next use opens another."""
        routes, self.routes = self.routes, RouteTable()
        routes.clear()
        self.current.drop(device)

    def forget(self) -> None:
        """Close every session and forget the choices and refusals; runs in other threads finish first."""
        with self._lock:
            sessions, routes = self.current, self.routes
            self._begin()
            routes.clear()
            self.forgotten()
        sessions.close()
        if self._loaded is not None:  # a packaged graph may not have been read
            from rlx_ort.selection.graph_cache import forget

            forget(self._loaded[0])
