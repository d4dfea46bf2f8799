"""Calls between the processes of a server, here of two ends in one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from rlx_ort.errors import ServingError
from rlx_ort.serving.channel import Arena, Channel, Tensors, shared_memory
from rlx_ort.serving.protocol import Array

SIZE = 1 << 20


def test_pieces_of_a_memory_never_overlap_and_all_come_back() -> None:
    """In any order of taking and giving back; None where there is no room."""
    arena, draw, taken = Arena(memoryview(bytearray(SIZE))), random.Random(0), dict[int, int]()
    refused = 0
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            at = draw.choice(list(taken))
            arena.give_back(at)
            del taken[at]
            continue
        size = draw.randrange(1, SIZE // 4)
        at_or_none = arena.take(size)
        if at_or_none is None:
            refused += 1
            continue
        at = at_or_none
        assert at + size <= SIZE
        assert all(at + size <= other or other + taken[other] <= at for other in taken)
        taken[at] = size
    assert refused
    for at in taken:
        arena.give_back(at)
    assert arena.take(SIZE) == 0


async def _doubled(name: str, values: Sequence[Any], tensors: dict[str, Array]) -> tuple[Any, Tensors]:
    if name == "refuse":
        raise ServingError("no", 429, 2.0)
    if name == "wait":
        await asyncio.sleep(30)
    return [name, *values], {key: array + array for key, array in tensors.items()}


@contextlib.asynccontextmanager
async def _ends() -> AsyncIterator[tuple[Channel, Channel]]:
    """Yield two ends; the second one doubles."""
    loop = asyncio.get_running_loop()
    one, other = memoryview(shared_memory(SIZE)[0]), memoryview(shared_memory(SIZE)[0])
    first, second = Channel(_doubled, one, other.toreadonly()), Channel(_doubled, other, one.toreadonly())
    for end, link in zip((first, second), socket.socketpair(), strict=True):
        link.setblocking(False)
        await loop.connect_accepted_socket(lambda end=end: end, link)  # type: ignore[misc]
    yield first, second
    first.close()
    second.close()
    await asyncio.sleep(0.05)


async def test_tensors_of_every_size_cross() -> None:
    """Small ones in the message, larger ones in shared memory, and those without room there; texts; many at a time."""
    async with _ends() as (first, _):
        for _ in range(3):
            given = [np.arange(count, dtype=np.float32).reshape(-1, 2) for count in (0, 2, 10_000, 200_000, 600_000)]
            calls = [first.ask("double", at, tensors={"x": array}) for at, array in enumerate(given)]
            for at, (value, found) in enumerate(await asyncio.gather(*calls)):
                assert value == ["double", at]
                np.testing.assert_array_equal(found["x"], 2 * given[at])
        texts = np.array([["a", "ä"]], object)
        _, found = await first.ask("double", tensors={"x": texts})
        assert found["x"].tolist() == [["aa", "ää"]]


async def test_an_error_crosses_with_its_status() -> None:
    """And when to come back."""
    async with _ends() as (first, _):
        with pytest.raises(ServingError, match="no") as refused:
            await first.ask("refuse")
        assert (refused.value.status, refused.value.retry_after_s) == (429, 2.0)


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
async def test_a_call_that_is_cancelled_gives_its_memory_back(pause_s: float) -> None:
    """Before the other end has seen it, and while it runs there."""
    async with _ends() as (first, second):
        call = asyncio.ensure_future(first.ask("wait", tensors={"x": np.zeros(SIZE // 8)}))
        await asyncio.sleep(pause_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.1)
        assert not second._tasks
        assert first._arena.take(SIZE) == 0


async def test_calls_to_an_end_that_is_gone_fail() -> None:
    """Those that wait, and later ones."""
    async with _ends() as (first, second):
        call = asyncio.ensure_future(first.ask("wait"))
        await asyncio.sleep(0.02)
        second.close()
        for each in (call, first.ask("double")):
            with pytest.raises(ServingError) as refused:
                await each
            assert refused.value.status == 503
