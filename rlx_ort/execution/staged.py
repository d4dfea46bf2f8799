"""`StagedSlot`: the engine of a graph that is cut into stages, an ordinary session on a device each.

A compiled graph runs in it as in any other engine, so that handles, decode loops, committed and pipelined runs work
over several devices. A value that a later stage of the same device reads stays in its memory; one that goes to another
device passes through the host. Runs of one stage take turns, so that stages of different runs overlap.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import InputError, StageError, near_names
from rlx_ort.execution.engine import Engine, EngineSlot, open_slot, runnable
from rlx_ort.execution.inputs import sizes_of
from rlx_ort.execution.interface import Inputs
from rlx_ort.execution.placement import PlacedNode, Placement
from rlx_ort.execution.session import working_provider
from rlx_ort.execution.weights import WeightStore
from rlx_ort.faults import is_device_failure
from rlx_ort.ir.graph import Graph, dynamic_symbols, section
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.options.split_plan import SplitPlan
from rlx_ort.providers.base import NodeAssignment
from rlx_ort.providers.engine.binding import Binder, BoundRun, DeviceTensor, HostTensor, Loop
from rlx_ort.providers.engine.process import budget
from rlx_ort.providers.engine.stopping import Turns, check_stopped

_Loops: TypeAlias = dict[int, tuple[Engine, Loop]]
_sections: weakref.WeakKeyDictionary[Graph, dict[tuple[int, int, int], Graph]] = weakref.WeakKeyDictionary()


def cuts_of(graph: Graph, plan: SplitPlan) -> list[int]:
    """Return where each stage ends: the place behind its last node, that of the last stage behind all nodes.

    Raises:
        InputError: a stage ends at no node of the graph, or not behind the one before.
    """
    places = {node.name: node.id + 1 for node in graph.nodes}
    ends: list[int] = []
    for stage in plan.stages[:-1]:
        end = places.get(stage.last)
        if end is None:
            raise InputError(f"graph {graph.name!r} has no node {stage.last!r}; {near_names(stage.last, places)}")
        if ends and end <= ends[-1]:
            raise InputError(f"the stage that ends with {stage.last!r} comes before the stage that it follows")
        ends.append(end)
    return [*ends, len(graph.nodes)]


def stage_graphs(graph: Graph, cuts: Sequence[int]) -> list[Graph]:
    """Return the graph of each stage, the same object for the same places.

    Raises:
        GraphVerifyError: nothing in a stage is needed.
    """
    known = _sections.setdefault(graph, {})
    found = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        key = (graph.revision, begin, end)
        if key not in known:
            known[key] = section(graph, begin, end, _sizes(graph))
        found.append(known[key])
    return found


def _sizes(graph: Graph) -> set[str]:
    """Return the names of the values that are computed from sizes alone."""
    from rlx_ort.converters.to_onnx.exporter import drafted

    nodes = drafted(graph).outline.nodes
    return {name for node in nodes if node.shape_only for name in node.output_names}


def stage_options(graph: Graph, options: CompileOptions) -> CompileOptions:
    """Return the options of a stage, whose graph may lack some dims; further sessions for fixed sizes do not count."""
    known = {*dynamic_symbols(graph)} if options.dims else set()
    return options.with_(
        split=None, sized_sessions=0, dims={dim: size for dim, size in options.dims.items() if dim in known}
    )


def _with_threads(plan: SplitPlan, options: CompileOptions) -> CompileOptions:
    """Return the options of the stages on the CPU, which take turns, so that each has the threads of all.

    By themselves later sessions of a process get the cores that are left, and pools spin while other stages run: BERT
    in three stages on two cores took 94 ms, with these options 63, and 60 in one. A thread drives each
    other device: ResNet-50 on an H200 and 16 cores, `run_pipelined`, took 8.0 ms a run, with a core left 5.1.
    """
    count, total = sum(stage.device == Device.CPU for stage in plan.stages), budget().total
    if options.intra_op_threads is None and len(plan.stages) > 1:
        options = options.with_(intra_op_threads=max(total - len(plan.devices) + 1, (total + 2) // 2))
    return options.with_(spinning=False) if options.spinning is None and count > 1 else options


def open_staged(graph: Graph, plan: SplitPlan, weights: WeightStore, options: CompileOptions) -> StagedSlot:
    """Return a slot for the sessions of a plan's stages, which are not opened yet.

    Raises:
        InputError: the plan is not one of this graph.
        DeviceUnavailableError: a device does not work here.
        GraphError: a stage cannot be written for its device.
    """
    on_cpu = _with_threads(plan, options)
    slots = [
        open_slot(
            working_provider(stage.device),
            stage.device,
            part,
            weights,
            stage_options(part, on_cpu if stage.device == Device.CPU else options),
        )
        for stage, part in zip(plan.stages, stage_graphs(graph, cuts_of(graph, plan)), strict=True)
    ]
    from rlx_ort.converters.to_onnx.exporter import exported
    from rlx_ort.providers.claims import kernel_set

    runs, last = runnable(graph), slots[-1]
    model = exported(runs.graph, options.with_(split=None), kernel_set(last.provider, runs.graph, options))
    return StagedSlot(plan, slots, last.provider, last.device, model, weights, options, graph, runs, weights, None)


class StagedSlot(EngineSlot):
    """Holds the engine of a graph whose stages have sessions of their own."""

    def __init__(self, plan: SplitPlan, slots: Sequence[EngineSlot], *usual: Any) -> None:
        super().__init__(*usual)
        self.plan = plan
        self.stages = [_Stage(number, slot) for number, slot in enumerate(slots, 1)]
        for slot in slots:
            self.adopt(slot)

    @property
    def overlapping(self) -> int:
        """How many runs are made at a time: one in each stage."""
        return max(2, len(self.stages))

    def release(self) -> None:
        """Let go of the engines of all stages; the next run opens others."""
        super().release()
        for stage in self.stages:
            stage.slot.release()

    def _moved(self) -> list[tuple[str, str]]:
        """Return each value that is moved to another device, with the reader's provider."""
        homes: dict[str, Device] = {}
        moved = []
        for stage in self.stages:
            slot = stage.slot
            strangers = [name for name in stage.reads if homes.get(name, slot.device) != slot.device]
            moved += [(name, slot.provider.ep_name or slot.provider.name) for name in strangers]
            homes.update(dict.fromkeys(stage.makes, slot.device))
        return moved

    def _still_fresh(self, engine: Engine) -> bool:
        return False  # each stage knows of its own

    def _open(self, rule: PlacementRule) -> Engine:
        """Open the stages, each under the strict rule unless the options have another one."""
        rule, version = self.options.placement or PlacementRule.STRICT, self.weights.version
        session = StagedSession(self.graph, self.stages, rule, self.plan.streams)
        placements = [stage.opened(rule, self.plan.streams, len(self.stages)) for stage in self.stages]
        self.named.placement = placement = StagedPlacement.of(placements, self._moved(), self.plan.devices)
        engine = Engine(session, {}, version, self.weights)
        engine.strict_ok = not placement.strays
        return engine


