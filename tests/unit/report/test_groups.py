"""Repeated layers become groups."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.report.document import Group, groups_of


def _covered(groups: list[Group]) -> list[int]:
    return [at for group in groups for at in range(group.first, group.first + group.count)]


def test_layers_that_repeat_are_groups_that_are_alike() -> None:
    """What is before and behind them stays alone."""
    groups = groups_of(np.array([90, 91, *([*range(10)] * 4), 92]))
    assert [(group.first, group.count) for group in groups] == [(2, 10), (12, 10), (22, 10), (32, 10)]
    assert len({group.like for group in groups}) == 1
    assert groups[1].label == "repeat 2 of 4"


def test_two_stages_are_found_one_after_the_other() -> None:
    """The rest is looked at again, and groups of different stages are not alike."""
    groups = groups_of(np.array([*([*range(10)] * 6), 99, *([*range(20, 32)] * 3)]))
    assert [group.count for group in groups] == [10] * 6 + [12] * 3
    assert len({group.like for group in groups}) == 2


def test_short_repetitions_are_put_together() -> None:
    """A chain of two operators is no hundred groups of two."""
    groups = groups_of(np.array([1, 2] * 40))
    assert {group.count for group in groups} == {8}
    assert _covered(groups) == [*range(80)]


def test_a_small_model_without_repetition_has_no_groups() -> None:
    """It is shown whole."""
    assert groups_of(np.arange(100)) == []
    assert groups_of(np.array([], dtype=np.int64)) == []


@pytest.mark.parametrize("codes", [np.arange(5000), np.zeros(5000, np.int64), np.arange(5000) % 3], ids=str)
def test_a_large_model_has_few_groups_with_every_node(codes: np.ndarray) -> None:
    """The page places some 150 groups and not 5,000 nodes."""
    groups = groups_of(codes)
    assert len(groups) <= 160
    assert len(set(_covered(groups))) == len(_covered(groups)) >= 4960
