"""The bytes that requests may take at a time."""

from __future__ import annotations

import asyncio

import pytest

from rlx_ort.errors import ServingError
from rlx_ort.serving import budget as budgets
from rlx_ort.serving.budget import Budget, Share


def test_what_finds_no_room_is_refused_and_takes_nothing() -> None:
    """With status 503 and when to come back; what was given back is free for others."""
    budget = Budget(100)
    first, second = Share(budget), Share(budget)
    first.take(60)
    first.take(20)
    with pytest.raises(ServingError) as refused:
        second.take(21)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
    assert (second.bytes, budget.held_bytes) == (0, 80)
    first.keep(10)
    second.take(90)
    second.close()
    first.close()
    assert (budget.held_bytes, budget.peak_bytes, budget.refused) == (0, 100, 1)


async def test_a_client_that_is_waited_for_loses_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been too slow, and only if somebody else finds no room."""
    monkeypatch.setattr(budgets, "_PATIENCE_S", 0.05)
    budget = Budget(100)
    begun = asyncio.Event()

    async def slow() -> None:
        share = Share(budget)
        try:
            with share.waiting():
                share.take(90)
                begun.set()
                await asyncio.sleep(30)
        finally:
            share.close()

    task = asyncio.create_task(slow())
    await begun.wait()
    other = Share(budget)
    with pytest.raises(ServingError):
        other.take(50)
    await asyncio.sleep(0.1)
    assert not task.done()
    with pytest.raises(ServingError):
        other.take(50)
    with pytest.raises(ServingError, match="too slow"):
        await task
    other.take(50)
    assert budget.ended == 1


async def test_a_wait_that_is_cancelled_from_elsewhere_stays_cancelled() -> None:
    """A server that ends, or a client that went away."""

    async def waits() -> None:
        with Share(Budget()).waiting():
            await asyncio.sleep(30)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_answers_that_cannot_be_given_up_take_half_of_the_budget() -> None:
    """What others read at once finds room beside them; small ones are not counted."""
    budget = Budget(1 << 20)
    first, second, small = Share(budget), Share(budget), Share(budget)
    first.take(300 << 10)
    first.sending()
    second.take(300 << 10)
    with pytest.raises(ServingError):
        second.sending()
    small.take(1 << 10)
    small.sending()
    first.close()
    second.sending()
    second.close()
    small.close()
    assert (budget.held_bytes, budget._sent_bytes) == (0, 0)


async def test_processes_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one holds finds no room in another, whose need ends the slow clients of the first."""
    monkeypatch.setattr(budgets, "_PATIENCE_S", 0.0)
    table = memoryview(bytearray(2 * 8 * budgets.COLUMNS)).cast("q")
    first, second = (Budget(100, table, place) for place in range(2))

    async def slow() -> None:
        share = Share(first)
        try:
            with share.waiting():
                share.take(90)
                await asyncio.sleep(30)
        finally:
            share.close()

    task = asyncio.create_task(slow())
    await asyncio.sleep(0.01)
    with pytest.raises(ServingError):
        Share(second).take(20)
    assert (first.held_bytes, second.held_bytes, second.peak_bytes, first.refused) == (90, 90, 90, 1)
    first.give_way()
    with pytest.raises(ServingError, match="too slow"):
        await task
    assert (second.held_bytes, second.ended) == (0, 1)
    Share(second).take(90)
    first.forget(1)
    assert first.held_bytes == 0