@dataclass(frozen=True, slots=True, repr=False)
class StagedPlacement(Placement):
    """The placement of several sessions as one; `requested` has the providers of all stages.

    Attributes:
        stages: the placement of each session.
        devices: the devices of the stages.
    """

    stages: tuple[Placement, ...] = ()
    devices: tuple[Device, ...] = ()

    @classmethod
    def of(
        cls, stages: Sequence[Placement], moved: Sequence[tuple[str, str]], devices: tuple[Device, ...]
    ) -> StagedPlacement:
        """Return the placements of stages as one, with the values that are moved between them."""
        requested = " and ".join(dict.fromkeys(stage.requested for stage in stages))
        by_ep: dict[str, tuple[PlacedNode, ...]] = {}
        for stage in stages:
            for ep, nodes in stage.nodes_by_ep.items():
                by_ep[ep] = (*by_ep.get(ep, ()), *nodes)
        sites = {name: ep for stage in stages for name, ep in stage.sites.items()}
        crossings = (*moved, *(each for stage in stages for each in stage.crossings))
        return cls(requested, by_ep, sites, crossings, tuple(stages), devices)

    @property
    def strays(self) -> tuple[PlacedNode, ...]:
        """The nodes that are not on the provider of their stage and not pinned to the CPU."""
        return tuple(node for stage in self.stages for node in stage.strays)


