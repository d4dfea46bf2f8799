"""`ExpertPool`: keeps the experts of a mixture on the device that were picked most since the last refresh."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError


class Phase(enum.Enum):
    """The kind of forward that ended."""

    PREFILL = "prefill"
    DECODE = "decode"
    DENOISE = "denoise"
    REFRESH = "refresh"
    """Not a forward: an explicit request."""


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """When a pool refreshes its experts, beside prefill and explicit requests, which always refresh.

    Attributes:
        every_forward: after every forward.
        every_steps: after each n-th decode or denoise step; 0 for never.
    """

    every_forward: bool = False
    every_steps: int = 0


@dataclass(frozen=True, slots=True)
class ExpertSwap:
    """Experts that swap places: `promoted[i]` moves to the device in the place of `demoted[i]`."""

    promoted: tuple[int, ...]
    demoted: tuple[int, ...]


class ExpertPool:
    """The experts of one layer that are on the device; initially 0 up to the budget.

    Args:
        experts: the number of experts.
        budget: the most experts on the device.
        policy: when to refresh.

    Raises:
        InputError: the budget is not from 0 to the number of experts.
    """

    def __init__(self, experts: int, budget: int, policy: RefreshPolicy | None = None) -> None:
        if not 0 <= budget <= experts:
            raise InputError(f"{experts} experts cannot have a budget of {budget}")
        self.experts = experts
        self.budget = budget
        self.policy = policy or RefreshPolicy()
        self._resident = np.arange(experts) < budget
        self._hits = np.zeros(experts, np.int64)
        self._steps = 0

    @property
    def resident(self) -> frozenset[int]:
        """The experts on the device."""
        return frozenset(np.flatnonzero(self._resident).tolist())

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """For each expert whether it is on the device."""
        return self._resident.copy()

    def record(self, picked: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """Count experts that a router picked, one entry for each token and place.

        Raises:
            InputError: there is no such expert.
        """
        ids = np.asarray(picked if isinstance(picked, np.ndarray) else list(picked)).reshape(-1).astype(np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.experts):
            raise InputError(f"experts are 0 to {self.experts - 1}, got {ids.min()} to {ids.max()}")
        self._hits += np.bincount(ids, minlength=self.experts)

    def wants_refresh(self, phase: Phase) -> bool:
        """Return whether to refresh after a forward; counts decode and denoise steps.

        False if the budget is enough for all experts.
        """
        stepped = phase in {Phase.DECODE, Phase.DENOISE}
        self._steps += stepped
        if self.budget >= self.experts:
            return False
        if phase in {Phase.REFRESH, Phase.PREFILL} or self.policy.every_forward:
            return True
        return stepped and self.policy.every_steps > 0 and self._steps % self.policy.every_steps == 0

    def refresh(self) -> ExpertSwap:
        """Move the experts with the most hits to the device and reset the hits.

        Ties go to the lower id; experts without hits are not moved. Each replaces the least used expert on the device
        that is not among them; if fewer are moved than the budget, the others stay.
        """
        ranked = sorted(range(self.experts), key=lambda expert: (-self._hits[expert], expert))
        chosen = [expert for expert in ranked if self._hits[expert]][: self.budget]
        wanted = frozenset(chosen)
        promoted = [expert for expert in chosen if not self._resident[expert]]
        leaving = [expert for expert in reversed(ranked) if self._resident[expert] and expert not in wanted]
        demoted = leaving[: len(promoted)]  # the least used are replaced first
        self._resident[promoted], self._resident[demoted] = True, False
        self._hits[:] = 0
        return ExpertSwap(tuple(promoted), tuple(demoted))


def budget_from_memory(free_bytes: int, expert_bytes: int, experts: int, layers: int = 1) -> int:
    """Return the number of experts of each layer that fit in a device's free memory, at most all of them.

    Raises:
        InputError: an expert has no bytes, or there is no layer.
    """
    if expert_bytes < 1 or layers < 1:
        raise InputError(f"experts of {expert_bytes} bytes in {layers} layers cannot be counted")
    return max(0, min(experts, free_bytes // (expert_bytes * layers)))


def per_layer_masks(pools: Sequence[ExpertPool]) -> list[npt.NDArray[np.bool_]]:
    """Return the mask of each pool, in order."""
    return [pool.mask for pool in pools]


def merged_mask(pools: Sequence[ExpertPool]) -> npt.NDArray[np.bool_]:
    """Return for each expert whether any layer keeps it on the device.

    Raises:
        InputError: there is no pool, or they differ in the number of experts.
    """
    if len({pool.experts for pool in pools}) != 1:
        raise InputError(f"masks of {[pool.experts for pool in pools]} experts cannot be merged")
    merged: npt.NDArray[np.bool_] = np.logical_or.reduce([pool.mask for pool in pools])
    return merged


def refresh_pools(
    pools: Sequence[ExpertPool], captured: Sequence[npt.NDArray[np.integer]], phase: Phase
) -> list[npt.NDArray[np.bool_]] | None:
    """Record the picks of each layer's router and refresh the pools that are due.

    `captured` is the result of `CompiledGraph.take_moe_topk_capture`: one array of experts a layer. Returns the masks
    for `set_moe_resident_experts_per_layer`, or None if no pool changed.

    Raises:
        InputError: there is not one array for each pool.
    """
    if len(captured) != len(pools):
        raise InputError(f"{len(pools)} pools need as many layers of picks, got {len(captured)}")
    changed = False
    for pool, picked in zip(pools, captured, strict=True):
        pool.record(picked)
        if pool.wants_refresh(phase):
            changed |= bool(pool.refresh().promoted)
    return per_layer_masks(pools) if changed else None
