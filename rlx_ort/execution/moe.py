"""Mixtures of experts: which experts are resident on the device, the routers' picks, and how a graph is split.

A product by experts, some of which are not resident, becomes two: one on the device with the weights of the resident
experts, and one on the host with the others; each row takes the result of the one that has its expert. The names of
the host's nodes contain `HOST_MARKER`, by which ONNX Runtime keeps them, and so their weights, on the CPU. Routers and
products get hidden outputs, from which each run counts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import GraphVerifyError, InputError
from rlx_ort.execution.engine import EngineSlot, Runnable, open_slot, runnable
from rlx_ort.execution.weights import Experts, ExpertWeights, taken_rows
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.dequant import DequantGroupedMatMul, GroupedMatMul
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.ops.norm import TopK
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import PlacementRule

MaskLike: TypeAlias = "Sequence[bool] | npt.NDArray[np.bool_]"
Mask: TypeAlias = npt.NDArray[np.bool_]
"""For each expert whether it is resident: on the device."""

HOST_MARKER = "@moe-host"
"""Part of the names of the nodes that run on the host."""
_PRODUCTS_PER_LAYER = 3
"""Gate, up and down."""


@dataclass(frozen=True, slots=True)
class MoeResidencyStats:
    """The work of the experts in one forward, summed over the products by experts.

    Attributes:
        gpu_expert_calls: experts on the device that got rows.
        cpu_expert_calls: experts on the host that got rows.
        gpu_tokens: rows of the experts on the device.
        cpu_tokens: rows of the experts on the host.
    """

    gpu_expert_calls: int
    cpu_expert_calls: int
    gpu_tokens: int
    cpu_tokens: int


class MoeControls:
    """The settings of one compiled graph about experts.

    A graph without experts accepts settings and ignores them. They must not change while another thread is in a run of
    the same graph.

    Attributes:
        base: the slot of the graph without settings.
        slot: the slot whose session implements the settings; `base` without any.
    """

    def __init__(self, base: EngineSlot) -> None:
        self.base = self.slot = base
        self._watch: _Watch | None = None

    def keep(self, masks: Sequence[MaskLike], rule: PlacementRule, *, every_layer: bool = False) -> None:
        """Set the resident experts layer by layer, or the first mask for every layer.

        Experts that no mask excludes are resident. See `CompiledGraph.set_moe_resident_experts` for the errors.
        """
        given = [_checked(mask) for mask in masks]
        kept = []
        for index, node in enumerate(expert_nodes(self.base.graph)):
            ref = node.inputs[1]
            if ref is None:
                raise GraphVerifyError(f"{node} lacks its weight")
            mask = np.ones(int(self.base.graph.value(ref).shape.static()[0]), bool)
            layer = 0 if every_layer else index // _PRODUCTS_PER_LAYER
            if layer < len(given):
                mask[: len(given[layer])] = given[layer][: len(mask)]
            kept.append(mask)
        if kept:
            self._apply(replace(self._settings, masks=tuple(kept)), rule)

    def capture(self, num_experts: int, rule: PlacementRule) -> bool:
        """Record the picks of routers over `num_experts` from now on; returns whether there is such a router."""
        if not router_picks(self.base.graph, num_experts):
            return False
        self._apply(replace(self._settings, capture=num_experts, picks=_Picks()), rule)
        return True

    def take_stats(self) -> MoeResidencyStats | None:
        """Return the stats of the last forward, once; None before one, or without masks."""
        stats = None
        if self._watch is not None:
            stats, self._watch.stats = self._watch.stats, None
        return stats

    def take_picks(self) -> list[npt.NDArray[np.uint32]] | None:
        """Return the picks of each router since the last call, None if there are none."""
        picks = self._settings.picks
        return None if picks is None else picks.take()

    def copy_to(self, other: MoeControls, rule: PlacementRule) -> None:
        """Give other controls the same settings; they have their own stats and share the record of picks."""
        if self._watch is not None:
            other._apply(self._watch.settings, rule)

    @property
    def _settings(self) -> _Settings:
        return _Settings() if self._watch is None else self._watch.settings

    def _apply(self, settings: _Settings, rule: PlacementRule) -> None:
        """Open a session with the hidden outputs, and the experts on the host, that the settings need."""
        base = self.base
        # The CPU is the host: there is nowhere to move an expert to.
        split = base.device.kind != Device.CPU.kind and settings.masks is not None
        if self._watch is not None and not split and self._watch.settings.outputs == settings.outputs:
            self._watch.settings, self._watch.stats = settings, None
            return
        what = runnable(base.graph)
        made = split_experts(what.graph, settings.capture, settings.masks, split)
        watch = _Watch(settings, made)
        runs = Runnable(made.graph, what.mutable, (*made.picks, *made.routed), HOST_MARKER if made.on_host else "")
        source = ExpertWeights(base.weights, made.experts) if made.experts else None
        common = (base.provider, base.device, base.graph, base.weights, base.options)
        slot = open_slot(*common, runs, source, watch)
        base.adopt(slot)
        slot.open_if_ready(rule)
        self._watch, self.slot = watch, slot


@dataclass(frozen=True)
class _Settings:
    capture: int | None = None
    picks: _Picks | None = None
    masks: tuple[Mask, ...] | None = None

    @property
    def outputs(self) -> tuple[int | None, bool]:
        """The settings that decide the hidden outputs of a session."""
        return self.capture, self.masks is not None


class _Picks:
    """The picks of routers, run after run, until they are taken; clones share it."""

    def __init__(self) -> None:
        self._layers: list[list[npt.NDArray[np.uint32]]] = []
        self._lock = threading.Lock()

    def add(self, layers: Sequence[Any]) -> None:
        flat = [np.asarray(layer).astype(np.uint32).reshape(-1) for layer in layers]
        with self._lock:
            if not self._layers:
                self._layers = [[] for _ in flat]
            for known, new in zip(self._layers, flat, strict=True):
                known.append(new)

    def take(self) -> list[npt.NDArray[np.uint32]] | None:
        with self._lock:
            layers, self._layers = self._layers, []
        return [np.concatenate(parts) for parts in layers] or None


class _Watch:
    """Reads the hidden outputs of runs, by the settings in force."""

    def __init__(self, settings: _Settings, made: MoeGraph) -> None:
        self.settings = settings
        self.stats: MoeResidencyStats | None = None
        self._picks, self._routed = made.picks, made.routed

    def __call__(self, hidden: Mapping[str, Any]) -> None:
        settings = self.settings
        if settings.picks is not None:
            settings.picks.add([hidden[name] for name in self._picks])
        if settings.masks is not None:
            self.stats = _stats([hidden[name] for name in self._routed], settings.masks)


def _stats(routed: Sequence[npt.NDArray[np.generic]], masks: Sequence[Mask]) -> MoeResidencyStats:
    """Count the experts and their rows, on the device and on the host; ids without an expert count as on the device."""
    calls, tokens = {True: 0, False: 0}, {True: 0, False: 0}
    for ids, mask in zip(routed, masks, strict=True):
        experts, rows = np.unique(np.asarray(ids).astype(np.int64), return_counts=True)
        for expert, count in zip(experts, rows, strict=True):
            resident = not 0 <= expert < len(mask) or bool(mask[expert])
            calls[resident] += 1
            tokens[resident] += int(count)
    return MoeResidencyStats(calls[True], calls[False], tokens[True], tokens[False])


def _checked(given: MaskLike) -> Mask:
    try:
        mask = np.asarray(given)
    except ValueError as err:  # a ragged list
        raise InputError(f"a mask of experts is one row of booleans: {err}") from err
    if mask.ndim != 1 or (mask.size and mask.dtype != np.bool_):
        raise InputError(f"a mask of experts is one row of booleans, got {mask.dtype} of shape {mask.shape}")
    return mask.astype(bool)


@dataclass
class MoeGraph:
    """A graph as its session runs it."""

    graph: Graph
    picks: tuple[str, ...] = ()
    """Names of the hidden outputs with the indices that each router's TopK found, in order."""
    routed: tuple[str, ...] = ()
    """Names of the hidden outputs with the expert of each row of each product, in order."""
    experts: dict[str, Experts] = field(default_factory=dict)
    """New parameter -> the part of the user's parameter that it holds."""
    on_host: bool = False
    """Whether some nodes run on the host."""


