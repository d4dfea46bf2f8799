"""Times of calls in ns, singly, in a row, and of several calls in turns, so that a disturbance affects all alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, int]:
    """Return the result of a call and its time."""
    begun = time.perf_counter_ns()
    result = call()
    return result, time.perf_counter_ns() - begun


def in_row(call: Callable[[], object], count: int, warm: int = 0) -> list[int]:
    """Return the times of `count` calls after `warm` that do not count."""
    for _ in range(warm):
        call()
    return [timed(call)[1] for _ in range(count)]


def least_in_turns(*calls: Callable[[], object], rounds: int) -> list[int]:
    """Return the least time of each call; in every round each is made once, in order."""
    return [min(times) for times in zip(*([timed(call)[1] for call in calls] for _ in range(rounds)), strict=True)]
