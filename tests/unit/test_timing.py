"""Times of calls, by a clock that the calls set forward themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rlx_ort import timing


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], str]]:
    """Return a maker of calls that take such times, one after the other."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def make(name: str, *times: int) -> Callable[[], str]:
        left = list(times)

        def call() -> str:
            now[0] += left.pop(0)
            return name

        return call

    return make


def test_the_least_time_of_each_call_counts(takes: Callable[..., Callable[[], str]]) -> None:
    """Of the rounds, whichever it was."""
    assert timing.least_in_turns(takes("a", 9, 5, 8), takes("b", 2, 6, 3), rounds=3) == [5, 2]


def test_calls_are_made_in_turns() -> None:
    """So that whatever disturbs one disturbs the other."""
    order: list[str] = []
    timing.least_in_turns(lambda: order.append("a"), lambda: order.append("b"), rounds=2)
    assert order == ["a", "b", "a", "b"]