def expert_nodes(graph: Graph) -> list[Node]:
    """Return the products by experts of the main graph, in order."""
    return [node for node in graph.nodes if isinstance(node.op, (GroupedMatMul, DequantGroupedMatMul))]


def router_picks(graph: Graph, num_experts: int) -> list[Ref]:
    """Return the indices output of each TopK over exactly that many elements in the main graph, in order."""
    picks = []
    for node in graph.nodes:
        if isinstance(node.op, TopK):
            axis, output = -1, 0
        elif isinstance(node.op, OnnxNode) and (node.op.domain, node.op.op_type) == ("", "TopK"):
            given = node.op.attributes.get("axis", -1)
            axis, output = given if isinstance(given, int) else -1, 1
        else:
            continue
        ref = node.inputs[0]
        kind = None if ref is None else graph.nodes[ref.node].types[ref.output]
        shape = kind.shape if isinstance(kind, TensorType) else None
        if shape is not None and -shape.rank <= axis < shape.rank and shape[axis] == num_experts:
            picks.append(Ref(node.id, output))
    return picks


def split_experts(graph: Graph, capture: int | None, residency: Sequence[Mask] | None, split: bool) -> MoeGraph:
    """Return a copy of a graph with hidden outputs and, if `split`, the experts that are not resident on the host.

    `capture` is the number of experts that identifies routers, None to capture nothing. `residency` has the mask of
    each product by experts, None to count nothing of them.

    Raises:
        GraphVerifyError: the weight of experts that are to move is neither a parameter nor a constant.
    """
    made = MoeGraph(Graph(graph.name, metadata=dict(graph.metadata), doc=graph.doc))
    made.graph.weights = dict(graph.weights)
    masks = dict(zip((node.id for node in expert_nodes(graph)), residency or (), strict=False)) if split else {}
    values: dict[Ref, Value] = {}
    for node in graph.nodes:
        inputs = [None if ref is None else values[ref] for ref in node.inputs]
        mask = masks.get(node.id)
        if mask is not None and not mask.all():
            made.on_host = True
            results: tuple[Value, ...] = (_split_product(made, graph, node, mask, inputs),)
        else:
            results = made.graph.add_node(
                node.op, inputs, name=node.name, types=node.types, output_names=node.output_names
            )
        values.update((Ref(node.id, place), value) for place, value in enumerate(results))
    picks = [] if capture is None else router_picks(graph, capture)
    routed = [] if residency is None else [node.inputs[2] for node in expert_nodes(graph)]
    made.picks = tuple(f"{HOST_MARKER}/picks/{place}" for place in range(len(picks)))
    made.routed = tuple(f"{HOST_MARKER}/routed/{place}" for place in range(len(routed)))
    outputs = [values[value.ref] for value in graph.outputs]
    hidden = [values[ref] for ref in (*picks, *routed) if ref is not None]
    made.graph.set_outputs([*outputs, *hidden], [*graph.output_names, *made.picks, *made.routed])
    return made