class _Stage:
    """One stage: its slot, the values that it reads and makes, and the turns of its runs."""

    def __init__(self, number: int, slot: EngineSlot) -> None:
        self.number, self.slot, self.turns = number, slot, Turns()
        self.reads, self.makes = tuple(slot.input_types), tuple(slot.output_types)

    def opened(self, rule: PlacementRule, streams: bool, count: int) -> Placement:
        """Open its session and return where its nodes are; a session of a plan that streams is closed again."""
        with self.failing(count):
            self.slot.ready(rule)
        if streams:
            self.slot.release()
        placement = self.slot.placement
        assert placement is not None  # noqa: S101  # opening a session fills it in
        return placement

    @contextlib.contextmanager
    def failing(self, count: int) -> Iterator[None]:
        """Raise an error that another device may avoid as a `StageError`, which names the stage."""
        try:
            yield
        except Exception as err:  # raised again
            if not is_device_failure(err):
                raise
            raise StageError(self.slot.device, self.number, count, err) from err


class StagedSession:
    """Runs the stages one after the other. Runs of several threads see the weights of one version each.

    A value lives until its last reader has run. With `streams` a stage is opened for its run and closed behind it.
    """

    assignments: Sequence[NodeAssignment] = ()

    def __init__(self, graph: Graph, stages: Sequence[_Stage], rule: PlacementRule, streams: bool) -> None:
        self.input_types, self.output_types = graph.input_types, graph.output_types
        self.binder = _StagedBinder(self)
        self.stages, self._rule, self.streams = stages, rule, streams
        self._values = {name: value.name for name, value in zip(graph.output_names, graph.outputs, strict=True)}
        self._all = Turns()
        self._homes: weakref.WeakKeyDictionary[DeviceTensor, Device] = weakref.WeakKeyDictionary()
        self._last = {name: stage.number for stage in stages for name in stage.reads}
        self._stays = [
            {
                name
                for name in stage.makes
                if stage.slot.device != Device.CPU
                and not streams  # a tensor keeps the session open that made it
                and any(name in later.reads and later.slot.device == stage.slot.device for later in stages[number:])
            }
            for number, stage in enumerate(stages, 1)
        ]

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run on arrays."""
        return self.run_on(feeds, output_names, ())

    def run_on(
        self, feeds: Inputs, outputs: Sequence[str], resident: Collection[str], loops: _Loops | None = None
    ) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`. `loops` keeps the prepared run of each stage.

        Raises:
            StageError: a stage failed in a way that another device may avoid.
        """
        with self._all if self.streams else contextlib.nullcontext():
            while True:
                versions, results = self._once(feeds, outputs, resident, loops)
                if len(versions) <= 1:  # else a parameter was set between two stages
                    return results

    def value_of(self, output: str) -> str:
        """Return the name of the value that is an output of the graph."""
        return self._values[output]

    def needed(self, stage: _Stage, wanted: Collection[str]) -> list[str]:
        """Return the values of a stage that are wanted, or that later stages read."""
        return [name for name in stage.makes if name in wanted or self._last.get(name, 0) > stage.number]

    def engine(self, stage: _Stage) -> Engine:
        """Return the engine of a stage with the newest weights."""
        return stage.slot.ready(self._rule)

    def close(self) -> None:
        """Do nothing: the stages are closed by their slot."""

    def _once(
        self, feeds: Inputs, outputs: Sequence[str], resident: Collection[str], loops: _Loops | None
    ) -> tuple[set[int], list[Any]]:
        wanted = [self._values[name] for name in outputs]
        kept, engines, versions = {self._values[name] for name in resident}, [], set[int]()
        values = dict(feeds)
        for stage, stays in zip(self.stages, self._stays, strict=True):
            names = self.needed(stage, wanted)
            if not names:
                continue
            check_stopped()
            with stage.failing(len(self.stages)), stage.turns:
                engine = self.engine(stage)
                given = {name: self._moved(values, name, stage.slot.device) for name in stage.reads}
                here = (stays | kept).intersection(names)
                plain = not here and not any(isinstance(value, DeviceTensor) for value in given.values())
                if plain:
                    made = engine.run(names, given)
                elif loops is None:
                    made = engine.binder.run(given, names, here)
                else:
                    if stage.number not in loops or loops[stage.number][0] is not engine:
                        loops[stage.number] = engine, engine.binder.loop(list(given), names, here)
                    made = loops[stage.number][1](list(given.values()))
            del given
            versions.add(engine.version)
            engines.append(weakref.ref(engine))
            del engine
            if self.streams:
                stage.slot.release()
            for name, value in zip(names, made, strict=True):
                values[name] = value
                if name in here:
                    self._homes[value] = stage.slot.device
            del made
            for name in [name for name in values if self._last.get(name, 0) <= stage.number and name not in wanted]:
                del values[name]
        versions.update(used.version for each in engines if (used := each()) is not None)
        results = []
        for name, value in zip(outputs, wanted, strict=True):
            result = values[value]
            if isinstance(result, DeviceTensor) and name not in resident:
                result = result.numpy()
            results.append(result)
        return versions, results

    def _moved(self, values: dict[str, Any], name: str, device: Device) -> Any:
        """Return a value as a session of a device takes it, by way of the host from another one."""
        value = values[name]
        if not isinstance(value, DeviceTensor) or self._homes.get(value) == device:
            return value
        values[name] = value = value.numpy()
        return value


