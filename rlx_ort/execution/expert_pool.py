"""`ExpertPool`: which experts of a mixture are kept on the device, by how often they were picked lately."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError

__all__ = [
    "ExpertPool",
    "ExpertSwap",
    "Phase",
    "RefreshPolicy",
    "budget_from_memory",
    "merged_mask",
    "per_layer_masks",
    "refresh_pools",
]


class Phase(enum.Enum):
    """What kind of forward just ended."""

    PREFILL = "prefill"
    DECODE = "decode"
    DENOISE = "denoise"
    REFRESH = "refresh"
    """Not a forward: the caller asks for a refresh."""


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """When a pool chooses its experts anew, apart from prefill and explicit requests, which always do.

    Attributes:
        every_forward: after every forward.
        every_steps: after each n-th decode or denoise step; 0 for never.
    """

    every_forward: bool = False
    every_steps: int = 0


@dataclass(frozen=True, slots=True)
class ExpertSwap:
    """Experts that change places: `promoted[i]` comes to the device in the place of `demoted[i]`."""

    promoted: tuple[int, ...]
    demoted: tuple[int, ...]


class ExpertPool:
    """The experts of one layer that are on the device: at first 0 up to the budget.

    Args:
        experts: how many there are.
        budget: how many may be on the device.
        policy: when to choose anew.

    Raises:
        InputError: the budget is not from 0 to the number of experts.
    """

    def __init__(self, experts: int, budget: int, policy: RefreshPolicy | None = None) -> None:
        if not 0 <= budget <= experts:
            raise InputError(f"{experts} experts cannot have a budget of {budget}")
        self.experts = experts
        self.budget = budget
        self.policy = policy or RefreshPolicy()
        self._resident = list(range(budget))
        self._hits: Counter[int] = Counter()
        self._steps = 0

    @property
    def resident(self) -> frozenset[int]:
        """The experts on the device."""
        return frozenset(self._resident)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """For each expert whether it is on the device."""
        found = np.zeros(self.experts, bool)
        found[self._resident] = True
        return found

    def record(self, picked: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """Count experts that a router picked, one entry for each token and place.

        Raises:
            InputError: there is no such expert.
        """
        ids = np.asarray(picked if isinstance(picked, np.ndarray) else list(picked)).reshape(-1)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.experts):
            raise InputError(f"experts are 0 to {self.experts - 1}, got {ids.min()} to {ids.max()}")
        for expert, count in zip(*np.unique(ids, return_counts=True), strict=True):
            self._hits[int(expert)] += int(count)

    def wants_refresh(self, phase: Phase) -> bool:
        """Return whether the end of a forward is a time to choose anew; counts decode and denoise steps.

        Never when all experts are on the device anyway.
        """
        stepped = phase in {Phase.DECODE, Phase.DENOISE}
        self._steps += stepped
        if self.budget >= self.experts:
            return False
        if phase in {Phase.REFRESH, Phase.PREFILL} or self.policy.every_forward:
            return True
        return stepped and self.policy.every_steps > 0 and self._steps % self.policy.every_steps == 0

    def refresh(self) -> ExpertSwap:
        """Bring the experts with the most hits to the device and forget the hits.

        More hits go first, then lower ids; experts without hits are not brought. Each comes in the place of one that
        is not among them; where fewer come than there are places, the others stay.
        """
        ranked = sorted((expert for expert, count in self._hits.items() if count), key=self._rank)
        chosen = ranked[: self.budget]
        wanted = frozenset(chosen)
        promoted = [expert for expert in chosen if expert not in self.resident]
        # The least used go first, so that what stays is the most used.
        leaving = sorted((expert for expert in self._resident if expert not in wanted), key=self._rank, reverse=True)
        demoted = leaving[: len(promoted)]
        gone = frozenset(demoted)
        self._resident = sorted([expert for expert in self._resident if expert not in gone] + promoted)
        self._hits.clear()
        return ExpertSwap(tuple(promoted), tuple(demoted))

    def _rank(self, expert: int) -> tuple[int, int]:
        return -self._hits[expert], expert


def budget_from_memory(free_bytes: int, expert_bytes: int, experts: int, layers: int = 1) -> int:
    """Return how many experts of each layer fit in a device's free memory, at most all of them.

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
    """Record what the router of each layer picked and choose anew where it is time.

    `captured` is what `CompiledGraph.take_moe_topk_capture` returns: one array of experts a layer. Returns the masks
    for `set_moe_resident_experts_per_layer`, or None when no pool changed.

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
