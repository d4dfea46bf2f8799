"""What a compiled graph offers for mixtures of experts: which experts are on the device, and what routers picked."""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import InputError
from rlx_ort.execution.engine_slot import EngineSlot
from rlx_ort.execution.expert_weights import ExpertWeights
from rlx_ort.execution.moe import (
    HOST_MARKER,
    MoeGraph,
    account,
    masks_of_products,
    rewritten,
    router_picks,
)
from rlx_ort.execution.runnable import Runnable, runnable
from rlx_ort.options.compile_options import PlacementRule

if TYPE_CHECKING:
    from rlx_ort.execution.weights import WeightStore

__all__ = ["MoeControls", "MoeResidencyStats"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MoeResidencyStats:
    """What the experts of one forward had to do, product by product.

    Attributes:
        gpu_expert_calls: experts on the device that got rows.
        cpu_expert_calls: experts on the host that got rows.
        gpu_tokens: rows that the former got.
        cpu_tokens: rows that the latter got.
    """

    gpu_expert_calls: int
    cpu_expert_calls: int
    gpu_tokens: int
    cpu_tokens: int


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


@dataclass(frozen=True)
class _Settings:
    """What is asked for."""

    capture: int | None = None
    picks: _Picks | None = None
    masks: tuple[Mask, ...] | None = None

    @property
    def outputs(self) -> tuple[int | None, bool]:
        """What decides which hidden outputs a session has."""
        return self.capture, self.masks is not None


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
            routed = {name: hidden[name] for name in self._routed}
            self.stats = MoeResidencyStats(**account(routed, settings.masks))


class MoeControls(abc.ABC):
    """Methods of a compiled graph for mixtures of experts; a graph without any takes the settings and changes nothing.

    Settings are not to be changed while another thread is in a run of the same object; use a clone for each.
    """

    _slot: EngineSlot
    _rule: PlacementRule
    _weights: WeightStore
    _moe: _Watch | None = None
    _moe_base: EngineSlot | None = None

    @abc.abstractmethod
    def _unbind(self) -> None:
        """Let go of what is bound to an engine, and so of the engine."""

    def set_moe_resident_experts(self, mask: Sequence[bool] | npt.NDArray[np.bool_]) -> None:
        """Choose the experts that stay on the device, the same in all layers; replaces masks for each layer.

        Experts that the mask does not reach stay on the device. On another device than the CPU the weights of the
        others, and their products, move to the host: the session is opened again. On the CPU only the accounts of
        `take_moe_residency_stats` change. Results are the same either way.

        Raises:
            GraphVerifyError: the weights of experts that are to move are computed in the graph.
            PlacementError: the rest does not keep the placement rule.
        """
        self._set_masks(masks_of_products(self._slot.graph, _mask(mask), None))

    def set_moe_resident_experts_per_layer(self, masks: Sequence[Sequence[bool] | npt.NDArray[np.bool_]]) -> None:
        """Choose the experts that stay on the device layer by layer, in forward order; replaces one mask for all.

        A layer is three products by experts: gate, up and down. See `set_moe_resident_experts`.

        Raises:
            GraphVerifyError: the weights of experts that are to move are computed in the graph.
            PlacementError: the rest does not keep the placement rule.
        """
        self._set_masks(masks_of_products(self._slot.graph, None, [_mask(mask) for mask in masks]))

    def take_moe_residency_stats(self) -> MoeResidencyStats | None:
        """Return what the experts of the last forward had to do, once; None before one, or without masks."""
        watch = self._moe
        if watch is None:
            return None
        stats, watch.stats = watch.stats, None
        return stats

    def enable_moe_topk_capture(self, num_experts: int) -> bool:
        """Record from now on what each TopK over exactly `num_experts` elements finds; opens the session again.

        Enabling again begins anew. Clones record into the same place. TopKs inside of bodies are not seen.

        Returns:
            Whether there is such a TopK; if not, nothing changes.
        """
        if not router_picks(self._slot.graph, num_experts):
            return False
        self._apply_moe(replace(self._settings, capture=num_experts, picks=_Picks()))
        return True

    def take_moe_topk_capture(self) -> list[npt.NDArray[np.uint32]] | None:
        """Return what each router picked since the last call, all forwards one after another; None for nothing."""
        picks = self._settings.picks
        return None if picks is None else picks.take()

    @property
    def _settings(self) -> _Settings:
        return _Settings() if self._moe is None else self._moe.settings

    def _copy_moe_to(self, other: MoeControls) -> None:
        """Give a clone the same settings; it has its own accounts and shares the record of picks."""
        if self._moe is not None:
            other._apply_moe(self._moe.settings)

    def _set_masks(self, masks: Sequence[Mask]) -> None:
        if masks:
            self._apply_moe(replace(self._settings, masks=tuple(masks)))

    def _apply_moe(self, settings: _Settings) -> None:
        """Put a slot in place whose session has the outputs, and the experts on the host, that the settings want."""
        from rlx_ort.converters.to_onnx.exporter import exported
        from rlx_ort.providers.claims import kernel_set

        base = self._moe_base or self._slot
        # The CPU is the host: there is nowhere to move an expert to.
        split = base.device.kind != Device.CPU.kind and settings.masks is not None
        if self._moe is not None and not split and self._moe.settings.outputs == settings.outputs:
            self._moe.settings, self._moe.stats = settings, None
            return
        what = runnable(base.graph)
        made = rewritten(what.graph, settings.capture, settings.masks, split)
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
        slot.open_if_ready(self._rule)
        base.release()  # it holds all experts on the device
        self._unbind()
        self._moe, self._moe_base, self._slot = watch, base, slot


def _mask(given: Sequence[bool] | npt.NDArray[np.bool_]) -> Mask:
    mask = np.asarray(given)
    if mask.ndim != 1 or (mask.size and mask.dtype != np.bool_):
        raise InputError(f"a mask of experts is one row of booleans, got {mask.dtype} of shape {mask.shape}")
    return mask.astype(bool)
