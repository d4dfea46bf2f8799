"""Controls of a compiled graph for mixtures of experts: which experts are resident, and what the routers picked."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import GraphVerifyError, InputError
from rlx_ort.execution.engine_slot import EngineSlot, Runnable, runnable
from rlx_ort.execution.expert_split import (
    HOST_MARKER,
    ExpertWeights,
    Mask,
    MoeGraph,
    expert_nodes,
    router_picks,
    split_experts,
)

if TYPE_CHECKING:
    from rlx_ort.ir.core import Node
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import PlacementRule

__all__ = ["MaskLike", "MoeControls", "MoeResidencyStats"]

MaskLike: TypeAlias = "Sequence[bool] | npt.NDArray[np.bool_]"
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

    def keep(self, mask: MaskLike, rule: PlacementRule) -> None:
        """Set the resident experts of all layers; see `CompiledGraph.set_moe_resident_experts` for what is raised."""
        given = _checked(mask)
        self._set_masks([given] * len(expert_nodes(self.base.graph)), rule)

    def keep_per_layer(self, masks: Sequence[MaskLike], rule: PlacementRule) -> None:
        """Set the resident experts layer by layer; all are resident in layers without a mask."""
        given = [_checked(mask) for mask in masks]
        self._set_masks([mask for mask in given for _ in range(_PRODUCTS_PER_LAYER)], rule)

    def capture(self, num_experts: int, rule: PlacementRule) -> bool:
        """Record the picks of routers over `num_experts` from now on; returns whether there is such a router."""
        if not router_picks(self.base.graph, num_experts):
            return False
        self._apply(replace(self._settings, capture=num_experts, picks=_Picks()), rule)
        return True

    def take_stats(self) -> MoeResidencyStats | None:
        """Return the stats of the last forward, once; None before one, or without masks."""
        if self._watch is None:
            return None
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

    def _set_masks(self, given: Sequence[Mask], rule: PlacementRule) -> None:
        """Keep the experts of each product by experts that its mask does not exclude; a missing mask excludes none."""
        masks = []
        for index, node in enumerate(expert_nodes(self.base.graph)):
            mask = np.ones(_expert_count(self.base.graph, node), bool)
            if index < len(given):
                mask[: len(given[index])] = given[index][: len(mask)]
            masks.append(mask)
        if masks:
            self._apply(replace(self._settings, masks=tuple(masks)), rule)

    def _apply(self, settings: _Settings, rule: PlacementRule) -> None:
        """Open a session with the hidden outputs, and the experts on the host, that the settings need."""
        from rlx_ort.converters.to_onnx.exporter import exported
        from rlx_ort.providers.claims import kernel_set

        base = self.base
        # The CPU is the host: there is nowhere to move an expert to.
        split = base.device.kind != Device.CPU.kind and settings.masks is not None
        if self._watch is not None and not split and self._watch.settings.outputs == settings.outputs:
            self._watch.settings, self._watch.stats = settings, None
            return
        what = runnable(base.graph)
        made = split_experts(what.graph, settings.capture, settings.masks, split)
        model = exported(made.graph, base.options, kernel_set(base.provider, made.graph))
        watch = _Watch(settings, made)
        hidden = (*made.picks, *made.routed)
        slot = EngineSlot(
            base.provider,
            base.device,
            model,
            base.weights,
            base.options,
            base.graph,
            Runnable(made.graph, what.mutable, hidden, HOST_MARKER if made.on_host else ""),
            ExpertWeights(base.weights, made.experts) if made.experts else None,
            watch,
        )
        base.adopt(slot)
        slot.open_if_ready(rule)
        base.release()  # it holds all experts on the device
        self._watch, self.slot = watch, slot


@dataclass(frozen=True)
class _Settings:
    capture: int | None = None
    picks: _Picks | None = None
    masks: tuple[Mask, ...] | None = None

    @property
    def outputs(self) -> tuple[int | None, bool]:
        """What decides which hidden outputs a session has."""
        return self.capture, self.masks is not None


class _Picks:
    """What routers picked, run after run, until it is taken; clones share it."""

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
    mask = np.asarray(given)
    if mask.ndim != 1 or (mask.size and mask.dtype != np.bool_):
        raise InputError(f"a mask of experts is one row of booleans, got {mask.dtype} of shape {mask.shape}")
    return mask.astype(bool)


def _expert_count(graph: Graph, node: Node) -> int:
    ref = node.inputs[1]
    if ref is None:
        raise GraphVerifyError(f"{node} lacks its weight")
    return int(graph.value(ref).shape.static()[0])
