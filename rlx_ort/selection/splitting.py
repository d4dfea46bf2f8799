"""`plan_split`: cuts a graph into stages for several devices, by counted memory and predicted time.

A stage is a run of nodes in the graph's order. Times, weights and live values are added up node by node, which gives
the figures of every possible stage at once, and the fastest cuts for each order of the devices follow by dynamic
programming. The memory of a stage alone differs a little: it is counted for the stages that are found, and corrects
what is expected of those near them, until the stages that are found again fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlx_ort.calibration.features import Workload
from rlx_ort.device import Device, DeviceLike, with_options
from rlx_ort.errors import InputError, MemoryBudgetError, NoViableDeviceError
from rlx_ort.execution.residency import parse_budgets
from rlx_ort.execution.staged import cuts_of, stage_graphs, stage_options
from rlx_ort.ir.core import Ref
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, live_nodes
from rlx_ort.ir.ops.leaf import Constant, Input, Param
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.options.split_plan import SplitPlan, Stage
from rlx_ort.providers.engine.compiled.store import parse_bytes
from rlx_ort.providers.registry import availability, memory_limit, provider_of
from rlx_ort.selection.cost import BackendCostModel
from rlx_ort.selection.folding import sized_outline
from rlx_ort.selection.memory import memory_need, memory_shortage
from rlx_ort.selection.predict import cost_model, predicted_ns, workload_on
from rlx_ort.selection.support import draft_on, support_of

Figures = npt.NDArray[np.float64]

_CUTS = 160  # places that are considered
_ORDERS = 6  # of devices, the fastest by the first pass, that are looked at closely
_ROUNDS = 25  # plans for one order whose stages are counted alone, which takes 5 to 50 ms each
_NEAR = (8.0, 1.0)  # places within which stages are off by about as much: the usual case, then the doubtful ones
_LOOSE = 1.1  # times the budgets are allowed in the first pass, which may count too much
_SMALL = 4096  # constants of fewer bytes are not counted by stage
_MOST_DEVICES = 4
_MOST_STREAMED = 32  # stages of one device that are opened one after the other


def plan_split(
    graph: Graph,
    budgets: Mapping[Device, int],
    options: CompileOptions | None = None,
    dims: Mapping[str, int] | None = None,
    *,
    overlap: bool = False,
) -> SplitPlan:
    """Return the fastest plan that keeps the budgets. Opens no session.

    Where all devices together do not hold the graph, one of them runs it in stages that are opened one after the other
    in every run, with the weights on the host; the plan `streams` then.

    Args:
        graph: the graph.
        budgets: the bytes that the stages of each device may take together.
        options: how to compile.
        dims: sizes of named dims, as `dims_of` reads them from inputs.
        overlap: plan for `run_pipelined`, whose stages work at the same time, so that the slowest stage counts, and not
            for the time of one run.

    Raises:
        InputError: there are more than four budgets.
        NoViableDeviceError: no device can be planned for.
        MemoryBudgetError: no plan keeps the budgets; it says by how much they are short.
    """
    options = (options or CompileOptions()).with_(split=None)
    sizes = {**options.dims, **(dims or {})}
    if len(budgets) > _MOST_DEVICES:
        raise InputError(f"a plan is for at most {_MOST_DEVICES} devices, not {len(budgets)}; leave some budgets out")
    table = _Table(graph, [*budgets], options, sizes)
    found = _fitting(table, budgets, overlap) or _streaming(table, budgets)
    if found is None:
        raise MemoryBudgetError(table.shortage(budgets))
    return found


def counted(graph: Graph, plan: SplitPlan, options: CompileOptions, dims: Mapping[str, int] | None = None) -> SplitPlan:
    """Return a plan with its figures counted for these sizes, those of the plan where none are given.

    Raises:
        InputError: it is no plan of this graph.
        MemoryBudgetError: a device has less than its stages need.
    """
    options, sizes = options.with_(split=None), {**options.dims, **dict(plan.sizes), **(dims or {})}
    stages = [(stage.device, end) for stage, end in zip(plan.stages, cuts_of(graph, plan), strict=True)]
    made = _Counted(graph, plan.devices, options, sizes).plan(stages, streams=plan.streams)
    budgets = dict(plan.budgets)
    for device, used in memory_of(made).items():
        limit = min(filter(None, (budgets.get(device), memory_limit(device, options))), default=None)
        if limit is not None and used > limit:
            raise MemoryBudgetError(
                f"the stages of graph {graph.name!r} on {device.display} need {used:,} bytes, and it has {limit:,} for "
                f"them: {used - limit:,} are missing. Move the cut, or plan again"
            )
    return replace(made, budgets=plan.budgets)


def memory_of(plan: SplitPlan) -> dict[Device, int]:
    """Return the bytes that the stages of each device take together; one that streams has one of them at a time."""
    each: dict[Device, list[int]] = {}
    for stage in plan.stages:
        each.setdefault(stage.device, []).append(stage.memory_bytes)
    return {device: max(used) if plan.streams else sum(used) for device, used in each.items()}


def budgets_of(given: Mapping[DeviceLike, int | str] | str) -> dict[Device, int]:
    """Return the budgets of a mapping or of a text such as `cuda=8GB,cpu=16GB`, in bytes.

    Raises:
        InputError: there is none, a device is unknown or a size is none.
    """
    try:
        if isinstance(given, str):
            budgets = {Device(name): nbytes for name, nbytes in parse_budgets(given).items()}
        else:
            sizes = {with_options(name)[0]: size for name, size in given.items()}
            budgets = {name: size if isinstance(size, int) else parse_bytes(size) for name, size in sizes.items()}
    except ValueError as err:
        reason = err.__cause__ or err  # without the name of the variable that has such budgets too
        raise InputError(f"the budgets {given!r:.80} are not such as 'cuda=8GB,cpu=16GB': {reason}") from err
    if not budgets:
        raise InputError("a plan needs a budget of at least one device, such as 'cuda=8GB,cpu=16GB'")
    return budgets


def memory_limits(devices: Iterable[Device], options: CompileOptions) -> dict[Device, int]:
    """Return the bytes that a session may take on each device for which that is known."""
    limits = {device: memory_limit(device, options) or availability(device).memory_bytes for device in devices}
    return {device: limit for device, limit in limits.items() if limit}


def missing_for(plan: SplitPlan, options: CompileOptions) -> str | None:
    """Return the reason why the devices here cannot keep a plan, or None."""
    limits = memory_limits(plan.devices, options)
    for device in plan.devices:
        state, budget = availability(device), dict(plan.budgets).get(device, 0)
        if not state.available:
            return f"{device.display} is not available: {state.reason}"
        if budget > limits.get(device, budget):
            return f"{device.display} has {limits[device]:,} bytes, and {budget:,} are planned for"
    return None


def plan_if_needed(
    graph: Graph, devices: Sequence[Device], options: CompileOptions, dims: Mapping[str, int]
) -> SplitPlan | None:
    """Return the plan of `split="auto"`: None where every device holds the graph, or one is as fast as any plan."""
    short = [device for device in devices if memory_shortage(graph, device, options, dims) is not None]
    if not short:
        return None
    try:
        plan = plan_split(graph, memory_limits(devices, options), options, dims)
    except (MemoryBudgetError, NoViableDeviceError):
        return None
    helped = options.with_(placement=options.placement or PlacementRule.ASSISTED)  # as a device is chosen
    alone = (predicted_ns(graph, device, helped, dims) for device in devices if device not in short)
    if len(plan.stages) == 1 or (plan.run_ns or math.inf) >= min(filter(None, alone), default=math.inf):
        return None
    return plan


@dataclass(frozen=True, slots=True)
class _Costs:
    """The figures of one device, at the places that are considered: sums over the nodes before, or of every stage."""

    run_ns: Figures
    """(P,): the time of all nodes before a place."""
    refused: Figures
    """(P,): how many nodes before a place it does not take."""
    nbytes: Figures
    """(P, P): the memory of the stage between two places."""
    moved_ns: tuple[Figures, Figures]
    """(P,): the time to hand over the values that cross a place, from the device and to it."""
    start_ns: float


class _Counted:
    """The figures of stages, each counted alone."""

    def __init__(
        self, graph: Graph, devices: Sequence[Device], options: CompileOptions, sizes: Mapping[str, int]
    ) -> None:
        self.graph, self.options, self.sizes = graph, options, sizes
        self.strict = options.with_(placement=options.placement or PlacementRule.STRICT)
        self.works: dict[Device, Workload] = {}
        self.models: dict[Device, BackendCostModel] = {}
        self.types: dict[Device, Mapping[str, ValueType]] = {}
        why_not: list[tuple[Device, str]] = []
        for device in devices:
            work, draft = workload_on(graph, device, options, sizes), draft_on(device, graph, options)
            model = None if draft is None else cost_model(device)
            if work is None or draft is None or model is None:
                why_not.append((device, support_of(device, graph, self.strict).blocker or "its times are not known"))
            else:
                self.works[device], self.models[device] = work, model
                self.types[device] = sized_outline(draft, graph.weights, sizes).known_types()
        if not self.works:
            raise NoViableDeviceError(f"graph {graph.name!r} cannot be split:", why_not)
        self._known: dict[tuple[Device, int, int], Stage] = {}

    def plan(self, stages: Sequence[tuple[Device, int]], overlap: bool = False, streams: bool = False) -> SplitPlan:
        """Return the plan of these stages with its figures, those of each stage alone."""
        ends = [end for _, end in stages]
        known = []
        for (device, end), begin, part in zip(stages, [0, *ends], stage_graphs(self.graph, ends), strict=False):
            if (device, begin, end) not in self._known:
                self._known[device, begin, end] = self._count(device, begin, end, part)
            known.append(self._known[device, begin, end])
        total = (max if overlap else sum)(stage.run_ns or 0.0 for stage in known)
        if streams:
            total += sum(self.models[stage.device].upload_ns(stage.memory_bytes) for stage in known)
        return SplitPlan(tuple(known), (), tuple(self.sizes.items()), total, streams)

    def _count(self, device: Device, begin: int, end: int, part: Graph) -> Stage:
        """Return the figures of a stage, whose values have the sizes that they have in the whole graph."""
        work, model = self.works[device], self.models[device]
        need = memory_need(part, device, stage_options(part, self.options), self.sizes, self.types[device])
        nbytes = {**work.inputs, **work.nbytes}
        inputs = [value.name for value in part.inputs]
        run_ns = model.roundtrip_overhead_ns()
        run_ns += sum(model.upload_ns(nbytes.get(name, 0)) for name in inputs)
        run_ns += sum(model.readback_ns(nbytes.get(value.name, 0)) for value in part.outputs)
        for node, kernel in zip(work.nodes, work.kernels, strict=True):
            if kernel is not None and begin <= node.origin < end:
                run_ns += model.price(kernel).ns
        moved = sum(work.nbytes.get(name, 0) for name in inputs)
        return Stage(device, self.graph.nodes[end - 1].name, 0 if need is None else need.total, run_ns, moved)


class _Table(_Counted):
    """What is known of a graph's nodes on each device: the figures of every stage, nearly."""

    def __init__(
        self, graph: Graph, devices: Sequence[Device], options: CompileOptions, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(graph, devices, options, sizes)
        self.readers: dict[Ref, list[int]] = {}
        live = live_nodes(graph)
        for node in graph.nodes:
            for ref in node.inputs if node.id in live else ():
                if ref is not None:
                    self.readers.setdefault(ref, []).append(node.id)
        self._find_places()
        self.costs = {device: self._costs(device) for device in self.works}
        shape = (len(self.places), len(self.places))
        # What the memory of the nearest stage that was counted alone was off by, and how many places away that is.
        self._off = {device: (np.zeros(shape), np.full(shape, np.inf)) for device in self.works}

    # --- where to cut

    def _find_places(self) -> None:
        """Find the places that the fewest bytes cross, spread over the graph by weights and work.

        No text and no sequence crosses one: these stay with the session that made them.
        """
        nodes, work = self.graph.nodes, next(iter(self.works.values()))
        across, values, blocked = (np.zeros(len(nodes) + 1) for _ in range(3))
        own = np.zeros(len(nodes))  # each node's share of the weights and of the work
        for ref, readers in self.readers.items():
            maker, kind = nodes[ref.node], nodes[ref.node].types[ref.output]
            if maker.op.is_leaf:
                own[readers[0]] += self._leaf_bytes(ref)
                continue
            size = work.nbytes.get(maker.output_names[ref.output], 0)
            bound = not isinstance(kind, TensorType) or kind.dtype is DType.STRING
            for sums, amount in ((across, size), (values, 1), (blocked, bound)):
                sums[ref.node + 1] += amount
                sums[readers[-1] + 1] -= amount
        own /= max(own.sum(), 1)
        for each in work.nodes:
            own[each.origin] += 1 / len(work.nodes)
        across, values, blocked = np.cumsum(across), np.cumsum(values), np.cumsum(blocked)
        room = np.floor(np.cumsum(own) / own.sum() * _CUTS)
        best: dict[float, int] = {}
        for place in np.flatnonzero((values > 0) & (blocked == 0)).tolist():
            at = float(room[place - 1])
            if at not in best or across[place] < across[best[at]]:
                best[at] = place
        self.places = [0, *sorted(best.values()), len(nodes)]
        self.across, self.values = across[self.places], values[self.places]

    def _leaf_bytes(self, ref: Ref) -> int:
        """Return the bytes of a weight, a constant or an input."""
        node = self.graph.nodes[ref.node]
        if isinstance(node.op, Input):
            return next(iter(self.works.values())).inputs.get(node.output_names[0], 0)
        kind = node.types[0]
        return kind.dtype.nbytes(kind.shape.num_elements or 0) if isinstance(kind, TensorType) and kind.shape else 0

    def _costs(self, device: Device) -> _Costs:
        """Return the figures of one device."""
        need, work = memory_need(self.graph, device, self.options, self.sizes), self.works[device]
        model, provider = self.models[device], provider_of(device)
        assert need is not None and provider is not None  # noqa: S101, PT018  # it has work
        count, places = len(self.graph.nodes), np.array(self.places)
        run_ns, packed, peak, kept, refused = (np.zeros(count) for _ in range(5))
        for node, kernel in zip(work.nodes, work.kernels, strict=True):
            run_ns[node.origin] += 0 if kernel is None else model.price(kernel).ns
        for row in support_of(device, self.graph, self.strict).unsupported:
            refused[row.index] = 1
        origin, origins = 0, {node.name: node.origin for node in work.nodes}
        for each in need.nodes:
            origin = origins.get(each.name, origin)
            packed[origin] += each.packed
            peak[origin] = max(peak[origin], each.live)
        for name, ref in self.graph._outputs:  # results are kept to the end of their stage
            kept[ref.node] += work.outputs.get(name, 0)
        nbytes = np.zeros((len(places), len(places)))
        for ref, readers in self.readers.items():
            op, size = self.graph.nodes[ref.node].op, self._leaf_bytes(ref)
            counts = isinstance(op, (Param, Constant)) or (
                isinstance(op, Input) and not provider.session_memory.on_host
            )
            if counts and size >= _SMALL:
                for before, reader in itertools.pairwise([-1, *readers]):
                    nbytes += size * np.outer((places > before) & (places <= reader), places > reader)
        until = _before(packed, places)
        nbytes += until[None] - until[:, None]
        most = [0, *(peak[begin:end].max(initial=0) for begin, end in itertools.pairwise(places))]
        nbytes += np.maximum.accumulate(np.triu(np.tile(most, (len(places), 1)), 1), axis=1)  # alive between two places
        nbytes -= _before(kept, places)[:, None]
        nbytes += need.total - need.session + need.work_space + need.runtime
        hand_over = (model.readback_ns, model.upload_ns)
        moved = [np.array([self._moved_ns(call, at) for at in range(len(places))]) for call in hand_over]
        sums, start_ns = _before(run_ns, places), model.roundtrip_overhead_ns()
        return _Costs(sums, _before(refused, places), nbytes, (moved[0], moved[1]), start_ns)

    def _moved_ns(self, call: Callable[[int], float], at: int) -> float:
        """Return the time to move the values that cross a place, its values counted as alike."""
        values = max(int(self.values[at]), 1)
        return call(int(self.across[at] / values)) * values

    # --- plans

    def _count(self, device: Device, begin: int, end: int, part: Graph) -> Stage:
        """Return the figures of a stage, and correct the expectations of those near it."""
        stage = super()._count(device, begin, end, part)
        if begin in self.places and end in self.places:
            first, last = self.places.index(begin), self.places.index(end)
            off, distance = self._off[device]
            rows, columns = np.indices(off.shape)
            away = abs(rows - first) + abs(columns - last)
            nearer = away < distance
            off[nearer] = stage.memory_bytes - self.costs[device].nbytes[first, last]
            distance[nearer] = away[nearer]
        return stage

    def orders(self) -> Iterator[tuple[Device, ...]]:
        """Yield the orders of devices that are considered: each device once, or one around another."""
        known = [*self.costs]
        for count in range(1, len(known) + 1):
            yield from itertools.permutations(known, count)
        for first, second in itertools.permutations(known, 2):
            yield first, second, first

    def fastest(
        self,
        order: Sequence[Device],
        allowed: Mapping[Device, float],
        overlap: bool = False,
        near: float = _NEAR[0],
    ) -> tuple[float, tuple[tuple[Device, int], ...]] | None:
        """Return the fastest cuts for one order of devices and their predicted time, None if nothing is allowed.

        By dynamic programming over the places.
        """
        count = len(self.places)
        total, back = np.full(count, np.inf), []
        total[0] = 0
        before: _Costs | None = None
        for device in order:
            costs, (off, away) = self.costs[device], self._off[device]
            stage = costs.run_ns[None] - costs.run_ns[:, None] + costs.start_ns
            if before is not None:
                stage = stage + (before.moved_ns[0] + costs.moved_ns[1])[:, None]
            taken = costs.refused[None] == costs.refused[:, None]
            within = costs.nbytes + off * np.exp(-away / near) <= allowed[device]
            fits = taken & within & np.triu(np.ones((count, count), bool), 1)
            step = np.maximum(total[:, None], stage) if overlap else total[:, None] + stage
            step = np.where(fits, step, np.inf)
            back.append(step.argmin(axis=0))
            total, before = step.min(axis=0), costs
        if not np.isfinite(total[-1]):
            return None
        at, stages = count - 1, list[tuple[Device, int]]()
        for device, source in zip(order[::-1], back[::-1], strict=True):
            stages.insert(0, (device, self.places[at]))
            at = int(source[at])
        return float(total[-1]), tuple(stages)

    def shortage(self, budgets: Mapping[Device, int]) -> str:
        """Return the message that no plan keeps the budgets."""
        least = min(costs.nbytes[0, -1] for costs in self.costs.values())
        given = ", ".join(f"{device.display} {budgets[device]:,}" for device in self.costs)
        missing = int(least) - sum(budgets[device] for device in self.costs)
        if missing > 0:
            why = f"it needs at least {int(least):,} bytes: {missing:,} are missing"
        else:
            why = "a part that cannot be cut, or a node that only one device takes, needs more than its device has"
        return f"graph {self.graph.name!r} does not fit into the budgets, {given} bytes; {why}. Raise a budget"


def _fitting(table: _Table, budgets: Mapping[Device, int], overlap: bool) -> SplitPlan | None:
    """Return the fastest plan that keeps the budgets by the figures of each stage alone, None if there is none."""
    loose = {device: nbytes * _LOOSE for device, nbytes in budgets.items()}
    found = [(each[0], order) for order in table.orders() if (each := table.fastest(order, loose, overlap))]
    plans: list[SplitPlan] = []
    for _, order in sorted(found, key=lambda each: each[0])[:_ORDERS]:
        allowed, tried = {device: float(nbytes) for device, nbytes in budgets.items()}, set[object]()
        for near in _NEAR:
            for _ in range(_ROUNDS):
                each = table.fastest(order, allowed, overlap, near)
                if each is None or each[1] in tried:
                    break
                tried.add(each[1])
                plan = table.plan(each[1], overlap=overlap)
                over = {device: used - budgets[device] for device, used in memory_of(plan).items()}
                if max(over.values()) <= 0:
                    plans.append(plan)
                for device, nbytes in over.items():
                    if nbytes > 0 and order.count(device) > 1:  # each of its stages fits, and all together do not
                        allowed[device] -= nbytes
    best = min(plans, key=lambda plan: plan.run_ns or math.inf, default=None)
    return None if best is None else replace(best, budgets=tuple(budgets.items()))


def _streaming(table: _Table, budgets: Mapping[Device, int]) -> SplitPlan | None:
    """Return the fastest plan of one device whose stages are opened one after the other, None if there is none.

    The host has all weights already, and gains nothing by it.
    """
    found: list[SplitPlan] = []
    for device in table.costs:
        provider, allowed = provider_of(device), float(budgets[device])
        if provider is None or provider.session_memory.on_host:
            continue
        for count in range(2, _MOST_STREAMED + 1):
            each = table.fastest([device] * count, {device: allowed})
            if each is None:
                continue
            plan = table.plan(each[1], streams=True)
            over = memory_of(plan)[device] - budgets[device]
            if over <= 0:
                found.append(replace(plan, budgets=((device, budgets[device]),)))
                break
            allowed -= over
    return min(found, key=lambda plan: plan.run_ns or math.inf, default=None)


def _before(amounts: Figures, places: npt.NDArray[np.int64]) -> Figures:
    """Return the sum of the amounts of all nodes before each place."""
    sums: Figures = np.concatenate([[0.0], np.cumsum(amounts)])[places]
    return sums
