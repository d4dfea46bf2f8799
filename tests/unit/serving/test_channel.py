"""Calls between the processes of a server, here of two ends in one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
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
        sizes = [draw.randrange(1, SIZE // 8) for _ in range(draw.randrange(1, 4))]
        begins = arena.take_all(sizes)
        if begins is None:
            refused += 1
            continue
        for at, size in zip(begins, sizes, strict=True):
            assert at + size <= SIZE
            assert all(at + size <= other or other + taken[other] <= at for other in taken)
            taken[at] = size
    assert refused
    for at in taken:
        arena.give_back(at)
    assert arena.take(SIZE) == 0


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("width", [64, 100])
def test_copies_of_neighbours_are_copies_of_each(gap: int, width: int) -> None:
    """Of rows that lie one behind the other and of others, with sizes that fill whole pieces and not."""
    rows = np.random.default_rng(0).standard_normal((12, width)).astype(np.float32)
    arrays = [rows[at : at + count] for at, count in ((0, 2), (2 + gap, 1), (3 + gap, 4))]
    arena = Arena(memoryview(bytearray(SIZE)))
    found = arena.place(*arrays)
    assert found is not None
    for array, (copy, at) in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(copy, array)
        assert arena.place_of(copy) == at
    before = arrays[0].copy()
    rows[:] = 0
    np.testing.assert_array_equal(found[0][0], before)


async def _doubled(name: str, values: Sequence[Any], tensors: dict[str, Array]) -> tuple[Any, Tensors]:
    if name == "refuse":
        raise ServingError("no", 429, 2.0)
    if name == "wait":
        await asyncio.sleep(30)
    return [name, *values], {key: array + array for key, array in tensors.items()}


@contextlib.asynccontextmanager
async def _ends(begin: Any = None) -> AsyncIterator[tuple[Channel, Channel]]:
    """Yield two ends; the second one doubles, or begins inferences."""
    loop = asyncio.get_running_loop()
    one, other = memoryview(shared_memory(SIZE)[0]), memoryview(shared_memory(SIZE)[0])
    first, second = Channel(_doubled, one, other.toreadonly()), Channel(_doubled, other, one.toreadonly(), begin=begin)
    for end, link in zip((first, second), socket.socketpair(), strict=True):
        link.setblocking(False)
        await loop.connect_accepted_socket(lambda end=end: end, link)  # type: ignore[misc]
    yield first, second
    first.close()
    second.close()
    await asyncio.sleep(0.05)


def test_tensors_of_every_size_cross() -> None:
    """Small ones in the message, larger ones in shared memory, and those without room there; texts; many at a time."""

    async def main() -> None:
        async with _ends() as (first, _):
            for _ in range(3):
                given = [
                    np.arange(count, dtype=np.float32).reshape(-1, 2) for count in (0, 2, 10_000, 200_000, 600_000)
                ]
                calls = [first.ask("double", at, tensors={"x": array}) for at, array in enumerate(given)]
                for at, (value, found) in enumerate(await asyncio.gather(*calls)):
                    assert value == ["double", at]
                    np.testing.assert_array_equal(found["x"], 2 * given[at])
            texts = np.array([["a", "ä"]], object)
            _, found = await first.ask("double", tensors={"x": texts})
            assert found["x"].tolist() == [["aa", "ää"]]

    asyncio.run(main())


def test_an_error_crosses_with_its_status() -> None:
    """And when to come back."""

    async def main() -> None:
        async with _ends() as (first, _):
            with pytest.raises(ServingError, match="no") as refused:
                await first.ask("refuse")
            assert (refused.value.status, refused.value.retry_after_s) == (429, 2.0)

    asyncio.run(main())


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_call_that_is_cancelled_gives_its_memory_back(pause_s: float) -> None:
    """Before the other end has seen it, and while it runs there."""

    async def main() -> None:
        async with _ends() as (first, second):
            call = asyncio.ensure_future(first.ask("wait", tensors={"x": np.zeros(SIZE // 8)}))
            await asyncio.sleep(pause_s)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.1)
            assert not second._tasks
            assert first.arena.take(SIZE) == 0

    asyncio.run(main())


def test_calls_to_an_end_that_is_gone_fail() -> None:
    """Those that wait, and later ones."""

    async def main() -> None:
        async with _ends() as (first, second):
            call = asyncio.ensure_future(first.ask("wait"))
            await asyncio.sleep(0.02)
            second.close()
            for each in (call, first.ask("double")):
                with pytest.raises(ServingError) as refused:
                    await each
                assert refused.value.status == 503

    asyncio.run(main())


def test_an_answer_keeps_its_memory_until_it_is_given_back() -> None:
    """The tensors that a front sends lie in the memory of the other end."""

    async def main() -> None:
        async with _ends() as (first, second):
            shared: list[int] = []
            _, found = await first.ask("double", tensors={"x": np.ones(SIZE // 16)}, shared=shared)
            await asyncio.sleep(0.05)
            assert second.arena.take(SIZE) is None
            assert not found["x"].flags.owndata
            assert (found["x"] == 2).all()
            first.give_back(shared)
            await asyncio.sleep(0.05)
            assert second.arena.take(SIZE) == 0

    asyncio.run(main())


def test_a_tensor_in_the_memory_of_an_end_is_not_copied() -> None:
    """As the body of a request, wherever its tensors begin; the call gives the piece back."""

    async def main() -> None:
        async with _ends() as (first, _):
            at = first.arena.take(SIZE // 2)
            assert at == 0
            whole = np.ndarray(SIZE // 2, np.uint8, first.arena.memory)
            part = whole[3 : 3 + 40_000].view(np.float32)
            part[:] = 7
            call = asyncio.ensure_future(first.ask("double", tensors={"x": part}, held=[at]))
            await asyncio.sleep(0)
            assert first.arena.take(SIZE // 2 + 64) is None
            assert first.arena.take(SIZE // 2) == SIZE // 2  # it was not copied there
            assert ((await call)[1]["x"] == 14).all()
            first.arena.give_back(SIZE // 2)
            assert first.arena.take(SIZE) == 0

    asyncio.run(main())


@pytest.mark.parametrize("given_up", [False, True])
def test_memory_of_an_inference_is_kept_until_nothing_uses_it(given_up: bool) -> None:
    """A call that is cancelled is answered when the model ends it, which reads and places tensors until then."""

    async def main() -> None:
        begun = list[Any]()

        def begin(*given: Any) -> Any:
            begun.append(given)
            return SimpleNamespace(cancel=lambda: None)

        async with _ends(begin) as (first, second):
            shared: list[int] = []
            call = asyncio.ensure_future(first.ask("infer", tensors={"x": np.ones(SIZE // 16)}, shared=shared))
            while not begun:
                await asyncio.sleep(0.001)
            [(_, tensors, place, answered)] = begun
            used, unused = await asyncio.to_thread(lambda: place([tensors["x"] + 1, tensors["x"]], [place, place]))
            if given_up:
                call.cancel()
            await asyncio.sleep(0.05)
            assert first.arena.take(SIZE) is None
            assert second.arena.take(SIZE) is None
            assert (unused == 1).all()
            answered(asyncio.CancelledError() if given_up else ("value", {"y": used}))
            if given_up:
                with pytest.raises(asyncio.CancelledError):
                    await call
            else:
                assert ((await call)[1]["y"] == 2).all()
                assert len(shared) == 1
                first.give_back(shared)
            await asyncio.sleep(0.05)
            assert first.arena.take(SIZE) == 0
            assert second.arena.take(SIZE) == 0

    asyncio.run(main())