class _StagedBinder(Binder):
    """The memory side of a staged session; an uploaded tensor waits in host memory for the stage that reads it."""

    def __init__(self, session: StagedSession) -> None:
        super().__init__(session.run)
        self._session = session
        self._placed: weakref.WeakKeyDictionary[DeviceTensor, DeviceTensor] = weakref.WeakKeyDictionary()

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        return self._session.run_on(feeds, outputs, resident)

    def loop(self, inputs: Sequence[str], outputs: Sequence[str], resident: Collection[str]) -> Loop:
        """Return a run whose stages are each prepared once; see `Binder.loop`. A plan that streams keeps none open."""
        loops: _Loops | None = None if self._session.streams else {}
        return lambda values: self._session.run_on(dict(zip(inputs, values, strict=True)), outputs, resident, loops)

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any] | str]) -> BoundRun | None:
        """Return a run whose stages are each bound once, with arrays between them; see `Binder.bound`.

        None where the shape of a value between two stages does not follow from the inputs' named dims, and for a plan
        that streams, which a bound session would keep open.
        """
        session = self._session
        if session.streams:
            return None
        sizes = sizes_of(session.input_types, {name: getattr(value, "shape", ()) for name, value in inputs.items()})
        values, bound = {**inputs}, list[tuple[_Stage, BoundRun]]()
        wanted = {session.value_of(name): place for name, place in outputs.items()}
        for stage in session.stages:
            names = session.needed(stage, wanted)
            if not names:
                continue
            engine = session.engine(stage)
            given = {name: self._there(values[name], stage, engine) for name in stage.reads}
            places = dict[str, npt.NDArray[Any] | str]()
            for name in names:
                if name not in wanted:
                    array = _array_of(stage.slot.output_types[name], sizes)
                    if array is None:
                        return None
                    places[name] = values[name] = array
                else:
                    places[name] = place = wanted[name]
                    values[name] = values[place] if isinstance(place, str) else place
            run = engine.binder.bound(given, places)
            if run is None:
                return None
            bound.append((stage, run))
        return _StagedRun(bound)

    def _there(self, value: Any, stage: _Stage, engine: Engine) -> Any:
        """Return a value that was uploaded in the memory of the stage that reads it, the same one each time."""
        if not isinstance(value, HostTensor):
            return value
        if value not in self._placed:
            self._placed[value] = engine.binder.upload(value.array)
        return self._placed[value]


class _StagedRun(BoundRun):
    """The bound runs of the stages, one after the other."""

    def __init__(self, bound: Sequence[tuple[_Stage, BoundRun]]) -> None:
        self._bound = bound

    def run(self) -> None:
        """Run each stage; see `BoundRun.run`."""
        for stage, run in self._bound:
            with stage.failing(len(self._bound)), stage.turns:
                run.run()

    def replace(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind another array to the stages that read the input."""
        for stage, run in self._bound:
            if name in stage.reads:
                run.replace(name, array)


def _array_of(kind: ValueType, sizes: Mapping[str, int]) -> npt.NDArray[Any] | None:
    """Return an array for a value, or None where its shape is not known."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return None
    shape = kind.shape.bind(sizes)
    return np.empty(shape.static(), kind.dtype.numpy) if shape.is_static else None
