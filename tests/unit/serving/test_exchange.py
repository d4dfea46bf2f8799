"""A request is given up when its client goes away, and not once it has its answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlx_ort.serving.budget import Budget, Share
from rlx_ort.serving.exchange import ClientGoneError, Request, Watch

SCOPE: dict[str, Any] = {"headers": []}
WATCHED_S = 0.2  # two ticks are over


async def _watched(gone: asyncio.Event, answer: asyncio.Future[str]) -> str:
    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    found = await Watch().unless_gone(Request(SCOPE, receive, Share(Budget())), answer)
    await asyncio.sleep(0.01)  # the answer is sent
    return str(found)


async def test_a_request_without_a_client_is_given_up() -> None:
    """What it waits for is cancelled."""
    gone, answer = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_watched(gone, answer))
    await asyncio.sleep(WATCHED_S)
    gone.set()
    with pytest.raises(ClientGoneError):
        await task
    assert answer.cancelled()


async def test_a_client_that_goes_as_its_answer_comes_cancels_nothing_else() -> None:
    """The request is no longer waiting, so that the cancellation would hit what comes after."""
    gone, answer = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_watched(gone, answer))
    await asyncio.sleep(WATCHED_S)
    gone.set()
    answer.set_result("answer")
    assert await task == "answer"
