"""`ExpertPool`: when it refreshes, and which experts swap places."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.errors import InputError
from rlx_ort.execution.expert_pool import (
    ExpertPool,
    ExpertSwap,
    Phase,
    RefreshPolicy,
    budget_from_memory,
    merged_mask,
    per_layer_masks,
    refresh_pools,
)


def test_the_first_experts_are_resident_at_first() -> None:
    """A budget of 2 keeps experts 0 and 1."""
    np.testing.assert_array_equal(ExpertPool(4, 2).mask, [True, True, False, False])
    with pytest.raises(InputError, match="budget of 5"):
        ExpertPool(4, 5)


@pytest.mark.parametrize(
    ("policy", "phase", "wanted"),
    [
        (RefreshPolicy(), Phase.PREFILL, True),
        (RefreshPolicy(), Phase.REFRESH, True),
        (RefreshPolicy(), Phase.DECODE, False),
        (RefreshPolicy(every_forward=True), Phase.DECODE, True),
        (RefreshPolicy(every_steps=1), Phase.DENOISE, True),
        (RefreshPolicy(every_steps=2), Phase.DECODE, False),
    ],
)
def test_the_phase_and_the_policy_decide(policy: RefreshPolicy, phase: Phase, wanted: bool) -> None:
    """Prefill and requests always refresh, steps by the policy."""
    assert ExpertPool(4, 2, policy).wants_refresh(phase) is wanted


def test_every_third_step_is_counted_over_decode_and_denoise() -> None:
    """Prefill is no step."""
    pool = ExpertPool(4, 2, RefreshPolicy(every_steps=3))
    phases = [Phase.DECODE, Phase.PREFILL, Phase.DENOISE, Phase.DECODE, Phase.DECODE]
    assert [pool.wants_refresh(phase) for phase in phases] == [False, True, False, True, False]


def test_a_budget_for_all_experts_never_needs_a_refresh() -> None:
    """Not even on request."""
    assert not ExpertPool(4, 4, RefreshPolicy(every_forward=True)).wants_refresh(Phase.REFRESH)


def test_hits_bring_experts_in_pairs_and_forget_themselves() -> None:
    """More hits first, then lower ids; each comes in the place of the least used resident one."""
    pool = ExpertPool(6, 2)
    pool.record([5, 5, 5, 3, 3, 1, 1])
    assert pool.refresh() == ExpertSwap((5,), (0,))
    assert pool.resident == {1, 5}
    assert pool.refresh() == ExpertSwap((), ())


def test_equal_hits_prefer_the_lower_expert() -> None:
    """Of three with two hits each, the two lower ones come."""
    pool = ExpertPool(6, 2)
    pool.record(np.array([[4, 3], [2, 4], [3, 2]]))
    assert pool.refresh().promoted == (2, 3)


def test_experts_without_hits_are_not_brought_and_surplus_ones_stay() -> None:
    """One expert with hits displaces one resident; the other stays though it has none."""
    pool = ExpertPool(6, 3)
    pool.record([5])
    swap = pool.refresh()
    assert swap == ExpertSwap((5,), (2,))
    assert pool.resident == {0, 1, 5}


def test_unknown_experts_are_refused() -> None:
    """An id beyond the last expert raises."""
    with pytest.raises(InputError, match="experts are 0 to 3"):
        ExpertPool(4, 2).record([1, 4])


@pytest.mark.parametrize(
    ("free", "size", "experts", "layers", "fit"), [(100, 10, 8, 1, 8), (100, 10, 8, 2, 5), (5, 10, 8, 1, 0)]
)
def test_the_budget_is_what_fits_in_memory(free: int, size: int, experts: int, layers: int, fit: int) -> None:
    """Experts of all layers count, and there are no more than all."""
    assert budget_from_memory(free, size, experts, layers) == fit


def test_masks_merge_by_any_layer() -> None:
    """An expert that one layer keeps is kept."""
    first, second = ExpertPool(4, 1), ExpertPool(4, 1)
    second.record([3])
    second.refresh()
    np.testing.assert_array_equal(merged_mask([first, second]), [True, False, False, True])
    np.testing.assert_array_equal(per_layer_masks([first, second])[1], [False, False, False, True])


def test_pools_are_refreshed_from_what_routers_picked() -> None:
    """Each pool takes its layer's picks; without a change there are no new masks."""
    pools = [ExpertPool(4, 1), ExpertPool(4, 1)]
    picks = [np.array([0, 0], np.uint32), np.array([2, 2, 3], np.uint32)]
    masks = refresh_pools(pools, picks, Phase.PREFILL)
    assert masks is not None
    np.testing.assert_array_equal(masks, [[True, False, False, False], [False, False, True, False]])
    assert refresh_pools(pools, picks, Phase.DECODE) is None
    with pytest.raises(InputError, match="2 pools"):
        refresh_pools(pools, picks[:1], Phase.DECODE)