def _split_product(made: MoeGraph, source: Graph, node: Node, mask: Mask, inputs: Sequence[Value | None]) -> Value:
    """Add a product by experts to a split graph, as one on the device and one on the host; keeps the node's name."""
    x, weight, experts = inputs
    if x is None or weight is None or experts is None:
        raise GraphVerifyError(f"{node} lacks an input")
    graph, name, op = made.graph, node.name, node.op
    if not mask.any():
        return graph.add_node(op, (x, weight, experts), name=f"{name}{HOST_MARKER}", types=node.types)[0]
    ids = graph.cast(experts, DType.I32)

    def product(side: Mask, label: str, suffix: str) -> Value:
        # Rows of the other side get -1: the loop over experts skips them, a copy for each row takes any matrix.
        places = np.where(side, np.cumsum(side) - 1, -1).astype(np.int32)
        local = graph.gather(graph.constant(places), ids, axis=0)
        return graph.append(op, x, _weight_part(made, source, node, side, label), local, name=f"{name}{suffix}")

    flags = graph.gather(graph.constant(mask.astype(np.int32)[:, None]), ids, axis=0)
    on_device = product(mask, "resident", "/resident")
    on_host = product(~mask, "host", HOST_MARKER)
    return graph.where_(graph.cast(flags, DType.BOOL), on_device, on_host, name=name)


def _weight_part(made: MoeGraph, source: Graph, node: Node, side: Mask, label: str) -> Value:
    """Return the weight of some experts: a parameter of `ExpertWeights`, or a constant."""
    ref = node.inputs[1]
    op = None if ref is None else source.nodes[ref.node].op
    experts = tuple(int(expert) for expert in np.flatnonzero(side))
    if isinstance(op, Param):
        name = f"{op.name}/{node.name}/{label}"
        made.experts[name] = Experts(op.name, experts)
        sizes = (op.type.shape or Shape()).static()
        return made.graph.param(name, (len(experts), *sizes[1:]), op.type.dtype)
    if isinstance(op, Constant):
        return made.graph.constant(taken_rows(op.data, experts), name=f"{node.name}/{label}")
    raise GraphVerifyError(
        f"{node} computes the weights of its experts in the graph; only a parameter that is not mutable, or "
        "a constant, can be kept on the host"
    )
