"""The limit of open connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httptools")

from uvicorn.server import ServerState

from rlx_ort.errors import ServingError
from rlx_ort.serving.connections import LimitedServer
from rlx_ort.serving.exchange import READ_INTO, ClientGoneError
from rlx_ort.serving.options import ConnectionLimits


class Transport:
    """A transport whose end is noted by the loop's next turn only, as asyncio's is."""

    def __init__(self) -> None:
        self.closing = False

    def is_closing(self) -> bool:
        """Return whether it was ended."""
        return self.closing

    def abort(self) -> None:
        """End it."""
        self.closing = True

    def set_write_buffer_limits(self, high: int) -> None:
        """Do nothing."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return nothing."""
        return default


def test_each_connection_beyond_the_limit_ends_another_one() -> None:
    """Also where all come within one turn of the event loop, before any has noticed its end."""
    config = LimitedServer(lambda: None, ConnectionLimits(most=5), 1.0).config
    config.load()
    state, transports, clock = ServerState(), [], iter(range(1000))
    made = config.http_protocol_class
    for _ in range(50):
        connection = made(config, state, {}, SimpleNamespace(time=lambda: float(next(clock))))
        transports.append(Transport())
        connection.connection_made(transports[-1])
    assert [transport.closing for transport in transports] == [True] * 45 + [False] * 5


Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY = bytes(range(256)) * 1000


def read_into(read: Callable[[Any, memoryview], Awaitable[None]], client: Client, body_s: float = 10.0) -> None:
    """Serve requests whose bodies `read` reads into memory of their size, and run a client."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        room = memoryview(bytearray(int(dict(scope["headers"])[b"content-length"])))
        await read(scope["extensions"][READ_INTO], room)
        headers = [(b"content-length", b"%d" % len(room))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": room})

    async def main() -> None:
        server = LimitedServer(app, ConnectionLimits(body_s=body_s, body_rate=1 << 30), 1.0, host="127.0.0.1", port=0)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()[:2])
        await asyncio.wait_for(client(reader, writer), 10)
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(main())


def request_of(body: bytes) -> bytes:
    """Return a request."""
    return b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


@pytest.mark.parametrize("pieces", [1, 2, 300])
def test_bodies_are_read_into_memory_one_behind_the_other(pieces: int) -> None:
    """Of three requests that come together, in pieces that end anywhere; each gets its own."""
    counted: list[int] = []
    bodies = [BODY, b"", BODY[::-1][:100_000]]

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b"".join(map(request_of, bodies))
        each = -(-len(data) // pieces)
        for at in range(0, len(data), each):
            writer.write(data[at : at + each])
            await asyncio.sleep(0 if pieces > 2 else 0.05)
        for body in bodies:
            assert await answer_of(reader) == body

    async def read(into: Any, room: memoryview) -> None:
        await into(room, counted.append)

    read_into(read, client)
    assert sum(counted) == sum(map(len, bodies))


def test_memory_of_a_body_that_is_given_up_is_not_written_any_more() -> None:
    """What still comes is dropped."""
    rooms: list[memoryview] = []

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = request_of(BODY)
        writer.write(data[:-10_000])
        await asyncio.sleep(0.2)
        writer.write(data[-10_000:])
        assert len(await answer_of(reader)) == len(BODY)

    async def read(into: Any, room: memoryview) -> None:
        rooms.append(room)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await into(room, int)
        assert bytes(room[:-10_000]) == BODY[:-10_000]
        await asyncio.sleep(0.2)

    read_into(read, client)
    assert bytes(rooms[0][-10_000:]) == bytes(10_000)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_body_that_does_not_end_is_not_waited_for(leaves: bool) -> None:
    """Neither if its client goes away nor if it is slow."""
    ended: list[Exception] = []

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request_of(BODY)[:-10])
        await writer.drain()
        await asyncio.sleep(0.1)
        if leaves:
            writer.close()
        else:
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
        while not ended:
            await asyncio.sleep(0.01)

    async def read(into: Any, room: memoryview) -> None:
        try:
            await into(room, int)
        except ClientGoneError as err:
            ended.append(err)

    read_into(read, client, body_s=0.3)


def test_a_body_for_which_there_is_no_room_is_refused() -> None:
    """The error of the function that counts its bytes is raised, wherever they are."""
    for most in (0, 100_000):
        found: list[ServingError] = []

        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(request_of(BODY))
            await answer_of(reader)

        async def read(into: Any, room: memoryview, most: int = most, found: list[Any] = found) -> None:
            left = most

            def count(size: int) -> None:
                nonlocal left
                left -= size
                if left < 0:
                    raise ServingError("no room", 503)

            with pytest.raises(ServingError) as refused:
                await into(room, count)
            found.append(refused.value)

        read_into(read, client)
        assert [error.status for error in found] == [503]
